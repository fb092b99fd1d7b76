"""Enters the precision of a job around the calls that compute in it: each layer's forward, and the loss (rule 13 of the
numerics contract)."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from raypar.worker.job_spec import Precision
from raypar.worker.process.torch_state_guard import TorchStateGuard
from raypar.worker.stage.layer_call import LayerFunction, PassContext
from raypar.worker.stage.weights import LayerTensors

AUTOCAST_DTYPES: Mapping[str, torch.dtype] = {"bf16": torch.bfloat16}
"""`Precision.compute` -> the dtype to which `torch.autocast` casts."""


class StagePrecision:
    """Wraps the calls of one stage so that they compute in the job's precision; calls of a job without one stay as they are.

    Autocast is entered for each call anew: it belongs to a thread, and a stage is run by a generator that may go on in another
    one. Its cache of cast weights is off: every operation casts its operands itself. With the cache the uses of a weight would
    share a cast if they met in one autocast, and their gradients would be added in bfloat16; which tensors are kept, PyTorch
    decides by whether they are leaves.
    """

    _dtype: torch.dtype | None
    """The dtype to which autocast casts; None: it is not entered."""
    _device: torch.device
    """Where the stage computes."""
    _guard: TorchStateGuard
    """Expects autocast to be on inside the calls."""

    def __init__(self, precision: Precision, device: torch.device, guard: TorchStateGuard) -> None:
        self._dtype = None if precision.compute is None else AUTOCAST_DTYPES[precision.compute]
        self._device, self._guard = device, guard

    def wrap_layer(self, call: LayerFunction) -> LayerFunction:
        """The call of a layer, in the job's precision."""
        if self._dtype is None:
            return call

        def run(forward_pass: PassContext, weights: LayerTensors, inputs: Sequence[Tensor]) -> tuple[Tensor, ...]:
            with self._entered():
                return call(forward_pass, weights, inputs)

        return run

    def wrap_loss(self, function: Callable[..., Any]) -> Callable[..., Any]:
        """The loss function (output, target) -> loss, in the job's precision; the sum that it returns becomes float32."""
        if self._dtype is None:
            return function

        def run(output: Tensor, target: Tensor) -> Any:
            with self._entered():
                found = function(output, target)
            if isinstance(found, tuple) and len(found) == 2:
                return _as_float32(found[0]), found[1]
            return _as_float32(found)

        return run

    @contextlib.contextmanager
    def _entered(self) -> Iterator[None]:
        try:
            with torch.autocast(self._device.type, self._dtype, cache_enabled=False), self._guard.accepting_autocast():
                yield
        finally:
            torch.clear_autocast_cache()  # of an autocast that the call has entered and not left


def _as_float32(total: Any) -> Any:
    """A loss's sum in float32, so that what it is multiplied with does not round it once more."""
    return total.float() if isinstance(total, Tensor) and total.dtype in AUTOCAST_DTYPES.values() else total
