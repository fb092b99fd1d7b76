"""What the layers of a model send over shards for one microbatch: which values, by which formula, how many numbers."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from sys import intern
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.utils.rnn import PackedSequence

from raypar.errors import RayparError
from raypar.model.graph import Graph
from raypar.model.layer_skeletons import build_on_meta, convert_module_dtype
from raypar.model.tensor_parallel.build_shard_modules import build_shard_modules
from raypar.model.tensor_parallel.convolution import CONVOLUTIONS
from raypar.model.tensor_parallel.layout_of_styles import modules_with_parameters
from raypar.model.tensor_parallel.meta_check import NoTransport
from raypar.model.tensor_parallel.shard_group import ShardedModule, ShardGroup
from raypar.model.tensor_parallel.sharded_value import ShardedValue
from raypar.model.tensor_parallel.styles.registry import parse_style
from raypar.model.tensor_parallel.styles_by_dimension import divided_dimension
from raypar.plan.tensor_parallel_layout import LayerCollective, TensorParallelLayout
from raypar.torch_compat.avoid_dynamo_import import meta_operations_without_dynamo
from raypar.user_code.stop_signals import reraise_ctrl_c
from raypar.user_code.user_code_errors import USER_CODE_ERRORS


@dataclass(frozen=True, slots=True)
class LayerTraffic:
    """One collective of a layer, or of layers that read the same value and share it."""

    layers: tuple[str, ...]
    """Qualified names of modules."""
    dimension: str
    """The dimension that is divided."""
    collective: LayerCollective
    numbers: int | None = None
    """How many numbers the whole value has, for one microbatch; of rows that are exchanged, those that all shards together
    send. None: not known."""
    nbytes: int | None = None
    """How many bytes."""


@dataclass(frozen=True, slots=True)
class _Call:
    """One call of a sharded layer, in order; sizes are of whole values, as (numbers, bytes)."""

    layer: str
    read: Any
    """What it was given, by which layers are known that share a sum."""
    input: tuple[int, int] | None = None
    """None: not known; (0, 0) for what has no gradient."""
    output: tuple[int, int] | None = None
    own: Mapping[tuple[str, str], int] = field(default_factory=dict)
    """`ShardedModule.numbers_of_last_call`."""

    def size(self, collective: LayerCollective) -> tuple[int, int] | None:
        """(numbers, bytes) of what a collective moves."""
        numbers = self.own.get((collective.direction, collective.formula))
        if numbers is None or not self.output:
            return self.input if collective.value == "input" else self.output
        return numbers, numbers * self.output[1] // max(1, self.output[0])


def layer_traffic(
    graph: Graph,
    layout: TensorParallelLayout,
    batch: Mapping[str, Tensor] | None,
    *,
    sequence: bool = False,
    dtype: torch.dtype = torch.float32,
) -> list[LayerTraffic]:
    """The collectives of all layers, in order; `sequence`: under sequence parallelism.

    `batch`: one microbatch. Without it, and where users' code does not run on tensors without numbers, no sizes are known.
    """
    owners = modules_with_parameters(graph.layers)
    dimensions = {name: divided_dimension(parse_style(text), name, owners) for name, text in layout.styles.items()}
    calls = None if batch is None else _calls_on_meta(graph, layout, batch, sequence, dtype)
    if calls is None:
        calls = [_Call(name, intern(name.rpartition(".")[0])) for name in layout.styles]
    rows: list[LayerTraffic] = []
    shared: tuple[Any, list[int]] | None = None  # what sibling layers have read last, and the rows of its collectives
    for call in calls:
        shares = call.layer in layout.shared_inputs and not isinstance(owners[call.layer][0], CONVOLUTIONS)
        joins = shares and shared is not None and shared[0] is call.read
        if shared is not None and joins:
            for number in shared[1]:
                rows[number] = replace(rows[number], layers=(*rows[number].layers, call.layer))
        elif shares:
            shared = call.read, []
        traffic = layout.traffic[call.layer]
        for collective in traffic.sequence if sequence else traffic.plain:
            of_input = collective.value == "input"
            size = call.size(collective)
            if size == (0, 0) or (of_input and joins):
                continue
            if shares and of_input and shared is not None:
                shared[1].append(len(rows))
            rows.append(LayerTraffic((call.layer,), dimensions[call.layer], collective, *(size or (None, None))))
    return _added_up(rows)


def _added_up(rows: Sequence[LayerTraffic]) -> list[LayerTraffic]:
    """The rows, those of several calls of a layer as one."""
    found: dict[tuple[Any, ...], LayerTraffic] = {}
    for row in rows:
        key = row.layers, row.collective
        before = found.get(key)
        if before is not None and before.numbers and row.numbers and before.nbytes and row.nbytes:
            row = replace(row, numbers=before.numbers + row.numbers, nbytes=before.nbytes + row.nbytes)
        found[key] = row
    return list(found.values())


def _calls_on_meta(
    graph: Graph, layout: TensorParallelLayout, batch: Mapping[str, Tensor], sequence: bool, dtype: torch.dtype
) -> list[_Call] | None:
    """The calls that a microbatch makes on the meta device; None where that cannot be run so."""
    found: list[_Call] = []

    def note(module: nn.Module, args: tuple[Any, ...], made: Any) -> None:
        assert isinstance(module, ShardedModule)
        read, first = (each.data if isinstance(each, PackedSequence) else each for each in (args[0], _first(made)))
        of_input, of_output = _size(read) if _has_gradient(read) else (0, 0), _size(first)
        found.append(_Call(module.name, read, of_input, of_output, module.numbers_of_last_call()))

    group = ShardGroup(NoTransport(0, layout.shards), range(layout.shards), sequence_parallel=sequence)
    values = {name: tensor.to("meta") for name, tensor in batch.items()}
    try:
        with torch.enable_grad(), meta_operations_without_dynamo(), torch.device("meta"):
            modules = build_shard_modules(
                graph,
                0,
                len(graph.layers),
                lambda i: convert_module_dtype(build_on_meta(graph.layers[i]), dtype),
                layout=layout,
                group=group,
                whole=True,
            )
            for module in modules.values():
                for part in module.modules():
                    if isinstance(part, ShardedModule):
                        part.register_forward_hook(note)
            for layer in graph.layers:
                made = modules[layer.name](*(values[name] for name in layer.inputs))
                values.update(zip(layer.outputs, made if isinstance(made, tuple) else (made,), strict=True))
    except RayparError:
        return None
    except USER_CODE_ERRORS as error:
        reraise_ctrl_c(error)
        return None
    return found


def _first(made: Any) -> Any:
    """What a layer returns, or the first of several values."""
    return made[0] if isinstance(made, tuple) and not isinstance(made, PackedSequence) else made


def _size(value: Any) -> tuple[int, int]:
    """(numbers, bytes) of the whole value."""
    local: Tensor = value.local if isinstance(value, ShardedValue) else value
    return value.shape.numel(), value.shape.numel() * local.element_size()


def _has_gradient(value: Any) -> bool:
    local: Tensor = value.local if isinstance(value, ShardedValue) else value
    return local.requires_grad
