"""Checkpoints: any plan reads what any other plan wrote, and what is damaged or foreign is said, never used."""

import errno
import json
import math
import os
import pickle
from pathlib import Path

import pytest
import torch
from helpers import checkpoint_folders as checkpoint_files
from helpers.ugly_models import job
from safetensors.torch import load_file

from raypar.errors import CheckpointError
from raypar.job.contract import contract_of_job
from raypar.launch.launch_options import LaunchOptions
from raypar.launch.make_run_request import contract_fields
from raypar.plan import ParallelPlan
from raypar.worker.checkpoint import contract_comparison
from raypar.worker.checkpoint.checkpoint_files import PARAMETER, TensorSlices, optimizer_key
from raypar.worker.norm_and_weights_hash import weights_hash
from raypar.worker.pretrained.open_weights import open_weights
from raypar.worker.run_in_one_process import OneProcessRun
from raypar.worker.state.checkpoint_snapshot import take_snapshot

pytestmark = pytest.mark.part(4)

SPEC = job("tangled", steps=6)
LAYERS = 9


def finished(local: OneProcessRun) -> str:
    parameters = {name: copies[0] for name, copies in local.parameters().items()}
    return weights_hash(parameters)


@pytest.fixture(scope="module")
def undisturbed() -> str:
    with OneProcessRun(SPEC, ParallelPlan.mesh(layers=LAYERS), "gpipe") as local:
        for step in range(6):
            local.step(step)
        return finished(local)


@pytest.fixture
def one(tmp_path: Path) -> Path:
    """A small checkpoint, two files, of made-up tensors."""
    return make(tmp_path / "checkpoints", 10)


def make(root: Path, done: int) -> Path:
    folder = checkpoint_files.create_checkpoint(root, done)
    a = checkpoint_files.write_shard(
        folder,
        "a.safetensors",
        {("w", PARAMETER): torch.arange(6.0).view(2, 3), ("w", optimizer_key("exp_avg")): torch.ones(2, 3)},
        {("w", optimizer_key("mu")): 0.5},
    )
    b = checkpoint_files.write_shard(folder, "b.safetensors", {("b", PARAMETER): torch.arange(3, dtype=torch.float64)})
    return checkpoint_files.commit_checkpoint(folder, [a, b], steps_done=done, contract={"seed": 1}, metrics={"loss": 2.5})


@pytest.mark.parametrize(
    "before, after",
    [((2, 2), (1, 3)), ((1, 1), (3, 2)), ((3, 1), (1, 1)), ((1, 4), (2, 2))],
    ids=lambda shape: f"{shape[0]}x{shape[1]}",
)
def test_a_run_resumed_under_another_plan_ends_in_the_same_bits(before, after, undisturbed: str, tmp_path: Path):
    with OneProcessRun(SPEC, ParallelPlan.mesh(pp=before[0], dp=before[1], layers=LAYERS), "1f1b") as local:
        for step in range(3):
            local.step(step)
        path = checkpoint_files.save_run(local, tmp_path, 3)
        assert checkpoint_files.checkpoint_weights_hash(path) == finished(local)
    manifest = checkpoint_files.verify_checkpoint(path)
    assert not contract_comparison.list_contract_differences(manifest, SPEC)
    with OneProcessRun(SPEC, ParallelPlan.mesh(pp=after[0], dp=after[1], layers=LAYERS), "gpipe") as local:
        checkpoint_files.check_checkpoint_fits_model(
            manifest, {name: tuple(copies[0].shape) for name, copies in local.parameters().items()}
        )
        for core in local.cores:
            core.load(path)
        for step in range(3, 6):
            local.step(step)
        assert finished(local) == undisturbed


def test_every_parameter_is_written_by_one_worker_only(tmp_path: Path):
    with OneProcessRun(SPEC, ParallelPlan.mesh(pp=3, dp=2, layers=LAYERS), "1f1b") as local:
        shares = [core.ownership.checkpoint_pieces(core.rank) for core in local.cores]
        names = sorted(name for share in shares for mine in share.values() for name in mine)
        assert names == sorted(local.parameters())


