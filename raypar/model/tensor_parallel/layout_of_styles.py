"""Builds the tensor parallel layout of layers from their styles, as plain data."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from sys import intern
from typing import Any

from torch import nn

from raypar.model.graph import Layer
from raypar.model.layer_skeletons import shared_skeleton
from raypar.model.tensor_parallel.styles.style import ShardingStyle
from raypar.plan.shard_ranges import TensorCut
from raypar.plan.stage_connections import parameter_of
from raypar.plan.tensor_parallel_layout import TensorParallelLayout

Owners = Mapping[str, tuple[nn.Module, tuple[nn.Module, ...]]]
"""Qualified name -> (module that owns parameters, the modules it is in, innermost first)."""


def modules_with_parameters(layers: Sequence[Layer]) -> dict[str, tuple[nn.Module, tuple[nn.Module, ...]]]:
    """See `Owners`."""
    found = {}
    for layer in layers:
        root = shared_skeleton(layer)
        for path, module in root.named_modules():
            if any(p is not None for p in module._parameters.values()):
                steps = path.split(".") if path else []
                parents = tuple(root.get_submodule(".".join(steps[:i])) for i in reversed(range(len(steps))))
                found[intern(layer.qualify(path))] = module, parents
    return found


def layout_of_styles(
    layers: Sequence[Layer], modules: Owners, chosen: Mapping[str, ShardingStyle], shards: int
) -> TensorParallelLayout:
    """The layout that these styles (qualified module name -> style) give these layers, whose modules they are.

    Raises `PlanError` for a style that does not fit, and for more shards than there is to share out.
    """
    first_names = _first_names(layers)
    found: dict[str, ShardingStyle] = {}
    cuts: dict[str, TensorCut] = {}
    once: dict[Any, Any] = {}  # equal answers, and names, are one object: the layout of a deep model is sent to every worker
    for name, style in chosen.items():
        module, parents = modules[name]
        style.check_fits(name, module)
        style = style.complete_options(name, parents)
        slices = style.slices(name, module, shards)
        if slices or style.divides_values:
            found[name] = style
            for key, cut in slices.items():
                parameter = intern(parameter_of(name, key))
                cuts[parameter] = once.setdefault(cut, cut)
                cuts[intern(first_names.get(parameter, parameter))] = cuts[parameter]
    costs = {name: style.cost(name, modules[name][0], shards) for name, style in found.items()}
    return TensorParallelLayout(
        shards=shards,
        styles={name: intern(str(style)) for name, style in found.items()},
        cuts=cuts,
        shared_inputs=_shared_inputs(found),
        traffic={name: style.collectives(modules[name][0]) for name, style in found.items()},
        costs={name: once.setdefault(cost, cost) for name, cost in costs.items()},
    )


def _first_names(layers: Sequence[Layer]) -> dict[str, str]:
    """Name of a parameter -> the name by which its layer knows it, where they differ: several modules of the layer have it."""
    found: dict[str, str] = {}
    for layer in layers:
        root = shared_skeleton(layer)
        first = {id(parameter): layer.qualify(path) for path, parameter in root.named_parameters()}
        for path, module in root.named_modules():
            for key, parameter in module._parameters.items():
                name = parameter_of(layer.qualify(path), key)
                if parameter is not None and first[id(parameter)] != name:
                    found[name] = first[id(parameter)]
    return found


def _shared_inputs(styles: Mapping[str, ShardingStyle]) -> frozenset[str]:
    """Layers that stand beside others in one module that read the same value: q, k, v; gate and up."""
    groups: dict[tuple[str, str], list[str]] = {}
    for name, style in styles.items():
        if style.input_group is not None:
            groups.setdefault((name.rpartition(".")[0], style.input_group), []).append(name)
    return frozenset(name for names in groups.values() if len(names) > 1 for name in names)
