"""Prints tensors whose memory is freed for a while: PyTorch reads their elements, which ends the process."""

from __future__ import annotations

from collections.abc import Callable
from types import ModuleType

import torch
from torch import Tensor

from raypar.fences.private_api_fence import Fence
from raypar.torch_compat import TESTED

NO_MEMORY = "no memory until its next use, size={size}"
"""What stands in place of the elements of a tensor without memory."""


def _look_for_printing() -> ModuleType:
    from torch import _tensor_str

    assert "1.0" not in _tensor_str._str(torch.ones(2), tensor_contents="none")
    return _tensor_str


PRINTING = Fence(
    api="torch._tensor_str._str",
    reason="PyTorch prints a tensor's elements without a look at whether they are in memory; no public function changes that",
    versions=TESTED,
    feature="printing parameters whose memory is freed between their uses",
    without="a print of such a parameter ends the worker's process",
    probe=_look_for_printing,
)


def print_tensors_without_memory() -> None:
    """Have PyTorch print tensors without memory by their sizes alone, in this process from now on. Idempotent."""
    printing = PRINTING.find()
    if printing is None or hasattr(printing._str, "prints_without_memory"):
        return
    printed: Callable[..., str] = printing._str

    def text(tensor: Tensor, *, tensor_contents: str | None = None) -> str:
        if tensor_contents is None and _lacks_memory(tensor):
            tensor_contents = NO_MEMORY.format(size=tuple(tensor.shape))
        return printed(tensor, tensor_contents=tensor_contents)

    text.prints_without_memory = True  # type: ignore[attr-defined]
    printing._str = text  # type: ignore[attr-defined]


def _lacks_memory(tensor: Tensor) -> bool:
    """Whether a tensor of the processor or a GPU has elements, and its storage no bytes."""
    try:
        return tensor.layout == torch.strided and bool(tensor.numel()) and not tensor.untyped_storage().nbytes()
    except (RuntimeError, NotImplementedError, AttributeError):  # a tensor without a storage of its own
        return False
