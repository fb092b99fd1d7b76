"""raypar's errors for lost workers, made from Ray's: whether its node has died, whether Ray's memory monitor has killed it."""

from __future__ import annotations

import os
import re
from collections.abc import Mapping
from types import ModuleType
from typing import Any

from ray.exceptions import ActorDiedError

from raypar.errors import NodeLost, OutOfMemory, WorkerLost, error_first_line
from raypar.fences.private_api_fence import Fence
from raypar.ray_compat import TESTED

REASON = "raypar_death_reason"
"""Attribute in which `keep_death_reasons` stores the reason code of an `ActorDiedError`."""


def _look_for_reasons() -> Any:
    """The reason code for a node's death. Also checks that Ray's error is made from a context that has a reason code."""
    from ray.core.generated.common_pb2 import ActorDiedErrorContext

    code = ActorDiedErrorContext.Reason.Value("NODE_DIED")
    ActorDiedError(ActorDiedErrorContext(reason=code, actor_id=bytes(16)))
    return code


DEATH_REASONS = Fence(
    api="ray.core.generated.common_pb2.ActorDiedErrorContext.reason",
    reason="Ray makes its error from this code but does not keep the code in the error",
    versions=TESTED,
    feature="telling a node's death from that of a single process",
    without="a worker lost with its node counts as one that the step may have killed, and the node is reported only once Ray "
    "lists it as dead",
    probe=_look_for_reasons,
)


def keep_death_reasons() -> None:
    """Have every `ActorDiedError` that Ray makes in this process from now on keep its reason code. Idempotent."""
    made = ActorDiedError.__init__
    if DEATH_REASONS.find() is None or getattr(made, REASON, False):
        return

    def make_and_keep(self: ActorDiedError, cause: Any = None) -> None:
        made(self, cause)
        setattr(self, REASON, getattr(cause, "reason", None))

    setattr(make_and_keep, REASON, True)
    ActorDiedError.__init__ = make_and_keep  # type: ignore[method-assign]


def is_node_death(error: Exception) -> bool:
    """Whether the error says that an actor's node has died. Only for errors made after `keep_death_reasons`."""
    reason = getattr(error, REASON, None)
    return reason is not None and reason == DEATH_REASONS.find()


def worker_lost_error(who: str, error: Exception, cure: str = "") -> WorkerLost:
    """raypar's error for a worker whose call ended with Ray's `RayActorError`; `NodeLost` if its node has died."""
    if is_node_death(error):
        return NodeLost(f"{who} was lost: its node died", cure=cure)
    return WorkerLost(f"{who} was lost: {error_first_line(error)}", cure=cure)


USED = re.compile(r"was (?P<used>[\d.]+) ?GB used / (?P<all>[\d.]+) ?GB limit")
"""The part of Ray's message, which has some hundred lines, that says how much of the node's memory was in use."""
THRESHOLD = re.compile(r"exceeded threshold of \d+B \((?P<percent>[\d.]+)%")
"""The part of the same message that says above which share of the node's memory Ray kills. Ray gives both numbers only there:
if a release words them differently, raypar's error lacks them."""
THRESHOLD_VARIABLE = "RAY_memory_usage_threshold"
RAY_THRESHOLD = 0.95
"""The default share of a node's memory above which Ray's monitor kills."""
KILL_CURE = (
    "use fewer workers on a node, nodes with more memory, or smaller microbatches, or end other programs that use that node's "
    "memory; RAY_memory_usage_threshold, set before Ray starts, is the share of memory above which Ray kills"
)


def memory_monitor_kill_error(who: str, error: Exception) -> OutOfMemory:
    """The error for a process that Ray's memory monitor has killed because its node was nearly out of memory.

    `who`: the process in words. `error`: Ray's `OutOfMemoryError`.
    """
    text, numbers = str(error), ""
    if used := USED.search(text):
        numbers = f": {used['used']} of {used['all']} GB were in use"
        if threshold := THRESHOLD.search(text):
            numbers += f", and Ray kills from {float(threshold['percent']):g} % on"
    return OutOfMemory(f"{who} was killed by Ray because its node ran out of memory{numbers}", cure=KILL_CURE)


def _look_for_use() -> tuple[ModuleType, ModuleType]:
    from ray._common import utils as common_utils
    from ray._private import utils

    assert callable(common_utils.get_system_memory) and callable(utils.get_used_memory)
    return common_utils, utils


MEMORY_IN_USE = Fence(
    api="ray._private.utils.get_used_memory",
    reason="Ray does not say why an actor that it restarts has died; its memory monitor compares these two numbers",
    versions=TESTED,
    feature="seeing whether Ray's memory monitor kills on this node",
    without="the error about a driver that Ray keeps killing for lack of memory says only that the driver does not answer",
    probe=_look_for_use,
)


def memory_shortage_here() -> str:
    """Text such as `23.1 of 23.5 GiB are in use, and Ray kills from 95 % on` if this node's use is above that; else empty.

    Ray itself does not say why an actor that it restarts has died.
    """

    def describe(modules: tuple[ModuleType, ModuleType]) -> str:
        common_utils, utils = modules
        used, all_bytes = float(utils.get_used_memory()), float(common_utils.get_system_memory())
        threshold = memory_threshold(os.environ)
        if used > threshold * all_bytes:
            return f"{used / 2**30:.1f} of {all_bytes / 2**30:.1f} GiB are in use, and Ray kills from {100 * threshold:g} % on"
        return ""

    return MEMORY_IN_USE.use(describe, "")


def memory_threshold(environment: Mapping[str, str]) -> float:
    """The share of a node's memory, from 0 to 1, above which Ray kills; Ray's default if the variable is not a number."""
    try:
        return float(environment.get(THRESHOLD_VARIABLE, RAY_THRESHOLD))
    except ValueError:
        return RAY_THRESHOLD
