"""Runs one worker's program for one step, as a routine (a generator that yields its waits).

The same code runs under every transport: `comm.transport.run_routine` blocks on each wait, and
`comm.local_transport.CooperativeScheduler` lets all workers of a plan take turns in one thread on a virtual clock. Sends and
receives are posted by plain calls; only waits, and the start of work, are yielded. So sends never block computation, receives
are posted as early as the program says, and a buffer lives until its handle is done.
"""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Protocol

import torch
from torch import Tensor

from raypar.comm.transport import Handle, Routine, Transport, Wait, Work
from raypar.model.graph import Graph
from raypar.plan import Crossing, Edge, ParallelPlan, Routing
from raypar.schedule.instructions import (
    Backward,
    BackwardInput,
    BackwardWeight,
    ExchangeTies,
    Forward,
    Free,
    Instruction,
    Kind,
    OptimizerStep,
    Program,
    Recv,
    Reduce,
    Send,
    Vote,
)
from raypar.worker.stage import Batch, Stage, gradient_counts
from raypar.worker.step_commit import InstructionSpan, StepCommit
from raypar.worker.tags import bundle_tag

Key = tuple[Kind, int, int, int]
"""kind, producer's stage, consumer's stage, microbatch: names one bundle of an edge."""


class BatchSource(Protocol):
    """Where a stage's batch fields come from (`worker.data.Loader`, or a stand-in)."""

    def get(self, step: int, microbatch: int) -> Batch:
        """The fields of one microbatch, collated; blocks until they are loaded, with a deadline of its own."""


@dataclass
class StageLinks:
    """The values that cross between stages, which the program's sends and receives carry. Worked out once for each plan."""

    into: dict[int, tuple[Edge, ...]]
    """Stage -> edges by which values come into it."""
    out_of: dict[int, tuple[Edge, ...]]
    """Stage -> edges by which values leave it."""
    counts: dict[tuple[int, int], tuple[tuple[str, int], ...]]
    """(src, dst) -> (value, number of gradients that come back for it), in the order of the edge's values."""
    receivers: dict[tuple[int, int], int]
    """(maker's stage, user's stage) -> number of the user's shards to which this worker sends a bundle."""

    @staticmethod
    def of(graph: Graph, plan: ParallelPlan, crossing: Crossing, *, shard: int = 0) -> StageLinks:
        """The links of all stages, for a worker with this shard of its stages.

        A value that crosses is whole on every shard of its maker: shard t of S sends it to shards t, t + S, ... of the user.
        """
        stages = range(len(plan.stages))
        return StageLinks(
            {s: crossing.into(s) for s in stages},
            {s: crossing.out_of(s) for s in stages},
            {
                (e.src, e.dst): tuple((v, gradient_counts(graph, plan, v, e.dst)) for v in e.values)
                for e in crossing.edges
                if e.differentiable
            },
            {
                (maker, user): len(range(shard, plan.stages[user].shards, plan.stages[maker].shards))
                for e in crossing.edges
                for maker, user in ((e.src, e.dst), (e.dst, e.src))
            },
        )


