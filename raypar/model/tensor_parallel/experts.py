"""The experts of a mixture, each cut over all shards by its inner features (none is dealt out whole): what one shard runs."""

from __future__ import annotations

from typing import Any

from torch import Tensor, nn

from raypar.model.tensor_parallel.autograd_collectives import copy_to_shards, reduce_from_shards
from raypar.model.tensor_parallel.shard_group import ShardedModule, ShardGroup
from raypar.model.tensor_parallel.sharded_value import ShardedValue, unsupported_on_part_error
from raypar.torch_compat.pytree import tree_map


class ExpertsCutByFeatures(ShardedModule):
    """Runs `experts`, whose parameters are this shard's slices, on whole values; sums what the shards return."""

    def __init__(self, experts: nn.Module, name: str, group: ShardGroup) -> None:
        super().__init__(name, group)
        self._parameters = experts._parameters
        self._modules = experts._modules
        self._experts = [experts]
        """The module itself, which shares its parameters with this one; in a list, so that it is no second owner of them."""

    def forward(self, *args: Any, **kwargs: Any) -> Tensor:
        """The sum over shards of what the experts make of their inner features."""

        def whole(value: Any) -> Any:
            if isinstance(value, ShardedValue):
                raise unsupported_on_part_error("a module of experts", value)
            return copy_to_shards(value, self.group) if isinstance(value, Tensor) else value

        (experts,) = self._experts
        experts.training = self.training
        made: Tensor = experts(*tree_map(whole, args), **tree_map(whole, kwargs))
        return reduce_from_shards(made, self.group)
