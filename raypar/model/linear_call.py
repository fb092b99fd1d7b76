"""The calls that PyTorch makes for a linear layer and its gradients.

They have the shapes and strides of those of `F.linear` and of its backward: kernels are chosen by these, and another kernel
may give other bits. PyTorch's calls are in aten/src/ATen/native (`linear` in Linear.cpp, `_matmul_impl` in LinearAlgebra.cpp)
and in torch/csrc/autograd/FunctionsManual.cpp (`mm_mat1_grad`, `mm_mat2_grad`); `tests/parity/test_kernel_calls.py` compares
them. A layer whose weight is transposed makes the calls of `torch.addmm`, which are the same but for the weight's strides.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor


def as_matrix(x: Tensor) -> Tensor:
    """A value [..., features] as [rows, features], as `F.linear` and its backward make it one: a matrix stays as it is."""
    dims = x.dim()
    if dims == 2:
        return x
    return x.unsqueeze(0) if dims == 1 else x.flatten(0, -2)


def linear_forward(x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
    """`F.linear`, for the forward of an autograd function.

    `.data`, because for an input of three dims F.linear returns a view, and code after the layer could not write into a view
    that was made inside an autograd function.
    """
    if x.dim() < 3 or (bias is not None and x.is_contiguous()):
        return F.linear(x, weight, bias).data
    if bias is None and weight.requires_grad:
        # Outside of a function matmul folds the batch into rows then, whatever the strides.
        return as_matrix(x).mm(weight.t()).view(*x.shape[:-1], weight.shape[0]).data
    with torch.enable_grad():  # as outside of a function
        return F.linear(x, weight, bias).data


def transposed_linear_forward(x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
    """y [..., out] of x [..., in] and a weight [in, out], by the calls of Conv1D, for the forward of an autograd function.

    `.data`: see `linear_forward`.
    """
    rows = as_matrix(x)
    made = torch.mm(rows, weight) if bias is None else torch.addmm(bias, rows, weight)
    return made.view(*x.shape[:-1], weight.shape[1]).data


def input_gradient(rows: Tensor, weight: Tensor, flat: Tensor) -> Tensor:
    """Gradient of x: grad W [rows, in], of grad [rows, out]. It is column-major in memory if x (`flat`) is."""
    if flat.stride() == (1, flat.shape[0]):
        return weight.t().mm(rows.t()).t()
    return rows.mm(weight)


def weight_gradient(rows: Tensor, flat: Tensor, weight: Tensor) -> Tensor:
    """grad^T x [out, in] of grad [rows, out] and x [rows, in]. It is column-major in memory if the weight is."""
    if is_row_major(weight):
        return rows.t().mm(flat)
    return flat.t().mm(rows).t()


def transposed_weight_gradient(rows: Tensor, flat: Tensor, weight: Tensor) -> Tensor:
    """x^T grad [in, out] of grad [rows, out] and x [rows, in]; `weight` [in, out] is asked for its strides."""
    return weight_gradient(rows, flat, weight.t()).t()


def is_row_major(weight: Tensor) -> bool:
    """Whether a weight's rows are contiguous, one after the other."""
    return weight.stride() == (weight.shape[1], 1)


def bias_gradient(gradient: Tensor) -> Tensor:
    """The gradient [..., out] summed over all dims but the last: [out]. May be the gradient itself."""
    dims = gradient.dim()
    if dims == 2:
        return gradient.sum(0, True).view(-1)
    if dims == 1:
        return gradient
    return gradient.sum(tuple(range(dims - 1)), keepdim=True).view(gradient.shape[-1])


def bias_gradient_operand(gradient: Tensor, rows: Tensor, x: Tensor) -> Tensor:
    """The gradient that `bias_gradient` sums, in the shape in which F.linear has added the bias.

    F.linear adds the bias to the product's rows, or, if x [..., in] is not contiguous, to the output.
    """
    return rows if x.dim() == 2 or x.is_contiguous() else gradient


@dataclass(frozen=True, slots=True)
class LinearCall:
    """One call of a linear layer, as `split_backward.LayerCall` describes it."""

    transposed: bool
    """Whether the weight is [in, out]."""

    def output(self, x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
        """x W^T + b."""
        return transposed_linear_forward(x, weight, bias) if self.transposed else linear_forward(x, weight, bias)

    def operands(self, gradient: Tensor, x: Tensor) -> tuple[Tensor, ...]:
        """(grad [rows, out], x [rows, in], what the bias's gradient sums)."""
        rows, flat = as_matrix(gradient), as_matrix(x)
        return rows, flat, rows if self.transposed else bias_gradient_operand(gradient, rows, x)

    def gradients(
        self, operands: tuple[Tensor, ...], weight: Tensor, needed: tuple[bool, bool, bool]
    ) -> tuple[Tensor | None, Tensor | None, Tensor | None]:
        """Gradients of x [rows, in], weight and bias. Without that of x the weight is only asked for its strides."""
        rows, flat, summed = operands
        of_weight = transposed_weight_gradient if self.transposed else weight_gradient
        return (
            input_gradient(rows, weight.t() if self.transposed else weight, flat) if needed[0] else None,
            of_weight(rows, flat, weight) if needed[1] else None,
            bias_gradient(summed) if needed[2] else None,
        )
