"""Torch functions on values that are cut along a spatial dim, where rows of other shards are needed: pooling, padding, slices,
interpolation, means, norms.

Each shard makes its even part of the result's rows. It gets the rows that these read, and, where the backward pass runs on the
values themselves, those for all rows of the result that its own rows are read by, which it computes again in its backward pass.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from math import prod
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from raypar.model.autograd_function_types import AutogradContext, AutogradFunction
from raypar.model.tensor_parallel.autograd_collectives import first_derivative_only, reduce_from_shards
from raypar.model.tensor_parallel.halo_exchange import fetch_rows, fit_rows
from raypar.model.tensor_parallel.local_part_layout import SPATIAL, LocalPartLayout
from raypar.model.tensor_parallel.shard_group import ShardGroup
from raypar.model.tensor_parallel.sharded_value import (
    IMPLEMENTATIONS,
    ShardedValue,
    implements_on_rows,
    take_part,
    unsupported_on_part_error,
)
from raypar.model.tensor_parallel.statistics_over_pieces import normalise_over_pieces
from raypar.plan.shard_ranges import IndexRange, even_ranges_by_shard
from raypar.plan.spatial_shards import (
    Enlargement,
    RowPlan,
    RowReads,
    Window,
    check_row_plan,
    copied_runs,
    even_rows,
    padded_rows,
    plan_copies,
    plan_linear,
    plan_with_values,
    rows_within,
)

_HALO, _GRADIENTS = "the rows that a layer reads", "the rows of a layer's output gradient"

ComputeRows = Callable[[Tensor, int, int, int], Tensor]
"""(rows of the input in a row, number of the first one, first and last output row) -> these output rows."""


def check_even(name: str, x: ShardedValue) -> None:
    """Raises `ModelError` unless this shard has its even part of the rows."""
    part = x.part_layout
    if part.ranges != even_ranges_by_shard(part.size, x.group.size)[x.group.shard]:
        raise unsupported_on_part_error(name, x, f"meets uneven parts ({list(part.ranges)} on shard {x.group.shard})")


def _result(x: ShardedValue, local: Tensor, rows: int) -> ShardedValue:
    """This shard's rows of a result that has so many."""
    held = even_ranges_by_shard(rows, x.group.size)[x.group.shard]
    x.check_recorded()
    return ShardedValue(local, LocalPartLayout(x.part_layout.dim, rows, held, SPATIAL), x.group)


# -- rows computed from rows -----------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class _Call:
    """One call of a function that computes rows from rows."""

    plan: RowPlan
    reads: RowReads
    compute: ComputeRows
    dim: int
    group: ShardGroup
    reads_values: bool
    """Whether the backward pass depends on the input's values, and not on its shape alone."""

    def rows_read(self, run: IndexRange) -> IndexRange:
        """The rows of the input that a run of output rows reads."""
        return rows_within(self.reads.reads(*run), self.plan.forward.rows)


class _Context(AutogradContext):
    call: _Call


class _FromRows(AutogradFunction):
    @staticmethod
    def forward(ctx: _Context, x: Tensor, call: _Call) -> Tensor:
        shard, computed = call.group.shard, call.plan.outputs[call.group.shard]
        wide = fetch_rows(x, call.dim, call.plan.forward, call.group, _HALO)
        ctx.call = call
        ctx.save_for_backward(wide if call.reads_values else x.new_empty(1).expand(x.shape))
        made = call.compute(wide, call.rows_read(computed)[0], *computed)
        return fit_rows(made, call.dim, computed[0], *even_rows(call.plan.backward.rows, call.group.size)[shard])

    @staticmethod
    @first_derivative_only
    def backward(ctx: _Context, *gradients: Tensor) -> tuple[Tensor | None, ...]:
        (gradient,), (kept,), call = gradients, ctx.saved_tensors, ctx.call
        gradient = fetch_rows(gradient, call.dim, call.plan.backward, call.group, _GRADIENTS)
        needed, held = call.plan.backward.needed[call.group.shard], call.plan.forward.held[call.group.shard]
        if not needed:  # rows that nothing reads
            return fit_rows(gradient.new_zeros(kept.shape), call.dim, held[0], *held), None
        first, last = call.rows_read(needed[0])
        shape = [last - first if dim == call.dim else size for dim, size in enumerate(kept.shape)]
        leaf = kept.detach() if call.reads_values else gradient.new_zeros(shape)
        with torch.enable_grad():
            leaf.requires_grad_()
            made = call.compute(leaf, first, *needed[0])
            (found,) = torch.autograd.grad(made, leaf, gradient)
        return fit_rows(found, call.dim, first, *held), None


