"""A model that its function returns in evaluation mode: it trains so, as in a loop without train(), and a line says it."""

from __future__ import annotations

import pytest
import torch
from helpers import plain_module
from helpers.optimizer_layouts import STEPS, job_of
from torch import Tensor, nn

from raypar.job import ModelConfig, OptimizerConfig
from raypar.plan import ParallelPlan
from raypar.worker.job_preflight import preflight
from raypar.worker.run_in_one_process import OneProcessRun

MODE_LINE = "evaluation mode"


class Net(nn.Module):
    """Its forward has a residual connection: it is captured."""

    def __init__(self, p: float) -> None:
        super().__init__()
        self.first, self.drop, self.head = nn.Linear(8, 8), nn.Dropout(p), nn.Linear(8, 3)
        self.norm = nn.BatchNorm1d(8)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(x + self.drop(self.norm(self.first(x)).relu()))


def captured(p: float, mode: str) -> nn.Module:
    return in_mode(Net(p), mode)


def sequential(p: float, mode: str) -> nn.Module:
    return in_mode(nn.Sequential(nn.Linear(8, 8), nn.BatchNorm1d(8), nn.Dropout(p), nn.Linear(8, 3)), mode)


def in_mode(model: nn.Module, mode: str) -> nn.Module:
    if mode == "eval":
        return model.eval()
    if mode == "frozen norm":
        next(part for part in model.modules() if isinstance(part, nn.BatchNorm1d)).eval()
    return model


def job(make, p: float, mode: str):
    return job_of(
        OptimizerConfig(function=torch.optim.SGD, args={"lr": 0.05}),
        model=ModelConfig(function=make, args={"p": p, "mode": mode}),
    )


@pytest.mark.parametrize("make", [captured, sequential])
def test_a_model_in_evaluation_mode_is_told(make):
    (line,) = (line for line in preflight(job(make, 0.5, "eval")).notes if MODE_LINE in line)
    assert "without dropout" in line and line.splitlines()[1].startswith("  cure: call train()")
    for mode in ("train", "frozen norm"):
        assert not [line for line in preflight(job(make, 0.5, mode)).notes if MODE_LINE in line], mode


def test_it_trains_as_in_a_loop_that_calls_no_train(monkeypatch: pytest.MonkeyPatch):
    make = plain_module.make_model
    monkeypatch.setattr(plain_module, "make_model", lambda spec: make(spec).eval())  # as it was before `make` called train()
    spec = job(captured, 0.5, "eval").replace(clip_norm=None, lr_schedule=None)
    graph = preflight(spec).graph
    want, model = plain_module.train(graph, spec)
    assert not any(part.training for part in model.modules())
    with OneProcessRun(spec, ParallelPlan.mesh(dp=2, layers=len(graph.layers)), "1f1b", graph=graph) as run:
        for step in range(STEPS):
            run.step(step)
        found = run.parameters()
    assert all(torch.equal(copy, want.parameters[name]) for name, copies in found.items() for copy in copies)
