"""Runs the layers of a captured model in stages apart, with relayed gradients, beside the plain module under plain autograd."""

from __future__ import annotations

import itertools
from collections import OrderedDict
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_flatten, tree_unflatten

from raypar.comm.sent_tensor_layout import empty_message, layout_of, message_of, tensor_of_message
from raypar.model.capture.forward_inputs import ForwardInputs
from raypar.model.capture.module_graph import ModuleCaptureOptions, find_aliases, make_layers, trace_module, traces_of
from raypar.model.capture.sequential import capture_layer_graph
from raypar.model.capture.trace_cache import TraceCache
from raypar.model.graph import Layer
from raypar.model.layer_skeletons import make_skeletons
from raypar.plan.seeds import seed_of
from raypar.worker.stage.layer_tensors import alias_received


@dataclass
class Captured:
    """A captured model."""

    cache: TraceCache
    layers: list[Layer]
    ties: list[tuple[str, ...]]
    skeleton: nn.Module


def capture(model: nn.Module, batch: Mapping[str, Tensor], units: Sequence[str] = ()) -> Captured:
    """The layers of an unmodified module."""
    ((_, skeleton),) = make_skeletons([("", model)])
    inputs = ForwardInputs(keywords=tuple(batch))
    buffers = {name: buffer.clone() for name, buffer in model.named_buffers()}
    cache = trace_module(skeleton, buffers, batch, inputs, dtype=torch.float32, units=units)
    return Captured(cache, *make_layers(cache, skeleton), skeleton)


def capture_as_a_job(model: nn.Module, batch: Mapping[str, Tensor]) -> Captured:
    """The layers of an unmodified module, with all that a job refuses before it looks at the forward."""
    request = ModuleCaptureOptions(
        fields=lambda: tuple(batch), read=lambda names: {name: batch[name] for name in names}, dtype=torch.float32, target=""
    )
    graph = capture_layer_graph(model, input="", whole=request)
    cache = traces_of(graph)
    assert cache is not None and cache.skeleton is not None
    return Captured(cache, list(graph.layers), list(graph.ties), cache.skeleton)


@dataclass
class StageOfLayers:
    """Consecutive layers that share one autograd graph."""

    layers: Sequence[Layer]
    modules: list[nn.Module]
    uses: list[tuple[str, nn.Parameter]]
    """(canonical name, leaf) of every layer's use of a parameter, in layer order."""
    buffers: dict[str, Tensor]
    received: dict[str, Tensor | None] = field(default_factory=dict)
    """Received value -> its gradient, as autograd gave it."""
    values: dict[str, Tensor] = field(default_factory=dict)


def make_stages(captured: Captured, model: nn.Module, cuts: Sequence[int]) -> list[StageOfLayers]:
    """Stages that begin at these layers, with copies of the model's values: one of a parameter for each layer that uses it."""
    canonical = {name: names[0] for names in captured.ties for name in names}
    state = dict(model.named_parameters(remove_duplicate=False)) | dict(model.named_buffers(remove_duplicate=False))
    stages = []
    for first, last in itertools.pairwise([0, *cuts, len(captured.layers)]):
        layers = captured.layers[first:last]
        stage = StageOfLayers(layers, [layer.build() for layer in layers], [], {})
        for layer, module in zip(layers, stage.modules, strict=True):
            made: dict[int, Tensor] = {}
            for path, skeleton in (*module.named_parameters(), *module.named_buffers()):
                name = canonical.get(layer.qualify(path), layer.qualify(path))
                value = state[name].detach().clone()
                if isinstance(skeleton, nn.Parameter):
                    made[id(skeleton)] = own = nn.Parameter(value, requires_grad=skeleton.requires_grad)
                    stage.uses.append((name, own))
                else:
                    made[id(skeleton)] = stage.buffers.setdefault(name, value)
            for part in module.modules():
                for tensors in (part._parameters, part._buffers):
                    tensors.update({key: made[id(tensor)] for key, tensor in tensors.items() if tensor is not None})
        stages.append(stage)
    return stages


def seed_of_layer(name: str) -> int:
    """The seed of a layer's random numbers."""
    return seed_of(0, "forward", 0, 0, name)


def run_stages(
    captured: Captured,
    stages: Sequence[StageOfLayers],
    batch: Mapping[str, Tensor],
    loss: Callable[[Any], Tensor],
    *,
    seeded: bool,
) -> tuple[Tensor, Any, dict[str, Tensor]]:
    """(loss, output, gradients) of one microbatch, whose values and gradients pass from stage to stage as copies."""
    values: dict[str, Tensor] = {}
    for stage in stages:
        _forward(stage, values, batch, seeded=seeded)
    cut = captured.cache.trace_of(batch, training=True)
    last = stages[-1]
    names = iter(cut.outputs)
    leaves = [last.values[next(names)] if key in cut.trace.output_keys else key for key in cut.trace.output_leaves]
    output = tree_unflatten(leaves, cut.trace.output_structure)
    found = loss(output)
    relayed: dict[str, Tensor] = {}
    for stage in reversed(stages):
        roots = [(stage.values[name], relayed[name]) for name in stage.values if name in relayed]
        if stage is last:
            roots.append((found, torch.ones_like(found)))
        if roots:
            torch.autograd.backward([root for root, _ in roots], [gradient for _, gradient in roots])
        relayed |= {name: _copy(gradient) for name, gradient in stage.received.items() if gradient is not None}
    gradients: dict[str, Tensor] = {}
    for name, use in reversed([use for stage in stages for use in stage.uses]):
        if use.grad is not None:
            gradients[name] = use.grad if name not in gradients else gradients[name] + use.grad
    return found, output, gradients


