"""Calls of `torch.vmap` between units: one event each, whose arguments include the tensors that the mapped function holds.

Inside of the mapped function PyTorch's own tensors stand for single elements. They exist only while the call runs, so what is
computed with them cannot be recorded by itself. Masks of attention are made so.
"""

from __future__ import annotations

import functools
import types
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

from torch import Tensor

from raypar.torch_compat.without_dynamo import is_filled_cell

_DEPTH = 12
"""How many functions inside each other are looked into."""


@dataclass(frozen=True)
class _Place:
    """Stands in a function for a tensor that the call is given."""


class MappedCall:
    """`torch.vmap` of one function with its options, as a function of the tensors that it holds and of its arguments."""

    __name__ = "vmap"

    def __init__(self, original: Callable[..., Any], function: Any, options: Sequence[Any]) -> None:
        """`original`: what carries the call out, given the function, the options and the arguments."""
        self._original, self._options = original, options
        self.held = list(_places_in(function))
        """The tensors that the function holds in closures and default arguments."""
        self.function = _filled(function, iter([_Place()] * len(self.held)))
        """The function without them."""

    def __call__(self, held: Sequence[Tensor], args: Sequence[Any], kwargs: Any) -> Any:
        """What the mapped function gives, with these tensors in the place of those that it holds."""
        return self._original(_filled(self.function, iter(held)), *self._options, *args, **kwargs)


def _places_in(value: Any, depth: int = 0) -> Iterator[Any]:
    """The tensors, or what stands for them, that a function holds, those of functions in it among them, in order."""
    if isinstance(value, (Tensor, _Place)):
        yield value
    elif depth <= _DEPTH:
        for part in _parts(value):
            yield from _places_in(part, depth + 1)


def _parts(value: Any) -> list[Any]:
    """What a function, a partial function, a tuple or a list holds; nothing for anything else."""
    if isinstance(value, types.FunctionType):
        cells = [cell.cell_contents for cell in value.__closure__ or () if is_filled_cell(cell)]
        return [*cells, *(value.__defaults__ or ())]
    if isinstance(value, functools.partial):
        return [value.func, *value.args, *value.keywords.values()]
    return list(value) if type(value) in (tuple, list) else []


def _filled(value: Any, tensors: Iterator[Any], depth: int = 0) -> Any:
    """The value with the next `tensors` in the places that `_places_in` finds. What has none stays as it is."""
    if isinstance(value, (Tensor, _Place)):
        return next(tensors)
    if depth > _DEPTH or not any(True for _ in _places_in(value, depth)):
        return value
    parts = iter([_filled(part, tensors, depth + 1) for part in _parts(value)])
    if isinstance(value, types.FunctionType):
        cells = [types.CellType(next(parts)) if is_filled_cell(cell) else cell for cell in value.__closure__ or ()]
        made = types.FunctionType(value.__code__, value.__globals__, value.__name__, None, tuple(cells))
        made.__defaults__ = tuple(parts) if value.__defaults__ is not None else None
        made.__kwdefaults__ = value.__kwdefaults__
        return made
    if isinstance(value, functools.partial):
        function, *rest = parts
        count = len(value.args)
        return functools.partial(function, *rest[:count], **dict(zip(value.keywords, rest[count:], strict=True)))
    return type(value)(parts)
