"""Tensors that layers share: one returned under two names, and writing into what others read."""

from dataclasses import replace

import pytest
import torch
from helpers import reference, ugly_models
from torch import Tensor, nn

from raypar.errors import UserCodeError
from raypar.model.graph import Graph, Layer
from raypar.plan import ParallelPlan
from raypar.worker.job_preflight import check_layer_shapes
from raypar.worker.job_spec import Ref
from raypar.worker.run_in_one_process import OneProcessRun

W = ugly_models.WIDTH
ONE, CUT = ParallelPlan.of((1,), layers=4), ParallelPlan.of((1, 1, 1, 1), layers=4)


class Twice(nn.Linear):
    def __init__(self) -> None:
        super().__init__(W, W)

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        out = super().forward(x)
        return out, out, (out * 3).detach().long()


class Three(nn.Linear):
    def __init__(self) -> None:
        super().__init__(W, W)

    def forward(self, a: Tensor, b: Tensor, count: Tensor) -> Tensor:
        return super().forward(a) + 0.7 * b + count


class Counting(Three):
    """Adds to an integer value in place, as its own stage alone would see it."""

    def forward(self, a: Tensor, b: Tensor, count: Tensor) -> Tensor:
        count += 1
        return super().forward(a, b, count)


class Rectified(Three):
    def forward(self, a: Tensor, b: Tensor, count: Tensor) -> Tensor:
        return super().forward(a.relu_(), b, count)


def graph(third: type[nn.Module] = Three) -> Graph:
    return Graph(
        (
            Layer("one", Twice, ("x",), ("a", "b", "n")),
            Layer("two", Three, ("a", "b", "n"), ("h",)),
            Layer("three", third, ("h", "a", "n"), ("i",)),
            Layer("four", Three, ("i", "b", "n"), ("out",)),
        ),
        output="out",
    )


def loss(output: Tensor, target: Tensor) -> Tensor:
    return (output - target).square().mean()


def data() -> list[tuple[Tensor, Tensor]]:
    x, y = torch.randn(2, 13, W, generator=torch.Generator().manual_seed(5))
    return list(zip(x, y, strict=True))


def job():
    base = ugly_models.job("plain", microbatches=4, steps=2)
    return replace(base, model=Ref(graph), loss=Ref(loss), data=replace(base.data, dataset=Ref(data), input=None, target="y"))


@pytest.mark.parametrize("plan", [ONE, CUT], ids=["whole", "cut"])
def test_a_tensor_returned_under_two_names_is_two_values(plan):
    spec = job()
    want = reference.train(graph(), spec)
    with OneProcessRun(spec, plan, "1f1b", graph=graph()) as run:
        for step in range(spec.steps):
            run.step(step)
        found = run.parameters()
    assert all(torch.equal(copy, want.parameters[name]) for name, copies in found.items() for copy in copies)


@pytest.mark.parametrize("third", [Counting, Rectified])
@pytest.mark.parametrize("plan", [ONE, CUT], ids=["whole", "cut"])
def test_a_layer_that_writes_into_its_input_is_refused_under_every_plan(plan, third):
    refused = pytest.raises(UserCodeError, match=r"layer 'three' writes into its input .* in place")
    with OneProcessRun(job(), plan, "1f1b", graph=graph(third)) as run, refused:
        run.step(0)


@pytest.mark.parametrize("third", [Counting, Rectified])
def test_a_layer_that_writes_into_its_input_is_found_before_anything_starts(third):
    batch = {"x": torch.randn(2, W), "y": torch.randn(2, W)}
    with pytest.raises(UserCodeError, match=r"layer 'three' writes into its input '[hn]' in place"):
        check_layer_shapes(job(), graph(third), batch)
