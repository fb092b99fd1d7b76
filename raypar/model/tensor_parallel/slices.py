"""A shard's slice of a parameter in the numbering by which state moves and is stored: `plan.pieces.Piece` (DESIGN 4.9).

Elements of a whole parameter that is cut are numbered with the cut dim as the slowest; of one that is not, as they lie in
memory. The numbering depends on the style alone, so it is the same under every plan of a job.
"""

from __future__ import annotations

import torch
from torch import Tensor

from raypar.plan.shard_ranges import Cut, positions_of


def taken(local: Tensor, cut: Cut | None, shard: int, start: int, stop: int) -> Tensor:
    """Elements [start, stop) of the whole, from the slice `local` that this shard holds; may share its memory."""
    flat, _ = _numbered(local, cut)
    at, end = _place(local, cut, shard, start, stop)
    return flat[at:end]


def put(local: Tensor, cut: Cut | None, shard: int, start: int, values: Tensor) -> None:
    """The opposite of `taken`: `values` [n] become elements [start, start + n) of the whole, in this shard's slice `local`."""
    with torch.no_grad():
        flat, moved = _numbered(local, cut)
        at, end = _place(local, cut, shard, start, start + values.numel())
        flat[at:end] = values
        if flat.data_ptr() != local.data_ptr():
            moved.copy_(flat.view(moved.shape))


def _numbered(local: Tensor, cut: Cut | None) -> tuple[Tensor, Tensor]:
    moved = local.detach() if cut is None else local.detach().movedim(cut.dim, 0)
    return moved.reshape(-1), moved


def _place(local: Tensor, cut: Cut | None, shard: int, start: int, stop: int) -> tuple[int, int]:
    if cut is None:
        return start, stop
    here = cut.held[shard]
    width = local.numel() // local.shape[cut.dim]
    (place,) = positions_of(cut.pieces(here, width * cut.size), ((start, stop),))
    return place
