"""What recurrent layers and their cells send over shards: formulas, and how many numbers these are in one call.

In formulas B are rows (sequences, times their time steps), N sequences, H hidden units, and C_in features of the input.
"""

from __future__ import annotations

from collections.abc import Mapping

from torch import nn

from raypar.plan.tensor_parallel_layout import LayerCollective, LayerCollectives

INPUT = LayerCollective("all_reduce", "backward", "input", "B C_in")
"""The gradient of what a layer reads."""
CELL_OUTPUT = LayerCollective("all_gather", "forward", "output", "N H")
"""The hidden state after a cell's step."""
CELL_STATE = LayerCollective("all_reduce", "backward", "output", "N H")
"""The gradient of the hidden state before it."""


def layer_collectives(module: nn.Module) -> LayerCollectives:
    """Those of an LSTM, GRU or RNN."""
    layers, ways = int(module.num_layers), 1 + bool(module.bidirectional)  # type: ignore[arg-type]
    found = [
        LayerCollective("all_gather", "forward", "output", _times(layers * ways, "B H")),
        LayerCollective("reduce_scatter", "backward", "output", _times(layers * ways, "(B - N) H")),
    ]
    if isinstance(module, nn.LSTM):
        found.insert(1, LayerCollective("all_gather", "forward", "output", _times(layers * ways, "N H")))
    if layers > 1:
        found.append(LayerCollective("reduce_scatter", "backward", "output", _times((layers - 1) * ways, "B H")))
    return _with_input(*found, INPUT)


def cell_collectives(module: nn.Module) -> LayerCollectives:
    """Those of a cell, for each call."""
    return _with_input(CELL_OUTPUT, CELL_STATE, INPUT)


def layer_numbers(layers: int, batch_sizes: tuple[int, ...], ways: int, hidden: int) -> Mapping[tuple[str, str], int]:
    """See `ShardedModule.numbers_of_last_call`; of time steps with so many sequences, and an initial state without gradient."""
    rows, sequences = sum(batch_sizes), batch_sizes[0]
    later = sum(rows - first for first in (batch_sizes[0], batch_sizes[-1])[:ways])
    return {
        ("forward", _times(layers * ways, "B H")): layers * ways * rows * hidden,
        ("forward", _times(layers * ways, "N H")): layers * ways * sequences * hidden,
        ("backward", _times(layers * ways, "(B - N) H")): layers * later * hidden,
        ("backward", _times((layers - 1) * ways, "B H")): (layers - 1) * ways * rows * hidden,
    }


def cell_numbers(sequences: int, hidden: int, *, gathers: bool, state_has_gradient: bool) -> Mapping[tuple[str, str], int]:
    """See `ShardedModule.numbers_of_last_call`."""
    one = sequences * hidden
    return {("forward", CELL_OUTPUT.formula): one * gathers, ("backward", CELL_STATE.formula): one * state_has_gradient}


def _times(count: int, formula: str) -> str:
    return formula if count == 1 else f"{count} {formula}"


def _with_input(*collectives: LayerCollective) -> LayerCollectives:
    """Under sequence parallelism the parts of the input are gathered first."""
    return LayerCollectives(collectives, (LayerCollective("all_gather", "forward", "input", "B C_in"), *collectives))
