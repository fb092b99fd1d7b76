"""The ranks that keep the mirror's second copies, each on another node than the rank whose state it keeps, if possible."""

from __future__ import annotations

from collections import Counter
from collections.abc import Hashable, Sequence


def assign_buddies(nodes: Sequence[Hashable], same_state_keys: Sequence[Hashable] = ()) -> dict[int, int]:
    """Rank -> the rank that keeps the mirror's second copy of its state. Empty for a single rank.

    `nodes[rank]`: the node that the rank lives on. `same_state_keys[rank]`: equal for ranks that hold the same state
    (`Ownership.same_state_keys`). A rank that holds the same state is a bad keeper. Where the nodes allow it, a rank with other
    state is taken, so that the state survives the loss of all ranks that hold it.

    Ranks sorted by node, largest node first, form a ring. The keeper of a rank is as many places further as the largest node
    has ranks. So no rank has its keeper on its own node, and every rank keeps one copy. If one node has more than half of all
    ranks, its ranks take turns among all other ranks, some of which keep several copies.
    """
    keepers = _keepers_elsewhere(nodes)
    for rank in keepers:
        if not same_state_keys or same_state_keys[keepers[rank]] != same_state_keys[rank]:
            continue
        for other in keepers:  # an exchange leaves every keeper with as many copies as before
            mine, theirs = keepers[other], keepers[rank]
            apart = rank != mine and other != theirs and _apart(nodes, rank, mine) and _apart(nodes, other, theirs)
            key_of = same_state_keys
            worse = key_of[mine] == key_of[rank] or key_of[theirs] == key_of[other] != key_of[mine]
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
