"""Nodes that are avoided for a while: those on which workers were silent, and those that have died young."""

from __future__ import annotations

import math
from collections.abc import Iterable

SUSPECT_S = 90.0
"""How long a node is suspected the first time. Ray, which places new workers, takes up to 65 s to notice that a node is dead
(five checks of 13 s each); until then it may place a worker there."""

MOST_SUSPECT_S = 1800.0
"""The longest suspicion. Each suspicion of a node lasts twice as long as its last one, so that a node with a bad network costs
fewer and fewer attempts."""


class SuspectNodes:
    """The nodes that are suspected at present. Each call takes the time as an argument.

    Every suspicion ends: otherwise no node would be left after the network of each machine has failed once.
    """

    def __init__(self) -> None:
        self._until_s: dict[str, float] = {}
        """Node -> when its latest suspicion ends or has ended."""
        self._lasts_s: dict[str, float] = {}
        """Node -> length of its latest suspicion."""

    def suspect(self, node: str, now_s: float) -> None:
        """Suspect a node from now on. If it is suspected already, its suspicion restarts with the same length."""
        if node not in self.at(now_s):
            self._lasts_s[node] = min(2 * self._lasts_s.get(node, SUSPECT_S / 2), MOST_SUSPECT_S)
        self._until_s[node] = now_s + self._lasts_s[node]

    def at(self, now_s: float) -> frozenset[str]:
        """The nodes that are suspected at this time."""
        return frozenset(node for node, until_s in self._until_s.items() if now_s < until_s)


YOUNG_S = 120.0
"""The loss of a node of at most this age counts as a flap."""

LEAST_AGE_S = 30.0
"""The age that new nodes must reach after the second flap. Each further flap doubles it, up to `YOUNG_S`."""

CALM_S = 600.0
"""New nodes are trusted again after this time, plus the required age, without a flap."""


class FlappingNodes:
    """Keeps workers off new nodes while nodes flap, that is, join and are lost soon after.

    A node that joins again has a new id, and several nodes may share an address, so a flapping machine cannot be recognised.
    Instead every new node must reach an age first while any node flaps. Nodes of the first `see` do not count as new.
    """

    def __init__(self) -> None:
        self._seen_s: dict[str, float] = {}
        """Node -> when it was first seen; -inf for those of the first `see`."""
        self._flaps = 0
        """Number of flaps since the last calm period."""
        self._last_s = -math.inf
        """Time of the last flap."""

    def see(self, nodes: Iterable[str], now_s: float) -> None:
        """Note the nodes that live now."""
        since_s = now_s if self._seen_s else -math.inf
        for node in nodes:
            self._seen_s.setdefault(node, since_s)

    def lose(self, node: str, now_s: float) -> float | None:
        """Note the loss of a node. Returns the age that new nodes must reach from now on.

        None if the loss is no flap, or is the first flap, which may be an accident.
        """
        age_s = now_s - self._seen_s.pop(node, -math.inf)
        if age_s > YOUNG_S:
            return None
        self._flaps = 1 if self._is_calm(now_s) else self._flaps + 1
        self._last_s = now_s
        return self._asked_age_s() or None

    def least_age_s(self, now_s: float) -> float:
        """The age that a new node must reach before a worker is started on it; 0 while nodes do not flap."""
        return 0.0 if self._is_calm(now_s) else self._asked_age_s()

    def at(self, now_s: float) -> frozenset[str]:
        """The nodes that are too young at this time."""
        least_s = self.least_age_s(now_s)
        return frozenset(node for node, seen_s in self._seen_s.items() if now_s - seen_s < least_s)

    def _asked_age_s(self) -> float:
        return float(min(LEAST_AGE_S * 2.0 ** min(self._flaps - 2, 10), YOUNG_S)) if self._flaps > 1 else 0.0

    def _is_calm(self, now_s: float) -> bool:
        return not self._flaps or now_s - self._last_s > self._asked_age_s() + CALM_S
