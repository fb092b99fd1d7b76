"""Prints a training run: numbered start-up lines, a progress line, lines for events; or JSON lines."""

from __future__ import annotations

import os
import sys
import time
from collections.abc import Collection, Iterable
from dataclasses import replace
from typing import TYPE_CHECKING, TextIO

from raypar.console.json_stdout import json_text
from raypar.files.atomic_write import DISK_FULL_ERRNOS
from raypar.files.redact_secrets import redact_certain_secrets, secrets_of_environment, tree_without_certain_secrets
from raypar.plan.loss_scale import format_loss_scale
from raypar.plan.wording import count_noun
from raypar.record.events import (
    ActivityNotice,
    EndOfRun,
    Event,
    GenerationStart,
    ReplayProgress,
    RunStart,
    SavedCheckpoint,
    StartupStage,
    StepRecord,
    ValidationRecord,
)
from raypar.record.fold import RunView, speed_of
from raypar.record.story import Narrator
from raypar.record.value_text import format_duration, format_metric

if TYPE_CHECKING:
    from raypar.launch.result import Result

STAGES = ("read", "checked", "planned", "connected", "started", "built")
"""The stages of the start-up, in order."""
EVERY_S = 10.0
"""How often a progress line is printed where the output is not a terminal."""
MOST_METRICS = 3
"""How many metrics are in the progress line."""
REDRAW_S = 0.1
"""How often the progress line is redrawn on a terminal."""


