"""What a sharding style is: five answers about a layer; and what it takes to add one: a class and a name."""

import pickle
import subprocess
import sys
from collections import Counter
from dataclasses import dataclass
from typing import ClassVar

import pytest
import torch
import torch.nn.functional as F
from helpers import on_shards
from helpers.shard_grid import DEPTH, Cell
from helpers.shard_grid import graph as gpt_graph
from torch import nn

from raypar.errors import ModelError, PlanError
from raypar.model.layer_skeletons import parameter_shapes
from raypar.model.tensor_parallel.build_shard_modules import materialise_shard, shard_slice_of
from raypar.model.tensor_parallel.compute_shard_layout import (
    compute_shard_layout,
    held_elements_by_layer,
    make_model_outline_with_layouts,
)
from raypar.model.tensor_parallel.linear import ColumnLinear
from raypar.model.tensor_parallel.local_part_layout import LocalPartLayout, sequence_part_layout
from raypar.model.tensor_parallel.meta_check import check_shards_on_meta
from raypar.model.tensor_parallel.shard_group import ShardedModule
from raypar.model.tensor_parallel.sharded_value import ShardedValue
from raypar.model.tensor_parallel.styles.registry import STYLES, parse_style
from raypar.model.tensor_parallel.styles.style import ShardingStyle, share_evenly
from raypar.plan import Microbatches, MicrobatchRouting, ParallelPlan
from raypar.plan.shard_ranges import TensorCut, count_indices, even_ranges_by_shard, merge_ranges
from raypar.plan.tensor_parallel_layout import LayerCollectives, TensorParallelLayout, shard_slice_shape
from raypar.schedule import registry as schedules
from raypar.schedule.program_assignment import assign_programs_to_ranks
from raypar.worker import worker_core
from raypar.worker.run_in_one_process import OneProcessRun

HEADS, WIDTH = 4, 8


class Attention(nn.Module):
    """What says how many heads there are."""

    num_heads, num_kv_heads = HEADS, 2


def linear(fan_in: int, fan_out: int) -> nn.Linear:
    return nn.Linear(fan_in, fan_out, dtype=torch.float64)


class Experts(nn.Module):
    """The experts of a mixture as `transformers` has them, here of the mean of all."""

    def __init__(self) -> None:
        super().__init__()
        self.gate_up_proj = nn.Parameter(torch.randn(3, 10, WIDTH, dtype=torch.float64))
        self.down_proj = nn.Parameter(torch.randn(3, WIDTH, 5, dtype=torch.float64))

    def forward(self, x):
        gate, up = torch.einsum("bsw,eiw->ebsi", x, self.gate_up_proj).chunk(2, -1)
        return torch.einsum("ebsi,ewi->bsw", F.silu(gate) * up, self.down_proj)


FITTING = {
    "column": linear(WIDTH, 12),
    "row": linear(12, WIDTH),
    "groups": nn.Conv1d(WIDTH, 12, 3, groups=4, dtype=torch.float64),
    "spatial": nn.Conv1d(WIDTH, 12, 3, padding=1, dtype=torch.float64),
    "spatial-gathered": nn.Conv1d(WIDTH, 12, 3, padding=1, dtype=torch.float64),
    "heads": linear(WIDTH, HEADS * 3),
    "kv-heads": linear(WIDTH, 2 * 3),
    "kv": linear(WIDTH, 2 * 2 * 3),
    "qkv": linear(WIDTH, (HEADS + 2 * 2) * 3),
    "qkv-interleaved": linear(WIDTH, 3 * HEADS * 3),
    "heads-row": linear(HEADS * 3, WIDTH),
    "attention": nn.MultiheadAttention(WIDTH, HEADS, batch_first=True, dtype=torch.float64),
    "gates": nn.GRU(WIDTH, 12, batch_first=True, dtype=torch.float64),
    "gates-column": nn.GRU(WIDTH, 12, batch_first=True, dtype=torch.float64),
    "experts": Experts(),
    "vocabulary": nn.Embedding(13, WIDTH, dtype=torch.float64),
    "gathered": linear(WIDTH, 12),
    "whole": nn.LayerNorm(WIDTH, dtype=torch.float64),
}
"""A module that each style fits."""


def style_for(name: str) -> ShardingStyle:
    """The style as a plan gets it: with the numbers of heads that the module around the layer says."""
    around = Attention()
    if name == "qkv-interleaved":
        around.num_kv_heads = HEADS
    return parse_style(name).complete_options("a.layer", [around])


def test_every_registered_style_is_in_this_test():
    assert list(STYLES) == list(FITTING)
    for name, style in STYLES.items():
        assert style.name == name and style.summary and style.__doc__ != ShardingStyle.__doc__


