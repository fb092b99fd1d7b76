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
        self._index = {id(one): index for index, one in enumerate(self._shared)}
        self._pickle = pickle.dumps(self._shared)

    def dumps(self, obj: object) -> bytes:
        """The pickle of one object, with a copy of the shared ones'."""
        own = io.BytesIO()
        _Pickler(own, self._index).dump(obj)
        return pickle.dumps(_Parts(self._pickle, own.getvalue()))


class _Pickler(pickle.Pickler):
    def __init__(self, file: io.BytesIO, index: dict[int, int]) -> None:
        super().__init__(file)
        self._index = index

    def persistent_id(self, obj: object) -> int | None:
        return self._index.get(id(obj))


class _Unpickler(pickle.Unpickler):
    def __init__(self, own: bytes, shared: list[object]) -> None:
        super().__init__(io.BytesIO(own))
        self._shared = shared

    def persistent_load(self, index: int) -> object:
        return self._shared[index]


class _Parts:
    """Is pickled as a call of `_load`, so that whoever reads it gets the object."""

    def __init__(self, shared: bytes, own: bytes) -> None:
        self._parts = shared, own

    def __reduce__(self) -> tuple[Any, ...]:
        return _load, self._parts


def _load(shared: bytes, own: bytes) -> object:
    found: object = _Unpickler(own, pickle.loads(shared)).load()
    return found
