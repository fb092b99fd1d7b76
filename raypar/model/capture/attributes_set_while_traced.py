"""Notices attributes that modules set while they are traced, and refuses what reads them later."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any, TypeVar

from torch import Tensor, nn

from raypar.model.capture.refusal import Refused, user_location

T = TypeVar("T")

_KEPT = (bool, int, float, complex, str, type(None), Tensor)
"""Types of values that are looked at."""


class UnitAttributes:
    """Refuses reads of an attribute that another event of the same forward has set.

    Layers are apart: what the call of one sets, or code between them, the others do not see. Numbers, texts and tensors are
    looked at; what other objects hold is seen if it is a tensor (`OperationWatch`).
    """

    def __init__(self, units: Mapping[str, nn.Module], varies: Callable[[Tensor], bool]) -> None:
        """`varies`: whether a tensor has other values in another forward."""
        self._varies = varies
        self._names = {
            id(part): f"{name}.{path}" if path else name for name, unit in units.items() for path, part in unit.named_modules()
        }
        """`id` of every module inside of a unit -> its qualified name."""
        self._set: dict[tuple[int, str], tuple[int | None, Any]] = {}
        """(`id` of a module, attribute) -> (event in which it was last set, its value before the forward)."""

    def note_write(self, module: nn.Module, key: str, value: Any, event: int | None) -> None:
        """An attribute is about to be set. `event`: number of the event that runs; None while code between units does."""
        if id(module) not in self._names:
            return
        attribute, former = (id(module), key), vars(module).get(key)
        if attribute in self._set:
            former = self._set[attribute][1]
        elif not (isinstance(value, _KEPT) or isinstance(former, _KEPT)) or _is_same(value, former):
            return
        self._set[attribute] = (event, former)

    def is_set(self, module: nn.Module, key: str) -> bool:
        """Whether the forward has set an attribute."""
        return (id(module), key) in self._set

    def check_read(self, module: nn.Module, key: str, event: int | None) -> None:
        """Raises `Refused` if an attribute that the forward has set is read in another event than that."""
        setter, former = self._set[id(module), key]
        value = vars(module).get(key)
        if setter == event or not isinstance(value, _KEPT) or _is_same(value, former):
            return
        if isinstance(value, Tensor) and not self._varies(value):
            return
        reader = "code between units" if event is None else "another call"
        by = "code between units has set" if setter is None else "the call of a unit has set"
        raise Refused(
            f"{reader} reads the attribute {key!r} of {self._names[id(module)]} ({type(module).__name__}) at "
            f"{user_location()}, which {by}: in a record it would stay as it is now",
            "pass it as an argument, or return it as a tensor; or make a module around both a unit (model.units)",
        )


def _is_same(value: T, other: T) -> bool:
    return value is other or (type(value) is type(other) and not isinstance(value, Tensor) and bool(value == other))
