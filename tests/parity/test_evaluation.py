"""Evaluation in passes: loss and metrics of a run's own validation, bit for bit, on any plan, in however many passes."""

import functools
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torchmetrics.classification
from fsspec.implementations.local import LocalFileSystem
from helpers import metrics
from helpers.finished_runs import train_into_folder
from helpers.forward_passes import PassesInOneProcess, make_passes_here
from helpers.shard_grid import SEQ, SHALLOW, VOCAB, Tokens, seeded_gpt, summed
from pyarrow.fs import FSSpecHandler, PyFileSystem
from torch import Tensor, nn

import raypar
from raypar.errors import ConfigError, UserCodeError
from raypar.job import Job, ValidationConfig
from raypar.launch import forward_run
from raypar.launch.evaluate_run import evaluate_checkpoint
from raypar.launch.forward_run import Cluster, find_trained_run
from raypar.launch.predict_run import PredictionRequest, predict_with_checkpoint
from raypar.launch.prediction_sinks import RowsInMemory
from raypar.record.events import Event
from raypar.storage.checkpoint_store import open_checkpoint
from raypar.storage.filesystems import uri_of_filesystem_object
from raypar.storage.run_folder import RunFolder
from raypar.storage.storage_uri import StorageUri

pytestmark = pytest.mark.part(5)

SAMPLES = 29
"""No number of microbatches of four divides them."""
CLASSES = 5


class Net(nn.Module):
    """Batch norms and dropout."""

    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(nn.Sequential(nn.Linear(6, 6), nn.BatchNorm1d(6), nn.Dropout(0.3)) for _ in range(3))
        self.head = nn.Linear(6, CLASSES)

    def forward(self, x: Tensor) -> Tensor:
        for block in self.blocks:
            x = x + block(x).tanh()
        return self.head(x)


class Pairs:
    """Samples (x, class)."""

    def __init__(self, size: int = 16) -> None:
        self.size = size

    def __len__(self) -> int:
        return self.size

    def __getitem__(self, index: int) -> tuple[Tensor, Tensor]:
        return torch.randn(6, generator=torch.Generator().manual_seed(index)), torch.tensor(index % CLASSES)


METRICS = {
    "accuracy": metrics.accuracy,
    "dropped": metrics.dropped,
    "median": metrics.Median,
    "library": metrics.LikeTorchmetrics,
    "f1": (torchmetrics.classification.MulticlassF1Score, {"num_classes": CLASSES}),
    "auroc": (torchmetrics.classification.MulticlassAUROC, {"num_classes": CLASSES}),
    "per_class": (torchmetrics.classification.MulticlassAccuracy, {"num_classes": CLASSES, "average": "none"}),
}


@pytest.fixture(scope="module")
def trained(tmp_path_factory: pytest.TempPathFactory) -> tuple[Any, Job, dict[str, float]]:
    """(the checkpoint of a run, its job, loss and metrics of its validation in one pass)."""
    job = raypar.Trainer(
        model=Net, loss="torch.nn.functional:cross_entropy",
        data=Pairs, validation=(Pairs, {"size": SAMPLES}), metrics=METRICS, steps=2,
        batch_size=16, microbatches=4, seed=3, optimizer=("torch.optim:AdamW", {"lr": 0.1}),
    ).job  # fmt: skip
    found = dict[str, float]()

    def validate(run: Any) -> None:
        found["validation_loss"] = run.validate(job.steps)
        found.update({f"validation_{name}": value for name, value in run.metrics.items()})

    path, _ = train_into_folder(job, tmp_path_factory.mktemp("runs"), pp=2, then=validate)
    assert len(found) >= 12
    return open_checkpoint(path / "checkpoints" / "step_00000002"), job, found


@pytest.fixture
def passes(monkeypatch: pytest.MonkeyPatch) -> Callable[..., PassesInOneProcess]:
    """See `make_passes_here`."""
    return functools.partial(make_passes_here, monkeypatch)


def evaluate(checkpoint: Any, job: Job, data: Any = None, told: Any = None) -> dict[str, Any]:
    tell = (lambda event: None) if told is None else told.append
    given = None if data is None else ValidationConfig.model_validate(data)
    return evaluate_checkpoint(job, checkpoint, given, tell, Cluster())


