"""`data: {parquet: ...}` and `data: {jsonl: ...}`: files by path or URI, read as a list of samples is."""

from __future__ import annotations

import itertools
import json
import os
import pickle
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pyarrow
import pyarrow.parquet
import pytest
import torch
from helpers.ragged import WORDS, longest
from pyarrow.fs import LocalFileSystem, SubTreeFileSystem
from torch import Tensor, nn

import raypar
from raypar.data.file_list import expand_braces
from raypar.data.json_lines import JsonLines
from raypar.data.parquet_files import ParquetFiles
from raypar.errors import CheckpointError, ConfigError, InputError
from raypar.job import DataConfig, Job
from raypar.job.contract import DATA_DIGEST, contract_of_job
from raypar.job.read_job import parse_job
from raypar.plan.microbatches import Microbatches
from raypar.storage.filesystems import register_filesystem
from raypar.worker.checkpoint.check_job_changes import check_data_digest
from raypar.worker.data.microbatch_loader import MicrobatchLoader
from raypar.worker.data.sample_order import SampleOrder
from raypar.worker.data.user_dataset import make_dataset
from raypar.worker.job_preflight import preflight

pytestmark = pytest.mark.part(4)

SAMPLES: list[dict[str, Any]] = [
    {"ids": [(7 * i + j) % WORDS for j in range(2 + i % 5)], "x": [i / 7, 1.5], "y": i % 3, "title": f"é{i}"} for i in range(50)
]
CUTS = (0, 10, 33, 50)


def write_parquet(path: Path, samples: list[dict[str, Any]], rows: int = 4, **more: Any) -> None:
    pyarrow.parquet.write_table(pyarrow.Table.from_pylist(samples), path, row_group_size=rows, **more)


def write_jsonl(path: Path, samples: list[dict[str, Any]]) -> None:
    path.write_text("".join(json.dumps(sample, ensure_ascii=False) + "\n" for sample in samples))


WRITERS: dict[str, Callable[[Path, list[dict[str, Any]]], None]] = {"parquet": write_parquet, "jsonl": write_jsonl}


@pytest.fixture(params=WRITERS)
def kind(request: pytest.FixtureRequest, tmp_path: Path) -> str:
    """A kind of files; `part-0.*` to `part-2.*` in the folder hold `SAMPLES`."""
    for number, (first, last) in enumerate(itertools.pairwise(CUTS)):
        WRITERS[request.param](tmp_path / f"part-{number}.{request.param}", SAMPLES[first:last])
    return str(request.param)


def data(kind: str, files: Any, **more: Any) -> DataConfig:
    return DataConfig(**{kind: files, "input": "x", "target": "y", **more})


def batches(spec: DataConfig, dataset: Any, fields: tuple[str, ...]) -> list[dict[str, Tensor]]:
    batching, order = Microbatches(2, 0, 8), SampleOrder(3, len(dataset))
    made = MicrobatchLoader(dataset, spec, order, batching, seed=3, fields=fields)
    try:
        return [made.get(step, microbatch) for step in range(8) for microbatch in range(2)]
    finally:
        made.close()


def same(one: list[dict[str, Tensor]], other: list[dict[str, Tensor]]) -> bool:
    return all(
        a.keys() == b.keys() and all(torch.equal(a[k], b[k]) and a[k].dtype == b[k].dtype for k in a)
        for a, b in zip(one, other, strict=True)
    )


def test_several_files_are_one_data_set_in_the_order_of_their_names(kind: str, tmp_path: Path):
    names = [str(tmp_path / f"part-{number}.{kind}") for number in (2, 0, 1)]
    for files in (f"{tmp_path}/*.{kind}", f"{tmp_path}/part-{{0..2}}.{kind}", names, [f"{tmp_path}/part-[01].*", names[0]]):
        found = make_dataset(data(kind, files))
        assert [found[index] for index in range(len(found))] == SAMPLES


