"""Tensors without memory, for tracing: they have shape, strides, dtype and device, as PyTorch's FakeTensor does."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from functools import partial
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from raypar.torch_compat.avoid_dynamo_import import without_dynamo
from raypar.torch_compat.dispatch import (
    CTC_LOSS,
    LOCAL_SCALAR,
    PACK_PADDED_SEQUENCE,
    OperatorValue,
    make_wrapper,
    no_torch_function,
    schema_of,
    without_torch_dispatch,
)
from raypar.torch_compat.pytree import tree_leaves, tree_map
from raypar.torch_compat.storages import storage_id

if TYPE_CHECKING:
    from raypar.torch_compat.dispatch import OpOverload

META = torch.device("meta")


class ValuesNeeded(Exception):
    """Raised by an operation that needs the values of a memoryless tensor."""


@without_dynamo
class MemorylessTensor(Tensor):
    """A meta tensor that reports a CPU device, so that users' code and libraries take their usual path."""

    meta: Tensor
    """The meta tensor, which has the shape, strides and aliases."""

    @staticmethod
    def __new__(cls, meta: Tensor, requires_grad: bool = False) -> MemorylessTensor:
        """The memoryless tensor of a meta tensor."""
        made: MemorylessTensor = make_wrapper(cls, meta, requires_grad)
        made.meta = meta
        return made

    __torch_function__ = no_torch_function

    def __repr__(self, *, tensor_contents: OperatorValue = None) -> str:  # type: ignore[override]
        """The tensor in messages."""
        return f"a tensor {list(self.shape)} of {self.dtype} without values"

    @classmethod
    def __torch_dispatch__(  # type: ignore[override]
        cls,
        func: OpOverload,
        types: Sequence[type],
        args: tuple[OperatorValue, ...] = (),
        kwargs: Mapping[str, OperatorValue] | None = None,
    ) -> OperatorValue:
        """Run the operation on meta tensors. Raises `ValuesNeeded` for one that reads values."""
        if func is PACK_PADDED_SEQUENCE and isinstance(args[0], MemorylessTensor) and not isinstance(args[1], MemorylessTensor):
            packed, batch_sizes = func(args[0].meta, *args[1:])  # which reads the values of the lengths alone
            return MemorylessTensor(packed), batch_sizes
        if func is torch.ops.aten.index.Tensor:
            args = (args[0], [each for index in _indices(args) for each in _integers(index)])
        if func in READ_VALUES or has_dynamic_shape(func, args):
            raise ValuesNeeded(str(func))
        known: dict[int, Tensor] = {}

        def to_meta(value: OperatorValue) -> OperatorValue:
            if isinstance(value, MemorylessTensor):
                known.setdefault(id(value.meta), value)
                return value.meta
            if isinstance(value, Tensor):
                return value if value.is_meta else value.to(META)
            return META if isinstance(value, torch.device) else value

        def to_absent(value: OperatorValue) -> OperatorValue:
            if not isinstance(value, Tensor):
                return value
            return known[id(value)] if id(value) in known else MemorylessTensor(value)

        try:
            made = func(*tree_map(to_meta, args), **tree_map(to_meta, dict(kwargs or {})))
        except NotImplementedError as error:
            return _run_on_random_values(func, args, kwargs or {}, error)
        if func is torch.ops.aten.convolution.default:
            made = _in_layout_of_cpu(made, args)
        if _changes_its_own_shape(func):  # shape and strides of the wrapper change too
            with without_torch_dispatch():
                func(*args, **(kwargs or {}))
        absent: OperatorValue = tree_map(to_absent, made)
        return absent


def _indices(args: Sequence[OperatorValue]) -> Sequence[Tensor | None]:
    """The indices that `aten.index` is called with, one of each dimension."""
    given = args[1]
    assert isinstance(given, (list, tuple))
    return given


def _integers(index: Tensor | None) -> Sequence[Tensor | None]:
    """The index tensors that an index stands for: itself, or for a mask with known values its integer indices."""
    if index is None or isinstance(index, MemorylessTensor) or index.dtype not in (torch.bool, torch.uint8):
        return [index]
    return index.nonzero().unbind(1)


SCALE = 0.1
"""Standard deviation of random numbers in the place of values."""


