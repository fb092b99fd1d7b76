"""`data: {tar: ...}`: shards as webdataset writes them are streams, each sample read once, and nothing is unpickled."""

from __future__ import annotations

import io
import json
import pickle
import tarfile
import types
from collections.abc import Mapping
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import numpy
import pytest
import torch
from pyarrow.fs import LocalFileSystem, SubTreeFileSystem
from torch import nn

import raypar
from raypar.data.tar_shards import TarShards, split_name
from raypar.errors import CheckpointError, InputError
from raypar.job.contract import DATA_DIGEST
from raypar.plan import ParallelPlan
from raypar.storage.filesystems import register_filesystem
from raypar.torch_compat.worker_info import seen_as_worker
from raypar.worker.checkpoint.check_job_changes import check_data_digest
from raypar.worker.data.mixture_dataset import StreamMixture
from raypar.worker.data.stream_source import StreamSource
from raypar.worker.data.user_dataset import content_digest
from raypar.worker.job_preflight import preflight
from raypar.worker.layer_graph_of_job import make_layer_graph
from raypar.worker.run_in_one_process import OneProcessRun

pytestmark = pytest.mark.part(4)


def packed(value: object) -> bytes:
    if isinstance(value, bytes):
        return value
    if isinstance(value, numpy.ndarray):
        numpy.save(file := io.BytesIO(), value)
        return file.getvalue()
    return (value if isinstance(value, str) else json.dumps(value)).encode()


def write_tar(path: Path, members: Mapping[str, object] | list[tuple[str, object]], **more: Any) -> None:
    with tarfile.open(path, "w", **more) as tar:
        for name, value in members.items() if isinstance(members, Mapping) else members:
            info, content = tarfile.TarInfo(name), packed(value)
            info.size = len(content)
            tar.addfile(info, io.BytesIO(content))


def members(index: int) -> dict[str, object]:
    x, y = numpy.array([index % 7 / 7, index % 5 / 5], numpy.float32), [index % 3 / 3]
    return {f"a/{index:04}.x.npy": x, f"a/{index:04}.json": {"y": y, "id": index}, f"a/{index:04}.Cls": str(index % 3)}


@pytest.fixture
def shards(tmp_path: Path) -> str:
    """Four shards of 6, 5, 4 and 3 samples."""
    begin = 0
    for shard, count in enumerate((6, 5, 4, 3)):
        found = [pair for index in range(begin, begin + count) for pair in members(index).items()]
        write_tar(tmp_path / f"s-{shard:02}.tar", found)
        begin += count
    return f"{tmp_path}/s-{{00..03}}.tar"


def numbers(dataset: TarShards, stream: int = 0, streams: int = 1) -> list[int]:
    with seen_as_worker(stream, streams, 0, dataset):
        return [sample["json"]["id"] for sample in dataset]  # type: ignore[index]


def test_members_with_one_basename_are_a_sample(shards: str):
    dataset = TarShards(shards)
    first = next(iter(dataset))
    assert list(first) == ["__key__", "x.npy", "json", "cls"] and (first["__key__"], first["cls"]) == ("a/0000", 0)
    assert isinstance(first["x.npy"], numpy.ndarray) and first["json"] == {"y": [0.0], "id": 0}
    assert numbers(dataset) == list(range(18)) and dataset.num_shards == 4
    assert [numbers(dataset, stream, 2) for stream in range(2)] == [[*range(6), *range(11, 15)], [*range(6, 11), 15, 16, 17]]
    assert list(next(iter(TarShards(shards, fields=["CLS"])))) == ["__key__", "cls"]
    assert next(iter(TarShards(shards, decode=False)))["cls"] == b"0"


def test_names_are_divided_as_webdataset_does():
    assert [split_name(name) for name in ("a.b/c.seg.PNG", "x.txt", "dir/none", "./_.cls")] == [
        ("a.b/c", "seg.png"),
        ("x", "txt"),
        ("dir/none", ""),
        ("./_", "cls"),
    ]
    assert split_name("a/._x.jpg")[1] == ""


def test_the_state_leads_to_the_next_sample(shards: str, tmp_path: Path):
    write_tar(tmp_path / "s-01.tar", {f"{'long' * 60}/{i:04}.json": {"id": i} for i in range(6, 11)}, format=tarfile.PAX_FORMAT)
    dataset = TarShards(shards, fields=["json"])
    states = [json.loads(json.dumps(dataset.state_dict())) for _ in dataset]
    for given, state in enumerate(states):
        dataset.set_epoch(0)
        dataset.load_state_dict(state)
        assert [sample["json"]["id"] for sample in dataset] == list(range(given + 1, 18))  # type: ignore[index]
    assert numbers(dataset) == list(range(18))


