"""The check whether a schedule or its programs would run; problems name the rule, the worker and the instruction."""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from typing import Literal

from raypar.errors import ScheduleError
from raypar.plan import MicrobatchRouting, StageConnections
from raypar.plan.wording import count_noun
from raypar.schedule.data_flow import MESSAGE_KIND, DataFlow, StageResult, name_of_producing_instruction
from raypar.schedule.gather_rules import check_gathers
from raypar.schedule.gathering import owners
from raypar.schedule.instructions import (
    WEIGHT_GRADIENTS,
    Bundle,
    Communication,
    Compute,
    Program,
    Schedule,
    ServeParameters,
)
from raypar.schedule.program_rules import (
    RuleCheckInput,
    ScheduleProblem,
    check_activation_frees,
    check_activation_limit,
    check_computed_once,
    check_gradient_order,
    check_needs_come_first,
    check_sends_match_receives,
    check_shards_have_same_order,
    check_step_end,
    describe_message,
)

__all__ = ["ScheduleProblem", "find_schedule_problems", "validate_schedule"]

Lists = Schedule | tuple[Program, ...]

_CURES = {
    "complete": "every (stage, microbatch) needs F once and B once (or I and W once each), on the worker it is routed to",
    "causal": "put F before B or I, I before W, a receive before its use and a send after what it sends",
    "canonical": "order the weight gradients of a stage by microbatch inside each block; the bits depend on it",
    "together": "give all shards of a replica of a stage one order: they compute every instruction together",
    "paired": "every send needs one receive of the same bundle at its peer, in the same order on both ends",
    "freed": "free the activations of each microbatch once, after its B or W",
    "gathered": "gather a stage's parameters before its uses, release them after the last, and serve all that readers ask for "
    "at the front",
    "ended": "a program ends with the reductions of its stages, tied parameters, buffers, the vote and the optimizer step",
    "deadlock-free": "change the order so that no workers wait for each other in a circle",
    "within memory": "start fewer forwards before the first backward (a smaller warmup), or allow more activations",
}


def validate_schedule(
    lists: Lists,
    routing: MicrobatchRouting,
    crossing: StageConnections,
    *,
    memory: Sequence[float] | None = None,
    communicators: Communicators = "pair",
    training: bool = True,
    ahead: int = 0,
) -> None:
    """Raise `ScheduleError` if there are problems, with the first one in its text. Arguments as of `find_schedule_problems`."""
    found = find_schedule_problems(
        lists, routing, crossing, memory=memory, communicators=communicators, training=training, ahead=ahead
    )
    if found:
        first = found[0]
        where = f"{routing.plan.coordinate(first.rank)}: " if first.rank < routing.plan.world else ""
        more = f" (and {len(found) - 1} more problems)" if len(found) > 1 else ""
        raise ScheduleError(f"{first.rule}: {where}{first.text}{more}", cure=_CURES[first.rule])


def find_schedule_problems(
    lists: Lists,
    routing: MicrobatchRouting,
    crossing: StageConnections,
    *,
    memory: Sequence[float] | None = None,
    communicators: Communicators = "pair",
    training: bool = True,
    ahead: int = 0,
) -> list[ScheduleProblem]:
    """The problems of orders or of lowered programs. A rule that presupposes another is checked only if the other holds.

    `memory`: most live activations per rank, in microbatches through all of a worker's chunks. `communicators`:
    the communicators through whose in-order queues messages go. `training=False`: the lists are those of a validation pass
    (`lower_validation_pass`). `ahead`: where gradients are scattered, how many microbatches find room on their way.
    """
    world = routing.plan.world
    if len(lists) != world:
        return [
            ScheduleProblem(
                "complete", min(len(lists), world), f"{len(lists)} lists for a plan of {count_noun(world, 'worker')}"
            )
        ]
    lowered = not training or any(i.role != "compute" for order in lists for i in order)
    case = RuleCheckInput(lists, routing, crossing, DataFlow(crossing, len(routing.plan.stages)), lowered, training, ahead)
    found = check_computed_once(case)
    if found:
        return found
    found = check_needs_come_first(case) + check_gradient_order(case) + check_shards_have_same_order(case)
    if lowered:
        found += check_sends_match_receives(case) + check_activation_frees(case) + check_step_end(case) + check_gathers(case)
    if not found:
        found += check_deadlock(case, communicators)
    if memory is not None:
        found += check_activation_limit(case, memory)
    return found


Communicators = Literal["pair", "world"]
"""`pair`: one communicator for each two workers. `world`: one for all, so that a worker has a single queue."""
HandedOver = tuple[int, int]
"""(stage, microbatch) whose gradients begin to go to their owners."""
Served = tuple[int, int, Literal["served"], int]
"""(owner, stage, "served", reader): that an owner has begun to serve a reader."""
Awaited = tuple[int, Bundle] | tuple[int, StageResult] | Compute | HandedOver | Served
"""(receiver, bundle) in a program, (worker, result) in a schedule that is not lowered; an instruction: that all shards of the
replica stand at it; gradients of another replica, without which there is no room for those of this one; parameters of an
owner."""


