"""Measures a job's layers and this machine's links, for the planner: each layer is run as the stage it could be."""

from __future__ import annotations

import contextlib
import math
import os
import resource
import statistics
import tempfile
import threading
import time
import traceback
from collections.abc import Callable, Collection, Mapping, Sequence
from pathlib import Path
from typing import NamedTuple

import torch
from torch import Tensor

from raypar.comm.buffer_pool import CPU
from raypar.comm.local_transport import LocalMesh
from raypar.comm.tcp.endpoint import TcpEndpoint
from raypar.comm.tcp.handshake import RunCredential
from raypar.comm.transport import Transport
from raypar.comm.virtual_shards import VirtualShards
from raypar.errors import ConfigError, ModelError, RayparError, UserCodeError
from raypar.job import Job
from raypar.model.graph import Graph
from raypar.model.initial_values import initial_values_by_layer
from raypar.model.layer_skeletons import layers_that_write_buffers
from raypar.model.tensor_parallel.build_shard_modules import shard_slice_of
from raypar.model.tensor_parallel.compute_shard_layout import compute_shard_layout, make_model_outline_with_layouts
from raypar.model.tensor_parallel.shard_group import ShardGroup
from raypar.plan import Microbatches, MicrobatchRouting, ParallelPlan
from raypar.plan.offloading import HOST, resolve_offloaded_layers
from raypar.plan.ownership import StateKind
from raypar.plan.stage_plan import GATHERS_FROM
from raypar.plan.state_bytes import StateBytes
from raypar.plan.wording import count_noun
from raypar.planner.model_profile import ActivationEdge, KeptStorages, LayerProfile, LinkProfile, ModelProfile
from raypar.user_code.stop_signals import reraise_ctrl_c
from raypar.user_code.user_code_errors import USER_CODE_ERRORS, error_text
from raypar.worker.check_state_between_microbatches import check_layer_recomputes
from raypar.worker.count_time_steps import count_time_steps
from raypar.worker.data.check_and_count_streams import resolve_streams
from raypar.worker.data.microbatch_loader import MicrobatchLoader
from raypar.worker.data.padding import Padding
from raypar.worker.data.sample_order import SampleOrder
from raypar.worker.data.stream_loader import read_stream_microbatches
from raypar.worker.data.trial_batches_of_padded_lengths import lengthened
from raypar.worker.data.user_dataset import is_stream, make_dataset
from raypar.worker.kept_predictions import Prediction
from raypar.worker.layer_graph_of_job import make_layer_graph
from raypar.worker.layer_precisions import dtype_of_job, gradient_dtype_of, parameter_dtype_of
from raypar.worker.measure_kept_storages import (
    KeptStoragesMeasurement,
    forward_first_microbatch,
    kept_in_parts,
    random_gradients,
)
from raypar.worker.process.allocator_and_garbage_collector import freed_memory_kept
from raypar.worker.process.generators_in_turn import GeneratorsInTurn
from raypar.worker.process.thread_activity import thread_cpu_wait_s
from raypar.worker.process.torch_state_guard import TorchStateGuard
from raypar.worker.stage.loss import make_loss_function
from raypar.worker.stage.stage import HandedBack, Stage
from raypar.worker.stage.stage_in_virtual_shards import StageInVirtualShards
from raypar.worker.stage.stage_shard import StageShard
from raypar.worker.stage.whole_layers import WholeLayers
from raypar.worker.stage_builder import build_stage, share_whole_layers
from raypar.worker.step.optimizer_and_parameter_groups import build_optimizers
from raypar.worker.step.optimizer_state import read_optimizer_state

REPEATS = 5
BUDGET_MS = 400.0
"""Of one layer: slow layers are timed fewer times, three at least."""
PING_BYTES = 8
BULK_BYTES = 4 << 20
LINK_TIMEOUT_S = 20.0


