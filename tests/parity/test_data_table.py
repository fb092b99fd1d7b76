"""The table of the guide "Your data": what its third column says is given to `Trainer`, and trains."""

from __future__ import annotations

import io
import re
import tarfile
import types
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import datasets
import numpy
import pandas
import pyarrow
import pytest
import ray.data
import tokenizers
import torch
from helpers.ragged import WORDS, Sentences, longest
from torch import Tensor, nn
from torch.utils.data import DataLoader, Dataset, IterableDataset, SequentialSampler, TensorDataset, get_worker_info
from transformers import DataCollatorForLanguageModeling, PreTrainedTokenizerFast

import raypar
from raypar.actors.ray_row_stream import RayRowStream
from raypar.data.ray_rows import blocks_in_order
from raypar.data.shared_rows import RowFeed
from raypar.data.token_files import TokenFile
from raypar.data.tokenize_text import write_tokens
from raypar.launch.steps_of_epochs import with_steps_of_epochs
from raypar.plan import ParallelPlan
from raypar.worker.data.check_and_count_streams import resolve_streams
from raypar.worker.layer_graph_of_job import make_layer_graph
from raypar.worker.run_in_one_process import OneProcessRun

pytestmark = pytest.mark.part(4)

GUIDE = (Path(__file__).parents[2] / "examples/guides/your_data.md").read_text()
ROWS = re.findall(r"^\| (.+?) \| `.+?` \| `(data=.+?)` \|$", GUIDE.split("\n## ")[1], re.MULTILINE)


def pair(index: int) -> dict[str, Tensor]:
    return {"x": torch.tensor([index % 7 / 7, index % 5 / 5]), "y": torch.tensor([index % 3 / 3])}


class Pairs(Dataset[dict[str, Tensor]]):
    def __len__(self) -> int:
        return 24

    def __getitem__(self, index: int) -> dict[str, Tensor]:
        return pair(index)


def numbers() -> Iterator[dict[str, Tensor]]:
    info = get_worker_info()
    yield from map(pair, range(info.id if info else 0, 24, info.num_workers if info else 1))


class Numbers(IterableDataset[dict[str, Tensor]]):
    def __iter__(self) -> Iterator[dict[str, Tensor]]:
        return numbers()


class Rows:
    """Stands for a `ray.data.Dataset`, which would start Ray: what is used of it."""

    def __init__(self) -> None:
        self.context = types.SimpleNamespace(execution_options=types.SimpleNamespace(preserve_order=False))

    def streaming_split(self) -> None: ...

    def has_serializable_lineage(self) -> bool:
        return True

    def serialize_lineage(self) -> bytes:
        return b""

    def schema(self) -> pyarrow.Schema:
        return pyarrow.schema({"x": pyarrow.list_(pyarrow.float64())})

    def iter_batches(self, *, batch_size: int | None, batch_format: str) -> Iterator[pyarrow.Table]:
        assert self.context.execution_options.preserve_order and (batch_size, batch_format) == (None, "pyarrow")
        yield from (pyarrow.Table.from_pylist(lists()[start : start + 7]) for start in range(0, 24, 7))


def lists() -> list[dict[str, Any]]:
    return [{name: value.tolist() for name, value in pair(index).items()} for index in range(24)]


def write_shard(path: Path, indices: range) -> None:
    path.parent.mkdir(exist_ok=True)
    with tarfile.open(path, "w") as tar:
        for index in indices:
            for name, value in pair(index).items():
                numpy.save(file := io.BytesIO(), value.numpy())
                info = tarfile.TarInfo(f"{index}.{name}.npy")
                info.size = len(file.getvalue())
                tar.addfile(info, io.BytesIO(file.getvalue()))


def tokenizer() -> PreTrainedTokenizerFast:
    vocabulary = {"[PAD]": 0, "[MASK]": 1} | {f"w{i}": i for i in range(2, WORDS)}
    words = tokenizers.Tokenizer(tokenizers.models.WordLevel(vocabulary, "[PAD]"))
    return PreTrainedTokenizerFast(tokenizer_object=words, pad_token="[PAD]", mask_token="[MASK]")


