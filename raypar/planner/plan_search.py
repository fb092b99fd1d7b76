"""Choosing a uniform plan: every candidate is simulated on the profile; of the fastest that fit into memory the smallest wins.

The bits of the result depend on the number of microbatches, `virtual_replicas` and threads. So the job says what they are,
and the planner never chooses them.
"""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import dataclass, replace

from raypar.errors import PlanError
from raypar.plan import Microbatches, MicrobatchRouting, ParallelPlan, StagePlan
from raypar.plan.stage_connections import find_oversized_message
from raypar.plan.stage_plan import GatherSpan, consecutive_grids
from raypar.plan.wording import count_noun
from raypar.planner.candidate_plans import PlanCandidate, enumerate_candidates
from raypar.planner.model_profile import ModelProfile
from raypar.planner.predicted_step import MakeSchedule, predict_step, simulation_costs
from raypar.planner.stage_balance import StageBalance, find_balanced_stages
from raypar.planner.ways_to_fit import ABOUT_AS_FAST, cheapest_of_fastest, ways_to_fit
from raypar.planner.zero_options import ZeroOption
from raypar.schedule import registry
from raypar.schedule.instructions import Schedule, splits_backward
from raypar.schedule.step_timeline import Timeline

BALANCED_CANDIDATES = 3
"""Number of candidates, the fastest ones, whose split points are chosen by simulation (`balance_stages`)."""
OFFLOAD_CANDIDATES = 12
"""Of how many plans that do not fit, the smallest ones, it is tried whether they would with activations in files."""


@dataclass(frozen=True)
class EvaluatedCandidate:
    """One candidate with its prediction, and why it was chosen or not.

    Figures are None where it was not simulated. `bubble` is a share of the whole time.
    """

    candidate: PlanCandidate
    reason: str
    predicted_ms: float | None = None
    bubble: float | None = None
    memory_bytes: int | None = None
    changed_for_memory: str = ""
    """What it has, in words, because it would not fit as it was given; empty: nothing."""
    bytes_without: int | None = None
    """What its largest worker would need without that."""


@dataclass(frozen=True)
class PlanChoice:
    """The outcome of a search: the chosen candidate, the other simulated ones by predicted time, then those ruled out.

    Candidates whose bound alone ruled them out have no predicted time.
    """

    verdicts: tuple[EvaluatedCandidate, ...]
    workers: int
    microbatches: Microbatches
    worker_bytes: int | None = None
    """The memory of a worker, where it is known."""

    @property
    def best(self) -> EvaluatedCandidate:
        """The chosen candidate; its figures are never None."""
        return self.verdicts[0]

    @property
    def plan(self) -> ParallelPlan:
        """The chosen plan."""
        return self.best.candidate.plan

    @property
    def schedule(self) -> str:
        """The chosen schedule's name."""
        return self.best.candidate.schedule


def search_plans(
    profile: ModelProfile,
    workers: int,
    microbatches: Microbatches,
    shards: int = 1,
    recompute: Collection[int] = (),
    virtual_shards: int = 0,
    zero: int | None = 0,
    zero_holders: int = 1,
    gather: GatherSpan = "step",
    offload: Collection[int] = (),
) -> PlanChoice:
    """The best uniform plan on at most `workers` workers. Raises `PlanError` when none fits into memory.

    All stages have `shards` shards. The bits depend on that number, so it is not chosen here, unless the job gives
    `virtual_shards` on which they depend in its place: then with `shards` 0 any divisor of these is tried. Every plan has the
    ZeRO stage `zero` (None: what costs least time of all with which it fits), gathers parameters for a `gather`, offloads the
    activations of the layers with the indices `offload`, and recomputes those with the indices `recompute`; one that does not
    fit divides state, scatters gradients, where these are open, or recomputes all layers that can be (`profile.recomputable`),
    whatever makes it fit in the least time. Of the plans that are about as fast as the fastest (`ABOUT_AS_FAST`) the one with
    the fewest workers wins, then with the fewest stages, then the faster. A candidate whose busiest worker alone computes
    longer than that is not simulated, unless it has one stage and one or two replicas, which people compare others with.
    """
    simulated: list[EvaluatedCandidate] = []
    ruled_out: list[EvaluatedCandidate] = []
    best_ms = float("inf")
    given = ZeroOption(zero or 0, gather)
    found = enumerate_candidates(profile, workers, microbatches, shards, recompute, virtual_shards, given, zero_holders)
    candidates = [replace(each, plan=each.plan.with_offload(offload)) for each in found] if offload else list(found)
    for candidate in sorted(candidates, key=lambda c: c.bound_ms):
        if candidate.bound_ms > (1 + ABOUT_AS_FAST) * best_ms and not candidate.is_yardstick:
            reason = f"its busiest worker computes {candidate.bound_ms:.4g} ms at least"
            ruled_out.append(EvaluatedCandidate(candidate, reason))
            continue
        oversized = find_oversized_message(profile.crossing(candidate.plan))
        if oversized is not None:
            ruled_out.append(EvaluatedCandidate(candidate, f"{oversized}, too many for messages"))
            continue
        verdict = _evaluated_within_memory(profile, candidate, microbatches, zero_is_open=zero is None)
        if profile.memory_bytes is not None and (excess := (verdict.memory_bytes or 0) - profile.memory_bytes) > 0:
            reason = f"needs {format_mib(verdict.memory_bytes or 0)} a worker, {format_mib(excess)} more than there is"
            ruled_out.append(replace(verdict, reason=reason))
            continue
        simulated.append(verdict)
        assert verdict.predicted_ms is not None
        best_ms = min(best_ms, verdict.predicted_ms)
    if not simulated:
        raise _no_plan_fits(profile, workers, ruled_out, microbatches)
    simulated.sort(key=_order)
    simulated[:BALANCED_CANDIDATES] = [_balanced(profile, v, microbatches) for v in simulated[:BALANCED_CANDIDATES]]
    simulated.sort(key=_order)
    fastest = simulated[0]
    chosen = min((v for v in simulated if _share_slower(v, fastest) <= ABOUT_AS_FAST), key=_size_order)
    others = [replace(v, reason=_why(v, chosen)) for v in simulated if v is not chosen]
    told = [replace(chosen, reason=_why_chosen(chosen, fastest)), *others]
    ruled_out.sort(key=lambda v: (v.predicted_ms is None, v.predicted_ms or v.candidate.bound_ms))
    return PlanChoice((*told, *ruled_out), workers, microbatches, profile.memory_bytes)


