"""Training on Ray from end to end, on one local Ray shared by all tests of this file."""

import contextlib
import hashlib
import io
import json
import os
import re
import shutil
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, replace
from pathlib import Path
from types import SimpleNamespace

import psutil
import pytest
import torch
from helpers.parity import Layout
from helpers.parity_on_ray import check_on_ray
from helpers.tiny_job import Diary, write_job
from helpers.trainee import Undisturbed
from ray.experimental.internal_kv import _internal_kv_list

from raypar import Trainer
from raypar.actors.queue_of_waiting_runs import PlacementQueue, RayTicketStore, look_at_cluster, placement_turn, ticket_key
from raypar.actors.ray_connection import connect_ray
from raypar.actors.ray_lease_store import RayLeaseStore
from raypar.cli import main
from raypar.elastic.run_policy import RunPolicy
from raypar.errors import (
    CheckpointError,
    ClusterError,
    ConfigError,
    LeaseHeldError,
    NonFiniteError,
    OutOfMemory,
    UserCodeError,
    WorkerLost,
)
from raypar.job.contract import contract_of_job
from raypar.job.read_job import load_job
from raypar.launch import Result
from raypar.launch.run_on_storage import new_run_on_storage, resumed_run_on_storage
from raypar.storage.filesystems import uri_of_filesystem_object
from raypar.storage.run_folder import RunFolder
from raypar.storage.run_lease import Lease
from raypar.worker.checkpoint import checkpoint_files
from raypar.worker.checkpoint.checkpoint_files import CheckpointTensors
from raypar.worker.run_in_one_process import OneProcessRun


@pytest.fixture(scope="module", autouse=True)
def own_ray():
    """raypar uses the Ray that a process has joined, and leaves it alone; at the end none of its processes is left."""
    before = set(psutil.Process().children(recursive=True))
    with connect_ray(None, 4, Path(__file__).parents[1]):
        yield
        family = set(psutil.Process().children(recursive=True)) - before
    assert family and psutil.wait_procs(family, timeout=10)[1] == []


@pytest.fixture
def job(tmp_path, monkeypatch):
    """`job("--set", ...)` runs `raypar train` on the tiny job and returns its exit code."""
    monkeypatch.chdir(Path(__file__).parents[1])
    path = write_job(tmp_path)

    def train(*words: str) -> int:
        return main(["train", str(path), *words])

    return train


def nothing_left() -> bool:
    """No placement group, actor or key of a run is left on the cluster."""
    import ray
    from ray.util import list_named_actors, placement_group_table

    groups = [g for g in placement_group_table().values() if g["state"] != "REMOVED"]
    return (
        not groups and not list_named_actors(all_namespaces=True) and not _internal_kv_list("raypar/") and ray.is_initialized()
    )


def hash_in(text: str) -> str:
    """The last line's."""
    return re.fullmatch(r"weights sha256 ([0-9a-f]{64})", text.strip().splitlines()[-1])[1]


def lines(path: Path) -> list[dict]:
    return [json.loads(line) for line in path.read_text().splitlines()]


NO_LONGER_KEPT = (
    *("optimizer.function=helpers.optimizers:KeepsListLater", "optimizer.args={above: 0.01}"),
    "lr_schedule=helpers.optimizers:doubles_after_two",
)
"""An optimizer whose state after the third step no file holds, which no trial sees."""


@pytest.mark.ci
def test_a_run_whose_optimizer_state_can_no_longer_be_saved_ends_with_an_error_and_its_weights(job, tmp_path, capfd):
    settings = [word for setting in NO_LONGER_KEPT for word in ("--set", setting)]
    assert job(*settings, "--set", "plan={stages: 1}", "--set", "checkpoint={every: 0}") == 1
    said = capfd.readouterr().err
    assert "cannot be saved: optimizer state 'factors' of layer" in said and "is a list, neither tensor nor number" in said
    (weights,) = (tmp_path / "runs/tiny/checkpoints").iterdir()
    steps = int(re.fullmatch("weights_([0-9]{8})", weights.name)[1])
    assert 4 <= steps <= 6, "found after step 4; the steps under way are made"
    assert f"Parameters and buffers are in {weights}" in said and f"init_from={weights}" in said
    there = checkpoint_files.checkpoint_weights_hash(weights)
    assert there == Undisturbed.of(tmp_path, *NO_LONGER_KEPT, f"steps={steps}").weights_sha256

    assert main(["resume", str(tmp_path / "runs/tiny")]) == 2
    assert "has no usable checkpoint" in capfd.readouterr().err
    assert Undisturbed.of(tmp_path, "steps=1", f"init_from={weights}").weights_sha256 != there
    assert nothing_left()


