"""List scheduling: every worker, whenever it is free, runs the most urgent of its instructions that could run now.

Used where no closed form is known: stages with different replica counts under interleaved and zero-bubble schedules, and ZB-H1.
The result cannot deadlock, because it is read off an execution.
"""

from __future__ import annotations

import heapq
from collections.abc import Sequence

from raypar.plan import Routing
from raypar.schedule.instructions import Backward, BackwardInput, BackwardWeight, Compute, Forward, Schedule


def list_schedule(routing: Routing, *, split: bool, ahead: Sequence[int], alive: Sequence[int]) -> Schedule:
    """Backwards first, then forwards of the latest chunk, weight gradients when nothing else can run or memory is full.

    Each of F, I and W of a stage takes one unit. Per position, a worker's first chunk may be at most `ahead` microbatches
    ahead of its own backward, and hold at most `alive` microbatches whose weight gradients are not done. Every list is first
    in, first out in order of entry, so what has been started can always be finished: no limit blocks a later chunk.
    """
    plan = routing.plan
    last = len(plan.stages) - 1
    orders: list[list[Compute]] = [[] for _ in plan.seats]
    mine = [routing.of_replica(plan.stages_of(rank)[0], seat.replica) for rank, seat in enumerate(plan.seats)]
    forward = {(rank, s): 0 for rank in range(plan.world) for s in plan.stages_of(rank)}
    backward, weight = dict(forward), dict(forward)
    done: set[tuple[str, int, int]] = set()
    asleep = set(range(plan.world))
    events: list[tuple[int, int, tuple[str, int, int]]] = []

    def ready(kind: str, stage: int, m: int) -> bool:
        if kind == "F":
            return stage == 0 or ("F", stage - 1, m) in done
        return ("F", stage, m) in done and (stage == last or ("B", stage + 1, m) in done)

    def choose(rank: int) -> Compute | None:
        stages, todo, position = plan.stages_of(rank), mine[rank], plan.seats[rank].position
        for s in reversed(stages):
            if backward[rank, s] < len(todo) and ready("B", s, todo[backward[rank, s]]):
                m = todo[backward[rank, s]]
                backward[rank, s] += 1
                return BackwardInput(s, m) if split else Backward(s, m)
        first = stages[0]
        for s in reversed(stages):
            at = forward[rank, s]
            if at == len(todo) or not ready("F", s, todo[at]):
                continue
            if s == first and (
                at - backward[rank, s] >= ahead[position] or (split and at - weight[rank, s] >= alive[position])
            ):
                continue
            forward[rank, s] += 1
            return Forward(s, todo[at])
        if split:
            for s in reversed(stages):
                if weight[rank, s] < backward[rank, s] and ("B", s, todo[weight[rank, s]]) in done:
                    weight[rank, s] += 1
                    return BackwardWeight(s, todo[weight[rank, s] - 1])
        return None

    now = 0
    while True:
        for rank in sorted(asleep):
            instruction = choose(rank)
            if instruction is None:
                continue
            asleep.discard(rank)
            orders[rank].append(instruction)
            kind = "F" if isinstance(instruction, Forward) else "W" if isinstance(instruction, BackwardWeight) else "B"
            units = 2 if isinstance(instruction, Backward) else 1
            heapq.heappush(events, (now + units, rank, (kind, instruction.stage, instruction.microbatch)))
        if not events:
            return tuple(tuple(order) for order in orders)
        now = events[0][0]
        while events and events[0][0] == now:
            _, rank, what = heapq.heappop(events)
            done.add(what)
            asleep.add(rank)
