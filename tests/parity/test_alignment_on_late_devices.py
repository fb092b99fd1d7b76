"""Where numbers lie on a GPU does not depend on the plan either: new tensors begin at multiples of 256 bytes, not of 64."""

import functools
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from unittest import mock

import pytest
import torch
from helpers import pretend, ugly_models
from helpers.kernel_calls import calls_on_late_devices, products_in
from helpers.late_device import World
from helpers.late_runs import late
from torch import Tensor, nn

from raypar.comm import bucket_layout, buffer_pool
from raypar.comm.buffer_pool import ALIGNED, ALIGNED_ON_CUDA
from raypar.model.graph import Graph
from raypar.plan import ParallelPlan
from raypar.worker.run_in_one_process import OneProcessRun

pytestmark = [pytest.mark.part(4), pretend.NEEDED]
S = ugly_models.SEQ
STEPS = 2
PLANS = [("1f1b", (1, 1, 1), 1), ("zb-h1", (1, 1), 1), ("interleaved", (1, 1), 2), ("gpipe", (2, 1), 1)]


@pytest.fixture(scope="module", autouse=True)
def device():
    with pretend.differentiable():
        yield pretend.device()


class Shifted(nn.Module):
    """Hands on a value, or a gradient, that lies so many bytes behind where new ones begin."""

    def __init__(self, what: str, by: int) -> None:
        super().__init__()
        self.linear, self.what, self.by = nn.Linear(S, S), what, by // 4

    def reset_parameters(self) -> None:
        self.linear.reset_parameters()

    def forward(self, x: Tensor) -> Tensor:
        return self._shifted(self.linear(x)) if self.what == "value" else self.linear(self._shifted(x))

    def _shifted(self, x: Tensor) -> Tensor:
        """Its gradient lies so, too."""
        return torch.cat([x.new_zeros(self.by), x.reshape(-1)])[self.by :].view_as(x)


SHIFTED = [("gradient", 64), ("gradient", 196), ("value", 128), ("value", 68)]


def products(schedule: str, replicas: tuple[int, ...], chunks: int, seed: int = 1) -> Counter[str]:
    """The matrix products of some steps of a plan, all workers together."""
    layers = [("in", lambda: nn.Linear(S, S)), *((f"{what}{by}", functools.partial(Shifted, what, by)) for what, by in SHIFTED)]
    graph = Graph.sequential([*layers, ("out", lambda: nn.Linear(S, 1))], input="x")
    spec = ugly_models.job("plain", microbatches=5, steps=STEPS)
    plan = ParallelPlan.of(replicas, layers=len(layers) + 1, chunks=chunks)
    with (
        World(seed, plan.world) as world,
        calls_on_late_devices() as calls,
        late(world),
        OneProcessRun(spec, plan, schedule, graph=graph, device=pretend.device()) as run,
    ):
        for step in range(STEPS):
            run.step(step)
    return products_in(calls)


@contextmanager
def aligned_to(alignment: int) -> Iterator[None]:
    """The pretended device, taken for one whose new tensors begin at multiples of this."""
    own = {"alignment_on": lambda device: alignment}
    with mock.patch.multiple(buffer_pool, **own), mock.patch.multiple(bucket_layout, **own):
        yield


@pytest.mark.parametrize("plan", [PLANS[0], *(pytest.param(one, marks=pytest.mark.ci) for one in PLANS[1:])], ids=str)
def test_every_plan_makes_the_products_of_one_worker_modulo_256(plan):
    with aligned_to(ALIGNED_ON_CUDA):
        want, got = products("1f1b", (1,), 1), products(*plan)
    assert sum(want.values()) > 100 and all(any(f" at {place}" in call for call in want) for _, place in SHIFTED)
    assert got == want, f"{list((got - want).elements())[:3]} instead of {list((want - got).elements())[:3]}"


def test_places_kept_modulo_64_only_would_be_seen():
    with aligned_to(ALIGNED):
        want, got = products("1f1b", (1,), 1), products(*PLANS[0])
    assert got != want
