"""Workers die under a running job on a real Ray: it goes on with those left, and the result does not change by a bit."""

import contextlib
import itertools
import json
import os
import re
import resource
import signal
import statistics
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import psutil
import pytest
import ray
from helpers.full_disk import no_bytecode
from helpers.tiny_job import write_job
from helpers.trainee import Trainee, Undisturbed, as_soon_as, kill

import raypar
from raypar.actors.driver_client import ALONE_S
from raypar.actors.ray_connection import connect_ray
from raypar.actors.worker_pool import (
    find_existing_worker_numbers,
    list_leftover_placement_groups,
    remove_placement_groups_of_ended_runs,
    run_namespace,
)
from raypar.cli import main
from raypar.errors import ClusterError, ConfigError, OutlivedError, RayparError
from raypar.job.read_job import load_job
from raypar.launch import resume_job
from raypar.storage.run_folder import RunFolder
from raypar.worker.checkpoint.checkpoint_files import checkpoint_weights_hash
from raypar.worker.run_in_one_process import OneProcessRun


@pytest.fixture(scope="module", autouse=True)
def own_ray():
    with no_bytecode(), connect_ray(None, 4, Path(__file__).parents[1]):
        yield


@pytest.fixture(scope="module")
def undisturbed(tmp_path_factory) -> Undisturbed:
    return Undisturbed.of(tmp_path_factory.mktemp("undisturbed"))


@pytest.mark.parametrize(
    "layout, act",
    [
        pytest.param(("plan.stages=2", "plan.replicas=2"), kill(3), marks=pytest.mark.chaos),
        pytest.param(("plan.stages=2", "plan.replicas=2"), kill(0), marks=pytest.mark.chaos),
        pytest.param(("plan.stages=2", "plan.replicas=2"), kill(0, 3), marks=pytest.mark.chaos),
        pytest.param(("plan.stages=1", "plan.replicas=4"), kill(1, 2, 3), marks=pytest.mark.chaos),
        pytest.param(("plan.stages=2", "plan.replicas=2", "plan.schedule=zb-v"), kill(1), marks=pytest.mark.chaos),
    ],
)
def test_a_killed_worker_changes_nothing_but_the_plan(layout, act, undisturbed, tmp_path):
    trainee = Trainee(tmp_path, "elastic.min_workers=1", *layout)
    result = trainee.run(act)
    assert result.end == "done", result.why
    assert result.weights_sha256 == undisturbed.weights_sha256
    assert trainee.losses == undisturbed.losses, "every step was seen once, with the same loss"
    told = [event["text"] for event in trainee.events if event["kind"] == "recovering"]
    assert any("generation 2" in text for text in told)


@pytest.mark.chaos  # on Ray without a killed worker: test_train.py
def test_a_killed_worker_brings_to_light_state_that_cannot_be_moved_and_the_weights_are_saved(tmp_path):
    """Without Ray: tests/parity/test_state_not_kept_elastic.py."""
    keeps_list = (
        *("optimizer.function=helpers.optimizers:KeepsListLater", "optimizer.args={above: 0.01}"),
        "lr_schedule=helpers.optimizers:doubles_after_nine",
    )
    trainee = Trainee(tmp_path, "elastic={min_workers: 1, mirror: off}", "plan.stages=2", "plan.replicas=2", *keeps_list)
    result = trainee.run(kill(3), at=11)
    assert result.end == "failed"
    assert re.search(r"'factors' of layer.* is a list.* Parameters and buffers are in ", str(result.error)), result.error
    (weights,) = (tmp_path / "runs/tiny/checkpoints").iterdir()
    steps = int(weights.name.removeprefix("weights_"))
    assert 11 <= steps < 16, "it was not the look after 16 steps"
    there = checkpoint_weights_hash(weights)
    assert there == Undisturbed.of(tmp_path, *keeps_list, f"steps={steps}").weights_sha256


@pytest.mark.chaos
def test_when_the_only_copy_dies_without_a_checkpoint_the_error_says_what_is_lost(tmp_path):
    trainee = Trainee(tmp_path, "elastic={min_workers: 1, mirror: off, lost_state: fail}", "plan.stages=4", "plan.replicas=1")
    result = trainee.run(kill(2))
    assert result.end == "failed"
    assert re.search(r"state after \d+ steps is lost: layer2.*worker 2 \(stage 2, replica 0\) held it", str(result.error))


