"""Data sets for tests of the loader; in a module of their own, so that data processes can import them."""

from __future__ import annotations

import atexit
import multiprocessing
import os
import random
import signal
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy
import torch


class Noisy:
    """Draws from python, numpy and torch for every sample."""

    def __init__(self, size: int = 13) -> None:
        self.size = size

    def __len__(self) -> int:
        return self.size

    def __getitem__(self, index: int) -> dict[str, Any]:
        x = torch.rand(3) + index
        return {"x": x, "noise": numpy.random.rand(2), "draw": random.random(), "id": index, "text": "not a tensor"}


class Of:
    """The samples given."""

    def __init__(self, samples: list[Any]) -> None:
        self.samples = samples

    def __len__(self) -> int:
        return len(self.samples)

    def __getitem__(self, index: int) -> Any:
        return self.samples[index]


class Calm(Of):
    """Needs no seeds; notices whether it gets them."""

    raypar_thread_safe = True

    def __init__(self) -> None:
        super().__init__([(float(i), i) for i in range(8)])


class Stream:
    """An iterable data set."""

    def __iter__(self) -> Iterator[int]:
        return iter(range(3))


class Raises(Noisy):
    """One sample is broken."""

    def __getitem__(self, index: int) -> dict[str, Any]:
        if index == 5:
            raise KeyError("no such picture")
        return super().__getitem__(index)


class Slow(Noisy):
    """Takes for ever."""

    def __getitem__(self, index: int) -> dict[str, Any]:
        time.sleep(600)
        return super().__getitem__(index)


class Dies(Noisy):
    """Ends its process, as one that runs out of memory does."""

    def __getitem__(self, index: int) -> dict[str, Any]:
        os._exit(9)


class Leaves(Noisy):
    """Writes its process id where the test finds it, and `unloads` if Python ends the process."""

    def __init__(self, folder: str) -> None:
        super().__init__()
        self.folder = folder
        atexit.register(Path(folder, "unloads").touch)

    def __getitem__(self, index: int) -> dict[str, Any]:
        Path(self.folder, str(os.getpid())).touch()
        return super().__getitem__(index)


class Managed(Noisy):
    """Keeps samples in the dict of a manager, a process of its own, whose id it writes where the test finds it."""

    def __init__(self, folder: str) -> None:
        super().__init__()
        self.manager = multiprocessing.Manager()
        self.kept = self.manager.dict()
        (process,) = multiprocessing.active_children()
        Path(folder, str(process.pid)).touch()

    def __getitem__(self, index: int) -> dict[str, Any]:
        self.kept[index] = index
        return super().__getitem__(index)


class Stubborn(Leaves):
    """Takes a minute for a sample, and does not end when it is asked to."""

    def __getitem__(self, index: int) -> dict[str, Any]:
        signal.signal(signal.SIGTERM, signal.SIG_IGN)
        found = super().__getitem__(index)
        time.sleep(60)
        return found


def broken_factory() -> Any:
    raise RuntimeError("no data here")
