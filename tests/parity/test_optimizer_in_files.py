"""`plan.optimizer_in`: optimizer state in files of a folder, with the bits of one process under every plan, saved, and through
faults; memory never holds it all."""

import errno
import os
import shutil
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from helpers import checkpoint_folders, limited_memory, optimizers, reference
from helpers.optimizer_layouts import ADAMW_IN_8_BITS, LAYERS, MUON_AND_ADAMW, job_of
from helpers.parity import PRECISIONS
from helpers.protocol import Change, World
from helpers.torch_flesh import TorchFlesh, TorchJob
from helpers.zero_layouts import by_name, put_together, small_pieces
from torch import Tensor

from raypar.errors import ConfigError
from raypar.job import AverageConfig, Job, OptimizerConfig, PlanConfig
from raypar.job.read_job import parse_job
from raypar.launch import check_offload_folder as check_offload_folder_module
from raypar.launch.check_offload_folder import check_offload_folder, lines_about_offloading
from raypar.plan import ParallelPlan
from raypar.worker.job_preflight import preflight
from raypar.worker.layer_graph_of_job import make_layer_graph
from raypar.worker.run_in_one_process import OneProcessRun
from raypar.worker.state.file_memory import FileMemoryPool
from raypar.worker.step import offloaded_optimizer
from raypar.worker.step.optimizer_state import read_optimizer_state
from raypar.worker.step.optimizer_trial import try_optimizer

SMALL = 256
"""Bytes of the smallest tensors that go to files in these tests, whose parameters are small."""
ADAMW = {"function": "torch.optim:AdamW", "args": {"lr": 0.01}, "groups": [{"match": "*.bias", "weight_decay": 0.0}]}
OPTIMIZERS = {
    "AdamW": ADAMW,
    "momentum": {"function": "torch.optim:SGD", "args": {"lr": 0.05, "momentum": 0.9}},
    "lists": {"function": "torch.optim:AdamW", "args": {"lr": 0.01, "foreach": True}},
    "state from the beginning": {"function": "torch.optim:Adagrad", "args": {"lr": 0.02}},
    "counts in group": {"function": optimizers.CountsInGroup, "args": {"lr": 0.02}},
    "counts in attribute": {"function": optimizers.CountsInAttribute, "args": {"lr": 0.02}},
    "every shape": {"function": optimizers.KeepsOddShapes},
    "8 bits": ADAMW_IN_8_BITS,
    "several": MUON_AND_ADAMW,
}
ONE = ParallelPlan.mesh(layers=LAYERS)
PLANS = {
    "one": ONE,
    "2 stages x 2 replicas": ParallelPlan.mesh(pp=2, dp=2, layers=LAYERS),
    "replicas that divide state": ParallelPlan.mesh(dp=3, layers=LAYERS).with_zero(1),
    "2 stages x replicas that divide gradients": ParallelPlan.mesh(pp=2, dp=2, layers=LAYERS).with_zero(2),
    "2 stages x replicas that divide parameters": ParallelPlan.mesh(pp=2, dp=2, layers=LAYERS).with_zero(3),
    "parameters that two of three replicas hold": ParallelPlan.mesh(dp=3, layers=LAYERS).with_zero(3, 2),
}
MORE = {
    "plain": {},
    "bf16 parameters and averages": {
        "precision": PRECISIONS["bf16 parameters"],
        "average": AverageConfig(decay=0.8, every=2, from_step=2),
    },
}


@pytest.fixture(autouse=True)
def small_runs(monkeypatch) -> Iterator[None]:
    """Owners have runs of these small parameters, too; they lie in files, and are stepped in several windows."""
    monkeypatch.setattr(FileMemoryPool, "small_bytes", SMALL)
    monkeypatch.setattr(offloaded_optimizer, "WINDOW_BYTES", 5_000)
    with small_pieces():
        yield


def job_in(folder: Path | None, optimizer: dict | list, **changes) -> Job:
    config = OptimizerConfig.model_validate(optimizer)
    spec = job_of(config, plan=PlanConfig(optimizer_in=None if folder is None else str(folder)), **changes)
    trial = preflight(spec).optimizer
    assert trial is not None
    return spec.with_undivided(trial.undivided)


def mapped(folder: Path) -> list[range]:
    """The addresses at which this process has files of a folder in its memory."""
    lines = [line.split() for line in Path("/proc/self/maps").read_text().splitlines() if str(folder) in line]
    return [range(*(int(end, 16) for end in fields[0].split("-"))) for fields in lines]


