"""The type of the context that PyTorch gives to `forward` and `backward` of an autograd function."""

from __future__ import annotations

from typing import TYPE_CHECKING

from torch import Tensor
from torch.autograd.function import FunctionCtx
from torch.autograd.graph import Node


class AutogradContext(FunctionCtx):
    """A context without values of its own; for a function that keeps more than tensors a derived class names what it keeps."""

    saved_tensors: tuple[Tensor, ...]
    """What `save_for_backward` was given. Where that was None it is None."""
    needs_input_grad: tuple[bool, ...]
    """For each argument of `forward`: whether its gradient is asked for."""
    next_functions: tuple[tuple[Node | None, int], ...]
    """For each argument of `forward`: (the graph node of its gradient, the number of that node's output)."""

    if TYPE_CHECKING:

        def save_for_backward(self, *tensors: Tensor | None) -> None:
            """Keep tensors for `backward`, which finds them, and None, in `saved_tensors`."""
