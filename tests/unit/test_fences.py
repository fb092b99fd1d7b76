"""Private and version-dependent APIs of Ray and PyTorch: in two packages, each behind a fence that warns when it is missing.

A release in which such an API is gone, renamed or answers differently gives one warning, with its number and the feature that
is off, and the run goes on where it can.
"""

import ast
import importlib
import logging
import mmap
import pkgutil
import re
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import ray
from helpers.sources import PACKAGE, nodes_of, source_files
from ray.core.generated import autoscaler_pb2, common_pb2
from ray.exceptions import ActorDiedError, RpcError

from raypar.errors import ClusterError, NodeLost, WorkerLost
from raypar.fences import private_api_fence as fences
from raypar.fences.private_api_fence import FENCES, Fence, fence_warnings, send_warnings_to
from raypar.ray_compat import (
    actor_errors,
    authentication,
    autoscaler,
    job_submission,
    key_value_store,
    local_cluster,
    nodes,
    ray_log_filter,
    settings,
)

ROOMS = ("ray_compat", "torch_compat")
LIBRARIES = ("ray", "torch")


# -- no other file names such an API -------------------------------------------------------------------------------------------

NOT_PUBLIC = re.compile(r"^ray\.(core|experimental|dashboard|autoscaler|util\.state|cluster_utils)\b|(^|\.)_(?!_)")
"""Modules, and attributes of modules, that a library does not call public, or whose home it has changed before."""
OF_EVERY_MODULE = {"_parameters", "_buffers", "_modules"}
"""The three dicts of `nn.Module` that every pickle of a module holds: as old as the class, and read by users' code too."""
STANDARD_LIBRARY = {
    "_exit", "_current_frames", "_getframe", "_ArgumentGroup", "_run_exitfuncs", "_actions", "_lru_cache_wrapper",
    "_SimpleCData", "_Pointer", "_processes",
}  # fmt: skip
"""Attributes of Python's own modules, NumPy's among them: no concern of the two rooms."""
OF_USERS_CODE = {"_bit_generator"}
"""Attributes that objects of NumPy have, which users' code holds."""


def dotted(node: ast.AST) -> str:
    """`a.b.c` of an expression that is nothing else; else empty."""
    if isinstance(node, ast.Attribute):
        return f"{before}.{node.attr}" if (before := dotted(node.value)) else ""
    return node.id if isinstance(node, ast.Name) else ""


def private_names(nodes: Iterable[Any]) -> Iterator[tuple[int, str]]:
    """(line, name) of each private API of the libraries that a file names."""
    for node in nodes:
        names: list[str] = []
        if isinstance(node, ast.Import):
            names = [alias.name for alias in node.names]
        elif isinstance(node, ast.ImportFrom):
            names = [f"{node.module}.{alias.name}" for alias in node.names]
        elif isinstance(node, ast.Attribute):
            names = [dotted(node)]
        elif isinstance(node, ast.Call) and dotted(node.func) in ("getattr", "hasattr", "setattr", "import_module"):
            words = [a.value if isinstance(a, ast.Constant) and isinstance(a.value, str) else dotted(a) for a in node.args[:2]]
            names = [".".join(words), *words]
        elif isinstance(node, ast.Call) and dotted(node.func).partition(".")[0] in LIBRARIES:
            names = [f"{dotted(node.func)}.{keyword.arg}" for keyword in node.keywords if keyword.arg]
        yield from ((node.lineno, n) for n in names if n.partition(".")[0] in LIBRARIES and NOT_PUBLIC.search(n))


def private_attributes(nodes: Iterable[Any]) -> Iterator[tuple[int, str]]:
    """(line, name) of each attribute that a file reads or sets whose name begins with `_`, also by `getattr` and its like."""
    for node in nodes:
        names: list[str] = []
        if isinstance(node, ast.Attribute):
            names = [node.attr]
        elif isinstance(node, ast.Call) and dotted(node.func) in ("getattr", "hasattr", "setattr", "delattr"):
            names = [word.value for word in node.args[1:2] if isinstance(word, ast.Constant)]
        yield from ((node.lineno, name) for name in names if name.startswith("_") and not name.startswith("__"))


