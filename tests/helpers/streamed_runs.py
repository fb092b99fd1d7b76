"""Runs of the tiny job on streams, on real Ray: what their journal says was read, beside one process that reads in turn."""

from __future__ import annotations

import hashlib
import io
import json
import struct
import tarfile
from collections.abc import Iterator
from functools import cache
from pathlib import Path
from typing import Any

import numpy
import pyarrow
import pyarrow.parquet
import torch
from helpers import reference
from helpers.tiny_job import WIDTH
from helpers.trainee import Trainee

from raypar.actors.ray_row_stream import RayRowStream
from raypar.data.batch_fields import digest_of_fields
from raypar.job.read_job import load_job
from raypar.worker.layer_graph_of_job import make_layer_graph
from raypar.worker.norm_and_weights_hash import weights_hash

SIZE, STREAMS, MICROBATCHES, STEPS = 50, 4, 4, 30
"""Samples of the sources: an epoch of a stream is 12 or 13 samples, and ends in the midst of a step."""


def row(index: int) -> dict[str, torch.Tensor]:
    """Sample `index`, with noise drawn where it is read."""
    x = torch.linspace(-1, 1, WIDTH) * (index + 1) / SIZE
    return {"x": x + 0.1 * torch.randn(WIDTH), "y": x.flip(0), "number": torch.tensor(index)}


def part() -> range:
    """The numbers of the samples that this worker of a `DataLoader` reads."""
    info = torch.utils.data.get_worker_info()
    return range(SIZE) if info is None else range(info.id, SIZE, info.num_workers)


def generated() -> Iterator[dict[str, torch.Tensor]]:
    """A generator function."""
    for index in part():
        yield row(index)


class Divided(torch.utils.data.IterableDataset[dict[str, torch.Tensor]]):
    """An `IterableDataset` that keeps no place, in another order in each epoch."""

    epoch = 0

    def set_epoch(self, epoch: int) -> None:
        self.epoch = epoch

    def __iter__(self) -> Iterator[dict[str, torch.Tensor]]:
        numbers = part()
        for place in range(len(numbers)):
            yield row(numbers[(place * 5 + self.epoch) % len(numbers)] if len(numbers) % 5 else numbers[place])


class Resuming(Divided):
    """One that keeps its place."""

    given = begin = 0

    def state_dict(self) -> dict[str, int]:
        return {"given": self.given}

    def load_state_dict(self, state: dict[str, int]) -> None:
        self.begin = state["given"]

    def __iter__(self) -> Iterator[dict[str, torch.Tensor]]:
        begin, self.begin = self.begin, 0
        for self.given, one in enumerate(super().__iter__(), 1):
            if self.given > begin:
                yield one


def whole() -> Iterator[dict[str, torch.Tensor]]:
    """A generator function that does not divide itself."""
    return map(row, range(SIZE))


def from_files(folder: str) -> Any:
    """`datasets` streaming: JSON lines in four files."""
    from datasets import load_dataset

    files = sorted(str(path) for path in Path(folder).glob("*.jsonl"))
    return load_dataset("json", data_files=files, split="train", streaming=True).with_format("torch")


def ray_rows(folder: str) -> Any:
    """A `ray.data.Dataset` of Parquet files as a stream; an actor of one name for all workers, as one that is given has."""
    import ray.data

    from raypar.data.ray_rows import lineage_of

    rows = ray.data.read_parquet(str(Path(folder) / "parquet"))
    return RayRowStream(*lineage_of(rows, "data"), too_large=False, number=hashlib.blake2b(folder.encode()).hexdigest()[:12])


def rows_in_order(folder: str) -> Iterator[dict[str, Any]]:
    """The rows of these files, without Ray."""
    for path in sorted((Path(folder) / "parquet").glob("*.parquet")):
        yield from pyarrow.parquet.read_table(path).to_pylist()


def of_function(name: str, *, streams: int, window: int = 0, folder: bool = False, processes: int = 0) -> str:
    args = "args: {folder: FOLDER}, " if folder else ""
    more = f"streams: {streams}, shuffle_window: {window}, processes: {processes}"
    return f"{{function: helpers.streamed_runs:{name}, {args}{more}}}"


