"""A stage's backward pass: hooks of its values, the run of autograd's engine, and weight gradients that are put off."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable, Collection, Hashable, Iterator, Mapping, Sequence
from functools import partial

import torch
from torch import Tensor
from torch.autograd.graph import GradientEdge

from raypar.model.split_backward import Stash
from raypar.torch_compat.autograd import backward_engine, root_metadata
from raypar.worker.process.torch_state_guard import TorchStateGuard
from raypar.worker.stage.gradient_accumulator import GradientAccumulator
from raypar.worker.stage.layer_tensors import Hook, Hooks, StageTensors


class LayerBackwardHooks:
    """The hooks of the values that a stage's layers return, and of those that it gets from other stages.

    The gradient of a value that the layer at position p has returned is complete when the backward pass has left everything
    that was made after the value: the loss and all layers behind p. In every backward pass the hook then restores process
    state that the layer at p + 1 (or the loss) has left changed. In the pass that closes a block it also hands the finished
    gradients of the layers behind p to the accumulator, while these are in the processor's cache; those of parameters that
    layers compute with in a lower precision in every pass, so that they never all exist in both.
    """

    of_outputs: list[Hooks]
    """By position of the layer in the stage: hooks of the values that the layer returns."""
    of_received: dict[str, Hooks]
    """Value from another stage -> hooks of its alias."""
    check_alive: Callable[[], None]
    """Raises what has ended the generation; called before each layer, forward and backward, so that a recovery need not wait
    for the rest of a microbatch that nobody needs any more. By default nothing ends it."""
    received_gradients: dict[str, Tensor | None]
    """Value from another stage -> its complete gradient, once this backward pass has it."""
    _plain_hooks: list[Hook]
    """By position: the hook of an ordinary backward pass."""
    _watching_hooks: list[Hook]
    """By position: the hook of a backward pass inside of which gradients are handed over."""
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
    _watching: bool
    """Whether gradients are handed over inside of this backward pass."""
    _not_left: int
    """The backward pass is known to have left the layers from this position on."""

    def __init__(
        self,
        layers: Sequence[str],
        received: Collection[str],
        gradients: GradientAccumulator,
        completed: Sequence[Sequence[int]],
        guard: TorchStateGuard,
        *,
        on_cpu: bool,
    ) -> None:
        """`layers`: names; `received`: values from other stages."""
        callers = [*(f"the backward pass of layer {name!r}" for name in layers[1:]), "the backward pass of the loss"]
        self._plain_hooks = [partial(self._on_gradient, caller) for caller in callers]
        self._watching_hooks = [partial(self._on_left, position) for position in range(len(layers))]
        self.of_outputs = [OrderedDict({0: plain}) for plain in self._plain_hooks]
        self.of_received = {name: OrderedDict({0: partial(self._on_received, name)}) for name in received}
        self.received_gradients, self.check_alive = {}, _always_alive
        self._gradients, self._completed, self._guard, self._on_cpu = gradients, completed, guard, on_cpu
        self._running, self._block, self._watching, self._not_left = False, None, False, len(layers)

    def when_left(self, call: Callable[[int], None]) -> None:
        """Have each backward pass call `call` with a position, once it has left all layers behind that."""
        for position, hooks in enumerate(self.of_outputs):
            hooks[len(hooks)] = partial(_tell_left, call, position)

    def begin(self, block: int | None) -> None:
        """Prepare for a backward pass. `block`: the block it closes, if gradients are to be handed over inside the pass."""
        self._running = True
        self.received_gradients.clear()
        if block is not None or self._gradients.rounded:
            self._watch(block)

    def end(self) -> None:
        """Clean up after a backward pass, also one that has failed."""
        self._running = False
        if self._watching:
            self._watch(None, until_end=False)

    def _watch(self, block: int | None, *, until_end: bool = True) -> None:
        self._block, self._watching, self._not_left = block, until_end, len(self.of_outputs)
        for hooks, plain, watching in zip(self.of_outputs, self._plain_hooks, self._watching_hooks, strict=True):
            hooks[0] = watching if until_end else plain

    def _on_left(self, position: int, gradient: Tensor | None) -> None:
        """A hook: the backward pass has left the layers behind `position`. Hands over their finished gradients, in a pass that
        does not close a block those of rounded parameters only.

        Of the nodes that are ready autograd runs the newest first, and a node's users are newer than the node. So all that was
        made after the value is over by now, and the gradients of these layers' parameters are complete.
        """
        if self._watching and position + 1 < self._not_left:
            uses = [use for uses in reversed(self._completed[position + 1 : self._not_left]) for use in uses]
            self._not_left = position + 1
            with torch.no_grad():
                if self._block is None:
                    self._gradients.add_rounded(uses)
                else:
                    self._gradients.settle(self._block, uses)
        self._plain_hooks[position](gradient)

    def _on_gradient(self, caller: str, gradient: Tensor | None) -> None:
        """A hook: `caller`, the backward pass of a layer or the loss, is over.

        Ends the pass if the generation is over. Restores process state that `caller` left changed, before the next layer's
        backward pass runs. Not outside of the stage's own backward pass: a layer that takes a gradient in forward is inside
        contexts of its own. Not on a GPU: hooks run in autograd's own threads there, which have a state of their own; the stage
        checks once at the end of the pass.
        """
        if self._running:
            self.check_alive()
        if self._running and self._on_cpu and not torch.is_grad_enabled():
            self._guard.check(caller, evaluating=True)

    def _on_received(self, name: str, gradient: Tensor | None) -> None:
        """A hook: the gradient of a value from another stage is complete."""
        if self._running:
            self.received_gradients[name] = gradient

    def release(self) -> None:
        """Break the circles between this object and its hooks; it cannot be used any more."""
        vars(self).clear()


def _always_alive() -> None:
    """`LayerBackwardHooks.check_alive` of a stage without a transport."""


def _tell_left(call: Callable[[int], None], position: int, gradient: Tensor | None) -> None:
    """A hook of a value that the layer at `position` has returned."""
    call(position)


def run_autograd_backward(roots: Sequence[Tensor | GradientEdge], gradients: Sequence[Tensor | None]) -> None:
    """Accumulate into `.grad` of every leaf, as `torch.autograd.backward` does. A gradient of None is 1, for a scalar root.

    `torch.autograd.backward` compares the shapes of roots and gradients with code for symbolic shapes, and so loads sympy with
    the first gradient: half a processor-second in each process. Here all shapes are numbers. Roots or gradients that are not
    plain tensors of equal shapes are passed to `torch.autograd.backward`, which also raises its own errors for them.
    """
    run_engine = backward_engine()
    if run_engine is None or not all(map(_is_plain, roots, gradients)):
        torch.autograd.backward(roots, gradients)  # type: ignore[arg-type]  # it takes both kinds in one list
        return
    starts = tuple(
        torch.ones_like(r) if isinstance(r, Tensor) and g is None else g for r, g in zip(roots, gradients, strict=True)
    )
    run_engine(tuple(roots), starts, False, False, (), allow_unreachable=True, accumulate_grad=True)


def _is_plain(root: Tensor | GradientEdge, gradient: Tensor | None) -> bool:
    """Whether `torch.autograd.backward` would start at the root with just this gradient (None: 1), without casts or errors."""
    if isinstance(root, GradientEdge):
        value = root_metadata(root.node, root.output_nr)
        if value.is_nested_tensor or value.is_cpp_nested_tensor or not value.dtype.is_floating_point or gradient is None:
            return False
        shape = value.shape
    else:
        if type(root) is not Tensor or root.is_nested or not root.is_floating_point():
            return False
        if gradient is None:
            return root.numel() == 1
        shape = root.shape
    return type(gradient) is Tensor and list(gradient.shape) == list(shape) and gradient.is_floating_point()


def take_uses_apart(roots: Sequence[Tensor | GradientEdge], values: Mapping[str, GradientEdge]) -> dict[str, list[Tensor]]:
    """Value -> a list that the next backward pass from `roots` fills with the gradient of each use of the value, newest first.

    `values`: where their gradients leave the graph; the pass adds none of them up. A use is an edge of the graph, so one layer
    may have several. Autograd runs nodes newest first and adds each of a node's gradients in turn to what has come before: the
    list has the order of its additions.
    """
    found: dict[str, list[Tensor]] = {name: [] for name in values}
    of_node = {edge.node: found[name] for name, edge in values.items()}
    nodes = [root.node if isinstance(root, GradientEdge) else root.grad_fn for root in roots]
    seen = set(of_node)
    while nodes:
        node = nodes.pop()
        if node is None or node in seen:
            continue
        seen.add(node)
        users = [(place, of_node[other]) for place, (other, _) in enumerate(node.next_functions) if other in of_node]
        if users:
            node.register_hook(partial(_take_gradients, users))
        nodes.extend(other for other, _ in node.next_functions)
    return found


def _take_gradients(
    users: Sequence[tuple[int, list[Tensor]]], gradients: tuple[Tensor | None, ...], _: tuple[Tensor | None, ...]
) -> tuple[Tensor | None, ...]:
    """A node's hook: moves some of the gradients that the node has computed to lists. `users`: (which, list)."""
    left = list(gradients)
    for place, taken in users:
        gradient = left[place]
        if gradient is not None:
            taken.append(gradient)
            left[place] = None
    return tuple(left)


