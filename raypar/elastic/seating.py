"""The assignment of workers to seats: of a first plan, of the same plan after a loss, of a new plan. Pure."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Callable, Collection, Hashable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import TYPE_CHECKING

from raypar.elastic.block_shares import share_out_by_slowdowns
from raypar.elastic.state_sources import find_live_holders
from raypar.errors import PlanError
from raypar.plan import ParallelPlan
from raypar.plan.parallel_plan import ComputeKey
from raypar.plan.pieces import Holdings, Piece, count_shared_elements, merge_pieces

if TYPE_CHECKING:
    from raypar.elastic.run_state import RunState


MOST_PREPARED = 8
"""With more replicas of a stage no plan is computed before one of them is lost, while some worker is known to be slow."""


@dataclass(frozen=True, slots=True)
class WorkerPlaces:
    """The node and zone of each worker, and which workers are on-demand. A worker without a node may be anywhere."""

    nodes: Mapping[int, str] = field(default_factory=dict)
    """Worker -> its node."""
    zones: Mapping[str, str] = field(default_factory=dict)
    """Node -> its availability zone, where nodes say theirs."""
    on_demand: Collection[int] = ()
    """Workers on nodes that the cloud does not take back."""

    def zone(self, worker: int) -> str:
        """The worker's zone; its node where that has no zone."""
        node = self.nodes.get(worker, "")
        return self.zones.get(node, node)


def spread_replicas_over_nodes(plan: ParallelPlan, places: WorkerPlaces, groups: Sequence[tuple[int, ...]]) -> tuple[int, ...]:
    """By rank, the worker of a first plan. Replicas of a stage go to different nodes and zones, so that none has all copies.

    `groups`: the workers that were placed together, a whole replica each; there may be more than the plan needs. The first
    replica of every stage goes to an on-demand node as long as there are such. Among equal choices the lowest number wins.
    """
    free = sorted(groups)
    left = Counter(places.nodes.get(group[0], "") for group in free)
    node_copies, zone_copies = Counter[tuple[ComputeKey, str]](), Counter[tuple[ComputeKey, str]]()
    chosen: dict[int, int] = {}
    replicas = list(plan.shard_groups)
    if places.on_demand:  # a copy of every stage before the second copy of any
        replicas.sort(key=lambda ranks: plan.roles[ranks[0]][0].replica)

    def cost(ranks: tuple[int, ...], group: tuple[int, ...]) -> tuple[bool, int, int, int, tuple[int, ...]]:
        """What is minimised; among nodes with equally few copies, the node with the most free workers is best."""
        node, zone, key = places.nodes.get(group[0], ""), places.zone(group[0]), plan.compute_keys[ranks[0]]
        first = plan.roles[ranks[0]][0].replica == 0
        unsafe = bool(places.on_demand) and first != (group[0] in places.on_demand)
        return unsafe, zone_copies[key, zone], node_copies[key, node], -left[node], group

    for ranks in replicas:
        group = min((g for g in free if len(g) == len(ranks)), key=partial(cost, ranks))
        free.remove(group)
        node, key = places.nodes.get(group[0], ""), plan.compute_keys[ranks[0]]
        left[node] -= 1
        node_copies[key, node] += 1
        zone_copies[key, places.zone(group[0])] += 1
        chosen.update(zip(ranks, group, strict=True))
    return tuple(chosen[rank] for rank in range(plan.world))