@pytest.mark.parametrize("name", FITTING)
def test_a_style_says_what_it_fits_and_why_not(name):
    style = style_for(name)
    style.check_fits("a.layer", FITTING[name])
    if name != "whole":
        others: tuple[nn.Module, ...] = (nn.LayerNorm(4), nn.Conv2d(1, 1, 1))
        if name in ("column", "row", "gathered"):
            others = (nn.LayerNorm(4),)
        elif style.divides_values:
            others = (nn.Linear(4, 4), nn.Embedding(4, 4))
        for other in others:
            with pytest.raises(PlanError, match=f"the style {style} does not fit a.layer, a {type(other).__name__}"):
                style.check_fits("a.layer", other)


@pytest.mark.parametrize("shards", [1, 2, 3, 4])
@pytest.mark.parametrize("name", FITTING)
def test_a_styles_slices_cover_each_parameter_and_every_index_has_one_owner(name, shards):
    slices = style_for(name).slices("a.layer", FITTING[name], shards)
    assert slices.keys() <= dict(FITTING[name].named_parameters()).keys()
    assert bool(slices) == (name != "whole" and not style_for(name).divides_values)
    for key, cut in slices.items():
        assert FITTING[name].get_parameter(key).shape[cut.dim] == cut.whole_size
        assert len(cut.indices_by_shard) == shards and all(cut.indices_by_shard)
        owned = [cut.owned(shard) for shard in range(shards)]
        assert merge_ranges(ranges for spans in owned for ranges in spans) == ((0, cut.whole_size),)
        assert sum(map(count_indices, owned)) == cut.whole_size


@pytest.mark.parametrize("shards", [1, 2, 3, 4])
@pytest.mark.parametrize("name", FITTING)
def test_a_styles_cost_is_the_share_of_work_and_of_bytes(name, shards):
    module, style = FITTING[name], style_for(name)
    costs, slices = style.cost("a.layer", module, shards), style.slices("a.layer", module, shards)
    elements = {key: p.numel() for key, p in module.named_parameters()}
    for shard, cost in enumerate(costs):
        held = {
            key: elements[key] // cut.whole_size * count_indices(cut.indices_by_shard[shard]) for key, cut in slices.items()
        }
        assert cost.bytes == pytest.approx(sum({**elements, **held}.values()) / sum(elements.values()))
        assert 0 < cost.bytes <= 1 and 0 < cost.compute <= 1
    assert len(costs) == shards
    if name in ("whole", "vocabulary"):  # every shard looks up a row for each id
        assert {cost.compute for cost in costs} == {1.0}
    elif name not in ("kv-heads", "kv", "qkv"):  # shards may need the same key head
        assert sum(cost.compute for cost in costs) == pytest.approx(1)


class Model(nn.Module):
    """Reads [2, 6, 8], or ids [2, 6]; has the layer under test with the one that it works with, and returns a whole value."""

    def __init__(self, name: str) -> None:
        super().__init__()
        self.name, self.layer = name, FITTING[name]
        self.first, self.up, self.down = linear(WIDTH, WIDTH), linear(WIDTH, 12), linear(12, WIDTH)

    def forward(self, x):
        if self.name == "vocabulary":
            return self.layer(x)
        if self.name == "attention":
            x = self.first(x)
            return self.layer(x, x, x, need_weights=False)[0]
        x = self.first(x)  # so that the layer's input has a gradient
        if self.name in ("row", "heads-row"):
            return self.layer(self.up(x))
        return self.down(self.layer(x)) if self.name in ("column", "heads") else self.layer(x)


PARTNERS = {
    "column": {"a.down": "row"},
    "row": {"a.up": "column"},
    "heads": {"a.down": "heads-row:4"},
    "heads-row": {"a.up": "heads:4"},
    "attention": {},
    "experts": {},
    "vocabulary": {},
    "gathered": {},
}


@pytest.mark.parametrize("sequence", [False, True], ids=["plain", "sequence"])
@pytest.mark.parametrize("name", PARTNERS)
def test_what_a_style_says_it_sends_is_what_the_ledger_counts(name, sequence):
    graph = on_shards.graph_of(lambda: [("a", Model(name))])
    layout = compute_shard_layout(graph, 2, {"a.layer": str(style_for(name)), **PARTNERS[name]}, infer=False)
    x = torch.arange(12).view(2, 6) if name == "vocabulary" else torch.randn(2, 6, WIDTH, dtype=torch.float64)

    def work(group):
        modules = materialise_shard(graph, 0, 1, layout=layout, group=group, seed=1, dtype=torch.float64)
        modules["a"](x).sum().backward()

    if sequence and name == "experts":
        with pytest.raises(ModelError, match=r"a module of experts of a value .* \(the sequence"):
            on_shards.on_shards(2, work, sequence=sequence)
        return
    _, ledgers = on_shards.on_shards(2, work, sequence=sequence)
    said = Counter(
        collective.operation
        for traffic in layout.traffic.values()
        for collective in (traffic.sequence if sequence else traffic.plain)
    )
    assert layout.operations(sequence=sequence) == said.keys()
    if sequence and name != "gathered":  # the sequence's parts are gathered where the value leaves the stage
        said["all_gather"] += 1
    for ledger in ledgers:
        assert {operation: row["messages"] for operation, row in ledger.as_dict().items()} == said


