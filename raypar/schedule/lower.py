"""From orders to programs: sends, receives, frees, reduction, ties, vote and optimizer step are added.

All orders are replayed at once in earliest-start order with unit times; when an instruction ends, its sends are appended to
its worker's program and the matching receives to the peers' at that very point. So both ends of a pair see one global order
that a real execution can follow, and a receive is posted as soon as its sender could have sent.
"""

from __future__ import annotations

import heapq
from collections import Counter

from raypar.errors import ScheduleError
from raypar.plan import Crossing, Routing
from raypar.schedule.dependences import Flow, Result, result
from raypar.schedule.instructions import (
    Backward,
    BackwardWeight,
    Compute,
    ExchangeTies,
    Forward,
    Free,
    Instruction,
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
    for rank, program in enumerate(programs):
        reduced = {i.stage for i in program if isinstance(i, Reduce)}
        program += [Reduce(stage) for stage in routing.plan.stages_of(rank) if stage not in reduced]
        program += [ExchangeTies()] if crossing.ties else []
        program += [Vote(), OptimizerStep()]
    return tuple(tuple(program) for program in programs)


def lower_forward(routing: Routing, crossing: Crossing) -> tuple[Program, ...]:
    """Programs of a validation pass: forwards only, every worker's microbatches in order of entry."""
    orders = []
    for rank, seat in enumerate(routing.plan.seats):
        stages = routing.plan.stages_of(rank)
        mine = routing.of_replica(stages[0], seat.replica)
        orders.append(tuple(Forward(s, m) for m in mine for s in stages))
    return tuple(tuple(program) for program in _replay(tuple(orders), routing, crossing, training=False))


def _replay(schedule: Schedule, routing: Routing, crossing: Crossing, *, training: bool) -> list[list[Instruction]]:
    plan = routing.plan
    flow = Flow(crossing, len(plan.stages))
    shard = [seat.shard for seat in plan.seats]
    programs: list[list[Instruction]] = [[] for _ in schedule]
    place = [0] * len(schedule)
    done: set[tuple[Result, int]] = set()
    waiting: dict[tuple[Result, int], list[int]] = {}
    left = [Counter(i.stage for i in order if isinstance(i, (Backward, BackwardWeight))) for order in schedule]
    events: list[tuple[int, int, int]] = []

    def start(rank: int, now: int) -> None:
        if place[rank] == len(schedule[rank]):
            return
        for need, _ in flow.needs(schedule[rank][place[rank]]):
            key = (need, shard[rank] % plan.stages[need[1]].shards)
            if key not in done:
                waiting.setdefault(key, []).append(rank)
                return
        heapq.heappush(events, (now + 1, rank, place[rank]))

    def finish(rank: int, instruction: Compute) -> None:
        program = programs[rank]
        program.append(instruction)
        stage, m = instruction.stage, instruction.microbatch
        for other, (kind, _, _, _) in flow.gives(instruction):
            for target in _receivers(routing, stage, other, m, shard[rank]):
                if target != rank:
                    program.append(Send(stage, m, other, target, kind))
                    programs[target].append(Recv(other, m, stage, rank, kind))
        if isinstance(instruction, (Backward, BackwardWeight)):
            program.append(Free(stage, m))
            left[rank][stage] -= 1
            if not left[rank][stage] and training:
                program.append(Reduce(stage))
        elif not training:
            program.append(Free(stage, m))

    for rank in range(len(schedule)):
        start(rank, 0)
    while events:
        now, rank, index = heapq.heappop(events)
        instruction = schedule[rank][index]
        finish(rank, instruction)
        key = (result(instruction), shard[rank])
        done.add(key)
        place[rank] += 1
        start(rank, now)
        for other in waiting.pop(key, ()):
            start(other, now)
    stuck = [rank for rank, order in enumerate(schedule) if place[rank] < len(order)]
    if stuck:
        rank = stuck[0]
        instruction = schedule[rank][place[rank]]
        missing = [
            f"{need[1]}{need[0]}{need[2]}"
            for need, _ in flow.needs(instruction)
            if (need, shard[rank] % plan.stages[need[1]].shards) not in done
        ]
        raise ScheduleError(
            f"{len(stuck)} of {len(schedule)} workers cannot finish: {plan.coordinate(rank)} stands at {instruction}, "
            f"which needs {', '.join(missing)}",
            cure="every instruction must be computed exactly once, before what needs it",
        )
    return programs


def _receivers(routing: Routing, stage: int, other: int, microbatch: int, shard: int) -> list[int]:
    """Shard t of the consumer is served by shard t mod (number of the producer's shards)."""
    own, theirs = routing.plan.stages[stage].shards, routing.plan.stages[other].shards
    return [routing.rank(other, microbatch, t) for t in range(theirs) if t % own == shard]
