"""Gradients that are scattered: every bit is that of one process, and owners hold the sums that the sheet says."""

from __future__ import annotations

import itertools
from dataclasses import replace

import pytest
import torch
from helpers import shard_grid
from helpers.parity import STEPS, Layout, layouts
from helpers.recomputed_layouts import recomputed_layouts
from helpers.shard_grid import SHALLOW, Cell
from helpers.virtual_shards import divided
from helpers.zero_layouts import PIECE, check_cell, check_zero, expected, small_pieces

from raypar.comm.gradient_scatter import ScatterReduction
from raypar.job import Job
from raypar.plan import MicrobatchRouting
from raypar.plan.gradient_scatter import most_open_sums, stack_steps
from raypar.worker.make_worker_assignments import gradient_pool
from raypar.worker.run_in_one_process import OneProcessRun
from raypar.worker.stage import stage

pytestmark = pytest.mark.part(4)

CELLS = [cell for cell in layouts() if max(cell.replicas) > 1]
SAMPLE = [
    Layout("tangled", "1f1b", (2, 3), 5),
    Layout("tangled", "zb-v", (2, 2), 5),
    Layout("tangled", "interleaved", (1, 3), 4, compute="bf16 parameters"),
    Layout("tangled", "1f1b", (3,), 7),
    Layout("tangled", "1f1b", (2,), 8, blocks=8),
    Layout("plain", "interleaved", (2, 2), 5, chunks=4),
    Layout("tangled", "gpipe", (1, 3), 3),
    Layout("tangled", "naive", (2, 3), 4),
    Layout("tangled", "list", (2, 1, 3), 6),
    Layout("tangled", "1f1b", (2, 2), 5, blocks=1),
    Layout("tangled", "1f1b", (3, 3), 3, blocks=7),
    Layout("plain", "zb-h1", (2, 3), 5, compute="bf16 gradients"),
    Layout("tangled", "1f1b", (3, 2), 7, blocks=5, shares=((3, 1, 1), (1, 4))),
]


def check(layout, holders=1, plan=None, level=2, **more):
    """As `check_zero`, with gradients that are scattered."""
    plan = (plan or layout.plan).with_zero(level, holders)
    return check_zero(layout, level, replace(plan, gradients="scatter"), holders=holders, **more)


def some(sample, others, first=3):
    """The first of the sample in the default suite, the rest of it in CI, all others in the full one."""
    later = [pytest.param(cell, marks=pytest.mark.ci) for cell in sample[first:]]
    return [*sample[:first], *later, *(pytest.param(cell, marks=pytest.mark.full) for cell in others if cell not in sample)]


@pytest.mark.parametrize("layout", some(SAMPLE, CELLS), ids=str)
def test_a_layout_gives_the_bits_of_one_process(layout):
    assert check(layout) or layout not in SAMPLE, "some parameter is divided"


LEVELS = (3, 0, pytest.param(1, marks=pytest.mark.ci))
"""Beside 2. At 0 owners send the totals to all replicas."""


@pytest.mark.parametrize("level", LEVELS)
@pytest.mark.parametrize("layout", some(SAMPLE[:4], CELLS, first=1), ids=str)
def test_each_level_has_the_bits(layout, level):
    check(layout, level=level)


def scattered(plan, level, holders=1):
    return plan.with_zero(level, holders).with_gradients("scatter")


SHARDED = [cell for cell in shard_grid.cells() if max(cell.replicas) > 1]
SHARDED_SAMPLE = [
    Cell("llama", "1f1b", (3, 1), (2, 2), 5, True),
    Cell("gpt", "zb-h1", (2, 2), (1, 2), 5, dtype="float32"),
    Cell("gpt", "1f1b", (2,), (2,), 4, dtype="float32", compute="bf16 parameters"),
    Cell("gpt", "interleaved", (2, 3), (2, 1), 5, True),
]


@pytest.mark.parametrize("level", (2, pytest.param(0, marks=pytest.mark.ci), pytest.param(3, marks=pytest.mark.ci)))
@pytest.mark.parametrize("cell", some(SHARDED_SAMPLE, SHARDED, first=1), ids=str)
def test_each_shard_scatters_to_its_own_replicas(cell, level):
    check_cell(cell, scattered(cell.plan, level))


@pytest.mark.ci
@pytest.mark.parametrize("runs", [(4,), (2, 2), (1, 3)], ids=str)
@pytest.mark.parametrize("level, holders", [(0, 1), (2, 1), (3, 2)])
def test_so_does_each_virtual_shard_of_a_worker(runs, level, holders):
    for model in (SHALLOW, "llama"):
        cell = Cell(model, "1f1b", (3 if holders > 1 else 2,), (len(runs),), 4)
        check_cell(cell, scattered(divided(cell.plan, runs), level, holders))


