"""Sees and replaces PyTorch's operations: dispatch modes, wrapper tensors, and what an operation's schema says."""

from __future__ import annotations

import contextlib
from collections.abc import Mapping, Sequence
from types import ModuleType
from typing import TYPE_CHECKING, Any, TypeAlias, TypeVar

import torch
from torch import Tensor

from raypar.errors import ModelError
from raypar.fences.private_api_fence import Fence
from raypar.torch_compat import TESTED
from raypar.torch_compat.pytree import tree_flatten


def _look_for_modes() -> ModuleType:
    from torch.utils import _python_dispatch

    assert isinstance(_python_dispatch.TorchDispatchMode, type) and callable(_python_dispatch._disable_current_modes)
    return _python_dispatch


MODES = Fence(
    api="torch.utils._python_dispatch.TorchDispatchMode",
    reason="nothing public sees the operations that a model's code runs",
    versions=TESTED,
    feature="watching a model's operations",
    without="initial values cannot be taken from a model function, and no forward can be recorded",
    probe=_look_for_modes,
    error=ModelError,
)

if TYPE_CHECKING:
    from torch._C import FunctionSchema
    from torch._ops import OpOverload as OpOverload
    from torch.utils._python_dispatch import TorchDispatchMode as TorchDispatchMode
else:  # required on import: no module that imports this one works without it
    TorchDispatchMode = MODES.require().TorchDispatchMode
    """The base of contexts that see every operation of a thread."""

T = TypeVar("T", bound=Tensor)


def without_dispatch_modes() -> contextlib.AbstractContextManager[None]:
    """Context in which no dispatch mode is entered."""
    found: contextlib.AbstractContextManager[None] = MODES.require()._disable_current_modes()
    return found


def _look_for_wrappers() -> ModuleType:
    assert callable(Tensor._make_wrapper_subclass) and callable(torch._C._disabled_torch_function_impl)
    for context in (torch._C.DisableTorchFunction, torch._C._DisableTorchDispatch):
        with context():
            pass
    return torch._C


WRAPPERS = Fence(
    api="torch.Tensor._make_wrapper_subclass",
    reason="PyTorch's own tensors without values that report a CPU device (FakeTensor) are part of its private compiler",
    versions=TESTED,
    feature="tensors without values",
    without="no model can be recorded or initialised one tensor at a time",
    probe=_look_for_wrappers,
    error=ModelError,
)

no_torch_function: Any = WRAPPERS.require()._disabled_torch_function_impl
"""The `__torch_function__` of a class that overrides no PyTorch functions."""


def make_wrapper(kind: type[T], meta: Tensor, requires_grad: bool) -> T:
    """A tensor of class `kind` with the sizes, strides and dtype of `meta`, without memory, that reports a CPU device."""
    made: T = Tensor._make_wrapper_subclass(
        kind,
        meta.size(),
        strides=meta.stride(),
        storage_offset=meta.storage_offset(),
        dtype=meta.dtype,
        device=torch.device("cpu"),
        requires_grad=requires_grad,
    )
    return made


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


SCHEMAS = Fence(
    api="torch._ops.OpOverload._schema",
    reason="nothing public says which arguments an operation writes, or which argument its result is a view of",
    versions=TESTED,
    feature="knowing which arguments operations write",
    without="initial values cannot be taken from a model function, and no forward can be recorded",
    probe=_look_for_schemas,
    error=ModelError,
)
SCHEMAS.require()


OperatorValue: TypeAlias = (
    "Tensor | bool | int | float | complex | str | torch.dtype | torch.device | torch.layout | torch.memory_format"
    " | torch.Generator | Sequence[OperatorValue] | Mapping[str, OperatorValue] | None"
)
"""What ATen operations take and return."""


def run_operation(
    operation: OpOverload, args: Sequence[OperatorValue], kwargs: Mapping[str, OperatorValue] | None = None
) -> OperatorValue:
    """The result of an ATen operation."""
    made: OperatorValue = operation(*args, **(kwargs or {}))
    return made


def schema_of(operation: OpOverload) -> FunctionSchema:
    """The schema of an ATen operation: name, arguments and returns, each with its alias information."""
    return operation._schema


def written_tensors(operation: OpOverload, args: Sequence[OperatorValue], kwargs: Mapping[str, OperatorValue]) -> list[Tensor]:
    """The tensors among the arguments into which an operation writes."""
    found = list[Tensor]()
    for index, argument in enumerate(schema_of(operation).arguments):
        if argument.alias_info is not None and argument.alias_info.is_write:
            given = args[index] if index < len(args) else kwargs.get(argument.name)
            found += [leaf for leaf in tree_flatten(given)[0] if isinstance(leaf, Tensor)]
    return found


def draws_random_numbers(operation: OpOverload) -> bool:
    """Whether an operation draws from a generator."""
    return torch.Tag.nondeterministic_seeded in operation.tags


def _look_for_operations() -> dict[str, OpOverload]:
    aten = torch.ops.aten
    return {
        "local_scalar": aten._local_scalar_dense.default,
        "pack_padded_sequence": aten._pack_padded_sequence.default,
        "ctc_loss": aten._ctc_loss.Tensor,
    }


OPERATIONS: Fence[dict[str, OpOverload]] = Fence(
    api="torch.ops.aten._local_scalar_dense",
    reason="the operations behind Tensor.item, pack_padded_sequence and ctc_loss have no public names",
    versions=TESTED,
    feature="recognising operations that read values",
    without="no forward can be recorded: results that depend on tensor values would become constants",
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
"""Parts of the names of the functions that pack sequences and make nested tensors. If a release renames them, such a forward is
refused with the general error about reading values instead of one about sequences."""
OTHER_STRIDES = frozenset(f"aten::{name}" for name in ("_linalg_svd", "linalg_eig", "_fft_r2c", "poisson", "_standard_gamma"))
"""Operations whose meta kernels predict strides that differ from those of the CPU's results. They run at
once instead of being deferred. `tests/parity/test_initial_values.py` notices one that a release renames."""