def in_memory(run: OneProcessRun, folder: Path) -> list[str]:
    """What of optimizers' state and of averages lies in no file of the folder, though it is large enough."""
    files, found = mapped(folder), []
    for core in run.cores:
        for optimizer in core.step_commit.optimizers.values():
            state = read_optimizer_state(optimizer)
            tensors = [(name, key, value) for name, of in state.parameters.items() for key, value in of.items()]
            for name, key, value in (*tensors, *((name, "average", value) for name, value in state.averages.items())):
                if isinstance(value, Tensor) and value.nbytes >= SMALL and not any(value.data_ptr() in f for f in files):
                    found.append(f"{key} of {name}")
    return found


def equal(run: OneProcessRun, want: dict[str, Tensor]) -> bool:
    """Whether what owners have is all of what is wanted."""
    found = by_name(put_together(run, lambda core, index, each: each.parameter.detach()))
    return found.keys() == want.keys() and all(torch.equal(copy, want[name]) for name in found for copy in found[name])


@pytest.mark.part(9)
@pytest.mark.parametrize("more", MORE)
@pytest.mark.parametrize("plan", PLANS)
@pytest.mark.parametrize("which", OPTIMIZERS)
def test_state_in_files_has_the_bits_of_one_process(which: str, plan: str, more: str, tmp_path: Path):
    folder = tmp_path / "made" / "here"
    spec = job_in(folder, OPTIMIZERS[which], **MORE[more])
    graph = make_layer_graph(spec)
    want = reference.train(graph, spec).parameters
    with OneProcessRun(spec, PLANS[plan], "1f1b", graph=graph) as run:
        for step in range(spec.steps):
            run.step(step)
        assert equal(run, want)
        assert not in_memory(run, folder)
        assert any(len(each.optimizers) > 1 for core in run.cores for each in core.step_commit.optimizers.values())
        if more != "plain":
            files = mapped(folder)
            masters = [
                each.parameter
                for core in run.cores
                for index, owned in core.step_commit.owned.items()
                for each in owned
                if each.name in core.stages[index].weights.rounded and each.parameter.nbytes >= SMALL
            ]
            assert masters and all(any(master.data_ptr() in file for file in files) for master in masters)
    assert not (folder.exists() and any(folder.iterdir())), "whatever ends a worker, nothing is left"


@pytest.mark.parametrize("plan", ["one", "2 stages x replicas that divide gradients"])
def test_checkpoints_are_the_same_and_go_on_with_and_without_files(plan: str, tmp_path: Path):
    spec = {kind: job_in(folder, ADAMW, **MORE["bf16 parameters and averages"]) for kind, folder in FOLDERS(tmp_path).items()}
    graph = make_layer_graph(spec["files"])
    want, saved = reference.train(graph, spec["files"]).parameters, {}
    for kind in spec:
        with OneProcessRun(spec[kind], PLANS[plan], "1f1b", graph=graph) as run:
            for step in range(3):
                run.step(step)
            begun = checkpoint_folders.create_checkpoint(tmp_path / kind, 3)
            for core in run.cores:
                core.start_save(begun)
            records = [core.save_result() for core in run.cores]
            saved[kind] = checkpoint_folders.commit_checkpoint(begun, records, steps_done=3, contract={}), records
    assert saved["files"][1] == saved["memory"][1], "sizes and digests of the files, and all that is said of them"
    for kind, other in (("files", "memory"), ("memory", "files")):
        with OneProcessRun(spec[kind], ParallelPlan.mesh(dp=2, layers=LAYERS), "1f1b", graph=graph) as run:
            for core in run.cores:
                core.load(saved[other][0])
            assert kind == "memory" or not in_memory(run, tmp_path / "folder")
            for step in range(3, 6):
                run.step(step)
            assert equal(run, want)


def FOLDERS(root: Path) -> dict[str, Path | None]:
    return {"files": root / "folder", "memory": None}


HISTORIES = {
    "a replica dies": (ParallelPlan.mesh(dp=2, pp=2, layers=LAYERS), 0, Change(3, 0.0, "kill")),
    "an owner dies": (ParallelPlan.mesh(dp=2, pp=2, layers=LAYERS).with_zero(1), 1, Change(3, 0.0, "kill")),
    "a stage moves to others": (ParallelPlan.mesh(dp=2, pp=2, layers=LAYERS), 0, Change(3, 0.0, "drain", 2)),
    "a worker joins": (ParallelPlan.mesh(pp=3, layers=LAYERS), 0, Change(3, 0.0, "join")),
    "the mirror has the only copy": (ParallelPlan.mesh(pp=3, layers=LAYERS), 1, Change(4, 0.0, "kill")),
}


