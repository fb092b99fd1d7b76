"""Recurrent layers cut over shards by hidden units: `nn.LSTM`, `nn.GRU` and `nn.RNN` (`recurrence.py`), and their cells.

Each shard has the rows of all gates for its hidden units, and all columns. The hidden state is whole for every product with it.
"""

from __future__ import annotations

from collections.abc import Mapping
from contextlib import AbstractContextManager, nullcontext
from functools import lru_cache
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.nn.utils.rnn import PackedSequence

from raypar.errors import ModelError
from raypar.model.autocast_casts import cast_for_autocast, is_autocast_enabled
from raypar.model.tensor_parallel.autograd_collectives import copy_to_shards, gather_from_shards, scatter_to_shards
from raypar.model.tensor_parallel.local_part_layout import FEATURES, LocalPartLayout
from raypar.model.tensor_parallel.recurrence import (
    Gates,
    GruGates,
    LayerCall,
    LstmGates,
    Recurrence,
    RnnGates,
    TimeSteps,
)
from raypar.model.tensor_parallel.recurrent_traffic import cell_numbers, layer_numbers
from raypar.model.tensor_parallel.shard_group import ShardedModule, ShardGroup
from raypar.model.tensor_parallel.sharded_value import ShardedValue
from raypar.plan.shard_ranges import even_ranges_by_shard, repeat_ranges

LAYERS = (nn.LSTM, nn.GRU, nn.RNN)
"""PyTorch's recurrent layers, which run over all time steps."""
CELLS = (nn.LSTMCell, nn.GRUCell, nn.RNNCell)
"""Those that compute one time step."""
RECURRENT = (*LAYERS, *CELLS)

Value = Tensor | ShardedValue


def gates_of(module: nn.Module) -> Gates:
    """The arithmetic of a recurrent layer or cell."""
    if isinstance(module, (nn.LSTM, nn.LSTMCell)):
        return LstmGates()
    if isinstance(module, (nn.GRU, nn.GRUCell)):
        return GruGates()
    assert isinstance(module, (nn.RNN, nn.RNNCell))
    return RnnGates(module.nonlinearity)


class ShardedRecurrentModule(ShardedModule):
    """Base of recurrent layers and cells of one shard. `module`: the layer, whose parameters are this shard's slices.

    `leaves_part`: whether the output stays divided by features.
    """

    def __init__(self, module: nn.Module, name: str, group: ShardGroup, *, leaves_part: bool) -> None:
        super().__init__(name, group)
        whole: Any = module
        self._class = next(kind for kind in RECURRENT if isinstance(module, kind))
        self.kind = gates_of(module)
        self.input_size, self.hidden_size, self.bias = int(whole.input_size), int(whole.hidden_size), bool(whole.bias)
        """Of the unsharded layer."""
        self.leaves_part = leaves_part
        self.even = even_ranges_by_shard(self.hidden_size, group.size)
        """By shard: its hidden units."""
        for key, parameter in module._parameters.items():
            self.register_parameter(key, parameter)

    @property  # type: ignore[misc]
    def __class__(self) -> type[Any]:
        """PyTorch's class of the layer: users' code asks it (`isinstance(self.rnn, nn.LSTM)`) what the state looks like."""
        return self._class

    def whole(self, x: Value, what: str) -> Tensor:
        """The whole value, of which sequence parallelism's parts are gathered. Raises `ModelError` for other parts."""
        if not isinstance(x, ShardedValue):
            return x
        x.check_recorded()
        if x.by_sequence:
            even = even_ranges_by_shard(x.part_layout.size, self.group.size)
            return gather_from_shards(x.local, 1, even, self.group)
        raise ModelError(
            f"{self.name} needs all of its {what}, which is cut along dim {x.part_layout.dim} of {list(x.shape)}",
            cure=f"give the layer that makes it the style gathered (a recurrent one: gates), or {self.name} the style whole",
        )

    def own_units(self, x: Value) -> Tensor:
        """This shard's hidden units, in the last dim, of a value; the gradients of the parts are gathered."""
        if not isinstance(x, ShardedValue):
            return scatter_to_shards(x, x.dim() - 1, self.group, self.even)
        x.check_recorded()
        if x.part_layout.dim != x.dim() - 1 or x.part_layout.ranges != self.even[self.group.shard]:
            return self.own_units(self.whole(x, "cell state"))
        return x.local

    def in_parts(self, local: Tensor, directions: int = 1) -> ShardedValue:
        """A value of which this shard has its hidden units, of each direction, in the last dim."""
        size = self.hidden_size
        held = repeat_ranges(self.even[self.group.shard], size, directions)
        return ShardedValue(local, LocalPartLayout(local.dim() - 1, directions * size, held, FEATURES), self.group)


