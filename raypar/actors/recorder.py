"""What people see of a run: metrics.jsonl, callbacks, checkpoints, the picture. Runs in the driver, off its event loop.

Steps are counted from 1 here: `step` 50 is the fiftieth, and `checkpoint`s and validations carry the number of steps done.
"""

from __future__ import annotations

import contextlib
import json
import math
import os
import pickle
import statistics
import sys
import time
from collections import deque
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from raypar.actors.messages import Hello
from raypar.actors.pictures import draw
from raypar.actors.request import RunRequest
from raypar.elastic.actions import Teardown
from raypar.errors import CheckpointError
from raypar.plan import ParallelPlan
from raypar.run_folder import RunFolder
from raypar.worker import checkpoint
from raypar.worker.checkpoint import ShardRecord
from raypar.worker.process_state import EnvironmentGuard

RETOLD = 1000
"""Steps of which a new driver tells the client again: more than it can have missed."""


@dataclass(frozen=True)
class Seen:
    """What the run folder says of a run. `outcomes`: step (from 0) -> (loss, norm); `validated`, `saved`: after how many steps
    that was done last; `lost`: workers that people know to be lost."""

    steps: int
    outcomes: Mapping[int, tuple[float, float]]
    validated: int | None
    saved: int | None
    last_s: float | None
    """When the last step was written (Unix time)."""
    lost: frozenset[int] = frozenset()


