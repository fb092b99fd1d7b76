"""The memory sheet is true: what is alive after each instruction of a run is what was measured in one process, times counts."""

import pytest
from helpers import ugly_models
from helpers.live_storages import LiveStorages
from helpers.shard_grid import Cell

from raypar.job import Job, PrecisionConfig
from raypar.model.graph import Graph
from raypar.plan import MicrobatchRouting, ParallelPlan
from raypar.plan.recomputation import RecomputePolicy, resolve_recomputed_layers
from raypar.planner.model_profile import ModelProfile
from raypar.planner.predicted_step import kept_bytes_by_kind, predict_step
from raypar.schedule import registry
from raypar.schedule.instructions import KEPT_SIZE, STASH, Compute
from raypar.worker.layer_graph_of_job import make_layer_graph
from raypar.worker.measure_profile import one_microbatch_of_each_size, profile_layers, read_microbatches
from raypar.worker.run_in_one_process import OneProcessRun

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


def expected_after_each(order: tuple[Compute, ...], sizes) -> list[tuple[str, int, int]]:
    """(instruction, bytes kept after it, of which the stash) from the declarations of the instructions."""
    kept, found = dict.fromkeys(KEPT_SIZE, 0), []
    for i in order:
        for kind in i.frees:
            kept[kind] -= sizes[kind][i.stage][i.microbatch]
        for kind in i.allocates:
            kept[kind] += sizes[kind][i.stage][i.microbatch]
        found.append((str(i), sum(kept.values()), kept[STASH]))
    return found


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
    routing = MicrobatchRouting(plan, job.batching)
    orders = registry.build_schedule(schedule, routing)
    measured = profile_layers(job, graph, read_microbatches(job, graph, one_microbatch_of_each_size(job.batching)))
    assert {kept.samples for kept in measured.kept} == {2, 3}
    profile = ModelProfile(measured.layers, outputs=measured.outputs, kept=measured.kept)
    sizes = kept_bytes_by_kind(profile, routing, orders)

    storages = LiveStorages()
    storages.watch(monkeypatch)
    with OneProcessRun(job, plan, orders, graph=graph) as run:
        run.step(0)
        storages.kept.clear()
        run.step(1)
    for rank, order in enumerate(orders):
        found = [(kept.after, kept.total, kept.stash) for kept in storages.kept if kept.rank == rank]
        assert found == expected_after_each(order, sizes)
    timeline, _ = predict_step(profile, plan, orders, job.batching)
    assert timeline.peak_bytes == tuple(max(k.total for k in storages.kept if k.rank == rank) for rank in range(2))
