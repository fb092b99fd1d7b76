"""The styles that a layout by named dimensions (`plan.layout`) gives the layers of a model."""

from __future__ import annotations

import difflib
from collections.abc import Mapping

from torch import nn

from raypar.errors import PlanError
from raypar.model.tensor_parallel.layout_of_styles import Owners
from raypar.model.tensor_parallel.styles.linear_styles import GatheredStyle, VocabularyStyle, WholeStyle
from raypar.model.tensor_parallel.styles.recurrent_styles import GatesStyle
from raypar.model.tensor_parallel.styles.registry import STYLES
from raypar.model.tensor_parallel.styles.spatial_styles import SPATIAL_DIMENSIONS, SpatialStyle
from raypar.model.tensor_parallel.styles.style import DimensionStyle, ShardingStyle, is_plain_convolution

SHARDS = "shards"
"""What a layout says of a dimension that is divided over the shards."""


def styles_by_dimension(
    modules: Owners, layout: Mapping[str, str], inferred: Mapping[str, ShardingStyle], given: Mapping[str, ShardingStyle]
) -> dict[str, ShardingStyle]:
    """The styles of the layers that have a dimension which the layout divides. All others stay whole.

    `inferred`: the styles that raypar finds; those are left that divide such a dimension. Convolutions, which have none, are
    gathered, or spatial, and recurrent layers cut by gates. `given`: the job's own styles, which come first. Raises `PlanError`
    for a dimension that no layer has, for one along which nothing can be divided, and for a convolution with two of them.
    """
    known = _dimensions_by_layer(modules, {**inferred, **given})
    _check_names(layout, known)
    layout = {dimension: where for dimension, where in layout.items() if dimension != "samples"}
    divided = {dimension for dimension, where in layout.items() if where == SHARDS}
    found = {name: style for name, style in inferred.items() if divided_dimension(style, name, modules) in divided}
    _check_one_each(modules, known, divided, given)
    if "channels" in divided:
        found |= {
            name: GatheredStyle()
            for name, (module, _) in modules.items()
            if is_plain_convolution(module) and "channels" in known[name] and name not in inferred
        }
    if "hidden" in divided:
        found |= {name: GatesStyle() for name, dimensions in known.items() if "hidden" in dimensions}
    for axis in sorted(divided & SPATIAL_DIMENSIONS):
        found |= {name: SpatialStyle(axis) for name, dimensions in known.items() if axis in dimensions}
    found = {name: style for name, style in found.items() if name not in given}
    idle = divided - {divided_dimension(style, name, modules) for name, style in {**found, **given}.items()}
    if idle:
        dimension = min(idle)
        some = next(name for name, names in known.items() if dimension in names)
        raise PlanError(
            f"plan.layout divides {dimension}, and raypar finds no layer that it could divide along it by itself",
            cure=f"give layers that have {dimension} styles by hand (plan.styles), such as {some}, or leave {dimension} out",
        )
    return found


def _check_one_each(
    modules: Owners, known: Mapping[str, set[str]], divided: set[str], given: Mapping[str, ShardingStyle]
) -> None:
    """Raises `PlanError` for a convolution without a style of its own that has several of the divided dimensions."""
    for name, (module, _) in modules.items():
        several = sorted(divided & known[name] - {"groups"})
        if len(several) > 1 and is_plain_convolution(module) and name not in given:
            raise PlanError(
                f"plan.layout divides {' and '.join(several)}, and {name} has both: a layer is divided along one dimension",
                cure="leave one of them out, or give layers styles by hand (plan.styles)",
            )


def _check_names(layout: Mapping[str, str], known: Mapping[str, set[str]]) -> None:
    names = sorted({"samples"}.union(*known.values()))
    for dimension in layout:
        if dimension not in names:
            near = difflib.get_close_matches(dimension, names, n=1, cutoff=0.3)
            raise PlanError(
                f"plan.layout names {dimension!r}, a dimension that no layer has" + (f" (nearest: {near[0]})" if near else ""),
                cure=f"the dimensions of this model are {', '.join(names)}",
            )


def _dimensions_by_layer(modules: Owners, styles: Mapping[str, ShardingStyle]) -> dict[str, set[str]]:
    """Layer -> the dimensions along which it can be divided. `styles`: those that it may have beside what its kind says."""
    found: dict[str, set[str]] = {}
    for name, (module, _) in modules.items():
        possible = [kind() for kind in STYLES.values() if kind is not VocabularyStyle or isinstance(module, nn.Embedding)]
        possible += map(SpatialStyle, sorted(SPATIAL_DIMENSIONS))
        found[name] = {divided_dimension(style, name, modules) for style in (*possible, styles.get(name, WholeStyle()))} - {""}
    return found


def divided_dimension(style: ShardingStyle, name: str, modules: Owners) -> str:
    """The dimension along which a style divides a layer; empty if it divides none, or does not fit."""
    module, parents = modules[name]
    try:
        style.check_fits(name, module)
        style = style.complete_options(name, parents)
        return style.dimensions(name, module).divided if isinstance(style, DimensionStyle) else ""
    except PlanError:
        return ""
