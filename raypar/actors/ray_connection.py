"""Connects this process to Ray: to a named cluster, to the one it has joined already, or to a new local Ray cluster."""

from __future__ import annotations

import contextlib
import logging
import os
import random
import signal
import socket
import sys
import tempfile
import threading
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass
from pathlib import Path
from types import FrameType
from typing import Literal

from raypar.actors.control_store_watch import (
    ControlStoreLost,
    call_ray,
    current_watch,
    run_with_timeout,
    silence_limit_s,
    watch_control_store,
)
from raypar.actors.local_cluster_temp_folder import (
    remove_abandoned_local_ray,
    remove_local_ray_on_exit,
    room_for_new_driver,
)
from raypar.actors.local_cluster_token import choose_token, write_token_file
from raypar.actors.local_nodes import LocalNode, cpus_per_node, start_local_nodes
from raypar.doctor.check_environment_variables import FOLDER_NAMES, SOCKET_PATH_ROOM
from raypar.doctor.check_machine import OBJECT_STORE_BYTES
from raypar.doctor.checks import refuse_unfit_machine
from raypar.doctor.gather import read_limits, read_room
from raypar.errors import ClusterAddressError, ClusterError, ConfigError, error_first_line
from raypar.files.json_type import Json
from raypar.ray_compat.authentication import control_store_lets_in_without_token, shows_token, token_authentication
from raypar.ray_compat.local_cluster import (
    CONNECT_S,
    LOOPBACK,
    forget_ray_at_exit,
    is_connecting,
    is_late_start,
    loopback_address_kept,
    loopback_address_kept_if_needed,
    ray_in_new_sessions,
    start_head,
    without_idle_ray_processes,
    without_ray_failure_handler,
    without_ray_sigterm_handler,
)
from raypar.ray_compat.ray_log_filter import filtering_ray_lines, without_autoscaler_lines
from raypar.ray_compat.settings import (
    NICENESS,
    NOT_RECORDED,
    PATIENT,
    QUIET,
    RECONNECT_VARIABLE,
    SUBMITTED_VARIABLE,
    temporary_environment_variables,
)
from raypar.storage.stored_file_layout import TEMPORARY_FOLDER_PREFIX
from raypar.user_code.stop_signals import STOP_SIGNALS, StopHandler

ATTEMPTS = 3
"""How often the start of Ray is attempted: Ray gives its raylet 30 s, which no setting changes."""

SHUTDOWN_S = 5.0
"""How long Ray may take to disconnect from a cluster whose control store is lost."""

TOKEN = (
    "RAY_AUTH_MODE=token and give the cluster's token: RAY_AUTH_TOKEN, or a file (RAY_AUTH_TOKEN_PATH; ~/.ray/auth_token "
    "where that is not set)"
)
"""How to join a cluster that has a token (Ray 2.59 and later), for messages."""

NO_TOKEN = "; it has no token: whoever reaches its ports can run code in its workers, as any user of this cluster can"
"""What the first lines of a run say of a cluster that was joined without a token."""

RAY_FOLDER = "r"
"""Ray's own folder below the run's temporary one. Ray lets everybody read and write its folder (mode 777), and its sockets lie
there; nobody but the user gets through the one above."""


@dataclass(frozen=True)
class RayConnection:
    """How this process is connected to Ray."""

    kind: Literal["own", "joined", "found"]
    """own: a local Ray cluster; joined: a cluster that was named; found: the one this process had joined before."""
    text: str
    """The connection in words."""
    address: str
    """Where Ray's control store answers: `host:port`."""
    host: str | None = None
    """The address that workers listen on; None: their node's address."""
    nodes: tuple[LocalNode, ...] = ()
    """The raylets of a local Ray cluster with several nodes."""

    @property
    def facts(self) -> dict[str, Json]:
        """The content of cluster.json, from which other processes of this machine find the cluster of a run."""
        return {"kind": self.kind, "address": self.address, "nodes": [asdict(node) for node in self.nodes]}


