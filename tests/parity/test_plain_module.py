"""Code of a root module around its units: raypar, the plain process with a leaf for each use, and plain autograd agree."""

from typing import Any

import pytest
import torch
import torch.utils.checkpoint
from helpers import plain_module
from helpers.captured_jobs import check_run, expected, graph_of
from helpers.parity import differences
from torch import Tensor, nn
from torch.nn import functional as F

from raypar.job import DataConfig, Job, LossConfig, ModelConfig, OptimizerConfig
from raypar.plan import ParallelPlan

pytestmark = pytest.mark.part(4)

WIDTH = 6


class Rows:
    """29 samples."""

    def __len__(self) -> int:
        return 29

    def __getitem__(self, index: int) -> dict[str, Tensor]:
        generator = torch.Generator().manual_seed(index)
        return {name: torch.randn(WIDTH, generator=generator) for name in ("x", "y")}


class Scale(torch.autograd.Function):
    """A product, as an operation of the user's own."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, factor: Tensor) -> Tensor:
        ctx.save_for_backward(x, factor)
        return x * factor

    @staticmethod
    def backward(ctx: Any, *gradients: Any) -> Any:
        x, factor = ctx.saved_tensors
        return gradients[0] * factor, (gradients[0] * x).sum(0)


class Root(nn.Module):
    """Two units, a parameter of the root, and code between them."""

    def __init__(self) -> None:
        super().__init__()
        self.scale = nn.Parameter(torch.randn(WIDTH))
        self.first, self.second = (nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.Dropout(0.3), nn.Tanh()) for _ in range(2))


class OwnOperation(Root):
    """The root's parameter goes through an operation of the user's own, twice before a unit and once after each."""

    def forward(self, x: Tensor) -> Tensor:
        x = Scale.apply(Scale.apply(x, self.scale), self.scale)
        return Scale.apply(self.second(Scale.apply(self.first(x), self.scale)), self.scale)


class WeightOfAUnit(Root):
    """The root reads a unit's weight before and after it calls the unit."""

    def forward(self, x: Tensor) -> Tensor:
        weight = self.first[0].weight
        return F.linear(self.second(self.first(F.linear(x, weight))), weight)


class CheckpointedUnits(Root):
    """Units with dropout are computed again in the backward pass."""

    def forward(self, x: Tensor) -> Tensor:
        for unit in (self.first, self.second, self.first):
            x = torch.utils.checkpoint.checkpoint(unit, x, use_reentrant=False)
        return x * self.scale


class CheckpointedCode(Root):
    """So are units together with code around them."""

    def forward(self, x: Tensor) -> Tensor:
        for unit in (self.first, self.second):
            x = torch.utils.checkpoint.checkpoint(
                lambda y, unit=unit: unit(y * self.scale) * self.scale, x, use_reentrant=False
            )
        return x + self.scale


@pytest.mark.parametrize("microbatches", [1, 3])
@pytest.mark.parametrize("model", [OwnOperation, WeightOfAUnit, CheckpointedUnits, CheckpointedCode])
def test_code_of_the_root_module_has_the_gradients_of_plain_autograd(model: type[nn.Module], microbatches: int):
    job = Job(
        name=model.__name__,
        seed=3,
        steps=2,
        batch_size=2 * microbatches + microbatches // 2,
        microbatches=microbatches,
        model=ModelConfig(function=model),
        loss=LossConfig(function=F.mse_loss),
        data=DataConfig(function=Rows, target="y"),
        optimizer=OptimizerConfig(function="torch.optim:AdamW", args={"lr": 1e-2}),
        clip_norm=0.5,
    )
    for stages in (1, 2):
        check_run(job, ParallelPlan.mesh(pp=stages, layers=len(graph_of(job).layers)), "1f1b")
    if microbatches == 1:
        plain, want = plain_module.train(graph_of(job), job, leaves=False)[0], expected(job)
        assert plain.losses == want.losses
        for found, gradients in zip(plain.gradients, want.gradients, strict=True):
            assert [n for n, g in gradients.items() if differences(n, [found[n]], g)] == []
