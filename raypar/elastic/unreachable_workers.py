"""Workers that cannot reach each other although the driver reaches all of them, and those that the run then goes on without.

A network that is broken between two machines only looks well from a third one: everybody answers pings, and no generation can
connect. Once that has happened in `GENERATIONS` generations, as few workers as possible are given up, so that those that are
left reach each other. A worker with the only copy of some state is never one of them.
"""

from __future__ import annotations

from collections import Counter

from raypar.elastic.events import CallFailed
from raypar.elastic.last_copy_holders import find_only_holders
from raypar.elastic.phases import Phase
from raypar.elastic.run_state import RunState
from raypar.errors import CommError

GENERATIONS = 2
"""How many generations in a row must fail to connect: an interruption of a few seconds costs no worker."""


def note_unreachable_workers(m: RunState, event: CallFailed) -> None:
    """Note the pairs of workers of which a failed adoption says that one could not reach the other."""
    order = m.recovery.order
    if m.phase is not Phase.ADOPTING or order is None or event.worker is None or not isinstance(event.error, CommError):
        return
    workers = (*order.members, *order.seatless_sources)
    pairs = {frozenset({event.worker, workers[rank]}) for rank in event.error.unreachable_ranks if rank < len(workers)}
    if pairs:
        m.health.unreachable[order.generation] = pairs


def choose_unreachable_workers(m: RunState) -> tuple[int, ...]:
    """The workers to go on without; empty if connecting has not failed often enough, or all of them are needed."""
    if len(m.health.unreachable) < GENERATIONS:
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
