"""The state of a run that `raypar top` shows, updated with new lines of its files. Its memory is bounded. Pure."""

from __future__ import annotations

import re
import statistics
from collections import deque
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from raypar.console.run_status import RECENT, UNDER_WAY, RunStatus
from raypar.console.throughput_chart_data import Line, build_run_history, goodput_of_history, is_finite_number
from raypar.telemetry.run_totals import read_totals

KEPT_LINES = 2000
"""Number of the last lines of metrics, and of events, that are kept."""
KEPT_LOSSES = 512
"""The curve of the loss has at most twice this many points."""
SEAT_PATTERN = re.compile(r"stages? ([\d,]+), replica (\d+)(?:, shard (\d+))?")
"""Finds the seat in a worker's coordinate."""


class BoundedSeries:
    """A series of values, summarised: at most 2 * `KEPT_LOSSES` means, each of `stride` consecutive values."""

    def __init__(self) -> None:
        self.means: list[float] = []
        """The means, in order."""
        self.stride = 1
        """Number of values in each mean."""
        self._rest: list[float] = []
        """Values that are in no mean yet."""

    def add(self, value: float) -> None:
        """Add the next value."""
        self._rest.append(value)
        if len(self._rest) < self.stride:
            return
        self.means.append(sum(self._rest) / self.stride)
        self._rest.clear()
        if len(self.means) >= 2 * KEPT_LOSSES:
            self.means = [(a + b) / 2 for a, b in zip(self.means[::2], self.means[1::2], strict=True)]
            self.stride *= 2

    def values(self) -> tuple[float, ...]:
        """The means, and the last value if it is in none of them."""
        return (*self.means, *self._rest[-1:])


@dataclass(frozen=True)
class LiveWorker:
    """One worker, for the table. Unknown values are None or empty."""

    stage: str
    replica: str
    shard: str
    """The seat. If the coordinate cannot be parsed, `stage` is its whole text."""
    worker: str
    node: str
    pid: str
    busy: float | None
    """Share of the last steps' time in which it computed."""
    peak_bytes: int | None
    """The largest resident memory that its process has had."""


@dataclass(frozen=True)
class LiveView:
    """A run at one moment, for the screen of `raypar top`."""

    status: RunStatus
    """What `raypar status` says."""
    now: float
    """Unix time."""
    first_step: int | None
    """The step at which the curve of the loss begins."""
    losses: tuple[float, ...]
    """The curve of the loss."""
    bubble: float | None
    """Mean share of the last steps in which workers did not compute."""
    goodput: float | None
    """See `RunTotals.goodput`. Without totals.json: the share of time in steps, from the lines that were read."""
    eta_s: float | None
    """Predicted seconds to the end."""
    cost: float | None
    """What the workers have cost so far."""
    workers: tuple[LiveWorker, ...]
    """The workers with a seat."""
    spares: int
    """Workers without a seat."""


class LiveRun:
    """Collects the new lines of a run's files, and makes the view of the run at any moment."""

    def __init__(self, steps: int | None, price_per_worker_hour: float | None = None) -> None:
        self.steps = steps
        """Number of steps of the job."""
        self.price_per_worker_hour = price_per_worker_hour
        """Price of one worker for an hour, if the job gives it."""
        self.metrics: deque[Line] = deque(maxlen=KEPT_LINES)
        """The last lines of metrics.jsonl, by ascending step."""
        self.events: deque[Line] = deque(maxlen=KEPT_LINES)
        """The last events."""
        self.first_step: int | None = None
        """The first step whose loss is in `losses`."""
        self.losses = BoundedSeries()
        """The losses of all steps since then."""
        self._last_step = 0
        """The last step in `losses`."""

    def add(self, metrics: Iterable[Line], events: Iterable[Line]) -> None:
        """Add new lines. Lines that were added before are skipped: a file that is written anew contains them again.

        A newer line about an earlier step is of a resumed run: it replaces the lines of that step and of later ones. The curve
        of the loss stays, because the run has the same losses again.
        """
        for line in metrics:
            replayed = bool(self.metrics) and line["step"] <= self.metrics[-1]["step"]
            if replayed and (line.get("time") or 0.0) <= (self.metrics[-1].get("time") or 0.0):
                continue
            while replayed and "loss" in line and self.metrics and self.metrics[-1]["step"] >= line["step"]:
                self.metrics.pop()
            self.metrics.append(line)
            if "loss" in line and line["step"] > self._last_step:
                self._last_step = line["step"]
                if is_finite_number(line["loss"]):
                    self.first_step = line["step"] if self.first_step is None else self.first_step
                    self.losses.add(float(line["loss"]))
        self.events.extend(events)

    def view(self, status: RunStatus, totals: Line | None, now: float) -> LiveView:
        """The run at this moment. `status`: made from the same lines; `totals`: the content of totals.json."""
        done = [line for line in self.metrics if "loss" in line][-RECENT:]
        found = read_totals(totals)
        goodput = found.goodput
        if goodput is None:
            goodput = goodput_of_history(build_run_history(list(self.metrics), list(self.events)))
        bubbles = [line["bubble"] for line in done if is_finite_number(line.get("bubble"))]
        left = None if self.steps is None else max(0, self.steps - status.step)
        under_way = status.phase in UNDER_WAY and status.step_s is not None and left is not None
        return LiveView(
            status=status,
            now=now,
            first_step=self.first_step,
            losses=self.losses.values(),
            bubble=statistics.fmean(bubbles) if bubbles else None,
            goodput=goodput,
            eta_s=left * status.step_s if under_way and left is not None and status.step_s is not None else None,
            cost=found.cost(self.price_per_worker_hour) if self.price_per_worker_hour and found.steps else None,
            workers=tuple(live_workers(status.members, done)),
            spares=len(status.spares),
        )


def live_workers(members: Sequence[Line], done: Sequence[Line]) -> list[LiveWorker]:
    """The workers with a seat, by rank. `done`: lines of the last steps; those with another number of workers are ignored."""
    busy = mean_by_rank([numbers for line in done if (numbers := numbers_by_rank(line, "busy_shares", len(members)))])
    peaks = next((found for line in reversed(done) if (found := numbers_by_rank(line, "peak_rss_bytes", len(members)))), None)
    rows = []
    for rank, member in enumerate(members):
        place = str(member.get("coordinate") or "")
        seat = SEAT_PATTERN.search(place)
        rows.append(
            LiveWorker(
                stage=seat[1] if seat else place,
                replica=seat[2] if seat else "",
                shard=(seat[3] or "") if seat else "",
                worker=str(member.get("worker", "?")),
                node=str(member.get("node") or "?")[:8],
                pid=str(member.get("pid", "?")),
                busy=busy[rank] if busy else None,
                peak_bytes=int(peaks[rank]) if peaks and peaks[rank] > 0 else None,
            )
        )
    return rows


def numbers_by_rank(line: Line, key: str, workers: int) -> list[float]:
    """The list of numbers `key` of a line, by rank; empty unless there is a finite number for each worker."""
    found = line.get(key)
    whole = isinstance(found, list) and len(found) == workers and all(is_finite_number(one) for one in found)
    return list(found) if whole and found is not None else []


def mean_by_rank(rows: Sequence[Sequence[float]]) -> list[float]:
    """The mean of each rank's numbers; empty if there are none."""
    return [statistics.fmean(numbers) for numbers in zip(*rows, strict=True)]
