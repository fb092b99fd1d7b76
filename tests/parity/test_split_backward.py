"""A Linear whose weight gradient is put off has the bits of torch's own backward."""

from itertools import product
from typing import ClassVar

import pytest
import torch
import torch.nn.functional as F
from helpers import ugly_models
from helpers.parity import check_gradients
from helpers.reference import train
from torch import Tensor, nn
from torch.nn.utils.parametrizations import weight_norm
from torch.utils.checkpoint import checkpoint

from raypar.errors import ModelError
from raypar.job import Job
from raypar.model.graph import Graph
from raypar.model.split_backward import Stash, defer_weight_gradients
from raypar.plan import ParallelPlan
from raypar.schedule.schedule_csv import parse_schedule_csv
from raypar.worker.run_in_one_process import OneProcessRun

pytestmark = pytest.mark.part(4)

S = ugly_models.SEQ
LEADING = [(), (1,), (7,), (64,), (1, 1), (4, 17), (8, 128), (2, 1, 3, 4)]
SIZES = [(1, 1), (1, 4), (4, 1), (17, 33), (128, 384)]


def whole(*shape: int, dtype: torch.dtype) -> Tensor:
    return torch.randn(*shape, dtype=dtype)


def by_column(*shape: int, dtype: torch.dtype) -> Tensor:
    """The last dim is the slowest in memory, as after a transpose; torch then computes dX as a transposed product."""
    return torch.randn(shape[-1], *shape[:-1], dtype=dtype).movedim(0, -1)


def sliced(*shape: int, dtype: torch.dtype) -> Tensor:
    return torch.randn(*shape[:-1], 2 * shape[-1], dtype=dtype)[..., : shape[-1]]


def expanded(*shape: int, dtype: torch.dtype) -> Tensor:
    """What the backward of a sum hands on."""
    return torch.randn((), dtype=dtype).expand(shape)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64], ids=str)
@pytest.mark.parametrize("inputs, gradients", [(whole, whole), (by_column, whole), (sliced, whole), (whole, expanded)])
def test_output_and_all_gradients_are_those_of_autograd(inputs, gradients, dtype):
    torch.set_num_threads(1)
    torch.manual_seed(3)
    for leading, (fan_in, fan_out), bias in product(LEADING, SIZES, (True, False)):
        linear = nn.Linear(fan_in, fan_out, bias=bias, dtype=dtype)
        x, gradient = inputs(*leading, fan_in, dtype=dtype), gradients(*leading, fan_out, dtype=dtype)
        plain = x.detach().requires_grad_()
        want = F.linear(plain, linear.weight, linear.bias)
        want.backward(gradient)
        wanted = {name: p.grad for name, p in linear.named_parameters()}
        linear.zero_grad()

        stash: Stash = []
        assert defer_weight_gradients(linear, lambda stash=stash: stash) == [linear]
        split = x.detach().requires_grad_()
        got = linear(split)
        got.backward(gradient)

        case = (leading, fan_in, fan_out, bias)
        assert torch.equal(got, want) and torch.equal(split.grad, plain.grad), case
        assert linear.weight.grad is None, case
        found = stash[0].gradients()
        assert all(a is b for (a, _), b in zip(found, linear.parameters(), strict=True)), case
        assert all(torch.equal(got, want) for (_, got), want in zip(found, wanted.values(), strict=True)), case


def test_an_undefined_gradient_puts_nothing_off():
    class Ends(torch.autograd.Function):
        @staticmethod
        def forward(ctx, x):
            return x.clone()

        @staticmethod
        def backward(ctx, gradient):
            return None

    stash: Stash = []
    linear = nn.Linear(3, 3)
    defer_weight_gradients(linear, lambda: stash)
    x = torch.ones(2, 3, requires_grad=True)
    Ends.apply(linear(x)).sum().backward()
    assert not stash and x.grad is None