class EventPrinter:
    """Prints the events of a run; call it with each event. On a terminal the progress line is redrawn in place."""

    def __init__(
        self,
        *,
        steps: int,
        as_json: bool = False,
        start_s: float | None = None,
        out: TextIO | None = None,
        metrics: Collection[str] = (),
    ) -> None:
        """`metrics`: names of the job's metrics, whose last values in training are in the progress line."""
        self.metrics = tuple(metrics)[:MOST_METRICS]
        self.out = out or sys.stdout
        """Where lines are printed."""
        self.start_s = time.monotonic() if start_s is None else start_s
        """When the command was started."""
        self.steps = steps
        """Number of steps of the job."""
        self.as_json = as_json
        """Whether events are printed as JSON lines."""
        self.live = self.out.isatty()
        """Whether the progress line can be redrawn."""
        self.drawn_s = float("-inf")
        """When the progress line was last drawn."""
        self.width = 0
        """Length of the progress line that is being redrawn; 0 if the last line is complete."""
        self.view = RunView()
        """What the events say: steps of this process only, and of a resumed run the faults before (`add_earlier`)."""
        self.narrator = Narrator()
        """Makes the lines of events."""
        self.members = ""
        """Generation and workers for the progress line; empty in the first generation."""
        self.former_steps = 0
        """Number of steps before the present generation."""
        self.again = False
        """Whether the last progress line was about replayed steps."""
        self.undrawn: StepRecord | None = None
        """The last step, if no progress line was printed for it; None otherwise."""
        self.known_secrets = secrets_of_environment(os.environ)
        """Values of this process's environment that are not printed: others read the log of a submitted job."""

    def add_earlier(self, events: Iterable[Event]) -> None:
        """Add what happened to a run before it was resumed: its faults are counted at the end."""
        for event in events:
            if not isinstance(event, (StepRecord, ValidationRecord)):
                self.view.apply(event)

    def __call__(self, event: Event) -> None:
        """Show an event."""
        if isinstance(event, ActivityNotice):
            if not self.as_json:
                self.line(f"      {event.text}")
            return
        if isinstance(event, StartupStage):
            event = replace(event, seconds=round(time.monotonic() - self.start_s, 3))
        if self.as_json:
            facts = {"time": time.time(), **event.facts()}
            self.put(json_text(tree_without_certain_secrets(facts, self.known_secrets)) + "\n")
            return
        self.view.apply(event)
        match event:
            case StartupStage():
                number = STAGES.index(event.stage) + 1
                first, *more = (event.text or "").splitlines()
                lines = [f"[{number}/{len(STAGES)}] {first} ... {event.seconds:.1f} s", *("      " + m for m in more)]
                self.line("\n".join(lines))
            case StepRecord():
                self.again = False
                self.progress(event)
            case ReplayProgress():
                self.replay(event)
            case ValidationRecord():
                self.line(event.progress_line())
            case EndOfRun():  # the result says it
                if self.undrawn is not None:
                    self.progress(self.undrawn, last=True)
            case RunStart():  # a stage says it
                pass
            case _:
                line = self.narrator.line(event)
                if isinstance(event, GenerationStart):
                    self.membership(event)
                if line is not None:
                    self.line(line)

    def membership(self, event: GenerationStart) -> None:
        """Note a new generation, for the progress line; its speed is measured anew."""
        plan = event.plan or ""
        shards = f", {plan.rpartition(' x ')[2]}" if "shard" in plan else ""
        there = f"  gen {event.generation}, {count_noun(len(event.workers), 'worker')}{shards}"
        self.members = there if event.generation > 1 else ""
        self.former_steps, self.undrawn = self.view.steps.count, None

    def progress(self, event: StepRecord, *, last: bool = False) -> None:
        """Draw the progress line: `step 50/200  loss 2.41  3,100 samples/s ...`, after a recovery also `gen 3, 3 workers`.

        `last`: the run ends with this step, so that it is drawn however short the time since the last line.
        """
        fresh = self.view.steps.count - self.former_steps
        recent = list(self.view.recent)[-fresh:]
        now = time.monotonic()
        last = last or event.step >= self.steps
        if not (fresh == 1 or last or now - self.drawn_s > (REDRAW_S if self.live else EVERY_S)):
            self.undrawn = event
            return
        self.drawn_s, self.undrawn = now, None
        speed = speed_of(recent)
        samples = speed.samples_per_s or 0.0
        counted = sum(step.count or 0.0 for step in recent) / sum(step.seconds for step in recent)
        rate = f"{samples:,.0f} samples/s" + (f"  {counted:,.0f} tokens/s" if counted > 1.5 * samples else "")
        bubble = sum(step.bubble or 0.0 for step in recent) / len(recent)
        data = f" (samples {100 * speed.data_wait:.0f} %)" if speed.waits_for_data else ""
        skipped = "  skipped: not finite" if event.skipped else ""
        if event.overflows and event.loss_scale is not None:
            skipped = f"  skipped: overflow with loss scale {format_loss_scale(event.loss_scale)}"
        rates = self.view.steps.learning_rates
        changed = event.lr is not None and rates is not None and event.lr != rates[0]  # by a schedule
        lr = f"  lr {event.lr:.3g}" if changed else ""
        last_values = [(name, self.view.metrics[name].last) for name in self.metrics if name in self.view.metrics]
        metrics = "".join(f"  {name} {format_metric(value)}" for name, value in last_values)
        text = (
            f"step {event.step}/{self.steps}  loss {event.loss:.4f}{metrics}{lr}  {rate}  bubble {100 * bubble:.0f} %{data}  "
            f"ETA {format_duration(event.eta_s or 0.0)}{self.members}{skipped}"
        )
        self.draw(text)

    def replay(self, event: ReplayProgress) -> None:
        """Draw the progress of replayed steps, for which there is no step event: `executing steps again: 20 of 25`."""
        now, last = time.monotonic(), event.step >= event.until
        if self.again and not last and now - self.drawn_s <= (REDRAW_S if self.live else EVERY_S):
            return
        self.drawn_s, self.again = now, True
        self.draw(event.progress_line())

    def draw(self, text: str) -> None:
        """Print a progress line; on a terminal it replaces the one before."""
        if self.live:
            self.put("\r" + text.ljust(self.width))
            self.width = len(text)
        else:
            self.line(text)

    def line(self, text: str) -> None:
        """Print a complete line, below the progress line if there is one."""
        ended, self.width = "\n" * (self.width > 0), 0
        self.put(ended + redact_certain_secrets(text, self.known_secrets) + "\n")

    def put(self, text: str) -> None:
        """Print and flush, with escapes for what the output's encoding does not have. If the output is a file on a full disk,
        the text is lost and the run continues."""
        try:
            try:
                self.out.write(text)
            except UnicodeEncodeError:
                encoding = self.out.encoding or "ascii"
                self.out.write(text.encode(encoding, "backslashreplace").decode(encoding))
            self.out.flush()
        except OSError as error:
            if error.errno not in DISK_FULL_ERRNOS:
                raise

    def speed(self) -> str:
        """The mean speed of the steps shown: `310 samples/s, 39,700 tokens/s`."""
        done = self.view.steps
        if not done.seconds:
            return "no steps"
        samples, counted = done.samples / done.seconds, done.counted / done.seconds
        return f"{samples:,.0f} samples/s" + (f", {counted:,.0f} tokens/s" if counted > 1.5 * samples else "")

    def finish(self, result: Result, *, in_program: bool = False) -> int:
        """Print the result; its last line is the hash of the weights. Returns the exit code.

        `in_program`: the advice is for a program that called `Trainer.fit`, which has the result as an object.
        """
        if self.as_json:
            facts = {k: v for k, v in vars(result).items() if k not in ("history", "error")}
            self.line(json_text({"kind": "result", **facts}))
            return 0
        done, validation = self.view.steps, self.view.last_validation
        part = f" in the last {count_noun(done.count, 'step')}" if 0 < done.count < result.done else ""
        lines = [f"{result.why}: {count_noun(result.done, 'step')}, {self.speed()}{part}"]
        if odd := done.skipped - done.overflows:
            lines.append(f"skipped {odd} of {count_noun(done.count, 'step')}: loss or gradient norm not finite")
        if done.overflows and self.view.last_step is not None and (scale := self.view.last_step.loss_scale) is not None:
            lines.append(
                f"skipped {done.overflows} of {count_noun(done.count, 'step')}: gradients overflowed; the loss scale is now "
                f"{format_loss_scale(scale)}"
            )
        if self.view.faults is not None:
            lines.append(f"survived: {self.view.faults}")
        if validation is not None:
            lines.append(validation.progress_line().partition(": ")[2])
        if result.sample:
            lines += ["sample:", *("    " + line for line in result.sample.splitlines())]
        if result.picture_path:
            lines.append(
                f"picture: {result.picture_path} (the schedule as predicted and as measured; trace.json opens in Perfetto)"
            )
        if result.best_checkpoint_path:
            lines.append(
                f"best checkpoint: {result.best_checkpoint_path}" + (" (result.best_checkpoint)" if in_program else "")
            )
        if in_program:
            lines += result.advice_in_program
        else:
            lines.append(f"next: {result.resume_advice if result.end == 'stopped' else result.export_advice}")
        if result.weights_sha256:
            lines.append(f"weights sha256 {result.weights_sha256}")
        self.line("\n".join(lines))
        return 0


