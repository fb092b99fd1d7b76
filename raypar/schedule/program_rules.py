"""The rules of correct orders and programs: one function per rule, which returns the problems that it finds.

`complete`, `canonical` and `together` are about compute instructions, `causal` about what each of them uses, `paired` about
sends and receives, `freed` about the ends of activations, `ended` about the last exchanges. `validate.py` finds workers that
wait for each other.
"""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import combinations, product, zip_longest
from typing import NamedTuple

from raypar.plan import MicrobatchRouting, StageConnections, serving_shards
from raypar.schedule.data_flow import DataFlow, name_of_producing_instruction, needs_of_own_stage
from raypar.schedule.instructions import (
    INPUT_GRADIENTS,
    KEPT_SIZE,
    VALUES,
    WEIGHT_GRADIENTS,
    Bundle,
    Communication,
    Compute,
    ExchangeBuffers,
    ExchangeTies,
    ExchangeVotes,
    FreeActivations,
    Instruction,
    MessageKind,
    OptimizerStep,
    Recv,
    ReduceGradients,
    Send,
    compute_classes,
    compute_instructions,
)


@dataclass(frozen=True, slots=True)
class ScheduleProblem:
    """A place in a schedule or program that breaks a rule."""

    rule: str
    """Name of the rule."""
    rank: int
    """The worker whose list breaks it."""
    text: str
    """The problem as a sentence for people."""


@dataclass(frozen=True)
class RuleCheckInput:
    """The orders or programs to be checked, with everything that the rules need to know."""

    lists: Sequence[Sequence[Instruction]]
    """By rank: the instructions of an order or program."""
    routing: MicrobatchRouting
    """The plan, and the workers that run each microbatch."""
    crossing: StageConnections
    """The connections between stages."""
    flow: DataFlow
    """The results that instructions need and give along these connections."""
    lowered: bool
    """Whether the lists are programs; else they are orders of compute instructions only."""
    training: bool = True
    """False for a validation pass, which has no backward."""
    ahead: int = 0
    """Where gradients are scattered: how many microbatches of a replica find room, whole, on their way to their owners."""

    @cached_property
    def _computations(self) -> list[list[Compute]]:
        return [compute_instructions(order) for order in self.lists]

    def compute(self, rank: int) -> list[Compute]:
        """The compute instructions of a worker."""
        return self._computations[rank]

    def computed_together(self, rank: int, other: int) -> list[Compute]:
        """The compute instructions of a worker that another computes with it, as a shard of the same replica."""
        plan = self.routing.plan
        if plan.one_role_each:  # the shards of a seat have all their work in common
            return self.compute(rank)
        mine, theirs = ({role.grid: role.replica for role in plan.roles[each]} for each in (rank, other))
        grids = {grid for grid, replica in mine.items() if theirs.get(grid) == replica}
        return [i for i in self.compute(rank) if plan.grid_of_stage[i.stage] in grids]

    def routed_work(self, rank: int) -> Iterator[tuple[int, int]]:
        """Every (stage, microbatch) that is routed to a worker."""
        plan = self.routing.plan
        for stage in plan.stages_of(rank):
            for microbatch in self.routing.microbatches_of_worker(stage, rank):
                yield stage, microbatch

    @cached_property
    def _ranks(self) -> list[list[tuple[int, ...]]]:
        """By stage, microbatch and shard: the rank that runs it."""
        count = range(self.routing.microbatches.count)
        return [[self.routing.ranks(stage, m) for m in count] for stage in range(len(self.routing.plan.stages))]

    @cached_property
    def _shard_in(self) -> list[dict[int, int]]:
        """By rank and its stages: which shard of the stage it is."""
        return [self.routing.plan.shards_of_stages(rank) for rank in range(self.routing.plan.world)]

    @cached_property
    def handed_over_before(self) -> list[list[int]]:
        """By stage whose gradients are scattered, and microbatch: how many microbatches must have begun to make gradients
        before those of this one all have found room."""
        found = []
        for stage, rounds in enumerate(self.routing.rounds_of_stage):
            end_of = [of_round.stop for of_round in rounds for _ in of_round]
            own: dict[int, list[int]] = {}
            needed = []
            for m, end in enumerate(end_of):
                before = own.setdefault(self.routing.replica_for(stage, m), [])
                before.append(end)
                needed.append(before[-1 - self.ahead] if len(before) > self.ahead else 0)
            found.append(needed)
        return found

    def source(self, stage: int, microbatch: int, user: int, rank: int) -> int:
        """The worker that gives results of (stage, microbatch) to the stage `user` of a worker."""
        row = self._ranks[stage][microbatch]
        return row[serving_shards(row, self._ranks[user][microbatch])[self._shard_in[rank][user]]]


