"""Documents in rows of one length: as if each were by itself, in every layout alike; what would mix them is refused."""

from __future__ import annotations

import math
import random
from typing import Any

import pytest
import torch
from helpers.captured_jobs import check_run, graph_of
from helpers.model_zoo import import_transformers
from helpers.ragged import WORDS, Masked, Plain, Sentences, longest, next_word
from torch import Tensor, nn

from raypar.errors import ConfigError, DataError, ModelError
from raypar.job import (
    DataConfig,
    FunctionConfig,
    Job,
    LossConfig,
    ModelConfig,
    OptimizerConfig,
    PackConfig,
    PadConfig,
    ValidationConfig,
)
from raypar.job.contract import contract_of_job
from raypar.plan import ParallelPlan
from raypar.worker.check_packing import check_documents_apart
from raypar.worker.data.data_set_with_sample_numbers import with_numbered_samples
from raypar.worker.data.packing import Packing, first_fit_decreasing
from raypar.worker.data.sample_reader import SampleReader
from raypar.worker.job_preflight import preflight
from raypar.worker.layer_graph_of_job import make_layer_graph
from raypar.worker.run_in_one_process import OneProcessRun

pytestmark = pytest.mark.part(5)


class ByBoundaries(nn.Module):
    """Takes documents as attention of variable length does (`torch.nn.attention.varlen.varlen_attn`, flash attention)."""

    def __init__(self, width: int = 16) -> None:
        super().__init__()
        self.embed, self.head = nn.Embedding(WORDS, width), nn.Linear(width, WORDS)
        self.blocks = nn.ModuleList(nn.TransformerEncoderLayer(width, 2, 2 * width, 0.0, batch_first=True) for _ in range(2))

    def forward(self, ids: Tensor, cu_seqlens: Tensor) -> Tensor:
        x = self.embed(ids)
        words = torch.arange(ids.numel())
        document = torch.bucketize(words, cu_seqlens, right=True)
        mask = (document[:, None] != document[None, :]) | (words[:, None] < words[None, :])
        x = x.flatten(0, 1)[None]
        for block in self.blocks:
            x = block(x, src_mask=mask)
        return self.head(x).unflatten(1, ids.shape)[0]


class Apart(nn.Module):
    """Words are related to those before them in the same document."""

    def __init__(self, width: int = 16) -> None:
        super().__init__()
        self.embed, self.places = nn.Embedding(WORDS, width), nn.Embedding(16, width)
        self.blocks = nn.ModuleList(nn.TransformerEncoderLayer(width, 2, 2 * width, 0.0, batch_first=True) for _ in range(2))
        self.head = nn.Linear(width, WORDS)

    def forward(self, ids: Tensor, position_ids: Tensor, document_ids: Tensor) -> Tensor:
        x = self.embed(ids) + self.places(position_ids)
        other = document_ids[:, :, None] != document_ids[:, None, :]
        later = torch.ones(ids.shape[1], ids.shape[1], dtype=torch.bool).triu(1)
        mask = (other | later).repeat_interleave(2, 0)
        for block in self.blocks:
            x = block(x, src_mask=mask)
        return self.head(x)


def shifted(output: Tensor, labels: Tensor) -> tuple[Tensor, Tensor]:
    """Compares each word with the next one."""
    return next_word(output[:, :-1], labels[:, 1:].contiguous())


def job(name: str, data: Any = Sentences, model: Any = Apart, loss: Any = next_word, **pack: Any) -> Job:
    return Job(
        name=name,
        seed=3,
        steps=3,
        batch_size=12,
        microbatches=3,
        model=ModelConfig(function=model),
        loss=loss if isinstance(loss, LossConfig) else LossConfig(function=loss),
        data=DataConfig(function=data, target="labels", pack=PackConfig(**{"to": 12, **pack})),
        optimizer=OptimizerConfig(function="torch.optim:AdamW", args={"lr": 1e-2}),
    )


def read(samples: Any, wanted: tuple[str, ...], target: str = "labels", **pack: Any) -> dict[str, Any]:
    spec = DataConfig(function=lambda: samples, target=target, pack=PackConfig(**pack))
    return SampleReader.of(samples, spec, 1, wanted).read([(0, index) for index in range(len(samples))])


