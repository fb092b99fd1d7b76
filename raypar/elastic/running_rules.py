"""The rules of a run whose workers are all well, and of its end. See `machine.py` for the picture, `table.py` for the table."""

from __future__ import annotations

from collections import deque
from typing import TYPE_CHECKING

from raypar.elastic import digest_check, growth_rules, recovery_rules, silent_worker_rules, stragglers
from raypar.elastic.actions import AbortGroups, EmitValidation, Probe, Warn
from raypar.elastic.events import (
    CallFailed,
    CheckpointFailed,
    CheckpointSaved,
    Event,
    GroupsAborted,
    StacksReported,
    StepEmitted,
    StepJournalled,
    StepReported,
    StopRequested,
    Tick,
    ValidationEmitted,
    ValidationReported,
)
from raypar.elastic.phases import Phase, UnexpectedEvent
from raypar.elastic.worker_names import name_workers, verb_form
from raypar.errors import CommTimeout

if TYPE_CHECKING:
    from raypar.elastic.run_machine import RunMachine


def ignore(m: RunMachine, event: Event) -> None:
    """Came too late to matter."""


def ready(m: RunMachine, event: Event) -> None:
    """Start training, or end at once when nothing is left to do."""
    for worker in sorted(m.leaving):
        m.pause_for = f"worker {worker} leaves"
    stragglers.begin_straggler_watch(m)
    m.go(Phase.RUNNING)
    m.advance()


def reported(m: RunMachine, event: Event) -> None:
    """Count a worker's report; the last one of a step commits it."""
    assert isinstance(event, StepReported)
    if event.generation < m.generation:
        return
    if not m.committed <= event.step < m.issued:
        raise UnexpectedEvent(f"{event}: committed {m.committed}, issued {m.issued}")
    m._reports.setdefault(event.step, set()).add(event.worker)
    m.clock.report(event.step, event.mirror_seconds)
    if event.digest is not None:
        m._digests.setdefault(event.step, {})[event.worker] = event.digest
    if event.busy_s is not None:
        m._busy.setdefault(event.step, {})[event.worker] = event.busy_s
    while len(m._reports.get(m.committed, ())) == len(m.members):
        if m.committed == m.clock.last and not digest_check.check_digests(m, m.committed + 1, m._digests.pop(m.committed, {})):
            if m.phase is not Phase.OVER:
                recovery_rules.begin(m, m.doubt)
            return
        del m._reports[m.committed]
        m.step_times.add(event.seconds, len(m.members))
        m.clock.commit(m.committed, event.seconds)
        busy = m._busy.pop(m.committed, {})
        m.commit(m.committed)
        stragglers.check_stragglers(m, busy)
    if m.committed <= m.emitted or m.pause_for is not None:
        m.advance()


def journalled(m: RunMachine, event: Event) -> None:
    """Only now may people see the step."""
    assert isinstance(event, StepJournalled)
    m.see(event.step)


def emitted(m: RunMachine, event: Event) -> None:
    """The step has been seen; go on, or stop if a callback asked for it."""
    assert isinstance(event, StepEmitted)
    m.count_emitted(event)
    m.advance()


def validated(m: RunMachine, event: Event) -> None:
    """All workers have finished the validation pass."""
    assert isinstance(event, ValidationReported)
    if event.generation < m.generation:
        return
    m._answers.add(event.worker)
    if len(m._answers) == len(m.members):
        m.validated = event.done
        m.decide(EmitValidation(event.done), "all workers have validated")


def validation_emitted(m: RunMachine, event: Event) -> None:
    """Next thing due."""
    assert isinstance(event, ValidationEmitted)
    if event.stop is not None and m.stop is None:
        m.stop = StopRequested(event.stop)
    m.serve()


def validation_emitted_late(m: RunMachine, event: Event) -> None:
    """After a recovery; training goes on already."""
    assert isinstance(event, ValidationEmitted)
    if event.stop is not None:
        stop_running(m, StopRequested(event.stop))


def snapshot_taken(m: RunMachine, event: Event) -> None:
    """Training goes on while the files are written."""
    m.serve()


def saved(m: RunMachine, event: Event) -> None:
    """A checkpoint is complete."""
    assert isinstance(event, CheckpointSaved)
    m.saving, m.saved, m._save_error = None, event.done, None
    after_save(m)


