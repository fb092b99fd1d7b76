"""Calls the user's model function as one plain process would; counts and NaN-fills what it allocates."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, TypeVar

import torch
from torch import Tensor

from raypar.torch_compat.avoid_dynamo_import import without_dynamo
from raypar.torch_compat.dispatch import OperatorValue, TorchDispatchMode, run_operation, schema_of
from raypar.torch_compat.storages import storage_id

if TYPE_CHECKING:
    from raypar.torch_compat.dispatch import OpOverload

T = TypeVar("T")

WHOLE_BYTES = 1 << 30
"""A model function that allocates more than this in all (parameters, buffers, intermediate tensors) is run with deferred
initialisation: otherwise every worker of a node would hold that much at the same time."""


class AllocationLimitExceeded(BaseException):
    """Raised inside the model function when it has allocated more than the limit.

    A `BaseException`, so that `except Exception` in the user's code does not catch it.
    """


@without_dynamo
class AllocationWatch(TorchDispatchMode):
    """While entered: counts the bytes of new tensors, and fills uninitialised memory with NaN (integers with 0).

    The NaN shows later which parameters nobody has given values. Raises `AllocationLimitExceeded` beyond `limit_bytes`.
    """

    def __init__(self, limit_bytes: int | None) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.limit_bytes = limit_bytes
        self.nbytes = 0
        """Bytes of all new tensors."""
        self.loaded_bytes = 0
        """Bytes copied from tensors that no operation in here has made, such as files or numpy arrays."""
        self._made: set[int] = set()
        """The memory of tensors that operations in here have made."""

    def __torch_dispatch__(
        self,
        func: OpOverload,
        types: Sequence[type],
        args: tuple[OperatorValue, ...] = (),
        kwargs: Mapping[str, OperatorValue] | None = None,
    ) -> OperatorValue:
        made = run_operation(func, args, kwargs)
        if isinstance(made, Tensor) and made.layout is torch.strided and not made.is_meta and func.namespace == "aten":
            value = uninitialised_fill_value(func, made)
            if value is not None:
                made.fill_(value)
            source = args[1] if schema_of(func).name == "aten::copy_" else None
            if isinstance(source, Tensor) and storage_id(source) not in self._made:
                self.loaded_bytes += made.nbytes
            if not any(a.alias_info is not None for a in schema_of(func).returns):
                self._made.add(storage_id(made))
                self.nbytes += made.nbytes
                if self.limit_bytes is not None and self.nbytes > self.limit_bytes:
                    raise AllocationLimitExceeded(f"{self.nbytes} bytes")
        return made


_UNINITIALISED = frozenset(
    f"aten::{name}" for name in ("empty", "empty_like", "empty_strided", "new_empty", "new_empty_strided", "empty_permuted")
)


def uninitialised_fill_value(func: OpOverload, made: Tensor) -> float | int | None:
    """The number with which to fill `made` if the ATen operation `func` leaves it uninitialised; None if it has values."""
    if schema_of(func).name not in _UNINITIALISED:
        return None
    return math.nan if made.is_floating_point() or made.is_complex() else 0


def call_counting_allocations(call: Callable[[], T], limit_bytes: int | None = None) -> tuple[T, int]:
    """(result of `call()`, bytes of values that it loaded), run under `AllocationWatch`.

    Raises `AllocationLimitExceeded` beyond `limit_bytes`.
    """
    with AllocationWatch(limit_bytes) as allocations:
        return call(), allocations.loaded_bytes
