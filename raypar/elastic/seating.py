"""The assignment of workers to seats: of a first plan, of the same plan after a loss, of a new plan. Pure."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Hashable, Mapping, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING

from raypar.elastic.state_sources import find_live_holders
from raypar.errors import PlanError
from raypar.plan import ParallelPlan
from raypar.plan.pieces import Holdings, Piece, count_shared_elements, merge_pieces

if TYPE_CHECKING:
    from raypar.elastic.run_state import RunState


def spread_replicas_over_nodes(plan: ParallelPlan, nodes: Mapping[int, str]) -> tuple[int, ...]:
    """By rank, the worker of a first plan: replicas of a position go to different nodes, so that no node has every copy.

    Among equal choices the lowest worker number comes first. `nodes`: worker -> node, one worker for each rank of `plan`. A
    plan with shards takes the workers in order of their numbers.
    """
    free = sorted(nodes)
    if len(set(nodes.values())) < 2 or any(stage.shards > 1 for stage in plan.stages):
        return tuple(free)
    left = Counter(nodes.values())
    members: list[int] = []
    used: dict[int, Counter[str]] = {}
    for seat in plan.seats:
        here = used.setdefault(seat.position, Counter())
        # Among the nodes with the fewest copies of this position, the node with the most free workers comes first.
        worker = min(free, key=lambda n: (here[nodes[n]], -left[nodes[n]], n))
        free.remove(worker)
        left[nodes[worker]] -= 1
        here[nodes[worker]] += 1
        members.append(worker)
    return tuple(members)


def refill_seats(m: RunState, usable: list[int]) -> tuple[ParallelPlan, tuple[int, ...]] | None:
    """The same stages with the workers that are left: (plan, members); None if a stage, or a shard of it, has no worker.

    Waiting workers take the empty seats; if seats remain empty, stages get fewer replicas.
    """
    assert m.membership.plan is not None
    plan, idle = m.membership.plan, [w for w in usable if w not in m.membership.members]
    full, at = Counter(plan.compute_keys), {place: list[int]() for place in plan.compute_keys}
    for worker, place in zip(m.membership.members, plan.compute_keys, strict=True):
        if worker in usable:
            at[place].append(worker)
    while idle and any(len(at[place]) < full[place] for place in at):
        neediest = max(at, key=lambda place: (full[place] - len(at[place])) / full[place])
        worker = choose_replacement_worker(m, plan, neediest, at, idle)
        idle.remove(worker)
        at[neediest].append(worker)
    if not all(at.values()):
        return None
    replicas = [
        seat_whole_replicas([at[place] for place in at if place[0] == p], m.membership.nodes) for p in range(plan.positions)
    ]
    stages = tuple(replace(s, replicas=len(replicas[s.position])) for s in plan.stages)
    return replace(plan, stages=stages), tuple(w for here in replicas for replica in here for w in replica)


def choose_replacement_worker(
    m: RunState, plan: ParallelPlan, place: tuple[int, int], at: Mapping[tuple[int, int], Sequence[int]], idle: list[int]
) -> int:
    """The idle worker that takes an empty seat at `place` (a key of `ParallelPlan.compute_keys`).

    Preferred is, in this order: a worker that holds most of the seat's state; a node where shards of a replica lack this one; a
    node with the fewest copies; the lowest number. `at`: place -> workers that are there.
    """
    need, have = m.held_pieces(plan)[plan.compute_keys.index(place)], find_live_holders(m, m.recovery.done)
    copies = Counter(m.membership.nodes.get(worker) for worker in at[place])
    others = [Counter(m.membership.nodes.get(w) for w in at[other]) for other in at if other[0] == place[0] and other != place]

    def key(worker: int) -> tuple[int, int, int, int]:
        node = m.membership.nodes.get(worker)
        lacking = max((count[node] for count in others), default=0) - copies[node]
        return -count_shared_elements(need, have.get(worker, ())), -max(0, lacking), copies[node], worker

    return min(idle, key=key)


def seat_whole_replicas(shards: Sequence[Sequence[int]], nodes: Mapping[int, str]) -> list[list[int]]:
    """The workers of each replica, by shard: as many whole replicas as possible, each on one node if possible.

    `shards`: by shard, the workers that hold it.
    """
    left = [list(workers) for workers in shards]
    found = []
    while all(left):
        fewest = min(left, key=len)
        first = max(fewest, key=lambda w: sum(any(nodes.get(w) == nodes.get(o) for o in others) for others in left))
        found.append([next((w for w in workers if nodes.get(w) == nodes.get(first)), workers[0]) for workers in left])
        for worker, workers in zip(found[-1], left, strict=True):
            workers.remove(worker)
    return found


def assign_seats(m: RunState, plan: ParallelPlan, usable: list[int]) -> tuple[int, ...]:
    """Who takes which seat of a new plan: as little as possible moves, the shards of a replica sit on one node, and copies of a
    stage on different ones."""
    replicas = [(seat.position, seat.replica) for seat in plan.seats]
    have = find_live_holders(m, m.recovery.done)
    return match_workers_to_seats(m.held_pieces(plan), have, usable, m.membership.nodes, plan.compute_keys, replicas)


def match_workers_to_seats(
    need: Sequence[Sequence[Piece]],
    have: Holdings,
    workers: Sequence[int],
    nodes: Mapping[int, str] | None = None,
    copies: Sequence[Hashable] = (),
    replicas: Sequence[Hashable] = (),
) -> tuple[int, ...]:
    """By seat: the worker that takes it. Workers that hold most of what a seat needs come first, then the lowest numbers.

    `need[rank]`: the pieces that a seat needs. `nodes`: worker -> node. `copies[rank]`: equal for seats that compute the same.
    `replicas[rank]`: equal for the shards of one replica. As far as nothing more has to move, the shards of a replica get
    workers on one node; as far as that allows, seats that compute the same get workers on different nodes.
    Raises `PlanError` when there are fewer workers than seats.
    """
    if len(workers) < len(need):
        raise PlanError(f"{len(need)} seats but {len(workers)} workers", cure="choose a plan for the workers there are")
    sizes = [sum(p.size for p in merge_pieces(pieces)) for pieces in need]
    pairs = sorted(
        (sizes[rank] - count_shared_elements(pieces, have.get(worker, ())), rank, worker)
        for rank, pieces in enumerate(need)
        for worker in workers
    )
    chosen: dict[int, int] = {}
    for _, rank, worker in pairs:
        if rank not in chosen and worker not in chosen.values():
            chosen[rank] = worker
    members = [chosen[rank] for rank in range(len(need))]
    if nodes and len(set(nodes.values())) > 1 and copies:
        cost = {(rank, worker): size for size, rank, worker in pairs}
        _improve_seating(members, sorted(set(workers) - set(members)), cost, nodes, copies, replicas or range(len(need)))
    return tuple(members)


def _improve_seating(
    members: list[int],
    idle: list[int],
    cost: Mapping[tuple[int, int], int],
    nodes: Mapping[int, str],
    copies: Sequence[Hashable],
    replicas: Sequence[Hashable],
) -> None:
    """Exchange members with each other and with idle workers, in place, for as long as an exchange improves the seating.

    An exchange improves it if it lowers (elements to move, pairs of a replica's shards on different nodes, pairs of copies on
    one node), compared in this order. So the exchanges come to an end.
    """

    def shared(of: Sequence[Hashable]) -> Counter[tuple[Hashable, str]]:
        return Counter((of[rank], nodes.get(worker, "")) for rank, worker in enumerate(members))

    def more(of: Sequence[Hashable], here: Counter[tuple[Hashable, str]], rank: int, other: int | None, worker: int) -> int:
        """How many more pairs with equal keys sit on one node after the exchange."""
        old, changed = members[rank], Counter[tuple[Hashable, str]]()
        changed[of[rank], nodes.get(worker, "")] += 1
        changed[of[rank], nodes.get(old, "")] -= 1
        if other is not None:
            changed[of[other], nodes.get(old, "")] += 1
            changed[of[other], nodes.get(worker, "")] -= 1
        return sum(math.comb(here[k] + d, 2) - math.comb(here[k], 2) for k, d in changed.items())

    def gain(rank: int, other: int | None, worker: int) -> tuple[int, int, int]:
        """How many more (elements move, pairs of shards are apart, pairs of copies share a node) when `worker` gets `rank`.

        `other`: the rank that `worker` has now, which the present member of `rank` gets; None: `worker` is idle.
        """
        elements = cost[rank, worker] - cost[rank, members[rank]]
        if other is not None:
            elements += cost[other, members[rank]] - cost[other, worker]
        return elements, -more(replicas, mates, rank, other, worker), more(copies, twins, rank, other, worker)

    size = Counter(replicas)
    better = True
    while better:
        better = False
        for rank in range(len(members)):
            mates, twins, node = shared(replicas), shared(copies), nodes.get(members[rank], "")
            complete = mates[replicas[rank], node] == size[replicas[rank]]
            if complete and twins[copies[rank], node] < 2 and not cost[rank, members[rank]]:
                continue  # nothing to gain
            others: list[tuple[int | None, int]] = [(o, w) for o, w in enumerate(members) if o != rank]
            ways = [(gain(rank, other, worker), worker, other) for other, worker in (*others, *((None, w) for w in idle))]
            (change, worker, other) = min(ways, key=lambda way: way[:2], default=((0, 0, 0), -1, None))
            if change >= (0, 0, 0):
                continue
            old, better = members[rank], True
            members[rank] = worker
            if other is not None:
                members[other] = old
            else:
                idle[idle.index(worker)] = old