def test_the_longest_document_comes_first_and_each_goes_into_the_first_row_with_room():
    assert first_fit_decreasing([3, 9, 4, 5, 1], 10) == [[1, 4], [3, 2], [0]]
    assert first_fit_decreasing([], 4) == [] and first_fit_decreasing([4, 4], 4) == [[0], [1]]
    chance = random.Random(1)
    for _ in range(200):
        lengths = [chance.randrange(0, 17) for _ in range(chance.randrange(1, 20))]
        rows = first_fit_decreasing(lengths, 16)
        assert sorted(document for row in rows for document in row) == list(range(len(lengths)))
        assert all(sum(lengths[each] for each in row) <= 16 for row in rows)
        assert len(rows) <= math.ceil(11 / 9 * max(1, math.ceil(sum(lengths) / 16))) + 1


def test_rows_have_documents_with_positions_and_numbers_of_their_own():
    samples = [
        {"ids": [1, 2], "labels": [2, -100], "attention_mask": [1, 1]},
        {"ids": [3, 4, 5], "labels": [4, 5, -100], "attention_mask": [1, 1, 1]},
        {"ids": [6] * 4, "labels": [6] * 4, "attention_mask": [1] * 4},
    ]
    found = read(
        samples, ("ids", "labels", "position_ids", "document_ids", "mask"), to=6, rows=3, mask="mask", value={"ids": 9}
    )
    assert found["ids"].tolist() == [[6, 6, 6, 6, 1, 2], [3, 4, 5, 9, 9, 9], [9] * 6]
    assert found["labels"].tolist() == [[6, 6, 6, 6, 2, -100], [4, 5, -100, -100, -100, -100], [-100] * 6]
    assert found["position_ids"].tolist() == [[0, 1, 2, 3, 0, 1], [0, 1, 2, 0, 0, 0], [0] * 6]
    assert found["document_ids"].tolist() == [[0, 0, 0, 0, 1, 1], [0, 0, 0, -1, -1, -1], [-1] * 6]
    assert found["mask"].shape == (3, 1, 6, 6) and found["mask"][0, 0, 3].tolist() == [True] * 4 + [False] * 2
    assert bool(found["mask"].any(-1).all()), "a row of the mask without any place makes NaN"
    masked = read(samples, ("labels",), to=6, first_label="mask")["labels"]
    assert masked.tolist() == [[-100, 6, 6, 6, -100, -100], [-100, 5, -100, -100, -100, -100]]


@pytest.mark.parametrize("rows", [0, 4])
def test_packed_batches_have_the_bits_of_one_process_in_every_layout(rows: int):
    spec = job(f"packed-{rows}", rows=rows)
    check_run(spec, ParallelPlan.mesh(pp=2, dp=2, layers=len(graph_of(spec).layers)), "1f1b")


def test_boundaries_are_those_that_attention_of_variable_length_takes():
    samples = [{"ids": [1] * length} for length in (2, 3, 4)]
    found = read(samples, ("ids", "cu_seqlens"), target="ids", to=6, rows=3)
    # rows of 4 + 2, of 3 and an end of 3, of an end of 6; as many numbers as three documents in three rows can need
    assert found["cu_seqlens"].tolist() == [0, 4, 6, 9, 12, 18, 18] and found["cu_seqlens"].dtype == torch.int32
    full = read(samples, ("cu_seqlens",), target="ids", to=9)["cu_seqlens"]
    assert full.tolist() == [0, 4, 7, 9, 9]
    assert read([{"ids": [1] * 4}] * 2, ("cu_seqlens",), target="ids", to=4)["cu_seqlens"].tolist() == [0, 4, 8, 8, 8]


@pytest.mark.parametrize("rows", [0, 4])
def test_batches_with_boundaries_have_the_bits_of_one_process(rows: int):
    spec = job(f"boundaries-{rows}", model=ByBoundaries, rows=rows)
    preflight(spec)
    check_run(spec, ParallelPlan.mesh(pp=2, dp=2, layers=len(graph_of(spec).layers)), "1f1b")


def losses(spec: Job) -> list[float]:
    graph = make_layer_graph(spec)
    with OneProcessRun(spec, ParallelPlan.mesh(pp=2, layers=len(graph.layers)), "1f1b", graph=graph) as run:
        return [run.step(step)[0].loss for step in range(spec.steps)]


class OneByOne(Sentences):
    """The fields that a packed batch has, for documents by themselves."""

    def __getitem__(self, index: int) -> dict[str, Any]:
        sample = super().__getitem__(index)
        count = len(sample["ids"])
        return {**sample, "position_ids": list(range(count)), "document_ids": [0] * count}