class DeferredGradients:
    """Where a stage's layers put off their weight gradients, and the parameters for which they do so."""

    stash: Stash
    """The stash of the microbatch under way, also in a backward pass: a layer that checkpoints runs its forward again there."""
    parameters: frozenset[int]
    """`id` of each parameter whose gradient is put off."""

    def __init__(self) -> None:
        self.stash = []
        self.parameters = frozenset()

    def current(self) -> Stash:
        """The stash of the microbatch under way."""
        return self.stash


def take_by_layer(stash: Stash, weights: StageTensors, layers: Sequence[range]) -> Iterator[tuple[range, Stash]]:
    """(uses of a layer, what it has put off), last layer first; empties the stash. `layers`: the uses of each."""
    of_layers: dict[range, Stash] = {uses: [] for uses in reversed(layers) if uses}
    layer_of = {use: uses for uses in of_layers for use in uses}
    for deferred in stash:
        of_layers[layer_of[weights.use_of(deferred.layer.weight)]].append(deferred)
    stash.clear()
    for uses in list(of_layers):
        yield uses, of_layers.pop(uses)


def sum_deferred_gradients(stash: Stash, weights: StageTensors) -> dict[int, Tensor]:
    """Use -> the weight gradient of one microbatch, added up in the dtype of the leaf, then in that of the parameter.

    Gradients of calls that share a cast of the weight (under `torch.autocast`) are added in the compute dtype, as by autograd.
    """
    by_cast: dict[tuple[int, Hashable], Tensor] = {}
    sums: dict[int, Tensor] = {}
    with torch.no_grad():
        for deferred in stash:
            for parameter, gradient in deferred.gradients():
                use = weights.use_of(parameter), deferred.cast_token
                by_cast[use] = by_cast[use] + gradient if use in by_cast else gradient
        for (index, _), total in by_cast.items():
            total = total.to(weights.leaves[index].dtype)
            sums[index] = sums[index] + total if index in sums else total
        return {index: total.to(weights.uses[index].dtype) for index, total in sums.items()}
