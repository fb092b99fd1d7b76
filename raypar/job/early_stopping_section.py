"""The section `early_stopping` of a job: when a run ends before its last step."""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import NonNegativeFloat, PositiveInt

from raypar.job.key import CLIENT
from raypar.job.section import Section


class EarlyStoppingConfig(Section):
    """When a run stops early: if a metric has not become better by more than `min_delta` for `patience` values in a row."""

    patience: Annotated[PositiveInt, CLIENT] = 3
    """Values in a row without a new best after which the run stops."""
    min_delta: Annotated[NonNegativeFloat, CLIENT] = 0.0
    """By how much a value has to be better to count as the best."""
    metric: Annotated[str, CLIENT] = "validation_loss"
    """The metric: `validation_loss`, `validation_NAME` for one of `metrics`, `validation/SET/NAME` for one of several
    validation sets, or a number of training steps."""
    mode: Annotated[Literal["min", "max"] | None, CLIENT] = None
    """Whether small or large values are good; None: `min` for a name that ends with `loss`."""
