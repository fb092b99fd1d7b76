"""Mixed precision inside a layer, by the user's own `torch.autocast`: the bits of plain autograd, also where W is put off."""

from collections.abc import Callable

import pytest
import torch
import torch.nn.functional as F
from helpers import ugly_models
from helpers.parity import check_gradients, different_gradients
from helpers.reference import train
from torch import Tensor, nn

from raypar.job import Job, PlanConfig
from raypar.model.graph import Graph
from raypar.plan import ParallelPlan
from raypar.worker.run_in_one_process import OneProcessRun

pytestmark = pytest.mark.part(4)

S = ugly_models.SEQ


def cast() -> torch.autocast:
    return torch.autocast("cpu", torch.bfloat16)


class Once(nn.Module):
    """As most people write it."""

    def __init__(self) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(S, 4 * S), nn.Linear(4 * S, S, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        with cast():
            y = self.down(F.gelu(self.up(x)))
        return x + y.float()


class Thrice(nn.Module):
    """One Linear three times under one autocast, which keeps the cast of its weight."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(S, S)

    def forward(self, x: Tensor) -> Tensor:
        with cast():
            y = self.linear(self.linear(self.linear(x).tanh()).tanh())
        return y.float()


class Apart(Thrice):
    """Each time under one of its own."""

    def forward(self, x: Tensor) -> Tensor:
        for _ in range(3):
            with cast():
                x = self.linear(x).tanh()
        return x.float()


class Between(Thrice):
    """Switched off for the second."""

    def forward(self, x: Tensor) -> Tensor:
        with cast():
            y = self.linear(x).tanh()
            with torch.autocast("cpu", enabled=False):
                y = self.linear(y.float()).tanh()
            return self.linear(y).float()


class Two(nn.Module):
    """Two read what comes in, which may be from another stage."""

    def __init__(self) -> None:
        super().__init__()
        self.one, self.other = nn.Linear(S, S), nn.Linear(S, S)

    def forward(self, x: Tensor) -> Tensor:
        with cast():
            y = self.one(x).tanh() * self.other(x)
        return y.float()


class Force(Thrice):
    """Takes a gradient by its weight, which is added to no `.grad`."""

    def forward(self, x: Tensor) -> Tensor:
        if not torch.is_grad_enabled():
            return x
        with cast():
            energy = self.linear(x.detach()).tanh().sum()
        (force,) = torch.autograd.grad(energy, self.linear.weight)
        with cast():
            y = self.linear(x)
        return y.float() + x @ force


class Leaves(nn.Module):
    """Hands bfloat16 on to the next layer."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(S, S)

    def forward(self, x: Tensor) -> Tensor:
        with cast():
            return self.linear(x)


def job_of(middle: Callable[[], nn.Module]) -> tuple[Graph, Job]:
    builds: list[tuple[str, Callable[[], nn.Module]]] = [
        ("a", lambda: nn.Linear(S, S)),
        ("b", middle),
        ("c", middle),
        ("d", lambda: nn.Linear(S, 1)),
    ]
    if middle is Leaves:
        builds[3] = ("d", Once)
        builds.append(("e", lambda: nn.Linear(S, 1)))
    return Graph.sequential(builds, input="x"), ugly_models.job("plain", microbatches=4, steps=2, virtual_replicas=2)


@pytest.mark.parametrize("schedule, stages", [("zb-h1", 1), ("zb-h1", 2), ("1f1b", 2)])
@pytest.mark.parametrize("middle", [Once, Thrice, Apart, Between, Two, Force, Leaves])
def test_autocast_inside_a_layer_has_the_bits_of_one_process(middle, schedule, stages):
    graph, job = job_of(middle)
    want = train(graph, job)
    with OneProcessRun(job, ParallelPlan.of((1,) * stages, layers=len(graph.layers)), schedule, graph=graph) as run:
        check_gradients(run, want)


class Gated(Two):
    """On shards its first two share what they read."""

    def __init__(self) -> None:
        super().__init__()
        self.down = nn.Linear(S, S)

    def forward(self, x: Tensor) -> Tensor:
        with cast():
            y = self.down(self.one(x).tanh() * self.other(x))
        return x + y.float()


STYLES = {"*.up": "column", "*.one": "column", "*.other": "column", "*.down": "row"}


@pytest.mark.parametrize("middle", [Once, Gated])
def test_on_shards_autocast_gives_under_every_schedule_the_same_bits_and_about_those_of_one_process(middle):
    graph, job = job_of(middle)
    names = ("up", "down") if middle is Once else ("one", "other", "down")
    job = job.replace(plan=PlanConfig(styles=dict(tuple((f"*.{name}", STYLES[f"*.{name}"]) for name in names))))
    want, found = train(graph, job), {}
    for schedule in ("1f1b", "zb-h1"):
        with OneProcessRun(job, ParallelPlan.mesh(pp=2, tp=2, layers=4), schedule, graph=graph) as run:
            run.step(0)
            found[schedule] = run.gradients()
    for name, wanted in want.gradients[0].items():
        for plain, split in zip(found["1f1b"][name], found["zb-h1"][name], strict=True):
            assert torch.equal(plain, split), name
            assert plain.dtype == wanted.dtype == torch.float32
            if plain.shape == wanted.shape:
                assert (plain - wanted).abs().max() < 0.02 * wanted.abs().max(), name


@pytest.mark.parametrize("cuts", [[1], [2], [1, 2, 3]], ids=str)
def test_where_the_model_is_cut_does_not_decide_the_bits_of_what_two_readers_cast(cuts):
    """Autocast keeps the cast of a leaf, which what comes from another stage would be, for all its readers."""
    graph, job = job_of(Two)
    want = train(graph, job)
    with OneProcessRun(job, ParallelPlan.of((1,) * (len(cuts) + 1), layers=4, cuts=cuts), "1f1b", graph=graph) as run:
        run.step(0)
        assert not different_gradients(run, want, 0)
