"""Which rank keeps the mirror's second copy of which rank's state: one on another node, wherever there is one."""

from __future__ import annotations

from collections import Counter
from collections.abc import Hashable, Sequence


def assign_buddies(nodes: Sequence[Hashable], state_keys: Sequence[Hashable] = ()) -> dict[int, int]:
    """Rank -> the rank that keeps the mirror's second copy of its state. Empty for a single rank.

    `nodes[rank]`: the node that the rank lives on. `same_state_keys[rank]`: equal for ranks that hold the same state
    (`Ownership.same_state_keys`). A rank that holds the same state is no good keeper: where the nodes allow it another one is
    taken, so that the state outlives all ranks that hold it.

    Ranks sorted by node, largest node first, form a ring. A keeper is as many places further as the largest node has ranks:
    so no rank has its keeper on its own node, and every rank keeps for one. The ranks of a node with more than half of all
    ranks would have keepers on that node; they take turns among all other ranks, some of which keep for several.
    """
    keepers = _keepers_elsewhere(nodes)
    for rank in keepers:
        if not state_keys or state_keys[keepers[rank]] != state_keys[rank]:
            continue
        for other in keepers:  # an exchange leaves every keeper with as many copies as before
            mine, theirs = keepers[other], keepers[rank]
            apart = rank != mine and other != theirs and _apart(nodes, rank, mine) and _apart(nodes, other, theirs)
            worse = state_keys[mine] == state_keys[rank] or state_keys[theirs] == state_keys[other] != state_keys[mine]
            if apart and not worse:
                keepers[rank], keepers[other] = mine, theirs
                break
    return keepers


def _apart(nodes: Sequence[Hashable], rank: int, keeper: int) -> bool:
    return nodes[rank] != nodes[keeper] or len(set(nodes)) == 1


def _keepers_elsewhere(nodes: Sequence[Hashable]) -> dict[int, int]:
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
