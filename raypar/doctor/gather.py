"""Gathers the facts that the doctor's checks judge. Each has a deadline; what takes longer is not known."""

from __future__ import annotations

import json
import os
import platform
import resource
import socket
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any, Generic, TypeVar

from raypar.doctor.finding import NotKnown
from raypar.doctor.machine_facts import (
    ClusterFacts,
    DoctorFacts,
    FolderFacts,
    HostFacts,
    LimitFacts,
    NodeFacts,
    ProcessorFacts,
    StorageFacts,
    TlsFacts,
    TokenFacts,
)
from raypar.errors import RayparError
from raypar.files.json_type import Json
from raypar.ray_compat.settings import token_file
from raypar.storage.filesystems import WRITE_CHECK_S
from raypar.storage.s3_lease_store import check_run_dir_on_storage
from raypar.storage.storage_uri import StorageUri

Fact = TypeVar("Fact")

SYSTEM_S = 5.0
"""Deadline of what the system answers; a network file system or a name server may never do."""
IMPORT_S = 60.0
"""Deadline of an import, in a process of its own: a broken library may hang."""
CLUSTER_S = 75.0
"""Deadline of the cluster's answers."""
LIBRARIES = ("torch", "ray", "numpy", "pydantic", "pyyaml", "safetensors", "torchvision", "cupy")
"""Libraries whose versions are read."""


T = TypeVar("T")


class Gathering(Generic[T]):
    """One fact that is being gathered, in a thread of its own."""

    def __init__(self, gather: Callable[[], T | NotKnown], deadline_s: float, what: str) -> None:
        self.deadline_s = deadline_s
        """How long it may take."""
        self.what = what
        """What is gathered, for the reason."""
        self.found: T | NotKnown = NotKnown(f"{what}: not gathered yet")
        """The fact, or why it is not known."""
        self.done = threading.Event()
        """Whether it is."""
        self.thread = threading.Thread(target=self._run, args=(gather,), daemon=True)
        """Not waited for at the end: it may hang."""
        self.thread.start()

    def _run(self, gather: Callable[[], T | NotKnown]) -> None:
        try:
            self.found = gather()
        except Exception as error:  # whatever is broken is to be told, with all else
            self.found = NotKnown(f"{self.what}: {type(error).__name__}: {error}"[:300])
        self.done.set()

    def result(self) -> T | NotKnown:
        """The fact, or why it is not known."""
        if not self.done.wait(self.deadline_s):
            return NotKnown(f"{self.what}: no answer within {self.deadline_s:g} s")
        return self.found


def gather_facts(run_dir: Path | StorageUri, address: str | None, environment: Mapping[str, str]) -> DoctorFacts:
    """All facts, gathered side by side. `address`: of the cluster to ask; None: none is asked."""
    gpus = tuple(sorted(str(path) for path in Path("/dev").glob("nvidia[0-9]*")))
    temp = environment.get("RAY_TMPDIR") or tempfile.gettempdir()
    token = Gathering(lambda: read_token(environment), SYSTEM_S, "reading the token's place")
    tls = Gathering(lambda: read_tls(environment), SYSTEM_S, "looking for the certificates")
    versions = Gathering(read_versions, SYSTEM_S, "reading the versions")
    processors = Gathering(read_processors, SYSTEM_S, "reading /proc and the container's limits")
    limits = Gathering(read_limits, SYSTEM_S, "reading limits")
    host = Gathering(read_host, SYSTEM_S, "resolving the name of this machine")
    shm = Gathering(partial(read_folder, "/dev/shm"), SYSTEM_S, "looking at /dev/shm")
    temporary = Gathering(partial(read_folder, temp), SYSTEM_S, f"looking at {temp}")
    runs: Gathering[StorageFacts] | Gathering[FolderFacts] = (
        Gathering(partial(read_storage, run_dir), WRITE_CHECK_S + 5, f"writing to {run_dir}")
        if isinstance(run_dir, StorageUri)
        else Gathering(partial(read_folder, run_dir), SYSTEM_S, f"looking at {run_dir}")
    )
    libraries = ["torch", "torchvision", *["nccl"] * bool(gpus)]
    torch = Gathering(lambda: run_probe("library_import_probe", libraries, IMPORT_S), IMPORT_S + 5, "importing PyTorch")
    ray = Gathering(lambda: run_probe("library_import_probe", ["ray"], IMPORT_S), IMPORT_S + 5, "importing Ray")
    cluster: ClusterFacts | NotKnown = NotKnown("no cluster is named")
    if address is not None:
        cluster = Gathering(lambda: ask_cluster(address, run_dir), CLUSTER_S + 5, "asking the cluster").result()

    def answer(found: Mapping[str, Mapping[str, Json]] | NotKnown, name: str) -> Mapping[str, Json] | NotKnown:
        if isinstance(found, NotKnown):
            return found
        return found.get(name, NotKnown(f"importing {name}: no answer within {IMPORT_S:g} s, or its process has died"))

    return DoctorFacts(
        torch=answer(torch.result(), "torch"),
        torchvision=answer(torch.result(), "torchvision"),
        nccl=answer(torch.result(), "nccl"),
        ray=answer(ray.result(), "ray"),
        token=token.result(),
        tls=tls.result(),
        versions=versions.result(),
        processors=processors.result(),
        limits=limits.result(),
        host=host.result(),
        shm=shm.result(),
        temporary=temporary.result(),
        runs=runs.result(),
        gpus=gpus,
        environment=dict(environment),
        cluster=cluster,
        address=address,
    )