@dataclass(frozen=True)
class FirstRun:
    """An elastic run of the tiny job on two workers, one of which has been slow to read a sample, by `raypar train`."""

    tmp_path: Path
    settings: list[str]
    """Those that the job's bits depend on; the sample is slow no more."""
    out: str
    """What was printed."""
    titles: list[str]
    """Of the processes below this one, at its end."""


@pytest.fixture(scope="module")
def first_run(own_ray, tmp_path_factory) -> FirstRun:
    folder = tmp_path_factory.mktemp("first")
    schedule = f"lr_schedule={{function: helpers.tiny_job:noting_schedule, args: {{folder: {folder}}}}}"
    slow = f"data.args={{size: 24, slow: {folder / 'slow'}, slow_s: 4.0}}"
    settings = ["--set", schedule, "--set", slow, "--set", "plan={replicas: 2}"]
    titles = []
    with pytest.MonkeyPatch.context() as patch, contextlib.redirect_stdout(io.StringIO()) as out:
        patch.chdir(Path(__file__).parents[1])
        words = [*settings, "--set", "elastic={min_workers: 1, step_deadline_s: 60}"]
        assert main(["train", str(write_job(folder)), *words]) == 0
        for process in psutil.Process().children(recursive=True):
            with contextlib.suppress(psutil.NoSuchProcess):  # a worker that ends
                titles.append(" ".join(process.cmdline()))
    return FirstRun(folder, settings, out.getvalue(), titles)


def test_a_run_loads_and_starts_only_what_it_needs_and_says_whom_it_waits_for(first_run):
    """A start is mostly the loading of modules: PyTorch's compiler and sympy are half as much again in every worker."""
    noted = {path.name: path.read_text() for path in first_run.tmp_path.glob("step11-*")}
    assert len(noted) == 2 and set(noted.values()) == {"numpy torch"}
    assert any("log_monitor.py" in title for title in first_run.titles)
    assert not [title for title in first_run.titles if "dashboard/dashboard.py" in title or "autoscaler" in title]
    waits = r"no news for [2-4] s; now waiting for 1 of 2 workers \(worker \d is in step \d+, reading sample 21\)"
    assert re.search(waits, first_run.out)


