"""Sharding styles of linear layers, embeddings and experts, cut by features or vocabulary, and of layers that are not cut.

`column`, `row` and `vocabulary` are those of Megatron-LM (Shoeybi et al. 2019, arXiv:1909.08053, section 3).
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import ClassVar, Self

from torch import nn

from raypar.errors import PlanError
from raypar.model.tensor_parallel.experts import ExpertsCutByFeatures
from raypar.model.tensor_parallel.linear import ColumnLinear, RowLinear
from raypar.model.tensor_parallel.local_part_layout import FEATURES
from raypar.model.tensor_parallel.shard_group import ShardGroup
from raypar.model.tensor_parallel.styles.style import (
    COLUMN_COLLECTIVES,
    ROW_COLLECTIVES,
    LinearStyle,
    ShardingStyle,
    cut_linear_by_input,
    cut_linear_by_output,
    features_per_part,
    indices_on_shard,
    is_plain_embedding,
    is_plain_linear,
    is_replaceable,
    share_evenly,
    style_misfit_error,
)
from raypar.model.tensor_parallel.vocabulary_parallel import VocabularyEmbedding
from raypar.model.transposed_linear import linear_features
from raypar.plan.shard_ranges import TensorCut, repeat_ranges
from raypar.plan.tensor_parallel_layout import LayerCollective, LayerCollectives, ShardWorkShare, TensorParallelLayout


@dataclass(frozen=True, slots=True)
class ColumnStyle(LinearStyle):
    """Each shard makes its part of the output features; the gradient of the input is summed over shards."""

    name: ClassVar[str] = "column"
    summary: ClassVar[str] = "Linear: cut by output features (column/2: two equal parts, as gate and up in one matrix)"
    input_group: ClassVar[str | None] = "features"

    parts: int = 1
    """Equal parts of the output of which each shard has a piece."""

    @classmethod
    def parse(cls, options: str) -> Self:
        """Reads `/parts` or nothing."""
        if not options:
            return cls()
        parts = int(options.removeprefix("/"))
        if not options.startswith("/") or parts < 1:
            raise ValueError(options)
        return cls(parts)

    @property
    def options(self) -> str:
        """See `ShardingStyle`."""
        return f"/{self.parts}" if self.parts > 1 else ""

    def slices(self, name: str, module: nn.Module, shards: int) -> Mapping[str, TensorCut]:
        """See `ShardingStyle`."""
        part = features_per_part(name, self, linear_features(module)[1], self.parts, "output")
        even = share_evenly(name, "output features", part, shards)
        return cut_linear_by_output(module, tuple(repeat_ranges(ranges, part, self.parts) for ranges in even))

    def build(self, name: str, module: nn.Module, layout: TensorParallelLayout, group: ShardGroup) -> nn.Module:
        """See `ShardingStyle`."""
        held = indices_on_shard(name, layout, group)
        return ColumnLinear(module, name, group, held, axis=FEATURES, shares_input=name in layout.shared_inputs)

    def collectives(self, module: nn.Module) -> LayerCollectives:
        """See `ShardingStyle`."""
        return COLUMN_COLLECTIVES


@dataclass(frozen=True, slots=True)
class RowStyle(LinearStyle):
    """Each shard reads its part of the input features; what the shards make of them is summed, then the whole bias added."""

    name: ClassVar[str] = "row"
    summary: ClassVar[str] = "Linear: cut by input features; the shards' contributions are summed"

    def slices(self, name: str, module: nn.Module, shards: int) -> Mapping[str, TensorCut]:
        """See `ShardingStyle`."""
        return cut_linear_by_input(module, share_evenly(name, "input features", linear_features(module)[0], shards))

    def build(self, name: str, module: nn.Module, layout: TensorParallelLayout, group: ShardGroup) -> nn.Module:
        """See `ShardingStyle`."""
        return RowLinear(module, name, group, indices_on_shard(name, layout, group))

    def collectives(self, module: nn.Module) -> LayerCollectives:
        """See `ShardingStyle`."""
        return ROW_COLLECTIVES


@dataclass(frozen=True, slots=True)
class GatheredStyle(LinearStyle):
    """Each shard makes its part of the output features, which are then gathered."""

    name: ClassVar[str] = "gathered"
    summary: ClassVar[str] = "Linear: cut by output features, which are then gathered"
    input_group: ClassVar[str | None] = "features"

    def slices(self, name: str, module: nn.Module, shards: int) -> Mapping[str, TensorCut]:
        """See `ShardingStyle`."""
        return cut_linear_by_output(module, share_evenly(name, "output features", linear_features(module)[1], shards))

    def build(self, name: str, module: nn.Module, layout: TensorParallelLayout, group: ShardGroup) -> nn.Module:
        """See `ShardingStyle`."""
        held = indices_on_shard(name, layout, group)
        shares = name in layout.shared_inputs
        return ColumnLinear(module, name, group, held, axis=FEATURES, shares_input=shares, gather_output=True)

    def collectives(self, module: nn.Module) -> LayerCollectives:
        """See `ShardingStyle`."""
        gather = LayerCollective("all_gather", "forward", "output")
        return LayerCollectives((gather, *COLUMN_COLLECTIVES.plain), (gather, *COLUMN_COLLECTIVES.sequence))


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


_UP, _DOWN = "gate_up_proj", "down_proj"


@dataclass(frozen=True, slots=True)
class ExpertsStyle(ShardingStyle):
    """Each shard computes some inner features of every expert; what the shards make of them is summed."""

    name: ClassVar[str] = "experts"
    summary: ClassVar[str] = "experts of transformers (gate_up_proj, down_proj in one module): inner features cut"

    def check_fits(self, name: str, module: nn.Module) -> None:
        """See `ShardingStyle`."""
        if not are_cuttable_experts(module):
            raise style_misfit_error(self, name, module)

    def slices(self, name: str, module: nn.Module, shards: int) -> Mapping[str, TensorCut]:
        """See `ShardingStyle`."""
        inner = module._parameters[_DOWN].shape[2]  # type: ignore[union-attr]
        held = share_evenly(name, "inner features", inner, shards)
        return {
            _UP: TensorCut(1, 2 * inner, tuple(repeat_ranges(ranges, inner, 2) for ranges in held)),
            _DOWN: TensorCut(2, inner, held),
        }

    def build(self, name: str, module: nn.Module, layout: TensorParallelLayout, group: ShardGroup) -> nn.Module:
        """See `ShardingStyle`."""
        return ExpertsCutByFeatures(module, name, group)

    def collectives(self, module: nn.Module) -> LayerCollectives:
        """See `ShardingStyle`. The gradients of the chosen experts' weights, a few numbers a token, are summed besides."""
        return LayerCollectives(
            plain=(LayerCollective("all_reduce", "forward", "output"), LayerCollective("all_reduce", "backward", "input"))
        )

    def cost(self, name: str, module: nn.Module, shards: int) -> tuple[ShardWorkShare, ...]:
        """See `ShardingStyle`."""
        down = self.slices(name, module, shards)[_DOWN]
        shares = [sum(b - a for a, b in ranges) / down.whole_size for ranges in down.indices_by_shard]
        return tuple(ShardWorkShare(share, share) for share in shares)


