"""The protocol of objects that give a model its initial values.

Implemented in `model.initial_values` and `worker.pretrained.initial_values`.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping
from typing import Protocol

import torch
from torch import Tensor

from raypar.plan.shard_ranges import IndexRanges

DimRanges = tuple[int, IndexRanges]
"""A dim of a tensor, and the indices of it."""


class InitialValues(Protocol):
    """Initial values by name: canonical names of parameters, qualified names of buffers."""

    def stream(self, names: Collection[str], dtype: torch.dtype) -> Iterator[tuple[str, Tensor]]:
        """(name, whole tensor) of each of `names` once, in any order.

        Tensors are on the CPU, contiguous, in memory of their own, floating-point ones in `dtype`. Raises `ModelError` for a
        tensor without values.
        """

    def stream_slices(self, slices: Mapping[str, DimRanges], dtype: torch.dtype) -> Iterator[tuple[str, Tensor]]:
        """(name, slice) of those of `slices` that can be had without the whole tensor; the caller cuts the others itself."""

    def release(self) -> None:
        """Free the memory that `stream` uses; a later `stream` makes the values again."""

    @property
    def notes(self) -> tuple[str, ...]:
        """Lines for the user: what these values cost, or which values are not used."""
