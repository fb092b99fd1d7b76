"""The style `vocabulary`: an embedding, or the layer that makes logits, cut by vocabulary.

Shoeybi et al. 2019, arXiv:1909.08053, section 3.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import ClassVar

from torch import nn

from raypar.errors import PlanError
from raypar.model.tensor_parallel.embedding import VocabularyEmbedding
from raypar.model.tensor_parallel.group import ShardGroup
from raypar.model.tensor_parallel.linear import ColumnLinear
from raypar.model.tensor_parallel.styles.style import (
    COLUMN_COLLECTIVES,
    ROW_COLLECTIVES,
    ShardingStyle,
    cut_linear_by_output,
    indices_on_shard,
    is_plain_embedding,
    is_plain_linear,
    share_evenly,
    style_misfit_error,
)
from raypar.model.transposed_linear import linear_features
from raypar.plan.shard_ranges import TensorCut
from raypar.plan.tensor_parallel_layout import LayerCollectives, ShardWorkShare, TensorParallelLayout


@dataclass(frozen=True, slots=True)
class VocabularyStyle(ShardingStyle):
    """Each shard has some ids: their rows of an embedding, whose outputs are summed over shards, or their logits."""

    name: ClassVar[str] = "vocabulary"
    summary: ClassVar[str] = "Embedding or output layer: cut by vocabulary"

    def check_fits(self, name: str, module: nn.Module) -> None:
        """See `ShardingStyle`."""
        if not is_plain_linear(module) and not is_plain_embedding(module):
            raise style_misfit_error(self, name, module)
        if isinstance(module, nn.Embedding) and (module.max_norm is not None or module.scale_grad_by_freq):
            raise PlanError(
                f"{name} scales by what is in all of its vocabulary (max_norm, scale_grad_by_freq)",
                cure="give it the style whole",
            )

    def slices(self, name: str, module: nn.Module, shards: int) -> Mapping[str, TensorCut]:
        """See `ShardingStyle`."""
        if isinstance(module, nn.Embedding):
            ids = module.num_embeddings
            return {"weight": TensorCut(0, ids, share_evenly(name, "rows of vocabulary", ids, shards))}
        return cut_linear_by_output(module, share_evenly(name, "output features", linear_features(module)[1], shards))

    def build(self, name: str, module: nn.Module, layout: TensorParallelLayout, group: ShardGroup) -> nn.Module:
        """See `ShardingStyle`."""
        held = indices_on_shard(name, layout, group)
        if isinstance(module, nn.Embedding):
            return VocabularyEmbedding(module, name, group, held)
        return ColumnLinear(module, name, group, held, axis="vocabulary")

    def collectives(self, module: nn.Module) -> LayerCollectives:
        """See `ShardingStyle`. The cross-entropy of logits that are cut gathers three numbers a token besides."""
        return ROW_COLLECTIVES if isinstance(module, nn.Embedding) else COLUMN_COLLECTIVES

    def cost(self, name: str, module: nn.Module, shards: int) -> tuple[ShardWorkShare, ...]:
        """See `ShardingStyle`. Every shard of an embedding looks up a row for each id of the batch, and masks the others'."""
        shares = ShardingStyle.cost(self, name, module, shards)
        return tuple(replace(share, compute=1.0) for share in shares) if isinstance(module, nn.Embedding) else shares
