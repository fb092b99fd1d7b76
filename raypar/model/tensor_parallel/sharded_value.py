"""A value of which each shard holds a part: what users' own forward functions compute with between sharded layers.

A `ShardedValue` stands in for the whole tensor. It has the whole shape, so code written for one process
(`view(b, s, heads, -1)`, `width // heads`) runs unchanged, and computes on this shard's part. Like `torch.fx.Proxy` it is
no tensor, but takes part in torch's functions through `__torch_function__`. An operation that needs the parts of other
shards is refused by name; none gives a wrong result.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Collection, Iterator, Sequence
from functools import cache, lru_cache, partial, wraps
from math import prod
from typing import Any, TypeVar

import torch
from torch import Tensor, nn

from raypar.errors import ModelError
from raypar.model.tensor_parallel.autograd_collectives import copy_to_shards, select_ranges
from raypar.model.tensor_parallel.layout_of_whole import WholeLayout
from raypar.model.tensor_parallel.local_part_layout import SAMPLES, SEQUENCE, SPATIAL, LocalPartLayout, sequence_part_layout
from raypar.model.tensor_parallel.shard_group import ShardGroup
from raypar.plan.shard_ranges import (
    IndexRanges,
    count_indices,
    intersect_ranges,
    positions_of_indices,
    repeat_ranges,
    scale_ranges,
    view_ranges_as_dims,
)

Implementation = Callable[..., Any]
F = TypeVar("F", bound=Implementation)
IMPLEMENTATIONS: dict[str, Implementation] = {}
"""Name of a torch function or method -> implementation(function, *args, **kwargs) for values that are cut."""
ROW_IMPLEMENTATIONS: dict[str, Implementation] = {}
"""Those that come first for values that are cut along a spatial dim."""
SAMPLE_IMPLEMENTATIONS: dict[str, Implementation] = {}
"""Those that come first for values of which shards have some samples, as their first dim."""
_ANY_PLACE: set[str] = set()
"""Names of functions whose `ShardedValue` argument need not be the first."""
_FIRST_ARGUMENTS = {"matmul": ("input", "other"), "bmm": ("input", "mat2")} | dict.fromkeys(
    ("cat", "concat", "stack"), ("tensors",)
)
"""Name of a function -> the names of the arguments that its implementation takes by their place."""


def implements_on_parts(*names: str, any_place: bool = False) -> Callable[[F], F]:
    """Decorator: the function computes these torch functions on parts; it is entered into `IMPLEMENTATIONS`."""

    def enter(found: F) -> F:
        noted = _noting_layouts(found)
        IMPLEMENTATIONS.update(dict.fromkeys(names, noted))
        _ANY_PLACE.update(names if any_place else ())
        return noted

    return enter


def implements_on_samples(*names: str) -> Callable[[F], F]:
    """Decorator: the function computes these torch functions on values of which shards have some samples."""

    def enter(found: F) -> F:
        noted = _noting_layouts(found)
        SAMPLE_IMPLEMENTATIONS.update(dict.fromkeys(names, noted))
        return noted

    return enter


def implements_on_rows(*names: str) -> Callable[[F], F]:
    """Decorator: the function computes these torch functions on values that are cut along a spatial dim."""

    def enter(found: F) -> F:
        noted = _noting_layouts(found)
        ROW_IMPLEMENTATIONS.update(dict.fromkeys(names, noted))
        return noted

    return enter


def _noting_layouts(implementation: F) -> F:
    """The implementation; values of a single index that it makes know by which call (`layout_of_whole.py`)."""

    @wraps(implementation)
    def call(func: Callable[..., Any] | None, *args: Any, **kwargs: Any) -> Any:
        made = implementation(func, *args, **kwargs)
        if type(made) is ShardedValue and not made.has_single_index:
            return made
        several = isinstance(made, (list, tuple))
        for place, value in enumerate(made if several else (made,)):
            if isinstance(value, ShardedValue) and value.has_single_index and not any(value is each for each in args):
                given, named = _layouts_of(args), {name: _layouts_of(each) for name, each in kwargs.items()}
                value.layout = WholeLayout.of_call(func or Tensor.__getitem__, given, named, place if several else None)
        return made

    return call  # type: ignore[return-value]


def _layouts_of(given: Any) -> Any:
    """Arguments of a function with layouts in the places of values."""
    if isinstance(given, ShardedValue):
        return given.layout_of_whole()
    if isinstance(given, Tensor):
        return WholeLayout.of_tensor(given)
    return [_layouts_of(value) for value in given] if type(given) in (list, tuple) else given


def _implementation(name: str, first: Any) -> Implementation | None:
    """What computes the torch function of that name, `first` being the first `ShardedValue` of it; None if nothing does."""
    if isinstance(first, ShardedValue) and first.part_layout.axis == SPATIAL and name in ROW_IMPLEMENTATIONS:
        return ROW_IMPLEMENTATIONS[name]
    if isinstance(first, ShardedValue) and first.part_layout.axis == SAMPLES and name in SAMPLE_IMPLEMENTATIONS:
        return SAMPLE_IMPLEMENTATIONS[name]
    return IMPLEMENTATIONS.get(name)


def unsupported_on_part_error(name: str, x: ShardedValue, why: str = "needs the parts of other shards") -> ModelError:
    """The error for an operation that cannot be computed on a part alone; `name`: of the operation."""
    of = f"{name} of a value {list(x.shape)} that is cut along dim {x.part_layout.dim}"
    if x.part_layout.axis == SEQUENCE:
        return ModelError(
            f"{of} (the sequence: plan.sequence_parallel) over {x.group.size} shards {why}",
            cure="give the layers that make what it needs a style (attention: heads, kv-heads and heads-row, or qkv; "
            "plan.styles), so that they see the whole sequence, or set plan.sequence_parallel: false",
        )
    if x.part_layout.axis == SAMPLES:
        return ModelError(
            f"{of} (the samples: plan.layout) over {x.group.size} shards {why}",
            cure="compute in layers what each sample gives by itself, and what mixes samples in the loss, which gets all of "
            "them; or take samples out of plan.layout",
        )
    if x.part_layout.axis == SPATIAL:
        return ModelError(
            f"{of} (rows of a layer of style spatial) over {x.group.size} shards {why}",
            cure="give the last layer before it the style spatial-gathered, so that it sees the whole, a convolution that "
            "reads the value the style spatial, or the layers before it the style whole (plan.styles)",
        )
    return ModelError(
        f"{of} over {x.group.size} shards {why}",
        cure="compute it before the column layer or after the row layer, give the column layer the style gathered, "
        "or both layers the style whole (plan.styles)",
    )


class ShardedValue:
    """A value of which each shard of a group holds a part; stands in for the whole tensor.

    `local`: this shard's part, as a tensor; `part_layout`: which part it is; `group`: the shards that have the other parts.
    """

    __slots__ = ("group", "layout", "local", "part_layout", "whole")

    def __init__(self, local: Tensor, part_layout: LocalPartLayout, group: ShardGroup, *, whole: Tensor | None = None) -> None:
        self.local, self.part_layout, self.group = local, part_layout, group
        self.whole = whole
        """The whole value, of a field of the batch, which every shard has: a layer's trace is chosen by it."""
        self.layout: WholeLayout | None = None
        """How the whole value lies in memory; None: as the part does."""

    @classmethod
    def __torch_function__(
        cls, func: Callable[..., Any], types: Collection[type], args: Sequence[Any] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        name, named = func.__name__, dict(kwargs or {})
        first = _FIRST_ARGUMENTS.get(name, () if name in _ANY_PLACE else ("input",))[len(args) :]
        args = (*args, *(named.pop(key) for key in first if key in named))
        cut = next(v for v in flatten_arguments((*args, *named.values())) if isinstance(v, ShardedValue))
        found = _implementation(name, cut)
        if found is None or not (name in _ANY_PLACE or (args and args[0] is cut)):
            raise unsupported_on_part_error(name, cut)
        return found(func, *args, **named)

    def __getattr__(self, name: str) -> Any:
        found = _implementation(name, self)
        if found is not None:
            return partial(found, getattr(Tensor, name), self)
        if name in _OF_THE_PART:
            return getattr(self.local, name)
        if hasattr(Tensor, name) and not name.startswith("__"):
            raise unsupported_on_part_error(name, self)
        raise AttributeError(name)

    def like(self, local: Tensor) -> ShardedValue:
        """`local`, computed from this value's part, as a value that is cut alike; its other dims may have other sizes."""
        self.check_recorded()
        return ShardedValue(local, self.part_layout, self.group)

    def check_recorded(self) -> None:
        """Raises `ModelError` where gradients are recorded but switched off for the code that uses this value.

        Such code (reentrant checkpoints, autograd functions of the user's own) looks for tensors that need gradients among its
        arguments and does not see that a part needs one.
        """
        if self.group.grad_enabled and not torch.is_grad_enabled() and self.local.requires_grad:
            raise ModelError(
                f"a value {list(self.shape)} of which shards have parts is used without gradients inside a layer that has some",
                cure="call torch.utils.checkpoint with use_reentrant=False, write no torch.autograd.Function of such values, "
                "and use detach() instead of torch.no_grad()",
            )

    @property
    def has_single_index(self) -> bool:
        """Whether this shard has one index of several along the cut dim, so that the part's strides do not say how it lies."""
        return self.part_layout.size > 1 and self.local.shape[self.part_layout.dim] == 1

    def layout_of_whole(self) -> WholeLayout:
        """How the whole value lies in memory."""
        if self.layout is None:
            whole = self.whole
            self.layout = WholeLayout.of_tensor(whole) if whole is not None else WholeLayout.in_order_of(self.local, self.shape)
        return self.layout

    @property
    def shape(self) -> torch.Size:
        """Shape of the whole value."""
        here, part = self.local.shape, self.part_layout
        return torch.Size((*here[: part.dim], part.size, *here[part.dim + 1 :]))

    @property
    def mT(self) -> ShardedValue:
        """As `Tensor.mT`: the last two dims exchanged."""
        moved: ShardedValue = IMPLEMENTATIONS["transpose"](torch.transpose, self, -2, -1)
        return moved

    @property
    def T(self) -> ShardedValue:
        """As `Tensor.T`, of a matrix."""
        if self.dim() != 2:
            raise unsupported_on_part_error("T", self, "is not defined for other than two dims")
        return self.mT

    @property
    def by_sequence(self) -> bool:
        """Whether it is the part of [batch, sequence, ...] that sequence parallelism gives this shard between layers.

        A value that is cut along its sequence may have been moved or reshaped; then it is not.
        """
        part, group = self.part_layout, self.group
        return part.axis == SEQUENCE and self.dim() > 2 and part == sequence_part_layout(part.size, group.shard, group.size)

    def size(self, dim: int | None = None) -> torch.Size | int:
        """As `Tensor.size`, of the whole value."""
        return self.shape if dim is None else self.shape[dim]

    def dim(self) -> int:
        """Number of dims."""
        return self.local.dim()

    @property
    def ndim(self) -> int:
        """Number of dims."""
        return self.local.dim()

    def numel(self) -> int:
        """Elements of the whole value."""
        return prod(self.shape)

    def __len__(self) -> int:
        return self.shape[0]

    def __iter__(self) -> Iterator[ShardedValue]:
        return iter(IMPLEMENTATIONS["unbind"](torch.unbind, self, 0))

    def __getitem__(self, index: Any) -> Any:
        found = _implementation("__getitem__", self)
        assert found is not None
        return found(None, self, index)

    def __setitem__(self, index: Any, value: Any) -> None:
        raise unsupported_on_part_error("writing into a part", self, "is not possible")

    def __bool__(self) -> bool:
        raise unsupported_on_part_error("a condition", self)

    def __repr__(self) -> str:
        return f"Sharded({list(self.shape)}, dim {self.part_layout.dim} cut, {list(self.part_layout.ranges)} here)"

    def reshaped(self, shape: Sequence[int]) -> ShardedValue:
        """As `Tensor.reshape`. Raises `ModelError` when the part here is no block of the new shape."""
        now = self.shape
        if -1 in shape:
            shape = list(shape)
            known = prod(n for n in shape if n != -1)
            shape[shape.index(-1)] = prod(now) // known if known else 0
        if prod(shape) != prod(now):
            raise ModelError(f"a value of shape {list(now)} cannot be viewed as {list(shape)}", cure="check the sizes")
        found = _viewed(tuple(now), tuple(shape), self.part_layout)
        if found is None:
            raise unsupported_on_part_error(f"view({', '.join(map(str, shape))})", self, self._unviewable(shape))
        local, part = found
        return ShardedValue(self.local.reshape(local), part, self.group)

    def _unviewable(self, shape: Sequence[int]) -> str:
        """Why the part here is no block of that shape."""
        part = self.part_layout
        here = f"({list(part.ranges)} of {part.size} here)"
        *_, heads, size = 1, *shape
        ragged = any(bound % max(1, size) for span in part.ranges for bound in span)
        if part.dim == self.dim() - 1 and heads * size == part.size and ragged:
            return (
                f"{here} needs runs of {size}: if these are {heads} heads, the style of the layer that makes it must say so "
                f"(heads:{heads}, and kv-heads and heads-row alike)"
            )
        return (
            f"{here} mixes it with other dims; fused q, k, v in the order [heads, q k v] have the style qkv-interleaved, in "
            "the order [q k v, heads] the style qkv"
        )


_OF_THE_PART = {
    "dtype",
    "device",
    "requires_grad",
    "grad_fn",
    "is_cuda",
    "layout",
    "is_floating_point",
    "is_complex",
    "is_leaf",
    "is_nested",
}


def flatten_arguments(arguments: Sequence[Any]) -> Iterator[Any]:
    """All values of an argument list, also those in lists and tuples."""
    for value in arguments:
        if isinstance(value, (list, tuple)):
            yield from flatten_arguments(value)
        else:
            yield value


@lru_cache(maxsize=1024)
def _viewed(
    old: tuple[int, ...], new: tuple[int, ...], part: LocalPartLayout
) -> tuple[tuple[int, ...], LocalPartLayout] | None:
    """(shape of the local tensor, which part it is) after a view; None when the part is no block of the new shape."""
    a = b = 0  # dims [a, i) of old and [b, j) of new have the same product: the smallest such group that holds the cut dim
    i = j = 0
    while True:
        i, j = i + 1, j + 1
        left, right = prod(old[a:i]), prod(new[b:j])
        while left != right:
            if left < right:
                left *= old[i]
                i += 1
            else:
                right *= new[j]
                j += 1
        if i > part.dim:
            break
        a, b = i, j
    while j < len(new) and new[j] == 1 and i == len(old):
        j += 1
    inner = prod(old[part.dim + 1 : i])
    merged = repeat_ranges(scale_ranges(part.ranges, inner), part.size * inner, prod(old[a : part.dim]))
    found = view_ranges_as_dims(merged, new[b:j])
    if found is None:
        return None
    place, ranges = found
    dim = b + place
    local = list(new)
    local[dim] = count_indices(ranges)
    return tuple(local), LocalPartLayout(dim, new[dim], ranges, part.axis)


def take_part(x: Tensor, dim: int, ranges: IndexRanges, group: ShardGroup) -> Tensor:
    """This shard's part of a value that all shards hold whole.

    The gradient of the whole value is a sum over shards. For a parameter it is completed once a step: the parameter is noted
    in `group.partially_used_parameters`. For any other value it is summed as soon as it is there.
    """
    if x.requires_grad and torch.is_grad_enabled():
        if isinstance(x, nn.Parameter):
            group.partially_used_parameters[id(x)] = x
        else:
            x = copy_to_shards(x, group)
    return select_ranges(x, dim, ranges)


def narrow_part(x: ShardedValue, ranges: IndexRanges) -> ShardedValue:
    """The value with fewer indices of the cut dim: `ranges`, of which this shard has all."""
    if ranges == x.part_layout.ranges:
        return x
    local = select_ranges(x.local, x.part_layout.dim, positions_of_indices(x.part_layout.ranges, ranges))
    return ShardedValue(local, x.part_layout.narrowed_to(ranges), x.group)


def common_ranges(name: str, ranges: IndexRanges, other: ShardedValue) -> IndexRanges:
    """The indices that both of two values have here: those of one of them, which the other must contain.

    Only so does some shard compute every element. The parts may differ because a key head serves queries of several shards.
    Raises `ModelError` when neither contains the other.
    """
    both = intersect_ranges(ranges, other.part_layout.ranges)
    if both not in (ranges, other.part_layout.ranges):
        raise unsupported_on_part_error(
            name, other, f"meets one of which {list(ranges)} are here, not {list(other.part_layout.ranges)}"
        )
    return both


def take_common_part_of_operands(name: str, values: Sequence[Any]) -> tuple[list[Any], ShardedValue]:
    """(values that are broadcast together, each as the tensor of this shard's part; one `ShardedValue` that is cut so).

    Whole tensors are cut where they have the cut dim. Raises `ModelError` when the parts are not of the same dim.
    """
    sharded = [v for v in values if isinstance(v, ShardedValue)]
    first = max(sharded, key=lambda v: v.dim())
    back = first.dim() - first.part_layout.dim
    ranges = first.part_layout.ranges
    for other in sharded:
        if other.dim() - other.part_layout.dim != back or other.part_layout.size != first.part_layout.size:
            raise unsupported_on_part_error(
                name, other, f"meets one {list(first.shape)} that is cut along dim {first.part_layout.dim}"
            )
        if other.part_layout.ranges != ranges:
            ranges = common_ranges(name, ranges, other)
    dims = max(v.dim() for v in values if isinstance(v, (Tensor, ShardedValue)))
    found: list[Any] = []
    for value in values:
        if isinstance(value, ShardedValue):
            found.append(narrow_part(value, ranges).local)
        elif isinstance(value, Tensor):
            cut = value.dim() >= back and value.shape[-back] != 1
            found.append(take_part(value, value.dim() - back, ranges, first.group) if cut else _take_all(value, first.group))
        else:
            found.append(value)
    return found, ShardedValue(
        first.local, LocalPartLayout(dims - back, first.part_layout.size, ranges, first.part_layout.axis), first.group
    )


def _take_all(x: Tensor, group: ShardGroup) -> Tensor:
    """A whole tensor that is computed with a part: its gradient is a sum over shards, too."""
    if x.dim() == 0 and not x.requires_grad:
        return x
    return take_part(x, 0, ((0, x.shape[0]),), group) if x.dim() else copy_to_shards(x, group)


def let_einops_take_parts() -> None:
    """Idempotent; nothing happens while nobody has imported `einops`."""
    if "einops" in sys.modules:
        _add_backend()


@cache
def _add_backend() -> type:
    from einops._backends import TorchBackend  # type: ignore[import-not-found, import-untyped, unused-ignore]

    class PartsBackend(TorchBackend):  # type: ignore[misc, unused-ignore]
        """The backend of PyTorch: its operations are those that values in parts have. `einops` finds it as a subclass."""

        framework_name = __name__

        def is_appropriate_type(self, tensor: object) -> bool:
            """Whether it is a value in parts."""
            return isinstance(tensor, ShardedValue)

    return PartsBackend
