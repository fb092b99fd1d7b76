"""Sees and replaces PyTorch's operations: dispatch modes, wrapper tensors, and what an operation's schema says."""

from __future__ import annotations

import contextlib
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from raypar.errors import ModelError
from raypar.fences.fence import Fence
from raypar.torch_compat import TESTED


def _look_for_modes() -> Any:
    from torch.utils import _python_dispatch

    assert isinstance(_python_dispatch.TorchDispatchMode, type) and callable(_python_dispatch._disable_current_modes)
    return _python_dispatch


MODES: Fence[Any] = Fence(
    api="torch.utils._python_dispatch.TorchDispatchMode",
    reason="nothing public sees the operations that a model's code runs",
    versions=TESTED,
    feature="watching a model's operations",
    without="initial values cannot be taken from a model function, and no forward can be recorded",
    probe=_look_for_modes,
    error=ModelError,
)

if TYPE_CHECKING:
    from torch.utils._python_dispatch import TorchDispatchMode as TorchDispatchMode
else:  # nothing that imports this module could go on without
    TorchDispatchMode = MODES.require().TorchDispatchMode
    """The base of contexts that see every operation of a thread."""


def without_dispatch_modes() -> contextlib.AbstractContextManager[Any]:
    """Context in which no dispatch mode is entered."""
    found: contextlib.AbstractContextManager[Any] = MODES.require()._disable_current_modes()
    return found


def _look_for_wrappers() -> Any:
    assert callable(Tensor._make_wrapper_subclass) and callable(torch._C._disabled_torch_function_impl)
    for context in (torch._C.DisableTorchFunction, torch._C._DisableTorchDispatch):
        with context():
            pass
    return torch._C


WRAPPERS: Fence[Any] = Fence(
    api="torch.Tensor._make_wrapper_subclass",
    reason="tensors without values, which claim to be on the CPU, are PyTorch's own FakeTensor only with its private compiler",
    versions=TESTED,
    feature="tensors without values",
    without="no model can be recorded or initialised one tensor at a time",
    probe=_look_for_wrappers,
    error=ModelError,
)

no_torch_function: Any = WRAPPERS.require()._disabled_torch_function_impl
"""As the `__torch_function__` of a class: its tensors are not overridden there."""


def make_wrapper(kind: type[Tensor], meta: Tensor, requires_grad: bool) -> Any:
    """A tensor of class `kind` with the geometry of `meta`, without memory, that claims to be on the CPU."""
    return Tensor._make_wrapper_subclass(
        kind,
        meta.size(),
        strides=meta.stride(),
        storage_offset=meta.storage_offset(),
        dtype=meta.dtype,
        device=torch.device("cpu"),
        requires_grad=requires_grad,
    )


def without_torch_function() -> contextlib.AbstractContextManager[None]:
    """Context in which no `__torch_function__` is called."""
    found: contextlib.AbstractContextManager[None] = torch._C.DisableTorchFunction()
    return found


def without_torch_dispatch() -> contextlib.AbstractContextManager[None]:
    """Context in which no `__torch_dispatch__` is called."""
    found: contextlib.AbstractContextManager[None] = torch._C._DisableTorchDispatch()
    return found


def _look_for_schemas() -> Any:
    schema: Any = torch.ops.aten.add_.Tensor._schema
    first, (returned,) = schema.arguments[0], schema.returns
    assert schema.name == "aten::add_" and schema.is_mutable is True and first.name == "self"
    assert first.alias_info.is_write and returned.alias_info.is_write and str(returned.type) == "Tensor"
    return schema


SCHEMAS: Fence[Any] = Fence(
    api="torch._ops.OpOverload._schema",
    reason="nothing public says which arguments an operation writes, or of which its result is a view",
    versions=TESTED,
    feature="knowing what operations write",
    without="initial values cannot be taken from a model function, and no forward can be recorded",
    probe=_look_for_schemas,
    error=ModelError,
)
SCHEMAS.require()


def schema_of(operation: Any) -> Any:
    """The schema of an ATen operation: its name, arguments and returns, with what they alias and write."""
    return operation._schema


def _look_for_operations() -> dict[str, Any]:
    aten = torch.ops.aten
    return {
        "local_scalar": aten._local_scalar_dense.default,
        "pack_padded_sequence": aten._pack_padded_sequence.default,
        "ctc_loss": aten._ctc_loss.Tensor,
    }


OPERATIONS: Fence[dict[str, Any]] = Fence(
    api="torch.ops.aten._local_scalar_dense",
    reason="the operations behind Tensor.item, pack_padded_sequence and ctc_loss have no public names",
    versions=TESTED,
    feature="knowing which operations read values",
    without="no forward can be recorded: what depends on values would be taken for fixed",
    probe=_look_for_operations,
    error=ModelError,
)

LOCAL_SCALAR = OPERATIONS.require()["local_scalar"]
"""What `Tensor.item` runs."""
PACK_PADDED_SEQUENCE = OPERATIONS.require()["pack_padded_sequence"]
"""What `torch.nn.utils.rnn.pack_padded_sequence` runs."""
CTC_LOSS = OPERATIONS.require()["ctc_loss"]
"""What `torch.nn.functional.ctc_loss` runs if the lengths are tensors."""
PACKING, NESTED_TENSORS = "_pack_padded_sequence", "_nested_tensor"
"""Parts of the names of the functions that pack sequences and make nested tensors. In other words their lengths are values that
a forward reads, which is refused with a general cure."""
OTHER_STRIDES = frozenset(f"aten::{name}" for name in ("_linalg_svd", "linalg_eig", "_fft_r2c", "poisson", "_standard_gamma"))
"""Names of the operations whose meta kernels predict other strides than the CPU's results have. One that is renamed is computed
on values all the same where its result is a view: `tests/parity/test_initial_values.py` compares bits."""
