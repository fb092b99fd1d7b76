"""The key `plan.gather`: what it accepts, which plans have it, and what is said where it cannot be or cannot help."""

from dataclasses import replace

import pytest

from raypar.errors import ConfigError, PlanError
from raypar.job import PlanConfig
from raypar.job.read_job import parse_job
from raypar.launch.choose_plan import lines_about_gather
from raypar.plan import ParallelPlan, StagePlan
from raypar.plan.placements import plan_for_fewer_workers
from raypar.record.stages_of_plan import plan_of_stages, stages_as_data

JOB = """
model: {function: "helpers.tiny_job:model"}
loss: {function: "helpers.tiny_job:loss"}
data: {function: "helpers.tiny_job:data"}
steps: 2
batch_size: 8
microbatches: 4
"""


@pytest.mark.parametrize("given, spans", [
    ("step", ["step"] * 2), ("layer", ["layer"] * 2), (["microbatch", "step"], ["microbatch", "step"]),
], ids=str)  # fmt: skip
def test_one_word_or_one_for_each_stage(given, spans):
    plan = PlanConfig(stages=2, replicas=2, zero=3, gather=given).to_plan(5)
    assert [stage.gather for stage in plan.stages] == spans and plan.gather_spans == tuple(spans)
    assert PlanConfig.of_plan(plan, "1f1b").gather == (given if isinstance(given, str) else tuple(given))
    chunked = PlanConfig(stages=2, replicas=2, chunks=2, schedule="interleaved", zero=3, gather=given)
    assert chunked.to_plan(5).gather_spans == tuple(spans)
    assert PlanConfig.of_plan(chunked.to_plan(5), "interleaved").to_plan(5) == chunked.to_plan(5)


@pytest.mark.parametrize("given", ["steps", ["layer", "x"], [], None, 1, True], ids=str)
def test_other_values_are_refused(given):
    with pytest.raises(ConfigError, match=r"expected step, microbatch or layer, or a list with one per stage"):
        PlanConfig(stages=2, replicas=2, zero=3, gather=given)


@pytest.mark.parametrize("zero", [0, 1, 2])
@pytest.mark.parametrize("gather", ["microbatch", "layer"])
def test_below_level_3_nothing_is_gathered_again(zero, gather):
    with pytest.raises(PlanError) as error:
        PlanConfig(replicas=2, zero=zero, gather=gather)
    assert str(error.value) == (
        f"plan.gather: {gather} needs plan.zero: 3, and plan.zero is {zero}: each replica has whole parameters\n"
        "  cure: set plan.zero: 3, or leave plan.gather out"
    )
    assert PlanConfig(replicas=2, zero=zero, gather="step").to_plan(3).gather_spans == ("step",)
    with pytest.raises(PlanError, match=f"plan.gather: {gather} needs plan.zero: 3"):
        parse_job(JOB + f"plan: {{replicas: 2, zero: {zero}, gather: {gather}}}\n")


def test_with_a_list_of_levels_each_stage_is_looked_at():
    PlanConfig(stages=2, replicas=2, zero=[3, 1], gather=["layer", "step"])
    for gather in ("layer", ["step", "layer"]):
        with pytest.raises(PlanError, match=r"plan.gather: layer needs plan.zero: 3, and plan.zero of stage 1 is 1") as error:
            PlanConfig(stages=2, replicas=2, zero=[3, 1], gather=gather)
        assert error.value.cure == f"set plan.zero: 3, or plan.gather: [{'step' if gather != 'layer' else 'layer'}, step]"


def test_as_many_words_as_stages_are_asked_for():
    with pytest.raises(PlanError, match=r"plan.gather has 3 entries for 2 stages"):
        PlanConfig(stages=2, replicas=2, zero=3, gather=["step", "layer", "layer"])
    placements = [{"layers": "a", "workers": [[0], [1]]}]
    with pytest.raises(PlanError, match=r"plan.gather has 1 entries, and plan.placements") as error:
        PlanConfig(placements=placements, zero=3, gather=["layer"])
    assert error.value.cure == "give plan.gather one word"
    assert PlanConfig(placements=placements, zero=3, gather="layer").to_plan(["a", "b"]).gather_spans == ("layer",)
    with pytest.raises(PlanError, match=r"needs plan.zero: 3"):
        PlanConfig(placements=placements, gather="layer")


