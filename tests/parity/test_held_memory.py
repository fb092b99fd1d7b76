"""What workers hold between two steps beside what the memory sheet says of it, kind by kind."""

from functools import partial

import pytest
from helpers.generations import Generations
from helpers.gpt_job import gpt_job
from helpers.torch_flesh import TorchJob

from raypar.comm import blocking_code_as_routine
from raypar.comm.blocking_code_as_routine import as_routine
from raypar.comm.cooperative_scheduler import CooperativeScheduler
from raypar.job.read_job import parse_job
from raypar.plan import ParallelPlan
from raypar.plan.ownership import CANONICAL_PIECE
from raypar.plan.stage_plan import GATHER_SPANS
from raypar.planner.memory_sheet import memory_sheets
from raypar.worker.layer_graph_of_job import make_layer_graph
from raypar.worker.measure_profile import profile_job
from raypar.worker.run_in_one_process import OneProcessRun

JOB = gpt_job(depth=2, width=128)
KEPT = ("parameter", "gathered", "master", "optimizer", "average", "buffer")
"""Kinds of state that are there between two steps."""
PIECE_BYTES = 4 * CANONICAL_PIECE


MORE = ("", "average: {decay: 0.9}", "precision: {parameters: bf16, master: float32}")


KINDS_OF_STATE = [(zero, "step", more) for zero in range(4) for more in MORE]
KINDS_OF_STATE += [(3, gather, more) for gather in GATHER_SPANS[1:] for more in MORE]


@pytest.mark.parametrize("zero, gather, more", KINDS_OF_STATE, ids=str)
def test_each_kind_of_state_is_within_a_piece_of_the_sheet(zero, gather, more):
    """What comes and goes inside a step: when it is most."""
    spec = parse_job(JOB + more)
    graph = make_layer_graph(spec)
    plan = ParallelPlan.mesh(dp=3, layers=len(graph.layers)).with_zero(zero).with_gather(gather)
    profile = profile_job(spec, workers=3, graph=graph)
    sheets = memory_sheets(profile, plan, "1f1b", spec.batching)
    with OneProcessRun(spec, plan, "1f1b") as run:
        reports = run.step(0)
    assert max(sheet.state["optimizer"] for sheet in sheets) > 4 * PIECE_BYTES, "there is something to compare"
    for sheet, report in zip(sheets, reports, strict=True):
        predicted = {kind: sheet.by_kind.get(kind, 0) for kind in KEPT}
        held = {kind: report.memory.get(kind, 0) for kind in KEPT}
        assert all(abs(held[kind] - predicted[kind]) <= PIECE_BYTES for kind in KEPT), (predicted, held)
        assert min(report.memory["empty"], report.memory["rss"]) > 0, "which is more shows in a worker's process only"


@pytest.mark.parametrize("gather", GATHER_SPANS[1:])
def test_copies_of_masters_that_come_for_each_use_are_gathered_and_no_parameters_that_are_kept(gather):
    spec = parse_job(JOB + MORE[2])
    graph = make_layer_graph(spec)
    plan = ParallelPlan.mesh(dp=2, layers=len(graph.layers)).with_zero(3).with_gather(gather)
    sheets = memory_sheets(profile_job(spec, workers=2, graph=graph), plan, "1f1b", spec.batching)
    with OneProcessRun(spec, plan, "1f1b") as run:
        reports = run.step(0)
    assert [report.memory["gathered"] for report in reports] == [sheet.gathered for sheet in sheets]
    assert all("parameter" not in report.memory and report.memory["master"] for report in reports)


