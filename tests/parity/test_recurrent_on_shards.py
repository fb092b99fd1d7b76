"""Recurrent layers cut by gates have the bits of the same shards in one process, and the numbers of the whole layers."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable
from typing import Any

import pytest
import torch
from helpers.networks_on_shards import (
    MIXED_PRECISIONS,
    SHARDS,
    check_division,
    check_gradients,
    check_layouts,
    check_numbers_of_whole,
    check_recomputation_and_zero_bubble,
    numbers,
    two_steps,
)
from helpers.on_shards import SEED, check, graph_of, sharded
from helpers.same_shards_of_recurrent import SameShardsRecurrent
from torch import Tensor, nn
from torch.nn.utils.rnn import pack_padded_sequence, pad_packed_sequence

from raypar.comm.collectives import ONE_PHASE_BYTES
from raypar.errors import ModelError, PlanError
from raypar.job import Job
from raypar.model.materialise import materialise
from raypar.model.tensor_parallel.compute_shard_layout import compute_shard_layout
from raypar.model.tensor_parallel.meta_check import check_shards_on_meta
from raypar.model.tensor_parallel.shard_traffic import layer_traffic
from raypar.plan import ParallelPlan
from raypar.planner.model_profile import LayerProfile, LinkProfile, ModelProfile
from raypar.worker.count_time_steps import count_time_steps

LENGTH, BATCH, WIDTH, HIDDEN = 5, 4, 5, 7
OPTIONS: dict[str, tuple[type[nn.RNNBase], dict[str, Any]]] = {
    "LSTM": (nn.LSTM, {}),
    "GRU": (nn.GRU, {}),
    "RNN": (nn.RNN, {}),
    "relu": (nn.RNN, {"nonlinearity": "relu", "bias": False}),
    "LSTM, two layers": (nn.LSTM, {"num_layers": 2, "dropout": 0.3, "batch_first": True}),
    "LSTM, both ways": (nn.LSTM, {"num_layers": 3, "bidirectional": True, "dropout": 0.2}),
    "GRU, both ways": (nn.GRU, {"num_layers": 2, "bidirectional": True, "bias": False, "batch_first": True}),
}


def squares(output: Tensor, target: Tensor) -> Tensor:
    return (output * output).sum() + output.sum()


def in_a_layer(module: nn.Module) -> nn.Sequential:
    return nn.Sequential(OrderedDict([("net", module)]))


def flat(values: Any) -> list[Tensor]:
    return [values] if isinstance(values, Tensor) else [tensor for each in values for tensor in flat(each)]


class Reads(nn.Module):
    """A recurrent layer, or one given a state, and a linear one; the state that comes out counts, too."""

    def __init__(self, kind: type[nn.RNNBase], options: dict[str, Any], given: bool = False) -> None:
        super().__init__()
        self.rnn = kind(WIDTH, HIDDEN, **options)
        layers = self.rnn.num_layers * (1 + self.rnn.bidirectional)
        self.first, self.cells = (nn.Parameter(numbers(layers, BATCH, HIDDEN, dtype=torch.float32)) for _ in range(2))
        self.out, self.given = nn.Linear(HIDDEN * (1 + self.rnn.bidirectional), 3), given

    def state(self) -> Any:
        if not self.given:
            return None
        return (self.first.sin(), self.cells.cos()) if isinstance(self.rnn, nn.LSTM) else self.first

    def forward(self, x: Tensor) -> Tensor:
        self.rnn.flatten_parameters()
        found, state = self.rnn(x, self.state())
        total = self.out(found).tanh()
        for place, each in enumerate(flat(state)):
            total = total + (each * (place + 2)).sin().sum()
        return total


def reads(name: str, **options: Any) -> Callable[[], nn.Sequential]:
    kind, more = OPTIONS[name]
    return lambda: in_a_layer(Reads(kind, more, **options))


def row_of(name: str) -> str:
    return "row/2" if OPTIONS[name][1].get("bidirectional") else "row"


@pytest.mark.part(6)
@pytest.mark.parametrize("styles", ["gates", "gates-column"])
@pytest.mark.parametrize("given", [False, True], ids=["zeros", "a state"])
@pytest.mark.parametrize("shards", SHARDS)
@pytest.mark.parametrize("name", OPTIONS)
def test_a_layer_by_gates_has_the_numbers_of_the_whole_one(name: str, shards: int, given: bool, styles: str):
    by_name = {"net.rnn": styles} | ({"net.out": row_of(name)} if styles == "gates-column" else {})
    shape = (BATCH, LENGTH, WIDTH) if OPTIONS[name][1].get("batch_first") else (LENGTH, BATCH, WIDTH)
    check(reads(name, given=given), squares, numbers(*shape), torch.zeros(1), shards, styles=by_name)


class First(nn.Module):
    """The output of a recurrent layer alone."""

    def __init__(self, kind: type[nn.RNNBase], options: dict[str, Any], width: int) -> None:
        super().__init__()
        self.rnn = kind(WIDTH, width, **options)

    def forward(self, x: Tensor) -> Tensor:
        found: Tensor = self.rnn(x)[0]
        return found


@pytest.mark.part(4)
@pytest.mark.parametrize("shards", [2, 3, 4])
@pytest.mark.parametrize("name", OPTIONS)
def test_a_layer_by_gates_has_the_bits_of_the_same_shards_written_down(name: str, shards: int):
    kind, options = OPTIONS[name][0], {k: v for k, v in OPTIONS[name][1].items() if k not in ("dropout", "batch_first")}
    graph = graph_of(lambda: in_a_layer(First(kind, options, 37)))
    x, y = numbers(LENGTH, BATCH, WIDTH, dtype=torch.float32), torch.zeros(1)
    layout = compute_shard_layout(graph, shards, {"net.rnn": "gates"})
    runs, _ = sharded(graph, layout, squares, x, y, dtype=torch.float32)
    plain = SameShardsRecurrent(materialise(graph, 0, 1, seed=SEED, dtype=torch.float32)["net"].rnn, shards)
    out = plain.forward(x).requires_grad_()
    squares(out, y).backward()
    of_input = plain.backward(out.grad)
    for shard, run in enumerate(runs):
        assert torch.equal(run.loss, squares(out, y)) and torch.equal(run.inputs, of_input)
        want = {f"net.rnn.{key}": gradient for key, gradient in plain.gradients[shard].items()}
        check_gradients(run, want)


class PackedNet(nn.Module):
    """Sequences of several lengths through recurrent layers; `order`: whether they are sorted in the module."""

    def __init__(self, kind: type[nn.RNNBase], options: dict[str, Any], given: bool) -> None:
        super().__init__()
        self.reads = Reads(kind, options | {"batch_first": False}, given)

    def forward(self, x: Tensor) -> Tensor:
        packed = pack_padded_sequence(x, torch.tensor([2, 5, 1, 2]), enforce_sorted=False)
        found, state = self.reads.rnn(packed, self.reads.state())
        out, _ = pad_packed_sequence(found)
        total = self.reads.out(out).tanh()
        for place, each in enumerate(flat(state)):
            total = total + (each * (place + 2)).sin().sum()
        return total


@pytest.mark.part(4)
@pytest.mark.parametrize("given", [False, True], ids=["zeros", "a state"])
@pytest.mark.parametrize("shards", SHARDS)
@pytest.mark.parametrize("name", OPTIONS)
def test_packed_sequences_have_the_numbers_of_the_whole_layer(name: str, shards: int, given: bool):
    kind, options = OPTIONS[name]
    make = lambda: in_a_layer(PackedNet(kind, options, given))  # noqa: E731
    check(make, squares, numbers(LENGTH, BATCH, WIDTH), torch.zeros(1), shards, styles={"net.reads.rnn": "gates"})


@pytest.mark.parametrize("shards", SHARDS)
def test_a_sequence_without_a_batch_has_the_numbers_of_the_whole_layer(shards: int):
    make = lambda: in_a_layer(First(nn.GRU, {"batch_first": True, "num_layers": 2}, HIDDEN))  # noqa: E731
    check(make, squares, numbers(LENGTH, WIDTH), torch.zeros(1), shards, styles={"net.rnn": "gates"})


class Normed(nn.Module):
    """A recurrent layer behind a norm, which sequence parallelism computes on parts of the sequence."""

    def __init__(self) -> None:
        super().__init__()
        self.norm, self.rnn = nn.LayerNorm(WIDTH), nn.GRU(WIDTH, HIDDEN, batch_first=True)

    def forward(self, x: Tensor) -> Tensor:
        found: Tensor = self.rnn(self.norm(x))[0]
        return found


@pytest.mark.parametrize("shards", SHARDS)
def test_under_sequence_parallelism_the_parts_of_the_sequence_are_gathered(shards: int):
    x = numbers(BATCH, LENGTH, WIDTH)
    check(lambda: in_a_layer(Normed()), squares, x, torch.zeros(1), shards, styles={"net.rnn": "gates"}, sequence=True)


class Steps(nn.Module):
    """A cell in a loop, whose hidden state is read by a linear layer."""

    def __init__(self, kind: type[nn.Module], bias: bool = True) -> None:
        super().__init__()
        self.cell, self.out = kind(WIDTH, HIDDEN, bias=bias), nn.Linear(HIDDEN, 3)

    def forward(self, x: Tensor) -> Tensor:
        state, total = None, torch.zeros((), dtype=x.dtype)
        for step in x:
            state = self.cell(step, state)
            hidden = state[0] if isinstance(self.cell, nn.LSTMCell) else state
            total = total + self.out(hidden).tanh()
        return total


@pytest.mark.part(2)
@pytest.mark.parametrize("style", ["gates", "gates-column"])
@pytest.mark.parametrize("shape", [(LENGTH, BATCH, WIDTH), (LENGTH, WIDTH)], ids=str)
@pytest.mark.parametrize("shards", SHARDS)
@pytest.mark.parametrize("kind", [nn.LSTMCell, nn.GRUCell, nn.RNNCell])
def test_cells_in_a_loop_have_the_numbers_of_whole_ones(kind: type[nn.Module], shards: int, shape: tuple[int, ...], style: str):
    styles = {"net.cell": style} | ({"net.out": "row"} if style == "gates-column" else {})
    make = lambda: in_a_layer(Steps(kind))  # noqa: E731
    check(make, squares, numbers(*shape), torch.zeros(1), shards, styles=styles)


# -- what travels --------------------------------------------------------------------------------------------------------------


def moved(make: Callable[[], nn.Sequential], x: Tensor, styles: dict[str, str], shards: int) -> tuple[dict[str, int], dict]:
    """By operation: bytes that `raypar plan` says, of which all shards together send so many, and the ledger's."""
    graph = graph_of(make)
    layout = compute_shard_layout(graph, shards, styles)
    said = dict.fromkeys(("all_gather", "all_reduce", "reduce_scatter"), 0)
    for row in layer_traffic(graph, layout, {"x": x}, dtype=torch.float64):
        phases = 1 if row.collective.operation != "all_reduce" else shards if row.nbytes <= ONE_PHASE_BYTES else 2
        said[row.collective.operation] += phases * (shards - 1) * row.nbytes
    _, ledgers = sharded(graph, layout, squares, x, torch.zeros(1))
    counted = [ledger.as_dict() for ledger in ledgers]
    return said, {name: sum(each.get(name, {}).get("sent", 0) for each in counted) for name in said}


