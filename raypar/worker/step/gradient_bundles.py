"""Gradients of values on their way back: how a bundle of them is made, read, and added to what has come before.

A bundle has one tensor for each of its values: the gradient, or the sum of gradients; an empty vector where none is defined,
so that the receiver skips it as autograd would. The gradients of a value's uses that travel apart (`GradientRelay.apart`) are
as many as the layers have made in this very microbatch, which no plan knows. Where there are several, an integer stands in the
place of the value and says how many, and they follow behind all values, newest first. Each is a message of its own: strides
and places in memory travel with it, and differ from use to use.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence

import torch
from torch import Tensor

from raypar.worker.stage.stage import HandedBack, fold_gradients

_UNDEFINED = torch.empty(0)


def bundle_of_gradients(gradients: Sequence[HandedBack]) -> list[Tensor]:
    """The tensors of a bundle. `gradients`: by value."""
    by_value: list[Tensor] = []
    following: list[Tensor] = []
    for gradient in gradients:
        uses = gradient if isinstance(gradient, tuple) else () if gradient is None else (gradient,)
        if len(uses) > 1:
            by_value.append(torch.tensor([len(uses)], device="cpu"))
            following += uses
        else:
            by_value.append(uses[0] if uses else _UNDEFINED)
    return by_value + following


def count_uses_apart(by_value: Sequence[Tensor]) -> int:
    """How many gradients follow behind those of a bundle that stand for its values."""
    return sum(int(tensor) for tensor in by_value if _is_count(tensor))


def gradients_of_bundle(values: Sequence[str], tensors: Sequence[Tensor]) -> Iterator[tuple[str, Tensor]]:
    """(value, gradient), those of one value newest first."""
    following = iter(tensors[len(values) :])
    for value, tensor in zip(values, tensors, strict=False):
        for _ in range(int(tensor) if _is_count(tensor) else 1):
            yield value, next(following) if _is_count(tensor) else tensor


def add_gradient(newer: Tensor | None, gradient: Tensor) -> Tensor:
    """The sum of the newer gradients of a value, if there are any, and the next one. Undefined ones are as in bundles."""
    if newer is None:
        return gradient
    with torch.no_grad():
        total = fold_gradients([_defined(newer), _defined(gradient)])
    return _UNDEFINED if total is None else total


def sums_of_gradients(received: Mapping[str, Tensor]) -> dict[str, Tensor | None]:
    """Value -> the sum of its gradients in later stages, None where undefined."""
    return {value: _defined(tensor) for value, tensor in received.items()}


def _is_count(tensor: Tensor) -> bool:
    """Whether it stands for several gradients, which are never integers."""
    return tensor.dtype == torch.int64


def _defined(gradient: Tensor) -> Tensor | None:
    return None if gradient.dim() == 1 and gradient.numel() == 0 else gradient
