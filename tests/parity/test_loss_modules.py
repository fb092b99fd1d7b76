"""A loss as PyTorch users have it: `nn.CrossEntropyLoss()`, its class, or a function; what cannot be one is refused by name."""

import pickle

import pytest
import torch
from ray import cloudpickle
from torch import nn

import raypar
from raypar.errors import ConfigError, UserCodeError
from raypar.model.graph import Graph, Layer
from raypar.plan import ParallelPlan
from raypar.worker.job_preflight import preflight
from raypar.worker.measure_profile import profile_job
from raypar.worker.run_in_one_process import OneProcessRun

SAMPLES = [(torch.full((3,), float(i)), i % 4) for i in range(8)]
GIVEN = {"data": SAMPLES, "steps": 2, "batch_size": 4, "microbatches": 2, "optimizer": ("torch.optim:SGD", {"lr": 0.1})}


def model() -> nn.Sequential:
    return nn.Sequential(nn.Linear(3, 5), nn.Tanh(), nn.Linear(5, 4))


def smoothed(output: torch.Tensor, target: torch.Tensor) -> torch.Tensor:
    return nn.functional.cross_entropy(output, target, label_smoothing=0.1)


def losses(loss: object) -> list[float]:
    """Of two steps on two replicas, of the job as workers get it."""
    spec = pickle.loads(cloudpickle.dumps(raypar.Trainer(model=model, loss=loss, **GIVEN).job))
    preflight(spec)
    with OneProcessRun(spec, ParallelPlan.mesh(dp=2, layers=3), "1f1b") as job:
        return [job.step(step)[0].loss for step in range(2)]


@pytest.mark.parametrize(
    "loss",
    [
        nn.CrossEntropyLoss(label_smoothing=0.1),
        (nn.CrossEntropyLoss, {"label_smoothing": 0.1}),
        ("torch.nn:CrossEntropyLoss", {"label_smoothing": 0.1}),
        nn.CrossEntropyLoss(weight=torch.ones(4), label_smoothing=0.1),
    ],
    ids=["module", "class", "name", "buffer"],
)
def test_a_loss_module_without_parameters_is_the_function_that_it_is(loss):
    assert losses(loss) == losses(smoothed)


def test_a_class_needs_no_arguments():
    assert losses(nn.CrossEntropyLoss) == losses(nn.functional.cross_entropy)


def two_inputs() -> Graph:
    first = Layer("first", lambda: nn.Linear(3, 4), ("x",), ("h",))
    return Graph((first, Layer("gate", lambda: nn.Bilinear(4, 2, 4), ("h", "mask"), ("out",))), "out")


def whole_for_a_mask(output: torch.Tensor, target: torch.Tensor) -> torch.Tensor:
    return output if target.is_floating_point() else nn.functional.cross_entropy(output, target)


def test_the_check_gives_the_loss_the_target_that_a_step_gives_it():
    """It gave the loss the second field that the model reads."""
    samples = [{"x": torch.full((3,), float(i)), "mask": torch.ones(2), "y": i % 4} for i in range(8)]
    preflight(raypar.Trainer(model=two_inputs, loss=whole_for_a_mask, **{**GIVEN, "data": samples}).job)


class Trained(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.scale = nn.Parameter(torch.ones(()))

    def forward(self, output, target):
        return self.scale * nn.functional.cross_entropy(output, target)


class Remembers(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("mean", torch.zeros(()))

    def forward(self, output, target):
        self.mean.add_(output.detach().mean().cpu() if not output.is_meta else 0)
        return nn.functional.cross_entropy(output, target)


@pytest.mark.parametrize(
    "loss, says",
    [
        (Trained(), r"loss Trained\(\) has parameters \('scale', ...\), which would not be trained\n.*into the model"),
        (Trained, r"loss Trained has parameters"),
        (nn.CrossEntropyLoss(reduction="sum"), r"adds up over a microbatch .*\n.*reduction='mean', or .*\(sum, count\)"),
        ((nn.CrossEntropyLoss, {"smoothing": 1}), r"loss CrossEntropyLoss refused its arguments: .*'smoothing'"),
        (int, r"loss int makes objects that cannot be called"),
    ],
    ids=["parameters", "class with parameters", "sum", "arguments", "no loss"],
)
def test_what_cannot_be_a_loss_is_refused_when_it_is_given(loss, says):
    with pytest.raises(ConfigError, match=says):
        raypar.Trainer(model=model, loss=loss, **GIVEN)


def test_a_loss_that_keeps_what_it_has_seen_is_refused():
    """As a layer is: every replica sees other samples."""
    with pytest.raises(UserCodeError, match="writes its buffer 'mean'"):
        losses(Remembers())


def test_a_loss_module_with_other_options_is_another_job():
    """A checkpoint keeps what a loss is called."""
    labels = {
        raypar.Trainer(model=model, loss=nn.CrossEntropyLoss(label_smoothing=s), **GIVEN).job.loss.label for s in (0, 0.1)
    }
    assert len(labels) == 2 and all("label_smoothing" in label for label in labels)


def test_an_error_while_layers_are_timed_names_the_layer_and_no_stage_of_a_plan():
    """Code that reads numbers is not called on the meta device, so that the plan's measurements are the first to meet it."""

    def loss(output, target):
        assert float(output.sum()) != float("inf")
        return nn.functional.cross_entropy(output, target)  # of [2, 5, 4] and [2, 5]

    sample = torch.zeros(5, 3), torch.zeros(5, dtype=torch.int64)
    spec = raypar.Trainer(model=model, loss=loss, **{**GIVEN, "data": [sample] * 8}).job
    with pytest.raises(UserCodeError, match=r"in layer '2', with the first microbatch, before the run"):
        profile_job(spec, workers=1)