def _no_plan_fits(
    profile: ModelProfile, workers: int, ruled_out: Collection[EvaluatedCandidate], microbatches: Microbatches
) -> PlanError:
    """The error for a model of which no plan fits."""
    smallest = min((v.memory_bytes for v in ruled_out if v.memory_bytes is not None), default=0)
    return PlanError(
        f"no plan for {count_noun(workers, 'worker')} fits: the smallest needs {format_mib(smallest)} a worker, "
        f"a worker has {format_mib(profile.memory_bytes or 0)}",
        cure=_offload_advice(profile, ruled_out, microbatches)
        + "use workers with more memory, more of them on other machines, or more microbatches (smaller ones keep less)",
    )


def _offload_advice(profile: ModelProfile, ruled_out: Collection[EvaluatedCandidate], microbatches: Microbatches) -> str:
    """The smallest of the plans that do not fit that does with activations in files, as text; empty if none of a few does."""
    known = sorted((v for v in ruled_out if v.memory_bytes is not None), key=lambda v: v.memory_bytes or 0)
    for verdict in known[:OFFLOAD_CANDIDATES]:
        given, every = verdict.candidate, set(range(len(profile.layers)))
        if given.plan.offload:
            continue
        plan = replace(given.plan, recompute=(), offload=tuple(sorted(every)))
        nbytes = evaluate_candidate(profile, replace(given, plan=plan), microbatches).memory_bytes or 0
        if profile.memory_bytes is not None and nbytes <= profile.memory_bytes:
            return (
                f"offloaded activations (plan.activations_in: {profile.activations_place}) are predicted to fit, with "
                f"{format_mib(nbytes)} a worker: {given.plan.describe()} under {given.schedule}; or "
            )
    return ""


def _evaluated_within_memory(
    profile: ModelProfile, candidate: PlanCandidate, microbatches: Microbatches, *, zero_is_open: bool
) -> EvaluatedCandidate:
    """The candidate; if it does not fit into a worker's memory, what costs least time of all that fits with another division of
    state and scattered gradients, where these are open, and with all layers recomputed that can be; if none fits, what needs
    least."""
    given = evaluate_candidate(profile, candidate, microbatches)
    limit = profile.memory_bytes
    if limit is None or (given.memory_bytes or 0) <= limit:
        return given
    ways = ways_to_fit(
        profile,
        candidate.plan,
        zero_is_open=zero_is_open,
        scatter_is_open=profile.scatter_is_open,
        recompute_is_open=True,
    )
    tried = [(way, evaluate_candidate(profile, replace(candidate, plan=way.plan), microbatches)) for way in ways]
    fit = [each for each in tried if (each[1].memory_bytes or 0) <= limit]
    if fit:
        way, best = cheapest_of_fastest(fit, lambda each: each[1].predicted_ms or 0.0)
    else:
        way, best = min(tried, key=lambda each: each[1].memory_bytes or 0)
    return replace(best, changed_for_memory=str(way), bytes_without=given.memory_bytes) if way.changes else given


def _balanced(profile: ModelProfile, verdict: EvaluatedCandidate, microbatches: Microbatches) -> EvaluatedCandidate:
    """The candidate with the split points of `balance_stages`, if they are faster than its own."""
    candidate = verdict.candidate
    if candidate.stages == 1:
        return verdict
    plan = balance_stages(profile, candidate.plan.with_even_stages(), candidate.schedule, microbatches).plan
    other = evaluate_candidate(profile, replace(candidate, plan=plan), microbatches)
    other = replace(other, changed_for_memory=verdict.changed_for_memory, bytes_without=verdict.bytes_without)
    fits = profile.memory_bytes is None or (other.memory_bytes or 0) <= profile.memory_bytes
    fits = fits and find_oversized_message(profile.crossing(plan)) is None
    return min(verdict, other, key=_order) if fits else verdict


