"""Makes the stages of a worker: `build_stage` makes one, `StageBuilder` all of them.

The parts of a stage: modules (of whole values or slices), parameter uses, split backward, gradient accumulator, hooks, calls.
`StageBuilder` also makes what ends a step: optimizers, reductions over replicas, and the step commit that runs them.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial

import torch
from torch import Tensor, nn

from raypar.comm.buffer_pool import CPU
from raypar.comm.gradient_reduction import CanonicalReduction, FastReduction, held_runs
from raypar.comm.gradient_scatter import ScatterReduction
from raypar.comm.gradient_scatter_on_device import DeviceScatterReduction
from raypar.comm.transport import SHARD_CHANNELS, Transport
from raypar.comm.virtual_shards import VirtualShards
from raypar.job import Job
from raypar.model.graph import Graph, Layer
from raypar.model.layer_skeletons import buffers_of_several_layers, canonical_names
from raypar.model.materialise import materialise
from raypar.model.split_backward import defer_weight_gradients
from raypar.model.tensor_parallel.build_shard_modules import materialise_shard, sharded_loss
from raypar.model.tensor_parallel.find_whole_layers import find_leading_layers
from raypar.model.tensor_parallel.linear import ShardedLinear
from raypar.model.tensor_parallel.shard_group import ShardGroup
from raypar.model.tensor_parallel.split_shards_backward import defer_sharded_weight_gradients
from raypar.model.tensor_parallel.weight_gradient_memory_reuse import GradientReusePolicy
from raypar.plan import MicrobatchRouting, ParallelPlan
from raypar.plan.forward_pass_batching import whole_batching
from raypar.plan.gradient_scatter import stack_steps
from raypar.plan.ownership import OwnedRun, Ownership
from raypar.plan.tensor_parallel_layout import TensorParallelLayout
from raypar.schedule.program_assignment import ProgramAssignment
from raypar.torch_compat.autograd import can_forget_gradient_hooks
from raypar.worker.kept_predictions import Prediction
from raypar.worker.layer_precisions import dtype_of_job, gradient_dtype_of, parameter_dtype_of
from raypar.worker.process.generators_in_turn import GeneratorsInTurn
from raypar.worker.process.seed_generators import HostGenerators, make_seeder, make_torch_seeder
from raypar.worker.process.seeded_calls import SeededCalls
from raypar.worker.process.torch_state_guard import TorchStateGuard
from raypar.worker.stage.activation_offloading import StageOffload
from raypar.worker.stage.backward import DeferredGradients, LayerBackwardHooks
from raypar.worker.stage.buffer_updates import BufferUpdates
from raypar.worker.stage.gradient_accumulator import GradientAccumulator
from raypar.worker.stage.initial_state import InitialStageState, StageStateSource
from raypar.worker.stage.layer_call import LayerCall
from raypar.worker.stage.layer_tensors import StageTensors
from raypar.worker.stage.loss import LossCall, make_loss_function
from raypar.worker.stage.parameter_checked_call import ParameterCheckedCall
from raypar.worker.stage.precision import StagePrecision
from raypar.worker.stage.recomputation import StageRecomputation
from raypar.worker.stage.stage import Stage, StageLayer, StageValues
from raypar.worker.stage.stage_coordinate_in_errors import SamplesOfPasses, StageCoordinate
from raypar.worker.stage.stage_in_virtual_shards import ShardOfStage, reduction_channel
from raypar.worker.stage.stage_shard import StageShard
from raypar.worker.stage.whole_layers import WholeLayers
from raypar.worker.state.activation_place import ActivationPlace
from raypar.worker.state.file_memory import FileMemoryPool
from raypar.worker.step.gathered_memory import GatheredMemory
from raypar.worker.step.layer_gather import LayerGather
from raypar.worker.step.learning_rates import LearningRates
from raypar.worker.step.offloaded_optimizer import build_offloaded_optimizers, move_masters_to_files
from raypar.worker.step.optimizer_and_parameter_groups import build_optimizers
from raypar.worker.step.owned_parameters import OwnedParameter, named_parameters, own_parameters
from raypar.worker.step.parameter_gather import ParameterGather, StageGather, gather_rounds
from raypar.worker.step.parameter_requests import ParameterRequests, cut_into_messages
from raypar.worker.step.step_commit import AnyGradientReduction, StepCommit
from raypar.worker.step.transient_parameters import GatheredBytes, TransientParameters

# -- one stage ---------------------------------------------------------------------------------------------------------------


def build_stage(
    graph: Graph,
    plan: ParallelPlan,
    index: int,
    *,
    spec: Job,
    routing: MicrobatchRouting,
    replica: int,
    loss_fn: Callable[..., Tensor | tuple[Tensor, Tensor | float]],
    split: bool = False,
    values: Mapping[str, Tensor] | None = None,
    shard: StageShard | None = None,
    device: torch.device = CPU,
    guard: TorchStateGuard | None = None,
    in_turn: GeneratorsInTurn | None = None,
    takes: WholeLayers | None = None,
) -> Stage:
    """Stage `index` of the plan on one replica, ready for its first step.

    `split`: the schedule computes weight gradients apart. `values`: tensors of all parameters (canonical names) and buffers,
    on `device`, which the stage takes over without a copy; by default the initial ones. `shard`: which shard of the stage this
    is, if the stage is cut; `values` are slices then. `guard`: of the worker's process; by default a new one. `in_turn`: of a
    worker with several virtual shards of the stage; `takes`: the layers that the first of these calls for this one.
    """
    guard = guard if guard is not None else TorchStateGuard(spec.threads)
    layers = graph.layers[plan.stages[index].first : plan.stages[index].last]
    coordinate = stage_coordinate(plan, index, replica, shard, layers[0].name)
    coordinate.samples_of = samples_of_passes(spec)
    modules = materialise_stage_modules(graph, plan, index, spec, values, shard, device, takes)
    weights = StageTensors(graph, layers, modules, parameter_dtype_of(spec.precision), gradient_dtype_of(spec.precision))
    deferred = prepare_split_backward(modules, sharded=shard is not None) if split else DeferredGradients()
    gradients = build_gradient_accumulator(weights, routing, index, replica)
    completed = uses_completed_by_autograd(weights, deferred)
    crossing = stage_values(graph, plan, index, spec)
    hooks = LayerBackwardHooks(weights.layer_names, crossing.received, gradients, completed, guard, on_cpu=device == CPU)
    precision = StagePrecision(spec.precision, device, guard)
    updates = build_buffer_updates(graph, weights)
    loss = build_stage_loss(graph, plan, index, spec, loss_fn, shard, coordinate, guard, precision)
    seeded = seeded_calls_of_layers(layers, loss, device, sharded=shard is not None, in_turn=in_turn)
    return Stage(
        graph=graph,
        index=index,
        coordinate=coordinate,
        seed=spec.seed,
        routing=routing,
        shard=shard,
        guard=guard,
        weights=weights,
        layers=build_stage_layers(graph, layers, hooks, coordinate, seeded, guard, precision, updates),
        loss=loss,
        values=crossing,
        gradients=gradients,
        hooks=hooks,
        deferred=deferred,
        gradient_reuse_policy=GradientReusePolicy([m for m in list_all_modules(modules) if isinstance(m, ShardedLinear)]),
        recomputation=stage_recomputation(graph, plan, index, spec),
        evaluation_calls=[in_evaluation for in_evaluation, _ in seeded],
        buffer_updates=updates,
        takes=takes,
    )


def share_whole_layers(first: Stage, others: int) -> WholeLayers | None:
    """The layers of a stage that its first virtual shard on a worker calls for so many others, too; None: there are none."""
    if first.shard is None or first.shard.group.sequence_parallel or not others:
        return None
    layers = [layer.layer for layer in first.layers]
    here = [layer.name for layer in first.graph.layers].index(layers[0].name)
    found = first.shard.layout.computed_once(here, here + len(layers), len(first.graph.layers))
    if not found:
        return None
    positions = frozenset(index - here for index in found)
    leading = find_leading_layers(layers, positions)
    whole = WholeLayers(positions, leading, others)
    if len(positions) < len(layers):  # else the others do not run
        first.gives = whole
    if positions != leading:
        first.hooks.when_left(whole.leave)
    return whole


def check_parameters_stay(stage: Stage, *, are_divided: bool, are_freed: bool) -> None:
    """Refuse, when they run, layers that do to parameters what replicas cannot follow."""
    for layer in stage.layers:
        layer.call = ParameterCheckedCall(layer.layer.name, layer.call, are_divided=are_divided, are_freed=are_freed)


def samples_of_passes(spec: Job) -> SamplesOfPasses | None:
    """Which samples microbatches have in a run that makes forward passes only; None in others."""
    if (passes := spec.forward_passes) is None:
        return None
    return SamplesOfPasses(whole_batching(passes.samples, spec.batch_size, spec.microbatches))


def stage_recomputation(graph: Graph, plan: ParallelPlan, index: int, spec: Job) -> StageRecomputation:
    """Which layers of a stage the plan recomputes, and which values must be kept for that."""
    here = plan.stages[index]
    of_loss = spec.loss_fields if here.last == len(graph.layers) else ()
    positions = [layer - here.first for layer in plan.recomputed_layers(index)]
    return StageRecomputation.of(graph, graph.layers[here.first : here.last], positions, of_loss)


def materialise_stage_modules(
    graph: Graph,
    plan: ParallelPlan,
    index: int,
    spec: Job,
    values: Mapping[str, Tensor] | None,
    shard: StageShard | None,
    device: torch.device,
    takes: WholeLayers | None = None,
) -> dict[str, nn.Module]:
    """Layer name -> module with values, on the device; of a stage that is cut, sharded layers in the place of whole ones.
    `takes`: as in `build_stage`; in the place of these layers there are empty modules."""
    here, dtype = plan.stages[index], dtype_of_job(spec)
    if shard is None:
        modules = materialise(graph, here.first, here.last, seed=spec.seed, dtype=dtype, values=values)
    else:
        layout, group = shard.layout, shard.group
        modules = materialise_shard(
            graph,
            here.first,
            here.last,
            layout=layout,
            group=group,
            seed=spec.seed,
            dtype=dtype,
            values=values,
            left_out=takes.positions if takes is not None else (),
        )
    if device != CPU:
        for module in modules.values():
            module.to(device)  # made on the CPU, so that the bits of a new run are those of its seed everywhere
    return modules


def prepare_split_backward(modules: Mapping[str, nn.Module], *, sharded: bool) -> DeferredGradients:
    """Make every linear layer and convolution that can do so defer its weight gradient; returns the store of deferred ones."""
    deferred = DeferredGradients()
    for module in modules.values():
        for find in (defer_weight_gradients, defer_sharded_weight_gradients) if sharded else (defer_weight_gradients,):
            for part in find(module, deferred.current):
                deferred.parameters |= {id(p) for p in part.parameters(recurse=False)}
    return deferred


def build_gradient_accumulator(
    weights: StageTensors, routing: MicrobatchRouting, index: int, replica: int
) -> GradientAccumulator:
    """The accumulator of gradients over the microbatches and blocks that this replica runs."""
    names, dtypes = [use.name for use in weights.uses], [use.dtype for use in weights.uses]
    run = run_of_blocks(routing, index, replica)
    return GradientAccumulator(weights.leaves, names, dtypes, *run, scatters=routing.scatters(index))


def stage_coordinate(
    plan: ParallelPlan, index: int, replica: int, shard: StageShard | None, first_layer: str
) -> StageCoordinate:
    """The place of a stage in the plan, for messages."""
    number = None if shard is None else shard.group.shard
    return StageCoordinate(index, replica, number, first_layer, bool(plan.stages[index].division))


def run_of_blocks(routing: MicrobatchRouting, index: int, replica: int) -> tuple[range, int, dict[int, int]]:
    """A replica's blocks of a stage, the number of all blocks, and the number of microbatches in each of its own; where its
    gradients are handed over microbatch by microbatch, each of these as a block."""
    if routing.scatters(index):
        mine = routing.microbatches_of_replica(index, replica)
        return range(0), routing.microbatches.count, dict.fromkeys(mine, 1)
    run = routing.blocks_of_replica(index, replica)
    sizes = {block: len(routing.microbatches.microbatches_of_block(block)) for block in run}
    return run, routing.microbatches.blocks, sizes


def uses_completed_by_autograd(weights: StageTensors, deferred: DeferredGradients) -> list[list[int]]:
    """By layer position: its uses whose gradients autograd itself completes in a whole backward pass, last first."""
    return [
        [use for use in reversed(weights.of_layer(i).uses) if id(weights.leaves[use]) not in deferred.parameters]
        for i in range(len(weights.layer_names))
    ]


def build_buffer_updates(graph: Graph, weights: StageTensors) -> dict[str, BufferUpdates]:
    """Layer name -> keeper of what the layer's forward writes into buffers; layers that may write none are left out."""
    policy = graph.buffer_policy
    shared = buffers_of_several_layers(graph) if policy != "refuse" else frozenset[str]()
    made = [
        (name, BufferUpdates.of(name, weights.modules[name], weights.of_layer(position).buffers, policy, shared))
        for position, name in enumerate(weights.layer_names)
    ]
    return {name: updates for name, updates in made if updates is not None}


