"""A cut layer writes a step's weight gradient to where the last step's lay, unless somebody still looks at that."""

import itertools

import numpy
import pytest
import torch
from helpers.shard_grid import STEPS, Cell, check, graph, held
from torch import nn

from raypar.comm.local_transport import LocalMesh
from raypar.model.tensor_parallel import weight_gradient_memory_reuse
from raypar.model.tensor_parallel.linear import RowLinear
from raypar.model.tensor_parallel.shard_group import ShardGroup
from raypar.model.tensor_parallel.weight_gradient_memory_reuse import GradientReusePolicy, KeptGradientMemory
from raypar.worker.run_in_one_process import OneProcessRun

pytestmark = pytest.mark.part(5)


def addresses(cell):
    """By step and holder: where the gradients of cut linear layers lie."""
    found = []
    with OneProcessRun(cell.job, cell.plan, cell.schedule, graph=graph(cell.model)) as local:
        for step in range(STEPS):
            local.step(step)
            found.append([p.grad.data_ptr() for (name, _, _), p, _ in held(local) if p.grad is not None and p.dim() == 2])
    return found


@pytest.mark.ci
@pytest.mark.parametrize(
    "schedule, microbatches, sequence",
    [
        *(("1f1b", 2, False), ("1f1b", 5, True), ("zb-h1", 4, True)),
        *(pytest.param(*case, marks=pytest.mark.full) for case in (("1f1b", 2, True), ("1f1b", 5, False), ("zb-h1", 4, False))),
    ],
)
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
    with torch.no_grad():  # as in a backward pass
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
    linear.keep_gradient_memory()
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
    linear.keep_gradient_memory()
    linear.weight.grad = None
    made = product(linear, 2)
    assert made.data_ptr() != place
    if isinstance(kept, torch.Tensor) and kept.shape == before.shape:
        assert torch.equal(kept, before)


def flat_with_a_flag():
    return torch.zeros(25, dtype=torch.float64)[1:].view(4, 6).data


def of_numpy():
    return torch.from_numpy(numpy.zeros((4, 6)))


def of_another_process():
    return torch.zeros(4, 6, dtype=torch.float64).share_memory_()


def of_inference():
    with torch.inference_mode():
        return torch.zeros(4, 6, dtype=torch.float64)


def by_column():
    return torch.zeros(6, 4, dtype=torch.float64).t()


@pytest.mark.parametrize("make", [flat_with_a_flag, of_numpy, of_another_process, of_inference, by_column])
def test_a_gradient_that_is_no_block_of_pytorchs_own_is_left_as_it_is(make):
    """Where it is not aligned a product has other bits; elsewhere somebody else may look at it."""
    weight, place = nn.Parameter(torch.zeros(4, 6, dtype=torch.float64)), KeptGradientMemory()
    for kept in (lambda: torch.zeros(4, 6, dtype=torch.float64), make):
        weight.grad = kept()
        place.keep(weight)
        weight.grad = None
        with torch.no_grad():
            taken = place.take(torch.ones(3, 4, dtype=torch.float64), torch.ones(3, 6, dtype=torch.float64))
        assert (taken is None) == (kept is make)


def test_a_gradient_of_another_type_is_allocated():
    linear, _ = after_a_step()
    linear.keep_gradient_memory()
    made = linear.weight_gradient(torch.ones(3, 4, dtype=torch.bfloat16), torch.ones(3, 6, dtype=torch.bfloat16))
    assert made.dtype == torch.bfloat16
    linear = layer()
    linear.keep_gradient_memory()
    product(linear, 2)


# -- whether it is worth while -----------------------------------------------------------------------------------------


class Kept:
    """A linear layer of 1,000 bytes."""

    def __init__(self):
        self.weight = nn.Parameter(torch.zeros(250))
        self.steps = 0

    def keep_gradient_memory(self):
        self.steps += 1


@pytest.mark.parametrize(
    "passes, allocated, kept",
    [
        ("FB", 250, True),
        ("FB", 251, False),
        ("FFBB", 251, False),
        ("FFBFBB", 10**6, True),
        ("FBFB", None, True),
        ("FB", None, False),
        ("F", 0, False),
    ],
)
def test_gradients_are_kept_where_they_cost_nothing_or_activations_are_small(monkeypatch, passes, allocated, kept):
    now = itertools.chain([7, 7 + allocated] if allocated is not None else [], itertools.repeat(None))
    monkeypatch.setattr(weight_gradient_memory_reuse, "_allocated", lambda: next(now))
    linear = Kept()
    places = GradientReusePolicy([linear])
    for _ in range(3):
        places.begin_step()
        for one in passes:
            (places.before_forward if one == "F" else places.before_backward)()
    assert linear.steps == (2 if kept else 0)


def test_what_is_allocated_is_told():
    before = weight_gradient_memory_reuse._allocated()
    held = torch.ones(1 << 20)
    after = weight_gradient_memory_reuse._allocated()
    # In MiB: other code of the process frees some hundreds of bytes meanwhile.
    assert before is None or round((after - before) / 2**20) == 4
    del held
