"""Optimizers do not load PyTorch's compiler, and do to the last bit what they do with it."""

import subprocess
import sys

import pytest
import torch
from torch import nn
from torch.optim.optimizer import Optimizer

from raypar.model.without_dynamo import without_dynamo
from raypar.worker.job_spec import OptimizerSpec, Ref
from raypar.worker.step.optimizer import build_optimizer

NAMES = ["Adadelta", "Adagrad", "Adam", "AdamW", "Adamax", "ASGD", "NAdam", "RAdam", "RMSprop", "Rprop", "SGD"]

TRAIN = """
import sys
import torch
from torch import nn
from raypar.worker.step.optimizer import build_optimizer
from raypar.worker.job_spec import OptimizerSpec, Ref

class Own(torch.optim.AdamW):
    def step(self, closure=None):
        return super().step(closure)

for target in ("torch.optim:SGD", "torch.optim:AdamW", "__main__:Own"):
    parameter = nn.Parameter(torch.arange(4.0))
    optimizer = build_optimizer(OptimizerSpec(Ref(target, {"lr": 0.1})), {"weight": parameter})
    for step in range(3):
        parameter.grad = torch.full((4,), 0.5 + step)
        optimizer.step()
    optimizer.load_state_dict(optimizer.state_dict())
    optimizer.zero_grad()
    assert parameter.grad is None and not torch.equal(parameter, torch.arange(4.0))
    assert torch.is_grad_enabled()
print([name for name in ("torch._dynamo", "torch._inductor", "sympy") if name in sys.modules])
import torch._dynamo
optimizer.step()
"""


def test_no_optimizer_loads_the_compiler():
    done = subprocess.run([sys.executable, "-c", TRAIN], capture_output=True, text=True, timeout=120)
    assert done.stdout == "[]\n" and done.returncode == 0, done.stderr


def trained(name: str) -> list[torch.Tensor]:
    parameter = nn.Parameter(torch.linspace(-1.0, 1.0, 12).reshape(3, 4).clone())
    optimizer = build_optimizer(OptimizerSpec(Ref(f"torch.optim:{name}", {"lr": 0.05})), {"weight": parameter})
    seen = []
    optimizer.register_step_pre_hook(lambda *given: seen.append("before"))
    optimizer.register_step_post_hook(lambda *given: seen.append("after"))
    generator = torch.Generator().manual_seed(3)
    for _ in range(4):
        parameter.grad = torch.randn(3, 4, generator=generator)
        optimizer.step()
    assert seen == ["before", "after"] * 4 and torch.is_grad_enabled()
    return [parameter.detach(), *(v for v in optimizer.state[parameter].values() if isinstance(v, torch.Tensor))]


@pytest.mark.parametrize("name", NAMES)
def test_with_and_without_the_compiler_the_bits_are_the_same(name, monkeypatch):
    monkeypatch.delitem(sys.modules, "torch._dynamo", raising=False)
    without = trained(name)
    assert "torch._dynamo" not in sys.modules
    monkeypatch.undo()
    import torch._dynamo

    assert all(map(torch.equal, without, trained(name)))


def test_a_class_is_changed_once():
    without_dynamo(torch.optim.SGD)
    torch.optim.SGD([nn.Parameter(torch.zeros(1))])  # puts the hooks of its class around `step`
    before = [vars(torch.optim.SGD)["step"], *vars(Optimizer).values()]
    without_dynamo(torch.optim.SGD)
    assert [vars(torch.optim.SGD)["step"], *vars(Optimizer).values()] == before
