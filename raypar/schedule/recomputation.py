"""Inserts activation recomputation (Chen et al. 2016, arXiv:1604.06174) into a schedule.

`Forward` becomes `CheckpointedForward`, which keeps its inputs only, and `Recompute` is put right before the instruction that
needs the activations. `Recompute` waits for no other worker. So it costs no time where the worker would wait for a gradient
anyway, as in the cooldown of 1F1B or after the warmup.

A forward keeps its activations if the next instruction needs them: dropping them would free memory for nothing. Under 1F1B this
holds for every forward of the last stage.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from raypar.errors import ScheduleError
from raypar.plan import ParallelPlan
from raypar.schedule.instructions import (
    ACTIVATIONS,
    KEPT_INPUTS,
    CheckpointedForward,
    Compute,
    Forward,
    Instruction,
    Order,
    Recompute,
    Schedule,
)

_CHECKPOINTED: dict[type[Compute], type[Compute]] = {Forward: CheckpointedForward}
"""Forward that keeps its activations -> the one that keeps its inputs only."""


def insert_recomputation(schedule: Schedule, plan: ParallelPlan) -> Schedule:
    """The schedule with the recomputation that the plan asks for. A schedule that recomputes already is returned unchanged."""
    stages = {index for index in range(len(plan.stages)) if plan.recomputed_layers(index)}
    if not stages or any(map(has_recomputation, schedule)):
        return schedule
    kept = _kept_activations(schedule, stages)
    return tuple(_insert(order, stages, kept) for order in schedule)


def has_recomputation(order: Iterable[Instruction]) -> bool:
    """Whether some forward of the order keeps its inputs only."""
    return any(KEPT_INPUTS in i.allocates for i in order)


def check_recomputed_stages(schedule: Sequence[Iterable[Instruction]], plan: ParallelPlan) -> None:
    """Raise `ScheduleError` if the schedule recomputes a stage that has no recomputed layers in the plan."""
    for rank, order in enumerate(schedule):
        for i in order:
            if isinstance(i, Compute) and KEPT_INPUTS in i.allocates and not plan.recomputed_layers(i.stage):
                raise ScheduleError(
                    f"{plan.coordinate(rank)}: the schedule has {i}, but plan.recompute names no layer of stage {i.stage}",
                    cure=f"set plan.recompute (full, or patterns of layers), or write {Forward(i.stage, i.microbatch)} and "
                    f"leave {Recompute(i.stage, i.microbatch)} out",
                )


def stages_not_worth_recomputing(schedule: Schedule, plan: ParallelPlan) -> tuple[int, ...]:
    """Stages with recomputed layers that the schedule never recomputes, because each backward follows its forward at once."""
    recomputed = {i.stage for order in schedule for i in order if KEPT_INPUTS in i.allocates}
    return tuple(s for s in range(len(plan.stages)) if plan.recomputed_layers(s) and s not in recomputed)


def describe_stages_not_worth_recomputing(stages: Sequence[int]) -> str:
    """Why these stages keep their activations, as text; empty for no stage."""
    if not stages:
        return ""
    keep = "stage {} keeps its" if len(stages) == 1 else "stages {} keep their"
    named = keep.format(", ".join(map(str, stages)))
    return f"{named} activations: each backward follows its forward at once, so nothing would be gained"


def _kept_activations(schedule: Schedule, stages: set[int]) -> set[tuple[int, int]]:
    """(stage, microbatch) of these stages whose backward follows its forward at once, on every shard that computes it."""
    at_once: dict[tuple[int, int], bool] = {}
    for order in schedule:
        for place, i in enumerate(order):
            if i.stage in stages and type(i) in _CHECKPOINTED:
                key = (i.stage, i.microbatch)
                at_once[key] = at_once.get(key, True) and _backward_follows_at_once(order, place)
    return {key for key, so in at_once.items() if so}


def _insert(order: Order, stages: set[int], kept: set[tuple[int, int]]) -> Order:
    """One worker's order with recomputation on these stages. `kept`: (stage, microbatch) whose activations are not dropped."""
    found: list[Compute] = []
    dropped: set[tuple[int, int]] = set()  # (stage, microbatch) whose activations are dropped
    for i in order:
        key = (i.stage, i.microbatch)
        if i.stage in stages and type(i) in _CHECKPOINTED and key not in kept:
            dropped.add(key)
            found.append(_CHECKPOINTED[type(i)](i.stage, i.microbatch))
            continue
        if ACTIVATIONS in i.frees and key in dropped:
            found.append(Recompute(i.stage, i.microbatch))
        found.append(i)
    return tuple(found)


def _backward_follows_at_once(order: Order, place: int) -> bool:
    """Whether the instruction after the forward at `place` needs its activations."""
    i, after = order[place], order[place + 1 : place + 2]
    return any(ACTIVATIONS in n.frees and (n.stage, n.microbatch) == (i.stage, i.microbatch) for n in after)
