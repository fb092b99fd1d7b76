"""The interpreter: runs one worker's program for one step, as a routine (a generator that yields transport waits).

What an instruction does is looked up by its class in `TRAINING_RULES`, in a validation pass in `VALIDATION_RULES`. The same
code runs under every transport: `comm.transport.run_routine` blocks on each wait, and
`comm.local_transport.CooperativeScheduler` interleaves all workers of a plan in one thread on a virtual clock. Posts are
plain calls; only waits (and the start of work) are yielded. So sends never block compute, receives are posted as early as
the program says, and a buffer lives until its handle is done.
"""

from __future__ import annotations

import contextlib
import time
from collections import deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple

from torch import Tensor

from raypar.comm.routine import Routine, RoutineWait, RoutineWork
from raypar.comm.transport import Handle, Transport
from raypar.errors import RayparError
from raypar.plan import GradientRelay, MicrobatchRouting, ParallelPlan, StageConnections, StageEdge
from raypar.plan.stage_connections import MAX_VALUES_OF_MESSAGE
from raypar.schedule.instructions import (
    INPUT_GRADIENTS,
    VALUES,
    Backward,
    BackwardInput,
    BackwardWeight,
    Bundle,
    CheckpointedForward,
    Compute,
    ExchangeBuffers,
    ExchangeTies,
    ExchangeVotes,
    Fetch,
    FetchKeptInputs,
    Forward,
    FreeActivations,
    Gather,
    Instruction,
    MessageKind,
    OffloadedCheckpointedForward,
    OffloadedForward,
    OptimizerStep,
    Program,
    Recompute,
    Recv,
    ReduceGradients,
    Release,
    Role,
    Send,
    ServeParameters,
)
from raypar.worker.data.microbatch_loader import BatchSource
from raypar.worker.stage.stage import Batch, HandedBack
from raypar.worker.stage.stage_in_virtual_shards import ComputesMicrobatches
from raypar.worker.step.bundle_gather import BundleGather, cut_bundle
from raypar.worker.step.gradient_bundles import (
    add_gradient,
    bundle_of_gradients,
    count_uses_apart,
    gradients_of_bundle,
    sums_of_gradients,
)
from raypar.worker.step.message_tags import bundle_tag
from raypar.worker.step.step_commit import InstructionSpan, StepCommit

Received = dict[str, Tensor]
"""Value -> its activation, or the sum of its gradients in later stages."""
_AT_ONCE: tuple[Role, ...] = ("communication", "release")
"""Roles of instructions that only post or drop something: no work for the virtual clock, not traced."""


class _IncomingBundle(NamedTuple):
    """The posted receives of a bundle."""

    source: int
    """The rank that sends it."""
    stage: int
    """The stage here that uses it."""
    handles: list[Handle]
    """One a value."""
    described: list[Handle]
    """Its description, if it travels in parts."""


@dataclass
class StageLinks:
    """What crosses between stages, which the program's sends and receives carry. Worked out once for each plan."""

    incoming_edges: dict[int, tuple[StageEdge, ...]]
    """Stage -> edges whose values it uses."""
    outgoing_edges: dict[int, tuple[StageEdge, ...]]
    """Stage -> edges whose values it makes."""
    incoming_relays: dict[int, tuple[GradientRelay, ...]]
    """Stage -> relays that bring gradients to it."""
    outgoing_relays: dict[int, tuple[GradientRelay, ...]]
    """Stage -> relays by which it hands gradients on."""
    bundle_values: dict[tuple[MessageKind, int, int], tuple[str, ...]]
    """(kind of message, earlier stage, later stage) -> names of the values that its bundles carry, or whose gradients."""

    @staticmethod
    def of(plan: ParallelPlan, crossing: StageConnections) -> StageLinks:
        """The links of all stages."""
        stages = range(len(plan.stages))
        values: dict[tuple[MessageKind, int, int], tuple[str, ...]]
        values = {("activation", edge.src, edge.dst): edge.values for edge in crossing.edges}
        values |= {("gradient", relay.dst, relay.src): relay.values for relay in crossing.relays}
        return StageLinks(
            {s: crossing.into(s) for s in stages},
            {s: crossing.out_of(s) for s in stages},
            {s: crossing.relays_to(s) for s in stages},
            {s: crossing.relays_from(s) for s in stages},
            values,
        )