class Recorder:
    """Side effects of one run, each exactly once and in order; called from one thread at a time."""

    def __init__(self, request: RunRequest) -> None:
        self.request = request
        self.folder = Path(request.folder)
        self._news: list[dict[str, Any]] = []
        self._waiting: dict[str, list[str]] = {}
        self._seconds: deque[float] = deque(maxlen=50)
        self.traced: dict[str, Any] | None = None
        self.replanned = True
        """The plan is another one than the picture's, or not known yet: see `seat`."""
        self.callbacks: Any = None
        self._guard: EnvironmentGuard | None = None
        """Of the driver's process, where callbacks run."""
        self._with_torch = False
        self.nodes: list[str] = []
        self._last: dict[str, Any] = {}
        self.checkpoint_path: Path | None = None
        self.age_s = 0.0
        """How long former drivers have been at it since the run was last started or resumed."""

    def news(self) -> list[dict[str, Any]]:
        """What the client should hear, since the last call."""
        news, self._news = self._news, []
        return news

    def meet(self, hellos: Sequence[Hello]) -> list[str]:
        """Compare what the workers compute with; warnings when they differ."""
        from raypar.actors.fingerprint import differences

        return [f"not bitwise: the workers differ in {line}" for line in differences([h.fingerprint for h in hellos])]

    def seat(self, plan: ParallelPlan, nodes: Sequence[str]) -> None:
        """From now on steps are those of another generation; `nodes[rank]` is where that seat of its plan is."""
        self.replanned, self.nodes = plan != self.request.plan, list(nodes)

    def take_over(self) -> Seen:
        """Go on with the folder that another driver has filled; the client is told again what it may have missed."""
        run = RunFolder(self.folder)
        first = self.request.course.first
        run.mend(run.metrics)
        run.mend(run.events)
        events = list(run.read(run.events))
        began = [event["time"] for event in events if event["kind"] == "started"]
        self.age_s = max(0.0, time.time() - began[-1]) if began else 0.0
        lines = [line for line in run.read(run.metrics) if line["step"] > first]
        steps = [line for line in lines if "loss" in line]
        validations = [line for line in lines if "validation_loss" in line]
        path, _ = checkpoint.usable(self.folder / "checkpoints")
        self.checkpoint_path = path
        self._seconds.extend(line["seconds"] for line in steps[-50:])
        for line in lines[-RETOLD:]:
            facts = {key: value for key, value in line.items() if key != "time"}
            if "loss" in line:
                eta_s = (self.request.course.end - line["step"]) * statistics.median(self._seconds)
                self._news.append({"kind": "step", **facts, "eta_s": eta_s})
            else:
                self._news.append({"kind": "validation", **facts})
        if path is not None:
            self._news.append({"kind": "checkpoint", "step": checkpoint.load_manifest(path).steps_done, "path": str(path)})
        return Seen(
            steps=steps[-1]["step"] if steps else first,
            outcomes={s["step"] - 1: (s["loss"], s["norm"]) for s in steps if s["loss"] is not None and s["norm"] is not None},
            validated=validations[-1]["step"] if validations else None,
            saved=checkpoint.load_manifest(path).steps_done if path is not None else None,
            last_s=steps[-1]["time"] if steps else None,
            lost=lost_of(events),
        )

    def clock(self) -> None:
        """The next step's time begins now."""
        self._last_s = time.monotonic()

    # -- steps -------------------------------------------------------------------------------------------------------------

    def begin(self) -> None:
        """The workers are there."""
        guard = self._guard_of_callbacks()
        with guard.watching("a module of the callbacks"):
            self.callbacks = pickle.loads(self.request.callbacks)
        self._warn(guard)
        self.clock()
        self._call("on_start", {"run": self.request.run, "folder": str(self.folder), "first": self.request.course.first + 1})

    def step(self, step: int, reports: Mapping[int, Mapping[str, Any]], *, fresh: bool = False) -> str | None:
        """Metrics and callbacks of a committed step; the reason to stop, if a callback gave one. `fresh`: the first of a new
        generation, whose time is its own, without the pause before it."""
        request, one = self.request, reports[0]
        now = time.monotonic()
        wall, self._last_s = now - self._last_s, now
        busy = sum(r["busy_seconds"] for r in reports.values())
        longest = max(r["seconds"] for r in reports.values())
        if not longest:  # found applied by a new driver, and reported to none
            wall = statistics.median(self._seconds) if self._seconds else wall
        elif fresh or wall < longest / 2:  # before it came a pause, or steps that were written late
            wall = longest
        self._seconds.append(wall)
        metrics = {
            "step": step + 1,
            "loss": one["loss"],
            "norm": one["norm"],
            "count": one["count"],
            "seconds": wall,
            "samples_per_s": request.cut.batch_size / wall,
            "count_per_s": one["count"] / wall,
            "bubble": max(0.0, 1 - busy / (longest * len(reports))) if longest else 0.0,
            "peak_rss_bytes": [reports[rank]["peak_rss_bytes"] for rank in sorted(reports) if longest],
        }
        if one["skipped"]:
            metrics["skipped"] = True
        if step in request.trace and not self.replanned and len(reports) == request.plan.world:
            spans = [reports[rank]["spans"] for rank in sorted(reports)]
            self.traced = {"step": step + 1, "spans": spans, "ledger": one["ledger"], "nodes": self.nodes}
        self._last = {"loss": metrics["loss"], "norm": metrics["norm"]}
        stop, own = self._call("on_step", metrics)
        metrics |= own
        self._write(metrics)
        left = request.course.end - step - 1
        self._news.append({"kind": "step", **metrics, "eta_s": left * statistics.median(self._seconds)})
        return stop

    def validation(self, done: int, reports: Sequence[Mapping[str, Any]]) -> str | None:
        """The validation loss: sums in microbatch order / count."""
        losses = {m: pair for report in reports for m, pair in report["losses"].items()}
        total = count = 0.0
        for microbatch in sorted(losses):
            total += losses[microbatch][0]
            count += losses[microbatch][1]
        seconds = max(r["seconds"] for r in reports)
        metrics = {"step": done, "validation_loss": total / count, "count": count, "seconds": seconds}
        stop, own = self._call("on_validation", metrics)
        metrics |= own
        self._write(metrics)
        self._last_s = time.monotonic()
        self._news.append({"kind": "validation", **metrics})
        return stop

    def note(self, facts: Mapping[str, Any]) -> None:
        """A line in events.jsonl."""
        self._append("events.jsonl", facts)

    def keep_status(self, text: str) -> None:
        """members.json, whole or not at all."""
        self._replace(RunFolder(self.folder).members, text)

    def plan_changed(self, plan: ParallelPlan, schedule: str) -> None:
        """plan.json is that of the present generation."""
        run = RunFolder(self.folder)
        facts = {
            "schedule": schedule,
            "stages": [asdict(stage) for stage in plan.stages],
            "workers": [plan.coordinate(rank) for rank in range(plan.world)],
        }
        self._replace(run.plan, json.dumps(facts, indent=1) + "\n")

    def _replace(self, path: Path, text: str) -> None:
        """A full disk must not end the run: what people see there is old then."""
        aside = path.with_suffix(".new")
        with contextlib.suppress(OSError):
            aside.write_text(text)
            aside.replace(path)

    def _write(self, metrics: Mapping[str, Any]) -> None:
        self._append("metrics.jsonl", metrics)

    def _append(self, name: str, facts: Mapping[str, Any]) -> None:
        """Add a line to a file of the run. On a full disk training goes on: lines wait here until they can be written."""
        path, waiting = self.folder / name, self._waiting.setdefault(name, [])
        waiting.append(json.dumps(_finite({"time": time.time(), **facts})) + "\n")
        size = path.stat().st_size if path.exists() else 0
        try:
            with open(path, "a") as file:
                file.write("".join(waiting))
        except OSError as error:
            with contextlib.suppress(OSError):
                os.truncate(path, size)  # a part may have been written
            if len(waiting) == 1:
                text = f"{path} cannot be written ({error}); its lines are kept in memory until it can"
                self._news.append({"kind": "warning", "text": f"{text}\n  cure: free disk space, or put the run folder back"})
            return
        waiting.clear()

    # -- callbacks ---------------------------------------------------------------------------------------------------------

    def _call(self, hook: str, facts: Mapping[str, Any]) -> tuple[str | None, dict[str, Any]]:
        """(reason to stop, metrics they added). Raises `UserCodeError`."""
        if self.callbacks is None:  # a run that failed before it began has none
            return None, {}
        guard = self._guard_of_callbacks()
        stop, metrics = self.callbacks.call(hook, facts, around=guard.watching)
        self._warn(guard)
        return stop, metrics

    def _warn(self, guard: EnvironmentGuard) -> None:
        """Tells what users' code has left of the state of the driver's process."""
        for _, text in guard.lines():
            self.note({"kind": "warning", "text": text})
            self._news.append({"kind": "warning", "text": text})

    def _guard_of_callbacks(self) -> EnvironmentGuard:
        """With PyTorch's state only where a callback has loaded that: nothing else is computed in this process."""
        loaded = "torch" in sys.modules
        if self._guard is None or loaded != self._with_torch:
            if loaded:
                import torch

                from raypar.worker.compute_state import StateGuard

                self._guard = StateGuard(torch.get_num_threads())
            else:
                self._guard = EnvironmentGuard()
            self._with_torch = loaded
        return self._guard

    # -- checkpoints -------------------------------------------------------------------------------------------------------

    def checkpoint_begin(self, done: int) -> Path:
        """A new folder aside, in which workers write. Raises `CheckpointError`."""
        return checkpoint.begin(self.folder / "checkpoints", done)

    def checkpoint_drop(self, folder: Path) -> None:
        """Forget one that could not be finished."""
        checkpoint.drop(folder)

    def checkpoint_end(self, done: int, folder: Path, records: Sequence[ShardRecord | None]) -> None:
        """Manifest, final name; the oldest ones beyond `keep` are removed. Raises `CheckpointError`."""
        written = [record for record in records if record is not None]
        try:
            for record in written:
                if not (folder / record.file).is_file():
                    raise CheckpointError(
                        f"{folder / record.file}, written by a worker, cannot be seen by the driver",
                        cure="set run_dir to storage that all nodes share",
                    )
            self.checkpoint_path = checkpoint.commit(
                folder, written, steps_done=done, contract=self.request.contract, metrics=self._last
            )
        except Exception:
            checkpoint.drop(folder)  # on a full disk the next one needs its room
            raise
        checkpoint.keep_last(self.folder / "checkpoints", self.request.keep)

    def checkpoint_seen(self, done: int) -> None:
        """Tell people."""
        facts = {"step": done, "path": str(self.checkpoint_path)}
        self._news.append({"kind": "checkpoint", **facts})
        self._call("on_checkpoint", facts)

    # -- the end -----------------------------------------------------------------------------------------------------------

    def finish(self, facts: Mapping[str, Any]) -> None:
        """The end that a former driver had decided on (`Journal.end`), as far as people have not seen it."""
        self.take_over()
        run = RunFolder(self.folder)
        last = next((e["kind"] for e in reversed([*run.read(run.events)]) if e["kind"] in ("started", "generation", "end")), "")
        if last != "end":
            if last:
                self.begin()
            error = None if facts["error"] is None else pickle.loads(facts["error"])
            self.end(Teardown(facts["end"], facts["why"], facts["done"], error), None)

    def end(self, teardown: Teardown, step_calls: int | None) -> None:
        """The pictures, the end in events.jsonl, and the last callbacks. `step_calls`: None where nobody has counted them."""
        steps = teardown.done - self.request.course.first
        facts = {"end": teardown.end, "why": teardown.why, "step": teardown.done}
        calls = {} if step_calls is None else {"driver_calls_per_step": step_calls / steps if steps else 0.0}
        self._append("events.jsonl", {"kind": "end", **facts, **calls})
        if self.traced is not None:
            try:
                draw(self.request, self.traced["step"], self.traced["spans"], self.traced["nodes"])
                self._news.append({"kind": "picture", "path": str(self.folder / "swimlane.svg")})
            except OSError as error:
                self._news.append({"kind": "warning", "text": f"the picture could not be written: {error}"})
        if teardown.error is not None:
            self._call("on_exception", {"error": teardown.error, "step": teardown.done})
        self._call("on_end", facts)


def lost_of(events: Iterable[Mapping[str, Any]]) -> frozenset[int]:
    """Workers that were told to be lost since the run was last started or resumed: their numbers begin again then."""
    lost: set[int] = set()
    for event in events:
        if event["kind"] == "started":
            lost.clear()
        elif event["kind"] == "lost":
            lost.add(event["worker"])
    return frozenset(lost)


def _finite(facts: Mapping[str, Any]) -> dict[str, Any]:
    """JSON has no NaN and no infinity: null."""
    return {k: None if isinstance(v, float) and not math.isfinite(v) else v for k, v in facts.items()}