@contextlib.contextmanager
def connect_ray(
    address: str | None, workers: int, working_dir: Path, nodes: int = 1, gpus: bool = False
) -> Iterator[RayConnection]:
    """Connect to Ray for the length of a run. Raises `ClusterError` when `address` does not answer.

    With an address (or `RAY_ADDRESS`), join that cluster. In a process that has called `ray.init`, use its cluster and leave it
    running. Else start a local Ray cluster with `workers` + 1 logical CPUs, which ends with this process, however that ends,
    and leaves nothing behind. A Ray cluster that happens to run on the machine is never used.

    `nodes`: of the local Ray cluster; they share its CPUs. Raises `ConfigError` where there cannot be so many
    (`check_local_node_count`). `gpus`: whether the local Ray cluster offers the machine's GPUs. Raises `ConfigError` without
    one.
    """
    check_local_node_count(address, nodes)
    if gpus and nodes > 1:
        raise ConfigError(
            f"{nodes} local nodes would each offer all GPUs of this machine",
            cure="leave --local-nodes out for workers on GPUs, or set device: cpu",
        )
    given, address = address, address or os.environ.get("RAY_ADDRESS")
    # The local cluster is for workers only: unlike Ray's default, other processes of the machine do not come before them.
    ours = {"PYTHONPATH": worker_python_path(working_dir), **NICENESS, **PATIENT, **NOT_RECORDED}
    with temporary_environment_variables(QUIET if address else {**QUIET, **ours}), without_ray_leftovers():
        import ray

        from raypar.actors.removed_working_dir import wait_until_working_dir_unpacked

        if ray.is_initialized():
            if nodes > 1:
                raise ConfigError(
                    f"{nodes} local nodes, but this process has joined a Ray already", cure="call ray.shutdown() before"
                )
            there = ray.get_runtime_context().gcs_address
            # By its port: a host has several names.
            if given not in (None, "auto") and given.rpartition(":")[2] != there.rpartition(":")[2]:
                raise ConfigError(
                    f"this process has joined the Ray at {there} already, and address is {given!r}",
                    cure="leave the address out, or call ray.shutdown() before",
                )
            wait_until_working_dir_unpacked()
            open_to_all = "" if shows_token() else NO_TOKEN
            with watch_control_store(there):
                yield RayConnection("found", f"using the Ray this process has joined, {there}{open_to_all}", there)
        elif address:
            with without_autoscaler_lines(), filtering_ray_lines(), join_cluster(address, working_dir) as connection:
                yield connection
        else:
            if gpus:
                require_gpu_here()
            with filtering_ray_lines(), start_local_ray(workers, nodes, gpus) as connection:
                yield connection


def require_gpu_here() -> None:
    """Raise `ConfigError` if PyTorch finds no GPU on this machine."""
    import torch

    if torch.cuda.device_count() == 0:
        raise ConfigError(
            "the job asks for GPUs (device: gpu), and PyTorch finds none on this machine",
            cure="set device: cpu, join a cluster that has GPUs (--address), or look at nvidia-smi, CUDA_VISIBLE_DEVICES and "
            "whether this PyTorch is built for CUDA",
        )


def uses_existing_ray(address: str | None) -> bool:
    """Whether `connect_ray` uses a cluster that is there already."""
    import ray

    return bool(address or os.environ.get("RAY_ADDRESS")) or ray.is_initialized()


def check_local_node_count(address: str | None, nodes: int) -> None:
    """Raise `ConfigError` for an impossible number of local nodes: fewer than 1, or several beside a cluster to join."""
    address = address or os.environ.get("RAY_ADDRESS")
    if nodes < 1:
        raise ConfigError(f"{nodes} local nodes", cure="ask for 1 or more")
    if nodes > 1 and address:
        raise ConfigError(
            f"{nodes} local nodes, and a cluster to join at {address}",
            cure="local nodes belong to a local Ray cluster: leave out --address and RAY_ADDRESS, or --local-nodes",
        )


