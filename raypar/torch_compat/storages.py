"""Which tensors share a storage, and how many references hold it."""

from __future__ import annotations

import sys
from collections.abc import Callable

import torch
from torch import Tensor

from raypar.errors import ModelError
from raypar.fences.private_api_fence import Fence
from raypar.torch_compat import TESTED


def _look_for_addresses() -> bool:
    one = torch.empty(2, device="meta")
    storage: torch.UntypedStorage = one.untyped_storage()
    assert isinstance(storage._cdata, int) and storage._cdata == one[1:].untyped_storage()._cdata
    assert storage._cdata != torch.empty(2, device="meta").untyped_storage()._cdata
    return True


ADDRESSES = Fence(
    api="torch.UntypedStorage._cdata",
    reason="`data_ptr` is 0 for every tensor without values, so that it does not tell which of them share memory",
    versions=TESTED,
    feature="seeing which tensors share memory",
    without="no model can be read: parameters that share memory would become two",
    probe=_look_for_addresses,
    error=ModelError,
)
ADDRESSES.require()


def storage_id(tensor: Tensor) -> int:
    """A number that is equal for all tensors of one storage, meta tensors included."""
    return int(tensor.untyped_storage()._cdata)


def view_base(tensor: Tensor) -> Tensor | None:
    """The tensor of which autograd records `tensor` as a view, and which it keeps alive; None if `tensor` is no view."""
    return tensor._base


def _look_for_counts() -> Callable[[int], int]:
    count = torch._C._storage_Use_Count
    alone = torch.empty(1)
    held = count(alone.untyped_storage()._cdata)
    assert isinstance(held, int) and isinstance(alone._use_count(), int)  # type: ignore[attr-defined]
    return count


COUNTS = Fence(
    api="torch._C._storage_Use_Count",
    reason="nothing public counts the references to a storage; PyTorch's own CUDA graph trees use it",
    versions=TESTED,
    feature="seeing whether anything else holds a tensor's memory",
    without="the memory of weight gradients is freed in every step, which may take up to 7 % more memory, and initialising one "
    "tensor at a time looks through all of Python's objects",
    probe=_look_for_counts,
)


def count_holders(tensor: Tensor) -> tuple[int, int, int, int] | None:
    """Reference counts (tensor in Python, tensor in C++, storage in Python, storage in C++); None if PyTorch has none to read.

    They include the references of the caller and of this function: compare them with the counts of a tensor that is known to
    be held by the caller only.
    """
    count = COUNTS.find()
    if count is None:
        return None
    memory = tensor.untyped_storage()
    uses: int = tensor._use_count()  # type: ignore[attr-defined]
    return sys.getrefcount(tensor), uses, sys.getrefcount(memory), count(memory._cdata)


def count_storage_holders(key: int) -> int | None:
    """Reference count of the live storage with this `storage_id`; None if PyTorch has none to read."""
    count = COUNTS.find()
    return None if count is None else int(count(key))


COUNTS.run_probe()  # on import: its tensor operations must not run while a model is recorded
