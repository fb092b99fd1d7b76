"""Evaluation and prediction on Ray: the loss of the run's own validation, and the outputs of one process, bit for bit, on any
plan, also when a worker dies in a pass."""

import os
import signal
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from helpers import tiny_job
from helpers.finished_runs import train_into_folder
from pyarrow import parquet
from torch.utils.data import ConcatDataset

import raypar
from raypar.actors.ray_connection import connect_ray
from raypar.cli import main
from raypar.errors import CheckpointError, ConfigError
from raypar.job import ElasticConfig, Job, PlanConfig, ValidationConfig
from raypar.launch.evaluate_run import evaluate_checkpoint
from raypar.launch.forward_run import Cluster, find_trained_run
from raypar.launch.parquet_writer import open_parquet_file
from raypar.launch.predict_run import PredictionRequest, predict_with_checkpoint
from raypar.plan import Microbatches, ParallelPlan
from raypar.record.events import Event
from raypar.worker.run_in_one_process import OneProcessRun

SIZE = 21
"""Validation samples: no number of microbatches of two divides them."""


class Slow(tiny_job.Samples):
    """Takes a while for each sample."""

    def __getitem__(self, index: int) -> Any:
        time.sleep(0.3)
        return super().__getitem__(index)


class HeldUp(tiny_job.Samples):
    """The samples of the last third wait for `file`."""

    def __init__(self, size: int, file: str) -> None:
        super().__init__(size)
        self.file, self.limit_s = Path(file), 60.0

    def __getitem__(self, index: int) -> Any:
        until = time.monotonic() + self.limit_s
        while index >= 2 * len(self) // 3 and not self.file.exists() and time.monotonic() < until:
            time.sleep(0.01)
        return super().__getitem__(index)


JOB = {
    "model": "helpers.tiny_job:model", "loss": "helpers.tiny_job:loss", "data": "helpers.tiny_job:data", "steps": 3,
    "batch_size": 8, "microbatches": 4, "optimizer": ("torch.optim:AdamW", {"lr": 1e-2}),
}  # fmt: skip


@pytest.fixture(scope="module", autouse=True)
def own_ray() -> Iterator[None]:
    with connect_ray(None, 4, Path(__file__).parents[1]):
        yield


@pytest.fixture(scope="module")
def trained(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Job, float]:
    """(the folder of a run, its job, the loss of its validation in one process)."""
    job = raypar.Trainer(**JOB, validation=("helpers.tiny_job:data", {"size": SIZE})).job
    losses = list[float]()
    path, _ = train_into_folder(job, tmp_path_factory.mktemp("runs"), then=lambda run: losses.append(run.validate(job.steps)))
    return path, job, losses[0]


@pytest.mark.full
def test_the_loss_is_that_of_the_runs_validation_although_a_worker_dies_in_the_pass(trained: Any):
    path, job, wanted = trained
    found = find_trained_run(path, ".", None, [], lambda event: None)
    assert found.job == job
    pids, kinds = list[int](), list[str]()

    def tell(event: Event) -> None:
        facts = event.facts()
        kinds.append(facts["kind"])
        if facts.get("stage") == "started":
            pids.append(int(facts["text"].partition("pids ")[2].split(", ")[1]))
        if facts.get("stage") == "built":
            threading.Timer(0.3, os.kill, (pids[0], signal.SIGKILL)).start()

    slow = job.replace(plan=PlanConfig(stages=2, replicas=2), elastic=ElasticConfig())
    facts = evaluate_checkpoint(slow, found.checkpoint, ValidationConfig(function=Slow, args={"size": SIZE}), tell, Cluster())
    assert (facts["validation_loss"], facts["count"], facts["step"]) == (wanted, SIZE, job.steps)
    assert "lost" in kinds and "recovering" in kinds, kinds
    assert "checkpoint" not in kinds
    assert [file.name for file in (path / "checkpoints").iterdir()] == ["step_00000003"]


@pytest.mark.ci
def test_the_command_prints_the_loss_of_one_worker(trained: Any, capsys: pytest.CaptureFixture[str]):
    path, _, wanted = trained
    assert main(["evaluate", str(path)]) == 0
    assert f"loss {wanted!r} over {SIZE} counted" in capsys.readouterr().out.splitlines()[-1]


def longer(size: int) -> ConcatDataset[Any]:
    """`size` samples of the tiny job, then others."""
    return ConcatDataset([tiny_job.Samples(size), tiny_job.Samples(3)])


@pytest.mark.full
def test_another_data_set_and_batch_size_are_those_of_a_job_that_has_them(trained: Any):
    path, job, _ = trained
    losses = list[float]()
    other = job.replace(batch_size=12, validation=ValidationConfig(function="helpers.tiny_job:data", args={"size": 10}))
    with OneProcessRun(other, ParallelPlan.mesh(layers=4), "1f1b") as local:
        for core in local.cores:
            core.load(path / "checkpoints" / "step_00000003")
        losses.append(local.validate(3))
    trainer = raypar.Trainer(**JOB)
    facts = trainer.evaluate(path, data=longer(10), samples=10, batch_size=3, verbose=False)
    assert (facts["validation_loss"], facts["count"]) == (losses[0], 10)