class ShardedRecurrentLayer(ShardedRecurrentModule):
    """An LSTM, GRU or RNN of one shard: several layers, both directions and packed sequences as the whole module."""

    def __init__(self, module: nn.Module, name: str, group: ShardGroup, *, leaves_part: bool) -> None:
        super().__init__(module, name, group, leaves_part=leaves_part)
        whole: Any = module
        self.mode, self.num_layers, self.proj_size = str(whole.mode), int(whole.num_layers), 0
        self.batch_first, self.bidirectional = bool(whole.batch_first), bool(whole.bidirectional)
        self.dropout = float(whole.dropout)
        self._steps: TimeSteps | None = None
        """Of the last call."""

    def numbers_of_last_call(self) -> Mapping[tuple[str, str], int]:
        """See `ShardedModule`."""
        if self._steps is None:
            return {}
        return layer_numbers(self.num_layers, self._steps.batch_sizes, self._steps.directions, self.hidden_size)

    def flatten_parameters(self) -> None:
        """Nothing: a shard's slices are used one by one."""

    def forward(self, input: Value | PackedSequence, hx: Any = None) -> Any:
        """(output, last state), as of the whole module; the output is divided by features if `leaves_part`."""
        if isinstance(input, PackedSequence):
            return self._of_packed(input, hx)
        x = self.whole(input, "input")
        is_batched = x.dim() == 3
        if not is_batched:
            x = x.unsqueeze(1)
        elif self.batch_first:
            x = x.transpose(0, 1)
        length, sequences = x.shape[:2]
        steps = _time_steps((sequences,) * length, 1 + self.bidirectional)
        if hx is not None and not is_batched:
            hx = tuple(each.unsqueeze(1) for each in hx) if self.kind.has_cells else hx.unsqueeze(1)
        rows, state = self._run(x.reshape(length * sequences, x.shape[2]), hx, steps)
        out = rows.unflatten(0, (length, sequences))
        if not is_batched:
            out, state = out.squeeze(1), tuple(each.squeeze(1) for each in state)
        elif self.batch_first:
            out = out.transpose(0, 1)
        return self.in_parts(out, steps.directions) if self.leaves_part else out, self._as_given(state)

    def _of_packed(self, packed: PackedSequence, hx: Any) -> tuple[PackedSequence, Any]:
        """As `forward`, of a packed sequence."""
        if self.leaves_part:
            raise ModelError(
                f"{self.name} has the style gates-column and gets a packed sequence, whose features cannot be divided",
                cure=f"give {self.name} the style gates, which leaves its output whole",
            )
        steps = _time_steps(tuple(packed.batch_sizes.tolist()), 1 + self.bidirectional)
        order, back = packed.sorted_indices, packed.unsorted_indices
        if hx is not None and order is not None:
            hx = tuple(each.index_select(1, order) for each in hx) if self.kind.has_cells else hx.index_select(1, order)
        rows, state = self._run(packed.data, hx, steps)
        if back is not None:
            state = tuple(each.index_select(1, back) for each in state)
        return PackedSequence(rows, packed.batch_sizes, order, back), self._as_given(state)

    def _as_given(self, state: tuple[Tensor, ...]) -> Tensor | tuple[Tensor, ...]:
        """The state as the whole module returns it."""
        return state if self.kind.has_cells else state[0]

    def _run(self, rows: Tensor, hx: Any, steps: TimeSteps) -> tuple[Tensor, tuple[Tensor, ...]]:
        """(rows of the output, last state) of the rows of all layers' input."""
        self._steps = steps
        hidden, cells = self._initial(rows, hx, steps)
        last: list[tuple[Tensor, Tensor]] = []
        for number in range(self.num_layers):
            here = slice(number * steps.directions, (number + 1) * steps.directions)
            is_last = number + 1 == self.num_layers
            call = LayerCall(
                self.kind,
                self.hidden_size,
                steps,
                self.group,
                reads_own_units=number > 0,
                leaves_part=self.leaves_part and is_last,
            )
            operands = cast_for_autocast(rows, hidden[here], cells[here], *self._weights(number))
            with _without_autocast(rows):
                rows, *of_layer = Recurrence.apply(call, *operands)
            last.append((of_layer[0], of_layer[1]))
            if self.dropout and self.training and not is_last:
                rows = F.dropout(rows, self.dropout)
        of_hidden, of_cells = (torch.cat(each) for each in zip(*last, strict=True))
        if not self.kind.has_cells:
            return rows, (of_hidden,)
        return rows, (of_hidden, gather_from_shards(of_cells, 2, self.even, self.group))

    def _initial(self, rows: Tensor, hx: Any, steps: TimeSteps) -> tuple[Tensor, Tensor]:
        """(hidden state, this shard's cells) [layers x directions, sequences, units]; zeros where none is given."""
        shape = self.num_layers * steps.directions, steps.sequences
        own = sum(stop - start for start, stop in self.even[self.group.shard])
        if hx is None:
            return rows.new_zeros(*shape, self.hidden_size), rows.new_zeros(*shape, own if self.kind.has_cells else 0)
        if self.kind.has_cells:
            return self.whole(hx[0], "hidden state"), self.own_units(hx[1])
        return self.whole(hx, "hidden state"), rows.new_zeros(*shape, 0)

    def _weights(self, number: int) -> list[Tensor | None]:
        """The parameters of a layer, one direction after the other, as `recurrence.Weights`."""
        keys = [f"_l{number}{way}" for way in ("", "_reverse")[: 1 + self.bidirectional]]
        kinds = ("weight_ih", "weight_hh", "bias_ih", "bias_hh")
        return [self._parameters.get(f"{kind}{key}") for key in keys for kind in kinds]


