"""What raypar says that layers send over shards is what the ledger counts, in bytes."""

import pytest
import torch
import torch.nn.functional as F
from helpers import on_shards
from helpers.model_zoo import ids
from torch import nn

from examples import gpt, unet_shapes
from raypar.model.tensor_parallel.compute_shard_layout import compute_shard_layout
from raypar.model.tensor_parallel.shard_traffic import LayerTraffic, layer_traffic

B, S, V, WIDTH, DEPTH, HEADS = 2, 24, 48, 48, 2, 12


def sent_by_all(rows: list[LayerTraffic], shards: int) -> dict[str, int]:
    """By operation: the bytes that all shards together send, by the ring formula, which large values keep."""
    found: dict[str, int] = {}
    for row in rows:
        operation = row.collective.operation
        times = 2 if operation == "all_reduce" else 1
        found[operation] = found.get(operation, 0) + times * (shards - 1) * row.nbytes
    return found


@pytest.mark.parametrize("sequence", [False, True])
@pytest.mark.parametrize("shards", [2, 3])
def test_the_bytes_that_are_said_of_a_gpt_are_those_of_the_ledger(shards, sequence):
    graph = on_shards.graph_of(lambda: gpt.layers(V, WIDTH, DEPTH, HEADS, S))
    layout = compute_shard_layout(graph, shards)
    x = ids(B, S, V)
    rows = layer_traffic(graph, layout, {"x": x}, sequence=sequence, dtype=torch.float64)
    _, ledgers = on_shards.sharded(graph, layout, gpt.loss, x, ids(B, S, V), sequence=sequence)
    counted = [ledger.as_dict() for ledger in ledgers]
    found = {operation: sum(each[operation]["sent"] for each in counted) for operation in counted[0]}
    found["all_gather"] -= shards * (shards - 1) * 3 * B * S * 8  # the loss, of which no layer speaks
    if sequence:
        found.pop("all_reduce")  # the gradient of the positions, once a step
    assert {operation: n for operation, n in found.items() if n} == sent_by_all(rows, shards)
    assert {row.numbers for row in rows} == {B * S * WIDTH}
    assert {row.dimension for row in rows} == {"heads", "features", "vocabulary"}
    assert rows[0].layers == ("embed.token",) and rows[0].collective.formula == "B C"


@pytest.mark.parametrize("shards", [2, 3, 4])
def test_the_bytes_that_are_said_of_a_u_net_by_rows_are_those_of_the_ledger(shards):
    """Of 24 rows, 12 and 6: where four shards share them, rows travel for pooling, too."""
    graph = on_shards.graph_of(lambda: [("net", unet_shapes.UNet(4, 2).double())])
    layout = compute_shard_layout(graph, shards, {"*": "spatial"})
    x = torch.randn(2, 1, 24, 16, dtype=torch.float64)
    rows = layer_traffic(graph, layout, {"x": x}, dtype=torch.float64)
    target = torch.zeros(2, 24, 16, dtype=torch.long)
    _, ledgers = on_shards.sharded(graph, layout, unet_shapes.loss, x, target)
    assert {row.dimension for row in rows} == {"height"}
    of_norms = [row for row in rows if row.collective.value == "statistics"]
    rows = [row for row in rows if row not in of_norms]
    assert {row.collective.operation for row in rows} == {"all_to_all"}
    gathered = sum(ledger.sent["all_gather"] for ledger in ledgers) - (shards - 1) * 2 * 4 * 24 * 16 * 8  # the output's
    assert gathered == sent_by_all(of_norms, shards)["all_gather"]
    first = next(row for row in rows if row.layers == ("net.downs.0.0",))
    assert first.collective.formula == "h B C_in W" and first.numbers == 2 * (shards - 1) * 2 * 1 * 16
    of_images = 8 * 2 * (shards - 1) * 2 * 4 * 16  # the gradient of what no job asks for
    assert of_images + sum(row.nbytes for row in rows) == sum(ledger.sent["all_to_all"] for ledger in ledgers)
    assert any(row.collective.formula == "h B C W" for row in rows) == (shards == 4)


