"""Prints a training run: numbered start-up lines, a progress line, lines for events; or JSON lines."""

from __future__ import annotations

import os
import sys
import time
from collections import deque
from typing import TYPE_CHECKING, Any, TextIO

from raypar.atomic_write import DISK_FULL_ERRNOS
from raypar.console.event_lines import EventNarrator, count_noun, replay_line
from raypar.console.fault_summary import COUNTED, summarize_faults
from raypar.console.json_stdout import json_text
from raypar.redact_secrets import redact_certain_secrets, secrets_of_environment, tree_without_certain_secrets

if TYPE_CHECKING:
    from raypar.launch.result import Result

STAGES = ("read", "checked", "planned", "connected", "started", "built")
"""The stages of the start-up, in order."""
EVERY_S = 10.0
"""How often a progress line is printed where the output is not a terminal."""
REDRAW_S = 0.1
"""How often the progress line is redrawn on a terminal."""


class EventPrinter:
    """Prints the events of a run; call it with each event. On a terminal the progress line is redrawn in place."""

    def __init__(self, *, steps: int, as_json: bool = False, start_s: float | None = None, out: TextIO | None = None) -> None:
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
        self.validation: float | None = None
        """The last validation loss."""
        self.first_lr: float | None = None
        """The learning rate of the first step that was drawn."""
        self.members = ""
        """Generation and workers for the progress line; empty in the first generation."""
        self.again = False
        """Whether the last progress line was about replayed steps."""
        self.words = EventNarrator()
        """Makes the lines of events."""
        self.faults: list[dict[str, Any]] = []
        """Events to be counted at the end of the run; for a resumed run also its earlier ones."""
        self.undrawn: dict[str, Any] | None = None
        """The last step, if no progress line was printed for it; None otherwise."""
        self.recent: deque[dict[str, Any]] = deque(maxlen=20)
        """The last steps, for their mean speed."""
        self.seconds = self.samples = self.counted = 0.0
        """Sums over all steps shown: seconds, samples, and units that the loss is averaged over (tokens)."""
        self.shown = 0
        """How many steps these sums are of."""
        self.skipped = 0
        """How many of them were skipped, because loss or gradient norm was not finite."""
        self.known_secrets = secrets_of_environment(os.environ)
        """Values of this process's environment that are not printed: others read the log of a submitted job."""

    def __call__(self, event: dict[str, Any]) -> None:
        """Show an event."""
        if event["kind"] == "waiting_for":
            if not self.as_json:
                self.line(f"      {event['text']}")
            return
        if event["kind"] == "stage":
            event = {**event, "seconds": round(time.monotonic() - self.start_s, 3)}
        if self.as_json:
            self.put(json_text({"time": time.time(), **tree_without_certain_secrets(event, self.known_secrets)}) + "\n")
            return
        kind = event["kind"]
        if kind in COUNTED:
            self.faults.append(event)
        if kind == "stage":
            number = STAGES.index(event["stage"]) + 1
            first, *more = event["text"].splitlines()
            self.line(
                "\n".join([f"[{number}/{len(STAGES)}] {first} ... {event['seconds']:.1f} s", *("      " + m for m in more)])
            )
        elif kind == "step":
            self.recent.append(event)
            self.shown += 1
            self.skipped += bool(event.get("skipped"))
            self.seconds += event["seconds"]
            self.samples += event["samples_per_s"] * event["seconds"]
            self.counted += event["count"]
            self.again = False
            self.progress(event)
        elif kind == "replay":
            self.replay(event)
        elif kind == "validation":
            self.validation = event["validation_loss"]
            self.line(f"step {event['step']}: validation loss {self.validation:.4f}")
        elif kind == "end":
            if self.undrawn is not None:
                self.progress(self.undrawn, last=True)
        elif kind != "started" and (words := self.words(event)) is not None:  # shown as stage and result
            if kind == "generation":
                self.membership(event)
            self.line(words)

    def membership(self, event: dict[str, Any]) -> None:
        """Note a new generation, for the progress line; its speed is measured anew."""
        shards = f", {event['plan'].rpartition(' x ')[2]}" if "shard" in event.get("plan", "") else ""
        self.members = (
            f"  gen {event['generation']}, {count_noun(len(event['workers']), 'worker')}{shards}"
            if event["generation"] > 1
            else ""
        )
        self.recent.clear()
        self.undrawn = None

    def progress(self, event: dict[str, Any], *, last: bool = False) -> None:
        """Draw the progress line: `step 50/200  loss 2.41  3,100 samples/s ...`, after a recovery also `gen 3, 3 workers`.

        `last`: the run ends with this step, so that it is drawn however short the time since the last line.
        """
        now = time.monotonic()
        last = last or event["step"] >= self.steps
        first = len(self.recent) == 1
        if not (first or last or now - self.drawn_s > (REDRAW_S if self.live else EVERY_S)):
            self.undrawn = event
            return
        self.drawn_s, self.undrawn = now, None
        seconds = sum(e["seconds"] for e in self.recent)
        samples = sum(e["samples_per_s"] * e["seconds"] for e in self.recent) / seconds
        counted = sum(e["count"] for e in self.recent) / seconds
        speed = f"{samples:,.0f} samples/s" + (f"  {counted:,.0f} tokens/s" if counted > 1.5 * samples else "")
        bubble = sum(e["bubble"] for e in self.recent) / len(self.recent)
        skipped = "  skipped: not finite" if event.get("skipped") else ""
        self.first_lr = event.get("lr") if self.first_lr is None else self.first_lr
        lr = f"  lr {event['lr']:.3g}" if event.get("lr") not in (None, self.first_lr) else ""  # once a schedule has changed it
        text = (
            f"step {event['step']}/{self.steps}  loss {event['loss']:.4f}{lr}  {speed}  bubble {100 * bubble:.0f} %  "
            f"ETA {format_duration(event['eta_s'])}{self.members}{skipped}"
        )
        self.draw(text)

    def replay(self, event: dict[str, Any]) -> None:
        """Draw the progress of replayed steps, for which there is no step event: `executing steps again: 20 of 25`."""
        now, last = time.monotonic(), event["step"] >= event["until"]
        if self.again and not last and now - self.drawn_s <= (REDRAW_S if self.live else EVERY_S):
            return
        self.drawn_s, self.again = now, True
        self.draw(replay_line(event))

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
        if not self.seconds:
            return "no steps"
        samples, counted = self.samples / self.seconds, self.counted / self.seconds
        return f"{samples:,.0f} samples/s" + (f", {counted:,.0f} tokens/s" if counted > 1.5 * samples else "")

    def finish(self, result: Result, *, in_program: bool = False) -> int:
        """Print the result; its last line is the hash of the weights. Returns the exit code.

        `in_program`: the advice is for a program that called `Trainer.fit`, which has the result as an object.
        """
        if self.as_json:
            facts = {k: v for k, v in vars(result).items() if k not in ("history", "error")}
            self.line(json_text({"kind": "result", **facts}))
            return 0
        part = f" in the last {count_noun(self.shown, 'step')}" if 0 < self.shown < result.done else ""
        lines = [f"{result.why}: {result.done} steps, {self.speed()}{part}"]
        if self.skipped:
            lines.append(f"skipped {self.skipped} of {count_noun(self.shown, 'step')}: loss or gradient norm not finite")
        survived = summarize_faults(self.faults)
        if survived is not None:
            lines.append(f"survived: {survived}")
        if self.validation is not None:
            lines.append(f"validation loss {self.validation:.4f}")
        if result.sample:
            lines += ["sample:", *("    " + line for line in result.sample.splitlines())]
        if result.picture_path:
            lines.append(
                f"picture: {result.picture_path} (the schedule as predicted and as measured; trace.json opens in Perfetto)"
            )
        if in_program:
            lines += result.advice_in_program
        else:
            lines.append(f"next: {result.resume_advice if result.end == 'stopped' else result.export_advice}")
        if result.weights_sha256:
            lines.append(f"weights sha256 {result.weights_sha256}")
        self.line("\n".join(lines))
        return 0


def format_duration(seconds: float) -> str:
    """A duration as text: `45 s`, `3 min 05 s`, `2 h 10 min`."""
    whole = round(seconds)
    if whole < 60:
        return f"{whole} s"
    if whole < 3600:
        return f"{whole // 60} min {whole % 60:02d} s"
    return f"{whole // 3600} h {whole % 3600 // 60:02d} min"
