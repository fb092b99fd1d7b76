"""How many workers a run begins with, and then asks the cluster for, uses, waits for and gives back. Pure.

Asking for workers is what makes an autoscaler add nodes, and giving them back is what makes it remove them. The counts of a run
go in, and its rules act on what comes out, in `hire_and_release_workers.py`.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Set
from dataclasses import dataclass, field
from typing import Literal

from raypar.plan import ParallelPlan
from raypar.plan.wording import count_noun, format_worker_numbers, word_form

StartStep = Literal["wait", "ask_planner", "begin", "impossible", "too_late"]
"""What to do next. `impossible`: the cluster can never place enough workers. `too_late`: it did not
place enough in time."""


@dataclass(frozen=True, slots=True)
class StartLimits:
    """The job's limits on the start of a run."""

    wanted: int
    """Workers of the job's own plan."""
    least: int
    """Least number of workers to begin with; if equal to `wanted`, the run waits for all."""
    grow_after_s: float
    """With fewer than `wanted` workers the run begins once no further worker has been placed for this time."""
    wait_s: float
    """The longest wait."""


@dataclass(frozen=True, slots=True)
class StartInputs:
    """The state of the placement at one moment."""

    placed: int
    """Workers that are placed, in whole replicas."""
    infeasible: int = 0
    """Workers that fit neither a node of the cluster nor one that the autoscaler may add."""
    waited_s: float = 0.0
    """Seconds since the workers were asked for."""
    quiet_s: float = 0.0
    """Seconds since the last worker was placed."""
    on_demand_lacking: int = 0
    """Workers that must be on on-demand nodes and are not placed."""
    on_demand_infeasible: bool = False
    """Whether some of the on-demand workers are infeasible."""
    fits: bool | None = None
    """Whether the planner has a plan for the placed workers that fits into their memory; None: the planner was not asked."""


@dataclass(frozen=True, slots=True)
class StartDecision:
    """What to do next, and why."""

    step: StartStep
    """What to do."""
    reason: str
    """The sentence for the log."""


