"""The metrics of a job: functions and objects that measure the model's output, and their names."""

from __future__ import annotations

import re
from collections.abc import Collection, Mapping
from dataclasses import fields
from typing import Literal

from pydantic import PositiveInt, model_validator

from raypar.errors import ConfigError
from raypar.job.function_section import FunctionConfig
from raypar.record.metric_names import VALIDATION

METRIC_NAME = r"[A-Za-z_][\w.-]{0,59}"
"""What the name of a metric must be, as a regular expression."""


class MetricConfig(FunctionConfig):
    """A metric: a function of (output, batch) or (output, target) that returns (sum, count) or a tensor that adds up; or a
    class whose objects have `update(output, target)`, `compute`, `reset` and `merge_state`, as those of torchmetrics."""

    exact: bool = True
    """Whether the merged states of microbatches must give the bits of one object that is updated in order. `false`: a metric
    that does not is used all the same, and the run says that it is not exact."""
    output: str | None = None
    """The part of the model's output that it gets, by name, such as `logits` of a model of transformers; None: all of it."""
    of: Literal["microbatch", "all"] = "microbatch"
    """`microbatch`: it measures each microbatch. `all`: the function is called once in a validation, with an object that has
    `predictions` and `label_ids` of all samples in their order, as a `compute_metrics` of transformers; it returns a dict."""
    preprocess_logits: FunctionConfig | None = None
    """With `of: all`: a function of (logits, labels) that returns what is kept of each microbatch in the place of the logits,
    as `preprocess_logits_for_metrics` of transformers."""
    limit_mib: PositiveInt = 1024
    """With `of: all`: most memory of one worker for what is kept of a validation, in MiB."""

    @model_validator(mode="after")
    def _keeps_all(self) -> MetricConfig:
        if self.of != "all" and self.preprocess_logits is not None:
            raise ConfigError(
                f"the metric {self.label} has preprocess_logits, and measures each microbatch by itself",
                cure="set of: all, for a function of all predictions; or leave it out",
            )
        return self


def check_metric_names(metrics: Mapping[str, MetricConfig]) -> None:
    """Raises `ConfigError` for the name of a metric that is none, or that another series of the run has."""
    from raypar.record.events import StepRecord, ValidationRecord

    of_every_run = {"kind", *(one.name for record in (StepRecord, ValidationRecord) for one in fields(record))}
    for name in metrics:
        if re.fullmatch(METRIC_NAME, name) is None:
            raise ConfigError(
                f"metrics: {name!r} is no name of a metric",
                cure="at most 60 letters, digits, '_', '.' and '-', the first one a letter or '_'",
            )
        taken = next((one for one in (name, VALIDATION + name) if one in of_every_run), None)
        if taken is not None:
            raise ConfigError(f"metrics: {name!r} takes the name of {taken}, which every run has", cure="give it another name")
        if name.startswith(VALIDATION) and name.removeprefix(VALIDATION) in metrics:
            raise ConfigError(
                f"metrics: {name!r} takes the name of {name.removeprefix(VALIDATION)!r} in validation",
                cure="give it another name",
            )


def mode_of(metric: str, mode: Literal["min", "max"] | None, key: str) -> Literal["min", "max"]:
    """Whether small or large values of a metric are good. Raises `ConfigError` where neither the job nor the name says it."""
    if mode is None and not metric.lower().endswith("loss"):
        raise ConfigError(
            f"{key} does not say whether small or large values of {metric} are good",
            cure=f"set mode: max (an accuracy, say) or mode: min (an error) beside metric: {metric}",
        )
    return mode or "min"


def check_metric_is_computed(metric: str, known: Collection[str], key: str) -> None:
    """Raises `ConfigError` for a metric that none of the names of series stands for; `name/part` is a part of one."""
    if metric not in known and not metric.startswith(tuple(f"{one}/" for one in known)):
        raise ConfigError(
            f"{key} names the metric {metric!r}, which nobody computes",
            cure=f"it is one of {', '.join(sorted(known))}; metrics of training need metrics_every",
        )
