"""What gathers send and what of them is there: to the byte what `raypar plan` says, on every kind of layout."""

from __future__ import annotations

import pytest
from helpers.parity import Layout
from helpers.recomputed_layouts import recomputed_layouts
from helpers.shard_grid import Cell
from helpers.virtual_shards import divided
from helpers.zero_layouts import small_pieces

from raypar.model.tensor_parallel.compute_shard_layout import make_model_outline_with_layouts
from raypar.plan import MicrobatchRouting, ParallelPlan
from raypar.plan.state_bytes import StateBytes
from raypar.planner.gathered_parameters import gather_traffic, gathered_bytes
from raypar.planner.model_profile import ModelProfile
from raypar.schedule import registry
from raypar.worker.measure_profile import profile_layers, read_microbatches
from raypar.worker.run_in_one_process import OneProcessRun

pytestmark = pytest.mark.part(4)

SPANS = ("layer", "microbatch")
OTHERS = [  # beside those of test_parameters_for_each_use.py
    (Layout("tangled", "1f1b", (3, 3), 5), 2),
    (Layout("tangled", "gpipe", (2,), 5), 1),
    (Layout("tangled", "1f1b", (3,), 2, blocks=2), 1),
    (Layout("tangled", "1f1b", (3,), 7, compute="bf16 parameters"), 1),
]
RECOMPUTED = [cell for cell in recomputed_layouts() if max(cell.layout.replicas) > 1][:8]
RUNS = [(1, 1), (4,), (1, 3)]


def some(cases, first):
    """The first cases in the default suite, by layer; the others in CI."""
    every = [(*(case if isinstance(case, tuple) else (case,)), span) for case in cases for span in SPANS]
    early = [number < 2 * first and case[-1] == "layer" for number, case in enumerate(every)]
    return [
        pytest.param(*case, id=" ".join(map(str, case)), marks=() if now else pytest.mark.ci)
        for case, now in zip(every, early, strict=True)
    ]


def check(of: Layout | Cell, plan: ParallelPlan, schedule: str) -> None:
    """Raise `AssertionError` where a step's gathers differ from their prediction. Virtual shards of a worker take turns, and
    the sheet has each of them at its most at once."""
    with small_pieces(), OneProcessRun(of.job, plan, schedule, graph=of.graph) as run:
        measured = profile_layers(of.job, of.graph, read_microbatches(of.job, of.graph, [0]))
        outline = make_model_outline_with_layouts(of.graph, plan.virtual_shard_counts, {}, {})
        profile = ModelProfile(measured.layers, state=StateBytes(outline, measured.state, measured.copies))
        routing, connections = MicrobatchRouting(plan, of.job.batching), of.graph.crossing(plan)
        orders = registry.build_schedule(schedule, routing, connections=connections)
        predicted, sheet = gather_traffic(profile, plan, orders), gathered_bytes(profile, plan, orders)
        ledgers = [core.transport.ledger for core in run.cores]
        run.step(0)
        before = [(ledger.sent["gather"], ledger.received["gather"]) for ledger in ledgers]
        run.step(1)
        after = [(ledger.sent["gather"], ledger.received["gather"]) for ledger in ledgers]
        most = [core.step_commit.gather.gathered_bytes.most for core in run.cores]
    assert [(s - was_s, r - was_r) for (s, r), (was_s, was_r) in zip(after, before, strict=True)] == [
        (each.sent, each.received) for each in predicted
    ]
    assert sum(each.received for each in predicted) > 0
    if any(stage.division for stage in plan.stages):
        assert all(held <= counted <= 1.05 * held for held, counted in zip(most, sheet, strict=True)), (most, sheet)
    else:
        assert most == list(sheet)


@pytest.mark.parametrize("layout, holders, gather", some(OTHERS, 1))
def test_layouts(layout, holders, gather):
    check(layout, layout.plan.with_zero(3, holders).with_gather(gather), layout.schedule)


@pytest.mark.parametrize("cell, gather", some(RECOMPUTED, 1))
def test_recomputation(cell, gather):
    check(cell.layout, cell.plan.with_zero(3).with_gather(gather), cell.layout.schedule)


@pytest.mark.parametrize("model, runs, gather", some([(model, runs) for model in ("gpt", "llama") for runs in RUNS], 0))
def test_shards_and_virtual_shards(model, runs, gather):
    cell = Cell(model, "1f1b", (2,), (len(runs),), 4)
    plan = cell.plan if set(runs) == {1} else divided(cell.plan, runs)
    check(cell, plan.with_zero(3).with_gather(gather), "1f1b")


def test_once_a_step_owners_send_all_others_what_they_own():
    """Beside gradients, which go to their owners in collectives of another kind."""
    layout = Layout("tangled", "1f1b", (3,), 6)
    plan = layout.plan.with_zero(3)
    with small_pieces(), OneProcessRun(layout.job, plan, "1f1b", graph=layout.graph) as run:
        measured = profile_layers(layout.job, layout.graph, read_microbatches(layout.job, layout.graph, [0]))
        outline = make_model_outline_with_layouts(layout.graph, (), {}, {})
        profile = ModelProfile(measured.layers, state=StateBytes(outline, measured.state, measured.copies))
        orders = registry.build_schedule("1f1b", MicrobatchRouting(plan, layout.job.batching))
        run.step(0)
        before = [core.transport.ledger.sent["all_gather"] for core in run.cores]
        run.step(1)
        sent = [core.transport.ledger.sent["all_gather"] - was for core, was in zip(run.cores, before, strict=True)]
        assert sent == [each.sent for each in gather_traffic(profile, plan, orders)]
