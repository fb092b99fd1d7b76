"""Rules for training while all workers are well, and for the end of the run."""

from __future__ import annotations

from collections import deque

from raypar.elastic.actions import AbortGroups, EmitStep, EmitValidation, RequestStacks, WarnUser
from raypar.elastic.deadlines import (
    extend_step_for_slow_sample,
    find_mute_workers,
    find_overdue_workers,
    silent_deadline_s,
    step_deadline_s,
)
from raypar.elastic.events import (
    AllWorkersCopiedState,
    CallFailed,
    CheckpointFailed,
    CheckpointSaved,
    FirstWorkersPlaced,
    GroupsAborted,
    RunEvent,
    StacksReported,
    StepEmitted,
    StepJournalled,
    StepReported,
    StopRequested,
    Tick,
    ValidationEmitted,
    ValidationReported,
    WorkersReady,
)
from raypar.elastic.failures import begin_recovery, end_run_once_cause_is_known, fail_run, recover_from_failure
from raypar.elastic.hire_and_release_workers import desired_capacity_of_run, release_workers, start_workers
from raypar.elastic.membership_rules import (
    ask_for_larger_plan,
    check_stragglers,
    give_up_larger_plan,
    seat_on_demand_workers,
)
from raypar.elastic.phases import Phase, UnexpectedEvent
from raypar.elastic.replica_digests import compare_replica_digests, end_run_if_doubts_stay
from raypar.elastic.run_state import RunState
from raypar.elastic.step_flow_rules import (
    begin_checkpoint,
    choose_due_work,
    commit_step,
    describe_last_checkpoint,
    end_if_saved,
    issue_steps,
    record_emitted_step,
    retry_last_checkpoint,
)
from raypar.elastic.wait_for_last_copies import check_silent_worker_wait, waits_for_silent_workers
from raypar.errors import CommTimeout, RayparError
from raypar.plan.wording import after_steps, format_worker_numbers, word_form


def ignore_event(m: RunState, event: RunEvent) -> None:
    """Do nothing: the event came too late to matter."""


# -- steps ---------------------------------------------------------------------------------------------------------------


def note_first_workers(m: RunState, event: FirstWorkersPlaced) -> None:
    """Note the first plan and its members. The others join while the first ones start or train."""
    who, hiring = m.membership, m.hiring
    who.plan, who.members = event.plan, event.members
    who.generation = event.claimed
    for group in event.groups:
        hiring.ask_for(group, on_demand=group[0] in event.on_demand)
    hiring.starting.difference_update(event.members)
    hiring.placed.update(event.placed)


def begin_first_generation(m: RunState, event: WorkersReady) -> Phase:
    """Begin the first generation as every later one: claim it, ask where the workers stand, and have them adopt its plan."""
    return Phase.CLAIMING


def count_step_report(m: RunState, event: StepReported) -> Phase | None:
    """Count workers' reports of a step; the last report commits the step."""
    p, members = m.progress, m.membership.members
    if event.generation < m.membership.generation:
        return None
    if not p.committed <= event.step < p.issued:
        raise UnexpectedEvent(f"{event}: committed {p.committed}, issued {p.issued}")
    p.reports.setdefault(event.step, set()).update(event.workers)
    m.mirror.report(event.step, event.mirror_seconds)
    if event.digests:
        p.digests.setdefault(event.step, {}).update(event.digests)
    p.busy_s.setdefault(event.step, {}).update(event.busy_s)
    while len(p.reports.get(p.committed, ())) == len(members):
        if p.committed == m.mirror.last and not compare_replica_digests(m, p.committed + 1, p.digests.pop(p.committed, {})):
            return end_run_if_doubts_stay(m) or begin_recovery(m, m.trust.doubt)
        del p.reports[p.committed]
        if m.health.slow_sample_from_s is None:  # else its time says nothing about other steps
            m.step_times.add(event.seconds, len(members))
        m.mirror.commit(p.committed, event.seconds)
        busy_s = p.busy_s.pop(p.committed, {})
        commit_step(m, p.committed)
        check_stragglers(m, busy_s)
    change = m.planned.reason is not None or m.sharing.plan is not None
    return issue_steps(m) if p.committed <= p.emitted or change else None


