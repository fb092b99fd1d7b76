"""The communicators that a plan needs are known before anything is built: those that its workers then use, and no others, but
for what turns out to be undefined, reductions of stages without parameters, gathering for a loss of whole logits, and tied
parameters of which stages with other numbers of replicas own runs."""

import contextlib
from dataclasses import replace
from functools import partial
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from helpers import ugly_models
from helpers.parity import Layout, layouts, validation_on
from helpers.shard_grid import Cell, cells
from helpers.zero_layouts import DividedLayout, small_pieces

from raypar.comm.nccl.device import COMMUNICATORS, WORKER_ENVIRONMENT
from raypar.comm.transport import COLLECTIVES, FAST_REDUCTION_CHANNELS, SHARD_CHANNELS, CommunicatorKey
from raypar.job import PlanConfig
from raypar.job.elastic_section import ElasticConfig
from raypar.job.read_job import load_job
from raypar.model.tensor_parallel.compute_shard_layout import compute_shard_layout
from raypar.model.tensor_parallel.styles.linear_styles import GatheredStyle
from raypar.plan import MicrobatchRouting, ParallelPlan, StageConnections, bundle_parts
from raypar.plan.pieces import MAX_DIRECT, AdoptPlanCommand, Piece, PieceMove, may_move_directly
from raypar.plan.tensor_parallel_layout import TensorParallelLayout as StyledLayout
from raypar.plan.tied_gradient_transfers import tied_gradient_pairs
from raypar.schedule import registry
from raypar.schedule.program_assignment import assign_programs_to_ranks
from raypar.worker.layer_graph_of_job import make_layer_graph
from raypar.worker.required_communicators import count_communicators, nccl_environment, required_communicators
from raypar.worker.run_in_one_process import OneProcessRun

pytestmark = pytest.mark.part(5)

GRID = [layout for layout in layouts() if layout.plan.world > 1]
CORNERS = [
    Layout("tangled", "1f1b", (2, 2), 4),
    Layout("plain", "interleaved", (2, 2), 5, chunks=4),
    Layout("tangled", "zb-v", (2, 2), 7),
    Layout("tangled", "gpipe", (1, 2, 3, 1), 8),
    Layout("tangled", "1f1b", (3, 3), 7, blocks=5),
    Layout("tangled", "1f1b", (2, 2), 5, blocks=1),
    Layout("relayed", "1f1b", (1, 2, 1, 1), 4),
    Layout("tangled", "1f1b", (2, 3), 8, blocks=8, shares=((7, 1), (4, 3, 1))),
    Layout("tangled", "1f1b", (2, 2), 8, blocks=8, shares=((4, 4), (5, 3))),
    Layout("branching", "gpipe", (1, 2, 1, 1, 1), 3),
    Layout("tangled", "1f1b", (4,), 8, blocks=8),
]


@contextlib.contextmanager
def overheard(transport, used, undefined):
    """What the rank would have a GPU's memory moved by is added to `used`. In these jobs that is fp32 and what stages hand on;
    votes are fp64. Gradients that are undefined, which is known too late, are empty vectors of the host's."""

    def send(tensor, *, to, tag, keep_layout=False, call=transport.send):
        if tensor.dtype != torch.float64:
            (undefined if tensor.shape == (0,) else used).add(CommunicatorKey((transport.rank, to), "message"))
        return call(tensor, to=to, tag=tag, keep_layout=keep_layout)

    def collective(name):
        call = getattr(transport, name)

        def listened(first, *rest, group, channel=0, **more):
            tensors = [first] if isinstance(first, torch.Tensor) else first
            if len(group) > 1 and tensors[0].dtype == torch.float32:
                used.add(CommunicatorKey(tuple(group), name, channel))
            return call(first, *rest, group=group, channel=channel, **more)

        return listened

    transport.send = send
    for name in COLLECTIVES:
        setattr(transport, name, collective(name))
    yield


