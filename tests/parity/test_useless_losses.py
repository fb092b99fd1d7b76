"""Losses that would train nothing are errors that say so."""

from typing import Any

import pytest
import torch
from helpers import ugly_models
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

import raypar
from raypar.errors import ModelError, NonFiniteError, UserCodeError
from raypar.job import LossConfig, ModelConfig
from raypar.plan import ParallelPlan
from raypar.worker import job_preflight
from raypar.worker.job_preflight import preflight
from raypar.worker.layer_graph_of_job import make_layer_graph
from raypar.worker.run_in_one_process import OneProcessRun


def constant(output: Tensor, target: Tensor) -> Tensor:
    return output.detach().square().mean()


def counts_nothing(output: Tensor, target: Tensor) -> tuple[Tensor, float]:
    return output.sum() * 0, 0.0


def counts_without_end(output: Tensor, target: Tensor) -> tuple[Tensor, float]:
    return output.sum(), float("inf")


def counts_backwards(output: Tensor, target: Tensor) -> tuple[Tensor, int]:
    return output.sum(), -len(target)


@pytest.mark.parametrize(
    "loss, error, said",
    [
        (constant, UserCodeError, "nothing would be trained"),
        (counts_nothing, NonFiniteError, "add up to 0 over 2 microbatches"),
        (counts_without_end, NonFiniteError, "add up to inf over 2 microbatches"),
        (counts_backwards, NonFiniteError, r"add up to -\d+ over 2 microbatches"),
    ],
)
def test_a_loss_that_trains_nothing_is_an_error_that_says_so(loss, error, said):
    job = ugly_models.job("plain", microbatches=2, steps=1).replace(loss=LossConfig(function=loss))
    plan = ParallelPlan.of((1,), layers=len(make_layer_graph(job).layers))
    with OneProcessRun(job, plan, "1f1b") as run, pytest.raises(error, match=said):
        run.step(0)


class Reentrant(nn.Module):
    """Recomputes as `use_reentrant=True` does, whose outputs need an input with a gradient; batch fields have none."""

    def __init__(self) -> None:
        super().__init__()
        self.inner = nn.Linear(2, 3)

    def forward(self, x: Tensor) -> Tensor:
        return checkpoint(self.inner, x, use_reentrant=True)


@pytest.mark.filterwarnings("ignore:None of the inputs have requires_grad")
def test_a_model_whose_outputs_have_no_gradient_is_an_error_that_says_so():
    """A plain process's backward raises; here steps changed nothing, and said nothing."""
    job = classify(cross_entropy).job.replace(model=ModelConfig(function=lambda: nn.Sequential(Reentrant())))
    plan = ParallelPlan.of((1,), layers=1)
    with OneProcessRun(job, plan, "1f1b") as run, pytest.raises(UserCodeError, match="nothing that it reads has one"):
        run.step(0)


def classify(loss: Any, *, tokens: int = 0) -> raypar.Trainer:
    """A job that tells three classes apart, of samples or of each of their tokens."""
    shape = (tokens,) if tokens else ()
    return raypar.Trainer(
        model=lambda: nn.Sequential(nn.Linear(2, 3)),
        loss=loss,
        data=[(torch.ones(*shape, 2), torch.full(shape, n % 3)) for n in range(8)],
        steps=1,
        batch_size=4,
        microbatches=2,
    )


def cross_entropy(output: Tensor, target: Tensor) -> Tensor:
    return nn.functional.cross_entropy(output.flatten(0, -2), target.flatten())


@pytest.mark.parametrize("model", [lambda: nn.Sequential(nn.Linear(2, 3)), lambda: Wrapped()], ids=["layers", "captured"])
@pytest.mark.parametrize(
    "loss, said",
    [
        (lambda output, target: cross_entropy(output, target).item(), "a float: without a gradient nothing would be trained"),
        (lambda output, target: float(cross_entropy(output, target)), "a float: without a gradient nothing would be trained"),
        (lambda output, target: 1, "an int: without a gradient nothing would be trained"),
        (
            lambda output, target: cross_entropy(output, target).detach(),
            "a tensor that does not depend on the output: without a gradient nothing would be trained",
        ),
        (
            lambda output, target: cross_entropy(output, target).detach().numpy(),
            "a ndarray: without a gradient nothing would be trained",
        ),
        (lambda output, target: None, "returned None, not a scalar"),
        (lambda output, target: {"loss": cross_entropy(output, target)}, "a dict, not a scalar"),
        (lambda output, target: (cross_entropy(output, target), output, target), "a tuple, not a scalar"),
        (lambda output, target: (cross_entropy(output, target), {"accuracy": 0.5}), "a pair whose second value is a dict"),
    ],
)
def test_a_loss_that_returns_no_tensor_with_a_gradient_is_the_first_thing_said(loss, said, model, monkeypatch):
    """A line that the layers were not compared with the model on numbers came first."""
    monkeypatch.setattr(job_preflight, "check_capture_with_numbers", lambda *given: pytest.fail("the loss was not refused"))
    with pytest.raises(ModelError, match=said):
        preflight(classify(loss).job.replace(model=ModelConfig(function=model)))


class Wrapped(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.inner = nn.Linear(2, 3)

    def forward(self, x: Tensor) -> Tensor:
        return self.inner(x)


def mean_and_accuracy(output: Tensor, target: Tensor) -> tuple[Tensor, Tensor]:
    logits, classes = output.flatten(0, -2), target.flatten()
    return nn.functional.cross_entropy(logits, classes), (logits.argmax(1) == classes).float().mean()


def mean_and_batches(output: Tensor, target: Tensor) -> tuple[Tensor, float]:
    return nn.functional.cross_entropy(output.flatten(0, -2), target.flatten()), 3.0


def mean_and_count(output: Tensor, target: Tensor) -> tuple[Tensor, int]:
    return nn.functional.cross_entropy(output.flatten(0, -2), target.flatten()), target.numel()


@pytest.mark.parametrize("tokens", [0, 5])
@pytest.mark.parametrize(
    "loss, said",
    [
        (mean_and_accuracy, "second value depends on the model's output"),
        (mean_and_batches, "second value is 3 for 2 samples and 3 for the same samples twice, so it is no count"),
        (mean_and_count, "so it is a mean, which would be divided by the second value"),
    ],
)
def test_a_pair_that_is_no_sum_with_its_count_is_an_error_before_the_run(loss, said, tokens):
    with pytest.raises(ModelError, match=said):
        preflight(classify(loss, tokens=tokens).job)


def sum_and_count(output: Tensor, target: Tensor) -> tuple[Tensor, Tensor]:
    total = nn.functional.cross_entropy(output.flatten(0, -2), target.flatten(), reduction="sum", ignore_index=0)
    return total, (target != 0).sum()


def mean_that_counts_once(output: Tensor, target: Tensor) -> tuple[Tensor, float]:
    return nn.functional.cross_entropy(output.flatten(0, -2), target.flatten()), 1.0


def takes_whole_microbatches(output: Tensor, target: Tensor) -> tuple[Tensor, float]:
    assert len(output) == 2
    return sum_and_count(output, target)


@pytest.mark.parametrize("tokens", [0, 5])
@pytest.mark.parametrize("loss", [sum_and_count, mean_that_counts_once, takes_whole_microbatches])
def test_a_sum_with_its_count_passes(loss, tokens):
    preflight(classify(loss, tokens=tokens).job)


def test_a_mean_alone_passes():
    preflight(classify(nn.CrossEntropyLoss()).job)
