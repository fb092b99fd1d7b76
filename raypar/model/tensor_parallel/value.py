"""A value of which each shard holds a part: what users' own forward functions compute with between sharded layers.

It stands in for the whole tensor: it has the whole shape, so that code written for one process (`view(b, s, heads, -1)`,
`width // heads`) runs as it is, and computes on this shard's part (as `torch.fx.Proxy`, it is no tensor but takes part in
torch's functions through `__torch_function__`). What needs other shards' parts is refused by name, never wrong.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import lru_cache, partial
from math import prod
from typing import Any

import torch
from torch import Tensor, nn

from raypar.errors import ModelError
from raypar.model.tensor_parallel.functions import copied, select
from raypar.model.tensor_parallel.group import ShardGroup
from raypar.plan.shard_ranges import (
    IndexRanges,
    common_factor,
    count_indices,
    even_range,
    intersect_ranges,
    positions_of,
    repeat_ranges,
    scale_ranges,
)


@dataclass(frozen=True, slots=True)
class Held:
    """This shard has the indices `spans` of dim `dim` (from the left), which is `size` long."""

    dim: int
    size: int
    spans: IndexRanges


Rule = Callable[..., Any]
RULES: dict[str, Rule] = {}
"""Name of a torch function or method -> rule(function, *args, **kwargs)."""
_ANY_PLACE: set[str] = set()
"""Those whose first argument need not be the `Sharded` one."""


def rule(*names: str, any_place: bool = False) -> Callable[[Rule], Rule]:
    """Enter a rule into `RULES`."""

    def enter(found: Rule) -> Rule:
        RULES.update(dict.fromkeys(names, found))
        _ANY_PLACE.update(names if any_place else ())
        return found

    return enter


def refuse(name: str, x: Sharded, why: str = "needs the parts of other shards") -> ModelError:
    """The error for an operation that a part alone cannot do."""
    of = f"{name} of a value {list(x.shape)} that is cut along dim {x.held.dim}"
    if x.by_sequence:
        return ModelError(
            f"{of} (the sequence: plan.sequence_parallel) over {x.group.size} shards {why}",
            cure="give the layers that make what it needs a style (attention: heads, kv-heads and heads-row, or qkv; "
            "plan.styles), so that they see the whole sequence, or set plan.sequence_parallel: false",
        )
    return ModelError(
        f"{of} over {x.group.size} shards {why}",
        cure="compute it before the column layer or after the row layer, give the column layer the style gathered, "
        "or both layers the style whole (plan.styles)" + (_OR_SEQUENCE if x.group.sequence else ""),
    )


_OR_SEQUENCE = (
    "; if it is the sequence that is cut (plan.sequence_parallel), give attention its styles, so that it sees the whole of it, "
    "or set plan.sequence_parallel: false"
)


class Sharded:
    """`local`: this shard's part; `held`: which part that is."""

    __slots__ = ("group", "held", "local")

    def __init__(self, local: Tensor, held: Held, group: ShardGroup) -> None:
        self.local, self.held, self.group = local, held, group

    @classmethod
    def __torch_function__(
        cls, func: Callable[..., Any], types: object, args: Sequence[Any] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        name, named = func.__name__, dict(kwargs or {})
        if not args and "input" in named:
            args = (named.pop("input"),)
        found = RULES.get(name)
        if found is None or not (name in _ANY_PLACE or isinstance(args[0], Sharded)):
            raise refuse(name, next(v for v in values_in((*args, *named.values())) if isinstance(v, Sharded)))
        return found(func, *args, **named)

    def __getattr__(self, name: str) -> Any:
        found = RULES.get(name)
        if found is not None:
            return partial(found, getattr(Tensor, name), self)
        if name in _OF_THE_PART:
            return getattr(self.local, name)
        if hasattr(Tensor, name) and not name.startswith("__"):
            raise refuse(name, self)
        raise AttributeError(name)

    def like(self, local: Tensor) -> Sharded:
        """What was computed of this: a value of the same shape up to dims that are not cut."""
        self.check_recorded()
        return Sharded(local, self.held, self.group)

    def check_recorded(self) -> None:
        """Code that hides gradients from autograd does not see that a part has some. Raises `ModelError`."""
        if self.group.recording and self.local.requires_grad and not torch.is_grad_enabled():
            raise ModelError(
                f"a value {list(self.shape)} of which shards have parts is used without gradients inside a layer that has some",
                cure="call torch.utils.checkpoint with use_reentrant=False, write no torch.autograd.Function of such values, "
                "and use detach() instead of torch.no_grad()",
            )

    @property
    def shape(self) -> torch.Size:
        """Of the whole value."""
        shape = list(self.local.shape)
        shape[self.held.dim] = self.held.size
        return torch.Size(shape)

    @property
    def by_sequence(self) -> bool:
        """Cut over dim 1 of [batch, sequence, ...] as sequence parallelism does it."""
        held, group = self.held, self.group
        return (
            group.sequence and held.dim == 1 and self.dim() > 2 and held.spans == even_range(held.size, group.size)[group.shard]
        )

    def size(self, dim: int | None = None) -> Any:
        """As of a tensor."""
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

    def __iter__(self) -> Iterator[Any]:
        return iter(RULES["unbind"](torch.unbind, self, 0))

    def __getitem__(self, index: Any) -> Any:
        return RULES["__getitem__"](None, self, index)

    def __setitem__(self, index: Any, value: Any) -> None:
        raise refuse("writing into a part", self, "is not possible")

    def __bool__(self) -> bool:
        raise refuse("a condition", self)

    def __repr__(self) -> str:
        return f"Sharded({list(self.shape)}, dim {self.held.dim} cut, {list(self.held.spans)} here)"

    def reshaped(self, shape: Sequence[int]) -> Sharded:
        """As `Tensor.reshape`. Raises `ModelError` when the part here is no block of the new shape."""
        now = self.shape
        if -1 in shape:
            shape = list(shape)
            known = prod(n for n in shape if n != -1)
            shape[shape.index(-1)] = prod(now) // known if known else 0
        if prod(shape) != prod(now):
            raise ModelError(f"a value of shape {list(now)} cannot be viewed as {list(shape)}", cure="check the sizes")
        found = _viewed(tuple(now), tuple(shape), self.held)
        if found is None:
            raise refuse(f"view({', '.join(map(str, shape))})", self, self._unviewable(shape))
        local, held = found
        return Sharded(self.local.reshape(local), held, self.group)

    def _unviewable(self, shape: Sequence[int]) -> str:
        """Why."""
        held = self.held
        here = f"({list(held.spans)} of {held.size} here)"
        *_, heads, size = 1, *shape
        ragged = any(bound % max(1, size) for span in held.spans for bound in span)
        if held.dim == self.dim() - 1 and heads * size == held.size and ragged:
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
}