def reachable_shard_counts(plan: ParallelPlan) -> tuple[int, ...]:
    """Numbers of shards that a run of this plan may come to have, most first: those of its stages, and their divisors."""
    own = {stage.shards for stage in plan.stages}
    return tuple(sorted({d for count in own for d in range(1, count + 1) if count % d == 0}, reverse=True))


def reachable_virtual_shard_counts(plan: ParallelPlan, virtual_shards: int) -> tuple[int, ...]:
    """Numbers of virtual shards that the layers of a run of this plan may come to have: the job's, if it gives one."""
    return (virtual_shards,) if virtual_shards else reachable_shard_counts(plan)


def balance_stages(
    profile: ModelProfile, even: ParallelPlan, schedule: str | MakeSchedule, microbatches: Microbatches
) -> StageBalance:
    """The best cut of the layers of `even` into its stages, beside `even` itself. `schedule`: its name, or what makes it.

    If no cut fits into memory, the fastest one is the best.
    """

    def make(plan: ParallelPlan) -> Schedule:
        routing, crossing = MicrobatchRouting(plan, microbatches), profile.crossing(plan)
        if isinstance(schedule, str):
            return registry.build_schedule(schedule, routing, connections=crossing)
        return schedule(routing, crossing)

    orders = make(even)
    # Where workers share this machine's processors every cut takes equally long. But the run may join a larger cluster.
    alone = replace(profile, processors=None)
    stages = [stage for stage in even.stages for _ in range(stage.first, stage.last)]
    grids = consecutive_grids((1, stage.shards) for stage in stages)
    by_layer = tuple(
        StagePlan(i, i + 1, grid, division=stage.division) for i, (grid, stage) in enumerate(zip(grids, stages, strict=True))
    )
    layer_costs = simulation_costs(alone, replace(even, stages=by_layer), split=any(map(splits_backward, orders)))

    def found(limit: int | None) -> StageBalance:
        def predict(plan: ParallelPlan) -> tuple[Timeline, int]:
            step, memory = predict_step(alone, plan, make(plan), microbatches)
            return step, max(0, max(memory) - limit) if limit is not None else 0

        return find_balanced_stages(even, orders, layer_costs, predict, is_chain=profile.is_chain)

    balance = found(profile.memory_bytes)
    return found(None) if balance.best_lacks_bytes else balance


def evaluate_candidate(profile: ModelProfile, candidate: PlanCandidate, microbatches: Microbatches) -> EvaluatedCandidate:
    """A candidate with its simulated step."""
    timeline, memory = predict_step(profile, candidate.plan, candidate.schedule, microbatches)
    return EvaluatedCandidate(candidate, "simulated", timeline.makespan_ms, timeline.bubble_of_total, max(memory))


def _order(verdict: EvaluatedCandidate) -> tuple[float, int, int, int]:
    """Sort key: time, then workers, memory, chunks. Rounded to a nanosecond: equal schedules differ in their last bits."""
    ms = verdict.predicted_ms if verdict.predicted_ms is not None else float("inf")
    return round(ms, 6), verdict.candidate.plan.world, verdict.memory_bytes or 0, verdict.candidate.chunks


def _size_order(verdict: EvaluatedCandidate) -> tuple[int, int, float, int, int, int]:
    """Sort key of plans of equal worth: workers, then stages, then as `_order`."""
    return verdict.candidate.plan.world, verdict.candidate.stages, *_order(verdict)


def _share_slower(verdict: EvaluatedCandidate, than: EvaluatedCandidate) -> float:
    """By which share of the other's step a candidate's step is longer."""
    return (verdict.predicted_ms or 0.0) / than.predicted_ms - 1 if than.predicted_ms else 0.0


def _why(verdict: EvaluatedCandidate, chosen: EvaluatedCandidate) -> str:
    slower = _share_slower(verdict, chosen)
    if abs(slower) < 5e-4:
        return "as fast"
    return f"{100 * slower:.1f} % slower" if slower > 0 else f"{-100 * slower:.1f} % faster"


def _why_chosen(chosen: EvaluatedCandidate, fastest: EvaluatedCandidate) -> str:
    slower = _share_slower(chosen, fastest)
    if slower < 5e-4:
        return "chosen: the fastest"
    fewer = "workers" if chosen.candidate.plan.world < fastest.candidate.plan.world else "stages"
    return f"chosen: the fewest {fewer} within {100 * ABOUT_AS_FAST:g} % of the fastest"


def format_mib(nbytes: int) -> str:
    """Bytes as MiB in words."""
    return f"{nbytes / 2**20:,.1f} MiB"