def defined_names(nodes: Iterable[Any]) -> Iterator[str]:
    """Names that a file defines: functions, classes, variables, fields and attributes."""
    for node in nodes:
        if isinstance(node, (ast.FunctionDef, ast.ClassDef, ast.AsyncFunctionDef)):
            yield node.name
        elif isinstance(node, ast.Name) and isinstance(node.ctx, ast.Store):
            yield node.id
        elif isinstance(node, ast.Attribute) and isinstance(node.ctx, ast.Store) and dotted(node.value) in ("self", "cls"):
            yield node.attr


def test_no_file_outside_the_rooms_names_a_private_api():
    """Nor an attribute whose name begins with `_` and that raypar does not define itself, such as `tensor._backward_hooks`."""
    known, wrong, attributes = OF_EVERY_MODULE | STANDARD_LIBRARY | OF_USERS_CODE, [], []
    for path in source_files():
        place, nodes = path.relative_to(PACKAGE), nodes_of(path)
        known |= set(defined_names(nodes))
        if place.parts[0] not in ROOMS:
            wrong += [f"{place}:{line}: {name}" for line, name in private_names(nodes)]
            attributes += [(place, line, name) for line, name in private_attributes(nodes)]
    wrong += [f"{place}:{line}: {name}" for place, line, name in attributes if name not in known]
    assert not wrong


def test_what_ray_raises_is_known_by_its_words_in_the_room_only():
    """Where Ray gives no type and no code."""
    wrong = [
        f"{path.relative_to(PACKAGE)}:{number}: {line.strip()}"
        for room in ("actors", "launch", "commands")
        for path in sorted((PACKAGE / room).rglob("*.py"))
        for number, line in enumerate(path.read_text().splitlines(), 1)
        if re.search(r"in (str|error_message)\((ray_)?error\)|\bray\.__version__ *[<>=!]", line)
    ]
    assert not wrong


@pytest.mark.parametrize(
    "source",
    [
        "import ray._private.worker",
        "from ray._private import worker",
        "from ray.util.placement_group import _call_placement_group_ready",
        "ray.core.generated.gcs_pb2",
        "getattr(ray, '_raylet')",
        "importlib.import_module('ray._raylet')",
        "from ray.experimental.internal_kv import _internal_kv_get",
        "ray.init(_temp_dir='x')",
        "torch._foreach_add_(a, b)",
        "from torch.utils._pytree import tree_map",
        "from torch.nn.modules.batchnorm import _NormBase",
        "torch.nn.modules.batchnorm._BatchNorm.forward",
        "torch.ops.aten._ctc_loss.Tensor",
        "getattr(torch._C, '_storage_Use_Count', None)",
    ],
)
def test_the_search_finds(source):
    importlib_too = source.replace("importlib.import_module", "import_module")
    assert list(private_names(ast.walk(ast.parse(importlib_too))))


# -- every fence ---------------------------------------------------------------------------------------------------------------

for module in pkgutil.iter_modules([str(PACKAGE / "ray_compat")]):
    importlib.import_module(f"raypar.ray_compat.{module.name}")
OF_RAY = [fence for fence in FENCES if fence.api.startswith("ray.")]


@pytest.fixture(autouse=True)
def told(monkeypatch) -> Iterator[list[str]]:
    """The lines that were said; nothing is known of what an earlier test has found."""
    lines: list[str] = []
    monkeypatch.setattr(fences, "_warnings", lines)
    monkeypatch.setattr(fences, "_listener", lambda line: None)
    for one in OF_RAY:
        one.reset()
    yield lines
    for one in OF_RAY:
        one.reset()


@pytest.mark.parametrize("one", OF_RAY, ids=lambda one: one.api)
def test_the_installed_release_has_the_api_and_it_is_said_why_it_is_used(one: Fence, told):
    assert one.find() is not None and not told
    assert all((one.reason, one.versions, one.feature, one.without))


def raises(error: type[Exception], call: Callable) -> Callable:
    """A call that has to raise, and returns the message's first line."""

    def called():
        with pytest.raises(error) as found:
            call()
        return str(found.value).splitlines()[0]

    return called


def entered(context: Callable) -> Callable:
    """A call that enters and leaves a context, and returns whether it got there."""

    def called():
        with context():
            return "went on"

    return called


