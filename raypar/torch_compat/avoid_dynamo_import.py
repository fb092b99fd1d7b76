"""Optimizers, dispatch modes and meta tensors of PyTorch without importing `torch._dynamo`, unless something is compiled.

Their first use in a process makes PyTorch import dynamo, only to tell it not to compile them. That costs each process more than
a CPU second and 70 MiB.
"""

from __future__ import annotations

import contextlib
import functools
import sys
import threading
from collections.abc import Callable, Iterable, Iterator
from types import CodeType, FunctionType
from typing import Any, ParamSpec, TypeVar

import torch
from torch.optim.optimizer import Optimizer

from raypar.fences.private_api_fence import Fence
from raypar.torch_compat import TESTED

P = ParamSpec("P")
R = TypeVar("R")

T = TypeVar("T", bound=type)


def _look_for_wrappers() -> tuple[CodeType, CodeType]:
    from torch.optim import optimizer

    def nothing() -> None:
        """Is wrapped."""

    disabled: Any = torch._disable_dynamo(nothing)  # type: ignore[attr-defined]
    step: Any = optimizer._use_grad_for_differentiable(nothing)
    assert isinstance(disabled.__wrapped__, FunctionType) and isinstance(step.__wrapped__, FunctionType)
    return disabled.__code__, step.__code__


WRAPPERS: Fence[tuple[CodeType, CodeType]] = Fence(
    api="torch._disable_dynamo",
    reason="PyTorch imports its compiler only to tell it what not to compile, and no setting prevents that",
    versions=TESTED,
    feature="leaving out PyTorch's compiler where nothing is compiled",
    without="each process needs over a CPU second and 70 MiB more to start",
    probe=_look_for_wrappers,
)
"""Code objects by which wrapped functions are recognised: of `torch._disable_dynamo`'s wrapper, and of the wrapper of
`Optimizer.step` that sets the gradient mode (`_use_grad_for_differentiable`)."""
_REFERENCE_MODULES = ("torch._refs", "torch._decomp", "torch._prims", "torch._prims_common", "torch._meta_registrations")
"""Packages in which PyTorch implements operations on meta tensors in Python."""
_DISABLED_VARIANT = "__dynamo_disable"
"""Attribute in which `torch._disable_dynamo` caches the variant of a function that dynamo does not compile."""


def without_dynamo(kind: T) -> T:
    """Change the methods of `kind` and its bases so that they do not import `torch._dynamo`; returns `kind`.

    Once dynamo is loaded they use it as before. Idempotent. A method with another wrapper, say of another release of PyTorch,
    is left as it is and imports dynamo.
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
    """The equivalent of `method` without dynamo; None if `method` does not use dynamo."""
    code, wrappers = getattr(method, "__code__", None), WRAPPERS.find()
    if wrappers is None or code not in wrappers:
        return None
    wrapped: Callable[..., Any] = method.__wrapped__

    def step(optimizer: Optimizer, *args: Any, **kwargs: Any) -> Any:
        with torch.set_grad_enabled(optimizer.defaults["differentiable"]):
            return wrapped(optimizer, *args, **kwargs)

    return wrapped if code is wrappers[0] else step


def _unless_loaded(method: Callable[P, R], plain: Callable[P, R]) -> Callable[P, R]:
    """A function that calls `method` if dynamo is loaded, else `plain`."""

    @functools.wraps(method)
    def call(*args: P.args, **kwargs: P.kwargs) -> R:
        return (method if "torch._dynamo" in sys.modules else plain)(*args, **kwargs)

    return call


class _OpenContexts:
    """The open contexts of `meta_operations_without_dynamo` in this process."""

    def __init__(self) -> None:
        self.lock = threading.Lock()
        """Held while `count` and `marked` change."""
        self.count = 0
        """Number of open contexts in all threads."""
        self.marked: list[FunctionType] = []
        """Functions that have the attribute `_DISABLED_VARIANT` until the last context is left."""


_contexts = _OpenContexts()


@contextlib.contextmanager
def meta_operations_without_dynamo() -> Iterator[None]:
    """Context in which operations on meta tensors do not import `torch._dynamo`, unless it is imported already.

    On its first call each such operation asks dynamo for a variant of itself that is never compiled, and caches it in an
    attribute. This context sets the attribute to the operation itself and removes it at the end, so that code compiled later
    finds PyTorch unchanged. An operation that is not found, say in another release of PyTorch, imports dynamo as before.
    """
    with _contexts.lock:
        _contexts.count += 1
        if _contexts.count == 1 and "torch._dynamo" not in sys.modules:
            _contexts.marked = [function for function in _references() if not hasattr(function, _DISABLED_VARIANT)]
            for function in _contexts.marked:
                setattr(function, _DISABLED_VARIANT, function)
    try:
        yield
    finally:
        with _contexts.lock:
            _contexts.count -= 1
            if _contexts.count == 0:
                for function in _contexts.marked:
                    if getattr(function, _DISABLED_VARIANT, None) is function:
                        delattr(function, _DISABLED_VARIANT)
                _contexts.marked = []


@functools.cache
def _references() -> tuple[FunctionType, ...]:
    """The functions of `_REFERENCE_MODULES` that are wrapped in `torch._disable_dynamo`."""
    modules = [module for name, module in list(sys.modules.items()) if name.startswith(_REFERENCE_MODULES)]
    return tuple(_disabled_functions(value for module in modules for value in list(vars(module).values())))


def _disabled_functions(values: Iterable[Any]) -> Iterator[FunctionType]:
    """The functions wrapped in `torch._disable_dynamo` among `values`, also those in dicts and inside other wrappers."""
    wrappers = WRAPPERS.find()
    if wrappers is None:
        return
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
        inside = {name: cell.cell_contents for name, cell in held.items() if is_filled_cell(cell)}
        left.extend(each for each in inside.values() if isinstance(each, FunctionType))
        if value.__code__ is wrappers[0] and isinstance(inside.get("fn"), FunctionType):
            yield inside["fn"]


def is_filled_cell(cell: Any) -> bool:
    """Whether a closure's cell has a value."""
    try:
        cell.cell_contents  # noqa: B018
    except ValueError:
        return False
    return True
