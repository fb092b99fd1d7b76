"""Seeds the generators that users' code draws from (rule 3 of raypar/NUMERICS.md)."""

from __future__ import annotations

import random
from collections.abc import Callable

import numpy
import torch

_PYTHON = random.seed.__self__  # type: ignore[attr-defined]
"""The generator behind the functions of the module `random`."""
_seed_python_from_integer = super(random.Random, _PYTHON).seed
_seed_numpy_twister = numpy.random.rand.__self__.seed  # type: ignore[attr-defined]
"""Of the generator behind the functions of `numpy.random`; raises `TypeError` where the user has set another kind of it."""


def seed_python_and_numpy(number: int) -> None:
    """Seed Python's and NumPy's generators by `number`, from 0 to 2**32 - 1.

    As `random.seed` and `numpy.random.seed` do it for an integer, without looking for its type and that of the generator: with
    cold caches that was half, and a quarter, of their time.
    """
    _seed_python_from_integer(number)
    _PYTHON.gauss_next = None
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


def make_seeder(device: torch.device) -> Callable[[int], None]:
    """A function that seeds the generators that layers draw from: PyTorch's, Python's and NumPy's (rule 3 of the contract).

    It is cheaper than `torch.manual_seed`, which visits every kind of device (65 us).
    """
    seed_cpu = torch.default_generator.manual_seed
    of_device = torch.cuda.default_generators[device.index or 0].manual_seed if device.type == "cuda" else None

    def seed(number: int) -> None:
        seed_cpu(number)
        if of_device is not None:
            of_device(number)
        seed_python_and_numpy(number % 2**32)

    return seed