GCS = "ray._raylet.GcsClient"
JOINED = {
    "ray.experimental.internal_kv._internal_kv_get": lambda key: None,
    "ray.get_runtime_context": lambda: SimpleNamespace(gcs_address="here:1"),
}
"""A process that has joined a cluster whose autoscaler is not of version 1."""
REPLY = "ray.core.generated.autoscaler_pb2.GetClusterStatusReply"
INFO = {"placement_group_id": "00" * 18, "name": "raypar-a-0"}
NODE = nodes.ClusterNode("ab", "127.0.0.1", 2, head=False)


class Client:
    """A control store that answers nothing to the point."""

    def __init__(self, **given):
        pass

    def get_all_node_info(self, **given):
        return "as text"

    def get_cluster_status(self, **given):
        return "as text"

    def drain_node(self, *given):
        return True


def a_raylet_with_other_options(tmp_path: Path) -> Path:
    (tmp_path / "7").mkdir(exist_ok=True)
    (tmp_path / "7/cmdline").write_text("/x/raylet\0--node-identity=ab\0--gcs-address=here:1")
    return tmp_path


def printed(data) -> list:
    """What reaches the terminal of what Ray prints."""
    from ray._private import worker

    seen: list = []
    before, worker.print_to_stdstream = worker.print_to_stdstream, lambda data, ignore_prefix: seen.append(data)
    try:
        with ray_log_filter.filtering_ray_lines():
            worker.print_to_stdstream(data, ignore_prefix=False)
    finally:
        worker.print_to_stdstream = before
    return seen


def unknown_arguments(**given):
    """What `ray.init` does with arguments that it does not know."""
    raise RuntimeError(f"Unknown keyword argument(s): {', '.join(name for name in given if name.startswith('_'))}")


