"""What the layers of a model send over shards for one microbatch: which values, by which formula, how many numbers."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from math import prod
from sys import intern
from typing import Any, Literal

import torch
from torch import Tensor, nn
from torch.nn.utils.rnn import PackedSequence

from raypar.errors import RayparError
from raypar.model.convolution_call import CONVOLUTIONS
from raypar.model.graph import Graph
from raypar.model.layer_skeletons import build_on_meta, convert_module_dtype, shared_skeleton
from raypar.model.tensor_parallel.build_shard_modules import build_shard_modules
from raypar.model.tensor_parallel.layout_of_styles import modules_with_parameters
from raypar.model.tensor_parallel.meta_check import NoTransport
from raypar.model.tensor_parallel.shard_group import ShardedModule, ShardGroup
from raypar.model.tensor_parallel.sharded_value import ShardedValue
from raypar.model.tensor_parallel.spatial_convolution import AXES, halo_formula
from raypar.model.tensor_parallel.statistics_over_pieces import STATISTICS
from raypar.model.tensor_parallel.styles.registry import parse_style
from raypar.model.tensor_parallel.styles_by_dimension import divided_dimension
from raypar.plan.spatial_shards import RowExchange, RowPlan
from raypar.plan.tensor_parallel_layout import CollectiveName, LayerCollective, LayerCollectives, TensorParallelLayout
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
    of_data: bool = False
    """Whether it is known to read fields of the batch, which have no gradients."""
    of_function: tuple[LayerCollective, ...] = ()
    """The collectives of a norm whose statistics are of all shards, or of another function; empty of sharded layers."""

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
    calls = None if batch is None else _calls_on_meta(graph, layout, batch, owners, sequence=sequence, dtype=dtype)
    if calls is None:
        of_data = _modules_of_data(graph, layout.styles)
        calls = [_Call(n, intern(n.rpartition(".")[0]), of_data=n in of_data) for n in layout.styles]
    dimension = "samples"

    def is_for_input_alone(collective: LayerCollective, call: _Call) -> bool:
        """Whether nothing but the gradient of the input is made of what it moves."""
        of_rows = collective.operation == "all_to_all" and not getattr(owners[call.layer][0], "transposed", False)
        return collective.direction == "backward" and (of_rows or collective.value == "input")

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
        dimension = dimensions.get(call.layer) or dimension  # a norm or function has that of the layer before it
        traffic = LayerCollectives(call.of_function, call.of_function) if call.of_function else layout.traffic[call.layer]
        for collective in traffic.sequence if sequence else traffic.plain:
            of_input = collective.value == "input"
            size = call.size(collective)
            if size == (0, 0) or (of_input and joins) or (call.of_data and is_for_input_alone(collective, call)):
                continue
            if shares and of_input and shared is not None:
                shared[1].append(len(rows))
            rows.append(LayerTraffic((call.layer,), dimension, collective, *(size or (None, None))))
    return _added_up(rows)


def _modules_of_data(graph: Graph, cut: Collection[str]) -> set[str]:
    """The modules of `cut` that read fields of the batch, which have no gradients: of a layer that reads nothing else, the
    first one that it has."""
    made = {name for layer in graph.layers for name in layer.outputs}
    found = set()
    for layer in graph.layers:
        if made.isdisjoint(layer.inputs):
            paths = (layer.qualify(path) or layer.name for path, _ in shared_skeleton(layer).named_modules())
            found.update([name for name in paths if name in cut][:1])
    return found


class _GroupThatNotes(ShardGroup):
    """A group without peers that notes what is sent outside of sharded layers."""

    statistics: list[int]
    """How many numbers each norm has gathered since somebody made it empty."""
    running: list[str]
    """The modules that run, each within the one before it."""
    calls: list[_Call]
    """Where calls of functions are noted."""

    def all_gather_in_place(self, whole: Tensor, what: str) -> None:
        """See `ShardGroup`."""
        if what == STATISTICS:
            self.statistics.append(whole.numel())
        super().all_gather_in_place(whole, what)

    def note_rows(self, x: Tensor, made: Tensor, dim: int, plan: RowPlan) -> None:
        """See `ShardGroup`."""
        formula = halo_formula("C", x.dim() - 2, dim - 2) if x.dim() - 2 in AXES and dim >= 2 else "n"
        self._note("all_to_all", "forward", "input", formula, x, _rows_sent(plan.forward, x, dim))
        if x.requires_grad:
            self._note("all_to_all", "backward", "output", formula, made, _rows_sent(plan.backward, made, dim))

    def note_sum(self, total: Tensor, kept: Collection[int], dims: int) -> None:
        """See `ShardGroup`."""
        names = ["B", "C", *(name[0].upper() for name in AXES.get(dims - 2, ()))]
        formula = " ".join(names[dim] for dim in sorted(kept)) if len(names) == dims else "n"
        self._note("all_reduce", "forward", "output", formula or "1", total, total.numel())

    def _note(
        self,
        operation: CollectiveName,
        direction: Literal["forward", "backward"],
        value: Literal["input", "output"],
        formula: str,
        like: Tensor,
        numbers: int,
    ) -> None:
        collective = LayerCollective(operation, direction, value, formula)
        own: dict[tuple[str, str], int] = {(direction, formula): numbers}
        call = _Call(self.running[-1], None, output=(1, like.element_size()), own=own, of_function=(collective,))
        self.calls.append(call)


def _rows_sent(exchange: RowExchange, x: Tensor, dim: int) -> int:
    """How many numbers all shards send together, of values like `x` but for the rows, which are dim `dim`."""
    rows = sum(map(exchange.rows_sent_by, range(len(exchange.held))))
    return rows * prod(size for place, size in enumerate(x.shape) if place != dim)


_NUMBERS_OF_NORM: dict[type[nn.Module], str] = {
    **dict.fromkeys((nn.BatchNorm1d, nn.BatchNorm2d, nn.BatchNorm3d), "C"),
    **dict.fromkeys((nn.InstanceNorm1d, nn.InstanceNorm2d, nn.InstanceNorm3d), "B C"),
    nn.GroupNorm: "B G",
    nn.LayerNorm: "B",
}
"""Kind of a norm -> how many means and variances it has."""


def _call_of_norms(name: str, module: nn.Module | None, read: Any, gathered: Sequence[int], shards: int) -> _Call:
    """What norms within the call of a module send: of each, T shards have `gathered` its means, variances and numbers of
    elements. `read`: what the module was given."""
    of_one = next((text for kind, text in _NUMBERS_OF_NORM.items() if isinstance(module, kind)), "n")
    forward, backward = f"T (2 {of_one} + 1)", f"2 {of_one}"
    has_gradient = not isinstance(read, ShardedValue) or _has_gradient(read)
    numbers = {
        ("forward", forward): sum(gathered),
        ("backward", backward): sum(count // shards - 1 for count in gathered) * has_gradient,
    }
    collectives = (
        LayerCollective("all_gather", "forward", "statistics", forward),
        LayerCollective("all_reduce", "backward", "statistics", backward),
    )
    return _Call(name, read, output=(1, torch.float64.itemsize), own=numbers, of_function=collectives)


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
    graph: Graph,
    layout: TensorParallelLayout,
    batch: Mapping[str, Tensor],
    owners: Mapping[str, tuple[nn.Module, tuple[nn.Module, ...]]],
    *,
    sequence: bool,
    dtype: torch.dtype,
) -> list[_Call] | None:
    """The calls that a microbatch makes on the meta device; None where that cannot be run so."""
    found: list[_Call] = []

    def note(module: nn.Module, args: tuple[Any, ...], made: Any) -> None:
        assert isinstance(module, ShardedModule)
        read, first = (each.data if isinstance(each, PackedSequence) else each for each in (args[0], _first(made)))
        of_input, of_output = _size(read) if _has_gradient(read) else (0, 0), _size(first)
        found.append(_Call(module.name, read, of_input, of_output, module.numbers_of_last_call()))

    group = _GroupThatNotes(NoTransport(0, layout.shards), range(layout.shards), sequence_parallel=sequence)
    group.statistics, group.running, group.calls = [], [], found

    def enter(name: str, module: nn.Module, args: tuple[Any, ...]) -> None:
        group.running.append(name)

    def leave(module: nn.Module, args: tuple[Any, ...], made: Any) -> None:
        group.running.pop()

    def note_norms(name: str, part: nn.Module, args: tuple[Any, ...], made: Any) -> None:
        if group.statistics:
            module = owners[name][0] if name in owners else part
            found.append(_call_of_norms(name, module, args[0] if args else None, group.statistics, layout.shards))
            group.statistics = []

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
            for layer in graph.layers:
                for path, part in modules[layer.name].named_modules():
                    name = layer.qualify(path) or layer.name
                    part.register_forward_pre_hook(partial(enter, name))
                    part.register_forward_hook(note if isinstance(part, ShardedModule) else partial(note_norms, name))
                    part.register_forward_hook(leave)
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
