"""What the lines of a run folder say about a fault: how long it took until training went on, where the time went. Pure."""

from __future__ import annotations

import itertools
import math
import statistics
from collections import defaultdict
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

Line = dict[str, Any]

SEEN_S = 0.1
"""An event may be written so long after the step that it belongs to."""
ENOUGH = 3
"""Steps of a generation whose median counts as the plan's step; with fewer, those of all generations of that plan count."""


@dataclass(frozen=True)
class Answer:
    """What a run did about one fault; all in seconds. `latency_s`: from the fault to the first step that the new generation
    commits; `gap_s`: between that step and the one before it; `step_s`: median step of the new plan.

    `noticed_s`, `ordered_s`: from the fault until the driver begins to recover, and until it sends the new plan out.
    """

    latency_s: float
    gap_s: float
    step_s: float
    noticed_s: float
    ordered_s: float
    workers: int
    plan: str
    again: int
    moved_elements: int


class Story:
    """The steps in metrics.jsonl, and events.jsonl."""

    def __init__(self, steps: Sequence[tuple[float, int]], events: Sequence[Line]) -> None:
        self.steps = list(steps)
        """(time of its commit, number)"""
        self.events = list(events)
        self.generations = [event for event in events if event["kind"] == "generation"]

    def after(self, time: float, wanted: Callable[[int, int], bool] = lambda before, now: True) -> Answer | None:
        """The answer to a fault at `time`: the first generation since whose numbers of workers (before, now) are `wanted`.
        None when there is none."""
        count = self._workers_at(time)
        for index, generation in enumerate(self.generations):
            if generation["time"] <= time:
                continue
            now = len(generation["workers"])
            if wanted(count, now):
                return self._answer(time, index)
            count = now
        return None

    def step_s(self, index: int) -> float:
        """Median step of the plan of a generation; the first step, which waits for everything, is no measure."""
        own = self._durations(index)
        if len(own) >= ENOUGH:
            return statistics.median(own)
        by_plan = defaultdict(list)
        for i, generation in enumerate(self.generations):
            by_plan[generation["plan"]] += self._durations(i)
        return statistics.median(by_plan[self.generations[index]["plan"]])

    def p99_s(self, time: float, steps: int = 100) -> float:
        """Of the last `steps` before `time`, pauses between generations left out."""
        # A step that was applied before the fault may be seen in the middle of the pause, so that numbers do not tell.
        pauses = [event["time"] for event in self.events if event["kind"] in ("recovering", "generation")]
        durations = [
            b - a
            for (a, _), (b, step) in itertools.pairwise(self.steps)
            if b <= time and step > 2 and not any(a < pause <= b + SEEN_S for pause in pauses)
        ][-steps:]
        return percentile(durations, 0.99)

    def _workers_at(self, time: float) -> int:
        before = [len(g["workers"]) for g in self.generations if g["time"] <= time]
        return before[-1] if before else next(len(event["workers"]) for event in self.events if event["kind"] == "started")

    def _durations(self, index: int) -> list[float]:
        """Of the steps of one generation, without the first."""
        first = self.generations[index]["step"] + 1
        following = self.generations[index + 1]["step"] if index + 1 < len(self.generations) else math.inf
        return [b - a for (a, _), (b, step) in itertools.pairwise(self.steps) if first < step <= following]

    def _answer(self, time: float, index: int) -> Answer | None:
        generation = self.generations[index]
        pairs = itertools.pairwise(self.steps)
        new = next(((a, b) for (a, _), (b, step) in pairs if b > time and step > generation["step"]), None)
        if new is None:
            return None
        before, first = new
        # A drain or a join is followed by steps of the old plan: its recovery begins after the last generation before this one.
        since = max([time, *(g["time"] for g in self.generations[:index])])
        told = [e for e in self.events if e["kind"] == "recovering" and since < e["time"] <= generation["time"]]
        ordered = [e["time"] for e in told if "workers" in e]
        return Answer(
            latency_s=first - time,
            gap_s=first - before,
            step_s=self.step_s(index),
            noticed_s=told[0]["time"] - time if told else math.nan,
            ordered_s=ordered[-1] - time if ordered else math.nan,
            workers=len(generation["workers"]),
            plan=generation["plan"],
            again=generation["again"],
            moved_elements=generation["moved_elements"],
        )


def percentile(values: Sequence[float], share: float) -> float:
    """Nearest rank: the smallest value that so many of all do not exceed."""
    return sorted(values)[max(0, math.ceil(share * len(values)) - 1)]
