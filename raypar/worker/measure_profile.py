"""Measures a job's layers and this machine's links, for the planner: each layer is run as the stage it could be."""

from __future__ import annotations

import os
import statistics
import threading
import time
from collections.abc import Callable, Collection, Mapping
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from raypar.comm.tcp.endpoint import TcpEndpoint
from raypar.comm.tcp.handshake import RunCredential
from raypar.comm.transport import Transport
from raypar.model.graph import Graph
from raypar.model.initial_values import initial_values_by_layer
from raypar.model.tensor_parallel.layout import make_model_outline_with_layouts
from raypar.plan import MicrobatchRouting, ParallelPlan
from raypar.plan.ownership import StateKind
from raypar.plan.state_bytes import StateBytes
from raypar.planner.model_profile import LayerProfile, LinkProfile, ModelProfile
from raypar.worker.job_spec import JobSpec
from raypar.worker.microbatch_loader import MicrobatchLoader, SampleOrder, make_dataset
from raypar.worker.process.torch_state_guard import TorchStateGuard
from raypar.worker.stage.loss_function import make_loss_function
from raypar.worker.stage.stage import Stage
from raypar.worker.stage_builder import build_stage, loss_target_name
from raypar.worker.step.optimizer import build_optimizer, optimizer_state
from raypar.worker.worker_assignments import make_layer_graph

REPEATS = 5
BUDGET_MS = 400.0
"""Of one layer: slow layers are timed fewer times, three at least."""
PING_BYTES = 8
BULK_BYTES = 4 << 20
LINK_TIMEOUT_S = 20.0


