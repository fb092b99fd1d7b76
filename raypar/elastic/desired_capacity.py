"""How many workers a run should start and use now: the one decision that an autoscaler would replace. Pure."""

from __future__ import annotations

from collections.abc import Set
from dataclasses import dataclass

from raypar.elastic.plural_wording import format_worker_numbers, verb_form

MAX_DOUBLINGS = 5
"""The pause between two attempts to start a worker is doubled at most so many times."""


@dataclass(frozen=True, slots=True)
class WorkerCountLimits:
    """The job's bounds on the number of workers."""

    wanted: int
    """The most workers that get a seat."""
    minimum: int = 1
    """The run does not train with fewer workers."""
    standbys: int = 0
    """Workers beyond `wanted` that wait for a seat with everything loaded."""
    hires: bool = False
    """Whether the run starts workers itself."""
    grows: bool = True
    """Whether the run moves to a larger plan to give waiting workers a seat."""
    retry_s: float = 5.0
    """Pause in seconds after the first failed start of a worker."""


@dataclass(frozen=True, slots=True)
class CapacityInputs:
    """The workers that a run has at one moment."""

    members: Set[int]
    """Workers with a seat that are neither lost nor asked to leave."""
    spares: Set[int] = frozenset()
    """Workers that wait for a seat."""
    starting: Set[int] = frozenset()
    """Workers that are being started."""
    placed: Set[int] = frozenset()
    """Workers of `starting` for which the cluster has found room."""
    available: int = 0
    """Workers that a new plan could use now."""
    seats: int = 0
    """Seats of the present plan."""
    start_after_s: float = 0.0
    """No worker is started before this time, because the last attempt failed."""
    grow_at_s: float | None = None
    """Time from which a larger plan may be chosen without waiting for more workers; None: no spare is to be considered."""
    may_grow: bool = False
    """Whether a larger plan may be asked for: no other change is under way, and a step has been measured. Without a measured
    step nobody knows what a seat saves."""
    stopping: bool = False
    """Whether the run has been asked to end."""

    @property
    def present(self) -> Set[int]:
        """Workers that are there or on their way."""
        return self.members | self.spares | self.starting


@dataclass(frozen=True, slots=True)
class DesiredCapacity:
    """The number of workers that the run should use, start and wait for now."""

    seats: int
    """Workers that the next plan should use."""
    workers_to_start: int
    """Workers to start now."""
    workers_lacking: int
    """Number of workers that are missing for the minimum; the run waits for them."""
    grow: bool
    """Whether to ask the planner now for a plan of more seats."""
    reason: str
    """The sentence for the log."""


def compute_desired_capacity(view: CapacityInputs, limits: WorkerCountLimits, now_s: float) -> DesiredCapacity:
    """The seats, the workers to start and the missing workers of a run with these workers at `now_s`."""
    seats = min(view.available, limits.wanted)
    lacking = max(0, limits.minimum - view.available)
    may_start = limits.hires and not view.stopping and now_s >= view.start_after_s
    start = max(0, limits.wanted + limits.standbys - len(view.present)) if may_start else 0
    grow = _should_grow(view, limits, seats, now_s)
    if lacking:
        are = "worker is" if view.available == 1 else "workers are"
        reason = f"{view.available} {are} left, min_workers is {limits.minimum}"
    elif grow:
        reason = f"{format_worker_numbers(view.spares)} {verb_form(view.spares, 'waits', 'wait')} for a seat"
    else:
        reason = f"{len(view.present)} of {limits.wanted} workers are there or on their way"
    return DesiredCapacity(seats, start, lacking, grow, reason)


def _should_grow(view: CapacityInputs, limits: WorkerCountLimits, seats: int, now_s: float) -> bool:
    """Whether to ask for a larger plan now: no other worker is on the way, or the first spare has waited long enough.

    A run with one seat does not wait for more workers: the first spare keeps a second copy of the state.
    """
    if not limits.grows or not view.may_grow or view.stopping or not view.spares or view.grow_at_s is None:
        return False
    complete = seats == limits.wanted or not view.placed
    alone = view.seats == 1
    return seats > view.seats and (complete or alone or now_s >= view.grow_at_s)


def retry_pause_s(limits: WorkerCountLimits, failures: int) -> float:
    """Seconds from the latest failed start of a worker to the next attempt; `failures`: failed starts in a row before it."""
    return limits.retry_s * 2.0 ** min(failures, MAX_DOUBLINGS)
