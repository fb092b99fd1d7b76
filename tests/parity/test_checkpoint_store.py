"""What a storage for checkpoints must do: folders, pyarrow's file systems, S3, and one that raypar does not have."""

from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from helpers.fake_gcs import fake_gcs
from helpers.memory_store import URL, MemoryStore
from helpers.moto_s3 import fake_s3
from helpers.ugly_models import job
from safetensors.torch import load_file

from raypar.actors.run_recorder import RunRecorder
from raypar.cli import main
from raypar.console.read_run_folder import has_checkpoints
from raypar.errors import CheckpointError, ConfigError
from raypar.job import CheckpointConfig
from raypar.job.contract import VALIDATED, contract_of_job
from raypar.job.lr_schedule_metric import FollowedMetric
from raypar.launch.resume import find_checkpoint, find_last_whole_checkpoint
from raypar.plan import ParallelPlan
from raypar.storage.checkpoint_store import STORES, CheckpointStore, open_checkpoint, open_checkpoint_store
from raypar.storage.filesystems import uri_of_filesystem_object
from raypar.storage.run_folder import RunFolder
from raypar.worker.checkpoint import checkpoint_files, contract_comparison
from raypar.worker.checkpoint.checkpoint_files import PARAMETER
from raypar.worker.norm_and_weights_hash import weights_hash
from raypar.worker.pretrained.open_weights import absolute_weights_path, open_weights, resolve_weights_source
from raypar.worker.run_in_one_process import OneProcessRun

SPEC = job("tangled", steps=4)
LAYERS = 9


@pytest.fixture
def memory(monkeypatch: pytest.MonkeyPatch) -> dict[str, MemoryStore]:
    """The stores in memory, by location; any is made when it is first opened."""
    there: dict[str, MemoryStore] = {}
    monkeypatch.setitem(STORES, "memory", lambda location: there.setdefault(location, MemoryStore(location)))
    return there


@pytest.fixture(params=["folder", "memory", "pyarrow", *(pytest.param(name, marks=pytest.mark.chaos) for name in ("s3", "gs"))])
def store(request: pytest.FixtureRequest, memory: dict[str, MemoryStore], tmp_path: Path) -> Iterator[CheckpointStore]:
    if request.param == "s3":
        with fake_s3() as s3:
            yield open_checkpoint_store(s3.at("run/checkpoints"))
    elif request.param == "gs":
        with fake_gcs(tmp_path) as gcs:
            yield open_checkpoint_store(gcs.at("run/checkpoints"))
    elif request.param == "pyarrow":
        yield open_checkpoint_store(on_pyarrow(tmp_path / "checkpoints"))
    else:
        yield open_checkpoint_store(URL if request.param == "memory" else tmp_path / "checkpoints")


def on_pyarrow(path: Path) -> str:
    """The location of a path on a file system of pyarrow that raypar cannot take for this machine's folders."""
    from fsspec.implementations.local import LocalFileSystem
    from pyarrow.fs import FSSpecHandler, PyFileSystem

    return str(uri_of_filesystem_object(PyFileSystem(FSSpecHandler(LocalFileSystem())), str(path)))


def save(local: OneProcessRun, at: str, done: int) -> str:
    """What the driver and its workers do; locations travel as text."""
    begun = str(checkpoint_files.create_checkpoint(at, done))
    for core in local.cores:
        core.start_save(begun)
    records = [core.save_result() for core in local.cores]
    facts = {"steps_done": done, "contract": contract_of_job(local.spec)}
    return str(checkpoint_files.commit_checkpoint(begun, records, **facts))


def final_hash(local: OneProcessRun) -> str:
    return weights_hash({name: copies[0] for name, copies in local.parameters().items()})


def commit(store: CheckpointStore, done: int, value: float) -> checkpoint_files.CheckpointRef:
    begun = checkpoint_files.create_checkpoint(store, done)
    record = checkpoint_files.write_shard(begun, "a.safetensors", {("w", PARAMETER): torch.full((3,), value)})
    return checkpoint_files.commit_checkpoint(begun, [record], steps_done=done, contract={})


