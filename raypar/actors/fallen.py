"""Nodes that a run has lost whole: told beside the losses of their workers. Pure; time is an argument."""

from __future__ import annotations

from collections.abc import Collection
from typing import Any

TOGETHER_S = 10.0
"""Workers that are lost within so many seconds are lost together: some are noticed by their silence only."""


class Fallen:
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
        who = f"worker {worker}" if len(together) == 1 else f"workers {', '.join(map(str, together[:-1]))} and {together[-1]}"
        text = f"node {node[:8]} is lost, with {who}"
        if not with_node:
            text = f"no worker is left on node {node[:8]}: {who} were lost together"
        return {"text": text, "node": node[:8], "workers": together}
