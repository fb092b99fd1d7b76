"""Who keeps the mirror's second copy of whose state: on another node wherever there is one."""

from __future__ import annotations

from collections import Counter
from collections.abc import Hashable, Sequence


def assign_buddies(nodes: Sequence[Hashable], copies: Sequence[Hashable] = ()) -> dict[int, int]:
    """Rank -> the rank that keeps its copy; `nodes[rank]` is the node it lives on. Empty for a single rank.

    `copies[rank]`: of what it is a copy (`ParallelPlan.copies`). A replica of the same has that state anyway: where the nodes
    allow it, somebody else keeps the copy, so that a state outlives all its replicas.

    Ranks sorted by node, largest node first, form a ring; a keeper is as many places further as the largest node has ranks,
    so that no node keeps for itself and everybody keeps for one. A node with more than half of all ranks would keep for
    itself: its ranks take turns among all others instead, some of which keep for several.
    """
    keepers = _elsewhere(nodes)
    for rank in keepers:
        if not copies or copies[keepers[rank]] != copies[rank]:
            continue
        for other in keepers:  # an exchange leaves everybody with as many copies as before
            mine, theirs = keepers[other], keepers[rank]
            apart = rank != mine and other != theirs and _apart(nodes, rank, mine) and _apart(nodes, other, theirs)
            worse = copies[mine] == copies[rank] or copies[theirs] == copies[other] != copies[mine]
            if apart and not worse:
                keepers[rank], keepers[other] = mine, theirs
                break
    return keepers


def _apart(nodes: Sequence[Hashable], rank: int, keeper: int) -> bool:
    return nodes[rank] != nodes[keeper] or len(set(nodes)) == 1


def _elsewhere(nodes: Sequence[Hashable]) -> dict[int, int]:
    world = len(nodes)
    if world < 2:
        return {}
    sizes = Counter(nodes)
    first = {node: rank for rank, node in reversed(list(enumerate(nodes)))}
    order = sorted(range(world), key=lambda rank: (-sizes[nodes[rank]], first[nodes[rank]], rank))
    largest = sizes[nodes[order[0]]]
    if largest == world:
        return {order[i]: order[(i + 1) % world] for i in range(world)}
    if 2 * largest <= world:
        return {order[i]: order[(i + largest) % world] for i in range(world)}
    others = order[largest:]
    crowd = {rank: others[i % len(others)] for i, rank in enumerate(order[:largest])}
    return crowd | {rank: order[i] for i, rank in enumerate(others)}