def test_a_run_saves_to_memory_resumes_with_the_same_bits_and_exports(memory, tmp_path: Path, capsys):
    with OneProcessRun(SPEC, ParallelPlan.mesh(layers=LAYERS), "gpipe") as local:
        for step in range(4):
            local.step(step)
        undisturbed = final_hash(local)
    with OneProcessRun(SPEC, ParallelPlan.mesh(pp=2, dp=2, layers=LAYERS), "1f1b") as local:
        for step in range(2):
            local.step(step)
        location = save(local, URL, 2)
        assert location == f"{URL}/step_00000002"
    last, skipped = checkpoint_files.latest_usable_checkpoint(URL)
    assert (str(last), skipped) == (location, [])
    assert not contract_comparison.list_contract_differences(checkpoint_files.load_manifest(location), SPEC)
    with OneProcessRun(SPEC, ParallelPlan.mesh(pp=3, layers=LAYERS), "gpipe") as local:
        for core in local.cores:
            core.load(location)
        for step in range(2, 4):
            local.step(step)
        assert final_hash(local) == undisturbed
        location = save(local, URL, 4)
    assert main(["export", location, "--out", str(tmp_path / "model.safetensors")]) == 0
    assert f"weights sha256 {undisturbed}" in capsys.readouterr().out
    exported = load_file(tmp_path / "model.safetensors")
    found = checkpoint_files.read_checkpoint_state(location)
    assert all(torch.equal(exported[name], kinds[PARAMETER]) for name, kinds in found.items() if PARAMETER in kinds)
    assert not list(tmp_path.glob("*memory*")) and not Path("memory:").exists()


def test_initial_weights_are_read_from_memory_by_slices(memory):
    checkpoint = commit(open_checkpoint_store(URL), 3, 2.5)
    path, _ = resolve_weights_source(str(checkpoint))
    assert absolute_weights_path(path) == str(checkpoint)
    with open_weights(absolute_weights_path(path)) as weights:
        assert torch.equal(weights.read("w", slices=(0, ((1, 3),))), torch.full((2,), 2.5))