@pytest.mark.parametrize(
    ("more", "fields"),
    [({}, ("x", "y")), ({"pad": {"multiple": 4}}, ("ids", "y")), ({"collate": longest}, ("ids", "labels"))],
)
def test_batches_are_those_of_a_list_of_the_same_samples(kind: str, more: Any, fields: tuple[str, ...], tmp_path: Path):
    samples = [sample | {"labels": sample["ids"]} for sample in SAMPLES]
    WRITERS[kind](tmp_path / "all", samples)
    spec = data(kind, tmp_path / "all", **more)
    plain = DataConfig(function=lambda: samples, input="x", target="y", **more)
    assert same(batches(spec, make_dataset(spec), fields), batches(plain, samples, fields))


@pytest.mark.ci
def test_data_processes_read_the_same(kind: str, tmp_path: Path):
    spec = data(kind, f"{tmp_path}/*.{kind}")
    assert same(
        batches(spec.replace(processes=2), make_dataset(spec), ("x", "y")), batches(spec, make_dataset(spec), ("x", "y"))
    )


def test_files_on_storage_are_read_where_they_are(kind: str, tmp_path: Path):
    (tmp_path / "deep/er").mkdir(parents=True)
    for number in (1, 2):
        os.rename(tmp_path / f"part-{number}.{kind}", tmp_path / f"deep/er/part-{number}.{kind}")
    place = f"filesystem://{register_filesystem(SubTreeFileSystem(str(tmp_path.parent), LocalFileSystem()))}/{tmp_path.name}"
    for files in (f"{place}/**/part-*.{kind}", [f"{place}/part-0.{kind}", f"file://{tmp_path}/deep/*/*"]):
        found = make_dataset(data(kind, files))
        assert sorted(found[index]["title"] for index in range(len(found))) == sorted(one["title"] for one in SAMPLES)


def test_a_data_set_travels_without_what_it_has_read(kind: str, tmp_path: Path):
    found = make_dataset(data(kind, f"{tmp_path}/*.{kind}"))
    assert found[20] == SAMPLES[20]
    again = pickle.loads(pickle.dumps(found))
    assert again[49] == SAMPLES[49] and len(pickle.dumps(found)) < 3000


def test_row_groups_are_read_when_they_are_needed_and_as_many_are_kept_as_there_is_room_for(tmp_path: Path):
    write_parquet(tmp_path / "rows", [{"i": i, "x": [float(i)] * 100} for i in range(1000)], rows=50)
    one = ParquetFiles(tmp_path / "rows")
    assert (one[999]["i"], list(one._groups)) == (999, [19])
    few = ParquetFiles(tmp_path / "rows", cached_bytes=3 * one._groups[19].nbytes)
    kept = 0
    for index in torch.randperm(1000, generator=torch.Generator().manual_seed(0)).tolist():
        assert few[index]["i"] == index
        kept = max(kept, len(few._groups))
        assert few._kept_bytes == sum(group.nbytes for group in few._groups.values()) <= few.cached_bytes
    assert kept == 3 and one.line_about_random_order is None
    assert "in 20 row groups" in str(few.line_about_random_order)
    narrow = ParquetFiles(tmp_path / "rows", columns=["i"])
    assert narrow[700] == {"i": 700} and narrow._groups[14].nbytes < 500


def test_a_random_order_that_reads_row_groups_for_single_samples_is_told(tmp_path: Path):
    write_parquet(tmp_path / "rows", [{"x": [float(i)] * 2, "y": [1.0]} for i in range(1000)], rows=50)
    for shuffle, told in ((True, True), (False, False)):
        given = {"parquet": tmp_path / "rows", "args": {"cached_bytes": 1000}, "shuffle": shuffle}
        assert any("of the samples read 50 rows for one" in line for line in checked(given).notes) is told


