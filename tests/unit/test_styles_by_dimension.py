"""A whole model's layout over shards, stated by the names of dimensions (`plan.layout`)."""

import pytest
import torch
import torch.nn.functional as F
from helpers import on_shards
from helpers.shard_grid import Cell
from helpers.shard_grid import graph as gpt_graph
from torch import nn

from raypar.errors import PlanError
from raypar.job.contract import contract_of_job
from raypar.job.plan_section import PlanConfig
from raypar.model.tensor_parallel.compute_shard_layout import compute_shard_layout, make_model_outline_with_layouts

ALL = {"heads": "shards", "features": "shards", "vocabulary": "shards"}


def styles(layout: dict[str, str], given: dict[str, str] | None = None, shards: int = 2) -> dict[str, str]:
    return dict(compute_shard_layout(gpt_graph("gpt"), shards, given, layout).styles)


@pytest.mark.parametrize("shards", [1, 2, 3])
def test_a_layout_of_all_dimensions_is_what_raypar_finds_by_itself(shards):
    graph = gpt_graph("gpt")
    assert compute_shard_layout(graph, shards, None, ALL) == compute_shard_layout(graph, shards)
    found = make_model_outline_with_layouts(graph, (2,), {}, {"heads": "shards"})
    assert found.layouts[2] is compute_shard_layout(graph, 2, {}, {"heads": "shards"}), "computed once, and told to all"


def test_layers_are_divided_along_the_dimensions_that_are_named_and_no_others():
    every = styles(ALL)
    by_name = {
        "heads": {"qkv", "project"},
        "features": {"up", "down"},
        "vocabulary": {"token", "logits"},
    }
    for dimension, names in by_name.items():
        found = styles({dimension: "shards"})
        assert found == {name: style for name, style in every.items() if name.rpartition(".")[2] in names} != {}
        assert styles(ALL | {dimension: "whole"}) == {n: s for n, s in every.items() if n not in found}
    assert styles({"heads": "whole"}) == {}


def test_height_and_width_divide_all_convolutions():
    graph = on_shards.graph_of(lambda: [("net", nn.Sequential(nn.Conv2d(1, 4, 3), nn.BatchNorm2d(4), nn.Conv2d(4, 2, 1)))])
    for dimension in ("height", "width"):
        found = compute_shard_layout(graph, 2, None, {dimension: "shards"}).styles
        assert found == {"net.0": f"spatial:{dimension}", "net.2": f"spatial:{dimension}"}
    with pytest.raises(PlanError, match=r"names 'depth', a dimension that no layer has"):
        compute_shard_layout(graph, 2, None, {"depth": "shards"})


def test_patterns_of_layers_overrule_the_layout():
    found = styles({"features": "shards"}, {"block0.*": "whole", "embed.token": "vocabulary", "*.logits": "vocabulary"})
    assert "block0.up" not in found and found["block1.up"] == "column" and found["embed.token"] == "vocabulary"
    assert "block1.qkv" not in found


@pytest.mark.parametrize(
    ("layout", "says"),
    [
        ({"head": "shards"}, r"plan\.layout names 'head', a dimension that no layer has \(nearest: heads\)"),
        ({"heads": "shards", "vocab": "whole"}, r"names 'vocab', a dimension that no layer has \(nearest: vocabulary\)"),
        ({"qqq": "shards"}, r"names 'qqq', a dimension that no layer has\n"),
        ({"channels": "shards"}, r"names 'channels', a dimension that no layer has"),
    ],
)
def test_a_dimension_that_no_layer_has_is_an_error_with_the_nearest_name(layout, says):
    with pytest.raises(PlanError, match=says) as error:
        styles(layout)
    assert error.value.cure == "the dimensions of this model are features, heads, samples, vocabulary"


