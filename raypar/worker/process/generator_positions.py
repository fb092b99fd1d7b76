"""How far Python's and NumPy's generators are: a few words of each, in place of a copy of its state of 2.5 kB."""

from __future__ import annotations

import ctypes
import random
import sys
from collections.abc import Callable
from typing import Any, NamedTuple

import numpy

from raypar.fences.private_api_fence import Fence

Position = Callable[[], bytes]
"""How far a generator is in its 624 words, and two of these: they change when it draws, all words when it has used them up."""

PYTHON: Any = random.seed.__self__  # type: ignore[attr-defined]
"""The generator behind the functions of the module `random`."""

NUMPY: Any = numpy.random
"""Without types: it has none of `get_bit_generator` and `set_bit_generator`."""

_WORDS = 624
_FEATURE = "seeding Python's and NumPy's generators only for layers that draw from them"
_WITHOUT = "they are seeded before every layer: the same numbers, and predictions with a small model take half a percent longer"


class NumpyPosition(NamedTuple):
    """How far the generator behind the functions of `numpy.random` is."""

    bit_generator: numpy.random.BitGenerator
    """The generator. While there is another, which the user has set, `position` says nothing of it."""
    position: Position
    """How far it is."""


def _three_words_at(address: int) -> Position:
    """A function that reads three words of memory."""
    return memoryview((ctypes.c_uint32 * 3).from_address(address)).tobytes


def _bytes_of(*words: int) -> bytes:
    return b"".join(int(word).to_bytes(4, sys.byteorder) for word in words)


def _look_for_python() -> Position:
    base: Any = random.Random.__base__
    head = object.__basicsize__
    assert sys.implementation.name == "cpython" and base.__basicsize__ >= head + 4 * (_WORDS + 1)

    def checked(generator: random.Random) -> Position:
        *words, index = generator.getstate()[1]
        position = _three_words_at(id(generator) + head)
        assert len(words) == _WORDS and position() == _bytes_of(index, *words[:2])
        return position

    own = random.Random(7)
    fresh = checked(own)()
    own.random()
    assert checked(own)() == _bytes_of(2, *own.getstate()[1][:2]) != fresh
    return checked(PYTHON)


def _look_for_numpy() -> NumpyPosition:
    def checked(generator: Any) -> Position:
        state = generator.state["state"]
        position = _three_words_at(generator.ctypes.state_address + 4 * (_WORDS - 2))
        assert len(state["key"]) == _WORDS and position() == _bytes_of(*state["key"][-2:], state["pos"])
        return position

    own = numpy.random.MT19937(7)
    fresh = checked(own)()
    numpy.random.RandomState(own).rand()
    assert checked(own)() != fresh and own.state["state"]["pos"] == 1
    found = NUMPY.get_bit_generator()
    NUMPY.set_bit_generator  # noqa: B018 - as old as `get_bit_generator`: both or neither
    return NumpyPosition(found, checked(found))


OF_PYTHON: Fence[Position] = Fence(
    api="python.random.Random",
    reason="`getstate` copies all words, which takes longer than to seed the generator",
    versions="3.10 to 3.13",
    feature=_FEATURE,
    without=_WITHOUT,
    probe=_look_for_python,
)
OF_NUMPY: Fence[NumpyPosition] = Fence(
    api="numpy.random.MT19937.ctypes",
    reason="`get_state` copies all words, which takes longer than to seed the generator",
    versions="2.4",
    feature=_FEATURE,
    without=_WITHOUT,
    probe=_look_for_numpy,
)
