"""Decides when a run begins, and with how many workers. Pure: the driver asks each time it polls the cluster."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from raypar.elastic.plural_wording import count_of
from raypar.plan import ParallelPlan

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
