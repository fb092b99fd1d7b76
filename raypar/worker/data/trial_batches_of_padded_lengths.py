"""The shapes that microbatches have under `data.pad.to`, and batches of these shapes made of the first microbatch."""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from raypar.plan.microbatches import Microbatches
from raypar.worker.data.padding import Padding

MOST_SHAPES = 64
"""Ladders with more shapes than this are not gone through ahead of the steps."""


@dataclass(frozen=True)
class LadderShapes:
    """All shapes that a ladder gives the fields of a microbatch. Fields whose samples have equal lengths have them together."""

    padding: Padding
    """The ladder."""
    lengths: Mapping[str, Sequence[int]]
    """Padded field -> the lengths of the samples of the first microbatch."""

    @property
    def groups(self) -> list[list[str]]:
        """The padded fields, those of equal lengths together."""
        found: dict[tuple[int, ...], list[str]] = {}
        for name, lengths in self.lengths.items():
            found.setdefault(tuple(lengths), []).append(name)
        return list(found.values())

    def batches(self, first: Mapping[str, Tensor], sizes: Sequence[int]) -> Iterator[dict[str, Tensor]]:
        """Batches of every shape, made of the values of the first microbatch: one whose rows are all full, and one whose rows
        all end before, for models that look in Python whether a mask is full.

        `first`: its fields [samples, length, ...], others [samples, ...]; `sizes`: numbers of samples. None for ladders with
        more than `MOST_SHAPES` shapes.
        """
        groups, steps = self.groups, self.padding.config.to
        if not groups or len(sizes) * len(steps) ** len(groups) > MOST_SHAPES:
            return
        for size, chosen in itertools.product(sizes, itertools.product(steps, repeat=len(groups))):
            length_of = {name: length for group, length in zip(groups, chosen, strict=True) for name in group}
            for is_full in (True, False):
                yield {name: self._field(name, value, size, length_of.get(name), is_full) for name, value in first.items()}

    def _field(self, name: str, value: Tensor, size: int, length: int | None, is_full: bool) -> Tensor:
        """A field of a batch of `size` samples: the first microbatch's, again from the first one on where there are more."""
        rows = [row % len(value) for row in range(size)] if value.dim() else []
        if length is None:
            return value[rows].clone() if rows else value
        made = value.new_full((size, length, *value.shape[2:]), self.padding.value(name, value.dtype))
        for target, row in zip(made, rows, strict=True):
            own = self.lengths[name][row]
            here = length if is_full else min(own, length - 1)
            target[:here] = value[row, torch.arange(here) % max(own, 1)]
        return made


def sizes_of_microbatches(batching: Microbatches) -> list[int]:
    """The numbers of samples that microbatches have."""
    smallest, largest = batching.batch_size // batching.count, -(-batching.batch_size // batching.count)
    return sorted({smallest, largest} - {0})


def lengthened(batch: Mapping[str, Tensor], padding: Padding | None, most: int | None = None) -> dict[str, Tensor]:
    """A collated batch whose padded fields have the largest length that `data.pad` gives: the last of the ladder, else that of
    a sample of length `most` (None: as they are)."""
    length = None if padding is None else padding.config.to[-1] if padding.config.to else padding.length(most) if most else None
    if padding is None or length is None:
        return dict(batch)
    found = {}
    for name, value in batch.items():
        found[name] = value
        if padding.pads_batch(name, value) and value.shape[1] < length:
            found[name] = value.new_full((len(value), length, *value.shape[2:]), padding.value(name, value.dtype))
            found[name][:, : value.shape[1]] = value
    return found