@dataclass
class Interpreter:
    """Executes one worker's program, instruction by instruction; keeps no tensors from one step to the next."""

    rank: int
    """This worker's rank in the plan."""
    routing: MicrobatchRouting
    """Which replica runs which microbatch."""
    links: StageLinks
    """The values that messages between stages carry."""
    stages: Mapping[int, ComputesMicrobatches]
    """This worker's stages, by index."""
    transport: Transport
    """Moves tensors between this worker and the others."""
    step_commit: StepCommit
    """Carries out reductions, ties, vote and optimizer step, and holds the step's outcome."""
    batch_sources: Mapping[int, BatchSource | None]
    """Stage -> source of its batch fields; None for a stage that reads none."""
    cost_ms: Callable[[Instruction], float] = lambda instruction: 0.0
    """How far the virtual clock moves for an instruction; ignored on real transports."""
    nodes: Sequence[int] = ()
    """By rank: the number of its node, which decides what travels in parts; empty: everything travels whole."""
    before_compute: Callable[[int, Instruction], None] | None = None
    """Called with (step, instruction) before each compute instruction: breakpoints of `raypar debug`."""

    _local: dict[Bundle, list[Tensor]] = field(default_factory=dict)
    """Bundles between stages of this worker that have been made and not yet used."""
    _served: dict[tuple[int, int], list[tuple[bool, int]]] = field(default_factory=dict)
    """(sending stage, receiving stage) -> `_served_by`."""
    _outgoing: dict[Bundle, tuple[list[Tensor], int]] = field(default_factory=dict)
    """Bundle -> (its tensors, number of workers to which it is still to be sent)."""
    _incoming: dict[Bundle, _IncomingBundle] = field(default_factory=dict)
    """Bundles whose receives are posted and that have not been used."""
    _sending: deque[Handle] = field(default_factory=deque)
    """Posted sends, oldest first; each keeps its tensor."""
    spans: list[InstructionSpan] = field(default_factory=list)
    """The instructions of the last step and their times, if it was traced."""
    busy_ns: int = 0
    """Time that compute instructions of the last step took, without `read_ns` and the time that layers waited for other
    shards."""
    read_ns: int = 0
    """Time that compute instructions of the last step waited for their batch fields, or read them."""
    _step: int = -1
    """The step under way."""
    _validating: bool = False
    """Whether the pass under way is one of validation, whose messages have tags of their own."""
    _parts: BundleGather = field(init=False)
    """The bundles that travel in parts."""

    def __post_init__(self) -> None:
        self._parts = BundleGather(self.routing, self.nodes, self.transport, self.step_commit.stream_waits)

    def run(self, program: Program, step: int, *, trace: bool = False) -> Routine[None]:
        """Run one training step. Leaves the outcome in `self.step_commit`. Raises what stages, transports or the vote raise."""
        self._begin_pass(step, validating=False)
        clock = time.perf_counter_ns
        for stage in self.stages.values():
            stage.begin_step(step)
        self.step_commit.begin(step)
        gather = self.step_commit.gather
        gather.begin_pass(program)
        for instruction in program:
            rule = TRAINING_RULES.get(type(instruction))
            if rule is None:
                raise TypeError(f"{self.rank}: the interpreter has no rule for {instruction!r}")
            if instruction.role in _AT_ONCE:
                rule(self, instruction, step, {})
                continue
            received: Received = {}
            if isinstance(instruction, Compute):
                received = yield from self._inputs(instruction)
                if gather.layers and instruction.needs_weights:
                    yield from gather.use(instruction)
                if self.before_compute is not None:
                    self.before_compute(step, instruction)
            yield RoutineWork(instruction, self.cost_ms(instruction))
            if instruction.role == "compute":  # not after the vote: who has all of it applies it, whatever comes
                self.transport.check_alive()
            start = clock()
            with self._blaming_failed_operations():
                waits = rule(self, instruction, step, received)
            if waits is not None:
                yield from waits
            end = clock()
            if instruction.role == "compute":
                self.busy_ns += end - start
            if trace:
                self.spans.append(InstructionSpan(str(instruction), start, end))
        self.busy_ns -= self.read_ns + sum(stage.waited_ns for stage in self.stages.values())
        yield from self._drain()

    def run_validation_pass(self, program: Program, step: int) -> Routine[None]:
        """One validation pass, which leaves the losses in the stages."""
        self._begin_pass(step, validating=True)
        gather = self.step_commit.gather
        gather.begin_pass(program)
        for instruction in program:
            rule = VALIDATION_RULES.get(type(instruction))
            if rule is None:
                raise TypeError(f"{self.rank}: the interpreter has no rule for {instruction!r} in a validation pass")
            received: Received = {}
            if isinstance(instruction, Compute):
                received = yield from self._inputs(instruction)
                if gather.layers and instruction.needs_weights:
                    yield from gather.use(instruction)
                yield RoutineWork(instruction, self.cost_ms(instruction))
                self.transport.check_alive()
            with self._blaming_failed_operations():
                rule(self, instruction, step, received)
        gather.end_pass()
        yield from self._drain()
        yield from gather.finish_serving()
        yield from self.step_commit.stream_waits.finish()

    @contextlib.contextmanager
    def _blaming_failed_operations(self) -> Iterator[None]:
        """Context of a computation. What users' code raises for numbers that a failed operation has left is no error of theirs:
        the operation's is raised in its place."""
        try:
            yield
        except RayparError:
            self.step_commit.stream_waits.raise_failure()
            raise

    def _begin_pass(self, step: int, *, validating: bool) -> None:
        self._step, self._validating = step, validating
        for store in (self._local, self._outgoing, self._incoming, self._sending, self.spans):
            store.clear()
        self.busy_ns = self.read_ns = 0

    # -- communication -------------------------------------------------------------------------------------------

    def _send(self, instruction: Send, step: int, received: Received) -> None:
        key = instruction.bundle
        tensors, receivers = self._outgoing.pop(key)
        if receivers > 1:
            self._outgoing[key] = tensors, receivers - 1
        send, to, sending = self.transport.send, instruction.peer, self._sending
        if self._parts.in_parts(instruction.stage, instruction.to_stage, instruction.microbatch):
            users = self.routing.ranks(instruction.to_stage, instruction.microbatch)
            description, tensors = cut_bundle(tensors, users.index(to), len(users))
            sending.append(send(description, to=to, tag=self._tag(key, 0)))  # equal tags match in order
        for index, tensor in enumerate(tensors):
            sending.append(send(tensor, to=to, tag=self._tag(key, index), keep_layout=True))
        while self._sending and self._sending[0].done():
            self._sending.popleft()

    def _recv(self, instruction: Recv, step: int, received: Received) -> None:
        key, source = instruction.bundle, instruction.peer
        cut = self._parts.in_parts(instruction.from_stage, instruction.stage, instruction.microbatch)
        described = self._post_receives(key, source, 1) if cut else []
        handles = self._post_receives(key, source, len(self.links.bundle_values[key[:3]]))
        self._incoming[key] = _IncomingBundle(source, instruction.stage, handles, described)

    def _post_receives(self, key: Bundle, source: int, count: int, first: int = 0) -> list[Handle]:
        """Receives of `count` tensors of a bundle, from number `first` on."""
        return [self.transport.recv(None, source=source, tag=self._tag(key, i)) for i in range(first, first + count)]

    def _tag(self, key: Bundle, index: int) -> int:
        """Tag of one tensor of a bundle. What comes behind the last number that a tag can have (only uses that travel apart may
        be so many) has that number, too: equal tags match in order."""
        if index >= MAX_VALUES_OF_MESSAGE:
            index = MAX_VALUES_OF_MESSAGE - 1
        return bundle_tag(self._step, *key, index, validation=self._validating)

    def _bundle(self, key: Bundle) -> Routine[list[Tensor]]:
        if key in self._local:
            return self._local.pop(key)
        source, stage, handles, described = self._incoming.pop(key)
        for handle in (*described, *handles):
            if not handle.done():
                yield from self._wait(handle, key)
        tensors = [handle.tensor() for handle in handles]
        if key[0] == "gradient" and (uses := count_uses_apart(tensors)):
            for handle in self._post_receives(key, source, uses, len(handles)):
                yield from self._wait(handle, key)
                tensors.append(handle.tensor())
        if described:
            came = [described[0].tensor(), *tensors]
            return (yield from self._parts.gather(stage, key[3], came, _describe_bundle(key)))
        return tensors

    def _wait(self, handle: Handle, key: Bundle) -> Routine[None]:
        """Wait for a receive of a bundle."""
        if handle.done():
            return
        what = _describe_bundle(key)
        yield RoutineWait(handle, what, on_stream=True)
        if handle.tensor().is_floating_point():
            self.step_commit.stream_waits.add(handle, what)
        elif not handle.done():  # an abort leaves indices without meaning, which fail an assertion on the device
            yield RoutineWait(handle, what)

    def _inputs(self, instruction: Compute) -> Routine[Received]:
        """Wait for the bundles that a compute instruction declares to need; add up what several stages send of one value."""
        found: Received = {}
        if VALUES in instruction.needs:
            for edge in self.links.incoming_edges[instruction.stage]:
                bundle: Bundle = ("activation", edge.src, edge.dst, instruction.microbatch)
                found.update(zip(edge.values, (yield from self._bundle(bundle)), strict=True))
        if INPUT_GRADIENTS in instruction.needs:
            # Newest first, whichever comes first: a value's sum of the newest uses, then the older uses, each by itself.
            for relay in reversed(self.links.incoming_relays[instruction.stage]):
                bundle = ("gradient", relay.dst, relay.src, instruction.microbatch)
                tensors = yield from self._bundle(bundle)
                if not found and len(tensors) == len(relay.values):
                    found.update(zip(relay.values, tensors, strict=True))
                    continue
                for value, gradient in gradients_of_bundle(relay.values, tensors):
                    found[value] = add_gradient(found.get(value), gradient)
        return found

    def _drain(self) -> Routine[None]:
        """Wait for all posted sends: their buffers must be free before the step ends."""
        while self._sending:
            handle = self._sending.popleft()
            if not handle.done():
                yield RoutineWait(handle, "a send to be taken by its receiver at the end of the step")

    # -- parameters of other replicas --------------------------------------------------------------------------------

    def _serve_parameters(self, instruction: ServeParameters, step: int, received: Received) -> None:
        self.step_commit.gather.serve(instruction.stage, instruction.reader)

    def _gather(self, instruction: Gather, step: int, received: Received) -> None:
        self.step_commit.gather.ask(instruction.stage)

    def _release(self, instruction: Release, step: int, received: Received) -> None:
        self.step_commit.gather.release(instruction.stage)

    # -- compute ---------------------------------------------------------------------------------------------------

    def _batch(self, stage: int, step: int, microbatch: int) -> Batch:
        source = self.batch_sources[stage]
        if source is None:
            return {}
        start = time.perf_counter_ns()
        batch = source.get(step, microbatch)
        self.read_ns += time.perf_counter_ns() - start
        return batch

    def _forward(self, instruction: Forward, step: int, received: Received) -> None:
        stage, microbatch = instruction.stage, instruction.microbatch
        outputs = self.stages[stage].forward(microbatch, received, self._batch(stage, step, microbatch))
        self._hand_on(stage, microbatch, outputs)

    def _checkpointed_forward(self, instruction: CheckpointedForward, step: int, received: Received) -> None:
        stage, microbatch = instruction.stage, instruction.microbatch
        batch = self._batch(stage, step, microbatch)
        outputs = self.stages[stage].checkpointed_forward(microbatch, received, batch)
        self._hand_on(stage, microbatch, outputs)

    def _offloaded_forward(self, instruction: OffloadedForward, step: int, received: Received) -> None:
        stage, microbatch = instruction.stage, instruction.microbatch
        outputs = self.stages[stage].offloaded_forward(microbatch, received, self._batch(stage, step, microbatch))
        self._hand_on(stage, microbatch, outputs)

    def _offloaded_checkpointed_forward(self, instruction: OffloadedCheckpointedForward, step: int, received: Received) -> None:
        stage, microbatch = instruction.stage, instruction.microbatch
        batch = self._batch(stage, step, microbatch)
        outputs = self.stages[stage].offloaded_checkpointed_forward(microbatch, received, batch)
        self._hand_on(stage, microbatch, outputs)

    def _fetch(self, instruction: Fetch | FetchKeptInputs, step: int, received: Received) -> None:
        self.stages[instruction.stage].fetch(instruction.microbatch)

    def _recompute(self, instruction: Recompute, step: int, received: Received) -> None:
        self.stages[instruction.stage].recompute(instruction.microbatch)

    def _evaluate(self, instruction: Forward, step: int, received: Received) -> None:
        """The forward of a validation pass."""
        stage, microbatch = instruction.stage, instruction.microbatch
        # Every pass reads the same samples: the first step's worth of the validation data.
        outputs = self.stages[stage].evaluate(microbatch, received, self._batch(stage, 0, microbatch))
        self._hand_on(stage, microbatch, outputs)

    def _backward(self, instruction: Backward, step: int, received: Received) -> None:
        stage, microbatch = instruction.stage, instruction.microbatch
        self._hand_back(stage, microbatch, self.stages[stage].backward(microbatch, sums_of_gradients(received)))

    def _backward_input(self, instruction: BackwardInput, step: int, received: Received) -> None:
        stage, microbatch = instruction.stage, instruction.microbatch
        self._hand_back(stage, microbatch, self.stages[stage].backward_input(microbatch, sums_of_gradients(received)))

    def _backward_weight(self, instruction: BackwardWeight, step: int, received: Received) -> None:
        self.stages[instruction.stage].backward_weight(instruction.microbatch)

    def _free(self, instruction: FreeActivations, step: int, received: Received) -> None:
        self.stages[instruction.stage].free(instruction.microbatch)

    def _hand_on(self, stage: int, microbatch: int, outputs: Mapping[str, Tensor]) -> None:
        for edge in self.links.outgoing_edges[stage]:
            self._route(("activation", stage, edge.dst, microbatch), stage, edge.dst, [outputs[v] for v in edge.values])

    def _hand_back(self, stage: int, microbatch: int, gradients: Mapping[str, HandedBack]) -> None:
        for relay in self.links.outgoing_relays[stage]:
            tensors = bundle_of_gradients([gradients[value] for value in relay.values])
            self._route(("gradient", relay.dst, stage, microbatch), stage, relay.dst, tensors)

    def _route(self, key: Bundle, maker: int, user: int, tensors: list[Tensor]) -> None:
        """Keep a bundle for this worker's own stage `user`, and for its sends to other workers."""
        served = self._served.get((maker, user))
        if served is None:
            served = self._served[maker, user] = self._served_by(maker, user)
        here, others = served[key[3]]
        if here:
            self._local[key] = tensors
        if others:
            self._outgoing[key] = tensors, others

    def _served_by(self, maker: int, user: int) -> list[tuple[bool, int]]:
        """By microbatch, for bundles from `maker` to `user`: (whether this worker uses them, how many others it serves)."""
        shard, found = self.routing.plan.role_in(self.rank, maker).shard, list[tuple[bool, int]]()
        for m in range(self.routing.microbatches.count):
            serving = zip(self.routing.serving_shards(maker, user, m), self.routing.ranks(user, m), strict=True)
            served = [rank for server, rank in serving if server == shard]
            found.append((self.rank in served, len(served) - (self.rank in served)))
        return found

    # -- end of the step -------------------------------------------------------------------------------------------

    def _reduce(self, instruction: ReduceGradients, step: int, received: Received) -> None:
        self.step_commit.reduce(instruction.stage)

    def _exchange_ties(self, instruction: ExchangeTies, step: int, received: Received) -> Routine[None]:
        return self.step_commit.exchange_ties()

    def _exchange_buffers(self, instruction: ExchangeBuffers, step: int, received: Received) -> Routine[None]:
        return self.step_commit.exchange_buffers()

    def _vote(self, instruction: ExchangeVotes, step: int, received: Received) -> Routine[None]:
        return self.step_commit.vote()

    def _apply(self, instruction: OptimizerStep, step: int, received: Received) -> None:
        self.step_commit.apply()
        self.step_commit.gather_parameters()