def test_a_run_leaves_its_folder_and_another_plan_ends_in_the_same_bits_also_when_resumed(first_run, monkeypatch, capfd):
    monkeypatch.chdir(Path(__file__).parents[1])
    tmp_path, out = first_run.tmp_path, first_run.out
    assert [f"[{i}/6]" in out for i in range(1, 7)] == [True] * 6
    first = hash_in(out)
    folder = tmp_path / "runs/tiny"
    made = {p.name for p in folder.iterdir()}
    assert made >= {"job.yaml", "plan.json", "metrics.jsonl", "trace.json", "swimlane.svg", "checkpoints"}
    metrics = lines(folder / "metrics.jsonl")
    assert [m["step"] for m in metrics if "loss" in m] == list(range(1, 13))
    assert [m["step"] for m in metrics if "validation_loss" in m] == [6, 12]
    assert "predicted" in (folder / "swimlane.svg").read_text() and "measured" in (folder / "swimlane.svg").read_text()
    assert sorted(p.name for p in (folder / "checkpoints").iterdir()) == ["step_00000008", "step_00000012"]
    there = CheckpointTensors(folder / "checkpoints/step_00000012")
    named = b"".join(name.encode() + b"\0" + there[name].numpy().tobytes() for name in sorted(there))
    assert hashlib.sha256(named).hexdigest() == first
    held = json.loads((folder / "totals.json").read_text())["worker_memory_bytes"]
    assert len(held) == 2 and all(0 < each["empty"] <= each["rss"] for each in held)
    assert nothing_left()

    page = tmp_path / "tiny.html"
    assert main(["report", str(folder), "--out", str(page)]) == 0
    shown = re.sub(r"<style>.*?</style>", "", page.read_text(), flags=re.DOTALL)
    assert shown.count("<svg") == 4 and "predicted before the run" in shown and "measured: step 12" in shown
    words = " ".join(re.sub(r"<[^>]+>", " ", shown).split())
    for told in ("steps 12 of 12", "layer0 .. layer3", "stage 0, replica 1 worker 1, node", f"torch {torch.__version__}"):
        assert told in words, told
    assert "not recorded" not in words and "://" not in shown

    other = ["--set", "plan={stages: 2}", "--set", "epochs=4", "--stop-at-step", "5"]
    assert main(["train", str(tmp_path / "tiny.yaml"), *first_run.settings, *other]) == 0
    out = capfd.readouterr().out
    assert hash_in(out) != first and ": 12 steps (4 epochs)" in out
    run = str(tmp_path / "runs/tiny-2")
    assert main(["status", run]) == 0 and "5 of 12" in capfd.readouterr().out
    assert main(["resume", run, "--set", "plan={stages: 1}"]) == 0
    assert hash_in(capfd.readouterr().out) == first
    assert [m["step"] for m in lines(Path(run) / "metrics.jsonl") if "loss" in m] == list(range(1, 13))
    assert nothing_left()

    assert main(["resume", run, "--set", "seed=4", "--set", "steps=20"]) == 2
    assert "seed was 3, is 4" in capfd.readouterr().err
    assert main(["resume", run]) == 2
    said = capfd.readouterr().err
    assert "12 of 12 steps already done" in said and "raise epochs (--set epochs=8" in said


RAGGED = """
name: ragged
seed: 3
steps: 4
batch_size: 10
microbatches: 4
model: helpers.ragged:Reader
loss: helpers.ragged:next_word
data: {function: helpers.ragged:Sentences, target: labels, collate: {function: helpers.ragged:Noisy, args: {share: 0.2}}}
"""


@pytest.mark.full
def test_batches_of_the_users_own_function_have_the_bits_of_one_process_also_when_another_plan_resumes(
    tmp_path, monkeypatch, capfd
):
    monkeypatch.chdir(Path(__file__).parents[1])
    file, run = tmp_path / "ragged.yaml", str(tmp_path / "runs/ragged")
    file.write_text(RAGGED + f"run_dir: {tmp_path / 'runs'}\n")
    spec = load_job(file)
    with OneProcessRun(spec, spec.to_plan(5), "1f1b") as local:
        for step in range(4):
            local.step(step)
        named = b"".join(
            name.encode() + b"\0" + copies[0].contiguous().numpy().tobytes()
            for name, copies in sorted(local.parameters().items())
        )
    two = ["--set", "plan={stages: 2}", "--stop-at-step", "2"]
    assert main(["train", str(file), *two]) == 0
    assert main(["resume", run, "--set", "plan={replicas: 2}"]) == 0
    assert hash_in(capfd.readouterr().out) == hashlib.sha256(named).hexdigest()


