"""By way of which nodes' agents a driver calls many workers: a tree of nodes, computed from the nodes of the workers."""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import chain

MOST_AGENTS = 4
"""How many agents the driver calls at most."""
FANOUT = 16
"""How many agents are in a group at most, of which one calls the others."""


@dataclass(frozen=True)
class CallRoute:
    """The part of a call that one agent takes: it calls workers of its own node, and further agents."""

    workers: tuple[int, ...] = ()
    """Workers on its node."""
    below: Mapping[str, CallRoute] = field(default_factory=dict)
    """Node of a further agent -> that agent's part."""

    def __iter__(self) -> Iterator[int]:
        """All workers that are called by way of this agent."""
        return chain(self.workers, *self.below.values())

    def only(self, wanted: Collection[int]) -> CallRoute | None:
        """The route to those of its workers that are in `wanted`; None if none is."""
        workers = tuple(worker for worker in self.workers if worker in wanted)
        below = {node: part for node, route in self.below.items() if (part := route.only(wanted)) is not None}
        return CallRoute(workers, below) if workers or below else None


def make_call_routes(
    workers_of_node: Mapping[str, Sequence[int]], most: int = MOST_AGENTS, fanout: int = FANOUT
) -> dict[str, CallRoute]:
    """Node of an agent -> its route, for those at most `most` agents that the driver itself calls.

    Nodes are taken in their order, in groups of one size, `fanout` at most. The first of a group calls the others, beside its
    own workers; of too many groups again the first of each of several calls the others.
    """
    routes = {node: CallRoute(tuple(workers)) for node, workers in workers_of_node.items()}
    while len(routes) > most:
        nodes, size = list(routes), min(fanout, -(-len(routes) // most))
        groups = [nodes[start : start + size] for start in range(0, len(nodes), size)]
        routes = {
            first: CallRoute(routes[first].workers, {**routes[first].below, **{node: routes[node] for node in others}})
            for first, *others in groups
        }
    return routes


def agents_below(routes: Mapping[str, CallRoute]) -> dict[str, tuple[str, ...]]:
    """Node of an agent -> the nodes whose agents it calls, of all agents on these routes."""
    found: dict[str, tuple[str, ...]] = {}
    for node, route in routes.items():
        found[node] = tuple(route.below)
        found |= agents_below(route.below)
    return found
