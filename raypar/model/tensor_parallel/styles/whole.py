"""The style `whole`: a layer that is not cut."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import ClassVar

from torch import nn

from raypar.model.tensor_parallel.group import ShardGroup
from raypar.model.tensor_parallel.styles.style import ShardingStyle
from raypar.plan.shard_ranges import TensorCut
from raypar.plan.tensor_parallel_layout import LayerCollectives, TensorParallelLayout


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
