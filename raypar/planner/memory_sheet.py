"""What a worker is predicted to hold in memory, and, where that was too much, which plans are predicted to hold less."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, replace
from itertools import combinations

from raypar.errors import PlanError
from raypar.plan import Microbatches, MicrobatchRouting, ParallelPlan, StagePlan
from raypar.plan.offloading import HOST
from raypar.plan.ownership import SHARED_OUT_FROM, STATE_KIND_NOUNS, StateKind
from raypar.plan.stage_plan import GATHER_SPANS, GatherSpan
from raypar.plan.wording import count_noun
from raypar.planner.candidate_plans import balanced_cuts
from raypar.planner.gathered_parameters import gathered_bytes
from raypar.planner.model_profile import MirrorPlace, ModelProfile
from raypar.planner.offloaded_activations import bytes_in_place, unwritten_limits
from raypar.planner.plan_search import format_mib
from raypar.planner.predicted_step import (
    bucket_bytes,
    gather_bytes,
    kept_bytes_by_kind,
    mirror_bytes,
    offloaded_bytes,
    state_bytes,
)
from raypar.planner.zero_options import ZeroOption, zero_options
from raypar.schedule import registry
from raypar.schedule.instructions import ACTIVATIONS, FETCHED, KEPT_INPUTS, RESIDENT, STASH, WRITTEN, Schedule
from raypar.schedule.step_timeline import peak_kept_bytes

BUCKETS = "buckets"
"""The kind of memory in which gradients are on their way between replicas."""
GATHER = "gather"
"""The kind of memory in which parameters are on their way from their owners."""
GATHERED = "gathered"
"""The kind of memory of whole parameters that layers compute with, beside those that a worker keeps, where replicas divide
them."""
UNWRITTEN = "unwritten"
"""The kind of memory of offloaded activations that are on their way to files, or to the host's memory."""
MIRROR = "mirror"
"""The kind of memory of the mirror's copies."""
KEPT_NOUNS: dict[str, str] = {
    GATHERED: "gathered parameters",
    BUCKETS: "buckets of gradients",
    GATHER: "parameters on their way",
    UNWRITTEN: "activations on their way out",
    MIRROR: "the mirror's copies",
    ACTIVATIONS: "activations",
    KEPT_INPUTS: "inputs of recomputed layers",
    RESIDENT: "activations beside offloaded ones",
    FETCHED: "activations that a backward reads",
    STASH: "stash for weight gradients",
}
"""Kind of memory beside the state -> its name in sheets."""


@dataclass(frozen=True, slots=True)
class MemorySheet:
    """Bytes that one worker holds."""

    state: Mapping[StateKind, int]
    """Kind of state -> its bytes."""
    kept: Mapping[str, int]
    """Kind of memory kept for backward passes -> its bytes at the moment of the step when all kinds together take most."""
    buckets: int = 0
    """Buckets of gradients that are on their way between replicas."""
    gather: int = 0
    """Parameters that are on their way from their owners, at most."""
    gathered: int = 0
    """Whole parameters that layers compute with, beside those that the worker keeps."""
    mirror: int = 0
    """The mirror's copies, when they are most."""
    mirror_files: int = 0
    """The mirror's copies that lie in files; they are no part of the memory."""
    optimizer_files: int = 0
    """State of the optimizer, masters and averages that lie in files; they are no part of the memory."""
    unwritten: int = 0
    """Offloaded activations that are on their way to where they lie, at that moment."""
    activation_files: int = 0
    """Offloaded activations that lie in files, at most; they are no part of the memory."""
    activation_host: int = 0
    """Offloaded activations that lie in pinned memory of a GPU's host, at most; they are no part of the GPU's."""

    @property
    def by_kind(self) -> dict[str, int]:
        """All kinds of memory -> their bytes, as data."""
        beside = {GATHERED: self.gathered, BUCKETS: self.buckets, GATHER: self.gather, MIRROR: self.mirror}
        beside[UNWRITTEN] = self.unwritten
        return {**{str(kind): nbytes for kind, nbytes in self.state.items()}, **beside, **self.kept}

    @property
    def total(self) -> int:
        """Bytes of all that is counted."""
        return sum(self.by_kind.values())

    def __str__(self) -> str:
        state = ", ".join(
            f"{format_mib(nbytes)} of {STATE_KIND_NOUNS[kind]}"
            for kind, nbytes in self.state.items()
            if nbytes or kind not in ("widened", "buffer", "average")
        )
        kinds = (GATHERED, BUCKETS, GATHER, MIRROR, UNWRITTEN)
        beside = {kind: nbytes for kind, nbytes in self.by_kind.items() if kind in kinds and nbytes}
        buckets = "".join(f", {format_mib(nbytes)} of {KEPT_NOUNS[kind]}" for kind, nbytes in beside.items())
        parts = [(kind, nbytes) for kind, nbytes in self.kept.items() if nbytes or kind == ACTIVATIONS]
        kept = ", ".join(f"{format_mib(nbytes)} of {KEPT_NOUNS[kind]}" for kind, nbytes in parts)
        return f"{state}{buckets} and at most {kept}: {format_mib(self.total)}"