def describe_message(carried: Bundle) -> str:
    """A bundle as text."""
    kind, src, dst, microbatch = carried
    way = f"from stage {src} to stage {dst}" if kind == "activation" else f"from stage {dst} back to stage {src}"
    return f"the {kind} of microbatch {microbatch} {way}"


def check_computed_once(case: RuleCheckInput) -> list[ScheduleProblem]:
    """Rule `complete`: every (stage, microbatch) is computed exactly once, by the worker to which it is routed.

    Its values, its input gradients and its weight gradients are each made once: by F, and by B or by I and W.
    """
    found: list[ScheduleProblem] = []
    forward, backward = (VALUES,), (INPUT_GRADIENTS, WEIGHT_GRADIENTS)
    groups = [(_makers(forward, case), forward), (_makers(backward, case), backward if case.training else ())]
    rules = [(makers, _combinations(makers, wanted)) for makers, wanted in groups]
    for rank in range(len(case.lists)):
        count = Counter((type(i), i.stage, i.microbatch) for i in case.compute(rank))
        due = set(case.routed_work(rank))
        for stage, m in sorted(due):
            for makers, right in rules:
                times = tuple([count.get((kind, stage, m), 0) for kind in makers])
                if times not in right:
                    found.append(ScheduleProblem("complete", rank, _times_text(makers, times, stage, m)))
        for kind, stage, m in count:
            if (stage, m) not in due:
                text = f"{kind(stage, m)}: microbatch {m} of stage {stage} is not routed to this worker"
                found.append(ScheduleProblem("complete", rank, text))
    return found


def _makers(products: tuple[str, ...], case: RuleCheckInput) -> tuple[type[Compute], ...]:
    """The classes of instructions that make any of these results; of those that make the same, the first and those in use."""
    used = {kind for rank in range(len(case.lists)) for kind in set(map(type, case.compute(rank)))}
    found: list[type[Compute]] = []
    for kind in compute_classes():
        makes = set(products).intersection(kind.makes)
        if makes and (kind in used or all(kind.makes != other.makes for other in found)):
            found.append(kind)
    return tuple(found)


def _combinations(makers: tuple[type[Compute], ...], products: tuple[str, ...]) -> set[tuple[int, ...]]:
    """All choices of how often each maker may occur so that each product is made once and nothing else is."""
    return {
        times
        for times in product((0, 1), repeat=len(makers))
        if sorted(what for kind, n in zip(makers, times, strict=True) for what in kind.makes * n) == sorted(products)
    }


def _times_text(makers: tuple[type[Compute], ...], times: tuple[int, ...], stage: int, microbatch: int) -> str:
    if len(makers) == 1:
        return f"{makers[0](stage, microbatch)} stands {times[0]} times"
    return ", ".join(f"{kind(stage, microbatch)} {n} times" for kind, n in zip(makers, times, strict=True))


def check_needs_come_first(case: RuleCheckInput) -> list[ScheduleProblem]:
    """Rule `causal`: on each worker, results and messages come before their uses; none is kept too long."""
    return [problem for rank in range(len(case.lists)) for problem in _check_causal_on(case, rank)]


