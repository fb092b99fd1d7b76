"""The flow of steps: issuing and committing them, saving and validating between them, and ending the run after the last one.

Step n+2 is issued when step n has been emitted, so one call always waits at each worker while another runs. A stop that a
callback of step n asks for therefore ends the run after exactly one more step, on every cluster.
"""

from __future__ import annotations

import math
from collections import deque

from raypar.elastic.actions import (
    CompareReplayedStep,
    RunStep,
    StartCheckpoint,
    Validate,
    WarnUser,
    WriteJournal,
)
from raypar.elastic.deadlines import interrupt_grace_s
from raypar.elastic.events import StepEmitted, StopRequested
from raypar.elastic.failures import begin_recovery, end_recovery, is_caused_by_worker_loss
from raypar.elastic.hire_and_release_workers import start_missing_workers
from raypar.elastic.phases import Phase, UnexpectedEvent
from raypar.elastic.run_state import Due, RunState
from raypar.errors import CheckpointError, ConfigError, StateNotKeptError, UnreadableStateError
from raypar.plan.wording import after_steps, count_noun

MAX_OPEN_STEPS = 2
"""The most steps that a worker has been called for and has not finished: one runs, one waits."""
DUE_WORK: dict[Due, Phase] = {"save": Phase.SAVING, "validate": Phase.VALIDATING, "end": Phase.ENDING}
"""Work that is due -> the phase in which it is done."""


def issue_steps(m: RunState) -> Phase | None:
    """Issue the steps that may be issued. Returns the phase of the work that is due if a flush point has been reached.

    A planned change of members comes first: it begins once no step is in flight.
    """
    p = m.progress
    if m.planned.reason is not None:
        return begin_recovery(m, m.planned.reason, counts=False) if p.committed == p.issued else None
    if m.sharing.plan is not None:
        if m.stopping.request is None and p.issued < get_final_step_count(m):
            return Phase.REBALANCING if p.committed == p.issued else None
        m.sharing.forget()
    again = p.doubted_validations[:1]
    barrier = max(min([step_of_next_save_or_validation(m), *again]), p.committed)
    while p.issued < min(barrier, min(p.emitted, p.committed) + MAX_OPEN_STEPS):
        saved_next = p.issued + 1 in next_saved_steps(m)
        if saved_next and m.mirror.awaits_report:
            return None  # only one mirror snapshot at a time is compared
        if p.issued == p.committed:
            m.timer.since_s = m.timer.now_s  # the time of callbacks does not count against workers
        alone = len(m.membership.members) == 1  # nobody would keep a copy
        into_mirror = not alone and m.mirror.begin_if_due(p.issued, saved_next)
        m.decide(RunStep(p.issued, into_mirror), f"step {p.issued} is within {MAX_OPEN_STEPS} of the last one seen by all")
        p.issued += 1
    if again and p.committed == p.issued == again[0]:
        p.due = deque(["validate"])
        return choose_due_work(m)
    seen = p.emitted == (p.journalled if m.recovery.not_kept else p.committed)
    if seen and p.committed == p.issued == barrier:
        p.due = list_due_saves_and_validations(m, barrier)
        p.served_flush_point = barrier
        return choose_due_work(m)
    return Phase.FLUSHING if p.issued == barrier and m.phase is Phase.RUNNING else None


def let_open_steps_end(m: RunState) -> Phase | None:
    """Wait for the steps in flight; after Ctrl-C they have the grace period to end. Perhaps none is left."""
    request = m.stopping.request
    m.timer.limit(interrupt_grace_s(m, request.grace_s) if request is not None and request.interrupt else None)
    return issue_steps(m)


def get_final_step_count(m: RunState) -> int:
    """The number of steps after which the run ends, as far as it is known now."""
    return m.policy.end_step if m.stopping.stop_step is None else m.stopping.stop_step