def test_a_runs_checkpoints_lie_where_its_folder_says(memory, tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    """The recorder writes there, and whoever resumes or shows the run looks there."""
    monkeypatch.setattr(RunFolder, "checkpoint_store_location", property(lambda folder: f"memory://bucket/{folder.name}"))
    folder = RunFolder.create(tmp_path, "mine")
    followed = FollowedMetric("validation_loss", 2, {2: 0.5, 4: 0.4})
    recorder = RunRecorder(
        SimpleNamespace(folder=str(folder.path), contract={}, job=SimpleNamespace(checkpoint=CheckpointConfig(keep=1))),
        followed=followed,
    )
    for done in (2, 4):
        begun = recorder.checkpoints.begin(done)
        record = checkpoint_files.write_shard(str(begun), "a.safetensors", {("w", PARAMETER): torch.ones(2)})
        recorder.checkpoints.commit(done, begun, [record])
    found = find_last_whole_checkpoint(folder, print)
    assert str(found) == "memory://bucket/mine/step_00000004" == str(recorder.checkpoints.last)
    assert find_checkpoint(str(found), print, "runs") == found
    assert find_checkpoint("mine", print, tmp_path) == find_checkpoint(str(folder.path), print, "runs") == found
    with pytest.raises(CheckpointError, match=r"min is neither a checkpoint nor a run\n  cure: .*did you mean mine\?"):
        find_checkpoint("min", print, tmp_path)
    assert checkpoint_files.load_manifest(found).contract == {VALIDATED: followed.as_json(4)}
    assert memory["memory://bucket/mine"].names() == ["step_00000004"]
    assert main(["export", "mine", "--run-dir", str(tmp_path), "--step", "4", "--out", str(tmp_path / "m.pt")]) == 0
    assert torch.equal(torch.load(tmp_path / "m.pt")["w"], torch.ones(2))


def test_what_is_begun_is_not_seen_before_it_is_committed(store: CheckpointStore):
    good = commit(store, 1, 1.0)
    begun = checkpoint_files.create_checkpoint(store, 2)
    record = checkpoint_files.write_shard(begun, "a.safetensors", {("w", PARAMETER): torch.ones(3)})
    assert begun.has_file(record.file) and open_checkpoint(str(begun)) == begun, "workers get its text"
    assert checkpoint_files.latest_usable_checkpoint(store) == (good, [])
    last = checkpoint_files.commit_checkpoint(begun, [record], steps_done=2, contract={})
    assert checkpoint_files.latest_usable_checkpoint(store) == (last, [])


def test_a_checkpoint_takes_the_place_of_one_with_its_name(store: CheckpointStore):
    assert commit(store, 1, 1.0) == commit(store, 1, 2.0)
    assert store.names() == ["step_00000001"] and not store.leftovers()
    found = checkpoint_files.read_checkpoint_state(store.checkpoint_location("step_00000001"))
    assert torch.equal(found["w"][PARAMETER], torch.full((3,), 2.0))


def test_old_ones_and_what_was_never_committed_are_removed(store: CheckpointStore):
    for done in (1, 2, 3):
        commit(store, done, 1.0)
    before, after = checkpoint_files.create_checkpoint(store, 2), checkpoint_files.create_checkpoint(store, 9)
    for begun in (before, after):
        file = checkpoint_files.write_shard(begun, "a.safetensors", {("w", PARAMETER): torch.ones(3)}).file
    checkpoint_files.remove_old_checkpoints(store, 2)
    steps = {name for name in store.names() if name.startswith("step_")}
    assert steps == {"step_00000002", "step_00000003"} and store.leftovers() == [(after.name, "step_00000009")]
    checkpoint_files.discard_checkpoint(after)
    assert not store.leftovers() and not after.has_file(file)


def test_what_lies_in_a_store_is_checked_as_in_a_folder(store: CheckpointStore):
    first, last = commit(store, 1, 1.0), commit(store, 2, 1.0)
    (name,) = checkpoint_files.load_manifest(last).files
    with store.open(last.name, name, cure="") as opened:
        content = opened.stream.read()
    with store.write(last.name, name) as file:
        file.write(content[:-1] + b"!")
    found, skipped = checkpoint_files.latest_usable_checkpoint(store)
    assert found == first and skipped == [
        f"skipped step_00000002: {last.file_location(name)} was altered: its checksum is another"
    ]
    with store.write(last.name, name) as file:
        file.write(content[:-1])
    with pytest.raises(CheckpointError, match="it was truncated"):
        checkpoint_files.read_checkpoint_state(last)
    with pytest.raises(CheckpointError, match="cannot read"):
        checkpoint_files.load_manifest(store.checkpoint_location("step_00000007"))


def test_a_storage_that_is_not_there_is_refused_by_name():
    for location in ("ftp://bucket/run/checkpoints", "https:/bucket"):
        with pytest.raises(ConfigError, match=r"does not read or write (ftp|https) storage"):
            open_checkpoint_store(location)
        with pytest.raises(ConfigError, match=f"the run is '{location}'"):
            open_checkpoint(location, "the run")


def test_a_relative_folder_that_looks_like_a_url_is_a_folder(tmp_path, monkeypatch):
    """`./ab:/r`, or a run_dir `ab:`: pathlib drops the `./`, and what is left looks like a URL of `ab`."""
    monkeypatch.chdir(tmp_path)
    folder = RunFolder(Path("ab:") / "r")
    folder.checkpoints.mkdir(parents=True)
    assert open_checkpoint_store(folder.checkpoint_store_location).names() == []
    assert not has_checkpoints(folder)
    named = open_checkpoint("./ab:/r/checkpoints/step_00000005")
    assert named.name == "step_00000005" and not named.has_file("manifest.json")


def test_a_writer_that_is_killed_leaves_the_checkpoint_before_also_of_the_same_step(store: CheckpointStore):
    """What is begun and left mixes with nothing: neither with an older checkpoint of its name nor with a later attempt."""
    for step in (1, 2):
        commit(store, step, 1.0)
    for step in (2, 3):
        killed = checkpoint_files.create_checkpoint(store, step)
        checkpoint_files.write_shard(killed, "a.safetensors", {("w", PARAMETER): torch.full((3,), 9.0)})
    found, skipped = checkpoint_files.latest_usable_checkpoint(store)
    assert found is not None and (found.name, skipped) == ("step_00000002", [])
    assert torch.equal(checkpoint_files.read_checkpoint_state(found)["w"][PARAMETER], torch.ones(3))
    commit(store, 3, 3.0)
    last, _ = checkpoint_files.latest_usable_checkpoint(store)
    assert last is not None and torch.equal(checkpoint_files.read_checkpoint_state(last)["w"][PARAMETER], torch.full((3,), 3.0))
    commit(store, 4, 3.0)
    checkpoint_files.remove_old_checkpoints(store, 1)
    last, _ = checkpoint_files.latest_usable_checkpoint(store)
    assert last is not None and last.name == "step_00000004" and store.names() == [last.name] and not store.leftovers()
    assert torch.equal(checkpoint_files.read_checkpoint_state(last)["w"][PARAMETER], torch.full((3,), 3.0))


@pytest.mark.parametrize("name", ["../elsewhere", "a/b", "..", "", "a\nb"])
def test_a_name_that_leads_elsewhere_names_no_file_of_a_checkpoint(name: str, tmp_path: Path):
    (tmp_path / "elsewhere").write_text("secret")
    store = open_checkpoint_store(on_pyarrow(tmp_path / "checkpoints"))
    commit(store, 1, 1.0)
    with pytest.raises(CheckpointError):
        store.read("step_00000001", name, limit=100, cure="")
    if name:
        with pytest.raises(CheckpointError):
            store.read(name, "manifest.json", limit=100, cure="")