def check(layout, nodes=(), **changes):
    job = layout.job.replace(steps=1, **changes)
    plan = layout.plan.with_virtual_shards(job.virtual_shards) if job.virtual_shards else layout.plan
    with OneProcessRun(job, plan, layout.schedule, graph=layout.graph, nodes=nodes) as run, contextlib.ExitStack() as stack:
        wanted = {
            w
            for rank, core in enumerate(run.cores)
            for w in required_communicators(AdoptPlanCommand(core.assignment, {}, 0, nodes=nodes), rank, job, core.layout)
        }
        used, undefined = set(), set()
        for transport in run.mesh.transports:
            stack.enter_context(overheard(transport, used, undefined))
        run.step(0)
        if job.validation is not None:
            run.validate(0)
        untrained = {index for core in run.cores for (index, _), stage in core.stages.items() if not stage.uses}
        spares = {rank for rank, core in enumerate(run.cores) if not core._own_microbatches}
    assert used <= wanted
    idle = wanted - used - undefined
    idle -= {w for w in idle if set(w.members) <= spares}  # a replica without a block computes nothing
    if not job.sequence_parallel:  # then only the loss gathers, of logits that are cut
        idle -= {CommunicatorKey(w.members, "all_gather", SHARD_CHANNELS + len(layout.plan.stages) - 1) for w in idle}
    ties = [tie for core in run.cores[:1] for tie in core.assignment.crossing.ties if plan.most_zero]
    uneven = [tie for tie in ties if len({plan.stages[stage].replicas for stage in tie.stages}) > 1]
    maybe = (pair for tie in uneven for pair in tied_gradient_pairs(plan, tie, {1: None}))
    idle -= {CommunicatorKey(pair, "message") for pair in maybe}
    assert not {w for w in idle if w.operation == "message" or w.channel % FAST_REDUCTION_CHANNELS not in untrained}


SHARDED = [replace(cell, dtype="float32") for cell in cells()]
"""Votes are fp64, whatever the job computes in."""
SHARDED_CORNERS = [
    Cell("gpt", "1f1b", (2, 1), (2, 2), 5, dtype="float32"),
    Cell("llama", "zb-h1", (1, 1), (1, 3), 5, sequence=True, dtype="float32"),
    Cell("llama", "1f1b", (1, 1), (4, 2), 5, dtype="float32"),
    Cell("llama", "1f1b", (1, 1), (3, 2), 5, sequence=True, dtype="float32"),
    Cell("dropped", "gpipe", (1, 2), (2, 3), 4, dtype="float32"),
    Cell("gpt", "interleaved", (1, 1), (2, 2), 4, sequence=True, dtype="float32"),
]


@pytest.mark.parametrize("layout", CORNERS, ids=str)
def test_a_step_uses_exactly_the_communicators_of_its_plan(layout):
    check(layout)


@pytest.mark.parametrize(
    "layout",
    [
        DividedLayout("tangled", "1f1b", (2, 3), 6, blocks=6),
        DividedLayout("tangled", "1f1b", (2, 2), 4),
        DividedLayout("relayed", "gpipe", (2, 1), 4),
    ],
    ids=str,
)
def test_a_step_whose_replicas_divide_state_uses_exactly_the_communicators_of_its_plan(layout):
    with small_pieces():  # each replica owns a part of every parameter
        check(layout)


@pytest.mark.full
@pytest.mark.parametrize("layout", GRID, ids=str)
def test_a_step_of_each_layout_uses_exactly_the_communicators_of_its_plan(layout):
    check(layout)


@pytest.mark.parametrize("cell", SHARDED_CORNERS, ids=str)
def test_a_step_with_shards_uses_exactly_the_communicators_of_its_plan(cell):
    check(cell)


@pytest.mark.parametrize(
    ("cell", "virtual_shards"), [(SHARDED_CORNERS[0], 4), (SHARDED_CORNERS[1], 3), (SHARDED_CORNERS[5], 4)], ids=str
)
def test_a_step_with_virtual_shards_uses_exactly_the_communicators_of_its_plan(cell, virtual_shards):
    check(cell, virtual_shards=virtual_shards)


@pytest.mark.parametrize("cell", [SHARDED_CORNERS[0], SHARDED_CORNERS[2], SHARDED_CORNERS[4]], ids=str)
def test_a_step_on_several_nodes_uses_exactly_the_communicators_of_its_plan(cell, monkeypatch):
    monkeypatch.setattr(bundle_parts, "LEAST_BYTES_IN_PARTS", 1)
    check(cell, bundle_parts.node_of_each_replica(cell.plan))