@pytest.mark.chaos  # without Ray: tests/unit/test_recovery_rules.py, tests/chaos/test_zero_kills.py
@pytest.mark.parametrize("at, optimizer", [(4, ()), (17, ("average={decay: 0.9}", "validation.every=5"))])
def test_when_all_die_without_a_checkpoint_the_run_begins_again_and_what_was_seen_is_not_seen_again(at, optimizer, tmp_path):
    trainee = Trainee(tmp_path, "elastic={min_workers: 2, mirror: 1}", "plan={replicas: 2, zero: 3}", *optimizer)
    result = trainee.run(kill(0, 1), at=at)
    assert result.end == "done", result.why
    undisturbed = Undisturbed.of(tmp_path, *optimizer)
    assert result.weights_sha256 == undisturbed.weights_sha256 and trainee.losses == undisturbed.losses
    (told,) = [event["text"] for event in trainee.events if "all begin again with the first step" in event.get("text", "")]
    assert re.search(
        r"state after \d+ steps is lost: .*; worker 0 \(.*replica 0\) and worker 1 \(.*replica 1\) held it, no mirror", told
    )
    assert not any("lost together" in event.get("text", "") for event in trainee.events), "the node lives"


@pytest.mark.chaos  # without Ray: tests/chaos/test_protocol.py
@pytest.mark.parametrize("mirror", ["auto", "4"])
def test_when_the_only_copy_dies_the_mirror_has_another_and_what_was_seen_is_not_seen_again(mirror, undisturbed, tmp_path):
    trainee = Trainee(tmp_path, f"elastic={{min_workers: 1, mirror: {mirror}}}", "plan.stages=4", "plan.replicas=1")
    result = trainee.run(kill(2), at=13)
    assert result.end == "done", result.why
    assert result.weights_sha256 == undisturbed.weights_sha256
    assert trainee.losses == undisturbed.losses
    told = [event["text"] for event in trainee.events if event["kind"] == "recovering"]
    assert any("from the mirror" in text for text in told), told


@pytest.mark.chaos
def test_when_the_only_copy_dies_the_checkpoint_is_read_and_what_was_seen_is_not_seen_again(undisturbed, tmp_path):
    trainee = Trainee(
        tmp_path, "elastic={min_workers: 1, mirror: off}", "plan.stages=4", "plan.replicas=1", "checkpoint.every=5"
    )
    result = trainee.run(kill(2), at=13)
    assert result.end == "done", result.why
    assert result.weights_sha256 == undisturbed.weights_sha256
    assert trainee.losses == undisturbed.losses


@pytest.mark.chaos  # without Ray: tests/chaos/test_protocol.py
@pytest.mark.parametrize("replicas", [4, 2])
def test_a_bit_that_flips_in_one_replica_is_found_and_the_steps_are_executed_again(replicas, undisturbed, tmp_path):
    """Of four replicas the one that differs is given up; of two nobody knows which is right. All start from the last cut."""
    flips = f"model.args={{sleep_s: 0.01, at: 14, flip: {tmp_path / 'flipped'}}}"
    layout = (f"plan.stages={4 // replicas}", f"plan.replicas={replicas}", "elastic={min_workers: 1, mirror: 4}")
    trainee = Trainee(tmp_path, *layout, flips)
    result = trainee.run()
    assert (tmp_path / "flipped").exists()
    assert result.end == "done", result.why
    assert result.weights_sha256 == undisturbed.weights_sha256
    warnings = [event["text"] for event in trainee.told("warning")]
    assert any("silent corruption" in text for text in warnings), warnings
    assert len(trainee.told("generation")[-1]["workers"]) == (3 if replicas == 4 else 4)
    wrong = {int(step) for text in warnings for step in re.findall(r"step (\d+): .* is right", text)}
    assert all(pair in undisturbed.losses or pair[0] in wrong for pair in trainee.losses)


@pytest.mark.chaos
def test_trainer_goes_on_when_a_worker_is_killed(tmp_path):
    parts = {"loss": "helpers.tiny_job:loss", "data": ("helpers.tiny_job:data", {"size": 32}), "name": "run"}
    model = ("helpers.tiny_job:model", {"sleep_s": 0.01})

    def trainer(run_dir: Path, **more) -> raypar.Trainer:
        return raypar.Trainer(model=model, **parts, steps=30, batch_size=8, microbatches=4, run_dir=run_dir, **more)

    run = tmp_path / "disturbed/run"

    def trains() -> bool:
        return (run / "metrics.jsonl").exists() and len((run / "metrics.jsonl").read_text().splitlines()) >= 8

    def kill_one(_: bool) -> None:
        os.kill(json.loads((run / "members.json").read_text())["members"][3]["pid"], signal.SIGKILL)

    whole = trainer(tmp_path / "undisturbed", plan={"stages": 1}).fit(verbose=False)
    with as_soon_as(trains, kill_one):
        disturbed = trainer(tmp_path / "disturbed", plan={"stages": 2, "replicas": 2}, elastic={"min_workers": 2})
        result = disturbed.fit(verbose=False)
    assert "is lost" in (run / "events.jsonl").read_text()
    assert result.weights_sha256 == whole.weights_sha256
    assert [row["loss"] for row in result.history] == [row["loss"] for row in whole.history]


