"""What makes orders and programs right on each worker by itself: one function per rule.

`complete`, `canonical` and `together` look at compute instructions, `causal` at what each one uses, `paired` at sends and
receives, `freed` at the ends of activations, `ended` at the last exchanges. Whether workers wait for each other is for
`deadlock`.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property

from raypar.plan import Crossing, Routing
from raypar.schedule.data_flow import Bundle, DataFlow, Result, result_of
from raypar.schedule.instructions import (
    Backward,
    BackwardInput,
    BackwardWeight,
    Compute,
    ExchangeTies,
    Forward,
    Free,
    Instruction,
    OptimizerStep,
    Recv,
    Reduce,
    Send,
    Vote,
)

COMPUTE = (Forward, Backward, BackwardInput, BackwardWeight)


@dataclass(frozen=True, slots=True)
class Problem:
    """One broken rule. `rank`: the worker where it shows."""

    rule: str
    rank: int
    text: str


@dataclass(frozen=True)
class RuleCase:
    """Lists under test with everything the rules look at. `training` is False for a validation pass, which has no backward."""

    lists: Sequence[Sequence[Instruction]]
    routing: Routing
    crossing: Crossing
    flow: DataFlow
    lowered: bool
    training: bool = True

    def compute(self, rank: int) -> Iterator[Compute]:
        """The compute instructions of a worker."""
        return (i for i in self.lists[rank] if isinstance(i, COMPUTE))

    def due(self, rank: int) -> Iterator[tuple[int, int]]:
        """(stage, microbatch) routed to a worker."""
        plan = self.routing.plan
        for stage in plan.stages_of(rank):
            for microbatch in self.routing.of_replica(stage, plan.seats[rank].replica):
                yield stage, microbatch

    @cached_property
    def _first_shards(self) -> list[list[int]]:
        """By stage and microbatch: the rank of the first shard; the others follow it."""
        count = range(self.routing.microbatches.count)
        return [[self.routing.rank(stage, m) for m in count] for stage in range(len(self.routing.plan.stages))]

    def source(self, stage: int, microbatch: int, like: int) -> int:
        """Who runs (stage, microbatch) for worker `like`: shard t is served by shard t mod (number of the source's shards)."""
        plan = self.routing.plan
        return self._first_shards[stage][microbatch] + plan.seats[like].shard % plan.stages[stage].shards


def bundle_of(instruction: Send | Recv) -> Bundle:
    """The bundle a send or receive moves."""
    kind, here = instruction.kind, instruction.stage
    if isinstance(instruction, Send):
        there, producer_first = instruction.to_stage, kind == "activation"
    else:
        there, producer_first = instruction.from_stage, kind == "gradient"
    return (kind, here, there, instruction.microbatch) if producer_first else (kind, there, here, instruction.microbatch)


def describe_bundle(carried: Bundle) -> str:
    """A bundle in words."""
    kind, src, dst, microbatch = carried
    way = f"from stage {src} to stage {dst}" if kind == "activation" else f"from stage {dst} back to stage {src}"
    return f"the {kind} of microbatch {microbatch} {way}"


def check_complete(case: RuleCase) -> list[Problem]:
    """Every (stage, microbatch) is computed exactly once, where it is routed, and nothing else is."""
    found: list[Problem] = []
    for rank in range(len(case.lists)):
        count = Counter((type(i), i.stage, i.microbatch) for i in case.compute(rank))
        due = set(case.due(rank))
        for stage, m in sorted(due):
            times = [count[kind, stage, m] for kind in COMPUTE]
            if times[0] != 1:
                found.append(Problem("complete", rank, f"{stage}F{m} stands {times[0]} times"))
            if times[1:] not in ([[1, 0, 0], [0, 1, 1]] if case.training else [[0, 0, 0]]):
                numbers = ", ".join(f"{stage}{letter}{m} {n} times" for letter, n in zip("BIW", times[1:], strict=True))
                found.append(Problem("complete", rank, numbers))
        for kind, stage, m in count:
            if (stage, m) not in due:
                text = f"{kind(stage, m)}: microbatch {m} of stage {stage} is not routed to this worker"
                found.append(Problem("complete", rank, text))
    return found


def check_causal(case: RuleCase) -> list[Problem]:
    """On each worker: what an instruction needs from the same worker, or receives, stands before it."""
    found: list[Problem] = []
    for rank, order in enumerate(case.lists):
        done: set[Result] = set()
        posted: set[Bundle] = set()
        made: set[Bundle] = set()
        for instruction in order:
            if isinstance(instruction, Recv):
                posted.add(bundle_of(instruction))
            elif isinstance(instruction, Send):
                if bundle_of(instruction) not in made:
                    found.append(Problem("causal", rank, f"{instruction} stands before what it sends"))
            elif isinstance(instruction, COMPUTE):
                for need, carried in case.flow.needs(instruction):
                    home = rank if carried is None else case.source(need[1], need[2], rank)
                    if home == rank:
                        if need not in done:
                            found.append(Problem("causal", rank, f"{instruction} stands before {need[1]}{need[0]}{need[2]}"))
                    elif case.lowered and carried is not None and carried not in posted:
                        text = f"{instruction} uses {describe_bundle(carried)}, which is not received before it"
                        found.append(Problem("causal", rank, text))
                done.add(result_of(instruction))
                if case.lowered:
                    made.update(b for _, b in case.flow.gives(instruction))
    return found


def check_canonical(case: RuleCase) -> list[Problem]:
    """Per stage and block, instructions that produce weight gradients come in index order (rule 6 of the contract): B and W,
    and B and I, because a layer whose backward cannot be split produces them in I."""
    found: list[Problem] = []
    for rank in range(len(case.lists)):
        last: dict[tuple[str, int, int], int] = {}
        for instruction in case.compute(rank):
            if isinstance(instruction, Forward):
                continue
            m, block = instruction.microbatch, case.routing.microbatches.block(instruction.microbatch)
            for kind in _PRODUCES[type(instruction)]:
                before = last.get((kind, instruction.stage, block), -1)
                if m < before:
                    text = f"{instruction} stands after microbatch {before} of the same block"
                    found.append(Problem("canonical", rank, text))
                    break
                last[kind, instruction.stage, block] = m
    return found


def check_shards_agree(case: RuleCase) -> list[Problem]:
    """The shards of a seat compute the same instructions in the same order: each is one computation of them all."""
    found: list[Problem] = []
    plan = case.routing.plan
    for rank, seat in enumerate(plan.seats):
        if seat.shard == 0:
            first = list(case.compute(rank)) if plan.stages[plan.stages_of(rank)[0]].shards > 1 else []
            continue
        mine = list(case.compute(rank))
        if mine != first:
            at = next(n for n, (a, b) in enumerate(zip(mine, first, strict=True)) if a != b)
            text = f"{mine[at]} is instruction {at} here, {first[at]} on shard 0"
            found.append(Problem("together", rank, text))
    return found


_PRODUCES: dict[type[Compute], str] = {Backward: "IW", BackwardInput: "I", BackwardWeight: "W"}


End = tuple[int, int, bool, Bundle]
"""(worker, peer, whether it sends, bundle)."""


def _post(end: End) -> Send | Recv:
    """The instruction that stands at one end of a message."""
    _, peer, sends, (kind, src, dst, microbatch) = end
    sender, receiver = (src, dst) if kind == "activation" else (dst, src)
    if sends:
        return Send(sender, microbatch, receiver, peer, kind)
    return Recv(receiver, microbatch, sender, peer, kind)


def check_paired(case: RuleCase) -> list[Problem]:
    """Each bundle that crosses workers has one send and one receive at the right ends, in one order per pair of workers."""
    found: list[Problem] = []
    due: dict[End, int] = {}
    for rank in range(len(case.lists)):
        for i in case.compute(rank):
            for need, carried in case.flow.needs(i):
                if carried is None:
                    continue
                source = case.source(need[1], need[2], rank)
                if source != rank:
                    due[rank, source, False, carried] = due[source, rank, True, carried] = 1
    have: dict[End, int] = {}
    queues: dict[tuple[int, int], list[Bundle]] = {}
    for rank, order in enumerate(case.lists):
        for post in order:
            if isinstance(post, (Send, Recv)):
                moved = bundle_of(post)
                end = (rank, post.peer, isinstance(post, Send), moved)
                have[end] = have.get(end, 0) + 1
                queues.setdefault((rank, post.peer), []).append(moved)
    if have != due:
        for end in [*due, *(end for end in have if end not in due)]:
            times, needed = have.get(end, 0), due.get(end, 0)
            if times != needed:
                text = f"{_post(end)} stands {times} times, needed {needed} ({describe_bundle(end[3])})"
                found.append(Problem("paired", end[0], text))
        return found
    for (rank, peer), queue in queues.items():
        other = queues[peer, rank]
        if rank < peer and queue != other:
            at = next(n for n, (a, b) in enumerate(zip(queue, other, strict=True)) if a != b)
            here, there = describe_bundle(queue[at]), describe_bundle(other[at])
            text = f"message {at} with {case.routing.plan.coordinate(peer)} is {here} here, {there} there"
            found.append(Problem("paired", rank, text))
    return found


def check_freed(case: RuleCase) -> list[Problem]:
    """Activations are freed once, after their last use."""
    found: list[Problem] = []
    last_use: tuple[type, ...] = (Backward, BackwardWeight) if case.training else (Forward,)
    for rank, order in enumerate(case.lists):
        used: set[tuple[int, int]] = set()
        gone: set[tuple[int, int]] = set()
        for instruction in order:
            if isinstance(instruction, Free):
                key = (instruction.stage, instruction.microbatch)
                if key in gone:
                    found.append(Problem("freed", rank, f"{instruction} stands twice"))
                elif key not in used:
                    found.append(Problem("freed", rank, f"{instruction} stands before the last use of these activations"))
                gone.add(key)
            elif isinstance(instruction, last_use):
                assert isinstance(instruction, COMPUTE)
                used.add((instruction.stage, instruction.microbatch))
        found += [Problem("freed", rank, f"{Free(*key)} is missing") for key in sorted(used - gone)]
    return found


def check_ended(case: RuleCase) -> list[Problem]:
    """After all work: one reduction of each stage, the tied parameters if there are any, the vote, the optimizer step."""
    if not case.training:
        return []
    found: list[Problem] = []
    for rank, order in enumerate(case.lists):
        stages = case.routing.plan.stages_of(rank)
        last = dict.fromkeys(stages, -1)
        places: dict[Instruction, list[int]] = {}
        for place, i in enumerate(order):
            if isinstance(i, (Backward, BackwardWeight)):
                last[i.stage] = place
            elif isinstance(i, (Reduce, ExchangeTies, Vote, OptimizerStep)):
                places.setdefault(i, []).append(place)
        wanted: list[Instruction] = [Reduce(s) for s in stages]
        wanted += [ExchangeTies()] if case.crossing.ties else []
        wanted += [Vote(), OptimizerStep()]
        for i in dict.fromkeys([*wanted, *places]):
            times, due = len(places.get(i, [])), int(i in wanted)
            if times != due:
                found.append(Problem("ended", rank, f"{i} ({type(i).__name__}) stands {times} times, needed {due}"))
        if any(len(places.get(i, [])) != 1 for i in wanted):
            continue
        for stage in stages:
            if places[Reduce(stage)][0] < last[stage]:
                text = f"{Reduce(stage)} stands before {order[last[stage]]}, the stage's last weight gradient"
                found.append(Problem("ended", rank, text))
        # What follows the reductions must be the program's very end, in this order.
        end = wanted[len(stages) :]
        if list(order[len(order) - len(end) :]) != end:
            text = f"the last instructions are {' '.join(map(str, order[-len(end) :]))}, not {' '.join(map(str, end))}"
            found.append(Problem("ended", rank, text))
    return found


def check_memory(case: RuleCase, memory: Sequence[float]) -> list[Problem]:
    """Live activations per worker, in microbatches through all its chunks (a chunk counts 1 / chunks), against `memory`."""
    found: list[Problem] = []
    for rank, allowed in enumerate(memory):
        chunks, live = len(case.routing.plan.stages_of(rank)), 0
        for instruction in case.compute(rank):
            if isinstance(instruction, Forward):
                live += 1
                if live > allowed * chunks + 1e-9:
                    text = f"{instruction} makes {live / chunks:g} microbatches of activations, {allowed:g} fit"
                    found.append(Problem("within memory", rank, text))
                    break
            elif isinstance(instruction, (Backward, BackwardWeight)):
                live -= 1
    return found