def refill_seats(m: RunState, usable: list[int]) -> tuple[ParallelPlan, tuple[int, ...]] | None:
    """The same stages with the workers that are left: (plan, members); None if a stage, or a shard of it, has no worker.

    Workers in reserve take the empty seats. On-demand workers among them also take seats in stages that have no on-demand
    worker. If seats remain empty, stages get fewer replicas; not where workers have several roles, which needs a new plan.
    """
    assert m.membership.plan is not None
    plan, idle = m.membership.plan, [w for w in usable if w not in m.membership.members]
    full, at = Counter(plan.compute_keys), _members_by_place(plan, m.membership.members, usable)
    free_seats_for_on_demand_workers(plan, at, idle, m.hiring.on_demand)
    while idle and (lacking := [place for place in at if len(at[place]) < full[place]]):
        on_demand_idle = any(worker in m.hiring.on_demand for worker in idle)
        all_on_spot = {place for place in lacking if on_demand_idle and m.hiring.on_demand.isdisjoint(at[place])}
        neediest = max(lacking, key=lambda place: (place in all_on_spot, (full[place] - len(at[place])) / full[place]))
        worker = choose_replacement_worker(m, plan, neediest, at, idle)
        idle.remove(worker)
        at[neediest].append(worker)
    if not all(at.values()):
        return None
    if not plan.one_role_each:
        return None if any(len(at[place]) < full[place] for place in at) else (plan, _in_their_seats(m, plan, at))
    number_of = {worker: roles[0].replica for worker, roles in zip(m.membership.members, plan.roles, strict=True)}
    replicas = []
    for grid, level in enumerate(plan.zero_levels):
        whole = seat_whole_replicas([workers for ((of, _),), workers in at.items() if of == grid], m.membership.nodes)
        replicas.append(keep_replica_numbers(whole, number_of) if level else whole)
    members = tuple(w for here in replicas for replica in here for w in replica)
    return plan.with_replicas([len(here) for here in replicas]), members


def _in_their_seats(m: RunState, plan: ParallelPlan, at: Mapping[ComputeKey, list[int]]) -> tuple[int, ...]:
    """By rank: the worker there, if all seats are taken. Members that remain keep theirs."""
    left = {place: [w for w in workers if w not in m.membership.members] for place, workers in at.items()}
    there = {worker for workers in at.values() for worker in workers}
    members = zip(m.membership.members, plan.compute_keys, strict=True)
    return tuple(member if member in there else left[place].pop(0) for member, place in members)


def with_measured_shares(m: RunState, plan: ParallelPlan, members: Sequence[int]) -> ParallelPlan:
    """The plan of a new generation: known stragglers get fewer blocks from its first step on, if the job wants that."""
    watch = m.health.stragglers
    wanted = m.policy.rebalance_stragglers and m.policy.block_work and plan.one_role_each
    if not wanted or watch.told.isdisjoint(members):
        return plan
    return share_out_by_slowdowns(plan, [watch.slowdown(worker) for worker in members], m.policy.block_work)


def plans_after_one_loss(m: RunState) -> tuple[ParallelPlan, ...]:
    """The plans, each once, with which the run would go on after the loss of one member if no worker were in reserve.

    The loss of a stage's only replica is left out: it needs a new plan.
    """
    who = m.membership
    if who.plan is None:
        return ()
    present = [worker for worker in who.members if worker not in who.gone | who.leaving]
    one_of_each = dict(zip((tuple(role.grid for role in roles) for roles in who.plan.roles), who.members, strict=True))
    losses = [worker for grids, worker in one_of_each.items() if all(len(who.plan.grids[grid]) > 1 for grid in grids)]
    if m.policy.rebalance_stragglers and not m.health.stragglers.told.isdisjoint(present):
        # Which replicas are slow then, and so the shares, depends on who is lost.
        rows = [[len(who.plan.grids[role.grid]) for role in roles if not role.shard] for roles in who.plan.roles]
        copies = [min(of_worker, default=1) for of_worker in rows]
        losses = [worker for count, worker in zip(copies, who.members, strict=True) if 1 < count <= MOST_PREPARED]
    found = (refill_seats(m, [w for w in present if w != lost]) for lost in losses)
    return tuple(dict.fromkeys(with_measured_shares(m, *refilled) for refilled in filter(None, found)))


