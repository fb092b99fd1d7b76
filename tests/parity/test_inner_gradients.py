"""Layers that take gradients inside their own forward pass: what does not end in a weight's `.grad` is not added to it."""

from collections import OrderedDict

import pytest
import torch
from helpers import reference
from helpers.on_shards import error, graph_of
from helpers.shard_grid import HEADS, SEQ, STEPS, TOLERANCE, VOCAB, WIDTH, Cell
from torch import nn

from examples import gpt
from raypar.errors import ModelError
from raypar.job import PlanConfig
from raypar.plan import ParallelPlan
from raypar.worker.run_in_one_process import OneProcessRun

pytestmark = pytest.mark.part(4)


class Force(nn.Module):
    """x + f(x) + 0.1 df/dx, f an MLP; `how`: taken apart, in the graph that is trained, with second derivatives."""

    def __init__(self, how: str) -> None:
        super().__init__()
        self.up, self.down, self.how = gpt.Linear(WIDTH, WIDTH), gpt.Linear(WIDTH, WIDTH), how

    def energy(self, z):
        return self.down(torch.tanh(self.up(z)))

    def forward(self, x):
        if not torch.is_grad_enabled():
            return x + self.energy(x)
        z = x if self.how == "same graph" and x.requires_grad else x.detach().requires_grad_()
        energy = self.energy(z)
        second = self.how == "second derivatives"
        (force,) = torch.autograd.grad(energy.sum(), z, retain_graph=True, create_graph=second)
        return x + (energy if self.how == "same graph" else self.energy(x)) + 0.1 * force


def layers(how):
    parts = OrderedDict(gpt.layers(VOCAB, WIDTH, 2, HEADS, SEQ + 1).named_children())
    made = [("embed", parts["embed"]), ("block0", parts["block0"]), ("force", Force(how)), ("head", parts["head"])]
    return nn.Sequential(OrderedDict(made))


def trained(how, schedule, stages, shards, styles=()):
    """Parameters by name, every holder's; those of one process."""
    graph = graph_of(lambda: layers(how))
    job = Cell("gpt", schedule, (1,), (1,), 4).job.replace(plan=PlanConfig(styles=dict(styles)))
    plan = ParallelPlan.mesh(pp=stages, tp=shards, layers=4, cuts=[2][: stages - 1])
    with OneProcessRun(job, plan, schedule, graph=graph) as local:
        for step in range(STEPS):
            local.step(step)
        found = local.parameters()
    return found, reference.train(graph, job).parameters


@pytest.mark.parametrize("how", ["apart", "same graph", "second derivatives"])
@pytest.mark.parametrize("schedule", ["1f1b", "zb-h1"])
def test_a_layer_that_takes_a_gradient_trains_as_in_one_process(schedule, how):
    """Or is refused: zero bubble cannot part what autograd adds to a weight from what it puts off."""
    try:
        found, want = trained(how, schedule, 2, 1)
    except ModelError as refused:
        assert schedule == "zb-h1" and how == "second derivatives" and "apart from it" in str(refused)
        return
    assert all(torch.equal(copy, want[name]) for name, copies in found.items() for copy in copies)


@pytest.mark.parametrize("how", ["apart", "same graph"])
@pytest.mark.parametrize("schedule, stages", [("1f1b", 1), ("1f1b", 2), ("zb-h1", 2)])
def test_so_it_does_on_shards(schedule, stages, how):
    found, want = trained(how, schedule, stages, 2)
    whole = {name: copies for name, copies in found.items() if copies[0].shape == want[name].shape}
    assert "force.down.bias" in whole and "force.up.weight" not in whole
    assert all(error(copy, want[name]) < TOLERANCE for name, copies in whole.items() for copy in copies)


def test_second_derivatives_through_shards_are_refused():
    with pytest.raises(ModelError, match="second derivatives"):
        trained("second derivatives", "1f1b", 1, 2)
    found, want = trained("second derivatives", "1f1b", 1, 2, (("force.*", "whole"),))
    assert all(error(copy, want["force.up.weight"]) < TOLERANCE for copy in found["force.up.weight"])