def save_failed(m: RunMachine, event: Event) -> None:
    """Training goes on; the last good checkpoint stays."""
    assert isinstance(event, CheckpointFailed)
    waited_for = m.phase is Phase.SAVING and event.done == m.emitted
    m.saving, m._save_error = None, event.error
    kept = f"the one after {m.saved} steps stays" if m.saved else "there is none yet"
    m.decide(Warn(f"the checkpoint after {event.done} steps could not be written ({event.error}); {kept}"), "training goes on")
    if waited_for:
        m.serve()
    else:
        after_save(m)


def after_save(m: RunMachine) -> None:
    """Who waited for the writer goes on."""
    if m.phase is Phase.SAVING:
        m.take_snapshot()
    elif m.phase is Phase.ENDING:
        m.end_if_saved()
    elif m.phase is Phase.FAILING:
        m.conclude()


def stop_running(m: RunMachine, event: Event) -> None:
    """Issue nothing more; what is in flight is finished first."""
    assert isinstance(event, StopRequested)
    if m.stop is None or (event.interrupt and not m.stop.interrupt):
        m.stop = event
        m.stop_at = max(m.issued, m.emitted)
        if m.phase is Phase.FLUSHING:
            m.go(Phase.FLUSHING, deadline_s=event.grace_s if event.interrupt else None)
        m.advance()


def stop_settled(m: RunMachine, event: Event) -> None:
    """Validating, saving or ending: the state is settled, so what is left is to save and end."""
    assert isinstance(event, StopRequested)
    if m.stop is None or (event.interrupt and not m.stop.interrupt):
        m.stop = event
        if event.interrupt and m.phase is Phase.VALIDATING:
            m._deadline_s = m._now_s + event.grace_s


def stop_starting(m: RunMachine, event: Event) -> None:
    """Nothing has been done yet."""
    assert isinstance(event, StopRequested)
    m.over("interrupted" if event.interrupt else "stopped", event.reason)


def failed(m: RunMachine, event: Event) -> None:
    """An elastic run goes on without the worker, if only to save after Ctrl-C; user code and our own mistakes end it."""
    assert isinstance(event, CallFailed)
    if survivable(m, event):
        recovery_rules.disturbed(m, event)
    else:
        m.fail(event)


def survivable(m: RunMachine, event: CallFailed) -> bool:
    """Whether a new generation is an answer: not to what is the end of our own abort."""
    return m.policy.elastic and (event.kind == "lost" or (event.kind == "aborted" and not m._we_aborted))


def failed_for_good(m: RunMachine, event: Event) -> None:
    """Before there is any state, or while the run is being ended."""
    assert isinstance(event, CallFailed)
    m.fail(event)


def failed_saving(m: RunMachine, event: Event) -> None:
    """A worker that dies after the last step has nothing left to lose but its share of the checkpoint. Where others hold that
    state, they write it again."""
    assert isinstance(event, CallFailed)
    if survivable(m, event):
        recovery_rules.disturbed(m, event)
    elif m.saving is None or event.kind == "user":
        m.fail(event)
    else:
        m.failures.append(event)
        m.go(Phase.FAILING, deadline_s=m.policy.save_grace_s)
        m.conclude()


def failed_again(m: RunMachine, event: Event) -> None:
    """Another symptom, or the cause itself."""
    assert isinstance(event, CallFailed)
    m.failures.append(event)
    m.conclude()


def tick_starting(m: RunMachine, event: Event) -> None:
    """The start has deadlines of its own, with better words; only silent workers are looked at."""
    assert isinstance(event, Tick)
    silent_worker_rules.tick(m, event)


def tick_steps(m: RunMachine, event: Event) -> None:
    """A step that takes too long, or an interrupted one whose grace is over; workers that wait for a seat, or are missing."""
    if m._deadline_s is not None and m._now_s >= m._deadline_s:
        abort(m, "the steps in flight did not end within the grace; aborted, they never happened")
        return
    assert isinstance(event, Tick)
    if silent_worker_rules.tick(m, event):
        return
    if m.policy.elastic and m.began_s is None:
        m.hire()
        growth_rules.look_for_growth(m)
    late = m.overdue(m.step_deadline_s())
    if not late and event.unheard:  # two witnesses, neither of whom would do alone so early
        late = tuple(sorted(event.unheard & set(m.overdue(m.silent_deadline_s()))))
    if late and m.policy.elastic:
        waited = m._now_s - m._since_s
        pings = f" and {verb_form(late, 'answers', 'answer')} no pings" * (set(late) <= event.unheard)
        who = f"{name_workers(late)} {verb_form(late, 'has', 'have')}"
        what = f"step {m.committed + 1}: {who} not reported for {waited:.1f} s{pings}"
        recovery_rules.disturbed(m, CallFailed("aborted", CommTimeout(what), generation=m.generation))
    elif late and not m._probing:
        m._probing = True
        m.decide(Probe(late), f"step {m.committed} is over its deadline of {m.step_deadline_s():.0f} s")


