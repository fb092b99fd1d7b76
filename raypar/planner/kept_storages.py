"""The storages that layers keep for the backward of one microbatch, and the bytes that a stage of such layers keeps.

A storage that two layers of a stage both keep counts once: for example an output that the next layer saves as its input.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable
from dataclasses import dataclass

from raypar.schedule.instructions import ACTIVATIONS, KEPT_INPUTS, STASH

BATCH = -1
"""Stands for the producing layer of a field of the batch."""


@dataclass(frozen=True, slots=True)
class ReadStorage:
    """A storage that a layer (or the loss) reads."""

    storage: int
    """Its number."""
    producer: int
    """Index of the layer that writes it, or `BATCH`."""
    has_gradient: bool
    """Whether it is a floating point value of another layer; a stage that receives such a value keeps it until the backward."""


@dataclass(frozen=True, slots=True)
class LayerStorages:
    """Numbers of the storages that a layer reads and keeps, without parameters and buffers; the last one with the loss."""

    saved: tuple[int, ...]
    """What autograd saves in its forward."""
    stash: tuple[int, ...]
    """What `BackwardInput` keeps for its weight gradients."""
    reads: tuple[ReadStorage, ...]
    """What its forward reads."""


@dataclass(frozen=True)
class KeptStorages:
    """What the layers of a model keep of a microbatch of one size."""

    samples: int
    """Samples of the microbatch."""
    sizes: tuple[int, ...]
    """Number of a storage -> its bytes."""
    layers: tuple[LayerStorages, ...]
    """By layer."""

    def bytes_by_kind(self, first: int, last: int, recomputed: Collection[int] = ()) -> dict[str, int]:
        """Kind of kept memory -> bytes that a stage of layers [first, last) keeps for a microbatch.

        `recomputed`: indices of its recomputed layers.
        """
        here = range(first, last)
        received = {r.storage for i in here for r in self.layers[i].reads if r.has_gradient and r.producer not in here}
        again = [i for i in here if i in recomputed]
        inputs = received | {r.storage for i in again for r in self.layers[i].reads if r.producer not in again}
        kept = received.union(*(self.layers[i].saved for i in here if i not in recomputed))
        saved_again = {storage for i in again for storage in self.layers[i].saved}
        # A recomputed output is a new storage, and another layer may still keep the storage of the first forward: both count.
        return {
            ACTIVATIONS: self._bytes(kept | (saved_again & inputs)) + self._bytes(saved_again - inputs),
            KEPT_INPUTS: self._bytes(kept | inputs),
            STASH: self._bytes({storage for i in here for storage in self.layers[i].stash}),
        }

    def _bytes(self, storages: Iterable[int]) -> int:
        return sum(self.sizes[storage] for storage in storages)
