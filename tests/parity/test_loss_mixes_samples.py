"""A loss that mixes the samples of a microbatch is found before the run, and no other loss is taken for one."""

from __future__ import annotations

from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

from raypar.errors import ModelError
from raypar.job import DataConfig, Job, LossConfig, ModelConfig, OptimizerConfig
from raypar.worker.job_preflight import preflight

TOKENS, CLASSES = 5, 4


class Tokens:
    """Samples of five tokens of three numbers, with a class for each token, of which some are masked."""

    def __len__(self) -> int:
        return 16

    def __getitem__(self, index: int) -> dict[str, Tensor]:
        generator = torch.Generator().manual_seed(index)
        labels = torch.randint(CLASSES, (TOKENS,), generator=generator)
        labels[: index % 3] = -100
        return {"x": torch.randn(TOKENS, 3, generator=generator), "labels": labels}


class Net(nn.Module):
    """Batch norm, and a class for each token."""

    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList([nn.Linear(3, 3), nn.BatchNorm1d(TOKENS), nn.Linear(3, CLASSES)])

    def forward(self, x: Tensor) -> Tensor:
        for block in self.blocks:
            x = block(x)
        return x


def masked_mean(output: Tensor, labels: Tensor) -> Tensor:
    return F.cross_entropy(output.flatten(0, 1), labels.flatten())


def sum_and_count(output: Tensor, labels: Tensor) -> tuple[Tensor, Tensor]:
    return F.cross_entropy(output.flatten(0, 1), labels.flatten(), reduction="sum"), (labels != -100).sum()


def of_each_sample(output: Tensor, labels: Tensor) -> Tensor:
    return output.square().mean((1, 2)).mean()


def without_batch(output: Tensor, labels: Tensor) -> Tensor:
    return output.sum() * 0.1


def contrastive(output: Tensor, labels: Tensor) -> Tensor:
    """InfoNCE: each sample's tokens against all samples."""
    one, two = F.normalize(output[:, 0], dim=-1), F.normalize(output[:, 1], dim=-1)
    return F.cross_entropy(one @ two.T, torch.arange(len(output)))


def of_statistics(output: Tensor, labels: Tensor) -> tuple[Tensor, int]:
    return (output - output.mean(0)).square().sum(), len(output)


def job_of(loss: Callable[..., Any], **changed: Any) -> Job:
    return Job(
        name=loss.__name__,
        seed=3,
        steps=1,
        batch_size=changed.pop("batch_size", 8),
        microbatches=changed.pop("microbatches", 2),
        model=ModelConfig(function=changed.pop("model", Net)),
        loss=LossConfig(function=loss),
        data=DataConfig(function=Tokens, target="labels"),
        optimizer=OptimizerConfig(function="torch.optim:SGD", args={"lr": 0.1}),
    )


def mixing_lines(job: Job) -> list[str]:
    return [line for line in preflight(job).notes if "samples of a microbatch with each other" in line]


@pytest.mark.parametrize("loss", [contrastive, of_statistics])
def test_a_loss_that_mixes_samples_is_said_to_see_a_microbatch_only(loss: Callable[..., Any]):
    (line,) = mixing_lines(job_of(loss))
    assert "it sees the 4 samples of a microbatch, not the batch of 8" in line
    assert mixing_lines(job_of(loss, batch_size=4, microbatches=1)) == []


@pytest.mark.parametrize("loss", [masked_mean, sum_and_count, of_each_sample, without_batch])
def test_other_losses_are_not_taken_for_one_that_mixes_samples(loss: Callable[..., Any]):
    assert mixing_lines(job_of(loss)) == []


class WithOwnLoss(Net):
    """Computes a loss if it gets the labels, as models of transformers do."""

    def forward(self, x: Tensor, labels: Tensor | None = None) -> dict[str, Tensor | None]:  # type: ignore[override]
        logits = super().forward(x)
        return {"logits": logits, "loss": None if labels is None else masked_mean(logits, labels)}


def takes_the_models(output: dict[str, Any], labels: Tensor) -> Any:
    return SimpleNamespace(**output).loss


def test_a_loss_that_is_none_says_that_forward_did_not_get_the_target():
    with pytest.raises(ModelError, match="was given x, and not 'labels', although it has a parameter of that name") as found:
        preflight(job_of(takes_the_models, model=WithOwnLoss))
    assert "loss: model" in found.value.cure
