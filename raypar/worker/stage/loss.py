"""A job's loss: the function, made from what the job names, and its call on one microbatch, checked."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from functools import partial

import torch
from torch import Tensor, nn

from raypar.comm.buffer_pool import CPU
from raypar.errors import ConfigError, UserCodeError, with_article
from raypar.job import FunctionConfig, LossConfig
from raypar.model.capture.forward_inputs import loss_in
from raypar.model.graph import ModelOutput
from raypar.user_code.stop_signals import reraise_ctrl_c
from raypar.user_code.user_code_errors import USER_CODE_ERRORS, error_text
from raypar.worker.data.padding import MASKED_LABEL
from raypar.worker.process.torch_state_guard import TorchStateGuard
from raypar.worker.stage.layer_call import PassContext
from raypar.worker.stage.layer_tensors import require_value
from raypar.worker.stage.stage_coordinate_in_errors import StageCoordinate


def make_loss_function(
    ref: FunctionConfig, device: torch.device = CPU
) -> Callable[..., Tensor | tuple[Tensor, Tensor | float]]:
    """The function (output, target) -> loss; with `loss.sample_weight` (output, target, weights) -> (sum, count).

    Raises as `make_loss_of_output`.
    """
    if ref.is_loss_of_model:
        count = ref.count if isinstance(ref, LossConfig) else None
        return loss_of_model if count is None else partial(counted_loss_of_model, shifted=count == "shifted_labels")
    function = make_loss_of_output(ref, device)
    weighted = isinstance(ref, LossConfig) and ref.sample_weight is not None
    return partial(weighted_loss, function, ref.label) if weighted else function


def make_loss_of_output(
    ref: FunctionConfig, device: torch.device = CPU
) -> Callable[..., Tensor | tuple[Tensor, Tensor | float]]:
    """The function of the user's, (output, target) -> loss; a class is instantiated with `ref.args` first.

    Raises `ConfigError` for a loss with parameters, which would not be trained, and for `reduction="sum"`, which does not say
    by what the sum over all microbatches is divided.
    """
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


def loss_of_model(output: ModelOutput, target: Tensor) -> Tensor:
    """The loss function of a model that computes the loss itself: what it returns is the loss, or, where metrics read the
    rest of it, has the loss."""
    found = output if isinstance(output, Tensor) else loss_in(output)
    assert isinstance(found, Tensor), "a model without it is refused when it is captured"
    return found


def counted_loss_of_model(output: ModelOutput, target: Tensor, *, shifted: bool) -> tuple[Tensor, Tensor]:
    """(sum, count) of a model's own loss, which is the mean over the labels `target` [samples, ...] that are not -100.

    `shifted`: without the first of each sequence. Where no label counts the sum is 0, though that mean is NaN.
    """
    loss = loss_of_model(output, target)
    count = ((target[..., 1:] if shifted else target) != MASKED_LABEL).sum()
    return torch.where(count > 0, loss, torch.nan_to_num(loss)) * count, count


def weighted_loss(
    function: Callable[..., Tensor | tuple[Tensor, Tensor | float]], label: str, *given: Tensor
) -> tuple[Tensor, Tensor]:
    """(weighted sum, sum of the weights) of what `function` returns for all of `given` but the last, the weights, which have
    the shape of what it returns. Raises `UserCodeError` for others, and for negative weights."""
    *read, weights = given
    losses = function(*read)
    if not isinstance(losses, Tensor) or losses.shape != weights.shape:
        raise UserCodeError(*wrong_losses(losses, label, weights))
    if not weights.is_meta and not bool((weights >= 0).all()):
        raise UserCodeError(
            f"a weight of the loss is {float(weights.min())}",
            cure="give finite weights >= 0; of a sample that does not count 0",
        )
    weights = weights.to(torch.promote_types(losses.dtype, torch.float32))
    return (losses * weights).sum(), weights.sum()


def wrong_losses(losses: Tensor | tuple[Tensor, Tensor | float] | float, label: str, weights: Tensor) -> tuple[str, str]:
    """(what, cure) of a loss that is not one value for each weight."""
    shape = list(losses.shape) if isinstance(losses, Tensor) else with_article(type(losses).__name__)
    return (
        f"the loss {label} returned {shape}, and loss.sample_weight has weights {list(weights.shape)}",
        "return a value for each weight: a loss module with args: {reduction: none}; or a function of (output, target) that "
        "ends in .flatten(1).mean(1), for a value for each sample",
    )


def _module(module: nn.Module, label: str, device: torch.device) -> Callable[..., Tensor | tuple[Tensor, Tensor | float]]:
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

    def run(output: Tensor, target: Tensor) -> Tensor | tuple[Tensor, Tensor | float]:
        before = {name: buffer._version for name, buffer in buffers.items()}
        found: Tensor | tuple[Tensor, Tensor | float] = module(output, target)
        for name, buffer in module.named_buffers():
            if buffer is not buffers[name] or buffer._version != before[name]:
                raise UserCodeError(
                    f"loss {label} writes its buffer {name!r}: it would be another one on every replica",
                    cure="compute it from the output and the target",
                )
        return found

    return run


_NO_LOSS = torch.zeros(())


class LossCall:
    """Computes (sum, count) of a microbatch from what the loss reads and the target (rule 5 of the numerics contract)."""

    inputs: tuple[str, ...]
    """Names of the values that the loss reads: the model's output, or those of which it is rebuilt."""
    fields: tuple[str, ...]
    """Names of the target, a field of the batch or a value of the graph, and of weights where it has them."""
    _function: Callable[..., Tensor | tuple[Tensor, Tensor | float]]
    """(a value for each of `inputs`, then of `fields`) -> a scalar, or (sum, count)."""
    _coordinate: StageCoordinate
    """The stage's place in the plan, for messages."""
    _guard: TorchStateGuard
    """Restores process state that the loss leaves changed."""
    _only_in_training: bool
    """Whether it is 0 in evaluation mode, where nothing is called for it: in a run that predicts."""

    def __init__(
        self,
        function: Callable[..., Tensor | tuple[Tensor, Tensor | float]],
        *,
        inputs: tuple[str, ...],
        fields: tuple[str, ...],
        coordinate: StageCoordinate,
        guard: TorchStateGuard,
        only_in_training: bool = False,
    ) -> None:
        self._function, self.inputs, self.fields = function, inputs, fields
        self._only_in_training = only_in_training
        self._coordinate, self._guard = coordinate, guard

    def is_called(self, *, training: bool) -> bool:
        """Whether the user's function is called in this mode."""
        return training or not self._only_in_training

    def __call__(self, forward_pass: PassContext, values: Mapping[str, Tensor]) -> tuple[Tensor, Tensor | float]:
        """(sum, count) of the microbatch.

        Raises `UserCodeError` for what the loss raises, and for a loss that is no scalar or has no gradient.
        """
        read = [values[name] for name in self.inputs]
        target, *weights = (require_value(values, name, "the loss") for name in self.fields)
        if not self.is_called(training=forward_pass.training):
            return _NO_LOSS, float(target.shape[0])
        try:
            found = forward_pass.call(self._function, *read, target, *weights)
        except USER_CODE_ERRORS as error:
            shapes = ", ".join(str(list(value.shape)) for value in read)
            code = f"the loss (output {shapes}, target {list(target.shape)})"
            raise self._coordinate.user_code_error(
                code, forward_pass.step, forward_pass.microbatch, error, forward_pass.data_set
            ) from error
        self._guard.check("the loss", evaluating=not forward_pass.training)
        total, count = found if isinstance(found, tuple) and len(found) == 2 else (found, None)
        _check_total(total, read)
        if count is None:
            samples = float(target.shape[0])
            return total * samples, samples
        # It is read at the end of the step. A view of a parameter may have no memory by then (`plan.zero: 3`).
        return total, count.detach().clone() if isinstance(count, Tensor) else count


def _check_total(total: Tensor | float, read: Sequence[Tensor]) -> None:
    """Raises `UserCodeError` unless the loss is a scalar tensor that depends on what the loss has read."""
    if not isinstance(total, Tensor) or total.numel() != 1 or total.dim():
        shape = list(total.shape) if isinstance(total, Tensor) else type(total).__name__
        raise UserCodeError(
            f"the loss returned {shape}, not a scalar tensor",
            cure="return a 0-dim tensor (mean over samples), or (sum, count) for token-weighted losses",
        )
    if not total.requires_grad and any(value.requires_grad for value in read):
        raise UserCodeError(
            "the loss has no gradient although the model's output has one: nothing would be trained",
            cure="compute it from the output by differentiable operations (no detach(), no .item(), no torch.no_grad())",
        )
    if not total.requires_grad and torch.is_grad_enabled():
        raise UserCodeError(
            "the loss has no gradient, and nothing that it reads has one: nothing would be trained",
            cure="let the outputs depend on parameters that require gradients (reentrant checkpoints: of inputs that do)",
        )
