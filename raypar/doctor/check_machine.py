"""Judges the facts about this machine: versions, processors, GPUs, folders, limits, names, the token. Pure."""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any

from raypar.doctor.check_environment_variables import FOLDER_NAMES, SOCKET_PATH_ROOM
from raypar.doctor.finding import Finding, Level, NotKnown
from raypar.doctor.machine_facts import FolderFacts, HostFacts, LimitFacts, ProcessorFacts, StorageFacts, TlsFacts, TokenFacts
from raypar.files.json_type import Json
from raypar.plan.wording import count_noun

GOOD = {
    "python": ((3, 10), (3, 15)), "torch": ((2, 6), (3,)), "ray": ((2, 60), (3,)), "numpy": ((1, 24), (3,)),
    "pydantic": ((2, 7), (3,)), "pyyaml": ((6,), (7,)), "safetensors": ((0, 4), (1,)),
}  # fmt: skip
"""Library -> the first good version, and the first that nobody has tried. Older ones do not work, newer ones may."""
CUPY_FROM = (14,)
"""The first CuPy that GPU workers can use."""
NAMES = {"python": "Python", "torch": "PyTorch", "ray": "Ray", "numpy": "NumPy", "pyyaml": "PyYAML", "cupy": "CuPy"}

OBJECT_STORE_BYTES = 150 << 20
"""Size of the object store of a local Ray cluster, in /dev/shm; modest, as no tensor goes through it."""
ADDRESS_SPACE_BYTES = 5 * 2**29
"""Address space of a process that has loaded Ray and PyTorch: less than 2.3 GiB. With less than it needs Ray calls abort()."""
LOG_BYTES = 2**19
"""Without so much room for its logs a local Ray cluster does not start, and says nothing."""
CLUSTER_SHM_BYTES = 1 << 30
WORKER_BYTES = 450 << 20
"""Resident memory of a worker before it has a model."""
GOOD_OPEN_FILES, LEAST_OPEN_FILES = 8192, 1024
GOOD_PROCESSES = 4096
LITTLE_DISK, LEAST_DISK = 10 << 30, 1 << 30
SLOW_STORAGE_S = 5.0
"""Writing and removing one small object should take no longer."""
RAY_FULL = 0.95
"""Share of the disk below Ray's folder that may be used: Ray stores no objects beyond."""

INSTALL = "pip install -c constraints.txt -e . in raypar's folder installs versions that work together"


def parse_version(text: str) -> tuple[int, ...]:
    """The numbers at the beginning of a version: (2, 13, 0) of `2.13.0+cpu`."""
    found = re.match(r"\d+(\.\d+)*", text)
    return tuple(int(part) for part in found[0].split(".")) if found else ()


def check_versions(versions: Mapping[str, str]) -> list[Finding]:
    """Python and the libraries that raypar needs."""
    found = [Finding("ok", "raypar", versions.get("raypar") or "not installed, run from its folder")]
    for library, (least, below) in GOOD.items():
        name, version = NAMES.get(library, library), versions.get(library, "")
        good = f"{'.'.join(map(str, least))} and later, below {'.'.join(map(str, below))}"
        if not version:
            found.append(Finding("failure", name, "not installed", INSTALL))
        elif parse_version(version) < least:
            found.append(Finding("failure", name, f"{version} is too old: known to work are {good}", INSTALL))
        elif parse_version(version) >= below:
            text = f"{version} has not been tried: known to work are {good}"
            found.append(Finding("warning", name, text, f"if something fails: {INSTALL}"))
        else:
            found.append(Finding("ok", name, version))
    return found


