"""The connection to Ray: a cluster that is named, the one this process has already joined, or a Ray of our own."""

from __future__ import annotations

import contextlib
import functools
import logging
import os
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
import threading
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from types import FrameType
from typing import Literal

from raypar.errors import ClusterError

OBJECT_STORE_BYTES = 150 * 2**20
"""Modest: no tensor goes through the object store."""

QUIET = {"RAY_USAGE_STATS_ENABLED": "0", "RAY_ACCEL_ENV_VAR_OVERRIDE_ON_ZERO": "0"}

CONNECT_S = 10.0
"""How long the head of a cluster may take to accept a connection."""

SOCKET_PATH_ROOM = 40
"""Ray puts about 65 characters of socket path below its folder, and the system allows 107."""


@dataclass(frozen=True)
class Connection:
    """How this process is connected. `host`: what workers should listen on; None means their node's own address."""

    kind: Literal["own", "joined", "found"]
    text: str
    host: str | None = None


@contextlib.contextmanager
def connected(address: str | None, workers: int, working_dir: Path) -> Iterator[Connection]:
    """Connect for the length of a run. Raises `ClusterError` when `address` does not answer.

    With an address (or `RAY_ADDRESS`) that cluster is joined. In a process that has called `ray.init` its cluster is used and
    left alone. Else raypar starts a Ray of its own with `workers` + 1 logical CPUs, which ends with this process, however
    that ends, and leaves nothing behind. A Ray that happens to run on the machine is never attached to.
    """
    address = address or os.environ.get("RAY_ADDRESS")
    with environment(QUIET if address else {**QUIET, "RAY_AUTH_MODE": "disabled", "PYTHONPATH": import_path(working_dir)}):
        import ray

        if ray.is_initialized():
            yield Connection("found", f"using the Ray this process has joined, {ray.get_runtime_context().gcs_address}")
        elif address:
            with joined(address, working_dir) as connection:
                yield connection
        else:
            with own(workers) as connection:
                yield connection


@contextlib.contextmanager
def joined(address: str, working_dir: Path) -> Iterator[Connection]:
    """A cluster that runs already. Its workers import from the working directory, which is sent there if it is elsewhere."""
    import ray

    answers(address)
    runtime_env = None
    if not on_this_machine(address) and "RAY_JOB_CONFIG_JSON_ENV_VAR" not in os.environ:
        runtime_env = {"working_dir": str(working_dir), "excludes": ["runs/", ".git/", ".venv/", "*.safetensors"]}
    try:
        with interruptible():
            ray.init(address=address, logging_level=logging.ERROR, runtime_env=runtime_env)
    except (ConnectionError, RuntimeError, ValueError, TimeoutError) as error:
        raise ClusterError(
            f"cannot join a Ray cluster at {address!r}: {error}",
            cure="check `ray status --address ...`, or leave the address out: raypar then starts a Ray of its own",
        ) from error
    try:
        yield Connection("joined", f"joined the Ray cluster at {address}")
    finally:
        ray.shutdown()


def answers(address: str) -> None:
    """Raise `ClusterError` when nothing listens at `host:port`: Ray itself would try for minutes without a word."""
    host, _, port = address.rpartition("://")[2].rpartition(":")
    if not port.isdigit():
        return
    try:
        socket.create_connection((host.strip("[]"), int(port)), timeout=CONNECT_S).close()
    except OSError as error:
        raise ClusterError(
            f"nothing answers at {address!r}: {error}",
            cure="check the address (`ray status --address ...`), or leave it out: raypar then starts a Ray of its own",
        ) from error


@contextlib.contextmanager
def own(workers: int) -> Iterator[Connection]:
    """A Ray of our own, in a folder of its own.

    Ray's processes die with this one (Ray asks the kernel for that); the folder is removed by us, or, if we are killed, by a
    shell that waits for the end of a pipe only we hold.
    """
    import ray

    folder = short_folder()
    cleaner = subprocess.Popen(
        ["sh", "-c", 'read -r word || { sleep 3; rm -rf "$1"; }', "raypar-cleaner", str(folder)],
        stdin=subprocess.PIPE,
        start_new_session=True,
    )
    try:
        with in_sessions_of_their_own(), interruptible():
            ray.init(
                address="local",
                num_cpus=workers + 1,
                num_gpus=0,
                include_dashboard=False,
                object_store_memory=OBJECT_STORE_BYTES,
                logging_level=logging.ERROR,
                _temp_dir=str(folder),
            )
        yield Connection("own", f"a Ray of our own with {workers + 1} logical CPUs", host="127.0.0.1")
    finally:
        ray.shutdown()
        shutil.rmtree(folder, ignore_errors=True)
        assert cleaner.stdin is not None
        with contextlib.suppress(BrokenPipeError):
            cleaner.stdin.write(b"done\n")
            cleaner.stdin.close()
        cleaner.wait(timeout=10)
        shutil.rmtree(folder, ignore_errors=True)


@contextlib.contextmanager
def interruptible() -> Iterator[None]:
    """A Ctrl-C that Ray's start swallows is raised when the start is over."""
    before = signal.getsignal(signal.SIGINT)
    if threading.current_thread() is not threading.main_thread() or not callable(before):
        yield
        return
    asked = False

    def note(number: int, frame: FrameType | None) -> None:
        nonlocal asked
        asked = True
        before(number, frame)

    signal.signal(signal.SIGINT, note)
    try:
        yield
    finally:
        signal.signal(signal.SIGINT, before)
    if asked:
        raise KeyboardInterrupt


@contextlib.contextmanager
def in_sessions_of_their_own() -> Iterator[None]:
    """Ray's processes are started outside our process group.

    Slurm, systemd and `timeout` send SIGTERM to the whole group: it would end Ray's control store at once, while this process
    still wants to finish the step and save. The name is private to Ray; where it is gone, only that protection is.
    """
    from ray._private import services

    popen = getattr(services, "ConsolePopen", None)
    if popen is None:
        yield
        return
    services.ConsolePopen = functools.partial(popen, start_new_session=True)
    try:
        yield
    finally:
        services.ConsolePopen = popen


def short_folder() -> Path:
    """A new folder for Ray's files whose path leaves room for its sockets."""
    base = tempfile.gettempdir()
    return Path(tempfile.mkdtemp(prefix="raypar-", dir=base if len(base) + 15 <= SOCKET_PATH_ROOM else "/tmp"))


def import_path(working_dir: Path) -> str:
    """PYTHONPATH for workers on this machine: they import what this process can import."""
    places = [str(working_dir), *(p for p in sys.path if p and "site-packages" not in p and Path(p).is_dir())]
    inherited = os.environ.get("PYTHONPATH", "")
    return os.pathsep.join(dict.fromkeys([*places, *inherited.split(os.pathsep)] if inherited else places))


def on_this_machine(address: str) -> bool:
    """Whether the head of the cluster shares our file system: `auto`, `local`, or one of our own addresses."""
    host = address.removeprefix("ray://").rpartition(":")[0] or address
    if host in ("auto", "local", "localhost", "127.0.0.1"):
        return True
    with contextlib.suppress(OSError):
        ours = {info[4][0] for info in socket.getaddrinfo(socket.gethostname(), None)}
        return socket.gethostbyname(host) in ours
    return False


@contextlib.contextmanager
def environment(values: dict[str, str]) -> Iterator[None]:
    """Set environment variables, which Ray's processes inherit, and put the old ones back."""
    before = {key: os.environ.get(key) for key in values}
    os.environ.update(values)
    try:
        yield
    finally:
        for key, value in before.items():
            if value is None:
                os.environ.pop(key, None)
            else:
                os.environ[key] = value
