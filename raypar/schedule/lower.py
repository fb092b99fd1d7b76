"""Lowering, which makes programs of orders: it adds sends, receives, frees, reductions, ties, written
buffers, vote and optimizer step.

All orders are replayed together, every instruction as early as possible. F, I and W take one unit, B two, times the replicas
of the stage, which is taken to have them because it is slower. When an instruction ends, its sends are appended to its
worker's program and the matching receives to the peers' programs at that very point. So all workers see one global order that
a real execution can follow, and a receive is posted as soon as its sender could have sent. Gathers of parameters come in last
(`gathering.py`).
"""

from __future__ import annotations

import heapq
from collections import Counter
from collections.abc import Sequence
from typing import NamedTuple

from raypar.errors import ScheduleError
from raypar.plan import MicrobatchRouting, StageConnections, serving_shards
from raypar.plan.wording import count_noun
from raypar.schedule.data_flow import DataFlow, StageResult, name_of_producing_instruction, needs_of_own_stage
from raypar.schedule.gathering import insert_gathers
from raypar.schedule.instructions import (
    VALUES,
    WEIGHT_GRADIENTS,
    Compute,
    ExchangeBuffers,
    ExchangeTies,
    ExchangeVotes,
    Forward,
    FreeActivations,
    Instruction,
    MessageKind,
    OptimizerStep,
    Program,
    Recv,
    ReduceGradients,
    Schedule,
    Send,
)


def lower_schedule(schedule: Schedule, routing: MicrobatchRouting, crossing: StageConnections) -> tuple[Program, ...]:
    """The programs of a training step, one per rank. Raises `ScheduleError` if the orders cannot be executed."""
    programs = _Replay(schedule, routing, crossing, training=True).run()
    # A worker without microbatches of a grid takes part in its reductions, in the order of those replicas that have some.
    in_turn: dict[int, list[Instruction]] = {}
    for roles, program in zip(routing.plan.roles, programs, strict=True):
        for role in roles:
            of_grid: set[Instruction] = {ReduceGradients(stage) for stage in routing.plan.stages_of_grid[role.grid]}
            if reductions := [i for i in program if i in of_grid]:
                in_turn.setdefault(role.grid, reductions)
    for roles, program in zip(routing.plan.roles, programs, strict=True):
        there = set(program)
        program += [i for role in roles for i in in_turn.get(role.grid, ()) if i not in there]
        program += [ExchangeTies()] if crossing.ties else []
        program += [ExchangeBuffers()] if crossing.exchanges_buffers else []
        program += [ExchangeVotes(), OptimizerStep()]
    return insert_gathers([tuple(program) for program in programs], routing.plan)


