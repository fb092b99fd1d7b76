"""Whether one layer can be computed with some styles: tried on meta tensors, where a shard has parts of values.

A part refuses every operation that needs what other shards have (`ShardedValue`), so what runs is right.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import torch
from torch import Tensor

from raypar.errors import PlanError, RayparError
from raypar.model.graph import Graph
from raypar.model.layer_skeletons import build_on_meta, convert_module_dtype
from raypar.model.random_state import preserve_random_state
from raypar.model.tensor_parallel.build_shard_modules import build_shard_modules
from raypar.model.tensor_parallel.group import ShardGroup
from raypar.model.tensor_parallel.layout_of_styles import layout_of_styles, modules_with_parameters
from raypar.model.tensor_parallel.no_transport import NoTransport
from raypar.model.tensor_parallel.parameter_misuse import ParameterMisuseDetector
from raypar.model.tensor_parallel.styles.style import ShardingStyle
from raypar.model.without_dynamo import meta_operations_without_dynamo
from raypar.plan.tensor_parallel_layout import TensorParallelLayout


def find_why_styles_fail(
    graph: Graph,
    index: int,
    styles: Mapping[str, ShardingStyle],
    inputs: Sequence[Tensor],
    dtype: torch.dtype | None,
    shard_counts: Sequence[int],
) -> RayparError | None:
    """Why layer `index` cannot be computed with these styles (qualified module name -> style); None if it can.

    `inputs`: meta tensors like those that it is given; `dtype`: of its parameters. With numbers of shards of which some would
    hold nothing it is not tried, but it must run with one of `shard_counts`. Raises what users' code raises, if it cannot run
    without numbers.
    """
    layer = graph.layers[index]
    owners = {name: owner for name, owner in modules_with_parameters([layer]).items() if name in styles}
    refused: RayparError | None = PlanError("no styles", cure="give some")
    for number, shards in enumerate(shard_counts):
        try:
            layout = layout_of_styles([layer], owners, styles, shards)
        except PlanError as error:
            if number == 0:
                return error
            continue
        refused = None
        for shard in (0, shards - 1):
            try:
                _run_on_meta(graph, index, layout, shard, inputs, dtype)
            except RayparError as error:
                return error
    return refused


def _run_on_meta(
    graph: Graph, index: int, layout: TensorParallelLayout, shard: int, inputs: Sequence[Tensor], dtype: torch.dtype | None
) -> None:
    """Raises `ModelError` for what cannot be computed on a part, or would be wrong."""
    layer = graph.layers[index]
    group = ShardGroup(NoTransport(shard, layout.shards), range(layout.shards))
    with torch.enable_grad(), meta_operations_without_dynamo(), torch.device("meta"), preserve_random_state():
        made = build_on_meta(layer)
        module = made if dtype is None else convert_module_dtype(made, dtype)
        modules = build_shard_modules(graph, index, index + 1, lambda _: module, layout=layout, group=group, whole=True)
        with ParameterMisuseDetector(graph, modules, layout, group) as access:
            access.layer = layer.name
            modules[layer.name](*inputs)
            access.refuse_mixed_use()