@contextlib.contextmanager
def join_cluster(address: str, working_dir: Path) -> Iterator[RayConnection]:
    """Join a running cluster. Its workers import from the working directory, which is sent there if it is elsewhere."""
    import ray
    from ray.exceptions import AuthenticationError, RayError

    from raypar.actors.removed_working_dir import wait_until_working_dir_unpacked  # at once: not while Ray unpacks us

    check_address_answers(address)
    open_to_all = is_open_to_all(address)
    runtime_env = None
    if not is_head_on_this_machine(address) and SUBMITTED_VARIABLE not in os.environ:
        runtime_env = {"working_dir": str(working_dir), "excludes": ["runs/", ".git/", ".venv/", "*.safetensors"]}
    limit_s = silence_limit_s(os.environ)
    # Ray ends a process that has waited this long for the control store; at half of it raypar gives up, and says why.
    longer_ray_timeout = temporary_environment_variables({RECONNECT_VARIABLE: f"{2 * limit_s:.0f}"})
    try:
        with longer_ray_timeout, delay_ctrl_c(), fresh_python_random_state(), loopback_address_kept_if_needed(address):
            ray.init(address=address, logging_level=logging.ERROR, runtime_env=runtime_env)
            wait_until_working_dir_unpacked()
    except AuthenticationError as error:
        raise ClusterAddressError(
            f"the Ray cluster at {address!r} lets nobody in without its token: {error.message}", cure=f"set {TOKEN}"
        ) from error
    except ConnectionError as error:  # something listens there: Ray says the same of a head that wants another token
        raise ClusterAddressError(
            f"cannot join a Ray cluster at {address!r}: {error_first_line(error)}",
            cure=f"look at `ray status --address {address}`; if the cluster has a token, set {TOKEN}",
        ) from error
    except (RuntimeError, ValueError, TimeoutError, RayError) as error:
        raise ClusterAddressError(
            f"cannot join a Ray cluster at {address!r}: {error_first_line(error)}",
            cure="check `ray status --address ...`, or leave the address out: raypar then starts a local Ray cluster",
        ) from error
    there = ray.get_runtime_context().gcs_address
    with watch_control_store(there, limit_s=limit_s):
        try:
            yield RayConnection("joined", f"joined the Ray cluster at {address}{NO_TOKEN if open_to_all else ''}", there)
        finally:
            leave_cluster()


def leave_cluster() -> None:
    """Disconnect this process from Ray. With a lost control store that may block, and is abandoned after `SHUTDOWN_S`."""
    import ray

    watch = current_watch()
    if watch is None or not watch.is_lost:
        with contextlib.suppress(ControlStoreLost):
            call_ray(ray.shutdown)
            return
    if not run_with_timeout(SHUTDOWN_S, ray.shutdown):
        forget_ray_at_exit()  # it would block the end of this process in the same way


def is_open_to_all(address: str) -> bool:
    """Whether the cluster at `address` lets in who shows no token."""
    with loopback_address_kept_if_needed(address):
        return not shows_token() or control_store_lets_in_without_token(address)


def check_address_answers(address: str) -> None:
    """Raise `ClusterAddressError` if nothing listens at `host:port`; Ray itself would retry silently for minutes."""
    host, _, port = address.rpartition("://")[2].rpartition(":")
    if not port.isdigit():
        return
    try:
        socket.create_connection((host.strip("[]"), int(port)), timeout=CONNECT_S).close()
    except OSError as error:
        raise ClusterAddressError(
            f"nothing answers at {address!r}: {error}",
            cure="check the address (`ray status --address ...`), or leave it out: raypar then starts a local Ray cluster",
        ) from error