GONE = object()
"""In the place of a value: the attribute is removed."""
Case = tuple[Fence, dict[str, object], Callable, object]
OLD = ClusterError
CASES: dict[str, Case] = {
    # what: (fence, what Ray has instead, what raypar does, what comes of it)
    "limits gone": (
        autoscaler.CAPACITY,
        {"ray._private.state.state": object()},
        lambda: autoscaler.autoscaler_capacity("CPU"),
        None,
    ),
    "limits otherwise": (
        autoscaler.CAPACITY,
        {"ray._private.state.state": SimpleNamespace(get_max_resources_from_cluster_config=lambda: {"CPU": "many"})},
        lambda: autoscaler.autoscaler_capacity("CPU"),
        None,
    ),
    "status gone": (autoscaler.STATUS, {**JOINED, GCS: object}, autoscaler.has_autoscaler, False),
    "status renamed": (
        autoscaler.STATUS,
        {"ray._private.ray_constants.DEBUG_AUTOSCALING_STATUS": GONE},
        autoscaler.has_autoscaler,
        False,
    ),
    "a field of the status renamed": (
        autoscaler.STATUS,
        {REPLY: lambda: SimpleNamespace(cluster_resource_state=autoscaler_pb2.ClusterResourceState(), state=None)},
        autoscaler.read_autoscaler_answer,
        autoscaler.AutoscalerAnswer(),
    ),
    "status otherwise": (
        autoscaler.STATUS,
        {
            **JOINED,
            GCS: Client,
        },
        autoscaler.has_autoscaler,
        False,
    ),
    "status as text": (
        autoscaler.STATUS,
        {"ray.experimental.internal_kv._internal_kv_get": lambda key: "{}"},
        autoscaler.has_autoscaler,
        False,
    ),
    "nodes gone": (nodes.NODE_TABLE, {GCS: object}, raises(OLD, lambda: nodes.list_live_nodes("here:1")), "says"),
    "nodes otherwise": (nodes.NODE_TABLE, {GCS: Client}, raises(OLD, lambda: nodes.list_live_nodes("here:1")), "says"),
    "draining nodes gone": (nodes.DRAINING_NODES, {"ray._private.state.state": object()}, nodes.list_draining_nodes, {}),
    "draining nodes otherwise": (
        nodes.DRAINING_NODES,
        {"ray._private.state.state": SimpleNamespace(get_draining_nodes=lambda: ["ab"])},
        nodes.list_draining_nodes,
        {},
    ),
    "draining nodes of a cluster gone": (
        nodes.DRAINING_NODES,
        {"ray._raylet.GlobalStateAccessor": object},
        raises(OLD, lambda: nodes.list_draining_nodes_of_cluster("here:1")),
        "says",
    ),
    "draining gone": (nodes.DRAINING, {GCS: object}, raises(OLD, lambda: nodes.drain_node("here:1", NODE, 9, "")), "says"),
    "draining otherwise": (nodes.DRAINING, {GCS: Client}, raises(OLD, lambda: nodes.drain_node("here:1", NODE, 9, "")), "says"),
    "memory gone": (
        actor_errors.MEMORY_IN_USE,
        {"ray._private.utils.get_used_memory": GONE},
        actor_errors.memory_shortage_here,
        "",
    ),
    "memory otherwise": (
        actor_errors.MEMORY_IN_USE,
        {"ray._common.utils.get_system_memory": lambda: None},
        actor_errors.memory_shortage_here,
        "",
    ),
    "tokens gone": (
        authentication.TOKENS,
        {"ray._raylet.AuthenticationTokenLoader": GONE},
        raises(OLD, authentication.read_variables_again),
        "says",
    ),
    "tokens gone, a cluster to join": (
        authentication.TOKENS,
        {"ray._raylet.AuthenticationTokenLoader": GONE},
        lambda: authentication.control_store_lets_in_without_token("127.0.0.1:1"),
        False,
    ),
    "the mode gone": (authentication.MODE, {"ray._raylet.get_authentication_mode": GONE}, authentication.shows_token, False),
    "addresses gone": (
        authentication.OPEN_CLUSTER,
        {"ray._private.services.canonicalize_bootstrap_address": GONE},
        lambda: authentication.control_store_lets_in_without_token("127.0.0.1:1"),
        False,
    ),
    "the store gone": (
        key_value_store.STORE,
        {"ray.experimental.internal_kv._internal_kv_list": GONE},
        raises(OLD, lambda: key_value_store.kv_get("key")),
        "says",
    ),
    "arguments of ray.init gone": (
        local_cluster.HEAD,
        {"ray.init": unknown_arguments},
        raises(OLD, lambda: local_cluster.start_head(1, 0, 1, Path())),
        "says",
    ),
    "raylets gone": (
        local_cluster.RAYLETS,
        {"ray._private.parameter.RayParams": GONE},
        raises(OLD, local_cluster.head_node),
        "says",
    ),
    "raylets otherwise": (
        local_cluster.RAYLETS,
        {"ray._private.worker._global_node": SimpleNamespace(node_id=b"ab", gcs_address="here:1")},
        raises(OLD, local_cluster.head_node),
        "says",
    ),
    "a raylet's settings renamed": (
        local_cluster.RAYLETS,
        {"ray._private.parameter.RayParams": lambda *, address: None},
        raises(OLD, lambda: local_cluster.start_raylet("here:1", 1, 1, Path())),
        "says",
    ),
    "a raylet's processes otherwise": (
        local_cluster.RAYLETS,
        {},
        raises(OLD, lambda: local_cluster.start_raylet_reaper(SimpleNamespace(all_processes={}))),
        "says",
    ),
    "sessions gone": (
        local_cluster.OWN_SESSIONS,
        {"ray._private.services.ConsolePopen": GONE},
        entered(local_cluster.ray_in_new_sessions),
        "went on",
    ),
    "the loopback address gone": (
        local_cluster.LOOPBACK_ADDRESS,
        {"ray._private.services.resolve_ip_for_localhost": GONE},
        entered(local_cluster.loopback_address_kept),
        "went on",
    ),
    "the dashboard's process renamed": (
        local_cluster.NO_API_SERVER,
        {"ray._private.services.start_api_server": GONE},
        entered(local_cluster.without_idle_ray_processes),
        "went on",
    ),
    "the monitor's process is a table": (
        local_cluster.NO_MONITOR,
        {"ray._private.node.Node.start_monitor": {}},
        entered(local_cluster.without_idle_ray_processes),
        "went on",
    ),
    "the handler's setter renamed": (
        local_cluster.NO_SIGTERM_HANDLER,
        {"ray._private.utils.set_sigterm_handler": GONE},
        entered(local_cluster.without_ray_sigterm_handler),
        "went on",
    ),
    "the native handler's switch gone": (
        local_cluster.NO_FAILURE_HANDLER,
        {"ray._private.ray_constants.RAY_DISABLE_FAILURE_SIGNAL_HANDLER": GONE},
        entered(local_cluster.without_ray_failure_handler),
        "went on",
    ),
    "the native handler's switch is a text": (
        local_cluster.NO_FAILURE_HANDLER,
        {"ray._private.ray_constants.RAY_DISABLE_FAILURE_SIGNAL_HANDLER": "0"},
        entered(local_cluster.without_ray_failure_handler),
        "went on",
    ),
    "the function that connects renamed": (
        local_cluster.CONNECTING,
        {"ray._private.worker.connect": GONE},
        lambda: local_cluster.is_connecting(None),
        False,
    ),
    "the farewell gone": (local_cluster.EXIT, {"ray._private.worker.shutdown": GONE}, local_cluster.forget_ray_at_exit, None),
    "printing gone": (
        ray_log_filter.PRINTING,
        {"ray._private.worker.print_to_stdstream": GONE},
        entered(ray_log_filter.filtering_ray_lines),
        "went on",
    ),
    "printing otherwise": (ray_log_filter.PRINTING, {}, lambda: printed(("raylet", "a line")), [("raylet", "a line")]),
    "the autoscaler's lines renamed": (
        ray_log_filter.EVENTS,
        {"ray._private.ray_constants.AUTOSCALER_EVENTS": GONE},
        entered(ray_log_filter.without_autoscaler_lines),
        "went on",
    ),
    "ids of groups gone": (
        nodes.IDS,
        {"ray._raylet.PlacementGroupID": GONE},
        raises(OLD, lambda: nodes.placement_group_of(INFO)),
        "says",
    ),
    "ids of groups are longer": (
        nodes.IDS,
        {},
        raises(OLD, lambda: nodes.placement_group_of({**INFO, "placement_group_id": "00"})),
        "says",
    ),
    "codes of deaths gone": (
        actor_errors.DEATH_REASONS,
        {"ray.core.generated.common_pb2.ActorDiedErrorContext": lambda **given: SimpleNamespace(**given)},
        actor_errors.keep_death_reasons,
        None,
    ),
    "ignore files gone": (
        job_submission.RULES,
        {"ray._private.runtime_env.packaging.get_excludes_from_ignore_files": GONE},
        lambda: job_submission.ignore_rules(Path(), with_git=True),
        None,
    ),
    "ignore files otherwise": (
        job_submission.RULES,
        {"ray._private.runtime_env.packaging.get_excludes_from_ignore_files": lambda place, include_gitignore: None},
        lambda: job_submission.ignore_rules(Path(), with_git=True),
        None,
    ),
    "a raylet's options renamed": (settings.OPTIONS, {}, lambda: settings.parse_raylet_command(7), None),
}


