"""Splits the backward pass of linear layers and convolutions into input and weight gradients, for zero-bubble schedules.

See arXiv:2401.10241, section 2. The input's gradient is computed in the backward pass (instruction I). What the gradients of
weight and bias are computed of is kept in a stash, and they are computed later (instruction W).

The calls are those of PyTorch's own backward, with the same shapes and strides: `linear_call.py`, `convolution_call.py`.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Hashable, Iterator, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Any, Protocol

import torch
from torch import Tensor, nn

from raypar.model.autocast_casts import autocast_cast_token, cast_for_autocast
from raypar.model.autograd_function_types import AutogradContext, AutogradFunction
from raypar.model.convolution_call import ConvolutionCall, ConvolutionGeometry, convolution_class
from raypar.model.linear_call import LinearCall
from raypar.model.transposed_linear import is_linear, is_transposed_linear
from raypar.torch_compat.autograd import innermost_transform, will_execute


class SplitLayer(Protocol):
    """A linear layer or a convolution, or one shard of it."""

    weight: Tensor
    bias: Tensor | None


class LayerCall(Protocol):
    """One call of a layer, and what autograd calls for its gradients."""

    def output(self, x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
        """The layer's output, for the forward of an autograd function."""

    def operands(self, gradient: Tensor, x: Tensor) -> tuple[Tensor, ...]:
        """What the gradients are computed of beside the weight."""

    def gradients(
        self, operands: tuple[Tensor, ...], weight: Tensor, needed: tuple[bool, bool, bool]
    ) -> tuple[Tensor | None, Tensor | None, Tensor | None]:
        """Gradients of x, weight and bias, those that are needed; that of x may have another shape than x. Without it only the
        weight's shape and strides count."""


@dataclass(frozen=True, slots=True)
class DeferredWeightGradient:
    """The gradients of a layer's weight and bias for one call, to be computed later, by the W instruction."""

    layer: SplitLayer
    kept: tuple[Tensor, ...]
    """What they are computed of: the gradient of the output, and the input, detached (with its graph the input would keep the
    values that the stage has received)."""
    compute: Callable[..., tuple[Tensor | None, Tensor | None]]
    """Computes the gradients of weight and bias from `kept`; None for a bias that there is not, or that autograd sees to."""
    cast_token: Hashable = None
    """Under `torch.autocast`: equal (one object) for calls whose gradients are added before they are cast back."""

    def gradients(self) -> list[tuple[Tensor, Tensor]]:
        """(parameter, its gradient in memory of its own), of weight and bias."""
        found = []
        for parameter, gradient in zip((self.layer.weight, self.layer.bias), self.compute(*self.kept), strict=True):
            if parameter is not None and gradient is not None:
                found.append((parameter, self._as_accumulated(gradient, parameter)))
        return found

    def _as_accumulated(self, gradient: Tensor, parameter: Tensor) -> Tensor:
        """The gradient as autograd would put it into `.grad`: a convolution's gradients may lie as channels_last inputs do."""
        if parameter.is_contiguous() and not gradient.is_contiguous():
            return gradient.contiguous()
        return gradient.clone() if any(gradient is tensor for tensor in self.kept) else gradient


Stash = list[DeferredWeightGradient]


def will_accumulate_gradient(ctx: AutogradContext, argument: int, parameter: Tensor) -> bool:
    """Whether the running backward pass adds the gradient of the function's argument to this parameter's `.grad`.

    `torch.autograd.grad` inside a layer does not: gradients that it computes must not be put off and added later. Nor does it
    where the argument was computed, or is another tensor (`torch.func.functional_call`): others need that gradient at once.
    """
    node = ctx.next_functions[argument][0]
    while node is not None and node.name() in ("ToCopyBackward0", "SliceBackward0"):  # `cast_for_autocast`, `take_part`
        node = node.next_functions[0][0]
    return getattr(node, "variable", None) is parameter and will_execute(node)


