"""The metric of validations that the learning rates follow, and its values so far: what a checkpoint has of them. Pure."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import TypeGuard

from raypar.errors import CheckpointError, ConfigError
from raypar.files.json_type import Json
from raypar.files.printable_text import repr_text, shorten
from raypar.plan.wording import after_steps
from raypar.record.metric_names import series_of_validation


@dataclass
class FollowedMetric:
    """The metric that the learning rates follow (`lr_schedule.metric`), and its values."""

    name: str
    """Its name, as in metrics.jsonl."""
    every: int
    """Steps from one validation to the next. One at the end of a run that is not due by this does not count: a longer run does
    not have it."""
    values: dict[int, float] = field(default_factory=dict)
    """Number of steps done -> value, ascending."""

    def add(self, done: int, measured: Mapping[str, float]) -> None:
        """Add what a validation after `done` steps has measured. Raises `ConfigError` if the metric is not among it."""
        if done % self.every:
            return
        if self.name not in measured:
            raise ConfigError(
                f"lr_schedule.metric is {self.name}, which the validation {after_steps(done)} has not measured",
                cure=f"it is one of {', '.join(sorted(measured))}",
            )
        self.values[done] = float(measured[self.name])

    def add_validation(self, done: int, loss: float, losses_of_sets: Mapping[str, float], metrics: Mapping[str, float]) -> None:
        """The same, from the loss, those of several sets, and the metrics as workers name them."""
        self.add(done, series_of_validation(loss, losses_of_sets, metrics))

    def lacks(self, done: int) -> bool:
        """Whether a validation is due after `done` steps whose value is not known."""
        return done > 0 and done % self.every == 0 and done not in self.values

    def as_json(self, done: int) -> Json:
        """What a checkpoint after `done` steps has of it; `values_in_checkpoint` reads it. JSON has no NaN or infinity."""
        known = [(at, value) for at, value in list(self.values.items()) if at <= done]
        return {"metric": self.name, "values": [[at, v if math.isfinite(v) else str(v)] for at, v in known]}


def values_in_checkpoint(found: Json, metric: str | None, steps_done: int) -> dict[int, float]:
    """Number of steps done -> value of a metric, of all validations before a checkpoint; none if the steps before it have
    followed another metric, or none. Raises `CheckpointError` for what no run writes."""
    if not isinstance(found, dict) or found.get("metric") != metric:
        return {}
    values: dict[int, float] = {}
    pairs = found.get("values")
    for pair in pairs if isinstance(pairs, list) else [pairs]:
        done, value = pair if isinstance(pair, list) and len(pair) == 2 else (None, None)
        least = next(reversed(values), 0)
        if not isinstance(done, int) or not least < done <= steps_done or not _is_number(value):
            raise CheckpointError(
                f"values of {shorten(repr_text(metric))} with {shorten(repr_text(pair))}, {after_steps(steps_done)}",
                cure="use another checkpoint",
            )
        values[done] = float(value)
    return values


def _is_number(value: Json) -> TypeGuard[float | str]:
    if isinstance(value, str):
        return value in ("nan", "inf", "-inf")
    return isinstance(value, (int, float)) and not isinstance(value, bool)
