"""What is wrong with a schedule or its programs: one function per rule; problems name the worker and the instruction.

`complete`, `causal` and `canonical` look at compute instructions, `paired` at sends and receives, `deadlock_free` executes
the whole under rendezvous semantics: posts are asynchronous, but a pair of workers has one in-order queue (one communicator),
and a message moves only when both ends have it at the head of that queue. Execution is confluent (no step disables another), so
one maximal run decides; `tests/helpers/brute_force.py` checks that against all interleavings.
"""

from __future__ import annotations

from collections import Counter, deque
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from raypar.errors import ScheduleError
from raypar.plan import Crossing, Routing
from raypar.schedule.dependences import Bundle, Flow, Result, result
from raypar.schedule.instructions import (
    Backward,
    BackwardInput,
    BackwardWeight,
    Compute,
    Forward,
    Instruction,
    OptimizerStep,
    Program,
    Recv,
    Reduce,
    Schedule,
    Send,
    Vote,
)

Lists = Schedule | tuple[Program, ...]
_COMPUTE = (Forward, Backward, BackwardInput, BackwardWeight)


@dataclass(frozen=True, slots=True)
class Problem:
    """One broken rule. `rank`: the worker where it shows."""

    rule: str
    rank: int
    text: str


@dataclass(frozen=True)
class _Case:
    """Lists under test with everything the rules look at."""

    lists: Sequence[Sequence[Instruction]]
    routing: Routing
    flow: Flow
    lowered: bool

    def compute(self, rank: int) -> Iterator[Compute]:
        """The compute instructions of a worker."""
        return (i for i in self.lists[rank] if isinstance(i, _COMPUTE))

    def rank_of(self, stage: int, microbatch: int, like: int) -> int:
        """Who runs (stage, microbatch) for the shard that worker `like` has to do with."""
        shards = self.routing.plan.stages[stage].shards
        return self.routing.rank(stage, microbatch, self.routing.plan.seats[like].shard % shards)


def validate(lists: Lists, routing: Routing, crossing: Crossing, *, memory: Sequence[float] | None = None) -> None:
    """Raise `ScheduleError` naming the first problem (and how many there are). `memory`: see `within_memory`."""
    found = problems(lists, routing, crossing, memory=memory)
    if found:
        first = found[0]
        more = f" (and {len(found) - 1} more problems)" if len(found) > 1 else ""
        raise ScheduleError(
            f"{first.rule}: {routing.plan.coordinate(first.rank)}: {first.text}{more}"
            if first.rank < routing.plan.world
            else f"{first.rule}: {first.text}{more}",
            cure=_CURES[first.rule],
        )


def problems(lists: Lists, routing: Routing, crossing: Crossing, *, memory: Sequence[float] | None = None) -> list[Problem]:
    """All broken rules. Rules that presuppose an earlier one are only looked at when that one holds."""
    if len(lists) != routing.plan.world:
        text = f"{len(lists)} lists for a plan of {routing.plan.world} workers"
        return [Problem("complete", min(len(lists), routing.plan.world), text)]
    lowered = any(isinstance(i, (Send, Recv, Reduce, Vote)) for order in lists for i in order)
    case = _Case(lists, routing, Flow(crossing, len(routing.plan.stages)), lowered)
    found = complete(case)
    if found:
        return found
    found = causal(case) + canonical(case)
    if lowered:
        found += paired(case) + ended(case)
    if not found:
        found += deadlock_free(case)
    if memory is not None:
        found += within_memory(case, memory)
    return found


_CURES = {
    "complete": "every (stage, microbatch) needs F once and B once (or I and W once each), on the worker it is routed to",
    "causal": "put F before B or I, I before W, a receive before its use and a send after what it sends",
    "canonical": "order the weight gradients of a stage by microbatch inside each block; the bits depend on it",
    "paired": "every send needs one receive of the same bundle at its peer, in the same order on both ends",
    "ended": "a program ends with the reduction of each of its stages, the vote and the optimizer step, in this order",
    "deadlock-free": "change the order so that no workers wait for each other in a circle",
    "within memory": "start fewer forwards before the first backward (a smaller warmup), or allow more activations",
}


