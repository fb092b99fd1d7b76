"""Reads and writes elements of a shard's slice, numbered as state is when it moves between workers and is stored.

The elements of the whole parameter are numbered with the cut dim as the slowest; those of a parameter that is not cut, as they
lie in memory. The numbering depends on the style alone, so it is the same under every plan (`TensorCut.element_ranges`).
"""

from __future__ import annotations

import torch
from torch import Tensor

from raypar.plan.shard_ranges import TensorCut, positions_of_indices


def read_elements(local: Tensor, cut: TensorCut | None, shard: int, start: int, stop: int) -> Tensor:
    """Elements [start, stop) of the whole parameter, from this shard's slice `local`; may share its memory."""
    flat, _ = _numbered(local, cut)
    at, end = _place(local, cut, shard, start, stop)
    return flat[at:end]


def write_elements(local: Tensor, cut: TensorCut | None, shard: int, start: int, values: Tensor) -> None:
    """Write `values` [n] to the elements [start, start + n) of the whole parameter, in this shard's slice `local`."""
    with torch.no_grad():
        flat, moved = _numbered(local, cut)
        at, end = _place(local, cut, shard, start, start + values.numel())
        flat[at:end] = values
        if flat.data_ptr() != local.data_ptr():
            moved.copy_(flat.view(moved.shape))


def _numbered(local: Tensor, cut: TensorCut | None) -> tuple[Tensor, Tensor]:
    """(the slice's elements in their order, maybe a copy; the slice with the cut dim first)."""
    moved = local.detach() if cut is None else local.detach().movedim(cut.dim, 0)
    return moved.reshape(-1), moved


def _place(local: Tensor, cut: TensorCut | None, shard: int, start: int, stop: int) -> tuple[int, int]:
    """Where elements [start, stop) of the whole parameter stand among those of the slice."""
    if cut is None:
        return start, stop
    here = cut.indices_by_shard[shard]
    width = local.numel() // local.shape[cut.dim]
    (place,) = positions_of_indices(cut.element_ranges(here, width * cut.whole_size), ((start, stop),))
    return place
