"""The section `checkpoint` of a job: when checkpoints are saved, and which of them are kept."""

from __future__ import annotations

from typing import Annotated, Literal, TypeVar

from pydantic import Field, NonNegativeInt, PositiveInt, model_validator

from raypar.job.key import CLIENT, DRIVER
from raypar.job.section import Section

T = TypeVar("T")


class BestConfig(Section):
    """Checkpoints that are kept because a metric was best there: `{metric: ..., mode: ..., keep: ...}`, or just its name."""

    metric: Annotated[str, DRIVER]
    """The metric: `validation_loss`, `validation_NAME` for one of `metrics`, `validation/SET/NAME` for one of several
    validation sets, or a number of a training step."""
    mode: Annotated[Literal["min", "max"] | None, DRIVER] = None
    """Whether small or large values are good; None: `min` for a name that ends with `loss`."""
    keep: Annotated[PositiveInt, DRIVER] = 1
    """How many checkpoints are kept for it."""

    @model_validator(mode="before")
    @classmethod
    def _short(cls, value: T) -> T | dict[str, str]:
        return {"metric": value} if isinstance(value, str) else value


class CheckpointConfig(Section):
    """When checkpoints are saved, and how many of them are kept."""

    every: Annotated[NonNegativeInt, DRIVER] = 0
    """Steps from one checkpoint to the next; 0: no checkpoint before the end."""
    keep: Annotated[PositiveInt, DRIVER] = 2
    """How many checkpoints are kept: the newest ones."""
    at_end: Annotated[bool, DRIVER] = True
    """Whether a checkpoint is saved at the end of the run."""
    only: Annotated[Literal["all", "trained"], CLIENT] = "all"
    """What they hold. `trained`: no frozen values that begin as `init_from` has them; these come again from there, and it must
    be the same then. For adapters and heads on a large pretrained model."""
    best: Annotated[tuple[BestConfig, ...], Field(strict=False), DRIVER] = ()
    """The metrics by which the best checkpoints are kept too, beside the newest ones. A validation with a new best value saves
    one."""
