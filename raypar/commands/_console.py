"""What a training run prints: numbered start-up lines with seconds, one progress line, plain events; or JSON lines."""

from __future__ import annotations

import json
import sys
import time
from collections import deque
from typing import Any, TextIO

STAGES = ("read", "checked", "planned", "connected", "started", "built")
EVERY_S = 10.0
"""How often a progress line is printed where the output is not a terminal."""
REDRAW_S = 0.1


class Console:
    """Give it every event. On a terminal the progress line is redrawn in place."""

    def __init__(self, *, steps: int, as_json: bool = False, out: TextIO | None = None) -> None:
        self.out = out or sys.stdout
        self.steps, self.as_json = steps, as_json
        self.live = self.out.isatty()
        self.drawn_s = float("-inf")
        self.width = 0
        self.validation: float | None = None
        self.recent: deque[dict[str, Any]] = deque(maxlen=20)

    def __call__(self, event: dict[str, Any]) -> None:
        """Show an event."""
        if self.as_json:
            self.line(json.dumps({"time": time.time(), **event}))
            return
        kind = event["kind"]
        if kind == "stage":
            number = STAGES.index(event["stage"]) + 1
            first, *more = event["text"].splitlines()
            self.line(
                "\n".join([f"[{number}/{len(STAGES)}] {first} ... {event['seconds']:.1f} s", *("      " + m for m in more)])
            )
        elif kind == "step":
            self.recent.append(event)
            self.progress(event)
        elif kind == "validation":
            self.validation = event["validation_loss"]
            self.line(f"step {event['step']}: validation loss {self.validation:.4f}")
        elif kind == "checkpoint":
            self.line(f"step {event['step']}: checkpoint {event['path']}")
        elif kind == "warning":
            self.line(f"warning: {event['text']}")
        elif kind in ("waiting", "stopping"):
            self.line(event["text"])

    def progress(self, event: dict[str, Any]) -> None:
        """`step 50/200  loss 2.41  3 100 samples/s ...`."""
        now, last = time.monotonic(), event["step"] >= self.steps
        first = len(self.recent) == 1
        if not (first or last or now - self.drawn_s > (REDRAW_S if self.live else EVERY_S)):
            return
        self.drawn_s = now
        seconds = sum(e["seconds"] for e in self.recent)
        samples = sum(e["samples_per_s"] * e["seconds"] for e in self.recent) / seconds
        counted = sum(e["count"] for e in self.recent) / seconds
        speed = f"{samples:,.0f} samples/s" + (f"  {counted:,.0f} tokens/s" if counted > 1.5 * samples else "")
        bubble = sum(e["bubble"] for e in self.recent) / len(self.recent)
        skipped = "  skipped: not finite" if event.get("skipped") else ""
        text = (
            f"step {event['step']}/{self.steps}  loss {event['loss']:.4f}  {speed}  bubble {100 * bubble:.0f} %  "
            f"ETA {duration(event['eta_s'])}{skipped}"
        )
        if self.live:
            self.out.write("\r" + text.ljust(self.width))
            self.width = len(text)
            self.out.flush()
        else:
            self.line(text)

    def line(self, text: str) -> None:
        """A line that stays; an unfinished progress line is kept above it."""
        if self.width:
            self.out.write("\n")
            self.width = 0
        self.out.write(text + "\n")
        self.out.flush()

    def speed(self) -> str:
        """Of the last steps: `310 samples/s, 39,700 tokens/s`."""
        seconds = sum(e["seconds"] for e in self.recent)
        if not seconds:
            return "no steps"
        samples = sum(e["samples_per_s"] * e["seconds"] for e in self.recent) / seconds
        counted = sum(e["count"] for e in self.recent) / seconds
        return f"{samples:,.0f} samples/s" + (f", {counted:,.0f} tokens/s" if counted > 1.5 * samples else "")


def duration(seconds: float) -> str:
    """`45 s`, `3 min 05 s`, `2 h 10 min`."""
    whole = round(seconds)
    if whole < 60:
        return f"{whole} s"
    if whole < 3600:
        return f"{whole // 60} min {whole % 60:02d} s"
    return f"{whole // 3600} h {whole % 3600 // 60:02d} min"
