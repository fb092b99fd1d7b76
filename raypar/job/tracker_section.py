"""An entry of `trackers` in a job: an experiment tracker with its arguments."""

from __future__ import annotations

from typing import Annotated, Any, Literal, TypeVar

from pydantic import model_validator

from raypar.job.key import CLIENT
from raypar.job.section import Section

T = TypeVar("T")


class TrackerConfig(Section):
    """An experiment tracker: `{tracker: tensorboard | wandb | mlflow, args: {...}}`, or just its name."""

    tracker: Annotated[Literal["tensorboard", "wandb", "mlflow"], CLIENT]
    """The kind of tracker."""
    args: Annotated[dict[str, Any], CLIENT] = {}
    """Arguments of the tracker's class."""

    @model_validator(mode="before")
    @classmethod
    def _short(cls, value: T) -> T | dict[str, str]:
        return {"tracker": value} if isinstance(value, str) else value