@pytest.mark.parametrize("replicas, zero, holders", [(3, 0, 1), (3, 1, 1), (4, 2, 2)])
def test_buckets_take_what_the_sheet_says(replicas, zero, holders):
    """Of a model for which the pool has room: sums of what a replica holds come from all others. Shares are within a piece."""
    spec = parse_job(JOB)
    graph = make_layer_graph(spec)
    plan = ParallelPlan.mesh(dp=replicas, layers=len(graph.layers)).with_zero(zero, holders)
    sheets = memory_sheets(profile_job(spec, workers=replicas, graph=graph), plan, "1f1b", spec.batching)
    with OneProcessRun(spec, plan, "1f1b") as run:
        for sheet, core in zip(sheets, run.cores, strict=True):
            buckets = [bucket for reduction in core.step_commit.reductions.values() for bucket in reduction.buckets]
            slots = {id(bucket.replicas.slot): bucket.replicas.slot for bucket in buckets}
            held = sum(slot._memory.nbytes for slot in slots.values())
            uneven = (replicas - 1) * PIECE_BYTES if zero else 0
            assert 0 <= held - sheet.buckets <= 0.02 * sheet.buckets + uneven, "but for what aligns buffers"


SCATTERED = [(3, 0, 1, 8), (3, 2, 1, 8), (4, 2, 2, 8), (2, 3, 1, 8), (3, 2, 1, 64), (3, 2, 1, 1), (4, 3, 2, 2)]


@pytest.mark.part(4)
@pytest.mark.parametrize("replicas, zero, holders, pool_mib", SCATTERED)
def test_slots_of_scattered_gradients_take_what_the_sheet_says(replicas, zero, holders, pool_mib):
    """Those of whole microbatches, as many as find room; else no more than the pool."""
    spec = parse_job(f"{JOB}\nplan: {{reduction_buffer_mib: {pool_mib}}}")
    graph = make_layer_graph(spec)
    plan = ParallelPlan.mesh(dp=replicas, layers=len(graph.layers)).with_zero(zero, holders).with_gradients("scatter")
    sheets = memory_sheets(profile_job(spec, workers=replicas, graph=graph), plan, "1f1b", spec.batching)
    with OneProcessRun(spec, plan, "1f1b") as run:
        for sheet, core in zip(sheets, run.cores, strict=True):
            (reduction,) = core.step_commit.reductions.values()
            slots = [*reduction.sending, *(slot for of in reduction.receiving.values() for slot in of)]
            held, uneven = sum(slot.nbytes for slot in slots), holders * (replicas - 1) * PIECE_BYTES
            assert held <= pool_mib << 20 and held <= 1.02 * sheet.buckets + uneven * (reduction.ahead > 0)
            assert bool(reduction.ahead) == (pool_mib > 2)
            assert not reduction.ahead or abs(held - sheet.buckets) <= 0.02 * sheet.buckets + reduction.ahead * uneven


@pytest.mark.parametrize("zero", [0, 1])
def test_the_mirrors_copies_are_what_the_sheet_says_once_two_snapshots_are_there(zero):
    spec = parse_job(JOB + "elastic: {mirror: 1}")
    graph = make_layer_graph(spec)
    plan = ParallelPlan.mesh(dp=2, layers=len(graph.layers)).with_zero(zero)
    sheets = memory_sheets(profile_job(spec, workers=2, graph=graph), plan, "1f1b", spec.batching)
    run = Generations(TorchJob(spec, graph))
    run.adopt(plan, [0, 1], 0)
    for rank, body in run.bodies.items():
        body.mirror.rank, body.mirror.keeper_of = rank, {0: 1, 1: 0}
    for step in range(3):  # the copies of the second step travel beside the third
        routines = [
            as_routine(partial(blocking_code_as_routine.run_or_yield, body.step(step, into_mirror=step < 2)))
            for body in run.bodies.values()
        ]
        CooperativeScheduler().run(routines, run.mesh)
    for body in run.bodies.values():
        body.mirror.poll()
    for sheet, body in zip(sheets, run.bodies.values(), strict=True):
        assert abs(body.mirror.held_bytes - sheet.mirror) <= 8 * PIECE_BYTES
        assert body.mirror.memory_kind == "mirror"
