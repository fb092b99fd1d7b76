"""What users' code does around the point where shards meet, which is where virtual shards of one worker take turns, stays its
own: each finds the process as it left it."""

from __future__ import annotations

import contextlib

import pytest
import torch
from helpers.on_shards import graph_of
from helpers.shard_grid import SEQ, VOCAB, WIDTH, Cell
from helpers.virtual_shards import divided
from torch import nn
from torch.nn.attention import SDPBackend, sdpa_kernel

from examples import gpt
from raypar.errors import ConfigError, UserCodeError
from raypar.plan import ParallelPlan
from raypar.worker.run_in_one_process import OneProcessRun
from raypar.worker.step.optimizer_trial import OptimizerKind, OptimizerTrial

HEADS, SHARDS = 5, 4
CELL = Cell("gpt", "1f1b", (), (), 2, dtype="float32")
DIVISIONS = [(4,), (1, 3), (1, 1, 1, 1)]


def run(make, division, steps=2, stages=1):
    """Steps of a job whose first block is `make(WIDTH, HEADS, 1)`: gradient norms, and lines about what was left changed."""
    graph = graph_of(
        lambda: nn.Sequential(
            gpt.Embed(VOCAB, SEQ, WIDTH), make(WIDTH, HEADS, 1), gpt.Block(WIDTH, HEADS, 1), gpt.Head(WIDTH, VOCAB)
        )
    )
    plan = divided(ParallelPlan.mesh(pp=stages, tp=len(division), layers=len(graph.layers)), division)
    with OneProcessRun(CELL.job, plan, "1f1b", graph=graph) as local:
        return [local.step(step)[0].norm for step in range(steps)], local.warnings


@contextlib.contextmanager
def setting(read, write, value):
    before = read()
    write(value)
    try:
        yield
    finally:
        write(before)


SETTINGS = {
    "attention": (lambda: sdpa_kernel(SDPBackend.MATH), torch.backends.cuda.flash_sdp_enabled),
    "default dtype": (
        lambda: setting(torch.get_default_dtype, torch.set_default_dtype, torch.float64),
        torch.get_default_dtype,
    ),
    "precision": (
        lambda: setting(torch.get_float32_matmul_precision, torch.set_float32_matmul_precision, "medium"),
        torch.get_float32_matmul_precision,
    ),
}
"""What a layer enters, and what tells it whether it is inside."""


@pytest.mark.parametrize("division", DIVISIONS, ids=str)
@pytest.mark.parametrize("name", SETTINGS)
def test_settings_of_the_process_hold_in_the_code_that_made_them(name, division):
    enter, read = SETTINGS[name]
    outside = read()
    with enter():
        inside = read()
    found = []

    class Enters(gpt.Block):
        def forward(self, x):
            found.append(read() == outside)
            with enter():
                x = x + self.down(self.up(x))
                found.append(read() == inside)
                x = x + self.down(self.up(x))
                found.append(read() == inside)
            x = x + self.down(self.up(x))
            found.append(read() == outside)
            return x

    _, warnings = run(Enters, division)
    assert found and all(found)
    assert not warnings


class Doubles(torch.autograd.Function):
    """Its backward pass writes into the gradient that it is given."""

    @staticmethod
    def forward(ctx, x):
        return x.clone()

    @staticmethod
    def backward(ctx, gradient):
        return gradient.mul_(2)


class DoublesAtItsEnd(gpt.Block):
    def forward(self, x):
        return Doubles.apply(super().forward(x))


@pytest.mark.parametrize("division", DIVISIONS[:-1], ids=str)
def test_a_layer_may_write_into_the_gradient_that_came_from_another_stage(division):
    assert run(DoublesAtItsEnd, division, stages=2) == run(DoublesAtItsEnd, (1,) * SHARDS, stages=2)


@pytest.mark.parametrize("division, shard", [((4,), "virtual shard"), ((1,) * 4, "shard")], ids=str)
def test_an_error_names_the_shard_whose_code_raised_it(division, shard):
    calls = iter(range(100))

    class Breaks(gpt.Block):
        def forward(self, x):
            x = x + self.down(self.up(x))
            if x.device.type != "meta" and next(calls) == 2:
                raise ValueError("broken")
            return x

    with pytest.raises(UserCodeError, match=f"stage 0, replica 0, {shard} [0-3], step 1, microbatch 0"):
        run(Breaks, division)


def test_an_optimizer_that_needs_whole_parameters_is_told_of_virtual_shards():
    trial = OptimizerTrial("Adafactor", OptimizerKind.PER_PARAMETER)
    with pytest.raises(ConfigError, match=r"(?s)4 virtual shards: .*set plan.shards: 1 and leave virtual_shards out"):
        trial.check_plan(divided(ParallelPlan.mesh(layers=3), (4,)))
