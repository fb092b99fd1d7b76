"""The check whether workers wait for each other for ever, under rendezvous semantics.

Posts do not block. But every communicator has one in-order queue at each of its ends, and a message moves only when it is at
the head of both queues. A compute instruction waits for the bundles it uses, the end of the step for everything
posted. Execution is confluent (no step disables another), so one maximal run decides; `tests/helpers/brute_force.py`
checks that against all interleavings.
"""

from __future__ import annotations

from collections import deque
from typing import Literal

from raypar.schedule.data_flow import MESSAGE_KIND, StageResult, name_maker_of_result
from raypar.schedule.instructions import Bundle, Communication, Compute
from raypar.schedule.program_rules import RuleCheckInput, ScheduleProblem, describe_message

Communicators = Literal["pair", "world"]
"""`pair`: one communicator for each two workers. `world`: one for all, so that a worker has a single queue."""
Awaited = tuple[int, Bundle] | tuple[int, StageResult]
"""(receiver, bundle) in a program, (worker, result) in a schedule that is not lowered."""


def check_deadlock(case: RuleCheckInput, communicators: Communicators) -> list[ScheduleProblem]:
    """The workers that wait for ever, as problems: all workers are run as far as possible, and some have not finished."""
    run = _Run(case, communicators)
    run.to_the_end()
    found: list[ScheduleProblem] = []
    for rank, place in enumerate(run.place):
        if place < len(case.lists[rank]):
            text = f"waits for ever at {case.lists[rank][place]}"
            awaited = run.awaited(rank)
            if awaited is not None:
                text += f" for {_words(awaited)}"
            found.append(ScheduleProblem("deadlock-free", rank, text))
    if not found:
        for (rank, _), queue in run.queues.items():
            if queue:
                text = f"the step cannot end: {describe_message(queue[0][0])} never moves"
                found.append(ScheduleProblem("deadlock-free", rank, text))
    return found


def _words(awaited: Awaited) -> str:
    worker, what = awaited
    if len(what) == 4:
        return describe_message(what)
    return f"{name_maker_of_result(what)} of worker {worker}"


class _Run:
    """A run of all workers as far as possible."""

    place: list[int]
    """Rank -> index of the instruction at which the rank waits."""
    queues: dict[tuple[int, int], deque[tuple[Bundle, int, bool]]]
    """(rank, peer) -> posts that have not moved: (bundle, peer, whether the rank sends it). Peer is -1 for a single queue."""
    exists: set[Awaited]
    """Everything that has arrived (in a program) or was made (in a schedule that is not lowered)."""
    sleepers: dict[Awaited, list[int]]
    """What is awaited -> ranks that wait for it."""
    runnable: deque[int]
    """Ranks that can go on."""

    def __init__(self, case: RuleCheckInput, communicators: Communicators) -> None:
        self.case = case
        self.paired = communicators == "pair"
        self.place = [0] * len(case.lists)
        self.queues = {}
        self.exists = set()
        self.sleepers = {}
        self.runnable = deque(range(len(case.lists)))

    def to_the_end(self) -> None:
        """Run until no worker can go on."""
        while self.runnable:
            rank = self.runnable.popleft()
            order = self.case.lists[rank]
            for place in range(self.place[rank], len(order)):
                instruction = order[place]
                if isinstance(instruction, Communication):
                    post = (instruction.bundle, instruction.peer, instruction.sends)
                    self._queue(rank, instruction.peer).append(post)
                    self._move(rank, instruction.peer)
                elif isinstance(instruction, Compute):
                    awaited = self._missing(rank, instruction)
                    if awaited is not None:
                        self.sleepers.setdefault(awaited, []).append(rank)
                        self.place[rank] = place
                        break
                    if not self.case.lowered:
                        for what in instruction.makes:
                            if what in MESSAGE_KIND:  # nobody waits for the others
                                self._now_exists((rank, (what, instruction.stage, instruction.microbatch)))
            else:
                self.place[rank] = len(order)

    def awaited(self, rank: int) -> Awaited | None:
        """The bundle or result that a stopped worker needs from another worker; None if its instruction computes nothing."""
        instruction = self.case.lists[rank][self.place[rank]]
        return self._missing(rank, instruction) if isinstance(instruction, Compute) else None

    def _missing(self, rank: int, instruction: Compute) -> Awaited | None:
        m = instruction.microbatch
        for what, stage, kind, src, dst in self.case.flow.arrivals(type(instruction), instruction.stage):
            home = self.case.source(stage, m, rank)
            if home != rank:
                key: Awaited = (rank, (kind, src, dst, m)) if self.case.lowered else (home, (what, stage, m))
                if key not in self.exists:
                    return key
        return None

    def _queue(self, rank: int, peer: int) -> deque[tuple[Bundle, int, bool]]:
        return self.queues.setdefault((rank, peer if self.paired else -1), deque())

    def _move(self, rank: int, peer: int) -> None:
        """Move messages from the head of a queue, then from queues that have got a new head."""
        ends = [(rank, peer)]
        while ends:
            here, there = ends.pop()
            mine = self._queue(here, there)
            while mine:
                moved, other, sent = mine[0]
                theirs = self._queue(other, here)
                if not theirs or theirs[0] != (moved, here, not sent):
                    break
                mine.popleft()
                theirs.popleft()
                self._now_exists((other if sent else here, moved))
                ends.append((other, here))

    def _now_exists(self, what: Awaited) -> None:
        self.exists.add(what)
        if what in self.sleepers:
            self.runnable.extend(self.sleepers.pop(what))
