"""Chooses the ZeRO stage of a plan that leaves it open: the lowest one with which its largest worker fits into memory."""

from __future__ import annotations

from raypar.plan import Microbatches, ParallelPlan
from raypar.planner.memory_sheet import largest_worker_bytes
from raypar.planner.model_profile import ModelProfile
from raypar.planner.plan_search import format_mib
from raypar.schedule.instructions import Schedule


def choose_zero_level(
    profile: ModelProfile, plan: ParallelPlan, schedule: str | Schedule, microbatches: Microbatches
) -> tuple[ParallelPlan, str]:
    """The plan with the ZeRO stage that is chosen for it, and why, a line. `schedule`: its name, or its orders.

    A higher stage sends more and keeps less, so the lowest one that fits is taken; where none does, the one that needs least.
    """
    holders, limit = plan.zero_holders, profile.memory_bytes
    whole = plan.with_zero(0)
    levels = [level for level in profile.zero_levels if level and plan.with_zero(level).most_zero]
    if not levels:
        why = "the optimizer couples parameters" if profile.most_stages == 1 else "no stage has replicas to divide state"
        return whole, f"plan.zero=0: {why}"
    if limit is None:
        return whole, "plan.zero=0: it is not known how much memory a worker has"
    plans = {level: plan.with_zero(level, holders) for level in (0, *levels)}
    needs = {level: largest_worker_bytes(profile, each, schedule, microbatches) for level, each in plans.items()}
    known = {level: nbytes for level, nbytes in needs.items() if nbytes is not None}
    fits = [level for level, nbytes in known.items() if nbytes <= limit]
    level = fits[0] if fits else min(known, key=lambda each: (known[each], each), default=0)
    if not known:
        return whole, "plan.zero=0: its memory cannot be predicted"
    lower = [f"{format_mib(known[each])} with plan.zero={each}" for each in known if each < level]
    beside = f" ({', '.join(lower)})" if lower else ""
    chosen = "the lowest that fits" if fits else "which needs least, and does not fit"
    return (
        plans[level],
        f"plan.zero={level}, {chosen}: the largest worker needs {format_mib(known[level])}{beside}, a worker has "
        f"{format_mib(limit)}",
    )
