"""The memory sheet of replicas that divide state is true after every instruction of a step, at every level and schedule."""

from __future__ import annotations

import pytest
from helpers import ugly_models
from helpers.offloaded_layouts import small_memory_offloaded, with_rest_offloaded
from helpers.parity import PRECISIONS
from helpers.sheet_checks import check_kept, gradient_bytes
from helpers.zero_layouts import PIECE, small_pieces

from raypar.job import AverageConfig, Job, OptimizerConfig, PlanConfig
from raypar.model.graph import Graph
from raypar.plan import ParallelPlan
from raypar.plan.stage_plan import GATHER_SPANS
from raypar.planner.memory_sheet import MemorySheet, memory_sheets
from raypar.schedule import registry
from raypar.worker.layer_graph_of_job import make_layer_graph
from raypar.worker.measure_profile import profile_job
from raypar.worker.run_in_one_process import OneProcessRun
from raypar.worker.worker_core import WorkerCore

pytestmark = pytest.mark.part(24)

LEVELS = (0, 1, 2, 3)
SCHEDULES = tuple(name for name in registry.NAMES if name != "naive")
SPLIT = ("zb-h1", "zb-v")
"""Schedules that compute weight gradients apart, so that a block's are never all there at once."""
WHOLE = tuple(name for name in SCHEDULES if name not in SPLIT)


def plan_of(graph: Graph, schedule: str, replicas: tuple[int, ...], level: int, **more) -> ParallelPlan:
    plan = ParallelPlan.of(
        replicas,
        layers=len(graph.layers),
        chunks=registry.resolve_chunks_per_worker(schedule),
        placement=registry.placement_of_schedule(schedule),
        recompute=range(len(graph.layers)) if more.pop("recompute", False) else (),
    )
    plan = plan.with_zero(level, more.pop("holders", None)).with_gradients(more.pop("gradients", "fold"))
    return plan.with_gather(more.pop("gather", "step"))


@pytest.mark.parametrize("recompute", [False, True], ids=["kept", "recomputed"])
@pytest.mark.parametrize("schedule", SCHEDULES)
@pytest.mark.parametrize("level", LEVELS)
def test_what_is_kept_for_backward_passes_is_what_the_sheet_counts(level, schedule, recompute, monkeypatch):
    job = ugly_models.job("tangled", microbatches=5)
    graph = make_layer_graph(job)
    with small_pieces():
        check_kept(job, graph, plan_of(graph, schedule, (2, 3), level, recompute=recompute), schedule, monkeypatch)


@pytest.mark.parametrize("schedule", SCHEDULES)
def test_so_it_is_where_parameters_come_for_each_use(schedule, monkeypatch):
    job = ugly_models.job("tangled", microbatches=5)
    graph = make_layer_graph(job)
    with small_pieces():
        check_kept(job, graph, plan_of(graph, schedule, (2, 3), 3, gather="microbatch"), schedule, monkeypatch)


KEPT_BESIDE = {
    "by layer": {"level": 3, "gather": "layer"},
    "by layer, recomputed": {"level": 3, "gather": "layer", "recompute": True},
    "by microbatch, recomputed": {"level": 3, "gather": "microbatch", "recompute": True},
    "scattered": {"level": 2, "gradients": "scatter"},
    "scattered, level 0": {"level": 0, "gradients": "scatter"},
    "scattered, by layer": {"level": 3, "gradients": "scatter", "gather": "layer"},
    "two holders": {"level": 2, "holders": 2, "replicas": (3, 4)},
    "two holders, by layer": {"level": 3, "holders": 2, "replicas": (3, 4), "gather": "layer"},
    "masters": {"level": 1, "precision": "bf16 parameters"},
    "masters, by layer": {"level": 3, "gather": "layer", "precision": "bf16 parameters"},
    "in files": {"level": 2, "offload": True},
    "in files, by layer, scattered": {"level": 3, "offload": True, "gather": "layer", "gradients": "scatter"},
}


@pytest.mark.parametrize("schedule", SCHEDULES)
@pytest.mark.parametrize("case", KEPT_BESIDE)
def test_so_it_is_with_what_else_replicas_that_divide_state_do(case, schedule, monkeypatch, tmp_path):
    more = dict(KEPT_BESIDE[case])
    job = ugly_models.job("tangled", microbatches=5, precision=PRECISIONS[more.pop("precision", None)])
    graph, replicas = make_layer_graph(job), more.pop("replicas", (2, 3))
    offload = more.pop("offload", False)
    plan = plan_of(graph, schedule, replicas, **more)
    if offload:
        job, plan = job.replace(plan=PlanConfig(activations_in=str(tmp_path))), with_rest_offloaded(plan)
    with small_pieces(), small_memory_offloaded():
        check_kept(job, graph, plan, schedule, monkeypatch)