class Pools(nn.Module):
    """A convolution by rows, pooling, padding and a mean over rows."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.pool = nn.Conv2d(2, 4, 3, padding=1), nn.MaxPool2d(3, 2, 1)
        self.double()

    def forward(self, x):
        return self.pool(F.pad(self.first(x), (0, 0, 2, 0), "reflect")).mean((2, 3))


def test_rows_that_pooling_and_padding_fetch_and_means_over_rows_are_spoken_of():
    graph = on_shards.graph_of(lambda: [("net", Pools())])
    layout = compute_shard_layout(graph, 2, {"*.first": "spatial"}, infer=False)
    x = torch.randn(3, 2, 8, 6, dtype=torch.float64)
    rows = layer_traffic(graph, layout, {"x": x}, dtype=torch.float64)
    found = [(row.layers[0], row.collective.operation, row.collective.direction, row.collective.formula) for row in rows]
    assert found == [
        ("net.first", "all_to_all", "forward", "h B C_in W"),
        *[("net", "all_to_all", direction, "h B C W") for direction in ("forward", "backward")],
        *[("net.pool", "all_to_all", direction, "h B C W") for direction in ("forward", "backward")],
        ("net", "all_reduce", "forward", "B C"),
    ]
    assert {row.dimension for row in rows} == {"height"} and rows[-1].numbers == 3 * 4
    _, ledgers = on_shards.sharded(graph, layout, F.mse_loss, x, torch.zeros(3, 4, dtype=torch.float64))
    of_images = 8 * 2 * 3 * 4 * 6
    assert of_images + sum(row.nbytes for row in rows[:-1]) == sum(ledger.sent["all_to_all"] for ledger in ledgers)


class Norms(nn.Module):
    """A convolution by rows, then a norm of each kind."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Conv2d(2, 4, 3, padding=1)
        self.norms = nn.Sequential(
            nn.BatchNorm2d(4), nn.GroupNorm(2, 4), nn.InstanceNorm2d(4, affine=True), nn.LayerNorm((4, 8, 6)), nn.LayerNorm(6)
        )
        self.double()

    def forward(self, x):
        return self.norms(self.first(x))


def test_norms_on_rows_send_their_statistics_and_the_data_has_no_gradient_of_which_any_is_spoken():
    graph = on_shards.graph_of(lambda: [("net", Norms())])
    layout = compute_shard_layout(graph, 2, {"*.first": "spatial"}, infer=False)
    rows = layer_traffic(graph, layout, {"x": torch.randn(3, 2, 8, 6, dtype=torch.float64)}, dtype=torch.float64)
    assert [(row.layers[0], row.collective.formula, row.numbers) for row in rows] == [
        ("net.first", "h B C_in W", 2 * 3 * 2 * 6),
        *[
            (f"net.norms.{place}", formula, numbers)
            for place, (of_one, count) in enumerate([("C", 4), ("B G", 3 * 2), ("B C", 3 * 4), ("B", 3)])
            for formula, numbers in ((f"T (2 {of_one} + 1)", 2 * (2 * count + 1)), (f"2 {of_one}", 2 * count))
        ],
    ]
    assert all(row.dimension == "height" and row.nbytes == row.numbers * 8 for row in rows)
    samples = layer_traffic(graph, compute_shard_layout(graph, 2, None, {"samples": "shards"}), {"x": torch.randn(4, 2, 8, 6)})
    assert [(row.layers, row.dimension, row.nbytes) for row in samples] == [
        (("net.norms.0",), "samples", 2 * 9 * 8),
        (("net.norms.0",), "samples", 8 * 8),
    ]


@pytest.mark.parametrize(
    ("first", "style", "backward"),
    [(nn.Conv2d, "column", 0), (nn.Conv2d, "gathered", 0), (nn.Conv2d, "spatial", 0), (nn.ConvTranspose2d, "spatial", 1)],
)
def test_where_sizes_are_not_known_nothing_is_said_of_a_gradient_of_the_data(first, style, backward):
    """A transposed convolution makes the gradient of its weight of the rows that travel backward, too."""
    graph = on_shards.graph_of(lambda: [("first", first(4, 4, 3)), ("second", first(4, 4, 3))])
    rows = layer_traffic(graph, compute_shard_layout(graph, 2, {"*": style}, infer=False), None)
    found = [[row.collective.direction for row in rows if row.layers == (name,)] for name in ("first", "second")]
    assert [each.count("backward") for each in found] == [backward, 1]
    assert found[0].count("forward") == found[1].count("forward")
    nested = on_shards.graph_of(lambda: [("net", nn.Sequential(nn.Sequential(first(4, 4, 3)), first(4, 4, 3)))])
    rows = layer_traffic(nested, compute_shard_layout(nested, 2, {"*": style}, infer=False), None)
    assert found == [[row.collective.direction for row in rows if row.layers == (f"net.{name}",)] for name in ("0.0", "1")]


