"""Mixed precision: runs each layer's forward and the loss under `torch.autocast`, or with rounded parameters (rule 13)."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Collection, Iterator, Sequence

import torch
from torch import Tensor

from raypar.job import PrecisionConfig
from raypar.model.rounded_parameters import as_layers_read, as_loss_reads
from raypar.worker.layer_precisions import autocast_of, parameter_dtype_of
from raypar.worker.process.torch_state_guard import TorchStateGuard
from raypar.worker.stage.layer_call import LayerFunction, PassContext
from raypar.worker.stage.layer_tensors import LayerTensors


class StagePrecision:
    """Wraps the calls of one stage in autocast; without mixed precision it returns them unchanged. With parameters in a lower
    precision layers get fields of the batch in it, and the loss gets in float32 what comes out of the model in it.

    Autocast is entered anew for each call, because it belongs to a thread, and the generator that runs a stage may continue in
    another thread. Its cache of cast weights is off, so every operation casts its operands itself. With the cache two uses of a
    weight inside one autocast would share a cast, and their gradients would be added in its dtype. Which casts PyTorch caches
    depends on which tensors are leaves.
    """

    _dtype: torch.dtype | None
    """The dtype to which autocast casts; None: no mixed precision."""
    _rounded_to: torch.dtype | None
    """The dtype of the parameters that layers compute with; None: the job's."""
    _device: torch.device
    """The device of the stage."""
    _guard: TorchStateGuard
    """Told that autocast is on inside the calls."""

    def __init__(self, precision: PrecisionConfig | None, device: torch.device, guard: TorchStateGuard) -> None:
        autocast = autocast_of(precision)
        self._dtype = None if autocast is None else autocast.dtype
        self._rounded_to = parameter_dtype_of(precision)
        self._device, self._guard = device, guard

    def wrap_layer(self, call: LayerFunction, fields: Sequence[int]) -> LayerFunction:
        """The call of a layer, under autocast. `fields`: places of its inputs that are fields of the batch."""
        if self._rounded_to is not None and fields:
            return self._with_rounded_fields(call, frozenset(fields))
        if self._dtype is None:
            return call

        def run(forward_pass: PassContext, weights: LayerTensors, inputs: Sequence[Tensor]) -> tuple[Tensor, ...]:
            with self._entered():
                return call(forward_pass, weights, inputs)

        return run

    def _with_rounded_fields(self, call: LayerFunction, fields: Collection[int]) -> LayerFunction:
        def run(forward_pass: PassContext, weights: LayerTensors, inputs: Sequence[Tensor]) -> tuple[Tensor, ...]:
            read = [as_layers_read(x, self._rounded_to) if place in fields else x for place, x in enumerate(inputs)]
            return call(forward_pass, weights, read)

        return run

    def wrap_loss(
        self, function: Callable[..., Tensor | tuple[Tensor, Tensor | float]]
    ) -> Callable[..., Tensor | tuple[Tensor, Tensor | float]]:
        """The loss as a function of values and the target, under autocast. The sum that it returns is cast to float32."""
        if self._dtype is None and self._rounded_to is None:
            return function

        def run(*given: Tensor) -> Tensor | tuple[Tensor, Tensor | float]:
            if self._rounded_to is not None:
                found = function(*(as_loss_reads(value, self._rounded_to) for value in given))
            else:
                with self._entered():
                    found = function(*given)
            if isinstance(found, tuple) and len(found) == 2:
                return self._as_float32(found[0]), found[1]
            return self._as_float32(found)

        return run

    @contextlib.contextmanager
    def _entered(self) -> Iterator[None]:
        try:
            with torch.autocast(self._device.type, self._dtype, cache_enabled=False), self._guard.accepting_autocast():
                yield
        finally:
            torch.clear_autocast_cache()  # if the call has entered an autocast of its own and not left it

    def _as_float32(self, total: Tensor) -> Tensor:
        """The sum of a loss in float32, so that multiplying it does not round it again."""
        lower = self._dtype or self._rounded_to
        return total.float() if isinstance(total, Tensor) and total.dtype == lower else total