class _Touched(NamedTuple):
    """The sets that a class of instructions reads and changes on one stage: of microbatches whose results the worker has."""

    own: list[tuple[str, set[int]]]
    """Needs of its own stage: (what, microbatches for which it exists)."""
    others: list[tuple[str, int, set[int], MessageKind, int, int]]
    """Needs of other stages: (what, stage, microbatches, kind, src, dst); the last three are its bundle without microbatch."""
    frees: list[set[int]]
    """Memory that it frees: microbatches for which the memory is kept."""
    results: list[set[int]]
    """Results that it makes or allocates: microbatches for which they exist."""


class _Holdings:
    """The results that one worker has made and keeps."""

    of: dict[tuple[str, int], set[int]]
    """(what, stage) -> microbatches for which the worker has it."""

    def __init__(self, flow: DataFlow) -> None:
        self._flow = flow
        self.of = defaultdict(set)
        self._touched: dict[tuple[type[Compute], int], _Touched] = {}

    def touched_by(self, instruction: Compute) -> _Touched:
        """The sets that an instruction reads and changes."""
        kind, stage = key = type(instruction), instruction.stage
        found = self._touched.get(key)
        if found is None:
            found = self._touched[key] = _Touched(
                own=[(what, self.of[what, stage]) for what in needs_of_own_stage(kind)],
                others=[(w, at, self.of[w, at], sort, src, dst) for w, at, sort, src, dst in self._flow.arrivals(kind, stage)],
                frees=[self.of[what, stage] for what in kind.frees],
                results=[self.of[what, stage] for what in kind.results],
            )
        return found

    def name_missing(self, what: str, stage: int, microbatch: int) -> str:
        """The instruction that should have made `what`, as text: one that uses up something the worker has, else the first."""
        for kind in compute_classes():
            if what in kind.allocates and kind.frees and all(microbatch in self.of[kept, stage] for kept in kind.frees):
                return str(kind(stage, microbatch))
        return name_of_producing_instruction((what, stage, microbatch))


def _check_causal_on(case: RuleCheckInput, rank: int) -> list[ScheduleProblem]:
    found: list[ScheduleProblem] = []
    holdings = _Holdings(case.flow)
    posted: set[Bundle] = set()
    made: set[Bundle] = set()
    for instruction in case.lists[rank]:
        if isinstance(instruction, Compute):
            stage, m = instruction.stage, instruction.microbatch
            own, others, frees, results = holdings.touched_by(instruction)
            for what, there in own:
                if m not in there:
                    found.append(
                        ScheduleProblem("causal", rank, f"{instruction} stands before {holdings.name_missing(what, stage, m)}")
                    )
            for what, at, there, kind, src, dst in others:
                if case.source(at, m, stage, rank) == rank:
                    if m not in there:
                        found.append(
                            ScheduleProblem(
                                "causal", rank, f"{instruction} stands before {name_of_producing_instruction((what, at, m))}"
                            )
                        )
                elif case.lowered and (kind, src, dst, m) not in posted:
                    text = f"{instruction} uses {describe_message((kind, src, dst, m))}, which is not received before it"
                    found.append(ScheduleProblem("causal", rank, text))
            for there in frees:
                there.discard(m)
            for there in results:
                there.add(m)
            if case.lowered:
                made.update([b for _, b in case.flow.gives(instruction)])
        elif isinstance(instruction, Communication):
            if not instruction.sends:
                posted.add(instruction.bundle)
            elif instruction.bundle not in made:
                found.append(ScheduleProblem("causal", rank, f"{instruction} stands before what it sends"))
    if case.training and not found:
        kept = [(what, s, m) for (what, s), there in holdings.of.items() if what in KEPT_SIZE for m in sorted(there)]
        found += [
            ScheduleProblem("causal", rank, f"the {what} of {s}F{m} are kept after their last use") for what, s, m in kept
        ]
    return found


