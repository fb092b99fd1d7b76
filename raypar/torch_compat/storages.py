"""Which tensors share memory, and how many hold it."""

from __future__ import annotations

import sys
from typing import Any

import torch
from torch import Tensor

from raypar.errors import ModelError
from raypar.fences.fence import Fence
from raypar.torch_compat import TESTED


def _look_for_addresses() -> Any:
    one = torch.empty(2, device="meta")
    storage: Any = one.untyped_storage()
    assert isinstance(storage._cdata, int) and storage._cdata == one[1:].untyped_storage()._cdata
    assert storage._cdata != torch.empty(2, device="meta").untyped_storage()._cdata
    return True


ADDRESSES: Fence[Any] = Fence(
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
    """A number that is equal for tensors that lie in one storage, with values or without."""
    return int(tensor.untyped_storage()._cdata)


def view_base(tensor: Tensor) -> Tensor | None:
    """The tensor that PyTorch keeps alive for this one, a view of it; None for any other."""
    return tensor._base


def _look_for_counts() -> Any:
    count = torch._C._storage_Use_Count
    alone = torch.empty(1)
    held = count(alone.untyped_storage()._cdata)
    assert isinstance(held, int) and isinstance(alone._use_count(), int)  # type: ignore[attr-defined]
    return count


COUNTS: Fence[Any] = Fence(
    api="torch._C._storage_Use_Count",
    reason="nothing public counts who holds a storage; PyTorch's own trees of CUDA graphs use it",
    versions=TESTED,
    feature="seeing whether anybody else holds a tensor's memory",
    without="the memory of weight gradients is freed in every step, which may take up to 7 % more memory, and initialising one "
    "tensor at a time looks through all of Python's objects",
    probe=_look_for_counts,
)


def count_holders(tensor: Tensor) -> tuple[int, int, int, int] | None:
    """Numbers of holders: of the tensor (Python object, C++ object), of its storage (both, too). None if they are not known.

    The caller and this function hold the tensor, too: compare with the numbers of a tensor that is held as well.
    """
    count = COUNTS.find()
    if count is None:
        return None
    memory = tensor.untyped_storage()
    uses: int = tensor._use_count()  # type: ignore[attr-defined]
    return sys.getrefcount(tensor), uses, sys.getrefcount(memory), count(memory._cdata)


def count_storage_holders(key: int) -> int | None:
    """How many tensors and Python objects hold the storage of this `storage_id`, which must exist. None if it is not known."""
    count = COUNTS.find()
    return None if count is None else int(count(key))


for _fence in (COUNTS,):
    _fence.look()  # now: not while a model's operations are watched