def are_cuttable_experts(module: nn.Module) -> bool:
    """Whether its parameters are those of experts without biases: [experts, 2 inner, width] and [experts, width, inner]."""
    if {key for key, p in module._parameters.items() if p is not None} != {_UP, _DOWN} or not is_replaceable(module):
        return False
    up, down = module._parameters[_UP], module._parameters[_DOWN]
    assert up is not None and down is not None
    return up.dim() == down.dim() == 3 and up.shape[1:] == (2 * down.shape[2], down.shape[1])


@dataclass(frozen=True, slots=True)
class WholeStyle(ShardingStyle):
    """Every shard holds and computes all of the layer."""

    name: ClassVar[str] = "whole"
    summary: ClassVar[str] = "any layer: not cut"

    def check_fits(self, name: str, module: nn.Module) -> None:
        """Any module fits."""

    def slices(self, name: str, module: nn.Module, shards: int) -> Mapping[str, TensorCut]:
        """No slices: the layout leaves such a layer out."""
        return {}

    def build(self, name: str, module: nn.Module, layout: TensorParallelLayout, group: ShardGroup) -> nn.Module:
        """The module itself: nothing of it is cut."""
        return module

    def collectives(self, module: nn.Module) -> LayerCollectives:
        """No collectives."""
        return LayerCollectives()
