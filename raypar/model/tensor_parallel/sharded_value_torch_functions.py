"""Torch functions on a part of a value, where the parts of other shards are not needed: the table behind `ShardedValue`."""

from __future__ import annotations

import operator
from collections.abc import Callable, Sequence
from functools import lru_cache
from math import prod
from typing import Any, TypeAlias

import torch
import torch.nn.functional as F
from torch import Tensor

from raypar.errors import ModelError
from raypar.model.tensor_parallel.autograd_collectives import select_ranges
from raypar.model.tensor_parallel.layout_of_whole import memory_order
from raypar.model.tensor_parallel.local_part_layout import LocalPartLayout
from raypar.model.tensor_parallel.sharded_value import (
    ShardedValue,
    common_ranges,
    implements_on_parts,
    narrow_part,
    take_common_part_of_operands,
    take_part,
    unsupported_on_part_error,
)
from raypar.plan.shard_ranges import IndexRanges, count_indices, merge_ranges, ranges_within, scale_ranges, shift_ranges

Operand: TypeAlias = Tensor | ShardedValue | torch.dtype | torch.device | float | str | Sequence[int] | None
"""What torch functions are given besides their first tensor."""

# -- element by element ------------------------------------------------------------------------------------------------

# fmt: off
ELEMENTWISE = (
    "abs", "add", "addcmul", "bfloat16", "bool", "ceil", "celu", "clamp", "clamp_max", "clamp_min", "clone", "contiguous",
    "cos", "cosh", "div", "double", "elu", "eq", "erf", "exp", "expm1", "float", "floor", "fmod", "ge", "gelu", "gt",
    "half", "hardsigmoid", "hardswish", "hardtanh", "le", "leaky_relu", "lerp", "log", "log1p", "logsigmoid", "lt",
    "masked_fill", "maximum", "minimum", "mish", "mul", "ne", "neg", "pow", "reciprocal", "relu", "relu6", "remainder", "round",
    "rsqrt", "rsub", "selu", "sigmoid", "sign", "silu", "sin", "softplus", "softsign", "sqrt", "square", "sub", "tanh",
    "tanhshrink", "to", "true_divide", "type", "type_as", "where",
)
# fmt: on


@implements_on_parts(*ELEMENTWISE, any_place=True)
def elementwise_on_parts(func: Callable[..., Tensor], *args: Any, **kwargs: Any) -> ShardedValue:
    """Any function that computes each element from the elements at the same place, broadcast or not."""
    if func.__name__ in ("to", "type", "type_as"):
        x: ShardedValue = args[0]
        if not isinstance(x, ShardedValue):
            raise unsupported_on_part_error(func.__name__, args[1])
        return x.like(func(x.local, *(a.local if isinstance(a, ShardedValue) else a for a in args[1:]), **kwargs))
    tensors, model = take_common_part_of_operands(func.__name__, [*args, *kwargs.values()])
    made = func(*tensors[: len(args)], **dict(zip(kwargs, tensors[len(args) :], strict=True)))
    return model.like(made)


def _write_into(
    func: Callable[..., Tensor], x: ShardedValue, other: Tensor | ShardedValue | float, *args: Operand, **kwargs: Operand
) -> ShardedValue:
    """`x += other`: writes into the part itself, so that views and other names of `x` see it, as with a whole tensor."""
    (part, operand), _ = take_common_part_of_operands(func.__name__, (x, other))
    if part is not x.local:
        raise unsupported_on_part_error(func.__name__, x, "would write into less than is here")
    x.like(func(part, operand, *args, **kwargs))
    return x


def _add_operators() -> None:
    """Give `ShardedValue` its operators: `a + b` with its mirrored form and `a += b`, `a < b`, `a @ b`."""
    for name in ("add", "sub", "mul", "truediv", "pow", "floordiv", "mod"):
        function = getattr(operator, name)
        setattr(ShardedValue, f"__{name}__", lambda self, other, f=function: elementwise_on_parts(f, self, other))
        setattr(ShardedValue, f"__r{name}__", lambda self, other, f=function: elementwise_on_parts(f, other, self))
        into = getattr(operator, f"i{name}")
        setattr(ShardedValue, f"__i{name}__", lambda self, other, f=into: _write_into(f, self, other))
    for name in ("lt", "le", "gt", "ge", "eq", "ne"):
        function = getattr(operator, name)
        setattr(ShardedValue, f"__{name}__", lambda self, other, f=function: elementwise_on_parts(f, self, other))
    for name, whole in (
        ("__neg__", lambda self: self.like(-self.local)),
        ("__matmul__", lambda self, other: matmul_sharded_values(torch.matmul, self, other)),
        ("__rmatmul__", lambda self, other: matmul_sharded_values(torch.matmul, other, self)),
    ):
        setattr(ShardedValue, name, whole)


