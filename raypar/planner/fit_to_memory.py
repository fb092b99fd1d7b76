"""Chooses what a plan leaves open (ZeRO stage, gathers, route of gradients, recomputation): the fastest of what fits into
memory."""

from __future__ import annotations

from collections.abc import Collection, Mapping

from raypar.plan import Microbatches, ParallelPlan
from raypar.planner.gradient_route import MakePool, PredictedPlan, choose_gradient_route, predict_plan
from raypar.planner.memory_sheet import changes_beside_zero
from raypar.planner.model_profile import ModelProfile
from raypar.planner.plan_search import format_mib
from raypar.planner.predicted_step import MakeSchedule
from raypar.planner.ways_to_fit import ABOUT_AS_FAST, WayToFit, cheapest_of_fastest, ways_to_fit
from raypar.planner.zero_options import WHOLE, zero_options


def fit_to_memory(
    profile: ModelProfile,
    plan: ParallelPlan,
    schedule: str | MakeSchedule,
    microbatches: Microbatches,
    pool: MakePool,
    *,
    scatter_is_open: bool = False,
    recompute_is_open: bool = False,
    is_asked: bool = False,
) -> tuple[ParallelPlan, str]:
    """The plan with all that is open chosen, and why, in one line or two.

    Where nothing has to be divided, nothing is. Otherwise every combination of open choices is predicted, and the fastest that
    fits is taken; of those that are about as fast the one that recomputes and sends least. Where none fits, the one that needs
    least is taken, and the line says what to try next. `pool`: makes a plan's pool. `is_asked`: whether the job asks for the
    choice of the route of gradients.
    """
    limit, options = profile.memory_bytes, list(zero_options(profile, plan))
    whole, line = plan.with_zero(0), ""
    given = predict_plan(profile, whole, schedule, microbatches, pool)
    if given is None or given.fits(limit):
        if scatter_is_open:
            whole, line = choose_gradient_route(profile, whole, schedule, microbatches, pool, is_asked=is_asked)
        return whole, "\n".join(filter(None, (_why_whole(profile, given, has_options=bool(options)), line)))
    assert limit is not None
    ways = ways_to_fit(
        profile,
        whole,
        zero_is_open=True,
        scatter_is_open=scatter_is_open,
        recompute_is_open=recompute_is_open,
    )
    predicted = {way: predict_plan(profile, way.plan, schedule, microbatches, pool) for way in ways}
    known = {way: each for way, each in predicted.items() if each is not None}
    fits = [way for way, each in known.items() if each.fits(limit)]
    if fits:
        chosen = cheapest_of_fastest(fits, lambda way: known[way].ms)
        return chosen.plan, _why_it_fits(chosen, fits, known, limit)
    chosen = min(known, key=lambda way: known[way].largest_bytes)
    text = f"{_describe(chosen)}, which needs least, and does not fit: {_needs(chosen, known, limit)}"
    named = schedule if isinstance(schedule, str) else ()
    others = changes_beside_zero(profile, chosen.plan, named, may_recompute=not recompute_is_open)
    return chosen.plan, text + (f"; to try next: {', then '.join(others)}" if others else "")


def _why_whole(profile: ModelProfile, given: PredictedPlan | None, *, has_options: bool) -> str:
    """Why replicas divide nothing, a line."""
    if not has_options:
        coupled = profile.most_stages == 1
        return f"plan.zero=0: {'the optimizer couples parameters' if coupled else 'no stage has replicas to divide state'}"
    if profile.memory_bytes is None:
        return "plan.zero=0: it is not known how much memory a worker has"
    if given is None:
        return "plan.zero=0: its memory cannot be predicted"
    needed, has = format_mib(given.largest_bytes), format_mib(profile.memory_bytes)
    return f"plan.zero=0, which fits: the largest worker needs {needed}, a worker has {has}"


def _why_it_fits(chosen: WayToFit, fits: Collection[WayToFit], known: Mapping[WayToFit, PredictedPlan], limit: int) -> str:
    """Why a way was chosen of those that fit, a line."""
    text = f"{_describe(chosen)}, "
    if len(fits) == 1:
        return f"{text}the only way that fits: {_needs(chosen, known, limit)}"
    other = min((way for way in fits if way is not chosen), key=lambda way: known[way].ms)
    ms, other_ms = (f"{known[way].ms:.1f}" for way in (chosen, other))
    fastest = "the fastest" if float(ms) <= float(other_ms) else f"within {100 * ABOUT_AS_FAST:g} % of the fastest"
    text += f"predicted to be {fastest} of {len(fits)} ways that fit: {ms} ms a step ({other_ms} with {_describe(other)})"
    return f"{text}; {_needs(chosen, known, limit)}"


def _needs(chosen: WayToFit, known: Mapping[WayToFit, PredictedPlan], limit: int) -> str:
    """What the largest worker needs with a way, and with those that only divide more or less state and need too much."""
    beside = [
        f"{format_mib(each.largest_bytes)} with {_describe(way)}"
        for way, each in known.items()
        if way is not chosen and not each.fits(limit) and way.changes_zero_alone
    ]
    also = f" ({', '.join(beside)})" if beside else ""
    return f"the largest worker needs {format_mib(known[chosen].largest_bytes)}{also}, a worker has {format_mib(limit)}"


def _describe(way: WayToFit) -> str:
    """The keys that it sets, the ZeRO stage first."""
    return str(way) if way.plan.most_zero else " and ".join((str(WHOLE), *way.changes))
