"""The driver of a run on Ray whose few workers are called by way of agents, as many workers are."""

from __future__ import annotations

from typing import Any

from raypar.actors import node_agents
from raypar.actors.driver_actor import DriverActor


class AgentDriver(DriverActor):
    """Has an agent on every node with workers."""

    def _set_up(self, request: Any, credential: Any) -> None:
        node_agents.MOST_DIRECT = 0
        DriverActor._set_up(self, request, credential)
