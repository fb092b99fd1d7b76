"""The storages that layers keep for the backward of one microbatch, and their bytes in a stage of some of these layers.

A storage that two layers of a stage both keep, as a layer's output that the next one saves as its input, counts once.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable
from dataclasses import dataclass

from raypar.schedule.instructions import ACTIVATIONS, KEPT_INPUTS, STASH

BATCH = -1
"""In the place of a producing layer: a field of the batch."""


@dataclass(frozen=True, slots=True)
class ReadStorage:
    """A storage that a layer (or the loss) reads."""

    storage: int
    """Its number."""
    producer: int
    """Index of the layer that writes it, or `BATCH`."""
    has_gradient: bool
    """Whether it holds values that require a gradient, which a stage that receives them keeps."""


@dataclass(frozen=True, slots=True)
class LayerStorages:
    """The storages that one layer (the last one with the loss) reads and keeps, by number; parameters and buffers aside."""

    saved: tuple[int, ...]
    """What its forward saves for its backward."""
    stash: tuple[int, ...]
    """What the input half of its backward keeps for its weight gradients."""
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

    def bytes_of(self, first: int, last: int, recomputed: Collection[int] = ()) -> dict[str, int]:
        """Kind of kept memory -> bytes that a stage of the layers [first, last) keeps for a microbatch.

        `recomputed`: indices of its layers of which the forward keeps the inputs only, and which are recomputed.
        """
        here = range(first, last)
        received = {r.storage for i in here for r in self.layers[i].reads if r.has_gradient and r.producer not in here}
        again = [i for i in here if i in recomputed]
        inputs = received | {r.storage for i in again for r in self.layers[i].reads if r.producer not in again}
        kept = received.union(*(self.layers[i].saved for i in here if i not in recomputed))
        saved_again = {storage for i in again for storage in self.layers[i].saved}
        # What a recomputed layer makes again is another storage than that of its first forward, which a kept layer may keep.
        return {
            ACTIVATIONS: self._bytes(kept | (saved_again & inputs)) + self._bytes(saved_again - inputs),
            KEPT_INPUTS: self._bytes(kept | inputs),
            STASH: self._bytes({storage for i in here for storage in self.layers[i].stash}),
        }

    def _bytes(self, storages: Iterable[int]) -> int:
        return sum(self.sizes[storage] for storage in storages)