def probed(m: RunMachine, event: Event) -> None:
    """A hung worker ends the run."""
    assert isinstance(event, StacksReported)
    m._probing = False
    late = m.overdue(m.step_deadline_s())
    if late and not m.silence:
        who = f"{name_workers(late)} {verb_form(late, 'has', 'have')}"
        error = CommTimeout(
            f"step {m.committed}: {who} not reported within {m.step_deadline_s():.0f} s\n{event.text}",
            cure="look at the stacks above for what they wait for; `raypar resume` goes on from the last checkpoint",
        )
        m.fail(CallFailed("error", error, late[0]))


def tick_waiting(m: RunMachine, event: Event) -> None:
    """Start, validation, snapshot or last checkpoint take too long, or somebody in it hangs."""
    assert isinstance(event, Tick)
    if silent_worker_rules.tick(m, event):
        return
    mute = m.mute() if m.policy.elastic else ()
    if mute:
        what = f"no pings are answered by {name_workers(mute)} while {m.phase.value}"
        recovery_rules.disturbed(m, CallFailed("aborted", CommTimeout(what), generation=m.generation))
        return
    if m._deadline_s is None or m._now_s < m._deadline_s:
        return
    if m.interrupted:
        if m.phase is Phase.VALIDATING:
            abort(m, "the validation pass did not end within the grace")
        else:
            m.over(
                "interrupted",
                f"interrupted; the last checkpoint is of step {m.saved}" if m.saved else "interrupted, nothing saved",
            )
        return
    missing = set(m.members) - m._answers
    error = CommTimeout(
        f"{m.phase.value} did not end within {m._now_s - m._since_s:.0f} s; no answer from {name_workers(missing)}",
        cure="look at the workers' logs; `raypar resume` goes on from the last checkpoint",
    )
    if m.policy.elastic and m.phase is not Phase.ENDING:
        recovery_rules.disturbed(m, CallFailed("aborted", error, generation=m.generation))
    else:
        m.fail(CallFailed("error", error))


def abort(m: RunMachine, reason: str) -> None:
    """Free all workers from the step or pass in flight."""
    m._we_aborted, m._stand = True, None
    m._aborts += 1
    m.go(Phase.ABORTING, deadline_s=m.policy.abort_s)
    m.decide(AbortGroups("interrupted"), reason)


def aborted(m: RunMachine, event: Event) -> None:
    """Where the workers stand; a step that all of them had applied just before is still committed and seen."""
    assert isinstance(event, GroupsAborted)
    m._stand = event.done
    save_where_we_stand(m)


def emitted_aborting(m: RunMachine, event: Event) -> None:
    """The last committed step has been seen."""
    assert isinstance(event, StepEmitted)
    m.emitted = event.step + 1
    save_where_we_stand(m)


def save_where_we_stand(m: RunMachine) -> None:
    """Save once every worker stands at the step people have seen; until then wait, up to the abort's deadline."""
    if m._stand is not None and set(m._stand) == {m.emitted}:
        m.issued = m.committed = m.served = m.stop_at = m.emitted
        m._reports.clear()
        m._due = deque(["end"] if m.emitted in (m.saved, m.saving) else ["save", "end"])
        m.serve()


def tick_aborting(m: RunMachine, event: Event) -> None:
    """A worker that hangs, or is deep in a computation, cannot be asked, or has applied a step that another has not. Of an
    elastic run a new generation, once, finds out who is well, and saves; else there is no new checkpoint."""
    if m._deadline_s is None or m._now_s < m._deadline_s:
        return
    stand = "not all workers answered" if m._stand is None else f"the workers stand at steps {m._stand}"
    what = f"{stand} {m.policy.abort_s} s after the abort"
    if m.policy.elastic and m._aborts == 1:
        recovery_rules.begin(m, what, counts=False)
        return
    left = f"the last checkpoint is of step {m.saved}" if m.saved else "nothing is saved"
    m.over("interrupted", f"interrupted; {what}: {left}")


def tick_failing(m: RunMachine, event: Event) -> None:
    """The root cause did not show up in time: the symptom is reported."""
    m.conclude()
