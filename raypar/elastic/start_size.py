"""With how many workers a run begins, and when. Pure: the driver looks at the cluster and asks again and again."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from raypar.elastic.plural_wording import count_of
from raypar.plan import ParallelPlan

StartStep = Literal["wait", "ask_planner", "begin", "impossible", "too_late"]
"""What to do next. `impossible`: the cluster can never place enough workers. `too_late`: it has not in time."""


@dataclass(frozen=True, slots=True)
class StartLimits:
    """The job's bounds on the start."""

    wanted: int
    """Workers of the job's own plan."""
    least: int
    """The run may begin with so many; `wanted`: it waits for all."""
    grow_after_s: float
    """With fewer than `wanted` it begins once no further worker has been placed for so long."""
    wait_s: float
    """How long it waits at most."""


@dataclass(frozen=True, slots=True)
class StartInputs:
    """What is known of the workers at one moment."""

    placed: int
    """Workers with a place, of replicas that are placed whole."""
    infeasible: int = 0
    """Workers without a place that no node has room for, and no node that an autoscaler may add."""
    waited_s: float = 0.0
    """Seconds since they were asked for."""
    quiet_s: float = 0.0
    """Seconds since the last of them was placed."""
    on_demand_lacking: int = 0
    """Workers without a place that have to be on nodes which the cloud does not take back."""
    on_demand_infeasible: bool = False
    """Whether there is no such node for some of them."""
    fits: bool | None = None
    """Whether the planner has a plan for the placed workers that fits into their memory; None: it was not asked."""


@dataclass(frozen=True, slots=True)
class StartDecision:
    """What to do next, and why."""

    step: StartStep
    """What to do."""
    reason: str
    """The sentence for the log."""


def least_workers_at_start(plan: ParallelPlan, min_workers: int) -> int:
    """The least number of workers with which a run of `plan` may begin: `min_workers`, in whole replicas.

    Results depend on the number of shards, so a plan whose stages differ in it waits for all of its workers.
    """
    shards = {stage.shards for stage in plan.stages}
    if len(shards) > 1:
        return plan.world
    (each,) = shards
    return min(plan.world, -(-max(min_workers, 1) // each) * each)


def decide_start(view: StartInputs, limits: StartLimits) -> StartDecision:
    """Whether to begin with the workers that are placed, or how to go on."""
    has = f"{view.placed} of {count_of(limits.wanted, 'worker')} {'has' if view.placed == 1 else 'have'} a place"
    if view.placed >= limits.wanted:
        return StartDecision("begin", has)
    if limits.wanted - view.infeasible < limits.least or view.on_demand_infeasible:
        return StartDecision("impossible", f"no node has room for {view.infeasible} of {count_of(limits.wanted, 'worker')}")
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