def values_in(arguments: Sequence[Any]) -> Iterator[Any]:
    """Also those in lists and tuples."""
    for value in arguments:
        if isinstance(value, (list, tuple)):
            yield from values_in(value)
        else:
            yield value


@lru_cache(maxsize=1024)
def _viewed(old: tuple[int, ...], new: tuple[int, ...], held: Held) -> tuple[tuple[int, ...], Held] | None:
    """(shape of the part, what is held) after a view; None when that is no block."""
    a = b = 0  # dims [a, i) of old and [b, j) of new have the same product: the smallest such group that holds held.dim
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
        if i > held.dim:
            break
        a, b = i, j
    while j < len(new) and new[j] == 1 and i == len(old):
        j += 1
    inner = prod(old[held.dim + 1 : i])
    merged = repeat_ranges(scale_ranges(held.spans, inner), held.size * inner, prod(old[a : held.dim]))
    found = common_factor(merged, new[b:j])
    if found is None:
        return None
    place, spans = found
    dim = b + place
    local = list(new)
    local[dim] = count_indices(spans)
    return tuple(local), Held(dim, new[dim], spans)


def part_of(x: Tensor, dim: int, spans: IndexRanges, group: ShardGroup) -> Tensor:
    """This shard's part of a value that all shards hold whole.

    A parameter is noted as `partial`: its gradients are completed once a step. Those of other values are summed at once.
    """
    if x.requires_grad and torch.is_grad_enabled():
        if isinstance(x, nn.Parameter):
            group.partial[id(x)] = x
        else:
            x = copied(x, group)
    return select(x, dim, spans)


def narrowed(x: Sharded, spans: IndexRanges) -> Sharded:
    """The part of a part."""
    if spans == x.held.spans:
        return x
    local = select(x.local, x.held.dim, positions_of(x.held.spans, spans))
    return Sharded(local, Held(x.held.dim, x.held.size, spans), x.group)


def met(name: str, spans: IndexRanges, other: Sharded) -> IndexRanges:
    """What is left when `spans` of a dim meet another value's: one of the two, in which the other is contained.

    Only so is everything computed by some shard. A key head serves queries of several shards, so its value may be the larger.
    """
    both = intersect_ranges(spans, other.held.spans)
    if both not in (spans, other.held.spans):
        raise refuse(name, other, f"meets one of which {list(spans)} are here, not {list(other.held.spans)}")
    return both


def align_parts(name: str, values: Sequence[Any]) -> tuple[list[Any], Sharded]:
    """Values that are broadcast together, all as tensors of this shard's part; and one of the sharded ones, as a model.

    Whole tensors are cut where they have the cut dim. Raises `ModelError` when the parts are not of the same dim.
    """
    sharded = [v for v in values if isinstance(v, Sharded)]
    first = max(sharded, key=lambda v: v.dim())
    back = first.dim() - first.held.dim
    spans = first.held.spans
    for other in sharded:
        if other.dim() - other.held.dim != back or other.held.size != first.held.size:
            raise refuse(name, other, f"meets one {list(first.shape)} that is cut along dim {first.held.dim}")
        if other.held.spans != spans:
            spans = met(name, spans, other)
    dims = max(v.dim() for v in values if isinstance(v, (Tensor, Sharded)))
    found: list[Any] = []
    for value in values:
        if isinstance(value, Sharded):
            found.append(narrowed(value, spans).local)
        elif isinstance(value, Tensor):
            cut = value.dim() >= back and value.shape[-back] != 1
            found.append(part_of(value, value.dim() - back, spans, first.group) if cut else _all_of(value, first.group))
        else:
            found.append(value)
    return found, Sharded(first.local, Held(dims - back, first.held.size, spans), first.group)


def _all_of(x: Tensor, group: ShardGroup) -> Tensor:
    """A whole tensor that meets a part: used for the part only."""
    if x.dim() == 0 and not x.requires_grad:
        return x
    return part_of(x, 0, ((0, x.shape[0]),), group) if x.dim() else copied(x, group)