def compute_rows(
    name: str, x: ShardedValue, reads: RowReads, rows: int, compute: ComputeRows, *, reads_values: bool = False
) -> ShardedValue:
    """A value of so many rows, each computed from the rows of `x` that it reads. `name`: of the operation, for messages."""
    check_even(name, x)
    size, dim = x.part_layout.size, x.part_layout.dim
    plan_for = plan_with_values if reads_values else plan_linear
    plan = check_row_plan(_described(name, x), lambda n: plan_for(reads, size, rows, n), size, rows, x.group.size)
    call = _Call(plan, reads, compute, dim, x.group, reads_values)
    made = _FromRows.apply(x.local, call)
    x.group.note_rows(x.local, made, dim, plan)
    return _result(x, made, rows)


def _described(name: str, x: ShardedValue) -> str:
    return f"{name} of a value {list(x.shape)} whose dim {x.part_layout.dim} is cut"


# -- rows copied -----------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class _Copies:
    """One call of a function whose output rows are rows of the input, or filled."""

    plan: RowPlan
    source: tuple[int, ...]
    value: float
    dim: int
    group: ShardGroup


class _CopyContext(AutogradContext):
    call: _Copies


class _CopyRows(AutogradFunction):
    @staticmethod
    def forward(ctx: _CopyContext, x: Tensor, call: _Copies) -> Tensor:
        ctx.call, shard = call, call.group.shard
        start, stop = call.plan.outputs[shard]
        places = copied_runs(call.source[start:stop], call.plan.forward.needed[shard])
        rows = fetch_rows(x, call.dim, call.plan.forward, call.group, _HALO)
        shape = list(x.shape)
        shape[call.dim] = stop - start
        made = x.new_full(shape, call.value)
        copied = [place for place, row in enumerate(places) if row >= 0]
        if copied:
            chosen = rows.index_select(call.dim, _indices([places[place] for place in copied], x))
            made.index_copy_(call.dim, _indices(copied, x), chosen)
        return made

    @staticmethod
    @first_derivative_only
    def backward(ctx: _CopyContext, *gradients: Tensor) -> tuple[Tensor | None, ...]:
        (gradient,), call = gradients, ctx.call
        first, last = call.plan.forward.held[call.group.shard]
        needed = call.plan.backward.needed[call.group.shard]
        rows = fetch_rows(gradient, call.dim, call.plan.backward, call.group, _GRADIENTS)
        shape = list(gradient.shape)
        shape[call.dim] = last - first
        found = gradient.new_zeros(shape)
        into = [call.source[place] - first for start, stop in needed for place in range(start, stop)]
        if into:
            found.index_add_(call.dim, _indices(into, gradient), rows)
        return found, None


def _indices(values: Sequence[int], like: Tensor) -> Tensor:
    return torch.tensor(values, device=like.device)


def copy_rows(name: str, x: ShardedValue, source: tuple[int, ...], value: float = 0.0) -> ShardedValue:
    """A value whose row o is the row `source[o]` of `x`, or filled with `value` (-1)."""
    check_even(name, x)
    size = x.part_layout.size
    plan = check_row_plan(_described(name, x), lambda n: plan_copies(source, size, n), size, len(source), x.group.size)
    call = _Copies(plan, source, value, x.part_layout.dim, x.group)
    made = _CopyRows.apply(x.local, call)
    x.group.note_rows(x.local, made, call.dim, plan)
    return _result(x, made, len(source))


