"""Kills by Ray's memory monitor: the error for a killed process, and whether this node is short of memory."""

from __future__ import annotations

import os
import re
from collections.abc import Callable
from typing import Any

import ray

from raypar.errors import OutOfMemory, error_first_line

USED = re.compile(r"was (?P<used>[\d.]+) ?GB used / (?P<all>[\d.]+) ?GB limit")
"""How much of the node's memory was in use, in Ray's message of some hundred lines."""
THRESHOLD = re.compile(r"exceeded threshold of \d+B \((?P<percent>[\d.]+)%")
"""The share of that memory above which Ray kills, in the same message."""
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


def memory_shortage_here(warn: Callable[[str], None]) -> str:
    """Text such as `23.1 of 23.5 GB are in use, and Ray kills from 95 % on` if this node's use is above that; else empty.

    Asked because Ray does not say why an actor that it restarts has died. Only private functions of Ray say what its monitor
    counts; `warn` gets a line where they are gone or fail.
    """
    try:
        from ray._common.utils import get_system_memory
        from ray._private.utils import get_used_memory

        used, all_bytes = get_used_memory(), get_system_memory()
        threshold = float(os.environ.get(THRESHOLD_VARIABLE, RAY_THRESHOLD))
    except Exception as error:  # ImportError, AttributeError and TypeError of another release; what it reads may be missing
        warn(
            f"whether Ray's memory monitor has killed the driver is not known: Ray {ray.__version__} does not say how much "
            f"memory is in use as raypar asks for it ({error_first_line(error)})\n  cure: use ray 2.60, or look at the memory "
            "of this node"
        )
        return ""
    if used > threshold * all_bytes:
        return f"{used / 2**30:.1f} of {all_bytes / 2**30:.1f} GB are in use, and Ray kills from {100 * threshold:g} % on"
    return ""