def test_only_plain_trainable_linears_are_split():
    class Own(nn.Linear):
        def forward(self, x: Tensor) -> Tensor:
            return super().forward(x) * 2

    frozen = nn.Linear(2, 2).requires_grad_(False)
    shared, twin = nn.Linear(2, 2), nn.Linear(2, 2)
    twin.weight = shared.weight
    plain = nn.Linear(2, 2)
    computed = weight_norm(nn.Linear(2, 2))
    layer = nn.Sequential(plain, Own(2, 2), frozen, shared, twin, computed)
    assert defer_weight_gradients(layer, list) == [plain]


class Recomputed(nn.Module):
    """Runs its Linear again in backward, when other microbatches have gone forward since."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(S, S)

    def forward(self, x: Tensor) -> Tensor:
        return checkpoint(lambda y: self.linear(y).tanh(), x, use_reentrant=True)


class Thrice(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(S, S)

    def forward(self, x: Tensor) -> Tensor:
        return self.linear(self.linear(self.linear(x)).tanh())


class Mixing(nn.Module):
    """Reads its input column by column."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(17, 17)

    def forward(self, x: Tensor) -> Tensor:
        columns = x.repeat(1, 17)[:, : 17 * 5].reshape(-1, 17, 5).movedim(1, 0).reshape(17, -1).t()
        return x + self.linear(columns).view(len(x), -1).mean(1, keepdim=True)


class Overwritten(nn.Module):
    """What the Linear returns, a view of a product where the input has three dims, is written over."""

    def __init__(self) -> None:
        super().__init__()
        self.parts = nn.Sequential(nn.Linear(S, S), nn.ReLU(inplace=True))

    def forward(self, x: Tensor) -> Tensor:
        return x + self.parts(x.view(len(x), 1, S)).squeeze(1)


class Substituted(nn.Module):
    """Calls its Linear with weights that it has computed, or that are another's."""

    def __init__(self) -> None:
        super().__init__()
        self.linear, self.other = nn.Linear(S, S), nn.Linear(S, S)

    def forward(self, x: Tensor) -> Tensor:
        doubled = torch.func.functional_call(self.linear, {"weight": self.linear.weight * 2}, (x,))
        lent = torch.func.functional_call(self.linear, {"bias": self.other.bias}, (doubled.tanh(),))
        return torch.func.functional_call(self.linear, dict(self.other.named_parameters()), (lent,))