def test_a_chosen_level_chooses_the_gather_too():
    with pytest.raises(PlanError, match=r"plan.gather is layer, and plan.zero is auto, which chooses how long") as error:
        PlanConfig(replicas=2, zero="auto", gather="layer")
    assert error.value.cure == "leave plan.gather out, or set plan.zero: 3"


@pytest.mark.parametrize("key", ["reshard_after_forward", "limit_all_gathers", "stage3_max_live_parameters"])
def test_names_of_other_frameworks_lead_to_it(key):
    with pytest.raises(ConfigError, match=r"is plan\.gather: step \(.*, microbatch, or layer \(two layers at a time"):
        parse_job(JOB + f"{key}: 1\n")


def test_a_whole_plan_says_it_and_is_checked():
    plan = ParallelPlan.mesh(dp=2, pp=2, layers=4).with_zero(3).with_gather("layer")
    assert plan.describe() == "2 stages x 2 replicas, ZeRO 3, gathered by layer"
    with pytest.raises(PlanError, match=r"plan.gather layer needs plan.zero 3, and it has 2"):
        ParallelPlan((StagePlan(0, 1, ((0,), (1,)), zero=2, gather="layer"),))
    with pytest.raises(PlanError, match="gathers parameters for a 'week'"):
        ParallelPlan((StagePlan(0, 1, ((0,), (1,)), zero=3, gather="week"),))
    chunks = ParallelPlan.mesh(dp=2, pp=2, chunks=2, layers=4).with_zero(3).stages
    with pytest.raises(PlanError, match="different spans of gathered parameters"):
        ParallelPlan((replace(chunks[0], gather="layer"), *chunks[1:]))


def test_other_levels_and_numbers_of_workers_keep_what_can_be():
    plan = ParallelPlan.of([3, 2], layers=4).with_zero(3).with_gather(["step", "microbatch"])
    assert plan.with_zero(2).gather_spans == ("step", "step"), "nothing is gathered"
    assert plan.with_zero([3, 3]).gather_spans == ("step", "microbatch")
    assert plan.with_replicas([1, 4]).gather_spans == ("step", "microbatch")
    assert ParallelPlan.of([2, 2, 2], layers=4).with_zero(3).with_gather(plan.gather_spans).gather_spans == ("microbatch",) * 3
    rows = ((0,), (1,))
    shared = ParallelPlan((StagePlan(0, 1, rows, zero=3, gather="layer"), StagePlan(1, 2, ((0, 1),), zero=3)))
    assert plan_for_fewer_workers(shared, 1).gather_spans == ("layer",), "grids that become one have one span"


def test_it_is_written_down_with_the_stages():
    plan = ParallelPlan.of([3, 2], layers=4).with_zero(3).with_gather(["step", "layer"])
    assert plan_of_stages(stages_as_data(plan)) == plan
    older = [{key: value for key, value in stage.items() if key != "gather"} for stage in stages_as_data(plan)]
    assert plan_of_stages(older) == plan.with_gather("step")


@pytest.mark.parametrize("chunks, text", [
    (1, "each worker has one stage, whose parameters are whole together"),
    (2, "no worker has more than 2 stages, whose parameters are whole together"),
])  # fmt: skip
def test_a_line_says_where_it_needs_no_less_memory(chunks, text):
    plan = ParallelPlan.mesh(dp=2, pp=2, chunks=chunks, layers=8).with_zero(3)
    (line,) = lines_about_gather(plan.with_gather("microbatch"))
    assert text in line and "needs no less memory than step" in line
    assert not lines_about_gather(plan.with_gather("layer")) and not lines_about_gather(plan)
    assert not lines_about_gather(ParallelPlan.mesh(dp=2, pp=2, chunks=3, layers=8).with_zero(3).with_gather("microbatch"))
    assert not lines_about_gather(ParallelPlan.mesh(pp=2, layers=8).with_zero(3).with_gather("microbatch")), "another line"