def test_a_snapshot_is_a_copy():
    with OneProcessRun(SPEC, ParallelPlan.mesh(layers=LAYERS), "gpipe") as local:
        core = local.cores[0]
        taken = take_snapshot(core.stages, core.step_commit.optimizers, core.ownership.checkpoint_pieces(0))
        before = taken.tensors["mix0.up.weight", PARAMETER].clone()
        local.step(0)
        assert torch.equal(taken.tensors["mix0.up.weight", PARAMETER], before)
        assert not torch.equal(core.stages[0, 0].parameters["mix0.up.weight"], before)


def test_shards_are_plain_safetensors_files(one: Path):
    there = load_file(one / "a.safetensors")
    assert torch.equal(there["w"], torch.arange(6.0).view(2, 3)) and torch.equal(there["w#exp_avg"], torch.ones(2, 3))


def test_reading_gives_back_what_was_written(one: Path):
    found = checkpoint_files.read_checkpoint_state(one)
    assert torch.equal(found["w"][PARAMETER], torch.arange(6.0).view(2, 3)) and found["w"][optimizer_key("mu")] == 0.5
    assert found["b"][PARAMETER].dtype == torch.float64 and set(checkpoint_files.read_checkpoint_state(one, ["b"])) == {"b"}
    manifest = checkpoint_files.load_manifest(one)
    assert (manifest.steps_done, manifest.metrics, manifest.contract) == (10, {"loss": 2.5}, {"seed": 1})
    with pytest.raises(CheckpointError, match="no parameter 'c'"):
        checkpoint_files.read_checkpoint_state(one, ["c"])


@pytest.mark.parametrize("dtype", [torch.float64, torch.float16, torch.bfloat16, torch.int64, torch.int8, torch.bool])
def test_every_dtype_and_odd_shapes_come_back(dtype: torch.dtype, tmp_path: Path):
    tensors = {
        (f"t{i}", PARAMETER): torch.arange(math.prod(shape)).reshape(shape).to(dtype)
        for i, shape in enumerate([(), (0, 3), (5,), (2, 3)])
    }
    tensors["strided", PARAMETER] = torch.arange(6).reshape(2, 3).t().to(dtype)
    folder = checkpoint_files.create_checkpoint(tmp_path, 0)
    record = checkpoint_files.write_shard(
        folder,
        "a",
        tensors,
        {
            ("t0", optimizer_key("n")): 3,
            ("t0", optimizer_key("none")): None,
            ("t0", optimizer_key("inf")): math.inf,
            ("t0", optimizer_key("flag")): True,
        },
    )
    found = checkpoint_files.read_checkpoint_state(
        checkpoint_files.commit_checkpoint(folder, [record], steps_done=0, contract={})
    )
    for (name, _), tensor in tensors.items():
        assert found[name][PARAMETER].dtype == dtype and torch.equal(found[name][PARAMETER], tensor)
    assert {k.name: v for k, v in found["t0"].items() if k != PARAMETER} == {
        "n": 3,
        "none": None,
        "inf": math.inf,
        "flag": True,
    }


def test_slices_are_joined_and_a_missing_slice_is_said(tmp_path: Path):
    whole = torch.arange(12.0).view(4, 3)
    parts = [TensorSlices((4, 3), 0, ((0, 3),)), TensorSlices((4, 3), 0, ((3, 4),))]
    folder = checkpoint_files.create_checkpoint(tmp_path, 1)
    records = [
        checkpoint_files.write_shard(folder, f"{i}", {("w", PARAMETER): whole[a:b]}, slices={("w", PARAMETER): parts[i]})
        for i, (a, b) in enumerate([(0, 3), (3, 4)])
    ]
    path = checkpoint_files.commit_checkpoint(folder, records, steps_done=1, contract={})
    assert torch.equal(checkpoint_files.read_checkpoint_state(path)["w"][PARAMETER], whole)
    folder = checkpoint_files.create_checkpoint(tmp_path, 2)
    record = checkpoint_files.write_shard(folder, "0", {("w", PARAMETER): whole[:3]}, slices={("w", PARAMETER): parts[0]})
    with pytest.raises(CheckpointError, match="9 of 12 elements of w"):
        checkpoint_files.read_checkpoint_state(checkpoint_files.commit_checkpoint(folder, [record], steps_done=2, contract={}))


