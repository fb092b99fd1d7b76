"""Brings the votes of all workers on a step to all of them: directly, or up and down a tree where there are many workers.

Directly a vote is one message away, but W workers send W (W - 1) messages. Up the tree each worker adds its ballot to those
from below, and hands on the sum; the first worker has them all, and the sum comes down again: 2 (W - 1) messages, on a way of
2 log W. Sums are exact, so the result has the same bits. A worker that dies in between leaves some with the whole vote and
others without, as it does where votes go directly; recovery settles such a step (raypar/DECISIONS.md, 8).
"""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass

import torch

from raypar.comm.routine import Routine, RoutineWait
from raypar.comm.transport import Handle, Transport
from raypar.plan.ballot import Ballot
from raypar.plan.vote_tree import TreeNeighbours, tree_neighbours
from raypar.worker.step.message_tags import vote_tag


@dataclass
class VoteExchange:
    """Exchanges the ballots of one step on one worker."""

    transport: Transport
    """Connects the workers; may connect some without a seat, which do not vote."""
    rank: int
    """This worker's."""
    world: int
    """Number of workers that vote."""
    coordinate: Callable[[int], str]
    """Rank -> the worker's coordinate, for messages."""
    meanwhile: Callable[[], None] | None = None
    """Called while ballots of others are on their way."""
    late_ns: int = 0
    """How long `meanwhile` took, if the ballots were there before it was over; else 0, because nobody waited."""

    def run(self, step: int, mine: Ballot) -> Routine[Ballot]:
        """The ballots of all workers, added up."""
        place = tree_neighbours(self.rank, self.world)
        if place is None:
            total = yield from self._directly(step, mine)
        else:
            total = yield from self._by_tree(step, mine, place)
        assert total.workers == self.world, f"{total.workers} of {self.world} workers have voted"
        return total

    def _directly(self, step: int, mine: Ballot) -> Routine[Ballot]:
        others = [rank for rank in range(self.world) if rank != self.rank]
        coming = {rank: self._receive(step, rank) for rank in others}
        sends = [self._send(step, mine, rank) for rank in others]
        self._use_time(list(coming.values()))
        total = mine
        for rank, handle in coming.items():
            total += yield from self._ballot(handle, f"the vote of {self.coordinate(rank)} on step {step}")
        yield from self._sent(sends)
        return total

    def _by_tree(self, step: int, mine: Ballot, neighbours: TreeNeighbours) -> Routine[Ballot]:
        above, below = neighbours.above, neighbours.below
        coming = {rank: self._receive(step, rank) for rank in below}
        if above is None and not all(handle.done() for handle in coming.values()):
            self._use_time(list(coming.values()))  # the root waits here alone
        total = mine
        for rank, handle in coming.items():
            what = f"the votes of {self.coordinate(rank)} and those below it on step {step}"
            total += yield from self._ballot(handle, what)
        sends = []
        if above is not None:
            answer = self._receive(step, above)
            sends.append(self._send(step, total, above))
            self._use_time([answer])
            what = f"all votes on step {step} from {self.coordinate(above)}"
            total = yield from self._ballot(answer, what)
        sends += [self._send(step, total, rank) for rank in below]
        yield from self._sent(sends)
        return total

    def _receive(self, step: int, rank: int) -> Handle:
        return self.transport.recv(None, source=rank, tag=vote_tag(step))

    def _send(self, step: int, ballot: Ballot, rank: int) -> Handle:
        return self.transport.send(torch.tensor(ballot.to_floats(), dtype=torch.float64), to=rank, tag=vote_tag(step))

    def _use_time(self, coming: list[Handle]) -> None:
        if not coming or self.meanwhile is None:
            return
        start = time.perf_counter_ns()
        self.meanwhile()
        if all(handle.done() for handle in coming):
            self.late_ns = time.perf_counter_ns() - start

    @staticmethod
    def _ballot(handle: Handle, what: str) -> Routine[Ballot]:
        if not handle.done():
            yield RoutineWait(handle, what)
        return Ballot.from_floats(handle.tensor().tolist())

    @staticmethod
    def _sent(sends: list[Handle]) -> Routine[None]:
        for handle in sends:
            if not handle.done():
                yield RoutineWait(handle, "the own vote to be taken")
