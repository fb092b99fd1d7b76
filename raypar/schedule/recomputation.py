"""Recomputation in a schedule: forwards that keep their inputs only, and an instruction that makes the activations again.

The forward of a microbatch is exchanged for one that keeps its inputs, and `Recompute` is put right before the instruction
that needs the activations. `Recompute` waits for nothing from other workers. So where the worker would wait for the gradient
anyway, in the cooldown of 1F1B or after the warmup, it costs no time. (Recomputation: Chen et al. 2016, arXiv:1604.06174.)

A forward that is followed at once by the instruction that needs its activations keeps them: to drop them would free no memory
for anybody. So does every forward of the last stage under 1F1B.
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
"""Instruction that keeps its activations -> the one that keeps its inputs in their place."""


def insert_recomputation(schedule: Schedule, plan: ParallelPlan) -> Schedule:
    """The schedule with the recomputation that the plan asks for; the schedule as it is where it has recomputation already."""
    stages = {index for index in range(len(plan.stages)) if plan.recomputed_layers(index)}
    if not stages or any(map(has_recomputation, schedule)):
        return schedule
    return tuple(_insert(order, stages) for order in schedule)


def has_recomputation(order: Iterable[Instruction]) -> bool:
    """Whether some forward in the list keeps its inputs only."""
    return any(KEPT_INPUTS in i.allocates for i in order)


def check_recomputed_stages(schedule: Sequence[Iterable[Instruction]], plan: ParallelPlan) -> None:
    """Raise `ScheduleError` if a schedule recomputes a stage of which the plan says that no layer is to be recomputed."""
    for rank, order in enumerate(schedule):
        for i in order:
            if isinstance(i, Compute) and KEPT_INPUTS in i.allocates and not plan.recomputed_layers(i.stage):
                raise ScheduleError(
                    f"{plan.coordinate(rank)}: the schedule has {i}, but plan.recompute names no layer of stage {i.stage}",
                    cure=f"set plan.recompute (full, or patterns of layers), or write {Forward(i.stage, i.microbatch)} and "
                    f"leave {Recompute(i.stage, i.microbatch)} out",
                )


def stages_that_keep_activations(schedule: Schedule, plan: ParallelPlan) -> tuple[int, ...]:
    """Stages with layers to recompute of which every forward keeps its activations all the same, ascending."""
    recomputed = {i.stage for order in schedule for i in order if KEPT_INPUTS in i.allocates}
    return tuple(s for s in range(len(plan.stages)) if plan.recomputed_layers(s) and s not in recomputed)


def _insert(order: Order, stages: set[int]) -> Order:
    """One worker's order with recomputation on these stages."""
    found: list[Compute] = []
    lean: set[tuple[int, int]] = set()
    for place, i in enumerate(order):
        key = (i.stage, i.microbatch)
        if i.stage in stages and type(i) in _CHECKPOINTED and not _is_used_at_once(order, place):
            lean.add(key)
            found.append(_CHECKPOINTED[type(i)](i.stage, i.microbatch))
            continue
        if ACTIVATIONS in i.frees and key in lean:
            found.append(Recompute(i.stage, i.microbatch))
        found.append(i)
    return tuple(found)


def _is_used_at_once(order: Order, place: int) -> bool:
    """Whether the next instruction is the one that needs the activations of the forward at `place`."""
    i, after = order[place], order[place + 1 : place + 2]
    return any(ACTIVATIONS in n.frees and (n.stage, n.microbatch) == (i.stage, i.microbatch) for n in after)
