"""The named dimensions of a layer, and what follows where one of them is divided over shards: cuts, sums, shares, formulas.

A kind of layer says once which dimensions its tensors have, in words like those of einops: a linear layer reads `samples (in)`,
makes `samples (out)`, and has a weight `(out) (in)` and a bias `(out)`. A tensor that has the divided dimension is cut along
it, every other one is whole on each shard. A product that sums over it (the output, the gradient of the input), because its
result does not have it, becomes a sum over the shards: this is what travels.
"""

from __future__ import annotations

import re
from collections.abc import Collection, Mapping
from dataclasses import dataclass
from functools import lru_cache
from math import prod
from typing import Literal

from raypar.plan.shard_ranges import (
    IndexRanges,
    TensorCut,
    count_indices,
    even_ranges_by_shard,
    merge_ranges,
    repeat_ranges,
    scale_ranges,
    shift_ranges,
)
from raypar.plan.tensor_parallel_layout import LayerCollective, LayerCollectives, ShardWorkShare

Block = tuple[str, ...]
"""Dimensions that lie in one axis of a tensor, the slowest first: `heads width`."""
Axis = tuple[Block, ...]
"""One axis of a tensor: blocks one behind the other (`heads width + key_heads width`)."""

SYMBOLS = {"samples": "B", "in": "C_in", "out": "C_out", "features": "C"}
SYMBOLS |= {"depth": "D", "height": "H", "width": "W", "length": "L"}
"""Dimension -> how formulas call it; those without a symbol are left out. B are samples, times the positions of a sequence."""


@dataclass(frozen=True, slots=True)
class LayerKind:
    """The dimensions of all tensors of a kind of layer. Parentheses hold what lies in one axis.

    A dimension in parentheses may be made of others in one layer (`LayerDimensions.orders`): out of heads and their width.
    """

    input: str
    output: str
    parameters: tuple[tuple[str, str], ...]
    """(name, dimensions)"""
    windows: tuple[str, ...] = ()
    """Dimensions along which an index of the output is made of several of the input, which lie side by side: a shard needs
    those beside its own."""
    looks_up: bool = False
    """Whether it looks up rows by its input: indices, which have no gradient."""
    sequence: Literal["parts", "gathered", "whole", "refused"] = "parts"
    """What sequence parallelism does with its whole input and output: cut into parts, of the input with a gradient that is
    summed in parts, or (gathered) as a whole; nothing, as these values have no sequence (whole); an error."""


@dataclass(frozen=True, slots=True)
class LayerDimensions:
    """One layer: its kind, how long its dimensions are, and which of them is divided over the shards."""

    kind: LayerKind
    sizes: tuple[tuple[str, int], ...]
    """(dimension, length), as far as the layer says them. Lengths of values alone (height) are not known."""
    parameters: tuple[str, ...]
    """The names of those parameters of the kind that the layer has."""
    orders: tuple[tuple[str, str], ...] = ()
    """(dimension of the kind, of what it is made): `("out", "heads width + key_heads width + key_heads width")`."""
    divided: str = ""
    noun: str = ""
    """What people call the divided dimension: output features."""
    followers: tuple[tuple[str, str], ...] = ()
    """(dimension, the one that it follows): a shard has the key heads that its heads need, which others may need, too."""
    gathers_output: bool = False
    """Whether an output that comes in parts is made whole."""

    def axes(self, text: str) -> tuple[Axis, ...]:
        """The axes of a tensor with these dimensions."""
        for dimension, order in self.orders:
            text = re.sub(rf"\b{dimension}\b", order, text)
        found = re.findall(r"\(([^)]*)\)|(\S+)", text)
        return tuple(tuple(tuple(block.split()) for block in (inside or alone).split("+")) for inside, alone in found)


@dataclass(frozen=True, slots=True)
class LayerDivision:
    """What follows from dividing a dimension of a layer."""

    indices: tuple[IndexRanges, ...]
    """By shard: the indices of the divided dimension that it has; empty where its length is not known."""
    cuts: Mapping[str, TensorCut]
    """Parameter -> its cut. What is not named is whole on every shard."""
    collectives: LayerCollectives
    """What travels for each microbatch."""
    shares: tuple[ShardWorkShare, ...]
    """By shard: its share of the work and of the memory."""