def test_there_is_a_case_for_every_fence():
    assert {case[0] for case in CASES.values()} == set(OF_RAY)


@pytest.mark.parametrize("what", CASES)
def test_an_api_that_is_gone_or_answers_otherwise_is_one_line_and_the_run_goes_on_where_it_can(
    what, told, monkeypatch, tmp_path
):
    fence, instead, use, expected = CASES[what]
    monkeypatch.delenv("RAY_SCHEDULER_EVENTS", raising=False)
    monkeypatch.setattr(settings, "PROC", a_raylet_with_other_options(tmp_path))
    monkeypatch.setattr(ray, "__version__", "2.71.3")
    for name, value in instead.items():
        if value is GONE:
            monkeypatch.delattr(name)
        else:
            monkeypatch.setattr(name, value)
    got = [use(), use()]
    lines = got[:1] if expected == "says" else told
    assert got == ([got[0]] * 2 if expected == "says" else [expected] * 2)
    assert len(lines) == 1, "it is said once"
    assert lines[0].startswith(f"Ray 2.71.3: {fence.api} is missing or has changed (")
    assert lines[0].partition("\n")[0].endswith(f"), so {fence.feature} is off: {fence.without}")
    assert expected == "says" or lines[0].endswith(
        "\n  cure: use Ray 2.60, with which raypar is tested, or report this as a bug"
    )


