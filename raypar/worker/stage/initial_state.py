"""A stage's state at step 0: values of parameters and buffers, and digests by which workers compare them."""

from __future__ import annotations

import zlib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

import torch
from torch import Tensor

from raypar.comm.buffer_pool import CPU
from raypar.job import Job
from raypar.model.graph import Graph
from raypar.model.initial_values import initial_values_of
from raypar.model.layer_skeletons import parameters_and_buffers_on_meta, state_shapes
from raypar.model.tensor_parallel.build_shard_modules import shard_slice_of
from raypar.plan.ownership import OwnedRun
from raypar.plan.tensor_parallel_layout import shard_slice_shape
from raypar.worker.layer_precisions import dtype_of_job
from raypar.worker.stage.stage_shard import StageShard
from raypar.worker.stage.tensors_without_memory import without_memory

RunsToKeep = Mapping[str, Sequence[tuple[int, int]]]
"""Parameter of which a worker keeps runs only, as it lies here -> these: (first element, element behind the last)."""


@dataclass
class InitialStageState:
    """A stage's parameters and buffers at step 0."""

    values: dict[str, Tensor] = field(default_factory=dict)
    """Name -> tensor for `build_stage` to take over: a slice if the stage is cut over shards. What is kept in runs has no
    memory."""
    runs: dict[OwnedRun, Tensor] = field(default_factory=dict)
    """Run -> the elements that are kept."""
    digests: dict[str, int] = field(default_factory=dict)
    """Name -> crc32 of the whole tensor's bytes; where only a slice was read, name and indices -> crc32 of its bytes."""

    def take(self, name: str, tensor: Tensor, keep: RunsToKeep, device: torch.device) -> None:
        """Take over a tensor, or only those of its elements that are kept."""
        if (own := keep.get(name)) is None or list(own) == [(0, tensor.numel())]:
            self.values[name] = tensor
            return
        self.values[name] = without_memory(tensor.shape, tensor.dtype, device)
        for start, stop in own:
            self.runs[OwnedRun(name, start, stop)] = tensor.reshape(-1)[start:stop].to(device, copy=True)


@dataclass(frozen=True)
class StageStateSource:
    """Makes the state at step 0 of layers [first, last)."""

    graph: Graph
    """The whole model."""
    first: int
    """Index of the first layer."""
    last: int
    """Index behind the last layer."""
    spec: Job
    """The job."""
    shard: StageShard | None = None
    """The shard to cut tensors for; None: they are whole."""
    keep: RunsToKeep = field(default_factory=dict)
    """The tensors of which only runs are kept."""
    device: torch.device = CPU
    """Where these runs are put."""

    def initial(self) -> InitialStageState:
        """The initial values. Raises `ModelError`.

        Of tensors that come from a file, a shard reads its slices only. Other tensors are made whole, and cut one after the
        other.
        """
        made, shard, dtype = InitialStageState(), self.shard, dtype_of_job(self.spec)
        initial, names = initial_values_of(self.graph, self.spec.seed), state_shapes(self.graph, self.first, self.last)
        if shard is not None:
            cuts = {name: shard.layout.cuts[name] for name in names if name in shard.layout.cuts}
            slices = {name: (cut.dim, cut.indices_by_shard[shard.group.shard]) for name, cut in cuts.items()}
            for name, part in initial.stream_slices(slices, dtype):
                made.digests[f"{name} (indices {slices[name][1]} of dim {slices[name][0]})"] = tensor_crc32(part)
                made.take(name, part, self.keep, self.device)
        for name, whole in initial.stream([name for name in names if name not in made.values], dtype):
            made.digests[name] = tensor_crc32(whole)
            part = whole if shard is None else shard_slice_of(shard.layout, name, whole, shard.group.shard)
            made.take(name, part, self.keep, self.device)
        return made

    def unfilled(self) -> InitialStageState:
        """Uninitialised tensors, which the caller fills."""
        found, shard = InitialStageState(), self.shard
        of_layers = parameters_and_buffers_on_meta(self.graph, self.first, self.last, dtype_of_job(self.spec))
        for name, whole in of_layers.items():
            cut = shard.layout.cuts.get(name) if shard is not None else None
            local = whole.shape if shard is None or cut is None else shard_slice_shape(cut, whole.shape, shard.group.shard)
            found.take(name, torch.empty(local, dtype=whole.dtype), self.keep, self.device)
        return found


def tensor_crc32(tensor: Tensor) -> int:
    """crc32 of a contiguous CPU tensor's bytes."""
    return zlib.crc32(tensor.detach().reshape(-1).view(torch.uint8).numpy().data) if tensor.numel() else 0
