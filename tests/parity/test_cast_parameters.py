"""Parameters that the model function makes in another dtype than the job's are cast, or refused before the run."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from helpers.captured_jobs import check_run, graph_of
from torch import Tensor, nn

from raypar.errors import ModelError
from raypar.job import DataConfig, Job, LossConfig, ModelConfig, OptimizerConfig
from raypar.plan import ParallelPlan
from raypar.worker.job_preflight import preflight


class Rows:
    """Samples of four numbers."""

    def __len__(self) -> int:
        return 12

    def __getitem__(self, index: int) -> dict[str, Tensor]:
        x = torch.randn(4, generator=torch.Generator().manual_seed(index))
        return {"x": x, "y": x.sum()}


def loss(output: Tensor, target: Tensor) -> Tensor:
    return (output.sum(1) - target).square().mean()


def job_of(model: Callable[[], Any]) -> Job:
    return Job(
        name="cast",
        seed=3,
        steps=2,
        batch_size=6,
        microbatches=3,
        model=ModelConfig(function=model),
        loss=LossConfig(function=loss),
        data=DataConfig(function=Rows, target="y"),
        optimizer=OptimizerConfig(function="torch.optim:SGD", args={"lr": 0.05}),
    )


class CastsInput(nn.Linear):
    """Counts on its weights being bfloat16."""

    def __init__(self) -> None:
        super().__init__(4, 4, dtype=torch.bfloat16)

    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x.bfloat16()).float()


class Net(nn.Module):
    def __init__(self, middle: Callable[[], nn.Module]) -> None:
        super().__init__()
        self.blocks = nn.ModuleList([nn.Linear(4, 4), middle(), nn.Linear(4, 4)])

    def forward(self, x: Tensor) -> Tensor:
        for block in self.blocks:
            x = block(x)
        return x


@pytest.mark.parametrize(
    "model", [lambda: Net(CastsInput), lambda: [nn.Linear(4, 4), CastsInput(), nn.Linear(4, 4)]], ids=["captured", "list"]
)
def test_a_forward_that_fails_with_cast_parameters_is_refused_with_their_name(model: Callable[[], Any]):
    with pytest.raises(ModelError, match=r"1\.weight is bfloat16, and the job's dtype is float32") as found:
        preflight(job_of(model))
    assert "must have the same dtype" in found.value.what and len(found.value.what.splitlines()) == 1


def test_parameters_of_another_dtype_are_cast_where_the_forward_allows_it():
    job = job_of(lambda: Net(lambda: nn.Linear(4, 4, dtype=torch.bfloat16)))
    assert preflight(job).notes == (
        "of the model's 6 parameters and buffers the model function makes 2 in bfloat16: they are cast to float32, the job's "
        'dtype, and trained in it\n  cure: layers compute in bfloat16 with precision: {"compute": "bf16"}',
    )
    check_run(job, ParallelPlan.mesh(pp=2, dp=2, layers=len(graph_of(job).layers)), "1f1b")


def test_a_model_in_float16_is_trained_in_float32_and_a_line_says_so():
    for model in (lambda: Net(lambda: nn.Linear(4, 4)).half(), lambda: nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4)).half()):
        (line,) = preflight(job_of(model)).notes
        assert "in float16: they are cast to float32, the job's dtype, and trained in it" in line
        assert line.endswith('\n  cure: layers compute in float16 with precision: {"compute": "fp16"}')
    doubles = preflight(job_of(lambda: nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4, dtype=torch.float64)))).notes
    assert "2 in float64" in doubles[0] and doubles[0].endswith("cure: dtype: float64 keeps those")
    assert preflight(job_of(lambda: Net(lambda: nn.Linear(4, 4)))).notes == ()
