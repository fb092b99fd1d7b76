"""Runs a model whole and on shards, in one process, and compares what comes out."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from raypar.comm.blocking_code_as_routine import as_routine
from raypar.comm.cooperative_scheduler import CooperativeScheduler
from raypar.comm.local_transport import LocalMesh
from raypar.comm.transport import CommunicationLedger
from raypar.model.capture.sequential import capture_layer_graph
from raypar.model.graph import Graph
from raypar.model.layer_skeletons import canonical_names
from raypar.model.materialise import materialise
from raypar.model.tensor_parallel.build_shard_modules import materialise_shard, shard_slice_of, sharded_loss
from raypar.model.tensor_parallel.compute_shard_layout import compute_shard_layout
from raypar.model.tensor_parallel.shard_group import ShardGroup
from raypar.plan.tensor_parallel_layout import TensorParallelLayout
from raypar.worker.stage.sum_gradients_over_shards import sum_partial_gradients

TOLERANCE = 1e-12
"""max error / max value of a tensor, float64."""
CANCELLED = 1e-9
"""What is smaller than so much of what was summed is what rounding has left of a sum that cancels."""
SEED = 11


def graph_of(make: Callable[[], Any], *, ties: tuple[tuple[str, ...], ...] = ()) -> Graph:
    """The model function's layers, with the values it gives them under one seed."""
    torch.manual_seed(SEED)
    graph = capture_layer_graph(make(), input="x")
    return replace(graph, ties=ties or graph.ties)


def on_shards(
    shards: int, work: Callable[[ShardGroup], Any], *, sequence: bool = False, seed: int | None = None
) -> tuple[list[Any], list[CommunicationLedger]]:
    """`work(group)` on every shard, interleaved in one thread at a time; results and ledgers by shard."""
    torch.set_num_threads(1)
    mesh = LocalMesh(shards)
    groups = [ShardGroup(transport, range(shards), sequence_parallel=sequence) for transport in mesh.transports]
    results = CooperativeScheduler(seed).run([as_routine(partial(work, group)) for group in groups], mesh)
    return results, [transport.ledger for transport in mesh.transports]


@dataclass
class Run:
    """Outputs and gradients, of the whole or of one shard. `gradients`: canonical name -> gradient, summed over ties."""

    loss: Tensor
    inputs: Tensor | None
    parameters: dict[str, Tensor]
    gradients: dict[str, Tensor | None]
    partial: set[str]


def partial_names(modules: Mapping[str, nn.Module], group: ShardGroup, canonical: Mapping[str, str]) -> set[str]:
    """Canonical names of the parameters in `group.partially_used_parameters`."""
    return {
        canonical.get(f"{layer}.{path}", f"{layer}.{path}")
        for layer, module in modules.items()
        for path, parameter in module.named_parameters()
        if id(parameter) in group.partially_used_parameters
    }


def train_once(
    graph: Graph, modules: Mapping[str, nn.Module], loss: Callable[..., Any], x: Tensor, y: Tensor, *, seed: int = SEED
) -> Run:
    """Forward and backward of one batch. Layers are seeded as a stage does it."""
    if x.is_floating_point():
        x = x.detach().clone().requires_grad_()
    value = x
    for number, layer in enumerate(graph.layers):
        torch.manual_seed(seed + number)
        value = modules[layer.name](value)
    found = loss(value, y)
    total = found[0] if isinstance(found, tuple) else found
    total.backward()
    canonical = canonical_names(graph)
    parameters: dict[str, Tensor] = {}
    gradients: dict[str, Tensor | None] = {}
    for layer in graph.layers:
        for path, parameter in modules[layer.name].named_parameters():
            name = canonical.get(f"{layer.name}.{path}", f"{layer.name}.{path}")
            before, gradient = gradients.get(name), parameter.grad
            parameters.setdefault(name, parameter.detach())
            gradients[name] = before if gradient is None else gradient if before is None else before + gradient
    return Run(total.detach(), x.grad, parameters, gradients, set())


def whole(graph: Graph, loss: Callable[..., Any], x: Tensor, y: Tensor, *, dtype: torch.dtype = torch.float64) -> Run:
    """In one process, without shards."""
    torch.set_num_threads(1)
    modules = materialise(graph, 0, len(graph.layers), seed=SEED, dtype=dtype)
    return train_once(graph, modules, loss, x, y)