def least_workers_at_start(plan: ParallelPlan, min_workers: int, virtual_shards: int) -> int:
    """The least number of workers with which a run of `plan` may begin: `min_workers`, in whole replicas.

    Results depend on the number of shards, so a plan whose stages differ in it waits for all of its workers. They do not where
    the job gives `virtual_shards` (0: it gives none): then any number will do.
    """
    if virtual_shards:
        return min(plan.world, max(min_workers, 1))
    shards = {stage.shards for stage in plan.stages}
    if len(shards) > 1:
        return plan.world
    (each,) = shards
    return min(plan.world, -(-max(min_workers, 1) // each) * each)


def decide_start(view: StartInputs, limits: StartLimits) -> StartDecision:
    """Whether to begin with the workers that are placed, or how to go on."""
    has = f"{view.placed} of {count_noun(limits.wanted, 'worker')} {'has' if view.placed == 1 else 'have'} a place"
    if view.placed >= limits.wanted:
        return StartDecision("begin", has)
    if limits.wanted - view.infeasible < limits.least or view.on_demand_infeasible:
        return StartDecision("impossible", f"no node has room for {view.infeasible} of {count_noun(limits.wanted, 'worker')}")
    over = view.waited_s >= limits.wait_s
    if view.on_demand_lacking:
        has += f", and {view.on_demand_lacking} of the others must be on-demand"
    elif limits.least <= view.placed < limits.wanted and (over or view.quiet_s >= limits.grow_after_s):
        if view.fits is None:
            return StartDecision("ask_planner", f"{has}, and for {view.quiet_s:.1f} s no more have got one")
        if view.fits:
            return StartDecision("begin", f"{has}, and for {view.quiet_s:.1f} s no more have got one")
        has += ", for which no plan fits into memory"
    if over:
        return StartDecision("too_late", f"{has} after {limits.wait_s:.0f} s")
    return StartDecision("wait", has)


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
    replica_size: int = 1
    """Workers of one replica of a stage: its shards. They are asked for together, on one node."""
    on_demand: int = 0
    """Least number of workers on nodes that the cloud does not take back."""


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
    useful: int | None = None
    """The largest number of workers that the planner can use; None: it has declined none yet."""
    may_release: bool = False
    """Whether workers may be given back now: the run trains, and no other change is under way."""
    needed_spares: Set[int] = frozenset()
    """Spares that may hold the only copy of some state."""
    asked_together: Mapping[int, Set[int]] = field(default_factory=dict)
    """Worker -> the workers that were asked for together with it, itself included; without an entry it was asked for alone."""
    on_demand: Set[int] = frozenset()
    """Workers on on-demand nodes, or asked for there."""

    @property
    def present(self) -> Set[int]:
        """Workers that are there or on their way."""
        return self.members | self.spares | self.starting


@dataclass(frozen=True, slots=True)
class DesiredCapacity:
    """The number of workers that the run should use, start and wait for now."""

    seats: int
    """Workers that the next plan should use."""
    groups_to_start: tuple[SameNodeGroup, ...]
    """Workers to start now, in groups that are placed whole."""
    workers_lacking: int
    """Number of workers that are missing for the minimum; the run waits for them."""
    grow: bool
    """Whether to ask the planner now for a plan of more seats."""
    workers_to_release: tuple[int, ...]
    """Workers to give back now: first those that are still starting, then those that wait for a seat."""
    reason: str
    """The sentence for the log."""

    @property
    def workers_to_start(self) -> int:
        """Number of workers to start now."""
        return sum(group.workers for group in self.groups_to_start)


@dataclass(frozen=True, slots=True)
class SameNodeGroup:
    """Workers that are asked for together: the cluster places all of them on one node, or none."""

    workers: int
    """Number of workers."""
    on_demand: bool = False
    """Whether they need an on-demand node."""


def compute_desired_capacity(view: CapacityInputs, limits: WorkerCountLimits, now_s: float) -> DesiredCapacity:
    """The seats, the workers to start, to wait for and to give back, of a run with these workers at `now_s`."""
    seats = min(view.available, limits.wanted)
    lacking = max(0, limits.minimum - view.available)
    target = target_worker_count(view, limits)
    may_start = limits.hires and not view.stopping and now_s >= view.start_after_s
    start = _split_into_groups(view, limits, max(0, target - len(view.present))) if may_start else ()
    may_release = limits.hires and view.may_release and not view.stopping
    release = choose_workers_to_release(view, len(view.present) - target) if may_release else ()
    grow = _should_grow(view, limits, seats, now_s)
    if lacking:
        are = "worker is" if view.available == 1 else "workers are"
        reason = f"{view.available} {are} left, min_workers is {limits.minimum}"
    elif grow:
        reason = f"{format_worker_numbers(view.spares)} {word_form(view.spares, 'waits', 'wait')} for a seat"
    else:
        reason = f"{len(view.present)} of {limits.wanted} workers are there or on their way"
    return DesiredCapacity(seats, start, lacking, grow, release, reason)


def target_worker_count(view: CapacityInputs, limits: WorkerCountLimits) -> int:
    """The number of workers to have, standbys included, without those that the planner has declined."""
    useful = limits.wanted if view.useful is None else min(limits.wanted, view.useful)
    return useful + limits.standbys


def _split_into_groups(view: CapacityInputs, limits: WorkerCountLimits, missing: int) -> tuple[SameNodeGroup, ...]:
    """`missing` workers as groups: whole replicas, then single workers. The first groups are on-demand, as far as required."""
    sizes = [limits.replica_size] * (missing // limits.replica_size) + [1] * (missing % limits.replica_size)
    lacking = limits.on_demand - len(view.on_demand & view.present)
    groups = []
    for size in sizes:
        groups.append(SameNodeGroup(size, lacking > 0))
        lacking -= size
    return tuple(groups)


def choose_workers_to_release(view: CapacityInputs, surplus: int) -> tuple[int, ...]:
    """At most `surplus` workers without a seat: first workers that are not placed, then those that have not joined.

    Workers that were asked for together share a placement group, so they are given back together. Members, and spares that may
    hold the only copy of some state, are never given back. Among equals the worker that was asked for last goes first.
    """
    if surplus <= 0:
        return ()
    free = (view.spares | view.starting) - view.needed_spares
    groups = {frozenset(view.asked_together.get(worker, {worker}) & view.present) for worker in free}

    def effort(group: Collection[int]) -> tuple[int, int]:
        """(how far the start of the group has come, order among equals)."""
        ready, placed = any(w in view.spares for w in group), any(w in view.placed for w in group)
        return 2 * ready + placed, -max(group)

    released: list[int] = []
    for group in sorted((group for group in groups if group <= free), key=effort):
        if len(released) + len(group) <= surplus:
            released += sorted(group)
    return tuple(released)


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
