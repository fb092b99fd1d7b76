"""Starts a local Ray cluster: on the loopback address, outside this process's group, with one or several raylets."""

from __future__ import annotations

import atexit
import contextlib
import functools
import logging
import socket
import threading
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from types import FrameType, FunctionType, ModuleType
from typing import TYPE_CHECKING, Any

from raypar.errors import error_first_line
from raypar.fences.private_api_fence import Fence
from raypar.ray_compat import TESTED

if TYPE_CHECKING:
    from ray._private.node import Node

LOOPBACK = "127.0.0.1"
"""The address on which all processes of a local Ray cluster listen."""
CONNECT_S = 10.0
"""How long the head of a cluster may take to accept a connection."""


PRIVATE_ARGUMENTS = ("_temp_dir", "_node_ip_address")
"""Arguments of `ray.init` that are not public."""


def _look_for_init() -> Any:
    import ray

    assert callable(ray.init)
    return ray.init


HEAD = Fence(
    api="ray.init._temp_dir",
    reason="`ray.init` has no public arguments for the folder of its files and the address that it listens on",
    versions=TESTED,
    feature="starting a local Ray cluster that nobody else can enter",
    without="none is started; join a running cluster (--address)",
    probe=_look_for_init,
)


def start_head(cpus: int, gpus: int | None, object_store_bytes: int, folder: Path) -> None:
    """Start a local cluster's head with its files in `folder`, and join it. `gpus`: None for all of this machine.

    Raises `ClusterError` if Ray no longer has the `PRIVATE_ARGUMENTS`; `start_local_ray` detects a Ray that ignores them.
    """
    import ray

    try:
        ray.init(
            address="local",
            num_cpus=cpus,
            num_gpus=gpus,
            include_dashboard=False,
            object_store_memory=object_store_bytes,
            logging_level=logging.ERROR,
            _temp_dir=str(folder),
            _node_ip_address=LOOPBACK,
        )
    except RuntimeError as error:  # Ray raises it, among others, for unknown arguments, which it names
        if any(name in str(error) for name in PRIVATE_ARGUMENTS):
            with HEAD.requiring():
                raise TypeError(error_first_line(error)) from error
        raise


def is_late_start(error: Exception) -> bool:
    """Whether Ray's start timed out, which is a bare `Exception`. If a release words it differently, raypar does not retry."""
    return "timed out" in str(error)


# -- further raylets -----------------------------------------------------------------------------------------------------------


def _look_for_raylets() -> ModuleType:
    from ray._private import worker
    from ray._private.node import Node
    from ray._private.parameter import RayParams

    assert callable(Node) and callable(RayParams) and hasattr(worker, "_global_node")
    return worker


RAYLETS = Fence(
    api="ray._private.node.Node",
    reason="no public API starts a further node in this process; `ray.cluster_utils.Cluster` uses this one",
    versions=TESTED,
    feature="starting several nodes of a local cluster",
    without="a local cluster has one node only; leave --local-nodes out",
    probe=_look_for_raylets,
)


def head_node() -> Node:
    """Ray's private `Node` of the head that `ray.init` has started in this process. Raises `ClusterError`."""
    with RAYLETS.requiring() as worker:
        head: Node = worker._global_node
        if not (isinstance(head.node_id, str) and isinstance(head.gcs_address, str)):
            raise TypeError("a node without its id and its cluster's address")
        return head


def start_raylet(address: str, cpus: int, store_bytes: int, folder: Path, labels: Mapping[str, str] | None = None) -> Node:
    """Start a raylet with these node labels that joins the cluster at `address`; returns Ray's private `Node`."""
    with RAYLETS.requiring():
        from ray._private.node import Node
        from ray._private.parameter import RayParams

        params = RayParams(
            gcs_address=address,
            node_ip_address=address.rpartition(":")[0].strip("[]"),  # on this machine: that of the cluster's head
            num_cpus=cpus,
            num_gpus=0,
            object_store_memory=store_bytes,
            temp_dir=str(folder),
            labels=dict(labels or {}),
            min_worker_port=0,
            max_worker_port=0,
            node_manager_port=0,
            include_log_monitor=False,  # type: ignore[arg-type]  # the head's reads the logs of all nodes of this machine
        )
        return Node(params, head=False, shutdown_at_exit=False, spawn_reaper=True)