def pad_rows(x: ShardedValue, before: int, after: int, mode: str, name: str, value: float = 0.0) -> ShardedValue:
    """The value with so many rows around it, made as `F.pad` makes them."""
    if not before and not after:
        return x
    return copy_rows(name, x, padded_rows(x.part_layout.size, before, after, mode), value)


@implements_on_rows("pad")
def _pad(
    func: Callable[..., Tensor], x: ShardedValue, pad: Sequence[int], mode: str = "constant", value: float | None = None
) -> ShardedValue:
    """The cut dim by copies of rows, then the others."""
    sides, at = list(pad), 2 * (x.dim() - 1 - x.part_layout.dim)
    if at < len(sides):
        before, after = sides[at : at + 2]
        sides[at : at + 2] = [0, 0]
        x = pad_rows(x, before, after, mode, "pad", value or 0.0)
    return x.like(func(x.local, sides, mode, value)) if any(sides) else x


@implements_on_rows("__getitem__")
def _getitem(func: Callable[..., Tensor] | None, x: ShardedValue, index: Any) -> ShardedValue:
    """Slices of the cut dim take rows, which are shared out evenly again."""
    entries = list(index) if isinstance(index, tuple) else [index]
    if all(each is Ellipsis or each is None or isinstance(each, (int, slice)) for each in entries):
        if Ellipsis not in entries:
            entries.append(Ellipsis)
        at = entries.index(Ellipsis)
        entries[at : at + 1] = [slice(None)] * (x.dim() - sum(each is not None for each in entries) + 1)
        place = [number for number, each in enumerate(entries) if each is not None][x.part_layout.dim]
        rows = range(x.part_layout.size)[entries[place]] if isinstance(entries[place], slice) else range(0)
        if rows and rows != range(x.part_layout.size):
            x = copy_rows("a slice", x, tuple(rows))
            entries[place] = slice(None)
        index = tuple(entries)
    found: ShardedValue = IMPLEMENTATIONS["__getitem__"](None, x, index)
    return found


@implements_on_rows("flip")
def _flip(func: Callable[..., Tensor], x: ShardedValue, *dims: Any) -> ShardedValue:
    """Of dims that are not cut."""
    turned = [dim % x.dim() for dim in (dims[0] if isinstance(dims[0], (tuple, list)) else dims)]
    if x.part_layout.dim in turned:
        raise unsupported_on_part_error("flip", x)
    return x.like(x.local.flip(turned))


# -- pooling ---------------------------------------------------------------------------------------------------------------


def _of_dims(value: Any, dims: int) -> list[Any]:
    """An argument for each spatial dim."""
    found = [value] * dims if isinstance(value, int) else list(value)
    return found * dims if len(found) == 1 else found


def _spatial(name: str, x: ShardedValue, dims: int) -> int:
    """Which of the last `dims` dims is cut; -1 if none of them is."""
    at = x.part_layout.dim - (x.dim() - dims)
    if at >= 0:
        check_even(name, x)
    return max(at, -1)


@implements_on_rows("max_pool1d", "max_pool2d", "max_pool3d")
def _max_pool(
    func: Callable[..., Tensor],
    x: ShardedValue,
    kernel_size: Any,
    stride: Any = None,
    padding: Any = 0,
    dilation: Any = 1,
    ceil_mode: bool = False,
    return_indices: bool = False,
) -> ShardedValue:
    """Rows of padding are of -inf."""
    name = func.__name__
    dims = int(name[-2])
    at = _spatial(name, x, dims)
    if return_indices:
        raise unsupported_on_part_error(f"{name} with return_indices", x)
    if at < 0:
        return x.like(func(x.local, kernel_size, stride, padding, dilation, ceil_mode))
    kernels, padded, spread = (_of_dims(each, dims) for each in (kernel_size, padding, dilation))
    strides = kernels if stride is None or stride == [] else _of_dims(stride, dims)
    window = Window(kernels[at], strides[at], spread[at], padded[at], padded[at])
    padded[at] = 0
    size, dim = x.part_layout.size, x.part_layout.dim

    def compute(wide: Tensor, first: int, start: int, stop: int) -> Tensor:
        rows = _with_edges(wide, dim, first, window.reads(start, stop), size, float("-inf"))
        return func(rows, kernels, strides, padded, spread, ceil_mode)

    return compute_rows(name, x, window, window.outputs(size, ceil_mode=ceil_mode), compute, reads_values=True)


