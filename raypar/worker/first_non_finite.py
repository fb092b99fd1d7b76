"""Notices the first value or gradient in a run that is not finite, and in which layer, microbatch and step it was."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from torch import Tensor

from raypar.worker.stage.layer_call import LayerFunction, PassContext
from raypar.worker.stage.stage import Stage
from raypar.worker.stage.stage_tensors import LayerTensors


class FirstNonFinite:
    """Watches the layers of stages: what each returns, and the gradient of that."""

    found: str | None = None
    """Which layer had the first number that is not finite, and where it was; None so far."""

    def __init__(self, stages: Iterable[Stage]) -> None:
        for stage in stages:
            for layer in stage.layers:
                layer.call = self._watched(layer.layer.name, layer.layer.outputs, layer.call)

    def _watched(self, name: str, outputs: Sequence[str], call: LayerFunction) -> LayerFunction:
        """The layer's call, whose results are looked at."""

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
        """Where the first number was that is not finite."""
        return (
            self.found or "the loss, a parameter's gradient, or their norm; what the layers return is finite, and its gradients"
        )