def memory_sheets(
    profile: ModelProfile, plan: ParallelPlan, schedule: str | Schedule, microbatches: Microbatches
) -> tuple[MemorySheet, ...]:
    """By rank, the predicted memory of a plan's workers under a schedule (its name, or its orders)."""
    routing = MicrobatchRouting(plan, microbatches)
    crossing = profile.crossing(plan)
    orders = registry.build_schedule(schedule, routing, connections=crossing) if isinstance(schedule, str) else schedule
    sizes = kept_bytes_by_kind(profile, routing, orders)
    kept = [peak_kept_bytes(order, sizes, unwritten_limits(profile, plan) if plan.offload else ()) for order in orders]
    state = state_bytes(profile, routing, orders, [sum(peak.values()) for peak in kept])
    unwritten = [peak.pop(WRITTEN, 0) for peak in kept]
    placed, none = bytes_in_place(profile, routing, orders), (0,) * plan.world
    beside = zip(
        kept,
        bucket_bytes(profile, routing),
        gather_bytes(profile, plan),
        gathered_bytes(profile, plan, orders),
        *mirror_bytes(profile, plan),
        offloaded_bytes(profile, plan),
        unwritten,
        *((none, placed) if profile.activations_place == HOST else (placed, none)),
        strict=True,
    )
    return tuple(
        MemorySheet({kind: by_rank[rank] for kind, by_rank in state.items()}, *of_rank) for rank, of_rank in enumerate(beside)
    )


@dataclass(frozen=True, slots=True)
class HoldersSheet:
    """What the largest worker of a plan holds with some number of holders of each part of divided state."""

    holders: int
    """How many replicas hold each part."""
    is_mirrored: bool
    """Whether the mirror is on."""
    sheet: MemorySheet
    """The worker's sheet."""

    @property
    def divided_bytes(self) -> int:
        """The state that replicas divide from the first ZeRO stage on."""
        return sum(nbytes for kind, nbytes in self.sheet.state.items() if SHARED_OUT_FROM[kind] == 1)


def sheets_by_holders(
    profile: ModelProfile, plan: ParallelPlan, schedule: str | Schedule, microbatches: Microbatches
) -> tuple[HoldersSheet, ...]:
    """The plan with one holder of each part and with two, with the mirror that it has and, for two, without; empty where
    replicas divide nothing, or are so few that two holders save nothing."""
    if not any(stage.zero and stage.replicas > 2 for stage in plan.stages):
        return ()
    mirrored = profile.mirror is not None
    cases = [(1, mirrored), (2, mirrored), *[(2, False)] * mirrored]
    found = []
    for holders, on in cases:
        known = profile if on else replace(profile, mirror=None)
        sheets = memory_sheets(known, plan.with_zero(plan.zero_levels, holders), schedule, microbatches)
        found.append(HoldersSheet(holders, on, max(sheets, key=lambda sheet: sheet.total + sheet.mirror_files)))
    return tuple(found)


def out_of_memory_advice(
    profile: ModelProfile, plan: ParallelPlan, schedule: str, microbatches: Microbatches, rank: int
) -> tuple[str, str]:
    """(what a rank holds and may hold, which plans would fit): two sentences for the error of a worker without memory."""
    held = memory_sheets(profile, plan, schedule, microbatches)[rank]
    stages = ", ".join(str(stage) for stage in plan.stages_of(rank))
    what = f"stage {stages} is predicted to hold {held}"
    # What is held did not fit, whatever memory was measured before: so only less than that may fit.
    limit = held.total
    if profile.memory_bytes is not None:
        what += f"; when the job was planned, a worker had {format_mib(profile.memory_bytes)}"
        limit = min(limit, profile.memory_bytes)
    return what, describe_changes_that_fit(profile, plan, schedule, microbatches, limit)


