"""An elastic run that comes to other numbers of shards, which changes its bits, says so."""

from contextlib import nullcontext
from pathlib import Path
from types import SimpleNamespace

import pytest
from helpers.partial_objects import make_with
from helpers.shard_grid import Cell
from helpers.trainee import Trainee, kill

from examples import gpt
from raypar.actors.generation_change import GenerationChange
from raypar.actors.messages import RunRequest
from raypar.actors.node_loss import NodeLossTracker
from raypar.actors.plan_cache import PlanCache
from raypar.actors.ray_connection import connect_ray
from raypar.elastic import actions as do
from raypar.errors import ModelError
from raypar.job import ElasticConfig, Job, ModelConfig
from raypar.launch import launch_run
from raypar.launch.choose_plan import choose_plan
from raypar.launch.launch_options import LaunchOptions
from raypar.launch.result import Result
from raypar.plan import Microbatches, ParallelPlan
from raypar.planner.model_profile import LayerProfile, LinkProfile, ModelProfile
from raypar.planner.plan_report import fewer_shards_warnings
from raypar.planner.plan_search import reachable_shard_counts
from raypar.record.events import GenerationStart
from raypar.storage.run_folder import RunFolder
from raypar.worker.check_model_can_shard import check_other_shard_counts
from raypar.worker.job_preflight import preflight

FOUR = ParallelPlan.mesh(pp=2, tp=2, layers=4)
PROFILE = ModelProfile(tuple(LayerProfile(f"block{i}", 1.0, 2.0, 1.0, 1.0) for i in range(4)), LinkProfile(0.0))


def plans_of(plan: ParallelPlan) -> PlanCache:
    job = SimpleNamespace(virtual_shards=0)
    return PlanCache(SimpleNamespace(plan=plan, schedule_name="1f1b", profile=PROFILE, batching=Microbatches(8), job=job))


def told(now: ParallelPlan, then: ParallelPlan) -> GenerationStart:
    """The event of the generation that goes from one plan to another."""
    events: list[GenerationStart] = []
    made = make_with(
        GenerationChange,
        plans=plans_of(FOUR),
        registry=SimpleNamespace(node_losses=NodeLossTracker()),
        side_effects=SimpleNamespace(note=events.append, aside=lambda *given: None),
        recorder=SimpleNamespace(write_plan_file=None),
        tasks=SimpleNamespace(spawn=lambda routine: routine.close()),
        last_order=do.AdoptPlan(2, then, tuple(range(then.world)), (), 7, ()),
        reported_schedule="1f1b",
        reported_plan=now,
    )
    made.report_first_step(do.ReportFirstStepAfterRecovery(7, 0.5, 0), "training goes on")
    assert made.reported_plan == then
    return events[0]


@pytest.mark.parametrize("workers, shards", [(1, 1), (2, 2), (3, 2)])
def test_a_plan_for_fewer_workers_keeps_the_shards_as_long_as_there_are_workers_for_them(workers, shards):
    found = plans_of(FOUR).find(workers)
    assert isinstance(found, ParallelPlan) and {stage.shards for stage in found.stages} == {shards}


def test_other_shards_than_before_are_told_with_the_generation():
    alone, two = ParallelPlan.mesh(layers=4), ParallelPlan.mesh(tp=2, layers=4)
    line = told(FOUR, alone).line()
    assert line is not None and "layers cut over 1 shard instead of 2, which changes the bits from here on" in line
    line = told(alone, FOUR).line()
    assert line is not None and "layers cut over 2 shards instead of 1" in line
    uneven = ParallelPlan.of((1, 1), (2, 1), layers=4)
    assert told(uneven, two).shards_was == "2/1"
    for then in (two, FOUR):
        assert told(FOUR, then).shards_was is None, "as many a layer, however the stages are cut"