def start_raylet_reaper(node: Node) -> int:
    """Start a thread that reaps a node's raylet, and return its pid: workers do not notice that a zombie is dead."""
    with RAYLETS.requiring():
        process = node.all_processes["raylet"][0].process
        threading.Thread(target=process.wait, name=f"raypar-reaper-{process.pid}", daemon=True).start()
        return int(process.pid)


def end_raylet(node: Node) -> None:
    """End a node's raylet and its children. Errors are ignored: the raylet ends with this process anyway."""
    with contextlib.suppress(Exception):
        node.kill_all_processes(check_alive=False, allow_graceful=True, wait=True)


# -- names of Ray that are replaced while it starts ----------------------------------------------------------------------------


def _replaceable(module: str, name: str) -> Callable[[], ModuleType | type]:
    """A probe: the module (or `module:Class`) whose attribute `name` is callable."""

    def look() -> ModuleType | type:
        import importlib

        path, _, inside = module.partition(":")
        owner = importlib.import_module(path)
        owner = getattr(owner, inside) if inside else owner
        if not callable(getattr(owner, name)):
            raise TypeError(f"{name} cannot be called")
        return owner

    return look


OWN_SESSIONS = Fence(
    api="ray._private.services.ConsolePopen",
    reason="Ray has no setting to start its processes outside this process's group",
    versions=TESTED,
    feature="keeping signals to this process's group from Ray's processes",
    without="a SIGTERM from Slurm, systemd or `timeout` ends Ray before the run has saved",
    probe=_replaceable("ray._private.services", "ConsolePopen"),
)
LOOPBACK_ADDRESS = Fence(
    api="ray._private.services.resolve_ip_for_localhost",
    reason="Ray replaces 127.0.0.1 as a node's address by one that other machines can reach",
    versions=TESTED,
    feature="keeping Ray to the loopback address",
    without="no local Ray cluster is started, as other machines could reach it, and one that listens on the loopback address "
    "only cannot be joined",
    probe=_replaceable("ray._private.services", "resolve_ip_for_localhost"),
)
NO_API_SERVER = Fence(
    api="ray._private.services.start_api_server",
    reason="Ray starts the dashboard's process even if there is no dashboard",
    versions=TESTED,
    feature="leaving out the dashboard's process of a local cluster",
    without="a local cluster starts a second later and uses 80 MiB more",
    probe=_replaceable("ray._private.services", "start_api_server"),
)
NO_MONITOR = Fence(
    api="ray._private.node.Node.start_monitor",
    reason="Ray starts the autoscaler's monitor even if it can add no nodes",
    versions=TESTED,
    feature="leaving out the autoscaler's process of a local cluster",
    without="a local cluster uses 80 MiB more",
    probe=_replaceable("ray._private.node:Node", "start_monitor"),
)

NO_SIGTERM_HANDLER = Fence(
    api="ray._private.utils.set_sigterm_handler",
    reason="Ray's start replaces this process's SIGTERM handler by one that raises SystemExit",
    versions=TESTED,
    feature="keeping this process's own SIGTERM handler while Ray starts",
    without="a SIGTERM during that time ends this process without a message",
    probe=_replaceable("ray._private.utils", "set_sigterm_handler"),
)


def _look_for_failure_handler() -> ModuleType:
    from ray._private import ray_constants

    if not isinstance(ray_constants.RAY_DISABLE_FAILURE_SIGNAL_HANDLER, bool):
        raise TypeError("RAY_DISABLE_FAILURE_SIGNAL_HANDLER is not true or false")
    return ray_constants


NO_FAILURE_HANDLER = Fence(
    api="ray._private.ray_constants.RAY_DISABLE_FAILURE_SIGNAL_HANDLER",
    reason="the environment variable of that name would also take the stack of a crash from the workers, which inherit it",
    versions=TESTED,
    feature="keeping Ray's native signal handler out of this process",
    without="a SIGTERM while Ray starts prints a native stack before raypar's line",
    probe=_look_for_failure_handler,
)


@contextlib.contextmanager
def _replaced(fence: Fence[Any], name: str, instead: Callable[[Any], Any]) -> Iterator[None]:
    """Replace the attribute `name` of the fence's module or class by `instead(its value)` for the length of a block."""
    owner = fence.find()
    before = getattr(owner, name, None)
    if before is None:
        yield
        return
    setattr(owner, name, instead(before))
    try:
        yield
    finally:
        setattr(owner, name, before)


