"""The loss of one microbatch as one callable: run the user's loss function, check what it returned."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

from torch import Tensor

from raypar.errors import UserCodeError
from raypar.user_code.user_code_errors import USER_CODE_ERRORS
from raypar.worker.process.torch_state_guard import TorchStateGuard
from raypar.worker.stage.layer_call import PassContext
from raypar.worker.stage.stage_coordinate import StageCoordinate
from raypar.worker.stage.stage_tensors import require_value


class LossCall:
    """Computes (sum, count) of a microbatch from what the loss reads and the target (rule 5 of the numerics contract)."""

    inputs: tuple[str, ...]
    """Names of the values that the loss reads: the model's output, or those of which it is rebuilt."""
    target: str
    """Name of the target, a field of the batch or a value of the graph."""
    _function: Callable[..., Any]
    """(a value for each of `inputs`, target) -> a scalar, or (sum, count)."""
    _coordinate: StageCoordinate
    """The stage's place in the plan, for messages."""
    _guard: TorchStateGuard
    """Restores process state that the loss leaves changed."""

    def __init__(
        self,
        function: Callable[..., Any],
        *,
        inputs: tuple[str, ...],
        target: str,
        coordinate: StageCoordinate,
        guard: TorchStateGuard,
    ) -> None:
        self._function, self.inputs, self.target = function, inputs, target
        self._coordinate, self._guard = coordinate, guard

    def __call__(self, forward_pass: PassContext, values: Mapping[str, Tensor]) -> tuple[Tensor, Tensor | float]:
        """(sum, count) of the microbatch.

        Raises `UserCodeError` for what the loss raises, and for a loss that is no scalar or has no gradient.
        """
        read, target = [values[name] for name in self.inputs], require_value(values, self.target, "the loss")
        try:
            found = forward_pass.call(self._function, *read, target)
        except USER_CODE_ERRORS as error:
            shapes = ", ".join(str(list(value.shape)) for value in read)
            code = f"the loss (output {shapes}, target {list(target.shape)})"
            raise self._coordinate.user_code_error(code, forward_pass.step, forward_pass.microbatch, error) from error
        self._guard.check("the loss", evaluating=not forward_pass.training)
        total, count = found if isinstance(found, tuple) and len(found) == 2 else (found, None)
        _check_total(total, read)
        if count is None:
            samples = float(target.shape[0])
            return total * samples, samples
        return total, count


def _check_total(total: Any, read: Sequence[Tensor]) -> None:
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
