"""The loss of one microbatch as one callable: run the user's loss function, check what it returned."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

from torch import Tensor

from raypar.errors import UserCodeError
from raypar.user_code_errors import USER_CODE_ERRORS
from raypar.worker.process.torch_state_guard import TorchStateGuard
from raypar.worker.stage.layer_call import PassContext
from raypar.worker.stage.layer_inputs import Hooks, make_input_alias, require_value
from raypar.worker.stage.stage_coordinate import StageCoordinate


class LossCall:
    """Computes (sum, count) of a microbatch from the model's output and the target (rule 5 of the numerics contract)."""

    output: str
    """Name of the model's output."""
    target: str
    """Name of the target, a field of the batch or a value of the graph."""
    _function: Callable[..., Any]
    """(output, target) -> a scalar, or (sum, count)."""
    _hooks: Hooks
    """Hooks of the alias through which the loss reads the output."""
    _coordinate: StageCoordinate
    """The stage's place in the plan, for messages."""
    _guard: TorchStateGuard
    """Restores process state that the loss leaves changed."""

    def __init__(
        self,
        function: Callable[..., Any],
        *,
        output: str,
        target: str,
        hooks: Hooks,
        coordinate: StageCoordinate,
        guard: TorchStateGuard,
    ) -> None:
        self._function, self.output, self.target = function, output, target
        self._hooks, self._coordinate, self._guard = hooks, coordinate, guard

    def __call__(self, forward_pass: PassContext, values: Mapping[str, Tensor]) -> tuple[Tensor, Tensor | float]:
        """(sum, count) of the microbatch.

        Raises `UserCodeError` for what the loss raises, and for a loss that is no scalar or has no gradient.
        """
        output, target = values[self.output], require_value(values, self.target, "the loss")
        try:
            if output.requires_grad:
                output = make_input_alias(output, self._hooks)
            found = forward_pass.call(self._function, output, target)
        except USER_CODE_ERRORS as error:
            code = f"the loss (output {list(output.shape)}, target {list(target.shape)})"
            raise self._coordinate.user_code_error(code, forward_pass.step, forward_pass.microbatch, error) from error
        self._guard.check("the loss", evaluating=not forward_pass.training)
        total, count = found if isinstance(found, tuple) and len(found) == 2 else (found, None)
        _check_total(total, output)
        if count is None:
            samples = float(target.shape[0])
            return total * samples, samples
        return total, count


def _check_total(total: Any, output: Tensor) -> None:
    """Raises `UserCodeError` unless the loss is a scalar tensor that depends on the output."""
    if not isinstance(total, Tensor) or total.numel() != 1 or total.dim():
        shape = list(total.shape) if isinstance(total, Tensor) else type(total).__name__
        raise UserCodeError(
            f"the loss returned {shape}, not a scalar tensor",
            cure="return a 0-dim tensor (mean over samples), or (sum, count) for token-weighted losses",
        )
    if output.requires_grad and not total.requires_grad:
        raise UserCodeError(
            "the loss has no gradient although the model's output has one: nothing would be trained",
            cure="compute it from the output by differentiable operations (no detach(), no .item(), no torch.no_grad())",
        )