def put_off(ctx: AutogradContext, stash: Stash | None, deferred: DeferredWeightGradient) -> bool:
    """Put gradients off that the running backward pass would compute, if it may be done. `ctx`: of an autograd function whose
    second argument is the weight, and whose third is the bias."""
    if stash is None or not ctx.needs_input_grad[1]:
        return False
    layer = deferred.layer
    own = [(1, layer.weight), *([(2, layer.bias)] if layer.bias is not None and ctx.needs_input_grad[2] else [])]
    if not all(will_accumulate_gradient(ctx, argument, parameter) for argument, parameter in own):
        return False
    stash.append(deferred)
    return True


class CastMarkingStash(list[DeferredWeightGradient]):
    """A stash that marks what it gets with `cast` and passes it on to `stash`."""

    def __init__(self, stash: Stash, cast: Hashable) -> None:
        super().__init__()
        self._stash, self._cast = stash, cast

    def append(self, deferred: DeferredWeightGradient) -> None:
        """Pass on, marked with `cast`."""
        self._stash.append(replace(deferred, cast_token=self._cast))


def deferred_gradients_of(
    layer: SplitLayer, call: LayerCall, operands: tuple[Tensor, ...], *, has_bias: bool
) -> DeferredWeightGradient:
    """The gradients of weight and bias of a call, to be computed later."""
    return DeferredWeightGradient(
        layer, tuple(tensor.detach() for tensor in operands), partial(_weight_gradients, layer, call, has_bias)
    )


def _weight_gradients(
    layer: SplitLayer, call: LayerCall, has_bias: bool, *operands: Tensor
) -> tuple[Tensor | None, Tensor | None]:
    _, of_weight, of_bias = call.gradients(operands, layer.weight, (False, True, has_bias))
    return of_weight, of_bias


class _SplitContext(AutogradContext):
    call: LayerCall
    layer: SplitLayer
    stash: Stash | None


class _Split(AutogradFunction):
    @staticmethod
    def forward(
        ctx: _SplitContext,
        x: Tensor,
        weight: Tensor,
        bias: Tensor | None,
        call: LayerCall,
        layer: SplitLayer,
        stash: Stash | None,
    ) -> Tensor:
        # A weight that no input gradient needs is not kept. Under autocast it would be a cast of its own.
        ctx.save_for_backward(x, weight if ctx.needs_input_grad[0] else None)
        ctx.call, ctx.layer, ctx.stash = call, layer, stash
        ctx.set_materialize_grads(False)
        return call.output(x, weight, bias)

    @staticmethod
    def backward(ctx: _SplitContext, *gradients: Tensor) -> tuple[Tensor | None, ...]:
        (gradient,) = gradients
        if gradient is None:
            return (None,) * 6
        x, weight = ctx.saved_tensors
        operands, (of_x, of_weight, of_bias) = ctx.call.operands(gradient, x), ctx.needs_input_grad[:3]
        if put_off(ctx, ctx.stash, deferred_gradients_of(ctx.layer, ctx.call, operands, has_bias=of_bias)):
            of_weight = of_bias = False
        if not (of_x or of_weight or of_bias):
            return (None,) * 6
        used = ctx.layer.weight.detach() if weight is None else weight
        dx, *own = ctx.call.gradients(operands, used, (of_x, of_weight, of_bias))
        if dx is not None and dx.shape != x.shape:
            dx = dx.reshape(x.shape)
        return dx, *own, None, None, None


def split_call(call: LayerCall, operands: Sequence[Tensor | None], layer: SplitLayer, stash: Stash | None) -> Tensor:
    """The output of a call with these operands (x, weight, bias), whose gradients of weight and bias go into the stash."""
    made: Tensor = _Split.apply(*operands, call, layer, stash)
    return made


# -- modules -----------------------------------------------------------------------------------------------------------------