@pytest.mark.ci
def test_a_resume_with_other_values_says_so_once_and_the_run_s_record_and_checkpoints_keep_it(first_run, tmp_path, capfd):
    run = str(shutil.copytree(first_run.tmp_path / "runs/tiny", tmp_path / "tiny"))
    line = "from step 13 on: batch_size 8 -> 12; clip_norm 1.0 -> 0.01"
    changed = ["--set", "batch_size=12", "--set", "clip_norm=0.01", "--set", "plan={stages: 1}"]
    assert main(["resume", run, *changed, "--set", "steps=14"]) == 0
    out = capfd.readouterr().out
    assert f"12 steps are done; {line}" in out
    assert main(["status", run]) == 0 and capfd.readouterr().out.count(line) == 1
    assert main(["report", run, "--out", str(tmp_path / "tiny.html")]) == 0
    assert line.replace(">", "&gt;") in (tmp_path / "tiny.html").read_text()
    (change,) = [event for event in lines(Path(run) / "events.jsonl") if event["kind"] == "job_changed"]
    assert (change["text"], change["step"]) == (line, 13)
    manifest = checkpoint_files.load_manifest(f"{run}/checkpoints/step_00000014")
    assert [(one["steps_done"], one["was"]) for one in manifest.contract["changes"]] == [
        (12, {"batch_size": 8, "clip_norm": 1.0})
    ]
    assert nothing_left()


@pytest.mark.full
def test_a_layout_on_ray_gives_the_bits_of_one_process(tmp_path):
    """Others: `test_parity_ray.py`. In the default suite `test_elastic.py` compares two stages with two replicas on Ray with
    one process, and `tests/parity/test_tcp.py` this layout over TCP."""
    check_on_ray(Layout("tangled", "1f1b", (2, 2), 4), tmp_path)
    assert nothing_left()


@pytest.mark.ci
def test_a_run_on_shared_storage_is_read_and_resumed_by_its_uri_with_the_bits_of_one_process(tmp_path, monkeypatch, capfd):
    """A file system of pyarrow that is given as an object, with the lease in Ray's store; S3: `test_storage_on_moto.py`.

    The first four steps are one process's; its folder, checkpoint and lease are a run's.
    """
    from fsspec.implementations.local import LocalFileSystem
    from pyarrow.fs import FSSpecHandler, PyFileSystem

    monkeypatch.chdir(Path(__file__).parents[1])
    monkeypatch.setattr("raypar.storage.held_lease.RENEW_S", 0.5)  # a second owner is refused at the first's next renewal
    place = uri_of_filesystem_object(PyFileSystem(FSSpecHandler(LocalFileSystem())), str(tmp_path / "there"))
    uri, there, said = str(place.child("tiny")), tmp_path / "there/tiny", []
    loaded = load_job(write_job(tmp_path), [f"run_dir={place}", "plan.stages=1", "plan.replicas=1"])
    whole = Undisturbed.of(tmp_path, "steps=12")
    with (
        new_run_on_storage(place, "tiny", said.append) as folder,
        OneProcessRun(loaded, loaded.to_plan(4), "1f1b") as local,
    ):
        folder.job.write_text(loaded.to_yaml())
        for step in range(4):
            local.step(step)
            rest = {"time": 1.0, "norm": 1.0, "count": 8.0, "seconds": 0.1, "samples_per_s": 80.0, "bubble": 0.0}
            folder.append_line(folder.metrics, {**rest, "step": step + 1, "loss": whole.losses[step][1]})
        begun = checkpoint_files.create_checkpoint(folder.checkpoint_store_location, 4)
        local.cores[0].start_save(begun)
        facts = {"steps_done": 4, "contract": contract_of_job(local.spec)}
        checkpoint_files.commit_checkpoint(begun, [local.cores[0].save_result()], **facts)
        with (
            pytest.raises(LeaseHeldError, match="run tiny is under way: process"),
            RunFolder.open_for_reading(uri, with_job=False) as other,
            resumed_run_on_storage(other, said.append) as held,
        ):
            held()
    assert "only runs of this Ray cluster are kept from training in" in said[0].text
    assert main(["status", uri]) == 0 and "4 of 12" in capfd.readouterr().out
    assert main(["resume", uri]) == 0
    assert hash_in(capfd.readouterr().out) == whole.weights_sha256
    with RunFolder.open_for_reading(uri) as folder:
        assert [(m["step"], m["loss"]) for m in folder.read_lines(folder.metrics) if "loss" in m] == whole.losses
    files = {path.relative_to(there).as_posix() for path in there.rglob("*") if path.is_file()}
    assert {"job.yaml", "plan.json", "members.json", "metrics.jsonl/000000000001.jsonl", "swimlane.svg"} <= files
    assert not [name for name in files if name.endswith(".tmp")]
    assert sorted(path.name for path in (there / "checkpoints").iterdir()) == ["step_00000008", "step_00000012"]
    with new_run_on_storage(place, "tiny", said.append) as second:
        assert second.name == "tiny-2" and second.path.is_dir()
        second.path.rmdir()
    assert nothing_left() and not _internal_kv_list("raypar-lease/") and not (tmp_path / "there/tiny-2").exists()