def names(folder: Path) -> dict[str, Any]:
    """What the names in the table stand for."""
    for shard in range(2):
        write_shard(folder / f"shards/{shard:03}.tar", range(12 * shard, 12 * shard + 12))
    datasets.Dataset.from_list(lists()[:10]).to_parquet(folder / "rows-0.parquet")
    datasets.Dataset.from_list(lists()[10:]).to_parquet(folder / "rows-1.parquet")
    datasets.Dataset.from_list(lists()).to_json(folder / "rows.jsonl")
    write_tokens(folder / "tokens.bin", [range(WORDS)] * 4, dtype="uint16", notes={})
    rows = datasets.Dataset.from_list(lists())
    return {
        "TensorDataset": TensorDataset,
        "x": torch.rand(24, 2),
        "y": torch.rand(24, 1),
        "Pairs": Pairs,
        "pairs": Pairs(),
        "more": [pair(index) for index in range(7)],
        "samples": [pair(index) for index in range(24)],
        "frame": pandas.DataFrame(lists()),
        "loader": DataLoader(Pairs(), batch_size=8, shuffle=True),
        "stream_loader": DataLoader(Numbers(), batch_size=8, num_workers=4),
        "words": Sentences(24),
        "to_longest": longest,
        "tokenized": [{"input_ids": Sentences()[index]["ids"]} for index in range(24)],
        "tokenizer": tokenizer(),
        "DataCollatorForLanguageModeling": DataCollatorForLanguageModeling,
        "sampler": SequentialSampler(range(24)),
        "weight_of": lambda dataset: torch.arange(1.0, len(dataset) + 1),
        "weighed": [{**pair(index), "w": index % 3} for index in range(24)],
        "loss_of_each": lambda output, target: (output - target).square().mean(1),
        "length_of": lambda dataset: [len(dataset[index]["ids"]) for index in range(len(dataset))],
        "dataset": rows,
        "streamed": rows.to_iterable_dataset(num_shards=2),
        "Numbers": Numbers,
        "numbers": numbers,
        "rows": Rows(),
        "rows_of_files": Rows(),
        "TokenFile": lambda name, context: TokenFile(folder / name, context),
    }


def next_word(output: Tensor, target: Tensor) -> tuple[Tensor, Tensor]:
    lost = nn.functional.cross_entropy(output.flatten(0, 1), target.flatten(), reduction="sum")
    return lost, (target != -100).sum()


def of_pairs() -> nn.Module:
    return nn.Sequential(nn.Linear(2, 4), nn.Tanh(), nn.Linear(4, 1))


def of_words() -> nn.Module:
    return nn.Sequential(nn.Embedding(WORDS, 4), nn.Linear(4, WORDS))


def test_the_table_is_found_and_ray_data_has_what_its_row_says():
    assert len(ROWS) == GUIDE.split("\n## ")[1].count("\n| ") - 1 > 20  # all but the head
    used = ("iter_batches", "streaming_split", "context", "schema", "has_serializable_lineage", "serialize_lineage")
    assert all(hasattr(ray.data.Dataset, name) for name in used)


@pytest.mark.parametrize("what, here", ROWS, ids=[what for what, _ in ROWS])
def test_what_is_written_here_trains(what: str, here: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(RayRowStream, "_read", RowFeed(lambda: blocks_in_order(Rows())).read)
    given = eval(f"dict({here})", names(tmp_path))
    masked, words = "tokenized" in here, "words" in here or "oken" in here
    model: Callable[[], nn.Module] = of_words if words else of_pairs
    if "words" in here or masked:
        given["data"] |= {"input": "input_ids" if masked else "ids", "target": "labels"}
    job = raypar.Trainer(
        **{
            "steps": 1,
            "batch_size": 8,
            "microbatches": 2,
            "loss": next_word if words else nn.functional.mse_loss,
            **given,
        },
        model=model,
        optimizer=(torch.optim.SGD, {"lr": 0.1}),
    ).job
    job = resolve_streams(with_steps_of_epochs(job, lambda event: None)).job
    layers = len(make_layer_graph(job).layers)
    with OneProcessRun(job.replace(steps=1), ParallelPlan.mesh(pp=2, layers=layers), "1f1b") as here:
        assert {report.loss > 0 for report in here.step(0)} == {True}