@pytest.mark.ci
def test_the_loss_is_that_of_documents_by_themselves():
    apart = job("apart", OneByOne)
    apart = apart.replace(data=apart.data.replace(pack=None, pad=PadConfig(value={"document_ids": -1})))
    assert losses(job("packed")) == pytest.approx(losses(apart), rel=1e-5)


@pytest.mark.ci
def test_the_job_says_what_the_loss_compares():
    """A loss that compares each word with the next one would compare the last of a document with the first of the next."""
    with pytest.raises(
        ConfigError,
        match=r"first_label is keep, and the loss shifted leaves out the first label of each row.*\n  cure: set data.pack",
    ):
        preflight(job("shifted", loss=shifted))
    preflight(job("shifted", loss=shifted, first_label="mask"))
    preflight(job("not-shifted"))
    with pytest.raises(
        ConfigError, match=r"data.pack, and loss: model: .*\n  cure: set loss: \{function: model, count: shifted"
    ):
        job("own", loss=LossConfig(function="model"))
    for count, first in (("labels", "keep"), ("shifted_labels", "mask")):
        spec = job("own", loss=LossConfig(function="model", count=count)).replace(
            validation=ValidationConfig(function=Sentences)
        )
        assert spec.training_data.pack is not None and spec.training_data.pack.first_label == first
        assert spec.validation_data.pack == spec.training_data.pack
    assert contract_of_job(job("a"))["data"]["pack"] == {"to": 12}  # type: ignore[index,call-overload]
    assert "pack" not in contract_of_job(job("a").replace(data=DataConfig(function=Sentences)))["data"]  # type: ignore[operator]


class Leaking(Apart):
    """Takes the positions, and relates words over documents."""

    def forward(self, ids: Tensor, position_ids: Tensor) -> Tensor:  # type: ignore[override]
        x = self.embed(ids) + self.places(position_ids)
        for block in self.blocks:
            x = block(x)
        return self.head(x)


def layers_that_leak() -> list[nn.Module]:
    return [nn.Embedding(WORDS, 16), nn.TransformerEncoderLayer(16, 2, 16, 0.0, batch_first=True), nn.Linear(16, WORDS)]


@pytest.mark.ci
def test_a_model_that_mixes_documents_is_refused():
    with pytest.raises(
        ModelError, match=r"data.pack: what Leaking makes of one document of a row depends on the words of another"
    ):
        preflight(job("leaking", model=Leaking))
    with pytest.raises(
        ConfigError, match=r"the model reads none of position_ids, document_ids, cu_seqlens: words would be related"
    ):
        preflight(job("blind", model=Plain))


class Pooled(Apart):
    """Has one output for a row."""

    def forward(self, ids: Tensor, position_ids: Tensor, document_ids: Tensor) -> Tensor:
        return super().forward(ids, position_ids, document_ids).mean(1)


def pooled(output: Tensor, labels: Tensor) -> Tensor:
    return output.square().sum() / labels.numel()


def documents_lines(spec: Job) -> list[str]:
    return [line for line in preflight(spec).notes if line.startswith("data.pack: whether the model keeps")]


@pytest.mark.ci
def test_a_model_whose_documents_could_not_be_looked_at_has_a_line(monkeypatch: pytest.MonkeyPatch):
    assert documents_lines(job("apart")) == []
    (line,) = documents_lines(job("pooled", model=Pooled, loss=pooled, first_label="mask"))
    assert "not looked at: what Pooled returns does not have floating-point numbers for each word of a row" in line
    monkeypatch.setattr("raypar.worker.plain_microbatches.MOST_BYTES", 1000)
    (line,) = documents_lines(job("large"))
    assert "not looked at: its parameters and buffers have" in line and line.count("\n") == 1


def test_numbers_that_are_not_finite_hide_no_document():
    packing = Packing(PackConfig(to=4), "labels")
    batch = {"x": torch.arange(8.0).reshape(2, 4), "labels": torch.zeros(2, 4)}

    def look(output: Any, **more: Any) -> str | None:
        return check_documents_apart(packing, batch, output, label="the model", **more)

    unknown = torch.tensor([math.nan, 0.0, -math.inf, 0.0])
    assert look(lambda given: given["x"] + unknown) is None
    with pytest.raises(ModelError, match=r"depends on the words of another"):
        look(lambda given: given["x"].cumsum(1) + unknown)
    with pytest.raises(ModelError, match=r"depends on the words of another: other words there change it by (nan|inf)"):
        look(lambda given: given["x"] / (given["x"][:, :1] != batch["x"][:, :1]))
    assert "does not have floating-point numbers" in str(look(lambda given: given["x"] * math.nan))
    assert "does not have a loss" in str(look(lambda given: given["x"].sum() * math.nan, is_loss=True))