LONG = ("steps=200", "elastic.min_workers=1")
FOUR = ("plan.stages=2", "plan.replicas=2")


@pytest.fixture(scope="module")
def long_undisturbed(tmp_path_factory) -> Undisturbed:
    return Undisturbed.of(tmp_path_factory.mktemp("undisturbed"), *LONG)


MEASURED = (
    "metrics={energy: helpers.metrics:energy, middle: {function: helpers.metrics:Median}}",
    "metrics_every=5",
    "checkpoint.keep=1",
    "checkpoint.best=[{metric: validation/held/energy, mode: min, keep: 2}, validation/few/loss]",
    "validation={every: 6, held: {function: helpers.tiny_job:data, args: {size: 8}}, "
    "few: {function: helpers.tiny_job:data, args: {size: 5}, batch_size: 3, metrics: [middle]}}",
)


@pytest.fixture(scope="module")
def disturbed(own_ray, tmp_path_factory) -> Trainee:
    """A run of 90 steps on four workers whose driver is killed after some steps, and later a worker; once another one has
    taken its place, for which steps are slow meanwhile, a worker hangs."""
    folder = tmp_path_factory.mktemp("disturbed")
    unfilled = folder / "unfilled"
    words = ("steps=90", "elastic.min_workers=1", *FOUR, "model.args.sleep_s=0.06", "checkpoint.every=20", "trace_every=4")
    trainee = Trainee(folder, *words, f"model.args.slow_while={unfilled}", *MEASURED)
    trainee.members_by_driver = []

    def kill_driver() -> None:
        trainee.members_by_driver.append(trainee.members)
        os.kill(trainee.members["driver_pid"], signal.SIGKILL)

    def kill_worker() -> None:
        trainee.members_by_driver.append(trainee.members)
        trainee.told_before = list(trainee.events)
        unfilled.touch()
        kill(1)(trainee.pids)

    def stop_another() -> None:
        if len(trainee.told("generation")) == 3:
            unfilled.unlink()
            kill(2, number=signal.SIGSTOP)(trainee.pids)

    trainee.result = trainee.run(then={5: kill_driver, 15: kill_worker, "generation": stop_another})
    return trainee


def test_a_run_whose_driver_and_workers_are_killed_or_hang_gives_the_bits_of_one_that_nothing_befalls(disturbed, tmp_path):
    undisturbed = Undisturbed.of(tmp_path, "steps=90")
    assert disturbed.result.end == "done", disturbed.result.why
    assert disturbed.result.weights_sha256 == undisturbed.weights_sha256
    assert disturbed.losses == undisturbed.losses, "every step was seen once"
    assert [event["step"] for event in disturbed.told("step")] == list(range(1, 91)), "the client saw every step once"


def test_metrics_and_the_best_checkpoints_are_those_of_a_run_that_nothing_befalls(disturbed, tmp_path, capsys):
    job, wanted = load_job(write_job(tmp_path), ["steps=90", *FOUR, *MEASURED]), {}
    with OneProcessRun(job, job.to_plan(4), "1f1b") as run:
        for step in range(1, 91):
            run.step(step - 1)
            wanted[step, "step"] = run.metrics
            if step % 6 == 0:
                run.validate(step)
                wanted[step, "validation"] = {f"validation/{name}": value for name, value in run.metrics.items()}
    lines = map(json.loads, (disturbed.folder / "runs/tiny/metrics.jsonl").read_text().splitlines())
    found = {(line["step"], "step" if "loss" in line else "validation"): line for line in lines}
    assert set(found) == set(wanted)
    told = " ".join(event["text"] for event in disturbed.told("warning"))
    for place, values in wanted.items():
        if place[1] == "validation" or f"the metrics of step {place[0]} are lost" not in told:
            assert {name: found[place].get(name) for name in values} == values, place
    last, history = wanted[90, "validation"] | wanted[90, "step"], disturbed.result.history
    middle = ("middle/median", "middle/first", "middle/last")
    measured = {"": ("energy", *middle), "validation/held/": ("loss", "energy", *middle), "validation/few/": ("loss", *middle)}
    assert set(last) == {f"{prefix}{name}" for prefix, names in measured.items() for name in names}
    assert {name: disturbed.result.metrics[name] for name in last} == last
    assert {line["step"] for line in history if "validation/held/energy" in line} == set(range(6, 91, 6))
    assert main(["status", str(disturbed.folder / "runs/tiny")]) == 0
    assert "  metrics  energy " in capsys.readouterr().out
    validated = {step: values for (step, kind), values in wanted.items() if kind == "validation"}

    def best_steps(name: str, keep: int) -> list[int]:
        return sorted(validated, key=lambda step: (validated[step][f"validation/{name}"], step))[:keep]

    best = best_steps("held/energy", 2)
    there = {path.name for path in (disturbed.folder / "runs/tiny/checkpoints").iterdir()}
    assert there == {f"step_{step:08d}" for step in {*best, *best_steps("few/loss", 1), 90}}
    assert disturbed.result.best_checkpoint_path.endswith(f"step_{best[0]:08d}")


