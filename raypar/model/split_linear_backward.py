"""Splits the backward pass of linear layers into input and weight gradients, for zero-bubble schedules.

See arXiv:2401.10241, section 2.

The calls are those of PyTorch's own backward of `F.linear`, with the same shapes and strides: kernels are chosen by these, and
another kernel may give other bits. PyTorch's calls are in aten/src/ATen/native (`linear` in Linear.cpp, `_matmul_impl` in
LinearAlgebra.cpp) and in torch/csrc/autograd/FunctionsManual.cpp (`mm_mat1_grad`, `mm_mat2_grad`);
`tests/parity/test_kernel_calls.py` compares them. A layer whose weight is transposed makes the calls of
`torch.addmm`, which are the same but for the weight's strides.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Callable, Hashable, Iterator
from dataclasses import dataclass, replace
from typing import Any, Protocol

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from raypar.model.autograd_context_type import AutogradContext
from raypar.model.transposed_linear import is_linear, is_transposed_linear
from raypar.torch_compat.autograd import innermost_transform, will_execute


class LinearLike(Protocol):
    """A linear layer, or one shard of it."""

    weight: Tensor
    bias: Tensor | None


def as_matrix(x: Tensor) -> Tensor:
    """A value [..., features] as [rows, features], as `F.linear` and its backward make it one: a matrix stays as it is."""
    if x.dim() == 2:
        return x
    if x.dim() == 1:
        return x.unsqueeze(0)
    return x.reshape(math.prod(x.shape[:-1]), x.shape[-1])


def linear_forward(x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
    """`F.linear`, for the forward of an autograd function.

    `.data`, because for an input of three dims F.linear returns a view, and code after the layer could not write into a view
    that was made inside an autograd function.
    """
    if x.dim() < 3 or (bias is not None and x.is_contiguous()):
        return F.linear(x, weight, bias).data
    with torch.enable_grad():  # as outside of a function: matmul folds the batch into rows only if the weight needs a gradient
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
    if gradient.dim() == 1:
        return gradient
    return gradient.sum(tuple(range(gradient.dim() - 1)), keepdim=True).view(gradient.shape[-1])


def bias_gradient_operand(gradient: Tensor, rows: Tensor, x: Tensor) -> Tensor:
    """The gradient that `bias_gradient` sums, in the shape in which F.linear has added the bias.

    F.linear adds the bias to the product's rows, or, if x [..., in] is not contiguous, to the output.
    """
    return rows if x.dim() == 2 or x.is_contiguous() else gradient


@dataclass(frozen=True, slots=True)
class DeferredWeightGradient:
    """A weight gradient to be computed later, by the W instruction: of one Linear call, grad [rows, out] and x [rows, in].

    x is detached: with its graph it would keep the values that the stage has received.
    `bias_operand`: see `bias_gradient_operand`.
    """

    linear: LinearLike
    gradient: Tensor
    x: Tensor
    bias_operand: Tensor
    compute_weight: Callable[[Tensor, Tensor], Tensor] | None = None
    """Computes the weight's gradient from grad and x; None: `weight_gradient` does."""
    transposed: bool = False
    """Whether the weight is [in, out]."""
    cast_token: Hashable = None
    """Under `torch.autocast`: equal (one object) for calls whose gradients are added before they are cast back."""

    def weight_gradient(self) -> Tensor:
        """Gradient of `linear.weight`."""
        if self.compute_weight is not None:
            return self.compute_weight(self.gradient, self.x)
        compute = transposed_weight_gradient if self.transposed else weight_gradient
        return compute(self.gradient, self.x, self.linear.weight)

    def bias_gradient(self) -> Tensor:
        """Gradient of `linear.bias` [out], in memory of its own."""
        found = bias_gradient(self.bias_operand)
        return found.clone() if found is self.bias_operand else found


Stash = list[DeferredWeightGradient]


def will_accumulate_weight_gradient(ctx: AutogradContext) -> bool:
    """Whether the running backward pass adds to the `.grad` of the function's second argument, a weight.

    `torch.autograd.grad` inside a layer does not: gradients that it computes must not be put off and added later.
    """
    node = ctx.next_functions[1][0]
    while node is not None and node.name() == "ToCopyBackward0":  # of `cast_for_autocast`
        node = node.next_functions[0][0]
    return will_execute(node)


# -- under torch.autocast ----------------------------------------------------------------------------------------------------


def is_autocast_enabled(device: torch.device) -> bool:
    """Whether this runs inside `torch.autocast` for that kind of device; kinds without autocast (meta) never do."""
    return torch.amp.is_autocast_available(device.type) and torch.is_autocast_enabled(device.type)


def cast_for_autocast(*tensors: Tensor | None) -> tuple[Tensor | None, ...]:
    """The operands of a product, cast as `torch.autocast` would cast them, by operations that autograd records."""
    device = next(t.device for t in tensors if t is not None)
    if not is_autocast_enabled(device):
        return tensors
    dtype = torch.get_autocast_dtype(device.type)
    castable = (t is not None and t.is_floating_point() and t.dtype != torch.float64 for t in tensors)
    return tuple(t.to(dtype) if t is not None and can else t for t, can in zip(tensors, castable, strict=True))


_PROBES: dict[torch.device, Tensor] = {}
"""A leaf of our own on each device: see `autocast_cast_token`."""


