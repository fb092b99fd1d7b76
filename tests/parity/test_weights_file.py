"""Weights files: every form reads the same values by name and slice; what does not fit the model is listed, never guessed."""

import ast
import json
import math
import os
import re
import signal
import subprocess
import sys
from collections.abc import Collection, Iterator, Mapping
from pathlib import Path

import pytest
import torch
import yaml
from fsspec.implementations.local import LocalFileSystem
from helpers import checkpoint_folders as checkpoint_files
from pyarrow.fs import FSSpecHandler, PyFileSystem
from safetensors.torch import save_file, save_model
from torch import Tensor, nn

from raypar.cli import main
from raypar.errors import CheckpointError, ConfigError
from raypar.job import InitFromConfig
from raypar.plan.shard_ranges import merge_ranges
from raypar.storage.checkpoint_store import open_checkpoint
from raypar.storage.filesystems import uri_of_filesystem_object
from raypar.worker.checkpoint import checkpoint_files as checkpoint_store_files
from raypar.worker.checkpoint.checkpoint_files import BUFFER, PARAMETER, TensorSlices
from raypar.worker.checkpoint.manifest import manifest_checksum
from raypar.worker.checkpoint.state_key import StateKey, optimizer_key
from raypar.worker.pretrained.initial_values import WeightsFromFile
from raypar.worker.pretrained.open_weights import open_weights, resolve_weights_source
from raypar.worker.pretrained.weights_file import StoredTensor
from raypar.worker.pretrained.weights_matching import match_weights

SHAPES = {"embed.weight": (7, 4), "up.weight": (6, 4), "up.bias": (6,), "scale": (), "cube": (3, 5, 2)}


def weights(seed: int = 0) -> dict[str, Tensor]:
    generator = torch.Generator().manual_seed(seed)
    return {name: torch.randn(shape, generator=generator) for name, shape in SHAPES.items()}


def sharded(folder: Path, tensors: Mapping[str, Tensor], index: str = "model.safetensors.index.json") -> Path:
    """What Hugging Face writes: tensors over two files, and which is where."""
    folder.mkdir(exist_ok=True)
    names = sorted(tensors)
    parts = {"model-00001-of-00002.safetensors": names[:2], "model-00002-of-00002.safetensors": names[2:]}
    for file, mine in parts.items():
        save_file({name: tensors[name] for name in mine}, folder / file, metadata={"format": "pt"})
    where = {name: file for file, mine in parts.items() for name in mine}
    (folder / index).write_text(json.dumps({"metadata": {"total_size": 1}, "weight_map": where}))
    return folder


def saved(root: Path, done: int, tensors: Mapping[str, Tensor]) -> Path:
    """A checkpoint of two shards: matrices cut along dim 1 in two spans each, `up.bias` a buffer, `embed.weight` tied."""
    aside = checkpoint_files.create_checkpoint(root, done)
    records = []
    for shard in range(2):
        held: dict[tuple[str, StateKey], Tensor] = (
            {("up.weight", optimizer_key("exp_avg")): torch.full((shard + 1,), 9.0)} if shard else {}
        )
        slices = {}
        for name, tensor in tensors.items():
            kind = BUFFER if name == "up.bias" else PARAMETER
            if tensor.dim() == 2:
                spans = (((0, 1), (2, 3)), ((1, 2), (3, 4)))[shard]
                slices[name, kind] = TensorSlices(tuple(tensor.shape), 1, spans)
                held[name, kind] = torch.cat([tensor[:, a:b] for a, b in spans], 1)
            elif shard == 0:
                held[name, kind] = tensor
        ties = {"embed.weight": ["head.weight"]}
        records.append(checkpoint_files.write_shard(aside, f"worker_{shard:04d}.safetensors", held, None, slices, ties))
    return checkpoint_files.commit_checkpoint(aside, records, steps_done=done, contract={})


FORMS = ("file", "pt", "index", "index by its name", "folder of one file", "checkpoint", "run", "export", "export.pt")


def form(what: str, folder: Path, tensors: Mapping[str, Tensor]) -> Path:
    """`tensors` in one of the forms that `init_from` takes."""
    if what == "file":
        save_file(dict(tensors), folder / "model.safetensors")
        return folder / "model.safetensors"
    if what == "pt":
        torch.save(dict(tensors), folder / "model.pt")
        return folder / "model.pt"
    if what.startswith("index"):
        path = sharded(folder / "hub", tensors)
        return path / "model.safetensors.index.json" if what == "index by its name" else path
    if what == "folder of one file":
        (folder / "one").mkdir()
        save_file(dict(tensors), folder / "one/model.safetensors")
        (folder / "one/config.json").write_text("{}")
        return folder / "one"
    path = saved(folder / "run/checkpoints", 10, tensors)
    if what == "checkpoint":
        return path
    if what == "run":
        return folder / "run"
    out = folder / ("out.pt" if what == "export.pt" else "out.safetensors")
    assert main(["export", str(folder / "run"), "--out", str(out)]) == 0
    return out


# -- reading -----------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("what", FORMS)
def test_every_form_gives_names_shapes_and_values(what: str, tmp_path: Path):
    tensors = weights()
    with open_weights(form(what, tmp_path, tensors)) as file:
        tied = {"head.weight"} if what in ("checkpoint", "run", "export", "export.pt") else set()
        assert set(file.names) == set(tensors) | tied and set(file.aliases) == tied
        for name, tensor in tensors.items():
            assert file.names[name] == StoredTensor(tuple(tensor.shape), "float32")
            assert torch.equal(file.read(name, torch.float32), tensor)
        for name in tied:
            assert torch.equal(file.read(name, torch.float32), tensors["embed.weight"])


@pytest.mark.parametrize("what", ["file", "pt", "checkpoint"])
def test_a_slice_is_that_slice_of_the_whole(what: str, tmp_path: Path):
    tensors = weights()
    with open_weights(form(what, tmp_path, tensors)) as file:
        for name, tensor in tensors.items():
            for dim, size in enumerate(tensor.shape):
                for spans in map(merge_ranges, [((0, 1),), ((1, size),), ((0, size),), ((0, 1), (2, size)), ()]):
                    expected = torch.cat([tensor.narrow(dim, a, b - a) for a, b in spans or ((0, 0),)], dim)
                    found = file.read(name, torch.float32, (dim, spans))
                    assert torch.equal(found, expected) and found.is_contiguous(), (name, dim, spans)


