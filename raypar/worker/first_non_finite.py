"""Finds the first NaN or infinite number of a run, with layer, microbatch and step: in a sample or another input of a layer,
in its parameters, in its outputs, or in their gradients."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from torch import Tensor

from raypar.model.graph import Layer
from raypar.worker.stage.layer_call import LayerFunction, PassContext
from raypar.worker.stage.stage import Stage
from raypar.worker.stage.stage_tensors import LayerTensors


class FirstNonFinite:
    """Watches what layers are given, their parameters, their outputs, and the gradients of these outputs."""

    found: str | None = None
    """The first NaN or infinite number: layer, microbatch, step and tensor, as text; None while there is none."""

    def __init__(self, stages: Iterable[Stage]) -> None:
        for stage in stages:
            for layer in stage.layers:
                layer.call = self._watched(layer.layer, layer.call)

    def _watched(self, layer: Layer, call: LayerFunction) -> LayerFunction:
        """The layer's call, which checks its inputs, parameters and outputs, with hooks that check the outputs' gradients."""

        def watched(forward_pass: PassContext, weights: LayerTensors, inputs: Sequence[Tensor]) -> tuple[Tensor, ...]:
            place = f"layer {layer.name!r} in microbatch {forward_pass.microbatch} of step {forward_pass.step + 1}"
            for name, value in zip(layer.inputs, inputs, strict=True):
                self._look(value, f"{place}: its input {name!r} has {{}}")
            for name, value in weights.module.named_parameters():
                self._look(value, f"{place}: its parameter {name!r} has {{}}")
            returned = call(forward_pass, weights, inputs)
            for output, value in zip(layer.outputs, returned, strict=True):
                self._look(value, f"{place}: its output {output!r} has {{}}")
                if value.grad_fn is not None and self.found is None:
                    text = f"{place}, in the backward pass: the gradient of its output {output!r} has {{}}"
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
            or "the loss, a parameter's gradient or the gradient norm (what layers are given, hold and return is finite)"
        )
