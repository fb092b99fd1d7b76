"""Sharding styles of linear layers, convolutions, embeddings and experts, cut by features, channels or vocabulary, and `whole`.

`column`, `row` and `vocabulary` are those of Megatron-LM (Shoeybi et al. 2019, arXiv:1909.08053, section 3).
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import ClassVar, Self

from torch import nn

from raypar.errors import PlanError
from raypar.model.tensor_parallel.convolution import (
    CONVOLUTIONS,
    ColumnConvolution,
    GroupsConvolution,
    RowConvolution,
    is_transposed_convolution,
)
from raypar.model.tensor_parallel.experts import ExpertsCutByFeatures
from raypar.model.tensor_parallel.linear import ColumnLinear, RowLinear
from raypar.model.tensor_parallel.local_part_layout import FEATURES
from raypar.model.tensor_parallel.shard_group import ShardGroup
from raypar.model.tensor_parallel.styles.style import (
    COLUMN_COLLECTIVES,
    ROW_COLLECTIVES,
    ShardingStyle,
    cut_by_input,
    cut_by_output,
    cut_linear_by_output,
    features_of,
    features_per_part,
    indices_on_shard,
    is_plain_convolution,
    is_plain_embedding,
    is_plain_linear,
    is_replaceable,
    share_evenly,
    style_misfit_error,
)
from raypar.model.tensor_parallel.vocabulary_parallel import VocabularyEmbedding
from raypar.model.transposed_linear import linear_features
from raypar.plan.shard_ranges import IndexRanges, TensorCut, even_ranges_by_shard, repeat_ranges, scale_ranges
from raypar.plan.tensor_parallel_layout import LayerCollective, LayerCollectives, ShardWorkShare, TensorParallelLayout


class FeaturesStyle(ShardingStyle):
    """A style of linear layers, which are cut by features, and of convolutions without groups, cut by channels."""

    __slots__ = ()

    def check_fits(self, name: str, module: nn.Module) -> None:
        """See `ShardingStyle`."""
        if not is_plain_linear(module) and not is_plain_convolution(module):
            raise style_misfit_error(self, name, module)
        if isinstance(module, CONVOLUTIONS) and module.groups > 1:
            raise PlanError(
                f"{name} has {module.groups} groups: a channel cut across groups would need the channels of other shards",
                cure=f"the style groups cuts it by whole groups; {self} is for convolutions without groups",
            )


@dataclass(frozen=True, slots=True)
class PartsOrUnitsStyle(FeaturesStyle):
    """A style that cuts features in equal parts of which each shard has a piece, or leaves units of them whole."""

    parts: int = 1
    """Equal parts of the features of which each shard has a piece (`/2`)."""
    units: int = 0
    """Equal units of the features that stay whole (`:8`); 0: single features."""

    @classmethod
    def parse(cls, options: str) -> Self:
        """Reads `/parts`, `:units` or nothing."""
        if not options:
            return cls()
        count = int(options[1:])
        if count < 1:
            raise ValueError(options)
        return cls(parts=count) if options[0] == "/" else cls(units=count)

    @property
    def options(self) -> str:
        """See `ShardingStyle`."""
        return f":{self.units}" if self.units else f"/{self.parts}" if self.parts > 1 else ""

    def share(self, name: str, module: nn.Module, features: int, shards: int, which: str) -> tuple[IndexRanges, ...]:
        """By shard: its features. Raises `PlanError` when a shard would have none, and for parts that are not equal."""
        what = "channels" if isinstance(module, CONVOLUTIONS) else "features"
        if self.units:
            each = features_per_part(name, self, features, self.units, which)
            held = share_evenly(name, f"units of {which} {what}", self.units, shards)
            return tuple(scale_ranges(ranges, each) for ranges in held)
        part = features_per_part(name, self, features, self.parts, which)
        even = share_evenly(name, f"{which} {what}", part, shards)
        return tuple(repeat_ranges(ranges, part, self.parts) for ranges in even)


@dataclass(frozen=True, slots=True)
class ColumnStyle(PartsOrUnitsStyle):
    """Each shard makes its part of the output features; the gradient of the input is summed over shards."""

    name: ClassVar[str] = "column"
    summary: ClassVar[str] = (
        "Linear, convolution: cut by output features or channels (column/2: two equal parts, as gate and up in one matrix; "
        "column:8: by 8 equal units, as groups of channels)"
    )
    input_group: ClassVar[str | None] = "features"

    def slices(self, name: str, module: nn.Module, shards: int) -> Mapping[str, TensorCut]:
        """See `ShardingStyle`."""
        return cut_by_output(module, self.share(name, module, features_of(module)[1], shards, "output"))

    def build(self, name: str, module: nn.Module, layout: TensorParallelLayout, group: ShardGroup) -> nn.Module:
        """See `ShardingStyle`."""
        held = indices_on_shard(name, layout, group)
        if isinstance(module, CONVOLUTIONS):
            return ColumnConvolution(module, name, group, held)
        return ColumnLinear(module, name, group, held, axis=FEATURES, shares_input=name in layout.shared_inputs)

    def collectives(self, module: nn.Module) -> LayerCollectives:
        """See `ShardingStyle`."""
        return _as_plain(COLUMN_COLLECTIVES) if isinstance(module, CONVOLUTIONS) else COLUMN_COLLECTIVES


@dataclass(frozen=True, slots=True)
class RowStyle(PartsOrUnitsStyle):
    """Each shard reads its part of the input features; what the shards make of them is summed, then the whole bias added."""

    name: ClassVar[str] = "row"
    summary: ClassVar[str] = (
        "Linear, convolution: cut by input features or channels; the shards' contributions are summed (row/2, row:8: what it "
        "reads is cut so)"
    )

    def slices(self, name: str, module: nn.Module, shards: int) -> Mapping[str, TensorCut]:
        """See `ShardingStyle`."""
        return cut_by_input(module, self.share(name, module, features_of(module)[0], shards, "input"))

    def build(self, name: str, module: nn.Module, layout: TensorParallelLayout, group: ShardGroup) -> nn.Module:
        """See `ShardingStyle`."""
        kind = RowConvolution if isinstance(module, CONVOLUTIONS) else RowLinear
        return kind(module, name, group, indices_on_shard(name, layout, group))

    def collectives(self, module: nn.Module) -> LayerCollectives:
        """See `ShardingStyle`."""
        return _as_plain(ROW_COLLECTIVES) if isinstance(module, CONVOLUTIONS) else ROW_COLLECTIVES


@dataclass(frozen=True, slots=True)
class GatheredStyle(FeaturesStyle):
    """Each shard makes its part of the output features, which are then gathered."""

    name: ClassVar[str] = "gathered"
    summary: ClassVar[str] = "Linear, convolution: cut by output features or channels, which are then gathered"
    input_group: ClassVar[str | None] = "features"

    def slices(self, name: str, module: nn.Module, shards: int) -> Mapping[str, TensorCut]:
        """See `ShardingStyle`."""
        what = "output channels" if isinstance(module, CONVOLUTIONS) else "output features"
        return cut_by_output(module, share_evenly(name, what, features_of(module)[1], shards))

    def build(self, name: str, module: nn.Module, layout: TensorParallelLayout, group: ShardGroup) -> nn.Module:
        """See `ShardingStyle`."""
        held = indices_on_shard(name, layout, group)
        if isinstance(module, CONVOLUTIONS):
            return ColumnConvolution(module, name, group, held, gather_output=True)
        shares = name in layout.shared_inputs
        return ColumnLinear(module, name, group, held, axis=FEATURES, shares_input=shares, gather_output=True)

    def collectives(self, module: nn.Module) -> LayerCollectives:
        """See `ShardingStyle`."""
        gather = LayerCollective("all_gather", "forward", "output")
        found = LayerCollectives((gather, *COLUMN_COLLECTIVES.plain), (gather, *COLUMN_COLLECTIVES.sequence))
        return _as_plain(found) if isinstance(module, CONVOLUTIONS) else found


@dataclass(frozen=True, slots=True)
class GroupsStyle(ShardingStyle):
    """Each shard computes whole groups of a grouped convolution: their input channels and their output channels."""

    name: ClassVar[str] = "groups"
    summary: ClassVar[str] = "convolution with groups, depthwise too: cut by whole groups, input and output alike"

    def check_fits(self, name: str, module: nn.Module) -> None:
        """See `ShardingStyle`."""
        if not is_plain_convolution(module):
            raise style_misfit_error(self, name, module)
        assert isinstance(module, CONVOLUTIONS)
        if module.groups == 1:
            raise PlanError(
                f"the style groups does not fit {name}, a {type(module).__name__} without groups",
                cure="give it the style column, row, gathered or whole",
            )

    def slices(self, name: str, module: nn.Module, shards: int) -> Mapping[str, TensorCut]:
        """See `ShardingStyle`."""
        assert isinstance(module, CONVOLUTIONS)
        held = share_evenly(name, "groups", module.groups, shards)

        def cut(channels: int) -> TensorCut:
            return TensorCut(0, channels, tuple(scale_ranges(ranges, channels // module.groups) for ranges in held))

        first = module.in_channels if is_transposed_convolution(module) else module.out_channels
        cuts = {"weight": cut(first), "bias": cut(module.out_channels)}
        return {key: cuts[key] for key, parameter in module._parameters.items() if parameter is not None}

    def build(self, name: str, module: nn.Module, layout: TensorParallelLayout, group: ShardGroup) -> nn.Module:
        """See `ShardingStyle`."""
        assert isinstance(module, CONVOLUTIONS)
        return GroupsConvolution(module, name, group, even_ranges_by_shard(module.groups, group.size)[group.shard])

    def collectives(self, module: nn.Module) -> LayerCollectives:
        """See `ShardingStyle`. None: the layer before it has cut its input."""
        return LayerCollectives()


def _as_plain(collectives: LayerCollectives) -> LayerCollectives:
    """Those of a convolution, whose values sequence parallelism does not cut."""
    return LayerCollectives(collectives.plain, collectives.plain)


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