def test_without_a_listener_the_line_is_a_warning_in_the_log_and_a_worker_reports_it(monkeypatch, caplog, told):
    monkeypatch.setattr(fences, "_listener", fences._log_warning)
    monkeypatch.delattr("ray._private.services.ConsolePopen")
    with caplog.at_level(logging.WARNING, "raypar"), local_cluster.ray_in_new_sessions():
        pass
    assert [record.getMessage() for record in caplog.records] == [f"warning: {fence_warnings()[0]}"]
    heard: list[str] = []
    send_warnings_to(heard.append)
    monkeypatch.delattr("ray._private.worker.shutdown")
    local_cluster.forget_ray_at_exit()
    assert heard == [fence_warnings()[1]] and len(caplog.records) == 1


def test_a_head_that_does_not_answer_is_no_missing_api(monkeypatch, told):
    """Its silence is reported by others; the autoscaler is asked again the next time."""

    def get(key):
        raise RpcError("no answer")

    monkeypatch.setattr("ray.experimental.internal_kv._internal_kv_get", get)
    assert autoscaler.has_autoscaler() is False and not told
    monkeypatch.setattr(
        "ray.experimental.internal_kv._internal_kv_get", lambda key: b'{"autoscaler_report": {"idle_nodes": {"a": 1}}}'
    )
    assert autoscaler.has_autoscaler() is True and not told


def test_the_doctor_lists_what_the_installed_release_does_not_have(monkeypatch, told):
    assert fences.find_missing_apis("ray_compat") == [] and not told
    monkeypatch.delattr("ray._private.services.ConsolePopen")
    for one in OF_RAY:
        one.reset()
    (found,) = fences.find_missing_apis("ray_compat")
    assert found.what.startswith(f"Ray {ray.__version__}: ray._private.services.ConsolePopen is missing or has changed (")
    assert "use Ray 2.60" in found.cure and not told, "the doctor says it itself"


# -- what is known by a type or a code -----------------------------------------------------------------------------------------


def test_a_death_with_the_node_is_known_by_its_code_and_not_by_words():
    actor_errors.keep_death_reasons()
    actor_errors.keep_death_reasons()
    reasons = common_pb2.ActorDiedErrorContext

    def lost(reason: int, words: str) -> WorkerLost:
        error = ActorDiedError(reasons(reason=reason, error_message=words, actor_id=bytes(16)))
        return actor_errors.worker_lost_error("worker 3", error, "c")

    with_node = lost(reasons.NODE_DIED, "in other words")
    assert type(with_node) is NodeLost and (with_node.what, with_node.cure) == ("worker 3 was lost: its node died", "c")
    alone = lost(reasons.WORKER_DIED, "The actor died because its node has died.")
    assert type(alone) is WorkerLost and alone.what.startswith("worker 3 was lost: The actor died unexpectedly")
    assert type(actor_errors.worker_lost_error("worker 3", ActorDiedError())) is WorkerLost


def test_ray_knows_the_settings_that_raypar_gives_it():
    """Ray ignores a variable that it does not know. Its servers' settings are in their programs, the others in its modules."""
    names = {
        *settings.PATIENT,
        *settings.NOT_RECORDED,
        *settings.NICENESS,
        *settings.QUIET,
        settings.RECONNECT_VARIABLE,
        settings.BLOCKING_GET_VARIABLE,
        settings.SUBMITTED_VARIABLE,
        actor_errors.THRESHOLD_VARIABLE,
        ray_log_filter.EVENTS_VARIABLE,
        authentication.MODE_VARIABLE,
    }
    root = Path(ray.__file__).parent
    programs = [root / "_raylet.so", root / "core/src/ray/gcs/gcs_server", root / "core/src/ray/raylet/raylet"]
    unknown = set(names)
    for path in programs:
        with open(path, "rb") as file, mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ) as content:
            unknown -= {name for name in unknown if content.find(name.removeprefix("RAY_").encode()) >= 0}
    for path in (
        p
        for folder in ("_private", "_common", "_common/usage", "dashboard/modules/job", "_private/accelerators")
        for p in (root / folder).glob("*.py")
    ):
        unknown -= {name for name in unknown if name in path.read_text()}
    assert not unknown