def profile_job(spec: JobSpec, *, workers: int, graph: Graph | None = None, shards: Collection[int] = ()) -> ModelProfile:
    """Measure what the planner needs to know of a job on this machine, with the first microbatch of the data set.

    `shards`: numbers of shards that a stage may have, for each of which the profile says what a shard holds
    (`make_model_outline_with_layouts`).

    `workers` share this machine's free memory and processors. One layer is held at a time, so that models larger than
    this process can be profiled.
    """
    guard = TorchStateGuard(spec.threads)  # its lines are not shown: workers run the same code, and show theirs
    guard.establish()
    with guard.watching("the job's code"):
        graph = graph if graph is not None else make_layer_graph(spec)
        layers, outputs, state = profile_layers(spec, graph, read_first_microbatch(spec, graph))
    link = profile_loopback()
    # The vote is one exchange of all with all, and the step ends with its answer.
    return ModelProfile(
        layers,
        link,
        free_memory_per_worker(workers),
        step_ms=2 * link.latency_ms,
        outputs=outputs,
        processors=max(1, count_usable_cpus() // spec.threads),
        state=StateBytes(make_model_outline_with_layouts(graph, shards, dict(spec.styles)), state),
    )


def read_first_microbatch(spec: JobSpec, graph: Graph) -> Mapping[str, Tensor]:
    """The fields of microbatch 0 of step 0, collated."""
    guard = TorchStateGuard(spec.threads)
    guard.establish()
    with guard.watching("the data set function"):
        dataset = make_dataset(spec.data)
    fields = tuple(dict.fromkeys([*graph.batch_fields, loss_target_name(spec)]))
    order = SampleOrder(spec.seed, len(dataset))
    loader = MicrobatchLoader(dataset, spec.data, order, spec.batching, seed=spec.seed, fields=fields, guard=guard)
    try:
        loader.prefetch(0, [0])
        return loader.get(0, 0)
    finally:
        loader.close()


BytesByTensor = dict[StateKind, dict[str, int]]
"""Kind of state -> parameter (canonical name) -> bytes."""


def profile_layers(
    spec: JobSpec, graph: Graph, batch: Mapping[str, Tensor]
) -> tuple[tuple[LayerProfile, ...], tuple[tuple[int, int, int], ...], BytesByTensor]:
    """Every layer's profile; (producer, consumer, bytes) of every value that passes between layers; what parameters take."""
    count = len(graph.layers)
    routing = MicrobatchRouting(ParallelPlan.mesh(pp=count), spec.batching)
    values: dict[str, Tensor] = {}
    sizes: dict[str, int] = {}
    found = []
    state: BytesByTensor = {"parameter": {}, "gradient": {}, "optimizer": {}}
    for index, held in enumerate(initial_values_by_layer(graph, spec.seed, getattr(torch, spec.dtype))):
        layer = graph.layers[index]
        received = {name: values[name] for name in dict.fromkeys(layer.inputs) if name in values}
        profile, outputs, of_layer = _profile_layer(spec, graph, routing, index, held, received, batch)
        found.append(profile)
        for kind, sizes_of_kind in of_layer.items():
            state[kind].update(sizes_of_kind)
        values.update(outputs)
        sizes.update((name, tensor_nbytes(value)) for name, value in outputs.items())
        values = {name: value for name, value in values.items() if max(graph.consumers(name), default=0) > index}
    pairs = [(graph.producer(name), c, size) for name, size in sizes.items() for c in graph.consumers(name)]
    return tuple(found), tuple((p, c, size) for p, c, size in pairs if p is not None), state


def _profile_layer(
    spec: JobSpec,
    graph: Graph,
    routing: MicrobatchRouting,
    index: int,
    held: Mapping[str, Tensor],
    received: Mapping[str, Tensor],
    batch: Mapping[str, Tensor],
) -> tuple[LayerProfile, Mapping[str, Tensor], BytesByTensor]:
    loss = make_loss_function(spec.loss)
    whole, split = (
        build_stage(graph, routing.plan, index, spec=spec, routing=routing, replica=0, loss_fn=loss, split=split, values=held)
        for split in (False, True)
    )
    whole.coordinate.is_profiling = split.coordinate.is_profiling = True
    fields = {name: batch[name] for name in whole.batch_fields}
    outputs = _forward(whole, received, fields)
    gradients = {name: [torch.randn_like(v) if v.is_floating_point() else None] for name, v in outputs.items()}

    forward_ms, backward_ms = measure_median_ms(lambda: _forward(whole, received, fields), lambda: whole.backward(0, gradients))
    _, input_ms, weight_ms = measure_median_ms(
        lambda: _forward(split, received, fields),
        lambda: split.backward_input(0, gradients),
        lambda: split.backward_weight(0),
    )
    optimizer_ms, optimizer_bytes = _profile_optimizer(spec, whole)
    state: BytesByTensor = {
        "parameter": {name: tensor_nbytes(p) for name, p in whole.parameters.items()},
        "gradient": {name: tensor_nbytes(p) for name, p in whole.parameters.items() if p.requires_grad},
        "optimizer": optimizer_bytes,
    }
    return (
        LayerProfile(
            name=graph.layers[index].name,
            forward_ms=forward_ms,
            backward_ms=backward_ms,
            input_ms=input_ms,
            weight_ms=weight_ms,
            activation_bytes=_kept_bytes(whole, received, fields),
            output_bytes=sum(map(tensor_nbytes, outputs.values())),
            parameter_bytes=sum(state["parameter"].values()),
            optimizer_bytes=sum(state["optimizer"].values()),
            optimizer_ms=optimizer_ms,
        ),
        outputs,
        state,
    )


def _forward(stage: Stage, received: Mapping[str, Tensor], fields: Mapping[str, Tensor]) -> dict[str, Tensor]:
    stage.begin_step(0)
    return stage.forward(0, received, fields)


def _kept_bytes(stage: Stage, received: Mapping[str, Tensor], fields: Mapping[str, Tensor]) -> int:
    """Bytes autograd keeps for one microbatch, each storage once, parameters aside."""
    parameters = {p.untyped_storage().data_ptr() for p in stage.parameters.values()}
    kept = {v.untyped_storage().data_ptr(): v.untyped_storage().nbytes() for v in received.values()}

    def keep(tensor: Tensor) -> Tensor:
        storage = tensor.untyped_storage()
        if storage.data_ptr() not in parameters:
            kept[storage.data_ptr()] = storage.nbytes()
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(keep, lambda tensor: tensor), stage.guard.accepting_contexts():
        _forward(stage, received, fields)
    return sum(kept.values())


def _profile_optimizer(spec: JobSpec, stage: Stage) -> tuple[float, dict[str, int]]:
    """Time of a step, and parameter -> bytes that the optimizer keeps for it."""
    trainable = {name: p for name, p in stage.parameters.items() if p.requires_grad}
    if not trainable:
        return 0.0, {}
    optimizer = build_optimizer(spec.optimizer, trainable)
    for parameter in trainable.values():
        parameter.grad = torch.zeros_like(parameter)
    (took,) = measure_median_ms(optimizer.step)
    state = optimizer_state(optimizer)
    return took, {n: sum(tensor_nbytes(v) for v in entry.values() if isinstance(v, Tensor)) for n, entry in state.items()}


def measure_median_ms(*calls: Callable[[], Any]) -> tuple[float, ...]:
    """Median time of each call in ms; the calls are made in turn, and the first round is not counted."""
    rounds: list[list[float]] = []
    while len(rounds) < 4 or (len(rounds) <= REPEATS and sum(map(sum, rounds)) < BUDGET_MS):
        took = []
        for call in calls:
            start = time.perf_counter_ns()
            call()
            took.append((time.perf_counter_ns() - start) / 1e6)
        rounds.append(took)
    return tuple(statistics.median(times) for times in zip(*rounds[1:], strict=True))


def tensor_nbytes(tensor: Tensor) -> int:
    """Bytes of a tensor's elements."""
    return tensor.numel() * tensor.element_size()


def free_memory_per_worker(workers: int) -> int | None:
    """What each of `workers` may use of this machine's free memory beside what a worker takes empty; None if unknown.

    More workers than two a processor are taken to be on several machines like this one.
    """
    try:
        info = dict(line.split(":") for line in Path("/proc/meminfo").read_text().splitlines())
        pages = int(Path("/proc/self/statm").read_text().split()[1])
    except (OSError, ValueError):
        return None
    free = int(info["MemAvailable"].split()[0]) * 1024
    return max(0, free // min(workers, 2 * count_usable_cpus()) - pages * os.sysconf("SC_PAGE_SIZE"))


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
