"""Hooks called when a backward pass reaches a layer's inputs: restore process state, align, hand over finished gradients."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Sequence
from functools import partial

import torch
from torch import Tensor

from raypar.worker.process.torch_state_guard import TorchStateGuard
from raypar.worker.stage.gradient_accumulator import GradientAccumulator
from raypar.worker.stage.layer_inputs import Hook, Hooks, aligned_gradient


class LayerBackwardHooks:
    """The hooks of the aliases through which a stage's layers and the loss read their values.

    In every backward pass they restore process state that a layer's backward has left changed, and align the gradient. In the
    pass that closes a block they also hand the finished gradients of the layers behind them to the accumulator, while these
    are in the processor's cache.
    """

    of_layer: list[Hooks]
    """By position of the layer in the stage: hooks of the aliases of what the layer reads."""
    of_loss: Hooks
    """Hooks of the alias through which the loss reads the model's output."""
    _plain_hooks: list[Hook]
    """By position: the hook of an ordinary backward pass."""
    _closing_hooks: list[Hook]
    """By position: the hook of a backward pass that closes a block."""
    _gradients: GradientAccumulator
    """Takes gradients of parameters that are finished inside the backward pass."""
    _completed: Sequence[Sequence[int]]
    """By position: uses of parameters whose gradients autograd itself completes, last first; deferred ones are left out."""
    _guard: TorchStateGuard
    """Restores process state that a layer's backward leaves changed."""
    _on_cpu: bool
    """Whether the stage computes on the CPU, where hooks run in the thread that called `backward`."""
    _running: bool
    """Whether a backward pass of the stage is under way."""
    _block: int | None
    """The block that this backward pass closes; None in other passes."""
    _not_passed: int
    """The backward pass has still to reach the inputs of the layers before this position."""

    def __init__(
        self,
        layers: Sequence[str],
        gradients: GradientAccumulator,
        completed: Sequence[Sequence[int]],
        guard: TorchStateGuard,
        *,
        on_cpu: bool,
    ) -> None:
        self._plain_hooks = [partial(self._on_gradient, f"the backward pass of layer {name!r}") for name in layers]
        self._closing_hooks = [partial(self._on_passed, position) for position in range(len(layers))]
        self.of_layer = [OrderedDict({0: arrived}) for arrived in self._plain_hooks]
        self.of_loss = OrderedDict({0: partial(self._on_gradient, "the backward pass of the loss")})
        self._gradients, self._completed, self._guard, self._on_cpu = gradients, completed, guard, on_cpu
        self._running, self._block, self._not_passed = False, None, len(layers)

    def begin(self, block: int | None) -> None:
        """Prepare for a backward pass. `block`: the block it closes, if gradients are to be handed over inside the pass."""
        self._running = True
        if block is not None:
            self._watch(block)

    def end(self) -> None:
        """Clean up after a backward pass, also one that has failed."""
        self._running = False
        if self._block is not None:
            self._watch(None)

    def _watch(self, block: int | None) -> None:
        self._block, self._not_passed = block, len(self.of_layer)
        for hooks, arrived, passed in zip(self.of_layer, self._plain_hooks, self._closing_hooks, strict=True):
            hooks[0] = arrived if block is None else passed

    def _on_passed(self, position: int, gradient: Tensor | None) -> Tensor | None:
        """A hook: the backward pass has left the layers from `position` on. Hands over their finished gradients.

        Of the nodes that are ready autograd runs the newest first, and a node's users are newer than the node. So all that was
        made after the alias is over by now, and the gradients of these layers' parameters are complete.
        """
        if self._block is not None and position < self._not_passed:
            uses = [use for uses in reversed(self._completed[position : self._not_passed]) for use in uses]
            self._not_passed = position
            with torch.no_grad():
                self._gradients.settle(self._block, uses)
        return self._plain_hooks[position](gradient)

    def _on_gradient(self, caller: str, gradient: Tensor | None) -> Tensor | None:
        """A hook: `caller`, the backward pass of a layer or the loss, has computed a gradient. Returns the gradient aligned.

        Restores process state that `caller` left changed, before the next layer's backward pass runs. Not outside of the
        stage's own backward pass: a layer that takes a gradient in forward is inside contexts of its own. Not on a GPU: hooks
        run in autograd's own threads there, which have a state of their own; the stage checks once at the end of the pass.
        """
        if self._running and self._on_cpu and not torch.is_grad_enabled():
            self._guard.check(caller, evaluating=True)
        return aligned_gradient(gradient)

    def release(self) -> None:
        """Break the circles between this object and its hooks; it cannot be used any more."""
        vars(self).clear()
