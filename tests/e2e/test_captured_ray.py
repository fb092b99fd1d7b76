"""Unmodified models on Ray: two stages and two replicas, also with a worker killed, end with the weights of one process."""

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
from raypar.worker.checkpoint.checkpoint_files import PARAMETER, read_checkpoint_buffers, read_checkpoint_state
from raypar.worker.layer_graph_of_job import make_layer_graph
from raypar.worker.run_in_one_process import OneProcessRun

pytestmark = [pytest.mark.full]  # each worker imports transformers

MODELS = ("llama", "gpt2", "bert", "t5", "vit", "small_resnet", "inception", "unet", "lstm")
"""Decoders, an encoder, both, a vision transformer, BatchNorm, heads beside, skips over stages, and no lists of modules."""
KILLED = ("llama", "t5", "small_resnet")


def job_of(model: str) -> dict[str, Any]:
    """A few steps of a model of the zoo on a ragged batch, with dropout where the model has it."""
    return {
        "model": ("helpers.captured_jobs:make_model", {"name": model, "p": 0.1}),
        "loss": ("helpers.captured_jobs:loss_of", {"name": model}),
        "data": {"function": "helpers.captured_jobs:BatchesOf", "args": {"name": model}, "target": "y"},
        "optimizer": ("torch.optim:AdamW", {"lr": 1e-2}),
        "steps": 5,
        "batch_size": 9,
        "microbatches": 4,
        "plan": {"stages": 2, "replicas": 2},
    }


@pytest.fixture(scope="module", autouse=True)
def own_ray():
    """One local Ray for all runs."""
    with connect_ray(None, 4, Path(__file__).parents[1]):
        yield


def check_run(trainer: raypar.Trainer) -> raypar.Result:
    """Train; parameters and buffers are those of one process."""
    result = trainer.fit()
    assert result.error is None
    graph = make_layer_graph(trainer.job)
    one = OneProcessRun(trainer.job, ParallelPlan.mesh(layers=len(graph.layers)), "1f1b", graph=graph)
    for step in range(trainer.job.steps):
        one.step(step)
    path = Path(result.checkpoint_path)
    parameters, buffers = read_checkpoint_state(path), read_checkpoint_buffers(path, one.buffers().keys())
    found = {name: kept[PARAMETER] for name, kept in parameters.items()} | buffers
    wanted = {name: copies[0] for name, copies in (one.parameters() | one.buffers()).items()}
    assert found.keys() == wanted.keys()
    assert [name for name, value in wanted.items() if not torch.equal(found[name], value)] == []
    return result


@pytest.mark.parametrize("model", MODELS)
def test_two_stages_and_two_replicas_train_an_unmodified_model_as_one_process(tmp_path: Path, model: str):
    check_run(raypar.Trainer(**job_of(model), run_dir=tmp_path))


class KillsOneWorker(raypar.Callback):
    """Kills a worker of the first stage after the second step."""

    def __init__(self, run: Path) -> None:
        self.run = run

    def on_step(self, info: raypar.StepInfo) -> None:
        if info.step == 2:
            members = json.loads((self.run / "members.json").read_text())["members"]
            os.kill(members[0]["pid"], signal.SIGKILL)


@pytest.mark.parametrize("model", KILLED)
def test_a_killed_worker_changes_nothing_but_the_plan(tmp_path: Path, model: str):
    job = job_of(model) | {"steps": 12, "elastic": True}
    result = check_run(raypar.Trainer(**job, run_dir=tmp_path, name="killed", callbacks=[KillsOneWorker(tmp_path / "killed")]))
    assert "lost" in (Path(result.path) / "events.jsonl").read_text()


def encoder_on_shards(folder: Path, **given: Any) -> raypar.Trainer:
    """A job of `nn.TransformerEncoder`, whose layers are cut by what they compute: no style is given."""
    return raypar.Trainer(
        model=("helpers.structure_models:Encoder", {}),
        loss="torch.nn.functional:mse_loss",
        data={"function": "helpers.structure_models:Vectors"},
        optimizer=("torch.optim:AdamW", {"lr": 1e-2}),
        steps=6,
        batch_size=8,
        microbatches=4,
        plan={"stages": 2, "shards": 2},
        elastic={"min_workers": 2},
        run_dir=folder,
        **given,
    )


def test_a_killed_worker_with_layers_that_were_cut_by_what_they_compute_changes_nothing_but_the_plan(tmp_path: Path):
    undisturbed = encoder_on_shards(tmp_path).fit()
    assert undisturbed.error is None
    killed = encoder_on_shards(tmp_path, name="killed", callbacks=[KillsOneWorker(tmp_path / "killed")]).fit()
    assert killed.error is None and killed.weights_sha256 == undisturbed.weights_sha256
    assert "generation 2" in (tmp_path / "killed" / "events.jsonl").read_text()