@lru_cache(maxsize=4096)
def divide(layer: LayerDimensions, shards: int) -> LayerDivision:
    """The cuts, collectives and shares of a layer of which a dimension is divided over so many shards."""
    sizes = dict(layer.sizes)
    if layer.divided not in sizes:  # no parameter has it, or it is a dimension of values that the layer does not name
        return LayerDivision((), {}, _collectives(layer, {layer.divided: ()}), (ShardWorkShare(1 / shards, 1.0),) * shards)
    held = {layer.divided: even_ranges_by_shard(sizes[layer.divided], shards)}
    for follower, leader in (pair for pair in layer.followers if pair[1] in held):
        each = sizes[leader] // sizes[follower]
        held[follower] = tuple(merge_ranges((a // each, -(-b // each)) for a, b in spans) for spans in held[leader])
    tensors = {key: layer.axes(text) for key, text in layer.kind.parameters if key in layer.parameters}
    cuts = {}
    for key, axes in tensors.items():
        for dim, axis in enumerate(axes):
            if _has(axis, held):
                of_shards = ({d: spans[shard] for d, spans in held.items()} for shard in range(shards))
                cuts[key] = TensorCut(dim, _length(axis, sizes), tuple(_indices(axis, sizes, each) for each in of_shards))
    return LayerDivision(held[layer.divided], cuts, _collectives(layer, held), _shares(layer, tensors, cuts, held, sizes))


def _has(axis: Axis, divided: Mapping[str, object]) -> bool:
    return any(dimension in divided for block in axis for dimension in block)


def _length(axis: Axis, sizes: Mapping[str, int]) -> int:
    return sum(prod(sizes[dimension] for dimension in block) for block in axis)


def _indices(axis: Axis, sizes: Mapping[str, int], held: Mapping[str, IndexRanges]) -> IndexRanges:
    """The indices of an axis that a shard has which has `held` of the divided dimensions."""
    found: list[tuple[int, int]] = []
    start = 0
    for block in axis:
        lengths = [sizes[dimension] for dimension in block]
        spans: IndexRanges = ((0, prod(lengths)),)
        for place, dimension in enumerate(block):
            if dimension in held:
                inner = prod(lengths[place + 1 :])
                spans = repeat_ranges(scale_ranges(held[dimension], inner), inner * lengths[place], prod(lengths[:place]))
        found += shift_ranges(spans, start)
        start += prod(lengths)
    return merge_ranges(found)


def _collectives(layer: LayerDimensions, divided: Mapping[str, object]) -> LayerCollectives:
    """What travels: a product whose result does not have the divided dimension is a sum over the shards."""
    kind = layer.kind
    if not layer.divided:
        return LayerCollectives()
    in_input, in_output = (any(_has(axis, divided) for axis in layer.axes(text)) for text in (kind.input, kind.output))
    reads, makes = _formula(kind.input), _formula(kind.output)
    summed = LayerCollective("all_reduce", "forward", "output", makes)
    gathered = LayerCollective("all_gather", "forward", "output", makes)
    summed_back = LayerCollective("all_reduce", "backward", "input", reads)
    sums_input = not in_input and not kind.looks_up
    outputs = [summed] * (not in_output) + [gathered] * layer.gathers_output
    rows = [f"h {_formula(text, without=divided)}" for text in (kind.input, kind.output)]
    fetched = LayerCollective("all_to_all", "forward", "input", rows[0])
    fetched_back = LayerCollective("all_to_all", "backward", "output", rows[1])
    beside = [fetched, fetched_back] * any(dimension in divided for dimension in kind.windows)
    plain = (*beside, *outputs, *[summed_back] * sums_input)
    if kind.sequence in ("whole", "refused"):
        return LayerCollectives(plain, plain if kind.sequence == "whole" else ())
    scattered = LayerCollective("reduce_scatter", "forward", "output", makes)
    scattered_back = LayerCollective("reduce_scatter", "backward", "input", reads)
    sequence = (
        *[LayerCollective("all_gather", "forward", "input", reads)] * sums_input,
        *[scattered if each is summed else each for each in outputs],
        *[LayerCollective("all_gather", "backward", "output", makes)] * (not in_output),
        *[scattered_back if kind.sequence == "parts" else summed_back] * sums_input,
    )
    return LayerCollectives(plain, sequence)


def _formula(text: str, without: Collection[str] = ()) -> str:
    """How many numbers a tensor with these dimensions has: `B C_in`."""
    names = (dimension for dimension in re.findall(r"\w+", text) if dimension in SYMBOLS and dimension not in without)
    return " ".join(SYMBOLS[dimension] for dimension in names)


def _shares(
    layer: LayerDimensions,
    tensors: Mapping[str, tuple[Axis, ...]],
    cuts: Mapping[str, TensorCut],
    held: Mapping[str, tuple[IndexRanges, ...]],
    sizes: Mapping[str, int],
) -> tuple[ShardWorkShare, ...]:
    """By shard: its share of the layer. Each element of a weight is multiplied once for each row; what is looked up is as long
    as the output."""
    elements = {key: prod(_length(axis, sizes) for axis in axes) for key, axes in tensors.items()}
    weights = [key for key, axes in tensors.items() if len(axes) > 1] or list(tensors)

    def share(keys: list[str], shard: int) -> float:
        whole, here = sum(elements[key] for key in keys), 0
        for key in keys:
            cut = cuts.get(key)
            here += (
                elements[key] if cut is None else elements[key] // cut.whole_size * count_indices(cut.indices_by_shard[shard])
            )
        return here / whole if whole else 1.0

    def work(shard: int) -> float:
        if not layer.kind.looks_up:
            return share(weights, shard)
        in_output = any(_has(axis, held) for axis in layer.axes(layer.kind.output))
        return count_indices(held[layer.divided][shard]) / sizes[layer.divided] if in_output else 1.0

    shards = range(len(held[layer.divided]))
    return tuple(ShardWorkShare(work(shard), share(list(tensors), shard)) for shard in shards)