def step_of_next_save_or_validation(m: RunState) -> int:
    """The next flush point: no step beyond this number is issued before saving and validation are done there."""
    periods = (m.policy.validate_every if m.policy.validates else 0, m.policy.save_every)
    served = max(
        m.progress.served_flush_point, m.progress.emitted - 1
    )  # no step beyond a flush point is issued before it was served
    return min([get_final_step_count(m), *((served // every + 1) * every for every in periods if every)])


def next_saved_steps(m: RunState) -> tuple[int, ...]:
    """The numbers of steps after which the state is saved next; the replicas are compared there before."""
    end, every = get_final_step_count(m), m.policy.save_every
    return (end, (m.progress.issued // every + 1) * every) if every else (end,)


def list_due_saves_and_validations(m: RunState, done: int) -> deque[Due]:
    """The work that is due after `done` steps, in order.

    Saving comes first: a failure in a validation, or in a callback after it, must not lose the training.
    """
    policy, due, stop_at = m.policy, deque[Due](), m.stopping.stop_step
    if policy.forward_passes:
        left = m.progress.passes < policy.forward_passes and m.stopping.request is None
        return deque(["validate"] if left else ["end"])
    cut_short = stop_at is not None and done >= stop_at and done < policy.job_steps
    ends = cut_short or done >= policy.end_step
    save_now = policy.save_every and done % policy.save_every == 0
    save_last = ends and (policy.save_at_end or done < policy.job_steps)
    if done not in (m.progress.saved, m.progress.saving) and (save_now or save_last or done == m.progress.best):
        due.append("save")
    every = policy.validate_every
    validate_now = (every and done % every == 0) or done == policy.job_steps
    fresh = (done > policy.steps_before_run or policy.validates_first) and m.progress.validated != done
    if policy.validates and fresh and validate_now and not m.stopping.interrupted:
        due.append("validate")
    if ends:
        due.append("end")
    return due


def choose_due_work(m: RunState) -> Phase:
    """The phase of the next work that is due at this flush point, or of training if there is none. No step is in flight."""
    p = m.progress
    done = p.ends_at
    if not p.due and m.stopping.request is not None and m.stopping.stop_step is None:
        if done < p.emitted and not m.recovery.not_kept:  # in a replay: what people have seen is executed again first
            m.stopping.stop_step = p.emitted
            return Phase.FLUSHING
        m.stopping.stop_step = done
        p.due = deque(["end"] if m.policy.forward_passes or done in (p.saved, p.saving) else ["save", "end"])
    if not p.due:
        return Phase.RUNNING
    p.answers = set()
    return DUE_WORK[p.due.popleft()]


def begin_validation(m: RunState) -> None:
    """Have the workers run a validation pass."""
    m.timer.limit(m.policy.pass_deadline_s)
    m.decide(Validate(m.progress.ends_at, m.progress.passes), f"it is due {after_steps(m.progress.ends_at)}")


def begin_due_checkpoint(m: RunState) -> None:
    """Have the workers copy their state, once the checkpoint before has been written."""
    m.timer.limit(m.policy.pass_deadline_s)
    if m.progress.saving is None:
        begin_checkpoint(m)


def wait_for_last_checkpoint(m: RunState) -> Phase | None:
    """Wait for the last checkpoint, if one is being written."""
    m.timer.limit(m.policy.pass_deadline_s)
    return end_if_saved(m)


def begin_checkpoint(m: RunState) -> None:
    """Begin a checkpoint. Only one is written at a time."""
    done = m.progress.saving = m.progress.ends_at
    m.decide(StartCheckpoint(done), f"a checkpoint is due {after_steps(done)}")


def end_if_saved(m: RunState) -> Phase | None:
    """End the run, unless a checkpoint is still being written."""
    p, request = m.progress, m.stopping.request
    if p.saving is not None:
        return None
    done = p.ends_at
    if p.save_error is not None and p.saved != done:
        if m.policy.elastic and is_caused_by_worker_loss(p.save_error):
            p.save_error = None
            return begin_recovery(m, "a worker was lost with its share of the last checkpoint; the others hold the state")
        if wait_for_disk(m):
            return None
        kept = f"the checkpoint {after_steps(p.saved)} is good" if p.saved else "there is no earlier checkpoint"
        return m.end_run("failed", f"the last checkpoint could not be written; {kept}", explain_unsaved_state(m, p.save_error))
    if request is not None:
        return m.end_run("interrupted" if request.interrupt else "stopped", request.reason)
    if m.policy.forward_passes:
        return m.end_run("done", f"all of {count_noun(m.policy.forward_passes, 'pass', 'passes')} are made")
    if done < m.policy.job_steps:
        return m.end_run("stopped", f"asked to stop after {count_noun(done, 'step')}")
    return m.end_run("done", "the only step is done" if done == 1 else f"all {count_noun(done, 'step')} are done")


def describe_lost_steps(lost: int, done: int) -> str:
    """`all 3 steps are lost`, `1 of 2 steps is lost`. `lost`: from 1 to `done`."""
    if lost < done:
        return f"{lost} of {done} steps {'is' if lost == 1 else 'are'} lost"
    return "the only step is lost" if done == 1 else f"all {count_noun(done, 'step')} are lost"


def explain_unsaved_state(m: RunState, error: Exception) -> Exception:
    """The error of a run whose last checkpoint failed with `error`; if the disk is the cause, also what is lost with it."""
    if isinstance(error, StateNotKeptError) or not isinstance(error, (CheckpointError, OSError)):
        return error
    p = m.progress
    what, cure = (error.what, error.cure) if isinstance(error, CheckpointError) else (str(error), "free disk space")
    saved = p.saved or m.policy.steps_before_run
    lost = describe_lost_steps(p.emitted - saved, p.emitted)
    tried = f" within {m.policy.save_wait_s:.0f} s" if p.unsaved_since_s is not None and not m.stopping.interrupted else ""
    resume = f"; then `raypar resume` goes on from the checkpoint {after_steps(saved)}" if saved else ""
    made = CheckpointError(f"the last checkpoint could not be written{tried}, and {lost}: {what}", cure=f"{cure}{resume}")
    made.__cause__ = error
    return made


def wait_for_disk(m: RunState) -> bool:
    """Schedule another attempt at the last checkpoint, which could not be written. False if the run waits no longer.

    The workers still hold the state, so nothing is lost if the disk has room, or is available, in time. A run does not wait
    after Ctrl-C.
    """
    p, now_s = m.progress, m.timer.now_s
    since_s = now_s if p.unsaved_since_s is None else p.unsaved_since_s
    left_s = m.policy.save_wait_s - (now_s - since_s)
    if left_s <= 0 or m.stopping.interrupted or isinstance(p.save_error, StateNotKeptError | UnreadableStateError):
        return False
    minutes = [math.ceil(s / 60.0) for s in (left_s, left_s + m.policy.save_retry_s)]
    if p.unsaved_since_s is None or minutes[0] != minutes[1]:  # again every minute
        m.decide(
            WarnUser(
                f"the state {after_steps(p.emitted)} is in the workers' memory only: it is saved as soon as its checkpoint can "
                f"be written, which is tried every {m.policy.save_retry_s:.0f} s; {left_s:.0f} s left, then the run ends "
                f"without it ({describe_last_checkpoint(m)})\n  cure: {_how_to_make_room(m)}"
            ),
            "the run would lose what was trained since then",
        )
    p.unsaved_since_s, p.retry_save_at_s, m.timer.deadline_s = since_s, now_s + m.policy.save_retry_s, None
    return True


def _how_to_make_room(m: RunState) -> str:
    """What lets the last checkpoint be written: room in the run's folder, or in a folder of the job's."""
    error = m.progress.save_error
    if isinstance(error, ConfigError):
        return f"make room there while the run waits: {error.what}"
    return "free disk space, or make the run folder writable"


def retry_last_checkpoint(m: RunState) -> Phase | None:
    """Start the next attempt at the last checkpoint if it is due, or end the run after Ctrl-C.

    If the attempt fails, `end_if_saved` decides again.
    """
    p = m.progress
    assert p.retry_save_at_s is not None
    if m.stopping.interrupted:
        p.retry_save_at_s = None
        return end_if_saved(m)
    if m.timer.now_s < p.retry_save_at_s:
        return None
    p.retry_save_at_s = p.save_error = None
    p.due = deque(["save", "end"])
    return choose_due_work(m)


def describe_last_checkpoint(m: RunState) -> str:
    """What is left of a run that cannot save its state."""
    return f"the last checkpoint is of step {m.progress.saved}" if m.progress.saved else "nothing is saved"


def commit_step(m: RunState, step: int) -> None:
    """Count `step` as applied by every worker; journal a new step, compare a replayed one with the journal."""
    p, health, now_s = m.progress, m.health, m.timer.now_s
    p.committed = step + 1
    if step >= p.journalled:
        health.attempts = 0
        health.unreachable.clear()
        health.deaths.clear()
        health.next_step_least_limit_s = 0.0
    m.timer.since_s, health.slow_sample_from_s = now_s, None
    end_recovery(m, step)
    p.last_commit_s = now_s
    start_missing_workers(m)
    if step < p.journalled:
        m.decide(CompareReplayedStep(step, step in m.trust.doubted_steps), f"step {step} was seen before the roll-back")
    else:
        p.journalled = step + 1
        m.decide(WriteJournal(step), f"all {len(m.membership.members)} workers hold step {step}")


def record_emitted_step(m: RunState, event: StepEmitted) -> None:
    """Count a step as emitted; if its callback asked to stop, the run ends after one more step. No step may be left out."""
    p, stopping = m.progress, m.stopping
    if event.step > p.emitted:
        raise UnexpectedEvent(f"{event}, but step {p.emitted} has not been seen")
    p.emitted = max(p.emitted, event.step + 1)
    if event.stop is not None and stopping.request is None:
        stopping.request = StopRequested(event.stop)
        stopping.stop_step = max(min(step_of_next_save_or_validation(m), event.step + MAX_OPEN_STEPS), p.committed, p.emitted)
