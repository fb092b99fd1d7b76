"""Losses, gradients and counts that are not finite: what is trained and skipped is the same in all layouts, bit for bit."""

from collections.abc import Callable
from functools import cache
from typing import Any

import pytest
import torch
from helpers.tiny_job import Samples, write_job
from torch import Tensor

from raypar.errors import NonFiniteError
from raypar.job import Job, LossConfig
from raypar.job.read_job import load_job
from raypar.plan import ParallelPlan
from raypar.worker.norm_and_weights_hash import weights_hash
from raypar.worker.run_in_one_process import OneProcessRun

pytestmark = pytest.mark.part(5)

LAYOUTS = [ParallelPlan.mesh(dp=dp, pp=pp, layers=4) for dp, pp in ((1, 1), (1, 2), (2, 1), (2, 2))]
STEPS = 4


@cache
def marked() -> Tensor:
    """The target of the one sample that is at fault, which a microbatch of the second step has."""
    return Samples(64).y[5]


class Backward(torch.autograd.Function):
    """The value itself; one number of its gradient is `bad`."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, bad: float) -> Tensor:
        ctx.bad = bad
        return x.clone()

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None]:
        gradient = gradient.clone()
        gradient.view(-1)[0] = ctx.bad
        return gradient, None


def of_loss(bad: float) -> Callable[..., Tensor]:
    def loss(output: Tensor, target: Tensor) -> Tensor:
        hit = (target == marked()).all(1, keepdim=True)
        return torch.where(hit, bad, (output - target).square()).mean()

    return loss


def of_gradient(bad: float) -> Callable[..., Tensor]:
    def loss(output: Tensor, target: Tensor) -> Tensor:
        if not output.is_meta and (target == marked()).all(1).any():
            output = Backward.apply(output, bad)
        return (output - target).square().mean()

    return loss


def of_size(output: Tensor, target: Tensor) -> Tensor:
    """A loss of 1e24: its norm overflows."""
    return ((output - target).square() * torch.where((target == marked()).all(1, keepdim=True), 1e25, 1.0)).mean()


def of_count(output: Tensor, target: Tensor) -> tuple[Tensor, int]:
    """No term of one microbatch counts: nothing is wrong with that."""
    counts = output.is_meta or not (target == marked()).all(1).any()
    return (output - target).square().mean(1).sum() * counts, len(output) * counts


def without_count(output: Tensor, target: Tensor) -> tuple[Tensor, int]:
    return output.sum() * 0, 0


NAN, INF = float("nan"), float("inf")
FAULTS = {
    "a loss of NaN": of_loss(NAN),
    "an infinite loss": of_loss(INF),
    "a loss of minus infinity": of_loss(-INF),
    "a gradient of NaN": of_gradient(NAN),
    "an infinite gradient": of_gradient(INF),
    "an infinite norm": of_size,
    "no count in a microbatch": of_count,
    "no count": without_count,
}


def trained(spec: Job, plan: ParallelPlan) -> tuple[list[str], str]:
    """What is reported of each step, as text in which NaN equals NaN, and the hash of the weights of all workers."""
    told = []
    with OneProcessRun(spec, plan, "1f1b") as run:
        for step in range(STEPS):
            try:
                report = run.step(step)[0]
            except NonFiniteError as error:
                told.append(str(error))
                break
            told.append(f"{report.loss!r} {report.norm!r} {report.skipped}")
        copies = run.parameters()
        assert all(torch.equal(copy, one[0]) for one in copies.values() for copy in one)
        assert all(one[0].isfinite().all() for one in copies.values())
        return told, weights_hash({name: one[0] for name, one in copies.items()})


@pytest.mark.parametrize("clip_norm", [1.0, pytest.param(None, marks=pytest.mark.full)])
@pytest.mark.parametrize("policy", ["stop", "skip"])
@pytest.mark.parametrize("fault", FAULTS)
def test_what_is_not_finite_stops_or_skips_a_step_alike_in_every_layout(fault, policy, clip_norm, tmp_path):
    job = load_job(write_job(tmp_path), ["validation=null", f"non_finite={policy}", f"steps={STEPS}"])
    spec = job.replace(loss=LossConfig(function=FAULTS[fault]), clip_norm=clip_norm)
    found = [trained(spec, plan) for plan in LAYOUTS]
    assert all(one == found[0] for one in found)
    told, _ = found[0]
    skips = [line.endswith("True") for line in told]
    if fault == "no count in a microbatch":
        assert not any(skips) and len(told) == STEPS
    elif policy == "skip":
        assert skips == [fault == "no count" or step == 1 for step in range(STEPS)]
    else:
        first = 0 if fault == "no count" else 1
        assert len(told) == first + 1 and told[first].startswith(f"step {first + 1}: ")
