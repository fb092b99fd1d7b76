"""`plan.gradients: auto`: what is chosen, what is said, and how many bytes either way sends."""

from __future__ import annotations

from dataclasses import replace

import pytest
from helpers.parity import Layout
from helpers.shard_grid import Cell
from helpers.zero_layouts import small_pieces

from raypar.errors import PlanError, ScheduleError
from raypar.job import Job, PlanConfig
from raypar.job.read_job import parse_job
from raypar.launch.choose_plan import choose_what_is_open
from raypar.plan import Microbatches, MicrobatchRouting, ModelOutline, ParallelPlan
from raypar.plan.gradient_pool import GradientPool
from raypar.plan.gradient_traffic import gradient_traffic
from raypar.plan.state_bytes import StateBytes
from raypar.planner import gradient_route
from raypar.planner.gradient_route import choose_gradient_route
from raypar.planner.model_profile import LayerProfile, LinkProfile, ModelProfile
from raypar.planner.plan_search import search_plans
from raypar.schedule import registry
from raypar.schedule.validate import find_schedule_problems
from raypar.worker.make_worker_assignments import make_worker_assignments
from raypar.worker.run_in_one_process import OneProcessRun

SIZE = 4 << 20
OUTLINE = ModelOutline((("a", ("x",), ("y",)),), elements=({"a": SIZE // 4},))
STATE = StateBytes(OUTLINE, {"parameter": {"a": SIZE}, "gradient": {"a": SIZE}, "optimizer": {"a": 2 * SIZE}})
LAYER = LayerProfile("a", 1.0, 2.0, 1.0, 1.0, 1 << 10, 1 << 10, SIZE, 2 * SIZE, 0.1)
PROFILE = ModelProfile((LAYER,), LinkProfile(0.0, SIZE), state=STATE, most_zero=3)


def chosen(plan, batching, memory=None, schedule="1f1b", **more):
    profile = replace(PROFILE, memory_bytes=memory)
    return choose_gradient_route(profile, plan, schedule, batching, lambda _: GradientPool(8 << 20, OUTLINE, 4), **more)


def test_fold_is_kept_where_it_fits_and_is_as_fast():
    plan = ParallelPlan.mesh(dp=2, layers=1)
    found, line = chosen(plan, Microbatches(8, 8))
    assert found == plan and line.startswith("plan.gradients=fold: predicted ") and " with scatter" in line
    assert chosen(plan, Microbatches(8, 8), is_asked=False) == (plan, "")


def test_nothing_is_simulated_where_nobody_asks_and_replicas_have_equal_numbers(monkeypatch):
    calls, predict = [], gradient_route.predict_step
    monkeypatch.setattr(gradient_route, "predict_step", lambda *given: calls.append(given) or predict(*given))
    chosen(ParallelPlan.mesh(dp=2, layers=1), Microbatches(8, 8), is_asked=False)
    assert len(calls) == 1


@pytest.mark.parametrize("is_asked", [True, False])
def test_replicas_that_would_have_nothing_to_do_take_turns(is_asked):
    """One block: folded, the second replica has no microbatch."""
    found, line = chosen(ParallelPlan.mesh(dp=2, layers=1), Microbatches(8, 1), is_asked=is_asked)
    assert found.gradients == "scatter" and line.startswith("plan.gradients=scatter: predicted "), line


def test_scatter_is_taken_where_it_alone_fits():
    plan = ParallelPlan.mesh(dp=4, layers=1).with_zero(2)
    found, line = chosen(plan, Microbatches(8, 8), memory=12 << 20, is_asked=False)
    assert found.gradients == "scatter" and "with plan.gradients=fold), a worker has 12.0 MiB" in line
    assert chosen(plan, Microbatches(8, 8), memory=1 << 30, is_asked=False) == (plan, "")


def test_fold_is_kept_where_neither_fits():
    plan = ParallelPlan.mesh(dp=4, layers=1)
    found, line = chosen(plan, Microbatches(8, 8), memory=1 << 20)
    assert found == plan and line == "plan.gradients=fold: scattered, they do not fit either"
    assert chosen(plan, Microbatches(8, 8), memory=1 << 20, is_asked=False) == (plan, "")


def test_the_search_scatters_where_nothing_else_fits():
    tight, batching = replace(PROFILE, memory_bytes=10 << 20, zero_is_open=True), Microbatches(8, 8)
    with pytest.raises(PlanError, match="no plan for 4 workers fits"):
        search_plans(tight, 4, batching, zero=None)
    choice = search_plans(replace(tight, scatter_is_open=True), 4, batching, zero=None)
    assert choice.plan.gradients == "scatter" and choice.best.memory_bytes <= 10 << 20
    assert choice.best.changed_for_memory.endswith(" and plan.gradients=scatter")
    roomy = search_plans(replace(tight, memory_bytes=1 << 30, scatter_is_open=True), 4, batching, zero=None)
    assert roomy.plan.gradients == "fold"


def test_without_replicas_there_is_nothing_to_choose():
    plan = ParallelPlan.mesh(layers=1)
    assert chosen(plan, Microbatches(4, 4)) == (plan, "plan.gradients=fold: no stage has replicas")
    assert chosen(plan, Microbatches(4, 4), is_asked=False) == (plan, "")


def test_the_key_says_whether_it_is_open_and_whether_somebody_asks():
    text = """
    model: {function: "helpers.tiny_job:model"}
    loss: {function: "helpers.tiny_job:loss"}
    data: {function: "helpers.tiny_job:data"}
    steps: 2
    batch_size: 8
    microbatches: 4
    """
    job = parse_job(text + "plan: {replicas: 2}")
    assert job.leaves_gradients_open and not job.asks_for_gradients and job.plan.to_plan(2).gradients == "fold"
    job = parse_job(text + "plan: {replicas: 2, gradients: auto}")
    assert job.leaves_gradients_open and job.asks_for_gradients
    assert not parse_job(text + "plan: {replicas: 2, gradients: fold}").leaves_gradients_open
    assert not parse_job(text + "plan: {replicas: 2}\n    reduction: fast").leaves_gradients_open
    on_gpus = parse_job(text + "plan: {replicas: 2, gradients: scatter}\n    device: gpu")
    assert on_gpus.plan.given_gradients == "scatter", "where the job says so"
    assert not parse_job(text + "plan: {replicas: 2}\n    device: gpu").leaves_gradients_open
    assert PlanConfig.of_plan(ParallelPlan.mesh(dp=2, layers=2), "1f1b").gradients == "fold"
    assert callable(choose_what_is_open)


NEEDS_ROOM = [
    Layout("tangled", "naive", (1, 2), 4),
    Layout("tangled", "zb-v", (2, 1, 3), 5),
    Layout("tangled", "interleaved", (2, 3, 1, 2), 8),
]


@pytest.mark.parametrize("layout", NEEDS_ROOM, ids=str)
def test_a_job_with_too_small_a_pool_is_told_the_size_that_works(layout, monkeypatch):
    """Where a schedule has a replica wait for others that wait for it, whatever fits into one message."""
    job, graph, plan = layout.job, layout.graph, layout.plan.with_zero(2).with_gradients("scatter")
    routing = MicrobatchRouting(plan, job.batching)
    orders = registry.build_schedule(layout.schedule, routing, connections=graph.crossing(plan))
    assert find_schedule_problems(orders, routing, graph.crossing(plan))
    monkeypatch.setattr(Job, "reduction_buffer_bytes", property(lambda self: 1_000))
    with pytest.raises(ScheduleError, match="1 microbatch find room on their way: in 0 MiB they do not") as error:
        make_worker_assignments(job, graph, plan, orders)
    assert error.value.cure.startswith("set plan.reduction_buffer_mib: 1, ")
    monkeypatch.setattr(Job, "reduction_buffer_bytes", property(lambda self: 1 << 20))
    assert make_worker_assignments(job, graph, plan, orders)


def test_a_stage_without_trained_parameters_has_room_for_any_number_of_microbatches(monkeypatch):
    layout = Layout("plain", "interleaved", (1, 4, 1), 8, blocks=8)
    plan = layout.plan.with_gradients("scatter")
    orders = registry.build_schedule("interleaved", MicrobatchRouting(plan, layout.job.batching))
    monkeypatch.setattr(Job, "reduction_buffer_bytes", property(lambda self: 1_000))
    assert make_worker_assignments(layout.job, layout.graph, plan, orders)


TRAFFIC = [
    (Layout("plain", "1f1b", (3,), 6, blocks=6), 2, 1),
    (Layout("tangled", "1f1b", (3, 2), 5), 0, 1),
    (Layout("tangled", "1f1b", (3,), 7), 1, 2),
    (Layout("tangled", "1f1b", (2,), 4, compute="bf16 gradients"), 2, 1),
    (Cell("llama", "1f1b", (3, 2), (2, 1), 5, dtype="float32"), 2, 1),
]


@pytest.mark.parametrize("cell, level, holders", TRAFFIC, ids=str)
def test_the_ledger_has_the_bytes_that_are_said(cell, level, holders):
    counted = {}
    for route in ("fold", "scatter"):
        plan = cell.plan.with_zero(level, holders).with_gradients(route)
        with small_pieces(), OneProcessRun(cell.job, plan, "1f1b", graph=cell.graph) as run:
            run.step(0)
            before = sent(run)
            run.step(1)
            counted[route] = sent(run) - before
            bits = {}
            for core in run.cores:
                for key in core.stages:
                    for use, (name, _, dtype) in enumerate(core.stages[key].uses):
                        bits.setdefault(canonical(core, key, use), (name, dtype.itemsize))
            sizes = {name: size for layer in run.cores[0].ownership.outline.elements for name, size in layer.items()}
            nbytes = {name: bits[name][1] * sizes[name] for name in bits}
            told = gradient_traffic(run.cores[0].ownership, cell.job.batching, nbytes)
        if route == "scatter" or (level and holders == 1):
            assert counted[route] == getattr(told, route), route
    assert told.scatter > told.fold or cell.microbatches < max(cell.replicas) * 2


def canonical(core, key, use) -> str:
    return next(name for name, places in core.step_commit._places[key].items() if use in places)


def sent(run) -> int:
    """Bytes of gradients between replicas: with several holders the gather of parameters is an all-to-all, too."""
    plan = run.cores[0].step_commit.routing.plan
    kinds = ["scatter"] + (["all_gather"] if not plan.most_zero else ["all_to_all", "window"] * (plan.gradients == "fold"))
    return sum(core.transport.ledger.sent[kind] for core in run.cores for kind in kinds)