def test_parquet_files_and_row_groups_without_rows_are_left_out(tmp_path: Path):
    table = pyarrow.Table.from_pylist(SAMPLES[:9])
    with pyarrow.parquet.ParquetWriter(tmp_path / "part-0.parquet", table.schema) as writer:
        writer.write_table(table.slice(0, 0))
    with pyarrow.parquet.ParquetWriter(tmp_path / "part-1.parquet", table.schema) as writer:
        for part in (table.slice(0, 0), table.slice(0, 5), table.slice(0, 0), table.slice(5)):
            writer.write_table(part)
    found = ParquetFiles(f"{tmp_path}/*.parquet", cached_bytes=1)
    assert [found[index] for index in range(len(found))] == SAMPLES[:9]
    assert "in 2 row groups" in str(found.line_about_random_order)


@pytest.mark.parametrize("text", ["one\ntwo\nthree", "one\r\ntwo\r\nthree\r\n\r\n", "one\ntwo\n" + "three" * 3000 + "\n\n \n"])
@pytest.mark.parametrize("piece", [7, 4 << 20])
def test_lines_are_found_wherever_pieces_end(text: str, piece: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr("raypar.data.json_lines.PIECE_BYTES", piece)
    lines = text.replace("\r", "").strip().split("\n") + ["long" * 2000, "x", "y" * 5000] + [str(i) for i in range(100)]
    end = "\r\n" if "\r" in text else "\n"
    made = "".join(json.dumps({"t": line}) + end for line in lines)
    (tmp_path / "a").write_bytes((made.removesuffix(end) if text.endswith("e") else made + " " * 9 + end).encode())
    found = JsonLines(tmp_path / "a")
    assert [found[index]["t"] for index in range(len(found))] == lines
    assert len(found._indices[0].numbers) < len(lines) / 4


def of_x() -> nn.Module:
    return nn.Sequential(nn.Linear(2, 4), nn.Tanh(), nn.Linear(4, 1))


def checked(given: dict[str, Any]) -> Any:
    settings: dict[str, Any] = {"model": of_x, "loss": nn.functional.mse_loss, "steps": 1, "batch_size": 4, "microbatches": 2}
    return preflight(raypar.Trainer(data=given, **settings).job)


def test_a_file_that_has_changed_under_its_name_is_found_at_a_resume(kind: str, tmp_path: Path):
    def samples(last: float) -> list[dict[str, Any]]:
        return [{"x": [float(i), 1.0], "y": [last if i == 11 else 2.0]} for i in range(12)]

    path = tmp_path / f"train.{kind}"
    digests = []
    for folder, last in (("a", 3.0), ("b", 3.0), ("b", 4.0)):
        (tmp_path / folder).mkdir(exist_ok=True)
        path = tmp_path / folder / f"train.{kind}"
        WRITERS[kind](path, samples(last))
        digests.append(checked({kind: path}).data_digest)
    assert digests[0] == digests[1] != digests[2]
    manifest: Any = SimpleNamespace(contract={DATA_DIGEST: digests[0]}, checkpoint="c")
    check_data_digest(manifest, digests[1])
    check_data_digest(SimpleNamespace(contract={}, checkpoint="c"), digests[2])  # type: ignore[arg-type]
    with pytest.raises(CheckpointError, match="changed under the same names\n  cure: give the files as they were"):
        check_data_digest(manifest, digests[2])
    dataset = make_dataset(data(kind, path))
    WRITERS[kind](path, samples(3.0) * 2)
    with pytest.raises(InputError, match=r"train\.\w+ has [\d,]+ bytes, and it had [\d,]+\n  cure: do not change"):
        dataset[0]


def test_a_job_file_names_files_and_its_contract_the_data_set():
    text = "steps: 1\nbatch_size: 2\nmicrobatches: 1\nmodel: m:f\nloss: m:l\n"
    spec: Job = parse_job(text + "data: {jsonl: a.jsonl}\nvalidation: {parquet: [b, c], args: {columns: [x]}}\n")
    assert parse_job(spec.to_yaml()) == spec
    written = contract_of_job(spec)
    assert written["data"]["function"] == "raypar.data.json_lines:JsonLines"  # type: ignore[index,call-overload]
    assert written["data"]["args"] == {"files": ["a.jsonl"]}  # type: ignore[index,call-overload]
    assert spec.validation_data.args == {"files": ("b", "c"), "columns": ["x"]}
    other = parse_job(spec.to_yaml().replace("jsonl: [a.jsonl]", "jsonl: [d.jsonl]"))
    assert other.data.args == {"files": ("d.jsonl",)}
    for data in ("{jsonl: a, parquet: b}", "{jsonl: a, function: m:f}"):
        with pytest.raises(ConfigError, match=r"(parquet|jsonl): .* are given together, and either of them is the data set"):
            parse_job(text + f"data: {data}\n")


def test_braces_stand_for_numbers_and_names():
    assert list(expand_braces("a-{08..11}.tar")) == ["a-08.tar", "a-09.tar", "a-10.tar", "a-11.tar"]
    assert list(expand_braces("{x,y}/{0..1}")) == ["x/0", "x/1", "y/0", "y/1"]
    assert list(expand_braces("{x}")) == ["{x}"]


def refused(given: dict[str, Any]) -> str:
    with pytest.raises(InputError) as found:
        checked(given)
    what, _, cure = str(found.value).partition("\n  cure: ")
    assert cure and "\n" not in what, "two lines"
    return f"{what} | {cure}"


def test_what_cannot_be_read_is_refused_before_the_run(tmp_path: Path):
    good = [{"x": [1.0, 2.0], "y": [1.0]}] * 8
    write_parquet(tmp_path / "a.parquet", good)
    write_parquet(tmp_path / "b.parquet", [{"x": [1.0, 2.0], "y": 1}] * 8)
    write_parquet(tmp_path / "empty.parquet", [])
    (tmp_path / "cut.parquet").write_bytes((tmp_path / "a.parquet").read_bytes()[:-9])
    write_jsonl(tmp_path / "a.jsonl", good)
    (tmp_path / "bad.jsonl").write_text('{"x": [1, 2], "y": [1]}\n{"x": [1,\n')
    (tmp_path / "blank.jsonl").write_text('\n{"x": [1, 2], "y": [1]}\n')
    (tmp_path / "list.jsonl").write_text("[1, 2]\n")
    (tmp_path / "none.jsonl").write_text("\n\n")
    (tmp_path / "z.jsonl").write_bytes(b"\x1f\x8b\x08")

    def of(kind: str, name: Any, **more: Any) -> str:
        names = [str(tmp_path / one) for one in name] if isinstance(name, list) else str(tmp_path / name)
        return refused({kind: names, "shuffle": False, **more})

    assert "no Parquet file is named" in (text := of("parquet", "c.parquet")) and "are a.jsonl, a.parquet, b.parquet" in text
    assert "no Parquet file is named" in of("parquet", "nothing-*.parquet")
    assert "is a folder | name the files in it" in of("parquet", "")
    assert "a.parquet is named twice" in of("parquet", ["a.parquet", "*.parquet"])
    assert "a.parquet is named twice" in of("parquet", ["a.parquet", "./a.parquet"])
    assert "b.parquet: column 'y' is of type int64, and in" in (text := of("parquet", ["a.parquet", "b.parquet"]))
    assert "a.parquet it is of type list<element: double>" in text
    assert "cut.parquet: " in of("parquet", "cut.parquet") and "a.jsonl: " in of("parquet", "a.jsonl")
    assert "is empty" in of("parquet", "empty.parquet")
    assert "has no column 'z' | it has x, y" in of("parquet", "a.parquet", args={"columns": ["x", "z"]})
    assert "has no such argument" in of("parquet", "a.parquet", args={"column": ["x"]})
    assert "line 2 of " in (text := of("jsonl", "bad.jsonl")) and "is not JSON" in text
    assert "line 1 of " in (text := of("jsonl", "blank.jsonl")) and "it is blank" in text
    assert "is no object: [1, 2]" in of("jsonl", "list.jsonl")
    assert "has no lines" in of("jsonl", "none.jsonl")
    assert "is compressed (gzip)" in of("jsonl", "z.jsonl")
    assert "http://host/a.jsonl" in refused({"jsonl": "http://host/a.jsonl"})
    assert "stands for 10,000,000 numbers" in refused({"jsonl": "a-{0..9999999}"})
