"""Prediction: on any plan, and however many passes, the outputs of one process with the same microbatches, bit for bit."""

import weakref
from collections import namedtuple
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy
import pyarrow.parquet
import pytest
import torch
from helpers.finished_runs import train_into_folder
from helpers.full_disk import room
from helpers.model_zoo import TokenSamples, import_transformers
from torch import Tensor, nn

import raypar
from raypar.errors import ConfigError, RayparError, UserCodeError, WorkerLost
from raypar.job import FunctionConfig, Job, ValidationConfig
from raypar.launch import predict_run
from raypar.launch.forward_run import make_forward_job
from raypar.launch.parquet_file import open_parquet_file
from raypar.launch.predict_run import PartsOfPrediction, count_samples, make_prediction_job
from raypar.plan import ParallelPlan
from raypar.record.events import Event, ValidationRecord
from raypar.storage.checkpoint_store import open_checkpoint
from raypar.worker.data.numbered_samples import SAMPLE
from raypar.worker.prediction import Prediction, named_tensors, unpack, whole_batching
from raypar.worker.run_in_one_process import OneProcessRun
from raypar.worker.worker_assignments import make_layer_graph

SAMPLES = 29
"""No number of microbatches of four divides them."""


class Net(nn.Module):
    """Batch norms and dropout; returns a dict."""

    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(nn.Sequential(nn.Linear(6, 6), nn.BatchNorm1d(6), nn.Dropout(0.3)) for _ in range(3))
        self.head = nn.Linear(6, 5)

    def forward(self, x: Tensor) -> dict[str, Tensor]:
        for block in self.blocks:
            x = x + block(x).tanh()
        return {"logits": self.head(x), "first": x[:, 0]}


class Pairs:
    """Samples (x, y)."""

    def __init__(self, size: int = 16) -> None:
        self.size = size

    def __len__(self) -> int:
        return self.size

    def __getitem__(self, index: int) -> tuple[Tensor, Tensor]:
        return torch.randn(6, generator=torch.Generator().manual_seed(index)), torch.ones(5)


class Inputs(Pairs):
    """Samples without a target."""

    def __getitem__(self, index: int) -> Any:
        return {"x": super().__getitem__(index)[0]}


def loss(output: Mapping[str, Tensor], target: Tensor) -> Tensor:
    return (output["logits"] - target).square().mean()


def gpt2() -> nn.Module:
    transformers = import_transformers()
    config = transformers.GPT2Config(vocab_size=99, n_embd=16, n_layer=2, n_head=2, n_positions=32)
    config.use_cache = False
    return transformers.GPT2LMHeadModel(config)


class Prompts:
    """Token ids without labels."""

    def __len__(self) -> int:
        return SAMPLES

    def __getitem__(self, index: int) -> dict[str, Tensor]:
        return {"input_ids": torch.randint(0, 99, (9,), generator=torch.Generator().manual_seed(index))}


def collated(samples: list[Tensor]) -> dict[str, Tensor]:
    return {"x": torch.stack(samples) * 2}


class Bare(Pairs):
    def __getitem__(self, index: int) -> Tensor:
        return super().__getitem__(index)[0]


def top(output: Any, *, count: int) -> dict[str, Tensor]:
    """What a user's function keeps."""
    return {"best": output["logits"].topk(count).indices}


def job_of(model: Any, **given: Any) -> Job:
    job = {"loss": loss, "data": Pairs, "steps": 2, "batch_size": 16, "microbatches": 4, "seed": 3}
    return raypar.Trainer(model=model, **(job | {"optimizer": ("torch.optim:AdamW", {"lr": 0.1})} | given)).job


@pytest.fixture(scope="module")
def trained(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Job]:
    job = job_of(Net)
    return train_into_folder(job, tmp_path_factory.mktemp("runs"), pp=2)[0], job


