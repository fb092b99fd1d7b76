"""What `raypar plan` says of a plan, without building or timing anything."""

import json
import re
from dataclasses import replace
from itertools import pairwise
from types import SimpleNamespace
from typing import NamedTuple

import pytest
import torch
from torch import Tensor, nn

from raypar.cli import main
from raypar.console.plan_text import (
    MOST_TRAFFIC,
    group_similar_layers,
    plan_as_text,
    stage_message_lines,
    traffic_lines,
    whole_on_shards_line,
    why_whole_lines,
)
from raypar.draw.swimlane_svg import swimlane_svg
from raypar.draw.text_grid import text_grid
from raypar.errors import ConfigError
from raypar.job import Job
from raypar.launch.choose_plan import idle_replicas_text
from raypar.launch.plan_as_dict import plan_as_dict, shard_style_by_layer, whole_bytes_on_shards, workers_share_caches
from raypar.launch.plan_to_show import refuse_no_profile
from raypar.model.graph import Graph, Layer
from raypar.plan import Microbatches, ParallelPlan, StagePlan
from raypar.plan.bundle_parts import LEAST_BYTES_IN_PARTS
from raypar.planner.model_profile import LayerProfile, LinkProfile, ModelProfile
from raypar.planner.predicted_step import predict_step
from raypar.schedule.data_flow import message_routes
from raypar.trainer import Trainer
from raypar.worker.layer_graph_of_job import make_layer_graph


class Size(NamedTuple):
    name: str
    parameters: int
    nbytes: int


SIZES = tuple(Size(f"block{i}", 1000 * (i + 1), 4000 * (i + 1)) for i in range(4))
PROFILE = ModelProfile(tuple(LayerProfile(s.name, 1.0, 2.0, 1.0, 1.0) for s in SIZES), LinkProfile(0.0))


def test_every_worker_is_told_with_its_layers_and_bytes():
    found = plan_as_dict(ParallelPlan.mesh(dp=2, pp=2, layers=4), "1f1b", Microbatches(8), SIZES, None)
    assert [w["layers"] for w in found["workers"]] == [[["block0", "block1"]]] * 2 + [[["block2", "block3"]]] * 2
    assert [w["parameter_bytes"] for w in found["workers"]] == [12000, 12000, 28000, 28000]
    assert [w["microbatches"] for w in found["workers"]] == [4] * 4
    assert found["imbalance"] == 0 and "predicted_ms" not in found
    json.dumps(found)


def test_uneven_shares_are_said():
    found = plan_as_dict(ParallelPlan.mesh(dp=3, layers=4), "1f1b", Microbatches(8, 4), SIZES, None)
    assert [w["microbatches"] for w in found["workers"]] == [2, 2, 4]
    assert found["imbalance"] == 0.5
    assert "50 % more microbatches" in plan_as_text(found)


def test_workers_without_a_block_are_said():
    found = plan_as_dict(ParallelPlan.mesh(dp=4, layers=4), "1f1b", Microbatches(8, 2), SIZES, None)
    assert "2 workers have no block" in plan_as_text(found)


def test_a_run_is_warned_of_replicas_without_work():
    def said(replicas: int, **batch: int) -> str | None:
        return idle_replicas_text(ParallelPlan.mesh(dp=replicas, pp=2, tp=2, layers=4), Microbatches(**batch))

    assert said(4, count=4) is said(4, count=8, blocks=4) is said(4, count=4, blocks=16) is None
    assert said(5, count=4) == (
        "plan.replicas is 5, and a step has 4 microbatches: 4 of 20 workers get none and compute nothing\n"
        "  cure: set plan.replicas <= 4, or microbatches >= 5 (which changes the results)"
    )
    assert said(5, count=1).startswith("plan.replicas is 5, and a step has 1 microbatch: 16 of 20")
    assert said(3, count=8, blocks=2) == (
        "plan.replicas is 3, and a step has 8 microbatches in 2 blocks (virtual_replicas): 4 of 12 workers get none and "
        "compute nothing\n  cure: set plan.replicas <= 2, or virtual_replicas >= 3 (which changes the results)"
    )


