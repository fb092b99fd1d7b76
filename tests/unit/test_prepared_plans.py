"""What the loss of one worker needs is computed before the loss, so that a recovery looks it up."""

from dataclasses import replace
from types import SimpleNamespace

import pytest
from helpers.machine_steps import begin

from raypar.actors import plan_cache
from raypar.actors.plan_cache import PlanCache
from raypar.elastic.actions import AdoptPlan, ChoosePlan
from raypar.elastic.events import CallFailed, GenerationClaimed, WorkerStatusReported
from raypar.elastic.generation_guard import WorkerStatus
from raypar.elastic.run_machine import RunMachine
from raypar.elastic.run_policy import RunPolicy
from raypar.elastic.seating import plans_after_one_loss
from raypar.errors import PlanError, ScheduleError, WorkerLost
from raypar.plan import Microbatches, ParallelPlan, StagePlan
from raypar.plan.model_outline import ModelOutline
from raypar.planner.model_profile import LayerProfile, ModelProfile
from raypar.planner.predicted_step import predict_step

LAYERS = 4
OUTLINE = ModelOutline(
    tuple((f"l{i}", ("x" if i == 0 else f"v{i - 1}",), (f"v{i}",)) for i in range(LAYERS)),
    elements=tuple({f"l{i}.w": 8} for i in range(LAYERS)),
    loss_inputs=(f"v{LAYERS - 1}",),
)
PLANS = [
    ParallelPlan.mesh(dp=2, pp=2, layers=LAYERS),
    ParallelPlan.mesh(dp=3, pp=2, layers=LAYERS),
    ParallelPlan.mesh(dp=4, layers=LAYERS),
    ParallelPlan.mesh(pp=4, layers=LAYERS),
    ParallelPlan.of((2, 1), layers=LAYERS),
]


def plans(plan: ParallelPlan) -> PlanCache:
    sizes = {"activation_bytes": 1000, "output_bytes": 100, "parameter_bytes": 1000, "optimizer_bytes": 2000}
    profile = ModelProfile(tuple(LayerProfile(f"l{i}", 1.0, 2.0, 1.0, 1.0, **sizes) for i in range(LAYERS)))
    given = {"profile": profile, "outline": OUTLINE, "batching": Microbatches(8), "validation_batching": None}
    return PlanCache(SimpleNamespace(plan=plan, schedule_name="1f1b", job=SimpleNamespace(virtual_shards=0), **given))


def machine_of(plan: ParallelPlan) -> RunMachine:
    """A machine whose workers hold no state, so that none can be lost."""
    policy = RunPolicy(workers=plan.world, job_steps=9, elastic=True, grow=False)
    return RunMachine(policy, plan=plan, held_pieces=lambda plan: ((),) * plan.world)


def actions_after_loss(machine: RunMachine, lost: int) -> list:
    others = [worker for worker in machine.membership.members if worker != lost]
    begin(machine)
    events = [
        CallFailed("lost", WorkerLost(f"worker {lost} died"), lost),
        GenerationClaimed(2, True),
        *(WorkerStatusReported(2, WorkerStatus(worker, 0)) for worker in others),
    ]
    return [decision.action for event in events for decision in machine.handle(event, 0.0)]


@pytest.mark.parametrize("plan", [*PLANS, ParallelPlan.of((2, 2), (2, 1), layers=LAYERS)], ids=lambda plan: plan.describe())
def test_each_plan_that_a_loss_leads_to_without_a_search_is_named_before(plan):
    named = plans_after_one_loss(machine_of(plan))
    followed = set()
    for lost in range(plan.world):
        actions = actions_after_loss(machine_of(plan), lost)
        orders = [action for action in actions if isinstance(action, AdoptPlan)]
        assert orders or any(isinstance(action, ChoosePlan) for action in actions)
        followed |= {order.plan for order in orders}
    assert set(named) == followed and len(named) == len(followed)