def sharded(
    graph: Graph,
    layout: TensorParallelLayout,
    loss: Callable[..., Any],
    x: Tensor,
    y: Tensor,
    *,
    sequence: bool = False,
    dtype: torch.dtype = torch.float64,
    seed: int | None = None,
) -> tuple[list[Run], list[CommunicationLedger]]:
    """On every shard; partial gradients completed."""

    def work(group: ShardGroup) -> Run:
        modules = materialise_shard(graph, 0, len(graph.layers), layout=layout, group=group, seed=SEED, dtype=dtype)
        run = train_once(graph, modules, sharded_loss(loss, group, graph.loss_inputs), x, y)
        run.partial = partial_names(modules, group, canonical_names(graph))
        return run

    found, ledgers = on_shards(layout.shards, work, sequence=sequence, seed=seed)
    mesh = LocalMesh(layout.shards)
    groups = [ShardGroup(t, range(layout.shards), sequence_parallel=sequence) for t in mesh.transports]
    jobs = [
        sum_partial_gradients(r.gradients, partial=r.partial, cuts=layout.cuts, group=g)
        for r, g in zip(found, groups, strict=True)
    ]
    CooperativeScheduler().run(jobs, mesh)
    return found, ledgers


def error(got: Tensor, want: Tensor, summed: float = 0.0) -> float:
    """max error / max value; where all values have cancelled, / `summed`: how large what was summed is."""
    assert got.shape == want.shape, (got.shape, want.shape)
    if not want.numel():
        return 0.0
    top = want.abs().max().item()
    return (got - want).abs().max().item() / ((summed if top < CANCELLED * summed else top) or 1.0)


def summed_in_layers(gradients: Mapping[str, Tensor | None]) -> dict[str, float]:
    """By name: the largest value of all gradients of its layer, which are sums of the same things.

    The query of a single position, for example, has a gradient of zero: a difference of two sums that differ by rounding,
    which is another one on another processor, is as large as these sums make it.
    """
    tops = {name: g.abs().max().item() for name, g in gradients.items() if g is not None and g.numel()}
    layers: dict[str, float] = {}
    for name, top in tops.items():
        layer = name.partition(".")[0]
        layers[layer] = max(layers.get(layer, 0.0), top)
    return {name: layers[name.partition(".")[0]] for name in tops}


def errors(runs: list[Run], want: Run, layout: TensorParallelLayout) -> dict[str, float]:
    """The largest error of every tensor over shards; parameters must be slices of the whole ones, bit for bit."""
    worst: dict[str, float] = {}
    summed = summed_in_layers(want.gradients)

    def note(name: str, got: Tensor | None, wanted: Tensor | None) -> None:
        assert (got is None) == (wanted is None), name
        if got is not None and wanted is not None:
            worst[name] = max(worst.get(name, 0.0), error(got, wanted, summed.get(name, 0.0)))

    for shard, run in enumerate(runs):
        note("loss", run.loss, want.loss)
        note("inputs", run.inputs, want.inputs)
        assert list(run.gradients) == list(want.gradients)
        for name, gradient in want.gradients.items():
            assert torch.equal(run.parameters[name], shard_slice_of(layout, name, want.parameters[name], shard)), name
            note(name, run.gradients[name], None if gradient is None else shard_slice_of(layout, name, gradient, shard))
    return worst


def check(
    make: Callable[[], Any],
    loss: Callable[..., Any],
    x: Tensor,
    y: Tensor,
    shards: int,
    *,
    styles: Mapping[str, str] | None = None,
    sequence: bool = False,
    ties: tuple[tuple[str, ...], ...] = (),
) -> tuple[list[Run], list[CommunicationLedger]]:
    """Whole against sharded within `TOLERANCE`; all shards agree on what they hold together."""
    graph = graph_of(make, ties=ties)
    layout = compute_shard_layout(graph, shards, styles)
    runs, ledgers = sharded(graph, layout, loss, x, y, sequence=sequence)
    found = errors(runs, whole(graph, loss, x, y), layout)
    wrong = {name: value for name, value in found.items() if not value <= TOLERANCE}
    assert not wrong, wrong
    for run in runs[1:]:
        assert torch.equal(run.loss, runs[0].loss)
        for name, gradient in run.gradients.items():
            if name not in layout.cuts and gradient is not None:
                assert torch.equal(gradient, runs[0].gradients[name]), name
    return runs, ledgers