def _with_edges(wide: Tensor, dim: int, first: int, run: IndexRange, size: int, value: float) -> Tensor:
    """The run of rows that are read, of rows `wide` from number `first` on; rows of `value` where the whole value ends."""
    start, stop = max(0, run[0]), min(size, run[1])
    wide = wide.narrow(dim, start - first, stop - start)
    sides = [0] * (2 * (wide.dim() - 1 - dim)) + [start - run[0], run[1] - stop]
    return F.pad(wide, sides, value=value) if any(sides) else wide


@implements_on_rows("avg_pool1d", "avg_pool2d", "avg_pool3d")
def _avg_pool(
    func: Callable[..., Tensor],
    x: ShardedValue,
    kernel_size: Any,
    stride: Any = None,
    padding: Any = 0,
    ceil_mode: bool = False,
    count_include_pad: bool = True,
    divisor_override: int | None = None,
) -> ShardedValue:
    """Rows of padding are of zeros. Where PyTorch divides by fewer rows at an edge, the mean is multiplied."""
    name = func.__name__
    dims = int(name[-2])
    at = _spatial(name, x, dims)
    more = [divisor_override] if dims > 1 else []
    if at < 0:
        return x.like(func(x.local, kernel_size, stride, padding, ceil_mode, count_include_pad, *more))
    kernels, padded = _of_dims(kernel_size, dims), _of_dims(padding, dims)
    strides = kernels if stride is None or stride == [] else _of_dims(stride, dims)
    window = Window(kernels[at], strides[at], 1, padded[at], padded[at])
    padded[at] = 0
    size, dim = x.part_layout.size, x.part_layout.dim

    def compute(wide: Tensor, first: int, start: int, stop: int) -> Tensor:
        rows = _with_edges(wide, dim, first, window.reads(start, stop), size, 0.0)
        made = func(rows, kernels, strides, padded, ceil_mode, count_include_pad, *more)
        edges = (-window.before, size + window.after) if count_include_pad else (0, size)
        counts = [min(b, edges[1]) - max(a, edges[0]) for a, b in (window.reads(o, o + 1) for o in range(start, stop))]
        if divisor_override or set(counts) == {window.kernel}:
            return made
        factors = torch.tensor([window.kernel / count for count in counts], dtype=made.dtype, device=made.device)
        return made * factors.view(-1, *[1] * (made.dim() - 1 - dim))

    return compute_rows(name, x, window, window.outputs(size, ceil_mode=ceil_mode), compute)


@implements_on_rows(*(f"adaptive_{kind}_pool{dims}d" for kind in ("avg", "max") for dims in (1, 2, 3)))
def _adaptive_pool(
    func: Callable[..., Tensor], x: ShardedValue, output_size: Any, return_indices: bool = False
) -> ShardedValue | Tensor:
    """To a divisor of the rows, as pooling; the mean of all rows is a sum over shards, and whole."""
    name, size = func.__name__, x.part_layout.size
    dims = int(name[-2])
    at = _spatial(name, x, dims)
    wanted = list(x.shape[-dims:])
    given = [output_size] * dims if output_size is None or isinstance(output_size, int) else list(output_size)
    wanted = [own if each is None else each for own, each in zip(wanted, given, strict=True)]
    if return_indices:
        raise unsupported_on_part_error(f"{name} with return_indices", x)
    if at < 0:
        return x.like(func(x.local, wanted))
    rows = wanted[at]
    if rows == 1 and "avg" in name:
        x.check_recorded()
        own = func(x.local, wanted) * (x.local.shape[x.part_layout.dim] / size)
        x.group.note_sum(own, [place for place in range(x.dim()) if own.shape[place] > 1 or place < x.dim() - dims], x.dim())
        return reduce_from_shards(own, x.group)
    if size % rows or rows < x.group.size:
        raise unsupported_on_part_error(
            f"{name} to {rows} of {size} rows", x, "needs rows of several shards for a row, or leaves a shard without any"
        )

    def compute(wide: Tensor, first: int, start: int, stop: int) -> Tensor:
        run = wide.narrow(x.part_layout.dim, start * each - first, (stop - start) * each)
        return func(run, [stop - start if place == at else n for place, n in enumerate(wanted)])

    each = size // rows
    return compute_rows(name, x, Window(each, each), rows, compute, reads_values="max" in name)