@pytest.mark.parametrize(
    "mesh, microbatches", [({}, 32), ({}, 1), ({"pp": 2, "dp": 2}, 3), ({"pp": 3}, 2), ({"dp": 3}, 5), ({"dp": 4}, 4)]
)
def test_loss_and_metrics_are_those_of_one_pass(mesh: dict[str, int], microbatches: int, trained: Any, passes: Any):
    checkpoint, job, wanted = trained
    made, told = passes(microbatches, mesh), list[Event]()
    found = evaluate(checkpoint, job, told=told)
    assert found.pop("seconds") == made.runs[0][1] == -(-8 // microbatches)
    assert found == {"step": 2, "count": float(SAMPLES), **wanted}
    texts = [event.text for event in told if "of 29 samples" in str(getattr(event, "text", ""))]
    assert len(texts) == made.runs[0][1] and texts[-1] == "29 of 29 samples"


class Doubles(Pairs):
    """Their losses are no sums that are exact in whatever order they are added, as those of float32 are."""

    def __getitem__(self, index: int) -> tuple[Tensor, Tensor]:
        x, target = super().__getitem__(index)
        return x.double(), target


@pytest.mark.ci
def test_several_sets_have_the_losses_and_metrics_of_the_run_s_own_validation_of_all(passes: Any, tmp_path: Path):
    sets = {name: {"function": Doubles, "args": {"size": size}} for name, size in (("a", SAMPLES), ("b", 23), ("c", 131))}
    job = raypar.Trainer(
        model=Net, loss="torch.nn.functional:cross_entropy", data=Doubles, validation={"sets": sets},
        metrics={"accuracy": metrics.accuracy}, steps=1, batch_size=16, microbatches=4, seed=3, dtype="float64",
    ).job  # fmt: skip
    own = dict[str, float]()

    def validate(run: Any) -> None:
        own.update(validation_loss=run.validate(job.steps), **{f"validation/{name}": one for name, one in run.metrics.items()})

    path, _ = train_into_folder(job, tmp_path, pp=2, then=validate)
    assert own.keys() == {"validation_loss", *(f"validation/{name}/{of}" for name in sets for of in ("loss", "accuracy"))}
    passes(3, {"dp": 2})
    found = evaluate(open_checkpoint(path / "checkpoints" / "step_00000001"), job)
    assert {name: found[name] for name in own} == own and found["count"] == SAMPLES + 23 + 131


def test_a_run_made_in_python_without_a_job_file_says_how_it_is_evaluated(tmp_path: Path):
    folder = RunFolder.create(tmp_path, "odd")
    folder.why_no_job.write_text("the model <lambda> has no name\n")
    said = (
        r"has no job.yaml, which would say how its model and data are made: the model <lambda> has no name\n  cure: .*evaluate"
    )
    with pytest.raises(ConfigError, match=said + r".*; for runs that commands can evaluate, put what is named here"):
        find_trained_run(folder.path, ".", None, [], lambda event: None)


@pytest.mark.ci
def test_workers_lost_in_the_middle_of_a_pass_change_nothing(trained: Any, passes: Any):
    checkpoint, job, wanted = trained
    made = passes(2, {"pp": 2, "dp": 2}, {"pp": 2}, {"dp": 2}, lost={0: (1, 3), 1: (1, 0)})
    found = evaluate(checkpoint, job)
    assert made.runs == [(0, 4), (1, 3), (2, 2)]
    assert {name: found[name] for name in wanted} == wanted and found["count"] == SAMPLES


@pytest.mark.ci
def test_a_run_on_object_storage_is_evaluated_and_predicted_by_its_uri(trained: Any, passes: Any, tmp_path: Path):
    checkpoint, job, wanted = trained
    shutil.copytree(Path(str(checkpoint)).parents[1], tmp_path / "there" / "run")
    there = uri_of_filesystem_object(PyFileSystem(FSSpecHandler(LocalFileSystem())), str(tmp_path / "there"))
    assert isinstance(there, StorageUri)
    for run in (str(there.child("run")), str(there.child("run").child("checkpoints").child("step_00000002"))):
        passes(3, {"dp": 2})
        found = find_trained_run(run, ".", None, [], lambda event: None)
        assert found.job.to_yaml() == job.to_yaml() and str(found.checkpoint).startswith(str(there))
        facts = evaluate(found.checkpoint, found.job)
        assert {name: facts[name] for name in wanted} == wanted
    rows = RowsInMemory()
    predict_with_checkpoint(found.job, found.checkpoint, PredictionRequest(None), rows, lambda event: None, Cluster())
    assert rows.columns_in_memory()["sample"].tolist() == list(range(SAMPLES))


class Stream(torch.utils.data.IterableDataset[Any]):
    """The samples of `Pairs`, one after the other, divided by PyTorch's workers."""

    def __init__(self, size: int) -> None:
        self.size = size

    def __iter__(self) -> Any:
        info = torch.utils.data.get_worker_info()
        return (Pairs()[index] for index in range(info.id if info else 0, self.size, info.num_workers if info else 1))


@pytest.mark.ci
def test_data_that_is_read_as_a_stream_is_counted(trained: Any, passes: Any):
    checkpoint, job, wanted = trained
    passes(3, {"dp": 2}, {"pp": 2, "dp": 2}, lost={0: (1, 2)})
    found = evaluate(checkpoint, job, {"function": Stream, "args": {"size": SAMPLES}})
    assert {name: found[name] for name in wanted} == wanted and found["count"] == SAMPLES
    made = passes(32)
    several = {"function": Stream, "args": {"size": SAMPLES}, "streams": 2}
    with pytest.raises(ConfigError, match="read as 2 streams: nothing says where they end"):
        evaluate(checkpoint, job, several)
    assert evaluate(checkpoint, job, {**several, "samples": 8})["count"] == 8 and len(made.runs) == 1


@pytest.mark.ci
def test_no_more_than_one_pass_is_in_memory(trained: Any, passes: Any, monkeypatch: pytest.MonkeyPatch):
    checkpoint, job, _ = trained
    passes(4, {"dp": 2})
    sizes = list[int]()
    take = forward_run.TakenPasses.take_pass

    def watched(taken: Any) -> None:
        given, taken.take = taken.take, lambda kept: (sizes.append(len(kept)), given(kept))
        take(taken)
        taken.take = given

    monkeypatch.setattr(forward_run.TakenPasses, "take_pass", watched)
    evaluate(checkpoint, job, {"function": Pairs, "args": {"size": 210}})
    assert len(sizes) == 14 and max(sizes) == 4 and sum(sizes) == 53


def one_a_sample(output: Tensor, target: Tensor) -> Tensor:
    return torch.ones(len(target))


def test_a_metric_that_cannot_be_added_over_passes_is_named(trained: Any, passes: Any):
    checkpoint, job, _ = trained
    passes(2)
    ragged = job.replace(metrics={"ragged": job.metrics["accuracy"].replace(function=one_a_sample)})
    with pytest.raises(UserCodeError, match=r"'ragged' returned \[3\] for one microbatch and \[4\] for another"):
        evaluate(checkpoint, ragged)


SHARDS = [({"tp": 2}, 2), ({"tp": 2, "pp": 2, "dp": 2}, 3), ({"tp": 2, "dp": 2}, 4)]


@pytest.fixture(scope="module")
def tokens(tmp_path_factory: pytest.TempPathFactory) -> tuple[Any, Job, float, Tensor]:
    """(the checkpoint of a GPT on two shards, its job, the loss of its validation, its logits in one pass)."""
    job = raypar.Trainer(
        model=(seeded_gpt, {"model": SHALLOW}), loss=summed, data=Tokens,
        validation=ValidationConfig(function=Tokens, samples=SAMPLES), steps=2, batch_size=12,
        microbatches=4, metrics={"accuracy": on_tokens}, dtype="float64",
    ).job  # fmt: skip
    losses = list[Any]()
    path, _ = train_into_folder(
        job, tmp_path_factory.mktemp("runs"), tp=2, then=lambda run: losses.extend([run.validate(2), run.metrics["accuracy"]])
    )
    return open_checkpoint(path / "checkpoints" / "step_00000002"), job, losses[0], losses[1]


def on_tokens(output: Tensor, target: Tensor) -> tuple[Tensor, int]:
    """Reads every logit."""
    return output.logsumexp(-1).sum() + output[..., -1].sum(), target.numel()


@pytest.mark.ci
@pytest.mark.parametrize("mesh, microbatches", [*SHARDS[:2], pytest.param(*SHARDS[2], marks=pytest.mark.full)])
def test_on_shards_too(mesh: dict[str, int], microbatches: int, tokens: Any, passes: Any):
    checkpoint, job, loss, metric = tokens
    passes(microbatches, mesh, lost={0: (2, 2)})
    found = evaluate(checkpoint, job)
    assert (found["validation_loss"], found["validation_accuracy"], found["count"]) == (loss, metric, SAMPLES * SEQ)


@pytest.mark.ci
def test_outputs_on_shards_are_those_of_as_many_shards_in_any_plan(tokens: Any, passes: Any):
    checkpoint, job, _, _ = tokens

    def predict() -> dict[str, Tensor]:
        rows = RowsInMemory()
        predict_with_checkpoint(job, checkpoint, PredictionRequest(None), rows, lambda event: None, Cluster())
        return rows.columns_in_memory()

    passes(32, {"tp": 2})
    wanted = predict()
    assert wanted["output"].shape == (SAMPLES, SEQ, VOCAB)
    passes(3, {"tp": 2, "pp": 2, "dp": 2}, {"tp": 2, "pp": 3}, lost={0: (2, 4)})
    found = predict()
    assert all(torch.equal(found[name], wanted[name]) for name in wanted) and found.keys() == wanted.keys()