def check_processors(facts: ProcessorFacts) -> list[Finding]:
    """Processors and memory."""
    count = facts.processors if facts.quota is None else min(facts.processors, facts.quota)
    text = f"{facts.processors} of {facts.all_processors} may be used"
    if facts.quota is not None and facts.quota < facts.processors:
        cure = "raise the container's CPU limit, or run as many workers as it allows"
        found = [Finding("warning", "processors", f"{text}, but a quota of the container allows {facts.quota:g}", cure)]
    else:
        found = [Finding("ok", "processors", text)]
    free, all_of_it = (
        f"{format_bytes(facts.free_memory_bytes)} free of {format_bytes(facts.memory_bytes)}",
        max(1, facts.memory_bytes),
    )
    room = facts.free_memory_bytes // WORKER_BYTES
    if room < 1:
        found.append(Finding("failure", "memory", f"{free}: no worker fits", "end other programs, or use a larger machine"))
    elif facts.free_memory_bytes < 0.07 * all_of_it:
        cure = "end other programs: Ray kills workers when 95 % of the memory is used"
        found.append(Finding("warning", "memory", free, cure))
    elif room < count:
        text = f"{free}: that is {count_noun(room, 'worker')}, each with about {WORKER_BYTES >> 20} MiB before its model"
        found.append(Finding("warning", "memory", text, "use fewer workers than processors, or a larger machine"))
    else:
        found.append(Finding("ok", "memory", free))
    return found


def check_gpus(torch: Mapping[str, Any], devices: tuple[str, ...], environment: Mapping[str, str]) -> list[Finding]:
    """Whether PyTorch can be imported, and sees the GPUs that the machine has."""
    if torch.get("error"):
        return [Finding("failure", "PyTorch's import", str(torch["error"]), f"install it anew: {INSTALL}")]
    seen = [str(name) for name in torch.get("gpus") or ()]
    if not devices and not seen:
        return [Finding("ok", "GPUs", "none on this machine; jobs for CPUs need none")]
    text = f"{len(devices)} on this machine, PyTorch sees {len(seen)}" + (
        f" ({', '.join(dict.fromkeys(seen))})" if seen else ""
    )
    if len(seen) >= len(devices):
        return [Finding("ok", "GPUs", text)]
    if not torch.get("cuda"):
        cure = "install a PyTorch for CUDA, for jobs with device: gpu"
        return [Finding("warning", "GPUs", f"{text}: it was built for CPUs", cure)]
    if "CUDA_VISIBLE_DEVICES" in environment:
        text += f"; CUDA_VISIBLE_DEVICES is {environment['CUDA_VISIBLE_DEVICES']!r}"
        return [Finding("warning", "GPUs", text, "unset CUDA_VISIBLE_DEVICES, unless the others are to be left alone")]
    cure = "look at nvidia-smi: the driver may be too old for this PyTorch, or the container may lack --gpus all"
    return [Finding("warning", "GPUs", text, cure)]


def check_nccl(
    nccl: Mapping[str, Json] | NotKnown, devices: tuple[str, ...], versions: Mapping[str, str] | NotKnown
) -> list[Finding]:
    """CuPy and NCCL, which only jobs on GPUs need."""
    cupy = "" if isinstance(versions, NotKnown) else versions.get("cupy", "")
    if cupy and parse_version(cupy) < CUPY_FROM:
        cure = f"install {CUPY_FROM[0]} or later: pip install -e '.[cuda13]', or cuda12"
        return [Finding("failure" if devices else "warning", "CuPy", f"{cupy} is too old for GPU workers", cure)]
    if not devices:
        return [Finding("ok", "CuPy and NCCL", f"CuPy {cupy or 'not installed'}; without a GPU nothing needs them")]
    if isinstance(nccl, NotKnown):
        return [Finding("not checked", "CuPy and NCCL", nccl.why)]
    if nccl.get("error"):
        return [Finding("failure", "CuPy and NCCL", str(nccl["error"]), str(nccl.get("cure") or ""))]
    return [Finding("ok", "CuPy and NCCL", str(nccl.get("text")))]


