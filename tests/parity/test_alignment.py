"""Where numbers lie in memory does not depend on the plan: MKL's products have other bits at other addresses."""

from types import SimpleNamespace

import pytest
import torch
import torch.nn.functional as F
from helpers import reference, relayed_models, ugly_models
from helpers.kernel_calls import calls_of, elsewhere, products_in
from torch import Tensor, nn

from raypar.comm.buffer_pool import aligned_contiguous
from raypar.comm.local_transport import LocalMesh
from raypar.job import Job
from raypar.model.graph import Graph
from raypar.model.tensor_parallel import autograd_collectives
from raypar.model.tensor_parallel.shard_group import ShardGroup
from raypar.plan import ParallelPlan
from raypar.plan.shard_ranges import even_ranges_by_shard
from raypar.worker.norm_and_weights_hash import square_gradients
from raypar.worker.process.torch_state_guard import TorchStateGuard, read_global_torch_state
from raypar.worker.run_in_one_process import OneProcessRun

pytestmark = pytest.mark.part(4)

S = ugly_models.SEQ


def shifted(x: Tensor) -> Tensor:
    """Equal, contiguous, four bytes behind where a new tensor begins; so is the gradient that comes back."""
    return torch.cat([x.new_zeros(1), x.reshape(-1)])[1:].view_as(x)


class Shifted(nn.Module):
    """Hands on a value that does not begin where new ones do, and a gradient that does not either; nor do its weights'."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(S, S)
        self.scale, self.tail = nn.Parameter(torch.empty(3)), nn.Parameter(torch.empty(S * S))
        self.reset_parameters()

    def reset_parameters(self) -> None:
        nn.init.uniform_(self.scale), nn.init.uniform_(self.tail, -0.3, 0.3)

    def forward(self, x: Tensor) -> Tensor:
        computed = torch.cat([self.scale, self.tail])
        x = shifted(x + F.linear(self.linear(x).tanh(), computed[3:].view(S, S))) * computed[0]
        return shifted(x)


def job(model: str) -> tuple[Graph, Job]:
    if model == "relayed":
        return relayed_models.relayed(), ugly_models.job(model, microbatches=5, steps=2)
    layers = [("in", lambda: nn.Linear(S, S)), *((f"shifted{n}", Shifted) for n in range(4)), ("out", lambda: nn.Linear(S, 1))]
    return Graph.sequential(layers, input="x"), ugly_models.job("plain", microbatches=5, steps=2)


@pytest.mark.parametrize("model", ["shifted", "relayed"])
@pytest.mark.parametrize(
    "schedule, replicas, chunks",
    [
        ("1f1b", (1,), 1),
        ("1f1b", (1, 1, 1), 1),
        ("zb-h1", (1, 1), 1),
        ("interleaved", (1,), 3),
        ("gpipe", (3, 2), 1),
        ("zb-v", (2,), 2),
    ],
    ids=str,
)
def test_every_plan_makes_the_products_of_one_process(schedule, replicas, chunks, model):
    graph, spec = job(model)
    want, _ = calls_of(reference.train, graph, spec)

    def train() -> None:
        plan = ParallelPlan.of(replicas, layers=len(graph.layers), chunks=chunks)
        guard = TorchStateGuard(spec.threads, read_global_torch_state())  # the mode that records is ours, and stays
        with OneProcessRun(spec, plan, schedule, graph=graph, guard=guard) as local:
            for step in range(spec.steps):
                local.step(step)

    got, _ = calls_of(train)
    got, want = products_in(got), products_in(want)
    assert sum(want.values()) > 100
    assert got == want, f"{list((got - want).elements())[:3]} instead of {list((want - got).elements())[:3]}"


@pytest.mark.parametrize("shape", [(5,), (2, 3), (2, 0)], ids=str)
def test_aligned_copies_only_what_lies_elsewhere(shape):
    x = torch.randn(shape)
    assert aligned_contiguous(x) is x
    for other in (elsewhere(x), x.expand(2, *shape)[1], torch.stack([x, x], -1)[..., 0]):
        found = aligned_contiguous(other)
        assert found.is_contiguous() and found.data_ptr() % 64 == 0 and torch.equal(found, x)


def test_the_norm_is_taken_of_gradients_as_they_lie_in_a_bucket():
    x = torch.randn(40000)
    want, squares = calls_of(square_gradients, [x])
    again, others = calls_of(square_gradients, [elsewhere(x)])
    assert again == want and torch.cat(others).tolist() == torch.cat(squares).tolist() and sum(map(len, squares)) == 2


@pytest.mark.parametrize("shard", [0, 1, 2])
def test_a_shards_part_of_a_value_lies_as_one_that_it_has_made(shard):
    """A single sequence is cut into runs that are contiguous where they lie."""
    group = ShardGroup(LocalMesh(3).transports[shard], range(3), sequence_parallel=True)
    value = torch.randn(1, 7, 5).requires_grad_()
    part = autograd_collectives.scatter_to_shards(value, 1, group)
    assert aligned_contiguous(part) is part
    leaving = SimpleNamespace(dim=1, mine=even_ranges_by_shard(7, 3)[shard])
    with torch.no_grad():
        gradient, *_ = autograd_collectives._Join.backward(leaving, torch.randn(1, 7, 5))
    assert aligned_contiguous(gradient) is gradient
