"""Records a run for its user: metrics.jsonl, events.jsonl, callbacks, checkpoints, pictures. Runs off the event loop.

Users' steps are counted from 1: `step` 50 is the fiftieth. Checkpoints and validations carry the number of steps done.
"""

from __future__ import annotations

import contextlib
import json
import math
import os
import pickle
import re
import statistics
import sys
import time
from collections import deque
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

from raypar.actors.driver_storage_session import DriverStorageSession
from raypar.actors.jsonl_file import JsonlFile
from raypar.actors.messages import RunRequest, WorkerHello
from raypar.actors.metrics_lines import (
    complete_metrics_lines,
    count_seen_steps,
    finite,
    format_step_ranges,
    step_record,
    without_kind,
)
from raypar.actors.metrics_publisher import MetricsPublisher
from raypar.actors.numerics_fingerprint import describe_fingerprint_differences
from raypar.actors.run_checkpoints import RunCheckpoints
from raypar.actors.run_state_in_ray_kv import Journal
from raypar.actors.step_reports import merge_reports, merge_validation_reports
from raypar.actors.step_timeline_files import write_step_timeline_files
from raypar.callbacks import Callbacks
from raypar.elastic.actions import Teardown
from raypar.errors import NonFiniteError, RayparError, error_first_line
from raypar.files.atomic_write import replace_file_atomically
from raypar.files.json_type import Json
from raypar.files.os_error_cure import cure_of_os_error
from raypar.files.redact_secrets import secrets_of_environment, without_certain_secrets
from raypar.job.lr_schedule_metric import FollowedMetric
from raypar.plan import ParallelPlan
from raypar.plan.wording import after_steps
from raypar.planner.memory_sheet import memory_sheets
from raypar.planner.plan_report import layers_as_dicts, processors_of_prediction
from raypar.record.best_checkpoint_rules import BestValues
from raypar.record.events import (
    EndOfRun,
    Event,
    LearningRateChange,
    Resumption,
    RunStart,
    RunWarning,
    SavedCheckpoint,
    StepPicture,
    StepRecord,
    ValidationRecord,
)
from raypar.record.fold import RunView
from raypar.record.folder import output_file
from raypar.record.metric_names import LOST_NAME_CURE, MeasuredNames, name_in_validation
from raypar.record.parse_events import parse_event, parse_metrics, text_event
from raypar.record.stages_of_plan import stages_as_data
from raypar.record.totals import read_totals
from raypar.storage.read_run_lines import Line, jsonl_line_sort_key, step_of
from raypar.storage.run_folder import RunFolder, resume_argument
from raypar.telemetry.run_telemetry import RunTelemetry, WorkerCounts
from raypar.worker.checkpoint import checkpoint_files
from raypar.worker.process.environment_and_signals_guard import EnvironmentGuard

if TYPE_CHECKING:
    from raypar.worker.worker_reports import Report

RETOLD = 1000
"""How many of the last lines a new driver sends to the client again: more than the client can have missed."""

MOST_PREDICTED = 2048
"""Workers x microbatches of a plan whose memory is predicted again while the run lasts: that takes some milliseconds."""

MOST_MEASURED = 128
"""Workers of a plan of which totals.json says what they hold: as many as reports show."""

TOTALS_S = 5.0
"""Time from one replacement of totals.json to the next."""


@dataclass(frozen=True)
class RecordedProgress:
    """How much of a run the user has seen, found from the run folder and the journal."""

    steps: int
    """Number of steps that the user has seen."""
    outcomes: Mapping[int, tuple[float, float]]
    """Step (from 0) -> (loss, norm)."""
    validated: int | None
    """Steps done at the last validation."""
    saved: int | None
    """Steps done at the last checkpoint."""
    best: int | None
    """Steps done at the last validation, if a metric is among its best values there."""
    last_s: float | None
    """When the last step was written (Unix time)."""
    lost: frozenset[int] = frozenset()
    """Workers whose loss was reported."""
    unseen: Mapping[int, Report] = field(default_factory=dict)
    """Step (from 0) -> its report in the journal (`step_reports.merge_reports`), for steps that the user may not have seen."""


class TracedStep(NamedTuple):
    """A measured step: its number, and by rank the instructions with their times, and the node."""

    step: int
    spans: Sequence[Sequence[tuple[str, float, float]]]
    nodes: Sequence[str]