def check_torchvision(torchvision: Mapping[str, Json] | NotKnown, versions: Mapping[str, str] | NotKnown) -> list[Finding]:
    """Whether the installed torchvision belongs to the installed PyTorch: `transformers` imports it."""
    if not isinstance(versions, NotKnown) and not versions.get("torchvision"):
        return [Finding("ok", "torchvision", "not installed; only models that use it need it")]
    if isinstance(torchvision, NotKnown):
        return [Finding("not checked", "torchvision", torchvision.why)]
    error = str(torchvision.get("error") or "")
    if "torchvision::" in error:
        cure = "install both from one index, or `pip uninstall torchvision`; until then `transformers` cannot be imported"
        return [Finding("warning", "torchvision", f"it was built for another PyTorch than the installed one ({error})", cure)]
    if error:
        cure = "`pip uninstall torchvision`, or install it anew"
        return [Finding("warning", "torchvision", f"it cannot be imported: {error}", cure)]
    version = "" if isinstance(versions, NotKnown) else versions.get("torchvision", "")
    return [Finding("ok", "torchvision", f"{version} fits the installed PyTorch")]


def check_ray(ray: Mapping[str, Json]) -> list[Finding]:
    """Whether Ray can be imported."""
    if ray.get("error"):
        return [Finding("failure", "Ray's import", str(ray["error"]), f"install it anew: {INSTALL}")]
    return []


def check_private_apis(name: str, library: Mapping[str, Any] | NotKnown) -> list[Finding]:
    """What is off because the installed release of a library has no longer what raypar uses beyond its public API."""
    if isinstance(library, NotKnown):
        return []
    return [Finding("warning", f"{name}'s private APIs", what, cure) for what, cure in library.get("lacks") or ()]


def check_shm(facts: FolderFacts) -> list[Finding]:
    """/dev/shm, where Ray's object store lies."""
    text = f"{format_bytes(facts.free_bytes)} free of {format_bytes(facts.size_bytes)}"
    if facts.error or facts.path != "/dev/shm":
        text = f"nothing can be written there: {facts.error or 'it does not exist'}"
        return [Finding("failure", "/dev/shm", text, "mount a tmpfs there: mount -t tmpfs -o size=2g tmpfs /dev/shm")]
    if facts.free_bytes < OBJECT_STORE_BYTES:
        text += f": Ray's object store of {OBJECT_STORE_BYTES >> 20} MiB then lies on disk, and is slow"
        return [Finding("warning", "/dev/shm", text, "docker run --shm-size=2g, or remove old files there")]
    if facts.free_bytes < CLUSTER_SHM_BYTES:
        text += ": enough for a local cluster; a node of a larger one wants more"
        return [Finding("warning", "/dev/shm", text, "docker run --shm-size=2g, or remove old files there")]
    return [Finding("ok", "/dev/shm", text)]


def check_runs_folder(facts: FolderFacts | StorageFacts) -> list[Finding]:
    """The folder of runs, writable with room for checkpoints; or the storage that takes its place."""
    if isinstance(facts, StorageFacts):
        return [_check_runs_storage(facts)]
    if facts.error:
        return [Finding("failure", "runs folder", f"{facts.path}: {facts.error}", "give --run-dir a folder you may write")]
    text = f"{facts.path} is writable, {format_bytes(facts.free_bytes)} free of {format_bytes(facts.size_bytes)}"
    if facts.free_inodes is not None and facts.free_inodes < 1000:
        text = f"{facts.path} has room for {facts.free_inodes} more files only"
        return [Finding("failure", "runs folder", text, "remove small files, or set run_dir to another disk")]
    if facts.free_bytes < LEAST_DISK:
        return [Finding("failure", "runs folder", text, "free disk space, or set run_dir to another disk")]
    if facts.free_bytes < LITTLE_DISK:
        cure = "a checkpoint is about three times as large as the weights; free disk space, or set run_dir to another disk"
        return [Finding("warning", "runs folder", text, cure)]
    return [Finding("ok", "runs folder", text)]


