"""An embedding cut by vocabulary: each shard looks up the ids it has; the sum over shards is the whole output.

Shoeybi et al. 2019, arXiv:1909.08053, section 3.
"""

from __future__ import annotations

import torch.nn.functional as F
from torch import Tensor, nn

from raypar.errors import ModelError
from raypar.model.tensor_parallel import autograd_collectives
from raypar.model.tensor_parallel.group import ShardedModule, ShardGroup
from raypar.model.tensor_parallel.local_part_layout import sequence_part_layout
from raypar.model.tensor_parallel.sharded_value import ShardedValue
from raypar.plan.shard_ranges import IndexRanges
from raypar.torch_compat.multi_tensor import assert_on_device


class VocabularyEmbedding(ShardedModule):
    """ids [...] int64 -> [..., width]; `weight` [rows here, width].

    For each id one shard contributes its row, all others zeros, so the sum over shards is exact.
    Under sequence parallelism the result [mb, seq, width] is this shard's part of dim 1.
    """

    def __init__(self, embedding: nn.Embedding, name: str, group: ShardGroup, held: IndexRanges) -> None:
        super().__init__(name, group)
        self.num_embeddings, self.embedding_dim = embedding.num_embeddings, embedding.embedding_dim
        self.weight = embedding.weight
        (self.start, self.stop) = held[0]
        """The ids whose rows are here: [start, stop)."""
        self.padding_idx: int | None = None
        """Row of the padding id, if that is here."""
        if embedding.padding_idx is not None and self.start <= embedding.padding_idx < self.stop:
            self.padding_idx = embedding.padding_idx - self.start

    def forward(self, ids: Tensor) -> Tensor | ShardedValue:
        """The embedded ids. Raises `IndexError` for an id outside the vocabulary, as `nn.Embedding` does."""
        inside = ((ids >= 0) & (ids < self.num_embeddings)).all()
        if ids.device.type != "cpu":  # nothing waits for the device
            assert_on_device(inside, f"index out of range in {self.name}")
        elif not inside:
            raise IndexError(
                f"index out of range in {self.name}: ids {int(ids.min())} to {int(ids.max())}, not all "
                f"in [0, {self.num_embeddings})"
            )
        absent = (ids < self.start) | (ids >= self.stop)
        rows = F.embedding((ids - self.start).masked_fill(absent, 0), self.weight, self.padding_idx)
        part = rows.masked_fill(absent.unsqueeze(-1), 0.0)
        if not self.group.sequence_parallel:
            return autograd_collectives.reduce_from_shards(part, self.group)
        if ids.dim() != 2:
            raise ModelError(
                f"{self.name} sees ids of shape {list(ids.shape)}, sequence parallelism needs [batch, sequence]",
                cure="give the embedding the style whole, or set plan.sequence_parallel: false",
            )
        made = autograd_collectives.reduce_scatter_to_shards(part, 1, self.group)
        return ShardedValue(made, sequence_part_layout(ids.shape[1], self.group.shard, self.group.size), self.group)
