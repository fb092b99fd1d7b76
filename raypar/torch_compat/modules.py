"""Private attributes of `torch.nn.Module`: hooks, non-persistent buffers, compiled calls, norms with running statistics."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any, TypeAlias

import torch
from torch import nn

from raypar.errors import ModelError
from raypar.fences.private_api_fence import Fence
from raypar.torch_compat import TESTED

KEPT_BY_MODULES = frozenset({"_parameters", "_buffers", "_modules", "_non_persistent_buffers_set"})
"""The dicts of registered tensors and modules, which every pickle of a module holds, and the non-persistent buffers' names."""
KEPT_BY_RECURRENT_LAYERS = frozenset({"_flat_weights", "_flat_weight_refs"})
"""Attributes in which PyTorch's recurrent layers hold references to their weights. If a release renames them, a model with such
a layer is refused with an error that names the new attribute."""
MODEL_OF_WRAPPER = ("_orig_mod", "module")
"""Attributes in which `torch.compile`, and `DataParallel` and `DistributedDataParallel`, hold the wrapped model. If a release
renames them, the error about a wrapped model no longer says where the model is."""
HOOKS_OF_MODULES = ("_forward_hooks", "_forward_pre_hooks", "_backward_hooks", "_backward_pre_hooks")


def _look_for_module_hooks() -> bool:
    module = nn.Identity()
    for name in HOOKS_OF_MODULES:
        assert not getattr(module, name)
    handle = module.register_forward_hook(lambda *given: None)
    assert len(module._forward_hooks) == 1
    handle.remove()
    return True


MODULE_HOOKS = Fence(
    api="torch.nn.Module._forward_hooks",
    reason="nothing public says whether a module has hooks",
    versions=TESTED,
    feature="seeing the hooks of modules",
    without="hooks of modules that raypar takes apart or replaces are neither called nor refused; use none",
    probe=_look_for_module_hooks,
)


def has_hooks(module: nn.Module) -> bool:
    """Whether a module has hooks, forward or backward."""
    return MODULE_HOOKS.find() is not None and any(getattr(module, name) for name in HOOKS_OF_MODULES)


def has_backward_hooks(module: nn.Module) -> bool:
    """Whether a module has hooks on its backward pass."""
    return MODULE_HOOKS.find() is not None and bool(module._backward_hooks or module._backward_pre_hooks)


def _look_for_persistence() -> bool:
    module: nn.Module = nn.Module()
    module.register_buffer("a", torch.empty(0), persistent=False)
    module.register_buffer("b", torch.empty(0))
    assert set(module._non_persistent_buffers_set) == {"a"} and set(module.state_dict()) == {"b"}
    return True


PERSISTENCE = Fence(
    api="torch.nn.Module._non_persistent_buffers_set",
    reason="only `state_dict` says publicly which buffers are state, and users override it",
    versions=TESTED,
    feature="knowing which buffers are caches",
    without="no model with buffers can be read",
    probe=_look_for_persistence,
    error=ModelError,
)


def non_persistent_buffer_names(module: nn.Module) -> frozenset[str]:
    """Names of a module's own non-persistent buffers. Raises `ModelError` if PyTorch does not say."""
    PERSISTENCE.require()
    return frozenset(module._non_persistent_buffers_set)


def reset_function(module: nn.Module) -> Callable[[], None] | None:
    """The method that initialises a module's own parameters; None without one.

    It is `reset_parameters`, or `_reset_parameters` as in PyTorch's attention.
    """
    found: Callable[[], None] | None = getattr(module, "reset_parameters", None) or getattr(module, "_reset_parameters", None)
    return found


def _look_for_compiled_calls() -> bool:
    assert nn.Identity()._compiled_call_impl is None
    return True


COMPILED_CALLS = Fence(
    api="torch.nn.Module._compiled_call_impl",
    reason="nothing public says whether `module.compile()` was called",
    versions=TESTED,
    feature="seeing that `module.compile()` was called",
    without="such a module would compute with the parameters that the model function made, which are not trained; compile "
    "functions instead",
    probe=_look_for_compiled_calls,
)


def has_compiled_call(module: nn.Module) -> bool:
    """Whether `module.compile()` was called."""
    return COMPILED_CALLS.find() is not None and module._compiled_call_impl is not None


def is_compiled_wrapper(module: nn.Module) -> bool:
    """Whether a module is what `torch.compile(module)` returns."""
    return type(module).__module__.startswith("torch._dynamo.")


def _look_for_norms() -> tuple[type[nn.Module], type[nn.Module], type[nn.Module]]:
    from torch.nn.modules import batchnorm, instancenorm

    norm = nn.InstanceNorm1d(1)
    assert isinstance(norm, batchnorm._NormBase) and isinstance(norm, instancenorm._InstanceNorm)
    assert isinstance(nn.BatchNorm1d(1), batchnorm._BatchNorm) and norm._get_no_batch_dim() == 2
    return batchnorm._NormBase, batchnorm._BatchNorm, instancenorm._InstanceNorm


NORMS = Fence(
    api="torch.nn.modules.batchnorm._NormBase",
    reason="this class is all that norms with running statistics, users' own subclasses included, have in common",
    versions=TESTED,
    feature="recognising norms with running statistics",
    without="no model can be read: its running statistics would be those of one replica",
    probe=_look_for_norms,
    error=ModelError,
)

if TYPE_CHECKING:
    from torch.nn.modules import batchnorm, instancenorm

    NormBase: TypeAlias = batchnorm._NormBase
    BatchNorm: TypeAlias = batchnorm._BatchNorm
    InstanceNorm: TypeAlias = instancenorm._InstanceNorm
else:  # required on import: no module that imports this one works without them
    NormBase, BatchNorm, InstanceNorm = NORMS.require()
    """The base of all norms with running statistics, of batch norms, and of instance norms."""


def dims_without_batch(norm: Any) -> int:
    """Number of dimensions of an instance norm's input without a batch dimension."""
    return int(norm._get_no_batch_dim())


for _fence in (MODULE_HOOKS, PERSISTENCE):
    _fence.run_probe()  # on import: their tensor operations must not run while a model is recorded