def test_replicas_that_take_microbatches_in_turn_need_no_blocks():
    """Where gradients are scattered."""
    plan = ParallelPlan.mesh(dp=3, layers=4).with_zero(2).with_gradients("scatter")
    assert idle_replicas_text(plan, Microbatches(8, 1)) is None
    assert "a step has 2 microbatches: 1 of 3 workers get none" in str(idle_replicas_text(plan, Microbatches(2, 1)))
    found = plan_as_dict(plan, "1f1b", Microbatches(8, 1), SIZES, None)
    assert "have no block" not in plan_as_text(found)


def test_the_prediction_is_the_simulators():
    found = plan_as_dict(ParallelPlan.mesh(pp=4, layers=4), "1f1b", Microbatches(8), SIZES, PROFILE)
    assert found["predicted_ms"] == 33
    assert "predicted step 33.0 ms, bubble 27.3 %" in plan_as_text(found)


@pytest.mark.parametrize(
    ("device", "processors", "workers", "said"),
    [("cpu", 4, 4, True), ("gpu", 4, 4, False), ("cpu", 4, 1, False), ("cpu", None, 4, False), ("cpu", 1, 4, False)],
)
def test_workers_on_the_cpus_of_one_machine_are_said_to_slow_each_other(device, processors, workers, said):
    profile = replace(PROFILE, processors=processors)
    assert workers_share_caches(device, profile, workers) is said and not workers_share_caches(device, None, workers)
    found = plan_as_dict(ParallelPlan.mesh(pp=workers, layers=4), "1f1b", Microbatches(8), SIZES, profile)
    lines = plan_as_text(found | {"workers_share_caches": said}).splitlines()
    at = next(number for number, line in enumerate(lines) if line.startswith("predicted step"))
    assert lines[at + 1].startswith("layers were timed one at a time") is said


def test_chunks_of_one_worker_are_listed_apart():
    found = plan_as_dict(ParallelPlan.mesh(pp=2, chunks=2, layers=4), "gpipe", Microbatches(4), SIZES, None)
    assert "block0 + block2" in plan_as_text(found)


def test_all_three_axes_are_told_and_drawn_also_where_stages_differ():
    plan = ParallelPlan.of((1, 2, 1), (2, 1, 2), layers=4)
    found = plan_as_dict(plan, "1f1b", Microbatches(8), SIZES, PROFILE)
    lines = plan_as_text(found).splitlines()
    assert lines[0].startswith("6 workers = 3 stages x 1/2/1 replicas x 2/1/2 shards, schedule 1f1b")
    rows = [line.split("  ") for line in lines[1:8]]
    assert [[cell.strip() for cell in row if cell.strip()][:4] for row in rows] == [
        ["worker", "stages", "replica", "shard"],
        ["0", "0", "0", "0 of 2"],
        ["1", "0", "0", "1 of 2"],
        ["2", "1", "0", "block1"],
        ["3", "1", "1", "block1"],
        ["4", "2", "0", "0 of 2"],
        ["5", "2", "0", "1 of 2"],
    ]
    timeline, _ = predict_step(PROFILE, plan, "1f1b", Microbatches(8))
    drawn = swimlane_svg(timeline, title="x", routes=message_routes(PROFILE.crossing(plan)))
    for lane in (
        "worker 1 (stage 0, replica 0, shard 1)",
        "worker 3 (stage 1, replica 1)",
        "worker 5 (stage 2, replica 0, shard 1)",
    ):
        assert lane in drawn and lane in text_grid(timeline)
    assert "shard" not in plan_as_text(plan_as_dict(ParallelPlan.mesh(dp=2, layers=4), "1f1b", Microbatches(8), SIZES, None))


def test_layers_that_are_cut_alike_are_named_once():
    styles = {"embed.token": "vocabulary", "block0.up": "column", "block1.up": "column", "block1.down": "row"}
    assert group_similar_layers(styles) == ["embed.token vocabulary", "block*.up column (2)", "block1.down row"]
    mlp = {f"block{i}.mlp.fc{k}": style for i in range(6) for k, style in ((1, "column"), (2, "row"))}
    assert group_similar_layers(mlp) == ["block*.mlp.fc1 column (6)", "block*.mlp.fc2 row (6)"]


