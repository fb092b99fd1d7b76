"""A worker holds one set of gradients, not that of the last step besides."""

import weakref

import pytest
from helpers.shard_grid import Cell, graph

from raypar.plan import ParallelPlan
from raypar.worker.run_in_one_process import OneProcessRun


@pytest.mark.parametrize(
    "plan", [ParallelPlan.mesh(tp=2, layers=8), ParallelPlan.mesh(pp=2, layers=8)], ids=["shards", "stages"]
)
def test_the_gradients_of_a_step_are_gone_when_the_next_one_computes(plan):
    """Parameters, gradients and optimizer state are what the memory sheet counts; it was one more copy."""
    kept: list = []
    alive: list[int] = []

    def before(step, instruction):
        if step == 1:
            alive.append(sum(reference() is not None for reference in kept))

    job = Cell("gpt", "1f1b", (1,), (1,), 2).job
    with OneProcessRun(job, plan, "1f1b", graph=graph("gpt"), before_compute=before) as local:
        local.step(0)
        gradients = [g for held in local.gradients().values() for g in held]
        assert gradients and all(g is not None for g in gradients), "whoever looks after a step finds them"
        kept += [weakref.ref(g) for g in gradients]
        del gradients
        local.step(1)
    # A worker may be several instructions ahead of another one, but when the last one has begun all have let go.
    assert alive and alive[-1] == 0 and alive[plan.world * 2] == 0
