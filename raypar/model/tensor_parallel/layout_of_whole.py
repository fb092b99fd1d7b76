"""In which order a whole value's dims lie in memory, of which a shard has a single index along the cut dim.

The strides of such a part do not tell: PyTorch takes a dim of one index for contiguous wherever it stands, and gives it any
stride. So these values know by which calls they were made. The same calls on tensors without numbers tell how the whole lies.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from raypar.torch_compat.avoid_dynamo_import import meta_operations_without_dynamo

_MOVING = {"transpose", "transpose_", "swapaxes", "swapdims", "permute", "movedim", "moveaxis", "t", "t_", "adjoint"}
_MOVING |= {"matmul", "einsum", "scaled_dot_product_attention", "multi_head_attention_forward"}
"""Functions that may return a value whose dims do not lie in their order."""
_FAILED = (RuntimeError, TypeError, ValueError, IndexError, AttributeError, AssertionError)
"""What a call raises that needs numbers, or another device."""


def memory_order(x: Tensor) -> list[int]:
    """A tensor's dims, outermost first, as they lie in memory; ascending if that has gaps."""
    shape, strides, dense = x.shape, x.stride(), 1
    # A dim of one index has the stride of the next one outside it, unless it was moved.
    order = sorted(range(len(shape)), key=lambda dim: (-strides[dim], shape[dim] == 1))
    for dim in reversed(order):  # no function of PyTorch: such as look for uses of parameters would see it
        if shape[dim] > 1 and strides[dim] != dense:
            return sorted(order)
        dense *= shape[dim]
    return order


class WholeLayout:
    """How a whole value lies: a tensor of its shape without numbers, made when it is asked for.

    `may_be_moved`: whether its dims may lie in another order than their own.
    """

    __slots__ = ("_made", "_make", "may_be_moved")

    def __init__(self, make: Callable[[], Tensor | None], *, may_be_moved: bool) -> None:
        self._make: Callable[[], Tensor | None] | None = make
        self._made: Tensor | None = None
        self.may_be_moved = may_be_moved

    @staticmethod
    def of_tensor(x: Tensor) -> WholeLayout:
        """That of a tensor which every shard has."""
        shape, stride, dtype = x.shape, x.stride(), x.dtype
        moved = memory_order(x) != list(range(x.dim()))
        return WholeLayout(lambda: torch.empty_strided(shape, stride, dtype=dtype, device="meta"), may_be_moved=moved)

    @staticmethod
    def in_order_of(local: Tensor, shape: Sequence[int]) -> WholeLayout:
        """That of a value whose dims lie as those of a part."""
        order, dtype = memory_order(local), local.dtype

        def make() -> Tensor:
            whole = torch.empty([shape[dim] for dim in order], dtype=dtype, device="meta")
            return whole.permute([order.index(dim) for dim in range(len(shape))])

        return WholeLayout(make, may_be_moved=order != sorted(order))

    @staticmethod
    def of_call(func: Callable[..., Any], args: Sequence[Any], named: Mapping[str, Any], place: int | None) -> WholeLayout:
        """That of what a function returns (its result number `place`, if it returns several). `args` and `named`: with layouts
        in the places of values."""

        def make() -> Tensor | None:
            given, more = _on_meta(list(args)), _on_meta(dict(named))
            try:
                with torch.no_grad():
                    found = func(*given, **more)
            except _FAILED:
                return None
            return found if place is None else found[place]  # type: ignore[no-any-return]

        read = [each for each in (*args, *named.values()) for each in (each if type(each) is list else [each])]
        moves = func.__name__ in _MOVING or any(isinstance(x, torch.memory_format) for x in read)
        return WholeLayout(make, may_be_moved=moves or any(isinstance(x, WholeLayout) and x.may_be_moved for x in read))

    def tensor(self) -> Tensor | None:
        """A tensor without numbers; None where that is not known."""
        if self._make is not None:
            with meta_operations_without_dynamo():
                self._made, self._make = self._make(), None
        return self._made


def _on_meta(given: Any) -> Any:
    """Arguments with tensors in the places of layouts."""
    if isinstance(given, WholeLayout):
        return given.tensor()
    if isinstance(given, dict):
        return {name: _on_meta(value) for name, value in given.items()}
    return [_on_meta(value) for value in given] if type(given) is list else given