def complete(case: _Case) -> list[Problem]:
    """Every (stage, microbatch) is computed exactly once, where it is routed, and nothing else is."""
    plan, found = case.routing.plan, []
    for rank, seat in enumerate(plan.seats):
        count = Counter((type(i), i.stage, i.microbatch) for i in case.compute(rank))
        due = set()
        for stage in plan.stages_of(rank):
            for m in case.routing.of_replica(stage, seat.replica):
                due.add((stage, m))
                backward = count[Backward, stage, m], count[BackwardInput, stage, m], count[BackwardWeight, stage, m]
                if count[Forward, stage, m] != 1:
                    found.append(Problem("complete", rank, f"{stage}F{m} stands {count[Forward, stage, m]} times"))
                if backward not in ((1, 0, 0), (0, 1, 1)):
                    numbers = ", ".join(f"{stage}{k}{m} {n} times" for k, n in zip("BIW", backward, strict=True))
                    found.append(Problem("complete", rank, numbers))
        for _, stage, m in count:
            if (stage, m) not in due:
                found.append(Problem("complete", rank, f"stage {stage}, microbatch {m} is not routed to this worker"))
    return found


def causal(case: _Case) -> list[Problem]:
    """On each worker: what an instruction needs from the same worker, or receives, stands before it."""
    found = []
    for rank, order in enumerate(case.lists):
        done: set[Result] = set()
        posted: set[Bundle] = set()
        handed: set[Bundle] = set()
        for instruction in order:
            if isinstance(instruction, Recv):
                posted.add(bundle(instruction))
            elif isinstance(instruction, Send) and bundle(instruction) not in handed:
                found.append(Problem("causal", rank, f"{instruction} stands before what it sends"))
            elif isinstance(instruction, _COMPUTE):
                for need, carried in case.flow.needs(instruction):
                    home = rank if carried is None else case.rank_of(need[1], need[2], rank)
                    if home == rank and need not in done:
                        found.append(Problem("causal", rank, f"{instruction} stands before {need[1]}{need[0]}{need[2]}"))
                    elif home != rank and case.lowered and carried not in posted:
                        found.append(Problem("causal", rank, f"{instruction} uses an {carried} that is not received before it"))
                done.add(result(instruction))
                handed.update(b for _, b in case.flow.gives(instruction))
    return found


def canonical(case: _Case) -> list[Problem]:
    """Per stage and block, instructions that produce weight gradients come in index order (rule 6 of the contract)."""
    found = []
    for rank in range(len(case.lists)):
        last: dict[tuple[str, int, int], int] = {}
        for instruction in case.compute(rank):
            if isinstance(instruction, Forward):
                continue
            kind = "W" if isinstance(instruction, BackwardWeight) else "B"
            key = (kind, instruction.stage, case.routing.microbatches.block(instruction.microbatch))
            if instruction.microbatch < last.get(key, -1):
                text = f"{instruction} stands after microbatch {last[key]} of the same block"
                found.append(Problem("canonical", rank, text))
            last[key] = max(instruction.microbatch, last.get(key, -1))
    return found


def bundle(instruction: Send | Recv) -> Bundle:
    """The bundle a send or receive moves."""
    other = instruction.to_stage if isinstance(instruction, Send) else instruction.from_stage
    producer_first = isinstance(instruction, Send) == (instruction.kind == "activation")
    pair = (instruction.stage, other) if producer_first else (other, instruction.stage)
    return (instruction.kind, *pair, instruction.microbatch)


def paired(case: _Case) -> list[Problem]:
    """Each needed bundle has one send and one receive at the right ends, in one order per pair of workers."""
    found = []
    ends: dict[tuple[int, int], list[list[tuple[Bundle, bool]]]] = {}
    for rank, order in enumerate(case.lists):
        for instruction in order:
            if isinstance(instruction, (Send, Recv)):
                if not 0 <= instruction.peer < len(case.lists) or instruction.peer == rank:
                    found.append(Problem("paired", rank, f"{instruction} has no such peer"))
                    continue
                pair = (min(rank, instruction.peer), max(rank, instruction.peer))
                sides = ends.setdefault(pair, [[], []])
                from_low = isinstance(instruction, Send) == (rank == pair[0])
                sides[rank != pair[0]].append((bundle(instruction), from_low))
    for (low, high), (a, b) in ends.items():
        if a != b:
            where = next((i for i, (x, y) in enumerate(zip(a, b, strict=False)) if x != y), min(len(a), len(b)))
            left, right = (str(side[where][0]) if where < len(side) else "nothing" for side in (a, b))
            found.append(Problem("paired", low, f"message {where} with worker {high} is {left} here and {right} there"))
    have = Counter((rank, bundle(i)) for rank, order in enumerate(case.lists) for i in order if isinstance(i, Recv))
    due = Counter(
        (rank, carried)
        for rank in range(len(case.lists))
        for i in case.compute(rank)
        for need, carried in case.flow.needs(i)
        if carried is not None and case.rank_of(need[1], need[2], rank) != rank
    )
    for (rank, moved), times in (have - due).items():
        found.append(Problem("paired", rank, f"{moved} is received {times} times more than it is used"))
    return found


