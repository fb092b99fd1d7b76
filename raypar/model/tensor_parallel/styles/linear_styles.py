"""Sharding styles of linear layers, convolutions, embeddings and experts, cut by features, channels or vocabulary, and `whole`.

`column`, `row` and `vocabulary` are those of Megatron-LM (Shoeybi et al. 2019, arXiv:1909.08053, section 3).
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import ClassVar, Self

from torch import nn

from raypar.errors import PlanError
from raypar.model.convolution_call import CONVOLUTIONS
from raypar.model.tensor_parallel.convolution import ColumnConvolution, GroupsConvolution, RowConvolution
from raypar.model.tensor_parallel.experts import ExpertsCutByFeatures
from raypar.model.tensor_parallel.linear import ColumnLinear, RowLinear
from raypar.model.tensor_parallel.local_part_layout import FEATURES
from raypar.model.tensor_parallel.shard_group import ShardGroup
from raypar.model.tensor_parallel.styles.layer_kinds import convolution_dimensions, dimensions_of, experts_dimensions
from raypar.model.tensor_parallel.styles.style import (
    DimensionStyle,
    ShardingStyle,
    features_per_part,
    indices_on_shard,
    is_plain_convolution,
    is_plain_embedding,
    is_plain_linear,
    is_replaceable,
    style_misfit_error,
)
from raypar.model.tensor_parallel.vocabulary_parallel import VocabularyEmbedding
from raypar.plan.layer_dimensions import LayerDimensions
from raypar.plan.shard_ranges import TensorCut
from raypar.plan.tensor_parallel_layout import LayerCollectives, TensorParallelLayout


class FeaturesStyle(DimensionStyle):
    """A style of linear layers, which are cut by features, and of convolutions without groups, cut by channels."""

    __slots__ = ()

    axis: ClassVar[str]
    """Which features: `in` or `out`."""

    def divided(self, name: str, module: nn.Module, *, parts: int = 1, units: int = 0) -> LayerDimensions:
        """The dimensions of the module, of which `axis` is divided: it lies in equal parts, a shard having a piece of each, or
        in units that stay whole. Raises `PlanError` for parts and units that are not equal."""
        layer, which = dimensions_of(module), {"in": "input", "out": "output"}[self.axis]
        what, features = "channels" if isinstance(module, CONVOLUTIONS) else "features", dict(layer.sizes)[self.axis]
        each = features_per_part(name, self, features, parts * (units or 1), which)
        sizes = {"parts": parts, what: units or each, "each": each if units else 1}
        return replace(
            layer,
            sizes=(*layer.sizes, *sizes.items()),
            orders=((self.axis, f"parts {what} each"),),
            divided=what,
            noun=f"{'units of ' if units else ''}{which} {what}",
        )

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

    def dimensions(self, name: str, module: nn.Module) -> LayerDimensions:
        """See `DimensionStyle`."""
        return self.divided(name, module, parts=self.parts, units=self.units)


@dataclass(frozen=True, slots=True)
class ColumnStyle(PartsOrUnitsStyle):
    """Each shard makes its part of the output features; the gradient of the input is summed over shards."""

    name: ClassVar[str] = "column"
    summary: ClassVar[str] = (
        "Linear, convolution: cut by output features or channels (column/2: two equal parts, as gate and up in one matrix; "
        "column:8: by 8 equal units, as groups of channels)"
    )
    input_group: ClassVar[str | None] = "features"
    axis: ClassVar[str] = "out"

    def build(self, name: str, module: nn.Module, layout: TensorParallelLayout, group: ShardGroup) -> nn.Module:
        """See `ShardingStyle`."""
        held = indices_on_shard(name, layout, group)
        if isinstance(module, CONVOLUTIONS):
            return ColumnConvolution(module, name, group, held)
        return ColumnLinear(module, name, group, held, axis=FEATURES, shares_input=name in layout.shared_inputs)


@dataclass(frozen=True, slots=True)
class RowStyle(PartsOrUnitsStyle):
    """Each shard reads its part of the input features; what the shards make of them is summed, then the whole bias added."""

    name: ClassVar[str] = "row"
    summary: ClassVar[str] = (
        "Linear, convolution: cut by input features or channels; the shards' contributions are summed (row/2, row:8: what it "
        "reads is cut so)"
    )
    axis: ClassVar[str] = "in"

    def build(self, name: str, module: nn.Module, layout: TensorParallelLayout, group: ShardGroup) -> nn.Module:
        """See `ShardingStyle`."""
        kind = RowConvolution if isinstance(module, CONVOLUTIONS) else RowLinear
        return kind(module, name, group, indices_on_shard(name, layout, group))


@dataclass(frozen=True, slots=True)
class GatheredStyle(FeaturesStyle):
    """Each shard makes its part of the output features, which are then gathered."""

    name: ClassVar[str] = "gathered"
    summary: ClassVar[str] = "Linear, convolution: cut by output features or channels, which are then gathered"
    input_group: ClassVar[str | None] = "features"
    axis: ClassVar[str] = "out"

    def dimensions(self, name: str, module: nn.Module) -> LayerDimensions:
        """See `DimensionStyle`."""
        return replace(self.divided(name, module), gathers_output=True)

    def build(self, name: str, module: nn.Module, layout: TensorParallelLayout, group: ShardGroup) -> nn.Module:
        """See `ShardingStyle`."""
        held = indices_on_shard(name, layout, group)
        if isinstance(module, CONVOLUTIONS):
            return ColumnConvolution(module, name, group, held, gather_output=True)
        shares = name in layout.shared_inputs
        return ColumnLinear(module, name, group, held, axis=FEATURES, shares_input=shares, gather_output=True)


@dataclass(frozen=True, slots=True)
class GroupsStyle(DimensionStyle):
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

    def dimensions(self, name: str, module: nn.Module) -> LayerDimensions:
        """See `DimensionStyle`."""
        return replace(convolution_dimensions(module), divided="groups", noun="groups")

    def build(self, name: str, module: nn.Module, layout: TensorParallelLayout, group: ShardGroup) -> nn.Module:
        """See `ShardingStyle`."""
        return GroupsConvolution(module, name, group, self.divide(name, module, group.size).indices[group.shard])


@dataclass(frozen=True, slots=True)
class VocabularyStyle(DimensionStyle):
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

    def dimensions(self, name: str, module: nn.Module) -> LayerDimensions:
        """See `DimensionStyle`. The cross-entropy of logits that are cut gathers three numbers a token besides."""
        if isinstance(module, nn.Embedding):
            return replace(dimensions_of(module), divided="vocabulary", noun="rows of vocabulary")
        layer = dimensions_of(module)
        sizes = (*layer.sizes, ("vocabulary", dict(layer.sizes)["out"]))
        return replace(layer, sizes=sizes, orders=(("out", "vocabulary"),), divided="vocabulary", noun="output features")

    def build(self, name: str, module: nn.Module, layout: TensorParallelLayout, group: ShardGroup) -> nn.Module:
        """See `ShardingStyle`."""
        held = indices_on_shard(name, layout, group)
        if isinstance(module, nn.Embedding):
            return VocabularyEmbedding(module, name, group, held)
        return ColumnLinear(module, name, group, held, axis="vocabulary")


_UP, _DOWN = "gate_up_proj", "down_proj"


@dataclass(frozen=True, slots=True)
class ExpertsStyle(DimensionStyle):
    """Each shard computes some inner features of every expert; what the shards make of them is summed."""

    name: ClassVar[str] = "experts"
    summary: ClassVar[str] = "experts of transformers (gate_up_proj, down_proj in one module): inner features cut"

    def check_fits(self, name: str, module: nn.Module) -> None:
        """See `ShardingStyle`."""
        if not are_cuttable_experts(module):
            raise style_misfit_error(self, name, module)

    def dimensions(self, name: str, module: nn.Module) -> LayerDimensions:
        """See `DimensionStyle`. The gradients of the chosen experts' weights, a few numbers a token, are summed besides."""
        return replace(experts_dimensions(module), divided="features", noun="inner features")

    def build(self, name: str, module: nn.Module, layout: TensorParallelLayout, group: ShardGroup) -> nn.Module:
        """See `ShardingStyle`."""
        return ExpertsCutByFeatures(module, name, group)


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
