"""Recognises the loss of a node: several of its workers are lost within seconds."""

from __future__ import annotations

import math
from collections.abc import Collection

from raypar.plan.wording import format_worker_numbers
from raypar.record.events import NodeLoss

TOGETHER_S = 10.0
"""Losses within this time count as one event: of some workers only silence shows that they are lost."""

NOTICED_S = 90.0
"""How long after a worker its node may be reported dead: Ray takes up to a minute to notice that."""


class NodeLossTracker:
    """Collects the losses of workers by node."""

    def __init__(self) -> None:
        self._lost: dict[str, dict[int, float]] = {}
        """Node -> worker -> time of its loss, for nodes whose loss has not been reported."""
        self._recovered_s = -math.inf
        """When the last recovery ended."""

    def note_recovery(self, now_s: float) -> None:
        """Note that training goes on: who is lost later was not lost together with those before."""
        self._recovered_s = now_s

    def lost(self, worker: int, node: str, left: Collection[int], with_node: bool, now_s: float) -> NodeLoss | None:
        """The node-lost event, if this was the node's last worker and the node is gone with it.

        `left`: the node's workers that are still there; `with_node`: Ray says that the node has died. If Ray does not say so,
        several workers must have been lost together: a single one may have died alone. Whether the node lives all the same is
        for the caller to find out.
        """
        lost = self._lost.setdefault(node, {})
        lost[worker] = now_s
        since_s = max(now_s - TOGETHER_S, self._recovered_s)
        together = sorted(number for number, at_s in lost.items() if at_s > since_s or number == worker)
        if left or not (with_node or len(together) > 1):
            return None
        del self._lost[node]
        if with_node:
            return node_loss_event(node, f"node {node[:8]} is lost, with {format_worker_numbers(together)}", together)
        return node_loss_event(
            node, f"no worker is left on node {node[:8]}: {format_worker_numbers(together)} were lost together", together
        )

    def died(self, node: str, now_s: float) -> NodeLoss | None:
        """The node-lost event of a node that Ray's node table lists as dead, often long after its workers were lost.

        None if no worker was lost with the node, or if its loss was reported before.
        """
        with_it = sorted(number for number, at_s in self._lost.pop(node, {}).items() if now_s - at_s < NOTICED_S)
        if not with_it:
            return None
        return node_loss_event(node, f"node {node[:8]} is lost, with {format_worker_numbers(with_it)}", with_it)


def node_loss_event(node: str, text: str, workers: Collection[int]) -> NodeLoss:
    """The node-lost event, with its text and facts."""
    return NodeLoss(text=text, node=node[:8], workers=list(workers))
