"""Tensors have the shapes in a record that they have in the run; where one has not, it is an error and no wrong number."""

from __future__ import annotations

import pytest
import torch
from helpers.captured_jobs import check_run, graph_of
from torch import Tensor, nn

from raypar.errors import ModelError
from raypar.job import DataConfig, Job, LossConfig, ModelConfig, OptimizerConfig
from raypar.model.capture import memoryless_tensor
from raypar.model.capture.memoryless_tensor import memoryless_like
from raypar.plan import ParallelPlan
from raypar.worker.run_in_one_process import OneProcessRun


class Recurrent(nn.Module):
    """A recurrent net whose output, batch first, is read by step and by its size."""

    def __init__(self, kind: str) -> None:
        super().__init__()
        self.embed, self.out = nn.Embedding(99, 8), nn.Linear(8, 5)
        self.rnn = getattr(nn, kind)(8, 8, batch_first=True, num_layers=2)

    def forward(self, ids: Tensor) -> Tensor:
        found, _ = self.rnn(self.embed(ids))
        return self.out(sum(found[:, step] / (step + 1) for step in range(found.size(1))))


class Words:
    """Rows of ids, and the class of each."""

    def __len__(self) -> int:
        return 24

    def __getitem__(self, index: int) -> dict[str, Tensor]:
        ids = torch.randint(0, 99, (6,), generator=torch.Generator().manual_seed(index))
        return {"ids": ids, "y": ids[0] % 5}


def recurrent_job(kind: str) -> Job:
    return Job(
        name="recurrent",
        seed=5,
        steps=2,
        batch_size=9,
        microbatches=3,
        model=ModelConfig(function=Recurrent, args={"kind": kind}),
        loss=LossConfig(function=nn.functional.cross_entropy),
        data=DataConfig(function=Words, target="y"),
        optimizer=OptimizerConfig(function="torch.optim:SGD", args={"lr": 0.1}),
    )


@pytest.mark.parametrize("kind", ["GRU", "RNN", "LSTM"])
def test_recurrent_nets_that_are_batch_first_have_the_bits_of_the_plain_module(kind: str):
    """`transpose_`, with which PyTorch's own code ends them, changes a tensor's shape in place."""
    job = recurrent_job(kind)
    check_run(job, ParallelPlan.mesh(pp=2, dp=2, layers=len(graph_of(job).layers)), "1f1b")


def test_a_tensor_of_another_shape_than_in_the_record_is_an_error(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(memoryless_tensor, "_changes_its_own_shape", lambda func: False)
    job = recurrent_job("GRU").replace(name="another")
    with (
        OneProcessRun(job, ParallelPlan.mesh(layers=3), "1f1b") as run,
        pytest.raises(ModelError, match=r"'rnn': a tensor of rnn at .* is \[3, 6, 8\] torch.float32, and was \[6, 3, 8\]"),
    ):
        run.step(0)


@pytest.mark.parametrize("requires_grad", [False, True])
@pytest.mark.parametrize(
    "call",
    [
        lambda x: x.transpose_(0, 1),
        lambda x: x.t_(),
        lambda x: x.unsqueeze_(1),
        lambda x: x.squeeze_(),
        lambda x: x.swapaxes_(0, 1),
        lambda x: x.as_strided_((2, 2), (1, 2)),
    ],
)
def test_operations_that_change_a_shape_in_place_change_that_of_a_memoryless_tensor(call, requires_grad: bool):
    real = torch.randn(3, 4)
    absent = memoryless_like(real.clone().requires_grad_(requires_grad)) * 2
    call(real)
    call(absent)
    assert (absent.shape, absent.stride(), absent.meta.shape) == (real.shape, real.stride(), real.shape)
    assert (absent * 2).shape == real.shape
