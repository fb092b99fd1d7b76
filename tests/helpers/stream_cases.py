"""Iterable data sets for tests of streams, in a module of their own, so that workers can import them."""

from __future__ import annotations

import io
import random
import tarfile
import tempfile
from collections.abc import Generator, Iterator
from functools import cache
from typing import Any

import numpy
import pyarrow
import torch
from torch import Tensor

from raypar.data.shared_rows import FedRowIterator, RowFeed
from raypar.data.tar_shards import TarShards

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


def divided_when_called(size: int = 23) -> Iterator[dict[str, Any]]:
    """A function that divides the samples when it is called, and returns an iterator."""
    numbers = part(size)
    return map(row, numbers)


class DividedTwice(Divided):
    """Asks which worker it is when it is made too, where a `DataLoader` has none yet."""

    def __init__(self, size: int = 23) -> None:
        super().__init__(size)
        self.numbers = part(size)

    def __iter__(self) -> Iterator[dict[str, Any]]:
        return (row(self.numbers[place]) for place in part(len(self.numbers)))


class Drawn(Divided):
    """Chooses the order of its samples when it is made, and divides them when it is read."""

    def __init__(self, size: int = 23) -> None:
        super().__init__(size)
        self.order = random.sample(range(size), size)

    def __iter__(self) -> Iterator[dict[str, Any]]:
        return (row(self.order[place]) for place in part(self.size))


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


class Sticky(Buffered):
    """Begins with the state that was loaded each time that it is read, as `datasets` do within an epoch."""

    def load_state_dict(self, state: dict[str, int]) -> None:
        self.loaded = state["given"]

    def __iter__(self) -> Iterator[dict[str, Any]]:
        self.begin = getattr(self, "loaded", 0)
        return super().__iter__()


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


@cache
def _shards(size: int) -> tempfile.TemporaryDirectory[str]:
    folder = tempfile.TemporaryDirectory()
    for shard in range(3):
        with tarfile.open(f"{folder.name}/{shard}.tar", "w") as tar:
            for index in range(shard, size, 3):
                for name, value in (("x", row(index)["x"].numpy()), ("y", numpy.float32(index % 5 / 5))):
                    numpy.save(file := io.BytesIO(), value)
                    member = tarfile.TarInfo(f"{index}.{name}.npy")
                    member.size = len(file.getvalue())
                    tar.addfile(member, io.BytesIO(file.getvalue()))
    return folder


def tar_shards(size: int = 23) -> TarShards:
    """Three tar files, of which the fields are `x.npy` and `y.npy`."""
    return TarShards(f"{_shards(size).name}/*.tar")


class Fed:
    """Rows that a feed hands out, as the actor of a `ray.data.Dataset` does."""

    raypar_thread_safe = True
    num_shards = 1

    def __init__(self, size: int = 23) -> None:
        rows = [{"x": [(index + place) / size for place in range(WIDTH)], "y": index % 5 / 5} for index in range(size)]
        self.table = pyarrow.Table.from_pylist(rows)
        self.feed = RowFeed(self.blocks)

    def blocks(self) -> Generator[pyarrow.Table]:
        for start in range(0, self.table.num_rows, 5):
            yield self.table.slice(start, 5)

    def __iter__(self) -> FedRowIterator:
        return FedRowIterator(self.feed.read, lambda: "the actor")

    def raypar_close(self) -> None:
        self.feed.close()


def mean_loss(output: Tensor, target: Tensor) -> Tensor:
    return ((output.squeeze(-1) - target) ** 2).mean()
