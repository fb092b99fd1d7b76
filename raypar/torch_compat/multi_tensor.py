"""Operations on lists of tensors in one call, and assertions on a GPU without synchronisation."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch
from torch import Tensor

from raypar.fences.fence import Fence
from raypar.torch_compat import TESTED


def _look_for_lists() -> bool:
    assert callable(torch._foreach_add_) and callable(torch._foreach_mul_) and callable(torch._foreach_copy_)
    return True


LISTS = Fence(
    api="torch._foreach_add_",
    reason="PyTorch's optimizers use these operations on lists; none has a public name",
    versions=TESTED,
    feature="adding, scaling and copying many gradients in one call",
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


def _look_for_assertion() -> Callable[[Tensor, str], None]:
    assert callable(torch._assert_async)
    return torch._assert_async


ASSERTION = Fence(
    api="torch._assert_async",
    reason="nothing public checks on a GPU without waiting for it",
    versions=TESTED,
    feature="checking ids and targets on a GPU without waiting for it",
    without="each such check waits for the GPU",
    probe=_look_for_assertion,
)


def assert_on_device(holds: Tensor, message: str) -> None:
    """Fail, on a GPU at a later synchronisation, unless the bool tensor `holds` [] is true."""
    check = ASSERTION.find()
    if check is not None:
        check(holds, message)
    elif not bool(holds):
        raise AssertionError(message)
