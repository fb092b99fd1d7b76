"""What needs no gradient in one process needs none in any stage: kernels, checkpoints and layers ask for it."""

import warnings

import pytest
import torch
from helpers import reference, ugly_models
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from raypar.job import ModelConfig, PrecisionConfig
from raypar.model.graph import Graph, Layer
from raypar.plan import MicrobatchRouting, ParallelPlan
from raypar.worker.layer_graph_of_job import make_layer_graph
from raypar.worker.run_in_one_process import OneProcessRun
from raypar.worker.stage_builder import build_stage

SIZE = ugly_models.SEQ


class Aware(nn.Linear):
    """Asks whether its input needs a gradient."""

    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x) * (2.0 if x.requires_grad else 1.0)


class Reentrant(nn.Linear):
    """A reentrant checkpoint trains nothing inside it if no input of it needs a gradient."""

    def forward(self, x: Tensor) -> Tensor:
        return checkpoint(super().forward, x, use_reentrant=True).tanh()


def frozen() -> nn.Linear:
    return nn.Linear(SIZE, SIZE).requires_grad_(False)


KINDS = {"asks": Aware, "reentrant checkpoint": Reentrant}


@pytest.mark.parametrize("recompute", [(), range(4)], ids=["kept", "recomputed"])
@pytest.mark.parametrize("cuts", [(1,), (2,), (1, 2)], ids=str)
@pytest.mark.parametrize("kind", KINDS)
def test_a_stage_behind_frozen_layers_gives_the_bits_of_one_process(kind, cuts, recompute):
    def model() -> nn.Sequential:
        return nn.Sequential(frozen(), nn.Tanh(), KINDS[kind](SIZE, SIZE), nn.Linear(SIZE, 1))

    spec = ugly_models.job("plain", steps=2, virtual_replicas=2).replace(model=ModelConfig(function=model))
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # of the reentrant checkpoint, about its inputs
        want = reference.train(make_layer_graph(spec), spec)
        plan = ParallelPlan.mesh(pp=len(cuts) + 1, layers=4, cuts=cuts, recompute=recompute)
        with OneProcessRun(spec, plan, "gpipe") as run:
            for step in range(2):
                assert {report.norm for report in run.step(step)} == {want.norms[step]}
            found = run.parameters()
    assert not [name for name, value in want.parameters.items() if not all(torch.equal(copy, value) for copy in found[name])]


class Embed(nn.Module):
    """Numbers as sequences of 4, and a mask to be added to attention scores, which has no gradient."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(SIZE, 4 * 8)

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        return self.linear(x).view(-1, 4, 8), x.new_zeros(len(x), 1, 4, 4).index_fill(3, torch.tensor(3, device=x.device), -9.0)


class Attention(nn.Module):
    """PyTorch chooses another kernel for a mask that requires a gradient."""

    def __init__(self) -> None:
        super().__init__()
        self.qkv, self.out = nn.Linear(8, 24), nn.Linear(8, 8)

    def forward(self, x: Tensor, mask: Tensor) -> Tensor:
        q, k, v = self.qkv(x).unflatten(2, (3, 1, 8)).permute(2, 0, 3, 1, 4)
        made = nn.functional.scaled_dot_product_attention(q, k, v, attn_mask=mask.to(q.dtype))
        return x + self.out(made.flatten(1, 2))


def masked() -> Graph:
    return Graph(
        (
            Layer("embed", Embed, ("x",), ("e", "mask")),
            Layer("first", Attention, ("e", "mask"), ("a",)),
            Layer("second", Attention, ("a", "mask"), ("b",)),
            Layer("head", lambda: nn.Sequential(nn.Flatten(), nn.Linear(4 * 8, 1)), ("b",), ("out",)),
        ),
        output="out",
    )


@pytest.mark.parametrize("compute", [None, "bf16"])
@pytest.mark.parametrize("schedule, recompute", [("1f1b", ()), ("zb-h1", (1, 2))], ids=str)
def test_a_mask_that_comes_from_another_stage_is_read_by_the_kernel_of_one_process(schedule, recompute, compute):
    spec = ugly_models.job("plain", steps=2, virtual_replicas=2).replace(
        model=ModelConfig(function=masked), precision=PrecisionConfig(compute=compute)
    )
    want = reference.train(make_layer_graph(spec), spec)
    plan = ParallelPlan.mesh(pp=3, layers=4, cuts=(1, 2), recompute=recompute)
    with OneProcessRun(spec, plan, schedule) as run:
        for step in range(2):
            assert {report.norm for report in run.step(step)} == {want.norms[step]}
        found = run.parameters()
    assert not [name for name, value in want.parameters.items() if not all(torch.equal(copy, value) for copy in found[name])]


def test_a_value_without_a_graph_is_received_without_one_and_no_gradient_is_sent_back():
    spec = ugly_models.job("plain").replace(model=ModelConfig(function=masked))
    graph, plan = make_layer_graph(spec), ParallelPlan.mesh(pp=2, layers=4, cuts=(1,))
    routing = MicrobatchRouting(plan, spec.batching)
    first, second = (
        build_stage(graph, plan, i, spec=spec, routing=routing, replica=0, loss_fn=spec.loss.partial()) for i in range(2)
    )
    batch = {"x": torch.randn(2, SIZE), "y": torch.rand(2)}
    for stage in (first, second):
        stage.begin_step(0)
    sent = first.forward(0, {}, batch)
    assert {name: value.requires_grad for name, value in sent.items()} == {"e": True, "mask": False}
    second.forward(0, sent, batch)
    returned = second.backward(0, {})
    assert returned["mask"] is None and returned["e"] is not None