def _describe_bundle(key: Bundle) -> str:
    kind, src, dst, microbatch = key
    return f"the {kind} of microbatch {microbatch} between stage {src} and stage {dst}"


InstructionRule = Callable[[Interpreter, Any, int, Received], Routine[None] | None]
"""What an instruction does: (interpreter, instruction, step, bundles that it needs) -> a routine where it has to wait."""

TRAINING_RULES: dict[type[Instruction], InstructionRule] = {
    Forward: Interpreter._forward,
    CheckpointedForward: Interpreter._checkpointed_forward,
    Recompute: Interpreter._recompute,
    OffloadedForward: Interpreter._offloaded_forward,
    OffloadedCheckpointedForward: Interpreter._offloaded_checkpointed_forward,
    Fetch: Interpreter._fetch,
    FetchKeptInputs: Interpreter._fetch,
    Backward: Interpreter._backward,
    BackwardInput: Interpreter._backward_input,
    BackwardWeight: Interpreter._backward_weight,
    Send: Interpreter._send,
    Recv: Interpreter._recv,
    FreeActivations: Interpreter._free,
    ServeParameters: Interpreter._serve_parameters,
    Gather: Interpreter._gather,
    Release: Interpreter._release,
    ReduceGradients: Interpreter._reduce,
    ExchangeTies: Interpreter._exchange_ties,
    ExchangeBuffers: Interpreter._exchange_buffers,
    ExchangeVotes: Interpreter._vote,
    OptimizerStep: Interpreter._apply,
}
"""Class of instructions -> what a worker does with it in a training step."""

VALIDATION_RULES: dict[type[Instruction], InstructionRule] = {
    Forward: Interpreter._evaluate,
    Send: Interpreter._send,
    Recv: Interpreter._recv,
    FreeActivations: Interpreter._free,
    ServeParameters: Interpreter._serve_parameters,
    Gather: Interpreter._gather,
    Release: Interpreter._release,
}
"""Class of instructions -> what a worker does with it in a validation pass."""
