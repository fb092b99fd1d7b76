"""Pickles of many objects with large parts in common, such as the plan in what each worker is told: these are pickled once."""

from __future__ import annotations

import io
import pickle
from collections.abc import Iterable
from typing import Any


class SharedPickles:
    """Pickles objects that refer to the `shared` ones, which are told apart by identity; `pickle.loads` reads the results."""

    def __init__(self, shared: Iterable[object]) -> None:
        self._shared = list(shared)
        found = io.BytesIO()
        self._pickler = pickle.Pickler(found)
        self._pickler.dump(self._shared)
        self._pickle = found.getvalue()

    def dumps(self, obj: object) -> bytes:
        """The pickle of one object, with a copy of the shared ones'."""
        found = io.BytesIO()
        pickler = pickle.Pickler(found)
        pickler.memo = self._pickler.memo  # a copy: as if this pickler had pickled the shared objects
        pickler.dump(obj)
        return pickle.dumps(_Parts(self._pickle + found.getvalue()))


class _Parts:
    """Is pickled as a call of `_load`, so that whoever reads it gets the object."""

    def __init__(self, parts: bytes) -> None:
        self._parts = parts

    def __reduce__(self) -> tuple[Any, ...]:
        return _load, (self._parts,)


def _load(parts: bytes) -> object:
    reader = pickle.Unpickler(io.BytesIO(parts))
    reader.load()  # the shared objects, to which the next refers
    found: object = reader.load()
    return found
