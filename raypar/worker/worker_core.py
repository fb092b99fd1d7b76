"""One worker without Ray: builds its stages from an assignment, runs steps, validates, hands out its state."""

from __future__ import annotations

import resource
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from raypar.comm.buffer_pool import CPU
from raypar.comm.communicator_key import SHARDS
from raypar.comm.gradient_reduction import CanonicalReduction, FastReduction
from raypar.comm.transport import Routine, Transport, run_routine
from raypar.elastic.holdings import Digest
from raypar.errors import WorkerLost
from raypar.model.build import SkeletonCopies
from raypar.model.graph import Graph, Layer
from raypar.model.initial_values import initial_values_of
from raypar.model.tensor_parallel.group import ShardGroup
from raypar.model.tensor_parallel.layout import layout_of
from raypar.plan import Routing
from raypar.plan.shard_layout import ShardLayout
from raypar.schedule.instructions import Instruction
from raypar.worker.assignment import Assignment, make_graph
from raypar.worker.checkpoint import ShardRecord
from raypar.worker.compute_state import StateGuard
from raypar.worker.data import Loader, SampleOrder, make_dataset
from raypar.worker.gpu_process import DeviceBatchSource
from raypar.worker.initial_state import initial_state, unfilled_state
from raypar.worker.interpreter import BatchSource, Interpreter, StageLinks
from raypar.worker.job_spec import DataSpec, JobSpec
from raypar.worker.loss import loss_function
from raypar.worker.optimizer import build_optimizer
from raypar.worker.process_state import Warnings
from raypar.worker.stage import Stage
from raypar.worker.stage_shard import StageShard
from raypar.worker.state_snapshot import CheckpointWriter, restore_state, take_snapshot, written_state
from raypar.worker.step_commit import InstructionSpan, StepCommit


@dataclass(frozen=True)
class StepReport:
    """What one worker says of one step. Times in seconds, `mirror_seconds` beside the others; `spans` only when traced.

    `digest`: of the state after the step, when it took a cut and others should hold the same. `warnings`: process state that
    users' code has left changed since the last report (see `StateGuard.lines`).
    """

    rank: int
    step: int
    loss: float
    count: float
    norm: float
    skipped: bool
    seconds: float
    busy_seconds: float
    started_ns: int
    spans: tuple[InstructionSpan, ...]
    ledger: Mapping[str, Mapping[str, int]]
    peak_rss_bytes: int
    mirror_seconds: float = 0.0
    digest: Digest | None = None
    warnings: Warnings = ()


@dataclass(frozen=True)
class ValidationReport:
    """Losses of the microbatches whose last stage ran here: microbatch -> (sum, count). `warnings`: as of `StepReport`."""

    rank: int
    step: int
    losses: Mapping[int, tuple[float, float]]
    seconds: float
    warnings: Warnings = ()


