"""The recurrence of one layer of an LSTM, GRU or RNN whose hidden units are cut over shards, as an autograd function.

A shard has the rows of all gates for its hidden units. The products with the inputs of all time steps are one, and so are those
that give the gradients of weights and inputs. Between them the time steps follow each other: each multiplies the whole hidden
state, whose parts the shards gather after every step; backward, the gradient of that state is summed over the shards, and each
keeps its part. Both directions of a bidirectional layer go in step, so that they share a message.

What is computed in one time step lies [sequences, features], the sequences of both directions one below the other.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import accumulate, groupby
from typing import ClassVar, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from raypar.comm.transport import Handle
from raypar.model.autograd_function_types import AutogradContext, AutogradFunctionOfSeveral
from raypar.model.tensor_parallel import autograd_collectives
from raypar.model.tensor_parallel.shard_group import ShardGroup
from raypar.plan.shard_ranges import even_ranges_by_shard

GATHERED, SUMMED = "the parts of a hidden state", "the sum of the gradients of a hidden state"
"""What a shard waits for after each time step, forward and backward."""


@dataclass(frozen=True)
class Run:
    """Consecutive iterations in which no sequence begins or ends."""

    first: int
    """Number of its first iteration."""
    count: int
    """How many iterations."""
    widths: tuple[int, ...]
    """By direction: how many sequences."""

    @property
    def width(self) -> int:
        """Sequences of all directions, which are computed side by side."""
        return sum(self.widths)

    @cached_property
    def places(self) -> tuple[slice, ...]:
        """By direction: its sequences among all."""
        ends = list(accumulate(self.widths))
        return tuple(slice(end - width, end) for end, width in zip(ends, self.widths, strict=True))


@dataclass(frozen=True)
class TimeSteps:
    """Which rows of a batch each iteration of a recurrence computes.

    Rows are those of a packed sequence: of the first time step, then of the second; sequences are sorted by length, the longest
    first. In iteration k one direction is at time step k, the other one at the k-th from the end.
    """

    batch_sizes: tuple[int, ...]
    """By time step: how many sequences have it."""
    directions: int
    """1, or 2 for a bidirectional layer."""

    @property
    def sequences(self) -> int:
        """Number of sequences."""
        return self.batch_sizes[0]

    @cached_property
    def runs(self) -> tuple[Run, ...]:
        """The iterations, in order."""
        widths = [(width, self.batch_sizes[-1 - k])[: self.directions] for k, width in enumerate(self.batch_sizes)]
        found: list[Run] = []
        for each, group in groupby(widths):
            found.append(Run(sum(run.count for run in found), len(list(group)), each))
        return tuple(found)

    def rows(self, run: Run, direction: int) -> slice:
        """The rows that a direction computes in a run."""
        begin = run.first if direction == 0 else len(self.batch_sizes) - run.first - run.count
        return slice(self._ends[begin], self._ends[begin + run.count])

    @cached_property
    def _ends(self) -> tuple[int, ...]:
        """Time step -> rows before it."""
        return (0, *accumulate(self.batch_sizes))

    def by_iteration(self, rows: Tensor, run: Run, direction: int) -> Tensor:
        """[iterations, sequences, features] of rows [all rows, features]."""
        found: Tensor = rows[self.rows(run, direction)].unflatten(0, (run.count, run.widths[direction]))
        return found if direction == 0 else found.flip(0)

    def put_rows(self, out: Tensor, run: Run, direction: int, values: Tensor) -> None:
        """The opposite of `by_iteration`: writes values [iterations, sequences, features] to their rows of `out`."""
        out[self.rows(run, direction)].unflatten(0, values.shape[:2]).copy_(values if direction == 0 else values.flip(0))

    def join_rows(self, values: Sequence[Tensor], direction: int) -> Tensor:
        """[all rows, features], of a direction, of values [iterations, all sequences, features] by run."""
        if len(values) == self.directions == 1:
            return values[0].flatten(0, 1)
        out = values[0].new_empty(sum(self.batch_sizes), values[0].shape[2])
        for run, of_run in zip(self.runs, values, strict=True):
            self.put_rows(out, run, direction, of_run[:, run.places[direction]])
        return out


class State(NamedTuple):
    """What a run keeps for its backward pass. Place 0 of `hidden` and `cells` is the state before its first iteration."""

    hidden: Tensor
    """[iterations + 1, sequences, hidden units], whole."""
    cells: Tensor
    """[iterations + 1, sequences, units of this shard] of an LSTM; of others there are no units."""
    gates: Tensor
    """[iterations, sequences, gates x units of this shard], after their functions."""
    products: Tensor
    """[iterations, sequences, units of this shard]: what the reset gate of a GRU multiplies; of others there are no units."""


class Gates(ABC):
    """The arithmetic of one kind of cell, on the units of one shard [sequences, units].

    Gradients of gates lie in blocks of units. The first `gates` blocks are those of the product with the hidden state.
    """

    gates: ClassVar[int]
    """How many gates a cell has."""
    of_input: ClassVar[tuple[int, ...]]
    """The blocks of the product with the input, in the order of the weight's rows."""
    has_cells: ClassVar[bool] = False
    """Whether there is a cell state beside the hidden one."""
    has_products: ClassVar[bool] = False
    """Whether a gate multiplies the product with the hidden state."""

    @abstractmethod
    def step(self, state: State, k: int, own: slice, product: Tensor) -> Tensor:
        """Iteration k: writes gates and cells, and returns this shard's new hidden units (its place among all is `own`).
        `gates[k]` holds the sum of both products; if `has_products`, that with the input alone, and `product` is the other."""

    @abstractmethod
    def slopes(self, state: State, own: slice) -> Tensor:
        """[iterations, sequences, blocks x units]: of all iterations, by what gradients of hidden state and cells are
        multiplied for those of the gates."""

    @abstractmethod
    def step_back(self, slopes: Tensor, k: int, state: State, gradient: Tensor, cells: Tensor) -> Tensor | None:
        """Iteration k: turns `slopes[k]` into gradients of the gates, given that of this shard's hidden units, and the gradient
        `cells` of the cell state into that of the state before. Returns what the hidden units before get directly."""


