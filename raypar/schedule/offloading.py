"""Inserts the offload of activations (Rhu et al. 2016, arXiv:1602.08124) into a schedule.

`Forward` becomes `OffloadedForward`, which writes activations out of memory, and `Fetch` is put one instruction ahead of that
which needs them: what it needs first is read while another microbatch is computed. The backward reads the rest layer by layer.
So two layers of a microbatch are there, and the first one of the next microbatch, beside what is still to be written. Where
layers of the stage are recomputed, too, `CheckpointedForward` becomes `OffloadedCheckpointedForward`, and `FetchKeptInputs`
comes before `Recompute`.

A forward keeps its activations if its backward follows so closely that they would be read right after they were written, and
the stage offloads so few layers that the backward has all of them at once.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from raypar.errors import ScheduleError
from raypar.plan import ParallelPlan
from raypar.plan.offloading import LAYERS_AT_A_TIME
from raypar.schedule.instructions import (
    ACTIVATIONS,
    KEPT_INPUTS,
    RESIDENT,
    VALUES,
    CheckpointedForward,
    Compute,
    Fetch,
    FetchKeptInputs,
    Forward,
    Instruction,
    OffloadedCheckpointedForward,
    OffloadedForward,
    Order,
    Schedule,
)

_OFFLOADED: dict[type[Compute], type[Compute]] = {Forward: OffloadedForward, CheckpointedForward: OffloadedCheckpointedForward}
"""A forward -> the one that offloads."""
_KEPT: dict[type[Compute], type[Compute]] = {offloaded: kept for kept, offloaded in _OFFLOADED.items()}
_FETCH: dict[type[Compute], type[Compute]] = {OffloadedForward: Fetch, OffloadedCheckpointedForward: FetchKeptInputs}
"""A forward that offloads -> the instruction that brings back what the one that keeps would have kept."""

_Key = tuple[int, int]
"""(stage, microbatch)."""


def insert_offloading(schedule: Schedule, plan: ParallelPlan) -> Schedule:
    """The schedule, with its recomputation, with the offloading that the plan asks for. A schedule that offloads already is
    returned unchanged."""
    stages = {index for index in range(len(plan.stages)) if plan.offloaded_layers(index)}
    if not stages or any(map(has_offloading, schedule)):
        return schedule
    places = [_places_of_fetches(order, plan, stages) for order in schedule]
    kept = {key for fetches in places for key, (_, gains) in fetches.items() if not gains}
    return tuple(_insert(order, fetches, kept) for order, fetches in zip(schedule, places, strict=True))


def has_offloading(order: Iterable[Instruction]) -> bool:
    """Whether some forward of the order writes activations out of memory."""
    return any(RESIDENT in i.allocates for i in order)


def check_offloaded_stages(schedule: Sequence[Iterable[Instruction]], plan: ParallelPlan) -> None:
    """Raise `ScheduleError` if the schedule offloads a stage that has no offloaded layers in the plan, or brings back what its
    forward has not left."""
    for rank, order in enumerate(schedule):
        fetched: dict[_Key, type[Compute]] = {}
        for i in order:
            if not isinstance(i, Compute):
                continue
            expected = fetched.setdefault((i.stage, i.microbatch), _FETCH.get(type(i), type(i)))
            if RESIDENT in i.frees and type(i) is not expected:
                needed = expected(i.stage, i.microbatch)
                raise ScheduleError(
                    f"{plan.coordinate(rank)}: the schedule has {i} after a forward that needs {needed}",
                    cure=f"write {OffloadedForward.letter} with {Fetch.letter}, and, where layers are recomputed, "
                    f"{OffloadedCheckpointedForward.letter} with {FetchKeptInputs.letter}",
                )
            if RESIDENT in i.allocates and not plan.offloaded_layers(i.stage):
                raise ScheduleError(
                    f"{plan.coordinate(rank)}: the schedule has {i}, but plan.offload names no layer of stage {i.stage}",
                    cure=f"set plan.activations_in (and plan.offload: patterns of layers), or write "
                    f"{Forward(i.stage, i.microbatch)} and leave {Fetch(i.stage, i.microbatch)} out",
                )


def without_offloading(schedule: Schedule) -> Schedule:
    """The same schedule, in which all activations stay in memory."""
    return tuple(
        tuple(_KEPT[type(i)](i.stage, i.microbatch) if type(i) in _KEPT else i for i in order if RESIDENT not in i.frees)
        for order in schedule
    )


def stages_not_worth_offloading(schedule: Schedule, plan: ParallelPlan) -> tuple[int, ...]:
    """Stages with offloaded layers that the schedule never offloads: each backward follows its forward closely, and would have
    all of these layers at once."""
    offloaded = {i.stage for order in schedule for i in order if RESIDENT in i.allocates}
    return tuple(s for s in range(len(plan.stages)) if plan.offloaded_layers(s) and s not in offloaded)


def describe_stages_not_worth_offloading(stages: Sequence[int]) -> str:
    """Why these stages keep their activations in memory, as text; empty for no stage."""
    if not stages:
        return ""
    keep = "stage {} keeps its" if len(stages) == 1 else "stages {} keep their"
    named = keep.format(", ".join(map(str, stages)))
    return (
        f"{named} activations in memory: each backward follows its forward at once, and would have those of {LAYERS_AT_A_TIME} "
        "layers there, which are all"
    )


def _places_of_fetches(order: Order, plan: ParallelPlan, stages: set[int]) -> dict[_Key, tuple[int, bool]]:
    """(stage, microbatch) of these stages -> where in the order its fetch is to stand, and whether memory is saved: other work
    comes between its forward and that, or the backward does not have all at once.

    Of instructions between, only those count that all shards of a replica have alike: of stages on the same workers.
    """
    found: dict[_Key, tuple[int, bool]] = {}
    forward: dict[_Key, int] = {}
    last: dict[int, tuple[int, int]] = {}
    """Grid of workers -> places of its last two instructions so far, the older first."""
    for place, i in enumerate(order):
        key, grid = (i.stage, i.microbatch), plan.grid_of_stage[i.stage]
        if i.stage in stages and VALUES in i.makes:
            forward[key] = place
        elif key in forward and key not in found and not {ACTIVATIONS, KEPT_INPUTS}.isdisjoint(i.frees):
            before, ahead = last[grid]
            has_more = len(plan.offloaded_layers(i.stage)) > LAYERS_AT_A_TIME
            found[key] = (place if ahead == forward[key] else ahead), has_more or before > forward[key]
        last[grid] = last.get(grid, (-1, -1))[1], place
    return found


def _insert(order: Order, fetches: dict[_Key, tuple[int, bool]], kept: set[_Key]) -> Order:
    """One worker's order with offloading. `fetches`: of `_places_of_fetches`; `kept`: what stays in memory."""
    before: dict[int, list[_Key]] = {}
    for key, (place, _) in fetches.items():
        if key not in kept:
            before.setdefault(place, []).append(key)
    found: list[Compute] = []
    forwards: dict[_Key, type[Compute]] = {}
    for place, i in enumerate(order):
        found += [_FETCH[forwards[key]](*key) for key in before.get(place, ())]
        key = (i.stage, i.microbatch)
        if key in fetches and key not in kept and VALUES in i.makes:
            forwards[key] = _OFFLOADED[type(i)]
            i = forwards[key](*key)
        found.append(i)
    return tuple(found)
