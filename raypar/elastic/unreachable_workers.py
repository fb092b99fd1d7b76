"""Workers that cannot reach each other although the driver reaches all of them, and which of them the run gives up.

If the network is broken only between two machines, all workers answer the driver's pings, but no generation can connect. After
`FAILED_GENERATIONS` such generations the run gives up as few workers as possible, so that all others can reach each other. It
never gives up a worker that holds the only copy of some state.

Newcomers, which have no seat yet, need not fail in a row: between two moves that fail the members train. They are given up with
the other newcomers of their nodes, which have the same network.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection, Mapping

from raypar.elastic.events import CallFailed
from raypar.elastic.last_copy_holders import find_only_holders
from raypar.elastic.phases import Phase
from raypar.elastic.run_state import RunState
from raypar.errors import CommError

FAILED_GENERATIONS = 2
"""Number of generations that must fail to connect, so that an interruption of a few seconds costs no worker. In a row, except
where newcomers fail."""


def note_unreachable_workers(m: RunState, event: CallFailed) -> None:
    """Note the pairs of workers that could not connect, if this failed call says which."""
    order = m.recovery.order
    if m.phase is not Phase.ADOPTING or order is None or event.worker is None or not isinstance(event.error, CommError):
        return
    workers = (*order.members, *order.seatless_sources)
    pairs = {frozenset({event.worker, workers[rank]}) for rank in event.error.unreachable_ranks if rank < len(workers)}
    if pairs:
        m.health.unreachable[order.generation] = pairs
    if with_newcomers := {pair for pair in pairs if pair & m.membership.spares}:
        m.planned.unreachable[order.generation] = with_newcomers


def choose_unreachable_workers(m: RunState) -> tuple[int, ...]:
    """The workers to give up. Empty if too few generations have failed to connect, or if every choice would lose state."""
    who = m.membership
    # Failures of newcomers that were given up already do not count against those that are still there.
    of_newcomers = {
        generation: pairs
        for generation, found in m.planned.unreachable.items()
        if (pairs := {pair for pair in found if not pair & who.gone})
    }
    chosen = _choose_from_pairs(m, of_newcomers, who.spares, [])
    nodes = {who.nodes[worker] for worker in chosen if worker in who.nodes}
    for worker in sorted(who.spares - set(chosen)):
        if who.nodes.get(worker) in nodes and not find_only_holders(m, {*chosen, worker}):
            chosen.append(worker)
    return tuple(sorted(_choose_from_pairs(m, m.health.unreachable, {*who.members, *who.spares}, chosen)))


def _choose_from_pairs(
    m: RunState, unreachable: Mapping[int, Collection[frozenset[int]]], among: Collection[int], chosen: list[int]
) -> list[int]:
    """`chosen`, and the workers of `among` to give up besides, so that every pair loses one of its workers.

    Only `chosen` if too few generations have failed, or if state would be lost. `unreachable`: generation -> its pairs of
    workers that could not reach each other.
    """
    if len(unreachable) < FAILED_GENERATIONS:
        return chosen
    given_up = m.membership.gone | set(chosen)
    pairs = {pair for found in unreachable.values() for pair in found if not pair & given_up}
    more = list(chosen)
    while pairs:
        times = Counter(worker for pair in pairs for worker in pair if worker in among)
        # Of two with as many broken connections the newer one.
        ranked = sorted(times, key=lambda worker: (times[worker], worker), reverse=True)
        dispensable = [worker for worker in ranked if not find_only_holders(m, {*more, worker})]
        if not dispensable:
            return chosen
        more.append(dispensable[0])
        pairs = {pair for pair in pairs if dispensable[0] not in pair}
    return more


def describe_unreachable_workers(m: RunState) -> str:
    """`workers 0 and 2, 1 and 3`: the pairs that could not reach each other; empty if there are none."""
    pairs = sorted({tuple(sorted(pair)) for found in m.health.unreachable.values() for pair in found})
    return "workers " + ", ".join(" and ".join(map(str, pair)) for pair in pairs) if pairs else ""
