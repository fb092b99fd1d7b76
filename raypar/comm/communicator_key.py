"""Names of operations that ranks post in one order, for each of which the `nccl` transport has a communicator of its own."""

from __future__ import annotations

from dataclasses import dataclass

COLLECTIVES = ("all_reduce", "reduce_scatter", "all_gather", "all_to_all", "broadcast")
"""Operations of the transport protocol that move memory and have a group."""

FAST, SHARDS = 1 << 32, 1 << 34
"""First channels by use: canonical reduction of stage s uses channel s, a plain all-reduce of its gradients FAST + s, the
layers of its shards SHARDS + s."""


@dataclass(frozen=True, order=True, slots=True)
class CommunicatorKey:
    """Messages of one rank to another, or one kind of collective of a group on one channel."""

    members: tuple[int, ...]
    """The ranks: (source, destination) of messages, ascending of a collective."""
    operation: str
    """"message", or one of `COLLECTIVES`."""
    channel: int = 0

    def __str__(self) -> str:
        if self.operation == "message":
            return f"messages {self.members[0]} -> {self.members[1]}"
        return f"{self.operation} of {','.join(map(str, self.members))} channel {self.channel}"