class Images(nn.Module):
    """Convolutions, one with groups, then dense layers."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Conv2d(3, 8, 3, padding=1), nn.Conv2d(8, 6, 3)
        self.depthwise, self.norm = nn.Conv2d(6, 6, 3, groups=6), nn.GroupNorm(2, 6)
        self.up, self.down = nn.Linear(6, 10), nn.Linear(10, 4)
        self.double()

    def forward(self, x):
        x = self.norm(self.depthwise(F.relu(self.second(F.relu(self.first(x))))))
        return self.down(F.relu(self.up(x.mean((-2, -1)))))


def images():
    return on_shards.graph_of(lambda: [("a", Images())])


def test_convolutions_are_divided_by_channels_and_dense_layers_by_features():
    layout = {"channels": "shards", "features": "shards"}
    found = compute_shard_layout(images(), 2, None, layout)
    assert found.styles == {"a.first": "gathered", "a.second": "gathered", "a.up": "column", "a.down": "row"}
    assert compute_shard_layout(images(), 2, {"a.first": "column", "a.second": "row"}, layout).styles["a.first"] == "column"
    assert compute_shard_layout(images(), 2).styles.keys() == {"a.up", "a.down"}, "without a layout convolutions stay whole"


def test_recurrent_layers_are_divided_by_hidden_units():
    graph = on_shards.graph_of(lambda: [("a", nn.LSTM(4, 6, num_layers=2, bidirectional=True, dtype=torch.float64))])
    found = compute_shard_layout(graph, 2, None, {"hidden": "shards"})
    assert found.styles == {"a": "gates"} and compute_shard_layout(graph, 2).styles == {}
    cut = found.cuts["a.weight_hh_l1_reverse"]
    assert cut.whole_size == 24 and cut.indices_by_shard[1] == ((3, 6), (9, 12), (15, 18), (21, 24))
    assert set(found.cuts.values()) == {cut} and [share.compute for share in found.costs["a"]] == [0.5, 0.5]


class Rows(nn.Module):
    """A stride, norms, a transposed convolution, and one of another number of dims."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.norm = nn.Conv2d(3, 8, 3, padding=1), nn.BatchNorm2d(8)
        self.second, self.last = nn.Conv2d(8, 8, 2, stride=2), nn.ConvTranspose2d(8, 2, 2, stride=2)
        self.double()

    def forward(self, x):
        return self.last(F.relu(self.second(F.relu(self.norm(self.first(x))))))


def test_what_is_divided_by_height_or_width_leaves_the_model_whole_and_no_layer_is_divided_twice():
    graph = on_shards.graph_of(lambda: [("a", Rows())])
    for axis in ("height", "width"):
        layout = compute_shard_layout(graph, 2, None, {axis: "shards"})
        assert layout.styles == {f"a.{name}": f"spatial:{axis}" for name in ("first", "second", "last")}
        x, y = (torch.randn(2, channels, 8, 12, dtype=torch.float64) for channels in (3, 2))
        whole = on_shards.whole(graph, F.mse_loss, x, y)
        runs, _ = on_shards.sharded(graph, layout, F.mse_loss, x, y)
        assert max(on_shards.errors(runs, whole, layout).values()) <= 1e-12
    by_hand = compute_shard_layout(graph, 2, {"a.last": "spatial-gathered"}, {"height": "shards"})
    assert by_hand.styles["a.last"] == "spatial-gathered" and by_hand.styles["a.first"] == "spatial:height"
    with pytest.raises(PlanError, match=r"divides channels and height, and a\.first has both"):
        compute_shard_layout(graph, 2, None, {"channels": "shards", "height": "shards"})
    with pytest.raises(PlanError, match=r"names 'hight', a dimension that no layer has \(nearest: height\)") as error:
        compute_shard_layout(graph, 2, None, {"hight": "shards"})
    assert error.value.cure == "the dimensions of this model are channels, height, samples, width"


def test_a_dimension_along_which_nothing_can_be_divided_by_itself_is_an_error():
    with pytest.raises(PlanError, match=r"plan\.layout divides groups, and raypar finds no layer") as error:
        compute_shard_layout(images(), 2, None, {"groups": "shards"})
    assert "such as a.depthwise" in error.value.cure
    given, layout = {"a.second": "column", "a.depthwise": "groups"}, {"groups": "shards", "channels": "shards"}
    assert compute_shard_layout(images(), 2, given, layout).styles["a.first"] == "gathered"


def test_the_layout_is_a_key_of_the_job_that_decides_bits_where_it_is_given():
    job = Cell("gpt", "1f1b", (1,), (1,), 2).job
    assert "layout" not in contract_of_job(job)
    told = job.replace(plan=PlanConfig(shards=2, layout={"vocabulary": "shards", "heads": "whole"}))
    assert contract_of_job(told)["layout"] == {"heads": "whole", "vocabulary": "shards"}
    assert told.for_workers().layout == (("vocabulary", "shards"), ("heads", "whole"))