@contextlib.contextmanager
def start_local_ray(workers: int, nodes: int = 1, gpus: bool = False) -> Iterator[RayConnection]:
    """Start a local Ray cluster with so many raylets, in a new folder.

    Ray's processes die with this one (Ray asks the kernel for that); `remove_local_ray_on_exit` removes what is left of them,
    even if this process is killed. They listen on the loopback address only and ask for a token, whatever `RAY_AUTH_MODE` says:
    raypar unpickles what workers find in Ray's store, and other users of this machine reach the loopback address.
    """
    import ray

    refuse_unfit_machine({"limits": read_limits()})
    cpus = cpus_per_node(workers, nodes)
    token = choose_token(os.environ)

    def start(folder: Path) -> None:
        with delay_ctrl_c(), fresh_python_random_state():
            start_head(cpus, None if gpus else 0, OBJECT_STORE_BYTES, folder / RAY_FOLDER)

    with contextlib.ExitStack() as stack:
        stack.enter_context(token_authentication(token))
        with ray_in_new_sessions(), without_idle_ray_processes(), loopback_address_kept():
            with _started():
                folder = start_ray_with_retries(start, stack)
            raylets: tuple[LocalNode, ...] = ()
            if nodes > 1:
                raylets = stack.enter_context(start_local_nodes(nodes, cpus, OBJECT_STORE_BYTES, folder / RAY_FOLDER))
        address = ray.get_runtime_context().gcs_address
        if address.rpartition(":")[0] != LOOPBACK or not shows_token():
            raise ClusterError(
                f"the local Ray cluster answers at {address}, to {'any token' if shows_token() else 'everybody'}: this version "
                "of Ray does not keep to the loopback address and the token that raypar gives it",
                cure="use ray 2.60, or join a running cluster (--address)",
            )
        write_token_file(folder, address, token)
        stack.enter_context(room_for_new_driver(folder))
        yield RayConnection("own", describe_local_ray(nodes * cpus, raylets), address, host=LOOPBACK, nodes=raylets)


def start_ray_with_retries(start: Callable[[Path], None], stack: contextlib.ExitStack) -> Path:
    """Start Ray by `start(folder)` in a new folder, which is returned; Ray ends with `stack`. Raises what Ray raises.

    If Ray is too late, it is removed and started again: on a busy machine the next attempt may be in time.
    """
    import ray

    for left in reversed(range(ATTEMPTS)):
        with contextlib.ExitStack() as attempt:
            folder = make_short_temp_dir()
            attempt.enter_context(remove_local_ray_on_exit(folder))
            attempt.callback(ray.shutdown)
            try:
                start(folder)
            except Exception as error:  # Ray raises a bare one when its processes are not up in time
                if not left or not is_late_start(error):
                    raise
                continue
            stack.push(attempt.pop_all())
            return folder
    raise AssertionError("the last attempt ends or raises")


@contextlib.contextmanager
def _started() -> Iterator[None]:
    """Turn the bare `Exception` that Ray raises when its processes do not start in time into a `ClusterError`."""
    try:
        yield
    except ClusterError:
        raise
    except Exception as error:
        raise ClusterError(
            f"Ray did not start on this machine: {error_first_line(error)}",
            cure="the machine may be busy or short of memory: try again; or join a running cluster (--address)",
        ) from error


def describe_local_ray(cpus: int, nodes: tuple[LocalNode, ...]) -> str:
    """`a local Ray cluster with 3 nodes (pids of the raylets 7 (the head: the run ends with it), 8, 9), 6 logical CPUs`."""
    if not nodes:
        return f"a local Ray cluster with {cpus} logical CPUs"
    pids = ", ".join(f"{node.pid}" + " (the head: the run ends with it)" * node.head for node in nodes)
    return f"a local Ray cluster with {len(nodes)} nodes (pids of the raylets {pids}), {cpus} logical CPUs"


