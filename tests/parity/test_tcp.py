"""The same bits over real processes: over real sockets, and over CuPy and the stand-in for NCCL."""

from dataclasses import replace

import pytest
import torch
from helpers import reference, tcp_calls
from helpers.optimizer_layouts import ADAMW_IN_8_BITS, MUON_AND_ADAMW, GridOfOptimizers
from helpers.parity import Layout, expected
from helpers.processes import Workers
from helpers.shard_grid import SHALLOW, Cell, run
from helpers.standin import needs_cupy
from helpers.zero_layouts import DividedLayout, LayeredLayout
from helpers.zero_layouts import expected as expected_in_small_pieces

from raypar.job import OptimizerConfig

pytestmark = pytest.mark.part(5)

LAYOUTS = [
    Layout("tangled", "1f1b", (2, 2), 4),
    Layout("tangled", "zb-v", (1, 1), 5),
    Layout("plain", "interleaved", (2, 2), 7),
    Layout("tangled", "gpipe", (4,), 7, blocks=5),
    Layout("plain norms", "1f1b", (2, 2), 5),
    Layout("tangled", "zb-h1", (1, 2, 1), 8),
    Layout("plain", "1f1b", (1, 1, 1, 1), 5),
    Layout("tangled", "naive", (2, 1), 3),
    Layout("tangled", "interleaved", (1, 1, 1), 7, chunks=3),
    Layout("tangled", "zb-v", (2, 2), 7),
    Layout("plain", "zb-h1", (2, 2), 4),
    Layout("tangled", "1f1b", (3, 1), 7, blocks=5),
    Layout("tangled", "gpipe", (1, 3), 6),
    Layout("norms", "gpipe", (3,), 5),
    Layout("norms", "interleaved", (2, 2), 4),
    Layout("splittable norms", "zb-v", (2, 2), 3),
    Layout("splittable norms", "zb-h1", (1, 3), 5, blocks=2),
    Layout("norms", "1f1b", (2, 1, 1), 4, compute="bf16"),
    Layout("relayed", "interleaved", (1, 2), 5),
]
QUICK = [*LAYOUTS[:5], Layout("relayed", "1f1b", (1, 1, 1, 1), 3), Layout("branching", "1f1b", (1, 1, 1, 1), 3)]


@pytest.fixture(scope="module")
def workers():
    group = Workers(4)
    yield group
    group.end()


@pytest.fixture(scope="module")
def eight():
    group = Workers(8)
    yield group
    group.end()


def check(workers, layout, kind, want=None):
    on = list(range(layout.plan.world))
    addresses = workers.each(tcp_calls.listen, kind, on=on)
    found = workers.each(tcp_calls.train, layout, addresses, on=on, timeout_s=60.0)
    want = want or expected(layout.model, layout.microbatches, layout.blocks, layout.compute)
    bad = []
    for rank, got in enumerate(found):
        assert got["losses"] == want.losses
        assert got["norms"] == want.norms
        for step in range(layout.job.steps):
            for name, gradient in want.gradients[step].items():
                if name in got["gradients"][step]:
                    copy = got["gradients"][step][name]
                    same = copy is None if gradient is None else torch.equal(torch.from_numpy(copy), gradient)
                    bad += [] if same else [f"rank {rank}, step {step}: gradient of {name}"]
        for name, copy in got["parameters"].items():
            bad += [] if torch.equal(torch.from_numpy(copy), want.parameters[name]) else [f"rank {rank}: {name}"]
        for name, copy in got["buffers"].items():
            bad += [] if torch.equal(torch.from_numpy(copy), want.buffers[name]) else [f"rank {rank}: {name}"]
        for name, kinds in got["state"].items():
            for key, value in want.state[name].items():
                same = torch.equal(torch.as_tensor(kinds[key]), torch.as_tensor(value))
                bad += [] if same else [f"rank {rank}: {name}.{key}"]
    assert not bad
    assert {name for got in found for name in got["parameters"]} == set(want.parameters)