def test_what_every_shard_holds_whole_is_named_with_its_mib():
    job = Job(
        steps=1,
        batch_size=4,
        microbatches=2,
        model={"function": "examples.gpt:layers", "args": {"width": 16, "depth": 2, "heads": 2, "context": 8}},
        loss={"function": "examples.gpt:loss"},
        data={"function": "examples.gpt:text"},
    )
    spec = job
    graph = make_layer_graph(spec)
    whole = whole_bytes_on_shards(graph, spec, ParallelPlan.of((1, 1), layers=4, shards=(2, 2)))
    assert whole["embed.position"] == 8 * 16 * 4 and whole["block0.norm1"] == 2 * 16 * 4 and whole["block1.down.bias"] == 16 * 4
    line, mib = whole_on_shards_line(whole, 4 * sum(whole.values())), sum(whole.values()) / 2**20
    assert line.startswith("whole on every shard: embed.position, ")
    assert line.endswith(f"{mib:.3f} MiB in all, 25.0 % of the parameters")
    assert whole_on_shards_line({"a": 3 << 20}, 3 << 20) == "every shard has all parameters: 3.0 MiB"
    assert "block*.norm* (4)" in line and "block*.down.bias (2)" in line and "block*.up" not in line
    assert whole_bytes_on_shards(graph, spec, ParallelPlan.of((1, 1), layers=4)) == {}
    reasons = {"block0.norm1": "norm of a part", "block1.norm1": "norm of a part", "block0.up": "is cut"}
    assert why_whole_lines(whole, reasons) == ["  block*.norm1 (2): norm of a part"]


def test_a_layer_that_joins_branches_on_shards_says_nothing_of_those_that_are_whole(monkeypatch: pytest.MonkeyPatch):
    """The layer in which branches meet has the name of the block that holds them."""
    names = ["block.one", "block.two", "block", "head"]
    graph = Graph(tuple(Layer(name, nn.Identity, inputs=("x",), outputs=(name,)) for name in names), output="head")
    styles = {"block.one": "column", "block.two.inner": "row", "head": "column"}
    layout = SimpleNamespace(styles=styles)
    monkeypatch.setattr("raypar.model.tensor_parallel.compute_shard_layout.compute_shard_layout", lambda *args: layout)
    spec = SimpleNamespace(styles=(), layout=())
    plan = ParallelPlan((StagePlan(0, 2, ((0,),)), StagePlan(2, 4, ((0, 1),))))
    assert shard_style_by_layer(graph, spec, plan) == {"head": "column"}  # type: ignore[arg-type]
    assert shard_style_by_layer(graph, spec, ParallelPlan.mesh(tp=2, layers=4)) == styles  # type: ignore[arg-type]


def test_what_travels_over_shards_is_told_with_its_formula_its_numbers_and_its_bytes():
    def row(layers, value="input", direction="backward", operation="all_reduce", numbers: int | None = 1024, itemsize=4):
        size = {"numbers": numbers, "bytes": numbers * itemsize if numbers and itemsize else None}
        how = {"operation": operation, "direction": direction, "value": value, "formula": f"B C_{value[:-3]}"}
        return {"layers": layers, "dimension": "heads", **how, **size}

    rows = [row([f"block{i}.q", f"block{i}.k"]) for i in range(2)]
    rows += [row(["out1"], "output", "forward", "reduce_scatter", 3072), row(["unknown"], numbers=None)]
    rows += [row(["bf16"], "output", "backward", "all_gather", itemsize=0)]
    assert [re.split("  +", line) for line in traffic_lines(rows)] == [
        ["travels for each microbatch", "divided", "value", "numbers"],
        ["block*.q, block*.k (2, each)", "heads", "gradient of the input, summed", "B C_in", "= 1,024, 4.0 KiB"],
        ["out1", "heads", "output, summed in parts", "B C_out", "= 3,072, 12.0 KiB"],
        ["unknown", "heads", "gradient of the input, summed", "B C_in"],
        ["bf16", "heads", "gradient of the output, gathered", "B C_out", "= 1,024"],
    ]
    assert traffic_lines([]) == []
    names = [chr(ord("a") + i) for i in range(MOST_TRAFFIC + 2)]
    assert traffic_lines([row([name]) for name in names])[-1] == "and 2 more (--json has all)"