# -- interpolation ---------------------------------------------------------------------------------------------------------

_MARGINS = {"nearest": 0, "nearest-exact": 0, "area": 0, "linear": 1, "bilinear": 1, "trilinear": 1, "bicubic": 2}
"""Mode -> rows on both sides of the nearest one that an output row may read, where sizes are enlarged."""


@implements_on_rows("interpolate", "upsample")
def _interpolate(
    func: Callable[..., Tensor],
    x: ShardedValue,
    size: Any = None,
    scale_factor: Any = None,
    mode: str = "nearest",
    align_corners: bool | None = None,
    recompute_scale_factor: bool | None = None,
    antialias: bool = False,
) -> ShardedValue:
    """By a whole factor."""
    dims = x.dim() - 2
    at = _spatial("interpolate", x, dims)
    rows, dim = x.part_layout.size, x.part_layout.dim
    options = {"mode": mode, "align_corners": align_corners, "recompute_scale_factor": recompute_scale_factor}
    if at < 0:
        return x.like(F.interpolate(x.local, size, scale_factor, antialias=antialias, **options))  # type: ignore[arg-type]
    sizes = None if size is None else _of_dims(size, dims)
    factors = [scale_factor] * dims if isinstance(scale_factor, (int, float)) else scale_factor and [*scale_factor]
    factor = sizes[at] / rows if sizes else factors[at]
    if factor != int(factor) or factor < 1 or align_corners or antialias or mode not in _MARGINS:
        raise unsupported_on_part_error(
            f"interpolate ({mode}{', align_corners' * bool(align_corners)}) by {factor:g}",
            x,
            "is possible by whole factors, without align_corners and antialias",
        )
    reads = Enlargement(int(factor), _MARGINS[mode])

    def compute(wide: Tensor, first: int, start: int, stop: int) -> Tensor:
        asked = None if sizes is None else [wide.shape[dim] * reads.factor if k == at else n for k, n in enumerate(sizes)]
        made = F.interpolate(wide, asked, factors, **options)  # type: ignore[arg-type]
        return made.narrow(dim, start - first * reads.factor, stop - start)

    return compute_rows("interpolate", x, reads, rows * reads.factor, compute)


# -- sums ------------------------------------------------------------------------------------------------------------------


@implements_on_rows("mean", "sum")
def _reduce(
    func: Callable[..., Tensor],
    x: ShardedValue,
    dim: int | Sequence[int] | None = None,
    keepdim: bool = False,
    *,
    dtype: torch.dtype | None = None,
) -> ShardedValue | Tensor:
    """Over the cut dim too: a sum over shards, which is whole."""
    dims = [dim] if isinstance(dim, int) else list(range(x.dim())) if dim is None else list(dim)
    if x.part_layout.dim not in [each % x.dim() for each in dims]:
        found: ShardedValue = IMPLEMENTATIONS["sum"](func, x, dim, keepdim, dtype=dtype)
        return found
    x.check_recorded()
    own = x.local.sum(dims, keepdim, dtype=dtype)
    x.group.note_sum(own, set(range(x.dim())) - {each % x.dim() for each in dims}, x.dim())
    total = reduce_from_shards(own, x.group)
    return total / prod(x.shape[each] for each in dims) if func.__name__ == "mean" else total


# -- norms -----------------------------------------------------------------------------------------------------------------


def _whole(x: ShardedValue, parameter: Tensor | None) -> Any:
    """A parameter that each shard computes with its rows: its gradient is a sum over shards."""
    return None if parameter is None else take_part(parameter, 0, ((0, parameter.shape[0]),), x.group)


