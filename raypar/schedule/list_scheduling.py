"""List scheduling (Graham 1966): orders found by simulating a step, for any plan and any connections between stages.

All workers are simulated on one clock. F, I and W take one unit, B two, times the stage's replicas: a stage is taken to have
more replicas because it is slower, and a replica a smaller share of the blocks. Idle workers take the most urgent instruction
that could start now: input gradients first, because others wait for them; then a forward, if few enough microbatches are ahead
and alive; then a weight gradient, which can wait and so fills what would be a bubble. Shards take an instruction together, when
all of them are idle; where a worker has several roles, those with more shards come first, because one that goes on alone keeps
the others waiting. Only instructions whose inputs exist are ever taken, so the orders cannot deadlock, whatever the limits are.

The schedule `list` follows the stages' own connections: branches run side by side, and a worker may have several roles.
Interleaved and zero-bubble schedules use it as if stages were a chain, where replica counts differ: no closed form is known.
"""

from __future__ import annotations

import heapq
from collections.abc import Sequence
from dataclasses import dataclass
from fractions import Fraction

from raypar.plan import MicrobatchRouting, StageConnections
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
    """The most microbatches that a replica may have open; each counts once per chunk.

    A limit is raised by one if all workers would stop otherwise.
    """

    ahead: tuple[int, ...]
    """By grid: forwards whose input gradient is not computed yet."""
    alive: tuple[int, ...]
    """By grid: forwards whose weight gradient is not computed yet."""
    group: int
    """Microbatches, over all replicas, that go through a chunk before the next chunk of the same worker has its turn."""


@dataclass(slots=True)
class _Queue:
    """A stage on one replica: its microbatches in order of entry, and the numbers of forwards, I and W that are done."""

    stage: int
    row: _Row
    microbatches: tuple[int, ...]
    forwards: int = 0
    inputs: int = 0
    weights: int = 0


@dataclass(slots=True)
class _Row:
    """The workers of one replica, which compute its stages together."""

    grid: int
    replica: int
    ranks: tuple[int, ...]
    """Those that are simulated: where each worker has one role the shards of a replica get the order of the first."""
    queues: list[_Queue]
    more: int = 0
    """Number by which its limits have been raised."""