def of_x() -> nn.Module:
    return nn.Sequential(nn.Linear(2, 4), nn.Tanh(), nn.Linear(4, 4), nn.Tanh(), nn.Linear(4, 1))


def job(files: Any, **data: Any) -> Any:
    given = {"tar": files, "input": "x.npy", "target": "json.y", **data}
    settings: dict[str, Any] = {"steps": 9, "batch_size": 8, "microbatches": 4, "model": of_x, "loss": nn.functional.mse_loss}
    return raypar.Trainer(data=given, **settings).job


@pytest.mark.parametrize("data", [{}, {"shuffle_window": 3}, {"args": {"shuffle_shards": True}}, {"streams": 2}])
def test_two_stages_and_two_replicas_have_the_samples_and_bits_of_one_process(data: dict[str, Any], shards: str):
    checked = preflight(job(shards, **data))
    spec, graph = checked.job, checked.graph
    assert spec.data.streams == data.get("streams", 4)
    read = {index: [] for index in range(spec.data.streams)}
    for stream in range(spec.data.streams):
        source = StreamSource(spec.data, stream, spec.data.streams, spec.seed)
        for epoch in range(2):
            source.begin(epoch)
            while found := source.read():
                read[stream].append(found[0]["json"]["id"])  # type: ignore[index]
        assert source.keeps_place
    assert sorted(index for ids in read.values() for index in ids) == sorted([*range(18)] * 2)
    graph = make_layer_graph(spec)
    with OneProcessRun(spec, ParallelPlan.mesh(pp=2, dp=2, layers=len(graph.layers)), "1f1b", graph=graph) as run:
        found_losses = [run.step(step)[0].loss for step in range(spec.steps)]
        other = run.parameters()
    with OneProcessRun(spec, ParallelPlan.mesh(layers=len(graph.layers)), "1f1b", graph=graph) as run:
        assert [run.step(step)[0].loss for step in range(spec.steps)] == found_losses
        for name, (value,) in run.parameters().items():
            assert all(torch.equal(copy, value) for copy in other[name]), name


def test_shards_on_storage_are_read_where_they_are(shards: str, tmp_path: Path):
    place = f"filesystem://{register_filesystem(SubTreeFileSystem(str(tmp_path), LocalFileSystem()))}"
    assert numbers(TarShards(f"{place}/s-*.tar")) == list(range(18))


def test_other_content_of_the_same_size_is_found_at_a_resume_and_checkpoints_of_before_are_read(tmp_path: Path):
    def digest(folder: str, value: int, **more: Any) -> str:
        (tmp_path / folder).mkdir(exist_ok=True)
        write_tar(tmp_path / folder / "s-0.tar", [(f"{index}.json", {"id": index}) for index in range(50)])
        write_tar(tmp_path / folder / "s-1.tar", [(f"{index}.json", {"id": value}) for index in range(50)])
        return content_digest(TarShards(f"{tmp_path}/{folder}/*.tar")) or ""

    one, same, other = digest("a", 1), digest("b", 1), digest("b", 2)
    sizes, _, pieces = one.partition("+")
    assert one == same != other and other.startswith(f"{sizes}+") and pieces
    for then, now, changed in ((one, same, False), (sizes, other, False), (one, other, True), ("0" * 16, one, True)):
        manifest: Any = types.SimpleNamespace(contract={DATA_DIGEST: then}, checkpoint="c")
        with pytest.raises(CheckpointError, match="changed under the same names") if changed else nullcontext():
            check_data_digest(manifest, now)
    mixed = [StreamMixture([], [found, None]).raypar_content_digest for found in (sizes, one, other)]
    assert len(set(mixed)) == 3 and len({text.partition("+")[0] for text in mixed}) == 1


def test_a_random_order_of_shards_is_another_in_each_epoch_and_each_sample_comes_once(shards: str):
    source = StreamSource(job(shards, args={"shuffle_shards": True}).data, 0, 1, 3)
    found = []
    for epoch in (0, 1, 0):
        source.begin(epoch)
        found.append([])
        while sample := source.read():
            found[-1].append(sample[0]["json"]["id"])  # type: ignore[index]
    assert found[0] == found[2] != found[1] and sorted(found[1]) == list(range(18))


class Touch:
    def __reduce__(self) -> Any:
        return (Path.touch, (Path("unpickled"),))


