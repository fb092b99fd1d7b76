"""Kills by Ray's memory monitor: the error for a killed process, and whether this node is short of memory."""

from __future__ import annotations

import os
import re
from collections.abc import Mapping
from typing import Any

from raypar.errors import OutOfMemory
from raypar.fences.fence import Fence
from raypar.ray_compat import TESTED

USED = re.compile(r"was (?P<used>[\d.]+) ?GB used / (?P<all>[\d.]+) ?GB limit")
"""How much of the node's memory was in use, in Ray's message of some hundred lines."""
THRESHOLD = re.compile(r"exceeded threshold of \d+B \((?P<percent>[\d.]+)%")
"""The share of that memory above which Ray kills, in the same message. Ray gives neither number otherwise: in other words the
error says none, and is one all the same, as it is known by its type."""
THRESHOLD_VARIABLE = "RAY_memory_usage_threshold"
RAY_THRESHOLD = 0.95
"""The default share of a node's memory above which Ray's monitor kills."""
KILL_CURE = (
    "use fewer workers on a node or nodes with more memory, smaller microbatches, or end what else uses that node's "
    "memory; RAY_memory_usage_threshold, set before Ray starts, says from which share of it on Ray kills"
)


def memory_monitor_kill_error(who: str, error: Any) -> OutOfMemory:
    """The error of a process that Ray's memory monitor has killed because its node had nearly no memory left.

    `who`: the process in words. `error`: Ray's `OutOfMemoryError`, whose text lists all that it knows of the node.
    """
    text, numbers = str(error), ""
    if used := USED.search(text):
        numbers = f": {used['used']} of {used['all']} GB were in use"
        if threshold := THRESHOLD.search(text):
            numbers += f", and Ray kills from {float(threshold['percent']):g} % on"
    return OutOfMemory(f"{who} was killed by Ray because its node ran out of memory{numbers}", cure=KILL_CURE)


def _look_for_use() -> Any:
    from ray._common import utils as common_utils
    from ray._private import utils

    assert callable(common_utils.get_system_memory) and callable(utils.get_used_memory)
    return common_utils, utils


MEMORY_IN_USE: Fence[Any] = Fence(
    api="ray._private.utils.get_used_memory",
    reason="Ray does not say why an actor that it restarts has died; its monitor compares these two numbers",
    versions=TESTED,
    feature="seeing whether this node is as short of memory as Ray's monitor allows",
    without="a driver that Ray kills again and again for want of memory is only said not to answer",
    probe=_look_for_use,
)


def memory_shortage_here() -> str:
    """Text such as `23.1 of 23.5 GB are in use, and Ray kills from 95 % on` if this node's use is above that; else empty.

    Asked because Ray does not say why an actor that it restarts has died. Only private functions of Ray say what its monitor
    counts; `warn` gets a line where they are gone or fail.
    """

    def ask(modules: Any) -> str:
        common_utils, utils = modules
        used, all_bytes = float(utils.get_used_memory()), float(common_utils.get_system_memory())
        threshold = memory_threshold(os.environ)
        if used > threshold * all_bytes:
            return f"{used / 2**30:.1f} of {all_bytes / 2**30:.1f} GB are in use, and Ray kills from {100 * threshold:g} % on"
        return ""

    return MEMORY_IN_USE.use(ask, "")


def memory_threshold(environment: Mapping[str, str]) -> float:
    """The share of a node's memory above which Ray kills; Ray's default where the variable holds no number."""
    try:
        return float(environment.get(THRESHOLD_VARIABLE, RAY_THRESHOLD))
    except ValueError:
        return RAY_THRESHOLD