def emit_step(m: RunState, event: StepJournalled) -> None:
    """Emit a step, now that it is in the journal."""
    m.decide(EmitStep(event.step), f"step {event.step} is in the journal")


def count_emitted_step(m: RunState, event: StepEmitted) -> Phase | None:
    """Count a step as emitted, and issue further steps unless a callback has asked to stop."""
    record_emitted_step(m, event)
    return issue_steps(m)


def check_step_deadlines(m: RunState, event: Tick) -> Phase | None:
    """Act on overdue steps and on the end of the grace period after Ctrl-C; start missing workers."""
    if m.timer.expired:
        return end_grace_after_interrupt(m)
    if waits_for_silent_workers(m):
        return check_silent_worker_wait(m, event)
    if m.policy.elastic and m.health.disturbed_at_s is None:
        give_up_larger_plan(m)
        following = seat_on_demand_workers(m)
        if following is not None:
            return following
        wanted = desired_capacity_of_run(m)
        start_workers(m, wanted)
        release_workers(m, wanted)
        ask_for_larger_plan(m, wanted)
    if extend_step_for_slow_sample(m, event):
        late = find_mute_workers(m) if m.policy.elastic else ()
    else:
        late = find_overdue_workers(m, step_deadline_s(m))
    if not late and event.unheard:  # late and silent: two signs together justify a shorter limit
        late = tuple(sorted(event.unheard & set(find_overdue_workers(m, silent_deadline_s(m)))))
    if late and m.policy.elastic:
        pings = f" and {word_form(late, 'answers', 'answer')} no pings" * (set(late) <= event.unheard)
        who = f"{format_worker_numbers(late)} {word_form(late, 'has', 'have')}"
        what = f"step {m.progress.committed + 1}: {who} not reported for {m.timer.elapsed_s:.1f} s{pings}"
        return recover_from_failure(m, CallFailed("aborted", CommTimeout(what), generation=m.membership.generation))
    if late and not m.health.probing:
        m.health.probing = True
        m.decide(RequestStacks(late), f"step {m.progress.committed} is over its deadline of {step_deadline_s(m):.0f} s")
    return None


def end_grace_after_interrupt(m: RunState) -> Phase | None:
    """Abort the steps in flight, which then never happened; if all workers have applied them, wait for callbacks."""
    if m.progress.committed < m.progress.issued:
        return Phase.ABORTING
    return wait_for_callbacks_after_interrupt(m, f"step {m.progress.emitted + 1}")


def wait_for_callbacks_after_interrupt(m: RunState, what: str) -> Phase | None:
    """Wait up to `callbacks_s` for the callbacks of `what`, after which the state is saved; else end the run without that."""
    if not m.stopping.waits_for_callbacks:
        m.stopping.waits_for_callbacks = True
        m.timer.limit(m.policy.callbacks_s)
        return None
    late = f"callbacks of {what} have not returned within {m.policy.callbacks_s:.0f} s"
    return m.end_run("interrupted", f"interrupted; {late}: {describe_last_checkpoint(m)}")


def fail_run_on_hung_workers(m: RunState, event: StacksReported) -> Phase | None:
    """End the run if workers are still overdue; the error shows their stacks."""
    m.health.probing = False
    late = find_overdue_workers(m, step_deadline_s(m))
    if not late or m.health.silent_since_s:
        return None
    who = f"{format_worker_numbers(late)} {word_form(late, 'has', 'have')}"
    error = CommTimeout(
        f"step {m.progress.committed}: {who} not reported within {step_deadline_s(m):.0f} s\n{event.text}",
        cure="look at the stacks above for what they wait for; `raypar resume` goes on from the last checkpoint",
    )
    return fail_run(m, CallFailed("error", error, late[0]))


# -- what is due between two steps -------------------------------------------------------------------------------------------


def count_validation(m: RunState, event: ValidationReported) -> None:
    """Count workers' validation passes; with the last worker the loss is emitted."""
    p = m.progress
    if event.generation < m.membership.generation:
        return
    p.answers.update(event.workers)
    if len(p.answers) == len(m.membership.members):
        again, number = event.done in p.doubted_validations, p.passes
        p.doubted_validations = tuple(done for done in p.doubted_validations if done > event.done)
        p.validated = max(event.done, p.validated or 0)
        if m.policy.forward_passes:
            p.passes += 1
            m.health.attempts = 0
            m.health.deaths.clear()
        if not m.stopping.interrupted:
            m.timer.deadline_s = None  # callbacks may take as long as they like
        m.decide(EmitValidation(event.done, number, again), "all workers have validated")


