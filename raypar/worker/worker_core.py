"""One worker without Ray: builds its stages from an assignment, runs steps, validates, hands out its state."""

from __future__ import annotations

import contextlib
import resource
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from functools import cached_property, partial

import torch

from raypar.comm.buffer_pool import CPU
from raypar.comm.routine import Routine, run_routine
from raypar.comm.transport import Transport
from raypar.errors import StateNotKeptError
from raypar.fences.private_api_fence import fence_warnings
from raypar.job import DataConfig, Job
from raypar.model.capture.module_graph import lines_about_repeated_traces
from raypar.model.graph import Graph
from raypar.model.initial_values import initial_values_of
from raypar.model.layer_skeletons import make_model_outline
from raypar.model.tensor_parallel.compute_shard_layout import compute_shard_layout
from raypar.plan import Microbatches, MicrobatchRouting, ModelOutline, ParallelPlan
from raypar.plan.forward_pass_batching import whole_batching
from raypar.plan.offloading import HOST
from raypar.plan.ownership import Ownership
from raypar.plan.pieces import AdoptedStages
from raypar.plan.shard_ranges import count_indices
from raypar.plan.tensor_parallel_layout import TensorParallelLayout
from raypar.plan.wording import after_steps
from raypar.schedule.gathering import gathers_in_pass
from raypar.schedule.instructions import Instruction
from raypar.schedule.program_assignment import ProgramAssignment
from raypar.worker.checkpoint.checkpoint_files import CheckpointAt, ShardRecord, load_manifest
from raypar.worker.data.loader_of_validation_sets import LoaderOfSets
from raypar.worker.data.microbatch_loader import BatchSource, MicrobatchLoader
from raypar.worker.data.slow_data_watch import SlowDataWatch
from raypar.worker.data.stream_feed_process import StreamFeedProcess
from raypar.worker.data.stream_loader import StreamLoader
from raypar.worker.data.worker_data import WorkerData
from raypar.worker.forward_passes import MicrobatchesOfPass, pack_measures
from raypar.worker.held_memory import held_memory
from raypar.worker.kept_predictions import Prediction
from raypar.worker.layer_graph_of_job import make_layer_graph
from raypar.worker.metrics.metric import Metric, make_metrics
from raypar.worker.metrics.metric_state import State
from raypar.worker.metrics.stage_metrics import StageMetrics, pack_states
from raypar.worker.plain_microbatches import MICROBATCHES, NotCompared, refuse_large_models
from raypar.worker.process.allocator_and_garbage_collector import (
    collect_what_came_since_freeze,
    large_blocks_returned,
)
from raypar.worker.process.environment_and_signals_guard import StateWarnings
from raypar.worker.process.generators_in_turn import GeneratorsInTurn
from raypar.worker.process.gpu_setup import DeviceBatchSource
from raypar.worker.process.guard_graph_builds import guard_graph_builds
from raypar.worker.process.memory_in_use import memory_in_use
from raypar.worker.process.seed_generators import make_seeder
from raypar.worker.process.torch_state_guard import TorchStateGuard
from raypar.worker.stage.initial_state import InitialStageState
from raypar.worker.stage.stage import Stage
from raypar.worker.stage.stage_in_virtual_shards import ComputesMicrobatches, ShardOfStage, StageInVirtualShards
from raypar.worker.stage_builder import StageBuilder
from raypar.worker.state.activation_file import ACTIVATIONS, ActivationFile
from raypar.worker.state.activation_host_memory import HostActivations
from raypar.worker.state.activation_place import ActivationPlace
from raypar.worker.state.checkpoint_snapshot import CheckpointWriter, copy_to_host, restore_from_checkpoint, take_snapshot
from raypar.worker.state.file_memory import OPTIMIZER_STATE, FileMemoryPool, check_folder_for_copies
from raypar.worker.step.interpreter import Interpreter, StageLinks
from raypar.worker.step.learning_rates import LearningRates, make_learning_rates
from raypar.worker.step.optimizer_state import OptimizerState, read_optimizer_state
from raypar.worker.step.step_commit import StepCommit
from raypar.worker.trace_batch_shapes_ahead import trace_ladder, trace_ladders_of_validation
from raypar.worker.worker_reports import StepReport, ValidationReport

SAMPLE_S = 2.0
"""Least time from one step whose report has the worker's memory and bytes sent to the next."""


