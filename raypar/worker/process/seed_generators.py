"""Seeds the generators that users' code draws from (rule 3 of raypar/NUMERICS.md)."""

from __future__ import annotations

import random
from collections.abc import Callable

import numpy
import torch

from raypar.worker.process.generator_positions import NUMPY, OF_NUMPY, OF_PYTHON, PYTHON, NumpyPosition, Position

_seed_python_from_integer = super(random.Random, PYTHON).seed
_seed_numpy_twister = numpy.random.rand.__self__.seed  # type: ignore[attr-defined]
"""Of the generator behind the functions of `numpy.random`; raises `TypeError` where the user has set another kind of it."""


def seed_python_and_numpy(number: int) -> None:
    """Seed Python's and NumPy's generators by `number`, from 0 to 2**32 - 1.

    As `random.seed` and `numpy.random.seed` do it for an integer, without looking for its type and that of the generator: with
    cold caches that was half, and a quarter, of their time.
    """
    _seed_python_from_integer(number)
    PYTHON.gauss_next = None
    try:
        _seed_numpy_twister(number)
    except TypeError:  # after `numpy.random.set_bit_generator`
        numpy.random.seed(number)


def seed_host_generators(number: int) -> None:
    """Seed the generators that code on the host draws from, for a sample or a batch: with `number` modulo 2**32.

    Of PyTorch the CPU's alone: `torch.manual_seed` visits every kind of device (65 us).
    """
    here = number % 2**32
    seed_python_and_numpy(here)
    torch.default_generator.manual_seed(here)


def make_torch_seeder(device: torch.device) -> Callable[[int], object]:
    """A function that seeds PyTorch's generators from which layers on this device draw.

    It is cheaper than `torch.manual_seed`, which visits every kind of device (65 us).
    """
    seed_cpu: Callable[[int], object] = torch.default_generator.manual_seed
    if device.type != "cuda":
        return seed_cpu
    of_device = torch.cuda.default_generators[device.index or 0].manual_seed

    def seed(number: int) -> None:
        seed_cpu(number)
        of_device(number)

    return seed


def make_seeder(device: torch.device) -> Callable[[int], None]:
    """A function that seeds the generators that layers draw from: PyTorch's, Python's and NumPy's (rule 3 of the contract)."""
    seed_torch = make_torch_seeder(device)

    def seed(number: int) -> None:
        seed_torch(number)
        seed_python_and_numpy(number % 2**32)

    return seed


_NOBODYS = 2654435769


class HostGenerators:
    """Python's and NumPy's generators of this process, which tell whether anybody has drawn since they were seeded."""

    numpy_generator: numpy.random.BitGenerator
    """The generator behind `numpy.random` that is looked at."""
    asked_at_end = False
    """Whether calls that are known to draw nothing are under way, and `are_as_seeded` is asked after all of them."""

    def __init__(self, of_python: Position, of_numpy: NumpyPosition) -> None:
        self.numpy_generator = of_numpy.bit_generator
        self._python, self._numpy = of_python, of_numpy.position
        self._seeded = b"", b""
        """Where both were once they were last seeded here."""

    @staticmethod
    def of_process() -> HostGenerators | None:
        """Those of this process; None, after a warning, where they do not tell how far they are."""
        of_python, of_numpy = OF_PYTHON.find(), OF_NUMPY.find()
        return None if of_python is None or of_numpy is None else HostGenerators(of_python, of_numpy)

    def seed(self, number: int) -> None:
        """Seed both, by `number` modulo 2**32."""
        seed_python_and_numpy(number % 2**32)
        self._seeded = self._python(), self._numpy()

    def seed_if_moved(self, number: int = _NOBODYS) -> None:
        """Seed both, unless they are as they were last seeded here: for calls that are not to draw from them. `number`: any by
        which users' code does not seed them, for who draws, and then seeds them so, would not be seen."""
        if not self.are_as_seeded():
            self.seed(number)

    def are_as_seeded(self) -> bool:
        """Whether nobody has drawn since they were last seeded here. A number that is kept for the next draw, the second of a
        pair of normal ones, has moved them when the first was drawn."""
        return (self._python(), self._numpy()) == self._seeded and NUMPY.get_bit_generator() is self.numpy_generator