@pytest.mark.ci
def test_shards_with_a_pool_of_a_few_kilobytes_wait_for_room(tiny_pool):
    for cell in (SHARDED_SAMPLE[0], SHARDED_SAMPLE[1], Cell(SHALLOW, "gpipe", (3,), (2,), 6, True)):
        for plan in (cell.plan, divided(cell.plan, (2,) * cell.shards[0]) if len(set(cell.shards)) == 1 else cell.plan):
            check_cell(cell, scattered(plan, 2))


@pytest.mark.parametrize("cell", [Cell(SHALLOW, "zb-h1", (2, 2), (1, 1), 4)], ids=str)
def test_a_weight_half_hands_over_layer_by_layer(cell, monkeypatch):
    """The deferred gradients of a layer are on their way before those of the next one are computed."""
    seen, compute, submit = [], stage.sum_deferred_gradients, ScatterReduction.submit_gradients

    def computed(stash, weights):
        found = compute(stash, weights)
        seen.append(("computed", len(found)))
        return found

    def submitted(self, indices, rows):
        seen.append(("handed over", len(indices)))
        submit(self, indices, rows)

    monkeypatch.setattr(stage, "sum_deferred_gradients", computed)
    monkeypatch.setattr(ScatterReduction, "submit_gradients", submitted)
    with OneProcessRun(cell.job, scattered(cell.plan, 2), cell.schedule, graph=cell.graph) as run:
        run.step(0)
        uses = {len(core.stages[key].uses) for core in run.cores for key in core.stages}
    kinds = [kind for kind, _ in seen]
    assert "computed" in kinds and kinds.count("handed over") >= kinds.count("computed") > 8
    assert all(after == "handed over" for kind, after in itertools.pairwise(kinds) if kind == "computed")
    assert max(count for _, count in seen) < min(uses), "never all of a stage at once"


@pytest.mark.ci
def test_stages_of_other_levels_have_the_bits():
    layout = Layout("tangled", "1f1b", (2, 3), 5)
    for levels in ((0, 2), (3, 0), (1, 2)):
        check(layout, level=levels)


HELD_TWICE = [Layout("tangled", "1f1b", (2, 3), 5), Layout("tangled", "zb-h1", (4,), 6)]


@pytest.mark.parametrize("layout", some(HELD_TWICE, CELLS, first=1), ids=str)
def test_two_replicas_hold_each_part(layout):
    """Of two replicas each holds, and adds up, everything."""
    check(layout, holders=2)


RECOMPUTED = [cell for cell in recomputed_layouts() if max(cell.layout.replicas) > 1]


@pytest.mark.parametrize("cell", some(RECOMPUTED[:1], RECOMPUTED), ids=str)
def test_layouts_that_recompute(cell):
    check(cell.layout, plan=cell.plan)


@pytest.mark.ci
def test_replicas_with_other_shares_from_a_step_on():
    check(Layout("tangled", "1f1b", (3,), 8, blocks=8), later=((1, 5, 2),))


@pytest.mark.ci
@pytest.mark.parametrize("order_seed", range(6))
def test_the_order_in_which_workers_run_does_not_matter(order_seed):
    check(SAMPLE[0], order_seed=order_seed)


@pytest.fixture
def tiny_pool(monkeypatch):
    """Gradients of a microbatch need many slots, so replicas that are ahead wait in every backward pass."""
    monkeypatch.setattr(Job, "reduction_buffer_bytes", property(lambda self: 6_000))


WITH_ANY_POOL = ("1f1b", "gpipe", "zb-h1", "list")
"""Schedules that need no room for a whole microbatch in any layout."""


@pytest.mark.parametrize(
    "layout", some(*([one for one in of if one.schedule in WITH_ANY_POOL] for of in (SAMPLE, CELLS)), first=2), ids=str
)
def test_a_pool_of_a_few_kilobytes_does_too(layout, tiny_pool):
    check(layout)
    check(layout, level=0)


def test_replicas_that_are_ahead_wait_for_room(tiny_pool):
    layout = Layout("tangled", "1f1b", (3,), 6)
    plan = layout.plan.with_zero(2).with_gradients("scatter")
    with small_pieces(), OneProcessRun(layout.job, plan, "1f1b", graph=layout.graph) as run:
        run.step(0)
        reductions = [next(iter(core.step_commit.reductions.values())) for core in run.cores]
        assert all(isinstance(one, ScatterReduction) and len(one.layouts) > 4 for one in reductions)
        slots = [[*one.sending, *(slot for of in one.receiving.values() for slot in of)] for one in reductions]
        held = [sum(slot.nbytes for slot in of) for of in slots]
        assert max(held) <= 6_000 * 1.5, held
        assert any(one.waited_ns for one in reductions)


def storages(tensors) -> int:
    """Bytes of the tensors' storages, each once."""
    return sum({t.untyped_storage().data_ptr(): t.untyped_storage().nbytes() for t in tensors}.values())


ONE_BLOCK = Layout("plain", "1f1b", (2,), 8, blocks=1)
"""One sum is open at a time: gradients take 4 P / n."""