def predict(
    path: Path, job: Job, data: Any, folder: Path, microbatches: int, function: Any = None, **mesh: Any
) -> dict[str, Tensor]:
    """All columns, of passes of so many microbatches on a plan as `mesh` says, taken from the run's folder."""
    forward = make_forward_job(job, 2, ValidationConfig.model_validate(data))
    samples = count_samples(forward, lambda event: None)
    whole = whole_batching(samples, forward.batch_size, forward.microbatches)
    made = make_prediction_job(forward, samples, microbatches, 0, function)
    rows: list[Mapping[str, Tensor]] = []
    parts = PartsOfPrediction(whole, microbatches, rows.append)
    parts.use_folder(folder)
    (folder / "outputs").mkdir()
    graph = make_layer_graph(made)
    with OneProcessRun(made, ParallelPlan.mesh(layers=len(graph.layers), **mesh), "1f1b", graph=graph) as local:
        for core in local.cores:
            core.load(path / "checkpoints" / "step_00000002", only_weights=True)
        for number in range(-(-whole.count // microbatches)):
            for report in local._run([core.validation_routine(2, number) for core in local.cores]):
                for microbatch, content in report.outputs.items():
                    (folder / "outputs" / f"{microbatch:012d}").write_bytes(content)
            parts._take()
    assert not list((folder / "outputs").iterdir())
    return {name: torch.cat([part[name] for part in rows]) for name in rows[0]}


def plain(path: Path, dataset: Any, call: Any) -> dict[str, Tensor]:
    """The same columns by a loop of one process over the module."""
    module, whole = raypar.load(path), whole_batching(len(dataset), 16, 4)
    with torch.no_grad():
        found = [call(module, [dataset[i] for i in whole.samples(number)]) for number in range(whole.count)]
    columns = {name: torch.cat([part[name] for part in found]) for name in found[0]}
    return {"sample": torch.arange(len(dataset)), **columns}


def equal(found: Mapping[str, Tensor], wanted: Mapping[str, Tensor]) -> bool:
    assert found.keys() == wanted.keys()
    return all(torch.equal(found[name], value) for name, value in wanted.items())


@pytest.mark.parametrize(
    "mesh, microbatches", [({}, 8), ({}, 3), ({"pp": 2, "dp": 2}, 4), ({"pp": 3}, 2), ({"dp": 3}, 3), ({"pp": 2, "dp": 2}, 8)]
)
def test_outputs_of_any_plan_are_those_of_one_process(mesh: dict[str, int], microbatches: int, trained: Any, tmp_path: Path):
    path, job = trained
    found = predict(path, job, {"function": Inputs, "args": {"size": SAMPLES}}, tmp_path, microbatches, **mesh)
    stack = lambda module, samples: module(torch.stack([sample["x"] for sample in samples]))  # noqa: E731
    assert equal(found, plain(path, Inputs(SAMPLES), stack))


def test_a_model_that_computes_its_loss_gives_its_logits_without_labels(tmp_path: Path):
    job = job_of(gpt2, loss="model", data={"function": TokenSamples, "target": "labels"})
    path, _ = train_into_folder(job, tmp_path)
    (tmp_path / "out").mkdir()
    found = predict(path, job, {"function": Prompts}, tmp_path / "out", 4, pp=2)
    call = lambda module, samples: {"logits": module(torch.stack([s["input_ids"] for s in samples])).logits}  # noqa: E731
    assert equal(found, plain(path, Prompts(), call))


def test_a_function_of_the_output_says_what_is_kept(trained: Any, tmp_path: Path):
    path, job = trained
    function = FunctionConfig(function=top, args={"count": 2})
    found = predict(path, job, {"function": Inputs, "args": {"size": SAMPLES}}, tmp_path, 4, function, dp=2)
    call = lambda module, samples: top(module(torch.stack([s["x"] for s in samples])), count=2)  # noqa: E731
    assert equal(found, plain(path, Inputs(SAMPLES), call)) and found["best"].dtype == torch.int64


def test_samples_may_be_tuples_with_targets_and_may_be_collated(trained: Any, tmp_path: Path):
    path, job = trained
    for name in ("tuples", "collated"):
        (tmp_path / name).mkdir()
    pairs = predict(path, job, {"function": Pairs, "args": {"size": SAMPLES}, "samples": 20}, tmp_path / "tuples", 4)
    assert pairs["sample"].tolist() == list(range(20))
    data = {"function": Bare, "args": {"size": SAMPLES}, "collate": collated}
    found = predict(path, job, data, tmp_path / "collated", 4, pp=2)
    call = lambda module, samples: module(collated(samples)["x"])  # noqa: E731
    assert equal(found, plain(path, Bare(SAMPLES), call))


def test_a_run_that_is_lost_goes_on_with_the_part_that_is_not_written(
    trained: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    """In the place of Ray one process makes the passes; the first run is lost in its third one, the second at its start."""
    path, job = trained
    monkeypatch.setattr(predict_run, "MICROBATCHES_OF_PASS", 2)
    lost, runs, told = iter([2, 0]), list[tuple[int, int]](), list[Event]()

    def run(made: Job, checkpoint: Any, tell: Any, cluster: Any, *, passes: int, on_folder: Any) -> None:
        runs.append((made.loss.function.first_pass, passes))
        folder = tmp_path / str(len(runs))
        (folder / "outputs").mkdir(parents=True)
        on_folder(folder)
        until = next(lost, None)
        with OneProcessRun(made, ParallelPlan.mesh(dp=2, layers=4), "1f1b") as local:
            for core in local.cores:
                core.load(checkpoint, only_weights=True)
            for number in range(passes):
                if number == until:
                    raise WorkerLost("the driver was lost")
                for report in local._run([core.validation_routine(2, number) for core in local.cores]):
                    for microbatch, content in report.outputs.items():
                        (folder / "outputs" / f"{microbatch:012d}").write_bytes(content)
                tell(ValidationRecord(step=2 + number, validation_loss=0.0, count=1.0, seconds=0.0))

    monkeypatch.setattr(predict_run, "run_forward", run)
    request = predict_run.PredictionRequest(ValidationConfig(function=Inputs, args={"size": SAMPLES}))
    rows = predict_run.RowsInMemory()
    arguments = job, open_checkpoint(path / "checkpoints" / "step_00000002"), request, rows.write, told.append, None
    with pytest.raises(WorkerLost):
        predict_run.predict_with_checkpoint(*arguments)
    assert runs == [(0, 4), (2, 2)], "a run that writes nothing is not begun again"
    rows = predict_run.RowsInMemory()
    lost = iter([2])
    assert predict_run.predict_with_checkpoint(*arguments[:3], rows.write, told.append, None) == SAMPLES
    assert runs[2:] == [(0, 4), (2, 2)]
    stack = lambda module, samples: module(torch.stack([sample["x"] for sample in samples]))  # noqa: E731
    assert equal(rows.columns_in_memory(), plain(path, Inputs(SAMPLES), stack))
    assert [event.text for event in told if "of 29" in str(event.text)][-1] == "29 of 29 samples"


OUTPUTS: list[weakref.ref[Tensor]] = []
"""What the layers below have returned in evaluation mode."""


class Watched(nn.Linear):
    """In evaluation mode no output but that of the layer before is in memory."""

    def forward(self, x: Tensor) -> Tensor:
        found = super().forward(x)
        if not self.training and not found.is_meta:
            assert all(output() is None for output in OUTPUTS[:-1])
            OUTPUTS.append(weakref.ref(found))
        return found


def watched() -> nn.Sequential:
    return nn.Sequential(*(Watched(8, 8) for _ in range(5)))


def test_a_validation_drops_what_no_later_layer_reads():
    data = ("helpers.tiny_job:data", {"size": 8})
    job = raypar.Trainer(
        model=watched, loss="helpers.tiny_job:loss", data=data, validation=data, steps=1, batch_size=4, microbatches=1
    ).job
    OUTPUTS.clear()
    with OneProcessRun(job, ParallelPlan.mesh(layers=5), "1f1b") as run:
        run.validate(0)
    assert len(OUTPUTS) == 10


# -- what an output may be -----------------------------------------------------------------------------------------------------

Point = namedtuple("Point", "x y")


@dataclass
class Boxes:
    corners: Tensor
    name: str


def test_tensors_of_an_output_are_named_by_their_places():
    one, two = torch.zeros(1), torch.ones(1)
    assert [name for name, _ in named_tensors(one)] == ["output"]
    assert [name for name, _ in named_tensors({"a": one, "b": {"c": two, "d": None}})] == ["a", "b.c"]
    assert [name for name, _ in named_tensors((one, [two, 3]))] == ["0", "1.0"]
    assert [name for name, _ in named_tensors(Point(one, two))] == ["x", "y"]
    assert [name for name, _ in named_tensors(Boxes(one, "box"))] == ["corners"]


def test_an_output_without_a_row_for_each_sample_is_refused():
    prediction, target = Prediction(4, 2), torch.arange(2)
    kept = unpack(prediction.measure({"logits": torch.ones(2, 3), "loss": torch.ones(())}, {}, target)["bytes"])
    assert kept.keys() == {SAMPLE, "logits"}, "a model's own loss is of no sample"
    with pytest.raises(UserCodeError, match=r"'attention' of 2 samples is \[3, 2\]: it has no row for each sample"):
        prediction.measure({"attention": torch.ones(3, 2)}, {}, target)
    with pytest.raises(UserCodeError, match="the output is a dict, in which no tensor has a row"):
        prediction.measure({"text": "none"}, {}, target)
    with (
        pytest.raises(UserCodeError, match=r"have 0 MiB, and those of one pass have at most 0 MiB"),
        pytest.MonkeyPatch.context() as patch,
    ):
        patch.setattr("raypar.worker.prediction.MOST_BYTES", 10)
        prediction.take_outputs({0: {"prediction": {"bytes": b"x" * 11}}}, 2, 1)


# -- the file ------------------------------------------------------------------------------------------------------------------


def test_a_parquet_file_has_a_column_for_each_output_and_a_row_for_each_sample(tmp_path: Path):
    numbers = torch.arange(24.0).view(2, 3, 4)
    with open_parquet_file(tmp_path / "out.parquet") as file:
        file.write(
            {"sample": torch.arange(2), "a": numbers, "b": torch.tensor([True, False]), "c": numbers[:, 0, 0].bfloat16()}
        )
        assert not (tmp_path / "out.parquet").exists()
        file.write(
            {"sample": torch.tensor([2]), "a": numbers[:1, :2], "b": torch.tensor([True]), "c": torch.ones(1).bfloat16()}
        )
    table = pyarrow.parquet.read_table(tmp_path / "out.parquet")
    assert table.column("sample").to_pylist() == [0, 1, 2]
    assert table.column("a").to_pylist() == [*numbers.tolist(), numbers[0, :2].tolist()]
    assert table.column("b").to_pylist() == [True, False, True] and table.column("c").to_pylist() == [0.0, 12.0, 1.0]
    assert numpy.asarray(table.column("c")).dtype == numpy.float32
    assert [path.name for path in tmp_path.iterdir()] == ["out.parquet"]


def test_a_file_that_cannot_be_written_leaves_nothing(tmp_path: Path):
    for out in ("out.csv", "none/out.parquet"):
        with pytest.raises(ConfigError, match=r"cannot write --out"), open_parquet_file(tmp_path / out):
            pass
    with pytest.raises(UserCodeError, match="have the columns a"), open_parquet_file(tmp_path / "out.parquet") as file:
        file.write({"a": torch.ones(1)})
        file.write({"a": torch.ones(1, dtype=torch.int64)})
    with (
        pytest.raises(UserCodeError, match="cannot be written to Parquet"),
        open_parquet_file(tmp_path / "out.parquet") as file,
    ):
        file.write({"a": torch.ones(1, dtype=torch.complex64)})
    with pytest.raises(RayparError, match="File too large"), room(1000), open_parquet_file(tmp_path / "out.parquet") as file:
        file.write({"a": torch.randn(10_000)})
    assert list(tmp_path.iterdir()) == []
