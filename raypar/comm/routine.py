"""Routines: code that communicates without blocking, as generators that yield what they wait for.

Code that must run both under real transports and under the cooperative scheduler is written as a *routine*: a generator
that posts operations by plain calls and yields `RoutineWait` where it cannot go on (and `RoutineWork` before work that takes
time). `run_routine` runs one on a real transport; `comm.cooperative_scheduler` interleaves many on a virtual clock.
"""

from __future__ import annotations

from collections.abc import Callable, Generator
from dataclasses import dataclass
from typing import TypeVar

from raypar.comm.transport import Handle, wait_named

T = TypeVar("T")


@dataclass(frozen=True, slots=True)
class RoutineWait:
    """Yielded by a routine that cannot go on before `handle` is done."""

    handle: Handle
    what: str
    """The operation, in time-out messages."""
    on_stream: bool = False
    """Only the caller's stream has to wait (`Handle.wait_on_stream`)."""


@dataclass(slots=True)
class RoutineWork:
    """Yielded by a routine just before it computes, so that a scheduler can advance its clock."""

    instruction: object
    """What it computes; its text names it in traces."""
    cost_ms: float = 0.0
    """Advance of the virtual clock; `run_routine` ignores it."""


Routine = Generator[RoutineWait | RoutineWork, None, T]


def run_routine(routine: Routine[T], timeout_s: float | None = None) -> T:
    """Run a routine to its end on real transports; each single wait is bounded by `timeout_s`."""

    def block(operation: RoutineWait | RoutineWork) -> None:
        if isinstance(operation, RoutineWait):
            wait_named(operation.handle, operation.what, timeout_s, on_stream=operation.on_stream)

    return drive_routine(routine, block)


def drive_routine(routine: Routine[T], do: Callable[[RoutineWait | RoutineWork], None]) -> T:
    """Run a routine to its end, calling `do` with everything that it yields.

    An error of `do` is raised inside the routine, at its `yield`, so that the routine can clean up.
    """
    failed: Exception | None = None
    while True:
        try:
            operation = next(routine) if failed is None else routine.throw(failed)
        except StopIteration as end:
            return end.value  # type: ignore[no-any-return]
        failed = None
        try:
            do(operation)
        except Exception as error:
            failed = error


def interleave_with_routine(routine: Routine[T], between: Callable[[], None]) -> Routine[T]:
    """The same routine, with a call of `between` before each of its waits and computations.

    An error of a wait is raised inside `routine`, as `drive_routine` does.
    """
    failed: Exception | None = None
    while True:
        try:
            operation = next(routine) if failed is None else routine.throw(failed)
        except StopIteration as end:
            return end.value  # type: ignore[no-any-return]
        failed = None
        between()
        try:
            yield operation
        except Exception as error:
            failed = error
