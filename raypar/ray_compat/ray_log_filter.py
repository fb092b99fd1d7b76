"""Keeps Ray from printing its own messages, which raypar replaces by one line or none, and the same line of several workers."""

from __future__ import annotations

import contextlib
import os
import re
import sys
import time
from collections.abc import Iterator
from typing import Any

from raypar.fences.private_api_fence import API_CHANGED, Fence
from raypar.ray_compat import TESTED
from raypar.ray_compat.worker_line_dedup import RepeatedWorkerLines

DEATH_NOTICE = re.compile(
    r"\s*($|Raylet is terminated|The node with node id|A worker died or was killed|Refer to the documentation on how to address"
    r" the out of memory|\[.*\] \((raylet|gcs_server)\) )",
    re.DOTALL,
)
"""The beginnings of Ray's messages about dead nodes and workers, and of the lines of its servers' logs. Ray gives them no code:
messages that a release words differently are printed."""
EVENTS_VARIABLE = "RAY_SCHEDULER_EVENTS"
"""The variable with which users turn the autoscaler's lines on or off."""


def _look_for_printing() -> Any:
    from ray._private import worker

    assert callable(worker.print_to_stdstream)
    return worker


PRINTING = Fence(
    api="ray._private.worker.print_to_stdstream",
    reason="Ray prints why nodes and workers have died, also between the lines of --json, and has no setting to turn that off",
    versions=TESTED,
    feature="leaving out Ray's own lines about dead nodes and workers, and lines that workers repeat",
    without="they are printed",
    probe=_look_for_printing,
)


@contextlib.contextmanager
def filtering_ray_lines() -> Iterator[None]:
    """Keep Ray from printing that a node or a worker has died: raypar says so in one line instead of twenty.

    Ray prints such lines to stdout, even between the lines of `--json`. What workers print is still shown, and what several of
    them print alike once (`RepeatedWorkerLines`).
    """
    worker = PRINTING.find()
    if worker is None:
        yield
        return
    print_data = worker.print_to_stdstream
    repeated = {is_error: RepeatedWorkerLines(os.environ) for is_error in (False, True)}

    def print_count(is_error: bool, *, at_end: bool = False) -> None:
        line = repeated[is_error].count(time.monotonic(), at_end=at_end)
        if line is not None:
            print(line, file=sys.stderr if is_error else sys.stdout, flush=True)

    def print_filtered(data: Any, *args: Any, **rest: Any) -> None:
        try:
            shown = _without_death_notices(data)
            if shown is not None and str(shown.get("pid")).isdigit():  # a worker's
                lines = repeated[bool(shown.get("is_err"))].shown(
                    shown["lines"], (shown.get("ip"), shown["pid"]), time.monotonic()
                )
                shown = {**shown, "lines": lines} if lines else None
            print_count(bool(data.get("is_err")))
        except API_CHANGED as error:
            PRINTING.warn_of_unexpected_answer(error)
            shown = data
        if shown is not None:
            print_data(shown, *args, **rest)

    worker.print_to_stdstream = print_filtered
    try:
        yield
    finally:
        worker.print_to_stdstream = print_data
        for is_error in repeated:
            print_count(is_error, at_end=True)


def _without_death_notices(data: Any) -> Any:
    """A process's printed lines, in Ray's form, without death notices; None if no line is left."""
    lines = data["lines"]
    if data.get("pid") in ("raylet", "gcs_server"):
        lines = [line for line in lines if not DEATH_NOTICE.match(str(line))]
        data = {**data, "lines": lines}
    return data if lines else None


def _look_for_events() -> Any:
    from ray._private import ray_constants

    ray_constants.AUTOSCALER_EVENTS  # noqa: B018 - raises where it is gone
    return ray_constants


EVENTS = Fence(
    api="ray._private.ray_constants.AUTOSCALER_EVENTS",
    reason=f"Ray reads {EVENTS_VARIABLE} only when it is imported, which may be earlier",
    versions=TESTED,
    feature="leaving out the lines of Ray's autoscaler",
    without="they are printed while a run waits to grow",
    probe=_look_for_events,
)


@contextlib.contextmanager
def without_autoscaler_lines() -> Iterator[None]:
    """Keep Ray from printing what its autoscaler does, unless the user has set `RAY_SCHEDULER_EVENTS`.

    While a run waits to grow, the autoscaler prints every few seconds that a placement group has no place.
    """
    constants = EVENTS.find() if EVENTS_VARIABLE not in os.environ else None
    if constants is None:
        yield
        return
    before = constants.AUTOSCALER_EVENTS
    constants.AUTOSCALER_EVENTS = 0
    try:
        yield
    finally:
        constants.AUTOSCALER_EVENTS = before