class LstmGates(Gates):
    """i, f, g, o: c' = f c + i g, h' = o tanh(c')."""

    gates, has_cells = 4, True
    of_input = (0, 1, 2, 3)

    def step(self, state: State, k: int, own: slice, product: Tensor) -> Tensor:
        """See `Gates`."""
        units = state.cells.shape[2]
        i, f, g, o = state.gates[k].split(units, 1)
        state.gates[k][:, : 2 * units].sigmoid_()
        g.tanh_()
        o.sigmoid_()
        made: Tensor = torch.mul(f, state.cells[k], out=state.cells[k + 1]).addcmul_(i, g).tanh().mul_(o)
        return made

    def slopes(self, state: State, own: slice) -> Tensor:
        """See `Gates`. The last block is that of the cells."""
        units = state.cells.shape[2]
        i, f, g, o = state.gates.split(units, 2)
        cells = state.cells[1:].tanh()
        found = state.gates.new_empty(*state.gates.shape[:2], 5 * units)
        to_i, to_f, to_g, to_o, to_cells = found.split(units, 2)
        torch.mul(i - i * i, g, out=to_i)
        torch.mul(f - f * f, state.cells[:-1], out=to_f)
        torch.mul(1 - g * g, i, out=to_g)
        torch.mul(o - o * o, cells, out=to_o)
        torch.mul(1 - cells * cells, o, out=to_cells)
        return found

    def step_back(self, slopes: Tensor, k: int, state: State, gradient: Tensor, cells: Tensor) -> None:
        """See `Gates`."""
        units = gradient.shape[1]
        cells.addcmul_(gradient, slopes[k][:, 4 * units :])
        slopes[k][:, : 3 * units].unflatten(1, (3, units)).mul_(cells.unsqueeze(1))
        slopes[k][:, 3 * units : 4 * units].mul_(gradient)
        cells.mul_(state.gates[k][:, units : 2 * units])