def test_the_driver_may_be_killed(disturbed):
    before, after = disturbed.members_by_driver
    assert disturbed.told("driver") and before["driver_pid"] != after["driver_pid"]
    assert disturbed.told("generation")[0]["workers"] == [0, 1, 2, 3], "the same workers, none started again"
    assert [member["pid"] for member in before["members"]] == [member["pid"] for member in after["members"]]
    assert not [event for event in disturbed.told_before if event["kind"] == "warning"], "it knows where its workers are"
    assert disturbed.told("picture")


def test_a_killed_worker_is_replaced_and_the_plan_is_whole_again(disturbed):
    assert [sorted(event["workers"]) for event in disturbed.told("generation")[1:3]] == [[0, 2, 3], [0, 2, 3, 4]]
    assert disturbed.told("joined")[0]["worker"] == 4


def test_a_worker_that_hangs_is_given_up(disturbed):
    killed, hung = disturbed.told("lost")
    assert (killed["worker"], hung["worker"]) == (1, 2) and "did not answer" in hung["text"]
    assert sorted(disturbed.told("generation")[3]["workers"]) == [0, 3, 4]


def no_room(trainee: Trainee) -> None:
    """From now on the driver's disk takes no byte more: the next driver's does."""
    size = (trainee.folder / "runs/tiny/metrics.jsonl").stat().st_size
    _, hard = resource.prlimit(trainee.members["driver_pid"], resource.RLIMIT_FSIZE)
    resource.prlimit(trainee.members["driver_pid"], resource.RLIMIT_FSIZE, (size, hard))


def cut(trainee: Trainee) -> None:
    os.truncate(trainee.folder / "runs/tiny/metrics.jsonl", 1000)


def validations(trainee: Trainee) -> list[tuple[int, float]]:
    lines = map(json.loads, (trainee.folder / "runs/tiny/metrics.jsonl").read_text().splitlines())
    return [(line["step"], line["validation_loss"]) for line in lines if "validation_loss" in line]


def mess(trainee: Trainee) -> None:
    for name in ("metrics.jsonl", "events.jsonl"):
        (trainee.folder / "runs/tiny" / name).write_bytes(bytes(range(256)))


@pytest.mark.chaos
@pytest.mark.parametrize("befalls, said", [(no_room, "cannot be written"), (cut, "lacked"), (mess, "lacked")])
def test_a_driver_that_is_killed_after_its_disk_was_full_or_damaged_loses_no_step(befalls, said, long_undisturbed, tmp_path):
    trainee = Trainee(tmp_path, *LONG, "plan.stages=2", "plan.replicas=2")

    def die() -> None:
        if befalls is not no_room:
            befalls(trainee)
        os.kill(trainee.members["driver_pid"], signal.SIGKILL)

    then = {20: lambda: befalls(trainee)} if befalls is no_room else {}
    result = trainee.run(then={**then, 40: die})
    assert result.end == "done", result.why
    assert result.weights_sha256 == long_undisturbed.weights_sha256
    assert trainee.losses == long_undisturbed.losses, "every step is there once"
    heard = {(event["step"], event["validation_loss"]) for event in trainee.told("validation")}
    assert validations(trainee) == sorted(heard), "as the client heard them, each with one value"
    assert [step for step, _ in validations(trainee)] == [*range(6, 201, 6), 200]
    assert [event["step"] for event in trainee.told("step")] == list(range(1, 201)), "the client saw every step once"
    assert any(said in event["text"] for event in trainee.told("warning")) and trainee.told("driver")
    events = [json.loads(line)["kind"] for line in (tmp_path / "runs/tiny/events.jsonl").read_text().splitlines()]
    assert "driver" in events and events[-1] == "end"


@pytest.mark.chaos
def test_workers_that_die_together_with_the_driver_are_told_to_be_lost(long_undisturbed, tmp_path):
    """Nobody was there to notice, and the new driver does not find them."""
    trainee = Trainee(tmp_path, *LONG, "plan.stages=2", "plan.replicas=2")
    killed = []

    def act(pids: list[int]) -> None:
        killed.extend(m["worker"] for m in trainee.members["members"] if m["pid"] in (pids[1], pids[2]))
        for pid in (trainee.members["driver_pid"], pids[1], pids[2]):
            os.kill(pid, signal.SIGKILL)

    result = trainee.run(act)
    assert result.weights_sha256 == long_undisturbed.weights_sha256
    assert trainee.losses == long_undisturbed.losses
    assert sorted(event["worker"] for event in trainee.told("lost")) == sorted(killed)
    assert all(re.search(r"stage \d, replica \d", event["coordinate"]) for event in trainee.told("lost"))


