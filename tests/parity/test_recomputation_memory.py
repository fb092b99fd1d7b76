"""The memory sheet is true: what is alive after each instruction of a run is what was measured in one process, times counts."""

import pytest
from helpers import ugly_models
from helpers.shard_grid import Cell
from helpers.sheet_checks import check_kept

from raypar.job import Job, PrecisionConfig
from raypar.model.graph import Graph
from raypar.plan import ParallelPlan
from raypar.plan.recomputation import RecomputePolicy, resolve_recomputed_layers
from raypar.schedule import registry
from raypar.worker.layer_graph_of_job import make_layer_graph

pytestmark = pytest.mark.part(4)

SCHEDULES = ("gpipe", "1f1b", "interleaved", "zb-v")
CASES = {
    "plain": ("none", "full", ("1", "2", "5")),
    "tangled": ("none", "full", ("mix*", "skip1")),
    "gpt": ("none", "full", ("block0", "block3", "head")),
}
CELLS = [
    pytest.param(model, schedule, policy, marks=[] if number % 4 == 1 else pytest.mark.full)
    for number, (model, schedule, policy) in enumerate(
        (model, schedule, policy) for schedule in SCHEDULES for model, policies in CASES.items() for policy in policies
    )
]
"""The default suite takes every fourth: each schedule, each model and each policy."""


def job_and_graph(model: str) -> tuple[Job, Graph]:
    """Five ragged microbatches (2 or 3 samples; of the GPT four)."""
    if model == "gpt":
        cell = Cell("gpt", "1f1b", (1,), (1,), 4, dtype="float32")
        return cell.job, cell.graph
    job = ugly_models.job(model, microbatches=5)
    return job, make_layer_graph(job)


@pytest.mark.parametrize("model, schedule, policy", CELLS, ids=str)
def test_what_is_alive_after_each_instruction_is_counts_times_measured_bytes(model, schedule, policy, monkeypatch):
    check_sheet(*job_and_graph(model), schedule, policy, monkeypatch)


@pytest.mark.parametrize("schedule, policy", [("zb-v", "none"), ("zb-h1", "full"), ("1f1b", ("1", "2", "5"))])
def test_so_it_is_in_bfloat16_where_casts_of_weights_are_kept(schedule, policy, monkeypatch):
    job, graph = job_and_graph("plain")
    check_sheet(job.replace(precision=PrecisionConfig(compute="bf16")), graph, schedule, policy, monkeypatch)


def check_sheet(job: Job, graph: Graph, schedule: str, policy: RecomputePolicy, monkeypatch: pytest.MonkeyPatch) -> None:
    plan = ParallelPlan.mesh(
        pp=2,
        layers=len(graph.layers),
        chunks=registry.resolve_chunks_per_worker(schedule),
        placement=registry.placement_of_schedule(schedule),
        recompute=resolve_recomputed_layers(policy, [layer.name for layer in graph.layers]),
    )
    check_kept(job, graph, plan, schedule, monkeypatch)
