"""The style `experts`: the experts of a mixture in two 3-dim parameters, each expert's inner features cut over shards."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import ClassVar

from torch import nn

from raypar.model.tensor_parallel.experts import ShardedExperts
from raypar.model.tensor_parallel.group import ShardGroup
from raypar.model.tensor_parallel.styles.style import ShardingStyle, is_replaceable, share_evenly, style_misfit_error
from raypar.plan.shard_ranges import TensorCut, repeat_ranges
from raypar.plan.tensor_parallel_layout import LayerCollective, LayerCollectives, ShardWorkShare, TensorParallelLayout

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
        return ShardedExperts(module, name, group)

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
