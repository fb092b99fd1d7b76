"""The job's loss function, made from a function, a loss module without parameters, or a class of either."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn

from raypar.comm.buffer_pool import CPU
from raypar.errors import ConfigError, UserCodeError
from raypar.job import FunctionConfig
from raypar.user_code.user_code_errors import USER_CODE_ERRORS, error_text, reraise_ctrl_c


def make_loss_function(ref: FunctionConfig, device: torch.device = CPU) -> Callable[..., Any]:
    """The function (output, target) -> loss; a class is instantiated with `ref.args` first.

    Raises `ConfigError` for a loss with parameters, which would not be trained, and for `reduction="sum"`, which does not say
    by what the sum over all microbatches is divided.
    """
    if ref.is_loss_of_model:
        return loss_of_model
    made = ref.resolve()
    if isinstance(made, type):
        try:
            made = made(**ref.args)
        except USER_CODE_ERRORS as error:
            reraise_ctrl_c(error)
            raise ConfigError(
                f"loss {ref.label} refused its arguments: {error_text(error)}",
                cure="compare them with the class's signature",
            ) from error
        if not callable(made):
            raise ConfigError(f"loss {ref.label} makes objects that cannot be called", cure="give a function or a loss module")
    elif ref.args:
        return ref.partial()
    return _module(made, ref.label, device) if isinstance(made, nn.Module) else made


def loss_of_model(output: Tensor, target: Tensor) -> Tensor:
    """The loss function of a model that computes the loss itself: what it returns is the loss."""
    return output


def _module(module: nn.Module, label: str, device: torch.device) -> Callable[..., Any]:
    """A loss module on `device`; its calls raise `UserCodeError` if they write to a buffer."""
    name = next((name for name, _ in module.named_parameters()), None)
    if name is not None:
        raise ConfigError(
            f"loss {label} has parameters ({name!r}, ...), which would not be trained",
            cure="put the module that has them into the model, as its last layer or before it, and leave a loss without any",
        )
    if getattr(module, "reduction", None) == "sum":
        raise ConfigError(
            f"loss {label} adds up over a microbatch (reduction='sum'), but does not say what to divide by",
            cure="give reduction='mean', or a function that returns (sum, count)",
        )
    buffers = dict(module.to(device).named_buffers())
    if not buffers:
        return module

    def run(output: Tensor, target: Tensor) -> Any:
        before = {name: buffer._version for name, buffer in buffers.items()}
        found = module(output, target)
        for name, buffer in module.named_buffers():
            if buffer is not buffers[name] or buffer._version != before[name]:
                raise UserCodeError(
                    f"loss {label} writes its buffer {name!r}: it would be another one on every replica",
                    cure="compute it from the output and the target",
                )
        return found

    return run
