"""Which worker sends which elements of the reduced gradient of a parameter that stages share, to which other worker."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from typing import NamedTuple

from raypar.plan.ownership import GradientRun
from raypar.plan.parallel_plan import ParallelPlan
from raypar.plan.shard_ranges import IndexRanges, TensorCut, intersect_ranges, merge_ranges, subtract_ranges
from raypar.plan.stage_connections import TiedParameter
from raypar.plan.stage_plan import StagePlan, WorkerGrid

Held = Callable[[int, int, int], tuple[GradientRun, ...]]
"""(stage, replica, virtual shard) -> the runs of the tied parameter of whose gradients there the replica gets totals
(`Ownership.gradient_runs`)."""


class TiedGradientTransfer(NamedTuple):
    """What one worker sends another of the gradient of a tied parameter."""

    source: int
    """The stage whose uses the gradient is of."""
    stage: int
    """The stage for which it is received: the receiver's first one with the same runs of the parameter, whose others take it
    from there."""
    giver: int
    """The virtual shard of `source` that has it."""
    taker: int
    """The virtual shard of `stage` that needs it."""
    sender: int
    """Rank that sends."""
    receiver: int
    """Rank that receives. It may be the sender, which has other runs in `source` than in `stage`."""
    elements: IndexRanges
    """The elements that are sent, as `Piece` numbers them."""


def tied_gradient_transfers(plan: ParallelPlan, tie: TiedParameter, held: Held) -> Iterator[TiedGradientTransfer]:
    """All that is sent of one tied parameter's gradients, in an order that all workers share."""
    for source in tie.stages:
        asked = set[tuple[int, tuple[tuple[GradientRun, ...], ...]]]()
        for stage in tie.stages:
            for replica, row in enumerate(plan.stages[stage].workers):
                for run, receiver in zip(plan.stages[stage].runs, row, strict=True):
                    needed = tuple(held(stage, replica, taker) for taker in run)
                    if (receiver, needed) in asked:
                        continue
                    asked.add((receiver, needed))
                    for taker, runs in zip(run, needed, strict=True):
                        if not has_same_runs(plan, held, source, receiver, taker, runs):
                            for giver, sender, elements in _senders(plan, held, source, replica, taker, receiver, runs):
                                yield TiedGradientTransfer(source, stage, giver, taker, sender, receiver, elements)


def has_same_runs(plan: ParallelPlan, held: Held, source: int, rank: int, number: int, runs: tuple[GradientRun, ...]) -> bool:
    """Whether a rank has the stage `source`, and the totals of these runs of one virtual shard there."""
    return source in plan.stages_of(rank) and held(source, plan.role_in(rank, source).replica, number) == runs


def _senders(
    plan: ParallelPlan, held: Held, source: int, replica: int, taker: int, receiver: int, runs: tuple[GradientRun, ...]
) -> Iterator[tuple[int, int, IndexRanges]]:
    """(virtual shard, rank, elements) of those of stage `source` that together have the elements of some runs: each element
    once, of the nearest virtual shard that has it, the nearest replica of this."""
    place = plan.stages[source]
    holder = [shard for shard, run in enumerate(place.runs) for _ in run]
    near = taker % place.virtual_shards
    nearest = [(replica + after) % place.replicas for after in range(place.replicas)]
    nearest.sort(key=lambda other: place.workers[other][holder[near]] != receiver)
    left = merge_ranges(span for run in runs for span in run.elements)
    if runs and not left:
        yield near, place.workers[nearest[0]][holder[near]], ()  # an empty tensor: whether it has a gradient
    for giver in sorted(range(place.virtual_shards), key=lambda number: number != near):
        for other in nearest:
            has = merge_ranges(span for run in held(source, other, giver) for span in run.elements)
            if found := intersect_ranges(has, left):
                yield giver, place.workers[other][holder[giver]], found
                left = subtract_ranges(left, found)


def tied_gradient_pairs(
    plan: ParallelPlan, tie: TiedParameter, cuts: Mapping[int, TensorCut | None]
) -> Iterator[tuple[int, int]]:
    """(sender, receiver) of the messages of `tied_gradient_transfers`, and, as it is not known here who owns what, of some that
    are not sent: of each replica of a stage whose replicas divide gradients. `cuts`: number of virtual shards -> how the
    parameter is cut over them."""
    for source in tie.stages:
        asked, there = set[tuple[int, int]](), plan.stages[source]
        holder = [shard for shard, run in enumerate(there.runs) for _ in run]
        for stage in tie.stages:
            here, grid = plan.stages[stage], plan.grid_of_stage[stage] if plan.divides_state(stage) else -1
            alike = plan.grid_of_stage[stage] == plan.grid_of_stage[source] or not plan.divides_state(source)
            for replica, row in enumerate(here.workers):
                senders: WorkerGrid = (there.workers[replica % there.replicas],)
                if plan.divides_state(source) and not _divide_alike(here, there):
                    senders = there.workers
                for run, receiver in zip(here.runs, row, strict=True):
                    if (receiver, grid) in asked or (alike and source in plan.stages_of(receiver)):
                        continue
                    asked.add((receiver, grid))
                    for taker in run:
                        for giver in _givers(
                            taker, cuts[here.virtual_shards], cuts[there.virtual_shards], there.virtual_shards
                        ):
                            found = ((of[holder[giver]], receiver) for of in senders)
                            yield from (pair for pair in found if pair[0] != pair[1])


def _divide_alike(here: StagePlan, there: StagePlan) -> bool:
    """Whether the replicas of two stages have the same runs of a parameter that both have (`Ownership`)."""
    return (here.replicas, here.zero_holders, here.runs) == (there.replicas, there.zero_holders, there.runs) and (
        min(here.zero_in_effect, there.zero_in_effect) > 0
    )


def _givers(taker: int, here: TensorCut | None, there: TensorCut | None, givers: int) -> Iterator[int]:
    """The virtual shards that together have what one of another stage has of a parameter, the nearest first."""
    near = taker % givers
    if there is None:
        yield near
        return
    left = ((0, there.whole_size),) if here is None else here.indices_by_shard[taker]
    for giver in sorted(range(givers), key=lambda number: number != near):
        if intersect_ranges(there.indices_by_shard[giver], left):
            yield giver
            left = subtract_ranges(left, there.indices_by_shard[giver])