@pytest.mark.chaos
def test_the_driver_may_be_killed_again_and_again(long_undisturbed, tmp_path):
    """One of the six would not have begun: Ray drops what an actor asks of itself before the news that it is back.

    Ray lets the client hear of a new driver up to 2 s after its start: that must be less than 30 steps.
    """
    trainee = Trainee(tmp_path, *LONG, "plan.stages=2", "plan.replicas=2", "model.args.sleep_s=0.03")
    steps = range(20, 200, 30)
    shot = []

    def shoot() -> None:
        shot.append(trainee.members["driver_pid"])
        os.kill(shot[-1], signal.SIGKILL)

    result = trainee.run(then=dict.fromkeys(steps, shoot))
    assert result.end == "done", result.why
    assert result.weights_sha256 == long_undisturbed.weights_sha256
    assert trainee.losses == long_undisturbed.losses
    assert len(set(shot)) == len(trainee.told("driver")) == len(steps)
    seen = [event["at_s"] for event in trainee.told("step")]
    assert max(b - a for a, b in itertools.pairwise(seen)) < 30, "none of them was given up as silent"


SLOW_BUILD = "model.args={sleep_s: 0.01, build_s: 4.0}", "optimizer.function=helpers.tiny_job:SlowToBuild"
"""Who holds the last layer takes that long to build its stage."""


def asked(number: int, method: str) -> Any:
    """What a worker of the run answers."""
    worker = ray.get_actor(f"worker-{number}", namespace=run_namespace("tiny"))
    return ray.get(getattr(worker, method).remote(), timeout=30)


def builds_slowly(number: int) -> bool:
    """Whether that worker is connected with the others, and makes the layer that takes long."""
    return number in find_existing_worker_numbers("tiny") and "self.build_s" in asked(number, "stacks")


@pytest.mark.chaos
@pytest.mark.parametrize(
    "moment",
    [
        pytest.param(lambda: True, id="workers are placed"),
        pytest.param(lambda: find_existing_worker_numbers("tiny"), id="workers start"),
        pytest.param(lambda: builds_slowly(3), id="stages are built"),
    ],
)
def test_the_driver_may_be_killed_while_the_run_starts(moment, undisturbed, tmp_path):
    """With the workers half placed, half started, half built: the new driver begins anew, or goes on with them."""
    trainee = Trainee(tmp_path, "elastic.min_workers=1", "plan.stages=2", "plan.replicas=2", *SLOW_BUILD)

    def begun() -> bool:
        return (tmp_path / "runs/tiny/members.json").exists() and bool(moment())

    with as_soon_as(begun, lambda _: os.kill(trainee.members["driver_pid"], signal.SIGKILL)):
        result = trainee.run()
    assert result.end == "done", result.why
    assert result.weights_sha256 == undisturbed.weights_sha256
    assert trainee.losses == undisturbed.losses


@pytest.mark.chaos
def test_the_driver_may_be_killed_before_it_has_kept_what_it_was_asked_for(undisturbed, tmp_path):
    """Nothing is in the journal yet: the client brings the run again."""
    trainee = Trainee(tmp_path, "elastic.min_workers=1", "plan.stages=2", "plan.replicas=2")

    def driver() -> psutil.Process | None:
        for process in psutil.Process().children(recursive=True):
            with contextlib.suppress(psutil.Error):
                if "DriverActor" in " ".join(process.cmdline()):
                    return process
        return None

    with as_soon_as(driver, psutil.Process.kill):
        result = trainee.run()
    assert result.end == "done", result.why
    assert result.weights_sha256 == undisturbed.weights_sha256
    assert trainee.losses == undisturbed.losses


@pytest.mark.chaos
def test_ctrl_c_while_the_driver_is_replaced_ends_the_run_and_names_its_checkpoint(tmp_path):
    layout = ("elastic.min_workers=1", "plan.stages=2", "plan.replicas=2")
    trainee = Trainee(tmp_path, *layout, "checkpoint.every=5", "steps=2000")  # half a second of steps before it hears

    def act(workers: list[int]) -> None:
        os.kill(trainee.members["driver_pid"], signal.SIGKILL)
        os.kill(os.getpid(), signal.SIGINT)

    result = trainee.run(act, at=12)
    assert result.end == "interrupted"
    assert 12 <= result.done < 2000 and Path(result.checkpoint_path).exists()


