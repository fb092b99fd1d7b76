"""No process of a run loads PyTorch's compiler or sympy by itself, and does to the last bit what it does with them."""

import sys
import threading

import pytest
import torch
from helpers.processes import run_code
from torch import nn
from torch.autograd.graph import get_gradient_edge
from torch.optim.optimizer import Optimizer

from raypar.job import OptimizerConfig
from raypar.torch_compat import avoid_dynamo_import as module
from raypar.torch_compat.avoid_dynamo_import import meta_operations_without_dynamo, without_dynamo
from raypar.worker.stage.backward import run_autograd_backward
from raypar.worker.step.optimizer_and_parameter_groups import build_optimizer

NAMES = ["Adadelta", "Adagrad", "Adam", "AdamW", "Adamax", "ASGD", "NAdam", "RAdam", "RMSprop", "Rprop", "SGD"]

TRAIN = """
import sys
import torch
from torch import nn
from raypar.worker.step.optimizer_and_parameter_groups import build_optimizer
from raypar.job import OptimizerConfig, FunctionConfig

class Own(torch.optim.AdamW):
    def step(self, closure=None):
        return super().step(closure)

for target in ("torch.optim:SGD", "torch.optim:AdamW", "__main__:Own"):
    parameter = nn.Parameter(torch.arange(4.0))
    optimizer = build_optimizer(OptimizerConfig(function=target, args={"lr": 0.1}), {"weight": parameter})
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


@pytest.mark.ci
def test_no_optimizer_loads_the_compiler():
    assert run_code(TRAIN) == "[]\n"


def trained(name: str) -> list[torch.Tensor]:
    parameter = nn.Parameter(torch.linspace(-1.0, 1.0, 12).reshape(3, 4).clone())
    optimizer = build_optimizer(OptimizerConfig(function=f"torch.optim:{name}", args={"lr": 0.05}), {"weight": parameter})
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


STEP = """
import sys
from functools import partial
import torch
from helpers.tiny_job import data, loss, model
from raypar import Graph, Layer, Trainer
from raypar.worker.job_preflight import preflight
from raypar.worker.run_in_one_process import OneProcessRun
from raypar.plan import ParallelPlan

def graph():
    made = model()
    layer = lambda i: Layer(f"layer{i}", lambda: model()[i], (f"h{i}" if i else "x",), (f"h{i + 1}",))
    return Graph(tuple(map(layer, range(4))), output="h4")

how = sys.argv[1]
given = {"model": graph if how == "graph" else model, "deferred_init": "always" if how == "deferred" else "never"}
adamw = partial(torch.optim.AdamW, lr=0.01)
spec = Trainer(
    **given, loss=loss, data=data, optimizer=adamw if how == "whole" else lambda p: adamw(p), steps=2, batch_size=8,
    microbatches=4,
).job
if how == "preflight":
    preflight(spec)
else:
    with OneProcessRun(spec, ParallelPlan.mesh(pp=2, dp=2, layers=4), "zb-h1") as run:
        for step in range(2):
            run.step(step)
print([name for name in ("torch._dynamo", "torch._inductor", "sympy") if name in sys.modules])
"""


@pytest.mark.parametrize("how, loaded", [("whole", []), ("graph", []), ("deferred", []), ("preflight", ["sympy"])])
def test_a_worker_loads_neither_compiler_nor_sympy_for_its_steps_and_a_check_no_compiler(how, loaded):
    """sympy, because PyTorch's operations on meta tensors ask it whether a plain number is one of its symbols."""
    assert eval(run_code(STEP, how)) in ([], loaded)


def gradients(run, dtype: torch.dtype, edges: bool = False) -> list[torch.Tensor | None]:
    """Those of three leaves after `run(roots, gradients)`; of the roots one is a leaf, one is strided, one is a loss."""
    generator = torch.Generator().manual_seed(5)
    a, b, c = (torch.randn(6, 4, generator=generator).to(dtype).requires_grad_() for _ in range(3))
    roots = [torch.tanh(a @ b.t()), c, (a * b).t(), (a * c).sum()]
    starts = [torch.randn(root.shape, generator=generator).to(dtype) for root in roots[:3]]
    if edges:
        roots[:3] = map(get_gradient_edge, roots[:3])
    run(roots, [*starts, None])
    return [leaf.grad for leaf in (a, b, c)]


