"""Tries whether layers run on shards with given styles, on tensors without values.

A shard's part of a value (`ShardedValue`) refuses every operation that needs the other shards' parts. So layers that run
without an error compute what the whole layers do.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import NamedTuple

import torch
from torch import Tensor

from raypar.errors import PlanError, RayparError
from raypar.model.capture.module_graph import build_layer_without_parameter_values, recorded_values
from raypar.model.graph import Graph
from raypar.model.layer_skeletons import shared_skeleton
from raypar.model.random_state import preserve_random_state
from raypar.model.tensor_parallel.build_shard_modules import build_shard_modules
from raypar.model.tensor_parallel.layout_of_styles import layout_of_styles, modules_with_parameters
from raypar.model.tensor_parallel.local_part_layout import FEATURES, SPATIAL
from raypar.model.tensor_parallel.meta_check import NoTransport, placed_error
from raypar.model.tensor_parallel.parameter_misuse import ParameterMisuseDetector
from raypar.model.tensor_parallel.shard_group import ShardGroup
from raypar.model.tensor_parallel.styles.style import ShardingStyle
from raypar.plan.shard_ranges import TensorCut, even_ranges_by_shard
from raypar.plan.tensor_parallel_layout import TensorParallelLayout
from raypar.torch_compat.avoid_dynamo_import import meta_operations_without_dynamo
from raypar.user_code.stop_signals import reraise_ctrl_c
from raypar.user_code.user_code_errors import USER_CODE_ERRORS


class SplitValue(NamedTuple):
    """A value between layers that is split over the shards."""

    cut: TensorCut
    """How it is split."""
    axis: str
    """What the split dim counts: `FEATURES`, or `SPATIAL`."""


def find_why_styles_fail(
    graph: Graph,
    first: int,
    last: int,
    styles: Mapping[str, ShardingStyle],
    values: Mapping[str, Tensor],
    shard_counts: Sequence[int],
) -> RayparError | None:
    """Why layers [first, last) cannot be computed with these styles (qualified module name -> style); None if they can.

    `values`: tensors without values, like those that the layers read. The first of `shard_counts` must leave no shard empty;
    others that would are skipped. Raises what users' code raises on tensors without values.
    """
    layers = graph.layers[first:last]
    owners = {name: owner for name, owner in modules_with_parameters(layers).items() if name in styles}
    for number, shards in enumerate(shard_counts):
        try:
            layout = layout_of_styles(layers, owners, styles, shards)
        except PlanError as error:
            if number == 0:
                return error
            continue
        for shard in (0, shards - 1):
            try:
                layout = with_values_in_parts(layout, _run(graph, [(first, last)], mark_parts_unknown(layout), shard, values))
                if last - first > 1:  # each layer may be in a stage of its own
                    _run(graph, [(i, i + 1) for i in range(first, last)], layout, shard, values)
            except RayparError as error:
                return error
    return None


def find_split_values_between_layers(graph: Graph, layout: TensorParallelLayout) -> dict[str, SplitValue]:
    """Value between layers of a captured model that is split over the shards under this layout -> how it is split.

    Found by running layers on tensors without values: from each layer that has column styles, or one whose state comes in
    parts, and no row style, to the next one that has a row style; from the first one of style spatial all. If users' code does
    not run that way, nothing is found, and a value that leaves its layer in parts is an error. Raises the `ModelError` of a
    layer that cannot be computed on rows: it would not show later, as rows are gathered between layers.
    """
    names = [
        {re.split("[:/]", layout.styles.get(layer.qualify(path), ""))[0] for path, _ in shared_skeleton(layer).named_modules()}
        for layer in graph.layers
    ]
    spatial = [bool({"spatial", "spatial-gathered"} & each) for each in names]
    parts = [bool({"column", "groups", "gates", "gates-column"} & each) and "row" not in each for each in names]
    begins = [at or does for at, does in zip(spatial, parts, strict=True)]
    values = recorded_values(graph) if layout.shards > 1 and any(begins) else {}
    found: dict[str, SplitValue] = {}
    last, shard = 0, layout.shards // 2  # both ends of its part say where parts end
    for first in (number for number, does in enumerate(begins) if does and values):
        if first < last:
            continue
        rows = (number + 1 for number in range(first, len(names)) if "row" in names[number])
        last = len(names) if any(spatial[first:]) else next(rows, len(names))
        try:
            found |= _run(graph, [(first, last)], mark_parts_unknown(layout), shard, values)
        except RayparError:
            if any(spatial[first:]):
                raise
            continue  # `check_shards_on_meta` reports it
        except USER_CODE_ERRORS as error:
            reraise_ctrl_c(error)
    return found


def mark_parts_unknown(layout: TensorParallelLayout) -> TensorParallelLayout:
    """The layout with `values_in_parts` marked as not yet known."""
    return replace(layout, values_in_parts=None)


def with_values_in_parts(layout: TensorParallelLayout, values: Mapping[str, SplitValue]) -> TensorParallelLayout:
    """The layout with these values split between layers."""
    cuts = {name: value.cut for name, value in values.items()}
    uneven = {
        name: cut for name, cut in cuts.items() if cut.indices_by_shard != even_ranges_by_shard(cut.whole_size, layout.shards)
    }
    return replace(
        layout,
        values_in_parts={name: cut.dim for name, cut in cuts.items()},
        uneven_values=uneven,
        spatial_values=frozenset(name for name, value in values.items() if value.axis == SPATIAL),
    )


def _run(
    graph: Graph, stages: Sequence[tuple[int, int]], layout: TensorParallelLayout, shard: int, values: Mapping[str, Tensor]
) -> dict[str, SplitValue]:
    """Run the layers as one shard does, without values. Returns: value that stays split between layers -> how it is split.

    Raises `ModelError` for an operation that is impossible or wrong on a part.
    """
    found, in_parts = dict(values), dict[str, SplitValue]()
    with torch.enable_grad(), meta_operations_without_dynamo(), preserve_random_state():
        for first, last in stages:
            group = ShardGroup(NoTransport(shard, layout.shards), range(layout.shards))
            modules = build_shard_modules(
                graph,
                first,
                last,
                lambda i: build_layer_without_parameter_values(graph, i),
                layout=layout,
                group=group,
                whole=True,
            )
            with ParameterMisuseDetector(graph, modules, layout, group) as access:
                for layer in graph.layers[first:last]:
                    access.layer = layer.name
                    try:
                        made = modules[layer.name](*(found[name] for name in layer.inputs))
                    except RayparError as error:
                        raise placed_error(error, f"layer {layer.name!r}") from error
                    found.update(zip(layer.outputs, made if isinstance(made, tuple) else (made,), strict=True))
                access.refuse_mixed_use()
            for name, part in group.value_layouts.items():
                held = layout.parts_like(part.ranges, part.size, shard) if part.axis in (FEATURES, SPATIAL) else None
                if held is not None:
                    in_parts[name] = SplitValue(TensorCut(part.dim, part.size, held), part.axis)
    return in_parts