class BriefEventPrinter:
    """Prints what a run waits for, warnings, what happens to its workers, and its end; call it with each event."""

    def __init__(self, run: str, known_secrets: list[str], out: TextIO | None = None) -> None:
        self.run = run
        """The run's name: the job's, until the run has its folder."""
        self.known_secrets = known_secrets
        """Texts that are not printed."""
        self.out = out or sys.stdout
        """Where lines are printed."""
        self.narrator = Narrator()
        """Makes the lines of events."""
        self.plan = ""
        """The plan in words; empty until the stage `planned`."""

    def __call__(self, event: Event) -> None:
        """Print an event, unless it is a step, a checkpoint, or a stage before training begins."""
        match event:
            case StartupStage():
                self._show_stage(event)
            case RunStart() | EndOfRun() | SavedCheckpoint() | ActivityNotice():
                pass
            case _:
                line = self.narrator.line(event)
                if line is not None:
                    self.line(line)

    def _show_stage(self, event: StartupStage) -> None:
        """Print that training begins, with the plan; earlier stages are not printed."""
        self.run = event.run or self.run
        if event.stage == "planned":
            self.plan = (event.text or "").splitlines()[0].partition(";")[0]
        elif event.stage == "built":
            self.line(f"training begins: {self.plan}")

    def finish(self, result: Result) -> None:
        """Print how the run has ended, its last loss and its folder."""
        loss = result.metrics.get("loss")
        self.line(f"{result.why}" + (f", loss {loss:.4f}" if loss is not None else "") + f"; in {result.path}")

    def line(self, text: str) -> None:
        """Print the lines of a text, each behind the run's name."""
        for one in redact_certain_secrets(text, self.known_secrets).splitlines():
            print(f"{self.run}: {one}", file=self.out, flush=True)
