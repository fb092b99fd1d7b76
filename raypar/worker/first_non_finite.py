"""Finds the first layer whose output, or whose output's gradient, has a NaN or an infinite number; with microbatch and step."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from torch import Tensor

from raypar.worker.stage.layer_call import LayerFunction, PassContext
from raypar.worker.stage.stage import Stage
from raypar.worker.stage.stage_tensors import LayerTensors


class FirstNonFinite:
    """Watches the outputs of layers and the gradients of these outputs."""

    found: str | None = None
    """The first NaN or infinite number: layer, microbatch, step and output, as text; None while there is none."""

    def __init__(self, stages: Iterable[Stage]) -> None:
        for stage in stages:
            for layer in stage.layers:
                layer.call = self._watched(layer.layer.name, layer.layer.outputs, layer.call)

    def _watched(self, name: str, outputs: Sequence[str], call: LayerFunction) -> LayerFunction:
        """The layer's call, with hooks that check its outputs and their gradients."""

        def watched(forward_pass: PassContext, weights: LayerTensors, inputs: Sequence[Tensor]) -> tuple[Tensor, ...]:
            place = f"microbatch {forward_pass.microbatch} of step {forward_pass.step + 1}"
            returned = call(forward_pass, weights, inputs)
            for output, value in zip(outputs, returned, strict=True):
                self._look(value, f"layer {name!r} in {place}: its output {output!r} has {{}}")
                if value.grad_fn is not None and self.found is None:
                    text = f"layer {name!r} in {place}, in the backward pass: the gradient of its output {output!r} has {{}}"
                    value.grad_fn.register_prehook(lambda gradients, text=text: self._look_at_all(gradients, text))
            return returned

        return watched

    def _look_at_all(self, gradients: Sequence[Tensor | None], text: str) -> None:
        for gradient in gradients:
            if gradient is not None:
                self._look(gradient, text)

    def _look(self, value: Tensor, text: str) -> None:
        if self.found is None and value.is_floating_point() and not value.isfinite().all():
            kind = "NaN" if value.isnan().any() else "infinite numbers"
            self.found = text.format(f"{kind} ({int((~value.isfinite()).sum())} of {value.numel()} numbers)")

    def describe(self) -> str:
        """Text on where the first NaN or infinite number was."""
        return (
            self.found
            or "the loss, a parameter's gradient or the gradient norm (layers' outputs and their gradients are finite)"
        )
