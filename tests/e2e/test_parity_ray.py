"""The same bits on Ray: loss and norm of every step, parameters and optimizer state (which holds every gradient) at the end."""

import json
from pathlib import Path

import pytest
import torch
from helpers.parity import STEPS, Layout, expected

from raypar.actors.ray_connection import connect_ray
from raypar.launch.chosen_plan import choose_plan
from raypar.launch.launch_options import LaunchOptions
from raypar.launch.launch_run import launch_run
from raypar.storage.run_folder import RunFolder
from raypar.worker.checkpoint.checkpoint_files import PARAMETER, read_checkpoint_buffers, read_checkpoint_state
from raypar.worker.checkpoint.state_key import optimizer_key

LAYOUTS = [
    Layout("tangled", "1f1b", (2, 2), 4),
    Layout("tangled", "zb-v", (2, 2), 7),
    Layout("tangled", "interleaved", (1, 1, 1), 7, chunks=3),
    Layout("plain", "zb-h1", (1, 2, 1), 8),
    Layout("tangled", "zb-h1", (2, 1), 5, compute="bf16"),
    Layout("plain norms", "1f1b", (2, 2), 4),
]


@pytest.fixture(scope="module", autouse=True)
def own_ray():
    """One local Ray for all layouts."""
    with connect_ray(None, 4, Path(__file__).parents[1]):
        yield


def check(layout, tmp_path, recompute="none"):
    job = layout.job
    result = launch_run(
        lambda checked: choose_plan(
            job, checked, lambda layers: layout.plan, layout.schedule, layout.plan.world, None, recompute
        ),
        LaunchOptions(job, lambda planned: RunFolder.create(tmp_path, "parity")),
        lambda event: None,
    )
    assert result.error is None
    want = expected(layout.model, layout.microbatches, layout.blocks, layout.compute)
    metrics = [json.loads(line) for line in (Path(result.path) / "metrics.jsonl").read_text().splitlines()]
    assert [m["loss"] for m in metrics] == want.losses
    assert [m["norm"] for m in metrics] == want.norms
    assert len(metrics) == STEPS
    found = read_checkpoint_state(Path(result.checkpoint_path))
    assert found.keys() == want.parameters.keys()
    bad = [name for name, p in want.parameters.items() if not torch.equal(found[name][PARAMETER], p)]
    buffers = read_checkpoint_buffers(Path(result.checkpoint_path), want.buffers)
    bad += [name for name, value in want.buffers.items() if not torch.equal(buffers[name], value)]
    for name, kinds in want.state.items():
        bad += [
            f"{name}.{k}"
            for k, v in kinds.items()
            if not torch.equal(torch.as_tensor(found[name][optimizer_key(k)]), torch.as_tensor(v))
        ]
    assert not bad
    started = next(event for event in RunFolder(Path(result.path)).read_lines(Path(result.path) / "events.jsonl"))
    assert (started["kind"], started.get("precision")) == ("started", layout.compute)


def test_a_layout_on_ray_gives_the_bits_of_one_process(tmp_path):
    check(LAYOUTS[0], tmp_path)


@pytest.mark.full
@pytest.mark.parametrize("layout", LAYOUTS[1:], ids=str)
def test_the_other_layouts_on_ray_give_the_bits_of_one_process(layout, tmp_path):
    check(layout, tmp_path)


@pytest.mark.full
def test_a_layout_that_recomputes_on_ray_gives_the_bits_of_one_process(tmp_path):
    check(LAYOUTS[1], tmp_path, recompute="full")