@pytest.mark.chaos
def test_ctrl_c_in_a_step_longer_than_its_grace_saves_also_when_a_worker_waits_for_a_seat(tmp_path):
    """Who waits stands at no step, and was taken for a worker that stands elsewhere: nothing was saved."""
    layout = ("plan.stages=2", "plan.replicas=2", "elastic={min_workers: 1, standbys: 1}", "model.args.sleep_s=0.8")
    trainee = Trainee(tmp_path, *layout)

    def in_a_step() -> bool:
        """Two steps of 1.6 s are in flight: one has just been seen."""
        joined, steps = trainee.told("joined"), trainee.told("step")
        return bool(joined and steps) and steps[-1]["at_s"] > joined[0]["at_s"]

    with as_soon_as(in_a_step, lambda _: os.kill(os.getpid(), signal.SIGINT), 90.0):
        result = trainee.run()
    assert result.end == "interrupted"
    assert result.checkpoint_path is not None and result.checkpoint_path.endswith(f"step_{result.done:08d}"), result.why


@pytest.mark.chaos
def test_a_worker_that_has_built_its_stages_may_die_while_another_builds(undisturbed, tmp_path):
    trainee = Trainee(tmp_path, "elastic.min_workers=1", "plan.stages=2", "plan.replicas=2", *SLOW_BUILD)

    def half_built() -> bool:
        if not trainee.pids or not builds_slowly(3):
            return False
        return asked(0, "ping")[1] == "idle"  # it has built: all were connected before any of them did

    with as_soon_as(half_built, lambda _: os.kill(trainee.pids[0], signal.SIGKILL)):
        result = trainee.run()
    assert result.end == "done", result.why
    assert result.weights_sha256 == undisturbed.weights_sha256
    assert trainee.losses == undisturbed.losses


@pytest.mark.chaos
def test_a_driver_that_hangs_is_ended_and_started_again(long_undisturbed, tmp_path, monkeypatch):
    monkeypatch.setattr("raypar.actors.driver_client.DRIVER_SILENT_S", 3.0)
    trainee = Trainee(tmp_path, *LONG, "plan.stages=2", "plan.replicas=2")
    result = trainee.run(lambda pids: os.kill(trainee.members["driver_pid"], signal.SIGSTOP))
    assert result.weights_sha256 == long_undisturbed.weights_sha256
    assert trainee.losses == long_undisturbed.losses


@pytest.mark.chaos
def test_a_driver_whose_callbacks_take_long_to_begin_is_not_taken_for_hung(undisturbed, tmp_path, monkeypatch):
    """It was ended and started again, and began with the same callbacks, for ever."""
    monkeypatch.setattr("raypar.actors.driver_client.DRIVER_SILENT_S", 3.0)
    diary = f"callbacks=[{{function: helpers.tiny_job:Diary, args: {{path: {tmp_path / 'diary'}, start_s: 6.0}}}}]"
    trainee = Trainee(tmp_path, "elastic.min_workers=1", "plan.stages=2", "plan.replicas=2", diary)
    result = trainee.run()
    assert result.weights_sha256 == undisturbed.weights_sha256
    assert not trainee.told("warning") and not trainee.told("driver")
    assert (tmp_path / "diary").read_text().count("start") == 1


@pytest.mark.chaos
def test_with_fewer_workers_than_wanted_the_run_waits_for_another(long_undisturbed, tmp_path):
    trainee = Trainee(tmp_path, *LONG, "elastic.min_workers=4", "plan.stages=2", "plan.replicas=2")
    result = trainee.run(kill(2))
    assert result.weights_sha256 == long_undisturbed.weights_sha256
    assert trainee.losses == long_undisturbed.losses
    assert "3 workers are left, min_workers is 4" in trainee.told("waiting")[0]["text"]


@pytest.mark.chaos
def test_a_new_driver_goes_on_asking_for_the_worker_that_has_no_place_and_at_the_end_nothing_is_asked_for(
    long_undisturbed, tmp_path
):
    """Six workers are wanted, and there is room for five."""
    trainee = Trainee(tmp_path, *LONG, "elastic.max_workers=6", "plan.stages=2", "plan.replicas=2")
    starting: list[list[int]] = []

    def look() -> None:
        starting.append(trainee.members["starting"])

    result = trainee.run(lambda pids: os.kill(trainee.members["driver_pid"], signal.SIGKILL), at=60, then={50: look, 150: look})
    assert result.end == "done", result.why
    assert result.weights_sha256 == long_undisturbed.weights_sha256
    before, after = starting
    assert trainee.told("driver") and len(after) == 1 and after[0] in before, "worker 4 or 5: Ray places either of them first"
    assert sorted(event["worker"] for event in trainee.told("hiring")) == [4, 5], "asked for once"
    assert list_leftover_placement_groups("tiny") == []


RESERVE = """
import ray
from ray.util.placement_group import placement_group
from raypar.ray_compat.local_cluster import loopback_address_kept_if_needed
with loopback_address_kept_if_needed("{address}"):
    ray.init(address="{address}", logging_level="ERROR")
for run, resources in {{"tiny": {{"CPU": 1}}, "gone": {{"CPU": 2}}, "living": {{"memory": 1}}}}.items():
    placement_group([resources], name=f"raypar-{{run}}-7", lifetime="detached").wait(60)
"""


