"""Losses that would train nothing are errors that say so."""

from dataclasses import replace

import pytest
from helpers import ugly_models
from torch import Tensor

from raypar.errors import NonFiniteError, UserCodeError
from raypar.plan import ParallelPlan
from raypar.worker.job_spec import Ref
from raypar.worker.run_in_one_process import OneProcessRun
from raypar.worker.worker_assignments import make_layer_graph


def constant(output: Tensor, target: Tensor) -> Tensor:
    return output.detach().square().mean()


def counts_nothing(output: Tensor, target: Tensor) -> tuple[Tensor, float]:
    return output.sum() * 0, 0.0


@pytest.mark.parametrize(
    "loss, error, said",
    [
        (constant, UserCodeError, "nothing would be trained"),
        (counts_nothing, NonFiniteError, "add up to 0 over 2 microbatches"),
    ],
)
def test_a_loss_that_trains_nothing_is_an_error_that_says_so(loss, error, said):
    job = replace(ugly_models.job("plain", microbatches=2, steps=1), loss=Ref(loss))
    plan = ParallelPlan.of((1,), layers=len(make_layer_graph(job).layers))
    with OneProcessRun(job, plan, "1f1b") as run, pytest.raises(error, match=said):
        run.step(0)
