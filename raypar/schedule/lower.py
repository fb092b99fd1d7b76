"""From orders to programs: sends, receives, frees, reduction, ties, vote and optimizer step are added.

All orders are replayed at once, every instruction as early as it can (F, I and W take one unit, B two, times the replicas of
the stage, which has them because it is slower). When an instruction ends, its sends are appended to its worker's program
and the matching receives to the peers' at that very point. So all workers see one global order that a real execution can
follow, and a receive is posted as soon as its sender could have sent.
"""

from __future__ import annotations

import heapq
from collections import Counter

from raypar.errors import ScheduleError
from raypar.plan import Crossing, Routing
from raypar.schedule.data_flow import DataFlow
from raypar.schedule.instructions import (
    Backward,
    BackwardWeight,
    Compute,
    ExchangeTies,
    Forward,
    Free,
    Instruction,
    Kind,
    OptimizerStep,
    Program,
    Recv,
    Reduce,
    Schedule,
    Send,
    Vote,
)


def lower(schedule: Schedule, routing: Routing, crossing: Crossing) -> tuple[Program, ...]:
    """Programs of a training step, one per rank. Raises `ScheduleError` when the orders cannot be executed."""
    programs = _replay(schedule, routing, crossing, training=True)
    # A worker without microbatches takes part in reductions in the order of those replicas that have some.
    in_turn: dict[int, list[Instruction]] = {}
    for seat, program in zip(routing.plan.seats, programs, strict=True):
        reductions: list[Instruction] = [i for i in program if isinstance(i, Reduce)]
        if reductions:
            in_turn.setdefault(seat.position, reductions)
    for seat, program in zip(routing.plan.seats, programs, strict=True):
        if not program:
            program += in_turn.get(seat.position, [])
        program += [ExchangeTies()] if crossing.ties else []
        program += [Vote(), OptimizerStep()]
    return tuple(tuple(program) for program in programs)


