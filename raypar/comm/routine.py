"""Routines: code that communicates without blocking, as generators that yield what they wait for.

Code that must run both under real transports and under the cooperative scheduler is written as a *routine*: a generator
that posts operations by plain calls and yields `RoutineWait` where it cannot go on (and `RoutineWork` before work that takes
time). `run_routine` runs one on a real transport; `comm.cooperative_scheduler` interleaves many on a virtual clock.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Generator
from dataclasses import dataclass
from functools import partial
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


class StreamWaits:
    """Operations behind which this worker has ordered work on its stream without waiting for them on the host. If one fails,
    what was computed since is invalid."""

    def __init__(self) -> None:
        self._posted: deque[tuple[Handle, str]] = deque()
        """The operations, oldest first, and what they are in messages; those that were seen to be done are left out."""

    def add(self, handle: Handle, what: str) -> None:
        """Note an operation, and let go of those that are done, and of their tensors. Raises what one has failed with."""
        self._posted.append((handle, what))
        while self._posted and self._posted[0][0].done():
            self._posted.popleft()

    def raise_failure(self) -> None:
        """Raise what any of them has failed with."""
        for handle, _ in self._posted:
            handle.done()

    def finish(self) -> Routine[None]:
        """Wait for all of them on the host, before anything leaves this worker. Raises what any has failed with."""
        while self._posted:
            handle, what = self._posted[0]
            if not handle.done():
                yield RoutineWait(handle, what)
            self._posted.popleft()


def run_routine(routine: Routine[T], timeout_s: float | None = None) -> T:
    """Run a routine to its end on real transports; each single wait is bounded by `timeout_s`."""
    return drive_routine(routine, partial(block_until_done, timeout_s=timeout_s))


def block_until_done(operation: RoutineWait | RoutineWork, timeout_s: float | None = None) -> None:
    """Wait for what a routine has yielded, on a real transport."""
    if isinstance(operation, RoutineWait):
        wait_named(operation.handle, operation.what, timeout_s, on_stream=operation.on_stream)


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