@ray.remote(num_cpus=0)
class Living:
    """The driver of another run."""


@pytest.mark.chaos
def test_what_runs_had_reserved_whose_driver_and_client_are_gone_is_given_back_by_the_next_run(undisturbed, tmp_path):
    """They were another job's, in which Ray does not find a placement group by its name: a resume ended with an error."""
    living = Living.options(name="driver", namespace=run_namespace("living")).remote()
    address = ray.get_runtime_context().gcs_address
    subprocess.run([sys.executable, "-c", RESERVE.format(address=address)], check=True, timeout=120)
    trainee = Trainee(tmp_path, "elastic.min_workers=4")
    try:
        result = trainee.run()
        assert result.end == "done", result.why
        assert result.weights_sha256 == undisturbed.weights_sha256
        told = {event["text"] for event in trainee.told("waiting")}
        assert {f"removed 1 placement group of run {run}, which has no driver any more" for run in ("tiny", "gone")} <= told
        assert list_leftover_placement_groups("gone") == [] and len(list_leftover_placement_groups("living")) == 1
    finally:
        ray.kill(living)
        remove_placement_groups_of_ended_runs()


@pytest.mark.chaos
def test_workers_that_do_not_help_are_given_back_and_not_asked_for_again(long_undisturbed, tmp_path):
    """Four blocks of microbatches and four layers: the planner has no use for more than four workers on one machine."""
    trainee = Trainee(tmp_path, *LONG, "elastic.max_workers=4", "plan.stages=1", "plan.replicas=2")
    held: list[int] = []
    result = trainee.run(then={195: lambda: held.append(len(list_leftover_placement_groups("tiny")))})
    assert result.end == "done", result.why
    assert result.weights_sha256 == long_undisturbed.weights_sha256
    released = [number for event in trainee.told("released") for number in event["workers"]]
    grown = [len(event["workers"]) for event in trainee.told("generation")]
    assert sorted(event["worker"] for event in trainee.told("hiring")) == [2, 3], "asked for once"
    assert held == [4 - len(released)] and (released or grown == [4])


@pytest.mark.chaos
def test_nobody_is_waited_for_longer_than_allowed(tmp_path):
    trainee = Trainee(tmp_path, "elastic.min_workers=4", "checkpoint.every=5", "wait_for_workers_s=0.5")
    result = trainee.run(kill(2))
    assert result.end == "failed"
    assert "no workers came within 0.5 s" in str(result.error) and "raypar resume" in str(result.error)


@pytest.mark.chaos
def test_a_standby_fills_the_empty_seat(long_undisturbed, tmp_path):
    trainee = Trainee(tmp_path, *LONG, "elastic.standbys=1", "plan.stages=2", "plan.replicas=2")
    result = trainee.run(kill(1), at=120)  # the standby has had the time to start
    assert result.weights_sha256 == long_undisturbed.weights_sha256
    assert trainee.losses == long_undisturbed.losses
    assert trainee.told("generation")[0]["workers"] == [0, 4, 2, 3]


@pytest.mark.chaos
def test_a_straggler_is_told_and_replaced(long_undisturbed, tmp_path):
    """One of the last stage's two workers sleeps three times as long as the other."""
    mark = tmp_path / "slow"
    trainee = Trainee(
        tmp_path,
        *LONG,
        "plan.stages=2",
        "plan.replicas=2",
        "elastic={min_workers: 1, stragglers: replace}",
        f"model.args={{sleep_s: 0.02, at: 30, slow: {mark}}}",
    )
    result = trainee.run()
    assert result.end == "done", result.why
    assert result.weights_sha256 == long_undisturbed.weights_sha256
    assert trainee.losses == long_undisturbed.losses
    (found,) = trainee.told("straggler")
    assert found["pid"] == int(mark.read_text()) and found["leaves"], found
    assert re.search(
        r"\(stage 1, replica \d, node \w+\) takes [23]\.\d times as long as its replicas for 20 steps", found["text"]
    )
    assert [event["worker"] for event in trainee.told("left")] == [found["worker"]]
    assert [event["worker"] for event in trainee.told("joined")] == [4], "another one has come"
    assert len(trainee.told("generation")[-1]["workers"]) == 4


