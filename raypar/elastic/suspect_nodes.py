"""Nodes on which no worker is started for a while, because a worker there was lost with its node or did not answer. Pure."""

from __future__ import annotations

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
        """Suspect a node from now on. If it is suspected already, the same length begins anew, and is not doubled."""
        if node not in self.at(now_s):
            self._lasts_s[node] = min(2 * self._lasts_s.get(node, SUSPECT_S / 2), MOST_SUSPECT_S)
        self._until_s[node] = now_s + self._lasts_s[node]

    def at(self, now_s: float) -> frozenset[str]:
        """The nodes that are suspected at this time."""
        return frozenset(node for node, until_s in self._until_s.items() if now_s < until_s)
