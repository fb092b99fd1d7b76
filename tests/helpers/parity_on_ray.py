"""A layout's job as a run on Ray, compared with one process: loss and norm of every step, parameters and optimizer state
(which holds every gradient) at the end."""

from __future__ import annotations

import json
from pathlib import Path

import torch
from helpers.parity import STEPS, Layout, expected

from raypar.launch.choose_plan import choose_plan
from raypar.launch.launch_options import LaunchOptions
from raypar.launch.launch_run import launch_run
from raypar.storage.run_folder import RunFolder
from raypar.worker.checkpoint.checkpoint_files import PARAMETER, read_checkpoint_buffers, read_checkpoint_state
from raypar.worker.checkpoint.state_key import optimizer_key


def check_on_ray(layout: Layout, tmp_path: Path, recompute: str = "none", zero: int = 0) -> None:
    """Train the layout's job on the Ray that this process has joined; asserts that every bit is the one process's."""
    job = layout.job
    result = launch_run(
        lambda checked: choose_plan(
            job, checked, lambda layers: layout.plan.with_zero(zero), layout.schedule, layout.plan.world, None, recompute
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
