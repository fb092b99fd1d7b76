"""State of a parameter as one worker has it: of all of it, of a shard's slice, or of a run of elements that has travelled.

Elements are numbered as `elastic.holdings.Piece` does it, alike under every number of shards (`slice_elements`).
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from raypar.comm.buffer_pool import CPU
from raypar.model.tensor_parallel.slice_elements import read_elements, write_elements
from raypar.plan.shard_layout import slice_shape
from raypar.plan.shard_ranges import Cut, IndexRanges, intersect_ranges, merge_ranges, subtract_ranges
from raypar.worker.checkpoint import PARAMETER

Kept = dict[str, Any]
"""Of one parameter: PARAMETER -> tensor, optimizer's key -> tensor or number."""


@dataclass(frozen=True)
class ParameterSlice:
    """Which part of a parameter: shard `shard` of `cut`; without a cut all of it."""

    cut: Cut | None = None
    shard: int = 0

    def spans(self, size: int) -> IndexRanges:
        """Elements of the `size` that the whole has."""
        return ((0, size),) if self.cut is None else self.cut.pieces(self.cut.held[self.shard], size)

    def size(self, local: Sequence[int]) -> int:
        """How many elements the whole has, of which a slice has the shape `local`."""
        count = 1
        for dim, n in enumerate(local):
            count *= self.cut.size if self.cut is not None and dim == self.cut.dim else n
        return count


@dataclass(frozen=True)
class ParameterState:
    """`kept` of one parameter. `start` None: tensors in their shape, at `place`; else flat runs that begin at that element.
    `lent`: it lies in a copy of the mirror's, which must stay as it is.

    What the optimizer keeps in the parameter's shape is sliced with it; all else (step counts) belongs to every slice.
    """

    kept: Kept
    place: ParameterSlice = ParameterSlice()
    start: int | None = None
    lent: bool = False

    @property
    def spans(self) -> IndexRanges:
        """The elements that it has."""
        parameter = self.kept[PARAMETER]
        if self.start is not None:
            return ((self.start, self.start + parameter.numel()),)
        return self.place.spans(self.place.size(parameter.shape))

    def sliced(self, key: str) -> bool:
        """Whether `kept[key]` has an element for each of the parameter's."""
        value = self.kept[key]
        return isinstance(value, Tensor) and value.shape == self.kept[PARAMETER].shape

    def take(self, key: str, start: int, stop: int, whole: Cut | None) -> Tensor:
        """Elements [start, stop), flat; they lie in one of `spans`. `whole`: how shards would cut what this has whole."""
        value: Tensor = self.kept[key]
        if self.start is not None:
            return value[start - self.start : stop - self.start]
        if self.place.cut is None:
            return read_elements(value, whole, 0, start, stop)
        return read_elements(value, self.place.cut, self.place.shard, start, stop)


def extract_run(holdings: Iterable[ParameterState], start: int, stop: int, whole: Cut | None) -> Kept:
    """Elements [start, stop) of a parameter, all of which these have together: flat tensors, and what is not sliced."""
    found: Kept = {}
    parts: dict[str, list[tuple[int, Tensor]]] = {}
    left: IndexRanges = ((start, stop),)
    for holding in holdings:
        for a, b in intersect_ranges(left, holding.spans):
            for key, value in holding.kept.items():
                if holding.sliced(key):
                    parts.setdefault(key, []).append((a, holding.take(key, a, b, whole)))
                else:
                    found[key] = value
            left = subtract_ranges(left, ((a, b),))
    assert not left, f"elements {left} are not here"
    return {key: _joined([part for _, part in sorted(runs, key=lambda run: run[0])]) for key, runs in parts.items()} | found


def _joined(parts: list[Tensor]) -> Tensor:
    """One after the other, where the first lies: some are on the worker's device, some (the mirror's) in host memory."""
    return torch.cat([part.to(parts[0].device) for part in parts])


def assemble_parameter(
    holdings: Sequence[ParameterState],
    place: ParameterSlice,
    size: int,
    shape: Callable[[], Sequence[int]],
    whole: Callable[[], Cut | None],
    device: torch.device = CPU,
) -> tuple[Kept, bool] | None:
    """(what these have of a parameter of so many elements, at `place`; whether it may be written to): as it lies in one of
    them, else in memory of its own on `device`. None: some of it is not there.

    `shape`, of the unsharded parameter, and `whole`, how shards would cut it, are only asked for where pieces are put together.
    """
    wanted = place.spans(size)
    for holding in holdings:
        if holding.start is None and holding.spans == wanted:
            return holding.kept, not holding.lent
    if not holdings or merge_ranges(s for h in holdings for s in intersect_ranges(wanted, h.spans)) != wanted:
        return None
    cut = place.cut if place.cut is not None else whole()
    local = tuple(shape()) if place.cut is None else slice_shape(place.cut, shape(), place.shard)
    kept: Kept = {}
    for key, value in holdings[0].kept.items():
        if not holdings[0].sliced(key):
            kept[key] = value
            continue
        kept[key] = torch.empty(local, dtype=value.dtype, device=device)
        for holding in holdings:
            for start, stop in intersect_ranges(wanted, holding.spans):
                write_elements(kept[key], cut, place.shard, start, holding.take(key, start, stop, whole()))
    return kept, True