class GruGates(Gates):
    """r, z, n: n = tanh(x_n + r p_n), h' = n + z (h - n), p being the product with the hidden state."""

    gates, has_products = 3, True
    of_input = (0, 1, 3)

    def step(self, state: State, k: int, own: slice, product: Tensor) -> Tensor:
        """See `Gates`."""
        units = state.products.shape[2]
        r, z, n = state.gates[k].split(units, 1)
        state.gates[k][:, : 2 * units].add_(product[:, : 2 * units]).sigmoid_()
        n.addcmul_(r, state.products[k].copy_(product[:, 2 * units :])).tanh_()
        made: Tensor = (state.hidden[k][:, own] - n).mul_(z).add_(n)
        return made

    def slopes(self, state: State, own: slice) -> Tensor:
        """See `Gates`. The blocks are those of r, z, p_n and n."""
        units = state.products.shape[2]
        r, z, n = state.gates.split(units, 2)
        found = state.gates.new_empty(*state.gates.shape[:2], 4 * units)
        to_r, to_z, to_product, to_n = found.split(units, 2)
        torch.mul(1 - z, 1 - n * n, out=to_n)
        torch.mul(to_n, r, out=to_product)
        torch.mul(to_n * state.products, r - r * r, out=to_r)
        torch.mul(state.hidden[:-1, :, own] - n, z - z * z, out=to_z)
        return found

    def step_back(self, slopes: Tensor, k: int, state: State, gradient: Tensor, cells: Tensor) -> Tensor:
        """See `Gates`."""
        units = gradient.shape[1]
        slopes[k].unflatten(1, (4, units)).mul_(gradient.unsqueeze(1))
        return gradient * state.gates[k][:, units : 2 * units]


class RnnGates(Gates):
    """h' = tanh(x + p), or its positive part."""

    gates = 1
    of_input = (0,)

    def __init__(self, nonlinearity: str) -> None:
        self._is_relu = nonlinearity == "relu"
        self.function = torch.relu if self._is_relu else torch.tanh

    def step(self, state: State, k: int, own: slice, product: Tensor) -> Tensor:
        """See `Gates`."""
        made: Tensor = self.function(state.gates[k])
        state.gates[k] = made
        return made

    def slopes(self, state: State, own: slice) -> Tensor:
        """See `Gates`."""
        made = state.gates
        return (made > 0).to(made.dtype) if self._is_relu else 1 - made * made

    def step_back(self, slopes: Tensor, k: int, state: State, gradient: Tensor, cells: Tensor) -> None:
        """See `Gates`."""
        slopes[k].mul_(gradient)


@dataclass(frozen=True)
class LayerCall:
    """What the recurrence of a layer is told beside tensors."""

    kind: Gates
    hidden_size: int
    """Hidden units of the whole layer."""
    steps: TimeSteps
    group: ShardGroup
    reads_own_units: bool = False
    """Whether the input is the output of such a layer, which needs the gradient of this shard's units only."""
    leaves_part: bool = False
    """Whether the output has this shard's units only."""

    @cached_property
    def own(self) -> slice:
        """This shard's hidden units."""
        ((start, stop),) = even_ranges_by_shard(self.hidden_size, self.group.size)[self.group.shard]
        return slice(start, stop)

    @property
    def units(self) -> int:
        """How many they are."""
        return int(self.own.stop - self.own.start)


class Weights(NamedTuple):
    """The parameters of one direction: this shard's rows of each gate."""

    of_input: Tensor
    of_hidden: Tensor
    bias_of_input: Tensor | None
    bias_of_hidden: Tensor | None


class _Context(AutogradContext):
    call: LayerCall