# -- a style that raypar does not have -----------------------------------------------------------------------------------


class Scale(nn.Module):
    """y = w x, feature by feature."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.randn(width, dtype=torch.float64))

    def forward(self, x):
        return x * self.weight


class ShardedScale(ShardedModule):
    """The same on this shard's features."""

    def __init__(self, scale: Scale, name, group) -> None:
        super().__init__(name, group)
        self.weight = scale.weight

    def forward(self, x: ShardedValue) -> ShardedValue:
        return x.like(x.local * self.weight)


@dataclass(frozen=True, slots=True)
class ScaleStyle(ShardingStyle):
    """A factor for each feature, cut as the features are."""

    name: ClassVar[str] = "scale"
    summary: ClassVar[str] = "Scale: cut by features"

    def check_fits(self, name, module):
        if not isinstance(module, Scale):
            raise PlanError(f"{name} is no Scale", cure="give it another style")

    def slices(self, name, module, shards):
        width = len(module.weight)
        return {"weight": TensorCut(0, width, share_evenly(name, "features", width, shards))}

    def build(self, name, module, layout, group):
        return ShardedScale(module, name, group)

    def collectives(self, module):
        return LayerCollectives()


def scaled_mlp() -> nn.Module:
    class Mlp(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.up, self.scale, self.down = linear(WIDTH, 10), Scale(10), linear(10, WIDTH)

        def forward(self, x):
            return self.down(F.gelu(self.scale(self.up(x))))

    return Mlp()


@pytest.mark.parametrize("shards", [2, 3])
def test_a_new_style_is_a_class_and_its_name(monkeypatch, shards):
    """It fits, cuts, builds, and a training step has the loss, gradients and new weights of the whole model."""
    with pytest.raises(PlanError, match="'scale' is no style"):
        parse_style("scale")
    monkeypatch.setitem(STYLES, ScaleStyle.name, ScaleStyle)
    graph = on_shards.graph_of(lambda: [("a", scaled_mlp()), ("b", scaled_mlp())])
    layout = compute_shard_layout(graph, shards, {"*.scale": "scale"})
    assert layout.styles == {f"{m}.{n}": s for m in "ab" for n, s in {"up": "column", "scale": "scale", "down": "row"}.items()}
    x, y = (torch.randn(2, 3, WIDTH, dtype=torch.float64) for _ in range(2))
    assert check_shards_on_meta(graph, layout, F.mse_loss, {"x": x, "y": y}, "y", dtype=torch.float64)

    whole = on_shards.whole(graph, F.mse_loss, x, y)
    runs, _ = on_shards.sharded(graph, layout, F.mse_loss, x, y)
    assert max(on_shards.errors(runs, whole, layout).values()) <= 1e-12
    for shard, run in enumerate(runs):
        for name, before in whole.parameters.items():
            want = shard_slice_of(layout, name, before - 0.1 * whole.gradients[name], shard)
            torch.testing.assert_close(run.parameters[name] - 0.1 * run.gradients[name], want, rtol=0, atol=1e-12)
    with pytest.raises(PlanError, match=r"a\.up is no Scale"):
        compute_shard_layout(graph, shards, {"a.up": "scale"})


# -- the layout as data --------------------------------------------------------------------------------------------------


def test_a_layout_names_styles_as_text_and_counts_what_shards_hold():
    graph = on_shards.graph_of(lambda: [("a", scaled_mlp())])
    layout = compute_shard_layout(graph, 3)
    assert layout.styles == {"a.up": "column", "a.down": "row"} == {n: str(parse_style(s)) for n, s in layout.styles.items()}
    shapes = parameter_shapes(graph)
    for shard in range(3):
        want = sum(
            torch.Size(shard_slice_shape(layout.cuts[n], s, shard)).numel() if n in layout.cuts else s.numel()
            for n, s in shapes.items()
        )
        assert held_elements_by_layer(graph, layout, shard) == (want,)
        assert want == sum(layout.elements_on_shard(n, s.numel(), shard) for n, s in shapes.items())
    assert {name: len(costs) for name, costs in layout.costs.items()} == {"a.up": 3, "a.down": 3}


def test_a_layout_is_data_that_is_read_without_torch(tmp_path):
    layout = compute_shard_layout(on_shards.graph_of(lambda: [("a", scaled_mlp())]), 2)
    file = tmp_path / "layout.pickle"
    file.write_bytes(pickle.dumps(layout))
    code = (
        "import pickle, sys; layout = pickle.load(open(sys.argv[1], 'rb'));"
        "print(layout.styles['a.up'], layout.cuts['a.up.weight'].indices_by_shard,"
        " layout.costs['a.up'][0].compute, 'torch' in sys.modules)"
    )
    found = subprocess.run([sys.executable, "-c", code, str(file)], capture_output=True, text=True, timeout=60, check=True)
    assert found.stdout.strip() == "column (((0, 5),), ((5, 10),)) 0.5 False"
    assert isinstance(layout, TensorParallelLayout) and pickle.loads(pickle.dumps(layout)) == layout


def test_the_layouts_of_all_numbers_of_shards_travel_in_the_outline_to_every_assignment():
    graph = on_shards.graph_of(lambda: [("a", scaled_mlp()), ("b", scaled_mlp())])
    outline = make_model_outline_with_layouts(graph, (4, 2, 1), {"a.*": "whole"})
    assert outline.layouts == {count: compute_shard_layout(graph, count, {"a.*": "whole"}) for count in (1, 2, 4)}
    assert outline.shardings == {count: outline.layouts[count].cuts for count in (2, 4)}
    assert outline.layouts[2] is compute_shard_layout(graph, 2, {"a.*": "whole"}), "computed once"
    plan, batches = ParallelPlan.mesh(tp=2, layers=2), Microbatches(2, 2, 4)
    orders = schedules.build_schedule("1f1b", MicrobatchRouting(plan, batches))
    for part in assign_programs_to_ranks(orders, plan, outline.crossing(plan), batches, layouts=outline.layouts):
        assert part.layouts == outline.layouts
    assert not make_model_outline_with_layouts(graph, (1,), {}).layouts


def test_workers_do_not_compute_the_layout_that_they_are_told(monkeypatch):
    cell = Cell("gpt", "1f1b", (1,), (1,), 2)
    monkeypatch.setattr(worker_core, "compute_shard_layout", None)
    with OneProcessRun(cell.job, ParallelPlan.mesh(tp=2, layers=DEPTH + 2), "1f1b", graph=gpt_graph("gpt")) as job:
        assert all(core.layout(2).styles["block0.up"] == "column" and core.layout(1).cuts for core in job.cores)


# -- the axis of a part --------------------------------------------------------------------------------------------------


def test_a_part_is_by_sequence_because_it_was_made_so_not_because_it_looks_like_it():
    """Four heads over two shards at dim 1 lie as four positions over two shards do."""

    def work(group):
        local = torch.zeros(3, 2, 5)
        heads = ShardedValue(local, LocalPartLayout(1, 4, ((2 * group.shard, 2 * group.shard + 2),), "heads"), group)
        sequence = ShardedValue(local, sequence_part_layout(4, group.shard, group.size), group)
        moved = sequence.transpose(0, 1)
        assert heads.part_layout.ranges == sequence.part_layout.ranges and heads.shape == sequence.shape
        back = moved.transpose(0, 1)
        return [heads.by_sequence, sequence.by_sequence, moved.by_sequence, back.by_sequence, moved.part_layout.axis]

    found, _ = on_shards.on_shards(2, work, sequence=True)
    assert found == [[False, True, False, True, "sequence"]] * 2


def test_a_column_layer_gathers_a_part_of_the_sequence_and_refuses_one_of_heads_that_lies_alike():
    def work(group):
        sliced = linear(5, 3)
        sliced.out_features = 6
        layer = ColumnLinear(sliced, "a.up", group, even_ranges_by_shard(6, 2)[group.shard])
        mine = (2 * group.shard, 2 * group.shard + 2)
        local = torch.ones(3, 2, 5, dtype=torch.float64)
        made = layer(ShardedValue(local, sequence_part_layout(4, group.shard, 2), group))
        with pytest.raises(ModelError, match=r"a\.up needs all of its input, which is cut along dim 1") as error:
            layer(ShardedValue(local, LocalPartLayout(1, 4, (mine,), "heads"), group))
        assert "gathered" in error.value.cure
        return list(made.shape), list(made.local.shape), made.part_layout.axis

    found, _ = on_shards.on_shards(2, work, sequence=True)
    assert found == [([3, 4, 6], [3, 4, 3], "features")] * 2