@pytest.mark.chaos
def test_a_worker_at_half_speed_gets_fewer_blocks_until_it_is_fast_again(own_ray, tmp_path):
    """Of three replicas: 5 of 12 blocks on a fast one take less than 4 on the slow one, and the step is within 5 % of that."""
    words = (
        "steps=150",
        "microbatches=12",
        "batch_size=24",
        "validation=null",
        "elastic={min_workers: 1, stragglers: rebalance}",
    )
    plain = Undisturbed.of(tmp_path, *words)
    file = tmp_path / "slow"
    args = f"model.args={{sleep_s: 0.05, half_speed: {file}}}"
    trainee = Trainee(tmp_path, *words, "plan={stages: 1, replicas: 3}", args)
    begin, end = 25, 90

    def slow_down() -> None:
        file.write_text(str(trainee.pids[2]))

    result = trainee.run(then={begin: slow_down, end: file.unlink})
    assert result.end == "done", result.why
    assert result.weights_sha256 == plain.weights_sha256 and trainee.losses == plain.losses
    first, back = trainee.told("shares")
    assert re.match(r"worker 2 takes \d\.\d times as long as the others: it gets 2 of 12 blocks, they 5; ", first["text"]), (
        first
    )
    assert first["plan"] == "1 stage x 3 replicas, shares of blocks: stage 0 5:5:2"
    assert back["text"].startswith("the replicas are equally fast again: they get 4 of 12 blocks each")
    assert trainee.told("generation") == [], "nobody has a new seat"
    times = {event["step"]: event["seconds"] for event in trainee.told("step")}
    even, slow, shared, again = (
        statistics.median(times[step] for step in range(*span))
        for span in (
            (5, begin),
            (begin + 3, first["step"]),
            (first["step"] + 3, end),
            (back["step"] + 3, 150),
        )
    )
    predicted = even + (slow - even) / 4  # one more block of a fast replica; the slow one had four at twice the time
    told = f"even {even:.4f}, slow {slow:.4f}, shared {shared:.4f} (predicted {predicted:.4f}), again {again:.4f} s; pauses "
    print(told, first["pause_s"], back["pause_s"])
    assert shared < 1.05 * predicted and again < 1.05 * even, told
    assert max(first["pause_s"], back["pause_s"]) < 1.0


@pytest.mark.chaos
@pytest.mark.parametrize("client", ["there", "gone"])
def test_a_run_that_is_under_way_cannot_be_resumed_and_its_files_stay_as_they_are(client, undisturbed, tmp_path, monkeypatch):
    """Its metrics were cut back to the last checkpoint while it went on."""
    trainee = Trainee(tmp_path, "elastic.min_workers=1", "plan.stages=2", "plan.replicas=2", "checkpoint.every=5")
    refused: list[RayparError] = []

    def act(pids: list[int]) -> None:
        if client == "gone":  # the system has let go of what it held
            monkeypatch.setattr("raypar.storage.run_folder.RunFolder.hold_lock", lambda self: contextlib.nullcontext())
        folder = RunFolder.find(tmp_path / "runs/tiny")
        with pytest.raises(RayparError) as caught:
            resume_job(load_job(folder.job, []), folder, lambda event: None)
        refused.append(caught.value)

    trainee.result = trainee.run(act, at=13)
    assert trainee.result.end == "done", trainee.result.error
    assert isinstance(refused[0], ConfigError if client == "there" else ClusterError), refused
    assert "is under way" in str(refused[0]) or "is active on this cluster" in str(refused[0])
    assert trainee.losses == undisturbed.losses


@pytest.mark.chaos
def test_a_run_whose_client_was_killed_saves_and_ends_when_it_is_resumed_and_the_next_attempt_goes_on(tmp_path):
    """Nobody could end it, and for minutes nobody could resume it."""
    words = ["steps=400", "model.args.sleep_s=0.01", "checkpoint.every=0", "elastic.min_workers=1", "plan.replicas=2"]
    job = write_job(tmp_path)
    address = ray.get_runtime_context().gcs_address
    command = [sys.executable, "-m", "raypar", "train", str(job), "--address", address]
    client = subprocess.Popen([*command, *(w for word in words for w in ("--set", word))], cwd=Path(__file__).parents[1])
    metrics, deadline = tmp_path / "runs/tiny/metrics.jsonl", time.monotonic() + 60
    try:
        while not (metrics.exists() and metrics.read_text().count("loss") > 10) and time.monotonic() < deadline:
            time.sleep(0.05)
    finally:
        client.kill()
        client.wait()
    folder = RunFolder.find(tmp_path / "runs/tiny")
    time.sleep(ALONE_S + 1.0)
    with pytest.raises(OutlivedError) as caught:  # there is no checkpoint before it
        resume_job(load_job(folder.job, []), folder, lambda event: None)
    assert "without a client" in str(caught.value)
    assert not ray.util.list_named_actors(all_namespaces=True)
    first = len(metrics.read_text().splitlines())
    result = resume_job(load_job(folder.job, []), folder, lambda event: None)
    assert result.end == "done" and result.done == 400
    steps = [line["step"] for line in map(json.loads, metrics.read_text().splitlines()) if "loss" in line]
    assert steps == list(range(1, 401)) and first > 10
