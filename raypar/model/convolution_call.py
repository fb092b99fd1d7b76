"""The calls that PyTorch makes for a convolution and its gradients.

A module of PyTorch pads its input where `torch.convolution` cannot, calls that, and autograd calls `convolution_backward` once,
with a mask of the gradients that are needed. Each gradient is made by a kernel of its own, chosen by the same arguments: in
aten/src/ATen/native/Convolution.cpp the mask takes no part in `select_conv_backend`, and oneDNN, cuDNN and PyTorch's own code
look at one flag of it for the input and at the others for weight and bias. So the input's gradient has the same bits in a call
of its own, and the gradients of weight and bias have in another (`tests/parity/test_split_convolution.py`).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

_TRANSPOSED = (nn.ConvTranspose1d, nn.ConvTranspose2d, nn.ConvTranspose3d)
CONVOLUTIONS = (nn.Conv1d, nn.Conv2d, nn.Conv3d, *_TRANSPOSED)
"""PyTorch's classes of convolutions."""


def convolution_class(module: object) -> type[nn.Module] | None:
    """PyTorch's class of a convolution that computes what its class computes; None for any other module."""
    kinds = type(module).__mro__
    base = next((kind for kind in kinds if kind in CONVOLUTIONS), None)
    if base is None or any("forward" in key for kind in kinds[: kinds.index(base)] for key in vars(kind)):
        return None
    return base


def is_transposed_convolution(module: object) -> bool:
    """Whether its weight is [in, out / groups, ...], not [out, in / groups, ...]."""
    return isinstance(module, _TRANSPOSED)


@dataclass(frozen=True, slots=True)
class ConvolutionCall:
    """One call of `torch.convolution`, as `split_backward.LayerCall` describes it. x is [batch, channels, ...]."""

    stride: tuple[int, ...]
    padding: tuple[int, ...]
    dilation: tuple[int, ...]
    transposed: bool
    output_padding: tuple[int, ...]
    groups: int
    has_bias: bool

    def convolve(self, x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
        """The call."""
        return torch.convolution(
            x, weight, bias, self.stride, self.padding, self.dilation, self.transposed, self.output_padding, self.groups
        )

    def output(self, x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
        """The same, for the forward of an autograd function."""
        with torch.enable_grad():  # as outside of a function: PyTorch has kernels for inference
            return self.convolve(x, weight, bias).data

    def operands(self, gradient: Tensor, x: Tensor) -> tuple[Tensor, ...]:
        """The gradient of the output, and x."""
        return gradient, x

    def gradients(
        self, operands: tuple[Tensor, ...], weight: Tensor, needed: tuple[bool, bool, bool]
    ) -> tuple[Tensor | None, Tensor | None, Tensor | None]:
        """Gradients of x, weight and bias. Without that of x the weight is only asked for its shape and strides: it may have no
        memory then."""
        gradient, x = operands
        if weight.dtype != x.dtype or not (needed[0] or weight.untyped_storage().nbytes()):
            weight = torch.empty_strided(weight.shape, weight.stride(), dtype=x.dtype, device=x.device)
        of_x, of_weight, of_bias = torch.ops.aten.convolution_backward(
            gradient,
            x,
            weight,
            [gradient.shape[1]] if self.has_bias else None,
            self.stride,
            self.padding,
            self.dilation,
            self.transposed,
            self.output_padding,
            self.groups,
            needed,
        )
        return of_x, of_weight, of_bias


@dataclass(frozen=True, slots=True)
class ConvolutionGeometry:
    """What a convolution module says of its calls, by spatial dim."""

    kernel_size: tuple[int, ...]
    stride: tuple[int, ...]
    padding: str | tuple[int, ...]
    padding_mode: str
    dilation: tuple[int, ...]
    transposed: bool
    output_padding: tuple[int, ...]
    groups: int

    @staticmethod
    def of(module: nn.Module) -> ConvolutionGeometry:
        """Of a module of one of `CONVOLUTIONS`."""
        found: Any = module
        return ConvolutionGeometry(
            found.kernel_size,
            found.stride,
            found.padding,
            found.padding_mode,
            found.dilation,
            is_transposed_convolution(module),
            found.output_padding,
            int(found.groups),
        )

    @property
    def dims(self) -> int:
        """Number of spatial dims."""
        return len(self.kernel_size)

    def sides(self) -> list[int]:
        """The padding as `F.pad` takes it: (before, after) of each dim, the last dim first."""
        sides: list[int] = []
        for dim in reversed(range(self.dims)):
            if isinstance(self.padding, tuple):
                sides += [self.padding[dim]] * 2
            else:
                total = self.dilation[dim] * (self.kernel_size[dim] - 1) if self.padding == "same" else 0
                sides += [total // 2, total - total // 2]
        return sides

    def pad(self, x: Tensor) -> Tensor:
        """The input, padded in another mode than zeros, which a module does before all else."""
        return x if self.padding_mode == "zeros" else F.pad(x, self.sides(), mode=self.padding_mode)

    def pad_unequal_sides(self, x: Tensor) -> Tensor:
        """The input [batch, channels, ...] with the zeros by which the sides behind are longer than those before."""
        if self.padding_mode != "zeros" or self.padding != "same":
            return x
        sides = self.sides()
        longer = [n - sides[at - 1] if at % 2 else 0 for at, n in enumerate(sides)]
        return F.pad(x, longer) if any(longer) else x

    def call(self, output_padding: Sequence[int] | None = None, *, has_bias: bool) -> ConvolutionCall:
        """The call with an input that `pad` and `pad_unequal_sides` have padded."""
        before = tuple(self.sides()[::2][::-1]) if self.padding_mode == "zeros" else (0,) * self.dims
        more = self.output_padding if output_padding is None else tuple(output_padding)
        return ConvolutionCall(self.stride, before, self.dilation, self.transposed, more, self.groups, has_bias)

    def output_padding_for(self, shape: Sequence[int], output_size: Sequence[int]) -> list[int]:
        """The output padding of a transposed convolution that makes its output this large of an input of that shape."""
        assert isinstance(self.padding, tuple)
        least = [
            (n - 1) * stride - 2 * padding + dilation * (kernel - 1) + 1
            for n, stride, padding, dilation, kernel in zip(
                shape[-self.dims :], self.stride, self.padding, self.dilation, self.kernel_size, strict=True
            )
        ]
        return [size - n for size, n in zip(list(output_size)[-self.dims :], least, strict=True)]

    def call_for(self, shape: Sequence[int], output_size: Sequence[int] | None, *, has_bias: bool) -> ConvolutionCall | None:
        """The call of a module that gets an input of this shape; None where PyTorch refuses the input, or may do so."""
        unbatched = len(shape) == self.dims + 1
        if len(shape) != self.dims + 2 and not unbatched:
            return None
        if output_size is None:
            return self.call(has_bias=has_bias)
        if len(output_size) not in (self.dims, len(shape)):
            return None
        more = self.output_padding_for(shape, output_size)
        fits = all(0 <= n < stride for n, stride in zip(more, self.stride, strict=True))
        return self.call(more, has_bias=has_bias) if fits else None
