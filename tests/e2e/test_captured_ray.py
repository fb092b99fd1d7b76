"""An unmodified Llama on Ray: two stages and two replicas, also with a worker killed, end with the weights of one process."""

import json
import os
import signal
from pathlib import Path
from typing import Any

import pytest
import torch

import raypar
from raypar.actors.ray_connection import connect_ray
from raypar.plan import ParallelPlan
from raypar.worker.checkpoint.checkpoint_files import PARAMETER, read_checkpoint_state
from raypar.worker.run_in_one_process import OneProcessRun

pytestmark = [pytest.mark.full]  # each worker imports transformers

JOB: dict[str, Any] = {
    "model": ("helpers.model_zoo:make_zoo_model", {"name": "llama", "p": 0.1}),
    "loss": "model",
    "data": {"function": "helpers.model_zoo:TokenSamples", "target": "labels"},
    "steps": 6,
    "batch_size": 7,
    "microbatches": 4,
    "plan": {"stages": 2, "replicas": 2},
}


@pytest.fixture(scope="module", autouse=True)
def own_ray():
    """One local Ray for all runs."""
    with connect_ray(None, 4, Path(__file__).parents[1]):
        yield


def parameters_of_one_process(trainer: raypar.Trainer) -> dict[str, torch.Tensor]:
    found = OneProcessRun(trainer.spec, ParallelPlan.mesh(layers=8), "1f1b")
    for step in range(trainer.spec.steps):
        found.step(step)
    return {name: copies[0] for name, copies in found.parameters().items()}


def test_two_stages_and_two_replicas_train_an_unmodified_llama_as_one_process(tmp_path: Path):
    trainer = raypar.Trainer(**JOB, run_dir=tmp_path)
    result = trainer.fit()
    assert result.error is None
    found, wanted = read_checkpoint_state(Path(result.checkpoint_path)), parameters_of_one_process(trainer)
    assert found.keys() == wanted.keys()
    assert [name for name, value in wanted.items() if not torch.equal(found[name][PARAMETER], value)] == []


class KillsOneWorker(raypar.Callback):
    """Kills a worker of the first stage after the second step."""

    def __init__(self, run: Path) -> None:
        self.run = run

    def on_step(self, info: raypar.StepInfo) -> None:
        if info.step == 2:
            members = json.loads((self.run / "members.json").read_text())["members"]
            os.kill(members[0]["pid"], signal.SIGKILL)


def test_a_killed_worker_changes_nothing_but_the_plan(tmp_path: Path):
    job = JOB | {"steps": 12, "elastic": True}
    trainer = raypar.Trainer(**job, run_dir=tmp_path, name="killed", callbacks=[KillsOneWorker(tmp_path / "killed")])
    result = trainer.fit()
    assert result.error is None
    found, wanted = read_checkpoint_state(Path(result.checkpoint_path)), parameters_of_one_process(trainer)
    assert [name for name, value in wanted.items() if not torch.equal(found[name][PARAMETER], value)] == []
    assert "lost" in (Path(result.path) / "events.jsonl").read_text()