BAD: dict[str, tuple[Any, dict[str, Any], str]] = {
    "too long": (
        [{"x": [1] * 9}],
        {"to": 8},
        r"sample 0: its field 'x' has length 9, and data.pack.to is 8\n  cure: set data.pack.to to 9 or more",
    ),
    "two lengths": (
        [{"x": [1], "z": [1, 2]}],
        {"to": 8},
        r"sample 0: its field 'z' has length 2, and 'x' has 1\n  cure: give the",
    ),
    "padded": (
        [{"x": [1, 0], "attention_mask": [1, 0]}],
        {"to": 8},
        r"sample 0 is padded: its field 'attention_mask' has zeros",
    ),
    "no length": ([{"x": 1}], {"to": 8}, r"sample 0 has no field with a length to be packed"),
    "one number": (
        [{"x": [1, 2], "n": 3}],
        {"to": 8, "fields": ("x", "n")},
        r"sample 0: its field 'n' is one number, and data.pack.fields names it\n  cure: give it a value for each word",
    ),
    "a field less": (
        [{"x": [1, 2], "z": [1, 2]}, {"z": [3]}],
        {"to": 8},
        r"sample 1 has no field 'x', and sample 0 has it\n  cure: give all samples the same fields",
    ),
    "one without a length": (
        [{"x": [1, 2], "z": [3, 4]}, {"x": [5, 6], "z": 7}],
        {"to": 8},
        r"sample 1 \(epoch 0\), field 'z': expected a length, then \[\] torch.int64, as in sample 0, found \[\] torch.int64",
    ),
    "labels that cannot be masked": (
        [{"x": [1, 2], "y": torch.tensor([3, 4], dtype=torch.uint8)}],
        {"to": 8, "first_label": "mask"},
        r"data.pack.first_label is mask, and the target 'y' \(torch.uint8\) cannot have -100\n  cure: give labels as int64",
    ),
    "no number": (
        [{"x": [1]}],
        {"to": 8, "value": {"x": math.nan}},
        r"data.pack.value.x is nan, and the field has integers \(torch.int64\)\n  cure: give a whole number",
    ),
    "too many rows": (
        [{"x": [1]}],
        {"to": 8, "rows": 10**12},
        r"there is no memory for field 'x' of a microbatch: \[1000000000000, 8\] int64 is 59,604.6 GiB\n  cure: give data.pack",
    ),
    "other widths": (
        [{"x": torch.ones(1, 2)}, {"x": torch.ones(1, 3)}],
        {"to": 8},
        r"sample 1 .*expected a length, then \[2\] torch.float32, as in sample 0, found \[1, 3\]",
    ),
}


@pytest.mark.parametrize(("samples", "pack", "says"), BAD.values(), ids=BAD)
def test_what_cannot_be_packed_is_refused(samples: Any, pack: dict[str, Any], says: str):
    with pytest.raises(DataError, match=says):
        read(samples, tuple(samples[0]), "y", **pack)


@pytest.mark.parametrize(
    ("mask", "whose"), [("x", "samples have"), ("z", "samples have"), ("document_ids", "packed batches have")]
)
def test_a_mask_does_not_take_the_place_of_a_field(mask: str, whose: str):
    with pytest.raises(ConfigError, match=rf"data.pack.mask is '{mask}', the name of a field that {whose}\n  cure: give"):
        read([{"x": [1], "z": [1]}], ("x",), "y", to=4, mask=mask)


def test_fields_without_a_value_for_each_word_are_refused():
    says = r"a batch of packed samples has no field 'n', only x, position_ids, document_ids, cu_seqlens\n"
    with pytest.raises(DataError, match=says):
        read([{"x": [1], "n": 1}], ("n",), "y", to=4)