# -- in processes of their own ---------------------------------------------------------------------------------------------


def run_probe(module: str, words: Sequence[str], deadline_s: float) -> dict[str, Any]:
    """The JSON objects that `python -m raypar.actors.MODULE` has printed by the deadline, as one; then it is killed."""
    package = str(Path(__file__).resolve().parents[2])
    path = os.pathsep.join([package, *filter(None, [os.environ.get("PYTHONPATH")])])
    started = subprocess.Popen(
        [sys.executable, "-m", f"raypar.actors.{module}", *words],
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.DEVNULL,
        env={**os.environ, "PYTHONPATH": path},
    )
    try:
        printed, _ = started.communicate(timeout=deadline_s)
    except subprocess.TimeoutExpired:
        started.kill()
        printed, _ = started.communicate()
    found: dict[str, Any] = {}
    for line in printed.decode(errors="replace").splitlines():
        if line.startswith("{"):
            try:
                found |= json.loads(line)
            except ValueError:
                continue
    return found


def ask_cluster(address: str, run_dir: Path | StorageUri) -> ClusterFacts | NotKnown:
    """What the nodes of a cluster say. Whether they see `run_dir` is asked only if it is a folder, not for storage."""
    folder = "" if isinstance(run_dir, StorageUri) else str(run_dir.resolve())
    found = run_probe("cluster_probe", [address, folder], CLUSTER_S)
    if "nodes" not in found:
        return NotKnown(str(found.get("error") or f"{address} gave no answer within {CLUSTER_S:g} s"))
    nodes = tuple(NodeFacts(**node) for node in found["nodes"])
    open_to_all = bool(found["open_to_all"])
    return ClusterFacts(address, nodes, found["versions"], found["processor"], found["settings"], open_to_all)


# -- here ------------------------------------------------------------------------------------------------------------------


def read_versions() -> dict[str, str]:
    """Library -> version, empty where it is not installed. Nothing is imported."""
    from importlib import metadata

    import raypar

    def version(name: str) -> str:
        try:
            return metadata.version(name)
        except metadata.PackageNotFoundError:
            return ""

    found = {"python": platform.python_version(), "raypar": raypar.__version__, **{name: version(name) for name in LIBRARIES}}
    found["cupy"] = next((v for name in ("cupy-cuda13x", "cupy-cuda12x", "cupy") if (v := version(name))), "")
    return found


def read_processors() -> ProcessorFacts:
    """Processors and memory, with a container's limits (cgroup version 2)."""
    memory = {name: int(value.split()[0]) << 10 for name, _, value in (line.partition(":") for line in _text("/proc/meminfo"))}
    size, free = memory["MemTotal"], memory["MemAvailable"]
    limit, used = _number("/sys/fs/cgroup/memory.max"), _number("/sys/fs/cgroup/memory.current")
    if limit is not None and used is not None and limit < size:
        size, free = limit, max(0, min(free, limit - used))
    quota = (_text("/sys/fs/cgroup/cpu.max") or ["max"])[0].split()
    share = int(quota[0]) / int(quota[1]) if quota[0] != "max" else None
    return ProcessorFacts(len(os.sched_getaffinity(0)), os.cpu_count() or 1, share, size, free)


def _text(path: str) -> list[str]:
    """The lines of a file of the system; none if there is no such file."""
    try:
        return Path(path).read_text().splitlines()
    except OSError:
        return []