@contextlib.contextmanager
def ray_in_new_sessions() -> Iterator[None]:
    """Have Ray start its processes outside this process's group.

    Slurm, systemd and `timeout` send SIGTERM to the whole group. That would end Ray's control store at once, while this process
    still has to finish the step and save.
    """
    with _replaced(OWN_SESSIONS, "ConsolePopen", lambda popen: functools.partial(popen, start_new_session=True)):
        yield


@contextlib.contextmanager
def loopback_address_kept() -> Iterator[None]:
    """Have Ray use 127.0.0.1 as a node's address; it would replace it by one that other machines can reach."""
    with _replaced(LOOPBACK_ADDRESS, "resolve_ip_for_localhost", lambda resolve: lambda host: host):
        yield


@contextlib.contextmanager
def loopback_address_kept_if_needed(address: str) -> Iterator[None]:
    """`loopback_address_kept` if the cluster at `address` listens on the loopback address only, as raypar's local ones do."""
    import ray

    host, _, port = address.rpartition(":")
    if host not in ("localhost", LOOPBACK) or not port.isdigit():
        yield
        return
    try:
        socket.create_connection((ray.util.get_node_ip_address(), int(port)), timeout=CONNECT_S).close()
    except OSError:
        with loopback_address_kept():
            yield
        return
    yield


@contextlib.contextmanager
def without_idle_ray_processes() -> Iterator[None]:
    """Keep Ray from starting two processes that a local Ray cluster does not need, and from waiting for the first of them.

    Ray starts the dashboard's process even without a dashboard, for usage statistics, which are off (`settings.QUIET`). The
    autoscaler's monitor has no nodes to add (but also writes what `ray status` prints). Each costs a CPU second and 80 MiB.
    """
    with (
        _replaced(NO_API_SERVER, "start_api_server", lambda start: lambda *args, **rest: ("", None)),
        _replaced(NO_MONITOR, "start_monitor", lambda start: lambda self: None),
    ):
        yield


@contextlib.contextmanager
def without_ray_sigterm_handler() -> Iterator[None]:
    """Keep Ray from setting a SIGTERM handler of its own, which would raise `SystemExit`."""
    with _replaced(NO_SIGTERM_HANDLER, "set_sigterm_handler", lambda set_handler: lambda handler: None):
        yield


@contextlib.contextmanager
def without_ray_failure_handler() -> Iterator[None]:
    """Keep Ray from setting native signal handlers in this process, that of SIGTERM too, when it connects.

    They print a native stack. Python's own handler of crashes, which Ray turns on, still prints the Python frames. Ray's other
    processes and the workers keep theirs.
    """
    with _replaced(NO_FAILURE_HANDLER, "RAY_DISABLE_FAILURE_SIGNAL_HANDLER", lambda value: True):
        yield


def _look_for_connect() -> Callable[..., None]:
    from ray._private import worker

    if not isinstance(worker.connect, FunctionType):
        raise TypeError("connect is no function of Python")
    return worker.connect


CONNECTING = Fence(
    api="ray._private.worker.connect",
    reason="Ray has no public way to tell whether this process is halfway connected",
    versions=TESTED,
    feature="waiting with a Ctrl-C or SIGTERM until this process is connected to Ray",
    without="a signal in that moment may crash this process after its last line",
    probe=_look_for_connect,
)


def is_connecting(frame: FrameType | None) -> bool:
    """Whether the code of `frame` is called by Ray's function that connects this process.

    An exception there leaves Ray half connected: its native threads go on, and the process crashes when it ends.
    """
    connect = CONNECTING.find()
    if connect is None:
        return False
    while frame is not None:
        if frame.f_code is connect.__code__:
            return True
        frame = frame.f_back
    return False


def _look_for_exit() -> Callable[..., None]:
    from ray._private import worker

    assert callable(worker.shutdown)
    return worker.shutdown


EXIT = Fence(
    api="ray._private.worker.shutdown",
    reason="Ray registers this function to be called when Python exits",
    versions=TESTED,
    feature="ending this process without Ray's shutdown",
    without="if the control store is lost, this process may take minutes to end; kill it",
    probe=_look_for_exit,
)


def forget_ray_at_exit() -> None:
    """Keep Ray from disconnecting when this process ends: with a lost control store that blocks."""
    shutdown = EXIT.find()
    if shutdown is not None:
        atexit.unregister(shutdown)
