"""Optimizers and dispatch modes of PyTorch without `torch._dynamo`, as long as nobody compiles anything.

PyTorch imports it with the first of them in a process, only to tell it to leave these methods alone. That costs each process
more than a second of a processor and 70 MiB.
"""

from __future__ import annotations

import functools
import sys
from collections.abc import Callable
from typing import Any, TypeVar

import torch
from torch.optim.optimizer import Optimizer, _use_grad_for_differentiable

T = TypeVar("T", bound=type)

_DISABLED = torch._disable_dynamo(lambda: None).__code__
"""The code object of every method that PyTorch wraps in `torch._disable_dynamo`."""
_STEP = _use_grad_for_differentiable(lambda: None).__code__
"""The code object of every `step` that sets the gradient mode between two breaks of dynamo's graph."""


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
