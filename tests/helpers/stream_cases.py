"""Iterable data sets for tests of streams, in a module of their own, so that workers can import them."""

from __future__ import annotations

import random
from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor

WIDTH = 6


def row(index: int) -> dict[str, Any]:
    """Sample `index`: `x` [6] with noise drawn where it is read, and its number as `y`."""
    x = torch.linspace(-1, 1, WIDTH) * (index + 1) / 23 + 0.05 * torch.randn(WIDTH) + random.random() / 100
    return {"x": x, "y": float(index % 5) / 5, "id": index}


def part(size: int) -> range:
    """The numbers of the samples that this worker of a `DataLoader` reads: every n-th."""
    info = torch.utils.data.get_worker_info()
    return range(size) if info is None else range(info.id, size, info.num_workers)


class Divided(torch.utils.data.IterableDataset[dict[str, Any]]):
    """Divides itself as PyTorch's documentation says."""

    def __init__(self, size: int = 23) -> None:
        self.size = size

    def __iter__(self) -> Iterator[dict[str, Any]]:
        return (row(index) for index in part(self.size))


class Plain:
    """Any object with `__iter__`: gives every worker all samples, in another order in each epoch."""

    def __init__(self, size: int = 23) -> None:
        self.size, self.epoch = size, 0

    def set_epoch(self, epoch: int) -> None:
        self.epoch = epoch

    def __iter__(self) -> Iterator[dict[str, Any]]:
        for index in range(self.size):
            yield row((index + 3 * self.epoch) % self.size)


def generated(size: int = 23) -> Iterator[dict[str, Any]]:
    """A generator function: each call begins at the first sample."""
    for index in part(size):
        yield row(index)


def whole(size: int = 23) -> Iterator[dict[str, Any]]:
    """A generator function that does not divide itself."""
    for index in range(size):
        yield row(index)


class Resuming(Divided):
    """Keeps where it is, as `datasets` do: `state_dict` and `load_state_dict`."""

    given = 0
    begin = 0

    def state_dict(self) -> dict[str, int]:
        return {"given": self.given}

    def load_state_dict(self, state: dict[str, int]) -> None:
        self.begin = state["given"]

    def __iter__(self) -> Iterator[dict[str, Any]]:
        self.given, self.begin = self.begin, 0
        for index in part(self.size)[self.given :]:
            self.given += 1
            yield row(index)


class Buffered(Resuming):
    """Shuffles by a buffer, which its state does not have, as `datasets` do."""

    def __iter__(self) -> Iterator[dict[str, Any]]:
        buffer: list[dict[str, Any]] = []
        dice = random.Random(5)
        for one in super().__iter__():
            buffer.append(one)
            if len(buffer) > 4:
                yield buffer.pop(dice.randrange(len(buffer)))
        yield from buffer


class Empty(Divided):
    """Gives nothing."""

    def __iter__(self) -> Iterator[dict[str, Any]]:
        return iter(())


class Raises(Divided):
    """Raises in the middle."""

    def __iter__(self) -> Iterator[dict[str, Any]]:
        for index in part(self.size):
            if index == 11:
                raise RuntimeError("sample 11 is broken")
            yield row(index)


ONCE = iter([row(index) for index in range(40)])


def once() -> Iterator[dict[str, Any]]:
    """The same iterator at each call."""
    return ONCE


def mean_loss(output: Tensor, target: Tensor) -> Tensor:
    return ((output.squeeze(-1) - target) ** 2).mean()