def profile_job(
    spec: Job,
    *,
    workers: int,
    graph: Graph | None = None,
    shards: Collection[int] = (),
    recompute: Collection[int] | None = (),
) -> ModelProfile:
    """Measure what the planner needs to know of a job on this machine, with the first microbatch of the data set, padded to the
    largest length that `data.pad.to` has.

    `shards`: numbers of shards that a stage may have, for each of which the profile says what a shard holds
    (`make_model_outline_with_layouts`). `recompute`: indices of layers that the plan recomputes; raises `UserCodeError` for one
    that fails the check for recomputation. None: the planner may choose, so all layers are checked, and none is refused.

    Layers are timed with memory kept between them as workers keep it: mapped afresh, that of large values would cost more than
    many a layer (a 1 x 1 convolution of 27 MiB took twice its time).

    `workers` share this machine's free memory and processors; of a GPU's memory nothing is known here. One layer is held at a
    time, so that models larger than this process can be profiled.
    """
    guard = TorchStateGuard(spec.threads)  # its lines are not shown: workers run the same code, and show theirs
    guard.establish()
    with guard.watching("the job's code"):
        graph = graph if graph is not None else make_layer_graph(spec)
        batches = read_microbatches(spec, graph, one_microbatch_of_each_size(spec.batching))
        longest = largest_shapes(spec, batches)
        try:
            with freed_memory_kept():
                measured = profile_layers(spec, graph, longest, recompute)
        except (UserCodeError, ModelError) as error:
            raise _error_of_longest(spec, batches, longest, error) from error
    link = profile_loopback()
    # The vote is one exchange of all with all, and the step ends with its answer. Written buffers are exchanged before it.
    exchanges = 2 + bool(layers_that_write_buffers(graph))
    sequence, layout = spec.sequence_parallel, dict(spec.layout)
    outline = make_model_outline_with_layouts(graph, shards, dict(spec.styles), layout, sequence=sequence)
    return ModelProfile(
        measured.layers,
        link,
        spec.worker_memory_bytes or (free_memory_per_worker(workers) if spec.device == "cpu" else None),
        step_ms=exchanges * link.latency_ms,
        outputs=measured.outputs,
        processors=max(1, count_usable_cpus() // spec.threads),
        state=StateBytes(outline, measured.state, measured.copies),
        kept=measured.kept,
        recomputable=measured.recomputable,
        lengths=describe_largest_shape(spec),
        reduction_buffer_bytes=spec.reduction_buffer_bytes,
        mirror=spec.elastic.mirror_place if spec.elastic is not None else None,
        most_zero=GATHERS_FROM if spec.device == "cpu" else 2,  # gathered once a step, as on GPUs, stage 3 needs no less
        zero_is_open=spec.leaves_zero_open,
        scatter_is_open=spec.leaves_gradients_open,
        offloads_optimizer=spec.optimizer_in is not None,
        offload_bandwidth=_offload_bandwidth(spec),
        activations_place="FOLDER" if spec.device == "cpu" else HOST,
    )


HOST_BYTES_PER_MS = 12e6
"""What a GPU is taken to copy to pinned memory in a ms, or from it: PCIe 3.0 with 16 lanes. Nobody has measured it here."""


def _offload_bandwidth(spec: Job) -> float:
    """Bytes of activations that can be offloaded, or brought back, in a ms."""
    if spec.activations_folder is not None:
        return measure_file_bandwidth(spec.activations_folder)
    return math.inf if spec.activations_in is None else HOST_BYTES_PER_MS


def measure_file_bandwidth(folder: str, nbytes: int = 8 << 20) -> float:
    """Bytes that can be written to a folder, or read from it, in a ms, as the system does it: in memory, where there is room.
    Of a folder that there is not yet, that in which it would be made is measured; infinite where nothing can be written."""
    place = next((each for each in (Path(folder), *Path(folder).absolute().parents) if each.is_dir()), Path("/"))
    data, best_s = bytes(nbytes), math.inf
    with contextlib.suppress(OSError), tempfile.TemporaryFile(dir=place) as file:
        for _ in range(3):
            start = time.perf_counter()
            os.pwrite(file.fileno(), data, 0)
            os.pread(file.fileno(), nbytes, 0)
            best_s = min(best_s, time.perf_counter() - start)
    return 2 * nbytes / (1000 * best_s) if best_s < math.inf else math.inf


def one_microbatch_of_each_size(cut: Microbatches) -> list[int]:
    """The first microbatch, and the first one of another size, where there are two sizes."""
    return sorted({len(cut.samples(m)): m for m in reversed(range(cut.count))}.values())


def read_microbatches(spec: Job, graph: Graph, microbatches: Sequence[int]) -> list[Mapping[str, Tensor]]:
    """The fields of these microbatches of step 0, collated."""
    return read_microbatches_of_steps(spec, graph, [(0, microbatch) for microbatch in microbatches])


def read_microbatches_of_steps(spec: Job, graph: Graph, places: Sequence[tuple[int, int]]) -> list[Mapping[str, Tensor]]:
    """The fields of microbatches, each given as (step, microbatch), collated."""
    guard = TorchStateGuard(spec.threads)
    guard.establish()
    fields = tuple(dict.fromkeys([*graph.batch_fields, *spec.loss_fields]))
    with guard.watching("the data set function"):
        dataset = make_dataset(spec.data)
        if spec.data.streams is None and is_stream(dataset):  # `raypar plan`, which makes no other checks of the data
            spec = resolve_streams(spec).job
    if spec.data.streams is not None:
        return [batch.fields for batch in read_stream_microbatches(spec, fields, places, guard)]
    order = SampleOrder.of_job(spec, dataset, guard)
    loader = MicrobatchLoader(dataset, spec.training_data, order, spec.batching, seed=spec.seed, fields=fields, guard=guard)
    samples = sum(len(spec.batching.samples(microbatch)) for _, microbatch in places)
    what = f"{count_noun(samples, 'sample')} of {count_noun(len(places), 'microbatch', 'microbatches')}"
    try:
        return _load_before_run(loader, places, what)
    finally:
        loader.close()


def describe_largest_shape(spec: Job) -> str:
    """`ModelProfile.lengths` of a job."""
    pad, pack = spec.data.pad, spec.data.pack
    if pack is not None:
        return f"microbatches of {count_noun(pack.rows, 'row')} of length {pack.to:,}" if pack.rows else ""
    return f"microbatches of length {pad.to[-1]:,}" if pad is not None and pad.to else ""


def largest_shapes(spec: Job, batches: Sequence[Mapping[str, Tensor]]) -> list[Mapping[str, Tensor]]:
    """Batches with the largest shape that `data.pad.to` gives them."""
    data = spec.training_data
    if data.pad is None:
        return list(batches)
    assert data.target is not None, "Job.training_data names it"
    padding = Padding(data.pad, data.target, data.names)
    return [lengthened(batch, padding) for batch in batches]


def _error_of_longest(
    spec: Job, batches: Sequence[Mapping[str, Tensor]], longest: Sequence[Mapping[str, Tensor]], error: RayparError
) -> RayparError:
    """The error of layers that could not be measured; where the last length of `data.pad.to` is to blame, it says so."""
    longer = [name for name, value in longest[0].items() if value.shape != batches[0][name].shape]
    if not longer or spec.data.pad is None:
        return error
    return ConfigError(
        f"data.pad.to ends with {spec.data.pad.to[-1]:,}, and the model does not take a microbatch of this length "
        f"({', '.join(f'{name} {list(longest[0][name].shape)}' for name in longer)}): {error.what}",
        cure="end data.pad.to with a length that the model takes (of its positions, say), and cut or leave out longer samples "
        "in the data set",
    )


def _load_before_run(loader: MicrobatchLoader, places: Sequence[tuple[int, int]], what: str) -> list[Mapping[str, Tensor]]:
    """`what`: how many samples that are, in words, which the user is told if it takes long (`thread_activity.PURPOSES`)."""
    for step in dict.fromkeys(step for step, _ in places):
        loader.prefetch(step, [microbatch for each, microbatch in places if each == step])
    return [loader.get(step, microbatch) for step, microbatch in places]


BytesByTensor = dict[StateKind, dict[str, int]]
"""Kind of state -> parameter (canonical name) -> bytes."""


class MeasuredLayers(NamedTuple):
    """What was measured of a model's layers."""

    layers: tuple[LayerProfile, ...]
    """Every layer's profile."""
    outputs: tuple[ActivationEdge, ...]
    """Every value that passes between layers, once for each layer that reads it."""
    state: BytesByTensor
    """What parameters take."""
    copies: dict[str, int]
    """Parameter -> bytes of the copy in a lower precision that layers compute with, of parameters that have one."""
    kept: tuple[KeptStorages, ...]
    """What layers keep for the backward, for each size of microbatch."""
    recomputable: tuple[int, ...]
    """Indices of the layers that passed the check for recomputation."""


def profile_layers(
    spec: Job, graph: Graph, batches: Sequence[Mapping[str, Tensor]], recompute: Collection[int] | None = ()
) -> MeasuredLayers:
    """Measure every layer: its memory with each of the batches, its times with the first. `recompute`: see `profile_job`."""
    count = len(graph.layers)
    tried = range(count) if recompute is None else recompute
    routing = MicrobatchRouting(ParallelPlan.mesh(pp=count, recompute=tried), spec.batching)
    recomputable = []
    chains = [KeptStoragesMeasurement(graph, batch, offloaded_layers(spec, graph, tried)) for batch in batches]
    sizes: dict[str, int] = {}
    copies: dict[str, int] = {}
    found = []
    state: BytesByTensor = {"parameter": {}, "gradient": {}, "optimizer": {}}
    if parameter_dtype_of(spec.precision) is not None:
        state["master"] = {}
    if gradient_dtype_of(spec.precision) is not None:
        state["widened"] = {}
    for index, held in enumerate(initial_values_by_layer(graph, spec.seed, dtype_of_job(spec))):
        profile, outputs, of_layer, of_copies, may_recompute = _profile_layer(
            spec, graph, routing, index, held, chains, refuse=recompute is not None
        )
        copies |= of_copies
        recomputable += [index] if may_recompute else []
        found.append(profile)
        for kind, sizes_of_kind in of_layer.items():
            if sizes_of_kind:
                state.setdefault(kind, {}).update(sizes_of_kind)
        sizes.update((name, tensor_nbytes(value)) for name, value in outputs.items())
    producers = dict.fromkeys(graph.handed_on, 0) | {name: i for i, layer in enumerate(graph.layers) for name in layer.outputs}
    between = tuple(
        ActivationEdge(producers[name], consumer, size, name)
        for name, size in sizes.items()
        for consumer in dict.fromkeys(graph.reading_layers(name))
        if consumer != producers[name]
    )
    kept = tuple(chain.result() for chain in chains)
    return MeasuredLayers(tuple(found), between, state, copies, kept, tuple(recomputable))


def _profile_layer(
    spec: Job,
    graph: Graph,
    routing: MicrobatchRouting,
    index: int,
    held: Mapping[str, Tensor],
    chains: Sequence[KeptStoragesMeasurement],
    *,
    refuse: bool,
) -> tuple[LayerProfile, Mapping[str, Tensor], BytesByTensor, dict[str, int], bool]:
    """What was measured of one layer and its tensors, and whether it may be recomputed. `refuse`: raise if it may not."""
    loss = make_loss_function(spec.loss)
    whole, split = (
        build_stage(graph, routing.plan, index, spec=spec, routing=routing, replica=0, loss_fn=loss, split=split, values=held)
        for split in (False, True)
    )
    whole.coordinate.is_profiling = split.coordinate.is_profiling = True
    received, fields = chains[0].inputs(whole)
    may_recompute = _may_recompute(graph.layers[index].name, whole, received, fields, refuse=refuse)
    outputs, *_ = [chain.measure(index, whole, split) for chain in chains]
    gradients = random_gradients(outputs)

    forward_ms, backward_ms = measure_median_ms(
        lambda: forward_first_microbatch(whole, received, fields), lambda: whole.backward(0, gradients)
    )
    _, input_ms, weight_ms = measure_median_ms(
        lambda: forward_first_microbatch(split, received, fields),
        lambda: split.backward_input(0, gradients),
        lambda: split.backward_weight(0),
    )
    in_parts_ms, in_parts_keep = None, None
    if spec.virtual_shards > 1 and not isinstance(spec.loss.function, Prediction):  # that one reads whole outputs
        parts = layer_in_parts(spec, graph, routing, index, held)
        in_parts_ms, in_parts_keep = forward_ms + backward_ms, 1.0
        if len(parts.shards) > 1:
            in_parts_ms = _time_in_parts(parts, received, fields, gradients)
            in_parts_keep = kept_in_parts(whole, parts, received, fields)
    optimizer_ms, state, copies = _profile_state(spec, whole)
    return (
        LayerProfile(
            name=graph.layers[index].name,
            forward_ms=forward_ms,
            backward_ms=backward_ms,
            input_ms=input_ms,
            weight_ms=weight_ms,
            activation_bytes=chains[0].activation_bytes(index),
            output_bytes=sum(map(tensor_nbytes, outputs.values())),
            parameter_bytes=sum(state.get("master", state["parameter"]).values()),
            gradient_bytes=sum(state["gradient"].values()) if "widened" in state else None,
            optimizer_bytes=sum(state["optimizer"].values()),
            optimizer_ms=optimizer_ms,
            in_parts_ms=in_parts_ms,
            in_parts_keep=in_parts_keep,
            time_steps=_time_steps(whole, received, fields, gradients),
        ),
        outputs,
        state,
        copies,
        may_recompute,
    )


def _time_in_parts(
    parts: StageInVirtualShards,
    received: Mapping[str, Tensor],
    fields: Mapping[str, Tensor],
    gradients: Mapping[str, Tensor | None],
) -> float:
    """Milliseconds that forward and backward of all virtual shards of a layer take, without the threads that these begin: a
    stage begins them once for all of its layers."""
    forward_ms, backward_ms, turns_ms = measure_median_ms(
        lambda: forward_first_microbatch(parts, received, fields),
        lambda: parts.backward(0, gradients),
        parts.do_nothing,
        in_turn=True,
    )
    return max(0.0, forward_ms - turns_ms) + max(0.0, backward_ms - turns_ms)


def _time_steps(
    stage: Stage, received: Mapping[str, Tensor], fields: Mapping[str, Tensor], gradients: Mapping[str, Tensor | None]
) -> int:
    """Time steps of the recurrent modules of a layer in one microbatch."""

    def run() -> None:
        forward_first_microbatch(stage, received, fields)
        stage.backward(0, gradients)

    return count_time_steps(stage.weights.modules.values(), run)


def layer_in_parts(
    spec: Job, graph: Graph, routing: MicrobatchRouting, index: int, held: Mapping[str, Tensor]
) -> StageInVirtualShards:
    """All virtual shards of one layer that compute anything, on one worker. `held`: its whole tensors."""
    count, loss = spec.virtual_shards, make_loss_function(spec.loss)
    layout = compute_shard_layout(graph, count, dict(spec.styles), dict(spec.layout))
    together = VirtualShards(LocalMesh(1).transports[0], [0], [range(count)])
    generators = GeneratorsInTurn(CPU)
    parts: list[Stage] = []
    whole: WholeLayers | None = None
    for number in range(count):
        group = ShardGroup(together.member(number), range(count), sequence_parallel=spec.sequence_parallel)
        slices = {name: shard_slice_of(layout, name, whole, number) for name, whole in held.items()}
        parts.append(
            build_stage(
                graph,
                routing.plan,
                index,
                spec=spec,
                routing=routing,
                replica=0,
                loss_fn=loss,
                values=slices,
                shard=StageShard(group, layout),
                in_turn=generators,
                takes=whole,
            )
        )
        parts[-1].coordinate.is_profiling = True
        if number == 0:
            whole = share_whole_layers(parts[0], count - 1)
    return StageInVirtualShards([part for part in parts if not part.has_no_layers], generators, None)


def _profile_state(spec: Job, stage: Stage) -> tuple[float, BytesByTensor, dict[str, int]]:
    """Time of the optimizer's step, what the state of a stage takes, and what copies in a lower precision take."""
    optimizer_ms, optimizer_bytes = _profile_optimizer(spec, stage)
    copies = {name: tensor_nbytes(copy) for name, copy in stage.weights.rounded.items()}
    return optimizer_ms, _state_bytes(spec, stage, optimizer_bytes), copies


def _state_bytes(spec: Job, stage: Stage, optimizer: dict[str, int]) -> BytesByTensor:
    """What the parameters of a stage take. `optimizer`: parameter -> bytes that the optimizer keeps for it."""
    trained = {name: tensor_nbytes(p) for name, p in stage.parameters.items() if p.requires_grad}
    parameters = {name: tensor_nbytes(p) for name, p in stage.parameters.items()}
    more: BytesByTensor = {"buffer": {name: tensor_nbytes(buffer) for name, buffer in stage.buffers.items()}}
    if spec.average is not None:
        more["average"] = trained
    if parameter_dtype_of(spec.precision) is None:
        return {"parameter": parameters, "gradient": trained, "optimizer": optimizer, **more}
    copies = {name: tensor_nbytes(copy) for name, copy in stage.weights.rounded.items()}
    masters = {name: nbytes for name, nbytes in trained.items() if name in copies}  # a frozen one is counted with its copy
    parameters = {name: nbytes + copies.get(name, 0) - masters.get(name, 0) for name, nbytes in parameters.items()}
    found: BytesByTensor = {"parameter": parameters, "master": masters, "gradient": trained, "optimizer": optimizer, **more}
    if gradient_dtype_of(spec.precision) is not None:
        found["gradient"] = {name: copies.get(name, nbytes) for name, nbytes in trained.items()}
        found["widened"] = {name: nbytes - copies[name] for name, nbytes in masters.items()}
    return found


def offloaded_layers(spec: Job, graph: Graph, recomputed: Collection[int]) -> tuple[int, ...]:
    """Indices of the layers that the job offloads: where it names none, all that are not among `recomputed`."""
    return resolve_offloaded_layers(spec.offload, [layer.name for layer in graph.layers], recomputed)


def _may_recompute(
    name: str, stage: Stage, received: Mapping[str, Tensor], fields: Mapping[str, Tensor], *, refuse: bool
) -> bool:
    """Whether the layer of a stage of its own may be recomputed; with `refuse` its error is raised if it may not."""
    if not stage.recomputation.positions:
        return False
    try:
        check_layer_recomputes(name, stage, received, fields)
    except UserCodeError:
        if refuse:
            raise
        stage.begin_step(0)
        return False
    return True


def _profile_optimizer(spec: Job, stage: Stage) -> tuple[float, dict[str, int]]:
    """Time of a step, and parameter -> bytes that the optimizer keeps for it."""
    trainable = {name: p for name, p in stage.parameters.items() if p.requires_grad}
    if not trainable:
        return 0.0, {}
    optimizer = build_optimizers(spec.optimizer, trainable)
    for parameter in trainable.values():
        parameter.grad = torch.zeros_like(parameter)
    try:
        (took,) = measure_median_ms(optimizer.step)
    except RayparError:
        raise
    except USER_CODE_ERRORS as error:
        reraise_ctrl_c(error)
        raise UserCodeError(
            f"the step of optimizer {spec.optimizer.label}, with gradients of 0, raised {error_text(error)}\n"
            f"{traceback.format_exc()}",
            cure="the last lines of the traceback are where your code, or what it called, raised",
        ) from error
    state = read_optimizer_state(optimizer).parameters
    return took, {n: sum(tensor_nbytes(v) for v in entry.values() if isinstance(v, Tensor)) for n, entry in state.items()}


def measure_median_ms(
    *calls: Callable[[], Mapping[str, Tensor] | Mapping[str, HandedBack] | None], in_turn: bool = False
) -> tuple[float, ...]:
    """Median time of each call in ms; the calls are made in turn, and the first round is not counted.

    Time in which this thread waited for a processor is not counted either, or layers would differ by what else runs here.
    `in_turn`: the calls run in threads that take turns; where torch has one thread, the process's processor time is measured.
    """
    thread, of_processor = threading.get_native_id(), in_turn and torch.get_num_threads() == 1
    rounds: list[list[float]] = []
    spent_ms = 0.0
    while len(rounds) < 4 or (len(rounds) <= REPEATS and spent_ms < BUDGET_MS):
        took = []
        for call in calls:
            waited_s, busy_ns, start = thread_cpu_wait_s(thread), time.process_time_ns(), time.perf_counter_ns()
            call()
            passed_ms = (time.perf_counter_ns() - start) / 1e6
            spent_ms += passed_ms
            passed_ms = (time.process_time_ns() - busy_ns) / 1e6 if of_processor else passed_ms
            waited_ms = 0.0 if of_processor else 1000 * (thread_cpu_wait_s(thread) - waited_s)
            took.append(max(0.0, passed_ms - waited_ms))
        rounds.append(took)
    return tuple(statistics.median(times) for times in zip(*rounds[1:], strict=True))


def tensor_nbytes(tensor: Tensor) -> int:
    """Bytes of a tensor's elements."""
    return tensor.numel() * tensor.element_size()


def free_memory_per_worker(workers: int) -> int | None:
    """What each of `workers` may use of this machine's free memory beside what a worker takes empty; None if unknown.

    More workers than two a processor are taken to be on several machines like this one. A container's limit counts (cgroup
    version 2), and so do limits of a process (`ulimit -d`, `ulimit -v`), which workers of a local cluster inherit.
    """
    try:
        info = dict(line.split(":") for line in Path("/proc/meminfo").read_text().splitlines())
        pages = [int(number) * os.sysconf("SC_PAGE_SIZE") for number in Path("/proc/self/statm").read_text().split()]
    except (OSError, ValueError):
        return None
    free = int(info["MemAvailable"].split()[0]) * 1024
    with contextlib.suppress(OSError, ValueError, KeyError):  # "max" where there is no limit
        limit, used = (int(Path(f"/sys/fs/cgroup/memory.{name}").read_text()) for name in ("max", "current"))
        stat = dict(line.split() for line in Path("/sys/fs/cgroup/memory.stat").read_text().splitlines())
        free = min(free, limit - used + int(stat["inactive_file"]))  # files that were read make room for others
    size, resident, data = pages[0], pages[1], pages[5]
    found = free // min(workers, 2 * count_usable_cpus()) - resident
    for which, used in ((resource.RLIMIT_AS, size), (resource.RLIMIT_DATA, data)):
        if (limit := resource.getrlimit(which)[0]) != resource.RLIM_INFINITY:
            found = min(found, limit - used)
    return max(0, found)


def count_usable_cpus() -> int:
    """Number of processors that this process may use."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


def profile_loopback() -> LinkProfile:
    """Measure latency and bandwidth of the TCP transport between two workers of this machine."""
    credential = RunCredential.fresh("profile")
    endpoints = [TcpEndpoint.listen(credential=credential) for _ in range(2)]
    addresses = [endpoint.address for endpoint in endpoints]

    def connect(rank: int) -> Transport:
        return endpoints[rank].connect(rank=rank, size=2, addresses=addresses, generation=0, deadline_s=LINK_TIMEOUT_S)

    found: list[LinkProfile] = []
    failed: list[Exception] = []

    def side(rank: int) -> None:
        try:
            transport = connect(rank)
            try:
                link = profile_link(transport, peer=1 - rank)
                if rank == 0:
                    found.append(link)
            finally:
                transport.close()
        except Exception as error:
            failed.append(error)

    threads = [threading.Thread(target=side, args=(rank,), daemon=True) for rank in range(2)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(2 * LINK_TIMEOUT_S)
    for endpoint in endpoints:
        endpoint.close()
    if failed:
        raise failed[0]
    return found[0]


def profile_link(transport: Transport, *, peer: int) -> LinkProfile:
    """Measure latency and bandwidth to `peer`, which has to call this too. One-way times are half of those there and back."""
    small = _one_way_ms(transport, peer, PING_BYTES, 40)
    bulk = _one_way_ms(transport, peer, BULK_BYTES, 6)
    return LinkProfile(small, BULK_BYTES / max(bulk - small, 1e-6))


def _one_way_ms(transport: Transport, peer: int, size: int, times: int) -> float:
    payload = torch.zeros(size, dtype=torch.uint8)
    took: list[float] = []
    for number in range(times + 2):
        start = time.perf_counter_ns()
        for leads in (transport.rank < peer, transport.rank > peer):
            if leads:
                transport.send(payload, to=peer, tag=number).wait(LINK_TIMEOUT_S)
            else:
                transport.recv(None, source=peer, tag=number).wait(LINK_TIMEOUT_S)
        took.append((time.perf_counter_ns() - start) / 2e6)
    return statistics.median(took[2:])
