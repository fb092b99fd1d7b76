"""Operations on lists of tensors in one call."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from raypar.fences.private_api_fence import Fence
from raypar.torch_compat import TESTED


def _look_for_lists() -> bool:
    assert callable(torch._foreach_add_) and callable(torch._foreach_mul_) and callable(torch._foreach_copy_)
    assert callable(torch._foreach_zero_)
    return True


LISTS = Fence(
    api="torch._foreach_add_",
    reason="PyTorch's optimizers use these operations on lists; none has a public name",
    versions=TESTED,
    feature="adding, scaling, copying and zeroing many tensors in one call",
    without="they are processed one by one: the same numbers, somewhat slower",
    probe=_look_for_lists,
)


def add_all(into: Sequence[Tensor], added: Sequence[Tensor]) -> None:
    """`into[i] += added[i]`."""
    if LISTS.find() is not None:
        torch._foreach_add_(into, added)  # type: ignore[call-overload]
        return
    for one, other in zip(into, added, strict=True):
        one.add_(other)


def add_to_all(into: Sequence[Tensor], number: int) -> None:
    """`into[i] += number`."""
    if LISTS.find() is not None:
        torch._foreach_add_(into, number)  # type: ignore[call-overload]
        return
    for one in into:
        one.add_(number)


def zero_all(tensors: Sequence[Tensor]) -> None:
    """`tensors[i] = 0`."""
    if LISTS.find() is not None:
        torch._foreach_zero_(tensors)  # type: ignore[arg-type]
        return
    for one in tensors:
        one.zero_()


def scale_all(tensors: Sequence[Tensor], factor: float) -> None:
    """`tensors[i] *= factor`."""
    if LISTS.find() is not None:
        torch._foreach_mul_(tensors, factor)  # type: ignore[call-overload]
        return
    for one in tensors:
        one.mul_(factor)


def copy_all(into: Sequence[Tensor], source: Sequence[Tensor]) -> None:
    """`into[i].copy_(source[i])`."""
    if LISTS.find() is not None:
        torch._foreach_copy_(into, source)  # type: ignore[arg-type]
        return
    for one, other in zip(into, source, strict=True):
        one.copy_(other)