class _Player:
    """The simulation of a step: the results so far, and the present instruction of every worker."""

    has_forward: list[bytearray]
    """Stage -> by microbatch: whether its forward is over."""
    has_gradient: list[bytearray]
    """Stage -> by microbatch: whether its input gradients exist."""
    rows: dict[int, list[_Row]]
    """Rank -> the replicas in which it computes."""
    orders: dict[int, list[Compute]]
    """Rank -> the order so far; its last instruction is running unless the rank is idle."""
    idle: set[int]
    """Ranks that execute no instruction."""
    events: list[tuple[Fraction, int]]
    """Heap of (time, rank): when the rank's instruction will be over."""

    def __init__(
        self, routing: MicrobatchRouting, limits: OpenMicrobatchLimits, connections: StageConnections, *, split: bool
    ) -> None:
        plan, count = routing.plan, routing.microbatches.count
        stages = range(len(plan.stages))
        self.routing, self.limits, self.split = routing, limits, split
        self.before = [[edge.src for edge in connections.into(s)] for s in stages]
        self.after = [[relay.src for relay in connections.relays_to(s)] for s in stages]
        self.readers = [[edge.dst for edge in connections.out_of(s)] for s in stages]
        self.takers = [[relay.dst for relay in connections.relays_from(s)] for s in stages]
        self.has_forward = [bytearray(count) for _ in stages]
        self.has_gradient = [bytearray(count) for _ in stages]
        self.entry = {m: i for i, m in enumerate(routing.entry_order)}
        self.speaker = plan.order_givers
        self.rows = {rank: [] for rank in sorted(set(self.speaker))}
        for number, grid in enumerate(plan.grids):
            for replica, ranks in enumerate(grid):
                row = _Row(number, replica, ranks[:1] if plan.one_role_each else ranks, [])
                row.queues = [_Queue(s, row, routing.microbatches_of_replica(s, replica)) for s in plan.stages_of_grid[number]]
                for rank in row.ranks:
                    self.rows[rank].append(row)
        self.orders = {rank: [] for rank in self.rows}
        self.idle = set(self.rows)
        self.events = []
        blocks = routing.microbatches.blocks
        self.slowness = [[Fraction(blocks, n) for n in s.share] or [Fraction(s.replicas)] * s.replicas for s in plan.stages]

    def play(self) -> Schedule:
        """Simulate the step and return the orders of all workers."""
        now, touched = Fraction(0), set(self.rows)
        while True:
            for rank in sorted(touched & self.idle):
                if rank in self.idle:  # it may have begun with another shard
                    self._start(rank, now)
            if not self.events:
                held_back = [
                    (key, rank, n) for rank in self.rows for n, row in enumerate(self.rows[rank]) for key in self._forwards(row)
                ]
                if not held_back:
                    break
                _, rank, number = min(held_back)
                self.rows[rank][number].more += 1
                touched = {rank}
                continue
            now, touched = self.events[0][0], set()
            while self.events and self.events[0][0] == now:
                _, rank = heapq.heappop(self.events)
                self.idle.add(rank)
                touched |= {rank, *self._finish(self.orders[rank][-1])}
        return tuple(tuple(self.orders[speaker]) for speaker in self.speaker)

    def _start(self, rank: int, now: Fraction) -> None:
        free = [row for row in self.rows[rank] if self.idle.issuperset(row.ranks)]
        sizes = sorted({len(row.ranks) for row in free}, reverse=True)
        chosen = next(filter(None, (self._choose([row for row in free if len(row.ranks) == size]) for size in sizes)), None)
        if chosen is None:
            return
        row, instruction = chosen
        slowness = self.slowness[instruction.stage][row.replica]
        for each in row.ranks:
            self.orders[each].append(instruction)
            self.idle.discard(each)
            heapq.heappush(self.events, (now + len(instruction.cost) * slowness, each))

    def _choose(self, rows: Sequence[_Row]) -> tuple[_Row, Compute] | None:
        """The most urgent instruction of these replicas, and the one that takes it."""
        queues = [queue for row in rows for queue in row.queues]
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
                return queue.row, BackwardInput(queue.stage, m)
            queue.weights += 1
            return queue.row, Backward(queue.stage, m)
        keys = [key for row in rows if self._has_room(row) for key in self._forwards(row)]
        if keys:
            stage = min(keys)[1]
            queue = next(q for q in queues if q.stage == stage)
            queue.forwards += 1
            return queue.row, Forward(stage, queue.microbatches[queue.forwards - 1])
        waiting = [q for q in queues if q.weights < q.inputs]
        if waiting:
            queue = min(waiting, key=lambda q: (self.entry[q.microbatches[q.weights]], -q.stage))
            queue.weights += 1
            return queue.row, BackwardWeight(queue.stage, queue.microbatches[queue.weights - 1])
        return None

    def _has_room(self, row: _Row) -> bool:
        """Whether the limits let a replica open another microbatch."""
        ahead = sum(q.forwards - q.inputs for q in row.queues)
        alive = sum(q.forwards - q.weights for q in row.queues)
        return ahead < self.limits.ahead[row.grid] + row.more and alive < self.limits.alive[row.grid] + row.more

    def _forwards(self, row: _Row) -> list[tuple[int, int, int]]:
        """(group, stage, entry) of the forwards whose input values exist, whatever the limits are."""
        found = []
        for queue in row.queues:
            if queue.forwards < len(queue.microbatches):
                m = queue.microbatches[queue.forwards]
                if all(self.has_forward[before][m] for before in self.before[queue.stage]):
                    found.append((self.entry[m] // self.limits.group, queue.stage, self.entry[m]))
        return found

    def _gradient_is_here(self, stage: int, microbatch: int) -> bool:
        """Whether a backward may start. Where no stage gives gradients always: the forward may still run, but on these very
        workers."""
        return all(self.has_gradient[after][microbatch] for after in self.after[stage])

    def _finish(self, instruction: Compute) -> set[int]:
        """Record the results of an instruction. Returns the ranks that may have waited for them."""
        stage, m = instruction.stage, instruction.microbatch
        if VALUES in instruction.makes:
            self.has_forward[stage][m] = 1
            waited = self.readers[stage]
        elif INPUT_GRADIENTS in instruction.makes:
            self.has_gradient[stage][m] = 1
            waited = self.takers[stage]
        else:
            return set()
        return {self.speaker[rank] for other in waited for rank in self.routing.ranks(other, m)}


def build_list_schedule(
    routing: MicrobatchRouting, limits: OpenMicrobatchLimits, *, split: bool, connections: StageConnections | None = None
) -> Schedule:
    """The orders found by list scheduling under `limits`; `split`: with I and W instead of B; without `connections` the stages
    are a chain.

    Every stage computes microbatches in order of entry, so gradients stay canonical.
    """
    chain = StageConnections.chain(len(routing.plan.stages))
    return _Player(routing, limits, chain if connections is None else connections, split=split).play()


def list_schedule(
    routing: MicrobatchRouting, warmup: Sequence[int] | None = None, connections: StageConnections | None = None
) -> Schedule:
    """List scheduling over the connections between stages, with as many microbatches open as keep every later stage busy.

    Of a stage that is 1 + max over its readers r of ceil(open(r) replicas(r) / replicas): on a chain the warmup of 1F1B.
    """
    plan = routing.plan
    there = StageConnections.chain(len(plan.stages)) if connections is None else connections
    open_of_stage = [1] * len(plan.stages)
    for stage in reversed(range(len(plan.stages))):
        for reader in {edge.dst for edge in there.out_of(stage)}:
            wanted = 1 - -open_of_stage[reader] * plan.stages[reader].replicas // plan.stages[stage].replicas
            open_of_stage[stage] = max(open_of_stage[stage], wanted)
    depth = tuple(sum(open_of_stage[stage] for stage in stages) for stages in plan.stages_of_grid)
    return build_list_schedule(routing, OpenMicrobatchLimits(depth, depth, group=1), split=False, connections=there)


def open_limits_per_replica(plan_replicas: Sequence[int], uniform: Sequence[int]) -> tuple[int, ...]:
    """Limits for one replica of each stage, if stages have different replica counts.

    A stage needs as many open microbatches in all as if it had the most replicas of any stage; its own replicas divide them.
    """
    most = max(plan_replicas)
    return tuple(-(-limit * most // own) for limit, own in zip(uniform, plan_replicas, strict=True))
