"""List scheduling (Graham 1966): orders found by simulating a step, for stages with different replica counts.

No closed form of interleaved and zero-bubble schedules is known for such plans. All workers are simulated on one clock. F, I
and W take one unit, B two, times the stage's replicas: a stage is taken to have more replicas because it is slower, and a
replica a smaller share of the blocks. An idle worker takes the most urgent instruction that could start now: input gradients
first, because others wait for them; then a forward, if few enough microbatches are ahead and alive; then a weight gradient,
which can wait and so fills what would be a bubble. Only instructions whose inputs exist are ever taken, so the orders cannot
deadlock, whatever the limits are.
"""

from __future__ import annotations

import heapq
from collections.abc import Sequence
from dataclasses import dataclass
from fractions import Fraction

from raypar.plan import MicrobatchRouting
from raypar.schedule.instructions import (
    INPUT_GRADIENTS,
    VALUES,
    Backward,
    BackwardInput,
    BackwardWeight,
    Compute,
    Forward,
    Schedule,
)


@dataclass(frozen=True, slots=True)
class OpenMicrobatchLimits:
    """The most microbatches that a worker may have open; each counts once per chunk.

    A limit is raised by one if all workers would stop otherwise.
    """

    ahead: tuple[int, ...]
    """By position: forwards whose input gradient is not computed yet."""
    alive: tuple[int, ...]
    """By position: forwards whose weight gradient is not computed yet."""
    group: int
    """Microbatches, over all replicas, that go through a chunk before the next chunk of the same worker has its turn."""


@dataclass(slots=True)
class _Queue:
    """A stage on one worker: its microbatches in order of entry, and the numbers of forwards, I and W that are done."""

    stage: int
    microbatches: tuple[int, ...]
    forwards: int = 0
    inputs: int = 0
    weights: int = 0


