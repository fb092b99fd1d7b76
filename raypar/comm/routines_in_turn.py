"""Runs routines of one worker that wait for each other: one goes on while the others wait."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TypeVar

from raypar.comm.routine import Routine, RoutineWait, RoutineWork
from raypar.comm.virtual_shards import TurnHandle, VirtualShardHandle

T = TypeVar("T")


def run_in_turn(routines: Sequence[Routine[T]]) -> Routine[list[T]]:
    """Run all to their ends, the first as far as it can, then the second, and so on; returns their results, in their order.

    What a wait fails with is raised in the routine that waits. What a routine raises ends the others, and is raised. If they
    wait for each other for ever, because they make unequal calls, that is the error of the first one's wait.
    """
    results: dict[int, T] = {}
    waits: dict[int, RoutineWait | None] = dict.fromkeys(range(len(routines)))
    try:
        while waits:
            ready = {place: failed for place, wait in waits.items() for failed in _end_of(wait)}
            if not ready:
                place = next((place for place, wait in waits.items() if wait and is_posted(wait)), min(waits))
                ready = {place: (yield from _wait_outside(waits[place]))}
            for place, failed in ready.items():
                try:
                    operation = next(routines[place]) if failed is None else routines[place].throw(failed)
                except StopIteration as end:
                    results[place] = end.value
                    del waits[place]
                    continue
                if isinstance(operation, RoutineWork):
                    yield operation
                waits[place] = operation if isinstance(operation, RoutineWait) else None
    finally:
        for place in waits:
            routines[place].close()
    return [results[place] for place in range(len(routines))]


def _end_of(wait: RoutineWait | None) -> tuple[Exception | None, ...]:
    """What a wait has ended with, its error or None; empty while it lasts."""
    try:
        return (None,) if wait is None or wait.handle.done() else ()
    except Exception as error:
        return (error,)


def is_posted(wait: RoutineWait) -> bool:
    """Whether what is waited for goes on by itself, and needs none of the other routines."""
    return not isinstance(wait.handle, (VirtualShardHandle, TurnHandle)) or wait.handle.is_posted


def _wait_outside(wait: RoutineWait | None) -> Routine[Exception | None]:
    """Have whoever runs all routines wait; returns the error with which that failed."""
    assert wait is not None
    try:
        yield wait
    except Exception as error:
        return error
    return None
