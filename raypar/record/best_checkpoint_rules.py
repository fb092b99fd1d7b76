"""Which checkpoints of a run are its best ones by a metric: decided from the values that its record has. Pure."""

from __future__ import annotations

import math
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from heapq import nsmallest
from typing import Literal

from raypar.files.json_type import Json
from raypar.record.field_types import is_finite_number

MOST_VALUES = 20_000
"""Of a metric with more values than this, the best half is kept: only values near the best decide."""


@dataclass(frozen=True)
class BestRule:
    """By which metric checkpoints are kept."""

    metric: str
    """Name of the metric, as in metrics.jsonl."""
    mode: Literal["min", "max"]
    """Whether small or large values are good."""
    keep: int = 1
    """How many checkpoints are kept for it."""


def parse_rules(given: Iterable[Mapping[str, Json]]) -> list[BestRule]:
    """The rules in a run's record; entries that are none are left out."""
    found = []
    for one in given:
        metric, mode, keep = one.get("metric"), one.get("mode"), one.get("keep", 1)
        if isinstance(metric, str) and (mode == "min" or mode == "max") and isinstance(keep, int) and keep > 0:
            found.append(BestRule(metric, mode, keep))
    return found


@dataclass
class BestValues:
    """The values of the metrics of some rules by step. A value of the same step replaces the one before."""

    rules: Sequence[BestRule]
    """By which metrics checkpoints are kept."""
    values: dict[str, dict[int, float]] = field(default_factory=dict)
    """Metric -> number of steps done -> value that is finite."""

    def add(self, step: int, metrics: Mapping[str, Json]) -> bool:
        """Add the values of a step or validation. True if one of them is among the `keep` best of its metric so far.

        Of equal values the first counts. What is not finite is no value.
        """
        better = False
        for rule in self.rules:
            value = metrics.get(rule.metric)
            if not isinstance(value, (int, float)) or not is_finite_number(value):
                continue
            known = self.values.setdefault(rule.metric, {})
            known.pop(step, None)
            known[step] = float(value)
            better = better or step in self._best(rule, known)
            if len(known) > MOST_VALUES:
                self.values[rule.metric] = {each: known[each] for each in sorted(self._best(rule, known, MOST_VALUES // 2))}
        return better

    def is_best(self, step: int) -> bool:
        """Whether the value of a step is among the `keep` best of a metric."""
        return any(step in self._best(rule, self.values.get(rule.metric, {})) for rule in self.rules)

    def kept(self, steps: Collection[int]) -> set[int]:
        """Of checkpoints after these numbers of steps those that are kept, as the best ones of any rule."""
        return {step for rule in self.rules for step in self.best_of(rule, steps)}

    def best_of(self, rule: BestRule, steps: Collection[int]) -> list[int]:
        """The `keep` best of checkpoints after these numbers of steps, best first."""
        values = dict(self.values.get(rule.metric, {}))
        return self._best(rule, {step: values[step] for step in steps if step in values})

    @staticmethod
    def _best(rule: BestRule, values: Mapping[int, float], count: int | None = None) -> list[int]:
        sign = 1.0 if rule.mode == "min" else -1.0
        return nsmallest(rule.keep if count is None else count, values, key=lambda step: (sign * values[step], step))


def is_better(mode: Literal["min", "max"], value: float, best: float, min_delta: float = 0.0) -> bool:
    """Whether a value is better than the best one by more than `min_delta`; NaN is not."""
    return value < best - min_delta if mode == "min" else value > best + min_delta


def worst_metric_value(mode: Literal["min", "max"]) -> float:
    """What every finite value is better than."""
    return math.inf if mode == "min" else -math.inf