class _Player:
    """The simulation of a step: the results so far, and the present instruction of every worker."""

    has_forward: list[bytearray]
    """Stage -> by microbatch: whether its forward is over."""
    has_gradient: list[bytearray]
    """Stage -> by microbatch: whether its input gradients exist."""
    queues: dict[int, list[_Queue]]
    """Rank -> its stages, with the numbers of instructions that are done."""
    more: dict[int, int]
    """Rank -> number by which its limits have been raised."""
    orders: dict[int, list[Compute]]
    """Rank -> the order so far; its last instruction is running unless the rank is idle."""
    idle: set[int]
    """Ranks that execute no instruction."""
    events: list[tuple[Fraction, int]]
    """Heap of (time, rank): when the rank's instruction will be over."""

    def __init__(self, routing: MicrobatchRouting, limits: OpenMicrobatchLimits, split: bool) -> None:
        plan, count = routing.plan, routing.microbatches.count
        self.routing, self.limits, self.split = routing, limits, split
        self.last = len(plan.stages) - 1
        self.has_forward = [bytearray(count) for _ in plan.stages]
        self.has_gradient = [bytearray(count) for _ in plan.stages]
        self.entry = {m: i for i, m in enumerate(routing.entry_order)}
        # Only one shard of each replica is simulated; the others get its order.
        self.speakers = [rank for rank, seat in enumerate(plan.seats) if seat.shard == 0]
        self.queues = {
            rank: [_Queue(s, routing.microbatches_of_replica(s, plan.seats[rank].replica)) for s in plan.stages_of(rank)]
            for rank in self.speakers
        }
        self.more = dict.fromkeys(self.speakers, 0)
        self.orders = {rank: [] for rank in self.speakers}
        self.idle = set(self.speakers)
        self.events = []
        blocks = routing.microbatches.blocks
        self.slowness = [[Fraction(blocks, n) for n in s.share] or [Fraction(s.replicas)] * s.replicas for s in plan.stages]

    def play(self) -> Schedule:
        """Simulate the step and return the orders of all workers."""
        now, touched = Fraction(0), set(self.speakers)
        while True:
            for rank in sorted(touched & self.idle):
                self._start(rank, now)
            if not self.events:
                held_back = [(key, rank) for rank in self.speakers for key in self._forwards(rank)]
                if not held_back:
                    break
                _, rank = min(held_back)
                self.more[rank] += 1
                touched = {rank}
                continue
            now, touched = self.events[0][0], set()
            while self.events and self.events[0][0] == now:
                _, rank = heapq.heappop(self.events)
                self.idle.add(rank)
                touched |= {rank, *self._finish(self.orders[rank][-1])}
        seats = self.routing.plan.seats
        return tuple(tuple(self.orders[rank - seat.shard]) for rank, seat in enumerate(seats))

    def _start(self, rank: int, now: Fraction) -> None:
        instruction = self._choose(rank)
        if instruction is not None:
            self.orders[rank].append(instruction)
            self.idle.discard(rank)
            slowness = self.slowness[instruction.stage][self.routing.plan.seats[rank].replica]
            heapq.heappush(self.events, (now + len(instruction.cost) * slowness, rank))

    def _choose(self, rank: int) -> Compute | None:
        queues = self.queues[rank]
        ready = [
            (self.entry[q.microbatches[q.inputs]] // self.limits.group, -q.stage, q)
            for q in queues
            if q.inputs < q.forwards and self._gradient_is_here(q.stage, q.microbatches[q.inputs])
        ]
        if ready:
            queue = min(ready, key=lambda r: r[:2])[2]
            m = queue.microbatches[queue.inputs]
            queue.inputs += 1
            if self.split:
                return BackwardInput(queue.stage, m)
            queue.weights += 1
            return Backward(queue.stage, m)
        position = self.routing.plan.seats[rank].position
        ahead = sum(q.forwards - q.inputs for q in queues)
        alive = sum(q.forwards - q.weights for q in queues)
        if ahead < self.limits.ahead[position] + self.more[rank] and alive < self.limits.alive[position] + self.more[rank]:
            keys = self._forwards(rank)
            if keys:
                stage = min(keys)[1]
                queue = next(q for q in queues if q.stage == stage)
                queue.forwards += 1
                return Forward(stage, queue.microbatches[queue.forwards - 1])
        waiting = [q for q in queues if q.weights < q.inputs]
        if waiting:
            queue = min(waiting, key=lambda q: (self.entry[q.microbatches[q.weights]], -q.stage))
            queue.weights += 1
            return BackwardWeight(queue.stage, queue.microbatches[queue.weights - 1])
        return None

    def _forwards(self, rank: int) -> list[tuple[int, int, int]]:
        """(group, stage, entry) of the forwards whose input values exist, whatever the limits are."""
        found = []
        for queue in self.queues[rank]:
            if queue.forwards < len(queue.microbatches):
                m = queue.microbatches[queue.forwards]
                if queue.stage == 0 or self.has_forward[queue.stage - 1][m]:
                    found.append((self.entry[m] // self.limits.group, queue.stage, self.entry[m]))
        return found

    def _gradient_is_here(self, stage: int, microbatch: int) -> bool:
        """Whether a backward may start. On the last stage always: its forward may still run, but on this very worker."""
        return bool(stage == self.last or self.has_gradient[stage + 1][microbatch])

    def _finish(self, instruction: Compute) -> tuple[int, ...]:
        """Record the results of an instruction. Returns the ranks that may have waited for them."""
        stage, m = instruction.stage, instruction.microbatch
        if VALUES in instruction.makes:
            self.has_forward[stage][m] = 1
            return (self.routing.rank(stage + 1, m),) if stage < self.last else ()
        if INPUT_GRADIENTS in instruction.makes:
            self.has_gradient[stage][m] = 1
            return (self.routing.rank(stage - 1, m),) if stage else ()
        return ()


def build_list_schedule(routing: MicrobatchRouting, limits: OpenMicrobatchLimits, *, split: bool) -> Schedule:
    """The orders found by list scheduling under `limits`; `split`: with I and W instead of B.

    Every stage computes microbatches in order of entry, so gradients stay canonical.
    """
    return _Player(routing, limits, split).play()


def open_limits_per_replica(plan_replicas: Sequence[int], uniform: Sequence[int]) -> tuple[int, ...]:
    """Limits for one replica of each stage, if stages have different replica counts.

    A stage needs as many open microbatches in all as if it had the most replicas of any stage; its own replicas divide them.
    """
    most = max(plan_replicas)
    return tuple(-(-limit * most // own) for limit, own in zip(uniform, plan_replicas, strict=True))