def test_before_it_begins_a_run_says_how_many_workers_keep_its_bits():
    assert fewer_shards_warnings(ParallelPlan.mesh(dp=4, layers=4), 1) == fewer_shards_warnings(FOUR, 2) == []
    (line,) = fewer_shards_warnings(FOUR, 1)
    assert "fewer than 2 workers" in line and "changes the bits" in line and "elastic.min_workers=2" in line
    (line,) = fewer_shards_warnings(ParallelPlan.of((1, 1), (2, 1), layers=4), 2)
    assert "over 2 shards or fewer" in line


def six_heads() -> Job:
    """A job of four layers."""
    size = {"vocab": 23, "width": 24, "depth": 2, "heads": 6, "context": 8}
    return Cell("gpt", "1f1b", (1,), (1,), 5).job.replace(model=ModelConfig(function=gpt.layers, args=size))


def test_the_numbers_of_shards_that_a_run_may_come_to_are_checked_before_it_begins(monkeypatch):
    """Six heads over four shards are 1, 2, 1 and 2; with two workers left they are three each."""
    spec = six_heads()
    checked = preflight(spec)
    plan = ParallelPlan.mesh(tp=4, layers=4)
    check_other_shard_counts(spec, checked, plan, reachable_shard_counts(plan))
    seen = []

    def refuse(spec, checked, plan):
        seen.append(plan.stages[0].shards)
        raise ModelError("softmax needs the parts of other shards", cure="the style gathered")

    monkeypatch.setattr("raypar.worker.check_model_can_shard.check_model_can_shard", refuse)
    with pytest.raises(ModelError, match="with 2 shards, to which an elastic run comes when workers are lost: softmax needs"):
        check_other_shard_counts(spec, checked, plan, reachable_shard_counts(plan))
    assert seen == [2]


@pytest.mark.chaos
def test_a_run_that_loses_one_of_two_shards_goes_on_with_one_and_says_so(tmp_path):
    sets = ["plan.stages=1", "plan.replicas=1", "plan.shards=2", "plan.styles={'*': gathered}", "elastic.min_workers=1"]
    with connect_ray(None, 2, Path(__file__).parents[1]):
        trainee = Trainee(tmp_path, *sets, "steps=60")
        result = trainee.run(kill(1))
    assert result.end == "done", result.why
    first = trainee.told("generation")[0]
    assert (first["workers"], first["shards"], first["shards_was"]) == ([0], "1", "2")
    assert any("with fewer than 2 workers it goes on with fewer shards" in event["text"] for event in trainee.told("stage"))


@pytest.mark.parametrize("kind", ["own", "joined"])
def test_a_run_may_fall_to_fewer_shards_on_any_cluster(kind, monkeypatch, tmp_path):
    """On a cluster that was joined the planner knew only the plan's own number of shards, and found no plan for fewer."""
    requests: list[RunRequest] = []
    connection = SimpleNamespace(kind=kind, host=None, facts={}, text="", address="127.0.0.1:1")
    monkeypatch.setattr("raypar.actors.ray_connection.connect_ray", lambda *given: nullcontext(connection))
    monkeypatch.setattr("raypar.actors.cluster_info.cluster_capacity", lambda: SimpleNamespace(may_add_nodes=False))
    monkeypatch.setattr("raypar.actors.cluster_info.require_capacity", lambda *given: None)

    def follow(request: RunRequest, folder: RunFolder, tell, heard) -> Result:
        requests.append(request)
        return Result({}, str(folder.path), "failed", 0)

    monkeypatch.setattr(launch_run, "_follow", follow)
    monkeypatch.setattr(launch_run, "_placement_turn", lambda *given: nullcontext())
    spec, plan = six_heads(), ParallelPlan.mesh(tp=4, layers=4)
    folder = RunFolder.create(tmp_path, "run")
    options = LaunchOptions(spec.replace(elastic=ElasticConfig(min_workers=1)), lambda chosen: folder)
    launch_run.launch_run(
        lambda checked: choose_plan(spec, checked, lambda layers: plan, "1f1b", 4), options, lambda event: None
    )
    found = PlanCache(requests[0]).find(3)
    assert isinstance(found, ParallelPlan) and {stage.shards for stage in found.stages} == {2}, found