def seeded_calls_of_layers(
    layers: Sequence[Layer],
    loss: LossCall | None,
    device: torch.device,
    *,
    sharded: bool,
    in_turn: GeneratorsInTurn | None,
) -> list[tuple[SeededCalls, SeededCalls]]:
    """By layer: its calls in evaluation, and in training.

    All generators are seeded before each call of layers on shards, of which one alone cannot call a layer again, of the layer
    before a loss, which goes on with its random numbers, and in training where hooks of a dropped call would stay. `in_turn`:
    the generators of virtual shards that take turns.
    """
    generators = None if sharded else HostGenerators.of_process()
    seed_all, seed_torch = make_seeder(device) if in_turn is None else in_turn.seed, make_torch_seeder(device)

    def calls(layer: Layer, *, training: bool) -> SeededCalls:
        before_loss = layer is layers[-1] and loss is not None and loss.is_called(training=training)
        always = before_loss or (training and not can_forget_gradient_hooks())
        return SeededCalls(seed_all, seed_torch, None if always else generators)

    return [(calls(layer, training=False), calls(layer, training=True)) for layer in layers]


def build_stage_layers(
    graph: Graph,
    layers: Sequence[Layer],
    hooks: LayerBackwardHooks,
    coordinate: StageCoordinate,
    seeded: Sequence[tuple[SeededCalls, SeededCalls]],
    guard: TorchStateGuard,
    precision: StagePrecision,
    updates: Mapping[str, BufferUpdates],
) -> list[StageLayer]:
    """The layers in order, each with how it is called, and the hooks of what it returns. `seeded`: by layer, as `LayerCall`
    has them."""
    made, given = [], {*graph.batch_fields, *graph.handed_on}
    for layer, of_outputs, own in zip(layers, hooks.of_outputs, seeded, strict=True):
        call = LayerCall(layer, coordinate=coordinate, calls=own, guard=guard, updates=updates.get(layer.name))
        shared = tuple(name for name in dict.fromkeys(layer.inputs) if len(graph.consumers(name)) > 1)
        fields = [place for place, name in enumerate(layer.inputs) if name in given]
        made.append(StageLayer(layer, precision.wrap_layer(call, fields), of_outputs, shared))
    return made


