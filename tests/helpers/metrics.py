"""Metrics of tests: functions, and objects with the protocol of torchmetrics, written by hand."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor


def accuracy(output: Tensor, target: Tensor) -> tuple[Tensor, int]:
    """(right tokens, tokens)."""
    return (output.argmax(-1) == target).sum(), target.numel()


def certainty(output: Tensor, batch: Mapping[str, Tensor]) -> tuple[Tensor, Tensor]:
    """(probability of what is most likely, in tokens that are not padding; how many they are): a sum whose order shows."""
    counted = batch["x"] != 0
    return (output.softmax(-1).amax(-1) * counted).sum(), counted.sum()


def energy(output: Tensor, target: Tensor) -> Tensor:
    """One tensor that adds up."""
    return output.double().square().sum()


def by_place(output: Tensor, target: Tensor) -> tuple[Tensor, Tensor]:
    """A value for each of the first two places."""
    return (output.argmax(-1) == target)[:, :2].sum(0), torch.full((2,), len(target))


def dropped(output: Tensor, target: Tensor) -> tuple[Tensor, int]:
    """Draws random numbers."""
    return torch.nn.functional.dropout(output, 0.5).sum(), 1


class Median:
    """Keeps all values, in order, and merges by appending."""

    def __init__(self, scale: float = 1.0) -> None:
        self.scale = scale
        self.reset()

    def reset(self) -> None:
        self.seen: list[Tensor] = []

    def update(self, output: Tensor, target: Tensor) -> None:
        self.seen.append(self.scale * output.amax(-1).flatten())

    def merge_state(self, other: Median) -> None:
        self.seen += other.seen

    def compute(self) -> dict[str, Tensor]:
        values = torch.cat(self.seen)
        return {"median": values.median(), "first": values[0], "last": values[-1]}


class LikeTorchmetrics:
    """What raypar uses of a torchmetrics object: states by name, and a rule of reduction for each."""

    def __init__(self) -> None:
        self._defaults = {"total": torch.tensor(0.0), "mean": torch.tensor(0.0), "seen": []}
        self._update_count = 0
        self.compiled = lambda: None  # such objects hold what cannot be pickled
        self.reset()

    def reset(self) -> None:
        self.total, self.mean, self.seen, self._update_count = torch.tensor(0.0), torch.tensor(0.0), [], 0

    def update(self, output: Tensor, target: Tensor) -> None:
        self._update_count += 1
        self.total = self.total + output.sum()
        self.seen.append(output.flatten()[:1])

    def _reduce_states(self, incoming_state: Mapping[str, Any]) -> None:
        self.total = incoming_state["total"] + self.total
        self.seen = incoming_state["seen"] + self.seen

    def compute(self) -> Tensor:
        return torch.stack([self.total, torch.cat(self.seen).cumsum(0)[-1]])


class LastOnly(Median):
    """Depends on what came before, which no merge knows."""

    def merge_state(self, other: Median) -> None:
        self.seen = other.seen + self.seen


class CannotMerge:
    """Has no merge_state."""

    def update(self, output: Tensor, target: Tensor) -> None: ...

    def compute(self) -> float:
        return 0.0

    def reset(self) -> None: ...
