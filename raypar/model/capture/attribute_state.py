"""What an attribute holds, to be compared before and after a forward: numbers, containers, tensors, generators."""

from __future__ import annotations

import random
from typing import Any, NamedTuple

import numpy
from torch import Tensor

_PLAIN = (bool, int, float, complex, str, bytes, type(None))
_DEPTH = 4
"""How many containers inside each other are looked into."""


class _Written(NamedTuple):
    """A tensor."""

    tensor: int
    """Its `id`."""
    writes: int
    """How often it has been written."""


class _Identity(int):
    """`id` of an object that is not looked into."""


def state_of(value: Any, depth: int = 0) -> Any:
    """What an attribute holds: numbers and texts by value, containers by content, tensors by identity and number of writes,
    generators of random numbers by their state, other objects by identity."""
    if isinstance(value, _PLAIN):
        return value
    if isinstance(value, Tensor):
        return _Written(id(value), 0 if value.is_inference() else value._version)
    if isinstance(value, random.Random):
        return value.getstate()
    if isinstance(value, (numpy.random.Generator, numpy.random.BitGenerator)):
        bits: Any = getattr(value, "bit_generator", value)
        return repr(bits.state)
    if isinstance(value, numpy.ndarray):
        return (value.shape, value.tobytes()) if value.dtype != object else _Identity(id(value))
    if depth < _DEPTH and isinstance(value, dict):
        return {key: state_of(each, depth + 1) for key, each in value.items()}
    if depth < _DEPTH and isinstance(value, (list, tuple)):
        return [state_of(each, depth + 1) for each in value]
    return _Identity(id(value))


def is_changed(before: Any, after: Any) -> bool:
    """Whether something that was there has changed: a number, a tensor by a write, a generator by drawing.

    What was None, or is another tensor or object now, may be a cache, as may be what was added to a dict or at the end of a
    list: it is compared by what a second forward does with it.
    """
    if isinstance(before, dict) and isinstance(after, dict):
        return any(key in after and is_changed(each, after[key]) for key, each in before.items())
    if isinstance(before, list) and isinstance(after, list):
        return any(map(is_changed, before, after))
    if isinstance(before, _Written) and isinstance(after, _Written):
        return before.tensor == after.tensor and before.writes != after.writes
    return type(before) is type(after) and before is not None and not isinstance(before, _Identity) and bool(before != after)
