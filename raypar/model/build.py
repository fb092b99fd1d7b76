"""Makes the modules of one stage, never of the whole model: parameters one at a time, initialised by name (rule 2)."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from raypar.errors import ModelError
from raypar.model.graph import Graph, Layer
from raypar.plan import Outline
from raypar.plan.seeds import seed_of

_RUNNING_STATISTICS = (nn.modules.batchnorm._NormBase,)
"""Batch and instance norms."""


@dataclass(frozen=True, slots=True)
class LayerSize:
    """A layer without its values: number of parameters and their bytes in the job's dtype (ties counted at their first use)."""

    name: str
    parameters: int
    nbytes: int


def canonical_names(graph: Graph) -> dict[str, str]:
    """Every tied name -> the first name of its tie."""
    return {name: names[0] for names in graph.ties for name in names}


def on_meta(layer: Layer) -> nn.Module:
    """The layer's module without values. Raises `ModelError` for what writes state in forward or has sparse gradients."""
    with torch.device("meta"):
        module = layer.build()
    for path, part in module.named_modules():
        name = f"{layer.name}.{path}" if path else layer.name
        if isinstance(part, _RUNNING_STATISTICS) and part.track_running_stats:
            raise ModelError(
                f"{name} is a {type(part).__name__} with running statistics, which forward would change",
                cure="use LayerNorm or GroupNorm, or track_running_stats=False",
            )
        if isinstance(part, (nn.Embedding, nn.EmbeddingBag)):
            if part.max_norm is not None:
                raise ModelError(
                    f"{name} is a {type(part).__name__} with max_norm, which forward would apply to its weight",
                    cure="leave max_norm out, or normalise the vectors that the layer returns",
                )
            if part.sparse:
                raise ModelError(
                    f"{name} is a {type(part).__name__} with sparse gradients, which cannot be summed over replicas",
                    cure="leave sparse=True out",
                )
    return module


def describe(graph: Graph, dtype: torch.dtype = torch.float32) -> tuple[LayerSize, ...]:
    """Size of every layer, without making one."""
    canonical, counted = canonical_names(graph), set[str]()
    sizes = []
    for layer in graph.layers:
        count = 0
        for path, parameter in on_meta(layer).named_parameters():
            name = canonical.get(f"{layer.name}.{path}", f"{layer.name}.{path}")
            if name not in counted:
                counted.add(name)
                count += parameter.numel()
        sizes.append(LayerSize(layer.name, count, count * dtype.itemsize))
    return tuple(sizes)


def parameter_shapes(graph: Graph, first: int = 0, last: int | None = None) -> dict[str, torch.Size]:
    """Canonical parameter name -> shape, for layers [first, last), in layer order."""
    canonical = canonical_names(graph)
    shapes: dict[str, torch.Size] = {}
    for layer in graph.layers[first:last]:
        for path, parameter in on_meta(layer).named_parameters():
            shapes.setdefault(canonical.get(f"{layer.name}.{path}", f"{layer.name}.{path}"), parameter.shape)
    return shapes


def elements_by_layer(graph: Graph) -> tuple[dict[str, int], ...]:
    """By layer: canonical parameter name -> number of elements."""
    count = len(graph.layers)
    return tuple({name: shape.numel() for name, shape in parameter_shapes(graph, i, i + 1).items()} for i in range(count))


def outline_of(graph: Graph) -> Outline:
    """The graph without the model."""
    return Outline(tuple((x.name, x.inputs, x.outputs) for x in graph.layers), graph.ties, elements_by_layer(graph))