class ShardedCell(ShardedRecurrentModule):
    """One time step of an LSTM, GRU or RNN on one shard, by autograd's own backward.

    The hidden state is returned whole, or divided by features if `leaves_part`; the cell state of an LSTM is always divided.
    """

    _last: tuple[int, bool, bool] | None = None
    """(sequences of the last call, whether it has gathered a hidden state, whether that before it has a gradient)"""

    def numbers_of_last_call(self) -> Mapping[tuple[str, str], int]:
        """See `ShardedModule`."""
        if self._last is None:
            return {}
        sequences, gathers, has_gradient = self._last
        return cell_numbers(sequences, self.hidden_size, gathers=gathers, state_has_gradient=has_gradient)

    def forward(self, input: Value, hx: Any = None) -> Any:
        """The state after the step, as of the whole module. Raises `ModelError` for an input of which a shard has a part."""
        x = self.whole(input, "input")
        is_batched = x.dim() == 2
        x = x if is_batched else x.unsqueeze(0)
        hidden, before, cells = self._state_before(x, hx, is_batched)
        self._last = len(x), before is not None or not self.leaves_part, hidden.requires_grad
        p: Any = self._parameters
        operands: Any = cast_for_autocast(x, hidden, p["weight_ih"], p["weight_hh"], p.get("bias_ih"), p.get("bias_hh"))
        x, hidden, of_input, of_hidden, *biases = operands
        hidden = copy_to_shards(hidden, self.group)
        gates = F.linear(copy_to_shards(x, self.group), of_input, biases[0])
        products = F.linear(hidden, of_hidden, biases[1])
        if before is None:
            ((start, stop),) = self.even[self.group.shard]
            before = hidden[:, start:stop]
        made, cells = _cell_step(self.kind, gates, products, before, cells)
        made = made if is_batched else made.squeeze(0)
        of_hidden = self.in_parts(made) if self.leaves_part else gather_from_shards(made, made.dim() - 1, self.even, self.group)
        if cells is None:
            return of_hidden
        return of_hidden, self.in_parts(cells if is_batched else cells.squeeze(0))

    def _state_before(self, x: Tensor, hx: Any, is_batched: bool) -> tuple[Tensor, Tensor | None, Tensor | None]:
        """(whole hidden state, this shard's units of it if it came in parts, this shard's cells)"""
        given, cells = (hx if self.kind.has_cells else (hx, None)) if hx is not None else (None, None)
        ((start, stop),) = self.even[self.group.shard]
        if given is None:
            hidden, part = x.new_zeros(len(x), self.hidden_size), None
            cells = x.new_zeros(len(x), stop - start) if self.kind.has_cells else None
            return hidden, part, cells
        own = None if cells is None else self.own_units(cells)
        if isinstance(given, ShardedValue) and given.part_layout.ranges == self.even[self.group.shard]:
            part = given.local
            hidden = gather_from_shards(part, part.dim() - 1, self.even, self.group)
        else:
            hidden, part = self.whole(given, "hidden state"), None
        if is_batched:
            return hidden, part, own
        return hidden.unsqueeze(0), None if part is None else part.unsqueeze(0), None if own is None else own.unsqueeze(0)


def _cell_step(
    kind: Gates, gates: Tensor, products: Tensor, before: Tensor, cells: Tensor | None
) -> tuple[Tensor, Tensor | None]:
    """(hidden units, cells) after a step, of a shard's products with the input and with the hidden state [sequences, ...]."""
    if isinstance(kind, LstmGates):
        assert cells is not None
        i, f, g, o = (gates + products).chunk(4, 1)
        cells = f.sigmoid() * cells + i.sigmoid() * g.tanh()
        return o.sigmoid() * cells.tanh(), cells
    if isinstance(kind, GruGates):
        (r, z, n), (of_r, of_z, of_n) = gates.chunk(3, 1), products.chunk(3, 1)
        n = (n + (r + of_r).sigmoid() * of_n).tanh()
        return n + (z + of_z).sigmoid() * (before - n), None
    assert isinstance(kind, RnnGates)
    return kind.function(gates + products), None


@lru_cache(maxsize=256)
def _time_steps(batch_sizes: tuple[int, ...], directions: int) -> TimeSteps:
    return TimeSteps(batch_sizes, directions)


def _without_autocast(x: Tensor) -> AbstractContextManager[Any]:
    """Operands have been cast, so nothing inside is."""
    return torch.autocast(x.device.type, enabled=False) if is_autocast_enabled(x.device) else nullcontext()