def test_communicators_are_counted_for_nodes_that_are_not_known_yet():
    """Blocks of NCCL's kernels follow from the number, before workers have nodes: it may not grow."""
    cell = Cell("gpt", "1f1b", (1, 1, 1), (2, 2, 2), 2, dtype="float32")
    with OneProcessRun(cell.job, cell.plan, cell.schedule, graph=cell.graph) as run:
        parts, layout = [core.assignment for core in run.cores], run.cores[0].layout
    counts = count_communicators(cell.job, cell.graph, parts)
    for nodes in ((), (0,) * 6, (0, 0, 1, 1, 2, 2), (0, 0, 1, 1, 0, 0), (0, 1, 2, 2, 2, 2)):
        orders = [AdoptPlanCommand(part, {}, 0, nodes=nodes) for part in parts]
        needed = [len(required_communicators(order, rank, cell.job, layout)) for rank, order in enumerate(orders)]
        assert all(need <= count for need, count in zip(needed, counts, strict=True)), nodes
        assert (needed == counts) is (nodes[:4] == (0, 0, 1, 1)), nodes


@pytest.mark.parametrize("mesh", [{"tp": 2}, {"tp": 2, "pp": 2}], ids=str)
def test_a_step_by_rows_uses_exactly_the_communicators_of_its_plan(mesh):
    smaller = ["model.args={width: 4, depth: 2}", "batch_size=4", "microbatches=2"]
    job = load_job(str(Path(__file__).parents[2] / "jobs" / "unet_rows.yaml"), smaller).replace(validation=None)
    graph = make_layer_graph(job)
    check(SimpleNamespace(job=job, plan=ParallelPlan.mesh(layers=len(graph.layers), **mesh), schedule="1f1b", graph=graph))


@pytest.mark.full
@pytest.mark.parametrize("cell", SHARDED, ids=str)
def test_a_step_of_each_layout_with_shards_uses_exactly_the_communicators_of_its_plan(cell):
    check(cell)


@pytest.mark.parametrize("cell", SHARDED_CORNERS[:1], ids=str)
def test_blocks_of_nccls_kernels_are_few_unless_the_runs_one_plan_waits_for_sums_over_shards(cell):
    with OneProcessRun(cell.job, cell.plan, cell.schedule, graph=cell.graph) as run:
        parts = [core.assignment for core in run.cores]
        most = max(
            len(required_communicators(AdoptPlanCommand(part, {}, 0), rank, cell.job, core.layout, anywhere=True))
            for rank, (part, core) in enumerate(zip(parts, run.cores, strict=True))
        )
    fixed = nccl_environment(cell.job, cell.graph, cell.plan, parts)
    assert {**fixed, "NCCL_MAX_CTAS": "4"} == {**WORKER_ENVIRONMENT, COMMUNICATORS: str(most)} and "NCCL_MAX_CTAS" not in fixed
    elastic = cell.job.replace(elastic=ElasticConfig())
    assert nccl_environment(elastic, cell.graph, cell.plan, parts) == WORKER_ENVIRONMENT
    whole = ParallelPlan.mesh(pp=2, dp=2, layers=len(cell.graph.layers))
    assert (
        nccl_environment(cell.job, cell.graph, whole, ()) == WORKER_ENVIRONMENT and WORKER_ENVIRONMENT["NCCL_MAX_CTAS"] == "4"
    )


def test_a_plain_all_reduce_of_gradients_has_other_communicators():
    check(Layout("tangled", "1f1b", (2, 2), 4), reduction="fast")


@pytest.mark.parametrize("layout", CORNERS[:3], ids=str)
def test_validation_needs_no_pair_of_workers_that_was_not_connected(layout):
    """Its microbatches are cut otherwise, so that other replicas meet."""
    check(layout, validation=validation_on(layout.job.data, samples=13))


JOB = ugly_models.job(microbatches=6)


def needed(part, rank, job=JOB):
    """Of plans without ties: how the model is cut does not matter."""
    return required_communicators(part, rank, job, partial(compute_shard_layout, make_layer_graph(job)))


def parts_of(plan, ranks=None, moves=()):
    order = registry.build_schedule("1f1b", MicrobatchRouting(plan, JOB.batching))
    made = assign_programs_to_ranks(order, plan, StageConnections.chain(len(plan.stages)), JOB.batching)
    return [AdoptPlanCommand(assignment, ranks or {}, 0, moves, direct=True) for assignment in made]


