"""Chooses the ZeRO stage of a plan that leaves it open, and how long parameters are whole: what costs least time of those ways
with which its largest worker fits into memory."""

from __future__ import annotations

from raypar.plan import Microbatches, ParallelPlan
from raypar.planner.memory_sheet import changes_beside_zero, largest_worker_bytes
from raypar.planner.model_profile import ModelProfile
from raypar.planner.plan_search import format_mib
from raypar.planner.zero_options import WHOLE, zero_options
from raypar.schedule.instructions import Schedule


def choose_zero_level(
    profile: ModelProfile, plan: ParallelPlan, schedule: str | Schedule, microbatches: Microbatches
) -> tuple[ParallelPlan, str]:
    """The plan with the ZeRO stage and the gather that are chosen for it, and why, a line. `schedule`: its name, or its orders.

    A higher stage, and shorter lives of whole parameters, send more and keep less. So the first one that fits is taken; where
    none does, the one that needs least, with what to try next.
    """
    holders, limit = plan.zero_holders, profile.memory_bytes
    whole = plan.with_zero(0)
    options = [WHOLE, *zero_options(profile, plan)]
    if len(options) == 1:
        why = "the optimizer couples parameters" if profile.most_stages == 1 else "no stage has replicas to divide state"
        return whole, f"plan.zero=0: {why}"
    if limit is None:
        return whole, "plan.zero=0: it is not known how much memory a worker has"
    needs = [(each, largest_worker_bytes(profile, each.of(plan, holders), schedule, microbatches)) for each in options]
    known = {each: nbytes for each, nbytes in needs if nbytes is not None}
    if not known:
        return whole, "plan.zero=0: its memory cannot be predicted"
    fits = [each for each, nbytes in known.items() if nbytes <= limit]
    chosen = fits[0] if fits else min(known, key=lambda each: known[each])
    before = list(known)[: list(known).index(chosen)]
    lower = [f"{format_mib(known[each])} with {each}" for each in before]
    beside = f" ({', '.join(lower)})" if lower else ""
    why = "the first that fits" if fits else "which needs least, and does not fit"
    text = f"{chosen}, {why}: the largest worker needs {format_mib(known[chosen])}{beside}, a worker has {format_mib(limit)}"
    if not fits and (others := changes_beside_zero(profile, chosen.of(plan, holders), schedule)):
        text += f"; to try next: {', then '.join(others)}"
    return chosen.of(plan, holders), text