@contextlib.contextmanager
def without_ray_leftovers() -> Iterator[None]:
    """Put back what Ray changes of this process and leaves so after `ray.shutdown`: its SIGTERM handler, which would end the
    process by `SystemExit`, the breakpoint hook and the level of its logger."""
    logger, hook = logging.getLogger("ray"), os.environ.get("PYTHONBREAKPOINT")
    in_main = threading.current_thread() is threading.main_thread()
    handler, level = signal.getsignal(signal.SIGTERM), logger.level
    try:
        yield
    finally:
        if in_main and handler is not None:
            signal.signal(signal.SIGTERM, handler)
        logger.setLevel(level)
        if hook is None:
            os.environ.pop("PYTHONBREAKPOINT", None)
        else:
            os.environ["PYTHONBREAKPOINT"] = hook


@contextlib.contextmanager
def fresh_python_random_state() -> Iterator[None]:
    """Give Ray fresh random numbers in the body, and restore the state of Python's generator afterwards.

    Ray 2.60 draws from that generator the name under which a client listens to the control store. Reading a sample seeds the
    generator, as a user's script may, so two clients may get the same name. Each then takes the other's calls, 1,800 times a
    second, which costs the control store half a processor.
    """
    state = random.getstate()
    random.seed()
    try:
        yield
    finally:
        random.setstate(state)


@contextlib.contextmanager
def delay_ctrl_c() -> Iterator[None]:
    """Delay a Ctrl-C until the body, Ray's start, is over, which would swallow it; likewise other signals that raise
    `StopSignal`. Ray sets SIGTERM handlers of its own there: one would end the process by `SystemExit`, a native one prints
    its stack.
    """
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    before = {number: signal.getsignal(number) for number in STOP_SIGNALS}
    delayed = [
        number
        for number, handler in before.items()
        if isinstance(handler, StopHandler) or (number == signal.SIGINT and callable(handler))
    ]
    asked: list[int] = []

    def note(number: int, frame: FrameType | None) -> None:
        asked.append(number)
        handler = before[signal.Signals(number)]
        if callable(handler) and not is_connecting(frame):
            handler(number, frame)

    for number in delayed:
        signal.signal(number, note)
    try:
        with contextlib.ExitStack() as stack:
            if signal.SIGTERM in delayed:
                stack.enter_context(without_ray_sigterm_handler())
                stack.enter_context(without_ray_failure_handler())
            yield
    finally:
        for number in delayed:
            signal.signal(number, before[number])
    if asked:
        handler = before[signal.Signals(asked[0])]
        if isinstance(handler, StopHandler):
            handler(asked[0])
        raise KeyboardInterrupt


def make_short_temp_dir() -> Path:
    """A new folder, which only this user may enter, for Ray's files; its path leaves room for their sockets.

    Folders that were left there by processes that were killed are removed before. Raises `ClusterError` where the disk is full.
    """
    base = tempfile.gettempdir()
    base = base if len(base) + FOLDER_NAMES <= SOCKET_PATH_ROOM else "/tmp"
    remove_abandoned_local_ray(Path(base), TEMPORARY_FOLDER_PREFIX)
    refuse_unfit_machine({"temporary": read_room(base)})
    return Path(tempfile.mkdtemp(prefix=TEMPORARY_FOLDER_PREFIX, dir=base))


def worker_python_path(working_dir: Path) -> str:
    """PYTHONPATH for workers on this machine, with which they can import what this process can import."""
    places = [str(working_dir), *(p for p in sys.path if p and "site-packages" not in p and Path(p).is_dir())]
    inherited = os.environ.get("PYTHONPATH", "")
    return os.pathsep.join(dict.fromkeys([*places, *inherited.split(os.pathsep)] if inherited else places))


def is_head_on_this_machine(address: str) -> bool:
    """Whether the head of the cluster is on this machine: `auto`, `local`, or one of this machine's addresses."""
    host = address.removeprefix("ray://").rpartition(":")[0] or address
    if host in ("auto", "local", "localhost", "127.0.0.1"):
        return True
    with contextlib.suppress(OSError):
        ours = {info[4][0] for info in socket.getaddrinfo(socket.gethostname(), None)}
        return socket.gethostbyname(host) in ours
    return False