@pytest.mark.parametrize("shards", [(1, 1), (2, 2), (2, 1), (1, 3), (3, 2)])
@pytest.mark.parametrize("replicas", [(1, 1), (2, 2), (1, 2), (3, 1)])
def test_all_members_of_a_communicator_name_it(replicas, shards):
    plan = ParallelPlan.of(replicas, shards=shards, layers=4)
    named = [
        needed(part, rank, JOB.replace(plan=PlanConfig(sequence_parallel=True))) for rank, part in enumerate(parts_of(plan))
    ]
    for mine in named:
        for key in mine:
            assert all(key in named[member] for member in key.members), key
    for rank, mine in enumerate(named):
        assert all(rank in key.members for key in mine)


def test_shards_have_communicators_of_their_own_and_reduce_with_the_same_shard_of_other_replicas():
    plan = ParallelPlan.of((3,), shards=(2,), layers=2)
    part = parts_of(plan)[2]
    assert needed(part, 2) == {  # replica 1, shard 0
        CommunicatorKey((2, 3), "all_reduce", SHARD_CHANNELS),
        CommunicatorKey((2, 3), "all_gather", SHARD_CHANNELS),
        CommunicatorKey((0, 2, 4), "all_to_all", 0),
        CommunicatorKey((0, 2, 4), "all_gather", 0),
    }
    assert CommunicatorKey((2, 3), "reduce_scatter", SHARD_CHANNELS) in needed(
        part, 2, JOB.replace(plan=PlanConfig(sequence_parallel=True))
    )
    assert CommunicatorKey((0, 2, 4), "all_reduce", FAST_REDUCTION_CHANNELS) in needed(part, 2, JOB.replace(reduction="fast"))


def test_four_replicas_with_a_subtree_each_halve_in_one_communicator():
    job = JOB.replace(microbatches=8)
    plan = ParallelPlan.of((4,), layers=2)
    order = registry.build_schedule("1f1b", MicrobatchRouting(plan, job.batching))
    part = AdoptPlanCommand(assign_programs_to_ranks(order, plan, StageConnections.chain(1), job.batching)[1], {}, 0)
    assert needed(part, 1, job) == {CommunicatorKey((0, 1, 2, 3), "halving_all_reduce", 0)}


def test_shards_that_gather_nothing_have_no_communicator_for_it():
    plan = ParallelPlan.of((1, 1), shards=(2, 2), layers=4)
    gathered = {"layer1": GatheredStyle().collectives(torch.nn.Linear(4, 4))}
    first, last = parts_of(plan)[0], parts_of(plan)[2]
    gather = CommunicatorKey((0, 1), "all_gather", SHARD_CHANNELS)
    assert gather not in needed(first, 0)
    assert gather in needed(first, 0, JOB.replace(plan=PlanConfig(sequence_parallel=True)))
    layout = StyledLayout(2, {"layer1": "gathered"}, {}, traffic=gathered)
    assert gather in required_communicators(first, 0, JOB, lambda shards: replace(layout, shards=shards))
    assert CommunicatorKey((2, 3), "all_gather", SHARD_CHANNELS + 1) in needed(last, 2), "the loss"


def test_state_that_changes_hands_has_communicators_and_who_has_no_seat_has_no_others():
    plan = ParallelPlan.of((1, 1), layers=2)
    ranks = {5: 0, 8: 1, 3: 2}
    moves = (PieceMove(3, 8, Piece("a", 0, 4)), PieceMove(3, 8, Piece("b", 0, 4)), PieceMove(8, 8, Piece("c", 0, 4)))
    handed = CommunicatorKey((2, 1), "message")
    assert may_move_directly(moves)
    assert needed(AdoptPlanCommand(None, ranks, 0, moves, direct=True), 2) == {handed}
    assert needed(AdoptPlanCommand(None, ranks, 0, moves), 2) == set()
    alone, parts = parts_of(plan), parts_of(plan, ranks, moves)
    assert needed(parts[1], 1) == needed(alone[1], 1) | {handed}
    assert needed(parts[0], 0) == needed(alone[0], 0)


def test_state_from_more_workers_than_there_can_be_communicators_for_travels_through_host_memory():
    for sources in (MAX_DIRECT, MAX_DIRECT + 1):
        ranks = {worker: worker for worker in range(sources + 1)}
        moves = tuple(PieceMove(worker, 0, Piece("a", worker, worker + 1)) for worker in range(1, sources + 1))
        part = AdoptPlanCommand(None, ranks, 0, moves, direct=may_move_directly(moves))
        assert len(needed(part, 0)) == (sources if sources <= MAX_DIRECT else 0)