class Recurrence(AutogradFunctionOfSeveral):
    """(output, last hidden state, last cells) of one layer, given its input, the initial state and the parameters.

    Input [rows, features], hidden state [directions, sequences, hidden units] and output [rows, directions x hidden units] are
    whole, and all shards use them alike; cells are this shard's. Of what has no cells they have no units. `parameters`: the
    `Weights` of one direction after the other.
    """

    @staticmethod
    def forward(
        ctx: _Context, call: LayerCall, x: Tensor, hidden: Tensor, cells: Tensor, *parameters: Tensor | None
    ) -> tuple[Tensor, Tensor, Tensor]:
        ctx.call = call
        ctx.set_materialize_grads(False)
        weights, steps = _by_direction(parameters), call.steps
        of_input = [_product_with_input(call.kind, x, each) for each in weights]
        width = call.units if call.leaves_part else call.hidden_size
        out = x.new_empty(len(x), len(weights) * width)
        by_direction = out.unflatten(1, (len(weights), width))
        last = torch.empty_like(hidden, memory_format=torch.contiguous_format), torch.empty_like(cells)
        states: list[State] = []
        before: tuple[Run, State] | None = None
        for run in steps.runs:
            state = _empty_state(call, run, x)
            _begin_run(run, state, before, (hidden, cells), last)
            for number, place in enumerate(run.places):
                state.gates[:, place] = steps.by_iteration(of_input[number], run, number)
            for k in range(run.count):
                _advance(call, run, state, k, weights)
            made = state.hidden[1:, :, call.own] if call.leaves_part else state.hidden[1:]
            for number, place in enumerate(run.places):
                steps.put_rows(by_direction[:, number], run, number, made[:, place])
            states.append(state)
            before = run, state
        _end_runs(before, last)
        ctx.save_for_backward(x, *parameters, *(tensor for state in states for tensor in state))
        return out, *last

    @staticmethod
    @autograd_collectives.first_derivative_only
    def backward(ctx: _Context, *gradients: Tensor) -> tuple[Tensor | None, ...]:
        call, count = ctx.call, 4 * ctx.call.steps.directions
        x, *saved = ctx.saved_tensors
        if all(gradient is None for gradient in gradients):
            return (None,) * (4 + count)
        weights, states = _by_direction(saved[:count]), [State(*saved[at : at + 4]) for at in range(count, len(saved), 4)]
        needs_x, needs_hidden, needs_cells, *needs_parameters = ctx.needs_input_grad[1:]
        back = _Backward(call, weights, x, gradients, needs_hidden=needs_hidden)
        slopes = back.run(states)
        of_gates = back.rows(slopes, call.kind.of_input)
        pending = _PendingInputGradient(call, weights, of_gates) if needs_x else None
        of_products = back.rows(slopes, range(call.kind.gates)) if call.kind.has_products else of_gates
        of_parameters: list[Tensor | None] = []
        for number in range(len(weights)):
            needed, read = needs_parameters[4 * number :], call.steps.join_rows([state.hidden[:-1] for state in states], number)
            of_parameters += _parameter_gradients(needed, x, of_gates[number], of_products[number], read)
        of_hidden = back.initial_hidden() if needs_hidden else None
        of_cells = back.initial_cells() if needs_cells else None
        return (None, None if pending is None else pending.take(), of_hidden, of_cells, *of_parameters)


def _by_direction(parameters: Sequence[Tensor | None]) -> list[Weights]:
    return [Weights(*parameters[at : at + 4]) for at in range(0, len(parameters), 4)]  # type: ignore[arg-type]


def _product_with_input(kind: Gates, x: Tensor, weights: Weights) -> Tensor:
    """[rows, gates x units]: with the sum of both biases, unless a gate multiplies the product with the hidden state."""
    bias = weights.bias_of_input
    if bias is not None and weights.bias_of_hidden is not None and not kind.has_products:
        bias = bias + weights.bias_of_hidden
    return F.linear(x, weights.of_input, bias)


def _empty_state(call: LayerCall, run: Run, x: Tensor) -> State:
    kind, units, count, width = call.kind, call.units, run.count, run.width
    return State(
        hidden=x.new_empty(count + 1, width, call.hidden_size),
        cells=x.new_empty(count + 1, width, units if kind.has_cells else 0),
        gates=x.new_empty(count, width, kind.gates * units),
        products=x.new_empty(count, width, units if kind.has_products else 0),
    )


def _begin_run(
    run: Run, state: State, before: tuple[Run, State] | None, initial: Sequence[Tensor], last: Sequence[Tensor]
) -> None:
    """Write the state before a run: that after the run before it, for sequences that begin here the `initial` one. Writes the
    state of sequences that have ended to `last`. Both are [directions, sequences, units], of the hidden state and the cells."""
    for kind in range(2):
        for number, place in enumerate(run.places):
            room, kept = state[kind][0][place], 0
            if before is not None:
                kept = before[0].widths[number]
                after, both = before[1][kind][-1][before[0].places[number]], min(kept, len(room))
                room[:both] = after[:both]
                last[kind][number, both:kept] = after[both:]
            room[kept:] = initial[kind][number, kept : len(room)]


