"""One worker's shard of a stage: completes gradients over shards, selects what the shard counts in the norm and writes."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property

from torch import Tensor

from raypar.comm.routine import Routine
from raypar.model.tensor_parallel.autograd_collectives import select_ranges
from raypar.model.tensor_parallel.build_shard_modules import shard_slice_of
from raypar.model.tensor_parallel.shard_group import ShardGroup
from raypar.plan.shard_ranges import TensorCut, positions_of_indices
from raypar.plan.tensor_parallel_layout import TensorParallelLayout
from raypar.worker.checkpoint.checkpoint_files import TensorSlices
from raypar.worker.stage.layer_tensors import ParameterUse
from raypar.worker.stage.sum_gradients_over_shards import sum_partial_gradients


@dataclass(frozen=True)
class StageShard:
    """The shard of a stage that a worker has, and how its tensors are cut out of whole ones."""

    group: ShardGroup
    """The shards of this replica of the stage, and which of them this is."""
    layout: TensorParallelLayout
    """How the model is cut over the shards of `group`."""

    def complete(
        self,
        uses: Sequence[ParameterUse],
        gradients: Sequence[Tensor | None],
        runs: Mapping[int, Sequence[Tensor]],
        partial: Collection[int],
    ) -> Routine[None]:
        """Add up over shards, in place, the gradients of uses of parameters that are parts of a sum.

        They are those of parameters that several shards hold elements of, and of `partial`: indices of uses of parameters that
        every shard holds whole but that have met parts of values. `runs`: use -> the runs of its gradient that this replica
        holds, flat, where replicas divide it: the same runs on all shards, and of what several shards hold elements of, all.
        """
        parts = [i for i, use in enumerate(uses) if i in partial or use.name in self._overlapping]
        found: dict[str, Sequence[Tensor] | Tensor | None] = {}
        for i in parts:
            name, shape = uses[i].name, uses[i].shape
            own = [run.view(shape) for run in runs[i]] if i in runs and name in self._overlapping else runs.get(i)
            found[name] = gradients[i] if own is None else own
        names = {uses[i].name for i in partial}
        yield from sum_partial_gradients(found, partial=names, cuts=self._overlapping, group=self.group)

    def counted(self, name: str, gradient: Tensor) -> Tensor:
        """The elements of a parameter's gradient, or of a run of it, that this shard counts in the norm: one shard counts each.
        Of what several shards hold elements of, `gradient` has this shard's shape."""
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
        return {name: cut for name, cut in self.layout.cuts.items() if cut.overlaps}