def lower_validation_pass(routing: MicrobatchRouting, crossing: StageConnections) -> tuple[Program, ...]:
    """The programs of a validation pass, with forwards only, one per rank.

    Groups of 2p microbatches per pipeline go through one chunk after the other. That is enough that no chunk waits for the way
    round the pipeline, and it bounds the number of bundles that wait.
    """
    plan = routing.plan
    group = 2 * len(plan.grids) * max(stage.replicas for stage in plan.stages)
    entry = {m: index for index, m in enumerate(routing.entry_order)}
    orders = []
    for rank in range(plan.world):
        stages = plan.stages_of(rank)
        mine = [(entry[m] // group, s, entry[m], m) for s in stages for m in routing.microbatches_of_worker(s, rank)]
        orders.append(tuple(Forward(stage, m) for _, stage, _, m in sorted(mine)))
    programs = _Replay(tuple(orders), routing, crossing, training=False).run()
    return insert_gathers([tuple(program) for program in programs], plan)


class _Rule(NamedTuple):
    """The data flow of one class of instructions on one stage and shard. Results are numbers."""

    needs: list[Sequence[int]]
    """Results that the instruction needs, each by microbatch."""
    results: list[int]
    """Results that it makes or keeps, of microbatch 0."""
    units: int
    """Its duration in units of the replay's clock."""
    gives: list[tuple[int, MessageKind]]
    """(consuming stage, kind of message) of everything that it sends."""
    frees: bool
    """Whether the microbatch's memory is freed after it."""
    makes_gradients: bool
    """Whether the stage's reduction waits for it."""


class _Rules:
    """The data flow in numbers, looked up once: a step may have a million instructions.

    A result (something made or kept, of one stage, shard and microbatch) is a number, ascending with the microbatch.
    """

    total: int
    """Number of results."""
    of_shard: list[dict[type[Compute], list[_Rule]]]
    """Shard -> class -> stage -> rule."""

    def __init__(self, schedule: Schedule, routing: MicrobatchRouting, crossing: StageConnections, *, training: bool) -> None:
        self._routing, self._plan, self._training = routing, routing.plan, training
        self._count = routing.microbatches.count
        self._flow = DataFlow(crossing, len(routing.plan.stages))
        self._shards = max(stage.shards for stage in routing.plan.stages)
        kinds: set[type[Compute]] = {kind for order in schedule for kind in set(map(type, order))}
        known = sorted({what for kind in kinds for what in (*kind.needs, *kind.results)})
        self._number = {what: number for number, what in enumerate(known)}
        self.total = len(known) * len(routing.plan.stages) * self._shards * self._count
        stages = range(len(routing.plan.stages))
        self.of_shard = [
            {kind: [self._rule(kind, stage, shard % self._plan.stages[stage].shards) for stage in stages] for kind in kinds}
            for shard in range(self._shards)
        ]

    def needs(self, instruction: Compute, shard: int) -> list[tuple[int, StageResult]]:
        """(number, result) for all results that an instruction needs, those of its own stage first."""
        stage, m = instruction.stage, instruction.microbatch
        found = [(self._first(what, stage, shard) + m, (what, stage, m)) for what in needs_of_own_stage(type(instruction))]
        for need, _ in self._flow.awaits(instruction):
            serving = self._routing.serving_shards(need[1], stage, m)[shard]
            found.append((self._first(need[0], need[1], serving) + m, need))
        return found

    def _needs_by_microbatch(self, kind: type[Compute], stage: int, shard: int) -> list[Sequence[int]]:
        """The results that a class of instructions needs, each by microbatch."""
        first = [number for number, _ in self.needs(kind(stage, 0), shard)]
        if self._plan.one_role_each:  # who serves whom does not depend on replicas
            return [range(number, number + self._count) for number in first]
        by_microbatch = ([number for number, _ in self.needs(kind(stage, m), shard)] for m in range(self._count))
        return list(zip(*by_microbatch, strict=True))

    def _rule(self, kind: type[Compute], stage: int, shard: int) -> _Rule:
        first = kind(stage, 0)
        return _Rule(
            needs=self._needs_by_microbatch(kind, stage, shard),
            results=[self._first(what, stage, shard) for what in kind.results],
            units=len(kind.cost) * self._plan.stages[stage].replicas,
            gives=[(other, bundle[0]) for other, bundle in self._flow.gives(first)],
            # A validation pass keeps nothing for a backward.
            frees=kind.last_use if self._training else VALUES in kind.makes,
            makes_gradients=WEIGHT_GRADIENTS in kind.makes,
        )

    def _first(self, what: str, stage: int, shard: int) -> int:
        """Number of a result of one shard for microbatch 0."""
        place = self._number[what] * len(self._plan.stages) + stage
        return (place * self._shards + shard) * self._count


class _Replay:
    """The replay of all orders of a schedule on one clock, which writes the programs."""

    rule_of: list[dict[type[Compute], list[_Rule]]]
    """Rank -> class -> stage -> rule."""
    ranks: list[list[tuple[int, ...]]]
    """Stage -> microbatch -> by shard, the ranks that run it."""
    shard_in: list[dict[int, int]]
    """Rank -> stage -> which shard of it the rank is."""
    programs: list[list[Instruction]]
    """Rank -> its program so far."""
    place: list[int]
    """Rank -> index of the instruction that it executes or waits to execute."""
    done: bytearray
    """Number of a result -> whether the result exists."""
    waiting: dict[int, list[int]]
    """Result -> ranks that wait for it."""
    gradients_left: list[Counter[int]]
    """Rank -> stage -> instructions to come that make weight gradients."""
    events: list[tuple[int, int]]
    """Heap of (time, rank): when the instruction that a rank executes will be over."""

    def __init__(self, schedule: Schedule, routing: MicrobatchRouting, crossing: StageConnections, *, training: bool) -> None:
        self.schedule, self.plan = schedule, routing.plan
        self.rules = _Rules(schedule, routing, crossing, training=training)
        self.rule_of = [self._rules_of(rank) for rank in range(self.plan.world)]
        self.shard_in = [self.plan.shards_of_stages(rank) for rank in range(self.plan.world)]
        count = range(routing.microbatches.count)
        self.ranks = [[routing.ranks(s, m) for m in count] for s in range(len(self.plan.stages))]
        self.programs = [[] for _ in schedule]
        self.place = [0] * len(schedule)
        self.done = bytearray(self.rules.total)
        self.waiting = {}
        self.gradients_left = [Counter([i.stage for i in order if WEIGHT_GRADIENTS in i.makes]) for order in schedule]
        self.events = []

    def _rules_of(self, rank: int) -> dict[type[Compute], list[_Rule]]:
        """The rules of one rank, which may be another shard in each of its grids."""
        of_shard, roles = self.rules.of_shard, self.plan.roles[rank]
        if len(roles) == 1:
            return of_shard[roles[0].shard]
        shards = self.plan.shards_of_stages(rank)
        return {
            kind: [of_shard[shards.get(stage, 0)][kind][stage] for stage in range(len(rules))]
            for kind, rules in of_shard[0].items()
        }

    def run(self) -> list[list[Instruction]]:
        """Replay the orders and return the programs of all ranks. Raises `ScheduleError` if some rank cannot finish."""
        place, done, waiting, events = self.place, self.done, self.waiting, self.events
        for rank in range(len(self.schedule)):
            self._start(rank, 0)
        while events:
            now, rank = heapq.heappop(events)
            instruction = self.schedule[rank][place[rank]]
            rule = self.rule_of[rank][type(instruction)][instruction.stage]
            self._finish(rank, instruction, rule)
            place[rank] += 1
            for result in rule.results:
                done[result + instruction.microbatch] = 1
            self._start(rank, now)
            for result in rule.results:
                for other in waiting.pop(result + instruction.microbatch, ()):
                    self._start(other, now)
        self._check_finished()
        return self.programs

    def _start(self, rank: int, now: int) -> None:
        """Begin a rank's next instruction, or let the rank wait for a result that is missing."""
        order, place = self.schedule[rank], self.place[rank]
        if place == len(order):
            return
        instruction = order[place]
        rule, microbatch = self.rule_of[rank][type(instruction)][instruction.stage], instruction.microbatch
        for need in rule.needs:
            if not self.done[need[microbatch]]:
                self.waiting.setdefault(need[microbatch], []).append(rank)
                return
        heapq.heappush(self.events, (now + rule.units, rank))

    def _finish(self, rank: int, instruction: Compute, rule: _Rule) -> None:
        """Add the instruction to the program, with the sends, frees and reductions that follow it."""
        program, stage, microbatch = self.programs[rank], instruction.stage, instruction.microbatch
        program.append(instruction)
        for other, kind in rule.gives:
            self._hand_on(rank, stage, microbatch, other, kind)
        if rule.frees:
            program.append(FreeActivations(stage, microbatch))
        if rule.makes_gradients:
            left = self.gradients_left[rank]
            left[stage] -= 1
            if not left[stage]:
                program.append(ReduceGradients(stage))

    def _hand_on(self, rank: int, stage: int, microbatch: int, other: int, kind: MessageKind) -> None:
        """Add the sends and receives of one bundle, from a rank of `stage` to the shards of `other` that it serves."""
        shard, users = self.shard_in[rank][stage], self.ranks[other][microbatch]
        for serving, target in zip(serving_shards(self.ranks[stage][microbatch], users), users, strict=True):
            if serving == shard and target != rank:
                self.programs[rank].append(Send(stage, microbatch, other, target, kind))
                self.programs[target].append(Recv(other, microbatch, stage, rank, kind))

    def _check_finished(self) -> None:
        stuck = [rank for rank, order in enumerate(self.schedule) if self.place[rank] < len(order)]
        if not stuck:
            return
        rank = stuck[0]
        instruction = self.schedule[rank][self.place[rank]]
        needs = self.rules.needs(instruction, self.shard_in[rank][instruction.stage])
        missing = ", ".join(name_of_producing_instruction(need) for number, need in needs if not self.done[number])
        raise ScheduleError(
            f"{len(stuck)} of {count_noun(len(self.schedule), 'worker')} cannot finish: {self.plan.coordinate(rank)} stands at "
            f"{instruction}, which needs {missing}",
            cure="every instruction must be computed exactly once, before what needs it",
        )