def _forward(stage: StageOfLayers, values: dict[str, Tensor], batch: Mapping[str, Tensor], *, seeded: bool) -> None:
    """Run a stage's layers; adds copies of what they write to `values`."""
    stage.received, stage.values = {}, {}
    for _, use in stage.uses:
        use.grad = None
    written = {name for layer in stage.layers for name in layer.outputs}
    for layer, module in zip(stage.layers, stage.modules, strict=True):
        for name in layer.inputs:
            if name in batch:
                stage.values.setdefault(name, batch[name])
            elif name not in written and name not in stage.values:
                value = _copy(values[name])
                if value.requires_grad:
                    value = alias_received(value, OrderedDict({0: partial(stage.received.__setitem__, name)}))
                stage.values[name] = value
        if seeded:
            torch.manual_seed(seed_of_layer(layer.name))
        made = module(*(stage.values[name] for name in layer.inputs))
        stage.values |= dict(zip(layer.outputs, made if isinstance(made, tuple) else (made,), strict=True))
    values |= {name: stage.values[name] for name in written}


def evaluate_stages(captured: Captured, stages: Sequence[StageOfLayers], batch: Mapping[str, Tensor]) -> list[Tensor]:
    """The tensors in the output of one microbatch, without gradients. The modules are in evaluation mode."""
    values: dict[str, Tensor] = dict(batch)
    with torch.no_grad():
        for stage in stages:
            for layer, module in zip(stage.layers, stage.modules, strict=True):
                made = module(*(values[name] for name in layer.inputs))
                values |= dict(zip(layer.outputs, made if isinstance(made, tuple) else (made,), strict=True))
    return [values[name] for name in captured.cache.trace_of(batch, training=False).outputs]


def _copy(tensor: Tensor) -> Tensor:
    """A copy that lies in memory as the tensor does, strides 0 and those of dims of length 1 included, and requires a gradient
    if that does. Libraries choose kernels by strides."""
    layout = layout_of(tensor)
    if layout is None:
        return tensor.detach().clone().requires_grad_(tensor.requires_grad)
    message = empty_message(layout, tensor.dtype, _allocate).copy_(message_of(tensor.detach(), layout))
    return tensor_of_message(message, layout, _allocate).requires_grad_(tensor.requires_grad)


def _allocate(shape: Sequence[int], dtype: torch.dtype) -> Tensor:
    return torch.empty(tuple(shape), dtype=dtype)


def run_plain(
    captured: Captured, model: nn.Module, batch: Mapping[str, Tensor], loss: Callable[[Any], Tensor], *, seeded: bool
) -> tuple[Tensor, Any, dict[str, Tensor]]:
    """(loss, output, gradients) of the user's own module under plain autograd. Seeded: before each unit."""
    hooks = []
    if seeded:
        names = iter([program.name for program in captured.cache.first_trace.layers if program.unit is not None][1:])
        calls: list[nn.Module] = []  # units under way: one may be an argument of another
        started = [False]

        def seed(module: nn.Module, args: Any) -> None:
            if not calls and started[0]:
                torch.manual_seed(seed_of_layer(next(names)))
            started[0] = True
            calls.append(module)

        for unit in map(model.get_submodule, captured.cache.units):
            hooks.append(unit.register_forward_pre_hook(seed))
            hooks.append(
                unit.register_forward_hook(lambda *args: calls.clear() if args[0] is calls[0] else None, always_call=True)
            )
        torch.manual_seed(seed_of_layer(captured.layers[0].name))
    model.zero_grad()
    output = model(**{name: value.clone() for name, value in batch.items()})
    found = loss(output)
    found.backward()
    for hook in hooks:
        hook.remove()
    stored = {name: names[0] for names in captured.ties for name in names}
    stored |= dict(find_aliases(captured.skeleton, captured.layers, captured.ties))
    by_id = {id(p): stored.get(name, name) for name, p in model.named_parameters(remove_duplicate=False)}
    return found, output, {by_id[id(p)]: p.grad.clone() for p in model.parameters() if p.grad is not None}


def differences(one: tuple[Tensor, Any, dict[str, Tensor]], other: tuple[Tensor, Any, dict[str, Tensor]]) -> list[str]:
    """What is not bit for bit equal in two results."""
    found = [] if torch.equal(one[0], other[0]) else ["loss"]
    mine, theirs = ([t for t in tree_flatten(result[1])[0] if isinstance(t, Tensor)] for result in (one, other))
    if len(mine) != len(theirs) or not all(map(torch.equal, mine, theirs)):
        found.append("output")
    gradients, wanted = one[2], other[2]
    found += [f"gradient of {name}" for name in sorted(gradients.keys() ^ wanted.keys())]
    return found + [f"gradient of {n}" for n in gradients if n in wanted and not torch.equal(gradients[n], wanted[n])]