def finish_validation(m: RunState, event: ValidationEmitted) -> Phase:
    """Begin the next work that is due; a callback of the validation may have asked to stop, and a best state is saved."""
    p = m.progress
    if event.is_best:
        p.best = event.done
        if event.done == p.ends_at and event.done not in (p.saved, p.saving) and "save" not in p.due:
            p.due.appendleft("save")
    if event.stop is not None and m.stopping.request is None:
        m.stopping.request = StopRequested(event.stop)
    return choose_due_work(m)


def apply_late_validation_stop(m: RunState, event: ValidationEmitted) -> Phase | None:
    """Stop if a validation's callback asked for it although its callbacks outlasted a recovery and training goes on already."""
    return issue_no_more_steps(m, StopRequested(event.stop)) if event.stop is not None else None


def continue_after_snapshot(m: RunState, event: AllWorkersCopiedState) -> Phase:
    """Begin the next work that is due, while the checkpoint's files are written."""
    return choose_due_work(m)


def record_checkpoint(m: RunState, event: CheckpointSaved) -> Phase | None:
    """Remember a complete checkpoint."""
    m.progress.saving, m.progress.saved, m.progress.save_error = None, event.done, None
    m.progress.unsaved_since_s = m.progress.retry_save_at_s = None
    return continue_after_save(m)


def report_failed_checkpoint(m: RunState, event: CheckpointFailed) -> Phase | None:
    """Warn that a checkpoint failed. Training goes on, and the last good checkpoint stays."""
    p = m.progress
    waited_for = m.phase is Phase.SAVING and event.done == p.emitted
    p.saving, p.save_error = None, event.error
    kept = f"the one {after_steps(p.saved)} stays" if p.saved else "there is none yet"
    if p.unsaved_since_s is None:  # else people know
        what, cure = (e.what, e.cure) if isinstance(e := event.error, RayparError) else (str(e), "")
        text = f"the checkpoint {after_steps(event.done)} could not be written ({what}); {kept}"
        m.decide(WarnUser(f"{text}\n  cure: {cure}" if cure else text), "training goes on")
    return choose_due_work(m) if waited_for else continue_after_save(m)


def continue_after_save(m: RunState) -> Phase | None:
    """Go on with a phase that waits for the checkpoint writer."""
    if m.phase is Phase.ENDING:
        return end_if_saved(m)
    if m.phase is Phase.FAILING:
        return end_run_once_cause_is_known(m)
    if m.phase is Phase.SAVING:
        begin_checkpoint(m)
    return None


def check_save_or_validation_deadline(m: RunState, event: Tick) -> Phase | None:
    """Act on a validation, a copy of the state or a last checkpoint that takes too long, and on workers that hang in it."""
    if waits_for_silent_workers(m):
        return check_silent_worker_wait(m, event)
    generation = m.membership.generation
    mute = find_mute_workers(m) if m.policy.elastic else ()
    if mute:
        what = f"no pings are answered by {format_worker_numbers(mute)} while {m.phase.value}"
        return recover_from_failure(m, CallFailed("aborted", CommTimeout(what), generation=generation))
    if m.phase is Phase.ENDING and m.progress.retry_save_at_s is not None:
        return retry_last_checkpoint(m)
    if not m.timer.expired:
        return None
    saved = m.progress.saved
    if m.stopping.interrupted:
        if m.phase is Phase.VALIDATING and m.progress.answers >= set(m.membership.members):
            return wait_for_callbacks_after_interrupt(m, "the validation")
        if m.phase is Phase.VALIDATING:
            return Phase.ABORTING
        return m.end_run(
            "interrupted", f"interrupted; the last checkpoint is of step {saved}" if saved else "interrupted, nothing saved"
        )
    missing = set(m.membership.members) - m.progress.answers
    error = CommTimeout(
        f"{m.phase.value} did not end within {m.timer.elapsed_s:.0f} s; no answer from {format_worker_numbers(missing)}",
        cure="look at the workers' logs; `raypar resume` goes on from the last checkpoint",
    )
    if m.policy.elastic and m.phase is not Phase.ENDING:
        return recover_from_failure(m, CallFailed("aborted", error, generation=generation))
    return fail_run(m, CallFailed("error", error))