def test_a_parameter_is_read_into_where_it_is(tmp_path: Path):
    with open_weights(form("file", tmp_path, weights())) as file:
        parameters = {name: nn.Parameter(torch.full(shape, math.nan).double()) for name, shape in SHAPES.items()}
        places = {name: parameter.data_ptr() for name, parameter in parameters.items()}
        for name, parameter in parameters.items():
            file.read_into(parameter, name)
            assert torch.equal(parameter, weights()[name].double()) and parameter.data_ptr() == places[name]
        half = torch.empty(3, 5, 1)
        file.read_into(half, "cube", (2, ((1, 2),)))
        assert torch.equal(half, weights()["cube"][:, :, 1:])


def test_slices_of_tensors_larger_than_one_read_are_right(tmp_path: Path):
    """9 MiB by short rows, by long rows, and along the first dim: three ways through the file."""
    for shape in ((36_864, 64), (3, 786_432), (3, 1024, 768), (2, 1_179_648)):
        tensor = torch.arange(math.prod(shape)).view(shape).float()
        save_file({"w": tensor}, tmp_path / "w.safetensors")
        with open_weights(tmp_path / "w.safetensors") as file:
            assert torch.equal(file.read("w", torch.float32), tensor)
            ends = ((5, 7), (shape[-1] - 1, shape[-1]))  # of rows that are longer than what is read at once, too
            thirds = [
                (dim, merge_ranges([(0, size // 3), (size - size // 3, size)])) for dim, size in enumerate(shape) if size > 2
            ]
            for dim, spans in [*thirds, (len(shape) - 1, ends)]:
                expected = torch.cat([tensor.narrow(dim, a, b - a) for a, b in spans], dim)
                assert torch.equal(file.read("w", torch.float32, (dim, spans)), expected)


@pytest.mark.parametrize("stored", [torch.bfloat16, torch.float16, torch.float64, torch.float32])
@pytest.mark.parametrize("what", ["file", "pt"])
def test_floating_point_is_cast_as_torch_casts_it(stored: torch.dtype, what: str, tmp_path: Path):
    tensors = {name: tensor.to(stored) for name, tensor in weights().items()}
    with open_weights(form(what, tmp_path, tensors)) as file:
        for wanted in (torch.float32, torch.float64, torch.bfloat16):
            for name, tensor in tensors.items():
                found = file.read(name, wanted)
                assert found.dtype == wanted and torch.equal(found, tensor.to(wanted))
        found = file.read("cube", torch.float64, (1, ((1, 3),)))
        assert torch.equal(found, tensors["cube"][:, 1:3].double())


def test_integers_and_booleans_are_read_as_they_are(tmp_path: Path):
    tensors = {"n": torch.tensor(3), "mask": torch.tensor([[True, False], [False, True]]), "ids": torch.arange(5).int()}
    for what in ("file", "pt"):
        with open_weights(form(what, tmp_path, tensors)) as file:
            for name, tensor in tensors.items():
                assert file.read(name).dtype == tensor.dtype and torch.equal(file.read(name, tensor.dtype), tensor)
            with pytest.raises(CheckpointError, match=r"ids is int32 in .*, not float32"):
                file.read("ids", torch.float32)


def test_a_byte_that_is_no_bool_is_true(tmp_path: Path):
    """PyTorch computes with such a bool as if it were neither."""
    path = form("file", tmp_path, {"mask": torch.tensor([True, False, True])})
    with open(path, "r+b") as opened:
        opened.seek(-3, os.SEEK_END)
        opened.write(bytes([2, 0, 255]))
    with open_weights(path) as file:
        assert file.read("mask").view(torch.uint8).tolist() == [1, 0, 1]


@pytest.mark.parametrize("what", ["file", "pt"])
def test_what_was_read_is_memory_of_its_own(what: str, tmp_path: Path):
    path = form(what, tmp_path, weights())
    with open_weights(path) as file:
        found = file.read("cube", torch.float32)
        found += 1
        assert torch.equal(file.read("cube", torch.float32), weights()["cube"])
    with open(path, "r+b") as opened:
        opened.truncate(0)
    assert torch.equal(found, weights()["cube"] + 1)


def test_a_tensor_stored_once_for_several_names_has_them_all(tmp_path: Path):
    """`safetensors.torch.save_model` keeps one of the names of shared tensors and says in the metadata which are left out."""
    model = nn.Sequential(nn.Linear(3, 3), nn.Linear(3, 3))
    model[1].weight = model[0].weight
    save_model(model, str(tmp_path / "m.safetensors"))
    with open_weights(tmp_path / "m.safetensors") as file:
        assert set(file.names) == {"0.weight", "0.bias", "1.weight", "1.bias"} and len(file.aliases) == 1
        assert torch.equal(file.read("1.weight"), model[0].weight)


def test_a_file_that_is_replaced_is_read_on_and_one_that_is_written_to_is_an_error(tmp_path: Path):
    path = form("file", tmp_path, weights())
    with open_weights(path) as file:
        path.unlink()
        save_file(weights(1), path)
        assert torch.equal(file.read("cube", torch.float32), weights()["cube"])
    with open_weights(path) as file:
        with open(path, "r+b") as opened:
            opened.truncate(path.stat().st_size - 1)
        with pytest.raises(CheckpointError, match="has changed while it was read"):
            file.read("embed.weight", torch.float32)


def test_a_reader_that_maps_files_does_not_survive_a_file_that_is_truncated(tmp_path: Path):
    """Why `safetensors.safe_open` does not read weights (DECISIONS.md, 20). If this fails, look at the library again."""
    path = tmp_path / "weights.safetensors"
    save_file({"w": torch.zeros(1 << 20)}, path)
    code = (
        "import os, sys; from safetensors import safe_open\n"
        "with safe_open(sys.argv[1], 'np') as file:\n"
        "    os.truncate(sys.argv[1], 8192); file.get_slice('w')[1 << 19 :].sum()"
    )
    ended = subprocess.run([sys.executable, "-c", code, str(path)], capture_output=True, timeout=60)
    assert ended.returncode == -signal.SIGBUS, ended


def test_a_run_folder_is_its_last_whole_checkpoint(tmp_path: Path):
    for done in (5, 10):
        saved(tmp_path / "run/checkpoints", done, weights(done))
    assert resolve_weights_source(tmp_path / "run") == (open_checkpoint(tmp_path / "run/checkpoints/step_00000010"), ())
    (tmp_path / "run/checkpoints/step_00000010/worker_0001.safetensors").unlink()
    path, notes = resolve_weights_source(tmp_path / "run")
    assert path.name == "step_00000005" and "skipped step_00000010" in notes[0]
    with open_weights(tmp_path / "run") as file:
        assert torch.equal(file.read("cube"), weights(5)["cube"]) and file.notes == notes
        assert match_weights(file, SHAPES).notes == notes


def test_checksums_are_compared_once_before_workers_open_a_checkpoint(tmp_path: Path):
    path = saved(tmp_path, 5, weights())
    assert resolve_weights_source(path) == (open_checkpoint(path), ())
    with open(path / "worker_0000.safetensors", "r+b") as file:
        file.seek(-1, os.SEEK_END)
        file.write(b"\x01")
    open_weights(path).close()
    with pytest.raises(CheckpointError, match="its checksum is another"):
        resolve_weights_source(path)


@pytest.mark.parametrize("what", ["index", "pt", "checkpoint"])
def test_weights_of_another_training_or_model_have_another_fingerprint(what: str, tmp_path: Path):
    found = []
    for number, tensors in enumerate((weights(), weights(), weights(1), {**weights(), "more": torch.zeros(1)})):
        (tmp_path / str(number)).mkdir()
        with open_weights(form(what, tmp_path / str(number), tensors)) as file:
            found.append(file.fingerprint())
    assert found[0] == found[1] and len(set(found)) == 3


@pytest.mark.parametrize("limit", [1 << 20, 40_000], ids=["whole", "pages"])
@pytest.mark.parametrize("what", ["file", "index", "pt"])
def test_a_digest_of_pieces_finds_a_part_that_was_changed_behind_the_first_bytes(
    what: str, limit: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    """Rows of an embedding of 120 KB: of the last ones every change is found, of a page in between where that is read."""
    monkeypatch.setattr("raypar.worker.pretrained.weights_file.DIGEST_BYTES", limit)
    plain = {**weights(), "large": torch.arange(30_000, dtype=torch.float32).view(300, 100)}
    found, prints = [], []
    for number, row in enumerate((None, None, 299, 170, 100)):
        (tmp_path / str(number)).mkdir()
        tensors = {name: tensor.clone() for name, tensor in plain.items()}
        if row is not None:
            tensors["large"][row, 99] += 1
        with open_weights(form(what, tmp_path / str(number), tensors)) as file:
            found.append(file.digest_of_pieces(tensors))
            prints.append(file.fingerprint())
    assert len(set(prints)) == 1 and found[0] == found[1] != found[2], "the fingerprint has the first 4 KiB of each"
    assert found[3] != found[0] and (found[4] != found[0]) == (limit == 1 << 20)


@pytest.mark.parametrize("limit", [1 << 20, 100], ids=["whole", "pages"])
def test_a_digest_of_pieces_reads_tensors_that_a_checkpoint_has_in_parts(
    limit: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.setattr("raypar.worker.pretrained.weights_file.DIGEST_BYTES", limit)
    found = []
    for number, seed in enumerate((0, 0, 1)):
        (tmp_path / str(number)).mkdir()
        with open_weights(form("checkpoint", tmp_path / str(number), weights(seed))) as file:
            found.append(file.digest_of_pieces(file.names))
            stored = b"".join(file._bytes_at("cube", start, start + 7) for start in range(0, file._nbytes("cube") - 6, 7))
            assert len(stored) > 7 and stored == file._bytes_at("cube", 0, len(stored))
    assert found[0] == found[1] != found[2]


@pytest.mark.full
@pytest.mark.parametrize("stored", ["float32", "bfloat16"])
def test_reading_holds_one_tensor_at_a_time(stored: str, tmp_path: Path):
    """8 tensors of 25 MB as float32: the peak of a new process grows by no more than one and a half of them.

    Each large tensor is a mapping of its own there: the holes that glibc's heap keeps between them are not what is measured.
    """
    rows = 25_000_000 // 4 // 1000
    specs = [(f"w{i}", stored, (rows, 1000)) for i in range(8)]
    piece = torch.zeros(rows, 1000, dtype=getattr(torch, stored))
    checkpoint_files.write_safetensors(tmp_path / "large.safetensors", specs, [piece] * 8)
    code = """
import sys, torch
from raypar.worker.pretrained.open_weights import open_weights
def peak(): return next(int(line.split()[1]) * 1024 for line in open("/proc/self/status") if line.startswith("VmHWM"))
with open_weights(sys.argv[1]) as file:
    torch.zeros(10).to(torch.bfloat16).float()
    before = peak()
    total = 0
    for name in file.names:
        total += file.read(name, torch.float32).numel()
print(total, peak() - before)
"""
    command = [sys.executable, "-c", code, str(tmp_path / "large.safetensors")]
    env = {**os.environ, "MALLOC_MMAP_THRESHOLD_": str(1 << 16)}
    done = subprocess.run(command, capture_output=True, text=True, check=True, timeout=60, env=env)
    total, grown = map(int, done.stdout.split())
    assert total == 8 * rows * 1000 and grown <= 1.5 * 25_000_000, f"{grown / 1e6:.1f} MB"


# -- which files -------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("path", ["hf://gpt2", "https://host/model.safetensors"])
def test_remote_places_are_refused(path: str):
    with pytest.raises(CheckpointError, match=r"local files[\s\S]*download it first"):
        open_weights(path)


def test_on_shared_storage_checkpoints_and_runs_are_read_and_other_files_refused(tmp_path: Path):
    place = uri_of_filesystem_object(PyFileSystem(FSSpecHandler(LocalFileSystem())), str(tmp_path))
    with pytest.raises(CheckpointError, match=r"neither a checkpoint nor a run[\s\S]*local files[\s\S]*download it first"):
        open_weights(f"{place}/model.safetensors")
    begun = checkpoint_store_files.create_checkpoint(f"{place}/run/checkpoints", 3)
    record = checkpoint_store_files.write_shard(begun, "a.safetensors", {("w", PARAMETER): torch.ones(3)})
    last = checkpoint_store_files.commit_checkpoint(begun, [record], steps_done=3, contract={})
    for location in (f"{place}/run", str(last)):
        assert resolve_weights_source(location)[0] == last
        with open_weights(location) as weights:
            assert torch.equal(weights.read("w"), torch.ones(3))


@pytest.mark.parametrize("path", ["gpt2", "openai-community/gpt2"])
def test_a_hub_id_is_refused_with_the_way_to_a_folder(path: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.chdir(tmp_path)
    with pytest.raises(CheckpointError, match=rf"no file or folder '{path}'[\s\S]*hf download {path} --local-dir"):
        open_weights(path)


def test_folders_that_leave_it_open_which_file_is_meant_are_refused(tmp_path: Path):
    def refused(said: str) -> None:
        with pytest.raises(CheckpointError, match=said):
            open_weights(tmp_path)

    refused("holds no weights")
    torch.save(weights(), tmp_path / "pytorch_model.bin")
    refused(r"holds no weights[\s\S]*pytorch_model.bin")
    save_file(weights(), tmp_path / "a.safetensors")
    save_file(weights(), tmp_path / "b.safetensors")
    refused(r"2 safetensors files and no index[\s\S]*a.safetensors")
    sharded(tmp_path, weights(), "one.safetensors.index.json")
    refused("a.safetensors and b.safetensors besides those of its index")
    (tmp_path / "a.safetensors").unlink()
    (tmp_path / "b.safetensors").unlink()
    open_weights(tmp_path).close()
    sharded(tmp_path, weights(), "two.safetensors.index.json")
    refused("2 indices")
    with open_weights(tmp_path / "two.safetensors.index.json") as file:
        assert set(file.names) == set(SHAPES)


def test_things_that_are_no_weights_are_refused(tmp_path: Path):
    (tmp_path / "notes.txt").write_text("hello")
    os.mkfifo(tmp_path / "pipe.safetensors")
    torch.save({"model": weights(), "epoch": 3}, tmp_path / "nested.pt")
    torch.save({"w": nn.Linear(2, 2)}, tmp_path / "code.pt")
    torch.save({"w": torch.zeros(2, 2).to_sparse()}, tmp_path / "sparse.pt")
    (tmp_path / "text.pt").write_text("hello")
    for name, said in {
        "notes.txt": "no weights file",
        "pipe.safetensors": "a FIFO, not a regular file",
        "nested.pt": r"'model' is a dict, not a tensor[\s\S]*torch.save\(found\['model'\]",
        "code.pt": r"cannot be read as a state_dict: it holds other objects than tensors[\s\S]*torch.save\(model.state_dict",
        "sparse.pt": "w is no dense tensor",
        "text.pt": "cannot be read as a state_dict",
    }.items():
        with pytest.raises(CheckpointError, match=said):
            open_weights(tmp_path / name)


HOSTILE = {
    "up": ("../outside.safetensors", "outside of the folder"),
    "absolute": ("/etc/passwd", "outside of the folder"),
    "link": ("link.safetensors", "outside of the folder"),
    "missing": ("model-00009-of-00009.safetensors", "is missing"),
    "pipe": ("pipe.safetensors", "a FIFO, not a regular file"),
    "nul": ("a\0b", "outside of the folder"),
    "number": (3, "weight_map"),
    "empty": ("", "outside of the folder"),
    "long": ("x" * 5000, "cannot read"),
}


@pytest.mark.parametrize("what", HOSTILE)
def test_an_index_leads_to_files_of_its_folder_only(what: str, tmp_path: Path):
    save_file(weights(), tmp_path / "outside.safetensors")
    folder = sharded(tmp_path / "hub", weights())
    (folder / "link.safetensors").symlink_to(tmp_path / "outside.safetensors")
    os.mkfifo(folder / "pipe.safetensors")
    index = json.loads((folder / "model.safetensors.index.json").read_text())
    index["weight_map"]["cube"], said = HOSTILE[what]
    (folder / "model.safetensors.index.json").write_text(json.dumps(index))
    with pytest.raises(CheckpointError, match=said):
        open_weights(folder / "model.safetensors.index.json")


def test_the_links_of_a_hub_cache_are_followed(tmp_path: Path):
    """Its snapshots are folders of links to `blobs` beside them."""
    repo = tmp_path / "models--a--b"
    (repo / "blobs").mkdir(parents=True)
    (repo / "snapshots").mkdir()
    folder = sharded(repo / "snapshots/0123abcd", weights())
    for number, path in enumerate(sorted(folder.iterdir())):
        path.rename(repo / f"blobs/{number}")
        path.symlink_to(f"../../blobs/{number}")
    with open_weights(folder) as file:
        assert torch.equal(file.read("cube"), weights()["cube"])


@pytest.mark.parametrize(
    "text, said",
    [
        ("{", "is no index"),
        ("[]", "weight_map"),
        ('{"weight_map": {}}', "weight_map"),
        ('{"weight_map": {"a": "x", "a": "y"}}', "twice"),
        ("[" * 100_000, "is no index"),
        ("\xff", "is no index"),
    ],
)
def test_a_damaged_index_is_refused(text: str, said: str, tmp_path: Path):
    path = tmp_path / "model.safetensors.index.json"
    path.write_bytes(text.encode("latin-1"))
    with pytest.raises(CheckpointError, match=said):
        open_weights(path)


def test_an_index_and_its_files_must_agree(tmp_path: Path):
    folder = sharded(tmp_path / "hub", weights())
    path = folder / "model.safetensors.index.json"
    index = json.loads(path.read_text())
    del index["weight_map"]["cube"]
    path.write_text(json.dumps(index))
    with pytest.raises(CheckpointError, match="does not name 1 tensor of its files: cube"):
        open_weights(folder)
    index["weight_map"] |= {"cube": "model-00001-of-00002.safetensors", "more": "model-00001-of-00002.safetensors"}
    path.write_text(json.dumps(index))
    with pytest.raises(CheckpointError, match="promises 1 tensor that its files do not have: more in model-00001"):
        open_weights(folder)


def test_an_index_of_absurd_size_is_not_read(tmp_path: Path):
    path = tmp_path / "model.safetensors.index.json"
    with open(path, "wb") as file:
        file.truncate(1 << 40)
    with pytest.raises(CheckpointError, match=r"1,099,511,627,776 bytes"):
        open_weights(path)


@pytest.mark.parametrize(
    "damage", ["gap", "overlap", "outside", "other shape", "elsewhere", "no such key", "no dims", "a file from elsewhere"]
)
def test_a_checkpoint_whose_slices_do_not_make_the_tensor_is_refused(damage: str, tmp_path: Path):
    path = saved(tmp_path, 10, weights())
    body = json.loads((path / "manifest.json").read_text())
    del body["sha256"]
    entries = [e for e in body["entries"] if (e["name"], e["kind"]) == ("up.weight", PARAMETER.kind)]
    if damage == "gap":
        body["entries"].remove(entries[1])
    elif damage == "overlap":
        entries[1]["slice"] = entries[0]["slice"]
    elif damage == "outside":
        entries[3]["slice"][1] = [4, 5]
    elif damage == "other shape":
        entries[0]["shape"] = [6, 5]
    elif damage == "elsewhere":
        entries[0]["file"] = "../../etc/passwd"
    elif damage == "no such key":
        entries[0]["key"] = "nothing"
    elif damage == "no dims":
        entries[0]["slice"] = []
    elif damage == "a file from elsewhere":
        (path / "worker_0001.safetensors").write_bytes((path / "worker_0000.safetensors").read_bytes())
    (path / "manifest.json").write_text(json.dumps({**body, "sha256": manifest_checksum(body)}))
    with pytest.raises(CheckpointError, match=r"manifest.json is damaged|is not what manifest.json says"):
        open_weights(path)


# -- what fits the model -----------------------------------------------------------------------------------------------------


def stored(tmp_path: Path, tensors: Mapping[str, Tensor]) -> Path:
    save_file(dict(tensors), tmp_path / "F.safetensors")
    return tmp_path / "F.safetensors"


def test_a_file_that_fits_is_matched_name_by_name(tmp_path: Path):
    with open_weights(stored(tmp_path, weights())) as file:
        found = match_weights(file, SHAPES)
    assert found.names == {name: name for name in SHAPES} and found.missing == () and found.notes == ()


def test_differences_are_listed_with_counts(tmp_path: Path):
    tensors = {**weights(), "cube": torch.zeros(3, 2), "n": torch.tensor(1.0)} | {f"x{i}": torch.zeros(1) for i in range(7)}
    wanted = {**SHAPES, "n": ()} | {f"y{i}": (1,) for i in range(6)}
    with open_weights(stored(tmp_path, tensors)) as file, pytest.raises(CheckpointError) as caught:
        match_weights(file, wanted, dtypes={"n": "int64"})
    assert caught.value.what.removeprefix(str(tmp_path)) == (
        "/F.safetensors does not fit the model: "
        "6 of the model's 12 tensors are not in the file: y0, y1, y2, y3, y4 and 1 more; "
        "7 of the file's 13 tensors are not in the model: x0, x1, x2, x3, x4 and 2 more; "
        "1 has another shape: cube is [3, 5, 2] in the model and [3, 2] in the file; "
        "1 has values of another kind: n is int64 in the model and float32 in the file"
    )


@pytest.mark.parametrize(
    "there, wanted, form",
    [
        ("module.{}", "{}", '{"path": "F", "strip_prefix": "module."}'),
        ("_orig_mod.module.{}", "{}", '{"path": "F", "strip_prefix": "_orig_mod.module."}'),
        ("{}", "transformer.{}", '{"path": "F", "add_prefix": "transformer."}'),
        ("transformer.{}", "model.{}", '{"path": "F", "strip_prefix": "transformer.", "add_prefix": "model."}'),
    ],
)
def test_names_that_differ_by_a_prefix_are_refused_with_the_line_that_reads_them(
    there: str, wanted: str, form: str, tmp_path: Path
):
    shapes = {wanted.format(name): shape for name, shape in SHAPES.items()}
    with open_weights(stored(tmp_path, {there.format(name): tensor for name, tensor in weights().items()})) as file:
        with pytest.raises(CheckpointError) as caught:
            match_weights(file, shapes)
        value = form.replace("F", str(file.path))
        assert caught.value.cure == f"its names differ by a prefix: set init_from to {value}"
        settings = ast.literal_eval(value)
        assert settings == yaml.safe_load(value), "one text for a job file and for Trainer's argument"
        found = match_weights(file, shapes, source=InitFromConfig(**settings))
        assert found.names == {wanted.format(name): there.format(name) for name in SHAPES}


def test_several_parts_of_a_model_begin_with_the_same_weights(tmp_path: Path):
    """As a policy and its frozen reference (DPO) do."""
    shapes = {f"{part}{name}": shape for part in ("policy.", "reference.") for name, shape in SHAPES.items()}
    with open_weights(stored(tmp_path, weights())) as file:
        with pytest.raises(CheckpointError) as caught:
            match_weights(file, shapes)
        value = f'{{"path": "{file.path}", "add_prefix": ["policy.", "reference."]}}'
        assert caught.value.cure == f"its names differ by a prefix: set init_from to {value}"
        found = match_weights(file, shapes, source=InitFromConfig(**yaml.safe_load(value)))
        assert found.names == {f"{part}{name}": name for part in ("policy.", "reference.") for name in SHAPES}
    with pytest.raises(ConfigError, match="add_prefix: expected a text, or a list of texts"):
        InitFromConfig(path="F", add_prefix=[])
    with pytest.raises(ConfigError, match=r"add_prefix has 'policy\.' twice\n  cure: name each part of the model once"):
        InitFromConfig(path="F", add_prefix=["policy.", "policy."])


PARTS = '"add_prefix": ["policy.", "reference."]'


@pytest.mark.parametrize(
    ("given", "idle", "cure"),
    [
        (["policy.", "refrence."], "'refrence.'", f"set init_from to .*{PARTS}"),
        (["policy", "reference"], "'policy', 'reference'", f"set init_from to .*{PARTS}"),
        (["policy.", "reference.", "xyz."], "'xyz.'", f"set init_from to .*{PARTS}"),
        (["policy.", "zzz"], "'zzz'", 'set init_from to .*"add_prefix": "policy."'),
        (["xx", "yy"], "'xx', 'yy'", "give prefixes of the model's names: policy., policy.embed., policy.up., reference.,"),
    ],
)
def test_a_prefix_that_nothing_in_the_model_has_is_refused_with_the_nearest_one(
    given: list[str], idle: str, cure: str, tmp_path: Path
):
    """Where the file was read under another prefix, and the rest may be missing, it was accepted in silence."""
    shapes = {f"{part}{name}": shape for part in ("policy.", "reference.") for name, shape in SHAPES.items()}
    with open_weights(stored(tmp_path, weights())) as file:
        source = InitFromConfig(path=str(file.path), add_prefix=given, allow_missing=["*"])
        with pytest.raises(
            ConfigError,
            match=rf"add_prefix {idle}: with it no tensor of [\s\S]*\n  cure: " + re.escape(cure).replace(r"\.\*", ".*"),
        ):
            match_weights(file, shapes, source=source)


def test_right_prefixes_of_a_file_whose_names_have_one_more_are_kept_in_the_cure(tmp_path: Path):
    """As DistributedDataParallel writes them: the cure named prefixes that no weights have."""
    shapes = {f"{part}{name}": shape for part in ("policy.", "reference.") for name, shape in SHAPES.items()}
    with open_weights(stored(tmp_path, {f"module.{name}": tensor for name, tensor in weights().items()})) as file:
        source = InitFromConfig(path=str(file.path), add_prefix=["policy.", "reference."])
        with pytest.raises(ConfigError, match="with it no tensor of") as caught:
            match_weights(file, shapes, source=source)
        assert caught.value.cure == f'set init_from to {{"path": "{file.path}", "strip_prefix": "module.", {PARTS}}}'
        match_weights(file, shapes, source=InitFromConfig(**yaml.safe_load(caught.value.cure.partition(" to ")[2])))


def test_a_prefix_that_does_not_make_all_fit_is_said_with_what_is_left(tmp_path: Path):
    tensors = {f"transformer.{name}": tensor for name, tensor in weights().items()} | {"lm_head.bias": torch.zeros(7)}
    with open_weights(stored(tmp_path, tensors)) as file, pytest.raises(CheckpointError) as caught:
        match_weights(file, {**SHAPES, "head.bias": (9,)})
    assert caught.value.what.endswith(
        "none of the model's 6 tensors is in the file: embed.weight, up.weight, up.bias, scale, cube and 1 more; "
        "none of the file's 6 tensors is in the model: lm_head.bias, transformer.cube, transformer.embed.weight, "
        "transformer.scale, transformer.up.bias and 1 more"
    )
    assert caught.value.cure.endswith(
        '"strip_prefix": "transformer."}; then 1 of the model\'s 6 tensors is not in the file: head.bias; '
        "1 of the file's 6 tensors is not in the model: lm_head.bias"
    )


def test_rename_writes_the_models_names(tmp_path: Path):
    tensors = {"h.0.w": torch.zeros(1), "h.11.w": torch.ones(1), "wte.weight": torch.zeros(2)}
    source = InitFromConfig(path="F", rename={r"^h\.(\d+)\.": r"block\1.", r"^wte\.": "embed."})
    with open_weights(stored(tmp_path, tensors)) as file:
        found = match_weights(file, {"block0.w": (1,), "block11.w": (1,), "embed.weight": (2,)}, source=source)
        assert found.names == {"block0.w": "h.0.w", "block11.w": "h.11.w", "embed.weight": "wte.weight"}
        for wrong, said in {
            (r"^h\.\d+\.", "block."): "h.0.w and h.11.w would both be block.w",
            (r"(", ""): "rename",
            (r"^h\.", r"\9"): "rename",
            (r"^layers\.", "block"): "matches none of the file's names",
        }.items():
            with pytest.raises(ConfigError, match=said):
                match_weights(file, {"embed.weight": (2,)}, source=InitFromConfig(path="F", rename=dict((wrong,))))
        with pytest.raises(ConfigError, match=r"strip_prefix 'module\.' is at the beginning of none"):
            match_weights(file, {"embed.weight": (2,)}, source=InitFromConfig(path="F", strip_prefix="module."))


def test_a_near_name_is_suggested(tmp_path: Path):
    path = stored(tmp_path, {"embed.weights": torch.zeros(2), "b": torch.zeros(1)})
    with open_weights(path) as file, pytest.raises(CheckpointError, match=r"embed.weights in the file for embed.weight\?") as x:
        match_weights(file, {"embed.weight": (2,), "b": (1,)})
    assert r""""rename": {"^embed\\.weights$": "embed.weight"}}""" in x.value.cure


@pytest.mark.parametrize("there", ["embed.weight", "head.weight"])
def test_any_name_of_a_tie_serves(there: str, tmp_path: Path):
    with open_weights(stored(tmp_path, {there: torch.zeros(7, 4)})) as file:
        ties = [["embed.weight", "head.weight"]]
        assert match_weights(file, {"embed.weight": (7, 4)}, ties).names == {"embed.weight": there}
        both = match_weights(file, {"embed.weight": (7, 4), "head.weight": (7, 4)}, ties)
        assert both.names == {"embed.weight": there, "head.weight": there}


def test_of_several_names_of_a_tie_the_first_is_read_and_the_shapes_of_all_are_checked(tmp_path: Path):
    ties = [["embed.weight", "head.weight"]]
    with open_weights(stored(tmp_path, {"head.weight": torch.zeros(7, 4), "embed.weight": torch.zeros(7, 4)})) as file:
        assert match_weights(file, {"embed.weight": (7, 4)}, ties).names == {"embed.weight": "embed.weight"}
    said = r"head.weight is \[7, 4\] in the model and \[9, 4\] in the file"
    path = stored(tmp_path, {"head.weight": torch.ones(9, 4), "embed.weight": torch.zeros(7, 4)})
    with open_weights(path) as file, pytest.raises(CheckpointError, match=said):
        match_weights(file, {"embed.weight": (7, 4)}, ties)


@pytest.mark.parametrize("head", [torch.ones(7, 4), torch.zeros(7, 4), torch.zeros(7, 4).bfloat16()])
def test_names_of_a_tie_with_different_values_are_refused_unless_one_is_chosen(head: torch.Tensor, tmp_path: Path):
    ties, shapes = [["embed.weight", "head.weight"]], {"embed.weight": (7, 4), "head.weight": (7, 4)}
    with open_weights(stored(tmp_path, {"head.weight": head, "embed.weight": torch.zeros(7, 4)})) as file:
        if head.dtype == torch.float32 and not head.any():
            assert match_weights(file, shapes, ties).names == {name: name for name in shapes}
            return
        said = (
            "has embed.weight and head.weight, which are one parameter of the model, with different values\n"
            r"  cure: to begin with embed.weight, set init_from to \{.*allow_unexpected.: \[.?head.weight.?\]"
        )
        with pytest.raises(CheckpointError, match=said) as refused:
            match_weights(file, shapes, ties)
        assert str(refused.value).count("\n") == 1
        for chosen, other in (("embed.weight", "head.weight"), ("head.weight", "embed.weight")):
            source = InitFromConfig(path=str(file.path), allow_unexpected=(other,))
            assert match_weights(file, shapes, ties, source=source).names == dict.fromkeys(shapes, chosen)


def test_a_tie_that_is_missing_is_counted_once(tmp_path: Path):
    said = r"none of the model's 1 tensor is in the file: embed.weight;"
    with open_weights(stored(tmp_path, {"other": torch.ones(1)})) as file, pytest.raises(CheckpointError, match=said):
        match_weights(file, {"embed.weight": (7, 4), "head.weight": (7, 4)}, [["embed.weight", "head.weight"]])


def test_a_tensor_stored_once_for_several_names_is_counted_once_where_the_model_lacks_it(tmp_path: Path):
    shared = torch.ones(3)
    torch.save(
        {"module.embed.weight": shared, "module.head.weight": shared, "module.scale": torch.ones(2)}, tmp_path / "ddp.pt"
    )
    with open_weights(tmp_path / "ddp.pt") as file, pytest.raises(CheckpointError) as refused:
        match_weights(file, {"embed.weight": (3,), "scale": (2,)}, ties=[("embed.weight", "head.weight")])
    assert "none of the file's 2 tensors is in the model: module.embed.weight, module.scale\n" in str(refused.value)


def test_a_model_without_the_tie_reads_both_names_of_a_tensor_stored_once(tmp_path: Path):
    path = form("export", tmp_path, weights())
    with open_weights(path) as file:
        assert match_weights(file, {**SHAPES, "head.weight": (7, 4)}).names["head.weight"] == "head.weight"
        assert set(match_weights(file, SHAPES).names) == set(SHAPES)


def test_buffers_that_are_not_persistent_may_be_in_the_file(tmp_path: Path):
    with open_weights(stored(tmp_path, {**weights(), "rope.inv_freq": torch.zeros(2)})) as file:
        found = match_weights(file, SHAPES, optional=["rope.inv_freq", "rope.other"])
        assert set(found.names) == set(SHAPES) and "rope.inv_freq" in found.notes[0] and "model's own values" in found.notes[0]
        assert match_weights(file, {**SHAPES, "rope.inv_freq": (2,)}, optional=["rope.inv_freq"]).names["rope.inv_freq"]
    with open_weights(stored(tmp_path, weights())) as file:
        found = match_weights(file, {**SHAPES, "rope.inv_freq": (2,)}, optional=["rope.inv_freq"])
        assert found.missing == ("rope.inv_freq",) and found.notes == ()


def test_what_the_cure_says_may_miss_is_all_that_is_missing(tmp_path: Path):
    """Of 29 tensors of 6 layers: patterns of whole layers, and those are enough."""
    wanted = {f"{layer}.{part}.weight": (2,) for layer in range(6) for part in ("attn.q", "attn.k", "attn.v", "up", "down")}
    wanted |= {"6.bias": (3,)}
    with open_weights(stored(tmp_path, {name: torch.zeros(2) for name in wanted if name < "3"})) as file:
        with pytest.raises(CheckpointError) as refused:
            match_weights(file, wanted)
        patterns = json.loads(re.search(r'"allow_missing": (\[.*?\])', refused.value.cure)[1])
        assert patterns == ["3.*", "4.*", "5.*", "6.*"]
        assert match_weights(file, wanted, source=InitFromConfig(path="F", allow_missing=tuple(patterns))).missing
        far = {f"{layer}.w{layer}": (2,) for layer in range(40)} | {"2.other.weight": (2,)}
        with pytest.raises(CheckpointError) as refused:
            match_weights(file, {**far, "0.up.weight": (2,)})
        assert refused.value.cure == "give weights of this model"


def test_parts_of_a_model_without_their_index_are_no_model(tmp_path: Path):
    for part in (1, 2):
        save_file(weights(), tmp_path / f"model-0000{part}-of-00002.safetensors")
    with pytest.raises(CheckpointError, match="parts of one model") as refused:
        open_weights(tmp_path)
    assert refused.value.cure == "put the model's model.safetensors.index.json beside them"


def test_a_new_head_is_let_through_by_name_and_said(tmp_path: Path):
    source = InitFromConfig(path="F", allow_missing=("head.*",), allow_unexpected=("head.*", "pooler.*"))
    tensors = {**weights(), "head.weight": torch.zeros(9, 4), "pooler.weight": torch.zeros(1)}
    wanted = {**SHAPES, "head.weight": (2, 4), "head.bias": (2,)}
    with open_weights(stored(tmp_path, tensors)) as file:
        with pytest.raises(CheckpointError, match=r'"allow_missing": \["head\.\*"\]'):
            match_weights(file, wanted)
        with pytest.raises(CheckpointError, match=r"head.weight is \[2, 4\] in the model and \[9, 4\] in the file"):
            match_weights(file, wanted, source=source.replace(allow_unexpected=("pooler.*",)))
        found = match_weights(file, wanted, source=source)
        assert found.missing == ("head.weight", "head.bias") and set(found.names) == set(SHAPES)
        assert found.notes == (
            "2 tensors begin with the model's own initial values, not with those of F.safetensors: head.weight, head.bias",
            "2 tensors of F.safetensors are not used: head.weight, pooler.weight",
        )
        with pytest.raises(CheckpointError, match="none of the model's 1 tensor is in"):
            match_weights(file, {"other": (1,)}, source=InitFromConfig(path="F", allow_missing=("*",), allow_unexpected=("*",)))


@pytest.mark.parametrize(
    "extra, pattern",
    [
        (["h.0.attn.mask", "h.1.attn.mask"], ["h.*.attn.mask"]),
        (["pooler.dense.weight", "pooler.dense.bias"], ["pooler.dense.*"]),
        (["up.gain"], ["up.gain"]),
        (["x"], ["x"]),
    ],
)
def test_the_pattern_that_is_proposed_lets_nothing_else_through(extra: list[str], pattern: list[str], tmp_path: Path):
    tensors = {**weights(), "h.0.attn.w": torch.zeros(1), "h.1.attn.w": torch.zeros(1)}
    wanted = {name: tuple(tensor.shape) for name, tensor in tensors.items()}
    with open_weights(stored(tmp_path, tensors | {name: torch.zeros(1) for name in extra})) as file:
        with pytest.raises(CheckpointError) as caught:
            match_weights(file, wanted)
        assert f'"allow_unexpected": {json.dumps(pattern)}}}' in caught.value.cure
        assert (
            match_weights(file, wanted, source=InitFromConfig(path="F", allow_unexpected=tuple(pattern))).names.keys()
            == wanted.keys()
        )


def test_casts_are_said_in_one_line(tmp_path: Path):
    tensors = {name: tensor.bfloat16() for name, tensor in weights().items()}
    tensors |= {"n": torch.tensor(1), "d": torch.zeros(1, dtype=torch.float64)}
    with open_weights(stored(tmp_path, tensors)) as file:
        found = match_weights(file, {**SHAPES, "n": (), "d": (1,)}, dtypes={"n": torch.int64, "d": "float64"})
    assert found.notes == ("F.safetensors holds bfloat16: 5 tensors are cast to float32",)


class Own:
    """A model's own values: ones. Notes what it was asked for."""

    def __init__(self) -> None:
        self.asked: list[list[str]] = []
        self.released = False

    def stream(self, names: Collection[str], dtype: torch.dtype) -> Iterator[tuple[str, Tensor]]:
        self.asked.append(list(names))
        yield from ((name, torch.ones(2, dtype=dtype)) for name in names)

    def release(self) -> None:
        self.released = True


@pytest.mark.parametrize("what", ["file", "pt", "checkpoint"])
def test_a_run_begins_with_the_files_values_and_its_own_where_the_file_has_none(what: str, tmp_path: Path):
    path = form(what, tmp_path, {**weights(), "n": torch.tensor(3)})
    own, source = Own(), InitFromConfig(path=str(path), allow_missing=("head.*",))
    with open_weights(path) as file:
        fits = match_weights(
            file, {**SHAPES, "n": (), "head.bias": (2,)}, source=source, dtype="float64", dtypes={"n": "int64"}
        )
        values = WeightsFromFile(file.path, file.fingerprint(), fits.names, own)
    found = dict(values.stream(["up.weight", "n"], torch.float64))
    assert set(found) == {"up.weight", "n"} and own.asked == [] and found["n"].item() == 3
    assert torch.equal(found["up.weight"], weights()["up.weight"].double())
    found = dict(values.stream([*SHAPES, "head.bias"], torch.float64))
    assert own.asked == [["head.bias"]] and torch.equal(found["head.bias"], torch.ones(2).double())
    values.release()
    assert own.released


def test_another_file_under_the_same_path_is_refused(tmp_path: Path):
    path = stored(tmp_path, weights())
    with open_weights(path) as file:
        values = WeightsFromFile(path, file.fingerprint(), match_weights(file, SHAPES).names, Own())
    stored(tmp_path, weights(1))
    with pytest.raises(CheckpointError, match=r"is another file on .* than where the run was started"):
        next(values.stream(["cube"], torch.float32))


def test_a_part_of_a_sharded_file_leads_to_its_folder(tmp_path: Path):
    folder = sharded(tmp_path / "hub", weights())
    with open_weights(folder / "model-00001-of-00002.safetensors") as file, pytest.raises(CheckpointError) as caught:
        match_weights(file, SHAPES)
    assert "give the folder" in caught.value.cure and str(folder) in caught.value.cure


def test_names_are_checked_without_torch(tmp_path: Path):
    """The command line says what does not fit before anything heavy is loaded."""
    code = """
import sys
from raypar.worker.pretrained.open_weights import open_weights
from raypar.worker.pretrained.weights_matching import match_weights
for path in sys.argv[1:]:
    with open_weights(path) as file:
        match_weights(file, {name: stored.shape for name, stored in file.names.items()})
assert "torch" not in sys.modules and "numpy" not in sys.modules
"""
    paths = [str(form(what, tmp_path, weights())) for what in ("file", "index", "checkpoint")]
    subprocess.run([sys.executable, "-c", code, *paths], check=True, timeout=60)