def check_gradient_order(case: RuleCheckInput) -> list[ScheduleProblem]:
    """Rule `canonical`: in each block of a stage, gradients are made in order of microbatches (rule 6 of the contract); in all
    of a stage on one replica, where they are scattered.

    Weight gradients are added in this order. Input gradients count, too: a layer whose backward cannot be split makes both at
    once.
    """
    found: list[ScheduleProblem] = []
    made_by = {kind: [what for what in kind.makes if what != VALUES] for kind in compute_classes()}
    for rank in range(len(case.lists)):
        last: dict[tuple[str, int, int], int] = {}
        for instruction in case.compute(rank):
            gradients = made_by[type(instruction)]
            if not gradients:
                continue
            m, scatters = instruction.microbatch, case.routing.scatters(instruction.stage)
            block = 0 if scatters else case.routing.microbatches.block_of(m)
            for what in gradients:
                before = last.get((what, instruction.stage, block), -1)
                if m < before:
                    text = f"{instruction} stands after microbatch {before} of the same {'stage' if scatters else 'block'}"
                    found.append(ScheduleProblem("canonical", rank, text))
                    break
                last[what, instruction.stage, block] = m
    return found


def check_shards_have_same_order(case: RuleCheckInput) -> list[ScheduleProblem]:
    """Rule `together`: what two workers compute together, as shards of one replica, they compute in one order.

    Other work of theirs, of grids in which they are replicas or that one of them is not in, may come between.
    """
    found: list[ScheduleProblem] = []
    for first, *others in case.routing.plan.shard_groups:
        pairs = [(first, other) for other in others] if case.routing.plan.one_role_each else combinations((first, *others), 2)
        for one, other in pairs:
            theirs, mine = (case.computed_together(rank, with_rank) for rank, with_rank in ((one, other), (other, one)))
            if mine != theirs:
                at = next(n for n, (a, b) in enumerate(zip_longest(mine, theirs)) if a != b)
                here, there = (each[at] if at < len(each) else "nothing" for each in (mine, theirs))
                text = (
                    f"{here} is instruction {at} here of those computed with {case.routing.plan.coordinate(one)}, {there} there"
                )
                found.append(ScheduleProblem("together", other, text))
    return found


_End = tuple[int, int, bool, Bundle]
"""(worker, peer, whether it sends, bundle)."""


def _post(end: _End) -> Send | Recv:
    """The instruction at one end of a message."""
    _, peer, sends, (kind, src, dst, microbatch) = end
    sender, receiver = (src, dst) if kind == "activation" else (dst, src)
    if sends:
        return Send(sender, microbatch, receiver, peer, kind)
    return Recv(receiver, microbatch, sender, peer, kind)


def check_sends_match_receives(case: RuleCheckInput) -> list[ScheduleProblem]:
    """Rule `paired`: each bundle between workers has one send and one receive, in one order per pair of workers."""
    found: list[ScheduleProblem] = []
    due: dict[_End, int] = {}
    for rank in range(len(case.lists)):
        for i in case.compute(rank):
            for need, carried in case.flow.awaits(i):
                source = case.source(need[1], need[2], i.stage, rank)
                if source != rank:
                    due[rank, source, False, carried] = due[source, rank, True, carried] = 1
    have: dict[_End, int] = {}
    queues: dict[tuple[int, int], list[Bundle]] = {}
    for rank, order in enumerate(case.lists):
        for post in order:
            if isinstance(post, Communication):
                moved = post.bundle
                end = (rank, post.peer, post.sends, moved)
                have[end] = have.get(end, 0) + 1
                queues.setdefault((rank, post.peer), []).append(moved)
    if have != due:
        for end in [*due, *(end for end in have if end not in due)]:
            times, needed = have.get(end, 0), due.get(end, 0)
            if times != needed:
                text = f"{_post(end)} stands {times} times, needed {needed} ({describe_message(end[3])})"
                found.append(ScheduleProblem("paired", end[0], text))
        return found
    for (rank, peer), queue in queues.items():
        other = queues[peer, rank]
        if rank < peer and queue != other:
            at = next(n for n, (a, b) in enumerate(zip(queue, other, strict=True)) if a != b)
            here, there = describe_message(queue[at]), describe_message(other[at])
            text = f"message {at} with {case.routing.plan.coordinate(peer)} is {here} here, {there} there"
            found.append(ScheduleProblem("paired", rank, text))
    return found