class WorkerCore:
    """Everything one worker owns; it computes on `device`. `adopt` may be called again with another assignment (a new plan, a
    new generation). `guard`: of the worker's process; a new one by default."""

    def __init__(
        self,
        spec: JobSpec,
        *,
        graph: Graph | None = None,
        step_timeout_s: float = 300.0,
        device: torch.device = CPU,
        guard: StateGuard | None = None,
    ) -> None:
        self.spec = spec
        self.guard = guard if guard is not None else StateGuard(spec.threads)
        self.guard.establish("the process that made this worker")
        self.step_timeout_s = step_timeout_s
        self.device = device
        if graph is None:
            graph = make_graph(spec, self.guard.watching)
        self.graph = graph_watched(graph, self.guard)
        self.stages: dict[int, Stage] = {}
        self.transport: Transport | None = None
        self._loaders: list[Loader] = []
        self._datasets: dict[str, Any] = {}
        self._layouts: dict[int, ShardLayout] = {}
        self._writer = CheckpointWriter()

    # -- building ------------------------------------------------------------------------------------------------------

    def adopt(
        self,
        assignment: Assignment,
        transport: Transport,
        *,
        cost_ms: Callable[[Instruction], float] = lambda instruction: 0.0,
        before: Callable[[int, Instruction], None] | None = None,
        values: Mapping[str, Tensor] | None = None,
        load: Path | None = None,
    ) -> dict[str, Any]:
        """Build this rank's stages, optimizers, reductions and loaders. Returns a description for the driver.

        `values`: tensors of all parameters (canonical names) and buffers, which the stages make their own; `load`: a checkpoint
        to read them from, with the optimizers' state. With neither, stages begin with the initial values, and the description
        has the digests of these.
        """
        spec, plan, rank = self.spec, assignment.plan, transport.rank
        self.learn_layouts(assignment)
        self.guard.establish()
        self.guard.thorough = True
        self._close_loaders()
        former = list(self.stages.values())
        reductions = list(self.end.reductions.values()) if self.stages else []
        self.assignment, self.transport, self.rank = assignment, transport, rank
        routing = Routing(plan, spec.cut)
        seat = plan.seats[rank]
        with self.guard.watching(f"the module of the loss {spec.loss.label}"):
            loss = loss_function(spec.loss, self.device)
        if values is not None:
            values = {name: value.to(self.device) for name, value in values.items()}
        stages: dict[int, Stage] = {}
        digests: dict[str, int] = {}
        shards = plan.stages[plan.stages_of(rank)[0]].shards
        for index in plan.stages_of(rank):
            # A tied parameter of two chunks is two tensors: each chunk has an optimizer of its own, which updates in place.
            taken = {name for stage in stages.values() for name in stage.parameters}
            shard = self._shard(index) if shards > 1 else None
            here = plan.stages[index]
            if load is not None:
                own = unfilled_state(self.graph, here.first, here.last, spec, shard)
            elif values is None:
                initial = initial_state(self.graph, here.first, here.last, spec, shard)
                own, digests = initial.values, {**digests, **initial.digests}
            else:
                own = {name: value.clone() if name in taken else value for name, value in values.items()}
            with self.guard.watching(f"the modules of the layers of stage {index}, as they were made,"):
                stages[index] = Stage(
                    self.graph,
                    plan,
                    index,
                    spec=spec,
                    routing=routing,
                    replica=seat.replica,
                    loss_fn=loss,
                    split=assignment.splits_backward,
                    values=own,
                    shard=shard,
                    device=self.device,
                    guard=self.guard,
                )
        self.stages = stages
        factor = _constant
        if spec.lr_schedule is not None:
            with self.guard.watching(f"the module of the lr_schedule {spec.lr_schedule.label}"):
                factor = spec.lr_schedule.partial()
        with self.guard.watching(f"the optimizer {spec.optimizer.optimizer.label}, as it was made,"):
            optimizers = {
                index: build_optimizer(spec.optimizer, stage.parameters)
                for index, stage in self.stages.items()
                if any(p.requires_grad for p in stage.parameters.values())
            }
        reduction = CanonicalReduction if spec.reduction == "canonical" else FastReduction
        self.end = StepCommit(
            rank=rank,
            graph=self.graph,
            routing=routing,
            ties=assignment.crossing.ties,
            stages=self.stages,
            reductions={
                index: reduction(
                    transport,
                    group=plan.replica_ranks(index, seat.shard),
                    runs=[routing.run(index, r) for r in range(plan.stages[index].replicas)],
                    blocks=spec.cut.blocks,
                    parameters=[(shape, dtype) for _, shape, dtype in stage.uses],
                    channel=index,
                    device=self.device,
                )
                for index, stage in self.stages.items()
            },
            optimizers=optimizers,
            transport=transport,
            spec=spec,
            lr_factor=factor,
            layout=self.layout,
            guard=self.guard,
        )
        links = StageLinks.of(self.graph, plan, assignment.crossing, shard=seat.shard)
        self._mine = sorted({m for i in self.stages for m in routing.of_replica(i, seat.replica)})
        self.loader = self._feed(spec.data, spec.cut, training=True)
        self.end.meanwhile = self._read_ahead
        self.interpreter = Interpreter(
            rank=rank,
            routing=routing,
            links=links,
            stages=self.stages,
            transport=transport,
            end=self.end,
            feeds=self._feeds(self.loader),
            cost_ms=cost_ms,
            before=before,
        )
        self.validator: Interpreter | None = None
        if assignment.validation_cut is not None and spec.validation is not None:
            cut = assignment.validation_cut
            self.validation_loader = self._feed(spec.validation.data, cut, training=False)
            self._validation_mine = sorted({m for i in self.stages for m in Routing(plan, cut).of_replica(i, seat.replica)})
            self.validator = Interpreter(
                rank=rank,
                routing=Routing(plan, cut),
                links=links,
                stages=self.stages,
                transport=transport,
                end=self.end,
                feeds=self._feeds(self.validation_loader),
            )
        # They and what hangs on their tensors hold each other, and Python's collector does not look at what is frozen.
        for stage in former:
            stage.release()
        for made in reductions:
            vars(made).clear()
        if load is not None:
            self.load(load)
        return {
            "rank": rank,
            "parameters": {name: tuple(p.shape) for s in self.stages.values() for name, p in s.parameters.items()},
            "bytes": sum(p.numel() * p.element_size() for s in self.stages.values() for p in s.parameters.values()),
            "initial": digests,
        }

    def release_initial_values(self) -> None:
        """Free what was kept of the whole model: this worker has its part, or gets it from others."""
        if self.graph.initial_values is not None:
            self.graph.initial_values.release()

    def learn_layouts(self, assignment: Assignment | None) -> None:
        """Take over, from what the driver has sent, how the model is cut over shards: it was computed once, by the client."""
        if assignment is not None:
            self._layouts.update(assignment.layouts)

    def layout(self, shards: int) -> ShardLayout:
        """How the job's styles cut the model over so many shards; computed where no assignment has brought it."""
        if shards not in self._layouts:
            self._layouts[shards] = layout_of(self.graph, shards, dict(self.spec.styles))
        return self._layouts[shards]

    def _shard(self, stage: int) -> StageShard:
        plan, seat = self.assignment.plan, self.assignment.plan.seats[self.rank]
        assert self.transport is not None
        group = ShardGroup(
            self.transport,
            [plan.rank(stage, seat.replica, shard) for shard in range(plan.stages[stage].shards)],
            channel=SHARDS + stage,
            sequence=self.spec.sequence_parallel,
            timeout_s=self.step_timeout_s,
        )
        return StageShard(group, self.layout(group.size))

    @property
    def blocks(self) -> bool:
        """Whether its steps wait for other shards in the middle of a layer: no plain routine then."""
        return any(stage.shard is not None for stage in self.stages.values())

    def dataset(self, spec: DataSpec) -> Any:
        """The user's data set, made once per worker and data specification."""
        target = spec.dataset.target  # not its label: two lambdas, or two objects of a class, have the same
        key = repr((target if isinstance(target, str) else id(target), sorted(spec.dataset.args.items(), key=str)))
        if key not in self._datasets:
            with self.guard.watching(f"the data set function {spec.dataset.label}"):
                self._datasets[key] = make_dataset(spec)
        return self._datasets[key]

    def _fields(self, stage: Stage) -> tuple[str, ...]:
        return stage.batch_fields

    def _feed(self, data: DataSpec, cut: Any, *, training: bool) -> Loader | None:
        fields = tuple(dict.fromkeys(f for stage in self.stages.values() for f in self._fields(stage)))
        if not fields:
            return None
        dataset = self.dataset(data)
        order = SampleOrder(self.spec.seed, len(dataset), shuffle=training)
        readers = sum(bool(self._fields(stage)) for stage in self.stages.values())
        loader = Loader(dataset, data, order, cut, seed=self.spec.seed, fields=fields, readers=readers, guard=self.guard)
        self._loaders.append(loader)
        return loader

    def _read_ahead(self, step: int) -> None:
        if self.loader is not None and step < self.spec.steps:
            self.loader.read_ahead(step, self._mine)

    def _feeds(self, loader: Loader | None) -> dict[int, BatchSource | None]:
        source = DeviceBatchSource(loader, self.device) if loader is not None and self.device != CPU else loader
        return {index: source if self._fields(stage) else None for index, stage in self.stages.items()}

    # -- running -------------------------------------------------------------------------------------------------------

    def routine(self, step: int, *, trace: bool = False) -> Routine[StepReport]:
        """One training step as a routine, for `drive` or the cooperative scheduler."""
        self.guard.establish()
        if self.loader is not None:
            self.loader.prefetch(step, self._mine)
            if step + 1 < self.spec.steps:
                self.loader.prefetch(step + 1, self._mine)
        start = time.perf_counter_ns()
        yield from self.interpreter.run(self.assignment.program, step, trace=trace)
        end = time.perf_counter_ns()
        outcome = self.end.outcome
        assert outcome is not None and self.transport is not None
        return StepReport(
            rank=self.rank,
            step=step,
            loss=outcome.loss,
            count=outcome.count,
            norm=outcome.norm,
            skipped=outcome.skipped,
            seconds=(end - start) / 1e9,
            busy_seconds=self.interpreter.busy_ns / 1e9,
            started_ns=start,
            spans=tuple(self.interpreter.spans),
            ledger=self.transport.ledger.as_dict() if trace else {},
            peak_rss_bytes=resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024,
            warnings=self.guard.lines(),
        )

    def step(self, step: int, *, trace: bool = False) -> StepReport:
        """One training step on a real transport; every wait is bounded by `step_timeout_s`."""
        return run_routine(self.routine(step, trace=trace), self.step_timeout_s)

    def validation_routine(self, step: int) -> Routine[ValidationReport]:
        """One whole validation pass as a routine."""
        assert self.validator is not None, "the assignment has no validation pass"
        self.guard.establish()
        start = time.perf_counter_ns()
        for stage in self.stages.values():
            stage.losses.clear()
        if self.validation_loader is not None:
            self.validation_loader.prefetch(0, self._validation_mine)
        yield from self.validator.run_forward(self.assignment.validation_program, step)
        losses = {m: (float(s), float(c)) for stage in self.stages.values() for m, (s, c) in stage.losses.items()}
        self.guard.check_all(f"a layer, the loss or the data set, in the validation after {step} steps,")
        return ValidationReport(self.rank, step, losses, (time.perf_counter_ns() - start) / 1e9, self.guard.lines())

    def validate(self, step: int) -> ValidationReport:
        """One whole validation pass on a real transport."""
        return run_routine(self.validation_routine(step), self.step_timeout_s)

    # -- state -------------------------------------------------------------------------------------------------------------

    def save(self, folder: Path, done: int) -> None:
        """Copy this rank's share of the state after `done` steps, write it in the background; see `save_result`."""
        names = written_state(self.assignment.plan, self.assignment.crossing, self.rank, self.stages)
        self._writer.start(
            folder, f"worker_{self.rank:04d}.safetensors", take_snapshot(self.stages, self.end.optimizers, names)
        )

    def save_result(self) -> ShardRecord:
        """Waits for what `save` began. Raises `CheckpointError` when the disk did not take it."""
        return self._writer.result()

    def load(self, path: Path) -> None:
        """Put a checkpoint's state into the stages adopted. Raises `CheckpointError`."""
        restore_state(path, self.stages, self.end.optimizers, initial_values_of(self.graph, self.spec.seed))

    # -- ending --------------------------------------------------------------------------------------------------------

    def _close_loaders(self) -> None:
        for loader in self._loaders:
            loader.close()
        self._loaders.clear()

    def abort(self, reason: str) -> None:
        """From any thread: every pending wait of this worker raises `GroupAborted`."""
        if self.transport is not None:
            self.transport.abort(reason)

    def close(self) -> None:
        """Release transports, loaders and their processes; idempotent."""
        self._close_loaders()
        if self.transport is not None:
            self.transport.close()
            self.transport = None