def test_pack_pad_and_collate_exclude_each_other_and_misspelt_names_are_refused():
    for more in ({"pad": PadConfig()}, {"collate": FunctionConfig(function=longest)}):
        spec = DataConfig(function=Masked, target="labels", pack=PackConfig(to=9), **more)
        with pytest.raises(ConfigError, match=r"data has pack and (pad|collate longest), and each of them makes batches"):
            SampleReader.of(Masked(), spec, 1)
    with pytest.raises(
        ConfigError, match=r"data.pack.value names 'idss', and samples have the fields ids, labels, position_ids"
    ):
        preflight(job("misspelt", value={"idss": 3}))
    with pytest.raises(DataError, match=r"sample \d+: its field 'ids' has length 9, and data.pack.to is 8\n  cure: set"):
        preflight(job("long", to=8))


def test_predictions_by_sample_are_refused():
    with pytest.raises(ConfigError, match=r"data.pack puts several samples into a row, and predictions are kept by sample"):
        with_numbered_samples(job("a").training_data, 3)


# -- models of transformers ------------------------------------------------------------------------------------------------


class Texts(Sentences):
    """As a tokenizer gives them."""

    def __getitem__(self, index: int) -> dict[str, Any]:
        ids = super().__getitem__(index)["ids"]
        return {"input_ids": ids, "attention_mask": [1] * len(ids), "labels": ids}


def gpt2(attention: str = "sdpa") -> Any:
    transformers = import_transformers()
    off = dict.fromkeys(("resid_pdrop", "embd_pdrop", "attn_pdrop"), 0.0)
    sizes = {
        "vocab_size": WORDS,
        "n_positions": 16,
        "n_embd": 16,
        "n_layer": 2,
        "n_head": 2,
        "bos_token_id": 0,
        "eos_token_id": 0,
    }
    config = transformers.GPT2Config(**off, **sizes, use_cache=False)
    config._attn_implementation = attention
    return transformers.GPT2LMHeadModel(config)


def bert() -> Any:
    transformers = import_transformers()
    off = dict.fromkeys(("hidden_dropout_prob", "attention_probs_dropout_prob"), 0.0)
    sizes = {"vocab_size": WORDS, "hidden_size": 16, "num_hidden_layers": 2, "num_attention_heads": 2, "intermediate_size": 32}
    return transformers.BertForMaskedLM(transformers.BertConfig(**off, **sizes, max_position_embeddings=32))


OWN = {"gpt2-sdpa": (gpt2, "shifted_labels", {}), "bert": (bert, "labels", {"mask": "attention_mask"})}


@pytest.mark.ci
@pytest.mark.parametrize(("model", "count", "more"), OWN.values(), ids=OWN)
def test_models_of_transformers_have_the_losses_of_documents_by_themselves(model: Any, count: Any, more: dict[str, Any]):
    packed = job("hf", Texts, model, LossConfig(function="model", count=count), to=24, rows=1, **more)
    apart = packed.replace(data=packed.data.replace(pack=None, pad=PadConfig()))
    assert losses(packed) == pytest.approx(losses(apart), rel=1e-4)
    preflight(packed)


@pytest.mark.ci
def test_a_model_of_transformers_whose_attention_needs_a_mask_is_refused_without_it():
    with pytest.raises(
        ModelError, match=r"data.pack: what BertForMaskedLM makes of one document of a row depends on the words of"
    ):
        preflight(job("bert", Texts, bert, LossConfig(function="model", count="labels"), to=24))


class WholeRows(Texts):
    """Every other four texts have 9 words each."""

    def __getitem__(self, index: int) -> dict[str, Any]:
        sample = super().__getitem__(index)
        return {name: (value * 3)[:9] for name, value in sample.items()} if index // 4 % 2 else sample


@pytest.mark.ci
def test_with_rows_no_step_makes_a_trace(monkeypatch: pytest.MonkeyPatch):
    """The forward of GPT-2 looks in Python whether a row has several documents: rows of 9 words have one."""
    spec = job("ahead", WholeRows, gpt2, LossConfig(function="model", count="shifted_labels"), to=9, rows=4)
    data = spec.data.replace(shuffle=False)
    spec = spec.replace(steps=3, data=data, validation=ValidationConfig(function=WholeRows))
    graph = make_layer_graph(spec)
    with OneProcessRun(spec, ParallelPlan.mesh(pp=2, layers=len(graph.layers)), "1f1b", graph=graph) as run:
        monkeypatch.setattr("raypar.model.capture.trace_cache.record_forward", None)
        for step in range(spec.steps):
            run.step(step)
        run.validate(spec.steps)
