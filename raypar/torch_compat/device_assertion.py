"""An assertion on a GPU that makes the host wait for nothing."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

from raypar.fences.fence import Fence
from raypar.torch_compat import TESTED


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