def flip(file: Path, at: int) -> None:
    data = bytearray(file.read_bytes())
    data[at] ^= 1
    file.write_bytes(data)


def truncate(file: Path, by: int = 1) -> None:
    os.truncate(file, file.stat().st_size - by)


DAMAGE = {
    "a bit flipped in a shard": (lambda p: flip(p / "a.safetensors", -3), "altered"),
    "a bit flipped in a header": (lambda p: flip(p / "a.safetensors", 12), "altered"),
    "a shard cut short": (lambda p: truncate(p / "b.safetensors"), "truncated"),
    "a shard gone": (lambda p: (p / "b.safetensors").unlink(), "missing"),
    "the manifest cut short": (lambda p: truncate(p / "manifest.json", 30), "damaged"),
    "the manifest altered": (lambda p: edit(p / "manifest.json", steps_done=11), "altered"),
    "the manifest gone": (lambda p: (p / "manifest.json").unlink(), "cannot read"),
    "the manifest no object": (lambda p: (p / "manifest.json").write_text("[]"), "damaged"),
}


def edit(file: Path, **changes: object) -> None:
    file.write_text(json.dumps({**json.loads(file.read_text()), **changes}))


@pytest.mark.parametrize("damage", DAMAGE)
def test_a_damaged_checkpoint_is_skipped_for_the_one_before_it_and_that_is_said(damage: str, tmp_path: Path):
    root = tmp_path / "checkpoints"
    older, newer = make(root, 10), make(root, 20)
    assert checkpoint_files.latest_usable_checkpoint(root) == (newer, [])
    spoil, word = DAMAGE[damage]
    spoil(newer)
    path, skipped = checkpoint_files.latest_usable_checkpoint(root)
    assert path == older and len(skipped) == 1 and newer.name in skipped[0] and word in skipped[0]


def damaged_everywhere(root: Path, newer: Path, every: int) -> int:
    """Each file of a checkpoint: cut at every `every`-th byte, bits flipped there, zeros from there on; and made longer.

    Returns how many times the checkpoint before it was taken, with one line; asserts that no other answer came.
    """
    found = 0
    for file in sorted(newer.iterdir()):
        whole = file.read_bytes()
        places = sorted({*range(0, len(whole), every), *range(min(9, len(whole))), len(whole) - 1})
        changed = [whole + b"\0", whole + whole, b"\0" + whole]
        for at in places:
            one = whole[at : at + 1]
            changed += [whole[:at], whole[:at] + bytes([one[0] ^ 1]) + whole[at + 1 :], whole[:at] + bytes(len(whole) - at)]
            changed.append(whole[:at] + bytes([one[0] ^ 0x80]) + whole[at + 1 :])
        for content in set(changed) - {whole}:
            file.write_bytes(content)
            path, skipped = checkpoint_files.latest_usable_checkpoint(root)
            assert path != newer and len(skipped) == 1 and newer.name in skipped[0], (file.name, content)
            found += 1
        file.write_bytes(whole)
    assert checkpoint_files.latest_usable_checkpoint(root) == (newer, [])
    return found


def test_a_checkpoint_that_is_cut_or_altered_anywhere_is_never_used(tmp_path: Path):
    make(tmp_path, 10)
    assert damaged_everywhere(tmp_path, make(tmp_path, 20), every=97) > 100


@pytest.mark.full
def test_a_checkpoint_that_is_cut_or_altered_at_any_byte_is_never_used(tmp_path: Path):
    make(tmp_path, 10)
    assert damaged_everywhere(tmp_path, make(tmp_path, 20), every=1) > 4000


class Hostile:
    """Makes a file as soon as it is unpickled."""

    def __init__(self, path: Path) -> None:
        self.path = path

    def __reduce__(self) -> tuple[object, ...]:
        return Path.touch, (self.path,)


