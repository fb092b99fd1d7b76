"""Which workers exchange ballots: all with all, or along a tree where there are many (`worker/step/vote_exchange.py`)."""

from __future__ import annotations

from dataclasses import dataclass

MOST_DIRECT = 32
"""The largest number of workers whose votes go directly."""
FANOUT = 4
"""How many workers hand on their ballots to the same one. With 1,024 workers a vote takes 36 messages one after the other; with
8 it would take 48, with 2 as many as with 4, over twice as many levels."""


@dataclass(frozen=True)
class TreeNeighbours:
    """With whom a worker exchanges ballots in the tree. Rank 0 is its root."""

    above: int | None
    """The rank to which it hands on the ballots; None for the root."""
    below: tuple[int, ...]
    """The ranks that hand on theirs to it."""

    @classmethod
    def of(cls, rank: int, world: int, fanout: int) -> TreeNeighbours:
        """Those of `rank` among `world` workers."""
        first = rank * fanout + 1
        return cls((rank - 1) // fanout if rank else None, tuple(range(first, min(first + fanout, world))))


def tree_neighbours(rank: int, world: int) -> TreeNeighbours | None:
    """A worker's place in the tree of `world` workers; None where votes go directly."""
    return None if world <= MOST_DIRECT else TreeNeighbours.of(rank, world, FANOUT)


def vote_neighbours(rank: int, world: int) -> frozenset[int]:
    """The ranks with which a worker exchanges ballots."""
    place = tree_neighbours(rank, world)
    if place is None:
        return frozenset(range(world)) - {rank}
    return frozenset(place.below) | ({place.above} if place.above is not None else set())