def test_what_goes_from_stage_to_stage_is_told_where_there_are_shards():
    """Two replicas and, on the same workers, two shards: each value goes to the other worker, each gradient to none."""
    plan = ParallelPlan((StagePlan(0, 2, ((0,), (1,))), StagePlan(2, 4, ((0, 1),))))
    found = plan_as_dict(plan, "gpipe", Microbatches(4, 4), SIZES, HEAVY)
    told = plan_as_text(found | {"cut": {}, "whole_on_every_shard": {}}).splitlines()
    (first,) = [number for number, line in enumerate(told) if line.startswith("travels between stages")]
    assert [re.split("  +", line) for line in told[first : first + 3]] == [
        ["travels between stages", "for each microbatch", "in a step", "between nodes"],
        ["stage 0 to stage 1", "values", "0.1 KiB", "4 messages, 0.2 KiB", "0.0 KiB"],
        ["stage 1 to stage 0", "gradients", "0.1 KiB", "nothing: it is used where it is made", "0.0 KiB"],
    ]
    shape, large = ParallelPlan.of((1, 1), (2, 2), layers=4), replace(HEAVY.layers[0], output_bytes=LEAST_BYTES_IN_PARTS)
    apart = plan_as_dict(shape, "gpipe", Microbatches(4, 4), SIZES, HEAVY)
    assert [row["messages"] for row in apart["between_stages"]] == [8, 8]
    in_parts = plan_as_dict(shape, "gpipe", Microbatches(4, 4), SIZES, replace(HEAVY, layers=(large,) * 4))
    told = [stage_message_lines(found["between_stages"])[1].split("  ")[-1] for found in (apart, in_parts)]
    assert told == ["0.5 KiB", "256.0 KiB, in parts"], "8 messages of 64 bytes, 4 values of 64 KiB"
    assert "between stages" not in plan_as_text(plan_as_dict(*GPIPE, HEAVY))
    row = apart["between_stages"][0]
    assert stage_message_lines([row] * (MOST_TRAFFIC + 2))[-1] == "and 2 more (--json has all)"


class WithPositions(nn.Module):
    """An encoder of PyTorch's beside a parameter of the model itself."""

    def __init__(self) -> None:
        super().__init__()
        self.positions = nn.Parameter(torch.zeros(3, 8))
        self.encoder = nn.TransformerEncoder(nn.TransformerEncoderLayer(8, 2, 16, 0.0, batch_first=True), 2)

    def forward(self, x: Tensor) -> Tensor:
        return self.encoder(x + self.positions)


def test_a_parameter_of_the_model_itself_is_named():
    sample = {"x": torch.zeros(3, 8), "y": torch.zeros(3, 8)}
    spec = Trainer(
        model=WithPositions, loss=nn.functional.mse_loss, data=[sample] * 4, steps=1, batch_size=4, microbatches=2
    ).job
    graph = make_layer_graph(spec)
    whole = whole_bytes_on_shards(graph, spec, ParallelPlan.mesh(tp=2, layers=len(graph.layers)))
    assert whole["positions"] == 3 * 8 * 4 and "encoder.layers.0.norm1" in whole


HEAVY = ModelProfile(tuple(replace(layer, activation_bytes=1 << 20, output_bytes=64) for layer in PROFILE.layers))
GPIPE = (ParallelPlan.mesh(pp=2, layers=4), "gpipe", Microbatches(8, 8, 64), SIZES)


def test_a_plan_shows_what_it_recomputes_and_its_memory_sheet():
    plan = ParallelPlan.mesh(pp=2, layers=4, recompute=range(4))
    found = plan_as_dict(plan, "1f1b", Microbatches(8), SIZES, HEAVY)
    assert found["recompute"] == [0, 1, 2, 3] and found["stages_that_keep_activations"] == [1]
    assert [sum(sheet.values()) for sheet in found["memory_sheet"]] == found["memory_bytes"]
    text = plan_as_text(found)
    assert "plan.recompute names all 4 layers; stage 1 keeps its activations: each backward follows its forward" in text
    header, first = next(pair for pair in pairwise(text.splitlines()) if pair[0].startswith("memory in MiB"))
    assert header.split()[-2:] == ["in", "all"] and "activations" in header and first.startswith("worker 0")


