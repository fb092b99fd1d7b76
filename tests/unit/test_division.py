"""How the shards of a stage divide its virtual shards, in plans and in jobs."""

from dataclasses import replace
from types import SimpleNamespace

import pytest

from raypar.errors import PlanError
from raypar.job import Job, PlanConfig
from raypar.plan import ParallelPlan, StagePlan
from raypar.plan.placements import plan_for_fewer_workers
from raypar.plan.shard_ranges import TensorCut, even_ranges_by_shard
from raypar.plan.stage_connections import TiedParameter, check_ties_are_cut_alike
from raypar.planner.candidate_plans import enumerate_candidates
from raypar.planner.model_profile import LayerProfile, ModelProfile
from raypar.record.stages_of_plan import plan_of_stages, stages_as_data

WHOLE = ((0, 1, 2),)


def test_a_stage_without_a_division_has_a_virtual_shard_for_each_shard():
    assert StagePlan(0, 1, WHOLE, division=(1, 1, 1)) == StagePlan(0, 1, WHOLE)
    assert StagePlan(0, 1, WHOLE).virtual_shards == 3 and StagePlan(0, 1, WHOLE).runs == (range(1), range(1, 2), range(2, 3))
    uneven = StagePlan(0, 1, WHOLE, division=(1, 3, 2))
    assert uneven.virtual_shards == 6 and uneven.runs == (range(1), range(1, 4), range(4, 6))


@pytest.mark.parametrize("division", [(1, 2), (0, 2, 2)])
def test_a_division_gives_every_shard_a_run(division):
    with pytest.raises(PlanError, match=r"stage 0 gives its 3 shards .* virtual shards\n  cure: give 3 numbers >= 1"):
        ParallelPlan((StagePlan(0, 1, WHOLE, division=division),))


def test_stages_of_the_same_workers_have_the_same_division():
    stages = (StagePlan(0, 1, ((0, 1),), division=(1, 3)), StagePlan(1, 2, ((0, 1),), division=(2, 2)))
    with pytest.raises(PlanError, match="the same workers and different divisions of virtual shards"):
        ParallelPlan(stages)


def test_a_number_of_virtual_shards_is_shared_evenly_and_an_uneven_division_of_as_many_stays():
    plan = ParallelPlan.of((1, 2), (2, 1), layers=2).with_virtual_shards(4)
    assert [stage.division for stage in plan.stages] == [(2, 2), (4,)] and plan.shards_by_layer == (4, 4)
    assert plan.describe() == "2 stages x 1/2 replicas x 2/1 shards, 4 virtual shards"
    uneven = ParallelPlan((StagePlan(0, 1, ((0, 1),), division=(1, 3)),))
    assert uneven.with_virtual_shards(4) == uneven
    with pytest.raises(
        PlanError, match="virtual_shards is 4, and stage 0 has 3 shards\n  cure: set virtual_shards to a multiple of 3"
    ):
        ParallelPlan.mesh(tp=3).with_virtual_shards(4)


def test_a_plan_is_read_from_its_file_with_its_division():
    plan = ParallelPlan((StagePlan(0, 1, ((0, 1),), division=(1, 3)), StagePlan(1, 2, ((2,),), division=(4,))))
    data = stages_as_data(plan)
    assert plan_of_stages(data) == plan
    assert plan_of_stages([{k: v for k, v in stage.items() if k != "division"} for stage in data]).shards_by_layer == (2, 1)
    assert plan_of_stages([{**stage, "division": [9]} for stage in data]) is None


def test_with_fewer_workers_shards_go_to_any_divisor_of_the_virtual_shards():
    plan = ParallelPlan((StagePlan(0, 2, ((0,), (1,), (2,))), StagePlan(2, 4, ((0, 1, 2),)))).with_virtual_shards(6)
    left = plan_for_fewer_workers(plan, 2, 6)
    assert [(stage.workers, stage.division) for stage in left.stages] == [(((0,), (1,)), (6,)), (((0, 1),), (3, 3))]
    assert left.shards_by_layer == plan.shards_by_layer


