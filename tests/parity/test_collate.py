"""The user's collate function makes the same batches wherever they are read; lengths may differ between microbatches."""

from __future__ import annotations

import random
from typing import Any

import pytest
import torch
from helpers import ragged
from helpers.captured_jobs import check_run, graph_of, job_of
from helpers.ragged import Reader, Sentences, next_word
from tokenizers import Tokenizer
from tokenizers.models import WordLevel
from torch import Tensor
from transformers import BertConfig, BertForMaskedLM, DataCollatorForLanguageModeling, PreTrainedTokenizerFast

from raypar.elastic.replica_digests import InitialDigestCheck
from raypar.errors import ConfigError, DataError, RayparError, UserCodeError
from raypar.job import DataConfig, FunctionConfig, Job, LossConfig, ModelConfig, OptimizerConfig, ValidationConfig
from raypar.job.contract import contract_of_job
from raypar.plan import ParallelPlan
from raypar.plan.microbatches import Microbatches
from raypar.plan.pieces import AdoptedStages
from raypar.plan.seeds import seed_of
from raypar.worker.data.collate import Collation
from raypar.worker.data.microbatch_loader import MicrobatchLoader
from raypar.worker.data.sample_order import SampleOrder
from raypar.worker.data.sample_reader import SampleReader
from raypar.worker.job_preflight import preflight
from raypar.worker.layer_graph_of_job import make_layer_graph
from raypar.worker.run_in_one_process import OneProcessRun
from raypar.worker.worker_core import WorkerCore

pytestmark = pytest.mark.part(5)


def job(collate: Any, name: str = "ragged", **more: Any) -> Job:
    settings: dict[str, Any] = {
        "name": name,
        "seed": 3,
        "steps": 4,
        "batch_size": 10,
        "microbatches": 4,
        "model": ModelConfig(function=Reader),
        "loss": LossConfig(function=next_word),
        "data": DataConfig(function=Sentences, target="labels", collate=collate),
        "optimizer": OptimizerConfig(function="torch.optim:AdamW", args={"lr": 1e-2}),
        "clip_norm": 1.0,
    }
    return Job(**(settings | more))


def loader(
    collate: Any, data: Any = Sentences, fields: tuple[str, ...] = ("ids", "mask", "labels"), **more: Any
) -> MicrobatchLoader:
    processes = more.pop("processes", 0)
    spec = DataConfig(function=data, collate=collate, processes=processes)
    dataset = spec.call()
    order = SampleOrder(3, len(dataset))
    return MicrobatchLoader(dataset, spec, order, Microbatches(4, 0, 10), seed=3, fields=fields, **more)


def same(one: dict[str, Tensor], other: dict[str, Tensor]) -> bool:
    return one.keys() == other.keys() and all(torch.equal(one[k], other[k]) and one[k].dtype == other[k].dtype for k in one)


@pytest.mark.parametrize(("schedule", "stages", "replicas"), [("1f1b", 2, 2), ("zb-h1", 3, 1), ("1f1b", 4, 1)])
def test_batches_of_many_lengths_have_the_bits_of_one_process_in_every_layout(schedule: str, stages: int, replicas: int):
    spec = job(FunctionConfig(function=ragged.Noisy, args={"share": 0.2}))
    lengths = {tuple(loader(spec.data.collate).get(step, m)["ids"].shape) for step in range(4) for m in range(4)}
    assert len(lengths) > 4
    check_run(spec, ParallelPlan.mesh(pp=stages, dp=replicas, layers=len(graph_of(spec).layers)), schedule)


@pytest.mark.ci
def test_a_collation_draws_what_its_place_says_in_any_order_and_in_data_processes():
    one = loader("helpers.ragged:noisy", "helpers.ragged:Sentences")
    two = loader(ragged.noisy, processes=0)
    three = loader("helpers.ragged:noisy", "helpers.ragged:Sentences", processes=1)
    places = [(0, 0), (0, 1), (3, 2), (0, 3), (1, 0)]
    read = {place: one.get(*place) for place in places}
    three.prefetch(0, range(4))
    try:
        for step, microbatch in reversed(places):
            samples = [Sentences()[index] for _, index in one.sample_positions(step, microbatch)]
            import random

            import numpy

            here = seed_of(3, "collate", step, microbatch) % 2**32
            random.seed(here), numpy.random.seed(here), torch.manual_seed(here)
            want = {k: v for k, v in ragged.noisy(samples).items() if k != "title"}
            for found in (read[step, microbatch], two.get(step, microbatch), three.get(step, microbatch)):
                assert same(found, want)
    finally:
        three.close()


