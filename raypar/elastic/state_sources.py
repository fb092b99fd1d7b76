"""The sources of the next generation's state, and the silent workers that hold the only copy of some of it.

The sources are, in this order: the workers that hold the state, the newest complete mirror snapshot, the checkpoint, the
initial values. `recovery_rules.py` decides how long the run waits for the holder of an only copy.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING

from raypar.elastic.generation_guard import WorkerStatus
from raypar.elastic.mirror_schedule_and_buddies import assign_buddies
from raypar.plan import ParallelPlan
from raypar.plan.ownership import first_rank_with_same_state
from raypar.plan.pieces import Holdings, Piece, count_shared_elements, pieces_nobody_holds, subtract_pieces
from raypar.plan.wording import after_steps, format_worker_numbers, word_form

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
    if have and not pieces_nobody_holds(have, need):
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

    Without a checkpoint it goes back to the beginning if the job allows that, and in any case if no step is done, or the very
    first mirror snapshot, of the first step, is not complete. `done`: steps of the state; by default those that the recovery
    has found.
    """
    near = m.mirror.first == m.policy.steps_before_run and not m.mirror.complete
    return (
        get_trusted_checkpoint_step(m) is not None
        or may_restart(m)
        or (m.recovery.done if done is None else done) <= m.policy.steps_before_run
        or near
    )


def may_restart(m: RunState) -> bool:
    """Whether the job allows the run to begin again with its first step, and that is the job's first one."""
    return m.policy.restarts and not m.policy.steps_before_run and m.progress.saved is None


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


TELL_EVERY_S = 30.0
"""How often people are told again what the run waits for."""


def find_only_holders(m: RunState, silent: Collection[int]) -> tuple[int, ...]:
    """The workers of `silent` without which some of the state would be lost.

    Empty if all of the state is elsewhere: in the workers that answer, in a complete mirror snapshot, or in a checkpoint of
    this very step. Empty too if the state would be incomplete even with the silent workers.
    """
    if m.membership.plan is None or not silent:
        return ()
    answering = {worker: status for worker, status in m.recovery.statuses.items() if worker not in silent}
    done = count_steps_of_answering_workers(m, silent)
    if _needs_no_worker(m, done) and len(answering.keys() - m.membership.leaving) >= m.policy.min_workers:
        return ()
    need = dict(enumerate(m.held_pieces(m.membership.plan)))
    lost = pieces_nobody_holds(_live_pieces(m, answering, done), need)
    if not lost or find_newest_mirror_snapshot(m, need, without=silent) is not None:
        return ()
    held = find_expected_pieces(m)
    in_snapshots = [piece for status in answering.values() for pieces in status.mirror_snapshots.values() for piece in pieces]
    in_silent = [piece for worker in silent for piece in held.get(worker, ())]
    if subtract_pieces(lost, [*in_snapshots, *in_silent]):
        return ()
    return tuple(worker for worker in sorted(silent) if count_shared_elements(lost, held.get(worker, ())))


def steps_are_lost_without(m: RunState, silent: Collection[int]) -> bool:
    """Whether the answering workers lack some of the newest state, so that all workers would go back to older copies."""
    if m.membership.plan is None:
        return False
    done = count_steps_of_answering_workers(m, silent)
    answering = {worker: status for worker, status in m.recovery.statuses.items() if worker not in silent}
    need = dict(enumerate(m.held_pieces(m.membership.plan)))
    return not _needs_no_worker(m, done) and bool(pieces_nobody_holds(_live_pieces(m, answering, done), need))


def _needs_no_worker(m: RunState, done: int) -> bool:
    """Whether the state after `done` steps is the initial one or in a checkpoint, so that no worker's memory is needed."""
    return done <= m.policy.steps_before_run or get_trusted_checkpoint_step(m) == done


def _live_pieces(m: RunState, stands: Mapping[int, WorkerStatus], done: int) -> dict[int, tuple[Piece, ...]]:
    """Worker -> its pieces of the state after `done` steps.

    A worker that has not applied the last step but has kept its gradients counts too, because it can still apply the step.
    """
    sound = {worker: stand for worker, stand in stands.items() if stand.done is not None and worker not in m.trust.tainted}
    return {w: s.pieces for w, s in sound.items() if s.done == done or (s.done == done - 1 and s.can_apply_late)}


def count_steps_of_answering_workers(m: RunState, silent: Collection[int]) -> int:
    """The number of steps after which the workers that answer would continue."""
    stands = {w: s.done for w, s in m.recovery.statuses.items() if w not in silent and w not in m.trust.tainted}
    return max((done for done in stands.values() if done is not None), default=m.progress.committed)


def find_expected_pieces(m: RunState) -> dict[int, list[Piece]]:
    """Worker -> the pieces of state that it should hold, for workers that cannot be asked.

    They are the pieces of its seats, in the plan that trained last and in a plan that was being adopted since, and the
    mirror's copies that it keeps for others.
    """
    found: dict[int, list[Piece]] = {}
    seatings: list[tuple[ParallelPlan, tuple[int, ...]]] = []
    if m.membership.plan is not None:
        seatings.append((m.membership.plan, m.membership.members))
    if m.recovery.former_order is not None:
        seatings.append((m.recovery.former_order.plan, m.recovery.former_order.members))
    for plan, members in seatings:
        held = m.held_pieces(plan)
        for worker, pieces in zip(members, held, strict=True):
            found.setdefault(worker, []).extend(pieces)
        if m.mirror.first is not None or m.mirror.complete:
            keepers = assign_buddies(
                [m.membership.nodes.get(worker, "") for worker in members], first_rank_with_same_state(held)
            )
            for rank, keeper in keepers.items():
                found[members[keeper]].extend(held[rank])
    return found


def describe_wait_for_last_copy(m: RunState, holders: Collection[int], unheard: Collection[int]) -> str:
    """The sentence about the workers that the run waits for: the state that only they hold, and whether they answer pings."""
    held = find_expected_pieces(m)
    pieces = sorted({piece for worker in holders for piece in held[worker]})
    names = ", ".join(map(str, pieces[:2])) + (f" and {len(pieces) - 2} more" if len(pieces) > 2 else "")
    steps = count_steps_of_answering_workers(m, holders)
    what = f"{format_worker_numbers(holders)}: no other memory has the state {after_steps(steps)} ({names})"
    silent = sorted(set(holders) & set(unheard))
    if not silent:
        answers = word_form(holders, "it answers", "they answer")
        return f"{what}; {answers} pings, so {word_form(holders, 'it lives', 'they live')}"
    who = f"{format_worker_numbers(silent)} {word_form(silent, 'answers', 'answer')} no pings"
    return f"{what}; {who}, but nothing says that {word_form(silent, 'its process has', 'their processes have')} ended"


def describe_failed_wait(m: RunState, holders: Collection[int]) -> str:
    """The clause about what happens if the wait for the holders of a last copy ends in vain."""
    saved = get_trusted_checkpoint_step(m)
    if saved is not None:
        return f"then all go back to the checkpoint {after_steps(saved)}"
    durable = can_restore_from_disk_or_start(m, count_steps_of_answering_workers(m, holders))
    return "then all begin again" if durable else "then the run is lost"