def ended(case: _Case) -> list[Problem]:
    """Reduce of every stage after its last weight gradient, then the vote, then the optimizer step."""
    found = []
    for rank, order in enumerate(case.lists):
        place: dict[object, int] = {}
        for index, instruction in enumerate(order):
            if isinstance(instruction, Reduce):
                place[instruction.stage] = index
            elif isinstance(instruction, (Vote, OptimizerStep)):
                place[type(instruction)] = index
        for stage in case.routing.plan.stages_of(rank):
            last = max(
                (n for n, i in enumerate(order) if isinstance(i, (Backward, BackwardWeight)) and i.stage == stage), default=-1
            )
            if not last < place.get(stage, -1) < place.get(Vote, -1) < place.get(OptimizerStep, -1):
                found.append(
                    Problem("ended", rank, f"stage {stage}: reduction, vote and optimizer step are missing or misplaced")
                )
    return found


def deadlock_free(case: _Case) -> list[Problem]:
    """Run everything as far as it goes; whoever has not finished waits in a circle."""
    size = len(case.lists)
    place = [0] * size
    queues: dict[tuple[int, int], deque[tuple[Bundle, bool]]] = {}
    arrived: list[set[Bundle]] = [set() for _ in range(size)]
    done: set[tuple[Result, int]] = set()
    watchers: dict[object, list[int]] = {}
    runnable = deque(range(size))
    shard = [seat.shard for seat in case.routing.plan.seats]

    def blocked_by(rank: int, instruction: Instruction) -> object | None:
        if not isinstance(instruction, _COMPUTE):
            return None
        for need, carried in case.flow.needs(instruction):
            if carried is None:
                continue
            home = case.rank_of(need[1], need[2], rank)
            if home == rank:
                continue
            if case.lowered:
                if carried not in arrived[rank]:
                    return (rank, carried)
            elif (need, shard[home]) not in done:
                return (need, shard[home])
        return None

    def wake(what: object) -> None:
        runnable.extend(watchers.pop(what, ()))

    def match(a: int, b: int) -> None:
        mine, theirs = queues.setdefault((a, b), deque()), queues.setdefault((b, a), deque())
        while mine and theirs and mine[0][0] == theirs[0][0] and mine[0][1] != theirs[0][1]:
            moved, sent = mine.popleft()
            theirs.popleft()
            receiver = b if sent else a
            arrived[receiver].add(moved)
            wake((receiver, moved))

    while runnable:
        rank = runnable.popleft()
        order = case.lists[rank]
        while place[rank] < len(order):
            instruction = order[place[rank]]
            needed = blocked_by(rank, instruction)
            if needed is not None:
                watchers.setdefault(needed, []).append(rank)
                break
            place[rank] += 1
            if isinstance(instruction, (Send, Recv)):
                queues.setdefault((rank, instruction.peer), deque()).append(
                    (bundle(instruction), isinstance(instruction, Send))
                )
                match(rank, instruction.peer)
            elif isinstance(instruction, _COMPUTE):
                key = (result(instruction), shard[rank])
                done.add(key)
                wake(key)
    found = [
        Problem("deadlock-free", rank, f"waits for ever at {case.lists[rank][place[rank]]}")
        for rank in range(size)
        if place[rank] < len(case.lists[rank])
    ]
    for (rank, peer), queue in queues.items():
        if queue and not found:
            found.append(Problem("deadlock-free", rank, f"{queue[0][0]} between workers {rank} and {peer} never moves"))
    return found


def within_memory(case: _Case, memory: Sequence[float]) -> list[Problem]:
    """Live activations per worker, in microbatches through all its chunks (a chunk counts 1 / chunks), against `memory`."""
    found = []
    for rank, allowed in enumerate(memory):
        chunk = 1 / len(case.routing.plan.stages_of(rank))
        live = 0.0
        for instruction in case.compute(rank):
            if isinstance(instruction, Forward):
                live += chunk
                if live > allowed + 1e-9:
                    text = f"{instruction} makes {live:g} microbatches of activations, {allowed:g} fit"
                    found.append(Problem("within memory", rank, text))
                    break
            elif isinstance(instruction, (Backward, BackwardWeight)):
                live -= chunk
    return found