def test_nested_batches_have_dotted_names():
    found = loader(ragged.nested, fields=("inputs.ids", "inputs.mask", "labels")).get(0, 1)
    flat = loader(ragged.longest).get(0, 1)
    assert same(found, {"inputs.ids": flat["ids"], "inputs.mask": flat["mask"], "labels": flat["labels"]})


def test_the_contract_has_the_collation_where_there_is_one():
    without, given = (
        contract_of_job(job(None)),
        contract_of_job(job(FunctionConfig(function=ragged.noisy, args={"share": 0.5}))),
    )
    assert "collate" not in without["data"]  # type: ignore[operator]
    assert given["data"]["collate"] == {"function": "noisy", "args": {"share": 0.5}}  # type: ignore[index,call-overload]
    del given["data"]["collate"]  # type: ignore[union-attr,arg-type]
    assert given == without


def test_batches_are_laid_out_as_stacked_ones_whatever_the_function_returns():
    rows = torch.arange(60.0).reshape(10, 6)

    def views(samples: list[Any]) -> dict[str, Any]:
        return {
            "ids": rows[: len(samples), 1:3].t().contiguous().t(),
            "mask": rows[1 : len(samples) + 1],
            "labels": [1] * len(samples),
        }

    found = loader(views).get(0, 0)
    assert all(t.is_contiguous() and t.storage_offset() == 0 and t.data_ptr() % 64 == 0 for t in found.values())
    assert torch.equal(found["ids"], rows[:2, 1:3]) and found["mask"].data_ptr() != rows[1:].data_ptr()


def test_a_function_that_changes_its_samples_changes_no_data_set():
    kept = [Sentences()[index] for index in range(23)]

    def popping(samples: list[dict[str, Any]]) -> dict[str, Any]:
        labels = [sample.pop("labels") for sample in samples]
        return ragged.longest([{**sample, "labels": one} for sample, one in zip(samples, labels, strict=True)])

    read = loader(popping, data=lambda: kept)
    assert same(read.get(0, 0), read.get(0, 0)) and all("labels" in sample for sample in kept)


@pytest.mark.ci
def test_masks_of_transformers_are_those_of_one_process_in_every_layout():
    tokenizer = PreTrainedTokenizerFast(
        tokenizer_object=Tokenizer(
            WordLevel({"[PAD]": 0, "[MASK]": 1} | {f"w{i}": i for i in range(2, ragged.WORDS)}, "[PAD]")
        ),
        pad_token="[PAD]",
        mask_token="[MASK]",
    )
    data = DataConfig(
        function=Tokenized, target="labels", collate=DataCollatorForLanguageModeling(tokenizer, mlm_probability=0.4)
    )
    spec = job(None, "mlm", model=ModelConfig(function=tiny_bert), loss=LossConfig(function="model"), data=data, steps=2)
    check_run(spec, ParallelPlan.mesh(pp=2, dp=2, layers=len(graph_of(spec).layers)), "1f1b")
    batches = [loader(spec.data.collate, Tokenized, ("input_ids", "labels")).get(step, 0) for step in range(2)]
    assert all((batch["input_ids"] == 1).any() and (batch["labels"] == -100).any() for batch in batches)
    assert preflight(spec).batch.keys() == {"input_ids", "attention_mask", "labels"}


class Tokenized(Sentences):
    """What a tokenizer gives."""

    def __getitem__(self, index: int) -> dict[str, Any]:
        return {"input_ids": super().__getitem__(index)["ids"]}


def tiny_bert() -> BertForMaskedLM:
    return BertForMaskedLM(
        BertConfig(
            vocab_size=ragged.WORDS,
            hidden_size=16,
            num_hidden_layers=2,
            num_attention_heads=2,
            intermediate_size=16,
            pad_token_id=0,
        )
    )


class Counting:
    calls = 0

    def __call__(self, samples: list[Any]) -> dict[str, Any]:
        self.calls += 1
        return ragged.longest(samples) | {"labels": torch.full((len(samples), 9), self.calls)}


class OwnGenerator:
    """What `transformers` does with `seed=`."""

    def __init__(self) -> None:
        self.generator = torch.Generator().manual_seed(1)

    def __call__(self, samples: list[Any]) -> dict[str, Any]:
        batch = ragged.longest(samples)
        return {**batch, "ids": torch.randint(1, 9, batch["ids"].shape, generator=self.generator)}


def appending(samples: list[Any]) -> dict[str, Any]:
    for sample in samples:
        sample["ids"].append(1)
        sample["labels"].append(1)
    return ragged.longest(samples)


