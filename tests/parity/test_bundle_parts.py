"""Bundles that travel in parts between nodes have the bits, strides and places of whole ones, and a part of their bytes."""

from __future__ import annotations

import random
from collections import Counter
from dataclasses import replace
from itertools import product

import pytest
import torch
from helpers import tcp_calls
from helpers.drawn_cells import check_drawn, draw_cell
from helpers.nodes_apart import put_apart
from helpers.processes import Workers
from helpers.random_grids import random_plan
from helpers.shard_grid import BATCH, SEQ, SHALLOW, WIDTH, Cell, cells, check_plan, graph, run
from helpers.standin import needs_cupy
from torch import Tensor

from raypar.comm.buffer_pool import bytes_behind_alignment
from raypar.comm.cooperative_scheduler import CooperativeScheduler
from raypar.comm.local_transport import LocalMesh
from raypar.comm.routine import StreamWaits
from raypar.plan import Microbatches, MicrobatchRouting, ParallelPlan, bundle_parts
from raypar.plan.bundle_parts import network_bytes, node_of_each_replica, travels_in_parts
from raypar.worker.run_in_one_process import OneProcessRun
from raypar.worker.step.bundle_gather import BundleGather, cut_bundle, read_description

pytestmark = pytest.mark.part(5)


@pytest.fixture
def gathered(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """Every replica is on a node of its own; the number of cut tensors of each bundle in parts."""
    return put_apart(monkeypatch)


# -- when ------------------------------------------------------------------------------------------------------------------


def test_parts_travel_to_shards_on_one_node_from_makers_on_others():
    assert travels_in_parts((0, 1), (2, 3), (0, 0, 1, 1))
    assert travels_in_parts((0,), (1, 2, 3), (0, 1, 1, 1))
    assert not travels_in_parts((0, 1), (2, 3), ()), "nobody knows the nodes"
    assert not travels_in_parts((0, 1), (2, 3), (0, 0, 0, 0)), "one node"
    assert not travels_in_parts((0, 1), (2,), (0, 0, 1)), "one user"
    assert not travels_in_parts((0, 1), (2, 3), (0, 0, 1, 2)), "the users would gather over the network"
    assert not travels_in_parts((0, 1), (2, 3), (1, 0, 1, 1)), "one user is served on its node"
    assert not travels_in_parts((0,), (0, 1), (0, 1)), "one user is the maker"


@pytest.mark.parametrize("seed", range(50))
def test_the_network_never_carries_more_than_with_whole_values(seed: int):
    dice = random.Random(seed)
    plan = random_plan(dice, 6)
    nodes = [dice.randrange(2) for _ in range(plan.world)]
    routing, outline = MicrobatchRouting(plan, Microbatches(4, 4)), range(len(plan.stages))
    for maker, user, m in product(outline, outline, range(4)):
        makers, users = routing.ranks(maker, m), routing.ranks(user, m)
        if travels_in_parts(makers, users, nodes):
            serving = [nodes[makers[shard]] for shard in routing.serving_shards(maker, user, m)]
            assert {nodes[rank] for rank in users}.isdisjoint(serving) and len(serving) > 1
            assert len({nodes[rank] for rank in users}) == 1


# -- how -------------------------------------------------------------------------------------------------------------------


def tensors() -> dict[str, Tensor]:
    """Tensors that lie in memory in every way, and some that are not cut."""
    draw = torch.Generator().manual_seed(1)
    whole = torch.randn(6, 10, 14, generator=draw)
    return {
        "new": whole,
        "transposed": whole.transpose(0, 2),
        "channels last": torch.randn(2, 8, 5, 6, generator=draw).to(memory_format=torch.channels_last),
        "in the middle": torch.randn(1000, generator=draw)[5:905].view(30, 30),
        "with gaps": whole[:, ::2],
        "expanded": whole[:1].expand(9, 10, 14),
        "bfloat16": whole.bfloat16(),
        "one element": torch.randn((), generator=draw),
        "negated": torch.view_as_complex(torch.randn(8, 40, 2, generator=draw)).conj().imag,
        "undefined": torch.empty(0),
        "no elements": torch.empty(3, 0, 2),
        "a number of uses": torch.tensor([2]),
        "needs a gradient": torch.randn(40, 40, generator=draw).requires_grad_(),
        "a length of 1": torch.empty_strided((1, 50), (7, 1)).copy_(torch.randn(1, 50, generator=draw)),
    }


CUT = {"new", "transposed", "expanded", "channels last", "in the middle", "bfloat16", "needs a gradient", "a length of 1"}


@pytest.mark.parametrize("users", [2, 3, 4])
def test_what_is_gathered_lies_in_memory_as_what_was_sent(users: int, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(bundle_parts, "LEAST_BYTES_IN_PARTS", 8)
    plan, mesh, sent = ParallelPlan.of((1, 1), (1, users)), LocalMesh(1 + users), tensors()
    routing, nodes = MicrobatchRouting(plan, Microbatches(1)), (0, *[1] * users)
    want = [mesh.transports[0].send(tensor, to=1, tag=n, keep_layout=True) for n, tensor in enumerate(sent.values())]
    whole = [mesh.transports[1].recv(None, source=0, tag=n).tensor() for n in range(len(want))]

    def user(rank: int):
        description, parts = cut_bundle(list(sent.values()), rank - 1, users)
        assert {name for name, cut in zip(sent, read_description(description), strict=True) if cut is not None} == CUT
        assert all(part.numel() < tensor.numel() for name, part, tensor in zip(sent, parts, whole, strict=True) if name in CUT)
        came = [part.clone() if name in CUT else other for name, part, other in zip(sent, parts, whole, strict=True)]
        gather = BundleGather(routing, nodes, mesh.transports[rank], StreamWaits())
        return gather.gather(1, 0, [description, *came], "a test")

    for found in CooperativeScheduler().run([user(rank) for rank in range(1, 1 + users)], mesh):
        for name, got, wanted in zip(sent, found, whole, strict=True):
            assert torch.equal(got, sent[name]) and got.dtype == wanted.dtype, name
            assert got.stride() == wanted.stride() and got.requires_grad == sent[name].requires_grad, name
            assert bytes_behind_alignment(got) == bytes_behind_alignment(wanted), name
            assert not got._is_view(), f"{name}: autograd may let nobody write into it"


# -- in the engine ---------------------------------------------------------------------------------------------------------

PIPELINES = [cell for cell in cells() if len(cell.shards) > 1 and max(cell.shards) > 1]
CORNERS = [
    Cell(SHALLOW, "1f1b", (1, 1), (2, 2), 4, dtype="float32"),
    Cell(SHALLOW, "zb-h1", (1, 1), (2, 3), 3, True),
    Cell("dropped", "gpipe", (1, 2), (2, 2), 4, dtype="float32"),
    Cell(SHALLOW, "gpipe", (2, 1), (1, 4), 4),
    Cell("llama", "1f1b", (1, 1), (4, 2), 5),
    Cell("gpt", "interleaved", (1, 1), (2, 2), 4, dtype="float32"),
]


@pytest.mark.parametrize("cell", [*CORNERS[:2], *(pytest.param(cell, marks=pytest.mark.ci) for cell in CORNERS[2:])], ids=str)
def test_pipelines_on_several_nodes_have_the_bits_of_one_process(cell: Cell, gathered: list[int]):
    check_plan(cell, cell.plan)
    assert sum(gathered)


@pytest.mark.full
@pytest.mark.parametrize("cell", PIPELINES, ids=str)
def test_so_has_the_whole_grid(cell: Cell, gathered: list[int]):
    check_plan(cell, cell.plan)
    assert sum(gathered)


def check_random(seed: int, monkeypatch: pytest.MonkeyPatch) -> int:
    dice = random.Random(seed)
    cell = draw_cell(dice)
    plan = random_plan(dice, len(cell.graph.layers), most_workers=5, shards=(1, 2, 2, 3))
    nodes = tuple(dice.randrange(2) for _ in range(64))
    with monkeypatch.context() as patch:
        gathered = put_apart(patch, lambda plan: nodes[: plan.world])
        check_drawn(dice, cell, plan, seed)
    return sum(gathered)


def test_workers_in_any_roles_on_any_nodes_have_the_bits_of_the_same_shards(monkeypatch: pytest.MonkeyPatch):
    assert sum(check_random(seed, monkeypatch) for seed in range(4))


@pytest.mark.full
@pytest.mark.parametrize("seeds", [range(at, at + 20) for at in range(4, 204, 20)], ids=str)
def test_two_hundred_plans_on_any_nodes(seeds: range, monkeypatch: pytest.MonkeyPatch):
    assert sum(check_random(seed, monkeypatch) for seed in seeds)


# -- bytes -----------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("senders, receivers", [(2, 2), (1, 3), pytest.param(4, 2, marks=pytest.mark.ci)])
def test_the_network_carries_each_value_once_and_the_node_the_rest(senders, receivers, monkeypatch):
    """Of float64. Of a description 8 bytes a number: dims, two flags, and three lengths of the shape."""
    monkeypatch.setattr(bundle_parts, "LEAST_BYTES_IN_PARTS", 1)
    cell = Cell(SHALLOW, "1f1b", (1, 1), (senders, receivers), 2)
    value, times = BATCH * SEQ * WIDTH * 8, 2
    moved = {}
    for nodes in ((), node_of_each_replica(cell.plan)):
        with OneProcessRun(cell.job, cell.plan, cell.schedule, graph=graph(SHALLOW), nodes=nodes) as local:
            local.step(0)
            found: Counter[str] = Counter()
            for core in local.cores:
                found += Counter({name: each["sent"] for name, each in core.transport.ledger.as_dict().items()})
            moved[bool(nodes)] = found
    routing = MicrobatchRouting(cell.plan, cell.job.batching)
    edge = replace(graph(SHALLOW).crossing(cell.plan).edges[0], nbytes=value // times)
    assert network_bytes(routing, edge, (0,) * cell.plan.world) == (0, False)
    saved = described = shared = 0
    for users in (receivers, senders):
        if users > 1:
            saved += (users - 1) * value
            shared += (users - 1) * value
            described += times * users * 6 * 8
    assert network_bytes(routing, edge, node_of_each_replica(cell.plan)) == (value, True)
    assert moved[False]["send"] - moved[True]["send"] == saved - described
    assert moved[True]["all_gather"] - moved[False]["all_gather"] == shared
    others = set(moved[True]) - {"send", "all_gather"}
    assert all(moved[True][name] == moved[False][name] for name in others)


# -- over real transports --------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("kind", [pytest.param("tcp", marks=pytest.mark.ci), needs_cupy("nccl")])
def test_over_real_transports_they_have_the_bits_of_the_local_one(kind: str):
    cell = Cell("llama", "1f1b", (1, 1), (2, 2), 5, sequence=True, dtype="float32")
    nodes, on = node_of_each_replica(cell.plan), list(range(cell.plan.world))
    workers = Workers(len(on))
    try:
        addresses = workers.each(tcp_calls.listen, kind, on=on)
        found = workers.each(tcp_calls.train_in_parts, cell, addresses, nodes, on=on, timeout_s=60.0)
    finally:
        workers.end()
    want = run(cell, cell.plan)
    gathered = [got["ledger"]["all_gather"]["messages"] for got in found]
    assert min(gathered) >= 3 * cell.microbatches
    for (role,), got in zip(cell.plan.roles, found, strict=True):
        assert got["losses"] == want.losses and got["norms"] == want.norms
        for name, copy in got["parameters"].items():
            key = (name, cell.shards[role.grid], role.shard)
            assert torch.equal(torch.from_numpy(copy), want.parameters[key][0]), key