def final_hash(spec: Job, plan: ParallelPlan, mirror_every: int = 0, *changes: Change) -> int:
    job = TorchJob(spec, make_layer_graph(spec), mirror_every=mirror_every)
    world = World(job, plan, changes=changes, flesh=TorchFlesh, tick_ms=5.0, max_workers=8, grow_after_s=0.0)
    try:
        world.run()
        assert world.over is not None and world.over.end == "done", world.tell(str(world.over))
        assert bool(changes) == bool(world.changed)
        return world.final_hash()
    finally:
        world.flesh.close()


@pytest.mark.part(3)
@pytest.mark.parametrize("history", HISTORIES)
def test_state_in_files_comes_through_faults(history: str, tmp_path: Path):
    plan, mirror_every, change = HISTORIES[history]
    files, memory = (job_in(folder, ADAMW, steps=8) for folder in FOLDERS(tmp_path).values())
    assert final_hash(files, plan, mirror_every, change) == final_hash(memory, ONE)
    assert not any((tmp_path / "folder").iterdir())


def test_optimizers_that_make_their_state_anew_in_each_step_have_it_in_the_same_files(tmp_path: Path):
    class Replaces(torch.optim.SGD):
        def step(self, closure=None):
            for group in self.param_groups:
                for parameter in group["params"]:
                    mean = self.state[parameter].get("mean", torch.zeros_like(parameter))
                    self.state[parameter]["mean"] = 0.9 * mean + parameter.grad
                    parameter.data -= 0.1 * self.state[parameter]["mean"]

    pool, weight = FileMemoryPool(str(tmp_path)), torch.nn.Parameter(torch.ones(64, 64).t())
    made = offloaded_optimizer.build_offloaded_optimizers(
        OptimizerConfig(function=Replaces, args={"lr": 0.1}), {"weight": weight}, pool
    )
    for _ in range(4):
        weight.grad = torch.ones_like(weight)
        made.step()
    (state,) = made.optimizers[0].state.values()
    assert pool.held_bytes == weight.nbytes and any(state["mean"].data_ptr() in file for file in mapped(tmp_path))
    assert torch.allclose(state["mean"], torch.full((64, 64), 3.439)) and state["mean"].stride() == weight.stride()


# -- memory --------------------------------------------------------------------------------------------------------------------


def limited(folder: str, room_mib: int) -> subprocess.CompletedProcess[str]:
    words = [sys.executable, "-m", "helpers.limited_memory", folder, str(room_mib)]
    environment = {
        **os.environ,
        "PYTHONPATH": os.pathsep.join([str(Path(__file__).parents[1]), str(Path(__file__).parents[2])]),
    }
    return subprocess.run(words, capture_output=True, text=True, env=environment, timeout=120)


def test_a_worker_whose_optimizer_state_alone_exceeds_its_limit_trains_saves_and_resumes(tmp_path: Path):
    files = limited(str(tmp_path), limited_memory.STATE_MIB - 8)
    assert files.returncode == 0, files.stderr
    assert not any(tmp_path.iterdir())


@pytest.mark.ci
def test_it_has_the_hash_of_one_without_a_limit_and_fails_under_it_otherwise(tmp_path: Path):
    room = limited_memory.STATE_MIB - 8
    files, without, free = limited(str(tmp_path), room), limited("-", room), limited("-", 0)
    assert files.returncode == free.returncode == 0 and files.stdout == free.stdout
    assert without.returncode and "can't allocate memory" in without.stderr


# -- bad input -----------------------------------------------------------------------------------------------------------------


def test_a_folder_that_takes_no_state_is_an_error_of_two_lines(tmp_path: Path, monkeypatch):
    spec, graph = job_in(tmp_path, ADAMW), make_layer_graph(job_in(None, ADAMW))

    def full(descriptor: int, start: int, size: int) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    with OneProcessRun(spec, ONE, "1f1b", graph=graph) as run:
        monkeypatch.setattr(os, "posix_fallocate", full)
        with pytest.raises(ConfigError, match=r"plan.optimizer_in .* takes no 0.0 MiB of optimizer state: .*No space") as error:
            run.step(0)
    assert error.value.cure.startswith("give a folder that workers can write to, on a local disk with room for about three")