@pytest.mark.parametrize("edges", [False, True])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16])
def test_a_backward_pass_gives_the_gradients_of_pytorchs_own(dtype, edges):
    """From tensors, and from where the gradients of tensors that are gone enter the graph."""
    assert all(map(torch.equal, gradients(run_autograd_backward, dtype, edges), gradients(torch.autograd.backward, dtype)))


class Own(torch.Tensor):
    """A tensor of a user's class."""


@pytest.mark.parametrize("root, gradient", [
    (torch.ones(2, 3), torch.ones(3)),
    (torch.ones(2, 3), None),
    (torch.ones(2), torch.ones(2, dtype=torch.complex64)),
    (torch.ones(2).as_subclass(Own), torch.ones(3)),
])  # fmt: skip
def test_what_pytorch_refuses_it_refuses_in_its_own_words(root, gradient):
    found = []
    for run in (run_autograd_backward, torch.autograd.backward):
        with pytest.raises(RuntimeError) as error:
            run([root.clone().requires_grad_() * 2], [gradient])
        found.append(str(error.value))
    assert found[0] == found[1]


def on_meta() -> list[tuple[torch.Size, tuple[int, ...], torch.dtype]]:
    """Shape, strides and dtype of what layers and initialisations give on the meta device."""
    with torch.device("meta"):
        weight = nn.init.normal_(torch.empty(4, 8))
        x = torch.zeros(2, 3, 8)
        made = [
            nn.Linear(8, 4)(x),
            nn.TransformerEncoderLayer(8, 2, batch_first=True)(x),
            nn.Embedding(5, 8)(torch.zeros(2, 3, dtype=torch.long)),
            nn.functional.gelu(x.transpose(1, 2)) * 2 + 1,
            nn.functional.cross_entropy(x.flatten(0, 1), torch.zeros(6, dtype=torch.long)),
            nn.init.trunc_normal_(weight).masked_fill(weight > 0, 1.0),
        ]
    return [(tensor.shape, tensor.stride(), tensor.dtype) for tensor in made]


def answers() -> list[object]:
    """The functions of PyTorch that keep an answer of the compiler."""
    return [f for f in module._references() if hasattr(f, "__dynamo_disable")]


def test_operations_on_meta_tensors_do_the_same_without_the_compiler_and_find_pytorch_as_it_was_afterwards(monkeypatch):
    monkeypatch.delitem(sys.modules, "torch._dynamo", raising=False)
    before = answers()
    for function in before:
        monkeypatch.delattr(function, "__dynamo_disable")
    assert module._references() and not answers()
    with meta_operations_without_dynamo():
        with meta_operations_without_dynamo():
            pass
        assert answers()
        without = on_meta()
    assert not answers() and "torch._dynamo" not in sys.modules
    monkeypatch.undo()
    assert answers() == before
    with meta_operations_without_dynamo():
        assert on_meta() == without


def test_threads_that_check_models_at_the_same_time_leave_no_answer_behind(monkeypatch):
    monkeypatch.delitem(sys.modules, "torch._dynamo", raising=False)
    before = answers()
    all_in, failed = threading.Barrier(4), []

    def check() -> None:
        try:
            for _ in range(50):
                with meta_operations_without_dynamo():
                    all_in.wait(20)
                    assert len(answers()) == len(module._references())
                    all_in.wait(20)
        except Exception as error:
            failed.append(error)
            all_in.abort()

    threads = [threading.Thread(target=check) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(60)
    assert not failed and answers() == before


COMPILED = """
import torch
from raypar.torch_compat.avoid_dynamo_import import _references, meta_operations_without_dynamo
with meta_operations_without_dynamo():
    torch.empty(3, device="meta").normal_()
graphs = []
def backend(graph, inputs):
    graphs.append(graph)
    return graph.forward
compiled = torch.compile(lambda x: torch.nn.functional.layer_norm(x.sin() * 2, (3,)), backend=backend)
x = torch.arange(6.0).view(2, 3)
assert torch.equal(compiled(x), torch.nn.functional.layer_norm(x.sin() * 2, (3,))) and len(graphs) == 1
torch.empty(3, device="meta").normal_()
kept = [f for f in _references() if hasattr(f, "__dynamo_disable")]
assert kept and all(getattr(f, "__dynamo_disable") is not f for f in kept)
"""


@pytest.mark.ci
def test_what_is_compiled_afterwards_is_compiled_as_ever():
    run_code(COMPILED)
