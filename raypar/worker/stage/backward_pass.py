"""Runs autograd's backward pass from the outputs of a stage; as `torch.autograd.backward`, without loading sympy."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor
from torch.autograd import graph
from torch.autograd.graph import GradientEdge

_run_engine = getattr(graph, "_engine_run_backward", None)
"""What `torch.autograd.backward` calls in the end; None in a release of PyTorch that does not have it."""


def run_backward_pass(roots: Sequence[Tensor | GradientEdge], gradients: Sequence[Tensor | None]) -> None:
    """Add to the `grad` of every leaf below the roots what comes from the gradient of each root (None: 1, of a scalar tensor).

    `torch.autograd.backward` compares the shapes of roots and gradients by code that knows symbols too, and so loads sympy with
    the first gradient: half a second of a processor in each process. Here shapes are numbers. What is not alike, not plain, or
    one of autograd's own errors is left to it.
    """
    plain = _run_engine is not None and all(map(_is_plain, roots, gradients))
    if not plain:
        torch.autograd.backward(roots, gradients)  # type: ignore[arg-type]  # it takes both kinds in one list
        return
    starts = tuple(
        torch.ones_like(r) if isinstance(r, Tensor) and g is None else g for r, g in zip(roots, gradients, strict=True)
    )
    _run_engine(tuple(roots), starts, False, False, (), allow_unreachable=True, accumulate_grad=True)


def _is_plain(root: Tensor | GradientEdge, gradient: Tensor | None) -> bool:
    """Whether `torch.autograd.backward` would start at the root with this gradient, or with 1, and nothing else."""
    if isinstance(root, GradientEdge):
        value = root.node._input_metadata[root.output_nr]  # type: ignore[attr-defined]
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