def build_stage_loss(
    graph: Graph,
    plan: ParallelPlan,
    index: int,
    spec: Job,
    loss_fn: Callable[..., Tensor | tuple[Tensor, Tensor | float]],
    shard: StageShard | None,
    coordinate: StageCoordinate,
    guard: TorchStateGuard,
    precision: StagePrecision,
) -> LossCall | None:
    """The call of the loss; None unless the stage has the last layer."""
    if plan.stages[index].last < len(graph.layers):
        return None
    function = graph.loss_of_values(loss_fn)
    if shard is not None:
        function = sharded_loss(function, shard.group, graph.loss_inputs)
    return LossCall(
        precision.wrap_loss(function),
        inputs=graph.loss_inputs,
        fields=spec.loss_fields,
        coordinate=coordinate,
        guard=guard,
        only_in_training=isinstance(spec.loss.function, Prediction),
    )


def stage_values(graph: Graph, plan: ParallelPlan, index: int, spec: Job) -> StageValues:
    """The values that enter and leave a stage."""
    here = plan.stages[index]
    layers = graph.layers[here.first : here.last]
    written = {v for layer in layers for v in layer.outputs}
    fields = set(graph.batch_fields)
    read = [v for layer in layers for v in layer.inputs if v in fields]
    of_loss = list(spec.loss_fields) if here.last == len(graph.layers) else []
    if graph.handed_on:  # fields are as what the first stage's layers write
        fields, of_loss, read = set(), [], list(graph.handed_on) if here.first == 0 else []
        written |= set(read)
    received = [
        v
        for v in graph.values
        if v not in written and v not in fields and any(here.first <= i < here.last for i in graph.reading_layers(v))
    ]
    read_later = {v for v in graph.values if any(i >= here.last for i in graph.reading_layers(v))}
    crossing = graph.crossing(plan)
    return StageValues(
        batch_fields=tuple(dict.fromkeys([*read, *of_loss])),
        received=tuple(received),
        relayed=frozenset(v for relay in crossing.relays_to(index) for v in relay.values).intersection(received),
        apart=frozenset(v for relay in crossing.relays_from(index) for v in relay.apart),
        outgoing=tuple(v for v in graph.values if v in written and v in read_later),
    )


