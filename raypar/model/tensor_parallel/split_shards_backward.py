"""The split backward pass of layers that are cut over shards, for zero-bubble schedules."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor, nn

from raypar.model.autocast_casts import is_autocast_enabled
from raypar.model.split_backward import CastMarkingStash, Stash, find_deferrable_modules
from raypar.model.tensor_parallel.shard_group import ShardedModule, ShardGroup


class SplitShard(ShardedModule):
    """Base of the linear layers and convolutions of one shard, whose weight gradients can be put off.

    `whole`: the layer, whose parameters are this shard's slices.
    """

    def __init__(self, whole: nn.Module, name: str, group: ShardGroup) -> None:
        super().__init__(name, group)
        self.weight: Tensor
        """This shard's slice."""
        self.register_parameter("weight", whole._parameters["weight"])
        self.bias: Tensor | None
        self.register_parameter("bias", whole._parameters["bias"])
        self.stash: Callable[[], Stash] | None = None
        """Where a zero-bubble schedule wants what the weight gradient needs. None: autograd computes that gradient."""

    def current_stash(self) -> Stash | None:
        """The running microbatch's stash; None where gradients are not put off."""
        stash = self.stash() if self.stash is not None and torch.is_grad_enabled() else None
        if stash is not None and is_autocast_enabled(self.weight.device):
            return CastMarkingStash(stash, object())  # a new object: on shards each call casts for itself
        return stash


def defer_sharded_weight_gradients(module: nn.Module, stash: Callable[[], Stash]) -> list[nn.Module]:
    """As `split_backward.defer_weight_gradients`, for the layers that are cut over shards."""
    chosen: list[nn.Module] = []
    for part in find_deferrable_modules(module, lambda one: isinstance(one, SplitShard)):
        assert isinstance(part, SplitShard)
        part.stash = stash
        chosen.append(part)
    return chosen