@pytest.mark.ci
@pytest.mark.parametrize(
    ("collate", "says"),
    {
        "counts its calls": (
            Counting,
            r"called twice with the same samples under the same seed, returned field 'labels' with other",
        ),
        "has a generator": (
            OwnGenerator,
            r"returned field 'ids' with other numbers: \d+ of \d+\n  cure: let it depend on its samples",
        ),
        "changes samples": (appending, r"returned field 'ids' with \[2, 8\] torch.int64 and then \[2, 9\] torch.int64"),
    }.values(),
)
def test_what_depends_on_the_process_is_refused_before_the_run(collate: Any, says: str):
    with pytest.raises(DataError, match=says):
        preflight(job(collate))


PROCESS = [0]
"""Stands for the number of the process that a worker is."""


def of_its_process(samples: list[Any]) -> dict[str, Any]:
    batch = ragged.longest(samples)
    batch["ids"][:, PROCESS[0] % 3] = 0
    return batch


def descriptions_of_workers(spec: Job, replicas: int, monkeypatch: pytest.MonkeyPatch) -> list[AdoptedStages]:
    """What each worker of a run says when it has built its stages, in a process of its own."""
    adopt, built = WorkerCore.adopt, []

    def adopt_in_own_process(*args: Any, **more: Any) -> AdoptedStages:
        PROCESS[0] += 1
        built.append(adopt(*args, **more))
        return built[-1]

    monkeypatch.setattr(WorkerCore, "adopt", adopt_in_own_process)
    graph = graph_of(spec)
    OneProcessRun(spec, ParallelPlan.mesh(pp=1, dp=replicas, layers=len(graph.layers)), "1f1b", graph=graph)
    return built


@pytest.mark.ci
def test_workers_that_collate_the_same_samples_differently_are_found(monkeypatch: pytest.MonkeyPatch):
    """Called twice in one process the function gives the same, which passes the check before the run."""
    preflight(job(of_its_process))
    found = InitialDigestCheck()
    first, second = map(found.add, (4, 7), descriptions_of_workers(job(of_its_process), 2, monkeypatch))
    assert first is None
    says = "depends on the process that calls it: of the first microbatch, workers 4 and 7 have other numbers in ids"
    assert isinstance(second, DataError) and says in second.what


@pytest.mark.ci
def test_only_what_a_collate_function_makes_is_compared_before_the_first_step(monkeypatch: pytest.MonkeyPatch):
    """Without one no sample is read for it."""
    found = InitialDigestCheck()
    assert [*map(found.add, range(2), descriptions_of_workers(job(ragged.longest), 2, monkeypatch))] == [None, None]
    monkeypatch.setattr(MicrobatchLoader, "get", None)
    built = descriptions_of_workers(job_of("gpt2"), 2, monkeypatch)
    assert [described["collated"] for described in built] == [{}, {}]


def dropping(samples: list[Any]) -> dict[str, Any]:
    return ragged.longest([sample for sample in samples if len(sample["ids"]) > 5] or samples[:1])


def without_labels(samples: list[Any]) -> dict[str, Any]:
    return {"ids": ragged.longest(samples)["ids"]}


def failing(samples: list[Any]) -> dict[str, Any]:
    return {"ids": samples[0]["words"]}


def texts(samples: list[Any]) -> dict[str, Any]:
    return ragged.longest(samples) | {"mask": ["a"] * len(samples)}


def twice(samples: list[Any]) -> dict[str, Any]:
    return {"a.b": 1, "a": {"b": 2}}


def changing(samples: list[Any]) -> dict[str, Any]:
    batch = ragged.longest(samples)
    return batch if batch["ids"].shape[1] > 5 else {**batch, "extra": batch["ids"]}


BAD = {
    "drops samples": (
        dropping,
        DataError,
        r"microbatch 0: data.collate dropping was given 2 samples \(\[\d+, \d+\]\), and field 'ids' that "
        r"it returned has 1 rows",
    ),
    "lacks a field": (without_labels, DataError, r"returned no field 'mask', only ids\n  cure: return it, or name"),
    "raises": (
        failing,
        UserCodeError,
        r"step 1, microbatch 0: data.collate failing, given 2 samples \(\[.*\]\), raised KeyError: 'words'[\s\S]*"
        r"\n  cure: if it takes no texts, leave 'title' out of the samples .*remove_columns\(\['title'\]\)\); or call it",
    ),
    "texts": (texts, DataError, r"field 'mask' of the batch that data.collate texts returned: a list cannot be made a tensor"),
    "two of one name": (twice, DataError, r"the batch that data.collate twice returned has two fields 'a.b'"),
    "too many": (
        lambda samples: (1, 2, 3, 4),
        DataError,
        r"returned has 4 fields, but names for 3: x, y, z\n  cure: name all 4 in data.names",
    ),
}


