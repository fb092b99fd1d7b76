"""A metric of all predictions of a validation: a `compute_metrics` of transformers, called once, in the order of samples."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import TypeVar

import numpy
import torch
from torch import Tensor

from raypar.errors import UserCodeError, with_article
from raypar.model.graph import ModelOutput
from raypar.plan.wording import count_noun
from raypar.worker.metrics.metric_state import Arrays, KeptPredictions, LiveObject, MetricValue, ObjectState, State

A = TypeVar("A")

NOT_PREDICTED = ("loss", "past_key_values")
"""Parts of a model's output that are no predictions, as in the Trainer of transformers."""
PADDING = -100
"""What rows are filled with whose microbatch is shorter than another."""


@dataclass(frozen=True)
class Predictions:
    """All predictions and labels of a validation, as the `EvalPrediction` of transformers has them."""

    predictions: Arrays
    """An array [samples, ...]; a tuple of arrays where the output has several parts."""
    label_ids: numpy.ndarray
    """The target: an array [samples, ...]."""
    inputs: None = None
    """Not kept."""
    losses: None = None
    """Not kept."""

    def __iter__(self) -> Iterator[Arrays]:
        return iter((self.predictions, self.label_ids))

    def __getitem__(self, index: int) -> Arrays:
        return (self.predictions, self.label_ids)[index]


class PredictionsMetric:
    """A function of all predictions and labels of a validation, which returns numbers by name; see `Metric`."""

    needs_batch = False
    in_training = False
    merges_by_user = False

    def __init__(
        self,
        name: str,
        function: Callable[[Predictions], Mapping[str, MetricValue]],
        *,
        part: str | None,
        preprocess: Callable[[ModelOutput, Tensor], ModelOutput] | None,
        limit_bytes: int,
    ) -> None:
        """`preprocess`: (logits, labels) -> what is kept in the place of logits; `limit_bytes`: of all that is kept."""
        self.name, self.part, self.limit_bytes = name, part, limit_bytes
        self._function, self._preprocess = function, preprocess

    def measure(self, output: ModelOutput, batch: Mapping[str, Tensor], target: Tensor) -> State:
        """See `Metric`: what is kept of one microbatch."""
        logits = _without_other_parts(output)
        if self._preprocess is not None:
            logits = self._preprocess(logits, target)
        return {"microbatches": [(self._kept(logits), self._kept(target))], "samples": len(target)}

    def merge(self, before: State, state: State) -> State:
        """See `Metric`."""
        first, later = _own(before), _own(state)
        first["microbatches"].extend(later["microbatches"])
        return {"microbatches": first["microbatches"], "samples": first["samples"] + later["samples"]}

    def pack(self, states: Sequence[State]) -> list[State]:
        """See `Metric`."""
        return list(states)

    def compute(self, state: State) -> MetricValue:
        """See `Metric`: calls the function."""
        parts = _own(state)["microbatches"]
        labels = _concatenate([labels for _, labels in parts])
        assert isinstance(labels, numpy.ndarray)
        found = self._function(Predictions(_concatenate([logits for logits, _ in parts]), labels))
        if not isinstance(found, Mapping):
            raise UserCodeError(
                f"metric {self.name!r} returned {with_article(type(found).__name__)} for all predictions",
                cure="return a dict of numbers by name, as a compute_metrics of transformers does",
            )
        return found

    def refuse_too_many(self, state: State, samples: int) -> None:
        """Raises `UserCodeError` if so many samples, all like those of `state`, take more than the limit."""
        measured = _own(state)["samples"]
        if not measured:
            return
        nbytes = sum(_count_bytes(part) for part in _own(state)["microbatches"])
        needed = nbytes * samples // measured
        if needed > self.limit_bytes:
            raise UserCodeError(
                f"metric {self.name!r} keeps {nbytes // measured:,} bytes of each of "
                f"{count_noun(samples, 'sample')}: {needed / 2**20:,.0f} MiB in the memory of one worker, and limit_mib is "
                f"{self.limit_bytes >> 20:,}",
                cure=f"keep less: metrics.{self.name}.preprocess_logits, a function of (logits, labels), such as one that "
                "returns logits.argmax(-1); or set validation.samples, or a larger limit_mib",
            )

    def _kept(self, value: ModelOutput) -> Arrays:
        """The arrays of a tensor, or of a tuple of these, in host memory of their own."""
        if isinstance(value, Tensor):
            value = value.detach()
            if value.dtype == torch.bfloat16:
                value = value.float()  # NumPy has none
            return value.to("cpu", copy=True).contiguous().numpy()
        if isinstance(value, Mapping):
            return {key: self._kept(part) for key, part in value.items()}
        if isinstance(value, (tuple, list)):
            return tuple(self._kept(part) for part in value)
        raise UserCodeError(
            f"metric {self.name!r}: the model's predictions are {with_article(type(value).__name__)}, not tensors",
            cure=f"name one part of the output: metrics.{self.name}.output: logits, say; or give preprocess_logits, a function "
            "of (logits, labels) that returns a tensor",
        )


def _own(state: State) -> KeptPredictions:
    assert not isinstance(state, (LiveObject, ObjectState)) and "microbatches" in state
    return state


def _without_other_parts(output: ModelOutput) -> ModelOutput:
    """The predictions in a model's output: of a dict all but the loss and caches, which are a tuple unless there is one."""
    if not isinstance(output, Mapping):
        return output
    parts = tuple(part for name, part in output.items() if name not in NOT_PREDICTED and part is not None)
    return parts[0] if len(parts) == 1 else parts


def _concatenate(parts: Sequence[Arrays]) -> Arrays:
    """Arrays, or tuples or dicts of arrays, of consecutive microbatches as one: dimension 1 is padded to the longest."""
    first = parts[0]
    if isinstance(first, tuple):
        return tuple(_concatenate([part[place] for part in _all_of(tuple, parts)]) for place in range(len(first)))
    if isinstance(first, dict):
        return {key: _concatenate([part[key] for part in _all_of(dict, parts)]) for key in first}
    arrays = [numpy.atleast_1d(part) for part in _all_of(numpy.ndarray, parts)]
    if arrays[0].ndim > 1 and len({array.shape[1] for array in arrays}) > 1:
        longest = max(array.shape[1] for array in arrays)
        arrays = [_padded(array, longest) for array in arrays]
    return numpy.concatenate(arrays)


def _all_of(kind: type[A], parts: Sequence[Arrays]) -> list[A]:
    """The parts, which are all of one kind, as the outputs of one model are."""
    found: list[A] = []
    for part in parts:
        assert isinstance(part, kind), f"one microbatch has {kind.__name__}, another {type(part).__name__}"
        found.append(part)
    return found


def _padded(array: numpy.ndarray, length: int) -> numpy.ndarray:
    room = [(0, 0), (0, length - array.shape[1]), *((0, 0) for _ in array.shape[2:])]
    return numpy.pad(array, room, constant_values=PADDING)


def _count_bytes(value: Arrays) -> int:
    if isinstance(value, numpy.ndarray):
        return value.nbytes
    return sum(map(_count_bytes, value.values() if isinstance(value, dict) else value))
