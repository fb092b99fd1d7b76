"""What becomes of random modules with hidden state: refused before the run, the bits of one process, or silently different."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from typing import Any

import pytest
import torch
from helpers import plain_module
from helpers.hidden_state_modules import HiddenStateModel, Rows, hidden_state_layers, hidden_state_of, loss
from helpers.reference import samples
from torch import Tensor

from raypar.errors import RayparError
from raypar.job import DataConfig, Job, LossConfig, ModelConfig, OptimizerConfig
from raypar.plan import ParallelPlan
from raypar.worker.job_preflight import preflight
from raypar.worker.layer_graph_of_job import make_layer_graph
from raypar.worker.run_in_one_process import OneProcessRun

LAYERS = 4
PLANS = {
    "2 stages": ParallelPlan.mesh(pp=2, layers=LAYERS),
    "2 replicas": ParallelPlan.mesh(dp=2, layers=LAYERS),
    "recompute": ParallelPlan.mesh(pp=2, layers=LAYERS, recompute=range(LAYERS)),
}


def job_of(seed: int, model: Callable[..., Any] = HiddenStateModel) -> Job:
    """24 microbatches, so that every effect comes up."""
    return Job(
        name=f"hidden-{seed}",
        seed=seed,
        steps=6,
        batch_size=8,
        microbatches=4,
        model=ModelConfig(function=model, args={"seed": seed}),
        loss=LossConfig(function=loss),
        data=DataConfig(function=Rows, target="y"),
        optimizer=OptimizerConfig(function="torch.optim:SGD", args={"lr": 0.1}),
    )


def refusal(job: Job) -> str | None:
    """What preflight says of a job; None if it lets it run."""
    try:
        preflight(job)
    except RayparError as error:
        return error.what
    return None


def plain_run(job: Job) -> tuple[list[float], dict[str, Tensor]]:
    """(losses, parameters at the end) of one plain process."""
    model, rows = plain_module.make_model(job), Rows()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    losses, size = [], job.batch_size // job.microbatches
    for step in range(job.steps):
        optimizer.zero_grad()
        total = 0.0
        for first in range(step * job.batch_size, (step + 1) * job.batch_size, size):
            fields = samples(rows, job, first, first + size)
            found = loss(model(fields["x"]), fields["y"]) * float(size)
            found.backward()
            total += float(found.detach())
        for parameter in model.parameters():
            parameter.grad.mul_(1 / job.batch_size)  # type: ignore[union-attr]
        optimizer.step()
        losses.append(total / job.batch_size)
    return losses, {name: parameter.detach() for name, parameter in model.named_parameters()}


def plan_run(job: Job, plan: ParallelPlan) -> tuple[list[float], dict[str, Tensor]]:
    """The same of a plan, all of whose workers are in this process."""
    with OneProcessRun(job, plan, "1f1b", graph=make_layer_graph(job)) as run:
        losses = [run.step(step)[0].loss for step in range(job.steps)]
        return losses, {name: copies[0] for name, copies in run.parameters().items()}


def outcomes(seed: int) -> dict[str, str]:
    """Plan -> refused, equal, or silent."""
    job = job_of(seed)
    if refusal(job) is not None:
        return dict.fromkeys(PLANS, "refused")
    losses, parameters = plain_run(job)
    found = {}
    for name, plan in PLANS.items():
        try:
            got, values = plan_run(job, plan)
        except RayparError:
            found[name] = "refused"
            continue
        same = got == losses and all(torch.equal(values[key], value) for key, value in parameters.items())
        found[name] = "equal" if same else "silent"
    return found


QUICK = (0, 9, 21, 37, 48)
"""One seed of each place, with effects from microbatch 6, 10, 4, 13 and 2 on."""
SILENT = {"CountsCacheHits": 1, "GlobalByName": 1}
"""Variant -> how many of 100 modules with it train otherwise than one process, without a line. The guide names them."""


@pytest.mark.parametrize("model", [HiddenStateModel, hidden_state_layers])
@pytest.mark.parametrize("seed", QUICK)
def test_hidden_state_is_refused_before_the_run(seed: int, model: Callable[..., Any]):
    what = refusal(job_of(seed, model))
    assert what is not None
    assert "keeps something of one microbatch for the next" in what or "is changed by every microbatch" in what


def test_the_largest_number_so_far_is_found_where_every_microbatch_has_a_larger_one():
    """With and without what was left, each of them computes the same; the first one does not once the others have been."""
    assert "'largest' of 1.block.scale.0" in str(refusal(job_of(50, hidden_state_layers)))


@pytest.mark.full
def test_of_100_modules_with_hidden_state_all_are_refused_but_those_that_the_guide_names():
    found = {seed: outcomes(seed) for seed in range(100)}
    counts = {plan: Counter(outcome[plan] for outcome in found.values()) for plan in PLANS}
    assert counts == {plan: Counter(refused=98, silent=2) for plan in PLANS}
    silent = Counter(hidden_state_of(seed).variant for seed, outcome in found.items() if "silent" in outcome.values())
    assert silent == SILENT


@pytest.mark.full
def test_of_100_lists_of_layers_with_hidden_state_the_same_are_refused():
    passed = Counter(hidden_state_of(seed).variant for seed in range(100) if refusal(job_of(seed, hidden_state_layers)) is None)
    assert passed == SILENT