def test_it_is_known_before_the_run_what_the_folder_has_no_room_for(tmp_path: Path, monkeypatch):
    spec = job_in(tmp_path / "not" / "yet", ADAMW)
    sheets = [SimpleNamespace(optimizer_files=9 << 20, state={"parameter": 1 << 40})] * 2
    check_offload_folder(spec, sheets)
    assert not any((tmp_path / "not" / "yet").iterdir())
    monkeypatch.setattr(shutil, "disk_usage", lambda path: SimpleNamespace(free=17 << 20))
    with pytest.raises(ConfigError, match=r"optimizer_in .* has room for 17 MiB, and all workers together offload 18 MiB"):
        check_offload_folder(spec, sheets)
    (tmp_path / "file").write_text("")
    with pytest.raises(ConfigError, match=r"plan.optimizer_in .*here takes none of optimizer state: .*directory"):
        check_offload_folder(job_in(tmp_path / "file" / "here", ADAMW), sheets)
    check_offload_folder(job_in(None, ADAMW), sheets)


def test_a_folder_that_another_run_uses_is_refused_until_it_ends(tmp_path: Path, monkeypatch):
    monkeypatch.setattr(check_offload_folder_module, "ENDING_S", 0.0)
    spec = job_in(tmp_path, ADAMW)
    pools = [FileMemoryPool(str(tmp_path)) for _ in range(2)]
    tensors = [pool.empty((10_000,), torch.float32) for pool in pools]
    while len(pools) and len(tensors):
        with pytest.raises(ConfigError, match=r"plan.optimizer_in .* is used by another run on this machine: each would take"):
            check_offload_folder(spec, ())
        pools.pop()
    check_offload_folder(spec, ())


def test_a_folder_on_another_machine_is_refused(tmp_path: Path, monkeypatch):
    mounts = tmp_path / "mounts"
    mounts.write_text(f"36 35 98:0 / / rw - ext4 /dev/a rw\n37 36 0:50 / {tmp_path}/a\\040b rw shared:1 - nfs4 server:/x rw\n")
    monkeypatch.setattr("raypar.files.file_systems.MOUNTS", str(mounts))
    folder = tmp_path / "a b"
    with (
        pytest.raises(
            ConfigError, match=r"plan.optimizer_in .*a b is on another machine \(nfs4\): every step would wait"
        ) as error,
        OneProcessRun(job_in(folder, ADAMW), ONE, "1f1b"),
    ):
        pass
    assert error.value.cure.startswith("give a folder that workers can write to, on a local disk")
    with pytest.raises(ConfigError, match=r"on another machine \(nfs4\)"):
        check_offload_folder(job_in(folder, ADAMW), ())
    FileMemoryPool(str(tmp_path / "a")).empty((1000,), torch.float32)


def test_gpus_have_their_own_memory():
    job = "model: {function: helpers.tiny_job:model}\nloss: helpers.tiny_job:loss\ndata: {function: helpers.tiny_job:data}\n"
    job += "steps: 2\nbatch_size: 8\nmicrobatches: 4\ndevice: gpu\nplan: {optimizer_in: /fast}\n"
    with pytest.raises(
        ConfigError, match=r"plan.optimizer_in is /fast, and device is gpu: files can hold what a processor steps"
    ):
        parse_job(job)


def test_an_optimizer_that_couples_parameters_is_refused():
    trial = try_optimizer(OptimizerConfig(function=optimizers.NormalisesAll, args={"lr": 0.1}), {"a": (8, 8), "b": (8,)})
    with pytest.raises(ConfigError, match=r"cannot be used with plan.optimizer_in: its step of one parameter") as error:
        trial.check_steps_in_windows()
    assert "leave plan.optimizer_in out" in error.value.cure and "measured: " in error.value.cure
    try_optimizer(OptimizerConfig.model_validate(ADAMW), {"a": (8, 8), "b": (8,)}).check_steps_in_windows()


def test_a_line_says_what_lies_in_memory_all_the_same(tmp_path: Path, monkeypatch):
    job = "model: {function: helpers.tiny_job:model}\nloss: helpers.tiny_job:loss\ndata: {function: helpers.tiny_job:data}\n"
    job += "steps: 2\nbatch_size: 8\nmicrobatches: 4\nplan: {optimizer_in: /fast}\n"
    (line,) = lines_about_offloading(parse_job(job + "elastic: {}\n"))
    assert line.endswith("cure: set elastic.mirror_in: FOLDER, too, or elastic.mirror: off")
    assert not lines_about_offloading(parse_job(job + "elastic: {mirror_in: /fast}\n"))
    assert not lines_about_offloading(parse_job(job + "elastic: {mirror: off}\n")) and not lines_about_offloading(
        parse_job(job)
    )
    (tmp_path / "mounts").write_text("36 35 0:9 / /fast rw - tmpfs none rw\n")
    monkeypatch.setattr("raypar.files.file_systems.MOUNTS", str(tmp_path / "mounts"))
    (line,) = lines_about_offloading(parse_job(job))
    assert line.startswith("plan.optimizer_in /fast is on tmpfs here, whose files lie in memory: nothing is saved")
