"""Buffers that forward writes: running statistics and others, equal under every plan to one process with the modules themselves."""

from __future__ import annotations

from dataclasses import replace
from itertools import product

import pytest
import torch
from helpers import norm_models, reference, ugly_models
from helpers.parity import Layout, check_local, differences, expected
from torch import nn

from raypar.errors import ModelError, UserCodeError
from raypar.model.capture import capture_layer_graph
from raypar.plan import ParallelPlan
from raypar.worker.job_spec import JobSpec, Ref
from raypar.worker.run_in_one_process import OneProcessRun
from raypar.worker.stage.running_statistics import RunningNorm, fold_norm_calls
from raypar.worker.worker_assignments import make_layer_graph

QUICK = [
    Layout("norms", "1f1b", (2, 2), 4),
    Layout("norms", "gpipe", (3, 1), 5),
    Layout("norms", "interleaved", (2, 1), 3),
    Layout("splittable norms", "zb-v", (2, 2), 5),
    Layout("norms", "1f1b", (1,), 1),
    Layout("norms", "1f1b", (2, 3), 5, blocks=2),
    Layout("norms", "1f1b", (2, 2), 4, compute="bf16"),
]
GRID = [
    Layout("splittable norms" if schedule.startswith("zb") else "norms", schedule, (replicas,) * stages, m, compute=compute)
    for schedule, stages, replicas, m, compute in product(
        ("1f1b", "gpipe", "interleaved", "zb-v", "zb-h1"), (1, 2, 3), (1, 2, 3), (1, 2, 3, 4, 5), (None, "bf16")
    )
]


@pytest.mark.parametrize("layout", QUICK, ids=str)
def test_running_statistics_are_those_of_one_process(layout: Layout):
    check_local(layout)


@pytest.mark.full
@pytest.mark.parametrize("layout", GRID, ids=str)
def test_running_statistics_are_those_of_one_process_in_every_layout(layout: Layout):
    check_local(layout)


# -- recomputation and activation checkpointing ------------------------------------------------------------------------------


def check(spec: JobSpec, plan: ParallelPlan, schedule: str, want: reference.Result) -> None:
    """Run a plan and compare losses, parameters and buffers with the reference."""
    with OneProcessRun(spec, plan, schedule, seed=1) as run:
        losses = [{report.loss for report in run.step(step)} for step in range(spec.steps)]
        bad = [d for n, p in want.parameters.items() for d in differences(want, n, run.parameters()[n], p)]
        bad += [d for n, b in want.buffers.items() for d in differences(want, n, run.buffers()[n], b)]
        assert not bad, f"{plan.describe()} {schedule}: {bad}"
        assert losses == [{loss} for loss in want.losses]


@pytest.mark.parametrize("schedule, recompute", [("1f1b", range(8)), ("gpipe", (0, 2, 3, 4)), ("zb-h1", range(8))], ids=str)
def test_a_recomputed_microbatch_counts_once(schedule, recompute):
    name = "splittable norms" if schedule == "zb-h1" else "norms"
    spec = replace(ugly_models.job(name), steps=5)
    check(spec, ParallelPlan.mesh(dp=2, pp=2, layers=8, recompute=recompute), schedule, expected(name, 4, 0))


# -- other buffers -----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("policy", ["last", "sum"])
@pytest.mark.parametrize(
    "replicas, schedule, microbatches, recompute",
    [((2, 2), "1f1b", 4, ()), ((3,), "gpipe", 5, range(8)), ((1, 2), "zb-h1", 3, (1, 3))],
    ids=str,
)
def test_other_buffers_follow_the_policy(policy, replicas, schedule, microbatches, recompute):
    spec = replace(ugly_models.job("counters", microbatches=microbatches), buffers=policy)
    want = reference.train(make_layer_graph(spec), spec)
    plan = replace(ParallelPlan.of(replicas, layers=8), recompute=tuple(recompute))
    check(spec, plan, schedule, want)
    last_sizes = spec.batch_size - (microbatches - 1) * spec.batch_size // microbatches
    assert want.buffers["1.samples"] == spec.steps * (spec.batch_size if policy == "sum" else last_sizes)
    before = dict(norm_models.counters().named_buffers())
    changed = {name for name, value in want.buffers.items() if not torch.equal(value, before[name])}
    assert changed >= {f"{layer}.{buffer}" for layer in (1, 3, 6) for buffer in ("average", "prototype", "positive")}
    assert changed >= {"2.running_mean", "4.mean", "4.variance"} and not changed & {"1.cache", "1.scale"}


@pytest.mark.parametrize("layer, path", [(norm_models.Counters, "samples"), (norm_models.OwnNorm, "mean")])
def test_other_buffers_are_refused_by_default_and_the_cure_is_the_policy(layer, path):
    spec = replace(ugly_models.job("counters"), model=Ref(lambda: nn.Sequential(nn.Flatten(), layer(75), nn.Linear(75, 3))))
    with OneProcessRun(spec, ParallelPlan.mesh(layers=3), "1f1b") as run, pytest.raises(UserCodeError) as error:
        run.step(0)
    assert f"layer '1' writes into its buffer '{path}' in forward" in error.value.what
    assert "model.buffers: last, or sum" in error.value.cure