def _check_runs_storage(facts: StorageFacts) -> Finding:
    """Storage for runs: whether it is writable and quick, and has a lock between clusters."""
    if facts.error:
        return Finding("failure", "runs folder", facts.error, facts.cure)
    text = f"{facts.uri} is writable: a small object was written and removed in {facts.write_s:.1f} s"
    if facts.write_s > SLOW_STORAGE_S:
        cure = "use storage in the region of the cluster, and look at the network to it"
        return Finding("warning", "runs folder", f"{text}; metrics are sent late, and checkpoints take long", cure)
    if not facts.guarded:
        text += "; two clusters that train one run there are not kept from each other (S3 has a lock)"
    return Finding("ok", "runs folder", text)


def check_temporary_folder(facts: FolderFacts) -> list[Finding]:
    """The folder in which Ray keeps its files."""
    if facts.error:
        return [Finding("failure", "temporary files", f"{facts.path}: {facts.error}", "set TMPDIR to a folder you may write")]
    used = 1 - facts.free_bytes / facts.size_bytes if facts.size_bytes else 1.0
    text = f"{facts.path}: {format_bytes(facts.free_bytes)} free of {format_bytes(facts.size_bytes)}"
    if used > RAY_FULL:
        cure = "free disk space there, or set RAY_TMPDIR to a folder with room (a short path)"
        return [Finding("warning", "temporary files", f"{text}; Ray stores no objects on a disk that is 95 % full", cure)]
    return [Finding("ok", "temporary files", text)]


def check_room_for_logs(facts: FolderFacts | NotKnown) -> list[Finding]:
    """A disk that is too full for the logs of a local Ray cluster."""
    if isinstance(facts, NotKnown) or facts.free_bytes >= LOG_BYTES:
        return []
    text = f"the disk is full: {facts.path} has {facts.free_bytes // 1024:,} KiB left, and Ray puts its logs there"
    cure = f"free disk space, or set TMPDIR to a folder with room and at most {SOCKET_PATH_ROOM - FOLDER_NAMES} characters"
    return [Finding("failure", "room for logs", text, cure)]


def check_limits(facts: LimitFacts) -> list[Finding]:
    """Limits of open files and of processes."""
    found = []
    files = facts.open_files
    text = f"{'unlimited' if files is None else f'{files:,}'} (ulimit -n)"
    if files is None or files >= GOOD_OPEN_FILES or (facts.open_files_hard or files) >= GOOD_OPEN_FILES:
        if files is not None and files < GOOD_OPEN_FILES:
            text += f"; Ray raises it up to {facts.open_files_hard:,}"
        found.append(Finding("ok", "open files", text))
    else:
        level: Level = "failure" if max(files, facts.open_files_hard or 0) < LEAST_OPEN_FILES else "warning"
        cure = (
            "ulimit -n 65536 before the start; in a container --ulimit nofile=65536:65536; for good: /etc/security/limits.conf"
        )
        found.append(Finding(level, "open files", f"{text}: Ray's processes and workers' connections may run out", cure))
    room = facts.processes
    text = "unlimited (ulimit -u)" if room is None else f"{room:,} (ulimit -u)"
    if room is not None and facts.running_processes is not None:
        room, text = room - facts.running_processes, f"{text}, of which {facts.running_processes:,} are taken"
    if room is not None and room < GOOD_PROCESSES:
        cure = "ulimit -u 65536 before the start; in a container --pids-limit=-1: threads count too, and a worker has dozens"
        found.append(Finding("failure" if room < 200 else "warning", "processes", text, cure))
    else:
        found.append(Finding("ok", "processes", text))
    return found


def check_address_space(facts: LimitFacts | NotKnown) -> list[Finding]:
    """A limit on address space that is too small for Ray, which would end the process without a word."""
    limit = None if isinstance(facts, NotKnown) else facts.address_space_bytes
    if limit is None or limit >= ADDRESS_SPACE_BYTES:
        return []
    text = (
        f"processes may have {limit / 2**30:.1f} GiB of address space each (`ulimit -v`), and one that loads Ray and PyTorch "
        f"needs {ADDRESS_SPACE_BYTES / 2**30:.1f}, of which it uses little"
    )
    cure = "raise or remove that limit (`ulimit -v unlimited`); a container or cgroup limits memory itself"
    return [Finding("failure", "address space", text, cure)]