def test_a_lease_in_rays_store_is_replaced_only_by_who_names_its_version_and_leaves_nothing():
    store, mine = RayLeaseStore("filesystem://x/runs/tiny"), Lease("one", "me")
    assert store.read() is None and store.put(mine, "3") is None
    first = store.put(mine, None)
    assert first is not None and store.put(Lease("two", "you"), None) is None
    second = store.put(replace(mine, renewal=1), first)
    assert second is not None and store.put(Lease("two", "you"), first) is None
    found = store.read()
    assert found is not None and (found.lease, found.version) == (replace(mine, renewal=1), second) and found.age_s is None
    with ThreadPoolExecutor(4) as pool:
        wrote = [*pool.map(lambda n: store.put(Lease(f"taker {n}", "them"), second), range(4))]
    assert len([version for version in wrote if version is not None]) == 1
    assert len(_internal_kv_list("raypar-lease/")) == 1
    assert store.put(replace(mine, released=True), "3") is not None and not _internal_kv_list("raypar-lease/")


def test_tickets_are_shared_and_the_room_names_the_runs_that_have_it():
    """Tickets of the placement queue in the store of a real cluster, and its room as the queue sees it."""
    import ray
    from ray.util.placement_group import placement_group, remove_placement_group

    store, said = RayTicketStore(), []
    assert store.items() == {} and store.put_if_absent(ticket_key(7), b"1") and not store.put_if_absent(ticket_key(7), b"2")
    store.put(ticket_key(7), b"3")
    assert store.items() == {ticket_key(7): b"3"}
    store.delete(ticket_key(7))
    with placement_turn("first", 2, 10, said.append) as first:
        second = PlacementQueue(RayTicketStore(), "my-second", 2)
        second.draw()
        assert (first.number, second.number) == (1, 2) and second.first_before().run == "first"
        group = placement_group([{"CPU": 1}] * 2, name="raypar-first-0", lifetime="detached")
        other = placement_group([{"CPU": 1}], name="others")
        ray.get([group.ready(), other.ready()], timeout=60)
        room = look_at_cluster()
        assert room.cpus == 5 and room.cpus_by_run == {"first": 2} and not room.may_add_nodes
    assert second.first_before() is None
    second.leave()
    assert store.items() == {} and said == []
    remove_placement_group(group)
    remove_placement_group(other)
    assert nothing_left()


@pytest.fixture(scope="module")
def stopped_by_callback(own_ray, tmp_path_factory) -> tuple[Path, Result]:
    """The folder, with the diary in it, and the result of a run on one worker that a callback has stopped after step 3."""
    folder = tmp_path_factory.mktemp("stopped")
    with pytest.MonkeyPatch.context() as patch:
        patch.chdir(Path(__file__).parents[1])
        result = Trainer(
            model="helpers.tiny_job:model",
            loss="helpers.tiny_job:loss",
            data=("helpers.tiny_job:data", {"size": 64}),
            steps=50,
            batch_size=16,
            microbatches=16,
            plan={"stages": 1},
            callbacks=[Diary(str(folder / "diary"), stop_after=3)],
            checkpoint={"every": 2},
            run_dir=folder,
        ).fit(verbose=False)
    assert nothing_left()
    return folder, result


def test_the_driver_makes_one_call_per_worker_and_step_whatever_the_microbatches(first_run, stopped_by_callback):
    """Two workers with 4 microbatches a step, and one with 16."""
    _, stopped = stopped_by_callback
    ends = [lines(run / "events.jsonl")[-1] for run in (first_run.tmp_path / "runs/tiny", Path(stopped.path))]
    assert [end["driver_calls_per_step"] for end in ends] == [2, 1]


