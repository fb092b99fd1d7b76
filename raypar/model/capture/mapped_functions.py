"""Calls of `torch.vmap` between units: each is one event, whose inputs include the tensors that the mapped function holds.

The mapped function itself runs on batched tensors of functorch. They exist only during the call, so its operations cannot be
recorded one by one. Attention masks are often made this way.
"""

from __future__ import annotations

import functools
import itertools
import types
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

from torch import Tensor

from raypar.model.capture.may_hide_tensors import attributes_of_function, values_of_function
from raypar.torch_compat.without_dynamo import is_filled_cell

_DEPTH = 12
"""Nesting depth to which functions and containers are searched for tensors."""


@dataclass(frozen=True)
class _Placeholder:
    """Stands in a function for a tensor that the function held."""


class MappedCall:
    """A call of `torch.vmap`, as a function of the tensors that the mapped function holds and of the call's arguments."""

    __name__ = "vmap"

    def __init__(self, original: Callable[..., Any], function: Any, options: Sequence[Any]) -> None:
        """`original`: PyTorch's implementation, called with the function, `options`, and then the call's arguments."""
        self._original, self._options = original, options
        self.held = list(_tensors_in(function))
        """The tensors that the function holds in closures and default arguments."""
        self.function = _with_tensors(function, iter([_Placeholder()] * len(self.held)))
        """The function with placeholders for them."""

    def __call__(self, held: Sequence[Tensor], args: Sequence[Any], kwargs: Any) -> Any:
        """The call's result with `held` in the place of the placeholders."""
        return self._original(_with_tensors(self.function, iter(held)), *self._options, *args, **kwargs)


def _tensors_in(value: Any, depth: int = 0) -> Iterator[Any]:
    """The tensors or placeholders that a function holds, directly or in functions and containers that it holds, in order."""
    if isinstance(value, (Tensor, _Placeholder)):
        yield value
    elif depth <= _DEPTH:
        for part in _parts(value):
            yield from _tensors_in(part, depth + 1)


def _parts(value: Any) -> list[Any]:
    """The values that a function, a partial function, a tuple or a list holds; none for anything else."""
    if isinstance(value, types.FunctionType):
        return values_of_function(value)
    if isinstance(value, functools.partial):
        return [value.func, *value.args, *value.keywords.values()]
    return list(value) if type(value) in (tuple, list) else []


def _with_tensors(value: Any, tensors: Iterator[Any], depth: int = 0) -> Any:
    """A copy of `value` in which the next `tensors` replace what `_tensors_in` yields; `value` itself if that is nothing."""
    if isinstance(value, (Tensor, _Placeholder)):
        return next(tensors)
    if depth > _DEPTH or not any(True for _ in _tensors_in(value, depth)):
        return value
    parts = iter([_with_tensors(part, tensors, depth + 1) for part in _parts(value)])
    if isinstance(value, types.FunctionType):
        cells = [types.CellType(next(parts)) if is_filled_cell(cell) else cell for cell in value.__closure__ or ()]
        made = types.FunctionType(value.__code__, value.__globals__, value.__name__, None, tuple(cells))
        made.__defaults__ = value.__defaults__ and tuple(itertools.islice(parts, len(value.__defaults__)))
        made.__kwdefaults__ = value.__kwdefaults__ and dict(zip(value.__kwdefaults__, parts, strict=False))
        vars(made).update(vars(value) | dict(zip(attributes_of_function(value), parts, strict=True)))
        return made
    if isinstance(value, functools.partial):
        function, *rest = parts
        count = len(value.args)
        return functools.partial(function, *rest[:count], **dict(zip(value.keywords, rest[count:], strict=True)))
    return type(value)(parts)