def check_silent_workers_at_start(m: RunState, event: Tick) -> Phase | None:
    """Act on silent workers during the start, whose time limits are the driver's."""
    return check_silent_worker_wait(m, event) if waits_for_silent_workers(m) else None


# -- requests to stop --------------------------------------------------------------------------------------------------------


def stop_before_start(m: RunState, event: StopRequested) -> Phase:
    """End the run at once: no step has been issued yet."""
    return m.end_run("interrupted" if event.interrupt else "stopped", event.reason)


def stop_after_open_steps(m: RunState, event: StopRequested) -> Phase | None:
    """End the run after the steps in flight."""
    return issue_no_more_steps(m, event)


def issue_no_more_steps(m: RunState, request: StopRequested) -> Phase | None:
    """Issue no more steps: the run ends after those in flight, which after Ctrl-C have the grace period from now on.

    Only the first request counts, or the Ctrl-C that comes after it.
    """
    p, stopping = m.progress, m.stopping
    if stopping.request is not None and (stopping.interrupted or not request.interrupt):
        return None
    stopping.request = request
    stopping.stop_step = max(p.issued, p.emitted)
    return Phase.FLUSHING if m.phase is Phase.FLUSHING else issue_steps(m)


def stop_after_save_or_validation(m: RunState, event: StopRequested) -> None:
    """End the run after the present saving or validation; after Ctrl-C a validation has the grace period to end."""
    stopping = m.stopping
    if stopping.request is None or (event.interrupt and not stopping.interrupted):
        stopping.request = event
        if event.interrupt and m.phase is Phase.VALIDATING:
            m.timer.limit(event.grace_s)


# -- aborted steps -----------------------------------------------------------------------------------------------------------


def abort_open_work(m: RunState) -> None:
    """Abort the steps or the validation pass in flight on all workers: they did not end within the grace."""
    m.health.aborted_by_us, m.health.applied_after_abort = True, None
    m.health.aborts += 1
    m.timer.limit(m.policy.abort_s)
    if m.progress.committed < m.progress.issued:
        reason = "the steps in flight did not end within the grace; aborted, they never happened"
    else:
        reason = "the validation pass did not end within the grace"
    m.decide(AbortGroups("interrupted"), reason)


def note_applied_steps(m: RunState, event: GroupsAborted) -> Phase | None:
    """Record the steps that workers have applied. A step that all of them had just applied is still committed and emitted."""
    m.health.applied_after_abort = event.done
    return save_if_all_at_same_step(m)


def count_emitted_step_while_aborting(m: RunState, event: StepEmitted) -> Phase | None:
    """Count the last committed step as emitted."""
    m.progress.emitted = event.step + 1
    return save_if_all_at_same_step(m)


def save_if_all_at_same_step(m: RunState) -> Phase | None:
    """Save if every worker has applied exactly the emitted steps; else wait, up to the abort's time limit."""
    p, applied = m.progress, m.health.applied_after_abort
    if applied is None or set(applied) != {p.emitted}:
        return None
    p.issued = p.committed = p.served_flush_point = m.stopping.stop_step = p.emitted
    p.reports.clear()
    p.due = deque(["end"] if m.policy.forward_passes or p.emitted in (p.saved, p.saving) else ["save", "end"])
    return choose_due_work(m)


def check_abort_deadline(m: RunState, event: Tick) -> Phase | None:
    """End the wait after an abort if it takes too long: a worker hangs, computes for long, or has applied one step more.

    An elastic run begins one recovery, which finds out which workers are well, and saves; else there is no new checkpoint.
    """
    if not m.timer.expired:
        return None
    applied = m.health.applied_after_abort
    found = "not all workers answered" if applied is None else f"the workers stand at steps {applied}"
    what = f"{found} {m.policy.abort_s} s after the abort"
    if m.policy.elastic and m.health.aborts == 1:
        return begin_recovery(m, what, counts=False)
    return m.end_run("interrupted", f"interrupted; {what}: {describe_last_checkpoint(m)}")
