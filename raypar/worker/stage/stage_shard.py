"""One worker's shard of a stage: sums gradients over shards, selects what the shard counts in the norm and writes."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property

import torch
from torch import Tensor

from raypar.comm.transport import Routine, RoutineWait
from raypar.model.tensor_parallel.autograd_collectives import select_ranges
from raypar.model.tensor_parallel.build_shard_modules import shard_slice_of
from raypar.model.tensor_parallel.group import ShardGroup
from raypar.plan.shard_ranges import IndexRanges, TensorCut, count_indices, intersect_ranges, positions_of_indices
from raypar.plan.tensor_parallel_layout import TensorParallelLayout
from raypar.worker.checkpoint.checkpoint_files import TensorSlices


@dataclass(frozen=True)
class StageShard:
    """The shard of a stage that a worker has, and how its tensors are cut out of whole ones."""

    group: ShardGroup
    """The shards of this replica of the stage, and which of them this is."""
    layout: TensorParallelLayout
    """How the model is cut over the shards of `group`."""

    def complete(self, names: Sequence[str], gradients: Sequence[Tensor | None], partial: Collection[int]) -> Routine[None]:
        """Add up over shards, in place, the gradients of uses of parameters (`names`) that are parts of a sum.

        They are those of parameters that several shards hold elements of, and of `partial`: indices of uses of parameters that
        every shard holds whole but that have met parts of values.
        """
        parts = [i for i, name in enumerate(names) if i in partial or name in self._overlapping]
        yield from sum_partial_gradients(
            {names[i]: gradients[i] for i in parts},
            partial={names[i] for i in partial},
            cuts=self._overlapping,
            group=self.group,
        )

    def counted(self, name: str, gradient: Tensor) -> Tensor:
        """The elements of a parameter's gradient that this shard counts in the norm: each element is counted by one shard."""
        if name not in self.layout.cuts and self.group.shard > 0:
            return gradient.new_empty(0)
        return self.owned(name, gradient)

    # -- state -----------------------------------------------------------------------------------------------------------

    def part(self, name: str, whole: Tensor) -> Tensor:
        """This shard's slice of an unsharded parameter, or of optimizer state of its shape. State of another shape is returned
        as it is: every shard has it."""
        cut = self.layout.cuts.get(name)
        if cut is None or whole.dim() <= cut.dim or whole.shape[cut.dim] != cut.whole_size:
            return whole
        return shard_slice_of(self.layout, name, whole, self.group.shard)

    def owned(self, name: str, local: Tensor) -> Tensor:
        """The elements of this shard's slice that no shard before this one has."""
        cut, shard = self._overlapping.get(name), self.group.shard
        if cut is None:
            return local
        return select_ranges(local, cut.dim, positions_of_indices(cut.indices_by_shard[shard], cut.owned(shard))).contiguous()

    def slices(self, name: str, local: Tensor) -> TensorSlices:
        """Where the elements of `owned` lie in the unsharded tensor."""
        cut = self.layout.cuts[name]
        shape = (*local.shape[: cut.dim], cut.whole_size, *local.shape[cut.dim + 1 :])
        return TensorSlices(shape, cut.dim, cut.owned(self.group.shard))

    @cached_property
    def _overlapping(self) -> Mapping[str, TensorCut]:
        """Parameter -> its cut, where several shards hold the same indices."""
        return {name: cut for name, cut in self.layout.cuts.items() if cut.shared}


def sum_partial_gradients(
    gradients: Mapping[str, Tensor | None], *, partial: set[str], cuts: Mapping[str, TensorCut], group: ShardGroup
) -> Routine[None]:
    """Sum over the shards, in place, the gradients `name -> tensor` (names in the same order on every shard): once a step,
    those of which each shard has a part.

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
    for name, gradient in gradients.items():
        if gradient is None:
            continue
        if name in cuts and cuts[name].shared:
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
        yield RoutineWait(group.post_all_reduce(flat), f"the partial gradients of shard {group.shard}")
        at = 0
        for gradient, room, pairs in parts:
            total = flat[at : at + room.numel()].view(room.shape)
            at += room.numel()
            if not pairs:
                gradient.copy_(total)
            for dim, here, there in pairs:
                for (a, b), (c, d) in _matched(here, there):
                    gradient.narrow(dim, a, b - a).copy_(total.narrow(dim, c, d - c))


def _spread(gradient: Tensor, room: Tensor, pairs: list[tuple[int, IndexRanges, IndexRanges]]) -> Tensor:
    """The gradient, its shared indices written to their places in `room`; itself where all of it is summed."""
    if not pairs:
        return gradient
    for dim, here, there in pairs:
        for (a, b), (c, d) in _matched(here, there):
            room.narrow(dim, c, d - c).copy_(gradient.narrow(dim, a, b - a))
    return room


def _matched(first: IndexRanges, second: IndexRanges) -> list[tuple[tuple[int, int], tuple[int, int]]]:
    """Pairs of runs of equal length that cover both sides, which list equally many indices in the same order."""
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