def test_a_plan_that_divides_state_shows_one_holder_of_each_part_beside_two_and_where_the_mirrors_copies_lie():
    known = replace(
        HEAVY, layers=tuple(replace(layer, parameter_bytes=4 << 20, optimizer_bytes=8 << 20) for layer in HEAVY.layers)
    )
    plan, more = ParallelPlan.mesh(dp=4, layers=4).with_zero(1), ("1f1b", Microbatches(4), SIZES)
    lines = plan_as_text(plan_as_dict(plan, *more, replace(known, mirror="memory"))).splitlines()
    at = next(i for i, line in enumerate(lines) if line.startswith("holders of each part"))
    assert lines[at].split("  ")[-1].strip() == "largest worker" and "the mirror's copies" in lines[at]
    rows = [line.split() for line in lines[at + 1 : at + 4]]
    assert [row[:4] for row in rows] == [
        ["1", "on", "8.0", "48.0"],
        ["2", "on", "16.0", "96.0"],
        ["2", "off", "16.0", "0.0"],
    ]
    assert lines[at + 4].startswith("in MiB; when one worker is lost: with one holder all go back to the mirror's last copy")
    text = plan_as_text(plan_as_dict(plan, *more, replace(known, mirror="files")))
    assert "the mirror's copies lie in files (elastic.mirror_in): at most 48.0 MiB of a worker, no part of its memory" in text
    assert "holders of each part" not in plan_as_text(plan_as_dict(plan.with_zero(0), *more, known))


def test_a_plan_that_does_not_fit_names_the_nearest_that_does():
    small = replace(HEAVY, memory_bytes=max(plan_as_dict(*GPIPE, HEAVY)["memory_bytes"]) - 1)
    found = plan_as_dict(*GPIPE, small)
    assert "this plan does not fit: worker " in plan_as_text(found)
    assert found["does_not_fit"]["advice"].startswith("predicted to fit: plan.recompute=full (")
    fits = replace(GPIPE[0], recompute=tuple(range(4)))
    assert "does_not_fit" not in plan_as_dict(fits, *GPIPE[1:], small)


def test_memory_needs_a_profile():
    with pytest.raises(ConfigError, match="memory cannot be predicted without a profile"):
        refuse_no_profile(False, None, 100.0)


@pytest.mark.parametrize("mib", ["0", "-1", "nan", "inf"])
def test_memory_that_no_worker_has_is_refused_before_the_job_is_read(mib, capfd):
    assert main(["plan", "no-such-job.yaml", f"--memory={mib}"]) == 2
    assert capfd.readouterr().err.splitlines()[-2:] == [f"error: --memory {mib}", "  cure: give what a worker has, in MiB"]


def test_the_price_of_virtual_shards_is_told_where_it_was_measured():
    timed = replace(PROFILE, layers=tuple(replace(layer, in_parts_ms=4.5) for layer in PROFILE.layers))
    plan = ParallelPlan.mesh(pp=2, layers=4).with_virtual_shards(4)
    found = plan_as_dict(plan, "1f1b", Microbatches(8), SIZES, timed)
    assert found["virtual_shards"] == 4 and found["price_of_virtual_shards"] == 1.5
    told = "virtual shards: a worker that computes all 4 takes 1.50 times as long for a microbatch as with whole layers"
    text = plan_as_text(found | {"cut": {}, "whole_on_every_shard": {}})
    (row,) = [line for line in text.splitlines() if line.startswith("0 ")]
    assert told in text and "0 of 1: 0 to 3" in row and found["workers"][0]["virtual_shards"] == [0, 1, 2, 3]
    assert "virtual shards" not in plan_as_text(plan_as_dict(plan, "1f1b", Microbatches(8), SIZES, PROFILE)).partition("\n")[2]
