"""What two or more ranks do together in one order: the unit for which the `nccl` transport has a communicator."""

from __future__ import annotations

from dataclasses import dataclass

COLLECTIVES = ("all_reduce", "reduce_scatter", "all_gather", "all_to_all", "broadcast")
"""Those of the protocol that move memory."""

FAST, SHARDS = 1 << 32, 1 << 34
"""Channels by who uses them: canonical reduction of stage s is on channel s, a plain all-reduce of gradients on FAST + s, what
the shards of one replica of a stage do together on SHARDS + s."""


@dataclass(frozen=True, order=True, slots=True)
class CommunicatorKey:
    """Messages of one rank to another (`operation` "message"), or one kind of collective of a group on one channel."""

    members: tuple[int, ...]
    operation: str
    channel: int = 0

    def __str__(self) -> str:
        if self.operation == "message":
            return f"messages {self.members[0]} -> {self.members[1]}"
        return f"{self.operation} of {','.join(map(str, self.members))} channel {self.channel}"
