"""Prediction: on any plan, and however many passes, the outputs of one process with the same microbatches, bit for bit."""

import functools
import itertools
import shutil
import weakref
from collections import namedtuple
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, ClassVar

import numpy
import pyarrow.parquet
import pytest
import torch
from fsspec.implementations.local import LocalFileSystem
from helpers.finished_runs import train_into_folder
from helpers.forward_passes import PassesInOneProcess, make_passes_here
from helpers.full_disk import room
from helpers.model_zoo import TokenSamples, import_transformers
from pyarrow.fs import FSSpecHandler, PyFileSystem
from torch import Tensor, nn

import raypar
from raypar.errors import ConfigError, DataError, RayparError, UserCodeError, WorkerLost
from raypar.job import DataConfig, FunctionConfig, Job, ValidationConfig
from raypar.launch import forward_run
from raypar.launch.forward_run import Cluster, make_forward_job
from raypar.launch.parquet_writer import open_parquet_file
from raypar.launch.predict_run import PredictionRequest, make_prediction_job, predict_with_checkpoint
from raypar.launch.prediction_sinks import RowsInMemory, open_rows
from raypar.launch.resume import find_checkpoint
from raypar.plan import ParallelPlan
from raypar.plan.forward_pass_batching import ForwardPasses, whole_batching
from raypar.record.events import Event
from raypar.storage.checkpoint_store import open_checkpoint
from raypar.storage.filesystems import uri_of_filesystem_object
from raypar.storage.storage_uri import StorageUri
from raypar.worker.data.data_set_with_sample_numbers import SAMPLE, NumberedSamples, NumberedStream, number_and_length
from raypar.worker.kept_predictions import Prediction, named_tensors, pack_predictions, unpack_predictions
from raypar.worker.layer_graph_of_job import make_layer_graph
from raypar.worker.process.torch_state_guard import TorchStateGuard
from raypar.worker.run_in_one_process import OneProcessRun

pytestmark = pytest.mark.part(6)

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


@pytest.fixture
def passes(monkeypatch: pytest.MonkeyPatch) -> Callable[..., PassesInOneProcess]:
    """See `make_passes_here`."""
    return functools.partial(make_passes_here, monkeypatch)


def predict(path: Path, job: Job, data: Any, function: Any = None, told: Any = None) -> dict[str, Tensor]:
    """All columns."""
    rows, request = RowsInMemory(), PredictionRequest(ValidationConfig.model_validate(data), function)
    tell = (lambda event: None) if told is None else told.append
    checkpoint = open_checkpoint(path / "checkpoints" / "step_00000002")
    predict_with_checkpoint(job, checkpoint, request, rows, tell, Cluster())
    return rows.columns_in_memory()


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
def test_outputs_of_any_plan_are_those_of_one_process(mesh: dict[str, int], microbatches: int, trained: Any, passes: Any):
    path, job = trained
    passes(microbatches, mesh)
    found = predict(path, job, {"function": Inputs, "args": {"size": SAMPLES}})
    stack = lambda module, samples: module(torch.stack([sample["x"] for sample in samples]))  # noqa: E731
    assert equal(found, plain(path, Inputs(SAMPLES), stack))