def autocast_cast_token(device: torch.device) -> Hashable:
    """The same object for all calls that share autocast's cached cast of a weight; None without autocast.

    Without the cache (`cache_enabled=False`) no two calls share one.
    Plain autograd adds the gradients of such calls in the compute dtype, and casts the sum. PyTorch does not say whether it
    still has a cast in its cache, so a leaf of our own is cast as weights are: the object is the graph node of that cast.
    """
    if not is_autocast_enabled(device):
        return None
    if not torch.is_autocast_cache_enabled():
        return object()
    if device not in _PROBES:
        _PROBES[device] = torch.ones(1, 1, dtype=torch.float32, device=device, requires_grad=True)
    made = torch.mm(_PROBES[device], _PROBES[device])
    return made.grad_fn.next_functions[0][0] if made.grad_fn is not None else None


class CastMarkingStash(list[DeferredWeightGradient]):
    """A stash that marks what it gets with `cast` and passes it on to `stash`."""

    def __init__(self, stash: Stash, cast: Hashable) -> None:
        super().__init__()
        self._stash, self._cast = stash, cast

    def append(self, deferred: DeferredWeightGradient) -> None:
        """Pass on, marked with `cast`."""
        self._stash.append(replace(deferred, cast_token=self._cast))


class _SplitLinearContext(AutogradContext):
    linear: LinearLike
    stash: Stash
    transposed: bool


class _SplitLinear(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: _SplitLinearContext, x: Tensor, weight: Tensor, bias: Tensor | None, linear: LinearLike, stash: Stash
    ) -> Tensor:
        # As F.linear: a weight that no input gradient needs is not kept. Under autocast it would be a cast of its own.
        ctx.save_for_backward(x, weight if ctx.needs_input_grad[0] else None)
        ctx.linear, ctx.stash, ctx.transposed = linear, stash, is_transposed_linear(linear)
        ctx.set_materialize_grads(False)
        return transposed_linear_forward(x, weight, bias) if ctx.transposed else linear_forward(x, weight, bias)

    @staticmethod
    def backward(ctx: _SplitLinearContext, *gradients: Tensor) -> tuple[Tensor | None, ...]:
        (gradient,) = gradients
        if gradient is None:
            return None, None, None, None, None
        x, weight = ctx.saved_tensors
        rows, flat = as_matrix(gradient), as_matrix(x)
        summed = rows if ctx.transposed else bias_gradient_operand(gradient, rows, x)
        own: tuple[Tensor | None, ...] = (None, None)
        put_off = DeferredWeightGradient(ctx.linear, rows, flat.detach(), summed, transposed=ctx.transposed)
        if will_accumulate_weight_gradient(ctx):
            ctx.stash.append(put_off)
        else:
            own = (put_off.weight_gradient(), bias_gradient(summed) if ctx.needs_input_grad[2] else None)
        if not ctx.needs_input_grad[0]:
            return None, *own, None, None
        dx = input_gradient(rows, weight.t() if ctx.transposed else weight, flat)
        return dx if x.dim() == 2 else dx.reshape(x.shape), *own, None, None


def find_deferrable_modules(module: nn.Module, kind: type[nn.Module]) -> Iterator[nn.Module]:
    """The parts of a layer that are of this kind and whose weight gradients can be put off.

    `nn.Linear` stands for transposed linear layers, too. Left alone: those with a forward of their own (of the class, or of
    this one object), weights that are computed (parametrizations, weight norm) or frozen, and parameters that several modules
    of the layer share.
    """
    owners = Counter(id(p) for part in module.modules() for p in part._parameters.values() if p is not None)
    for part in module.modules():
        if kind is nn.Linear and (not is_linear(part) or "forward" in vars(part)):
            continue
        if kind is not nn.Linear and not isinstance(part, kind):
            continue
        own = [p for p in part._parameters.values() if p is not None]
        if part._parameters.get("weight") is not None and all(p.requires_grad and owners[id(p)] == 1 for p in own):
            yield part


def defer_weight_gradients(module: nn.Module, stash: Callable[[], Stash]) -> list[nn.Module]:
    """Make the Linears of a layer defer their weight gradients to `stash()`, the running microbatch's list, where possible.

    Returns those Linears.
    """
    chosen: list[nn.Module] = []
    for part in find_deferrable_modules(module, nn.Linear):
        part.forward = _forward(part, stash)
        chosen.append(part)
    return chosen


def _forward(linear: Any, stash: Callable[[], Stash]) -> Callable[[Tensor], Tensor]:
    def forward(x: Tensor) -> Tensor:
        # Weight gradients are autograd's own for a part of a value (`tensor_parallel.sharded_value.ShardedValue`), which is no
        # tensor, and inside of `torch.func.vmap` and its like, which take no autograd function such as this one.
        if not torch.is_grad_enabled() or not isinstance(x, Tensor) or innermost_transform() is not None:
            plain: Tensor = type(linear).forward(linear, x)
            return plain
        operands: tuple[Tensor | None, ...] = (x, linear.weight, linear.bias)
        kept, cast = stash(), autocast_cast_token(x.device)
        if cast is not None:
            kept, operands = CastMarkingStash(kept, cast), cast_for_autocast(*operands)
        result: Tensor = _SplitLinear.apply(*operands, linear, kept)  # type: ignore[no-untyped-call]
        return result

    return forward
