"""Types of autograd functions: what PyTorch gives to their `forward` and `backward`, and what `apply` returns."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
from torch import Tensor
from torch.autograd.function import FunctionCtx
from torch.autograd.graph import Node

if TYPE_CHECKING:
    from typing import TypeVarTuple, Unpack

    Arguments = TypeVarTuple("Arguments")


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


class AutogradFunction(torch.autograd.Function):
    """An autograd function that returns one tensor; PyTorch's own `apply` has no types."""

    if TYPE_CHECKING:

        @classmethod
        def apply(cls, *arguments: Unpack[Arguments]) -> Tensor:
            """What `forward` returns for these arguments."""


class AutogradFunctionOfSeveral(torch.autograd.Function):
    """An autograd function that returns several tensors."""

    if TYPE_CHECKING:

        @classmethod
        def apply(cls, *arguments: Unpack[Arguments]) -> tuple[Tensor, ...]:
            """What `forward` returns for these arguments."""