@pytest.mark.parametrize("layout", QUICK, ids=str)
def test_a_layout_over_tcp_gives_the_bits_of_one_process(workers, layout):
    check(workers, layout, "tcp")


@pytest.mark.full
@pytest.mark.parametrize("layout", LAYOUTS[4:], ids=str)
def test_the_other_layouts_over_tcp_give_the_bits_of_one_process(workers, layout):
    check(workers, layout, "tcp")


CELLS = [
    Cell(SHALLOW, "1f1b", (1, 1), (2, 2), 5),
    Cell("llama", "zb-h1", (1, 1), (1, 3), 5, sequence=True),
    Cell(SHALLOW, "zb-v", (1,), (4,), 4, sequence=True),
    Cell("gpt", "gpipe", (2,), (2,), 3, sequence=True),
    Cell("llama", "interleaved", (1,), (4,), 5),
    Cell("dropped", "1f1b", (1, 1), (3, 1), 4),
    Cell("gpt", "naive", (2, 1), (1, 2), 2, dtype="float32"),
    Cell("dropped", "zb-h1", (1, 1), (2, 2), 4, sequence=True),
]


def check_shards(workers, cell, kind):
    on = list(range(cell.plan.world))
    addresses = workers.each(tcp_calls.listen, kind, on=on)
    found = workers.each(tcp_calls.train, cell, addresses, on=on, timeout_s=60.0)
    want = run(cell, cell.plan)
    for (role,), got in zip(cell.plan.roles, found, strict=True):
        assert got["losses"] == want.losses and got["norms"] == want.norms
        for name, copy in got["parameters"].items():
            key = (name, cell.shards[role.grid], role.shard)
            assert torch.equal(torch.from_numpy(copy), want.parameters[key][0]), key
            for step, gradients in enumerate(got["gradients"]):
                assert torch.equal(torch.from_numpy(gradients[name]), want.gradients[step][key][0]), (key, step)
            for kind_of, value in got["state"][name].items():
                assert torch.equal(torch.as_tensor(value), torch.as_tensor(want.state[key][0][kind_of])), (key, kind_of)


@pytest.mark.parametrize("cell", CELLS[:3], ids=str)
def test_shards_over_tcp_give_the_bits_of_the_local_transport(workers, cell):
    check_shards(workers, cell, "tcp")


@pytest.mark.full
@pytest.mark.parametrize("cell", CELLS[3:], ids=str)
def test_other_shards_over_tcp_give_the_bits_of_the_local_transport(workers, cell):
    check_shards(workers, cell, "tcp")


DIVIDED = [
    DividedLayout("tangled", "1f1b", (2, 2), 4),
    DividedLayout("tangled", "zb-h1", (1, 3), 7, blocks=5),
    DividedLayout("plain", "interleaved", (2, 2), 7),
]
LAYERED = [
    LayeredLayout("tangled", "1f1b", (2, 2), 4),
    LayeredLayout("tangled", "zb-v", (2, 2), 5),
    LayeredLayout("tangled", "gpipe", (1, 3), 7),
]
"""They gather layer by layer."""


@pytest.mark.parametrize(
    ("layout", "kind"),
    [
        (DIVIDED[0], "tcp"),
        *(pytest.param(layout, "tcp", marks=pytest.mark.ci) for layout in DIVIDED[1:]),
        (LAYERED[0], "tcp"),
        *(pytest.param(layout, "tcp", marks=pytest.mark.ci) for layout in LAYERED[1:]),
        needs_cupy(DIVIDED[1], "nccl"),
    ],
    ids=str,
)
def test_replicas_that_divide_state_have_the_bits_of_one_process(workers, layout, kind):
    on = list(range(layout.plan.world))
    addresses = workers.each(tcp_calls.listen, kind, on=on)
    found = workers.each(tcp_calls.train_divided, layout, addresses, on=on, timeout_s=60.0)
    want = expected_in_small_pieces(layout.model, layout.microbatches, layout.blocks, layout.compute)
    for got in found:
        assert got["losses"] == want.losses and got["norms"] == want.norms
        assert all(torch.equal(torch.from_numpy(copy), want.parameters[name]) for name, copy in got["parameters"].items())
    assert any("[" in key for got in found for key in got["state"]), "some owners have runs of parameters"