class Siblings(nn.Module):
    """Queries read one value, keys and values another; then a gated MLP, which is called twice."""

    num_heads = 4

    def __init__(self) -> None:
        super().__init__()
        self.q_proj, self.k_proj, self.v_proj, self.o_proj = (nn.Linear(64, 64) for _ in range(4))
        self.gate_proj, self.up_proj, self.down_proj = nn.Linear(64, 96), nn.Linear(64, 96), nn.Linear(96, 64)
        self.before = nn.Linear(64, 64)
        self.double()

    def forward(self, x):
        x, other = self.before(x), self.before(x.flip(1))
        q, k, v = (y.unflatten(-1, (4, 16)).transpose(1, 2) for y in (self.q_proj(x), self.k_proj(other), self.v_proj(other)))
        x = self.o_proj(F.scaled_dot_product_attention(q, k, v).transpose(1, 2).flatten(2))
        for _ in range(2):
            x = x + self.down_proj(F.silu(self.gate_proj(x)) * self.up_proj(x))
        return x


def test_layers_that_read_the_same_value_share_what_travels():
    graph = on_shards.graph_of(lambda: [("a", Siblings())])
    layout = compute_shard_layout(graph, 2)
    x, y = (torch.randn(4, 32, 64, dtype=torch.float64) for _ in range(2))
    rows = layer_traffic(graph, layout, {"x": x}, dtype=torch.float64)
    found = [([n.removeprefix("a.") for n in row.layers], row.collective.value, row.numbers // x.numel()) for row in rows]
    assert found == [
        (["q_proj"], "input", 1),
        (["k_proj", "v_proj"], "input", 1),
        (["o_proj"], "output", 1),
        (["gate_proj", "up_proj"], "input", 2),
        (["down_proj"], "output", 2),
    ]
    _, ledgers = on_shards.sharded(graph, layout, F.mse_loss, x, y)
    assert sum(ledger.as_dict()["all_reduce"]["sent"] for ledger in ledgers) == sent_by_all(rows, 2)["all_reduce"]


def test_convolutions_and_what_reads_the_data_itself():
    class Images(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.first, self.second = nn.Conv2d(3, 16, 3), nn.Conv2d(16, 8, 3, stride=2)
            self.third, self.fourth = nn.Conv2d(8, 6, 3), nn.Conv2d(8, 6, 3)
            self.double()

        def forward(self, x):
            x = F.relu(self.second(F.relu(self.first(x))))
            return self.third(x) + self.fourth(x)

    graph = on_shards.graph_of(lambda: [("a", Images())])
    styles = {"a.first": "column", "a.second": "row", "a.third": "gathered", "a.fourth": "gathered"}
    layout = compute_shard_layout(graph, 2, styles, infer=False)
    x = torch.randn(4, 3, 32, 32, dtype=torch.float64)
    rows = layer_traffic(graph, layout, {"x": x}, dtype=torch.float64)
    assert [(row.layers[0], row.dimension, row.collective.operation, row.numbers) for row in rows] == [
        ("a.second", "channels", "all_reduce", 4 * 8 * 14 * 14),  # the data has no gradient
        ("a.third", "channels", "all_gather", 4 * 6 * 12 * 12),
        ("a.third", "channels", "all_reduce", 4 * 8 * 14 * 14),
        ("a.fourth", "channels", "all_gather", 4 * 6 * 12 * 12),
        ("a.fourth", "channels", "all_reduce", 4 * 8 * 14 * 14),  # convolutions have a sum each
    ]
    _, ledgers = on_shards.sharded(graph, layout, F.mse_loss, x, torch.randn(4, 6, 12, 12, dtype=torch.float64))
    counted = [ledger.as_dict() for ledger in ledgers]
    found = {operation: sum(each[operation]["sent"] for each in counted) for operation in ("all_reduce", "all_gather")}
    assert found == sent_by_all(layer_traffic(graph, layout, {"x": x.requires_grad_()}, dtype=torch.float64), 2)
    unknown = layer_traffic(graph, layout, None)
    assert [row.collective.formula for row in unknown] == ["B C_out H W", *["B C_out H W", "B C_in H W"] * 2]
    assert all(row.numbers is None for row in unknown)
