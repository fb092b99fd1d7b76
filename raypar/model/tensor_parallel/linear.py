"""Linear layers cut over shards by output (column) or by input features (row) (Shoeybi et al. 2019, section 3).

Weight gradients are computed while the input's gradient is being summed over shards, or deferred by zero-bubble schedules.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable
from functools import lru_cache

import torch
from torch import Tensor, nn

from raypar.comm.transport import Handle
from raypar.errors import ModelError
from raypar.model import split_linear_backward
from raypar.model.autograd_context_type import AutogradContext
from raypar.model.split_linear_backward import (
    CastMarkingStash,
    DeferredWeightGradient,
    Stash,
    as_matrix,
    bias_gradient,
    cast_for_autocast,
    find_deferrable_modules,
    is_autocast_enabled,
    will_accumulate_weight_gradient,
)
from raypar.model.tensor_parallel import autograd_collectives
from raypar.model.tensor_parallel.local_part_layout import FEATURES, LocalPartLayout, sequence_part_layout
from raypar.model.tensor_parallel.shard_group import ShardedModule, ShardGroup
from raypar.model.tensor_parallel.sharded_value import ShardedValue, take_part
from raypar.model.tensor_parallel.weight_gradient_memory_reuse import KeptGradientMemory
from raypar.model.transposed_linear import is_transposed_linear, linear_features
from raypar.plan.shard_ranges import IndexRanges, even_ranges_by_shard


class ShardedLinear(ShardedModule):
    """Base of the column and row layers of one shard. `linear`: a linear layer, whose parameters are this shard's slices."""

    def __init__(self, linear: nn.Module, name: str, group: ShardGroup) -> None:
        super().__init__(name, group)
        self.in_features, self.out_features = linear_features(linear)
        """Of the unsharded layer."""
        self.transposed = is_transposed_linear(linear)
        """Whether the weight is [in, out]."""
        self.weight: Tensor
        """This shard's slice [out here, in here]; [in here, out here] if `transposed`."""
        self.register_parameter("weight", linear._parameters["weight"])
        self.bias: Tensor | None
        self.register_parameter("bias", linear._parameters["bias"])
        self.stash: Callable[[], Stash] | None = None
        """Where a zero-bubble schedule wants what the weight gradient needs. None: autograd computes that gradient."""
        self._gradient_memory = KeptGradientMemory()
        """The memory that the weight's gradient had in the last step."""

    def _stash(self) -> Stash | None:
        stash = self.stash() if self.stash is not None and torch.is_grad_enabled() else None
        if stash is not None and is_autocast_enabled(self.weight.device):
            return CastMarkingStash(stash, object())  # a new object: on shards each call casts for itself
        return stash

    def keep_gradient_memory(self) -> None:
        """Keep the memory of the last step's gradient, which is no longer needed, for the next gradient."""
        self._gradient_memory.keep(self.weight)

    def product(self, x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
        """x W^T + b, for the forward of an autograd function."""
        compute = split_linear_backward.transposed_linear_forward if self.transposed else split_linear_backward.linear_forward
        return compute(x, weight, bias)

    def input_gradient(self, rows: Tensor, weight: Tensor, x: Tensor) -> Tensor:
        """Gradient of x [..., in], of grad [rows, out]."""
        found = split_linear_backward.input_gradient(rows, weight.t() if self.transposed else weight, as_matrix(x))
        return found.reshape(x.shape)

    def bias_operand(self, gradient: Tensor, rows: Tensor, x: Tensor) -> Tensor:
        """The gradient that the bias's gradient sums, where the product has added the bias."""
        return rows if self.transposed else split_linear_backward.bias_gradient_operand(gradient, rows, x)

    def weight_gradient(self, gradient: Tensor, x: Tensor) -> Tensor:
        """grad^T x [out, in] of grad [rows, out] and x [rows, in], in the memory of the last step's gradient where possible.

        Same call and bits as `split_linear_backward.weight_gradient`; x^T grad [in, out] if `transposed`.
        """
        memory = self._gradient_memory.take(gradient, x)
        if self.transposed:
            if memory is None or split_linear_backward.is_row_major(self.weight.t()) or not self.weight.is_contiguous():
                return split_linear_backward.transposed_weight_gradient(gradient, x, self.weight)
            return torch.mm(x.t(), gradient, out=memory).data
        if memory is None or not split_linear_backward.is_row_major(self.weight):
            return split_linear_backward.weight_gradient(gradient, x, self.weight)
        # `.data` has a version count of its own, which this first writing does not raise.
        return torch.mm(gradient.t(), x, out=memory).data


def defer_sharded_weight_gradients(module: nn.Module, stash: Callable[[], Stash]) -> list[nn.Module]:
    """As `split_linear_backward.defer_weight_gradients`, for the linear layers that are cut over shards."""
    chosen: list[nn.Module] = []
    for part in find_deferrable_modules(module, ShardedLinear):
        assert isinstance(part, ShardedLinear)
        part.stash = stash
        chosen.append(part)
    return chosen


class ColumnLinear(ShardedLinear):
    """y = x W^T + b, of which each shard makes some features of y [..., out].

    x [..., in] is whole, or under sequence parallelism this shard's part of dim 1, which is gathered. Backward: the gradient of
    x is summed over the shards (one all-reduce, or one reduce-scatter).
    """

    def __init__(
        self,
        linear: nn.Module,
        name: str,
        group: ShardGroup,
        held: IndexRanges,
        *,
        axis: str = FEATURES,
        shares_input: bool = False,
        gather_output: bool = False,
    ) -> None:
        super().__init__(linear, name, group)
        self.held = held
        """The output features that this shard makes."""
        self.axis = axis
        """What the output's cut dim counts (`LocalPartLayout.axis`)."""
        self.shares_input = shares_input
        """Whether other layers read the same x (q, k and v). Their gradients of x are summed before they are communicated, so
        one value costs one collective however many layers read it."""
        self.gather_output = gather_output
        """Whether the output is made whole again."""

    def forward(self, x: Tensor | ShardedValue) -> Tensor | ShardedValue:
        """y, whole if `gather_output`, else this shard's part."""
        local, seq = _input_of(self, x)
        made: Tensor
        if self.shares_input and local.requires_grad and torch.is_grad_enabled():
            made = _apply_to_shared_input(self, local, seq)
        else:
            operands = cast_for_autocast(local, self.weight, self.bias)
            made = _Column.apply(*operands, seq, self.group, self, self._stash())  # type: ignore[no-untyped-call]
        if self.gather_output:
            even = even_ranges_by_shard(self.out_features, self.group.size)
            return autograd_collectives.gather_from_shards(made, made.dim() - 1, even, self.group)
        return ShardedValue(made, LocalPartLayout(made.dim() - 1, self.out_features, self.held, self.axis), self.group)


class RowLinear(ShardedLinear):
    """y = x W^T + b, to which each shard contributes what some features of x [..., in] give; b is whole.

    Forward: the contributions are summed over the shards; under sequence parallelism with a reduce-scatter, and y is this
    shard's part of dim 1.
    """

    def __init__(self, linear: nn.Module, name: str, group: ShardGroup, held: IndexRanges) -> None:
        super().__init__(linear, name, group)
        self.held = held
        """The input features that this shard reads."""

    def forward(self, x: Tensor | ShardedValue) -> Tensor | ShardedValue:
        """y. Raises `ModelError` where x is cut otherwise than the weight."""
        if isinstance(x, ShardedValue):
            x.check_recorded()
            if x.part_layout.dim != x.dim() - 1 or x.part_layout.ranges != self.held:
                raise ModelError(
                    f"{self.name} has the features {self.held} of its weight on shard {self.group.shard}, its input comes with "
                    f"{x.part_layout.ranges} of dim {x.part_layout.dim}",
                    cure="styles of layers that follow each other must cut alike: heads with heads-row, column with row",
                )
            local = x.local
        else:
            local = take_part(x, x.dim() - 1, self.held, self.group)
        if self.group.sequence_parallel:
            _check_sequence(self.name, local.dim())
        operands = cast_for_autocast(local, self.weight, self.bias)
        made: Tensor = _Row.apply(*operands, self.group, self, self._stash())  # type: ignore[no-untyped-call]
        if not self.group.sequence_parallel:
            return made
        return ShardedValue(made, sequence_part_layout(local.shape[1], self.group.shard, self.group.size), self.group)


def _check_sequence(name: str, dims: int) -> None:
    """Raises `ModelError` for a value without a sequence dim that sequence parallelism could cut."""
    if dims < 3:
        raise ModelError(
            f"{name} sees a value of {dims} dims, sequence parallelism cuts dim 1 of [batch, sequence, features]",
            cure="keep batch and sequence apart in the layers, or set plan.sequence_parallel: false",
        )


def _input_of(layer: ColumnLinear, x: Tensor | ShardedValue) -> tuple[Tensor, int | None]:
    """(this shard's tensor of the input, the whole length of dim 1 if that is cut)."""
    if not isinstance(x, ShardedValue):
        return x, None
    x.check_recorded()
    if x.by_sequence:
        return x.local, x.part_layout.size
    raise ModelError(
        f"{layer.name} needs all of its input, which is cut along dim {x.part_layout.dim} of {list(x.shape)}",
        cure=f"give {layer.name} the style row, or the layer before it the style gathered or whole",
    )


def _weight_gradients(
    ctx: AutogradContext,
    gradient: Tensor,
    rows: Tensor,
    x: Tensor,
    layer: ShardedLinear,
    stash: Stash | None,
    *,
    added_apart: bool = False,
) -> tuple[Tensor | None, Tensor | None]:
    """(gradient of the weight, gradient of the bias); None for what a zero-bubble schedule computes later.

    They are the second and third argument of the autograd function. `added_apart`: the bias was added to the layer's output,
    not by the matrix product.
    """
    summed = gradient if added_apart else layer.bias_operand(gradient, rows, x)
    flat = as_matrix(x)
    if stash is not None and ctx.needs_input_grad[1] and will_accumulate_weight_gradient(ctx):
        stash.append(DeferredWeightGradient(layer, rows, flat.detach(), summed, layer.weight_gradient))
        return None, None
    weight = layer.weight_gradient(rows, flat) if ctx.needs_input_grad[1] else None
    return weight, bias_gradient(summed) if ctx.needs_input_grad[2] else None


class _ColumnContext(AutogradContext):
    seq: int | None
    group: ShardGroup
    layer: ShardedLinear
    stash: Stash | None


class _Column(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: _ColumnContext,
        x: Tensor,
        weight: Tensor,
        bias: Tensor | None,
        seq: int | None,
        group: ShardGroup,
        layer: ShardedLinear,
        stash: Stash | None,
    ) -> Tensor:
        ctx.seq, ctx.group, ctx.layer, ctx.stash = seq, group, layer, stash
        ctx.set_materialize_grads(False)
        if seq is not None:
            x = group.gather_and_concat(x, 1, even_ranges_by_shard(seq, group.size), "the sequence's parts")
        ctx.save_for_backward(x, weight)
        return layer.product(x, weight, bias)

    @staticmethod
    @autograd_collectives.first_derivative_only
    def backward(ctx: _ColumnContext, *gradients: Tensor) -> tuple[Tensor | None, ...]:
        (gradient,) = gradients
        if gradient is None:
            return (None,) * 7
        x, weight = ctx.saved_tensors
        rows = as_matrix(gradient)
        pending: _Pending | None = None
        if ctx.needs_input_grad[0]:
            pending = _Pending(ctx.group, ctx.layer.input_gradient(rows, weight, x), ctx.seq)
        own = _weight_gradients(ctx, gradient, rows, x, ctx.layer, ctx.stash)
        return (None if pending is None else pending.take(), *own, None, None, None, None)


class _Pending:
    """A sum over shards that is under way: of a layer's gradient of its input [..., in], whose memory it takes.

    `seq`: as in `_input_of`; then the sum is scattered, too.
    """

    def __init__(self, group: ShardGroup, gradient: Tensor, seq: int | None) -> None:
        self._group = group
        self._handle: Handle
        self._kept: list[Tensor] = []
        gradient = gradient.contiguous()
        if seq is None:
            self.out, self._handle = gradient, group.post_all_reduce(gradient)
        else:
            self.out, self._handle, self._kept = group.post_reduce_scatter(gradient, 1)

    def take(self) -> Tensor:
        """The sum (or this shard's part of it), once it is there."""
        self._group.wait(self._handle, self.out, "the sum of the gradients of a layer's input")
        self._kept = []
        return self.out


# -- several layers that read one value --------------------------------------------------------------------------------
#
# The sum over shards of a value's gradient travels while a weight gradient is computed. The order comes from autograd, which
# runs, of the nodes that are ready, the one that was made last. A value passes through `_Arrive`, then `_Depart`, to its
# readers; the weight of the first reader passes through `_Late`, made between the two. So in the backward pass, when all
# readers have given their gradients, `_Depart` posts the sum of them, `_Late` computes a weight gradient, `_Arrive` waits.


class InputOfSeveralLayers:
    """A value that several column layers read, and the sum of its gradients while that is under way."""

    def __init__(self, x: Tensor, seq: int | None, group: ShardGroup) -> None:
        self.source, self.version = weakref.ref(x), x._version
        """The value, and the version of its contents that was read."""
        self.seq, self.group = seq, group
        self.pending: _Pending | None = None
        """The sum of the readers' gradients, while it is under way."""


class _ArriveContext(AutogradContext):
    shared: InputOfSeveralLayers


class _Arrive(torch.autograd.Function):
    @staticmethod
    def forward(ctx: _ArriveContext, x: Tensor, shared: InputOfSeveralLayers) -> Tensor:
        ctx.shared = shared
        ctx.set_materialize_grads(False)
        return x.view_as(x)

    @staticmethod
    @autograd_collectives.first_derivative_only
    def backward(ctx: _ArriveContext, *gradients: Tensor) -> tuple[Tensor | None, ...]:
        pending, ctx.shared.pending = ctx.shared.pending, None
        return (None if pending is None else pending.take()), None


class _DepartContext(AutogradContext):
    shared: InputOfSeveralLayers


class _Depart(torch.autograd.Function):
    @staticmethod
    def forward(ctx: _DepartContext, x: Tensor, shared: InputOfSeveralLayers) -> Tensor:
        ctx.shared = shared
        ctx.set_materialize_grads(False)
        if shared.seq is None:
            return x.view_as(x)
        return shared.group.gather_and_concat(x, 1, even_ranges_by_shard(shared.seq, shared.group.size), "the sequence's parts")

    @staticmethod
    @autograd_collectives.first_derivative_only
    def backward(ctx: _DepartContext, *gradients: Tensor) -> tuple[Tensor | None, ...]:
        (gradient,) = gradients
        if gradient is None:
            return None, None
        shared = ctx.shared
        shared.pending = _Pending(shared.group, gradient, shared.seq)
        return shared.pending.out, None


class _LateContext(AutogradContext):
    layer: ShardedLinear
    left: list[Tensor]


class _Late(torch.autograd.Function):
    @staticmethod
    def forward(ctx: _LateContext, weight: Tensor, layer: ShardedLinear, left: list[Tensor]) -> Tensor:
        ctx.layer, ctx.left = layer, left
        ctx.set_materialize_grads(False)
        return weight.view_as(weight)

    @staticmethod
    @autograd_collectives.first_derivative_only
    def backward(ctx: _LateContext, *gradients: Tensor) -> tuple[Tensor | None, ...]:
        if not ctx.left:  # the reader's output has no gradient
            return None, None, None
        rows, flat = ctx.left
        ctx.left.clear()
        return ctx.layer.weight_gradient(rows, flat), None, None


@lru_cache(maxsize=16)
def _zero(dtype: torch.dtype, device: torch.device) -> Tensor:
    return torch.zeros((), dtype=dtype, device=device)


class _ReaderContext(AutogradContext):
    layer: ShardedLinear
    stash: Stash | None
    left: list[Tensor] | None


class _Reader(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: _ReaderContext,
        x: Tensor,
        weight: Tensor,
        bias: Tensor | None,
        layer: ShardedLinear,
        stash: Stash | None,
        left: list[Tensor] | None,
    ) -> Tensor:
        ctx.layer, ctx.stash, ctx.left = layer, stash, left
        ctx.set_materialize_grads(False)
        ctx.save_for_backward(x, weight)
        return layer.product(x, weight, bias)

    @staticmethod
    @autograd_collectives.first_derivative_only
    def backward(ctx: _ReaderContext, *gradients: Tensor) -> tuple[Tensor | None, ...]:
        (gradient,) = gradients
        if gradient is None:
            return (None,) * 6
        x, weight = ctx.saved_tensors
        rows, flat = as_matrix(gradient), as_matrix(x)
        dx = ctx.layer.input_gradient(rows, weight, x)
        if ctx.left is None:
            return (dx, *_weight_gradients(ctx, gradient, rows, x, ctx.layer, ctx.stash), None, None, None)
        ctx.left[:] = [rows, flat]
        # What `_Late` gets is only a sign that it may begin.
        sign = _zero(rows.dtype, rows.device).expand(weight.shape)
        bias = bias_gradient(ctx.layer.bias_operand(gradient, rows, x)) if ctx.needs_input_grad[2] else None
        return dx, sign, bias, None, None, None


def _apply_to_shared_input(layer: ColumnLinear, x: Tensor, seq: int | None) -> Tensor:
    """The layer's output for an x that other layers of the module read, too; the first of them leads x to all."""
    group, stash = layer.group, layer._stash()
    left: list[Tensor] | None = None
    weight: Tensor = layer.weight
    if group.shared_input is None or group.shared_input[0].source() is not x or group.shared_input[0].version != x._version:
        shared = InputOfSeveralLayers(x, seq, group)
        arrived = _Arrive.apply(x, shared)  # type: ignore[no-untyped-call]
        if stash is None and weight.requires_grad:
            left = []
            weight = _Late.apply(weight, layer, left)  # type: ignore[no-untyped-call]
        # Not kept in `shared`, which the graph refers to: the cycle would hold the activations until Python's collector comes.
        group.shared_input = shared, _Depart.apply(arrived, shared)  # type: ignore[no-untyped-call]
    operands = cast_for_autocast(group.shared_input[1], weight, layer.bias)
    made: Tensor = _Reader.apply(*operands, layer, stash, left)  # type: ignore[no-untyped-call]
    return made


class _RowContext(AutogradContext):
    seq: int | None
    group: ShardGroup
    layer: ShardedLinear
    stash: Stash | None


class _Row(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: _RowContext,
        x: Tensor,
        weight: Tensor,
        bias: Tensor | None,
        group: ShardGroup,
        layer: ShardedLinear,
        stash: Stash | None,
    ) -> Tensor:
        ctx.group, ctx.layer, ctx.stash, ctx.seq = group, layer, stash, x.shape[1] if group.sequence_parallel else None
        ctx.set_materialize_grads(False)
        ctx.save_for_backward(x, weight)
        made = layer.product(x, weight, None)
        what = "the sum of a layer's outputs"
        made = group.reduce_scatter(made, 1, what) if group.sequence_parallel else group.all_reduce(made, what)
        return made if bias is None else made.add_(bias)

    @staticmethod
    @autograd_collectives.first_derivative_only
    def backward(ctx: _RowContext, *gradients: Tensor) -> tuple[Tensor | None, ...]:
        (gradient,) = gradients
        if gradient is None:
            return (None,) * 6
        x, weight = ctx.saved_tensors
        if ctx.seq is not None:
            gradient = ctx.group.gather_and_concat(
                gradient, 1, even_ranges_by_shard(ctx.seq, ctx.group.size), "the parts of a gradient"
            )
        rows = as_matrix(gradient)
        dx = ctx.layer.input_gradient(rows, weight, x) if ctx.needs_input_grad[0] else None
        return (dx, *_weight_gradients(ctx, gradient, rows, x, ctx.layer, ctx.stash, added_apart=True), None, None, None)