def test_callbacks_are_called_once_a_step_in_order_and_a_stop_takes_effect_after_one_more_step(stopped_by_callback):
    folder, result = stopped_by_callback
    assert [w for w in (folder / "diary").read_text().splitlines() if not w.startswith("checkpoint")] == [
        "start 1", "step 1", "step 2", "step 3", "step 4", "end stopped 4",
    ]  # fmt: skip
    assert result.metrics["step"] == 4 and result.metrics["twice"] == 2 * result.metrics["loss"]
    assert result.checkpoint.path.endswith("step_00000004") and result.error is None


@pytest.mark.full  # the default suite does it by commands, above
def test_a_trainer_goes_on_from_a_checkpoint_under_another_plan_with_the_same_bits(tmp_path, monkeypatch):
    monkeypatch.chdir(Path(__file__).parents[1])

    def trainer(**more):
        parts = {part: f"helpers.tiny_job:{part}" for part in ("model", "loss", "data")}
        return Trainer(**parts, steps=6, batch_size=8, microbatches=4, run_dir=tmp_path, **more)

    whole = trainer(plan={"stages": 1}).fit(verbose=False)
    half = trainer(plan={"stages": 2}, stop_at_step=3, name="half").fit(verbose=False)
    for given in (half.checkpoint, half.path):
        again = trainer(plan={"replicas": 2}, resume_from_checkpoint=given).fit(verbose=False)
        assert [row["step"] for row in again.history] == [4, 5, 6]
        assert again.weights_sha256 == whole.weights_sha256 and again.path != half.path
    with pytest.raises(CheckpointError, match="seed was 0, is 1"):
        trainer(seed=1, resume_from_checkpoint=half.path).fit(verbose=False)
    with pytest.raises(ConfigError, match="resume_from_checkpoint is 5"):
        trainer(resume_from_checkpoint=5).fit(verbose=False)
    with pytest.raises(CheckpointError, match="neither a checkpoint nor a run"):
        trainer(resume_from_checkpoint=tmp_path).fit(verbose=False)
    assert nothing_left()


@pytest.mark.parametrize(
    "fault, error",
    [
        # Errors of user code: test_user_code_ends.py; that of a worker comes to the client: the optimizer's state, above.
        pytest.param("raise", UserCodeError, marks=pytest.mark.full),
        pytest.param("die", WorkerLost, marks=pytest.mark.ci),
        pytest.param("nan", NonFiniteError, marks=pytest.mark.full),
        pytest.param("memory", OutOfMemory, marks=pytest.mark.full),
    ],
)
def test_a_failure_in_a_worker_ends_the_run_with_one_error_and_leaves_nothing(fault, error, tmp_path, monkeypatch, capfd):
    monkeypatch.chdir(Path(__file__).parents[1])
    with pytest.raises(error) as caught:
        Trainer(
            model=("helpers.tiny_job:model", {"fault": fault, "at": 9}),
            loss="helpers.tiny_job:loss",
            data="helpers.tiny_job:data",
            steps=50,
            batch_size=8,
            microbatches=4,
            plan={"stages": 2, "replicas": 1},
            run_dir=tmp_path,
        ).fit(verbose=False)
    if fault == "nan":
        (folder,) = tmp_path.iterdir()
        assert f"cure: `raypar debug {folder}` names the first layer" in str(caught.value)
        assert main(["status", str(folder)]) == 0
        assert f"next     `raypar debug {folder}` names the first layer with a NaN" in capfd.readouterr().out
        assert main(["debug", str(folder)]) == 1
        assert "first not finite: layer 'layer3' in microbatch 1 of step 3: its output" in capfd.readouterr().err
    else:
        assert "worker 1 (stage 1, replica 0)" in str(caught.value)
    if fault == "raise":
        assert "ZeroDivisionError: the fault that was asked for" in str(caught.value) and "tiny_job.py" in str(caught.value)
    if fault == "memory":
        assert "MemoryError: what was asked for" in str(caught.value) and "tiny_job.py" in str(caught.value)
        assert "stage 1 is predicted to hold" in caught.value.what and "predicted to" in caught.value.cure
    assert nothing_left()


