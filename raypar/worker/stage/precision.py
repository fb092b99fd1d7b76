"""Mixed precision: runs each layer's forward and the loss under `torch.autocast`, or with rounded parameters (rule 13)."""

from __future__ import annotations

from collections.abc import Callable, Collection, Sequence

import torch
from torch import Tensor

from raypar.job import PrecisionConfig
from raypar.model.rounded_parameters import as_layers_read, as_loss_reads
from raypar.worker.layer_precisions import autocast_of, parameter_dtype_of
from raypar.worker.process.torch_state_guard import TorchStateGuard
from raypar.worker.stage.layer_call import LayerFunction, PassContext
from raypar.worker.stage.layer_tensors import LayerTensors


class EnteredAutocast:
    """Context of one call under `torch.autocast`, which the guard expects inside.

    Every layer's call enters one. With generators as contexts, all made anew, it took 12 us in the place of 3.4, and with cold
    caches 16 in the place of 6: 3.5 % and 1.5 % of a step of ten layers of width 32, 0.8 % and 0.3 % of one of the quickstart.
    """

    __slots__ = ("_autocast", "_before", "_guard", "_left")

    def __init__(self, left: list[torch.autocast], device: torch.device, dtype: torch.dtype, guard: TorchStateGuard) -> None:
        """`left`: contexts that may be entered again, to which this one's comes back."""
        self._left, self._guard = left, guard
        self._autocast = left.pop() if left else torch.autocast(device.type, dtype, cache_enabled=False)

    def __enter__(self) -> None:
        self._autocast.__enter__()
        self._before = self._guard.accept_autocast()

    def __exit__(self, *error: object) -> None:
        self._guard.expect_again(self._before)
        self._autocast.__exit__(None, None, None)
        torch.clear_autocast_cache()  # if the call has entered an autocast of its own and not left it
        self._left.append(self._autocast)


class StagePrecision:
    """Wraps the calls of one stage in autocast; without mixed precision it returns them unchanged. With parameters in a lower
    precision layers get fields of the batch in it, and the loss gets in float32 what comes out of the model in it.

    Autocast is entered anew for each call, because it belongs to a thread, and the generator that runs a stage may continue in
    another thread. And what a layer enters itself, with a cache, would keep its casts beyond the layer if ours stayed entered:
    PyTorch drops them where the outermost autocast is left. Layers of a stage that share a weight would share its cast then,
    and where the model is cut would decide bits. The cache of ours is off, so every operation casts its operands itself. With
    it two uses of a weight inside one autocast would share a cast, and their gradients would be added in its dtype. Which casts
    PyTorch caches depends on which tensors are leaves.
    """

    _dtype: torch.dtype | None
    """The dtype to which autocast casts; None: no mixed precision."""
    _rounded_to: torch.dtype | None
    """The dtype of the parameters that layers compute with; None: the job's."""
    _device: torch.device
    """The device of the stage."""
    _guard: TorchStateGuard
    """Told that autocast is on inside the calls."""
    _left: list[torch.autocast]
    """Contexts that nobody is in; to make one takes longer than to enter it."""

    def __init__(self, precision: PrecisionConfig | None, device: torch.device, guard: TorchStateGuard) -> None:
        autocast = autocast_of(precision)
        self._dtype = None if autocast is None else autocast.dtype
        self._rounded_to = parameter_dtype_of(precision)
        self._device, self._guard, self._left = device, guard, []

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

    def _entered(self) -> EnteredAutocast:
        assert self._dtype is not None, "without it nothing is entered"
        return EnteredAutocast(self._left, self._device, self._dtype, self._guard)

    def _as_float32(self, total: Tensor) -> Tensor:
        """The sum of a loss in float32, so that multiplying it does not round it again."""
        lower = self._dtype or self._rounded_to
        return total.float() if isinstance(total, Tensor) and total.dtype == lower else total