def _members_by_place(plan: ParallelPlan, members: tuple[int, ...], usable: Collection[int]) -> dict[ComputeKey, list[int]]:
    """Key of `ParallelPlan.compute_keys` -> the members there that are `usable`, by rank."""
    at = {place: list[int]() for place in plan.compute_keys}
    for worker, place in zip(members, plan.compute_keys, strict=True):
        if worker in usable:
            at[place].append(worker)
    return at


def find_seats_for_on_demand_workers(m: RunState, spares: Collection[int]) -> tuple[int, ...]:
    """Members that should give their seats to on-demand workers among `spares`, because their stages have none."""
    who = m.membership
    if who.plan is None or m.hiring.on_demand.isdisjoint(spares):
        return ()
    at = _members_by_place(who.plan, who.members, set(who.members) - who.gone - who.leaving)
    return free_seats_for_on_demand_workers(who.plan, at, sorted(spares), m.hiring.on_demand)


def free_seats_for_on_demand_workers(
    plan: ParallelPlan, at: Mapping[ComputeKey, list[int]], idle: list[int], on_demand: Collection[int]
) -> tuple[int, ...]:
    """Empty one replica's seats in each full stage with no on-demand worker, if `idle` has enough of them; returns who leaves.

    Moves the workers that lose their seats from `at` to `idle`. `at`: key of `ParallelPlan.compute_keys` -> workers there.
    """
    waiting, freed = sum(worker in on_demand for worker in idle), list[int]()
    if not plan.one_role_each:
        return ()  # a replica of one grid has workers of others
    for number, grid in enumerate(plan.grids):
        shards = [at[((number, shard),)] for shard in range(len(grid[0]))]
        full = all(len(there) == len(grid) for there in shards)
        if not full or waiting < len(shards) or all(any(w in on_demand for w in there) for there in shards):
            continue
        replica = next((r for r in reversed(range(len(grid))) if not any(there[r] in on_demand for there in shards)), None)
        if replica is not None:
            waiting -= len(shards)
            freed += [there.pop(replica) for there in shards]
    idle += freed
    return tuple(freed)


def choose_replacement_worker(
    m: RunState, plan: ParallelPlan, place: ComputeKey, at: Mapping[ComputeKey, Sequence[int]], idle: list[int]
) -> int:
    """The idle worker that takes an empty seat at `place` (a key of `ParallelPlan.compute_keys`).

    Preferred is, in this order: an on-demand worker, where the place has none; a worker that holds most of the seat's state; a
    node where shards of a replica lack this one; a zone and a node with the fewest copies; the lowest number. `at`: place ->
    workers that are there.
    """
    need, have = m.held_pieces(plan)[plan.compute_keys.index(place)], find_live_holders(m, m.recovery.done)
    places, on_demand = WorkerPlaces(m.membership.nodes, m.membership.zones), m.hiring.on_demand
    copies = Counter(m.membership.nodes.get(worker) for worker in at[place])
    zone_copies = Counter(map(places.zone, at[place]))
    mates = [other for other in at if other != place and {grid for grid, _ in other} == {grid for grid, _ in place}]
    others = [Counter(m.membership.nodes.get(w) for w in at[other]) for other in mates]

    def key(worker: int) -> tuple[bool, int, int, int, int, int]:
        node = m.membership.nodes.get(worker)
        lacking = max((count[node] for count in others), default=0) - copies[node]
        all_on_spot = worker not in on_demand and on_demand.isdisjoint(at[place])
        held = count_shared_elements(need, have.get(worker, ()))
        return all_on_spot, -held, -max(0, lacking), zone_copies[places.zone(worker)], copies[node], worker

    return min(idle, key=key)


def seat_whole_replicas(shards: Sequence[Sequence[int]], nodes: Mapping[int, str]) -> list[list[int]]:
    """The workers of each replica, by shard: as many whole replicas as possible, each on one node if possible.

    `shards`: by shard, the workers that hold it.
    """
    left = [list(workers) for workers in shards]
    found = []
    while all(left):
        fewest = min(left, key=len)
        there = [{nodes.get(worker) for worker in workers} for workers in left]
        first = max(fewest, key=lambda w: sum(nodes.get(w) in here for here in there))
        found.append([next((w for w in workers if nodes.get(w) == nodes.get(first)), workers[0]) for workers in left])
        for worker, workers in zip(found[-1], left, strict=True):
            workers.remove(worker)
    return found