def graph_watched(graph: Graph, guard: StateGuard) -> Graph:
    """The graph with its builds and its `init` guarded: process state that they leave changed is restored.

    Not those builds that copy skeletons: they call no user's code, and a recovery waits for every one of them.
    """

    def build(layer: Layer) -> nn.Module:
        with guard.watching(f"the constructor of layer {layer.name!r}"):
            return layer.build()

    def fill(init: Callable[[str, object], None], name: str, parameter: object) -> None:
        with guard.watching("the graph's init"):
            init(name, parameter)

    layers = tuple(
        layer if isinstance(layer.build, SkeletonCopies) else replace(layer, build=partial(build, layer))
        for layer in graph.layers
    )
    return replace(graph, layers=layers, init=graph.init and partial(fill, graph.init))


def _constant(step: int) -> float:
    return 1.0


def whole_loss(reports: list[ValidationReport]) -> float:
    """The validation loss from all workers' reports: sums in microbatch order / count."""
    losses = {m: pair for report in reports for m, pair in report.losses.items()}
    if not losses:
        raise WorkerLost("no worker reported a validation loss", cure="report this: a worker must hold the last stage")
    total = count = 0.0
    for microbatch in sorted(losses):
        total += losses[microbatch][0]
        count += losses[microbatch][1]
    return total / count