def check_activation_frees(case: RuleCheckInput) -> list[ScheduleProblem]:
    """Rule `freed`: activations are freed once, after their last use, which in a validation pass is the forward."""
    found: list[ScheduleProblem] = []
    for rank, order in enumerate(case.lists):
        used: set[tuple[int, int]] = set()
        gone: set[tuple[int, int]] = set()
        for instruction in order:
            if type(instruction) is FreeActivations:
                key = (instruction.stage, instruction.microbatch)
                if key in gone:
                    found.append(ScheduleProblem("freed", rank, f"{instruction} stands twice"))
                elif key not in used:
                    found.append(
                        ScheduleProblem("freed", rank, f"{instruction} stands before the last use of these activations")
                    )
                gone.add(key)
            elif isinstance(instruction, Compute) and (instruction.last_use if case.training else VALUES in instruction.makes):
                used.add((instruction.stage, instruction.microbatch))
        found += [ScheduleProblem("freed", rank, f"{FreeActivations(*key)} is missing") for key in sorted(used - gone)]
    return found


def check_step_end(case: RuleCheckInput) -> list[ScheduleProblem]:
    """Rule `ended`: after all work come one reduction of each stage, tied parameters and written buffers if any, the vote, the
    optimizer step."""
    if not case.training:
        return []
    found: list[ScheduleProblem] = []
    for rank, order in enumerate(case.lists):
        stages = case.routing.plan.stages_of(rank)
        last = dict.fromkeys(stages, -1)
        places: dict[Instruction, list[int]] = {}
        for place, i in enumerate(order):
            if isinstance(i, Compute):
                if WEIGHT_GRADIENTS in i.makes:
                    last[i.stage] = place
            elif i.role in ("reduction", "step"):
                places.setdefault(i, []).append(place)
        wanted: list[Instruction] = [ReduceGradients(s) for s in stages]
        wanted += [ExchangeTies()] if case.crossing.ties else []
        wanted += [ExchangeBuffers()] if case.crossing.exchanges_buffers else []
        wanted += [ExchangeVotes(), OptimizerStep()]
        for i in dict.fromkeys([*wanted, *places]):
            times, due = len(places.get(i, [])), int(i in wanted)
            if times != due:
                found.append(ScheduleProblem("ended", rank, f"{i} ({type(i).__name__}) stands {times} times, needed {due}"))
        if any(len(places.get(i, [])) != 1 for i in wanted):
            continue
        for stage in stages:
            if places[ReduceGradients(stage)][0] < last[stage]:
                text = f"{ReduceGradients(stage)} stands before {order[last[stage]]}, the stage's last weight gradient"
                found.append(ScheduleProblem("ended", rank, text))
        # What follows the reductions must be the program's very end, in this order.
        end = wanted[len(stages) :]
        if list(order[len(order) - len(end) :]) != end:
            text = f"the last instructions are {' '.join(map(str, order[-len(end) :]))}, not {' '.join(map(str, end))}"
            found.append(ScheduleProblem("ended", rank, text))
    return found


def check_activation_limit(case: RuleCheckInput, memory: Sequence[float]) -> list[ScheduleProblem]:
    """Rule `within memory`: no worker keeps more activations than `memory[rank]`, in microbatches through all its chunks.

    A microbatch in one of its chunks counts 1 / chunks.
    """
    found: list[ScheduleProblem] = []
    for rank, allowed in enumerate(memory):
        chunks, live = len(case.routing.plan.stages_of(rank)), 0
        for instruction in case.compute(rank):
            live += instruction.held_change
            if instruction.held_change > 0 and live > allowed * chunks + 1e-9:
                text = f"{instruction} makes {live / chunks:g} microbatches of activations, {allowed:g} fit"
                found.append(ScheduleProblem("within memory", rank, text))
                break
    return found