def list_all_modules(modules: Mapping[str, nn.Module]) -> list[nn.Module]:
    """Every module of every layer."""
    return [part for module in modules.values() for part in module.modules()]


# -- all stages of a worker --------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class StageBuilder:
    """Makes what one worker needs for its seat in a plan: stages, optimizers, reductions, the step commit."""

    spec: Job
    """The job."""
    graph: Graph
    """The whole model, its builds watched by `guard`."""
    assignment: ProgramAssignment
    """The plan, and what each worker does in it."""
    routing: MicrobatchRouting
    """Which replica runs a microbatch."""
    transport: Transport
    """Connects the plan's workers."""
    layout: Callable[[int], TensorParallelLayout]
    """Number of shards -> how the job's styles cut the model over them."""
    ownership: Ownership
    """Which rank of the plan keeps which piece of state."""
    device: torch.device
    """Where the worker computes."""
    guard: TorchStateGuard
    """Restores process state that users' code leaves changed."""
    shard_timeout_s: float
    """How long a layer waits for other shards."""
    generators: GeneratorsInTurn
    """Of virtual shards that take turns."""
    optimizer_files: FileMemoryPool | None = None
    """Where state of optimizers lies that is not in memory (`plan.optimizer_in`); None: all is."""
    activation_place: ActivationPlace | None = None
    """Where activations are offloaded to (`plan.activations_in`); None: none are."""

    def build_stages(
        self, values: Mapping[ShardOfStage, InitialStageState] | None, *, unfilled: bool
    ) -> tuple[dict[ShardOfStage, Stage], dict[ShardOfStage, dict[OwnedRun, Tensor]], dict[str, int]]:
        """The worker's stages, each virtual shard of one by itself; runs of parameters that are not in them, because these have
        no memory yet; and digests of the initial values that were made.

        `values`: the state to begin with, which the stages take over; None: the initial values. `unfilled`: leave parameters
        and buffers uninitialised, for the caller to fill.
        """
        plan, rank, spec = self.assignment.plan, self.transport.rank, self.spec
        with self.guard.watching(f"the module of the loss {spec.loss.label}"):
            loss = make_loss_function(spec.loss, self.device)
        stages: dict[ShardOfStage, Stage] = {}
        runs: dict[ShardOfStage, dict[OwnedRun, Tensor]] = {}
        digests: dict[str, int] = {}
        whole: dict[int, WholeLayers | None] = {}
        for (index, number), shard in self.build_shards().items():
            state = values[index, number] if values is not None else self._state(index, number, shard, unfilled=unfilled)
            digests.update(state.digests)
            runs[index, number] = state.runs
            with self.guard.watching(f"the modules of the layers of stage {index}, as they were made,"):
                stages[index, number] = build_stage(
                    self.graph,
                    plan,
                    index,
                    spec=spec,
                    routing=self.routing,
                    replica=plan.role_in(rank, index).replica,
                    loss_fn=loss,
                    split=self.assignment.splits_backward,
                    values=state.values,
                    shard=shard,
                    device=self.device,
                    guard=self.guard,
                    in_turn=self.generators if plan.stages[index].division else None,
                    takes=whole.get(index),
                )
            if self.activation_place is not None and (offloaded := plan.offloaded_layers(index)):
                positions = tuple(layer - plan.stages[index].first for layer in offloaded)
                stages[index, number].offload = offload = StageOffload(positions, self.activation_place)
                stages[index, number].hooks.when_left(offload.enter_backward)
            if index not in whole:
                others = len(plan.stages[index].run_of(plan.role_in(rank, index).shard)) - 1
                whole[index] = share_whole_layers(stages[index, number], others)
        return stages, runs, digests

    def _state(self, index: int, number: int, shard: StageShard | None, *, unfilled: bool) -> InitialStageState:
        """What a stage begins with at the beginning of a run, or, if `unfilled`, before a checkpoint is read. Where replicas
        divide parameters, what others keep is not allocated before it is gathered."""
        plan = self.assignment.plan
        here, replica = plan.stages[index], plan.role_in(self.transport.rank, index).replica
        divides = self.ownership.divides(index, "parameter")
        keep = self.ownership.runs_by_name(index, number, replica) if divides else {}
        source = StageStateSource(self.graph, here.first, here.last, self.spec, shard, keep, self.device)
        return source.unfilled() if unfilled else source.initial()

    def build_shards(self) -> dict[ShardOfStage, StageShard | None]:
        """The virtual shards of its stages that this worker computes, in order; None for a stage that is not cut."""
        plan, found = self.assignment.plan, dict[ShardOfStage, StageShard | None]()
        for index in plan.stages_of(self.transport.rank):
            role, stage = plan.role_in(self.transport.rank, index), plan.stages[index]
            if stage.virtual_shards == 1:
                found[index, 0] = None
                continue
            ranks = list(stage.workers[role.replica])
            together = VirtualShards(self.transport, ranks, stage.runs) if stage.division else None
            for number in stage.run_of(role.shard):
                group = ShardGroup(
                    self.transport if together is None else together.member(number),
                    ranks if together is None else range(stage.virtual_shards),
                    channel=SHARD_CHANNELS + index,
                    sequence_parallel=self.spec.sequence_parallel,
                    timeout_s=self.shard_timeout_s,
                )
                found[index, number] = StageShard(group, self.layout(group.size))
        return found

    def own_parameters(
        self, stages: Mapping[ShardOfStage, Stage], values: Mapping[ShardOfStage, Mapping[OwnedRun, Tensor]]
    ) -> dict[ShardOfStage, list[OwnedParameter]]:
        """By stage: what this rank trains there. Frees masters that other replicas have (`own_parameters`). `values`: of
        `build_stages`."""
        plan, rank = self.assignment.plan, self.transport.rank
        found = {}
        for (index, number), stage in stages.items():
            replica, runs, frozen = plan.role_in(rank, index).replica, None, None
            if self.ownership.divides(index, "optimizer"):
                runs = self.ownership.runs(index, number, replica)
            if self.ownership.divides(index, "parameter"):
                frozen = self.ownership.runs(index, number, replica, frozen=True)
            mine = found[index, number] = own_parameters(stage.weights, runs, frozen, values[index, number])
            if self.optimizer_files is not None:
                move_masters_to_files(mine, stage.weights, self.optimizer_files)
        return found

    def build_optimizers(
        self, owned: Mapping[ShardOfStage, Sequence[OwnedParameter]]
    ) -> dict[ShardOfStage, torch.optim.Optimizer]:
        """Stage -> optimizer of what this rank trains there; a stage without any has no optimizer."""
        with self.guard.watching(f"the optimizer {self.spec.optimizer.label}, as it was made,"):
            return {
                index: self._build_optimizer(*named_parameters(mine))
                for index, mine in owned.items()
                if any(each.parameter.requires_grad for each in mine)
            }

    def _build_optimizer(self, parameters: Mapping[str, nn.Parameter], names: Mapping[str, str]) -> torch.optim.Optimizer:
        if self.optimizer_files is None:
            return build_optimizers(self.spec.optimizer, parameters, names, self.spec.average)
        return build_offloaded_optimizers(self.spec.optimizer, parameters, self.optimizer_files, names, self.spec.average)

    def build_gather(
        self, stages: Mapping[ShardOfStage, Stage], owned: Mapping[ShardOfStage, Sequence[OwnedParameter]]
    ) -> ParameterGather:
        """What brings parameters from the replicas that own them, of the stages whose replicas divide state."""
        plan, rank = self.assignment.plan, self.transport.rank
        found, layers, gathered = dict[ShardOfStage, StageGather](), dict[ShardOfStage, LayerGather](), GatheredBytes()
        for (index, number), stage in stages.items():
            if not self.ownership.divides(index, "optimizer"):
                if plan.stages[index].replicas > 1 and not all(each.requires_grad for each in stage.parameters.values()):
                    check_parameters_stay(stage, are_divided=False, are_freed=False)
                continue
            place, divides_parameters = plan.stages[index], self.ownership.divides(index, "parameter")
            check_parameters_stay(stage, are_divided=True, are_freed=divides_parameters)
            all_runs = partial(self.ownership.owned_runs, index, number)
            runs = [(*all_runs(replica), *all_runs(replica, frozen=True)) for replica in range(place.replicas)]
            runs = [tuple(run for run in of_replica if run.name in stage.parameters) for of_replica in runs]
            if place.gather_in_effect in ("microbatch", "layer"):
                memory = TransientParameters(stage.weights, owned[index, number], gathered)
                layers[index, number] = self._build_layer_gather(index, number, stage, memory, runs)
                continue
            whole = GatheredMemory(stage.weights, owned[index, number]) if divides_parameters else None
            tensors = {run.name: stage.weights.computed_with(run.name) for of_replica in runs for run in of_replica}
            found[index, number] = StageGather(
                self.transport,
                plan.replica_ranks(index, plan.role_in(rank, index).shard),
                reduction_channel(plan, index, number),
                gather_rounds(tensors, runs),
                place.zero_holders,
                whole,
                is_stale=divides_parameters,
            )
        return ParameterGather(found, layers, gathered)

    def _build_layer_gather(
        self, index: int, number: int, stage: Stage, memory: TransientParameters, runs: Sequence[Sequence[OwnedRun]]
    ) -> LayerGather:
        """What brings parameters of a stage for each use. `runs`: by replica, those that it owns."""
        plan, place = self.assignment.plan, self.assignment.plan.stages[index]
        role, weights = plan.role_in(self.transport.rank, index), stage.weights
        group = plan.replica_ranks(index, role.shard)
        positions = range(len(weights.layer_names))
        named = [*(weights.of_layer(position).parameters for position in positions), tuple(weights.parameters)]
        dtypes = {name: weights.computed_with(name).dtype for name in weights.parameters}
        messages = [
            [cut_into_messages([run for run in own if run.name in names], dtypes) for names in map(frozenset, named)]
            for own in runs
        ]
        others = [replica for replica in range(place.replicas) if replica != role.replica]
        asked = [r for r in others if (role.replica - r) % place.replicas >= place.zero_holders]
        served = [r for r in others if (r - role.replica) % place.replicas >= place.zero_holders]
        requests = ParameterRequests(
            self.transport,
            group,
            reduction_channel(plan, index, number),
            asked=[{group[owner]: messages[owner][request] for owner in asked} for request in range(len(named))],
            served={group[reader]: messages[role.replica] for reader in served},
            owned=memory.owned,
            place=memory.place,
        )
        gather = LayerGather(
            memory,
            requests,
            [memory.come_and_go(names) for names in named],
            {"forward": positions, "recompute": stage.recomputation.positions, "backward": positions[::-1]},
            by_layer=place.gather_in_effect == "layer",
            what=f"the parameters of stage {index} from their owners",
            timeout_s=self.shard_timeout_s,
        )
        if gather.by_layer:
            weights.gathers = gather
            stage.hooks.when_left(gather.enter_backward)
        return gather

    def build_reductions(self, stages: Mapping[ShardOfStage, Stage]) -> dict[ShardOfStage, AnyGradientReduction]:
        """Stage -> reduction of gradients over the replicas."""
        plan, rank = self.assignment.plan, self.transport.rank
        kind = CanonicalReduction if self.spec.reduction == "canonical" else FastReduction
        found: dict[ShardOfStage, AnyGradientReduction] = {}
        for (index, number), stage in stages.items():
            if self.routing.scatters(index):
                found[index, number] = self._build_scatter(index, number, stage)
                continue
            stage.gradient_wait_ns = None
            found[index, number] = kind(
                self.transport,
                group=plan.replica_ranks(index, plan.role_in(rank, index).shard),
                runs=[self.routing.blocks_of_replica(index, r) for r in range(plan.stages[index].replicas)],
                block_count=self.spec.batching.blocks,
                parameters=[(use.shape, use.dtype) for use in stage.uses],
                channel=reduction_channel(plan, index, number),
                device=self.device,
                owners=self._owners_of_uses(index, number, stage),
                holders=plan.stages[index].zero_holders,
                pool_bytes=self._pool_bytes(index),
                keeps_gradients_of_others=not self.ownership.divides(index, "gradient"),
            )
        return found

    def _build_scatter(self, index: int, number: int, stage: Stage) -> ScatterReduction:
        """The reduction of a virtual shard of a stage whose gradients go to their owners microbatch by microbatch."""
        plan, rank = self.assignment.plan, self.transport.rank
        replicas, is_divided = range(plan.stages[index].replicas), plan.divides_state(index)
        holders = plan.stages[index].zero_holders if is_divided else 1
        kind = ScatterReduction if self.device == CPU else DeviceScatterReduction
        made = kind(
            self.transport,
            group=plan.replica_ranks(index, plan.role_in(rank, index).shard),
            replica_of=[self.routing.replica_for(index, m) for m in range(self.spec.batching.count)],
            steps=stack_steps(self.spec.batching),
            parameters=[(use.shape, use.dtype) for use in stage.uses],
            owners=[[held_runs(of, r, holders) for r in replicas] for of in self._runs_of_uses(index, number, stage)],
            gathers=not is_divided,
            channel=reduction_channel(plan, index, number),
            pool_bytes=self._pool_bytes(index),
            timeout_s=self.shard_timeout_s,
            device=self.device,
        )
        stage.gradient_wait_ns = lambda: made.waited_ns
        return made

    def _pool_bytes(self, index: int) -> int:
        """Memory for buckets of the gradients of one virtual shard of a stage here."""
        stage, role = self.assignment.plan.stages[index], self.assignment.plan.role_in(self.transport.rank, index)
        return self.spec.reduction_buffer_bytes // len(stage.run_of(role.shard))

    def _owners_of_uses(self, index: int, number: int, stage: Stage) -> list[list[list[tuple[int, int]]]]:
        """By use of a parameter: the runs that each replica owns, where gradients are reduced to these; empty if none are."""
        return self._runs_of_uses(index, number, stage) if self.assignment.plan.divides_state(index) else []

    def _runs_of_uses(self, index: int, number: int, stage: Stage) -> list[list[list[tuple[int, int]]]]:
        """By use of a parameter: the runs that each replica owns, or would own if replicas divided state."""
        plan = self.assignment.plan
        canonical = canonical_names(self.graph)
        of_name: dict[str, list[list[tuple[int, int]]]] = {}
        for replica in range(plan.stages[index].replicas):
            for name, start, stop in self.ownership.owned_runs(index, number, replica):
                of_name.setdefault(name, [[] for _ in range(plan.stages[index].replicas)])[replica].append((start, stop))
        nothing: list[list[tuple[int, int]]] = [[] for _ in range(plan.stages[index].replicas)]
        names = [canonical.get(use.name, use.name) for use in stage.uses]
        return [of_name.get(name, nothing) for name in names]

    def share_out_anew(self, stages: Mapping[ShardOfStage, Stage], step_commit: StepCommit) -> StepCommit:
        """The step commit of the same stages, whose replicas have other blocks from the next step on. Tensors and optimizers
        stay; the reductions, whose subtrees are others, are made anew."""
        for (index, _), stage in stages.items():
            stage.routing = self.routing
            replica = self.assignment.plan.role_in(self.transport.rank, index).replica
            stage.gradients.take_run(*run_of_blocks(self.routing, index, replica), scatters=self.routing.scatters(index))
        return replace(step_commit, routing=self.routing, reductions=self.build_reductions(stages))

    def build_step_commit(
        self,
        stages: Mapping[ShardOfStage, Stage],
        runs: Mapping[ShardOfStage, Mapping[OwnedRun, Tensor]],
        rates: LearningRates,
    ) -> StepCommit:
        """The `StepCommit` that ends the steps of these stages. `runs`: of `build_stages`. `rates`: the learning rates of all
        steps."""
        owned = self.own_parameters(stages, runs)
        return StepCommit(
            rank=self.transport.rank,
            graph=self.graph,
            routing=self.routing,
            ties=self.assignment.crossing.ties,
            stages=stages,
            reductions=self.build_reductions(stages),
            owned=owned,
            gather=self.build_gather(stages, owned),
            optimizers=self.build_optimizers(owned),
            transport=self.transport,
            spec=self.spec,
            rates=rates,
            ownership=self.ownership,
            guard=self.guard,
            seed_generators=make_seeder(self.device),
        )
