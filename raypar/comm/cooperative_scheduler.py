"""Runs the routines of many workers in one thread, on a virtual clock, and names what they wait for if none can go on."""

from __future__ import annotations

import random
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal, TypeVar

from raypar.comm.local_transport import LocalMesh
from raypar.comm.routine import Routine, RoutineWait
from raypar.comm.transport import Handle
from raypar.errors import CommError, GroupAborted

T = TypeVar("T")


@dataclass(frozen=True, slots=True)
class RoutineSpan:
    """One interval of a cooperative run, in virtual milliseconds, in which a routine worked or waited."""

    routine: int
    label: str
    start_ms: float
    end_ms: float
    kind: Literal["work", "wait"]


class CooperativeScheduler:
    """Interleaves routines in one thread, on a virtual clock.

    The runnable routine with the lowest clock goes next; among equals the lowest index, or with a `seed` a random one, so
    that many seeds explore many interleavings. A routine runs until it yields: `RoutineWork` advances its clock, `RoutineWait`
    blocks it until the handle is done.
    """

    def __init__(self, seed: int | None = None, trace: bool = False) -> None:
        self._random = None if seed is None else random.Random(seed)
        self._trace = trace
        """Whether to record `spans`."""
        self.spans: list[RoutineSpan] = []
        """Of the last run."""
        self.makespan_ms = 0.0
        """Of the last run."""

    def run(self, routines: Sequence[Routine[T]], mesh: LocalMesh | None = None) -> list[T]:
        """Run all to their end and return their results.

        The first exception of a routine aborts `mesh` (if given), is thrown as `GroupAborted` into the other routines and
        is raised again. Raises `CommError` with the list of all waits when no routine can go on.
        """
        self.spans = []
        clocks = [0.0] * len(routines)
        results: dict[int, T] = {}
        runnable: dict[int, Exception | None] = dict.fromkeys(range(len(routines)))
        blocked: dict[int, RoutineWait] = {}
        while runnable or blocked:
            if not runnable:
                raise self._stop(routines, list(blocked), mesh, deadlock_error(blocked, clocks))
            soonest = min(clocks[i] for i in runnable)
            ready = sorted(i for i in runnable if clocks[i] == soonest)
            index = ready[0] if self._random is None else self._random.choice(ready)
            failed = runnable.pop(index)
            now = clocks[index]
            try:
                operation = next(routines[index]) if failed is None else routines[index].throw(failed)
            except StopIteration as end:
                results[index] = end.value
            except Exception as error:
                raise self._stop(routines, [*runnable, *blocked], mesh, error) from None
            else:
                if isinstance(operation, RoutineWait):
                    blocked[index] = operation
                else:
                    clocks[index] = now + operation.cost_ms
                    runnable[index] = None
                    self._span(index, str(operation.instruction), now, clocks[index], "work")
            for other, wait in list(blocked.items()):
                settled, error_of_wait = poll_handle(wait.handle)
                if settled:
                    del blocked[other]
                    runnable[other] = error_of_wait
                    self._span(other, wait.what, clocks[other], now, "wait")
                    clocks[other] = max(clocks[other], now)
        self.makespan_ms = max(clocks, default=0.0)
        return [results[index] for index in range(len(routines))]

    def _span(self, routine: int, label: str, start_ms: float, end_ms: float, kind: Literal["work", "wait"]) -> None:
        if self._trace and end_ms > start_ms:
            self.spans.append(RoutineSpan(routine, label, start_ms, end_ms, kind))

    def _stop(
        self, routines: Sequence[Routine[T]], others: Sequence[int], mesh: LocalMesh | None, error: Exception
    ) -> Exception:
        """End all other routines as an abort would; returns the error to raise."""
        reason = f"another routine of the group stopped: {type(error).__name__}: {error}"
        if mesh is not None:
            mesh.abort(reason)
        for index in others:
            # Errors raised while they are stopped are consequences; only the first error is reported.
            try:
                routines[index].throw(GroupAborted(reason))
            except (Exception, StopIteration):
                continue
            routines[index].close()
        return error


def poll_handle(handle: Handle) -> tuple[bool, Exception | None]:
    """(settled, error) of a handle, without blocking."""
    try:
        return handle.done(), None
    except Exception as error:
        return True, error


def deadlock_error(blocked: dict[int, RoutineWait], clocks: Sequence[float]) -> CommError:
    """The error when no routine can go on: what each of them waits for."""
    lines = [f"routine {i} at {clocks[i]:g} ms waits for {wait.what}" for i, wait in sorted(blocked.items())]
    return CommError(
        "deadlock: nobody can go on\n    " + "\n    ".join(lines),
        cure="a send or receive is missing, or two ranks post them in orders that wait for each other",
    )
