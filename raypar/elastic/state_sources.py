"""Where the state of the next generation comes from: those that hold it; else the newest complete cut of the mirror; else the
checkpoint, or the very beginning. Decides nothing."""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import dataclass
from typing import TYPE_CHECKING

from raypar.plan.pieces import Holdings, Piece, pieces_nobody_holds

if TYPE_CHECKING:
    from raypar.elastic.run_state import RunState


@dataclass(frozen=True)
class StateSource:
    """Who has what of the state after `done` steps: in memory, in the mirror (`cut`), or on a disk that all read (`load`)."""

    done: int
    holdings: Holdings
    from_mirror: bool = False
    from_checkpoint: bool = False


def find_state_source(m: RunState, need: Holdings) -> StateSource | None:
    """The best source of all of `need`; None when it is lost."""
    done = m.recovery.done
    have = find_live_holders(m, done)
    if not pieces_nobody_holds(have, need):
        return StateSource(done, have)
    found = find_newest_mirror_snapshot(m, need)
    if found is not None:
        return StateSource(*found, from_mirror=True)
    return (
        StateSource(get_trusted_checkpoint_step(m) or m.policy.steps_before_run, need, from_checkpoint=True)
        if can_restore_from_disk_or_start(m)
        else None
    )


def find_live_holders(m: RunState, done: int) -> dict[int, tuple[Piece, ...]]:
    """Who holds what of the state after `done` steps, in memory."""
    return {w: s.pieces for w, s in m.recovery.statuses.items() if s.done == done and w not in m.trust.tainted}


def find_newest_mirror_snapshot(
    m: RunState, need: Holdings, without: Collection[int] = ()
) -> tuple[int, dict[int, tuple[Piece, ...]]] | None:
    """The last step whose cut of the mirror has all of `need`, and who has what of it; `without`: workers that do not count."""
    stands = {worker: stand for worker, stand in m.recovery.statuses.items() if worker not in without}
    steps = {step for s in stands.values() for step in s.mirror_snapshots}
    if m.trust.doubt:
        m.trust.untrusted_snapshots |= {step for step in steps if step > m.trust.agreed}
    for step in sorted(steps - m.trust.untrusted_snapshots, reverse=True):
        copies = {
            w: s.mirror_snapshots[step] for w, s in stands.items() if step in s.mirror_snapshots and w not in m.trust.wrong
        }
        if not pieces_nobody_holds(copies, need):
            return step, copies
    return None


def can_restore_from_disk_or_start(m: RunState, done: int | None = None) -> bool:
    """Whether there is a checkpoint, or the beginning is near: nothing is done, or the first cut, taken there, is under way.

    `done`: steps of the state; by default those that the recovery has found.
    """
    near = m.mirror.first == m.policy.steps_before_run and not m.mirror.complete
    return (
        get_trusted_checkpoint_step(m) is not None
        or (m.recovery.done if done is None else done) <= m.policy.steps_before_run
        or near
    )


def get_trusted_checkpoint_step(m: RunState) -> int | None:
    """Steps of the last checkpoint, if it can be trusted."""
    return None if m.progress.saved is not None and m.trust.doubt and m.progress.saved > m.trust.agreed else m.progress.saved


def find_lost_pieces(m: RunState) -> tuple[Piece, ...]:
    """What is lost for good: in no memory, no cut and no checkpoint. Waiting for workers would not bring it back."""
    if m.membership.plan is None or can_restore_from_disk_or_start(m):
        return ()
    need = dict(enumerate(m.layout(m.membership.plan)))
    lost = pieces_nobody_holds(find_live_holders(m, m.recovery.done), need)
    return lost if lost and find_newest_mirror_snapshot(m, need) is None else ()
