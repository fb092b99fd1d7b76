"""Runs the autograd engine from the outputs of a stage: `torch.autograd.backward` without loading sympy."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor
from torch.autograd.graph import GradientEdge

from raypar.torch_compat.autograd import backward_engine, root_metadata


def run_autograd_backward(roots: Sequence[Tensor | GradientEdge], gradients: Sequence[Tensor | None]) -> None:
    """Accumulate into `.grad` of every leaf, as `torch.autograd.backward` does. A gradient of None is 1, for a scalar root.

    `torch.autograd.backward` compares the shapes of roots and gradients with code for symbolic shapes, and so loads sympy with
    the first gradient: half a processor-second in each process. Here all shapes are numbers. Roots or gradients that are not
    plain tensors of equal shapes are passed to `torch.autograd.backward`, which also raises its own errors for them.
    """
    run_engine = backward_engine()
    if run_engine is None or not all(map(_is_plain, roots, gradients)):
        torch.autograd.backward(roots, gradients)  # type: ignore[arg-type]  # it takes both kinds in one list
        return
    starts = tuple(
        torch.ones_like(r) if isinstance(r, Tensor) and g is None else g for r, g in zip(roots, gradients, strict=True)
    )
    run_engine(tuple(roots), starts, False, False, (), allow_unreachable=True, accumulate_grad=True)


def _is_plain(root: Tensor | GradientEdge, gradient: Tensor | None) -> bool:
    """Whether `torch.autograd.backward` would start at the root with just this gradient (None: 1), without casts or errors."""
    if isinstance(root, GradientEdge):
        value = root_metadata(root.node, root.output_nr)
        if value.is_nested_tensor or value.is_cpp_nested_tensor or not value.dtype.is_floating_point or gradient is None:
            return False
        shape = value.shape
    else:
        if type(root) is not Tensor or root.is_nested or not root.is_floating_point():
            return False
        if gradient is None:
            return root.numel() == 1
        shape = root.shape
    return type(gradient) is Tensor and list(gradient.shape) == list(shape) and gradient.is_floating_point()
