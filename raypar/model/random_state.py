"""The state of the three random number generators that users' code draws from: Python's, numpy's and torch's."""

from __future__ import annotations

import contextlib
import random
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import numpy
import torch
from torch import Tensor


@dataclass(frozen=True)
class RandomState:
    """The state of all three generators at one moment."""

    python: tuple[int, tuple[int, ...], float | None]
    numpy: Any
    torch: Tensor

    @staticmethod
    def now() -> RandomState:
        """A copy of the current state."""
        return RandomState(random.getstate(), numpy.random.get_state(), torch.get_rng_state())

    def is_changed(self) -> bool:
        """Whether a generator has another state now."""
        now, kept = numpy.random.get_state(legacy=False), self.numpy
        return (
            random.getstate() != self.python
            or not numpy.array_equal(now["state"]["key"], kept[1])
            or now["state"]["pos"] != kept[2]
            or not torch.equal(torch.get_rng_state(), self.torch)
        )

    def restore(self) -> None:
        """Set the generators to this state: they draw the same numbers again."""
        random.setstate(self.python)
        numpy.random.set_state(self.numpy)
        torch.set_rng_state(self.torch)


def seed_all(seed: int) -> None:
    """Seed all three generators, as one process does before it calls the model function (rule 2 of the numerics contract)."""
    random.seed(seed)
    numpy.random.seed(seed % 2**32)
    torch.manual_seed(seed)


@contextlib.contextmanager
def preserve_random_state() -> Iterator[None]:
    """Restore the generators on exit."""
    before = RandomState.now()
    try:
        yield
    finally:
        before.restore()
