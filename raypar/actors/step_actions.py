"""Carries out what the run machine decides about steps: call the workers, keep the journal, show what came of it."""

from __future__ import annotations

import time
from collections.abc import Collection, Mapping
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

from raypar.actors.background_tasks import BackgroundTasks
from raypar.actors.events_for_client import EventFeed
from raypar.actors.generation_change import GenerationChange
from raypar.actors.messages import StepCall
from raypar.actors.run_recorder import RunRecorder
from raypar.actors.run_state_in_ray_kv import Journal
from raypar.actors.side_effect_thread import SideEffectThread
from raypar.actors.step_reports import StepReports
from raypar.actors.worker_calls import WorkerCalls
from raypar.elastic import actions as do
from raypar.elastic import events as on
from raypar.elastic.run_machine import RunMachine
from raypar.errors import RayparError
from raypar.plan.wording import after_steps
from raypar.record.events import Note, ReplayProgress, RunWarning, Wait

if TYPE_CHECKING:
    from raypar.worker.worker_reports import Report


@dataclass
class StepActions:
    """Steps, validations, aborts, and what people are told about them. Outcomes become events of the run machine."""

    machine: RunMachine
    """Knows the generation and its members."""
    calls: WorkerCalls
    """Calls the workers."""
    reports: StepReports
    """Keeps the workers' reports until people have seen the step."""
    journal: Journal
    """Gets every committed step."""
    recorder: RunRecorder
    """Writes metrics and calls callbacks."""
    side_effects: SideEffectThread
    """The thread in which the recorder runs."""
    tasks: BackgroundTasks
    """Work beside the event loop; posts events."""
    feed: EventFeed
    """What the client is told."""
    generations: GenerationChange
    """Knows the first step of the present generation; prepares for the next one."""
    traced_steps: Collection[int]
    """Steps whose instructions are timed."""
    step_calls: int = 0
    """Calls to workers for steps, for the report at the end."""
    _last_call: StepCall | None = None
    """The last call for a step, which the next one carries."""

    def run_step(self, action: do.RunStep, reason: str) -> None:
        """Call every worker for a step."""
        step, generation = action.step, self.machine.membership.generation
        samples = self.reports.samples
        cursors = samples is not None and samples.wants_cursors(step)
        try:
            validated = self.reports.validated_before(step)
        except RayparError as error:
            self.tasks.post(on.CallFailed("error", error))
            return
        trace, before = step in self.traced_steps, self._last_call
        self._last_call = StepCall(generation, step, trace, action.into_mirror, cursors, validated)
        same = before is not None and (before.generation, before.step) == (generation, step - 1)
        call = replace(self._last_call, before=before if same else None).to_bytes()
        self.step_calls += len(self.machine.membership.members)
        self.calls.call_all(
            lambda w: w.step.remote(call),
            lambda reports: self.reports.keep_step_reports(generation, step, self._show_warnings(reports)),
            lambda agent, part, within_s: agent.step.remote(call, part, within_s),
        )

    def write_journal(self, action: do.WriteJournal, reason: str) -> None:
        """Write a committed step to the journal."""
        step, samples = action.step, self.reports.samples
        self.reports.mark_committed(step)
        if samples is not None:
            self.side_effects.aside(samples.write, samples.record(step))
        facts: Report = {"time": time.time(), **self.reports.merged_report(step)}
        self.side_effects.perform(lambda: self.journal.commit(step, facts), lambda _: on.StepJournalled(step))

    def emit_step(self, action: do.EmitStep, reason: str) -> None:
        """Write the metrics of a step and call the callbacks."""
        step, brief = action.step, self.reports.merged_report(action.step)
        reports, fresh = self.reports.take_reports(step), step == self.generations.first_step
        self.side_effects.perform(
            lambda: self.recorder.record_step(step, reports, brief, fresh=fresh),
            lambda stop: self.side_effects.after_telling_client(on.StepEmitted(step, stop)),
        )
        self.generations.prepare_for_loss()  # after a step: the first one is not delayed

    def validate(self, action: do.Validate, reason: str) -> None:
        """Call every worker for a validation pass."""
        done, generation = action.done, self.machine.membership.generation
        self.reports.validations = {}
        self.calls.call_all(
            lambda w: w.validate.remote(generation, done, action.number),
            lambda reports: self.reports.keep_validation_reports(generation, done, self._show_warnings(reports)),
        )

    def emit_validation(self, action: do.EmitValidation, reason: str) -> None:
        """Write the validation loss and call the callbacks; before that keep the value that the learning rates follow.

        A driver that was replaced learns so here: it calls for no step that follows the value.
        """
        done, found = action.done, list(self.reports.validations.values())
        try:
            values = self.reports.follow_validation(done, self.recorder.request.validation_batching)
        except RayparError as error:
            self.tasks.post(on.CallFailed("error", error))
            return

        if action.again:
            self._tell_other_value(done)

        def record() -> tuple[str | None, bool]:
            if values:
                self.journal.store_validated(values)
            self.journal.check_claim(done)  # after storing: a successor that claims now reads what was stored
            if action.again:
                return None, False
            return self.recorder.record_validation(done + action.number, found)

        self.side_effects.perform(
            record, lambda outcome: self.side_effects.after_telling_client(on.ValidationEmitted(done, *outcome))
        )

    def forget_validations(self, action: do.ForgetValidations, reason: str) -> None:
        """Forget the values of validations that are run again, which learning rates follow; a new driver must not use them."""
        left = self.reports.forget_validations(action.done)
        self.side_effects.perform(lambda: self.journal.store_validated(left), lambda _: on.Tick())

    def _tell_other_value(self, done: int) -> None:
        """Warn if a validation that was run again has found another value than people have seen."""
        followed, before = self.reports.followed, self.reports.doubted.pop(done, None)
        if followed is None or before is None or before == (found := followed.values[done]):
            return
        self.side_effects.note(
            RunWarning(text=f"{followed.name} {after_steps(done)}: {before} was seen, {found} is right and used from now on")
        )

    def abort_groups(self, action: do.AbortGroups, reason: str) -> None:
        """Abort the transports of all workers."""
        self.tasks.spawn(self.calls.abort(action.why))

    def request_stacks(self, action: do.RequestStacks, reason: str) -> None:
        """Ask workers for the stacks of their threads."""
        self.tasks.spawn(self.calls.probe(action.ranks))

    def warn_user(self, action: do.WarnUser, reason: str) -> None:
        """Show a warning; while the run waits for something, say what for."""
        self.side_effects.note(Wait(text=action.text) if self.machine.waits else RunWarning(text=action.text))

    def tell_user(self, action: do.TellUser, reason: str) -> None:
        """Show a decision."""
        self.side_effects.note(Note(text=action.text))

    def compare_replayed_step(self, action: do.CompareReplayedStep, reason: str) -> None:
        """Compare a replayed step with its first execution, and tell how far the replay has come."""
        self._check_replay(action.step, action.doubted)
        self.feed.tell(ReplayProgress(step=action.step + 1, until=self.machine.progress.journalled))
        self.generations.prepare_for_loss()

    def _check_replay(self, step: int, doubted: bool) -> None:
        """End the run if the step differs; `doubted`: the first execution may have been wrong, so only warn."""
        difference = self.reports.replay_difference(step)
        if difference is None:
            return
        before, found = difference
        if doubted:
            kept = self.reports.clause_on_learning_rates_after_wrong_step(step)
            self.side_effects.note(
                RunWarning(text=f"step {step + 1}: (loss, norm) {before} was seen, {found} is right from now on{kept}")
            )
            self.reports.outcomes[step] = found
        else:
            error = RayparError(
                f"step {step + 1} was executed again and gave (loss, norm) {found} instead of {before}",
                cure="the job is not reproducible: look for randomness of its own, or for workers that compute differently",
            )
            self.tasks.post(on.CallFailed("error", error))

    def _show_warnings(self, reports: Mapping[int, Report]) -> Mapping[int, Report]:
        """Show the warnings in workers' reports that no other worker has given; returns the reports."""
        for number, line in self.reports.new_warnings(reports):
            self.side_effects.note(RunWarning(text=f"{self.calls.coordinate(number)}: {line}"))
        return reports