@pytest.mark.parametrize("plan", PLANS, ids=lambda plan: plan.describe())
def test_after_the_preparation_a_recovery_computes_no_plan_program_or_pieces(plan, monkeypatch):
    cache = plans(plan)
    machine = machine_of(plan)
    cache.prepare(plan, plans_after_one_loss(machine))
    for name in ("search_plans", "assign_programs_to_ranks", "predict_step", "Ownership"):
        monkeypatch.setattr(plan_cache, name, None)
    searched = cache.find(plan.world - 1)
    assert isinstance(searched, ParallelPlan)
    for found in (searched, *plans_after_one_loss(machine)):
        assert len(cache.assignments(found)) == len(cache.held_pieces(found)) == found.world
    assert cache.predicted_step_s(searched) > 0 and cache.predicted_step_s(plan) > 0


def test_the_preparation_keeps_the_jobs_schedule_and_nothing_of_plans_that_are_over():
    first, then = PLANS[1], PLANS[0]
    cache = plans(first)
    cache.prepare(first, plans_after_one_loss(machine_of(first)))
    former = set(cache._assignments)
    now = plans_after_one_loss(machine_of(then))
    cache.prepare(then, now)
    assert {cache.schedule_name(plan) for plan in now} == {"1f1b"}
    assert set(cache._assignments) == set(cache._held) == {*now, cache.find(then.world - 1)}
    assert former - set(cache._assignments)


def test_a_plan_that_cannot_be_lowered_is_left_to_the_recovery_that_needs_it(monkeypatch):
    def refuse(*given, **named):
        raise ScheduleError("it would not run", cure="another plan")

    plan = PLANS[0]
    cache = plans(plan)
    after = plans_after_one_loss(machine_of(plan))
    monkeypatch.setattr(plan_cache, "assign_programs_to_ranks", refuse)
    cache.prepare(plan, after)
    with pytest.raises(ScheduleError, match="would not run"):
        cache.assignments(after[0])


def test_a_plan_with_other_shares_keeps_the_schedule_and_is_refused_where_memory_has_no_room():
    now = ParallelPlan.mesh(dp=2, layers=LAYERS)
    other = replace(now, stages=(replace(now.stages[0], share=(7, 1)),))
    cache = plans(now)
    cache.schedules[now] = "gpipe"
    cache.lower_shares(other, now)
    assert cache.schedule_name(other) == "gpipe" and cache.passes(other) == (7, 1)
    request = cache.request
    even, uneven = (max(predict_step(request.profile, plan, "gpipe", request.batching)[1]) for plan in (now, other))
    assert even < uneven
    request.profile = replace(request.profile, memory_bytes=(even + uneven) // 2)
    cache.lower_shares(now, now)
    with pytest.raises(PlanError, match=r"worker 0 \(stage 0, replica 0\) would need .* MiB for its blocks, and a worker has"):
        cache.lower_shares(other, now)


def test_plans_after_a_loss_are_compared_with_memory_beforehand():
    now = ParallelPlan.mesh(dp=3, layers=LAYERS).with_zero(1)
    cache = plans(now)
    assert cache.memory_lacking(now) == "", "how much there is is not known"
    request, (after, *_) = cache.request, plans_after_one_loss(machine_of(now))
    most = max(predict_step(request.profile, now, "1f1b", request.batching)[1])
    request.profile = replace(request.profile, memory_bytes=most)
    cache.prepare(now, [after])
    assert after in cache._lacking and "would need" in cache.memory_lacking(after) and cache.memory_lacking(now) == ""
    found = cache.find(2)
    assert isinstance(found, PlanError) or not cache.memory_lacking(found)


def test_of_workers_with_several_roles_there_is_a_plan_for_fewer_down_to_one():
    whole = ParallelPlan((StagePlan(0, 2, ((0,), (1,), (2,))), StagePlan(2, 4, ((0,), (1,)))))
    cache = plans(whole)
    found = [cache.find(workers) for workers in (3, 2, 1)]
    assert [[stage.workers for stage in plan.stages] for plan in found if isinstance(plan, ParallelPlan)] == [
        [((0,), (1,), (2,)), ((0,), (1,))],
        [((0,), (1,)), ((0,), (1,))],
        [((0,),), ((0,),)],
    ]
    assert isinstance(cache.find(0), PlanError)
    cache.prepare(found[2], ())  # for the loss of the last worker there is none
