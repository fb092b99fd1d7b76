"""Adds up gradients of which each shard has a part of the sum."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import torch
from torch import Tensor

from raypar.comm.routine import Routine, RoutineWait
from raypar.model.tensor_parallel.shard_group import ShardGroup
from raypar.plan.shard_ranges import (
    IndexRanges,
    TensorCut,
    count_indices,
    intersect_ranges,
    matched_ranges,
    positions_of_indices,
)


def sum_partial_gradients(
    gradients: Mapping[str, Sequence[Tensor] | Tensor | None],
    *,
    partial: set[str],
    cuts: Mapping[str, TensorCut],
    group: ShardGroup,
) -> Routine[None]:
    """Sum over the shards, in place, the gradients `name -> tensor` (names in the same order on every shard): once a step,
    those of which each shard has a part. Of a gradient that replicas divide there are this replica's runs, the same on every
    shard.

    There are two kinds. A parameter that all shards hold whole may have been used on parts of values: norms under sequence
    parallelism, norms of single heads (`ShardGroup.partially_used_parameters`). And several shards may hold the same indices
    of a parameter that is cut: a key head that serves query heads of more than one shard. The parameters are equal on all
    shards that hold them, before and after.

    `partial`: names of parameters that are in `group.partially_used_parameters` on some replica. Costs one all-reduce of the
    summed elements for each dtype. A gradient that is undefined on one shard is undefined on all.
    """
    if group.size == 1:
        return
    jobs: dict[torch.dtype, list[tuple[Tensor, Tensor, list[tuple[int, IndexRanges, IndexRanges]]]]] = {}
    of_all = ((name, found) for name, one in gradients.items() for found in ([one] if isinstance(one, Tensor) else one or ()))
    for name, gradient in of_all:
        if name in cuts and cuts[name].overlaps:
            cut = cuts[name]
            shape = list(gradient.shape)
            shape[cut.dim] = count_indices(cut.shared)
            mine = intersect_ranges(cut.indices_by_shard[group.shard], cut.shared)
            pairs = [
                (cut.dim, positions_of_indices(cut.indices_by_shard[group.shard], mine), positions_of_indices(cut.shared, mine))
            ]
            jobs.setdefault(gradient.dtype, []).append((gradient, gradient.new_zeros(shape), pairs))
        elif name in partial:
            jobs.setdefault(gradient.dtype, []).append((gradient, gradient.new_zeros(gradient.shape), []))
    for parts in jobs.values():
        flat = torch.cat([_spread(g, room, pairs).reshape(-1) for g, room, pairs in parts])
        handle, what = group.post_all_reduce(flat), f"the partial gradients of shard {group.shard}"
        yield RoutineWait(handle, what, on_stream=group.stream_waits is not None)
        if group.stream_waits is not None:
            group.stream_waits.add(handle, what)
        at = 0
        for gradient, room, pairs in parts:
            total = flat[at : at + room.numel()].view(room.shape)
            at += room.numel()
            if not pairs:
                gradient.copy_(total)
            for dim, here, there in pairs:
                for (a, b), (c, d) in matched_ranges(here, there):
                    gradient.narrow(dim, a, b - a).copy_(total.narrow(dim, c, d - c))


def _spread(gradient: Tensor, room: Tensor, pairs: list[tuple[int, IndexRanges, IndexRanges]]) -> Tensor:
    """The gradient, its shared indices written to their places in `room`; itself where all of it is summed."""
    if not pairs:
        return gradient
    for dim, here, there in pairs:
        for (a, b), (c, d) in matched_ranges(here, there):
            room.narrow(dim, c, d - c).copy_(gradient.narrow(dim, a, b - a))
    return room
