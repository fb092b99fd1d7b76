"""Inserts the offload of activations (Rhu et al. 2016, arXiv:1602.08124) into a schedule.

`Forward` becomes `OffloadedForward`, which writes activations out of memory, and `Fetch` is put one instruction ahead of that
which needs them: they are read while another microbatch is computed. So at most two microbatches of a stage's activations are
there, beside what is still to be written. Where layers of the stage are recomputed, too, `CheckpointedForward` becomes
`OffloadedForward`, and `FetchKeptInputs` comes before `Recompute`.

A forward keeps its activations if they would be read right after they were written.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from raypar.errors import ScheduleError
from raypar.plan import ParallelPlan
from raypar.schedule.instructions import (
    ACTIVATIONS,
    KEPT_INPUTS,
    RESIDENT,
    VALUES,
    Compute,
    Fetch,
    FetchKeptInputs,
    Forward,
    Instruction,
    OffloadedForward,
    Order,
    Schedule,
)

_FETCH: dict[str, type[Compute]] = {ACTIVATIONS: Fetch, KEPT_INPUTS: FetchKeptInputs}
"""What a forward without offloading keeps -> the instruction that brings it back."""

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
    """Raise `ScheduleError` if the schedule offloads a stage that has no offloaded layers in the plan."""
    for rank, order in enumerate(schedule):
        for i in order:
            if isinstance(i, Compute) and RESIDENT in i.allocates and not plan.offloaded_layers(i.stage):
                raise ScheduleError(
                    f"{plan.coordinate(rank)}: the schedule has {i}, but plan.offload names no layer of stage {i.stage}",
                    cure=f"set plan.activations_in (and plan.offload: patterns of layers), or write "
                    f"{Forward(i.stage, i.microbatch)} and leave {Fetch(i.stage, i.microbatch)} out",
                )


def stages_not_worth_offloading(schedule: Schedule, plan: ParallelPlan) -> tuple[int, ...]:
    """Stages with offloaded layers that the schedule never offloads, because each backward follows its forward closely."""
    offloaded = {i.stage for order in schedule for i in order if RESIDENT in i.allocates}
    return tuple(s for s in range(len(plan.stages)) if plan.offloaded_layers(s) and s not in offloaded)


def describe_stages_not_worth_offloading(stages: Sequence[int]) -> str:
    """Why these stages keep their activations in memory, as text; empty for no stage."""
    if not stages:
        return ""
    keep = "stage {} keeps its" if len(stages) == 1 else "stages {} keep their"
    named = keep.format(", ".join(map(str, stages)))
    return f"{named} activations in memory: each backward follows its forward so closely that nothing would be gained"


def _places_of_fetches(order: Order, plan: ParallelPlan, stages: set[int]) -> dict[_Key, tuple[int, bool]]:
    """(stage, microbatch) of these stages -> where in the order its fetch is to stand, and whether other work comes between its
    forward and that.

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
            before, fetched_at = last[grid]
            found[key] = fetched_at, before > forward[key]
        last[grid] = last.get(grid, (-1, -1))[1], place
    return found


def _insert(order: Order, fetches: dict[_Key, tuple[int, bool]], kept: set[_Key]) -> Order:
    """One worker's order with offloading. `fetches`: of `_places_of_fetches`; `kept`: what stays in memory."""
    before: dict[int, list[_Key]] = {}
    for key, (place, _) in fetches.items():
        if key not in kept:
            before.setdefault(place, []).append(key)
    found: list[Compute] = []
    without: dict[_Key, str] = {}
    """What the forward of a microbatch would keep without offloading."""
    for place, i in enumerate(order):
        found += [_FETCH[without[key]](*key) for key in before.get(place, ())]
        key = (i.stage, i.microbatch)
        if key in fetches and key not in kept and VALUES in i.makes:
            (without[key],) = i.allocates
            i = OffloadedForward(*key)
        found.append(i)
    return tuple(found)
