"""Workers of a large run have sockets to those alone with which they exchange messages, which is known before they connect.

The tests treat few workers as many; `tests/chaos/test_vote_tree_kills.py` adds state that moves, copies of it, and losses.
"""

from functools import cache

import pytest
from helpers import ugly_models
from helpers.metrics import energy
from helpers.parity import Layout, validation_on
from helpers.shard_grid import Cell

from raypar.job import Job, MetricConfig
from raypar.model.graph import Graph
from raypar.plan import Microbatches, MicrobatchRouting, ParallelPlan, StageConnections, vote_tree
from raypar.plan.pieces import AdoptPlanCommand
from raypar.plan.tensor_parallel_layout import TensorParallelLayout
from raypar.schedule import registry
from raypar.schedule.program_assignment import assign_programs_to_ranks
from raypar.worker.connected_ranks import connected_ranks
from raypar.worker.layer_graph_of_job import make_layer_graph
from raypar.worker.run_in_one_process import OneProcessRun

MOST_CONNECTIONS = 40


@pytest.fixture
def few_workers_are_many(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(vote_tree, "MOST_DIRECT", 2)
    monkeypatch.setattr(vote_tree, "FANOUT", 2)


def check(job: Job, graph: Graph, plan: ParallelPlan, schedule: str) -> list[frozenset[int]]:
    """A step and a validation send nothing to a worker that is not connected; by rank, those that are."""
    with OneProcessRun(job, plan, schedule, graph=graph) as run:
        numbers = {rank: rank for rank in range(plan.world)}
        found = []
        for rank, core in enumerate(run.cores):
            core.transport.peers = connected_ranks(AdoptPlanCommand(core.assignment, numbers, 0), rank, job, core.layout)
            found.append(core.transport.peers)
        run.step(0)
        if job.validation is not None:
            run.validate(1)
    assert all(rank in found[other] for rank, others in enumerate(found) for other in others), "both ends name each other"
    return found


@pytest.mark.parametrize(
    "layout",
    [
        Layout("tangled", "1f1b", (2, 2), 4),
        Layout("tangled", "zb-v", (2, 2), 7),
        Layout("tangled", "gpipe", (1, 2, 3, 1), 8),
        Layout("relayed", "1f1b", (1, 2, 1, 1), 4),
        Layout("branching", "gpipe", (1, 2, 1, 1, 1), 3),
        Cell("gpt", "1f1b", (2, 1), (2, 2), 5),
        Cell("llama", "1f1b", (1, 1), (3, 2), 5, sequence=True),
    ],
    ids=str,
)
def test_nobody_has_a_message_for_a_worker_with_which_it_is_not_connected(layout, few_workers_are_many):
    job = layout.job.replace(steps=1)
    if isinstance(layout, Layout):
        job = job.replace(validation=validation_on(job.data, samples=13))
    found = check(job, layout.graph, layout.plan, layout.schedule)
    if layout.plan.world > 6:
        assert min(map(len, found)) < layout.plan.world - 1, "some are not connected"


def test_so_it_is_where_metrics_are_gathered_and_buffers_exchanged(few_workers_are_many):
    job = ugly_models.job("counters", microbatches=6, steps=1)
    job = job.replace(model=job.model.replace(buffers="sum"), metrics={"energy": MetricConfig(function=energy)})
    job = job.replace(metrics_every=1)
    check(job, make_layer_graph(job), ParallelPlan.mesh(pp=2, dp=3, layers=8), "1f1b")


def test_up_to_32_workers_are_all_connected():
    order = AdoptPlanCommand(None, {number: number for number in range(32)}, 0)
    assert connected_ranks(order, 3, ugly_models.job(), None) == frozenset(range(32)) - {3}


@pytest.mark.ci
def test_a_worker_of_1024_in_8_stages_8_replicas_and_16_shards_has_at_most_40_connections():
    plan, batching = ParallelPlan.mesh(pp=8, dp=8, tp=16, layers=96), Microbatches(64, 0, 512)
    order = registry.build_schedule("1f1b", MicrobatchRouting(plan, batching))
    parts = assign_programs_to_ranks(order, plan, StageConnections.chain(8), batching)
    job = ugly_models.job("plain", microbatches=64)
    layout = cache(lambda shards: TensorParallelLayout(shards, {}, {}))
    numbers = {rank: rank for rank in range(plan.world)}
    keepers = {rank: (rank + 8) % plan.world for rank in numbers}
    for rank in (0, 1, 7, 8, 100, 511, 512, 1000, 1023):
        part = AdoptPlanCommand(parts[rank], numbers, 0, mirror_keepers=keepers)
        assert len(connected_ranks(part, rank, job, layout)) <= MOST_CONNECTIONS