def test_nothing_that_lies_in_a_storage_is_unpickled(tmp_path: Path):
    """Neither a file of a checkpoint nor a state_dict."""
    older, newer = make(tmp_path / "c", 10), make(tmp_path / "c", 20)
    made, hostile = tmp_path / "made", tmp_path / "weights.pt"
    for file in sorted(newer.iterdir()):
        whole = file.read_bytes()
        file.write_bytes(pickle.dumps(Hostile(made)))
        assert checkpoint_files.latest_usable_checkpoint(tmp_path / "c")[0] == older
        file.write_bytes(whole)
    torch.save({"w": Hostile(made)}, hostile)
    with pytest.raises(CheckpointError, match=r"weights\.pt cannot be read as a state_dict"):
        open_weights(hostile)
    assert not made.exists()


def test_unfinished_checkpoints_are_not_seen_and_old_ones_are_removed(tmp_path: Path):
    assert checkpoint_files.latest_usable_checkpoint(tmp_path / "none") == (None, [])
    for done in (5, 10, 15, 100):
        make(tmp_path, done)
    checkpoint_files.create_checkpoint(tmp_path, 20)
    checkpoint_files.create_checkpoint(tmp_path, 200)
    checkpoint_files.remove_old_checkpoints(tmp_path, 2)
    assert sorted(p.name for p in tmp_path.iterdir()) == [".tmp-step_00000200", "step_00000015", "step_00000100"]
    assert checkpoint_files.latest_usable_checkpoint(tmp_path)[0] == tmp_path / "step_00000100"


def test_a_checkpoint_of_the_same_step_replaces_the_first(tmp_path: Path):
    first = make(tmp_path, 10)
    flip(first / "a.safetensors", -1)
    assert make(tmp_path, 10) == first and checkpoint_files.latest_usable_checkpoint(tmp_path) == (first, [])
    assert [p.name for p in tmp_path.iterdir()] == [first.name]


def test_a_full_disk_is_one_error_and_leaves_the_last_good_checkpoint(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    good = make(tmp_path, 10)
    folder = checkpoint_files.create_checkpoint(tmp_path, 20)

    def full(descriptor: int) -> None:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    monkeypatch.setattr(os, "fsync", full)
    with OneProcessRun(SPEC, ParallelPlan.mesh(layers=LAYERS), "gpipe") as local:
        core = local.cores[0]
        core.start_save(folder)
        with pytest.raises(CheckpointError, match="No space left on device") as found:
            core.save_result()
        local.step(0)
    assert "disk" in found.value.cure
    checkpoint_files.discard_checkpoint(folder)
    assert checkpoint_files.latest_usable_checkpoint(tmp_path) == (good, []) and not folder.exists()


def test_a_checkpoint_of_another_model_names_the_first_differences(one: Path):
    manifest = checkpoint_files.load_manifest(one)
    checkpoint_files.check_checkpoint_fits_model(manifest, {"w": (2, 3), "b": (3,)})
    with pytest.raises(
        CheckpointError, match=r"only the model has c.*only the checkpoint has b.*w is \[2, 4\] in the model and \[2, 3\]"
    ):
        checkpoint_files.check_checkpoint_fits_model(manifest, {"w": (2, 4), "c": (1,)})


def test_a_checkpoint_of_another_contract_says_what_changed_and_steps_are_no_part_of_it(tmp_path: Path):
    folder = checkpoint_files.create_checkpoint(tmp_path, 1)
    path = checkpoint_files.commit_checkpoint(folder, [], steps_done=1, contract=contract_of_job(SPEC))
    manifest = checkpoint_files.load_manifest(path)
    assert not contract_comparison.list_contract_differences(manifest, job("tangled", steps=100))
    changed = contract_comparison.list_contract_differences(manifest, job("tangled", seed=12, batch_size=13))
    assert changed == ["seed was 11, is 12", "batch_size was 11, is 13"]


def test_a_checkpoint_with_the_hashes_of_the_job_s_code_as_every_run_writes_them_is_of_the_same_job(tmp_path: Path):
    contract = contract_fields(LaunchOptions(SPEC, lambda chosen: pytest.fail("no run is made")))["contract"]
    assert contract.keys() - contract_of_job(SPEC).keys() == {"code"}
    folder = checkpoint_files.create_checkpoint(tmp_path, 1)
    path = checkpoint_files.commit_checkpoint(folder, [], steps_done=1, contract=contract)
    assert not contract_comparison.list_contract_differences(checkpoint_files.load_manifest(path), SPEC)
