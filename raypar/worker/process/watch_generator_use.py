"""Notices users' code that reads, sets or seeds the state of Python's or NumPy's generator.

Code that draws and puts the state back leaves no trace in it, and is noticed by that. What else draws leaves the generators in
another state.
"""

from __future__ import annotations

import contextlib
import random
from collections.abc import Iterator
from typing import Any

import numpy

from raypar.worker.process.generator_positions import NUMPY, PYTHON


class GeneratorUse:
    """What was noticed."""

    seen = False
    """Whether the state of a generator was read, set or seeded."""


_use = GeneratorUse()
"""Where it is noted."""


class _Noting(random.Random.__base__):  # type: ignore[name-defined, misc]
    """Stands between `random.Random` and the class in C whose methods it calls."""

    def seed(self, *args: Any) -> Any:
        _use.seen = True
        return super().seed(*args)

    def getstate(self) -> Any:
        _use.seen = True
        return super().getstate()

    def setstate(self, state: Any) -> Any:
        _use.seen = True
        return super().setstate(state)


class _WatchedRandom(random.Random, _Noting):
    """The class of Python's generator while it is watched."""


class _WatchedTwister(numpy.random.MT19937):
    """Stands behind `numpy.random` while the generator there is watched: has its memory and its lock, so draws its numbers."""

    def __init__(self, watched: numpy.random.BitGenerator) -> None:
        object.__setattr__(self, "watched", watched)
        super().__init__(0)

    def __getattribute__(self, name: str) -> Any:
        _use.seen = True
        return getattr(object.__getattribute__(self, "watched"), name)

    def __setattr__(self, name: str, value: Any) -> None:
        _use.seen = True
        setattr(object.__getattribute__(self, "watched"), name, value)


@contextlib.contextmanager
def watching_generator_use(of_numpy: numpy.random.BitGenerator) -> Iterator[GeneratorUse]:
    """Context that notes what is done to both generators, by any thread. `of_numpy`: the one behind `numpy.random`.

    Where another one is there, which the user has set, or another thread watches already, all counts as use.
    """
    global _use
    if type(PYTHON) is not random.Random or NUMPY.get_bit_generator() is not of_numpy:
        found = GeneratorUse()
        found.seen = True
        yield found
        return
    here = _WatchedTwister(of_numpy)
    PYTHON.__class__ = _WatchedRandom
    NUMPY.set_bit_generator(here)
    _use = found = GeneratorUse()
    try:
        yield found
    finally:
        _use = GeneratorUse()
        PYTHON.__class__ = random.Random
        if NUMPY.get_bit_generator() is here:
            state = numpy.random.get_state(legacy=False)
            NUMPY.set_bit_generator(of_numpy)  # forgets the second number of a pair
            numpy.random.set_state(state)
        else:
            found.seen = True