def keep_replica_numbers(replicas: Sequence[list[int]], before: Mapping[int, int]) -> list[list[int]]:
    """The same replicas, ordered so that each has the number that it had, if there still are so many; the others take what
    numbers are left. So the last one takes that of one that is gone, and little moves of what replicas divide
    (`plan.nested_shares`). `before`: worker -> the number of its replica."""
    found: dict[int, list[int]] = {}
    others = []
    for workers in replicas:
        number = before.get(workers[0], len(replicas))
        if number < len(replicas) and number not in found:
            found[number] = workers
        else:
            others.append(workers)
    return [found[number] if number in found else others.pop(0) for number in range(len(replicas))]


def assign_seats(m: RunState, plan: ParallelPlan, usable: list[int]) -> tuple[int, ...]:
    """By rank: the worker that takes the seat of a new plan.

    In this order: where on-demand workers are asked for, each stage has one; as few elements as possible move; the shards of a
    replica sit on one node; copies of a stage sit in different zones and on different nodes.
    """
    group_of = {rank: group for group in plan.shard_groups for rank in group}
    replicas = [group_of[rank] for rank in range(plan.world)]
    have = find_live_holders(m, m.recovery.done)
    places = WorkerPlaces(m.membership.nodes, m.membership.zones, m.hiring.on_demand)
    return match_workers_to_seats(m.held_pieces(plan), have, usable, places, plan.compute_keys, replicas)