def materialise(
    graph: Graph, first: int, last: int, *, seed: int, dtype: torch.dtype, values: Mapping[str, Tensor] | None = None
) -> dict[str, nn.Module]:
    """Layer name -> module on the CPU, in `dtype`, initialised by name. Tied uses inside the range hold equal values.

    A parameter whose first name lies outside the range is initialised as its first use would be. With `values` (canonical
    name -> tensor, of every parameter) nothing is initialised and nothing copied: the tensors given become the parameters.
    """
    canonical = canonical_names(graph)
    modules: dict[str, nn.Module] = {}
    for layer in graph.layers[first:last]:
        modules[layer.name] = _build(graph, layer, seed=seed, dtype=dtype, values=values)
    if values is not None:
        return modules
    for layer in graph.layers[first:last]:
        for path, parameter in list(modules[layer.name].named_parameters()):
            name = f"{layer.name}.{path}"
            source = canonical.get(name, name)
            if source != name:
                owner = graph.layer_of(source)
                if owner not in modules:
                    home = next(other for other in graph.layers if other.name == owner)
                    values = _build(graph, home, seed=seed, dtype=dtype).get_parameter(source[len(owner) + 1 :])
                else:
                    values = modules[owner].get_parameter(source[len(owner) + 1 :])
                with torch.no_grad():
                    parameter.copy_(values)
    return modules


def _build(
    graph: Graph, layer: Layer, *, seed: int, dtype: torch.dtype, values: Mapping[str, Tensor] | None = None
) -> nn.Module:
    module = on_meta(layer)
    given = values
    canonical = canonical_names(graph)
    names = {id(p): canonical.get(f"{layer.name}.{path}", f"{layer.name}.{path}") for path, p in module.named_parameters()}
    if any(b.is_meta for b in module.buffers()):
        buffers = dict(layer.build().named_buffers())
        if any(b.is_meta for b in buffers.values()):
            raise ModelError(
                f"layer {layer.name!r} has buffers without values",
                cure="build must make real buffers when it is called outside torch.device('meta')",
            )
    else:
        buffers = dict(module.named_buffers())
    made: dict[int, nn.Parameter] = {}  # a parameter used at two places of one layer stays one
    for _, part in module.named_modules():
        for key, parameter in list(part._parameters.items()):
            if parameter is None:
                continue
            if id(parameter) not in made and given is not None:
                made[id(parameter)] = nn.Parameter(given[names[id(parameter)]], requires_grad=parameter.requires_grad)
            if id(parameter) not in made:
                kind = dtype if parameter.is_floating_point() else parameter.dtype
                fresh = torch.empty(parameter.shape, dtype=kind)
                if fresh.is_floating_point():
                    fresh.fill_(math.nan)  # what nobody initialises is found, instead of being whatever the memory held
                made[id(parameter)] = nn.Parameter(fresh, requires_grad=parameter.requires_grad)
            part._parameters[key] = made[id(parameter)]
        for key, buffer in list(part._buffers.items()):
            if buffer is not None and buffer.is_meta:
                part._buffers[key] = None
    for path, buffer in buffers.items():
        owner, _, key = path.rpartition(".")
        kind = dtype if buffer.is_floating_point() else buffer.dtype
        module.get_submodule(owner)._buffers[key] = buffer.detach().to(kind, copy=True)
    if given is not None:
        return module
    _initialise(graph, layer.name, module, seed)
    for path, parameter in module.named_parameters():
        if parameter.is_floating_point() and bool(parameter.isnan().any()):
            owner, _, _ = path.rpartition(".")
            kind = type(module.get_submodule(owner)).__name__
            by = "init(name, tensor)" if graph.init is not None else f"reset_parameters() of {kind}"
            raise ModelError(
                f"parameter {layer.name}.{path} is left without (all its) values by {by}",
                cure="give every parameter its values there: those of the constructor are not kept",
            )
    return module


def _initialise(graph: Graph, layer: str, module: nn.Module, seed: int) -> None:
    if graph.init is not None:
        canonical = canonical_names(graph)
        for path, parameter in module.named_parameters():
            name = f"{layer}.{path}"
            with torch.no_grad():
                torch.manual_seed(seed_of(seed, "init", canonical.get(name, name)))
                graph.init(canonical.get(name, name), parameter)
        return
    for path, part in module.named_modules():
        if not any(p is not None for p in part._parameters.values()):
            continue
        name = f"{layer}.{path}" if path else layer
        reset: Callable[[], Tensor | None] | None = getattr(part, "reset_parameters", None) or getattr(
            part, "_reset_parameters", None
        )
        if reset is None:
            raise ModelError(
                f"{name} ({type(part).__name__}) owns parameters but has no reset_parameters()",
                cure="add one, or return a Graph with init=function(name, tensor)",
            )
        torch.manual_seed(seed_of(seed, "init", name))
        reset()
