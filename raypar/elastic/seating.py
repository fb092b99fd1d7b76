"""Which worker takes which seat of a first plan, when workers share nodes. Pure."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping

from raypar.plan import ParallelPlan


def spread(plan: ParallelPlan, nodes: Mapping[int, str]) -> tuple[int, ...]:
    """members[rank]: the replicas of a position on different nodes where there are several, so that a node that dies does not
    take every copy of a stage with it; among equals the lowest numbers.

    `nodes`: worker -> node, one worker a rank of `plan`. The shards of a seat keep their numbers together.
    """
    free = sorted(nodes)
    if len(set(nodes.values())) < 2 or any(stage.shards > 1 for stage in plan.stages):
        return tuple(free)
    left = Counter(nodes.values())
    members: list[int] = []
    used: dict[int, Counter[str]] = {}
    for seat in plan.seats:
        here = used.setdefault(seat.position, Counter())
        # The node with most room left comes first among those that have fewest copies of this position.
        worker = min(free, key=lambda n: (here[nodes[n]], -left[nodes[n]], n))
        free.remove(worker)
        left[nodes[worker]] -= 1
        here[nodes[worker]] += 1
        members.append(worker)
    return tuple(members)