def test_more_workers_than_the_cluster_can_ever_have_is_an_error_with_numbers_at_once(job, tmp_path, capfd):
    assert job("--set", "plan.replicas=4") == 1
    error = capfd.readouterr().err
    assert "8 workers of 1 CPU" in error and "has 5 CPUs" in error and "cure:" in error
    assert not (tmp_path / "runs").exists()


@pytest.mark.ci
def test_the_doctor_asks_the_cluster_and_finds_it_well(tmp_path, capfd, monkeypatch):
    import ray

    for name in ("RAY_AUTH_TOKEN", "RAY_AUTH_TOKEN_PATH"):
        monkeypatch.delenv(name, raising=False)
    address = ray.get_runtime_context().gcs_address
    main(["doctor", "--address", address, "--run-dir", str(tmp_path / "runs"), "--json"])
    told = {check["subject"]: check for check in json.loads(capfd.readouterr().out)["checks"]}
    for subject in ("PyTorch", "GPUs", "cluster", "clocks", "versions", "kernels", "runs folder"):
        assert told[subject]["level"] == "ok", told[subject]
    assert told["cluster"]["text"] == f"1 of 1 node at {address} answers"
    assert list(tmp_path.iterdir()) == [] and nothing_left()


@pytest.mark.ci
def test_a_damaged_checkpoint_is_skipped_and_one_that_cannot_be_written_does_not_stop_training(first_run, tmp_path, capfd):
    run = shutil.copytree(first_run.tmp_path / "runs/tiny", tmp_path / "tiny")
    shard = next((run / "checkpoints/step_00000012").glob("*.safetensors"))
    os.truncate(shard, shard.stat().st_size - 1)
    # A link to nowhere in place of the folder: mkdir fails as on a full disk, for root too.
    (run / "checkpoints/.tmp-step_00000010").symlink_to("/proc/none/none")
    assert main(["resume", str(run), "--set", "plan={stages: 1}", "--set", "checkpoint={every: 2}"]) == 0
    out = capfd.readouterr().out
    assert "skipped step_00000012" in out and "truncated" in out and "from step_00000008" in out
    assert "warning: the checkpoint after 10 steps could not be written" in out and "after 8 steps stays" in out
    assert hash_in(out) == hash_in(first_run.out)
    assert main(["resume", str(run), "--set", "steps=20", "--set", "model.args.depth=5"]) == 2
    assert "belongs to another job: model was" in capfd.readouterr().err


def test_a_run_that_is_active_cannot_be_started_twice(tmp_path):
    import ray

    from raypar.actors.driver_client import follow_run
    from raypar.actors.worker_pool import run_namespace

    @ray.remote(num_cpus=0)
    class Other:
        pass

    other = Other.options(name="driver", namespace=run_namespace("taken")).remote()
    request = SimpleNamespace(run="taken", policy=RunPolicy(workers=1, job_steps=9))
    with pytest.raises(ClusterError, match="'taken' is active"):
        follow_run(request, print)
    ray.kill(other)


@pytest.mark.full
def test_what_a_layer_leaves_behind_is_told_once_and_changes_nothing(job, tmp_path, capfd):
    """Both replicas of the last stage run the layer; both set it back, one says so."""
    assert job() == 0
    wanted = hash_in(capfd.readouterr().out)
    assert job("--set", "model.args.fault=leak", "--set", "model.args.at=5", "--set", "name=leaky") == 0
    out = capfd.readouterr().out
    assert hash_in(out) == wanted
    left = "layer 'layer3' left torch.set_grad_enabled(False) behind: set back"
    assert out.count(left) == 1
    events = [event for event in lines(tmp_path / "runs/leaky/events.jsonl") if event["kind"] == "warning"]
    assert [left in event["text"] for event in events].count(True) == 1
    assert any("left os.chdir('/') behind: set back" in event["text"] for event in events)