def _end_runs(before: tuple[Run, State] | None, last: Sequence[Tensor]) -> None:
    """Write the state of the sequences of the last run to `last`."""
    assert before is not None
    run, state = before
    for kind in range(2):
        for number, place in enumerate(run.places):
            last[kind][number, : run.widths[number]] = state[kind][-1][place]


def _advance(call: LayerCall, run: Run, state: State, k: int, weights: Sequence[Weights]) -> None:
    """One iteration: products, gates, and the parts of the new hidden state, which are gathered."""
    product = state.gates[k]
    if call.kind.has_products:
        product = torch.empty_like(product)
    for each, place in zip(weights, run.places, strict=True):
        room, before = product[place], state.hidden[k][place]
        if not call.kind.has_products:
            room.addmm_(before, each.of_hidden.t())
        elif each.bias_of_hidden is None:
            torch.mm(before, each.of_hidden.t(), out=room)
        else:
            torch.addmm(each.bias_of_hidden, before, each.of_hidden.t(), out=room)
    made = call.kind.step(state, k, call.own, product)
    even = even_ranges_by_shard(call.hidden_size, call.group.size)
    call.group.gather_and_concat(made, 1, even, GATHERED, out=state.hidden[k + 1])


class _Backward:
    """The way back through the iterations of a layer. `gradients`: of its three results; None is zero."""

    def __init__(
        self, call: LayerCall, weights: Sequence[Weights], x: Tensor, gradients: Sequence[Tensor | None], *, needs_hidden: bool
    ) -> None:
        self._call, self._weights, self._x, self._needs_hidden = call, weights, x, needs_hidden
        out, hidden, cells = gradients
        shape = len(weights), call.steps.sequences
        if out is not None:
            out = out.unflatten(1, (len(weights), -1))
            out = out if call.leaves_part else out[:, :, call.own]
        self._out = out
        """Of the output [rows, directions, units of this shard]."""
        self._last = (
            x.new_zeros(*shape, call.units) if hidden is None else hidden[:, :, call.own],
            x.new_zeros(*shape, call.units * call.kind.has_cells) if cells is None else cells,
        )
        """Of the last state [directions, sequences, units of this shard]: hidden and cells."""
        self._initial = tuple(torch.zeros_like(each, memory_format=torch.contiguous_format) for each in self._last)
        """Of the initial state, as `_last`."""

    def run(self, states: Sequence[State]) -> list[Tensor]:
        """By run: the gradients of the gates of its iterations, as `Gates.step_back` leaves them."""
        runs = self._call.steps.runs
        carried = [self._empty(runs[-1], kind) for kind in range(2)]
        for kind, number, place in self._places(runs[-1]):
            carried[kind][place] = self._last[kind][number, : runs[-1].widths[number]]
        found: list[Tensor] = []
        for at in reversed(range(len(runs))):
            found.append(self._run_back(runs[at], states[at], carried))
            carried = self._leave_run(runs[at], runs[at - 1] if at else None, carried)
        return found[::-1]

    def _empty(self, run: Run, kind: int) -> Tensor:
        return self._x.new_empty(run.width, self._last[kind].shape[2])

    @staticmethod
    def _places(run: Run) -> Iterator[tuple[int, int, slice]]:
        """(0 for the hidden state and 1 for the cells, direction, its sequences)"""
        return ((kind, number, place) for kind in range(2) for number, place in enumerate(run.places))

    def _run_back(self, run: Run, state: State, carried: list[Tensor]) -> Tensor:
        """The gradients of a run's gates. `carried`: of the state after it; becomes that of the state before it."""
        call, kind = self._call, self._call.kind
        slopes = kind.slopes(state, call.own)
        of_out = self._x.new_zeros(run.count, run.width, call.units)
        if self._out is not None:
            for number, place in enumerate(run.places):
                of_out[:, place] = call.steps.by_iteration(self._out[:, number], run, number)
        before = self._x.new_empty(run.width, call.hidden_size)
        for k in reversed(range(run.count)):
            direct = kind.step_back(slopes, k, state, of_out[k].add_(carried[0]), carried[1])
            if run.first + k == 0 and not self._needs_hidden:
                break
            of_products = slopes[k][:, : kind.gates * call.units]
            for each, place in zip(self._weights, run.places, strict=True):
                torch.mm(of_products[place], each.of_hidden, out=before[place])
            carried[0] = call.group.reduce_scatter(before, 1, SUMMED)
            if direct is not None:
                carried[0].add_(direct)
        return slopes

    def _leave_run(self, run: Run, before: Run | None, carried: list[Tensor]) -> list[Tensor]:
        """The gradients of the state after the run `before`, given those of the state before `run`: see `_begin_run`."""
        found = [] if before is None else [self._empty(before, kind) for kind in range(2)]
        for kind, number, place in self._places(run):
            of_run, kept = carried[kind][place], 0
            if before is not None:
                room, kept = found[kind][before.places[number]], before.widths[number]
                both = min(kept, len(of_run))
                room[:both] = of_run[:both]
                room[both:] = self._last[kind][number, both:kept]
            self._initial[kind][number, kept : len(of_run)] = of_run[kept:]
        return found

    def rows(self, slopes: Sequence[Tensor], blocks: Sequence[int]) -> list[Tensor]:
        """By direction: some blocks of the gates' gradients as rows [rows, blocks x units]."""
        units, steps = self._call.units, self._call.steps
        if list(blocks) == list(range(len(blocks))):
            chosen = [of_run[:, :, : len(blocks) * units] for of_run in slopes]
        else:
            chosen = [torch.cat([of_run[:, :, at * units : (at + 1) * units] for at in blocks], 2) for of_run in slopes]
        return [steps.join_rows(chosen, number) for number in range(len(self._weights))]

    def initial_hidden(self) -> Tensor:
        """The gradient of the initial hidden state, whole."""
        group = self._call.group
        return group.gather_and_concat(
            self._initial[0], 2, even_ranges_by_shard(self._call.hidden_size, group.size), "the gradient of a hidden state"
        )

    def initial_cells(self) -> Tensor:
        """The gradient of this shard's initial cells."""
        return self._initial[1]


