"""The base of all modules that run a part of a layer on each shard."""

from __future__ import annotations

from torch import nn

from raypar.model.tensor_parallel.group import ShardGroup


class ShardedModule(nn.Module):
    """A layer whose parameters are this shard's slices. No code but the layer itself may compute with them."""

    def __init__(self, name: str, group: ShardGroup) -> None:
        super().__init__()
        self.name = name
        """Qualified name of the layer that it stands for."""
        self.group = group
        """The shards that compute the layer together."""
