"""Reads the microbatches of a validation pass over several data sets, each from the loader of its set."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Protocol

from torch import Tensor

from raypar.errors import RayparError
from raypar.plan.microbatches import Microbatches
from raypar.worker.data.microbatch_loader import BatchSource


class SetLoader(BatchSource, Protocol):
    """The loader of one set."""

    def prefetch(self, step: int, microbatches: Sequence[int]) -> None:
        """Begin to read these microbatches."""


class LoaderOfSets:
    """A `BatchSource` of all sets. `batching` numbers their microbatches; `loaders`: name -> the loader of the set."""

    def __init__(self, batching: Microbatches, loaders: Mapping[str, SetLoader]) -> None:
        self.batching, self.loaders = batching, dict(loaders)

    def get(self, step: int, microbatch: int) -> Mapping[str, Tensor]:
        """See `BatchSource.get`. What is wrong with the data names the set."""
        name, number = self.batching.place_in_set(microbatch)
        try:
            return self.loaders[name].get(step, number)
        except RayparError as error:
            error.add_place(f"validation set {name}")
            raise

    def prefetch(self, step: int, microbatches: Sequence[int]) -> None:
        """Begin to read these microbatches of the pass."""
        places = [self.batching.place_in_set(microbatch) for microbatch in microbatches]
        for name, loader in self.loaders.items():
            loader.prefetch(step, [number for of_set, number in places if of_set == name])