class Apart(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(S, S)

    def forward(self, x: Tensor) -> Tensor:
        return self.linear(x) + F.linear(x, self.linear.weight)


def job_of(middle: type[nn.Module]) -> tuple[Graph, Job]:
    graph = Graph.sequential(
        [("a", lambda: nn.Linear(S, S)), ("b", middle), ("c", middle), ("d", lambda: nn.Linear(S, 1))], input="x"
    )
    return graph, ugly_models.job("plain", microbatches=7, steps=2, virtual_replicas=2)


@pytest.mark.parametrize("middle", [Recomputed, Thrice, Mixing, Overwritten, Substituted])
@pytest.mark.parametrize("stages", [1, 2])
def test_zero_bubble_has_the_bits_of_one_process(middle, stages):
    graph, job = job_of(middle)
    want = train(graph, job)
    with OneProcessRun(job, ParallelPlan.of((1,) * stages, layers=4), "zb-h1", graph=graph) as run:
        check_gradients(run, want)


@pytest.mark.parametrize("blocks", [2, 7])
def test_a_schedule_may_mix_whole_and_split_backwards(blocks):
    graph, job = job_of(Thrice)
    job = job.replace(virtual_replicas=blocks)
    want = train(graph, job)
    text = "0F0,0F1,0I0,0W0,0B1,0F2,0I2,0F3,0B3,0W2,0F4,0B4,0F5,0I5,0W5,0F6,0B6"
    with OneProcessRun(job, ParallelPlan.of((1,), layers=4), parse_schedule_csv(text), graph=graph) as run:
        check_gradients(run, want)


class Fused(nn.Module):
    """Its two parameters make one weight: their gradients are parts of one tensor."""

    def __init__(self) -> None:
        super().__init__()
        self.upper, self.lower = nn.Linear(S, 2), nn.Linear(S, S - 2)

    def forward(self, x: Tensor) -> Tensor:
        return F.linear(x, torch.cat([self.upper.weight, self.lower.weight])).tanh()


@pytest.mark.parametrize("blocks", [2, 7])
def test_parameters_that_are_used_as_one_have_the_bits_of_one_process(blocks):
    graph, job = job_of(Fused)
    job = job.replace(virtual_replicas=blocks)
    want = train(graph, job)
    with OneProcessRun(job, ParallelPlan.of((1,), layers=4), "1f1b", graph=graph) as run:
        check_gradients(run, want)


class RecomputedTwice(Recomputed):
    def forward(self, x: Tensor) -> Tensor:
        return super().forward(super().forward(x))


@pytest.mark.parametrize("blocks", [2, 7])
def test_two_reentrant_checkpoints_of_one_layer_have_the_bits_of_one_process(blocks):
    graph, job = job_of(RecomputedTwice)
    job = job.replace(virtual_replicas=blocks)
    want = train(graph, job)
    with OneProcessRun(job, ParallelPlan.of((1,), layers=4), "1f1b", graph=graph) as run:
        check_gradients(run, want)


@pytest.mark.parametrize(
    "microbatches, blocks, replicas", [(2, 3, (3,)), (4, 5, (3, 3, 2)), (3, 7, (3, 3)), (2, 5, (2, 1, 1))], ids=str
)
@pytest.mark.parametrize("schedule", ["1f1b", "zb-h1"])
def test_a_replica_whose_blocks_are_all_empty_takes_part_in_every_step(microbatches, blocks, replicas, schedule):
    job = ugly_models.job("plain", microbatches=microbatches, steps=2, virtual_replicas=blocks)
    with OneProcessRun(job, ParallelPlan.of(replicas, layers=8), schedule) as run:
        want = train(run.graph, job)
        check_gradients(run, want)


class NowAndThen(RecomputedTwice):
    """Checkpoints twice in the second microbatch only."""

    calls: ClassVar[list[int]] = []

    def forward(self, x: Tensor) -> Tensor:
        self.calls.append(1)
        return super().forward(x) if len(self.calls) == 3 else self.linear(self.linear(x).tanh()).tanh()


def test_a_gradient_in_several_parts_where_one_was_relied_on_is_an_error_not_other_bits():
    NowAndThen.calls.clear()
    graph, job = job_of(NowAndThen)
    job = job.replace(virtual_replicas=7)
    with (
        OneProcessRun(job, ParallelPlan.of((1,), layers=4), "1f1b", graph=graph) as run,
        pytest.raises(ModelError, match="several parts"),
    ):
        run.step(0)


class Late(nn.Module):
    """When its backward comes, it runs another backward pass into the weight of the last of its kind."""

    last: ClassVar[list[nn.Module]] = []

    class Again(torch.autograd.Function):
        @staticmethod
        def forward(ctx, x, layer):
            ctx.layer = layer
            return x.clone()

        @staticmethod
        def backward(ctx, gradient):
            if Late.last[0] is not ctx.layer:
                with torch.enable_grad():
                    Late.last[0].linear.weight.sum().backward()
            return gradient, None

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(S, S)

    def forward(self, x: Tensor) -> Tensor:
        Late.last[:] = [self]
        return Late.Again.apply(x, self) + self.linear(x)


def test_a_gradient_that_comes_after_a_parameter_was_reported_is_an_error_not_lost():
    graph, job = job_of(Late)
    plan = ParallelPlan.of((1,), layers=4)
    with OneProcessRun(job, plan, "1f1b", graph=graph) as run, pytest.raises(ModelError, match="use_reentrant=False"):
        run.step(0)


def test_a_weight_used_by_its_linear_and_apart_from_it_is_refused_not_miscounted():
    graph, job = job_of(Apart)
    plan = ParallelPlan.of((1, 1), layers=4)
    with OneProcessRun(job, plan, "zb-h1", graph=graph) as run, pytest.raises(ModelError, match="apart from it"):
        run.step(0)
    want = train(graph, job)
    with OneProcessRun(job, plan, "1f1b", graph=graph) as run:
        assert run.step(0)[0].norm == want.norms[0]
