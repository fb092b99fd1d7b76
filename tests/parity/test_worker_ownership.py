"""What real workers hold, train and count is what `plan.ownership` says of them."""

import pytest
from helpers import ugly_models
from helpers.shard_grid import Cell
from helpers.shard_grid import graph as grid_graph

from raypar.plan import ParallelPlan
from raypar.worker.layer_graph_of_job import make_layer_graph
from raypar.worker.run_in_one_process import OneProcessRun

TANGLED = ugly_models.job("tangled")
LAYERS = len(make_layer_graph(TANGLED).layers)
GPT = Cell("gpt", "1f1b", (1,), (1,), 5).job
GPT_LAYERS = len(grid_graph("gpt").layers)
CASES = {
    "one worker": (TANGLED, None, ParallelPlan.mesh(layers=LAYERS)),
    "3 and 2 replicas": (TANGLED, None, ParallelPlan.of([3, 2], layers=LAYERS)),
    "2 chunks": (TANGLED, None, ParallelPlan.mesh(pp=2, chunks=2, layers=LAYERS)),
    "2 shards": (GPT, "gpt", ParallelPlan.mesh(dp=2, tp=2, layers=GPT_LAYERS)),
    "2 and 3 shards": (GPT, "gpt", ParallelPlan.of([2, 1], [2, 3], layers=GPT_LAYERS)),
}


@pytest.fixture(params=CASES)
def cores(request):
    spec, graph, plan = CASES[request.param]
    schedule = "interleaved" if request.param == "2 chunks" else "1f1b"
    with OneProcessRun(spec, plan, schedule, graph=graph and grid_graph(graph)) as local:
        yield local.cores


def test_workers_hold_and_train_the_elements_that_they_own(cores):
    for core in cores:
        parameters = {name: p for stage in core.stages.values() for name, p in stage.parameters.items()}
        buffers = {name: b for stage in core.stages.values() for name, b in stage.buffers.items()}
        trained = [p.numel() for p in parameters.values() if p.requires_grad]
        kept = {kind: core.ownership.elements(core.rank, kind) for kind in ("parameter", "optimizer", "buffer")}
        sizes = [sum(p.numel() for p in parameters.values()), sum(trained), sum(b.numel() for b in buffers.values())]
        assert list(kept.values()) == sizes
        assert set(core.ownership.sizes(core.rank)) == {n for n, t in {**parameters, **buffers}.items() if t.numel()}


def test_squares_of_the_norm_are_counted_in_the_order_of_parameters(cores):
    """In another order the norm would have other bits."""
    for core in cores:
        plan, ties = core.assignment.plan, {tie.name: tie.stages[0] for tie in core.assignment.crossing.ties}
        for (index, _), stage in core.stages.items():
            replicas = plan.replica_ranks(index, plan.roles[core.rank][0].shard)
            counted = [name for rank in replicas for name in core.ownership.norm_parameters(rank)[index]]
            trained = [name for name, parameter in stage.parameters.items() if parameter.requires_grad]
            assert counted == [name for name in trained if ties.get(name, index) == index]
