"""Completing gradients that are parts of a sum over shards, once a step.

Two kinds are: of a parameter that all shards hold whole but saw a part of the values with (`ShardGroup.partial`: norms under
sequence parallelism, norms of single heads), and of indices that several shards hold (a key head that serves query heads of
more than one shard). What they hold is equal on all its holders before and after.
"""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import Tensor

from raypar.comm.transport import Routine, Wait
from raypar.model.tensor_parallel.group import ShardGroup
from raypar.plan.shard_ranges import Cut, IndexRanges, count_indices, intersect_ranges, positions_of


def complete(
    gradients: Mapping[str, Tensor | None], *, partial: set[str], cuts: Mapping[str, Cut], group: ShardGroup
) -> Routine[None]:
    """Add up, in place, what shards have of the gradients `name -> tensor` (names in the same order on every shard).

    `partial`: names of parameters in `group.partial`, of any replica. One message in all for each dtype; bytes as an all-reduce
    of those parameters' elements. An undefined gradient of one shard is undefined on all.
    """
    if group.size == 1:
        return
    jobs: dict[torch.dtype, list[tuple[Tensor, Tensor, list[tuple[int, IndexRanges, IndexRanges]]]]] = {}
    for name, gradient in gradients.items():
        if gradient is None:
            continue
        if name in cuts and cuts[name].shared:
            cut = cuts[name]
            shape = list(gradient.shape)
            shape[cut.dim] = count_indices(cut.shared)
            mine = intersect_ranges(cut.held[group.shard], cut.shared)
            pairs = [(cut.dim, positions_of(cut.held[group.shard], mine), positions_of(cut.shared, mine))]
            jobs.setdefault(gradient.dtype, []).append((gradient, gradient.new_zeros(shape), pairs))
        elif name in partial:
            jobs.setdefault(gradient.dtype, []).append((gradient, gradient.new_zeros(gradient.shape), []))
    for parts in jobs.values():
        flat = torch.cat([(_filled(g, room, pairs)).reshape(-1) for g, room, pairs in parts])
        yield Wait(group.post_sum(flat), f"the partial gradients of shard {group.shard}")
        at = 0
        for gradient, room, pairs in parts:
            total = flat[at : at + room.numel()].view(room.shape)
            at += room.numel()
            if not pairs:
                gradient.copy_(total)
            for dim, here, there in pairs:
                for (a, b), (c, d) in _matched(here, there):
                    gradient.narrow(dim, a, b - a).copy_(total.narrow(dim, c, d - c))


def _filled(gradient: Tensor, room: Tensor, pairs: list[tuple[int, IndexRanges, IndexRanges]]) -> Tensor:
    if not pairs:
        return gradient
    for dim, here, there in pairs:
        for (a, b), (c, d) in _matched(here, there):
            room.narrow(dim, c, d - c).copy_(gradient.narrow(dim, a, b - a))
    return room


def _matched(first: IndexRanges, second: IndexRanges) -> list[tuple[tuple[int, int], tuple[int, int]]]:
    """Runs of equal length, pairwise: both sides list the same indices in the same order."""
    found = []
    left, right = [list(s) for s in first], [list(s) for s in second]
    while left:
        n = min(left[0][1] - left[0][0], right[0][1] - right[0][0])
        found.append(((left[0][0], left[0][0] + n), (right[0][0], right[0][0] + n)))
        for side in (left, right):
            side[0][0] += n
            if side[0][0] == side[0][1]:
                side.pop(0)
    return found