class RunRecorder:
    """Writes the files of a run folder and calls the callbacks, for everything once and in order.

    Call its methods from one thread at a time.
    """

    def __init__(
        self,
        request: RunRequest,
        journal: Journal | None = None,
        storage_session: DriverStorageSession | None = None,
        publisher: MetricsPublisher | None = None,
        followed: FollowedMetric | None = None,
    ) -> None:
        self.request = request
        """The run's request."""
        self.journal = journal
        """The run's journal; None: nothing is stored in one."""
        self.publisher = publisher
        """Publishes the run's metrics; None: they are not published."""
        self.followed = followed
        """The metric that the learning rates follow; None: they follow none. The event loop adds values to it."""
        self.folder = Path(request.folder)
        """The run folder."""
        self.storage_session = storage_session
        """Lease and upload of a run on shared storage; None for a run in a folder."""
        self.run_folder = run = RunFolder(self.folder, storage_session.place if storage_session is not None else None)
        """The run folder with the paths of its files, and its place on shared storage."""
        self._new_events: list[Event] = []
        """Events for the client since the last `new_events`."""
        self.metrics = JsonlFile(run.metrics, self._say_text, journal)
        """metrics.jsonl."""
        self.events = JsonlFile(run.events, self._say_text, journal, mirrored=True)
        """events.jsonl."""
        self._step_seconds: deque[float] = deque(maxlen=50)
        """Durations of the last steps, from which the remaining time is predicted."""
        self.traced_step: TracedStep | None = None
        """The last measured step."""
        self.plan_differs_from_picture = True
        """Whether the plan differs from the picture's, or is not known yet (`note_generation`)."""
        self.callbacks: Callbacks | None = None
        """The user's callbacks; None before `start_callbacks`."""
        self._measured = MeasuredNames(of_validation=True)
        """The names of all that validations have measured since this driver began."""
        self._measured_in_training = MeasuredNames(of_validation=False)
        """The same of steps whose metrics are computed."""
        self._guard: EnvironmentGuard | None = None
        """Guards the state of the driver's process, where callbacks run."""
        self._with_torch = False
        """Whether `_guard` covers PyTorch's state too."""
        self.nodes: list[str] = []
        """By rank: the node of the worker in that seat."""
        self._last_learning_rate: float | None = None
        """The learning rate of the last step that had one, where it follows a metric."""
        self.checkpoints = RunCheckpoints(request, run.checkpoint_store_location, storage_session, followed)
        """The run's checkpoints."""
        self.age_s = 0.0
        """Seconds that former drivers have worked since the run was last started or resumed."""
        self.telemetry = RunTelemetry(RunView(read_totals(self._former_totals())))
        """The values of the run's metrics. A resumed run goes on with the totals of its former starts."""
        self._known_secrets = secrets_of_environment(os.environ)
        """Secrets of this process's environment, which no file of the run may contain."""
        self._totals_saved_s = time.monotonic()
        """When totals.json was replaced last."""

    def new_events(self) -> list[Event]:
        """The events for the client since the last call."""
        events, self._new_events = self._new_events, []
        return events

    def why_not_bitwise(self, hellos: Sequence[WorkerHello]) -> list[str]:
        """Warnings where results need not be those of one process: differences between the workers, and what the job says."""
        differences = describe_fingerprint_differences([hello.fingerprint for hello in hellos])
        reasons = [f"the workers differ in {line}" for line in differences]
        if self.request.contract.get("reduction") == "fast":
            reasons.append("reduction is fast: gradients are added in an order that depends on the plan")
        return [f"not bitwise: {reason}" for reason in reasons]

    def note_generation(self, plan: ParallelPlan, nodes: Sequence[str]) -> None:
        """Note that a generation with this plan begins; `nodes[rank]` is the node of the worker in that seat."""
        self.plan_differs_from_picture, self.nodes = plan != self.request.plan, list(nodes)
        self.telemetry.begin_generation(plan)

    def take_over(self) -> RecordedProgress:
        """Continue the run folder of a former driver, which may have been damaged since; returns the user's progress.

        Events that the client may have missed are sent again.
        """
        first, journal = self.request.policy.steps_before_run, self.journal
        known = [] if journal is None else journal.committed_steps()
        events = [parse_event(line) for line in self.events.open()]
        view = RunView.of(events)
        rebuilt: list[int] = []

        def correct(found: list[Line]) -> list[Line]:
            if journal is None:
                return found
            lines, rebuilt[:] = complete_metrics_lines(found, journal, known, self.request)
            return lines

        lines = self.metrics.open(correct)
        before = first, not self.request.policy.validates_first
        records = [parse_metrics(line) for line in lines if jsonl_line_sort_key(line) > before]
        steps = [record for record in records if isinstance(record, StepRecord)]
        seen = count_seen_steps(first, (record.step for record in records), known)
        since = view.start.time if view.start is not None else None
        since = journal.began() if since is None and journal is not None else since
        self.age_s = max(0.0, time.time() - since) if since is not None else 0.0
        validations = [record for record in records if isinstance(record, ValidationRecord)]
        checkpoint = self.checkpoints.find_last()
        self._step_seconds.extend(step.seconds for step in steps[-50:])
        for record in records[-RETOLD:]:
            again: Event = replace(record, time=None)
            if isinstance(record, StepRecord):
                eta_s = (self.request.policy.end_step - record.step) * statistics.median(self._step_seconds)
                count, bubble = (0.0 if x is None or math.isnan(x) else x for x in (record.count, record.bubble))
                again = replace(record, time=None, eta_s=eta_s, count=count, bubble=bubble)
            self._new_events.append(again)
        saved = checkpoint_files.load_manifest(checkpoint).steps_done if checkpoint is not None else None
        if checkpoint is not None and saved is not None:
            self._new_events.append(SavedCheckpoint(step=saved, path=str(checkpoint)))
        if rebuilt:
            lacking = format_step_ranges(rebuilt)
            text = f"{self.metrics.path} lacked the lines of {lacking}: they are written again from the journal"
            self._warn(text, "leave the files of a run alone while it trains")
        self._tell_gaps((step.step for step in steps), first, seen)
        starts = [number for number, event in enumerate(events) if isinstance(event, RunStart)]
        self.telemetry.catch_up(steps, events[max(starts, default=0) :], time.time())
        reports = {step: journal.step_report(step) for step in known if step >= seen} if journal is not None else {}
        return RecordedProgress(
            steps=seen,
            outcomes={s.step - 1: (s.loss, s.norm) for s in steps if s.norm is not None and not math.isnan(s.loss + s.norm)},
            validated=validations[-1].step if validations else None,
            saved=saved,
            best=validations[-1].step if validations and self._best_values(None).is_best(validations[-1].step) else None,
            last_s=steps[-1].time if steps else None,
            lost=frozenset(view.lost_since_start),
            unseen={step: report for step, report in reports.items() if report is not None},
        )

    def record_resumption(self) -> None:
        """Record that the run was resumed, and count the steps that are executed again; only once, even if a driver dies.

        First adds to the totals what was written before the resumption and is not in the saved totals.
        """
        if not self.request.resumption:
            return
        resumed = self.request.resumption[0]
        lines = [json.loads(text) for text in self.events.recent.texts] if self.events.opened else self.events.open()
        events, until_s = [parse_event(line) for line in lines], resumed.former_end_s or 0.0
        if any(isinstance(event, Resumption) and event.resumed_s == resumed.resumed_s for event in events):
            return
        former = [event for event in events if (event.time or 0.0) <= until_s]
        self.telemetry.catch_up(self._steps_in_file(), former, until_s)
        self.telemetry.totals.workers = 0  # those from before the resumption are gone
        self.note(resumed)
        self._new_events.append(resumed)
        self._save_totals(time.monotonic())

    def _tell_gaps(self, there: Iterable[int], first: int, seen: int) -> None:
        """Warn of steps that the user has seen and whose lines are missing from the file. `there`: the steps in it."""
        gaps = sorted(set(range(first + 1, seen + 1)) - set(there))
        if gaps:
            text = f"{self.metrics.path} has no lines of {format_step_ranges(gaps)} any more; training is not touched by that"
            self._warn(text, "take them from what was printed; leave the files of a run alone while it trains")

    def _warn(self, text: str, cure: str) -> None:
        """Show a warning and write it to events.jsonl."""
        event = RunWarning(text=f"{text}\n  cure: {cure}")
        self._new_events.append(event)
        self.note(event)

    def _say_text(self, kind: str, text: str) -> None:
        """Show a note or a warning without writing it to events.jsonl."""
        self._new_events.append(text_event(kind, text))

    def restart_step_timer(self) -> None:
        """Start measuring the next step's time."""
        self._last_s = time.monotonic()

    def _steps_in_file(self) -> list[StepRecord]:
        """The steps of metrics.jsonl; none if it cannot be read."""
        run = self.run_folder
        with contextlib.suppress(RayparError):
            records = [parse_metrics(line) for line in run.read_lines(run.metrics)]
            return [record for record in records if isinstance(record, StepRecord)]
        return []

    # -- steps -------------------------------------------------------------------------------------------------------------

    def start_callbacks(self) -> None:
        """Load the callbacks and call `on_start`. Call it when the workers have started."""
        guard = self._guard_of_callbacks()
        with guard.watching("a module of the callbacks"):
            self.callbacks = pickle.loads(self.request.callbacks)
        self._warn_of_what_is_left(guard)
        self.restart_step_timer()
        self._best_values(self.request.policy.steps_before_run)
        self.remember_learning_rate()
        self._call(
            "on_start", {"run": self.request.run, "folder": str(self.folder), "first": self.request.policy.steps_before_run + 1}
        )

    def _best_values(self, last: int | None) -> BestValues:
        """Which checkpoints are the best, by the record up to step `last` (None: all of it) and what this driver adds to it."""
        best = self.checkpoints.best
        if best is None:
            best = self.checkpoints.best = BestValues(self.request.job.best_rules)
            run = self.run_folder
            for line in run.read_lines(run.metrics) if best.rules else ():
                if last is None or step_of(line) <= last:
                    best.add(step_of(line), line)
        return best

    def record_step(
        self, step: int, reports: Mapping[int, Report], brief: Report | None = None, *, fresh: bool = False
    ) -> str | None:
        """Write the metrics of a committed step and call its callbacks; the reason to stop: a callback's, or state of an
        optimizer that can no longer be saved.

        `brief`: the reports merged, if they are already. `fresh`: the first step of a new generation, whose time does not
        include the pause before it.
        """
        request, brief = self.request, brief or merge_reports(reports)
        now = time.monotonic()
        wall, self._last_s = now - self._last_s, now
        longest = brief["seconds"]
        if not longest:  # found applied by a new driver, and reported to none
            wall = statistics.median(self._step_seconds) if self._step_seconds else wall
        elif fresh or wall < longest / 2:  # before it came a pause, or steps that were written late
            wall = longest
        self._step_seconds.append(wall)
        record = step_record(step, brief, wall, request.batching.batch_size)
        spans = [reports[rank]["spans"] for rank in sorted(reports)]
        if (
            step in request.traced_steps
            and not self.plan_differs_from_picture
            and len(reports) == request.plan.world
            and all(spans)
        ):
            self.traced_step = TracedStep(step + 1, spans, self.nodes)
        self.checkpoints.loss_and_norm = {"loss": record.loss, "norm": record.norm}
        self.telemetry.add_step(record, now, reports)
        if brief["skipped"]:
            self._warn_of_skipped_step(record)
        if not longest:
            self._warn_of_lost_metrics(step + 1)
        if (metrics := brief.get("metrics")) is not None:
            self._note_names(self._measured_in_training, f"step {step + 1}", metrics)
        self._tell_of_learning_rate(record)
        stop, own = self._call("on_step", without_kind(record))
        record = replace(record, more={**record.more, **own})
        self._write(record)
        if self.checkpoints.best is not None:
            self.checkpoints.best.add(record.step, without_kind(record))
        left = request.policy.end_step - step - 1
        self._new_events.append(replace(record, eta_s=left * statistics.median(self._step_seconds)))
        not_kept = next((what for report in reports.values() if (what := report.get("not_kept"))), None)
        return stop or not_kept

    def _warn_of_skipped_step(self, record: StepRecord) -> None:
        """Warn of the first skipped step, and again whenever their number has doubled: a few lines, however many they are. Not
        where gradients overflow because the loss is scaled: its scale is found so."""
        if record.overflows:
            return
        skipped = self.telemetry.totals.skipped_steps
        if skipped & (skipped - 1):
            return
        debug = f"`raypar debug {resume_argument(self.run_folder.place)}`"
        one = f"step {record.step} was skipped and changed nothing: loss {record.loss}, gradient norm {record.norm}"
        self._warn(
            one if skipped == 1 else f"{one}; so were {skipped - 1} steps before it",
            f"{debug} names the first layer with such a number; if it happens often, lower the learning rate or look at these "
            "samples; non_finite: stop ends the run instead",
        )

    def remember_learning_rate(self) -> None:
        """Find the learning rate of the last step that former drivers and starts have written, if it follows a metric."""
        if self.followed is not None:
            known = (step.lr for step in reversed(self._steps_in_file()))
            self._last_learning_rate = next((lr for lr in known if lr is not None), None)

    def _tell_of_learning_rate(self, record: StepRecord) -> None:
        """Tell of a learning rate that is another than before, because of a validation."""
        before, followed = self._last_learning_rate, self.followed
        if followed is None or record.lr is None:
            return
        self._last_learning_rate = record.lr
        if before is not None and before != record.lr:
            done = max((at for at in list(followed.values) if at < record.step), default=0)
            found = f": {followed.name} was {followed.values[done]:.6g} {after_steps(done)}" if done else ""
            text = f"learning rate {before:.6g} -> {record.lr:.6g} from step {record.step} on{found}"
            event = LearningRateChange(text=text, step=record.step, lr=record.lr, before=before)
            self.note(event)
            self._new_events.append(event)

    def _warn_of_lost_metrics(self, step: int) -> None:
        """Warn if the metrics of a step (from 1) are lost with the report of the worker that has computed them."""
        every = self.request.job.metrics_every
        if every and step % every == 0:
            cure = (
                f"the next ones are those of step {step + every}; a validation is run again, so that its metrics are not lost"
            )
            self._warn(f"the metrics of step {step} are lost with a worker, though the step itself is not", cure)

    def _note_names(self, names: MeasuredNames, where: str, measured: Mapping[str, float]) -> None:
        """Warn of names of metrics that had a value before and have none now. Raises `UserCodeError` if `checkpoint.best` or
        early stopping depends on one. `where`: what has measured these."""
        best = self.checkpoints.best
        rules = [(rule.metric, "checkpoint.best") for rule in (best.rules if best is not None else ())]
        watched = [*rules, *(self.callbacks.watched_metrics if self.callbacks is not None else ())]
        if (line := names.note(where, measured, watched)) is not None:
            self._warn(line, LOST_NAME_CURE)

    def _write_outputs(self, outputs: Mapping[int, bytes]) -> None:
        """Write a file for each microbatch, whole or not at all. Raises `RayparError`."""
        try:
            for microbatch, data in outputs.items():
                path = output_file(self.folder, microbatch)
                path.parent.mkdir(exist_ok=True)
                replace_file_atomically(path, data, lasting=False)
        except OSError as error:
            size = sum(map(len, outputs.values()))
            raise RayparError(
                f"cannot write the {size / 2**20:,.1f} MiB that were kept of a pass into {self.folder}: "
                f"{error.strerror or error}",
                cure=cure_of_os_error(error, "free disk space there, or set TMPDIR to a folder on another disk"),
            ) from error

    def record_validation(self, done: int, reports: Sequence[Report]) -> tuple[str | None, bool]:
        """Write the validation loss and the job's metrics, and call the callbacks.

        Returns (the reason to stop, if a callback gave one; whether a metric is among its best values, so that the state is to
        be saved). `done`: steps that are done; each pass of a run that makes several counts as one more. The outputs that
        such a run keeps are written first.
        """
        self._write_outputs({m: data for report in reports for m, data in report.get("outputs", {}).items()})
        loss, count, measured = merge_validation_reports(self.request.validation_batching, reports)
        seconds = max(r["seconds"] for r in reports)
        self._note_names(self._measured, f"the validation {after_steps(done)}", measured)
        metrics = {name: value for name, value in measured.items() if name != name_in_validation("loss")}
        record = ValidationRecord(step=done, validation_loss=loss, count=count, seconds=seconds, more=metrics)
        stop, own = self._call("on_validation", without_kind(record))
        record = replace(record, more={**metrics, **own})
        if self.journal is not None:
            self.journal.store_validation(done, finite({"time": time.time(), **without_kind(record)}))
        self._write(record)
        self.telemetry.view.apply(record)
        self._last_s = time.monotonic()
        self._new_events.append(record)
        if self.checkpoints.best is None or not self.checkpoints.best.add(done, without_kind(record)):
            return stop, False
        # A checkpoint of these steps was saved before its value was known: one that was better so far may be kept no more.
        with contextlib.suppress(RayparError, OSError):  # then the next checkpoint removes it
            self.checkpoints.check_lease()
            self.checkpoints.remove_old()
        return stop, True

    def note(self, event: Event) -> None:
        """Write an event to events.jsonl."""
        self.telemetry.view.apply(event)
        self._append(self.events, event.facts())

    # -- metrics for Prometheus --------------------------------------------------------------------------------------------

    def publish_metrics(self, counts: WorkerCounts) -> None:
        """Publish the run's metrics, and replace totals.json every `TOTALS_S`. `counts`: the workers at present."""
        now = time.monotonic()
        self.telemetry.advance(now, counts)
        why = self.publisher.publish(self.telemetry) if self.publisher is not None else None
        if why is not None:
            self._warn(f"Ray takes no metrics ({why}): nothing more is published", "the run itself is not touched")
        if now - self._totals_saved_s > TOTALS_S:
            self._save_totals(now)

    def _save_totals(self, now_s: float) -> None:
        """Replace totals.json."""
        self._totals_saved_s = now_s
        totals = self.telemetry.totals
        totals.time = time.time()
        document = totals.as_document()
        if (plan := self.telemetry.seated) is not None and plan.world <= MOST_MEASURED:
            document["worker_memory_bytes"] = [dict[str, Json](self.telemetry.held_bytes(r)) for r in range(plan.world)]
        self._replace(self.run_folder.totals, json.dumps(document) + "\n")

    def _former_totals(self) -> Mapping[str, Json] | None:
        """The content of totals.json; None if it is missing or damaged."""
        with contextlib.suppress(RayparError):
            found: Mapping[str, Json] | None = self.run_folder.read_document(self.run_folder.totals, damaged=True)
            return found
        return None

    def write_members_file(self, text: str) -> None:
        """Replace members.json."""
        self._replace(self.run_folder.members, text)

    def write_plan_file(self, plan: ParallelPlan, schedule: str) -> None:
        """Replace plan.json: a generation with another plan has begun."""
        facts = {
            "schedule": schedule,
            "stages": stages_as_data(plan),
            "workers": [plan.coordinate(rank) for rank in range(plan.world)],
            "layers": layers_as_dicts(self.request.profile),
            **({"recompute": list(plan.recompute)} if plan.recompute else {}),
            **({"offload": list(plan.offload)} if plan.offload else {}),
            **self._predictions(plan, schedule),
        }
        self._replace(self.run_folder.plan, json.dumps(facts, indent=1) + "\n")

    def _predictions(self, plan: ParallelPlan, schedule: str) -> dict[str, Json]:
        """What is predicted of a plan, for plan.json: the memory of workers; of the job's own plan the step too."""
        request = self.request
        facts: dict[str, Json] = {}
        if (plan, schedule) == (request.plan, request.schedule_name):
            facts = {"predicted_ms": request.predicted.makespan_ms, "predicted_bubble": request.predicted.bubble_of_total}
            facts["predicted_for"] = processors_of_prediction(request.profile.processors, plan.world, request.profile.lengths)
        if plan.world * request.batching.count <= MOST_PREDICTED:
            with contextlib.suppress(Exception):  # what is only shown must not end a run; a file's schedule has no known name
                sheets = memory_sheets(request.profile, plan, schedule, request.batching)
                facts["predicted_memory_bytes"] = [sheet.by_kind for sheet in sheets]
        return facts

    def _replace(self, path: Path, text: str) -> None:
        """Replace a file that `raypar status` reads, or keep it as it was: a full disk must not end the run."""
        with contextlib.suppress(OSError):
            replace_file_atomically(path, text.encode(), lasting=False)

    def _write(self, record: StepRecord | ValidationRecord) -> None:
        """Add a line to metrics.jsonl."""
        self._append(self.metrics, without_kind(record))

    def _append(self, file: JsonlFile, facts: Mapping[str, Json]) -> None:
        """Add a line to a file of the run. On a full disk the line waits until it can be written, and training continues."""
        file.append(finite({"time": time.time(), **without_certain_secrets(facts, self._known_secrets)}))

    # -- callbacks ---------------------------------------------------------------------------------------------------------

    def _call(self, hook: str, facts: Mapping[str, Json]) -> tuple[str | None, dict[str, Json]]:
        """Call a hook of all callbacks: (reason to stop, metrics they added). Raises `UserCodeError`."""
        if self.callbacks is None:  # a run that failed before it began has none
            return None, {}
        guard = self._guard_of_callbacks()
        try:
            stop, metrics = self.callbacks.call(hook, facts, around=guard.watching)
        finally:
            self._tell_all(self.callbacks.lines())
        self._warn_of_what_is_left(guard)
        return stop, metrics

    def _warn_of_what_is_left(self, guard: EnvironmentGuard) -> None:
        """Warn of process state that callbacks have left changed."""
        self._tell_all(("warning", text) for _, text in guard.lines())

    def _tell_all(self, lines: Iterable[tuple[str, str]]) -> None:
        """Show lines, given as (kind, text), and write them to events.jsonl."""
        for kind, text in lines:
            event = text_event(kind, text)
            self.note(event)
            self._new_events.append(event)

    def _guard_of_callbacks(self) -> EnvironmentGuard:
        """The guard of this process. It covers PyTorch's state once a callback has imported torch."""
        loaded = "torch" in sys.modules
        if self._guard is None or loaded != self._with_torch:
            if loaded:
                import torch

                from raypar.worker.process.torch_state_guard import TorchStateGuard

                self._guard = TorchStateGuard(torch.get_num_threads())
            else:
                self._guard = EnvironmentGuard()
            self._with_torch = loaded
        return self._guard

    def checkpoint_seen(self, done: int) -> None:
        """Report the checkpoint to the client and the callbacks."""
        event = SavedCheckpoint(step=done, path=str(self.checkpoints.last))
        self._new_events.append(event)
        self._call("on_checkpoint", without_kind(event))

    # -- the end -----------------------------------------------------------------------------------------------------------

    def record_former_end(self, facts: Mapping[str, Any]) -> None:
        """Record the end that a former driver had decided on (`Journal.end`), unless it is recorded already."""
        self.take_over()
        view = RunView.of(parse_event(json.loads(line)) for line in self.events.recent.texts)
        if view.end is None:
            if view.start is not None or view.generation is not None:
                self.start_callbacks()
            error = None if facts["error"] is None else pickle.loads(facts["error"])
            self.record_end(Teardown(facts["end"], facts["why"], facts["done"], error), None)

    def record_end(self, teardown: Teardown, step_calls: int | None) -> None:
        """Record the end: files, pictures, last callbacks. `step_calls`: calls to workers for steps; None if not counted."""
        steps = teardown.done - self.request.policy.steps_before_run
        calls = None if step_calls is None else step_calls / steps if steps else 0.0
        event = EndOfRun(
            end=teardown.end,
            why=teardown.why,
            step=teardown.done,
            driver_calls_per_step=calls,
            non_finite=True if isinstance(teardown.error, NonFiniteError) else None,
        )
        self.metrics.close()
        self.publish_metrics(WorkerCounts(generation=self.telemetry.counts.generation))
        self._save_totals(time.monotonic())
        if self.metrics.changed or self.metrics.lost or self.metrics.failing:
            there = (step.step for step in self._steps_in_file())
            self._tell_gaps(there, self.request.policy.steps_before_run, teardown.done)
        self._append(self.events, event.facts())
        self.events.close()
        if self.traced_step is not None:
            try:
                write_step_timeline_files(self.request, *self.traced_step)
                self._new_events.append(StepPicture(path=self.run_folder.place_of(self.run_folder.swimlane)))
            except OSError as error:
                cure = cure_of_os_error(error, "free disk space")
                self._say_text(
                    "warning", f"the picture could not be written ({error})\n  cure: {cure}; the run itself is not touched"
                )
        if teardown.error is not None:
            self._call_last("on_exception", {"error": teardown.error, "step": teardown.done})
        self._call_last("on_end", {"end": teardown.end, "why": teardown.why, "step": teardown.done})

    def _call_last(self, hook: str, facts: Mapping[str, Any]) -> None:
        """Call a hook at the end of the run, whose outcome no callback changes any more: one that raises is a warning."""
        try:
            self._call(hook, facts)
        except RayparError as error:
            place = re.findall(r'File "[^"]+", line \d+', error.what)[-1:]
            what = ", ".join([error_first_line(error), *place])
            self._say_text("warning", f"{what}; the run itself is not touched\n  cure: mend the callback")
