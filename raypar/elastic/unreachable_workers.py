"""Workers that cannot reach each other although the driver reaches all of them, and which of them the run gives up.

If the network is broken only between two machines, all workers answer the driver's pings, but no generation can connect. After
`FAILED_GENERATIONS` such generations the run gives up as few workers as possible, so that all others can reach each other. It
never gives up a worker that holds the only copy of some state.
"""

from __future__ import annotations

from collections import Counter

from raypar.elastic.events import CallFailed
from raypar.elastic.last_copy_holders import find_only_holders
from raypar.elastic.phases import Phase
from raypar.elastic.run_state import RunState
from raypar.errors import CommError

FAILED_GENERATIONS = 2
"""Number of generations in a row that must fail to connect, so that an interruption of a few seconds costs no worker."""


def note_unreachable_workers(m: RunState, event: CallFailed) -> None:
    """Note the pairs of workers that could not connect, if this failed call says which."""
    order = m.recovery.order
    if m.phase is not Phase.ADOPTING or order is None or event.worker is None or not isinstance(event.error, CommError):
        return
    workers = (*order.members, *order.seatless_sources)
    pairs = {frozenset({event.worker, workers[rank]}) for rank in event.error.unreachable_ranks if rank < len(workers)}
    if pairs:
        m.health.unreachable[order.generation] = pairs


def choose_unreachable_workers(m: RunState) -> tuple[int, ...]:
    """The workers to give up. Empty if too few generations have failed to connect, or if every choice would lose state."""
    if len(m.health.unreachable) < FAILED_GENERATIONS:
        return ()
    pairs = {pair for found in m.health.unreachable.values() for pair in found if not pair & m.membership.gone}
    chosen: list[int] = []
    while pairs:
        times = Counter(worker for pair in pairs for worker in pair)
        # Of two with as many broken connections the newer one.
        ranked = sorted(times, key=lambda worker: (times[worker], worker), reverse=True)
        dispensable = [worker for worker in ranked if not find_only_holders(m, {*chosen, worker})]
        if not dispensable:
            return ()
        chosen.append(dispensable[0])
        pairs = {pair for pair in pairs if dispensable[0] not in pair}
    return tuple(chosen)


def describe_unreachable_workers(m: RunState) -> str:
    """`workers 0 and 2, 1 and 3`: the pairs that could not reach each other; empty if there are none."""
    pairs = sorted({tuple(sorted(pair)) for found in m.health.unreachable.values() for pair in found})
    return "workers " + ", ".join(" and ".join(map(str, pair)) for pair in pairs) if pairs else ""