def describe_changes_that_fit(
    profile: ModelProfile, plan: ParallelPlan, schedule: str | Schedule, microbatches: Microbatches, limit: int
) -> str:
    """A sentence with changes to a plan that bring its largest worker below `limit` bytes, the smallest change first."""
    ways = list(_changes_that_fit(profile, plan, schedule, microbatches, limit))
    if not ways:
        least = f"less than {format_mib(limit)} a worker"
        return (
            "neither recomputation nor plan.zero, more stages, another schedule or smaller microbatches are predicted to take "
            f"{least}: use larger workers"
        )
    return f"predicted to fit: {'; or '.join(ways)}"


@dataclass(frozen=True, slots=True)
class _Change:
    """A change to a job that leaves its results as they are, and may need less memory."""

    text: str
    """What to set."""
    mirror: MirrorPlace | None = None
    """Where the mirror's copies lie then; None: where they lie now."""
    recompute: tuple[int, ...] | None = None
    """The layers that are recomputed then; None: as now."""
    zero: ZeroOption | None = None
    """How replicas divide state then; None: as now."""
    scatters: bool = False
    """Whether gradients are scattered then."""
    offloads: bool = False
    """Whether the optimizer's state lies in files then."""
    offloads_activations: bool = False
    """Whether activations of all layers that are not recomputed lie in files then."""


def _changes(profile: ModelProfile, plan: ParallelPlan, schedule: str | Schedule) -> list[_Change]:
    """The changes that may help, those that cost least first."""
    every = tuple(range(len(profile.layers)))
    found = [_Change("elastic.mirror_in=FOLDER", mirror="files")] if profile.mirror == "memory" else []
    if plan.recompute != every and not plan.offload and isinstance(schedule, str):
        found.append(_Change("plan.recompute=full", recompute=every))
        found.append(_Change(f"plan.activations_in={profile.activations_place}", offloads_activations=True))
    gathers = list[_Change]()
    for option in zero_options(profile, plan):
        if option.gather != "step" and any(_is_shorter(option.gather, stage) for stage in plan.stages):
            text = f"plan.gather={option.gather}" if min(plan.zero_levels) == option.level else str(option)
            gathers.append(_Change(text, zero=option))
        elif not plan.most_zero:
            found.append(_Change(str(option), zero=option))
    if isinstance(schedule, str) and plan.gradients == "fold" and 2 in profile.zero_levels and _may_scatter(plan):
        beside = "" if plan.most_zero > 1 else "plan.zero=2 and "
        found.append(_Change(f"{beside}plan.gradients=scatter", zero=ZeroOption(2) if beside else None, scatters=True))
    found += gathers
    if not profile.offloads_optimizer and profile.most_stages != 1:
        found.append(_Change("plan.optimizer_in=FOLDER", offloads=True))
    return found


def changes_beside_zero(
    profile: ModelProfile, plan: ParallelPlan, schedule: str | Schedule, *, may_recompute: bool = True
) -> list[str]:
    """What may make a plan need less memory in another way than by dividing state, those that cost least first.
    `may_recompute`: False where recomputation was tried already."""
    changes = [each for each in _changes(profile, plan, schedule) if each.zero is None and not each.scatters]
    return [each.text for each in changes if may_recompute or each.recompute is None]


def _is_shorter(span: GatherSpan, stage: StagePlan) -> bool:
    """Whether parameters of a stage that replicas could divide would be whole for a shorter time."""
    now = stage.gather_in_effect or "step"
    return stage.replicas > stage.zero_holders and GATHER_SPANS.index(span) > GATHER_SPANS.index(now)


def _may_scatter(plan: ParallelPlan) -> bool:
    """Whether replicas of the plan may scatter gradients to owners."""
    return bool(plan.with_zero(2).most_zero)


def _changed(profile: ModelProfile, plan: ParallelPlan, changes: Iterable[_Change]) -> tuple[ModelProfile, ParallelPlan]:
    """Profile and plan after some changes."""
    for change in changes:
        profile = profile if change.mirror is None else replace(profile, mirror=change.mirror)
        profile = replace(profile, offloads_optimizer=profile.offloads_optimizer or change.offloads)
        plan = plan if change.recompute is None else replace(plan, recompute=change.recompute)
        plan = plan if change.zero is None else change.zero.of(plan)
        plan = plan.with_gradients("scatter") if change.scatters else plan
        if change.offloads_activations:
            plan = plan.with_offload(set(range(len(profile.layers))).difference(plan.recompute))
    return profile, plan


