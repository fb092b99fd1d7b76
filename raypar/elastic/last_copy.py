"""Silent workers that hold the only copy of some state, and the sentences about waiting for them.

`recovery.py` decides how long it waits.
"""

from __future__ import annotations

from collections.abc import Collection
from typing import TYPE_CHECKING

from raypar.elastic import sources
from raypar.elastic.buddies import buddies
from raypar.elastic.holdings import Piece, missing, overlap, without
from raypar.elastic.naming import named, verb
from raypar.plan import ParallelPlan

if TYPE_CHECKING:
    from raypar.elastic.machine import RunMachine


def only_holders(m: RunMachine, silent: Collection[int]) -> tuple[int, ...]:
    """Those of the `silent` workers without whom some of the state would be lost.

    State is lost if the workers that answer have it neither live nor in a complete snapshot of the mirror. A checkpoint of
    this very step, or a run that has made no step, makes up for lost state if enough workers answer to continue.
    """
    if m.plan is None or not silent:
        return ()
    stands = {w: s for w, s in m.recovery.stands.items() if w not in silent}
    done = done_by(m, silent)
    if (done <= m.course.first or sources.saved(m) == done) and len(set(stands) - m.leaving) >= m.course.min_workers:
        return ()
    need = dict(enumerate(m.layout(m.plan)))
    # A worker that has not applied the last step, but kept its gradients, can still apply it.
    states = {w: s for w, s in stands.items() if s.done is not None and w not in m.tainted}
    have = {w: s.pieces for w, s in states.items() if s.done == done or (s.done == done - 1 and s.votable)}
    lost = missing(have, need)
    if not lost or sources.newest_cut(m, need, without=silent) is not None:
        return ()
    held = may_hold(m)
    kept = [piece for s in stands.values() for pieces in s.cuts.values() for piece in pieces]
    if without(lost, [*kept, *(piece for worker in silent for piece in held.get(worker, ()))]):
        return ()  # the state is incomplete even with the silent workers
    return tuple(w for w in sorted(silent) if overlap(lost, held.get(w, ())))


def done_by(m: RunMachine, silent: Collection[int]) -> int:
    """The number of steps after which the workers that answer would continue."""
    stands = {w: s.done for w, s in m.recovery.stands.items() if w not in silent and w not in m.tainted}
    return max((done for done in stands.values() if done is not None), default=m.committed)


def may_hold(m: RunMachine) -> dict[int, list[Piece]]:
    """Worker -> the pieces of state that it should hold; for workers that cannot be asked.

    These are the pieces of its seats, in the plan that trained last and in one that was being adopted since, and the mirror's
    copies that it keeps for others.
    """
    found: dict[int, list[Piece]] = {}
    seatings: list[tuple[ParallelPlan, tuple[int, ...]]] = []
    if m.plan is not None:
        seatings.append((m.plan, m.members))
    if m.recovery.former is not None:
        seatings.append((m.recovery.former.plan, m.recovery.former.members))
    for plan, members in seatings:
        layout = m.layout(plan)
        for worker, pieces in zip(members, layout, strict=True):
            found.setdefault(worker, []).extend(pieces)
        if m.clock.first is not None or m.clock.complete:
            keepers = buddies([m.nodes.get(worker, "") for worker in members], plan.copies)
            for rank, keeper in keepers.items():
                found[members[keeper]].extend(layout[rank])
    return found


def waiting_text(m: RunMachine, holders: Collection[int], unheard: Collection[int]) -> str:
    """The sentence about the workers waited for: their state, and whether they answer pings."""
    held = may_hold(m)
    pieces = sorted({piece for worker in holders for piece in held[worker]})
    names = ", ".join(map(str, pieces[:2])) + (f" and {len(pieces) - 2} more" if len(pieces) > 2 else "")
    what = f"{named(holders)}: no other memory has the state after {done_by(m, holders)} steps ({names})"
    silent = sorted(set(holders) & set(unheard))
    if not silent:
        return f"{what}; {verb(holders, 'it answers', 'they answer')} pings, so {verb(holders, 'it lives', 'they live')}"
    who = f"{named(silent)} {verb(silent, 'answers', 'answer')} no pings"
    return f"{what}; {who}, but nothing says that {verb(silent, 'its process has', 'their processes have')} ended"


def outcome_text(m: RunMachine, holders: Collection[int]) -> str:
    """The sentence about what happens when the wait for them ends in vain."""
    saved = sources.saved(m)
    if saved is not None:
        return f"then all go back to the checkpoint after {saved} steps"
    return "then all begin again" if sources.durable(m, done_by(m, holders)) else "then the run is lost"
