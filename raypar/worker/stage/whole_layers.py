"""Whole layers of a stage, which a worker computes once for all of its virtual shards.

All virtual shards would make the same calls on equal values. So the first one of a worker has these layers, with their
parameters, buffers and gradients, and runs them; the others have nothing of them, and take their results. A gradient that goes
back through such a layer is the same on all, too: the others take what the first one's backward pass has made.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from itertools import chain
from typing import Literal

import torch
from torch import Tensor
from torch.autograd.graph import Node, get_gradient_edge

from raypar.comm.blocking_code_as_routine import wait_for_handle
from raypar.comm.sent_tensor_layout import copy_as_it_lies
from raypar.comm.virtual_shards import TurnHandle
from raypar.model.autograd_function_types import AutogradContext, AutogradFunction, AutogradFunctionOfSeveral
from raypar.worker.stage.layer_tensors import make_alias

PassKind = Literal["forward", "recompute", "evaluate"]
"""In which pass a layer is called."""

BEFORE_ALL = -1
"""A position before all layers: the backward pass has left them all."""

_Edge = tuple[Node | None, int]
"""(a node of autograd's graph, the number of one of its outputs)."""


@dataclass(eq=False)
class WholeCall:
    """One call of a whole layer: what the virtual shards that have not made it take."""

    label: str
    """The layer's name in messages."""
    outputs: tuple[Tensor, ...]
    """What it has returned, without a graph."""
    with_gradient: tuple[bool, ...]
    """By output: whether it requires a gradient."""
    takers: int
    """How many virtual shards take them."""
    uses: tuple[int, ...] = ()
    """By input: how many edges of the call's graph lead to it, which are the summands of its gradient; none are counted where
    nobody takes it."""
    reached: tuple[frozenset[int], ...] = ()
    """By output: the inputs to which its graph leads."""
    gradients: list[list[Tensor]] = field(default_factory=list)
    """By input: its summands, newest first, as the backward pass makes them."""
    is_left: bool = False
    """Whether the backward pass has left the call."""
    _taken: Counter[int] = field(default_factory=Counter)
    """By input: how many virtual shards have taken its gradient."""

    def watch(self, inputs: Sequence[Tensor], outputs: Sequence[Tensor]) -> None:
        """Have the backward pass keep copies of the inputs' gradients. `inputs`: the values as they came, before what
        `alias_inputs` has made; `outputs`: with their graph."""
        edges: dict[_Edge, int] = {}
        for place, value in enumerate(inputs):
            if value.requires_grad:
                edge = get_gradient_edge(value)
                edges.setdefault((edge.node, edge.output_nr), place)
        users: dict[Node, list[tuple[int, int]]] = {}
        self.reached = tuple(_find_inputs(value.grad_fn, edges, users) for value in outputs)
        uses, self.gradients = [0] * len(inputs), [[] for _ in inputs]
        for node, found in users.items():
            for _, place in found:
                uses[place] += 1
            node.register_hook(partial(self._keep, found))
        self.uses = tuple(uses)

    def _keep(
        self, users: Sequence[tuple[int, int]], gradients: tuple[Tensor | None, ...], _: tuple[Tensor | None, ...]
    ) -> None:
        """A node's hook. Keeps copies: code of an earlier layer may write into what it gets. `users`: (which gradient, of which
        input)."""
        for number, place in users:
            gradient = gradients[number]
            if gradient is not None:
                self.gradients[place].append(copy_as_it_lies(gradient))

    @property
    def has_one_graph(self) -> bool:
        """Whether a gradient of any output goes to all inputs that get one."""
        used = frozenset(place for place, uses in enumerate(self.uses) if uses)
        return all(found == used for found, needs in zip(self.reached, self.with_gradient, strict=True) if needs)

    def take_gradients(self, place: int) -> tuple[Tensor | None, ...]:
        """For each summand of an input, once the call is left: its tensor, or None where there is none; memory that the caller
        may write to."""
        if not self.is_left:
            what = f"the gradients that {self.label} gives back"
            wait_for_handle(TurnHandle(what, lambda: self.is_left), what)
        made = self.gradients[place]
        self._taken[place] += 1
        if self._taken[place] == self.takers:
            self.gradients[place] = []
        else:
            made = [copy_as_it_lies(each) for each in made]
        return (*made, *[None] * (self.uses[place] - len(made)))


def _find_inputs(start: Node | None, edges: Mapping[_Edge, int], users: dict[Node, list[tuple[int, int]]]) -> frozenset[int]:
    """The inputs to which the graph behind a node leads. `edges`: where they are; `users` gets each node that has such an edge:
    (which gradient, of which input)."""
    ends = {node for node, _ in edges}
    nodes, seen, reached = [start], set[Node](), set[int]()
    while nodes:
        node = nodes.pop()
        if node is None or node in seen:
            continue
        seen.add(node)
        found = [(number, edges[edge]) for number, edge in enumerate(node.next_functions) if edge in edges]
        if found:
            users[node] = found
            reached.update(place for _, place in found)
        nodes.extend(other for other, _ in node.next_functions if other not in ends)
    return frozenset(reached)


class WholeLayers:
    """The whole layers of one stage of a worker, between its first virtual shard, which calls them, and the others."""

    def __init__(self, positions: frozenset[int], leading: frozenset[int], takers: int) -> None:
        """`takers`: number of the other virtual shards."""
        self.positions = positions
        """Positions of the whole layers in the stage."""
        self.leading = leading
        """Those of them that read nothing which other layers of the stage have had a part in: nobody takes their gradients."""
        self._takers = takers
        self._made: dict[tuple[PassKind, int, int], tuple[WholeCall, int]] = {}
        """(pass, microbatch, position) -> call, and by how many it is still to be taken."""
        self._watched: dict[int, dict[int, WholeCall]] = {}
        """Microbatch -> position -> call whose gradients the others take."""
        self._in_backward: dict[int, WholeCall] = {}
        """Those of the backward pass under way."""

    # -- the first virtual shard ---------------------------------------------------------------------------------------

    def begin_step(self) -> None:
        """Forget the last step."""
        self._made.clear()
        self._watched.clear()
        self._in_backward = {}

    def alias_inputs(
        self, position: int, names: Sequence[str], inputs: Sequence[Tensor], shared: Collection[str]
    ) -> Sequence[Tensor]:
        """What a layer is called with in `forward`: an alias of each value that it alone reads, if others take the gradient.

        A hook that the layer registers on such a value, or on the node behind it, so belongs to the call, and changes what the
        others take. Hooks on `shared` values are refused, and the gradients of these are added in the order of the reads.
        """
        if position not in self.positions or position in self.leading:
            return inputs
        own = {n: make_alias(v) for n, v in zip(names, inputs, strict=True) if v.requires_grad and n not in shared}
        return [own.get(name, value) for name, value in zip(names, inputs, strict=True)]

    def give(
        self, kind: PassKind, microbatch: int, position: int, label: str, inputs: Sequence[Tensor], outputs: Sequence[Tensor]
    ) -> None:
        """Let the others have what the call of a layer has returned; nothing where the layer is not whole."""
        if position not in self.positions:
            return
        detached = tuple(value.detach() for value in outputs)
        call = WholeCall(label, detached, tuple(value.requires_grad for value in outputs), self._takers)
        if kind == "forward" and position not in self.leading:
            call.watch(inputs, outputs)
            self._watched.setdefault(microbatch, {})[position] = call
        self._made[kind, microbatch, position] = call, self._takers

    def begin_backward(self, microbatch: int) -> None:
        """Note which microbatch's backward pass begins."""
        self._in_backward = self._watched.pop(microbatch, {})

    def leave(self, position: int) -> None:
        """Note that the backward pass has left all layers behind `position`."""
        for at, call in self._in_backward.items():
            call.is_left |= at > position

    # -- the others ----------------------------------------------------------------------------------------------------

    def take(self, kind: PassKind, microbatch: int, position: int, label: str, inputs: Sequence[Tensor]) -> tuple[Tensor, ...]:
        """What the layer has returned, once it has. In `forward`, with a graph through which its inputs get the gradients that
        the first virtual shard's have."""
        key = kind, microbatch, position
        if key not in self._made:
            wait_for_handle(TurnHandle(f"what {label} returns", lambda: key in self._made), f"what {label} returns")
        call, left = self._made.pop(key)
        if left > 1:
            self._made[key] = call, left - 1
        if not torch.is_grad_enabled():
            return tuple(value.detach() for value in call.outputs)
        return _with_graph(call, inputs)


def _with_graph(call: WholeCall, inputs: Sequence[Tensor]) -> tuple[Tensor, ...]:
    """The outputs of a call, in a graph that leads from each to the same inputs as where the call was made.

    Where it leads decides which code of earlier layers runs in the backward pass, if without a gradient: activation
    checkpoints run their forward again then, and wait for other shards.
    """
    if not any(call.uses):
        return tuple(_end_of_graph(value, needs=needs) for value, needs in zip(call.outputs, call.with_gradient, strict=True))
    uses = {place: [inputs[place]] * count for place, count in enumerate(call.uses) if count}
    if call.has_one_graph:
        return _Taken.apply(call, tuple(uses), *chain(*uses.values()))
    ends = {place: _GradientOfInput.apply(call, place, *values) for place, values in uses.items()}
    found = list[Tensor]()
    for number, (value, needs, reached) in enumerate(zip(call.outputs, call.with_gradient, call.reached, strict=True)):
        if reached:
            of_inputs = (ends[place] for place in sorted(reached))
            found.append(_TakenOutput.apply(call, number, *of_inputs))
        else:
            found.append(_end_of_graph(value, needs=needs))
    return tuple(found)


class _TakenContext(AutogradContext):
    call: WholeCall
    places: Sequence[int]


class _Taken(AutogradFunctionOfSeveral):
    """A whole layer's call in the graph of a virtual shard that has not made it. Each input is given once for each summand of
    its gradient, so that autograd adds these to others in the order in which it does so where the call was made."""

    @staticmethod
    def forward(ctx: _TakenContext, call: WholeCall, places: Sequence[int], *inputs: Tensor) -> tuple[Tensor, ...]:
        ctx.call, ctx.places = call, places
        ctx.set_materialize_grads(False)
        outputs = tuple(value.detach() for value in call.outputs)
        ctx.mark_non_differentiable(*(v for v, needs in zip(outputs, call.with_gradient, strict=True) if not needs))
        return outputs

    @staticmethod
    def backward(ctx: _TakenContext, *gradients: Tensor | None) -> tuple[Tensor | None, ...]:
        return (None, None, *chain.from_iterable(map(ctx.call.take_gradients, ctx.places)))


class _GradientOfInput(AutogradFunction):
    """One input's summands in such a graph, behind the outputs whose gradients make them. Returns a sign alone."""

    @staticmethod
    def forward(ctx: _TakenContext, call: WholeCall, place: int, *inputs: Tensor) -> Tensor:
        ctx.call, ctx.places = call, (place,)
        ctx.set_materialize_grads(False)
        return inputs[0].new_empty(())

    @staticmethod
    def backward(ctx: _TakenContext, *gradients: Tensor | None) -> tuple[Tensor | None, ...]:
        return (None, None, *ctx.call.take_gradients(ctx.places[0]))


class _TakenOutput(AutogradFunction):
    """One output in such a graph."""

    @staticmethod
    def forward(ctx: AutogradContext, call: WholeCall, number: int, *ends: Tensor) -> Tensor:
        ctx.set_materialize_grads(False)
        return call.outputs[number].detach()

    @staticmethod
    def backward(ctx: AutogradContext, *gradients: Tensor | None) -> tuple[Tensor | None, ...]:
        return (None,) * len(ctx.needs_input_grad)


def _end_of_graph(value: Tensor, *, needs: bool) -> Tensor:
    """A tensor of the same memory, which requires a gradient if it `needs` one, and keeps none."""
    if not needs:
        return value.detach()
    leaf = value.detach().requires_grad_()
    alias = make_alias(leaf)
    leaf.requires_grad_(False)
    return alias