@pytest.mark.parametrize("level", [2, 0])
@pytest.mark.parametrize(
    "layout", [Layout("plain", "1f1b", (2,), 8, blocks=8), Layout("plain", "1f1b", (2, 3), 6, blocks=6), ONE_BLOCK], ids=str
)
def test_owners_hold_as_many_sums_as_the_sheet_says(layout, level):
    """After each instruction; what the sheet counts is reached, and no more."""
    plan = scattered(layout.plan, level)
    routing = MicrobatchRouting(plan, layout.job.batching)
    most: dict[int, int] = {}
    runs: list[OneProcessRun] = []

    def look(step: int, instruction: object) -> None:
        for core in runs[0].cores:
            for reduction in core.step_commit.reductions.values():
                if isinstance(reduction, ScatterReduction) and reduction._step is not None:
                    held = storages(reduction._step.sums._tensors.values())
                    most[core.rank] = max(most.get(core.rank, 0), held)

    with small_pieces(), OneProcessRun(layout.job, plan, "1f1b", graph=layout.graph, before_compute=look) as run:
        runs.append(run)
        for step in range(2):
            run.step(step)
        for core in run.cores:
            ((stage, _),) = core.stages
            sums = most_open_sums(stack_steps(layout.job.batching), routing.rounds_of_stage[stage])
            owned = core.step_commit.reductions[stage, 0].owned  # by use: a tied parameter may have several
            own = sum(4 * (stop - start) for runs in owned for start, stop in runs)
            assert most[core.rank] == sums * own, (core.rank, most, sums)
            whole = sum(4 * use.shape.numel() for use in core.stages[stage, 0].uses)
            assert layout is not ONE_BLOCK or abs(most[core.rank] - whole / 2) <= 4 * PIECE * len(owned)
            kept = [each.parameter.grad for each in core.step_commit.owned[stage, 0] if each.parameter.grad is not None]
            assert storages(kept) == sum(one.nbytes for one in kept)


@pytest.mark.parametrize("pool_bytes", [1 << 15, 1 << 17, 1 << 20])
@pytest.mark.parametrize(
    "plan, job, graph",
    [
        pytest.param(scattered(cell.plan, level, holders), cell.job, cell.graph, id=f"{cell} zero {level} holders {holders}")
        for cell, level, holders in [
            (Layout("tangled", "1f1b", (2, 3), 6), 0, 1),
            (Layout("tangled", "1f1b", (3,), 6, compute="bf16 gradients"), 2, 2),
            (Cell("llama", "1f1b", (3, 2), (2, 2), 6), 2, 1),
        ]
    ],
)
def test_a_pool_has_room_for_as_many_microbatches_as_the_deadlock_check_is_told(plan, job, graph, pool_bytes, monkeypatch):
    monkeypatch.setattr(Job, "reduction_buffer_bytes", property(lambda self: pool_bytes))
    scattering = [stage for stage, place in enumerate(plan.stages) if place.replicas > 1]
    told = gradient_pool(job, graph, plan).microbatches(plan, scattering)
    with small_pieces(), OneProcessRun(job, plan, "1f1b", graph=graph) as run:
        made = [one for core in run.cores for one in core.step_commit.reductions.values() if isinstance(one, ScatterReduction)]
    assert made and all(one.ahead >= min(told, max(map(len, one.microbatches))) for one in made), told
    assert pool_bytes < 1 << 20 or told, "a large one has room for some"


def test_each_gradient_is_sent_to_its_owners_once():
    layout = Layout("plain", "1f1b", (3,), 6, blocks=6)
    plan = layout.plan.with_zero(2).with_gradients("scatter")
    with small_pieces(), OneProcessRun(layout.job, plan, "1f1b", graph=layout.graph) as run:
        run.step(0)
        before = [core.transport.ledger.sent["scatter"] for core in run.cores]
        run.step(1)
        sent = [core.transport.ledger.sent["scatter"] - was for core, was in zip(run.cores, before, strict=True)]
        own = [sum(e.parameter.nbytes for e in core.step_commit.owned[0, 0]) for core in run.cores]
    padding = 4 * 16 * len(layout.graph.layers) * 8 * 3
    assert all(abs(one - 2 * (sum(own) - mine)) <= padding for one, mine in zip(sent, own, strict=True)), (sent, own)


@pytest.mark.ci
def test_losses_are_those_of_one_process_when_a_step_is_measured_with_metrics_and_validation():
    layout = Layout("tangled", "1f1b", (2, 1), 4)
    want = expected(layout.model, layout.microbatches, layout.blocks)
    plan = layout.plan.with_zero(2).with_gradients("scatter")
    with small_pieces(), OneProcessRun(layout.job, plan, "1f1b", graph=layout.graph) as run:
        for step in range(STEPS):
            assert {r.loss for r in run.step(step)} == {want.losses[step]}
        assert all(torch.equal(copy, want.parameters[n]) for n, copies in run.parameters().items() for copy in copies)
