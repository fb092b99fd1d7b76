"""Nodes on which no worker is started for a while, because a worker there was lost with its node or did not answer. Pure."""

from __future__ import annotations

SUSPECT_S = 90.0
"""How long a node is suspected the first time. Ray, which places new workers, takes up to 65 s to notice that a node is dead
(five checks of 13 s each); until then it may place a worker there."""
MOST_SUSPECT_S = 1800.0
"""The longest suspicion. It doubles each time, so that a node with a bad network costs fewer and fewer attempts."""


class SuspectNodes:
    """Knows which nodes are suspected. The time of each call is an argument.

    A suspicion ends: if the network of every machine has failed once, all of them must be of use again.
    """

    def __init__(self) -> None:
        self._until_s: dict[str, float] = {}
        """Node -> when its last suspicion ends."""
        self._lasts_s: dict[str, float] = {}
        """Node -> how long its last suspicion lasts."""

    def suspect(self, node: str, now_s: float) -> None:
        """Suspect a node from now on. Workers that are lost while it is suspected already do not count as a further time."""
        if node not in self.at(now_s):
            self._lasts_s[node] = min(2 * self._lasts_s.get(node, SUSPECT_S / 2), MOST_SUSPECT_S)
        self._until_s[node] = now_s + self._lasts_s[node]

    def at(self, now_s: float) -> frozenset[str]:
        """The nodes that are suspected at this time."""
        return frozenset(node for node, until_s in self._until_s.items() if now_s < until_s)
