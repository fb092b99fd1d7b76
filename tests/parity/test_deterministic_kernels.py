"""Operations without a deterministic kernel on a GPU are named before the run, and in the first step with a cure."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
from helpers import ugly_models
from torch import Tensor, nn
from torch.nn import functional as F

from raypar.errors import ModelError
from raypar.job import DataConfig, Job, LossConfig, ModelConfig, OptimizerConfig
from raypar.user_code.user_code_errors import cure_for_known_error
from raypar.worker.job_preflight import preflight


class Images:
    """Images of 3 x 8 x 8 with a class for each place."""

    def __len__(self) -> int:
        return 8

    def __getitem__(self, index: int) -> dict[str, Tensor]:
        generator = torch.Generator().manual_seed(index)
        return {"x": torch.randn(3, 8, 8, generator=generator), "y": torch.randint(0, 3, (8, 8), generator=generator)}


class Between(nn.Module):
    """Convolutions, with what a test puts between them."""

    def __init__(self, between: Callable[[Tensor], Tensor]) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(nn.Conv2d(3, 3, 1) for _ in range(2))
        self.between = between

    def forward(self, x: Tensor) -> Tensor:
        return self.blocks[1](self.between(self.blocks[0](x)))


class Call(nn.Module):
    """One function as a layer."""

    def __init__(self, function: Callable[[Tensor], Tensor]) -> None:
        super().__init__()
        self.function = function

    def forward(self, x: Tensor) -> Tensor:
        return self.function(x)


def rows(output: Tensor, target: Tensor) -> Tensor:
    return F.cross_entropy(output.movedim(1, -1).reshape(-1, 3), target.reshape(-1))


def job(between: Callable[[Tensor], Tensor], *, captured: bool = True, loss: Callable[..., Any] = rows, **changed: Any) -> Job:
    def make() -> nn.Module:
        if captured:
            return Between(between)
        return nn.Sequential(nn.Conv2d(3, 3, 1), Call(between), nn.Conv2d(3, 3, 1))

    return Job(
        name="kernels",
        steps=1,
        batch_size=4,
        microbatches=2,
        device="gpu",
        model=ModelConfig(function=make),
        loss=LossConfig(function=loss),
        data=DataConfig(function=Images, target="y"),
        optimizer=OptimizerConfig(function="torch.optim:SGD", args={"lr": 0.05}),
    ).replace(**changed)


def bigger(x: Tensor, mode: str) -> Tensor:
    return F.interpolate(x, scale_factor=2, mode=mode)[..., ::2, ::2]


WITHOUT = {
    "adaptive_avg_pool2d": (lambda x: F.adaptive_avg_pool2d(x, (8, 8)), "mean"),
    "reflection_pad2d": (lambda x: F.pad(x, (1, 0, 1, 0), mode="reflect")[..., 1:, 1:], "replicate"),
    r"interpolate\(mode='bicubic'\)": (lambda x: bigger(x, "bicubic"), "bilinear"),
    "cumsum": (lambda x: x.cumsum(-1), "triu"),
    "grid_sample": (lambda x: F.grid_sample(x, torch.zeros(len(x), 8, 8, 2, device=x.device), align_corners=False), "gather"),
    "median": (lambda x: x - x.median(-1, keepdim=True).values, "sort"),
}


@pytest.mark.parametrize("captured", [True, False])
@pytest.mark.parametrize("name", WITHOUT)
def test_an_operation_without_one_is_named_before_the_run_with_the_cure(name, captured):
    between, cure = WITHOUT[name]
    with pytest.raises(ModelError, match=rf"layer '.*' calls {name}, which has no deterministic kernel on a GPU") as error:
        preflight(job(between, captured=captured))
    assert cure in error.value.cure and "reduction: fast" in error.value.cure
    assert preflight(job(between, captured=captured, device="cpu")).samples == 8
    assert preflight(job(between, captured=captured, reduction="fast")).samples == 8


def test_so_is_one_of_the_loss():
    with pytest.raises(ModelError, match=r"the loss .*cross_entropy calls nll_loss2d, which") as error:
        preflight(job(lambda x: x, loss=F.cross_entropy))
    assert "movedim" in error.value.cure


WITH = [
    lambda x: x * F.adaptive_avg_pool2d(x, 1),
    lambda x: bigger(x, "bilinear"),
    lambda x: F.pad(x, (1, 0, 1, 0), mode="replicate")[..., 1:, 1:],
    lambda x: x * torch.ones(8, dtype=torch.int64, device=x.device).cumsum(0),
    lambda x: x + F.adaptive_avg_pool2d(x.detach(), (8, 8)),
]


@pytest.mark.parametrize("captured", [True, False])
@pytest.mark.parametrize("between", WITH)
def test_what_pytorch_replaces_or_nobody_differentiates_is_no_such_operation(between, captured):
    assert preflight(job(between, captured=captured)).samples == 8


def test_code_that_cannot_be_looked_through_is_left_to_the_first_step_whose_error_has_a_cure():
    def reads(x: Tensor) -> Tensor:
        return x + float(len(x[x[0, 0, 0, 0] > 1e6])) + 0 * F.adaptive_avg_pool2d(x, (8, 8))

    assert preflight(job(reads, captured=False)).samples == 8
    said = "adaptive_avg_pool2d_backward_cuda does not have a deterministic implementation, but you set ..."
    assert "reduction: fast" in cure_for_known_error(RuntimeError(said))


def test_models_of_other_tests_have_none():
    preflight(ugly_models.job("tangled", microbatches=4).replace(device="gpu"))
