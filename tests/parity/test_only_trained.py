"""`checkpoint.only: trained`: checkpoints without the frozen values of a pretrained folder, which come again from there."""

from __future__ import annotations

import shutil
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from helpers import checkpoint_folders
from helpers.forward_passes import PassesInOneProcess
from helpers.language_model import save_base
from test_pretrained_folder import LORA, STEPS, job
from torch import nn

import raypar
from raypar.errors import CheckpointError, ConfigError
from raypar.job import Job, ValidationConfig
from raypar.job.contract import FROZEN, contract_of_job
from raypar.launch import forward_run
from raypar.launch.choose_plan import make_plan_chooser
from raypar.launch.evaluate_run import evaluate_checkpoint
from raypar.launch.export_run import ExportRequest, FolderOptions, export_to_file, export_to_folder
from raypar.launch.forward_run import Cluster
from raypar.launch.launch_options import LaunchOptions
from raypar.launch.resume import prepare_resumed_run
from raypar.plan import ParallelPlan
from raypar.storage.checkpoint_store import open_checkpoint
from raypar.worker.checkpoint.checkpoint_files import load_manifest
from raypar.worker.checkpoint.frozen_table import parse_frozen_table
from raypar.worker.checkpoint.manifest import DTYPES
from raypar.worker.layer_graph_of_job import make_layer_graph
from raypar.worker.pretrained.frozen_values import (
    AllTensors,
    check_frozen_values,
    make_frozen_table,
    weights_hash_of_checkpoint,
)
from raypar.worker.pretrained.initial_values import with_weights_fingerprint
from raypar.worker.pretrained.open_weights import open_weights
from raypar.worker.pretrained.weights_file import WeightsFile
from raypar.worker.run_in_one_process import OneProcessRun

pytestmark = pytest.mark.part(5)

PLANS = [{"pp": 2, "dp": 2}, {"pp": 4}, {"dp": 2}, {"tp": 2}]


def save(local: OneProcessRun, folder: Path, done: int, table: Any) -> Path:
    """A checkpoint of the workers' state, as a run that leaves out the values of `table` saves it."""
    begun = checkpoint_folders.create_checkpoint(folder, done)
    for core in local.cores:
        core.start_save(begun)
    beside = {} if table is None else {FROZEN: table.as_json()}
    return checkpoint_folders.commit_checkpoint(
        begun, [core.save_result() for core in local.cores], steps_done=done, contract={**contract_of_job(local.spec), **beside}
    )


class Saved:
    """A run with adapters on 2 x 2: checkpoints after two steps with all values and without frozen ones, and its end."""

    def __init__(self, kind: str, room: Path) -> None:
        folder = save_base(room / "base", kind, tie_word_embeddings=True)
        self.base, self.room, self.job = Path(folder), room, job(folder, LORA[kind], checkpoint={"only": "trained"})
        spec = with_weights_fingerprint(self.job)
        graph = make_layer_graph(spec)
        self.table = make_frozen_table(spec, graph)
        assert self.table is not None
        with OneProcessRun(spec, ParallelPlan.mesh(pp=2, dp=2, layers=len(graph.layers)), "1f1b", graph=graph) as run:
            for step in range(2):
                run.step(step)
            self.whole = save(run, room / "whole" / "checkpoints", 2, None)
            for core in run.cores:
                core.spec = core.spec.without_saving(self.table.tensors)
            self.small = save(run, room / "small" / "checkpoints", 2, self.table)
            run.step(2)
            self.end = {name: copies[0].detach().clone() for name, copies in run.parameters().items()}
        self.without_folder = self.job.replace(init_from=None)
        self.graph = make_layer_graph(self.without_folder)
        for name in ("whole", "small"):
            (room / name / "job.yaml").write_text(self.job.to_yaml())


@pytest.fixture(scope="module")
def made() -> dict[str, Saved]:
    """Those that a test has asked for."""
    return {}


@pytest.fixture(params=["llama", "gpt2"])
def saved(request: pytest.FixtureRequest, made: dict[str, Saved], tmp_path_factory: pytest.TempPathFactory) -> Saved:
    if request.param not in made:
        made[request.param] = Saved(request.param, tmp_path_factory.mktemp(request.param))
    return made[request.param]


def test_a_checkpoint_and_its_manifest_hold_only_what_was_trained(saved: Saved):
    there = {entry.name for entry in load_manifest(saved.small).entries}
    assert there and all("lora_" in name for name in there if "weight" in name), there
    files = [sum(path.stat().st_size for path in folder.glob("*.safetensors")) for folder in (saved.small, saved.whole)]
    assert files[0] < files[1] / 2
    small, whole = AllTensors(saved.small), AllTensors(saved.whole)
    assert dict(small).keys() == dict(whole).keys() and all(torch.equal(small[name], whole[name]) for name in whole)
    assert load_manifest(saved.small).ties == load_manifest(saved.whole).ties
    assert weights_hash_of_checkpoint(saved.small) == weights_hash_of_checkpoint(saved.whole)


