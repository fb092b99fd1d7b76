"""Linear layers cut over shards by output (column) or by input features (row) (Shoeybi et al. 2019, section 3).

Weight gradients are computed while the input's gradient is being summed over shards, or deferred by zero-bubble schedules.
"""

from __future__ import annotations

import weakref
from collections.abc import Sequence
from functools import lru_cache

import torch
from torch import Tensor, nn

from raypar.comm.transport import Handle
from raypar.errors import ModelError
from raypar.model.autocast_casts import cast_for_autocast
from raypar.model.autograd_function_types import AutogradContext, AutogradFunction
from raypar.model.linear_call import (
    LinearCall,
    bias_gradient,
    input_gradient,
    is_row_major,
    transposed_weight_gradient,
    weight_gradient,
)
from raypar.model.split_backward import DeferredWeightGradient, Stash, put_off
from raypar.model.tensor_parallel import autograd_collectives
from raypar.model.tensor_parallel.local_part_layout import FEATURES, LocalPartLayout, sequence_part_layout
from raypar.model.tensor_parallel.shard_group import PendingSum, ShardGroup
from raypar.model.tensor_parallel.sharded_value import ShardedValue, take_part
from raypar.model.tensor_parallel.split_shards_backward import SplitShard
from raypar.model.tensor_parallel.weight_gradient_memory_reuse import KeptGradientMemory
from raypar.model.transposed_linear import is_transposed_linear, linear_features
from raypar.plan.shard_ranges import IndexRanges, even_ranges_by_shard


class ShardedLinear(SplitShard):
    """Base of the column and row layers of one shard. `linear`: a linear layer, whose parameters are this shard's slices."""

    def __init__(self, linear: nn.Module, name: str, group: ShardGroup) -> None:
        super().__init__(linear, name, group)
        self.in_features, self.out_features = linear_features(linear)
        """Of the unsharded layer."""
        self.call = LinearCall(is_transposed_linear(linear))
        """How it calls PyTorch. The weight is [out here, in here]; [in here, out here] if `call.transposed`."""
        self._gradient_memory = KeptGradientMemory()
        """The memory that the weight's gradient had in the last step."""

    def keep_gradient_memory(self) -> None:
        """Keep the memory of the last step's gradient, which is no longer needed, for the next gradient."""
        self._gradient_memory.keep(self.weight)

    def input_gradient(self, operands: tuple[Tensor, ...], weight: Tensor, shape: Sequence[int]) -> Tensor:
        """Gradient of x, which has this shape [..., in]. `operands`: as `LinearCall.operands` has them."""
        rows, flat, _ = operands
        found = input_gradient(rows, weight.t() if self.call.transposed else weight, flat)
        return found.view(shape) if found.is_contiguous() else found.reshape(shape)

    def weight_gradient(self, rows: Tensor, flat: Tensor) -> Tensor:
        """grad^T x [out, in] of grad [rows, out] and x [rows, in], in the memory of the last step's gradient where possible.

        Same call and bits as `LinearCall.gradients`; x^T grad [in, out] if `call.transposed`.
        """
        memory = self._gradient_memory.take(rows, flat)
        transposed, weight = self.call.transposed, self.weight
        # The memory is row-major, as the gradient of such a weight is.
        if memory is None or not (
            not is_row_major(weight.t()) and weight.is_contiguous() if transposed else is_row_major(weight)
        ):
            return (transposed_weight_gradient if transposed else weight_gradient)(rows, flat, weight)
        # `.data` has a version count of its own, which this first writing does not raise.
        return torch.mm(*((flat.t(), rows) if transposed else (rows.t(), flat)), out=memory).data

    def deferred_gradients(self, rows: Tensor, flat: Tensor, summed: Tensor) -> tuple[Tensor, Tensor | None]:
        """Gradients of weight and bias, as `DeferredWeightGradient.compute`."""
        return self.weight_gradient(rows, flat), None if self.bias is None else bias_gradient(summed)


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
        self._layouts: dict[int, LocalPartLayout] = {}
        """Number of dims of an output -> which part of it is here."""

    def forward(self, x: Tensor | ShardedValue) -> Tensor | ShardedValue:
        """y, whole if `gather_output`, else this shard's part."""
        local, seq = _input_of(self, x)
        made: Tensor
        if self.shares_input and local.requires_grad and torch.is_grad_enabled():
            made = _apply_to_shared_input(self, local, seq)
        else:
            operands = cast_for_autocast(local, self.weight, self.bias)
            stash = None if self.stash is None else self.current_stash()
            made = _Column.apply(*operands, seq, self.group, self, stash)
        if self.gather_output:
            even = even_ranges_by_shard(self.out_features, self.group.size)
            return autograd_collectives.gather_from_shards(made, made.dim() - 1, even, self.group)
        dims = made.dim()
        part = self._layouts.get(dims)
        if part is None:
            part = self._layouts[dims] = LocalPartLayout(dims - 1, self.out_features, self.held, self.axis)
        return ShardedValue(made, part, self.group)


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
        stash = None if self.stash is None else self.current_stash()
        made: Tensor = _Row.apply(*operands, self.group, self, stash)
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
    ctx: AutogradContext, operands: tuple[Tensor, ...], layer: ShardedLinear, stash: Stash | None
) -> tuple[Tensor | None, Tensor | None]:
    """(gradient of the weight, gradient of the bias); None for what a zero-bubble schedule computes later.

    They are the second and third argument of the autograd function. `operands`: as `LinearCall.operands` has them.
    """
    rows, flat, summed = operands
    if stash is not None:
        deferred = DeferredWeightGradient(layer, (rows, flat.detach(), summed), layer.deferred_gradients)
        if put_off(ctx, stash, deferred):
            return None, None
    weight = layer.weight_gradient(rows, flat) if ctx.needs_input_grad[1] else None
    return weight, bias_gradient(summed) if ctx.needs_input_grad[2] else None


