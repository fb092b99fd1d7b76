"""Computes when a packet in a simulated network arrives, or that it is lost. Pure: the time is an argument.

Every address has one link, as a virtual machine has one network card. Packets in each direction of a link share its bandwidth,
wait in a queue of limited length, and may be delayed or lost. A partition drops the packets of a pair of addresses silently, in
one direction or both: no error tells either end.
"""

from __future__ import annotations

import math
import random
from collections.abc import Iterable
from dataclasses import dataclass, field

QUEUE_S = 0.5
"""A packet that would wait longer than this for a link's bandwidth is dropped, as a full queue of a switch drops it."""


@dataclass(frozen=True)
class LinkShape:
    """What a link does to packets, in each of its two directions."""

    bandwidth_mbit_s: float = math.inf
    """Megabits per second."""
    delay_s: float = 0.0
    """Time added to each packet."""
    loss: float = 0.0
    """Share of packets that are lost, from 0 to 1."""

    def __post_init__(self) -> None:
        if not (self.bandwidth_mbit_s > 0 and 0 <= self.delay_s < math.inf and 0 <= self.loss <= 1):
            raise ValueError(f"a link needs bandwidth > 0, delay >= 0 and loss from 0 to 1, not {self}")


@dataclass
class LinkRules:
    """The state of a network: shapes of links, and which packets are dropped."""

    seed: int = 7
    """Seed of the random losses."""
    blocked: set[tuple[str, str]] = field(default_factory=set)
    """(source, destination) pairs of addresses whose packets are dropped."""
    shapes: dict[str, LinkShape] = field(default_factory=dict)
    """Address -> the shape of its link; other links are perfect."""
    free_at_s: dict[tuple[str, str], float] = field(default_factory=dict)
    """(address, "out" or "in") -> when that direction of the link has sent all that was given to it."""

    def __post_init__(self) -> None:
        self._chance = random.Random(self.seed)

    def block(self, sources: Iterable[str], destinations: Iterable[str]) -> None:
        """Drop all packets from any of the sources to any of the destinations."""
        self.blocked.update((a, b) for a in sources for b in destinations if a != b)

    def heal(self) -> None:
        """Let packets of all pairs through again; shapes stay."""
        self.blocked.clear()

    def arrival_s(self, source: str, destination: str, size_bytes: int, now_s: float) -> float | None:
        """When a packet sent at `now_s` arrives; None if it is lost."""
        if (source, destination) in self.blocked:
            return None
        at_s = now_s
        for link in ((source, "out"), (destination, "in")):
            shape = self.shapes.get(link[0])
            if shape is None:
                continue
            if shape.loss and self._chance.random() < shape.loss:
                return None
            begin_s = max(at_s, self.free_at_s.get(link, 0.0))
            if begin_s - at_s > QUEUE_S:
                return None
            end_s = begin_s + size_bytes * 8e-6 / shape.bandwidth_mbit_s
            self.free_at_s[link] = end_s
            at_s = end_s + shape.delay_s
        return at_s