def _changes_that_fit(
    profile: ModelProfile, plan: ParallelPlan, schedule: str | Schedule, microbatches: Microbatches, limit: int
) -> Iterator[str]:
    """Each change that fits, as text: those that cost little first, then others, the smallest of each kind. Changes are
    combined only if nothing fits without.
    """
    changes = _changes(profile, plan, schedule)
    several = [
        each
        for count in range(2, len(changes) + 1)
        for each in combinations(changes, count)
        if sum(change.zero is not None for change in each) <= 1
        and sum(change.recompute is not None or change.offloads_activations for change in each) <= 1
    ]
    found = False
    for each in [*((change,) for change in changes), *several]:
        if found and (len(each) > 1 or each[0].zero not in (None, ZeroOption(1))):
            break  # more changes, or a higher ZeRO stage, than are needed
        known, other = _changed(profile, plan, each)
        most = largest_worker_bytes(known, other, schedule, microbatches)
        if most is not None and most < limit:
            found = True
            yield f"{' and '.join(change.text for change in each)} ({format_mib(most)} a worker, the same results)"
    for each in [(), *((change,) for change in changes), *several]:
        if found and each:
            return
        known, other = _changed(profile, plan, each)
        beside = f" with {' and '.join(change.text for change in each)}" if each else ""
        for way in _other_changes_that_fit(known, other, schedule, microbatches, limit, beside):
            found = True
            yield way


def _other_changes_that_fit(
    profile: ModelProfile, plan: ParallelPlan, schedule: str | Schedule, microbatches: Microbatches, limit: int, beside: str
) -> Iterator[str]:
    """Each change that fits beside recomputation: the fewest more stages, 1F1B, and the fewest more microbatches.

    `beside`: what else is changed, for the text.
    """
    layers, replicas = len(profile.layers), max(stage.replicas for stage in plan.stages)
    shards = max(stage.shards for stage in plan.stages)
    for stages in range(len(plan.grids) + 1, layers + 1):
        cuts = balanced_cuts(profile.work_sums(plan.recompute), stages)
        deeper = ParallelPlan.mesh(dp=replicas, pp=stages, tp=shards, layers=layers, cuts=cuts, recompute=plan.recompute)
        deeper = deeper.with_zero(max(plan.zero_levels), plan.zero_holders).with_gather(plan.gather_spans)
        deeper = deeper.with_offload(plan.offload)
        most = largest_worker_bytes(profile, deeper, "1f1b", microbatches)
        if most is not None and most < limit:
            more = f"{count_noun(deeper.world, 'worker')}, " if deeper.world != plan.world else ""
            yield f"plan.stages={stages} under 1f1b{beside} ({more}{format_mib(most)} a worker)"
            break
    if schedule != "1f1b" and registry.schedule_fits_plan("1f1b", plan):
        most = largest_worker_bytes(profile, plan, "1f1b", microbatches)
        if most is not None and most < limit:
            named = schedule if isinstance(schedule, str) else "the file's"
            yield f"schedule 1f1b instead of {named}{beside} ({format_mib(most)})"
    count = 2 * microbatches.count
    while count <= microbatches.batch_size and isinstance(schedule, str):
        parts = tuple(replace(x, activation_bytes=x.activation_bytes * microbatches.count // count) for x in profile.layers)
        finer = Microbatches(count, microbatches.blocks, microbatches.batch_size)
        most = largest_worker_bytes(replace(profile, layers=parts), plan, schedule, finer)
        if most is not None and most < limit:
            yield (
                f"microbatches={count} instead of {microbatches.count}{beside} ({format_mib(most)}; another sum, so other bits)"
            )
            break
        count *= 2


def largest_worker_bytes(
    profile: ModelProfile, plan: ParallelPlan, schedule: str | Schedule, microbatches: Microbatches
) -> int | None:
    """Predicted memory of the largest worker in bytes; None if the schedule cannot run the plan."""
    try:
        return max(sheet.total for sheet in memory_sheets(profile, plan, schedule, microbatches))
    except PlanError:
        return None
