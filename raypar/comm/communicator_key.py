"""The names of communicators: one for every kind of operation that a group of ranks posts in one order (`nccl` transport)."""

from __future__ import annotations

from dataclasses import dataclass

COLLECTIVES = ("all_reduce", "reduce_scatter", "all_gather", "all_to_all", "broadcast")
"""Operations of the transport protocol that move memory and have a group."""

FAST_REDUCTION_CHANNELS, SHARD_CHANNELS = 1 << 32, 1 << 34
"""First channel of the fast gradient reductions, and of the collectives between shards; stage s uses this channel + s.

The canonical reduction of stage s uses channel s."""


@dataclass(frozen=True, order=True, slots=True)
class CommunicatorKey:
    """Names one communicator: messages from one rank to another, or one kind of collective of a group on one channel."""

    members: tuple[int, ...]
    """The ranks: (source, destination) of messages, ascending of a collective."""
    operation: str
    """"message", or one of `COLLECTIVES`."""
    channel: int = 0

    def __str__(self) -> str:
        if self.operation == "message":
            return f"messages {self.members[0]} -> {self.members[1]}"
        return f"{self.operation} of {','.join(map(str, self.members))} channel {self.channel}"
