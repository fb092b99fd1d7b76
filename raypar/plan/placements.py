"""Placements: which workers compute which layers, by name; and what is left of them with fewer workers."""

from __future__ import annotations

import difflib
import fnmatch
import itertools
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace

from raypar.errors import PlanError
from raypar.plan.parallel_plan import ParallelPlan
from raypar.plan.stage_plan import StagePlan, WorkerGrid, shortest_span


@dataclass(frozen=True, slots=True)
class LayerPlacement:
    """Consecutive layers, and the workers that compute them."""

    layers: tuple[str, ...]
    """Patterns of layer names (`*` and `?`)."""
    workers: WorkerGrid
    """Their grid of workers, by replica and shard."""
    share: tuple[int, ...] = ()
    """Blocks of each replica (`StagePlan.share`)."""


def check_placements(placements: Sequence[LayerPlacement]) -> ParallelPlan:
    """The plan of a model with one layer for each placement. Raises `PlanError` for what no model could make right."""
    for number, each in enumerate(placements):
        StagePlan(0, 1, each.workers, each.share).check(f"plan.placements[{number}]")
    return ParallelPlan(tuple(StagePlan(i, i + 1, each.workers, each.share) for i, each in enumerate(placements)))


def plan_of_placements(placements: Sequence[LayerPlacement], names: Sequence[str]) -> ParallelPlan:
    """The plan with a stage for each placement. `names`: the model's layers, in order.

    A layer that no placement names joins the layer before it, the first ones the placement behind them. Raises `PlanError`
    for patterns that match no layer, a layer of two placements, and placements whose layers are not consecutive.
    """
    given: list[int | None] = [_placement_of(placements, name) for name in names]
    for number, placement in enumerate(placements):
        if number not in given:
            raise PlanError(
                f"plan.placements[{number}] has {' or '.join(map(repr, placement.layers))}, which matches none of the "
                f"{len(names)} layers",
                cure=_nearest(placement.layers, names),
            )
    now = next(own for own in given if own is not None)
    joined = [now := now if own is None else own for own in given]
    runs = [(number, len(list(run))) for number, run in itertools.groupby(joined)]
    numbers = [number for number, _ in runs]
    twice = next((number for number in numbers if numbers.count(number) > 1), None)
    if twice is not None:
        between = next(name for at, name in enumerate(names) if given[at] not in (None, twice) and twice in given[:at])
        raise PlanError(
            f"the layers of plan.placements[{twice}] ({', '.join(placements[twice].layers)}) are not consecutive: "
            f"{between} lies between them",
            cure="give each run of layers a placement of its own; several placements may have the same workers",
        )
    bounds = [0, *itertools.accumulate(count for _, count in runs)]
    return ParallelPlan(
        tuple(
            StagePlan(a, b, placements[number].workers, placements[number].share)
            for (a, b), number in zip(itertools.pairwise(bounds), numbers, strict=True)
        )
    )


def _placement_of(placements: Sequence[LayerPlacement], name: str) -> int | None:
    found = [n for n, each in enumerate(placements) if any(fnmatch.fnmatchcase(name, pattern) for pattern in each.layers)]
    if len(found) > 1:
        raise PlanError(
            f"layer {name} is in plan.placements[{found[0]}] and in plan.placements[{found[1]}]",
            cure="let the patterns of one placement only match it",
        )
    return found[0] if found else None


def _nearest(patterns: Iterable[str], names: Sequence[str]) -> str:
    near = [name for pattern in patterns for name in difflib.get_close_matches(pattern, names, n=2, cutoff=0.4)]
    shown = ", ".join(names) if len(names) <= 6 else f"{', '.join(names[:4])}, ..., {names[-1]}"
    return (f"did you mean {' or '.join(near)}? " if near else "") + f"layers are {shown}; a pattern may have * and ?"


# -- fewer workers -------------------------------------------------------------------------------------------------------------


def plan_for_fewer_workers(plan: ParallelPlan, workers: int, virtual_shards: int = 0) -> ParallelPlan:
    """What is left of a plan with fewer workers, numbered anew. They go one by one, each time the one with the least loss.

    Replicas go first, then shards (down to a divisor of their number), then stages, which join the one before them (the first
    the one behind it): by layers, the number of shards and of copies that are lost. It may take fewer workers than there are.
    `virtual_shards`: the job's, of which shards are a divisor then; 0: none are given.
    """
    while plan.world > workers:
        without = [_without(plan, rank, virtual_shards) for rank in range(plan.world)]
        plan = min(reversed(without), key=lambda left: _loss(plan, left))
    return plan.with_virtual_shards(virtual_shards) if virtual_shards else plan


def _without(plan: ParallelPlan, gone: int, virtual_shards: int) -> ParallelPlan:
    """The plan without one of its workers; others that then have no work go, too."""
    stages: list[StagePlan | None] = []
    for stage in plan.stages:
        rows = tuple(row for row in stage.workers if gone not in row)
        if not rows:
            left = tuple(rank for rank in stage.workers[0] if rank != gone)
            count = next((d for d in range(len(left), 0, -1) if (virtual_shards or stage.shards) % d == 0), 0)
            rows = (left[:count],) if count else ()
        same = len(rows) == stage.replicas
        share = stage.share if same else ()
        stages.append(replace(stage, workers=rows, share=share, division=()) if rows else None)
    joined: list[StagePlan] = []
    for stage, given in zip(plan.stages, stages, strict=True):
        if given is not None:
            first = 0 if not joined else given.first
            joined.append(replace(given, first=first))
        elif joined:
            joined[-1] = replace(joined[-1], last=stage.last)
    if not joined:
        raise PlanError("a plan needs at least one worker", cure="add nodes")
    used = sorted({rank for stage in joined for row in stage.workers for rank in row})
    number = {rank: index for index, rank in enumerate(used)}
    anew = (replace(s, workers=tuple(tuple(number[rank] for rank in row) for row in s.workers)) for s in joined)
    kept = list(anew)
    like = {s.workers: [other for other in kept if other.workers == s.workers] for s in kept}
    zero = {workers: max(s.zero for s in of) for workers, of in like.items()}
    holders = {workers: max(s.zero_holders for s in of) for workers, of in like.items()}
    spans = {workers: shortest_span(s.gather for s in of) for workers, of in like.items()}
    alike = (replace(s, zero=zero[s.workers], zero_holders=holders[s.workers], gather=spans[s.workers]) for s in kept)
    return replace(plan, stages=tuple(alike))


def _loss(plan: ParallelPlan, left: ParallelPlan) -> tuple[int, int, int]:
    """(stages, layers x shards, layers x replicas) that are lost."""
    (shards, copies), (shards_left, copies_left) = (
        (sum((s.last - s.first) * s.shards for s in one.stages), sum((s.last - s.first) * s.replicas for s in one.stages))
        for one in (plan, left)
    )
    return len(plan.stages) - len(left.stages), shards - shards_left, copies - copies_left