def find_deferrable_modules(module: nn.Module, can: Callable[[nn.Module], bool]) -> Iterator[nn.Module]:
    """The parts of a layer that `can` names and whose weight gradients can be put off.

    Left alone: those with weights that are computed (parametrizations, weight norm) or frozen, and with parameters that several
    modules of the layer share.
    """
    owners = Counter(id(p) for part in module.modules() for p in part._parameters.values() if p is not None)
    for part in module.modules():
        own = [p for p in part._parameters.values() if p is not None]
        trains_alone = all(p.requires_grad and owners[id(p)] == 1 for p in own)
        if can(part) and part._parameters.get("weight") is not None and trains_alone:
            yield part


def defer_weight_gradients(module: nn.Module, stash: Callable[[], Stash]) -> list[nn.Module]:
    """Make the linear layers (transposed ones too) and convolutions of a layer defer their weight gradients to `stash()`, the
    running microbatch's list, where possible.

    Returns those modules. Left alone are also those with a forward of their own (of the class, or of this one object).
    """
    chosen: list[nn.Module] = []
    for part in find_deferrable_modules(module, _has_pytorchs_forward):
        part.forward = _forward(part, stash, _call_linear if is_linear(part) else _call_convolution)
        chosen.append(part)
    return chosen


def _has_pytorchs_forward(part: nn.Module) -> bool:
    return (is_linear(part) or convolution_class(part) is not None) and "forward" not in vars(part)


Size = Sequence[int] | None
Split = Callable[[Any, Tensor, Stash, Size], Tensor | None]
"""Calls a module (its input, a stash, the size of its output if that is given); None where PyTorch's own code is to do so."""


def _forward(layer: Any, stash: Callable[[], Stash], split: Split) -> Callable[..., Tensor]:
    def forward(*given: Tensor | Size, **named: Tensor | Size) -> Tensor:
        # Weight gradients are autograd's own for a part of a value (`tensor_parallel.sharded_value.ShardedValue`), which is no
        # tensor, and inside of `torch.func.vmap` and its like, which take no autograd function such as this one.
        x, size = given[0] if given else None, given[1] if len(given) > 1 else named.get("output_size")
        found = None
        if torch.is_grad_enabled() and isinstance(x, Tensor) and innermost_transform() is None:
            assert not isinstance(size, Tensor)
            kept, cast = stash(), autocast_cast_token(x.device)
            found = split(layer, x, kept if cast is None else CastMarkingStash(kept, cast), size)
        if found is not None:
            return found
        plain: Tensor = type(layer).forward(layer, *given, **named)
        return plain

    return forward


def _call_linear(linear: Any, x: Tensor, stash: Stash, output_size: Size) -> Tensor:
    operands = cast_for_autocast(x, linear.weight, linear.bias)
    return split_call(LinearCall(is_transposed_linear(linear)), operands, linear, stash)


def _call_convolution(layer: Any, x: Tensor, stash: Stash, output_size: Size) -> Tensor | None:
    geometry = ConvolutionGeometry.of(layer)
    call = geometry.call_for(x.shape, output_size, has_bias=layer.bias is not None)
    if call is None:
        return None
    operands = cast_for_autocast(geometry.pad(x), layer.weight, layer.bias)
    if len({t.dtype for t in operands if t is not None}) > 1 or not x.is_floating_point():
        return None  # PyTorch computes complex numbers in parts, and refuses mixtures
    return split_convolution(geometry, call, operands, layer, stash)


def split_convolution(
    geometry: ConvolutionGeometry,
    call: ConvolutionCall,
    operands: Sequence[Tensor | None],
    layer: SplitLayer,
    stash: Stash | None,
) -> Tensor:
    """The output of a convolution of x, to which `geometry.pad` has been applied, weight and bias. Without a stash autograd
    computes its gradients."""
    x, weight, bias = operands
    assert x is not None and weight is not None
    unbatched = x.dim() == geometry.dims + 1
    x = geometry.pad_unequal_sides(x.unsqueeze(0) if unbatched else x)
    made = call.convolve(x, weight, bias) if stash is None else split_call(call, (x, weight, bias), layer, stash)
    return made.squeeze(0) if unbatched else made