@pytest.mark.parametrize(("collate", "kind", "says"), BAD.values(), ids=BAD)
def test_wrong_batches_are_refused(collate: Any, kind: type[RayparError], says: str):
    with pytest.raises(kind, match=says):
        loader(collate).get(0, 0)


def test_fields_that_change_between_microbatches_are_refused():
    graph = make_layer_graph(job(changing))
    assert graph.batch_names in (("ids", "mask", "labels", "title"), ("ids", "mask", "labels", "title", "extra"))
    read = loader(changing, batch_names=graph.batch_names)
    with pytest.raises(
        DataError, match=r"step \d, microbatch \d: data.collate changing returned the fields .*, and in the first"
    ):
        [read.get(step, microbatch) for step in range(4) for microbatch in range(4)]


def test_samples_of_texts_and_numbers_alone_are_to_be_made_ids():
    """Without the column of texts nothing would be left for the model."""
    with pytest.raises(UserCodeError) as found:
        Collation(failing, "failing", (), 0).values([{"text": "a b", "label": 1}], [3], (0, 0))
    assert found.value.cure.startswith("if it takes ids, make them of 'text' first, as samples have no other values")
    assert "dataset.map(lambda row: tokenizer(row['text']), remove_columns=['text'])" in found.value.cure


def test_a_field_that_samples_have_not_is_named_with_those_that_they_have():
    def asks(samples: list[Any]) -> Any:
        return {"ids": [sample["txt"] for sample in samples]}

    with pytest.raises(UserCodeError) as found:
        Collation(asks, "asks", (), 0).values([{"id": "a", "text": "a b", "label": 1}], [3], (0, 0))
    assert found.value.cure.startswith("samples have no 'txt' but 'id', 'text', 'label' (did you mean 'text'?); or call it")


DICE = random.Random(0)


def blanks_by_itself(samples: list[Any]) -> Any:
    """Draws from a generator that nobody seeds."""
    found = ragged.longest(samples)
    found["ids"][0, 0] = DICE.randrange(1 << 30)
    return found


def test_a_collate_function_that_draws_by_itself_is_named():
    """Also where the first call was by chance the same twice, and the data set was asked."""
    with pytest.raises(DataError, match=r"data.collate blanks_by_itself, called twice with the same samples"):
        preflight(job(blanks_by_itself))
    words = r"data.collate blanks_by_itself of data set \w+, asked twice for .* gave field 'ids' with other numbers"
    reader = SampleReader.of(Sentences(), DataConfig(function=Sentences, collate=blanks_by_itself), 3, ("ids",))
    with pytest.raises(DataError, match=words) as found:
        reader.refuse_dependence_on_process([(0, 0), (0, 1)])
    assert "what collate returns on its samples" in found.value.cure


@pytest.mark.ci
def test_the_check_before_a_run_sees_the_collated_batch():
    found = preflight(job(ragged.longest))
    assert found.batch.keys() == {"ids", "mask", "labels"} and found.batch["ids"].dim() == 2
    assert any("reads these fields of the samples: title" in line for line in found.notes)


@pytest.mark.parametrize(
    ("data", "collate", "says"),
    [
        (lambda: Sentences(), None, r"data has processes: 1, and they cannot be given .*<lambda>: .*\n  cure: put functions"),
        (Sentences, lambda samples: ragged.longest(samples), r"cannot be given Sentences and collate <lambda>: "),
    ],
)
def test_functions_that_data_processes_cannot_import_are_named(data: Any, collate: Any, says: str):
    with pytest.raises(ConfigError, match=says):
        loader(collate, data, ("ids",), processes=1).get(0, 0)


def raises(samples: list[Any]) -> Any:
    raise ValueError("no such word")


class WithoutLabels:
    def __len__(self) -> int:
        return 5

    def __getitem__(self, index: int) -> dict[str, Any]:
        return {"ids": [1, 2], "mask": [1, 1]}


@pytest.mark.ci
@pytest.mark.parametrize(
    ("validation", "says"),
    [
        ({"function": ragged.Sentences, "collate": raises}, r"validation: .*data.collate raises.* ValueError: no such word"),
        ({"function": WithoutLabels, "pad": {}}, r"validation: sample 0 has no field 'labels', only ids, mask"),
    ],
    ids=["collate", "fields"],
)
def test_batches_of_validation_are_tried_before_the_run(validation: Any, says: str):
    """Else the run would end at its first validation."""
    with pytest.raises(RayparError, match=says):
        preflight(job(ragged.longest, validation=ValidationConfig(**validation)))