@pytest.mark.ci
@pytest.mark.parametrize(
    ("saved", "mesh"),
    [
        pytest.param(kind, mesh, id=f"{kind}-{mesh}", marks=[pytest.mark.full] * (kind == "gpt2" and "tp" not in mesh))
        for kind in ("llama", "gpt2")
        for mesh in PLANS
    ],
    indirect=["saved"],
)
def test_a_run_goes_on_from_it_with_the_same_bits_on_any_plan(mesh: dict[str, int], saved: Saved):
    spec, graph = saved.without_folder, saved.graph
    ends = []
    for checkpoint in (saved.small, saved.whole) if "tp" in mesh else (saved.small,):
        with OneProcessRun(spec, ParallelPlan.mesh(layers=len(graph.layers), **mesh), "1f1b", graph=graph) as run:
            for core in run.cores:
                core.load(checkpoint)
            run.step(2)
            ends.append({name: copies[0].detach().clone() for name, copies in run.parameters().items()})
    wanted = ends[-1] if "tp" in mesh else saved.end  # shards add in another order
    assert ends[0].keys() == wanted.keys() and all(torch.equal(value, wanted[name]) for name, value in ends[0].items())


@pytest.mark.ci
def test_load_export_and_evaluate_use_the_folder_s_values(saved: Saved, tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    loaded, wanted = (raypar.load(saved.room / name).state_dict() for name in ("small", "whole"))
    assert loaded.keys() == wanted.keys() and all(torch.equal(loaded[name], wanted[name]) for name in wanted)
    for name in ("small", "whole"):
        export_to_file(ExportRequest(str(saved.room / name), ".", None, str(tmp_path / f"{name}.safetensors")), print)
        request = ExportRequest(str(saved.room / name), ".", None, str(tmp_path / name))
        export_to_folder(request, FolderOptions(merge=True), print)
    with open_weights(tmp_path / "small.safetensors") as one, open_weights(tmp_path / "whole.safetensors") as other:
        assert one.names.keys() == other.names.keys() and one.fingerprint() == other.fingerprint()
    with open_weights(tmp_path / "small") as one, open_weights(tmp_path / "whole") as other:
        assert one.fingerprint() == other.fingerprint()
    monkeypatch.setattr(forward_run, "run_passes", PassesInOneProcess({"pp": 2}))
    losses = [
        evaluate_checkpoint(
            saved.job, open_checkpoint(path), ValidationConfig(function=saved.job.data.function, samples=9), print, Cluster()
        )["validation_loss"]
        for path in (saved.small, saved.whole)
    ]
    assert losses[0] == losses[1]


def test_the_line_of_an_export_opens_the_adapters_and_the_folder_has_the_cache_of_the_one_before(
    saved: Saved, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    import peft
    import transformers

    monkeypatch.chdir(saved.room)
    loaded = raypar.load(saved.room / "small")
    (saved.room / "small" / "job.yaml").rename(tmp_path / "job.yaml")  # as of a run from Python with objects
    kind = "gpt2" if "gpt2" in str(saved.room) else "llama"
    given = raypar.load(saved.room / "small", model={"pretrained": str(saved.base), "adapter": LORA[kind]}).state_dict()
    assert all(torch.equal(given[name], value) for name, value in loaded.state_dict().items())
    (tmp_path / "job.yaml").rename(saved.room / "small" / "job.yaml")
    request = ExportRequest(str(saved.room / "small"), ".", None, str(tmp_path / "adapters"))
    line = export_to_folder(request, FolderOptions(), print)[0]
    opens = line.partition("adapters alone: ")[2].partition(" opens it")[0]
    opened = eval(opens, {"peft": peft, **vars(transformers)})
    found, wanted = opened.state_dict(), loaded.state_dict()
    assert found.keys() == wanted.keys() and all(torch.equal(found[name], wanted[name]) for name in wanted)
    assert " after step 2 " in line or " after 2 steps " in line
    export_to_folder(replace(request, out=str(tmp_path / "merged")), FolderOptions(merge=True), print)
    assert transformers.AutoConfig.from_pretrained(tmp_path / "merged").use_cache
    assert loaded.config.use_cache and not saved.job.model.resolve()(saved.base).config.use_cache  # type: ignore[union-attr]


def uses(saved: Saved) -> dict[str, Any]:
    """What needs the frozen values."""
    checkpoint = open_checkpoint(saved.small)
    options = LaunchOptions(saved.job.replace(steps=STEPS), lambda chosen: None)  # type: ignore[arg-type,return-value]
    return {
        "load": lambda: raypar.load(saved.room / "small"),
        "export": lambda: export_to_file(ExportRequest(str(saved.room / "small"), ".", None, str(saved.room / "x.pt")), print),
        "resume": lambda: prepare_resumed_run(checkpoint, options, make_plan_chooser(options.job), print),
        "evaluate": lambda: forward_run.run_passes(saved.job, checkpoint, 1, print, Cluster(), print),
    }


@pytest.mark.ci
@pytest.mark.parametrize("use", ["load", "export", "resume", "evaluate"])
def test_a_folder_that_is_gone_or_another_is_one_error(use: str, saved: Saved):
    call, moved = uses(saved)[use], saved.base.with_name("moved")
    if use == "resume":
        call()
    saved.base.rename(moved)
    try:
        with pytest.raises(
            CheckpointError, match=r"(?s)frozen tensors are those of .*base, which cannot be read.*\n  cure: put"
        ):
            call()
        shutil.copytree(moved, saved.base)
        (file,) = sorted(saved.base.glob("*.safetensors"))[-1:]
        content = bytearray(file.read_bytes())
        content[-1] ^= 1
        file.write_bytes(content)
        with pytest.raises(CheckpointError, match=r"with the fingerprint [0-9a-f]{12}, and those there have [0-9a-f]{12}"):
            call()
    finally:
        shutil.rmtree(saved.base, ignore_errors=True)
        moved.rename(saved.base)


def test_a_folder_of_which_a_later_part_was_changed_is_an_error_although_its_fingerprint_is_the_same(
    saved: Saved, monkeypatch: pytest.MonkeyPatch
):
    """As a value far behind the first 4 KiB of a tensor: those here are small."""
    call, kept = uses(saved)["evaluate"], saved.base.with_name("kept")
    assert saved.table is not None
    fingerprint = saved.table.fingerprint
    monkeypatch.setattr(WeightsFile, "fingerprint", lambda file: fingerprint)
    shutil.copytree(saved.base, kept)
    try:
        (file,) = sorted(saved.base.glob("*.safetensors"))[-1:]
        content = bytearray(file.read_bytes())
        content[-1] ^= 1
        file.write_bytes(content)
        with pytest.raises(CheckpointError, match=r"with the digest [0-9a-f]{12}, and those there have [0-9a-f]{12}: some of"):
            call()
    finally:
        shutil.rmtree(saved.base)
        kept.rename(saved.base)


def test_a_checkpoint_of_before_the_digest_was_kept_is_read(saved: Saved):
    manifest = load_manifest(open_checkpoint(saved.small))
    assert manifest.frozen is not None and manifest.frozen.pieces is not None
    table = {name: value for name, value in manifest.frozen.as_json().items() if name != "pieces"}
    old = parse_frozen_table(table, DTYPES)
    assert old is not None and old.pieces is None and old.as_json() == table
    check_frozen_values(replace(manifest, contract={**manifest.contract, FROZEN: table}))


def test_what_cannot_be_is_refused(saved: Saved):
    options = LaunchOptions(saved.job, lambda chosen: None)  # type: ignore[arg-type,return-value]
    with pytest.raises(CheckpointError, match=r"holds all values, and checkpoint\.only is trained"):
        prepare_resumed_run(open_checkpoint(saved.whole), options, make_plan_chooser(saved.job), print)
    with pytest.raises(CheckpointError, match=r"(?s)holds only what was trained.*cure: make one file of both"), \
            open_weights(saved.small):  # fmt: skip
        pass
    with pytest.raises(ConfigError, match=r"checkpoint\.only is trained, and nothing says where the frozen values come from"):
        Job(steps=1, batch_size=1, microbatches=1, model="a:b", loss="a:b", data="a:b", checkpoint={"only": "trained"})


@pytest.mark.ci
def test_a_run_without_frozen_values_is_refused(tmp_path: Path):
    """Its checkpoints would hold all values, from which no run with `only: trained` may go on."""
    torch.manual_seed(1)
    torch.save(nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 1)).state_dict(), tmp_path / "w.pt")
    trainer = raypar.Trainer(
        model=lambda: nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 1)), init_from=tmp_path / "w.pt",
        loss=nn.functional.mse_loss, data=[(torch.ones(2), torch.ones(1))] * 4, steps=1, batch_size=2, microbatches=1,
        checkpoint={"only": "trained"}, run_dir=tmp_path / "runs", address="none:1",
    )  # fmt: skip
    with pytest.raises(
        ConfigError, match=r"the model has no frozen parameter that begins as init_from has it.*\n  cure: leave"
    ):
        trainer.fit()