def sheets_of(job: Job, graph: Graph, plan: ParallelPlan, schedule: str) -> tuple[MemorySheet, ...]:
    return memory_sheets(profile_job(job, workers=plan.world, graph=graph), plan, schedule, job.batching)


OPTIMIZERS = {
    "AdamW": OptimizerConfig(function="torch.optim:AdamW", args={"lr": 1e-2}),
    "SGD": OptimizerConfig(function="torch.optim:SGD", args={"lr": 1e-2}),
    "momentum": OptimizerConfig(function="torch.optim:SGD", args={"lr": 1e-2, "momentum": 0.9}),
}
CASES = [
    *((schedule, (2, 3), level, "AdamW", {}) for schedule in SCHEDULES for level in LEVELS),
    *(("1f1b", (3,), level, "SGD", {}) for level in LEVELS),
    *(("gpipe", (2, 1), level, "momentum", {}) for level in LEVELS),
    *(("1f1b", (3, 4), level, "AdamW", {"holders": 2}) for level in LEVELS[1:]),
    *((schedule, (2, 3), level, "AdamW", {"gradients": "scatter"}) for schedule in WHOLE for level in LEVELS),
    *((schedule, (3, 4), 3, "AdamW", {"holders": 2, "gather": "layer"}) for schedule in SCHEDULES),
    *((schedule, (2, 3), level, "AdamW", {"precision": "bf16 parameters"}) for schedule in SCHEDULES for level in LEVELS[1:]),
    *(("1f1b", (2, 3), 3, "AdamW", {"precision": "bf16 parameters", "gather": gather}) for gather in GATHER_SPANS[1:]),
    ("1f1b", (2, 3), 3, "AdamW", {"recompute": True, "gather": "layer", "gradients": "scatter"}),
    *((schedule, (2, 3), 3, "AdamW", {"gather": gather}) for schedule in SCHEDULES for gather in GATHER_SPANS[1:]),
]


@pytest.mark.parametrize("schedule, replicas, level, optimizer, more", CASES, ids=str)
def test_state_and_gradients_are_what_the_sheet_counts_after_every_instruction(schedule, replicas, level, optimizer, more):
    """Gradients take that when they are most: two microbatches of a block, so that its own are beside the open sums of others.
    The rest is there all the time, each kind within a piece."""
    job = ugly_models.job("plain", microbatches=8, virtual_replicas=4, optimizer=OPTIMIZERS[optimizer])
    more = dict(more)
    job = job.replace(average=AverageConfig(decay=0.9, from_step=1), precision=PRECISIONS[more.pop("precision", None)])
    graph = make_layer_graph(job)
    plan = plan_of(graph, schedule, replicas, level, **more)
    runs: list[OneProcessRun] = []
    most = [0] * plan.world

    def look(step: int, instruction: object) -> None:
        for core in runs[0].cores:
            most[core.rank] = max(most[core.rank], gradient_bytes(core))
            check_state(core, sheets[core.rank])

    with small_pieces():
        sheets = sheets_of(job, graph, plan, schedule)
        with OneProcessRun(job, plan, schedule, graph=graph, before_compute=look) as run:
            runs.append(run)
            for step in range(3):
                run.step(step)
                for core in run.cores:
                    check_state(core, sheets[core.rank])
    for rank, (sheet, found) in enumerate(zip(sheets, most, strict=True)):
        assert found <= sheet.state["gradient"], (most, sheets)
        several = len(plan.stages_of(rank)) > 1  # which need not all have most at the same time
        assert several or schedule in SPLIT or "gradients" in more or found == sheet.state["gradient"], (most, sheets)


def check_state(core: WorkerCore, sheet: MemorySheet) -> None:
    """Each kind is there within a piece; what is gathered may be gone, or that of some stages, after its last use in a step."""
    held, predicted = core.memory(), sheet.by_kind
    # Runs of freed parameters are tensors of their own, like masters; copies of masters are gone as a whole.
    state = [("parameter",), ("master",)] if predicted.get("master") else [("parameter", "master")]
    for kinds in (*state, ("optimizer",), ("average",)):
        found, wanted = (sum(of.get(kind, 0) for kind in kinds) for of in (held, predicted))
        assert abs(found - wanted) <= 8 * PIECE or not found, (kinds, held, sheet)
    assert held.get("gathered", 0) <= sheet.gathered, (held, sheet)