_add_operators()


@implements_on_parts("detach")
def _detach(func: Callable[..., Tensor], x: ShardedValue) -> ShardedValue:
    """Also where no gradients are recorded."""
    return ShardedValue(x.local.detach(), x.part_layout, x.group)


@implements_on_parts("dropout")
def _dropout(
    func: Callable[..., Tensor], x: ShardedValue, p: float = 0.5, training: bool = True, inplace: bool = False
) -> ShardedValue:
    """The whole value's mask is drawn: whether an element is dropped depends on its place in the whole value alone."""
    if not training or p == 0.0:
        return x
    mask = dropout_mask(x, p)
    if inplace:  # other names of the value see it
        x.like(x.local.mul_(mask))
        return x
    return x.like(x.local * mask)


def dropout_mask(x: ShardedValue, p: float) -> Tensor:
    """This shard's part of the mask, scaled, by which `F.dropout` multiplies the whole value. It is drawn in the order of
    memory, in which the whole value's dims lie as the part's, or as it is known of parts of one index."""
    order, shape = _order_in_memory(x)
    with torch.no_grad():
        drawn = F.dropout(torch.ones(shape, dtype=x.local.dtype, device=x.local.device), p, True)
        drawn = drawn.permute([order.index(dim) for dim in range(x.dim())])
        return select_ranges(drawn, x.part_layout.dim, x.part_layout.ranges)


def _order_in_memory(x: ShardedValue) -> tuple[list[int], list[int]]:
    """(dims of the whole value, outermost first, their sizes): as those of the part lie, if its memory has no gaps."""
    layout = x.layout_of_whole() if x.has_single_index else None
    whole = layout.tensor() if layout is not None and layout.may_be_moved else None
    order = memory_order(x.local if whole is None else whole)
    return order, [x.shape[dim] for dim in order]


def _drawn(x: ShardedValue, draw: Callable[..., Tensor], *args: Operand, **kwargs: Operand) -> Tensor:
    """This shard's part of what `draw` makes of a tensor like the whole value."""
    if any(isinstance(each, (Tensor, ShardedValue)) for each in (*args, *kwargs.values())):
        raise unsupported_on_part_error(draw.__name__, x, "reads a tensor: which numbers are drawn depends on it")
    order, shape = _order_in_memory(x)
    with torch.no_grad():
        whole = torch.empty(shape, dtype=x.local.dtype, device=x.local.device)
        drawn = draw(whole.permute([order.index(dim) for dim in range(x.dim())]), *args, **kwargs)
        return select_ranges(drawn, x.part_layout.dim, x.part_layout.ranges)


@implements_on_parts("bernoulli_", "exponential_", "normal_", "uniform_")
def _draw_into(func: Callable[..., Tensor], x: ShardedValue, *args: Operand, **kwargs: Operand) -> ShardedValue:
    """Random numbers into the part: those at the same places of the whole value, for which all are drawn."""
    x.check_recorded()
    x.local.copy_(_drawn(x, func, *args, **kwargs))
    return x


@implements_on_parts("rand_like", "randint_like", "randn_like")
def _draw_like(func: Callable[..., Tensor], x: ShardedValue, *args: Operand, **kwargs: Any) -> ShardedValue:
    """Random numbers of the whole value's shape, all of which are drawn."""
    needs_gradient = bool(kwargs.pop("requires_grad", False))
    return ShardedValue(_drawn(x, func, *args, **kwargs).requires_grad_(needs_gradient), x.part_layout, x.group)


# -- shape -------------------------------------------------------------------------------------------------------------


def _sizes(shape: Sequence[Any]) -> Sequence[int]:
    return shape[0] if len(shape) == 1 and isinstance(shape[0], (tuple, list, torch.Size)) else shape


@implements_on_parts("view", "reshape")
def _view(
    func: Callable[..., Tensor], x: ShardedValue, *shape: int | Sequence[int] | torch.dtype, **kwargs: Any
) -> ShardedValue:
    """To another shape; a view as another dtype is refused."""
    if shape and isinstance(shape[0], torch.dtype):
        raise unsupported_on_part_error("view(dtype)", x)
    return x.reshaped(_sizes(kwargs.get("shape", shape)))


