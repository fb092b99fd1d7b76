"""Tensors that layers share: one returned under two names, and writing into what others read."""

from typing import ClassVar

import pytest
import torch
from helpers import reference, ugly_models
from torch import Tensor, nn

from raypar.errors import UserCodeError
from raypar.job import DataConfig, LossConfig, ModelConfig
from raypar.model.graph import Graph, Layer
from raypar.plan import ParallelPlan
from raypar.worker.check_layer_shapes import check_layer_shapes
from raypar.worker.run_in_one_process import OneProcessRun

pytestmark = pytest.mark.part(4)

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
    return base.replace(
        model=ModelConfig(function=graph),
        loss=LossConfig(function=loss),
        data=DataConfig(function=data, target="y"),
    )


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


class Source(nn.Linear):
    """Returns a value, a parameter, and a part of the value; uses the parameter itself too."""

    def __init__(self) -> None:
        super().__init__(W, W)
        self.gate = nn.Parameter(torch.linspace(0.5, 1.5, W))

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        out = super().forward(x) * self.gate
        return out, self.gate, out[:, 1:]


class Passing(nn.Linear):
    """Returns what it reads, as it is and as a view, beside something of its own."""

    def __init__(self) -> None:
        super().__init__(W, W)

    def forward(self, a: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        return a, a.view(-1, W // 2, 2), super().forward(a).tanh()


class Meeting(nn.Linear):
    """Computes with all of them, with some several times."""

    def __init__(self) -> None:
        super().__init__(W, W)

    def forward(self, a: Tensor, b: Tensor, gate: Tensor, part: Tensor, pairs: Tensor, h: Tensor) -> Tensor:
        return super().forward(a) * b * gate + part.exp().sum(1, keepdim=True) + a * pairs.flatten(1) + gate.sin() * h


def passing() -> Graph:
    """`b` is `a` itself where both are made in one stage; `gate` is a parameter."""
    every = ("a", "b", "gate", "part", "pairs")
    return Graph(
        (
            Layer("source", Source, ("x",), ("a", "gate", "part")),
            Layer("passing", Passing, ("a",), ("b", "pairs", "h")),
            Layer("meeting", Meeting, (*every, "h"), ("i",)),
            Layer("again", Meeting, (*every, "i"), ("j",)),
            Layer("last", Three, ("j", "b", "gate"), ("out",)),
        ),
        output="out",
    )


@pytest.mark.parametrize("autocast", [False, True], ids=["plain", "users autocast"])
@pytest.mark.parametrize("cuts", [(), (1,), (2,), (3,), (4,), (1, 3), (1, 2, 3, 4)], ids=str)
def test_a_layer_may_return_what_it_reads_a_view_of_it_or_a_parameter(cuts, autocast, monkeypatch):
    if autocast:  # with its cache, which keeps casts of leaves
        inner = Meeting.forward
        monkeypatch.setattr(
            Meeting, "forward", lambda self, *given: torch.autocast("cpu", torch.bfloat16)(inner)(self, *given).float()
        )
    spec = job()
    want = reference.train(passing(), spec)
    with OneProcessRun(spec, ParallelPlan.mesh(pp=len(cuts) + 1, layers=5, cuts=cuts), "1f1b", graph=passing()) as run:
        for step in range(spec.steps):
            run.step(step)
            found = run.gradients()
            bad = [n for n, g in want.gradients[step].items() if not all(torch.equal(copy, g) for copy in found[n])]
            assert not bad
        found = run.parameters()
    assert all(torch.equal(copy, want.parameters[name]) for name, copies in found.items() for copy in copies)


class Hooked(nn.Linear):
    """Registers hooks on what it reads and on what it returns: the first is called, and doubles, the second adds one."""

    calls: ClassVar[list[str]] = []

    def __init__(self) -> None:
        super().__init__(W, W)

    def forward(self, x: Tensor) -> Tensor:
        def doubled(gradient: Tensor) -> Tensor:
            self.calls.append("read")
            return 2 * gradient

        def increased(gradient: Tensor) -> Tensor:
            self.calls.append("returned")
            return gradient + 1

        x.register_hook(doubled)
        out = super().forward(x).tanh()
        out.register_hook(increased)
        return out


@pytest.mark.parametrize("cuts", [(), (1,), (2,), (1, 2)], ids=str)
def test_hooks_of_users_code_on_values_are_called_once_and_may_change_the_gradient(cuts):
    def hooked() -> Graph:
        return Graph.sequential([("in", lambda: nn.Linear(W, W)), ("one", Hooked), ("two", Hooked)], input="x")

    spec = job()
    want = reference.train(hooked(), spec)
    Hooked.calls.clear()
    with OneProcessRun(spec, ParallelPlan.mesh(pp=len(cuts) + 1, layers=3, cuts=cuts), "1f1b", graph=hooked()) as run:
        for step in range(spec.steps):
            run.step(step)
        found = run.parameters()
    assert sorted(Hooked.calls) == ["read"] * 16 + ["returned"] * 16  # two layers, four microbatches, two steps
    assert all(torch.equal(copy, want.parameters[name]) for name, copies in found.items() for copy in copies)


def double_on_node(x: Tensor) -> None:
    """Doubles the gradient by a hook that the node behind it is called with."""
    x.grad_fn.register_prehook(lambda gradients: (2 * gradients[0],))


def double_behind_node(x: Tensor) -> None:
    """Doubles what the node behind it makes of the gradient."""
    x.grad_fn.register_hook(lambda made, gradients: tuple(2 * each if each is not None else None for each in made))


HOOKS = {
    "value": (lambda x: None, r"its input 'a'"),  # `Hooked` registers one
    "before the node": (double_on_node, r"the grad_fn of its input 'a'"),
    "behind the node": (double_behind_node, r"the grad_fn of its input 'a'"),
}


@pytest.mark.parametrize("viewed", [False, True], ids=["itself", "a view"])
@pytest.mark.parametrize("cuts", [(), (1, 2)], ids=str)
@pytest.mark.parametrize("on", HOOKS)
def test_a_hook_on_a_value_that_others_read_too_is_refused_and_one_on_a_view_of_it_is_not(on, cuts, viewed):
    register, place = HOOKS[on]

    class Reader(Hooked if on == "value" else nn.Linear):
        def __init__(self) -> None:
            nn.Linear.__init__(self, W, W)

        def forward(self, x: Tensor) -> Tensor:
            x = x.view_as(x) if viewed else x
            register(x)
            return super().forward(x)

    class Sum(nn.Module):
        def forward(self, a: Tensor, b: Tensor) -> Tensor:
            return a * b

    def shared() -> Graph:
        layers = (
            Layer("in", lambda: nn.Linear(W, W), ("x",), ("a",)),
            Layer("reader", Reader, ("a",), ("b",)),
            Layer("sum", Sum, ("a", "b"), ("out",)),
        )
        return Graph(layers, output="out")

    spec = job()
    plan = ParallelPlan.mesh(pp=len(cuts) + 1, layers=3, cuts=cuts)
    with OneProcessRun(spec, plan, "1f1b", graph=shared()) as run:
        if not viewed:
            with pytest.raises(UserCodeError, match=rf"layer 'reader' registers a hook on {place}, which others read too"):
                run.step(0)
            return
        for step in range(spec.steps):
            run.step(step)
        found = run.parameters()
    want = reference.train(shared(), spec)
    assert all(torch.equal(copy, want.parameters[name]) for name, copies in found.items() for copy in copies)