def _by_channel(x: ShardedValue, made: Tensor, weight: Tensor | None, bias: Tensor | None) -> ShardedValue:
    """A normalised value, times its channels' weights, plus their biases."""
    shape = [1, -1, *[1] * (x.dim() - 2)]
    if weight is not None:
        made = made * _whole(x, weight).view(shape)
    if bias is not None:
        made = made + _whole(x, bias).view(shape)
    return x.like(made)


def _normalised_in_groups(x: ShardedValue, groups: int, eps: float) -> Tensor:
    """Each group of channels of each sample by its own statistics, over all shards."""
    local = x.local.contiguous()
    made, _ = normalise_over_pieces(local.view(1, len(local) * groups, -1), None, None, eps, x.group)
    return made.view(local.shape)


@implements_on_rows("instance_norm")
def _instance_norm(
    func: Callable[..., Tensor],
    x: ShardedValue,
    running_mean: Tensor | None = None,
    running_var: Tensor | None = None,
    weight: Tensor | None = None,
    bias: Tensor | None = None,
    use_input_stats: bool = True,
    momentum: float = 0.1,
    eps: float = 1e-5,
) -> ShardedValue:
    """Each channel of each sample by its statistics over all shards, without running statistics."""
    if x.part_layout.dim < 2 or running_mean is not None or not use_input_stats:
        raise unsupported_on_part_error("instance_norm", x, "is possible without running statistics, by rows")
    return _by_channel(x, _normalised_in_groups(x, x.shape[1], eps), weight, bias)


@implements_on_rows("group_norm")
def _group_norm(
    func: Callable[..., Tensor],
    x: ShardedValue,
    num_groups: int,
    weight: Tensor | None = None,
    bias: Tensor | None = None,
    eps: float = 1e-5,
) -> ShardedValue:
    """Each group of channels of each sample by its statistics over all shards."""
    if x.part_layout.dim < 2:
        raise unsupported_on_part_error("group_norm", x)
    return _by_channel(x, _normalised_in_groups(x, num_groups, eps), weight, bias)


@implements_on_rows("layer_norm")
def _layer_norm(
    func: Callable[..., Tensor],
    x: ShardedValue,
    normalized_shape: Sequence[int],
    weight: Tensor | None = None,
    bias: Tensor | None = None,
    eps: float = 1e-5,
) -> ShardedValue:
    """Over last dims; over the cut one too by statistics over all shards."""
    at = x.part_layout.dim - (x.dim() - len(normalized_shape))
    if at < 0:
        return x.like(func(x.local, normalized_shape, _whole(x, weight), _whole(x, bias), eps))
    local = x.local.contiguous()
    outer = prod(local.shape[: x.dim() - len(normalized_shape)])
    made, _ = normalise_over_pieces(local.view(1, outer, -1), None, None, eps, x.group)
    found = x.like(made.view(local.shape))
    for operation, parameter in ((torch.mul, weight), (torch.add, bias)):
        found = found if parameter is None else IMPLEMENTATIONS["mul"](operation, found, parameter)
    return found


# -- dropout of channels, others -------------------------------------------------------------------------------------------


@implements_on_rows("dropout1d", "dropout2d", "dropout3d")
def _drop_channels(
    func: Callable[..., Tensor], x: ShardedValue, p: float = 0.5, training: bool = True, inplace: bool = False
) -> ShardedValue:
    """The mask is drawn, one number for each sample and channel, which is every shard's."""
    if not training or p == 0.0:
        return x
    if x.part_layout.dim < 2 or x.dim() != int(func.__name__[-2]) + 2:
        raise unsupported_on_part_error(func.__name__, x)
    with torch.no_grad():
        ones = torch.ones([*x.shape[:2], *[1] * (x.dim() - 2)], dtype=x.local.dtype, device=x.local.device)
        mask = func(ones, p, True)
    if inplace:  # other names of the value see it
        x.like(x.local.mul_(mask))
        return x
    return x.like(x.local * mask)