class WorkerCore:
    """One worker without Ray: its stages of the model, and all that trains, validates and saves them.

    `adopt` builds the stages. It may be called again with another assignment (a new plan, a new generation).
    """

    spec: Job
    """The job."""
    graph: Graph
    """The whole model; `guard` restores what building its layers leaves changed."""
    device: torch.device
    """Where this worker computes."""
    guard: TorchStateGuard
    """Restores state of this process that users' code leaves changed."""
    step_timeout_s: float
    """Bounds every wait of a step."""
    data: WorkerData
    """Its data sets, streams and data processes, and the loaders of the present plan."""
    transport: Transport | None
    """Connects the workers of the present plan; None before the first plan and after `close`."""
    stages: dict[ShardOfStage, Stage]
    """This worker's stages in the present plan, each virtual shard of one by itself."""
    assignment: ProgramAssignment
    """The present plan and this worker's program. Set by `adopt`, as all attributes below."""
    rank: int
    """This worker's rank in the present plan."""
    nodes: tuple[int, ...]
    """By rank: the number of its node; empty: not known."""
    ownership: Ownership
    """Which rank of the present plan keeps which piece of state."""
    step_commit: StepCommit
    """Ends each step: reduces gradients, votes, runs the optimizers."""
    not_moved: StateNotKeptError | None
    """What optimizer state could not be moved here with the present plan: the stages have parameters and buffers only."""
    interpreter: Interpreter
    """Runs training steps."""
    loader: MicrobatchLoader | StreamLoader | None
    """Reads training samples; None if no stage here reads any."""
    validation_interpreter: Interpreter | None
    """Runs validation passes; None if the job has none."""
    validation_loader: MicrobatchLoader | StreamLoader | LoaderOfSets | None
    """Reads validation samples; None if no stage here reads any."""
    _own_microbatches: list[int]
    """Microbatches of a step that this worker runs, ascending."""
    _passes: dict[int, MicrobatchesOfPass]
    """Stage -> its source of batches in validation passes."""
    _own_validation_microbatches: list[int]
    """Microbatches of a validation pass that this worker runs, ascending."""
    generators: GeneratorsInTurn
    """Of the layers of virtual shards that take turns."""
    validated: dict[int, float]
    """Number of steps done -> value of the job's `followed_metric`, of the validations that this worker was told of."""
    skipped_steps: list[int]
    """`StepCommit.skipped_steps`; of all plans."""
    _skipped_when_saved: tuple[int, ...] | None
    """Those of the checkpoint that is being written; None where the loss is not scaled."""
    optimizer_files: FileMemoryPool | None
    """Where state of optimizers lies that is not in memory (`plan.optimizer_in`); None: all is."""
    activation_place: ActivationPlace | None
    """Where activations are offloaded to in the present plan (`plan.activations_in`); None: none are."""
    _layouts: dict[int, TensorParallelLayout]
    """Number of shards -> how the model is cut over them; kept because it is needed repeatedly."""
    _writer: CheckpointWriter
    """Writes this worker's share of a checkpoint in the background."""
    _compared: set[str]
    """Users' code that has run here in a whole step in which all process state was compared after each call."""
    _to_compare: set[str]
    """Users' code that the present plan has this worker run and that `_compared` lacks."""
    _slow_data: SlowDataWatch
    """Tells when steps are long because samples are read slowly."""
    _sampled_ns: int
    """When a report last had the memory and the bytes sent (`time.perf_counter_ns`)."""
    _empty_bytes: int
    """Resident memory of this process before it held anything of the model."""

    def __init__(
        self,
        spec: Job,
        *,
        graph: Graph | None = None,
        step_timeout_s: float = 300.0,
        device: torch.device = CPU,
        guard: TorchStateGuard | None = None,
        stream_process: StreamFeedProcess | None = None,
    ) -> None:
        """`stream_process`: the node's data process, where one reads the job's stream for all workers of the node."""
        self.spec = spec
        self.guard = guard if guard is not None else TorchStateGuard(spec.threads)
        self.guard.establish("the process that made this worker")
        self.step_timeout_s = step_timeout_s
        self.device, self._empty_bytes = device, memory_in_use(CPU).get("rss", 0)
        if graph is None:
            graph = make_layer_graph(spec, self.guard.watching)
        self.graph = guard_graph_builds(graph, self.guard)
        self.stages = {}
        self.transport = None
        self._layouts, self._passes, self.optimizer_files, self.activation_place = {}, {}, None, None
        if spec.optimizer_in is not None and spec.forward_passes is None:
            check_folder_for_copies(spec.optimizer_in, OPTIMIZER_STATE)  # now, and not in the first step
        if spec.activations_folder is not None and spec.forward_passes is None:
            check_folder_for_copies(spec.activations_folder, ACTIVATIONS)
        self._compared, self._to_compare = set(), set()
        self.data = WorkerData(spec, self.guard, batch_names=graph.batch_names, stream_process=stream_process)
        self.generators = GeneratorsInTurn(device)
        self.validated, self.skipped_steps, self._skipped_when_saved = {}, [], None
        self._writer = CheckpointWriter()
        self._slow_data = SlowDataWatch(spec.data)
        self._sampled_ns = 0

    # -- building ------------------------------------------------------------------------------------------------------

    def adopt(
        self,
        assignment: ProgramAssignment,
        transport: Transport,
        *,
        cost_ms: Callable[[Instruction], float] = lambda instruction: 0.0,
        before_compute: Callable[[int, Instruction], None] | None = None,
        values: Mapping[ShardOfStage, InitialStageState] | None = None,
        load: CheckpointAt | None = None,
        only_weights: bool = False,
        nodes: Sequence[int] = (),
    ) -> AdoptedStages:
        """Build this rank's stages, optimizers, reductions and loaders. Returns a description for the driver.

        `values`: by stage, tensors of all parameters (canonical names) and buffers, which the stages make their own; where
        replicas divide state, only this rank's runs need be filled, or are apart, and all replicas begin so. `load`: a
        checkpoint to read them from, with the optimizers' state unless `only_weights` is set. With neither, stages begin with
        the initial values, and the description contains digests of these. `cost_ms`, `before_compute`, `nodes`: see
        `Interpreter`.
        """
        self.take_layouts_from_assignment(assignment)
        self.guard.establish()
        self.data.close_loaders()
        self.release_stages()
        self.assignment, self.transport, self.rank = assignment, transport, transport.rank
        self.ownership, self.nodes = self.ownership_of(assignment.plan), tuple(nodes)
        if values is None or self.optimizer_files is None:
            self.renew_optimizer_files()
        self._open_activation_place()
        builder = self._builder(assignment, transport)
        self.not_moved = None
        frees = gathers_in_pass(assignment.plan)
        with large_blocks_returned() if frees else contextlib.nullcontext():  # else heaps keep what whole parameters had
            self.stages, runs, digests = builder.build_stages(values, unfilled=load is not None)
            self.step_commit = builder.build_step_commit(self.stages, runs, self.learning_rates)
        self.step_commit.skipped_steps = self.skipped_steps
        for stage in self.stages.values():
            stage.hooks.check_alive = transport.check_alive
        self._build_interpreters(builder.routing, transport, cost_ms, before_compute)
        self._to_compare = self._users_code() - self._compared
        if self._to_compare:
            self.guard.compare_everything = True
        if load is not None:
            self.load(load, only_weights=only_weights)
        if values is not None:
            self.step_commit.gather.mark_stale()
        self.trace_ladder(assignment.validation_microbatches)
        return {
            "rank": self.rank,
            "parameters": self._shapes_here(),
            "bytes": sum(p.numel() * p.element_size() for s in self.stages.values() for p in s.parameters.values()),
            "initial": digests,
            "collated": {} if values is not None else self._first_batch_digests(),
            "not_kept": "",
        }

    def release_stages(self) -> None:
        """Let go of the stages and their tensors, before others are built; what is known of the last step stays."""
        former, self.stages = self.stages, {}
        if not former:
            return
        # Stages and what hangs on their tensors hold each other in circles, and Python's collector skips what is frozen.
        for reduction in self.step_commit.reductions.values():
            vars(reduction).clear()
        self.step_commit.release()
        del self.interpreter, self.validation_interpreter
        for stage in former.values():
            stage.release()
        former.clear()
        collect_what_came_since_freeze()

    def _shapes_here(self) -> dict[str, tuple[int, ...]]:
        """Parameter -> its shape here, that of all virtual shards of this worker together."""
        plan, found = self.assignment.plan, dict[str, tuple[int, ...]]()
        for (index, _), stage in self.stages.items():
            run = plan.stages[index].run_of(plan.role_in(self.rank, index).shard)
            for name, parameter in stage.parameters.items():
                cut = stage.shard.layout.cuts.get(name) if stage.shard is not None else None
                shape = list(parameter.shape)
                if cut is not None:
                    shape[cut.dim] = count_indices(cut.over_runs([run]).indices_by_shard[0])
                found[name] = tuple(shape)
        return found

    def _builder(self, assignment: ProgramAssignment, transport: Transport) -> StageBuilder:
        return StageBuilder(
            spec=self.spec,
            graph=self.graph,
            assignment=assignment,
            routing=MicrobatchRouting(assignment.plan, self.spec.batching),
            transport=transport,
            layout=self.layout,
            ownership=self.ownership,
            device=self.device,
            guard=self.guard,
            shard_timeout_s=self.step_timeout_s,
            generators=self.generators,
            optimizer_files=self.optimizer_files,
            activation_place=self.activation_place,
        )

    def _open_activation_place(self) -> None:
        """Have a new place for activations, if some are offloaded, and none of the plan before."""
        if self.activation_place is not None:
            self.activation_place.close()
        where = self.spec.activations_in if self.assignment.plan.offload else None
        if where == HOST:
            self.activation_place = HostActivations(self.device)
        else:
            self.activation_place = None if where is None else ActivationFile(where, self.step_timeout_s)

    def renew_optimizer_files(self) -> None:
        """Have new files for the state under the next plan; those of the plan before are gone with its state."""
        self.optimizer_files = self._make_files()

    def _make_files(self) -> FileMemoryPool | None:
        """Files for state in `plan.optimizer_in`, each gone when its tensor is; None without it."""
        folder = self.spec.optimizer_in
        return None if folder is None else FileMemoryPool(folder, OPTIMIZER_STATE)

    def can_share_out_anew(self, assignment: ProgramAssignment) -> bool:
        """Whether the stages that are here can run `assignment`: the plan is the present one but for the replicas' shares."""
        now, then = self.assignment, assignment
        same = [[replace(stage, share=()) for stage in one.plan.stages] for one in (now, then)]
        alike = now.plan.recompute == then.plan.recompute and now.plan.offload == then.plan.offload
        alike = alike and now.plan.gradients == then.plan.gradients
        return same[0] == same[1] and alike and now.splits_backward == then.splits_backward

    def share_out_anew(self, assignment: ProgramAssignment) -> None:
        """Run other blocks from the next step on, under a plan with other shares (`can_share_out_anew`), between two steps.

        Stages, their tensors and optimizers, and the connections stay.
        """
        assert self.transport is not None and self.can_share_out_anew(assignment)
        self.guard.establish()
        self.data.close_loaders()
        reductions = list(self.step_commit.reductions.values())
        self.assignment, self.ownership = assignment, self.ownership_of(assignment.plan)
        builder = self._builder(assignment, self.transport)
        self.step_commit = builder.share_out_anew(self.stages, replace(self.step_commit, ownership=self.ownership))
        self._build_interpreters(builder.routing, self.transport, lambda instruction: 0.0, None)
        for reduction in reductions:
            vars(reduction).clear()

    def _users_code(self) -> set[str]:
        """Names for what the present plan has this worker run: layers, the reading of batch fields, the loss, metrics."""
        found = set()
        for stage in self.stages.values():
            found |= {f"layer {name}" for name in stage.weights.layer_names} | {f"field {name}" for name in stage.batch_fields}
            found |= {name for name, made in (("loss", stage.loss), ("metrics", stage.metrics)) if made is not None}
        return found

    def trace_ladder(self, validation: Microbatches | None) -> None:
        """Trace a captured model for all lengths of `data.pad.to`. `validation`: the microbatches of a validation pass. Traces
        are the whole model's and outlive plans: after the first plan there is nothing left to do."""
        with self.guard.watching("the model's forward, recorded for the lengths of data.pad.to,"):
            passes = self.spec.forward_passes
            if passes is None:
                trace_ladder(self.spec, self.graph, self.spec.batching, training=True)
            elif validation is not None:
                validation = whole_batching(passes.samples, self.spec.batch_size, self.spec.microbatches)
            if validation is not None and self.spec.validation is not None:
                trace_ladders_of_validation(self.spec, self.graph, validation)

    def _build_interpreters(
        self,
        routing: MicrobatchRouting,
        transport: Transport,
        cost_ms: Callable[[Instruction], float],
        before_compute: Callable[[int, Instruction], None] | None,
    ) -> None:
        """Make loaders and interpreters, of training and of validation."""
        plan = self.assignment.plan
        links = StageLinks.of(plan, self.assignment.crossing)
        build = partial(
            Interpreter,
            rank=self.rank,
            links=links,
            stages=self._by_index(),
            transport=transport,
            step_commit=self.step_commit,
            nodes=self.nodes,
        )
        for stage in self.stages.values():
            if stage.shard is not None:
                stage.shard.group.stream_waits = self.step_commit.stream_waits
        self._own_microbatches = own = self._microbatches(routing)
        metrics = self._add_metrics()
        data, batching = self.spec.training_data, self.spec.batching
        fields = self.data.all_fields(data, batching) if metrics and self.spec.metrics_every else ()
        self.loader = self._make_loader(None, data, batching, own=own, more=fields)
        self.step_commit.while_votes_arrive = self._read_ahead
        self.step_commit.order_digest = self.loader.order_digest if isinstance(self.loader, MicrobatchLoader) else None
        self.interpreter = build(
            routing=routing, batch_sources=self._batch_sources(self.loader), cost_ms=cost_ms, before_compute=before_compute
        )
        self.validation_interpreter = None
        if self.assignment.validation_microbatches is not None and self.spec.validation is not None:
            validation = MicrobatchRouting(plan, self.assignment.validation_microbatches, forward_only=True)
            batching, passes = validation.microbatches, self.spec.forward_passes
            if passes is not None:
                batching = whole_batching(passes.samples, self.spec.batch_size, self.spec.microbatches)
            self._own_validation_microbatches = own = self._microbatches(validation)
            self.validation_loader = self._make_validation_loader(batching, own, reads_all_fields=metrics)
            sources = self._batch_sources(self.validation_loader)
            self._passes = {
                index: MicrobatchesOfPass(self.validation_loader, source, batching.count) for index, source in sources.items()
            }
            if passes is not None:
                sources = {index: one if sources[index] is not None else None for index, one in self._passes.items()}
            self.validation_interpreter = build(routing=validation, batch_sources=sources)

    def _by_index(self) -> dict[int, ComputesMicrobatches]:
        """Index -> stage; the virtual shards of one, if several compute anything, together."""
        found: dict[int, list[Stage]] = {}
        for (index, _), stage in self.stages.items():
            if not stage.has_no_layers:
                found.setdefault(index, []).append(stage)
        return {
            i: of[0] if len(of) == 1 else StageInVirtualShards(of, self.generators, self.step_timeout_s)
            for i, of in found.items()
        }

    def _make_validation_loader(
        self, batching: Microbatches, own: list[int], *, reads_all_fields: bool
    ) -> MicrobatchLoader | StreamLoader | LoaderOfSets | None:
        """A loader of the validation sets; None if no stage here reads any. `own`: the microbatches that this worker runs."""
        loaders: dict[str, MicrobatchLoader | StreamLoader] = {}
        for name, part in batching.of_each_set.items():
            data, places = self.spec.data_of_set(self.spec.validation_sets[name]), map(batching.place_in_set, own)
            fields = self.data.all_fields(data, part) if reads_all_fields else ()
            mine = [number for of_set, number in places if of_set == name]
            loader = self._make_loader(name, data, part, own=mine, more=fields)
            if loader is not None:
                loaders[name] = loader
        return loaders[""] if "" in loaders else LoaderOfSets(batching, loaders) if loaders else None

    def _add_metrics(self) -> bool:
        """Give the last stage the job's metrics, if it is here. True if they may read any field of this worker's batches."""
        found = [self._add_metrics_to(stage) for (index, _), stage in self.stages.items() if index == self._last_index]
        return any(found)

    def _add_metrics_to(self, last: Stage) -> bool:
        prediction = self.prediction
        if not (self.spec.metrics or prediction):
            return False
        with self.guard.watching("the modules of the metrics"):
            metrics: Mapping[str, Metric] = (
                make_metrics(self.spec.metrics, self.spec.loss_target_name)
                if prediction is None
                else {prediction.name: self._for_passes(prediction)}
            )
        last.metrics = StageMetrics(
            metrics,
            graph=self.graph,
            target=self.spec.loss_target_name,
            seed=self.spec.seed,
            coordinate=last.coordinate,
            shard=last.shard,
            guard=self.guard,
            seed_generators=make_seeder(self.device),
            every=self.spec.metrics_every,
            merges=self.spec.forward_passes is None,
            of_sets={name: self.spec.metrics_of_set(name) for name in self.spec.validation_sets} if prediction is None else {},
            samples=self._samples_of_metrics,
            untried=self._untried_metrics(),
        )
        measures = last.shard is None or last.shard.group.shard == 0
        reads_batch = any(metric.needs_batch for metric in metrics.values())
        return measures and reads_batch and not self.graph.handed_on  # streams: the first stage hands fields on

    def _for_passes(self, prediction: Prediction) -> Prediction:
        """What is kept of outputs, which knows of how many microbatches of a pass."""
        of_pass = self.assignment.validation_microbatches
        plan = self.assignment.plan
        own = self._microbatches(MicrobatchRouting(plan, of_pass, forward_only=True)) if of_pass is not None else ()
        return replace(prediction, microbatches=len(own))

    def _untried_metrics(self) -> dict[str, int]:
        """Metric that must be exact -> microbatches of a trial, where the model was too large for the one before the run."""
        exact = [name for name, metric in self.spec.metrics.items() if metric.exact]
        try:
            if exact:
                refuse_large_models(self.spec, self.graph)
        except NotCompared:
            return dict.fromkeys(exact, MICROBATCHES)
        return {}

    @property
    def _samples_of_metrics(self) -> dict[str, int]:
        """Metric -> number of samples that it measures in a validation, or in all forward passes of the run."""
        passes, batching = self.spec.forward_passes, self.assignment.validation_microbatches
        if batching is None:
            return {}
        if passes is not None:
            return self.spec.samples_of_metrics({"": passes.samples})
        return self.spec.samples_of_metrics({name: part.batch_size for name, part in batching.of_each_set.items()})

    @property
    def _last_index(self) -> int:
        """Index of the stage with the last layer."""
        return len(self.assignment.plan.stages) - 1

    @property
    def _last_stage(self) -> Stage | None:
        """The stage with the last layer, if it is here; its first virtual shard here."""
        return next((stage for (index, _), stage in self.stages.items() if index == self._last_index), None)

    def _microbatches(self, routing: MicrobatchRouting) -> list[int]:
        """The microbatches that this worker runs, ascending."""
        return sorted({m for index, _ in self.stages for m in routing.microbatches_of_worker(index, self.rank)})

    def release_initial_values(self) -> None:
        """Free the initial values of the whole model, once this worker has its part of the state."""
        if self.graph.initial_values is not None:
            self.graph.initial_values.release()

    def take_layouts_from_assignment(self, assignment: ProgramAssignment | None) -> None:
        """Keep the layouts that the assignment brings, so that this worker need not compute them again."""
        if assignment is not None:
            self._layouts.update(assignment.layouts)

    def layout(self, shards: int) -> TensorParallelLayout:
        """How the model is cut over `shards` shards; computed if no assignment has brought the layout."""
        if shards not in self._layouts:
            self._layouts[shards] = compute_shard_layout(self.graph, shards, dict(self.spec.styles), dict(self.spec.layout))
        return self._layouts[shards]

    def ownership_of(self, plan: ParallelPlan) -> Ownership:
        """Which rank of a plan keeps which piece of the job's state."""
        shards = (plan.virtual_shard_counts | self._layouts.keys()) - {1}
        return Ownership(plan, replace(self._outline, shardings={count: self.layout(count).cuts for count in shards}))

    @property
    def may_have_shards(self) -> bool:
        """Whether plans of the run may have shards, so that parameters' elements are numbered as their cuts say."""
        return any(count > 1 for count in self._layouts)

    @cached_property
    def learning_rates(self) -> LearningRates:
        """The learning rates of all steps. They outlive plans: a scheduler is run from the first step on."""
        label = self.spec.lr_schedule.label if self.spec.lr_schedule is not None else "none"
        with self.guard.watching(f"the module of the lr_schedule {label}"):
            return make_learning_rates(self.spec, self.graph, self.validated)

    @cached_property
    def _outline(self) -> ModelOutline:
        return replace(make_model_outline(self.graph), undivided=self.spec.undivided)

    @property
    def waits_inside_layers(self) -> bool:
        """Whether steps wait for other shards, for room for gradients, or for a layer's parameters, in the middle of a stage,
        which a plain routine cannot do."""
        return any(
            stage.shard is not None or stage.gradients.scatters or stage.weights.gathers is not None
            for stage in self.stages.values()
        )

    def _make_loader(
        self, of_set: str | None, data: DataConfig, batching: Microbatches, *, own: list[int], more: Sequence[str] = ()
    ) -> MicrobatchLoader | StreamLoader | None:
        """A loader of the batch fields that this worker's stages read, and of `more`; None if they read none. `of_set`: the
        validation set, None for training; `own`: the microbatches that this worker runs."""
        fields = tuple(dict.fromkeys([*(f for stage in self.stages.values() for f in stage.batch_fields), *more]))
        if not fields:
            return None
        readers = len({index for (index, _), stage in self.stages.items() if stage.batch_fields})
        return self.data.make_loader(of_set, data, batching, fields=fields, readers=readers, own=own)

    def _first_batch_digests(self) -> dict[str, int]:
        """Field -> digest of what `data.collate` makes of the job's first microbatch here: all readers must find the same."""
        if self.spec.data.collate is None or not isinstance(self.loader, MicrobatchLoader):
            return {}
        return self.loader.first_batch_digests()

    def _read_ahead(self, step: int) -> None:
        """Read samples of a later step, if the job has one."""
        if self.loader is not None and step < self.spec.steps:
            self.loader.read_ahead(step, self._own_microbatches)

    def _batch_sources(self, loader: MicrobatchLoader | StreamLoader | LoaderOfSets | None) -> dict[int, BatchSource | None]:
        """Stage -> source of its batches, on the worker's device; None for a stage that reads none."""
        source: BatchSource | None = loader
        if loader is not None and self.device != CPU:
            source = DeviceBatchSource(loader, self.device, self.guard.pass_on)
        reads: dict[int, bool] = {}
        for (index, _), stage in self.stages.items():
            reads[index] = reads.get(index, False) or bool(stage.batch_fields) or stage.metrics is not None
        return {index: source if read else None for index, read in reads.items()}

    # -- running -------------------------------------------------------------------------------------------------------

    def routine(self, step: int, *, trace: bool = False) -> Routine[StepReport]:
        """One training step as a routine, for `run_routine` or the cooperative scheduler."""
        self.guard.establish()
        if self.loader is not None:
            self.loader.prefetch(step, self._own_microbatches)
            if step + 1 < self.spec.steps:
                self.loader.prefetch(step + 1, self._own_microbatches)
        measured = self.spec.metrics_every > 0 and (step + 1) % self.spec.metrics_every == 0
        self.step_commit.gather_metrics = partial(self._gather_metrics, step) if measured else None
        start = time.perf_counter_ns()
        yield from self.step_commit.gather.finish()
        yield from self.interpreter.run(self.assignment.program, step, trace=trace)
        if self.transport is not None and gathers_in_pass(self.assignment.plan):
            self.transport.forget_freed_memory()  # that of messages which came before they were waited for
        metrics = self._compute_metrics() if measured else {}
        self._compared |= self._to_compare
        end = time.perf_counter_ns()
        outcome = self.step_commit.outcome
        assert outcome is not None and self.transport is not None
        sampled = end - self._sampled_ns >= SAMPLE_S * 1e9
        if sampled:
            self._sampled_ns = end
        seconds, read_seconds = (end - start) / 1e9, (self.interpreter.read_ns + self.step_commit.late_read_ns) / 1e9
        if (line := self._slow_data.add(read_seconds, seconds)) is not None:
            self.guard.pass_on([("slow data", line)])
        return StepReport(
            rank=self.rank,
            step=step,
            loss=outcome.loss,
            count=outcome.count,
            norm=outcome.norm,
            lr=self.step_commit.learning_rate if self.step_commit.applied else None,
            loss_scale=outcome.loss_scale,
            skipped=outcome.skipped,
            seconds=seconds,
            busy_seconds=self.interpreter.busy_ns / 1e9,
            read_seconds=read_seconds,
            started_ns=start,
            spans=tuple(self.interpreter.spans),
            ledger=self.transport.ledger.as_dict() if trace or sampled else {},
            peak_rss_bytes=resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024,
            memory=self.memory() if sampled else {},
            streams=self.loader.report(step) if isinstance(self.loader, StreamLoader) else None,
            warnings=self._lines_for_user(),
            not_kept="" if (step + 1) & step else self.why_not_kept(),
            metrics=metrics,
        )

    def memory(self) -> dict[str, int]:
        """Kind of memory -> bytes in use now: of the process (`process.memory_in_use`), `empty` before it held anything of the
        model, and of its tensors by the kinds of the memory sheet (`held_memory`)."""
        commit = self.step_commit
        held = held_memory(self.stages, commit.optimizers.values(), commit.owned, commit.gather)
        if (place := self.activation_place) is not None:
            kind = "activation_host" if self.spec.activations_in == HOST else "activation_files"
            held |= {"unwritten": place.most_unwritten, kind: place.nbytes}
        return {**memory_in_use(self.device), "empty": self._empty_bytes, **held}

    def optimizer_state(self, index: ShardOfStage) -> OptimizerState:
        """The state of a stage's optimizer. Raises `StateNotKeptError` for what cannot be, or was not, moved or saved."""
        if self.not_moved is not None:
            raise self.not_moved
        return read_optimizer_state(self.step_commit.optimizers[index])

    def why_not_kept(self) -> str:
        """What optimizer state cannot be saved, and why; empty if all can."""
        try:
            for index in self.step_commit.optimizers:
                self.optimizer_state(index)
        except StateNotKeptError as error:
            return error.what
        return ""

    def step(self, step: int, *, trace: bool = False) -> StepReport:
        """One training step on a real transport; every wait is bounded by `step_timeout_s`."""
        return run_routine(self.routine(step, trace=trace), self.step_timeout_s)

    @property
    def prediction(self) -> Prediction | None:
        """What is kept of the output, in a run that predicts; else None."""
        return found if isinstance(found := self.spec.loss.function, Prediction) else None

    def name_of_pass(self, step: int) -> str:
        """What a validation pass is called in messages. `step`: number of steps that are done."""
        if self.prediction is not None:
            return "in the prediction"
        return "in the evaluation" if self.spec.forward_passes is not None else f"in the validation {after_steps(step)}"

    def validation_routine(self, step: int, number: int = 0) -> Routine[ValidationReport]:
        """One whole validation pass as a routine. `number`: which pass of a run that makes these only."""
        assert self.validation_interpreter is not None, "the assignment has no validation pass"
        self.guard.establish()
        start = time.perf_counter_ns()
        for stage in self.stages.values():
            stage.losses.clear()
            if stage.metrics is not None:
                stage.metrics.begin()
        self._begin_pass(number)
        yield from self.step_commit.gather.finish()
        averaged = self.spec.average is not None and self.spec.average.validate_with == "average"
        with self.step_commit.computing_with_averages() if averaged else contextlib.nullcontext():
            yield from self.step_commit.gather.finish()
            yield from self.validation_interpreter.run_validation_pass(self.assignment.validation_program, step)
        if self.spec.metrics and self.spec.forward_passes is None:
            yield from self._gather_metrics(step)
        losses = {m: (float(s), float(c)) for stage in self.stages.values() for m, (s, c) in stage.losses.items()}
        metrics = self._compute_metrics()
        self.guard.check_all(f"a layer, the loss or the data set, {self.name_of_pass(step)},")
        seconds = (time.perf_counter_ns() - start) / 1e9
        return ValidationReport(
            self.rank, step, losses, seconds, metrics, self._outputs_of_pass(number, losses), self._lines_for_user()
        )

    def _begin_pass(self, number: int) -> None:
        """Have the stages and their sources of batches begin a pass."""
        first, batching = self._first_microbatch_of_pass(number), self.assignment.validation_microbatches
        assert batching is not None, "the assignment has no validation pass"
        of_whole = self.spec.forward_passes is not None
        place_in_set = (lambda microbatch: ("", first + microbatch)) if of_whole else batching.place_in_set
        for stage in self.stages.values():
            stage.place_in_set = place_in_set
        for source in self._passes.values():
            source.begin(first, self._own_validation_microbatches)

    def _first_microbatch_of_pass(self, number: int) -> int:
        """The first microbatch of a pass, of those of the whole data set."""
        passes = self.spec.forward_passes
        return (passes.first + number) * passes.microbatches if passes is not None else 0

    def _outputs_of_pass(self, number: int, losses: Mapping[int, tuple[float, float]]) -> dict[int, bytes]:
        """Microbatch of the whole data set -> what is kept of it, in a run that makes forward passes only: the outputs of one
        that predicts, else what was measured."""
        passes, last = self.spec.forward_passes, self._last_stage
        if passes is None or last is None or (last.shard is not None and last.shard.group.shard):
            return {}
        count = whole_batching(passes.samples, self.spec.batch_size, self.spec.microbatches).count
        states: dict[int, dict[str, State]] = {}
        if last.metrics is not None:
            states = {m: one for (_, m), one in last.metrics.states.items() if m < count}
            last.metrics.states = {}
        if self.prediction is not None:
            return self.prediction.bytes_of(states)
        if last.metrics is not None:
            states = pack_states(last.metrics.metrics, states)
        return pack_measures(losses, states, self._first_microbatch_of_pass(number), count)

    def _gather_metrics(self, step: int) -> Routine[None]:
        """Bring what was measured in the pass under way to the worker that computes the metrics."""
        plan, last = self.assignment.plan, self._last_stage
        if last is not None and last.metrics is not None and self.transport is not None:
            index = len(plan.stages) - 1
            yield from last.metrics.gather(step, index, plan.replica_ranks(index, 0), self.transport)

    def _compute_metrics(self) -> dict[str, float]:
        """The metrics of the pass under way, if this worker computes them."""
        last = self._last_stage
        return last.metrics.compute() if last is not None and last.metrics is not None else {}

    def _lines_for_user(self) -> StateWarnings:
        """The lines that have not been reported yet: state that users' code left changed, a model that is traced often, and
        APIs that this release of a library does not have."""
        self.guard.pass_on((line, line) for line in fence_warnings())
        self.guard.pass_on(lines_about_repeated_traces(self.graph).items())
        return self.guard.lines()

    def validate(self, step: int) -> ValidationReport:
        """One whole validation pass on a real transport."""
        return run_routine(self.validation_routine(step), self.step_timeout_s)

    # -- state -------------------------------------------------------------------------------------------------------------

    def start_save(self, checkpoint: CheckpointAt, *, only_weights: bool = False) -> None:
        """Copy this rank's share of the state, and write it in the background; see `save_result`.

        `only_weights`: parameters and buffers, without state of the optimizers. Raises `StateNotKeptError` for such state that
        cannot be saved.
        """
        if self.not_moved is not None and not only_weights:
            raise self.not_moved
        optimizers = {} if only_weights else self.step_commit.optimizers
        unsaved = self.spec.unsaved
        pieces = {
            stage: {name: of for name, of in mine.items() if name not in unsaved}
            for stage, mine in self.ownership.checkpoint_pieces(self.rank).items()
        }
        files = self._make_files()  # what memory has no room for has none for its copy
        copy = copy_to_host if files is None else files.contiguous_copy_of
        state = take_snapshot(self.stages, optimizers, pieces, self.step_commit.owned, copy=copy)
        self._skipped_when_saved = tuple(self.skipped_steps) if self.spec.loss_scaling is not None else None
        self._writer.start(checkpoint, f"worker_{self.rank:04d}.safetensors", state)

    def save_result(self) -> ShardRecord:
        """Wait until the file of `start_save` is written, and describe it. Raises `CheckpointError` if the disk refuses it."""
        return replace(self._writer.result(), skipped_steps=self._skipped_when_saved)

    def load(self, checkpoint: CheckpointAt, *, only_weights: bool = False) -> None:
        """Put a checkpoint's state into the stages and, unless `only_weights` is set, the optimizers. Raises
        `CheckpointError`."""
        optimizers = {} if only_weights else self.step_commit.optimizers
        initial = initial_values_of(self.graph, self.spec.seed)
        files = self.optimizer_files
        with large_blocks_returned() if files is not None else contextlib.nullcontext():
            restore_from_checkpoint(checkpoint, self.stages, optimizers, initial, self.step_commit.owned, files=files)
        if self.spec.loss_scaling is not None and not only_weights:
            self.skipped_steps[:] = load_manifest(checkpoint).skipped_steps
        for stage in self.stages.values():
            stage.weights.round_parameters()

    # -- ending --------------------------------------------------------------------------------------------------------

    def abort(self, reason: str) -> None:
        """Make every pending wait of this worker raise `GroupAborted`; may be called from any thread."""
        if self.transport is not None:
            self.transport.abort(reason)

    def close(self) -> None:
        """Release transports, loaders and their processes; idempotent."""
        self.data.close()
        if self.activation_place is not None:
            self.activation_place.close()
        if self.transport is not None:
            self.transport.close()
            self.transport = None
