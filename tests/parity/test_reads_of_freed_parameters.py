"""What reads parameters of ZeRO stage 3 after their memory is freed: a loss's count, and whoever prints them."""

import subprocess
import sys
from pathlib import Path

import torch
from helpers import ugly_models
from helpers.parity import Layout
from helpers.zero_layouts import small_pieces
from torch import Tensor, nn

from raypar.job import LossConfig, ModelConfig, OptimizerConfig
from raypar.plan import ParallelPlan
from raypar.torch_compat.printing import print_tensors_without_memory
from raypar.worker.layer_graph_of_job import make_layer_graph
from raypar.worker.run_in_one_process import OneProcessRun
from raypar.worker.stage.tensors_without_memory import without_memory

SPANS = ("step", "microbatch", "layer")


class GivesItsScale(nn.Module):
    """x [samples, 6] -> {"y": [samples, 1], "count": an element of a parameter}."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.last = nn.Linear(6, 8), nn.Linear(8, 1)
        self.scale = nn.Parameter(torch.full((40,), 3.0), requires_grad=False)

    def forward(self, x: Tensor) -> dict[str, Tensor]:
        return {"y": self.last(torch.tanh(self.first(x))), "count": self.scale[0]}


def scaled_loss(output: dict[str, Tensor], target: Tensor) -> tuple[Tensor, Tensor]:
    """(sum of squares, what the model says)."""
    return ((output["y"].squeeze(-1) - target) ** 2).sum(), output["count"]


def test_a_loss_may_be_counted_by_a_view_of_a_parameter():
    """Its memory was freed before the vote read it: "setStorage ... out of bounds for storage of size 0"."""
    job = ugly_models.job("plain").replace(
        model=ModelConfig(function=GivesItsScale),
        loss=LossConfig(function=scaled_loss),
        optimizer=OptimizerConfig(function="torch.optim:AdamW", args={"lr": 1e-2}),
    )
    graph, found = make_layer_graph(job), []
    one, two = (ParallelPlan.of(replicas, layers=len(graph.layers)) for replicas in ((1,), (2,)))
    for plan in (one, *(two.with_zero(3).with_gather(span) for span in SPANS)):
        with small_pieces(), OneProcessRun(job, plan, "1f1b", graph=graph) as run:
            found.append([{report.loss for report in run.step(step)} for step in range(3)])
    assert found[1:] == found[:1] * 3 and all(len(of_step) == 1 for of_step in found[0])


def print_between_steps() -> None:
    """Print all parameters of all workers after a step."""
    layout = Layout("tangled", "1f1b", (2, 3), 4)
    plan = layout.plan.with_zero(3).with_gather("layer")
    with small_pieces(), OneProcessRun(layout.job, plan, "1f1b", graph=layout.graph) as run:
        run.step(0)
        for core in run.cores:
            for stage in core.stages.values():
                for name, parameter in stage.parameters.items():
                    print(name, parameter, f"{parameter.data}", [parameter])
        run.step(1)


def test_who_prints_parameters_between_their_uses_sees_their_sizes():
    """It ended the process by SIGSEGV."""
    tests = Path(__file__).parents[1]
    script = "from test_reads_of_freed_parameters import print_between_steps; print_between_steps()"
    code = f"import sys; sys.path[:0] = [{str(tests)!r}, {str(tests / 'parity')!r}]; {script}"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stderr[-2000:]
    size = "tensor(no memory until its next use, size=(16, 8)"
    assert f"mix0.up.weight Parameter containing:\n{size}, requires_grad=True) {size})" in done.stdout


def test_other_tensors_are_printed_as_before():
    tensors = [
        torch.arange(3.0),
        nn.Parameter(torch.ones(2, 2)),
        torch.empty(0),
        torch.ones(2).to_sparse(),
        torch.ones(2, device="meta"),
    ]
    before = [repr(tensor) for tensor in tensors]
    print_tensors_without_memory(), print_tensors_without_memory()
    assert [repr(tensor) for tensor in tensors] == before
    assert repr(without_memory((2, 3), torch.float32)) == "tensor(no memory until its next use, size=(2, 3))"
    assert repr(without_memory((2, 0), torch.float32)) == "tensor([], size=(2, 0))"