@pytest.mark.ci
def test_predictions_of_two_workers_one_of_which_dies_are_those_of_one_process(
    trained: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    path, job, _ = trained
    monkeypatch.setattr("raypar.launch.forward_run.MICROBATCHES_OF_PASS", 4)
    pids, told = list[int](), list[str]()

    def tell(event: Event) -> None:
        facts = event.facts()
        told.append(facts["kind"] if facts["kind"] != "note" else facts["text"])
        if facts.get("stage") == "started":
            pids.append(int(facts["text"].partition("pids ")[2].split(", ")[1]))
        if told[-1] == "7 of 21 samples":
            os.kill(pids[0], signal.SIGKILL)
            (tmp_path / "killed").touch()

    held_up = ValidationConfig(function=HeldUp, args={"size": SIZE, "file": str(tmp_path / "killed")})
    elastic = job.replace(plan=PlanConfig(stages=1, replicas=2), elastic=ElasticConfig())
    found = find_trained_run(path, ".", None, [], tell)
    with open_parquet_file(tmp_path / "out.parquet") as file:
        assert predict_with_checkpoint(elastic, found.checkpoint, PredictionRequest(held_up), file, tell, Cluster()) == SIZE
    assert "lost" in told and "recovering" in told and told.count("7 of 21 samples") == 1
    table = parquet.read_table(tmp_path / "out.parquet")
    module, samples = raypar.load(path), tiny_job.Samples(SIZE)
    with torch.no_grad():
        wanted = torch.cat([module(samples.x[list(part)]) for part in map(Microbatches(11, 11, SIZE).samples, range(11))])
    assert table.column("sample").to_pylist() == list(range(SIZE))
    assert torch.equal(torch.tensor(table.column("output").to_pylist()), wanted)


@pytest.mark.full
def test_the_command_and_trainer_predict_alike(trained: Any, tmp_path: Path, capsys: pytest.CaptureFixture[str]):
    path, _, _ = trained
    out = tmp_path / "out.parquet"
    assert main(["predict", str(path), "--data", "{function: helpers.tiny_job:data, args: {size: 9}}", "--out", str(out)]) == 0
    assert capsys.readouterr().out.splitlines()[-1] == f"9 rows in {out}: sample, output"
    columns = raypar.Trainer(**JOB).predict(path, data=longer(9), samples=9, verbose=False)
    assert columns["sample"].tolist() == list(range(9))
    assert torch.equal(torch.tensor(parquet.read_table(out).column("output").to_pylist()), columns["output"])


# -- what is refused, before anything is started -----------------------------------------------------------------------------


def test_what_cannot_be_evaluated_is_refused(trained: Any, tmp_path: Path, capsys: pytest.CaptureFixture[str]):
    path, _, _ = trained
    with pytest.raises(ConfigError, match="the job has no validation data"):
        raypar.Trainer(**JOB).evaluate(path, verbose=False)
    deeper = raypar.Trainer(**(JOB | {"model": ("helpers.tiny_job:model", {"depth": 5})}))
    with pytest.raises(CheckpointError, match="belongs to another model: only the model has layer4"):
        deeper.evaluate(path, data=tiny_job.Samples(10), verbose=False)
    for arguments, said in (
        ([str(path), "--step", "7"], "no checkpoint after 7 steps"),
        ([str(path), "--data", "nothing"], "validation"),
        ([str(path), "--data", "{function: a:b, colour: red}"], "colour"),
        ([str(path), "--batch-size", "0"], "is not a whole number of at least 1"),
        (["nothing", "--run-dir", str(tmp_path)], "no run 'nothing'"),
    ):
        for command in (["evaluate"], ["predict", "--out", str(tmp_path / "out.parquet")]):
            assert main([*command, *arguments]) == 2
            assert said in capsys.readouterr().err
    assert not list(tmp_path.iterdir())
    with pytest.raises(ConfigError, match="function is 3, which names no function"):
        raypar.Trainer(**JOB).predict(path, data=tiny_job.Samples(10), function=3, verbose=False)
    for argument, value in (("samples", 0), ("samples", True), ("batch_size", 0), ("batch_size", 2.5)):
        for call in (raypar.Trainer(**JOB).evaluate, raypar.Trainer(**JOB).predict):
            with pytest.raises(ConfigError, match=f"{argument} is {value}\n  cure: give a whole number of samples"):
                call(path, data=tiny_job.Samples(10), verbose=False, **{argument: value})
    made, _ = train_into_folder(
        raypar.Trainer(**(JOB | {"loss": lambda output, target: (output - target).sum()})).job, tmp_path
    )
    assert main(["evaluate", str(made)]) == 2
    assert f"Trainer(...).evaluate({str(made)!r})" in capsys.readouterr().err
