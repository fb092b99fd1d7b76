"""Which worker takes which seat: of a first plan, of the same plan with those who are left, of a new plan. Pure."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping
from dataclasses import replace
from typing import TYPE_CHECKING

from raypar.elastic.holdings import overlap, seated
from raypar.elastic.sources import held
from raypar.plan import ParallelPlan

if TYPE_CHECKING:
    from raypar.elastic.machine import RunMachine


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


def refilled(m: RunMachine, usable: list[int]) -> tuple[ParallelPlan, tuple[int, ...]] | None:
    """The same stages with who is left: waiting workers in the empty seats, then fewer replicas; None if a stage has nobody."""
    assert m.plan is not None
    plan, idle = m.plan, [w for w in usable if w not in m.members]
    at: list[list[int]] = [[] for _ in range(plan.positions)]
    for rank, worker in enumerate(m.members):
        if worker in usable:
            at[plan.seats[rank].position].append(worker)
    full = [sum(seat.position == p for seat in plan.seats) for p in range(plan.positions)]
    if any(stage.shards > 1 for stage in plan.stages) and [len(a) for a in at] != full:
        return None
    while idle and any(len(a) < f for a, f in zip(at, full, strict=True)):
        neediest = max(range(len(at)), key=lambda p: (full[p] - len(at[p])) / full[p])
        worker = next_to(m, plan, neediest, at[neediest], idle)
        idle.remove(worker)
        at[neediest].append(worker)
    if not all(at):
        return None
    stages = tuple(replace(s, replicas=len(at[s.position]) // s.shards) for s in plan.stages)
    return ParallelPlan(stages), tuple(w for workers in at for w in workers)


def next_to(m: RunMachine, plan: ParallelPlan, position: int, there: list[int], idle: list[int]) -> int:
    """Which of the idle workers joins those at a position: who lacks least of what they hold; of these one on a node that has
    fewest copies of it; of these the lowest number."""
    rank = next(rank for rank, seat in enumerate(plan.seats) if seat.position == position)
    need, have = m.layout(plan)[rank], held(m, m.recovery.done)
    copies = Counter(m.nodes.get(worker) for worker in there)
    return min(idle, key=lambda w: (-overlap(need, have.get(w, ())), copies[m.nodes.get(w)], w))


def seats(m: RunMachine, plan: ParallelPlan, usable: list[int]) -> tuple[int, ...]:
    """Who takes which seat of a new plan: as little as possible moves, and copies of a stage sit on different nodes."""
    positions = [seat.position for seat in plan.seats]
    return seated(m.layout(plan), held(m, m.recovery.done), usable, m.nodes, positions)
