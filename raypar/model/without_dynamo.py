"""Optimizers, dispatch modes and meta tensors of PyTorch without `torch._dynamo`, as long as nobody compiles anything.

PyTorch imports it with the first of them in a process, only to tell it to leave these functions alone. That costs each process
more than a second of a processor and 70 MiB.
"""

from __future__ import annotations

import contextlib
import functools
import sys
import threading
from collections.abc import Callable, Iterable, Iterator
from types import FunctionType
from typing import Any, TypeVar

import torch
from torch.optim.optimizer import Optimizer, _use_grad_for_differentiable

T = TypeVar("T", bound=type)

_DISABLED = torch._disable_dynamo(lambda: None).__code__
"""The code object of every method that PyTorch wraps in `torch._disable_dynamo`."""
_STEP = _use_grad_for_differentiable(lambda: None).__code__
"""The code object of every `step` that sets the gradient mode between two breaks of dynamo's graph."""
_REFERENCE_MODULES = ("torch._refs", "torch._decomp", "torch._prims", "torch._prims_common", "torch._meta_registrations")
"""Where PyTorch keeps its operations on meta tensors that are written in Python; modules below them too."""
_ANSWER = "__dynamo_disable"
"""Attribute of a function in which `torch._disable_dynamo` keeps what it calls instead of the function."""


def without_dynamo(kind: T) -> T:
    """Return `kind`; its methods, and those of its bases, no longer import `torch._dynamo`. Where it is loaded they use it.

    Idempotent. A method that is wrapped otherwise, by another release of PyTorch say, is left as it is: it costs the time.
    """
    for owner in kind.__mro__:
        for name, method in list(vars(owner).items()):
            hooked = getattr(method, "hooked", False)  # by the first optimizer of the class
            made = method.__wrapped__ if hooked else method
            plain = _plain(made)
            if plain is None:
                continue
            changed = _unless_loaded(made, plain)
            if hooked:
                changed = Optimizer.profile_hook_step(changed)
                vars(changed)["hooked"] = True
            setattr(owner, name, changed)
    return kind


def _plain(method: Any) -> Callable[..., Any] | None:
    """What `method` does without dynamo; None if it does not call it."""
    code = getattr(method, "__code__", None)
    if code is not _DISABLED and code is not _STEP:
        return None
    wrapped: Callable[..., Any] = method.__wrapped__

    def step(optimizer: Optimizer, *args: Any, **kwargs: Any) -> Any:
        with torch.set_grad_enabled(optimizer.defaults["differentiable"]):
            return wrapped(optimizer, *args, **kwargs)

    return wrapped if code is _DISABLED else step


def _unless_loaded(method: Callable[..., Any], plain: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(method)
    def call(*args: Any, **kwargs: Any) -> Any:
        return (method if "torch._dynamo" in sys.modules else plain)(*args, **kwargs)

    return call


class _OpenContexts:
    """How many contexts of `references_without_dynamo` are open in this process."""

    def __init__(self) -> None:
        self.lock = threading.Lock()
        """Held while `count` and the functions' attributes change."""
        self.count = 0
        """Number of open contexts, of all threads."""
        self.answered: list[FunctionType] = []
        """Functions that have got an answer until the last of them ends."""


_contexts = _OpenContexts()


@contextlib.contextmanager
def references_without_dynamo() -> Iterator[None]:
    """Within: no operation on meta tensors imports `torch._dynamo`, unless it has been imported before.

    Each of these operations asks it once for a variant that is never compiled, and keeps the answer. Within, the answer is the
    operation itself; afterwards there is none again, so that code which is compiled later finds PyTorch as it was. An operation
    that is not found, in another release of PyTorch say, costs the time.
    """
    with _contexts.lock:
        _contexts.count += 1
        if _contexts.count == 1 and "torch._dynamo" not in sys.modules:
            _contexts.answered = [function for function in _references() if not hasattr(function, _ANSWER)]
            for function in _contexts.answered:
                setattr(function, _ANSWER, function)
    try:
        yield
    finally:
        with _contexts.lock:
            _contexts.count -= 1
            if _contexts.count == 0:
                for function in _contexts.answered:
                    if getattr(function, _ANSWER, None) is function:
                        delattr(function, _ANSWER)
                _contexts.answered = []


@functools.cache
def _references() -> tuple[FunctionType, ...]:
    """The functions of PyTorch's reference modules that are wrapped in `torch._disable_dynamo`."""
    modules = [module for name, module in list(sys.modules.items()) if name.startswith(_REFERENCE_MODULES)]
    return tuple(_disabled_functions(value for module in modules for value in list(vars(module).values())))


def _disabled_functions(values: Iterable[Any]) -> Iterator[FunctionType]:
    """The functions below `torch._disable_dynamo` in the values, and in what their wrappers and tables hold."""
    left, seen = list(values), set[int]()
    while left:
        value = left.pop()
        if id(value) in seen:
            continue
        seen.add(id(value))
        if isinstance(value, dict):
            left.extend(each for each in list(value.values()) if isinstance(each, (dict, FunctionType)))
        if not isinstance(value, FunctionType):
            continue
        held = dict(zip(value.__code__.co_freevars, value.__closure__ or (), strict=True))
        inside = {name: cell.cell_contents for name, cell in held.items() if _is_filled(cell)}
        left.extend(each for each in inside.values() if isinstance(each, FunctionType))
        if value.__code__ is _DISABLED and isinstance(inside.get("fn"), FunctionType):
            yield inside["fn"]


def _is_filled(cell: Any) -> bool:
    try:
        cell.cell_contents  # noqa: B018
    except ValueError:
        return False
    return True