def refused(members: Any, tmp_path: Path, name: str = "bad.tar", **more: Any) -> str:
    if members is not None:
        write_tar(tmp_path / name, members)
    with pytest.raises(InputError) as found:
        preflight(job(str(tmp_path / name), **more))
    what, _, cure = str(found.value).partition("\n  cure: ")
    assert cure and "\n" not in what, "two lines"
    return f"{what} | {cure}"


def test_what_would_be_unpickled_is_refused_by_name(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.chdir(tmp_path)
    for kind in ("pyd", "pkl", "pickle", "pth", "pt", "feature.PYD"):
        text = refused({f"0.{kind}": pickle.dumps(Touch()), **members(1)}, tmp_path)
        assert f"member 0.{kind} of " in text and "would have to be unpickled, which runs what the file says | write" in text
    numpy.save(file := io.BytesIO(), numpy.array([Touch()]), allow_pickle=True)
    assert "member 0.npy of " in (text := refused({"0.npy": file.getvalue()}, tmp_path)) and "allow_pickle=False" in text
    assert not Path("unpickled").exists()
    write_tar(tmp_path / "some.tar", {"0.pyd": pickle.dumps(Touch()), "0.json": {"id": 7}})
    assert numbers(TarShards("some.tar", fields=["json"])) == [7] and not Path("unpickled").exists()


def test_what_cannot_be_read_is_refused_before_the_run(tmp_path: Path, shards: str):
    good = dict(pair for index in range(4) for pair in members(index).items())
    write_tar(tmp_path / "whole.tar", good)
    whole = (tmp_path / "whole.tar").read_bytes()
    for end in (whole.rstrip(b"\0").__len__() // 512 * 512 + 512, 1100, 512 * 3, 100):
        (tmp_path / "cut.tar").write_bytes(whole[:end])
        assert "cut.tar is cut off, damaged or none" in refused(None, tmp_path, "cut.tar", streams=1)
    write_tar(tmp_path / "z.tar.gz", good)
    with tarfile.open(tmp_path / "z.tar.gz", "w:gz"):
        pass
    assert "is compressed | decompress it" in refused(None, tmp_path, "z.tar.gz")
    with tarfile.open(tmp_path / "link.tar", "w") as tar:
        info = tarfile.TarInfo("0.txt")
        info.type, info.linkname = tarfile.SYMTYPE, "/etc/hostname"
        tar.addfile(info)
    assert "member 0.txt of " in (text := refused(None, tmp_path, "link.tar")) and "is no regular file" in text
    assert "has two members 0.cls in one sample" in refused([("0.cls", "1"), ("0.cls", "2")], tmp_path)
    assert "cannot be read as cls: invalid literal for int()" in refused({"0.cls": "cat"}, tmp_path)
    assert "cannot be read as json" in refused({"0.json": b"{"}, tmp_path)
    assert "cannot be read as txt" in refused({"0.txt": b"\xff"}, tmp_path)
    assert "no tar file is named" in refused(None, tmp_path, "t-{0..3}.tar")
    assert "data.streams is 3, and data set raypar.data.tar_shards:TarShards has 1 shard" in refused(good, tmp_path, streams=3)
    assert "data.shuffle is indexed, and data set" in refused(good, tmp_path, shuffle="indexed")


def test_images_are_decoded_where_pillow_is_there(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    """Pillow's two names that are used stand in for it."""
    write_tar(tmp_path / "a.tar", {"0.png": b"gray", "1.jpeg": b"rgb"})
    monkeypatch.setitem(__import__("sys").modules, "PIL.Image", None)
    monkeypatch.setitem(__import__("sys").modules, "PIL", None)
    text = refused(None, tmp_path, "a.tar")
    assert "member 0.png of " in text and "is an image, and PIL" in text and "not installed | pip install pillow" in text
    pixels = {b"gray": numpy.zeros((4, 5), numpy.uint8), b"rgb": numpy.ones((4, 5, 3), numpy.uint8)}
    stand_in = types.SimpleNamespace(open=lambda file: pixels[file.read()])
    monkeypatch.setitem(__import__("sys").modules, "PIL", types.SimpleNamespace(Image=stand_in))
    monkeypatch.setitem(__import__("sys").modules, "PIL.Image", stand_in)
    gray, rgb = TarShards(tmp_path / "a.tar")
    assert gray["png"].shape == (1, 4, 5) and rgb["jpeg"].shape == (3, 4, 5)  # type: ignore[attr-defined]
