"""Nodes that a run has lost whole: told beside the losses of their workers. Pure; time is an argument."""

from __future__ import annotations

from collections.abc import Collection
from typing import Any

TOGETHER_S = 10.0
"""Workers that are lost within so many seconds are lost together: some are noticed by their silence only."""
NOTICED_S = 90.0
"""Ray may take up to a minute to notice that a node is gone."""


class NodeLossTracker:
    """Hears of every worker that is lost."""

    def __init__(self) -> None:
        self._lost: dict[str, dict[int, float]] = {}
        """node -> worker -> when it was lost, of those whose node has not been told"""

    def lost(self, worker: int, node: str, left: Collection[int], with_node: bool, now_s: float) -> dict[str, Any] | None:
        """What is to be told of the node, if anything. `left`: workers that are still there; `with_node`: Ray says that the
        node has died. Where it does not, several must be lost together: one alone may have died of itself.
        """
        lost = self._lost.setdefault(node, {})
        lost[worker] = now_s
        together = sorted(number for number, at_s in lost.items() if now_s - at_s < TOGETHER_S)
        if left or not (with_node or len(together) > 1):
            return None
        del self._lost[node]
        if with_node:
            return node_loss_event(node, f"node {node[:8]} is lost, with {list_workers(together)}", together)
        return node_loss_event(
            node, f"no worker is left on node {node[:8]}: {list_workers(together)} were lost together", together
        )

    def died(self, node: str, now_s: float) -> dict[str, Any] | None:
        """Ray's node table has it as dead, which it may say long after the workers were lost; told once, and not of nodes that
        have taken nobody along."""
        with_it = sorted(number for number, at_s in self._lost.pop(node, {}).items() if now_s - at_s < NOTICED_S)
        return node_loss_event(node, f"node {node[:8]} is lost, with {list_workers(with_it)}", with_it) if with_it else None


def node_loss_event(node: str, text: str, workers: Collection[int]) -> dict[str, Any]:
    """In words and facts."""
    return {"text": text, "node": node[:8], "workers": list(workers)}


def list_workers(workers: Collection[int]) -> str:
    """`worker 0`, `workers 0, 2 and 3`."""
    *most, last = map(str, workers)
    return f"workers {', '.join(most)} and {last}" if most else f"worker {last}"