def test_a_cut_over_runs_has_the_indices_of_its_shards():
    cut = TensorCut(0, 10, even_ranges_by_shard(10, 4)).over_runs([range(1), range(1, 4)])
    assert cut == TensorCut(0, 10, (((0, 2),), ((2, 10),)))


def test_a_tie_on_one_worker_has_the_same_virtual_shards_in_both_stages():
    def tied(*divisions):
        stages = (StagePlan(0, 1, ((0, 1),), division=divisions[0]), StagePlan(1, 2, ((0, 1), (2, 3)), division=divisions[1]))
        check_ties_are_cut_alike(ParallelPlan(stages), [TiedParameter("w", (0, 1))])

    tied((1, 3), (1, 3))
    with pytest.raises(PlanError, match="worker 0 would have it as shards 0 and 0 to 1"):
        tied((1, 3), (2, 2))
    with pytest.raises(PlanError, match="would have it cut over 2 and 4 shards"):
        tied((1, 1), (2, 2))


def test_the_planner_may_choose_shards_where_bits_do_not_depend_on_them():
    profile = SimpleNamespace(layers=(None,) * 2, most_stages=None, processors=None, work_sums=lambda: [0.0, 1.0, 2.0])
    cut = SimpleNamespace(blocks=1, count=1, microbatches_of_block=lambda block: (0,))
    found = {(c.stages, c.shards, c.plan.shards_by_layer) for c in enumerate_candidates(profile, 4, cut, 0, (), 4)}
    assert found == {(stages, shards, (4, 4)) for stages, shards in ((1, 1), (2, 1), (1, 2), (2, 2), (1, 4))}


def test_a_job_file_cannot_say_an_uneven_division():
    plan = ParallelPlan((StagePlan(0, 2, ((0, 1),), division=(1, 3)),))
    assert "unequal numbers of virtual shards" in PlanConfig.of_plan(plan, "1f1b").unwritable_parts[0]


def test_a_worker_of_several_virtual_shards_takes_its_share_of_what_all_were_measured_to_take():
    layers = (LayerProfile("a", 2.0, 4.0, 2.0, 2.0, in_parts_ms=9.0), LayerProfile("b", 1.0, 1.0, 0.5, 0.5, in_parts_ms=4.0))
    profile = ModelProfile(layers)
    assert profile.price_of_virtual_shards == 13 / 8
    plan = ParallelPlan.mesh(layers=2).with_virtual_shards(4)
    assert profile.stage(plan.stages[0]).forward_ms == 2.0 * 1.5 + 1.0 * 2.0
    two = ParallelPlan.mesh(tp=2, layers=2).with_virtual_shards(4)
    assert profile.stage(two.stages[0]).backward_ms == (4.0 * 1.5 + 1.0 * 2.0) / 2
    four = ParallelPlan.mesh(tp=4, layers=2).with_virtual_shards(4)
    assert profile.stage(four.stages[0]).forward_ms == 3.0 / 4, "a worker for each: as without"
    keeps = tuple(replace(layer, activation_bytes=1000, in_parts_keep=2.0) for layer in layers)
    kept = [ModelProfile(keeps).stage(each.stages[0]).activation_bytes for each in (plan, two, four)]
    assert kept == [4000, 2000, 500], "all parts twice of what whole layers keep"
    assert ModelProfile((LayerProfile("a", 2.0, 4.0, 2.0, 2.0),)).price_of_virtual_shards is None


@pytest.mark.parametrize("virtual_shards", [0, 8])
def test_a_plan_that_divides_other_virtual_shards_than_the_job_has_is_refused(virtual_shards: int):
    plan = replace(ParallelPlan.mesh(tp=2, layers=1), stages=(StagePlan(0, 1, ((0, 1),), division=(1, 3)),))
    job = Job.model_construct(plan=PlanConfig.of_plan(plan, "1f1b"))
    assert job.replace(virtual_shards=4).to_plan(1) == plan
    with pytest.raises(PlanError, match=f"divides 4 virtual shards .*, and virtual_shards is {virtual_shards}"):
        job.replace(virtual_shards=virtual_shards).to_plan(1)