def test_samples_are_cut_as_the_contract_says_and_2_x_2_gives_the_bits_of_one_process(trained: Any, passes: Any):
    path, job = trained
    n, c = SAMPLES, -(-SAMPLES // 4)
    cut = [range(m * n // c, (m + 1) * n // c) for m in range(c)]
    assert [i for part in cut for i in part] == list(range(n)) and {len(part) for part in cut} == {3, 4}
    module = raypar.load(path)
    with torch.no_grad():
        wanted = [with_size(module(torch.stack([Inputs(n)[i]["x"] for i in part]))) for part in cut]
    passes(3, {"pp": 2, "dp": 2})
    found = predict(path, job, {"function": Inputs, "args": {"size": n}}, FunctionConfig(function=with_size))
    assert found.keys() == {"sample", *wanted[0]}
    assert all(torch.equal(found[name], torch.cat([part[name] for part in wanted])) for name in wanted[0])


def with_size(output: Any) -> dict[str, Tensor]:
    """With the number of samples of the microbatch in each row."""
    return {"logits": output["logits"], "size": torch.full((len(output["logits"]),), len(output["logits"]))}


@pytest.mark.ci
def test_a_model_that_computes_its_loss_gives_its_logits_without_labels(tmp_path: Path, passes: Any):
    job = job_of(gpt2, loss="model", data={"function": TokenSamples, "target": "labels"})
    path, _ = train_into_folder(job, tmp_path)
    passes(4, {"pp": 2})
    found = predict(path, job, {"function": Prompts})
    call = lambda module, samples: {"logits": module(torch.stack([s["input_ids"] for s in samples])).logits}  # noqa: E731
    assert equal(found, plain(path, Prompts(), call))


class Ragged(Prompts):
    """Token ids of unequal lengths, in a list."""

    def __getitem__(self, index: int) -> Any:
        return {"input_ids": super().__getitem__(index)["input_ids"][: 2 + index % 7].tolist()}


def first_token(output: Any) -> dict[str, Tensor]:
    return {"first": output.logits[:, 0].argmax(-1)}


@pytest.mark.ci
def test_samples_that_are_padded_have_their_lengths_beside_their_outputs(tmp_path: Path, passes: Any):
    job = job_of(gpt2, loss="model", data={"function": TokenSamples, "target": "labels"})
    path, _ = train_into_folder(job, tmp_path)
    passes(4, {"pp": 2})
    found = predict(path, job, {"function": Ragged, "pad": {"to": [4, 8]}}, FunctionConfig(function=first_token))
    assert found.keys() == {"sample", "length", "first"}
    assert found["sample"].tolist() == list(range(SAMPLES))
    assert found["length"].tolist() == [len(Ragged()[index]["input_ids"]) for index in range(SAMPLES)]
    with pytest.raises(UserCodeError, match="'length' has the name of the column with the lengths of the samples"):
        predict(path, job, {"function": Ragged, "pad": {"to": [4, 8]}}, FunctionConfig(function=own_length))


class Translations(torch.utils.data.Dataset[dict[str, Tensor]]):
    """Texts, and longer ones that no prediction is made of."""

    def __len__(self) -> int:
        return 9

    def __getitem__(self, index: int) -> dict[str, Tensor]:
        return {"x": torch.zeros(index), "y": torch.zeros(20)}


@pytest.mark.parametrize("pad, length", [({"multiple": 4}, 7), ({"fields": ("x",)}, 7), ({"fields": ("y",)}, 20)])
def test_the_length_of_a_padded_sample_is_that_of_its_target_only_if_nothing_else_is_padded(pad: Any, length: int):
    numbered = NumberedSamples(DataConfig(function=Translations, pad=pad))()
    assert not isinstance(numbered, NumberedStream)
    numbers, lengths = number_and_length(torch.tensor([numbered[7][SAMPLE]]))
    assert lengths is not None and (numbers.tolist(), lengths.tolist()) == ([7], [length])


def own_length(output: Any) -> dict[str, Tensor]:
    return {"length": output.logits[:, 0].argmax(-1)}


def test_a_function_of_the_output_says_what_is_kept(trained: Any, passes: Any):
    path, job = trained
    passes(4, {"dp": 2})
    function = FunctionConfig(function=top, args={"count": 2})
    found = predict(path, job, {"function": Inputs, "args": {"size": SAMPLES}}, function)
    call = lambda module, samples: top(module(torch.stack([s["x"] for s in samples])), count=2)  # noqa: E731
    assert equal(found, plain(path, Inputs(SAMPLES), call)) and found["best"].dtype == torch.int64


def test_a_function_that_is_not_there_is_told_before_anything_starts(trained: Any, passes: Any):
    used = passes(8, {})
    function = FunctionConfig(function=f"{__name__}:topp")
    with pytest.raises(ConfigError, match=r"test_prediction has no 'topp'\n.*test_prediction\.py.*did you mean top"):
        predict(*trained, Pairs, function)
    assert not used.runs


@pytest.mark.ci
def test_an_error_of_users_code_says_of_which_samples_of_the_prediction(trained: Any, passes: Any):
    """29 samples are 8 microbatches, of which the second pass has the fifth."""
    passes(4, {"pp": 2})
    data = {"function": Inputs, "args": {"size": SAMPLES}}
    CALLS.clear()
    says = r"raised KeyError: 'nope'\n  at stage 1, replica 0, microbatch 4 \(samples 14 to 17\)\n"
    with pytest.raises(UserCodeError, match=rf"^the function \S*broken {says}") as caught:
        predict(*trained, data, FunctionConfig(function=broken))
    assert "raypar debug" not in caught.value.cure
    with pytest.raises(UserCodeError, match=r"sample 9 .*it is lost"):
        predict(*trained, {"function": NoNinth, "args": {"size": SAMPLES}})


CALLS: list[int] = []


def broken(output: Any) -> Tensor:
    CALLS.append(len(CALLS))
    if len(CALLS) == 5:
        raise KeyError("nope")
    return output["first"]


class NoNinth(Inputs):
    def __getitem__(self, index: int) -> Any:
        if index == 9:
            raise ValueError("it is lost")
        return super().__getitem__(index)


def test_what_a_worker_does_is_said_of_predictions_evaluations_and_validations(trained: Any):
    _, job = trained
    data = ValidationConfig(function=Inputs, args={"size": SAMPLES})
    forward = make_forward_job(job, 2, data)
    graph = make_layer_graph(job)
    plan = ParallelPlan.mesh(layers=len(graph.layers))
    for made, says in (
        (make_prediction_job(forward, SAMPLES, None).in_passes(ForwardPasses(SAMPLES, 4)), "in the prediction"),
        (forward.in_passes(ForwardPasses(SAMPLES, 4)), "in the evaluation"),
        (job.replace(validation=data.replace(function=Pairs)), "in the validation after 2 steps"),
    ):
        with OneProcessRun(made, plan, "1f1b", graph=graph) as local:
            assert local.cores[0].name_of_pass(2) == says


@pytest.mark.ci
def test_samples_may_be_tuples_with_targets_and_may_be_collated(trained: Any, passes: Any):
    path, job = trained
    passes(4, {"pp": 2})
    pairs = predict(path, job, {"function": Pairs, "args": {"size": SAMPLES}, "samples": 20})
    assert pairs["sample"].tolist() == list(range(20))
    found = predict(path, job, {"function": Bare, "args": {"size": SAMPLES}, "collate": collated})
    call = lambda module, samples: module(collated(samples)["x"])  # noqa: E731
    assert equal(found, plain(path, Bare(SAMPLES), call))


class Kept(Inputs):
    """Samples that are kept, each a dict."""

    def __init__(self, size: int) -> None:
        super().__init__(size)
        self.samples = [Inputs.__getitem__(self, index) | {"label": index} for index in range(size)]

    def __getitem__(self, index: int) -> Any:
        return self.samples[index]


def without_labels(samples: list[dict[str, Any]]) -> dict[str, Tensor]:
    """Takes the labels out, as collators of transformers do."""
    for sample in samples:
        sample.pop("label")
    return {"x": torch.stack([sample["x"] for sample in samples])}


def test_a_collate_function_may_change_the_samples_that_it_gets(trained: Any, passes: Any):
    path, job = trained
    passes(4)
    kept = Kept(SAMPLES)
    found = predict(path, job, {"function": lambda: kept, "collate": without_labels})
    assert equal(found, plain(path, Inputs(SAMPLES), stacked)) and all("label" in sample for sample in kept.samples)


@pytest.mark.ci
def test_a_run_that_is_lost_goes_on_with_the_pass_that_is_not_written(trained: Any, passes: Any):
    """The first run is lost in the middle of its third pass, the second at its start."""
    path, job = trained
    data, told = {"function": Inputs, "args": {"size": SAMPLES}}, list[Event]()
    made = passes(2, {"pp": 2, "dp": 2}, {"dp": 2}, lost={0: (2, 3), 1: (0, 0)})
    with pytest.raises(WorkerLost):
        predict(path, job, data)
    assert made.runs == [(0, 4), (2, 2)], "a run that writes nothing is not begun again"
    made = passes(2, {"pp": 2, "dp": 2}, {"dp": 2}, lost={0: (2, 3)})
    found = predict(path, job, data, told=told)
    assert made.runs == [(0, 4), (2, 2)]
    stack = lambda module, samples: module(torch.stack([sample["x"] for sample in samples]))  # noqa: E731
    assert equal(found, plain(path, Inputs(SAMPLES), stack))
    assert [event.text for event in told if "of 29" in str(getattr(event, "text", ""))][-1] == "29 of 29 samples"


def test_a_run_that_is_lost_is_not_said_to_be_resumed(trained: Any, monkeypatch: pytest.MonkeyPatch):
    def lost(*_: Any) -> None:
        raise WorkerLost("the driver's node is lost", cure="`raypar resume` goes on from the last checkpoint")

    monkeypatch.setattr(forward_run, "launch_run", lost)
    path, job = trained
    with pytest.raises(
        WorkerLost, match="the driver's node is lost\n  cure: run the command again: nothing of its passes is kept"
    ):
        predict(path, job, {"function": Inputs, "args": {"size": SAMPLES}})


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


def test_a_checkpoint_as_ray_has_it_is_taken_wherever_a_path_is(trained: Any):
    """It is `os.PathLike`, too, but `os.fspath` of it raises."""
    from ray.train import Checkpoint

    path, _ = trained
    given = Checkpoint.from_directory(str(path / "checkpoints" / "step_00000002"))
    assert str(find_checkpoint(given, print, "runs")) == given.path
    by_object, by_path = (raypar.load(place, model=Net).state_dict() for place in (given, given.path))
    assert by_object.keys() == by_path.keys() and all(torch.equal(by_object[name], by_path[name]) for name in by_path)
    assert job_of(Net, init_from=given).init_from == job_of(Net, init_from=given.path).init_from is not None


def test_tensors_of_an_output_are_named_by_their_places():
    one, two = torch.zeros(1), torch.ones(1)
    assert [name for name, _ in named_tensors(one)] == ["output"]
    assert [name for name, _ in named_tensors({"a": one, "b": {"c": two, "d": None}})] == ["a", "b.c"]
    assert [name for name, _ in named_tensors((one, [two, 3]))] == ["0", "1.0"]
    assert [name for name, _ in named_tensors(Point(one, two))] == ["x", "y"]
    assert [name for name, _ in named_tensors(Boxes(one, "box"))] == ["corners"]


def test_an_output_without_a_row_for_each_sample_is_refused():
    prediction, target = Prediction(), torch.arange(2)
    kept = unpack_predictions(prediction.measure({"logits": torch.ones(2, 3), "loss": torch.ones(())}, {}, target)["bytes"])
    assert kept.keys() == {SAMPLE, "logits"}, "a model's own loss is of no sample"
    with pytest.raises(UserCodeError, match=r"'attention' of 2 samples is \[3, 2\]: it has no row for each sample"):
        prediction.measure({"attention": torch.ones(3, 2)}, {}, target)
    with pytest.raises(UserCodeError, match=r"the output 'sample' has the name of the column .*\n  cure: .* --function"):
        prediction.measure({"sample": torch.ones(2, 3)}, {}, target)
    with pytest.raises(UserCodeError, match="the output is a dict, in which no tensor has a row"):
        prediction.measure({"text": "none"}, {}, target)


def test_packed_outputs_have_the_bits_and_kinds_of_the_tensors():
    made = {
        "rows": torch.randn(3, 4),
        "none": torch.zeros(0, 3, dtype=torch.bfloat16),
        "turned": torch.randn(2, 3).to(torch.bfloat16).t(),
        "one of a row": torch.randn(3, 6)[:1, :1],
        "flags": torch.tensor([True, False]),
        "conjugate": torch.randn(2, dtype=torch.complex64).conj(),
        "number \u00e9": torch.arange(3),
    }
    found = unpack_predictions(pack_predictions(made))
    assert list(found) == list(made)
    for name, tensor in made.items():
        assert (found[name].dtype, found[name].shape) == (tensor.dtype, tensor.shape)
        assert torch.equal(found[name], tensor.resolve_conj())


def test_a_pass_that_predicts_calls_no_loss(trained: Any, passes: Any, monkeypatch: pytest.MonkeyPatch):
    """Nothing in the place of a loss, and so no check of the process's state after it."""
    path, job = trained
    losses, checks = list[bool](), list[str]()
    check_state = TorchStateGuard.check
    monkeypatch.setattr(Prediction, "__call__", lambda *given: losses.append(torch.is_grad_enabled()))
    monkeypatch.setattr(
        TorchStateGuard, "check", lambda guard, caller, **given: (checks.append(caller), check_state(guard, caller, **given))[1]
    )
    passes(6, {})
    found = predict(path, job, {"function": Inputs, "args": {"size": SAMPLES}})
    assert len(found["logits"]) == SAMPLES
    assert not losses
    assert "the loss" not in checks
    assert checks.count(Prediction().code) >= whole_batching(SAMPLES, 16, 4).count


def test_outputs_that_are_too_large_for_a_pass_are_refused_at_the_first_microbatch(
    trained: Any, passes: Any, monkeypatch: pytest.MonkeyPatch
):
    path, job = trained
    monkeypatch.setattr("raypar.worker.kept_predictions.MOST_BYTES", 300)
    calls = list[int]()
    monkeypatch.setattr(Prediction, "_check_size", lambda *given: (calls.append(1), check(*given)), raising=True)
    passes(6, {"dp": 2})
    with pytest.raises(UserCodeError, match="those of the 2 microbatches that a worker has in a pass 0 MiB, and at most 0 MiB"):
        predict(path, job, {"function": Inputs, "args": {"size": SAMPLES}})
    assert len(calls) == 1


check = Prediction._check_size


# -- data that is read as a stream ---------------------------------------------------------------------------------------------


class Stream(torch.utils.data.IterableDataset[Any]):
    """The samples of `Inputs`, one after the other; `size` 0: without an end. Keeps how many were ever read."""

    read = 0

    def __init__(self, size: int) -> None:
        self.size = size

    def __iter__(self) -> Any:
        for index in range(self.size) if self.size else itertools.count():
            Stream.read += 1
            yield {"x": torch.randn(6, generator=torch.Generator().manual_seed(index))}


def bare_stream(size: int) -> Any:
    return (sample["x"] for sample in Stream(size))


def stacked(module: nn.Module, samples: Any) -> Any:
    return module(torch.stack([sample["x"] for sample in samples]))


@pytest.mark.parametrize("meshes", [({},), ({"pp": 2, "dp": 2},), ({"dp": 2}, {"pp": 2}, {"dp": 4})])
def test_samples_of_a_stream_are_counted_and_have_its_order_on_any_plan(meshes: Any, trained: Any, passes: Any):
    path, job = trained
    passes(3, *meshes, lost={} if len(meshes) == 1 else {0: (1, 3), 1: (1, 1)})
    found = predict(path, job, {"function": Stream, "args": {"size": SAMPLES}})
    assert equal(found, plain(path, Inputs(SAMPLES), stacked))


@pytest.mark.parametrize("size", [1, 3])
def test_a_stream_may_have_fewer_samples_than_go_through_the_model_at_once(size: int, trained: Any, passes: Any):
    path, job = trained
    assert size < job.batch_size // job.microbatches
    passes(3, {"dp": 2})
    found = predict(path, job, {"function": Stream, "args": {"size": size}})
    assert equal(found, plain(path, Inputs(size), stacked))


def test_a_stream_is_read_once_for_the_count_and_once_by_the_worker(trained: Any, passes: Any):
    path, job = trained
    made = passes(3)
    Stream.read = 0
    predict(path, job, {"function": Stream, "args": {"size": SAMPLES}})
    assert made.runs == [(0, 3)] and Stream.read <= 2 * SAMPLES + 2 * 4 + 4, "and the first ones by the checks before the run"


class Closed(Stream):
    """Knows which of its objects were not closed after they were read last."""

    open: ClassVar[set[int]] = set()

    def __iter__(self) -> Any:
        Closed.open.add(id(self))
        return super().__iter__()

    def raypar_close(self) -> None:
        Closed.open.discard(id(self))


def test_a_stream_is_closed_when_it_is_read(trained: Any, passes: Any):
    passes(3)
    predict(*trained, {"function": Closed, "args": {"size": SAMPLES}})
    assert not Closed.open


def test_a_stream_without_an_end_is_bounded_and_may_be_collated(trained: Any, passes: Any):
    path, job = trained
    passes(4, {"dp": 2})
    data = {"function": bare_stream, "args": {"size": 0}, "collate": collated, "samples": 10}
    found = predict(path, job, data)
    assert equal(found, plain(path, Bare(10), lambda module, samples: module(collated(samples)["x"])))


def test_a_stream_that_ends_too_early_or_has_no_sample_or_several_parts_is_refused(trained: Any, passes: Any):
    path, job = trained
    passes(4, {"dp": 2})
    for more, said in (
        ({"args": {"size": 9}, "samples": 12}, "ended after 9 samples, and more were asked for"),
        ({"args": {"size": 9}, "streams": 2}, "to be read as 2 streams, and rows have the order of one"),
    ):
        with pytest.raises(RayparError, match=said):
            predict(path, job, {"function": Stream, **more})
    with pytest.raises(DataError, match="gave no sample"):
        predict(path, job, {"function": iter_of_nothing})


def iter_of_nothing() -> Any:
    return (sample for sample in [])


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


def test_a_file_that_is_there_is_replaced_only_when_told_so(tmp_path: Path):
    there = uri_of_filesystem_object(PyFileSystem(FSSpecHandler(LocalFileSystem())), str(tmp_path))
    assert isinstance(there, StorageUri)
    file = tmp_path / "out.parquet"
    file.write_text("before")
    for out in (file, str(there.child("out.parquet"))):
        said = r"out.parquet is there already: nothing was written\n  cure: .*--overwrite"
        with pytest.raises(ConfigError, match=said), open_rows(out):
            raise AssertionError("the block runs although the file is there")
        assert file.read_text() == "before"
        with open_rows(out, overwrite=True) as rows:
            rows.write({"sample": torch.arange(3)})
        assert pyarrow.parquet.read_table(file).num_rows == 3
        file.write_text("before")
    (tmp_path / "link.parquet").symlink_to("nowhere")
    with pytest.raises(ConfigError, match=r"link.parquet is there already"), open_rows(tmp_path / "link.parquet"):
        pass


def test_a_disk_without_room_for_all_rows_is_told_after_the_first_part(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    usage = shutil.disk_usage(tmp_path)
    monkeypatch.setattr("shutil.disk_usage", lambda folder: usage._replace(free=10_000_000))
    rows = {"sample": torch.arange(1000), "a": torch.randn(1000, 32)}
    with open_parquet_file(tmp_path / "out.parquet") as file:
        file.expect(40_000)
        file.write(rows)
    (tmp_path / "out.parquet").unlink()
    with (
        pytest.raises(RayparError, match=r"the outputs of 200,000 samples need 3\d\.\d MiB more, at 1\d\d bytes a sample, and "
                      r".* has 9.5 MiB free"),
        open_parquet_file(tmp_path / "out.parquet") as file,
    ):  # fmt: skip
        file.expect(200_000)
        file.write(rows)
    assert list(tmp_path.iterdir()) == []


def test_a_disk_that_fills_up_in_the_middle_keeps_the_file_that_was_there(trained: Any, passes: Any, tmp_path: Path):
    path, job = trained
    out = tmp_path / "out.parquet"
    out.write_text("before")
    passes(1)
    request = PredictionRequest(ValidationConfig(function=Inputs, args={"size": SAMPLES}), FunctionConfig(function=wide))
    checkpoint = open_checkpoint(path / "checkpoints" / "step_00000002")
    with (
        pytest.raises(RayparError, match=r"cannot write .*out.parquet: File too large") as caught,
        room(200_000),
        open_rows(out, overwrite=True) as rows,
    ):
        predict_with_checkpoint(job, checkpoint, request, rows, lambda event: None, Cluster())
    assert 0 < rows.rows < SAMPLES and "free disk space" in caught.value.cure
    assert [(file.name, file.read_text()) for file in tmp_path.iterdir()] == [("out.parquet", "before")]


def wide(output: Any) -> Tensor:
    return torch.randn(len(output["logits"]), 2_000, dtype=torch.float64)


def test_rows_may_go_to_object_storage_whole_or_not_at_all(tmp_path: Path):
    there = uri_of_filesystem_object(PyFileSystem(FSSpecHandler(LocalFileSystem())), str(tmp_path / "there"))
    assert isinstance(there, StorageUri)
    out = str(there.child("out.parquet"))
    with open_rows(out) as rows:
        rows.write({"sample": torch.arange(3), "a": torch.ones(3)})
        assert "out.parquet" not in [file.name for file in (tmp_path / "there").iterdir()]
        rows.write({"sample": torch.arange(3, 5), "a": torch.ones(2)})
    assert pyarrow.parquet.read_table(tmp_path / "there" / "out.parquet").column("sample").to_pylist() == list(range(5))
    with pytest.raises(UserCodeError, match="have the columns a"), open_rows(str(there.child("two.parquet"))) as rows:
        rows.write({"a": torch.ones(1)})
        rows.write({"a": torch.ones(1, dtype=torch.int64)})
    with pytest.raises(ConfigError, match="cannot write --out"), open_rows(str(there.child("out.csv"))):
        pass
    assert [file.name for file in (tmp_path / "there").iterdir()] == ["out.parquet"]


GIVEN: list[Mapping[str, Tensor]] = []


@pytest.mark.ci
def test_rows_may_go_to_a_function(trained: Any, passes: Any):
    path, job = trained
    request = PredictionRequest(ValidationConfig(function=Inputs, args={"size": SAMPLES}))
    checkpoint = open_checkpoint(path / "checkpoints" / "step_00000002")
    GIVEN.clear()
    passes(3)
    for out in (GIVEN.append, f"{__name__}:take"):
        GIVEN.clear()
        with open_rows(out) as rows:
            predict_with_checkpoint(job, checkpoint, request, rows, lambda event: None, Cluster())
        assert (rows.rows, rows.columns, rows.columns_in_memory()) == (SAMPLES, ["sample", "first", "logits"], {})
        found = {name: torch.cat([part[name] for part in GIVEN]) for name in GIVEN[0]}
        assert len(GIVEN) == 3 and equal(found, plain(path, Inputs(SAMPLES), stacked))
    said = "refuses raised KeyError: 'none', for the rows of samples from 0 on"
    with pytest.raises(UserCodeError, match=said), open_rows(refuses) as rows:
        predict_with_checkpoint(job, checkpoint, request, rows, lambda event: None, Cluster())


def take(rows: Mapping[str, Tensor]) -> None:
    GIVEN.append(rows)


def refuses(rows: Mapping[str, Tensor]) -> None:
    rows["none"]