class _PendingInputGradient:
    """The sum over shards of the gradient of a layer's input, under way while gradients of weights are computed."""

    def __init__(self, call: LayerCall, weights: Sequence[Weights], of_gates: Sequence[Tensor]) -> None:
        self._call = call
        total = of_gates[0].mm(weights[0].of_input)
        for rows, each in zip(of_gates[1:], weights[1:], strict=True):
            total.addmm_(rows, each.of_input)
        self._kept: list[Tensor] = []
        self._handle: Handle
        if call.reads_own_units:
            by_direction = total.unflatten(1, (-1, call.hidden_size))
            self._out, self._handle, self._kept = call.group.post_reduce_scatter(by_direction, 2)
        else:
            self._out, self._handle = total, call.group.post_all_reduce(total)

    def take(self) -> Tensor:
        """The sum, once it is there; where the layer before needs its own units only, the others are 0."""
        call = self._call
        call.group.wait(self._handle, self._out, "the sum of the gradients of a layer's input")
        self._kept = []
        if not call.reads_own_units:
            return self._out
        found = self._out.new_zeros(*self._out.shape[:2], call.hidden_size)
        found[:, :, call.own] = self._out
        return found.flatten(1)


def _parameter_gradients(
    needed: Sequence[bool], x: Tensor, of_gates: Tensor, of_products: Tensor, hidden: Tensor
) -> tuple[Tensor | None, ...]:
    """Of the `Weights` of one direction, each from one product, or one sum, over the rows of all time steps."""
    return (
        of_gates.t().mm(x) if needed[0] else None,
        of_products.t().mm(hidden) if needed[1] else None,
        of_gates.sum(0) if needed[2] else None,
        of_products.sum(0) if needed[3] else None,
    )
