"""How a model is cut over shards, as plain data: it is computed once where the model is, and read everywhere.

Nothing here needs torch, so the driver and the planner can read a layout. `model.tensor_parallel.layout` computes it.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Literal

from raypar.plan.shard_ranges import TensorCut, count_indices

CollectiveName = Literal["all_reduce", "all_gather", "reduce_scatter"]


@dataclass(frozen=True, slots=True)
class LayerCollective:
    """One collective that a layer runs over the shards of its stage, once for every microbatch."""

    operation: CollectiveName
    direction: Literal["forward", "backward"]
    value: Literal["input", "output"]
    """What it moves: all elements of the layer's unsharded input or output; in the backward pass of the gradient of that."""


@dataclass(frozen=True, slots=True)
class LayerCollectives:
    """All collectives of one layer, without and with sequence parallelism.

    They are counted for a layer that reads what the layer before it wrote, and whose input has a gradient.
    """

    plain: tuple[LayerCollective, ...] = ()
    sequence: tuple[LayerCollective, ...] = ()


@dataclass(frozen=True, slots=True)
class ShardWorkShare:
    """What one shard does of a layer, as shares of the unsharded layer (from 0 to 1)."""

    compute: float
    """Of its multiplications and additions, or of its look-ups."""
    bytes: float
    """Of the memory of its parameters."""


@dataclass(frozen=True)
class TensorParallelLayout:
    """How a model is cut over `shards` shards. Layers and parameters that are not named here are whole on every shard.

    One shard has cuts too: they number a parameter's elements alike under every number of shards (`TensorCut.pieces`).
    """

    shards: int
    styles: Mapping[str, str]
    """Qualified module name -> style, as text that `plan.styles` accepts."""
    cuts: Mapping[str, TensorCut]
    """Qualified parameter name -> which part each shard holds. A tied parameter has an entry under each of its names."""
    shared_inputs: frozenset[str] = frozenset()
    """Modules that read the same value as others beside them (q, k and v; gate and up): one collective serves them all."""
    traffic: Mapping[str, LayerCollectives] = field(default_factory=dict)
    """Qualified module name -> what it sends over shards."""
    costs: Mapping[str, tuple[ShardWorkShare, ...]] = field(default_factory=dict)
    """Qualified module name -> by shard, its share of the layer."""

    def operations(self, *, sequence: bool) -> frozenset[CollectiveName]:
        """The kinds of collectives that the layers run over shards; `sequence`: under sequence parallelism."""
        return frozenset(
            collective.operation
            for traffic in self.traffic.values()
            for collective in (traffic.sequence if sequence else traffic.plain)
        )

    def elements_on_shard(self, name: str, elements: int, shard: int) -> int:
        """How many of a parameter's `elements` a shard holds."""
        cut = self.cuts.get(name)
        return elements if cut is None else elements // cut.whole_size * count_indices(cut.indices_by_shard[shard])


def shard_slice_shape(cut: TensorCut, shape: Sequence[int], shard: int) -> tuple[int, ...]:
    """The shape of a shard's slice of a parameter of `shape`."""
    return tuple(count_indices(cut.indices_by_shard[shard]) if dim == cut.dim else n for dim, n in enumerate(shape))
