"""The section `average` of a job: a moving average of the weights."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Annotated, Any, Literal, TypeVar

from pydantic import Field, NonNegativeInt, PositiveInt, model_validator

from raypar.errors import ConfigError
from raypar.files.printable_text import shorten
from raypar.job.section import Section

T = TypeVar("T")


class AverageConfig(Section):
    """A moving average of the weights (EMA), which trains nothing itself: `{decay: 0.999, every: 1, from: 100}`."""

    decay: Annotated[float, Field(gt=0, lt=1)] = 0.999
    """What an update keeps of the average: it becomes decay * average + (1 - decay) * weights."""
    every: PositiveInt = 1
    """Every how many steps the average is updated, counted from `from`: with 2 and 3 after steps 5, 7, 9, ..."""
    from_step: NonNegativeInt = 0
    """Number of steps after which the average begins, with the weights of then; `from` is understood too."""
    validate_with: Literal["weights", "average"] = "weights"
    """What validations compute with, and so what the best checkpoint is the best of: the weights, or their average once it
    has begun."""

    @model_validator(mode="before")
    @classmethod
    def _from(cls, value: T) -> T | dict[str, Any]:
        if not isinstance(value, Mapping) or "from" not in value:
            return value
        if "from_step" in value:
            raise ConfigError(
                f"average has from: {shorten(value['from'])} and from_step: {shorten(value['from_step'])}, which is the same",
                cure="leave one of them out",
            )
        return {"from_step" if key == "from" else key: part for key, part in value.items()}