def check_deadlock(case: RuleCheckInput, communicators: Communicators) -> list[ScheduleProblem]:
    """The workers that wait for each other for ever, as problems: all workers are run as far as possible, and some have not
    finished.

    Posts do not block. But every communicator has one in-order queue at each of its ends, and a message moves only when it is
    at the head of both queues. A compute instruction waits for the bundles it uses, the end of the step for everything posted.
    Parameters that come and go arrive once their owners serve them, without these owners' doing. Where gradients are
    scattered, an instruction that makes some is over when there was room for them: when the gradients of
    all microbatches have begun to be made up to the end of the round (`gradient_scatter.rounds_of`) of the one `ahead` before.
    Execution is confluent (no step disables another), so one maximal run decides; `tests/helpers/brute_force.py` checks that
    against all interleavings.
    """
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
    if isinstance(awaited, Compute):
        return "the other shards, which stand at other instructions"
    if len(awaited) == 4:
        return f"parameters of stage {awaited[1]}, which worker {awaited[0]} does not serve yet"
    worker, what = awaited
    if isinstance(what, int):
        return f"room for its gradients: those of microbatch {what} of stage {worker} have not begun to be made"
    if len(what) == 4:
        return describe_message(what)
    return f"{name_of_producing_instruction(what)} of worker {worker}"


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
    handed_over: list[int]
    """Stage -> the first microbatch whose gradients have not begun to be made, where they are scattered."""
    met: dict[Compute, set[int]]
    """Instruction that shards compute together -> those that have come to it. Empty where each worker has one role: the shards
    of a replica then have one order, and what one of them waits for all do."""

    def __init__(self, case: RuleCheckInput, communicators: Communicators) -> None:
        self.case = case
        self.paired = communicators == "pair"
        self.place = [0] * len(case.lists)
        self.queues = {}
        self.exists = set()
        self.sleepers = {}
        self.met = {}
        self.handed_over = [0] * len(case.routing.plan.stages)
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
                elif type(instruction) is ServeParameters:
                    self._now_exists((rank, instruction.stage, "served", instruction.reader))
                elif isinstance(instruction, Compute):
                    awaited = self._awaited(rank, instruction)
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
        if not isinstance(instruction, Compute):
            return None
        return self._missing(rank, instruction) or self._not_served(rank, instruction) or self._room(instruction) or instruction

    def _awaited(self, rank: int, instruction: Compute) -> Awaited | None:
        """What a worker that stands at an instruction waits for; None: it can be computed."""
        found = self._missing(rank, instruction) or self._not_served(rank, instruction)
        return found or self._met(rank, instruction) or self._room(instruction)

    def _not_served(self, rank: int, instruction: Compute) -> Served | None:
        """The first owner of the parameters with which an instruction computes that does not serve this worker yet."""
        if not self.case.lowered or not instruction.needs_weights:
            return None
        stage = instruction.stage
        if self.case.routing.plan.stages[stage].gather_in_effect in (None, "step"):
            return None
        served: list[Served] = [(owner, stage, "served", rank) for owner in owners(self.case.routing.plan, stage, rank)]
        return next((each for each in served if each not in self.exists), None)

    def _met(self, rank: int, instruction: Compute) -> Compute | None:
        """The instruction itself if other shards have not come to it yet, without which a shard cannot compute it."""
        plan = self.case.routing.plan
        if plan.one_role_each or plan.stages[instruction.stage].shards == 1:
            return None
        there = self.met.setdefault(instruction, set())
        there.add(rank)
        if len(there) < plan.stages[instruction.stage].shards:
            return instruction
        self._now_exists(instruction)
        return None

    def _room(self, instruction: Compute) -> HandedOver | None:
        """The gradients that must begin to be made before there is room for all of the instruction's; None if there is."""
        stage, m = instruction.stage, instruction.microbatch
        if WEIGHT_GRADIENTS not in instruction.makes or not self.case.routing.scatters(stage):
            return None
        if (stage, m) not in self.exists:
            self._now_exists((stage, m))
            while (stage, self.handed_over[stage]) in self.exists:
                self.handed_over[stage] += 1
        needed = self.case.handed_over_before[stage][m]
        first = self.handed_over[stage]
        return (stage, first) if first < needed else None

    def _missing(self, rank: int, instruction: Compute) -> Awaited | None:
        m = instruction.microbatch
        for what, stage, kind, src, dst in self.case.flow.arrivals(type(instruction), instruction.stage):
            home = self.case.source(stage, m, instruction.stage, rank)
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
