"""A worker whose generation ends stops computing at its next layer, however far its next message is: others wait for that."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from functools import partial
from itertools import count

import pytest
import torch
from helpers.parity import Layout
from helpers.shard_grid import SHALLOW, Cell, graph
from helpers.virtual_shards import divided
from helpers.zero_layouts import LayeredLayout, small_pieces
from torch import Tensor, nn

from raypar.comm.local_transport import LocalTransport
from raypar.errors import CommError, GroupAborted
from raypar.job.read_job import parse_job
from raypar.plan import ParallelPlan
from raypar.worker.run_in_one_process import OneProcessRun

LAYERS, MICROBATCHES, WIDTH = 3, 4, 4
JOB = f"""
model: {{function: "{__name__}:layers"}}
loss: {{function: "torch.nn.functional:mse_loss"}}
data: {{function: "{__name__}:samples"}}
optimizer: {{function: "torch.optim:SGD", args: {{lr: 0.1}}}}
validation: {{data: {{function: "{__name__}:samples"}}, every: 1}}
steps: 2
batch_size: {MICROBATCHES}
microbatches: {MICROBATCHES}
"""


@dataclass
class Computed:
    """What layers have computed, and after which of it the generation ends."""

    run: OneProcessRun | None = None
    ends_after: int = -1
    done: list[str] = field(default_factory=list)

    def note(self, what: str) -> None:
        self.done.append(what)
        if len(self.done) == self.ends_after:
            self.run.mesh.transports[0].abort("a newer generation begins")


COMPUTED = Computed()


class Noted(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x: Tensor, name: str) -> Tensor:
        ctx.name = name
        COMPUTED.note(f"forward of {name}")
        return x.view_as(x)

    @staticmethod
    def backward(ctx, gradient: Tensor) -> tuple[Tensor, None]:
        COMPUTED.note(f"backward of {ctx.name}")
        return gradient, None


class Layer(nn.Module):
    def __init__(self, name: str) -> None:
        super().__init__()
        self.linear, self.name = nn.Linear(WIDTH, WIDTH), name

    def forward(self, x: Tensor) -> Tensor:
        y = self.linear(x)
        return y if x.is_meta else Noted.apply(y, self.name)


def layers() -> nn.Sequential:
    return nn.Sequential(*(Layer(f"layer {number}") for number in range(LAYERS)))


def samples() -> list[tuple[Tensor, Tensor]]:
    return [(torch.full((WIDTH,), 0.1 * i), torch.zeros(WIDTH)) for i in range(MICROBATCHES)]


@pytest.fixture
def run(monkeypatch):
    """One worker: in its steps it exchanges no message at all."""
    spec = parse_job(JOB)
    with OneProcessRun(spec, ParallelPlan.mesh(layers=LAYERS), "1f1b") as run:
        COMPUTED.done.clear()
        monkeypatch.setattr(COMPUTED, "run", run)
        yield run


@pytest.mark.parametrize("ends_after", [1, LAYERS, LAYERS + 1, 2 * LAYERS, 2 * LAYERS + 2, 4 * LAYERS - 1])
def test_a_step_ends_at_the_next_layer(run, monkeypatch, ends_after):
    """In a forward pass, behind it, in a backward pass, behind that, and in those of the next microbatch."""
    monkeypatch.setattr(COMPUTED, "ends_after", ends_after)
    with pytest.raises(GroupAborted, match="a newer generation begins"):
        run.step(0)
    assert len(COMPUTED.done) <= ends_after + (ends_after % (2 * LAYERS) == LAYERS), "but for the last layer, behind the loss"


def test_a_validation_pass_ends_at_the_next_layer(run, monkeypatch):
    monkeypatch.setattr(COMPUTED, "ends_after", 2)
    with pytest.raises(GroupAborted, match="a newer generation begins"):
        run.validate(0)
    assert COMPUTED.done == ["forward of layer 0", "forward of layer 1"]


def test_who_has_the_whole_vote_applies_the_step_whatever_ends_then(run, monkeypatch):
    everything = 2 * LAYERS * MICROBATCHES
    monkeypatch.setattr(COMPUTED, "ends_after", everything)
    before = run.cores[0].stages[0, 0].parameters["0.linear.weight"].detach().clone()
    run.step(0)
    after = run.cores[0].stages[0, 0].parameters["0.linear.weight"].detach()
    assert len(COMPUTED.done) == everything and not torch.equal(before, after)


def of_layout(layout: Layout | Cell) -> OneProcessRun:
    return OneProcessRun(layout.job, layout.plan, layout.schedule, graph=layout.graph)


def in_virtual_shards() -> OneProcessRun:
    """Two replicas, each of one worker that runs four virtual shards in turn."""
    cell = Cell(SHALLOW, "1f1b", (2,), (1,), 4)
    return OneProcessRun(cell.job, divided(cell.plan.with_virtual_shards(4), (4,)), "1f1b", graph=graph(SHALLOW))


RUNS = {
    "zb-v": partial(of_layout, Layout("tangled", "zb-v", (2, 2), 5)),
    "interleaved": partial(of_layout, Layout("plain", "interleaved", (2, 2), 5, chunks=4)),
    "gathered layer by layer": partial(of_layout, LayeredLayout("tangled", "1f1b", (3,), 7)),
    "virtual shards": in_virtual_shards,
    "recomputed on shards": partial(of_layout, Cell("gpt", "1f1b", (1, 1), (2, 2), 3, recompute=(1,))),
}
PLACES = 12


@pytest.mark.ci
@pytest.mark.parametrize("kind", RUNS)
def test_an_abort_ends_a_step_wherever_it_comes(kind, monkeypatch):
    """At places all over the step, of every rank: in layers, in hooks of a backward pass, and where messages are posted."""
    make: Callable[[], OneProcessRun] = RUNS[kind]
    checks, check_alive = count(), LocalTransport.check_alive

    def ending_at(place: int, transport: LocalTransport) -> None:
        if next(checks) == place:
            transport.abort("a newer generation begins")
        check_alive(transport)

    def ending_step(place: int) -> int:
        """The number of checks in a step that ends at the one with this number."""
        nonlocal checks
        with make() as run:
            checks = count()
            monkeypatch.setattr(LocalTransport, "check_alive", lambda transport: ending_at(place, transport))
            for core in run.cores:
                for stage in core.stages.values():
                    stage.hooks.check_alive = core.transport.check_alive
            run.step(0)
        return next(checks)

    with small_pieces():
        everywhere = ending_step(-1)
        assert everywhere > PLACES
        for number in range(PLACES):
            with pytest.raises(CommError):  # the abort, or that a peer has left, where another rank sees that first
                ending_step(number * (everywhere - 1) // (PLACES - 1))