class Fed(nn.Module):
    """Layers behind a linear one, so that their input has a gradient."""

    def __init__(self, kind: type[nn.RNNBase], options: dict[str, Any]) -> None:
        super().__init__()
        self.before, self.rnn = nn.Linear(WIDTH, WIDTH), kind(WIDTH, HIDDEN, **options)

    def forward(self, x: Tensor) -> Tensor:
        found: Tensor = self.rnn(self.before(x))[0]
        return found


@pytest.mark.parametrize("shards", SHARDS)
@pytest.mark.parametrize("name", OPTIONS)
def test_what_is_said_to_travel_is_what_the_ledger_counts(name: str, shards: int):
    kind, options = OPTIONS[name]
    x = numbers(LENGTH, BATCH, WIDTH)
    said, counted = moved(lambda: in_a_layer(Fed(kind, options)), x, {"net.rnn": "gates"}, shards)
    ways, layers, time, batch = 1 + options.get("bidirectional", False), options.get("num_layers", 1), LENGTH, BATCH
    if options.get("batch_first"):
        time, batch = batch, time
    states = layers * ways * batch * HIDDEN
    assert counted["all_gather"] == (shards - 1) * 8 * states * (time + (kind is nn.LSTM))
    assert counted["reduce_scatter"] == (shards - 1) * 8 * (states * (time - 1) + states // layers * (layers - 1) * time)
    assert said == counted


@pytest.mark.parametrize("kind", [nn.LSTMCell, nn.GRUCell])
def test_what_is_said_to_travel_of_cells_is_what_the_ledger_counts(kind: type[nn.Module]):
    said, counted = moved(lambda: in_a_layer(Steps(kind)), numbers(LENGTH, BATCH, WIDTH), {"net.cell": "gates"}, 2)
    assert counted["all_gather"] == 8 * LENGTH * BATCH * HIDDEN
    assert counted["all_reduce"] == 2 * 8 * ((LENGTH - 1) * BATCH * HIDDEN + LENGTH * BATCH * WIDTH)
    assert said["all_gather"] == counted["all_gather"]


def test_shards_are_predicted_to_wait_for_a_message_after_each_time_step():
    model = Network()
    assert count_time_steps([model], lambda: model(torch.zeros(4, 6, dtype=torch.int64))) == 2 * 6 + 6 + 6 + 3
    packed = PackedNet(nn.GRU, {"num_layers": 2}, False)
    assert count_time_steps([packed], lambda: packed(numbers(LENGTH, BATCH, WIDTH, dtype=torch.float32))) == 2 * LENGTH
    layers = tuple(LayerProfile("a", 4.0, 8.0, 4.0, 4.0, time_steps=steps) for steps in (0, 10))
    profile, shards = ModelProfile(layers, LinkProfile(0.5)), ParallelPlan.mesh(tp=2, layers=2).stages[0]
    sums_ms = 2 * 2 * 0.5 + 10 * 0.5
    assert profile.stage(shards).forward_ms == 4.0 + sums_ms and profile.stage(shards).backward_ms == 8.0 + sums_ms


# -- whole runs ----------------------------------------------------------------------------------------------------------------


class Words:
    """Sample i: ids of a sentence and its class."""

    def __len__(self) -> int:
        return 24

    def __getitem__(self, index: int) -> tuple[Tensor, Tensor]:
        generator = torch.Generator().manual_seed(index)
        return torch.randint(0, 30, (6,), generator=generator), torch.randint(0, 5, (), generator=generator)


class Network(nn.Module):
    """LSTMs with dropout between, a bidirectional GRU, and cells, whose state goes from one call to the next."""

    def __init__(self, p: float = 0.2) -> None:
        super().__init__()
        self.embedding = nn.Embedding(30, 8)
        self.lstm = nn.LSTM(8, 7, num_layers=2, dropout=p, batch_first=True)
        self.gru, self.middle = nn.GRU(7, 6, batch_first=True, bidirectional=True), nn.Linear(12, 9)
        self.rnn, self.after = nn.LSTM(9, 10, batch_first=True), nn.Linear(10, 8)
        self.cell, self.out = nn.LSTMCell(8, 9), nn.Linear(9, 5)

    def forward(self, ids: Tensor) -> Tensor:
        x, _ = self.lstm(self.embedding(ids))
        x, _ = self.gru(x)
        x, _ = self.rnn(self.middle(x).relu())
        x = self.after(x)
        state = self.cell(x[:, 0])
        state = self.cell(x[:, 1], state)
        hidden, _ = self.cell(x[:, 2], state)
        logits: Tensor = self.out(hidden)
        return logits


STYLES = {"lstm": "gates", "gru": "gates", "rnn": "gates-column", "after": "row", "cell": "gates"}


def job_of(model: object = Network, **given: object) -> Job:
    return two_steps(model, Words, STYLES, **given)


@pytest.mark.part(4)
@pytest.mark.parametrize("shards", SHARDS)
@pytest.mark.parametrize("mesh", [{"pp": 2}, {"pp": 4, "dp": 2}], ids=str)
def test_a_captured_network_has_the_same_bits_in_every_layout(mesh: dict[str, int], shards: int):
    job = job_of()
    check_layouts(job, shards, mesh)


@pytest.mark.part(3)
@pytest.mark.parametrize("division", [(4,), (2, 2), (1, 3)], ids=str)
def test_any_workers_have_the_bits_of_as_many_virtual_shards(division: tuple[int, ...]):
    check_division(job_of(), division)


@pytest.mark.ci
@MIXED_PRECISIONS
def test_bf16_recomputation_and_zero_bubble_have_the_same_bits_in_every_layout(precision: dict[str, str]):
    check_recomputation_and_zero_bubble(job_of(precision=precision))


@pytest.mark.ci
@pytest.mark.parametrize("shards", SHARDS)
def test_a_captured_network_has_the_numbers_of_the_whole_one(shards: int):
    job = job_of((Network, {"p": 0.0}), dtype="float64")
    check_numbers_of_whole(job, shards)


# -- what is refused -----------------------------------------------------------------------------------------------------------


class Strange(nn.LSTM):
    """A forward of its own."""

    def forward(self, x: Tensor, hx: Any = None) -> Any:  # type: ignore[override]
        return super().forward(-x, hx)


def layout_of(shards: int, style: str, make: Callable[[], nn.Module], styles: dict[str, str] | None = None) -> None:
    """Raises what the layout or the pass on the meta device raises."""
    graph = graph_of(lambda: in_a_layer(make()))
    layout = compute_shard_layout(graph, shards, {"net.rnn": style, **(styles or {})})
    x = numbers(LENGTH, BATCH, WIDTH, dtype=torch.float32)
    check_shards_on_meta(graph, layout, squares, {"x": x, "y": torch.zeros(1)}, "y")


class After(nn.Module):
    """A recurrent layer that reads what a linear one makes."""

    def __init__(self) -> None:
        super().__init__()
        self.before, self.rnn = nn.Linear(WIDTH, WIDTH), nn.LSTM(WIDTH, HIDDEN)

    def forward(self, x: Tensor) -> Tensor:
        found: Tensor = self.rnn(self.before(x))[0]
        return found


@pytest.mark.parametrize(
    "shards, style, make, styles, words, cure",
    [
        (5, "gates", lambda: First(nn.GRU, {}, 4), {}, "4 hidden units for 5 shards", "plan.shards <= 4"),
        (2, "gates", lambda: First(nn.LSTM, {"proj_size": 3}, 7), {}, "projects its hidden state", "style whole"),
        (2, "gates", lambda: First(Strange, {}, 7), {}, "does not fit net.rnn, a Strange", "their own forward"),
        (2, "column", lambda: First(nn.LSTM, {}, 7), {}, "style column does not fit net.rnn", "gates"),
        (2, "gates-column", lambda: First(nn.LSTM, {}, 7), {}, "cut along dim 2", "row layer"),
        (2, "gates", After, {"net.before": "column"}, "net.rnn needs all of its input", "gathered"),
    ],
)
def test_what_does_not_fit_is_refused_before_anything_is_started(shards, style, make, styles, words, cure):
    with pytest.raises((PlanError, ModelError)) as raised:
        layout_of(shards, style, make, styles)
    assert words in raised.value.what and cure in raised.value.cure, str(raised.value)


def test_a_linear_layer_by_gates_and_a_packed_sequence_in_parts_are_refused():
    with pytest.raises(PlanError, match=r"the style gates does not fit net.out, a Linear"):
        compute_shard_layout(graph_of(reads("LSTM")), 2, {"net.out": "gates"})
    make = lambda: in_a_layer(PackedNet(nn.LSTM, {}, False))  # noqa: E731
    with pytest.raises(ModelError, match="gets a packed sequence"):
        check(make, squares, numbers(LENGTH, BATCH, WIDTH), torch.zeros(1), 2, styles={"net.reads.rnn": "gates-column"})