def lower_forward(routing: Routing, crossing: Crossing) -> tuple[Program, ...]:
    """Programs of a validation pass: forwards only.

    Groups of 2p microbatches a pipeline go through one chunk after the other: enough that no chunk waits for the way round
    the pipeline, and no more bundles lie in wait than that.
    """
    plan = routing.plan
    group = 2 * plan.positions * max(stage.replicas for stage in plan.stages)
    entry = {m: index for index, m in enumerate(routing.entry_order)}
    orders = []
    for rank, seat in enumerate(plan.seats):
        stages = plan.stages_of(rank)
        mine = [(entry[m] // group, s, entry[m], m) for s in stages for m in routing.of_replica(s, seat.replica)]
        orders.append(tuple(Forward(stage, m) for _, stage, _, m in sorted(mine)))
    return tuple(tuple(program) for program in _replay(tuple(orders), routing, crossing, training=False))


class _Tables:
    """The data flow by stage, and who is who, looked up once: a step may have a million instructions."""

    def __init__(self, routing: Routing, crossing: Crossing) -> None:
        plan, self.count = routing.plan, routing.microbatches.count
        stages = range(len(plan.stages))
        self.sources = [[e.src for e in crossing.into(s)] for s in stages]
        self.consumers = [[e.dst for e in crossing.out_of(s)] for s in stages]
        self.gradients_from = [[e.dst for e in crossing.out_of(s) if e.differentiable] for s in stages]
        self.gradients_to = [[e.src for e in crossing.into(s) if e.differentiable] for s in stages]
        self.shard = [seat.shard for seat in plan.seats]
        self.shards = [stage.shards for stage in plan.stages]
        self.most_shards = max(self.shards)
        self.first_shard = [[routing.rank(s, m) for m in range(self.count)] for s in stages]

    def result(self, gradient: bool, stage: int, shard: int, microbatch: int) -> int:
        """A number for the forward (or the input gradients) of a microbatch on one shard of a stage."""
        place = (2 * stage + gradient) * self.most_shards + shard % self.shards[stage]
        return place * self.count + microbatch

    def results(self) -> int:
        """How many results there are."""
        return 2 * len(self.shards) * self.most_shards * self.count

    def needs(self, rank: int, instruction: Compute) -> list[int]:
        """The results that an instruction uses."""
        stage, m, shard = instruction.stage, instruction.microbatch, self.shard[rank]
        if isinstance(instruction, Forward):
            return [self.result(False, source, shard, m) for source in self.sources[stage]]
        if isinstance(instruction, BackwardWeight):
            return [self.result(True, stage, shard, m)]
        return [
            self.result(False, stage, shard, m),
            *(self.result(True, source, shard, m) for source in self.gradients_from[stage]),
        ]

    def receivers(self, rank: int, stage: int, other: int, microbatch: int) -> list[int]:
        """Ranks of stage `other` that get what `rank` makes: shard t is served by shard t mod (the maker's shards)."""
        first = self.first_shard[other][microbatch]
        return [first + t for t in range(self.shard[rank], self.shards[other], self.shards[stage])]


def _replay(schedule: Schedule, routing: Routing, crossing: Crossing, *, training: bool) -> list[list[Instruction]]:
    plan, tables = routing.plan, _Tables(routing, crossing)
    programs: list[list[Instruction]] = [[] for _ in schedule]
    place = [0] * len(schedule)
    done = bytearray(tables.results())
    waiting: dict[int, list[int]] = {}
    left = [Counter(i.stage for i in order if isinstance(i, (Backward, BackwardWeight))) for order in schedule]
    events: list[tuple[int, int]] = []

    def start(rank: int, now: int) -> None:
        if place[rank] == len(schedule[rank]):
            return
        instruction = schedule[rank][place[rank]]
        for need in tables.needs(rank, instruction):
            if not done[need]:
                waiting.setdefault(need, []).append(rank)
                return
        units = 2 if isinstance(instruction, Backward) else 1
        heapq.heappush(events, (now + units * plan.stages[instruction.stage].replicas, rank))

    def finish(rank: int, instruction: Compute) -> int | None:
        """Adds the instruction and what follows from it; returns the result that others may wait for."""
        program = programs[rank]
        program.append(instruction)
        stage, m = instruction.stage, instruction.microbatch
        made: int | None = None
        if isinstance(instruction, Forward):
            made = tables.result(False, stage, tables.shard[rank], m)
            hand_on(rank, stage, m, tables.consumers[stage], "activation")
            if not training:
                program.append(Free(stage, m))
        elif not isinstance(instruction, BackwardWeight):
            made = tables.result(True, stage, tables.shard[rank], m)
            hand_on(rank, stage, m, tables.gradients_to[stage], "gradient")
        if isinstance(instruction, (Backward, BackwardWeight)):
            program.append(Free(stage, m))
            left[rank][stage] -= 1
            if not left[rank][stage]:
                program.append(Reduce(stage))
        return made

    def hand_on(rank: int, stage: int, microbatch: int, others: list[int], kind: Kind) -> None:
        for other in others:
            for target in tables.receivers(rank, stage, other, microbatch):
                if target != rank:
                    programs[rank].append(Send(stage, microbatch, other, target, kind))
                    programs[target].append(Recv(other, microbatch, stage, rank, kind))

    for rank in range(len(schedule)):
        start(rank, 0)
    while events:
        now, rank = heapq.heappop(events)
        made = finish(rank, schedule[rank][place[rank]])
        place[rank] += 1
        if made is not None:
            done[made] = 1
        start(rank, now)
        if made is not None:
            for other in waiting.pop(made, ()):
                start(other, now)
    stuck = [rank for rank, order in enumerate(schedule) if place[rank] < len(order)]
    if stuck:
        rank = stuck[0]
        instruction = schedule[rank][place[rank]]
        needs = [need for need, _ in DataFlow(crossing, len(plan.stages)).needs(instruction)]
        missing = [need for need, key in zip(needs, tables.needs(rank, instruction), strict=True) if not done[key]]
        raise ScheduleError(
            f"{len(stuck)} of {len(schedule)} workers cannot finish: {plan.coordinate(rank)} stands at {instruction}, "
            f"which needs {', '.join(f'{stage}{kind}{m}' for kind, stage, m in missing)}",
            cure="every instruction must be computed exactly once, before what needs it",
        )
    return programs