@dataclass
class Interpreter:
    """Runs the programs of one worker. Keeps nothing from step to step."""

    rank: int
    """This worker's rank."""
    routing: Routing
    """The plan, and which replica runs a microbatch."""
    links: StageLinks
    """The values that cross between stages."""
    stages: Mapping[int, Stage]
    """This worker's stages, by index."""
    transport: Transport
    """Connects the workers."""
    end: StepCommit
    """Ends the steps; holds the outcome of the last one."""
    feeds: Mapping[int, BatchSource | None]
    """Stage -> source of its batch fields; None for a stage that reads none."""
    cost_ms: Callable[[Instruction], float] = lambda instruction: 0.0
    """How far an instruction moves the virtual clock; real transports ignore it."""
    before: Callable[[int, Instruction], None] | None = None
    """Called with (step, instruction) before each compute instruction: breakpoints of `raypar debug`."""

    spans: list[InstructionSpan] = field(default_factory=list)
    """The instructions of the last step and their times, if the step was traced."""
    busy_ns: int = 0
    """Time spent computing in the last step, without the time in which layers waited for other shards."""
    _local: dict[Key, list[Tensor]] = field(default_factory=dict)
    """Bundles between two stages of this worker."""
    _outgoing: dict[Key, tuple[list[Tensor], int]] = field(default_factory=dict)
    """Bundle -> (its tensors, number of workers to which it is still to be sent)."""
    _incoming: dict[Key, list[Handle]] = field(default_factory=dict)
    """Bundle -> its receives, in the order of its tensors."""
    _sending: deque[tuple[Handle, list[Tensor]]] = field(default_factory=deque)
    """Sends under way and the tensors that must stay alive, in the order in which they were posted."""
    _replica: int = field(init=False)
    """Which replica of its stages this worker is."""

    def __post_init__(self) -> None:
        self._replica = self.routing.plan.seats[self.rank].replica

    def run(self, program: Program, step: int, *, trace: bool = False) -> Routine[None]:
        """One training step. Leaves the outcome in `self.end`. Raises what stages, transports or the vote raise."""
        self._reset()
        clock = time.perf_counter_ns
        for stage in self.stages.values():
            stage.begin_step(step)
        self.end.begin(step)
        for instruction in program:
            kind = type(instruction)
            if kind is Send:
                self._post_send(instruction, step)
                continue
            if kind is Recv:
                self._post_recv(instruction, step)
                continue
            if kind is Free:
                self.stages[instruction.stage].free(instruction.microbatch)
                continue
            if kind in (Forward, Backward, BackwardInput, BackwardWeight):
                received = yield from self._inputs(instruction)
                if self.before is not None:
                    self.before(step, instruction)
                yield Work(str(instruction), self.cost_ms(instruction))
                start = clock()
                self._compute(instruction, step, received)
                end = clock()
                self.busy_ns += end - start
            else:
                yield Work(str(instruction), self.cost_ms(instruction))
                start = clock()
                if kind is Reduce:
                    self.end.reduce(instruction.stage)
                elif kind is ExchangeTies:
                    yield from self.end.exchange_ties()
                elif kind is Vote:
                    yield from self.end.vote()
                elif kind is OptimizerStep:
                    self.end.apply()
                else:
                    raise TypeError(f"{self.rank}: the interpreter has no rule for {instruction!r}")
                end = clock()
            if trace:
                self.spans.append(InstructionSpan(str(instruction), start, end))
        self.busy_ns -= sum(stage.waited_ns for stage in self.stages.values())
        yield from self._drain()

    def run_forward(self, program: Program, step: int) -> Routine[None]:
        """A validation pass: forward instructions only; losses are left in the stages."""
        self._reset()
        for instruction in program:
            if isinstance(instruction, Send):
                self._post_send(instruction, step, validation=True)
            elif isinstance(instruction, Recv):
                self._post_recv(instruction, step, validation=True)
            elif isinstance(instruction, Free):
                self.stages[instruction.stage].free(instruction.microbatch)
            elif isinstance(instruction, Forward):
                received = yield from self._inputs(instruction)
                yield Work(str(instruction), self.cost_ms(instruction))
                stage, microbatch = instruction.stage, instruction.microbatch
                # Every pass reads the same samples: the first step's worth of the validation data.
                values = {value: tensors[0] for value, tensors in received.items()}
                outputs = self.stages[stage].evaluate(microbatch, values, self._batch(stage, 0, microbatch))
                self._hand_on(stage, microbatch, outputs)
        yield from self._drain()

    def _reset(self) -> None:
        for store in (self._local, self._outgoing, self._incoming, self._sending, self.spans):
            store.clear()
        self.busy_ns = 0

    # -- communication -------------------------------------------------------------------------------------------

    def _key(self, instruction: Send | Recv) -> Key:
        other = instruction.to_stage if isinstance(instruction, Send) else instruction.from_stage
        sender_first = isinstance(instruction, Send) == (instruction.kind == "activation")
        src, dst = (instruction.stage, other) if sender_first else (other, instruction.stage)
        return (instruction.kind, src, dst, instruction.microbatch)

    def _post_send(self, instruction: Send, step: int, *, validation: bool = False) -> None:
        key = self._key(instruction)
        tensors, receivers = self._outgoing.pop(key)
        if receivers > 1:
            self._outgoing[key] = tensors, receivers - 1
        for index, tensor in enumerate(tensors):
            tag = bundle_tag(step, *key, index, validation=validation)
            self._sending.append((self.transport.send(tensor, to=instruction.peer, tag=tag), [tensor]))
        while self._sending and self._sending[0][0].done():
            self._sending.popleft()

    def _post_recv(self, instruction: Recv, step: int, *, validation: bool = False) -> None:
        key = self._key(instruction)
        kind, src, dst, _ = key
        if kind == "activation":
            edge = next(e for e in self.links.into[dst] if e.src == src)
            count = len(edge.values)
        else:
            count = sum(n for _, n in self.links.counts[src, dst])
        self._incoming[key] = [
            self.transport.recv(None, source=instruction.peer, tag=bundle_tag(step, *key, i, validation=validation))
            for i in range(count)
        ]

    def _bundle(self, key: Key) -> Routine[list[Tensor]]:
        if key in self._local:
            return self._local.pop(key)
        handles = self._incoming.pop(key)
        kind, src, dst, microbatch = key
        tensors = []
        for handle in handles:
            if not handle.done():
                yield Wait(handle, f"the {kind} of microbatch {microbatch} between stage {src} and stage {dst}")
            tensors.append(handle.tensor())
        return tensors

    def _inputs(self, instruction: Instruction) -> Routine[dict[str, list[Tensor]]]:
        """Waits for the bundles a compute instruction uses: value -> [activation], or -> gradients, last consumer first."""
        found: dict[str, list[Tensor]] = {}
        if isinstance(instruction, Forward):
            for edge in self.links.into[instruction.stage]:
                key: Key = ("activation", edge.src, edge.dst, instruction.microbatch)
                for value, tensor in zip(edge.values, (yield from self._bundle(key)), strict=True):
                    found[value] = [tensor]
        elif isinstance(instruction, (Backward, BackwardInput)):
            for edge in reversed(self.links.out_of[instruction.stage]):
                if not edge.differentiable:
                    continue
                tensors = iter((yield from self._bundle(("gradient", edge.src, edge.dst, instruction.microbatch))))
                for value, count in self.links.counts[edge.src, edge.dst]:
                    found.setdefault(value, []).extend(next(tensors) for _ in range(count))
        return found

    def _drain(self) -> Routine[None]:
        """Buffers of posted sends must be free before the step ends."""
        while self._sending:
            handle, _ = self._sending.popleft()
            if not handle.done():
                yield Wait(handle, "a send to be taken by its receiver at the end of the step")

    # -- compute ---------------------------------------------------------------------------------------------------

    def _batch(self, stage: int, step: int, microbatch: int) -> Batch:
        feed = self.feeds[stage]
        return {} if feed is None else feed.get(step, microbatch)

    def _compute(self, instruction: Instruction, step: int, received: Mapping[str, list[Tensor]]) -> None:
        if isinstance(instruction, Forward):
            stage, microbatch = instruction.stage, instruction.microbatch
            values = {value: tensors[0] for value, tensors in received.items()}
            outputs = self.stages[stage].forward(microbatch, values, self._batch(stage, step, microbatch))
            self._hand_on(stage, microbatch, outputs)
        elif isinstance(instruction, BackwardWeight):
            self.stages[instruction.stage].backward_weight(instruction.microbatch)
        elif isinstance(instruction, (Backward, BackwardInput)):
            stage, microbatch = instruction.stage, instruction.microbatch
            defined = {value: [_defined(t) for t in tensors] for value, tensors in received.items()}
            run = self.stages[stage].backward if isinstance(instruction, Backward) else self.stages[stage].backward_input
            gradients = run(microbatch, defined)
            self._hand_back(stage, microbatch, gradients)

    def _hand_on(self, stage: int, microbatch: int, outputs: Mapping[str, Tensor]) -> None:
        for edge in self.links.out_of[stage]:
            self._route(("activation", stage, edge.dst, microbatch), stage, edge.dst, [outputs[v] for v in edge.values])

    def _hand_back(self, stage: int, microbatch: int, gradients: Mapping[str, Sequence[Tensor | None]]) -> None:
        for edge in self.links.into[stage]:
            if edge.differentiable:
                tensors = [_sendable(g) for v, _ in self.links.counts[edge.src, stage] for g in gradients[v]]
                self._route(("gradient", edge.src, stage, microbatch), stage, edge.src, tensors)

    def _route(self, key: Key, maker: int, user: int, tensors: list[Tensor]) -> None:
        """Another replica of this position's own stages is another worker."""
        if user in self.stages and self.routing.replica(user, key[3]) == self._replica:
            self._local[key] = tensors
        elif receivers := self.links.receivers[maker, user]:
            self._outgoing[key] = tensors, receivers


_UNDEFINED = torch.empty(0)


def _sendable(gradient: Tensor | None) -> Tensor:
    """An undefined gradient travels as an empty vector, so that the receiver skips it as autograd would."""
    return _UNDEFINED if gradient is None else gradient


def _defined(gradient: Tensor) -> Tensor | None:
    return None if gradient.dim() == 1 and gradient.numel() == 0 else gradient