@implements_on_parts("view_as", "reshape_as")
def _view_as(func: Callable[..., Tensor], x: ShardedValue, other: Tensor | ShardedValue) -> ShardedValue:
    """To the shape of another value."""
    return x.reshaped(other.shape)


@implements_on_parts("flatten")
def _flatten(func: Callable[..., Tensor], x: ShardedValue, start_dim: int = 0, end_dim: int = -1) -> ShardedValue:
    """Several dims become one."""
    shape, start, end = list(x.shape), start_dim % x.dim(), end_dim % x.dim()
    return x.reshaped([*shape[:start], prod(shape[start : end + 1]), *shape[end + 1 :]])


@implements_on_parts("unflatten")
def _unflatten(func: Callable[..., Tensor], x: ShardedValue, dim: int, sizes: Sequence[int]) -> ShardedValue:
    """One dim becomes several."""
    shape, at = list(x.shape), dim % x.dim()
    known = prod(n for n in sizes if n != -1)
    return x.reshaped([*shape[:at], *(shape[at] // known if n == -1 else n for n in sizes), *shape[at + 1 :]])


def _moved(x: ShardedValue, order: Sequence[int]) -> ShardedValue:
    return ShardedValue(x.local.permute(*order), x.part_layout.moved_to(list(order).index(x.part_layout.dim)), x.group)


@implements_on_parts("permute")
def _permute(func: Callable[..., Tensor], x: ShardedValue, *dims: int | Sequence[int]) -> ShardedValue:
    """The dims in another order."""
    return _moved(x, [d % x.dim() for d in _sizes(dims)])


@implements_on_parts("transpose", "swapaxes", "swapdims")
def _transpose(func: Callable[..., Tensor], x: ShardedValue, dim0: int, dim1: int) -> ShardedValue:
    """Two dims exchanged."""
    order = list(range(x.dim()))
    a, b = dim0 % x.dim(), dim1 % x.dim()
    order[a], order[b] = order[b], order[a]
    return _moved(x, order)


@implements_on_parts("movedim", "moveaxis")
def _movedim(func: Callable[..., Tensor], x: ShardedValue, source: int, destination: int) -> ShardedValue:
    """One dim at another place."""
    order = [d for d in range(x.dim()) if d != source % x.dim()]
    order.insert(destination % x.dim(), source % x.dim())
    return _moved(x, order)


@implements_on_parts("unsqueeze")
def _unsqueeze(func: Callable[..., Tensor], x: ShardedValue, dim: int) -> ShardedValue:
    """A new dim of size 1."""
    at = dim % (x.dim() + 1)
    return ShardedValue(x.local.unsqueeze(at), x.part_layout.moved_to(x.part_layout.dim + (at <= x.part_layout.dim)), x.group)


@implements_on_parts("squeeze")
def _squeeze(func: Callable[..., Tensor], x: ShardedValue, dim: int | None = None) -> ShardedValue:
    """Without a dim of size 1."""
    if dim is None:
        raise unsupported_on_part_error("squeeze without a dim", x, "would depend on the size of the part")
    at = dim % x.dim()
    if x.shape[at] != 1:
        return x
    if at == x.part_layout.dim:
        raise unsupported_on_part_error("squeeze", x)
    return ShardedValue(x.local.squeeze(at), x.part_layout.moved_to(x.part_layout.dim - (at < x.part_layout.dim)), x.group)


@implements_on_parts("expand", "broadcast_to")
def _expand(func: Callable[..., Tensor], x: ShardedValue, *sizes: int | Sequence[int]) -> ShardedValue:
    """Repeats dims of size 1, but not the cut dim."""
    shape = list(_sizes(sizes))
    new = len(shape) - x.dim()
    at = x.part_layout.dim + new
    if shape[at] not in (-1, x.part_layout.size):
        raise unsupported_on_part_error("expand", x, "repeats the cut dim")
    shape[at] = x.local.shape[x.part_layout.dim]
    return ShardedValue(x.local.expand(*shape), x.part_layout.moved_to(at), x.group)


@implements_on_parts("repeat_interleave")
def _repeat_interleave(
    func: Callable[..., Tensor], x: ShardedValue, repeats: int, dim: int | None = None, **kwargs: Operand
) -> ShardedValue:
    """Each index of a dim several times over: a key head for each of its query heads."""
    if dim is None or not isinstance(repeats, int):
        raise unsupported_on_part_error("repeat_interleave", x)
    at, part = dim % x.dim(), x.part_layout
    if at == part.dim:
        part = LocalPartLayout(at, part.size * repeats, scale_ranges(part.ranges, repeats), part.axis)
    return ShardedValue(x.local.repeat_interleave(repeats, at), part, x.group)


@implements_on_parts("unbind")
def _unbind(func: Callable[..., Tensor], x: ShardedValue, dim: int = 0) -> tuple[ShardedValue, ...]:
    """Slices along a dim that is not cut."""
    at = dim % x.dim()
    if at == x.part_layout.dim:
        raise unsupported_on_part_error("unbind", x)
    part = x.part_layout.moved_to(x.part_layout.dim - (at < x.part_layout.dim))
    return tuple(ShardedValue(local, part, x.group) for local in x.local.unbind(at))


@implements_on_parts("split", "chunk")
def _split(
    func: Callable[..., Tensor | tuple[Tensor, ...]],
    x: ShardedValue,
    sizes: int | Sequence[int] | None = None,
    dim: int = 0,
    **kwargs: Any,
) -> tuple[ShardedValue, ...]:
    """Pieces along a dim. Along the cut dim each is what this shard has of the whole piece (q, k, v of a fused layer)."""
    if sizes is None:
        (sizes,) = kwargs.values()  # split_size, split_size_or_sections, chunks
    at = dim % x.dim()
    if at != x.part_layout.dim:
        return tuple(x.like(part) for part in getattr(torch, func.__name__)(x.local, sizes, at))
    if isinstance(sizes, int):
        step = -(-x.part_layout.size // sizes) if func.__name__ == "chunk" else sizes
        sizes = [min(step, x.part_layout.size - start) for start in range(0, x.part_layout.size, step)]
    pieces, start, local = [], 0, 0
    for size in sizes:
        ranges = ranges_within(x.part_layout.ranges, start, start + size)
        part = LocalPartLayout(at, size, ranges, x.part_layout.axis)
        pieces.append(ShardedValue(x.local.narrow(at, local, count_indices(ranges)), part, x.group))
        start, local = start + size, local + count_indices(ranges)
    return tuple(pieces)


@implements_on_parts("__getitem__", "select", "narrow")
def _getitem(func: Callable[..., Tensor] | None, x: ShardedValue, *index: Any) -> ShardedValue:
    """Slices, numbers, None and Ellipsis that leave the cut dim whole."""
    if func is not None and func.__name__ != "__getitem__":
        if index[0] % x.dim() == x.part_layout.dim:
            raise unsupported_on_part_error(func.__name__, x)
        if func.__name__ == "narrow":
            return x.like(x.local.narrow(*index))
        part = x.part_layout.moved_to(x.part_layout.dim - (index[0] % x.dim() < x.part_layout.dim))
        return ShardedValue(x.local.select(*index), part, x.group)
    entries = [_as_slice(e) for e in (index[0] if isinstance(index[0], tuple) else (index[0],))]
    if not all(e is None or e is Ellipsis or isinstance(e, (int, slice)) for e in entries):
        raise unsupported_on_part_error("indexing", x, "by tensors or lists is not possible on a part")
    if Ellipsis not in entries:
        entries.append(Ellipsis)
    at = entries.index(Ellipsis)
    entries[at : at + 1] = [slice(None)] * (x.dim() - sum(e is not None for e in entries) + 1)
    dim = place = 0
    for entry in entries:
        if entry is None:
            place += 1
            continue
        if dim == x.part_layout.dim:
            break
        place += not isinstance(entry, int)
        dim += 1
    own = entry
    if isinstance(own, slice) and own.indices(x.part_layout.size)[2] == 1:
        start, stop, _ = own.indices(x.part_layout.size)
        if (start, stop) != (0, x.part_layout.size):  # what is here of a piece of the cut dim, as of `split`
            sizes = [start, max(0, stop - start), x.part_layout.size - max(start, stop)]
            piece = _split(torch.split, x, sizes, x.part_layout.dim)[1]
            found: ShardedValue = _getitem(None, piece, tuple(slice(None) if e is own else e for e in entries))
            return found
    else:
        raise unsupported_on_part_error("indexing", x, "along that dim needs the parts of other shards")
    # A slice to the whole's end is one to the part's end.
    entries = [slice(None) if e is own and isinstance(e, slice) else e for e in entries]
    return ShardedValue(x.local[tuple(entries)], x.part_layout.moved_to(place), x.group)


@implements_on_parts("masked_fill_")
def _fill_into(
    func: Callable[..., Tensor], x: ShardedValue, mask: Tensor | ShardedValue, value: float | Tensor
) -> ShardedValue:
    """As `masked_fill`, into the part itself."""
    return _write_into(func, x, mask, value)


@implements_on_parts("is_complex", "is_floating_point")
def _asked_of_dtype(func: Callable[..., bool], x: ShardedValue) -> bool:
    """Of the part's dtype."""
    return func(x.local)


@implements_on_parts("div_", "mul_")
def _scale_into(
    func: Callable[..., Tensor], x: ShardedValue, other: Tensor | ShardedValue | float, **kwargs: Operand
) -> ShardedValue:
    """As `*=` and `/=`: drop paths scale what they have drawn."""
    return _write_into(func, x, other, **kwargs)


@implements_on_parts("copy_")
def _copy_into(func: Callable[..., Tensor], x: ShardedValue, source: Tensor | ShardedValue, *args: Operand) -> ShardedValue:
    """A value into memory that is cut as it is."""
    return _write_into(Tensor.copy_, x, source)


@implements_on_parts("new_empty", "new_zeros", "new_ones")
def _new(func: Callable[..., Tensor], x: ShardedValue, *shape: int | Sequence[int], **kwargs: Any) -> ShardedValue:
    """Of a shape that has the cut dim, at the same place."""
    sizes = list(_sizes(shape)) if shape else list(kwargs.pop("size"))
    part = x.part_layout
    if len(sizes) != x.dim() or sizes[part.dim] != part.size:
        raise unsupported_on_part_error(func.__name__, x)
    sizes[part.dim] = count_indices(part.ranges)
    return ShardedValue(getattr(x.local, func.__name__)(sizes, **kwargs), part, x.group)


@implements_on_parts("empty_like", "full_like", "ones_like", "zeros_like")
def _new_like(func: Callable[..., Tensor], x: ShardedValue, *args: Operand, **kwargs: Operand) -> ShardedValue:
    """Of the value's shape."""
    return ShardedValue(func(x.local, *args, **kwargs), x.part_layout, x.group)


def _as_slice(entry: Any) -> Any:
    """A list of one number as the slice that it is."""
    if isinstance(entry, list) and len(entry) == 1 and type(entry[0]) is int:
        return slice(entry[0], entry[0] + 1 or None)
    return entry


@implements_on_parts("cat", "concat", "stack", any_place=True)
def _cat(func: Callable[..., Tensor], tensors: Sequence[Tensor | ShardedValue], dim: int = 0) -> ShardedValue:
    """Along a dim that is not cut; along the cut dim, where all are cut: this shard then has a part of each."""
    first = next(each for each in tensors if isinstance(each, ShardedValue))
    if func.__name__ != "stack" and dim % first.dim() == first.part_layout.dim:
        return _cat_of_parts(func.__name__, first, tensors)
    parts, model = take_common_part_of_operands(func.__name__, tensors)
    if func.__name__ == "stack":
        at = dim % (model.dim() + 1)
        return ShardedValue(
            torch.stack(parts, at),
            model.part_layout.moved_to(model.part_layout.dim + (at <= model.part_layout.dim)),
            model.group,
        )
    return model.like(torch.cat(parts, dim))


def _cat_of_parts(name: str, first: ShardedValue, tensors: Sequence[Tensor | ShardedValue]) -> ShardedValue:
    """Values that are all cut along the dim along which they are joined. Raises `ModelError` if one is not."""
    parts: list[Tensor] = []
    held: IndexRanges = ()
    size = 0
    for each in tensors:
        if not isinstance(each, ShardedValue) or each.part_layout.dim != first.part_layout.dim:
            raise unsupported_on_part_error(name, first, "meets one that is not cut along that dim")
        parts.append(each.local)
        held += shift_ranges(each.part_layout.ranges, size)
        size += each.part_layout.size
    part = LocalPartLayout(first.part_layout.dim, size, merge_ranges(held), first.part_layout.axis)
    first.check_recorded()
    return ShardedValue(torch.cat(parts, part.dim), part, first.group)


# -- sums over other dims, products ------------------------------------------------------------------------------------


@implements_on_parts("mean", "sum", "amax", "amin", "var", "std")
def _reduce(
    func: Callable[..., Tensor], x: ShardedValue, dim: int | Sequence[int] | None = None, *args: Operand, **kwargs: Operand
) -> ShardedValue:
    """Over dims that are not cut. Other arguments are passed on."""
    dims = [dim] if type(dim) is int else dim
    if not isinstance(dims, (list, tuple)) or not dims or any(d % x.dim() == x.part_layout.dim for d in dims):
        raise unsupported_on_part_error(func.__name__, x)
    x.check_recorded()
    made = func(x.local, dim, *args, **kwargs)
    before = 0 if made.dim() == x.dim() else sum(d % x.dim() < x.part_layout.dim for d in dims)
    return ShardedValue(made, x.part_layout.moved_to(x.part_layout.dim - before), x.group)


@implements_on_parts("softmax", "log_softmax", "cumsum")
def _along(
    func: Callable[..., Tensor],
    x: ShardedValue,
    dim: int,
    *args: Operand,
    **kwargs: Operand,
) -> ShardedValue:
    """Along a dim that is not cut."""
    if dim % x.dim() == x.part_layout.dim:
        raise unsupported_on_part_error(func.__name__, x)
    return x.like(func(x.local, dim, *args, **kwargs))


@implements_on_parts("view_as_complex", "view_as_real")
def _pairs(func: Callable[..., Tensor], x: ShardedValue) -> ShardedValue:
    """Pairs in the last dim as complex numbers, or back; the cut dim is another."""
    if func.__name__ == "view_as_complex" and x.part_layout.dim == x.dim() - 1:
        raise unsupported_on_part_error(func.__name__, x)
    return x.like(func(x.local))


@implements_on_parts("pad")
def _pad(
    func: Callable[..., Tensor],
    x: ShardedValue,
    pad: Sequence[int],
    *args: Operand,
    **kwargs: Operand,
) -> ShardedValue:
    """Of dims that are not cut."""
    if len(pad) // 2 >= x.dim() - x.part_layout.dim:
        raise unsupported_on_part_error(func.__name__, x)
    return x.like(func(x.local, pad, *args, **kwargs))


@implements_on_parts("normalize")
def _normalize(
    func: Callable[..., Tensor],
    x: ShardedValue,
    p: float = 2.0,
    dim: int = 1,
    *args: Operand,
    **kwargs: Operand,
) -> ShardedValue:
    """Along a dim that is not cut."""
    if dim % x.dim() == x.part_layout.dim:
        raise unsupported_on_part_error(func.__name__, x)
    return x.like(func(x.local, p, dim, *args, **kwargs))


@implements_on_parts("layer_norm", "rms_norm")
def _norm(
    func: Callable[..., Tensor],
    x: ShardedValue,
    normalized_shape: Sequence[int],
    *args: Operand,
    **kwargs: Operand,
) -> ShardedValue:
    """Over last dims that are not cut. The gradients of weight and bias are sums over shards."""
    if x.part_layout.dim >= x.dim() - len(normalized_shape):
        raise unsupported_on_part_error(func.__name__, x)
    return x.like(func(x.local, normalized_shape, *_seen(x, args), **dict(zip(kwargs, _seen(x, kwargs.values()), strict=True))))


def _seen(x: ShardedValue, values: Any) -> list[Any]:
    """Whole tensors that are computed with a part: their gradients are sums over shards. Other values as they are."""
    return [take_part(v, 0, ((0, v.shape[0]),), x.group) if isinstance(v, Tensor) else v for v in values]


@implements_on_parts("linear")
def _linear(func: Callable[..., Tensor], x: ShardedValue, weight: Tensor, bias: Tensor | None = None) -> ShardedValue:
    """A whole linear layer on a part of the rows."""
    if x.part_layout.dim == x.dim() - 1:
        raise unsupported_on_part_error("linear", x)
    return x.like(F.linear(x.local, *_seen(x, (weight, bias))))


@implements_on_parts("matmul", "bmm", any_place=True)
def matmul_sharded_values(func: Callable[..., Tensor], left: Tensor | ShardedValue, right: Any) -> ShardedValue:
    """Two parts that are cut along the same batch dim; or a part and a whole matrix that does not sum over what is cut."""
    cut: ShardedValue = left if isinstance(left, ShardedValue) else right
    back, ranges = cut.dim() - cut.part_layout.dim, cut.part_layout.ranges
    summed = 1 if cut is left else 2
    if left.dim() < 2 or right.dim() < 2 or back == summed:
        raise unsupported_on_part_error("matmul", cut)
    if isinstance(left, ShardedValue) and isinstance(right, ShardedValue):
        if back < 3 or right.dim() - right.part_layout.dim != back:
            raise unsupported_on_part_error("matmul", left, "needs both to be cut along the same batch dim")
        ranges = common_ranges("matmul", ranges, right)
        parts = [narrow_part(left, ranges).local, narrow_part(right, ranges).local]
    else:
        parts = [_beside(cut, x, back) for x in (left, right)]
    cut.check_recorded()
    made = torch.matmul(*parts)
    return ShardedValue(made, LocalPartLayout(made.dim() - back, cut.part_layout.size, ranges, cut.part_layout.axis), cut.group)


def _beside(cut: ShardedValue, x: Tensor | ShardedValue, back: int) -> Tensor:
    """A factor of a product: the part itself, or what is multiplied with the part of a whole tensor."""
    if isinstance(x, ShardedValue):
        return x.local
    if back > 2 and x.dim() >= back and x.shape[-back] != 1:
        return take_part(x, x.dim() - back, cut.part_layout.ranges, cut.group)
    return take_part(x, 0, ((0, x.shape[0]),), cut.group)


@implements_on_parts("einsum", any_place=True)
def _einsum(func: Callable[..., Tensor], equation: str, *operands: Tensor | ShardedValue) -> ShardedValue:
    """Where no operand is summed over what is cut, and all that are cut are cut along the same letter."""
    values = list(operands[0]) if len(operands) == 1 and isinstance(operands[0], (list, tuple)) else list(operands)
    sharded = [v for v in values if isinstance(v, ShardedValue)]
    first = next((v for v in sharded if not _is_all_here(v)), sharded[0])
    terms, result = _letters_of(equation, first, values)
    letter = terms[values.index(first)][first.part_layout.dim]
    if letter not in result:
        raise unsupported_on_part_error("einsum", first, f"({equation}) sums over the parts of other shards")
    ranges = first.part_layout.ranges
    for term, value in zip(terms, values, strict=True):
        if isinstance(value, ShardedValue) and not (term[value.part_layout.dim] != letter and _is_all_here(value)):
            if term[value.part_layout.dim] != letter:
                raise unsupported_on_part_error("einsum", value, f"({equation}) meets one that is cut along another dim")
            ranges = common_ranges("einsum", ranges, value)
    parts: list[Tensor] = []
    for term, value in zip(terms, values, strict=True):
        if isinstance(value, ShardedValue):
            parts.append((narrow_part(value, ranges) if term[value.part_layout.dim] == letter else value).local)
        elif letter in term:
            parts.append(take_part(value, term.index(letter), ranges, first.group))
        else:
            parts.append(take_part(value, 0, ((0, value.shape[0]),), first.group))
    first.check_recorded()
    made = torch.einsum(equation, *parts)
    part = first.part_layout
    return ShardedValue(made, LocalPartLayout(result.index(letter), part.size, ranges, part.axis), first.group)


def _is_all_here(x: ShardedValue) -> bool:
    """Whether every shard has all of it: the one key head that all queries need. Its gradient here is a part of a sum."""
    return x.part_layout.ranges == ((0, x.part_layout.size),)


def _letters_of(
    equation: str, first: ShardedValue, values: Sequence[Tensor | ShardedValue]
) -> tuple[list[list[str]], list[str]]:
    """(of each operand, of the result) the letter of each dim. What an ellipsis stands for are digits, from the right."""
    left, arrow, right = equation.replace(" ", "").partition("->")
    if not arrow:
        raise unsupported_on_part_error("einsum without ->", first, "is not possible")

    def letters(term: str, dims: int | None) -> list[str]:
        before, dots, after = term.partition("...")
        hidden = (most if dims is None else dims - len(before) - len(after)) if dots else 0
        return [*before, *(str(i) for i in reversed(range(hidden))), *after]

    most = max(
        [v.dim() - len(term.replace("...", "")) for term, v in zip(left.split(","), values, strict=True) if "..." in term]
        or [0]
    )
    return [letters(term, v.dim()) for term, v in zip(left.split(","), values, strict=True)], letters(right, None)


# -- attention ---------------------------------------------------------------------------------------------------------


@implements_on_parts("scaled_dot_product_attention", any_place=True)
def _attention(
    func: Callable[..., Tensor],
    query: ShardedValue,
    key: ShardedValue,
    value: ShardedValue,
    attn_mask: Tensor | None = None,
    dropout_p: float = 0.0,
    is_causal: bool = False,
    scale: float | None = None,
    enable_gqa: bool = False,
) -> ShardedValue:
    """Attention by heads: q [..., heads, seq, width] is cut along heads; k and v have at least the heads that these need."""
    at = query.dim() - 3
    if not isinstance(query, ShardedValue) or query.part_layout.dim != at:
        cut = query if isinstance(query, ShardedValue) else key if isinstance(key, ShardedValue) else value
        raise unsupported_on_part_error(
            "scaled_dot_product_attention", cut, "is possible where heads (the third dim from the right) are cut"
        )
    gqa = False
    pair = []
    for x in (key, value):
        if isinstance(x, ShardedValue) and x.part_layout.dim != at:
            raise unsupported_on_part_error("scaled_dot_product_attention", x, "needs keys and values that are cut by heads")
        spans = x.part_layout.ranges if isinstance(x, ShardedValue) else ((0, x.shape[at]),)
        heads = x.shape[at]
        local = x.local if isinstance(x, ShardedValue) else take_part(x, at, spans, query.group)
        if heads not in (1, query.part_layout.size) and (not enable_gqa or query.part_layout.size % heads):
            raise ModelError(
                f"{query.part_layout.size} query heads and {heads} key heads in scaled_dot_product_attention",
                cure="give enable_gqa=True and a multiple of the key heads as query heads",
            )
        each, needed = _needed(query.part_layout.ranges, query.part_layout.size // heads, spans)
        if each == 0:
            local = local.index_select(at, torch.tensor(needed, device=local.device))
        elif each > 1:
            gqa = True
        if each and len(needed) != local.shape[at]:
            local = local.index_select(at, torch.tensor(needed, device=local.device))
        pair.append(local)
    if pair[0].shape[at] != pair[1].shape[at]:
        raise unsupported_on_part_error("scaled_dot_product_attention", query, "has keys and values of different heads")
    if isinstance(attn_mask, ShardedValue):
        if attn_mask.dim() - attn_mask.part_layout.dim != 3 or attn_mask.part_layout.ranges != query.part_layout.ranges:
            raise unsupported_on_part_error(
                "scaled_dot_product_attention", attn_mask, "needs a mask that is whole or cut by heads as the queries are"
            )
        mask: Tensor | None = attn_mask.local
    elif attn_mask is not None and attn_mask.dim() >= 3 and attn_mask.shape[-3] != 1:
        mask = take_part(attn_mask, attn_mask.dim() - 3, query.part_layout.ranges, query.group)
    else:
        (mask,) = _seen(query, (attn_mask,))
    if dropout_p == 0.0:
        made = F.scaled_dot_product_attention(
            query.local, pair[0], pair[1], attn_mask=mask, is_causal=is_causal, scale=scale, enable_gqa=gqa
        )
        return query.like(made)
    return attention_with_dropout(query, pair[0], pair[1], mask, dropout_p, is_causal, scale)


@lru_cache(maxsize=256)
def _needed(queries: IndexRanges, group: int, held: IndexRanges) -> tuple[int, list[int]]:
    """(n, key heads): each of these key heads serves n of the query heads here, one after the other.

    n = 0: it is not so even, and there is one key head for each query head. Key heads are numbered among those held.
    """
    place = {head: i for i, head in enumerate(h for a, b in held for h in range(a, b))}
    wanted = [q // group for a, b in queries for q in range(a, b)]
    missing = sorted({h for h in wanted if h not in place})
    if missing:
        raise ModelError(
            f"key heads {missing} are not on the shard that has query heads {list(queries)}",
            cure="give q, k and v styles of the same head counts: heads:H, kv-heads:H/K",
        )
    order = [place[h] for h in wanted]
    distinct = sorted(set(order))
    each = len(order) // len(distinct) if distinct else 1
    even = order == [h for h in distinct for _ in range(each)]
    return (each, distinct) if even else (0, order)


def attention_with_dropout(
    query: ShardedValue, key: Tensor, value: Tensor, mask: Tensor | None, p: float, is_causal: bool, scale: float | None
) -> ShardedValue:
    """softmax(q k^T) v with dropout of the probabilities, whose mask is the whole value's."""
    q, at = query.local, query.dim() - 3
    if key.shape[at] != q.shape[at]:
        each = q.shape[at] // key.shape[at]
        key, value = key.repeat_interleave(each, at), value.repeat_interleave(each, at)
    scores = q @ key.transpose(-2, -1) * (q.shape[-1] ** -0.5 if scale is None else scale)
    if is_causal:
        shape = scores.shape[-2:]
        scores = scores.masked_fill(~torch.ones(shape, dtype=torch.bool, device=q.device).tril(), float("-inf"))
    if mask is not None:
        scores = scores.masked_fill(~mask, float("-inf")) if mask.dtype == torch.bool else scores + mask
    probabilities = query.like(scores.softmax(-1))
    return query.like((probabilities.local * dropout_mask(probabilities, p)) @ value)
