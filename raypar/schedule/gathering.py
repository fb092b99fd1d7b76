"""Puts gathers into programs: when a worker gets the parameters of a stage that its replicas divide, and when it frees them.

Under `plan.gather: step` programs have none of it: parameters are gathered after the optimizer step, and freed after their last
use. Under `microbatch` a stage's whole parameters are there from a `Gather` until a `Release`. The gather of a use is posted
before the instruction ahead of it begins, so that what travels is hidden behind one instruction, and at most two stages of a
worker are there. A stage stays where it would be gathered again before the next instruction begins: that takes no more memory.
Instructions that compute without parameters, as weight gradients do, neither wait for a gather nor keep one.

Under `layer` the layers are gathered inside each instruction, so programs only say who serves whom.

Owners serve without computing, when they are asked: what a reader asks for in a pass follows from the reader's program, so that
replicas may have different numbers of microbatches, and an owner needs no turn. `ServeParameters` stand at the front, before
anything that waits.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from typing import NamedTuple

from raypar.plan import ParallelPlan
from raypar.plan.stage_plan import GatherSpan
from raypar.schedule.instructions import Compute, Gather, Instruction, Program, Release, ServeParameters, compute_instructions

MOST_STAGES_TOGETHER = 2
"""Stages of a worker whose parameters are whole together, at most, where they come and go by microbatch."""


class GathersOfOrder(NamedTuple):
    """What is gathered and released beside the compute instructions of one worker."""

    before: tuple[tuple[int, ...], ...]
    """By compute instruction: the stages whose gather is posted before it begins."""
    after: tuple[tuple[int, ...], ...]
    """By compute instruction: the stages that are released after it."""


def gathers_of_order(order: Sequence[Compute], stages: Collection[int]) -> GathersOfOrder:
    """What a worker gathers and releases. `order`: its compute instructions; `stages`: those that come and go by microbatch."""
    before: list[tuple[int, ...]] = [()] * len(order)
    after: list[tuple[int, ...]] = [()] * len(order)
    last: dict[int, int] = {}
    for place, i in enumerate(order):
        if not i.needs_weights or i.stage not in stages:
            continue
        former, posted = last.get(i.stage), max(0, place - 1)
        if former is None or posted > former + 1:
            before[posted] += (i.stage,)
            if former is not None:
                after[former] += (i.stage,)
        last[i.stage] = place
    for stage, place in last.items():
        after[place] += (stage,)
    return GathersOfOrder(tuple(before), tuple(after))


def stages_gathered(plan: ParallelPlan, rank: int, span: GatherSpan) -> frozenset[int]:
    """The stages of a rank whose whole parameters are there for so long."""
    return frozenset(stage for stage in plan.stages_of(rank) if plan.stages[stage].gather_in_effect == span)


def insert_gathers(programs: Sequence[Program], plan: ParallelPlan) -> tuple[Program, ...]:
    """The programs of a pass with gathers and releases, and in front what is served; programs, or orders, that need none are
    returned unchanged."""
    if not gathers_in_pass(plan):
        return tuple(programs)
    made = [tuple(_with_gathers(program, stages_gathered(plan, r, "microbatch"))) for r, program in enumerate(programs)]
    asked = requests(made, plan)
    return tuple((*_serves(plan, rank, asked), *program) for rank, program in enumerate(made))


def gathers_in_pass(plan: ParallelPlan) -> bool:
    """Whether parameters of some stage are gathered more than once in a step."""
    return any(stage.gather_in_effect not in (None, "step") for stage in plan.stages)


def has_gathers(order: Iterable[Instruction]) -> bool:
    """Whether a list has gathers of parameters already."""
    return any("gather" in i.cost for i in order)


def _with_gathers(program: Program, stages: frozenset[int]) -> Iterator[Instruction]:
    gathers = gathers_of_order(compute_instructions(program), stages)
    place = 0
    for i in program:
        if not isinstance(i, Compute):
            yield i
            continue
        yield from map(Gather, gathers.before[place])
        yield i
        yield from map(Release, gathers.after[place])
        place += 1


def requests(programs: Sequence[Program], plan: ParallelPlan) -> Mapping[tuple[int, int], int]:
    """(stage, rank) -> how often the rank asks for the parameters of the stage in a pass: once for each gather, or, where it
    gathers by layer, once for each layer of each instruction that needs parameters."""
    found: Counter[tuple[int, int]] = Counter()
    for rank, program in enumerate(programs):
        by_layer = stages_gathered(plan, rank, "layer")
        for i in program:
            if type(i) is Gather:
                found[i.stage, rank] += 1
            elif isinstance(i, Compute) and i.needs_weights and i.stage in by_layer:
                found[i.stage, rank] += plan.stages[i.stage].last - plan.stages[i.stage].first
    return found


def readers(plan: ParallelPlan, stage: int, rank: int) -> list[int]:
    """The ranks that get from a rank what it owns of a stage: its shard on the other replicas, without those that hold it."""
    place, role = plan.stages[stage], plan.role_in(rank, stage)
    return [
        place.workers[replica][role.shard]
        for replica in range(place.replicas)
        if (replica - role.replica) % place.replicas >= place.zero_holders
    ]


def owners(plan: ParallelPlan, stage: int, rank: int) -> list[int]:
    """The ranks from which a rank gets the parameters of a stage: those of which it is one of the `readers`."""
    ranks = (row[plan.role_in(rank, stage).shard] for row in plan.stages[stage].workers)
    return [other for other in ranks if rank in readers(plan, stage, other)]


def _serves(plan: ParallelPlan, rank: int, asked: Mapping[tuple[int, int], int]) -> Iterator[ServeParameters]:
    for stage in plan.stages_of(rank):
        for reader in readers(plan, stage, rank):
            if count := asked.get((stage, reader), 0):
                yield ServeParameters(stage, reader, count)
