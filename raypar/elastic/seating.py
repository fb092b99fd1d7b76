"""Which worker takes which seat: of a first plan, of the same plan with those who are left, of a new plan. Pure."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING

from raypar.elastic.holdings import overlap, seated
from raypar.elastic.state_sources import live_holders
from raypar.plan import ParallelPlan

if TYPE_CHECKING:
    from raypar.elastic.run_state import RunState


def spread_over_nodes(plan: ParallelPlan, nodes: Mapping[int, str]) -> tuple[int, ...]:
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


def refill_seats(m: RunState, usable: list[int]) -> tuple[ParallelPlan, tuple[int, ...]] | None:
    """The same stages with who is left: waiting workers in the empty seats, then fewer replicas; None if a stage, or a shard of
    it, has nobody."""
    assert m.membership.plan is not None
    plan, idle = m.membership.plan, [w for w in usable if w not in m.membership.members]
    full, at = Counter(plan.copies), {place: list[int]() for place in plan.copies}
    for worker, place in zip(m.membership.members, plan.copies, strict=True):
        if worker in usable:
            at[place].append(worker)
    while idle and any(len(at[place]) < full[place] for place in at):
        neediest = max(at, key=lambda place: (full[place] - len(at[place])) / full[place])
        worker = choose_replacements(m, plan, neediest, at, idle)
        idle.remove(worker)
        at[neediest].append(worker)
    if not all(at.values()):
        return None
    replicas = [
        seat_whole_replicas([at[place] for place in at if place[0] == p], m.membership.nodes) for p in range(plan.positions)
    ]
    stages = tuple(replace(s, replicas=len(replicas[s.position])) for s in plan.stages)
    return ParallelPlan(stages), tuple(w for here in replicas for replica in here for w in replica)


def choose_replacements(
    m: RunState, plan: ParallelPlan, place: tuple[int, int], at: Mapping[tuple[int, int], Sequence[int]], idle: list[int]
) -> int:
    """Which of the idle workers joins those `at` a place (`ParallelPlan.copies`): who lacks least of what they hold; of these
    one on a node where other shards lack it; of these one where there are fewest copies; of these the lowest number."""
    need, have = m.layout(plan)[plan.copies.index(place)], live_holders(m, m.recovery.done)
    copies = Counter(m.membership.nodes.get(worker) for worker in at[place])
    others = [Counter(m.membership.nodes.get(w) for w in at[other]) for other in at if other[0] == place[0] and other != place]

    def key(worker: int) -> tuple[int, int, int, int]:
        node = m.membership.nodes.get(worker)
        lacking = max((count[node] for count in others), default=0) - copies[node]
        return -overlap(need, have.get(worker, ())), -max(0, lacking), copies[node], worker

    return min(idle, key=key)


def seat_whole_replicas(shards: Sequence[Sequence[int]], nodes: Mapping[int, str]) -> list[list[int]]:
    """As many whole replicas as there can be of the workers that hold each shard; each on one node where that can be."""
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
    return seated(m.layout(plan), live_holders(m, m.recovery.done), usable, m.membership.nodes, plan.copies, replicas)
