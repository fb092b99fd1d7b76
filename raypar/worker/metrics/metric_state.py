"""The types of what metrics measure: their states after a microbatch, and the values that states make."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Protocol, SupportsFloat, TypeAlias, TypedDict, final

if TYPE_CHECKING:
    import numpy
    from torch import Tensor

    from raypar.model.graph import ModelOutput

Arrays: TypeAlias = "numpy.ndarray | tuple[Arrays, ...] | dict[str, Arrays]"
"""Predictions or labels in host memory, nested as the model's output is."""
MetricValue: TypeAlias = "Tensor | SupportsFloat | Mapping[str, MetricValue] | list[MetricValue] | tuple[MetricValue, ...]"
"""What a metric computes: a number, a vector of numbers, or numbers by name."""


class MetricObject(Protocol):
    """An object that measures: it takes microbatches one after the other, and computes a value of all."""

    def update(self, output: ModelOutput, target: Tensor, /) -> object:
        """Take one microbatch."""

    def compute(self) -> MetricValue:
        """The value of all that it has taken."""

    def reset(self) -> object:
        """Forget all."""


@final
class Summands(TypedDict):
    """The state of a function that measures."""

    parts: tuple[Tensor, ...]
    """(sum, count), or one tensor that adds up."""


@final
class KeptPredictions(TypedDict):
    """The state of a metric of all predictions."""

    microbatches: list[tuple[Arrays, Arrays]]
    """(predictions, labels) of each microbatch."""
    samples: int
    """How many samples they have."""


@final
class KeptOutput(TypedDict):
    """What a run that predicts keeps of a microbatch."""

    bytes: bytes


@dataclass(frozen=True)
class LiveObject:
    """The state of an object that measures, as long as its worker keeps it: the object itself. It is not sent."""

    one: MetricObject


class ObjectState(dict[str, object]):
    """The state of an object that measures, as it is sent: its attributes by name."""


State: TypeAlias = "Summands | KeptPredictions | KeptOutput | LiveObject | ObjectState"
"""What a metric has measured of one microbatch, or of all so far."""