def check_host_name_and_ports(facts: HostFacts | NotKnown, address: str | None) -> list[Finding]:
    """The machine's name, its address and ports. `address`: of the cluster to join; None: none is named."""
    if isinstance(facts, NotKnown):
        return [Finding("failure", "host name", facts.why, "add this machine's name to /etc/hosts, or repair /etc/resolv.conf")]
    found = []
    if not facts.addresses:
        text = f"{facts.name} resolves to no address"
        return [Finding("failure", "host name", text, f"add a line for {facts.name} to /etc/hosts")]
    text = f"{facts.name} is {', '.join(facts.addresses)}"
    local = all(one.startswith("127.") or one == "::1" for one in facts.addresses)
    if local and address:
        text += ": other machines cannot reach that"
        cure = "give the name the machine's own address in /etc/hosts, or start Ray with --node-ip-address"
        found.append(Finding("warning", "host name", text, cure))
    else:
        found.append(Finding("ok", "host name", text))
    if facts.own_connection_error:
        text = f"a connection to a port of {facts.addresses[0]} fails: {facts.own_connection_error}"
        cure = "let the firewall pass connections between the nodes, on all high ports"
        found.append(Finding("failure", "ports", text, cure))
    else:
        count = facts.last_port - facts.first_port + 1
        text = f"this machine connects to itself; {count:,} ports for listeners ({facts.first_port} to {facts.last_port})"
        if count < 2000:
            cure = "sysctl net.ipv4.ip_local_port_range='32768 60999'"
            found.append(Finding("warning", "ports", text, cure))
        else:
            found.append(Finding("ok", "ports", text))
    return found


def check_token(facts: TokenFacts, address: str | None) -> list[Finding]:
    """The cluster's token, if it has one."""
    there = facts.in_environment or facts.file_exists
    if facts.mode == "token" and not there:
        text = f"RAY_AUTH_MODE is token, and there is none: neither RAY_AUTH_TOKEN nor {facts.file}"
        cure = "set RAY_AUTH_TOKEN, or RAY_AUTH_TOKEN_PATH to a file with the cluster's token"
        return [Finding("failure", "auth token", text, cure)]
    if facts.file_exists and facts.file_mode & 0o077 and (facts.mode == "token" or not facts.in_environment):
        text = f"others may read {facts.file} (mode {facts.file_mode & 0o777:o})"
        return [Finding("warning", "auth token", text, f"chmod 600 {facts.file}")]
    if facts.mode == "token":
        return [Finding("ok", "auth token", "in RAY_AUTH_TOKEN" if facts.in_environment else f"in {facts.file}")]
    if there and address:
        text = "there is a token, and RAY_AUTH_MODE is not set to token"
        return [Finding("warning", "auth token", text, "RAY_AUTH_MODE=token, if the cluster asks for one")]
    return [Finding("ok", "auth token", "none is set: a local cluster makes its own for each run")]


def format_bytes(size: int) -> str:
    """Bytes as text: `1.5 GiB`, `64 MiB`."""
    return f"{size / 2**30:,.1f} GiB" if size >= 2**30 else f"{size / 2**20:,.0f} MiB"


def check_tls(facts: TlsFacts) -> list[Finding]:
    """TLS on Ray's connections, which raypar's connections between workers do not have."""
    if not facts.used:
        return [Finding("ok", "TLS", "not used (RAY_USE_TLS): nothing between the nodes is encrypted")]
    if facts.unset or facts.unreadable:
        wrong = [f"{name} is not set" for name in facts.unset] + [f"{text} cannot be read" for text in facts.unreadable]
        text = f"RAY_USE_TLS is set, and {', '.join(wrong)}: Ray cannot connect"
        return [Finding("failure", "TLS", text, "name the files of this node's certificate and key, or unset RAY_USE_TLS")]
    text = "Ray's connections are encrypted; those on which workers exchange tensors prove who they are, and are not encrypted"
    return [Finding("warning", "TLS", text, "keep the nodes in a network of their own (VPC, VPN, network policy)")]