def match_workers_to_seats(
    need: Sequence[Sequence[Piece]],
    have: Holdings,
    workers: Sequence[int],
    places: WorkerPlaces | None = None,
    copies: Sequence[Hashable] = (),
    replicas: Sequence[Hashable] = (),
) -> tuple[int, ...]:
    """By seat: the worker that takes it. Workers that hold most of what a seat needs come first, then the lowest numbers.

    `need[rank]`: the pieces that a seat needs. `copies[rank]`: equal for seats that compute the same. `replicas[rank]`: equal
    for the shards of one replica. One of the seats that compute the same gets an on-demand worker, as far as they suffice.
    As far as nothing more has to move, the shards of a replica get workers on one node; as far as that allows, seats that
    compute the same get workers in different zones and on different nodes.
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
    if places is not None and len(set(places.nodes.values())) > 1 and copies:
        cost = {(rank, worker): size for size, rank, worker in pairs}
        _improve_seating(members, sorted(set(workers) - set(members)), cost, places, copies, replicas or range(len(need)))
    return tuple(members)


def _improve_seating(
    members: list[int],
    idle: list[int],
    cost: Mapping[tuple[int, int], int],
    places: WorkerPlaces,
    copies: Sequence[Hashable],
    replicas: Sequence[Hashable],
) -> None:
    """Exchange members with each other and with idle workers, in place, for as long as an exchange improves the seating.

    An exchange improves it if it lowers (stages without an on-demand worker, elements to move, pairs of a replica's shards on
    different nodes, pairs of copies in one zone, pairs of copies on one node), compared in this order. So it comes to an end.
    """
    better = True
    while better:
        better = False
        for rank in range(len(members)):
            seating = _Seating(members, cost, places, copies, replicas)
            if seating.is_best(rank):
                continue
            others: list[tuple[int | None, int]] = [(o, w) for o, w in enumerate(members) if o != rank]
            ways = [(seating.cost_of_exchange(rank, o, w), w, o) for o, w in (*others, *((None, w) for w in idle))]
            (change, worker, other) = min(ways, key=lambda way: way[:2], default=(NO_CHANGE, -1, None))
            if change >= NO_CHANGE:
                continue
            old, better = members[rank], True
            members[rank] = worker
            if other is not None:
                members[other] = old
            else:
                idle[idle.index(worker)] = old


NO_CHANGE = (0, 0, 0, 0, 0)
"""The cost of an exchange that changes nothing."""


class _Seating:
    """An assignment of workers to seats, and the cost of exchanges in it."""

    def __init__(
        self,
        members: Sequence[int],
        cost: Mapping[tuple[int, int], int],
        places: WorkerPlaces,
        copies: Sequence[Hashable],
        replicas: Sequence[Hashable],
    ) -> None:
        self.members = members
        """`members[rank]`: the worker in the seat `rank`."""
        self.cost = cost
        """(rank, worker) -> elements that move if the worker gets the seat."""
        self.places = places
        """Where workers are."""
        self.copies, self.replicas = copies, replicas
        """By rank: equal for seats that compute the same, and for the shards of one replica."""
        self.safe = frozenset(places.on_demand)
        """Workers on on-demand nodes."""
        self.mates = self._count(replicas, self._node)
        """(replica, node) -> its shards there."""
        self.twins = self._count(copies, self._node)
        """(copy, node) -> such copies there."""
        self.zone_twins = self._count(copies, places.zone)
        """(copy, zone) -> such copies there."""
        self.guarded = self._count(copies, self.safe.__contains__)
        """(copy, whether on an on-demand node) -> such copies."""

    def _node(self, worker: int) -> str:
        return self.places.nodes.get(worker, "")

    def _count(self, of: Sequence[Hashable], place: Callable[[int], Hashable]) -> Counter[tuple[Hashable, Hashable]]:
        return Counter((of[rank], place(worker)) for rank, worker in enumerate(self.members))

    def is_best(self, rank: int) -> bool:
        """Whether no exchange can improve this seat."""
        worker, copy, replica = self.members[rank], self.copies[rank], self.replicas[rank]
        complete = self.mates[replica, self._node(worker)] == sum(each == replica for each in self.replicas)
        alone = self.zone_twins[copy, self.places.zone(worker)] < 2 and self.twins[copy, self._node(worker)] < 2
        return complete and alone and not self.cost[rank, worker] and (not self.safe or self.guarded[copy, True] > 0)

    def cost_of_exchange(self, rank: int, other: int | None, worker: int) -> tuple[int, ...]:
        """The change of the cost (see `_improve_seating`) if `worker` gets the seat `rank`.

        `other`: the rank that `worker` has now, which the present member of `rank` gets; None: `worker` is idle.
        """
        elements = self.cost[rank, worker] - self.cost[rank, self.members[rank]]
        if other is not None:
            elements += self.cost[other, self.members[rank]] - self.cost[other, worker]

        def changed(of: Sequence[Hashable], place: Callable[[int], Hashable]) -> Counter[tuple[Hashable, Hashable]]:
            """(key, place) -> how many more members are there after the exchange."""
            old, found = self.members[rank], Counter[tuple[Hashable, Hashable]]()
            found[of[rank], place(worker)] += 1
            found[of[rank], place(old)] -= 1
            if other is not None:
                found[of[other], place(old)] += 1
                found[of[other], place(worker)] -= 1
            return found

        def pairs(here: Counter[tuple[Hashable, Hashable]], change: Counter[tuple[Hashable, Hashable]]) -> int:
            """How many more pairs with equal keys sit in one place after the exchange."""
            return sum(math.comb(here[k] + d, 2) - math.comb(here[k], 2) for k, d in change.items())

        guards = changed(self.copies, self.safe.__contains__)
        unsafe = sum((self.guarded[k] + d < 1) - (self.guarded[k] < 1) for k, d in guards.items() if k[1] is True)
        apart = -pairs(self.mates, changed(self.replicas, self._node))
        zones = pairs(self.zone_twins, changed(self.copies, self.places.zone))
        return unsafe, elements, apart, zones, pairs(self.twins, changed(self.copies, self._node))
