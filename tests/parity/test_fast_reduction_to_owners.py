"""The fast reduction where replicas divide state: its buckets end at owners, with the bits that all replicas get without."""

from __future__ import annotations

import pytest
import torch
from helpers.parity import Layout
from helpers.shard_grid import Cell
from helpers.zero_layouts import gradients_of, put_together, small_pieces

from raypar.comm.gradient_reduction import FastReduction
from raypar.comm.holder_buckets import FastOwnerBucket
from raypar.worker.run_in_one_process import OneProcessRun

pytestmark = pytest.mark.part(4)

LAYOUTS = [
    Layout("tangled", "1f1b", (2, 3), 7),
    pytest.param(Layout("tangled", "zb-h1", (3, 2), 5, blocks=5), marks=pytest.mark.ci),
    pytest.param(Layout("tangled", "1f1b", (4,), 3), marks=pytest.mark.ci),  # one replica has no block
    pytest.param(Layout("plain", "1f1b", (3,), 7, compute="bf16 gradients"), marks=pytest.mark.ci),
    pytest.param(Cell("llama", "1f1b", (3, 1), (2, 2), 5, True), marks=pytest.mark.ci),
]


def after_steps(layout, level, holders=1):
    """(losses and norms, gradients, parameters) of two steps."""
    plan, job = layout.plan.with_zero(level, holders), layout.job.replace(reduction="fast")
    with small_pieces(), OneProcessRun(job, plan, layout.schedule, graph=layout.graph) as run:
        reports = [{(r.loss, r.norm) for r in run.step(step)} for step in range(2)]
        for core in run.cores:
            for index, reduction in core.step_commit.reductions.items():
                assert isinstance(reduction, FastReduction)
                kinds = {type(bucket) for bucket in reduction.buckets}
                assert not core.ownership.divides(index[0], "optimizer") or kinds <= {FastOwnerBucket}
                owned = [each for each in core.step_commit.owned[index] if each.run is not None]
                kept = [each.parameter.grad for each in owned if each.parameter.grad is not None]
                if core.ownership.divides(index[0], "gradient"):
                    assert all(one.untyped_storage().nbytes() == one.nbytes for one in kept), "a part of a whole gradient"
        found = gradients_of(run), put_together(run, lambda core, index, each: each.parameter.detach())
        return reports, *({key: [one if one is None else one.clone() for one in of] for key, of in f.items()} for f in found)


@pytest.mark.parametrize("layout", LAYOUTS, ids=str)
@pytest.mark.parametrize("level, holders", [(2, 1), pytest.param(1, 2, marks=pytest.mark.ci)])
def test_every_level_has_the_bits_of_all_replicas_having_everything(layout, level, holders):
    plain, divided = after_steps(layout, 0), after_steps(layout, level, holders)
    assert plain[0] == divided[0]
    for before, after in zip(plain[1:], divided[1:], strict=True):
        for name, copies in after.items():
            want = before[name][0]
            assert all(one is want is None or torch.equal(one, want) for one in copies), name


def test_each_replica_sends_one_sum_of_what_others_hold():
    layout, sent = Layout("plain", "1f1b", (3,), 8), {}
    for reduction in ("fast", "canonical"):
        job = layout.job.replace(reduction=reduction)
        with small_pieces(), OneProcessRun(job, layout.plan.with_zero(2), "1f1b", graph=layout.graph) as run:
            run.step(0)
            before = sum(core.transport.ledger.sent["all_to_all"] for core in run.cores)
            run.step(1)
            sent[reduction] = sum(core.transport.ledger.sent["all_to_all"] for core in run.cores) - before
            assert not any(core.transport.ledger.sent["all_reduce"] for core in run.cores)
    assert 0 < sent["fast"] < sent["canonical"], "runs of blocks are several subtrees"