@pytest.mark.parametrize("layout", [needs_cupy(layout) for layout in LAYOUTS[:8]], ids=str)
def test_a_layout_over_nccl_gives_the_bits_of_one_process(workers, layout):
    check(workers, layout, "nccl")


ON_DEVICE = [
    Cell(SHALLOW, "1f1b", (2, 1), (1, 2), 5),
    Cell("llama", "1f1b", (1, 1), (2, 2), 5, sequence=True),
    Cell("llama", "zb-h1", (1, 1), (1, 3), 4),
    Cell("gpt", "gpipe", (2,), (2,), 3, sequence=True),
    Cell("gpt", "zb-v", (1,), (4,), 4, sequence=True),
    Cell("gpt", "interleaved", (1, 1), (2, 2), 4),
    Cell("dropped", "zb-h1", (1, 1), (2, 2), 4, sequence=True),
    Cell("llama", "1f1b", (1, 1), (3, 1), 5, sequence=True),
    Cell("dropped", "1f1b", (1, 1), (1, 2), 4),
    Cell("gpt", "1f1b", (2, 1), (1, 2), 2, sequence=True),
    Cell("gpt", "naive", (1, 1, 1), (1, 2, 1), 2),
]
ON_DEVICE = [replace(cell, dtype="float32") for cell in ON_DEVICE]
"""What is fp32 counts as memory of a device."""


@pytest.mark.parametrize("cell", [needs_cupy(cell) for cell in ON_DEVICE[:3]], ids=str)
def test_shards_over_nccl_give_the_bits_of_the_local_transport(workers, cell):
    check_shards(workers, cell, "nccl")


@pytest.mark.full
@pytest.mark.parametrize("cell", [needs_cupy(cell) for cell in ON_DEVICE[3:]], ids=str)
def test_other_shards_over_nccl_give_the_bits_of_the_local_transport(workers, cell):
    check_shards(workers, cell, "nccl")


ALL_THREE = [
    Cell(SHALLOW, "1f1b", (2, 2), (2, 2), 4),
    Cell("llama", "zb-h1", (2, 2), (2, 2), 5, sequence=True),
    Cell("dropped", "1f1b", (1, 2), (2, 3), 4),
]
ALL_THREE = [replace(cell, dtype="float32") for cell in ALL_THREE]


@pytest.mark.ci
@pytest.mark.parametrize("cell", [needs_cupy(cell) for cell in ALL_THREE[:1]], ids=str)
def test_eight_workers_on_all_three_axes_over_nccl_give_the_bits_of_the_local_transport(eight, cell):
    check_shards(eight, cell, "nccl")


@pytest.mark.full
@pytest.mark.parametrize("cell", [needs_cupy(cell) for cell in ALL_THREE[1:]], ids=str)
def test_other_layouts_of_eight_workers_over_nccl_give_the_bits_of_the_local_transport(eight, cell):
    check_shards(eight, cell, "nccl")


@pytest.mark.parametrize(
    "optimizer",
    [pytest.param(MUON_AND_ADAMW, id="Muon and AdamW"), pytest.param(ADAMW_IN_8_BITS, id="AdamW8bit", marks=pytest.mark.ci)],
)
def test_optimizers_of_whole_parameters_have_the_bits_of_one_process_on_two_stages_and_two_replicas(workers, optimizer):
    layout = GridOfOptimizers(OptimizerConfig.model_validate(optimizer))
    check(workers, layout, "tcp", reference.train(layout.graph, layout.job))
