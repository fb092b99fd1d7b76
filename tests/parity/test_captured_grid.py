"""Unmodified models in many layouts, in one process and over TCP, against one plain process that runs the model itself."""

import pytest
import torch
from helpers import tcp_calls
from helpers.captured_jobs import MODELS, STEPS, CapturedLayout, check_local, expected
from helpers.processes import Workers

pytestmark = pytest.mark.part(5)

DEFAULT = [
    CapturedLayout("small_resnet", "zb-v", (2, 2), recompute="second"),
    CapturedLayout("small_densenet", "interleaved", (1, 1), 4, recompute="all"),
    CapturedLayout("small_mobilenet", "1f1b", (1, 2, 1), 5, blocks=3),
    CapturedLayout("siamese", "zb-h1", (1, 1, 1), 4, recompute="all"),
    CapturedLayout("unet", "gpipe", (2, 1, 1, 1), 4, p=0.3),
    CapturedLayout("lstm", "zb-h1", (1, 1, 1)),
    CapturedLayout("small_resnet", "1f1b", (1, 1, 1), compute="bf16"),
    CapturedLayout("inception", "1f1b", (2, 1, 1), 4),
]

PLACES = [
    ("1f1b", (1, 1)),
    ("1f1b", (2, 1, 1)),
    ("1f1b", (1, 1, 1, 1)),
    ("gpipe", (1, 2, 1)),
    ("gpipe", (2, 2)),
    ("interleaved", (1, 1)),
    ("interleaved", (2, 2)),
    ("interleaved", (1, 1, 1)),
    ("zb-v", (1, 1)),
    ("zb-v", (2, 2)),
    ("zb-h1", (1, 2)),
    ("zb-h1", (1, 1, 1)),
    ("zb-h1", (2, 2, 2)),
    ("zb-v", (1,)),
]


def layouts() -> list[CapturedLayout]:
    """Every small model in every place; microbatches, dropout, recomputation, blocks and precision in turn."""
    found = []
    for row, model in enumerate(MODELS):
        for column, (schedule, replicas) in enumerate(PLACES):
            turn = row + column
            found.append(
                CapturedLayout(
                    model,
                    schedule,
                    replicas,
                    microbatches=(3, 4, 5)[turn % 3],
                    p=(0.1, 0.0)[turn % 2],
                    recompute=("", "all", "second", "")[(turn // 2) % 4],
                    compute="bf16" if turn % 7 == 0 else None,
                    blocks=(0, 2)[turn % 5 == 0],
                )
            )
    return found


LOCAL = layouts()
OVER_TCP = [layout for layout in LOCAL if sum(layout.replicas) <= 4][3::9]


@pytest.fixture(scope="module")
def workers():
    group = Workers(4)
    yield group
    group.end()


@pytest.mark.parametrize("layout", DEFAULT, ids=str)
def test_an_unmodified_model_has_the_bits_of_one_plain_process(layout: CapturedLayout):
    check_local(layout)


@pytest.mark.full
@pytest.mark.parametrize("layout", LOCAL, ids=str)
def test_every_unmodified_model_has_the_bits_of_one_plain_process_in_every_layout(layout: CapturedLayout):
    check_local(layout, order_seed=3)


def test_the_grid_is_as_large_as_it_says():
    assert len(LOCAL) >= 400 and len(OVER_TCP) >= 30


@pytest.mark.full
@pytest.mark.parametrize("layout", OVER_TCP, ids=str)
def test_unmodified_models_over_tcp_have_the_bits_of_one_plain_process(workers: Workers, layout: CapturedLayout):
    on = list(range(layout.plan.world))
    addresses = workers.each(tcp_calls.listen, "tcp", on=on)
    found = workers.each(tcp_calls.train, layout, addresses, on=on, timeout_s=120.0)
    want = expected(layout.job)
    bad = []
    for rank, got in enumerate(found):
        assert got["losses"] == want.losses and got["norms"] == want.norms
        for step in range(STEPS):
            for name, copy in got["gradients"][step].items():
                gradient = want.gradients[step].get(name)
                same = copy is None if gradient is None else torch.equal(torch.from_numpy(copy), gradient)
                bad += [] if same else [f"rank {rank}, step {step}: gradient of {name}"]
        for held, wanted in (("parameters", want.parameters), ("buffers", want.buffers)):
            bad += [f"{rank}: {n}" for n, c in got[held].items() if not torch.equal(torch.from_numpy(c), wanted[n])]
    assert bad == []
    assert {name for got in found for name in got["parameters"]} == set(want.parameters)
