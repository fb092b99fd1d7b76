"""Refuses models that PyTorch or another framework has wrapped to distribute or compile them."""

from __future__ import annotations

from dataclasses import dataclass

from torch import nn

from raypar.errors import ModelError
from raypar.torch_compat.modules import MODEL_OF_WRAPPER, has_compiled_call, is_compiled_wrapper


@dataclass(frozen=True)
class _Wrapper:
    """A class of modules that wrap a model."""

    package: str
    """The beginning of the name of its Python module."""
    name: str
    """The class's name."""
    instead: str
    """What to write in a job instead."""
    has_model: bool = False
    """Whether one of the attributes `MODEL_OF_WRAPPER` holds the unwrapped model."""
    said: str = ""
    """What users call it; empty: `name`."""


_REPLICAS = 'for data parallelism set plan.replicas (plan={"replicas": 2})'
_SHARDED = f"{_REPLICAS}; plan.zero: 1, 2 or 3 divides state among these (ZeRO, FSDP), and plan.stages and plan.shards a model"
_WRAPPERS = (
    _Wrapper("torch.nn.parallel", "DistributedDataParallel", _REPLICAS, True),
    _Wrapper("torch.nn.parallel", "DataParallel", _REPLICAS, True),
    _Wrapper("torch.distributed.fsdp", "FullyShardedDataParallel", _SHARDED),
    _Wrapper("torch.distributed.fsdp", "FSDPModule", _SHARDED, said="fully_shard"),
    _Wrapper("deepspeed", "DeepSpeedEngine", _SHARDED, True),
    _Wrapper("lightning", "_FabricModule", _REPLICAS, True, "Fabric.setup"),
)


def refuse_framework_wrappers(name: str, module: nn.Module) -> None:
    """Raise `ModelError` if a module, or one inside it, is a wrapper for distributed training, or is compiled as an object.

    `name`: the module's qualified name in the model; empty for the model itself.
    """
    for path, part in module.named_modules():
        where = ".".join(filter(None, (name, path)))
        _refuse_compiled(where, part)
        wrapper = _wrapper_of(part)
        if wrapper is not None:
            said = wrapper.said or wrapper.name
            inner = f" and give model.{_inner_name(part)}" if wrapper.has_model and not where else ""
            raise ModelError(
                f"{where or 'the model'} is wrapped by {said}, but raypar distributes the work itself",
                cure=f"leave {said} out{inner}: {wrapper.instead}",
            )


def _refuse_compiled(where: str, module: nn.Module) -> None:
    """Raises `ModelError` for a module that is compiled as an object: the compiled code refers to that object's parameters."""
    wrapper = is_compiled_wrapper(module)
    if wrapper or has_compiled_call(module):
        inner = f" (the model itself is model.{_inner_name(module)})" if wrapper and not where else ""
        raise ModelError(
            f"{where or 'the model'} is a compiled module, and compiled code would use the parameters of the model "
            "function, which workers do not train",
            cure=f"leave torch.compile out{inner}, or compile functions instead: put @torch.compile on the method forward of "
            "its class, or on a function that it calls",
        )


def _inner_name(module: nn.Module) -> str:
    """The attribute in which a wrapper holds the wrapped model."""
    return next((name for name in MODEL_OF_WRAPPER if isinstance(getattr(module, name, None), nn.Module)), "module")


def _wrapper_of(module: nn.Module) -> _Wrapper | None:
    """The entry of `_WRAPPERS` for a module's class; None if there is none."""
    for base in type(module).__mro__:
        for wrapper in _WRAPPERS:
            if base.__name__ == wrapper.name and base.__module__.startswith(wrapper.package):
                return wrapper
    return None