def _number(path: str) -> int | None:
    """The number in a file of the system; None if there is none, or `max`."""
    words = _text(path)
    return int(words[0]) if words and words[0].strip().isdigit() else None


def read_storage(uri: StorageUri) -> StorageFacts:
    """A place on shared storage; whether an object can be written and removed there."""
    began_s = time.monotonic()
    try:
        guarded = check_run_dir_on_storage(uri)
    except RayparError as error:
        return StorageFacts(str(uri), error.what, error.cure)
    return StorageFacts(str(uri), write_s=time.monotonic() - began_s, guarded=guarded)


def read_folder(given: str | Path) -> FolderFacts:
    """A folder, or the nearest above it that exists; whether a file can be made there."""
    path = Path(given).resolve()
    while not path.exists() and path != path.parent:
        path = path.parent
    error = ""
    try:
        with tempfile.NamedTemporaryFile(prefix=".raypar-doctor-", dir=path) as file:
            file.write(b"x" * 4096)
            file.flush()
    except OSError as failed:
        error = failed.strerror or str(failed)
    return read_room(path, error)


def read_room(path: str | Path, error: str = "") -> FolderFacts:
    """The room in a folder that exists. `error`: why nothing can be written there."""
    room = os.statvfs(path)
    inodes = room.f_favail if room.f_files else None
    return FolderFacts(str(path), error, room.f_blocks * room.f_frsize, room.f_bavail * room.f_frsize, inodes)


def read_limits() -> LimitFacts:
    """Limits of open files and processes; of processes also the container's."""

    def limit(value: int) -> int | None:
        return None if value == resource.RLIM_INFINITY else value

    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    processes = limit(resource.getrlimit(resource.RLIMIT_NPROC)[0]) if os.getuid() else None  # root has no limit
    running, allowed = None, _number("/sys/fs/cgroup/pids.max")
    if allowed is not None and (processes is None or allowed < processes):
        processes, running = allowed, _number("/sys/fs/cgroup/pids.current")
    address_space = limit(resource.getrlimit(resource.RLIMIT_AS)[0])
    return LimitFacts(limit(soft), limit(hard), processes, running, address_space)


def read_host() -> HostFacts:
    """The machine's name and addresses; whether it can connect to itself. Raises `OSError` if the name is not resolved."""
    name = socket.gethostname()
    answers = socket.getaddrinfo(name, None, type=socket.SOCK_STREAM)
    addresses = tuple(dict.fromkeys(str(answer[4][0]) for answer in sorted(answers, key=lambda one: one[0] != socket.AF_INET)))
    first, last = ((_text("/proc/sys/net/ipv4/ip_local_port_range") or ["32768 60999"])[0]).split()
    interfaces = tuple(name for _, name in socket.if_nameindex())
    return HostFacts(name, addresses, connect_to_self(addresses[0]), interfaces, int(first), int(last))


def connect_to_self(address: str) -> str:
    """Why a connection to a port of this machine's address fails; empty if it does not."""
    family = socket.AF_INET6 if ":" in address else socket.AF_INET
    try:
        with socket.socket(family, socket.SOCK_STREAM) as listener:
            listener.bind((address, 0))
            listener.listen(1)
            socket.create_connection(listener.getsockname()[:2], timeout=2).close()
    except OSError as error:
        return error.strerror or str(error)
    return ""


TLS_FILES = ("RAY_TLS_SERVER_CERT", "RAY_TLS_SERVER_KEY", "RAY_TLS_CA_CERT")
"""Variables that name the files of Ray's TLS."""


def read_token(environment: Mapping[str, str]) -> TokenFacts:
    """Where the cluster's token is. It is not read."""
    file = token_file(environment)
    there = file.is_file()
    mode = file.stat().st_mode if there else 0
    return TokenFacts(environment.get("RAY_AUTH_MODE", ""), bool(environment.get("RAY_AUTH_TOKEN")), str(file), there, mode)


def read_tls(environment: Mapping[str, str]) -> TlsFacts:
    """What is set for TLS. Certificates and keys are not read."""
    if environment.get("RAY_USE_TLS", "0").lower() not in ("1", "true"):
        return TlsFacts(False)
    files = {name: environment.get(name, "") for name in TLS_FILES}
    unreadable = tuple(f"{name}={path}" for name, path in files.items() if path and not os.access(path, os.R_OK))
    return TlsFacts(True, tuple(name for name, path in files.items() if not path), unreadable)
