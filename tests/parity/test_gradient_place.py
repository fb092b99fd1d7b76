"""A cut layer writes a step's weight gradient to where the last step's lay, unless somebody still looks at that."""

import pytest
import torch
from helpers.shard_grid import STEPS, Cell, check, graph, held
from torch import nn

from raypar.comm.local import LocalMesh
from raypar.model.tensor_parallel.group import ShardGroup
from raypar.model.tensor_parallel.linear import RowLinear
from raypar.worker.local_run import LocalJob


def addresses(cell):
    """By step and holder: where the gradients of cut linear layers lie."""
    found = []
    with LocalJob(cell.job, cell.plan, cell.schedule, graph=graph(cell.model)) as local:
        for step in range(STEPS):
            local.step(step)
            found.append([p.grad.data_ptr() for (name, _, _), p, _ in held(local) if p.grad is not None and p.dim() == 2])
    return found


@pytest.mark.parametrize("schedule, microbatches", [("1f1b", 1), ("1f1b", 5), ("zb-h1", 4)])
@pytest.mark.parametrize("sequence", [False, True])
def test_gradients_of_cut_layers_stay_where_they_are(schedule, microbatches, sequence):
    cell = Cell(
        "gpt",
        schedule,
        (1,) * (2 if schedule == "zb-h1" else 1),
        (2,) * (2 if schedule == "zb-h1" else 1),
        microbatches,
        sequence,
    )
    check(cell)  # the numbers
    first, *later = addresses(cell)
    stayed = [all(places[i] == first[i] for places in later) for i in range(len(first))]
    assert sum(stayed) >= 2 * 4 * 2, "2 blocks with at least 4 cut linear layers on 2 shards"


def layer():
    mesh = LocalMesh(2)
    linear = nn.Linear(6, 4, dtype=torch.float64)
    return RowLinear(linear, "row", ShardGroup(mesh.transports[0], (0, 1)), ((0, 6),))


def product(linear, seed):
    """grad [3, 4], x [3, 6]; what is made of them."""
    numbers = torch.Generator().manual_seed(seed)
    gradient, x = (torch.randn(3, n, dtype=torch.float64, generator=numbers) for n in (4, 6))
    made = linear.weight_gradient(gradient, x)
    assert torch.equal(made, gradient.t().mm(x))
    assert made._version == 0, "as of memory that was never written"
    return made


def after_a_step():
    linear = layer()
    linear.weight.grad = product(linear, 1)
    return linear, linear.weight.grad.data_ptr()


def test_the_next_gradient_takes_the_place_of_the_last_one_once():
    linear, place = after_a_step()
    linear.keep_gradient()
    linear.weight.grad = None
    first, second = product(linear, 2), product(linear, 3)
    assert first.data_ptr() == place != second.data_ptr()


HOLDERS = {
    "itself": lambda gradient: gradient,
    "its data": lambda gradient: gradient.detach(),
    "a part": lambda gradient: gradient[1:],
    "its memory": lambda gradient: gradient.untyped_storage(),
    "numpy": lambda gradient: gradient.numpy(),
    "a graph": lambda gradient: (gradient * nn.Parameter(torch.ones(4, 6, dtype=torch.float64))).sum(),
}


@pytest.mark.parametrize("holder", HOLDERS)
def test_a_gradient_that_somebody_holds_is_left_as_it_is(holder):
    linear, place = after_a_step()
    kept = HOLDERS[holder](linear.weight.grad)
    before = linear.weight.grad.clone()
    linear.keep_gradient()
    linear.weight.grad = None
    made = product(linear, 2)
    assert made.data_ptr() != place
    if isinstance(kept, torch.Tensor) and kept.shape == before.shape:
        assert torch.equal(kept, before)


def test_a_gradient_of_another_form_is_allocated():
    linear, _ = after_a_step()
    linear.weight.grad = torch.zeros(6, 4, dtype=torch.float64).t()
    linear.keep_gradient()
    product(linear, 2)
    linear, _ = after_a_step()
    linear.keep_gradient()
    made = linear.weight_gradient(torch.ones(3, 4, dtype=torch.bfloat16), torch.ones(3, 6, dtype=torch.bfloat16))
    assert made.dtype == torch.bfloat16
    linear = layer()
    linear.keep_gradient()
    product(linear, 2)
