"""The sources of the next generation's state.

They are, in this order: the workers that hold it, the newest complete mirror snapshot, the checkpoint, the initial values.
"""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import dataclass
from typing import TYPE_CHECKING

from raypar.plan.pieces import Holdings, Piece, pieces_nobody_holds

if TYPE_CHECKING:
    from raypar.elastic.run_state import RunState


@dataclass(frozen=True)
class StateSource:
    """A source of the whole state after some number of steps."""

    done: int
    """Number of steps that the state has had."""
    holdings: Holdings
    """Worker -> the pieces that it has; with `from_checkpoint`, the pieces that it reads."""
    from_mirror: bool = False
    """Whether the pieces are those of a mirror snapshot."""
    from_checkpoint: bool = False
    """Whether all workers read the checkpoint; if `done` is the beginning, they make the initial values."""


def find_state_source(m: RunState, need: Holdings) -> StateSource | None:
    """The first source that has all of `need`; None if the state is lost."""
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
    """Worker -> the pieces that it computes with, of workers whose state has had `done` steps and is trusted."""
    return {w: s.pieces for w, s in m.recovery.statuses.items() if s.done == done and w not in m.trust.tainted}


def find_newest_mirror_snapshot(
    m: RunState, need: Holdings, without: Collection[int] = ()
) -> tuple[int, dict[int, tuple[Piece, ...]]] | None:
    """(steps, worker -> pieces) of the newest trusted mirror snapshot that has all of `need`, or None.

    `without`: workers whose pieces do not count.
    """
    statuses = {worker: status for worker, status in m.recovery.statuses.items() if worker not in without}
    steps = {step for s in statuses.values() for step in s.mirror_snapshots}
    if m.trust.doubt:
        m.trust.untrusted_snapshots |= {step for step in steps if step > m.trust.agreed}
    for step in sorted(steps - m.trust.untrusted_snapshots, reverse=True):
        copies = {
            w: s.mirror_snapshots[step] for w, s in statuses.items() if step in s.mirror_snapshots and w not in m.trust.wrong
        }
        if not pieces_nobody_holds(copies, need):
            return step, copies
    return None


def can_restore_from_disk_or_start(m: RunState, done: int | None = None) -> bool:
    """Whether the run can go back to a checkpoint or to its beginning.

    It goes back to the beginning if no step is done, or the very first mirror snapshot, of the first step, is not complete.
    `done`: steps of the state; by default those that the recovery has found.
    """
    near = m.mirror.first == m.policy.steps_before_run and not m.mirror.complete
    return (
        get_trusted_checkpoint_step(m) is not None
        or (m.recovery.done if done is None else done) <= m.policy.steps_before_run
        or near
    )


def get_trusted_checkpoint_step(m: RunState) -> int | None:
    """Steps of the last checkpoint; None if there is none, or it is newer than the last agreement of replicas in doubt."""
    return None if m.progress.saved is not None and m.trust.doubt and m.progress.saved > m.trust.agreed else m.progress.saved


def find_lost_pieces(m: RunState) -> tuple[Piece, ...]:
    """The pieces that are lost for good: no memory, no mirror snapshot and no checkpoint has them."""
    if m.membership.plan is None or can_restore_from_disk_or_start(m):
        return ()
    need = dict(enumerate(m.held_pieces(m.membership.plan)))
    lost = pieces_nobody_holds(find_live_holders(m, m.recovery.done), need)
    return lost if lost and find_newest_mirror_snapshot(m, need) is None else ()
