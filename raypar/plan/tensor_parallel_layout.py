"""The tensor-parallel layout of a model, as plain data.

`model.tensor_parallel.compute_shard_layout` computes it once, in a process that has the model. Nothing here needs torch: the
driver and the planner can read it.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Literal

from raypar.plan.shard_ranges import IndexRanges, TensorCut, count_indices, even_ranges_by_shard, scale_ranges

CollectiveName = Literal["all_reduce", "all_gather", "reduce_scatter", "all_to_all"]


@dataclass(frozen=True, slots=True)
class LayerCollective:
    """One collective that a layer runs over the shards of its stage, once for every microbatch."""

    operation: CollectiveName
    """The kind of collective."""
    direction: Literal["forward", "backward"]
    """The pass in which it runs."""
    value: Literal["input", "output", "statistics"]
    """The value that it moves: the layer's unsharded input or output, or a norm's statistics, float64; in the backward pass,
    the gradient of that value."""
    formula: str = ""
    """How many numbers this value has, by the layer's dimensions: `B C_in`."""


@dataclass(frozen=True, slots=True)
class LayerCollectives:
    """All collectives of one layer, without and with sequence parallelism.

    They are those of a layer whose input is the output of the layer before it and has a gradient.
    """

    plain: tuple[LayerCollective, ...] = ()
    """Without sequence parallelism."""
    sequence: tuple[LayerCollective, ...] = ()
    """With sequence parallelism."""


@dataclass(frozen=True, slots=True)
class ShardWorkShare:
    """One shard's share of a layer, as fractions of the unsharded layer (from 0 to 1)."""

    compute: float
    """Fraction of its multiplications and additions, or of its look-ups."""
    bytes: float
    """Fraction of the memory of its parameters."""


@dataclass(frozen=True)
class TensorParallelLayout:
    """How a model is cut over shards. Layers and parameters that are not named here are whole on every shard.

    The layout for one shard has cuts too: they number a parameter's elements alike under every number of shards
    (`TensorCut.element_ranges`).
    """

    shards: int
    """Number of shards."""
    styles: Mapping[str, str]
    """Qualified module name -> style, as text that `plan.styles` accepts."""
    cuts: Mapping[str, TensorCut]
    """Qualified parameter name -> how it is cut over the shards. A tied parameter has an entry under each of its names."""
    shared_inputs: frozenset[str] = frozenset()
    """Modules that read the same value as sibling modules (q, k and v; gate and up): one collective serves all of them."""
    traffic: Mapping[str, LayerCollectives] = field(default_factory=dict)
    """Qualified module name -> its collectives over shards."""
    costs: Mapping[str, tuple[ShardWorkShare, ...]] = field(default_factory=dict)
    """Qualified module name -> by shard, its share of the layer."""
    divides_samples: bool = False
    """Whether each shard computes some of a microbatch's samples with whole layers, and no layer is cut."""
    values_in_parts: Mapping[str, int] | None = field(default_factory=dict)
    """Value between layers that is split over the shards, evenly but for `uneven_values` -> the dim of the split. It holds for
    every plan, also if a stage ends there and the value is sent whole. None: not yet known
    (`find_split_values_between_layers`)."""
    uneven_values: Mapping[str, TensorCut] = field(default_factory=dict)
    """Those of `values_in_parts` that are split in other parts than even ones (flattened channels, units of a style) -> how."""
    spatial_values: frozenset[str] = frozenset()
    """Those of `values_in_parts` that are split along a spatial dim, evenly."""
    whole_layers: frozenset[int] = frozenset()
    """Indices of the layers that every shard computes alike, from whole values, if values are not cut along the sequence."""

    def operations(self, *, sequence: bool) -> frozenset[CollectiveName]:
        """The kinds of collectives that the layers run over shards; `sequence`: under sequence parallelism."""
        return frozenset(
            collective.operation
            for traffic in self.traffic.values()
            for collective in (traffic.sequence if sequence else traffic.plain)
        )

    def computed_once(self, first: int, last: int, layers: int) -> frozenset[int]:
        """Indices of the layers of a stage, [first, last) of a model's `layers`, that a worker computes once for all of its
        virtual shards. Not the model's last one: the loss goes on with its random numbers."""
        return frozenset(index for index in self.whole_layers if first <= index < min(last, layers - 1))

    def elements_on_shard(self, name: str, elements: int, shard: int) -> int:
        """Number of elements that a shard holds of a parameter with so many `elements`."""
        cut = self.cuts.get(name)
        return elements if cut is None else elements // cut.whole_size * count_indices(cut.indices_by_shard[shard])

    def parts_of_value(self, name: str, size: int) -> tuple[IndexRanges, ...]:
        """By shard: its indices of the split dim, `size` long, of a value between layers."""
        cut = self.uneven_values.get(name)
        return even_ranges_by_shard(size, self.shards) if cut is None else cut.indices_by_shard

    def parts_like(self, part: IndexRanges, size: int, shard: int) -> tuple[IndexRanges, ...] | None:
        """By shard: the runs of a dim, `size` long, of which this shard has `part`: even ones, or those of a parameter's cut of
        which each index has become several. None if there are none."""
        even = even_ranges_by_shard(size, self.shards)
        if part == even[shard]:
            return even
        for cut in self.cuts.values():
            runs = tuple(scale_ranges(ranges, size // cut.whole_size) for ranges in cut.indices_by_shard)
            if size % cut.whole_size == 0 and runs[shard] == part and all(len(ranges) == 1 for ranges in runs):
                return runs
        return None


def shard_slice_shape(cut: TensorCut, shape: Sequence[int], shard: int) -> tuple[int, ...]:
    """The shape of a shard's slice of a parameter of `shape`."""
    return tuple(count_indices(cut.indices_by_shard[shard]) if dim == cut.dim else n for dim, n in enumerate(shape))