def random_like(absent: MemorylessTensor, generator: torch.Generator) -> Tensor:
    """A real tensor of the shape, strides and dtype of a memoryless one: small random numbers, zeros if it holds integers."""
    if not absent.is_floating_point():
        return torch.zeros(absent.shape, dtype=absent.dtype)
    made = torch.empty_strided(absent.shape, absent.stride(), dtype=torch.float32)
    return made.normal_(0, SCALE, generator=generator).to(absent.dtype).requires_grad_(absent.requires_grad)


def _run_on_random_values(
    func: OpOverload, args: Sequence[OperatorValue], kwargs: Mapping[str, OperatorValue], error: Exception
) -> OperatorValue:
    """The memoryless result of an operation that has no kernel for meta tensors. Runs it twice, on different random numbers.

    Raises `ValuesNeeded` if the shapes of its results depend on values, or if it writes to its arguments, or returns them or
    anything but tensors.
    """
    schema = schema_of(func)
    if schema.is_mutable or any(each.alias_info is not None or str(each.type) != "Tensor" for each in schema.returns):
        raise ValuesNeeded(str(func)) from error
    found = []
    for seed in (1, 2):
        real = partial(_real, generator=torch.Generator().manual_seed(seed))
        with torch.no_grad():
            found.append(func(*tree_map(real, args), **tree_map(real, dict(kwargs))))
    first, second = map(tree_leaves, found)
    if any(value.layout is not torch.strided or value.is_nested for value in first) or not all(
        map(_have_one_shape, first, second)
    ):
        raise ValuesNeeded(str(func)) from error
    absent: OperatorValue = tree_map(memoryless_like, found[0])
    return absent


def _have_one_shape(one: Tensor, other: Tensor) -> bool:
    return one.shape == other.shape and one.dtype == other.dtype


def _real(value: OperatorValue, generator: torch.Generator) -> OperatorValue:
    return random_like(value, generator) if isinstance(value, MemorylessTensor) else value


READ_VALUES = frozenset(
    (
        LOCAL_SCALAR,
        torch.ops.aten.equal.default,
        torch.ops.aten.nonzero.default,
        PACK_PADDED_SEQUENCE,
    )
)
"""Operations that read values: what they return, or what C++ code does next, depends on them."""


def _in_layout_of_cpu(made: Tensor, args: Sequence[OperatorValue]) -> Tensor:
    """The result of a convolution in the memory layout that CPU kernels give it: channels_last, if an argument has it."""
    layout = {4: torch.channels_last, 5: torch.channels_last_3d}.get(made.dim())
    given = [value for value in args[:2] if isinstance(value, Tensor)]
    if layout is None or not any(value.is_contiguous(memory_format=layout) and not value.is_contiguous() for value in given):
        return made
    return made.contiguous(memory_format=layout)


def _changes_its_own_shape(func: OpOverload) -> bool:
    """Whether an operation gives its argument another shape in place, as `transpose_` does."""
    return torch.Tag.inplace_view in func.tags


def has_dynamic_shape(func: OpOverload, args: Sequence[OperatorValue]) -> bool:
    """Whether the shape of what an operation returns depends on values."""
    if torch.Tag.dynamic_output_shape not in func.tags:
        return False
    if func is torch.ops.aten.index.Tensor:  # an index of integers gives its own shape
        return any(index is not None and index.dtype in (torch.bool, torch.uint8) for index in _indices(args))
    if func is CTC_LOSS:  # the lengths of the targets decide the shape of what is kept for the backward
        return isinstance(args[3], MemorylessTensor)
    return True


def memoryless_like(tensor: Tensor) -> MemorylessTensor:
    """A memoryless tensor with the shape, strides, dtype and `requires_grad` of `tensor`."""
    meta = torch.empty_strided(tensor.shape, tensor.stride(), dtype=tensor.dtype, device=META)
    return MemorylessTensor(meta, tensor.requires_grad)


def memory_of(tensor: Tensor) -> int:
    """A number that is equal for tensors that share memory, memoryless or real."""
    within = tensor.meta if isinstance(tensor, MemorylessTensor) else tensor
    if within.layout is not torch.strided:
        return id(within)
    return storage_id(within)
