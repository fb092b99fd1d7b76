"""An independent judge of programs: it executes them in every possible way.

Written from the rules in words, sharing no code with `raypar.schedule`'s rules. Two questions, asked apart because a
worker's own order never changes: does each worker, if all messages come, do exactly its work and use only what it has
(`_does_its_work` walks the program with the values it holds)? And can the workers ever get stuck (`_never_stuck` searches
all reachable states)? A state is how far every worker is and how many messages each pair has exchanged; from a state any
worker may go on if what it uses is there, and any pair may move the message that both have at the head of their queue.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import pairwise

from raypar.plan import MicrobatchRouting, StageConnections
from raypar.schedule.instructions import (
    Backward,
    BackwardInput,
    BackwardWeight,
    ExchangeBuffers,
    ExchangeTies,
    ExchangeVotes,
    Forward,
    FreeActivations,
    Instruction,
    OptimizerStep,
    Recv,
    ReduceGradients,
    Send,
)

Programs = Sequence[Sequence[Instruction]]
Message = tuple[str, int, int, int]
"""(kind, earlier stage, later stage, microbatch)."""


def good(programs: Programs, routing: MicrobatchRouting, crossing: StageConnections) -> bool:
    """Whether the programs compute exactly the right things in a legal order and can never get stuck."""
    assert all(stage.shards == 1 for stage in routing.plan.stages), "shards follow their first one"
    return (
        len(programs) == routing.plan.world
        and all(_does_its_work(rank, program, routing, crossing) for rank, program in enumerate(programs))
        and _never_stuck(programs, crossing)
    )


class _Wrong(Exception):
    """The program does something it must not do."""


def _require(condition: bool) -> None:
    if not condition:
        raise _Wrong


def _does_its_work(rank: int, program: Sequence[Instruction], routing: MicrobatchRouting, crossing: StageConnections) -> bool:
    try:
        _Worker(rank, routing, crossing).run(program)
    except _Wrong:
        return False
    return True


class _Worker:
    """One worker and everything in its memory; every message it has posted a receive for counts as arrived."""

    def __init__(self, rank: int, routing: MicrobatchRouting, crossing: StageConnections) -> None:
        self.rank, self.routing, self.crossing = rank, routing, crossing
        stages = [s for s, plan in enumerate(routing.plan.stages) if rank in routing.plan.replica_ranks(s)]
        self.phase = {
            (s, m): "waiting" for s in stages for m in range(routing.microbatches.count) if routing.rank(s, m) == rank
        }
        self.values: set[Message] = set()
        self.to_send: dict[Message, int] = {}
        self.last: dict[tuple[str, int, int], int] = {}
        self.unreduced = set(stages)
        self.ended: list[str] = []

    def run(self, program: Sequence[Instruction]) -> None:
        for instruction in program:
            if isinstance(instruction, ExchangeVotes):
                due = [*(["ties"] if self.crossing.ties else []), *(["buffers"] if self.crossing.exchanges_buffers else [])]
                _require(self.ended == due and not self.unreduced)
                self.ended.append("vote")
            elif isinstance(instruction, OptimizerStep):
                _require(self.ended[-1:] == ["vote"])
                self.ended.append("step")
            elif isinstance(instruction, ExchangeBuffers):
                _require(self.ended == (["ties"] if self.crossing.ties else []) and not self.unreduced)
                _require(bool(self.crossing.exchanges_buffers))
                self.ended.append("buffers")
            elif isinstance(instruction, ExchangeTies):
                _require(not self.ended and not self.unreduced and bool(self.crossing.ties))
                self.ended.append("ties")
            else:
                _require(not self.ended)
                self.step(instruction)
        _require(self.ended[-1:] == ["step"])
        _require(all(phase == "freed" for phase in self.phase.values()) and not self.values and not self.to_send)

    def step(self, i: Instruction) -> None:
        if isinstance(i, Send):
            message = (i.kind, *((i.stage, i.to_stage) if i.kind == "activation" else (i.to_stage, i.stage)), i.microbatch)
            _require(self.to_send.pop(message, None) == i.peer)
        elif isinstance(i, Recv):
            message = (i.kind, *((i.from_stage, i.stage) if i.kind == "activation" else (i.stage, i.from_stage)), i.microbatch)
            _require(i.peer != self.rank and message not in self.values)
            self.values.add(message)
        elif isinstance(i, Forward):
            self.change(i, "waiting", "F")
            self.take([("activation", e.src, e.dst, i.microbatch) for e in self.crossing.edges if e.dst == i.stage])
            self.give([("activation", e.src, e.dst, i.microbatch) for e in self.crossing.edges if e.src == i.stage])
        elif isinstance(i, (Backward, BackwardInput)):
            self.change(i, "F", "B" if isinstance(i, Backward) else "I")
            self.take([("gradient", *pair, i.microbatch) for pair in _handed_back(self.crossing) if pair[0] == i.stage])
            self.give([("gradient", *pair, i.microbatch) for pair in _handed_back(self.crossing) if pair[1] == i.stage])
            self.in_order("inputs", i)
            if isinstance(i, Backward):
                self.in_order("weights", i)
        elif isinstance(i, BackwardWeight):
            self.change(i, "I", "W")
            self.in_order("weights", i)
        elif isinstance(i, FreeActivations):
            key = (i.stage, i.microbatch)
            _require(self.phase.get(key) in ("B", "W"))
            self.phase[key] = "freed"
        else:
            assert isinstance(i, ReduceGradients)
            _require(i.stage in self.unreduced)
            _require(all(phase in ("B", "W", "freed") for (stage, _), phase in self.phase.items() if stage == i.stage))
            self.unreduced.remove(i.stage)

    def change(self, i: Forward | Backward | BackwardInput | BackwardWeight, before: str, after: str) -> None:
        _require(self.phase.get((i.stage, i.microbatch)) == before)
        self.phase[i.stage, i.microbatch] = after

    def take(self, messages: list[Message]) -> None:
        for message in messages:
            _require(message in self.values)
            self.values.remove(message)

    def give(self, messages: list[Message]) -> None:
        for message in messages:
            kind, src, dst, m = message
            consumer = self.routing.rank(dst if kind == "activation" else src, m)
            if consumer == self.rank:
                self.values.add(message)
            else:
                self.to_send[message] = consumer

    def in_order(self, what: str, i: Backward | BackwardInput | BackwardWeight) -> None:
        key = (what, i.stage, self.routing.microbatches.block_of(i.microbatch))
        _require(self.last.get(key, -1) < i.microbatch)
        self.last[key] = i.microbatch


def _never_stuck(programs: Programs, crossing: StageConnections) -> bool:
    """Presupposes `_does_its_work` of all workers."""
    size = len(programs)
    pairs = [(a, b) for a in range(size) for b in range(a + 1, size)]
    # Each end's queue: (place of the post, sending rank, receiving rank, message).
    ends: list[tuple[list[tuple[int, int, int, Message]], list[tuple[int, int, int, Message]]]] = [([], []) for _ in pairs]
    arrival: dict[tuple[int, Message], tuple[int, int]] = {}
    for rank, program in enumerate(programs):
        for place, i in enumerate(program):
            if not isinstance(i, (Send, Recv)):
                continue
            pair = pairs.index((min(rank, i.peer), max(rank, i.peer)))
            if isinstance(i, Send):
                producer_first, other, way = i.kind == "activation", i.to_stage, (rank, i.peer)
            else:
                producer_first, other, way = i.kind == "gradient", i.from_stage, (i.peer, rank)
            message = (i.kind, *((i.stage, other) if producer_first else (other, i.stage)), i.microbatch)
            queue = ends[pair][rank > i.peer]
            if isinstance(i, Recv):
                arrival[rank, message] = (pair, len(queue))
            queue.append((place, *way, message))
    # Of every instruction: which pairs must have moved more than how many messages.
    waits = [
        [[arrival[rank, m] for m in _used(i, crossing) if (rank, m) in arrival] for i in program]
        for rank, program in enumerate(programs)
    ]

    def movable(pair: int, moved: int, places: Sequence[int]) -> bool:
        low, high = ends[pair]
        a, b = pairs[pair]
        return (
            moved < len(low)
            and moved < len(high)
            and low[moved][1:] == high[moved][1:]
            and low[moved][0] < places[a]
            and high[moved][0] < places[b]
        )

    state = ((0,) * size, (0,) * len(pairs))
    seen, todo = {state}, [state]
    while todo:
        places, moved = todo.pop()
        following = []
        for rank, at in enumerate(places):
            if at < len(programs[rank]) and all(moved[pair] > n for pair, n in waits[rank][at]):
                following.append(((*places[:rank], at + 1, *places[rank + 1 :]), moved))
        for pair, n in enumerate(moved):
            if movable(pair, n, places):
                following.append((places, (*moved[:pair], n + 1, *moved[pair + 1 :])))
        if not following and not (
            all(at == len(program) for at, program in zip(places, programs, strict=True))
            and all(n == len(low) == len(high) for n, (low, high) in zip(moved, ends, strict=True))
        ):
            return False
        for state in following:
            if state not in seen:
                seen.add(state)
                todo.append(state)
    return True


def _handed_back(crossing: StageConnections) -> list[tuple[int, int]]:
    """(earlier, later) stages between which gradients are handed back: from each user of a value to the one before it, from
    the first one to the maker."""
    found = set()
    values = {(e.src, value) for e in crossing.edges if e.differentiable for value in e.values}
    for maker, value in values:
        stages = sorted({maker, *(e.dst for e in crossing.edges if e.differentiable and e.src == maker and value in e.values)})
        found |= set(pairwise(stages))
    return sorted(found)


def _used(i: Instruction, crossing: StageConnections) -> list[Message]:
    """The messages an instruction uses, if they come from another worker."""
    if isinstance(i, Forward):
        return [("activation", e.src, e.dst, i.microbatch) for e in crossing.edges if e.dst == i.stage]
    if isinstance(i, (Backward, BackwardInput)):
        return [("gradient", *pair, i.microbatch) for pair in _handed_back(crossing) if pair[0] == i.stage]
    return []