class _ColumnContext(AutogradContext):
    seq: int | None
    group: ShardGroup
    layer: ShardedLinear
    stash: Stash | None


class _Column(AutogradFunction):
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
        return layer.call.output(x, weight, bias)

    @staticmethod
    @autograd_collectives.first_derivative_only
    def backward(ctx: _ColumnContext, *gradients: Tensor) -> tuple[Tensor | None, ...]:
        (gradient,) = gradients
        if gradient is None:
            return (None,) * 7
        x, weight = ctx.saved_tensors
        operands = ctx.layer.call.operands(gradient, x)
        pending: _Pending | None = None
        if ctx.needs_input_grad[0]:
            pending = _Pending(ctx.group, ctx.layer.input_gradient(operands, weight, x.shape), ctx.seq)
        own = _weight_gradients(ctx, operands, ctx.layer, ctx.stash)
        return (None if pending is None else pending.take(), *own, None, None, None, None)


class _Pending:
    """A sum over shards that is under way: of a layer's gradient of its input [..., in], whose memory it takes.

    `seq`: as in `_input_of`; then the sum is scattered, too.
    """

    def __init__(self, group: ShardGroup, gradient: Tensor, seq: int | None) -> None:
        self._group = group
        self._sum: PendingSum | None = None
        self._handle: Handle
        self._kept: list[Tensor] = []
        gradient = gradient.contiguous()
        if seq is None:
            self.out, self._sum = gradient, group.post_sum(gradient)
        else:
            self.out, self._handle, self._kept = group.post_reduce_scatter(gradient, 1)

    def take(self) -> Tensor:
        """The sum (or this shard's part of it), once it is there."""
        what = "the sum of the gradients of a layer's input"
        if self._sum is not None:
            return self._sum.take(what)
        self._group.wait(self._handle, self.out, what)
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


class _Arrive(AutogradFunction):
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


class _Depart(AutogradFunction):
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


class _Late(AutogradFunction):
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


class _Reader(AutogradFunction):
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
        return layer.call.output(x, weight, bias)

    @staticmethod
    @autograd_collectives.first_derivative_only
    def backward(ctx: _ReaderContext, *gradients: Tensor) -> tuple[Tensor | None, ...]:
        (gradient,) = gradients
        if gradient is None:
            return (None,) * 6
        x, weight = ctx.saved_tensors
        operands = ctx.layer.call.operands(gradient, x)
        rows, flat, summed = operands
        dx = ctx.layer.input_gradient(operands, weight, x.shape)
        if ctx.left is None:
            return (dx, *_weight_gradients(ctx, operands, ctx.layer, ctx.stash), None, None, None)
        ctx.left[:] = [rows, flat]
        # What `_Late` gets is only a sign that it may begin.
        sign = _zero(rows.dtype, rows.device).expand(weight.shape)
        bias = bias_gradient(summed) if ctx.needs_input_grad[2] else None
        return dx, sign, bias, None, None, None


def _apply_to_shared_input(layer: ColumnLinear, x: Tensor, seq: int | None) -> Tensor:
    """The layer's output for an x that other layers of the module read, too; the first of them leads x to all."""
    group, stash = layer.group, layer.current_stash()
    left: list[Tensor] | None = None
    weight: Tensor = layer.weight
    if group.shared_input is None or group.shared_input[0].source() is not x or group.shared_input[0].version != x._version:
        shared = InputOfSeveralLayers(x, seq, group)
        arrived = _Arrive.apply(x, shared)
        if stash is None and weight.requires_grad:
            left = []
            weight = _Late.apply(weight, layer, left)
        # Not kept in `shared`, which the graph refers to: the cycle would hold the activations until Python's collector comes.
        group.shared_input = shared, _Depart.apply(arrived, shared)
    operands = cast_for_autocast(group.shared_input[1], weight, layer.bias)
    made: Tensor = _Reader.apply(*operands, layer, stash, left)
    return made


class _RowContext(AutogradContext):
    seq: int | None
    group: ShardGroup
    layer: ShardedLinear
    stash: Stash | None


class _Row(AutogradFunction):
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
        made = layer.call.output(x, weight, None)
        what = "the sum of a layer's outputs"
        if not group.sequence_parallel:
            return group.all_reduce(made, what, added=bias)
        made = group.reduce_scatter(made, 1, what)
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
        operands = (*ctx.layer.call.operands(gradient, x)[:2], gradient)  # the bias was added to the sum over shards
        dx = ctx.layer.input_gradient(operands, weight, x.shape) if ctx.needs_input_grad[0] else None
        return (dx, *_weight_gradients(ctx, operands, ctx.layer, ctx.stash), None, None, None)