FIELDS = "input: x.npy, target: y.npy"
SOURCES = {
    "generator function": of_function("generated", streams=STREAMS),
    "IterableDataset": of_function("Divided", streams=2, window=5),
    "IterableDataset with state_dict": of_function("Resuming", streams=STREAMS),
    "IterableDataset with state_dict, shuffled": of_function("Resuming", streams=2, window=7),
    "not divided": of_function("whole", streams=1, window=4),
    "not divided, read by a process": of_function("whole", streams=1, window=4, processes=1),
    "state_dict, read by a process": of_function("Resuming", streams=1, processes=1),
    "datasets streaming": of_function("from_files", streams=STREAMS, window=5, folder=True),
    "tar": f"{{tar: FOLDER/tar/*.tar, {FIELDS}, streams: {STREAMS}, shuffle_window: 5}}",
    "Ray Data": of_function("ray_rows", streams=1, window=5, folder=True),
    "parquet": "{parquet: FOLDER/parquet/*.parquet}",
    "jsonl": "{jsonl: FOLDER/*.jsonl}",
    "mix": "{mix: [{parquet: FOLDER/parquet/0.parquet, ratio: 3}, {jsonl: [FOLDER/1.jsonl, FOLDER/2.jsonl], ratio: 1}]}",
    "mix of streams": "{mix: [{function: helpers.streamed_runs:Resuming, ratio: 3}, "
    "{function: helpers.streamed_runs:generated, ratio: 1}], streams: 2, shuffle_window: 5}",
}
"""Name -> the section `data`. Those without `streams` are read by id."""


def write_files(folder: Path) -> None:
    """The samples as four files of each kind, once."""
    if folder.exists():
        return
    for kind in ("parquet", "tar"):
        (folder / kind).mkdir(parents=True)
    for number in range(STREAMS):
        numbers = range(number, SIZE, STREAMS)
        rows = [{"x": [index / SIZE] * WIDTH, "y": [-index / SIZE] * WIDTH} for index in numbers]
        (folder / f"{number}.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
        pyarrow.parquet.write_table(pyarrow.Table.from_pylist(rows), folder / f"parquet/{number}.parquet", row_group_size=3)
        with tarfile.open(folder / f"tar/{number}.tar", "w") as tar:
            for index, row in zip(numbers, rows, strict=True):
                for name, value in row.items():
                    numpy.save(file := io.BytesIO(), numpy.array(value, "float32"))
                    member = tarfile.TarInfo(f"{index}.{name}.npy")
                    member.size = len(file.getvalue())
                    tar.addfile(member, io.BytesIO(file.getvalue()))


def words_of(source: str, folder: Path) -> list[str]:
    """The settings of a tiny job that reads a source; its files are under `folder`."""
    data = SOURCES[source]
    if "FOLDER" in data:
        write_files(folder / "files")
    data = data.replace("FOLDER", str(folder / "files"))
    return [f"data={data}", "validation=null", f"microbatches={MICROBATCHES}", f"steps={STEPS}"]


def journal_of(content: bytes) -> list[list[int]]:
    """Step -> digest of each microbatch, of a samples.bin."""
    magic, _, microbatches, streams = struct.unpack_from("<8sQQQ", content)
    assert magic == b"raypar-s"
    width = microbatches + streams
    numbers = [number for (number,) in struct.iter_unpack("<Q", content[struct.calcsize("<8sQQQ") :])]
    return [numbers[start : start + microbatches] for start in range(0, len(numbers), width)]


class StreamedRun(Trainee):
    """The tiny job on a source."""

    def __init__(self, folder: Path, source: str, *words: str) -> None:
        self.source = source
        super().__init__(folder, *words_of(source, folder), "elastic.min_workers=1", *words)

    @property
    def journal(self) -> list[list[int]]:
        """Step -> digest of each microbatch; empty where samples are read by id."""
        if "streams" not in SOURCES[self.source]:
            return []
        return journal_of((self.folder / "runs/tiny/samples.bin").read_bytes())


class InOneProcess:
    """What one process that reads the streams in turn has read, and trained."""

    def __init__(self, folder: Path, source: str) -> None:
        run = StreamedRun(folder, source)
        spec = load_job(run.path, [word.replace(":ray_rows", ":rows_in_order") for word in run.words])
        result = reference.train(make_layer_graph(spec), spec)
        self.losses, self.weights_sha256 = list(enumerate(result.losses, 1)), weights_hash(result.parameters)
        streams = [reference.stream(spec, number) for number in range(spec.data.streams or 0)]
        self.samples: list[list[tuple[int, int]]] = []
        """All that was read of a step: (epoch, number) by microbatch."""
        self.journal: list[list[int]] = []
        for _ in range(spec.steps if streams else 0):
            digests = []
            for microbatch in range(spec.microbatches):
                read = [next(streams[microbatch % len(streams)]) for _ in spec.batching.samples(microbatch)]
                fields = reference.stack([row for _, row in read], spec)
                digests.append(
                    digest_of_fields({name: fields[name] for name in (spec.data.input or "x", spec.data.target or "y")})
                )
            self.journal.append(digests)


@cache
def in_one_process(folder: Path, source: str) -> InOneProcess:
    """Once for all histories of a source."""
    return InOneProcess(folder, source)
