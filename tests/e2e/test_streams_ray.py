"""Runs on streams over real Ray through losses, drivers, resumes and other plans: the samples and bits of one process.

One history is `full`, all are `pytest -m chaos tests/e2e/test_streams_ray.py`. In the default suite
`tests/chaos/test_stream_histories.py` takes real streams through kills, new drivers and other plans, pickled as on Ray.
"""

from __future__ import annotations

import os
import shutil
import signal
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy
import psutil
import pytest
import ray
import ray.data
from helpers.streamed_runs import SOURCES, StreamedRun, in_one_process, write_files

import raypar
from raypar.actors import ray_row_stream
from raypar.actors.ray_connection import connect_ray
from raypar.actors.ray_row_stream import NAMESPACE
from raypar.job.read_job import load_job
from raypar.launch import Result, resume_job, train_job_in_new_folder
from raypar.storage.run_folder import RunFolder

REPLICAS, STAGES, BOTH = (
    ("plan.stages=1", "plan.replicas=4"),
    ("plan.stages=4", "plan.replicas=1"),
    ("plan.stages=2", "plan.replicas=2"),
)
SAVED, STOPPED = 10, 23
"""A run that is resumed had done more steps than its checkpoint has: these are read again, and must be the same."""


@pytest.fixture(scope="module", autouse=True)
def own_ray() -> Iterator[None]:
    ray_row_stream.KEPT_S = 5.0  # so that what this process keeps for the checks before a run does not seem to be left
    os.environ["RAYPAR_TEST_CLUSTER"] = str(os.getpid())  # what the cluster starts is told from that of others by it
    with connect_ray(None, 4, Path(__file__).parents[1]):
        yield
    del os.environ["RAYPAR_TEST_CLUSTER"]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("in_one_process")


def check(run: StreamedRun, result: Result, folder: Path, source: str) -> None:
    """Every step has read, and the run has ended, as one process."""
    want = in_one_process(folder, source)
    assert result.end == "done", f"{result.why} {result.error}"
    assert run.losses == want.losses, "every step was seen once, with the same loss"
    assert result.weights_sha256 == want.weights_sha256
    assert run.journal == want.journal
    deadline = time.monotonic() + 20
    while left := [one for one in ray.util.list_named_actors(all_namespaces=True) if one["namespace"] == NAMESPACE]:
        assert time.monotonic() < deadline, f"actors outlive the run: {left}"
        time.sleep(0.1)
    while left_processes := data_processes():
        assert time.monotonic() < deadline, f"data processes outlive the run: {left_processes}"
        time.sleep(0.1)


def kill_driver(run: StreamedRun) -> Callable[[], None]:
    return lambda: os.kill(run.members["driver_pid"], signal.SIGKILL)


def kill_a_worker(run: StreamedRun) -> Callable[[], None]:
    def act() -> None:
        alive = [member["pid"] for member in run.members["members"] if psutil.pid_exists(member["pid"])]
        if alive:  # else the run has ended before this was called: events come late after a driver's death
            os.kill(alive[0], signal.SIGKILL)

    return act


def undisturbed(run: StreamedRun) -> Result:
    return run.run()


def worker_killed(run: StreamedRun) -> Result:
    """Its microbatches go to others, which read its streams from there on."""
    return run.run(lambda pids: os.kill(pids[1], signal.SIGKILL), at=13)


def three_workers_killed(run: StreamedRun) -> Result:
    """One reads all streams."""
    return run.run(lambda pids: [os.kill(pid, signal.SIGKILL) for pid in pids[1:]] and None, at=13)


def driver_killed(run: StreamedRun) -> Result:
    """And a worker after it, whose streams others find by what the second driver knows."""
    run.words.append("model.args.sleep_s=0.03")
    return run.run(then={12: kill_driver(run), 16: kill_a_worker(run)})


def actor_killed(run: StreamedRun) -> Result:
    """That which computes the rows of Ray Data, twice; the next one computes them again, and skips what was read."""
    run.words.append("model.args.sleep_s=0.03")

    def kill_actor() -> None:
        (name,) = [one["name"] for one in ray.util.list_named_actors(all_namespaces=True) if one["namespace"] == NAMESPACE]
        ray.kill(ray.get_actor(name, namespace=NAMESPACE))

    return run.run(then={7: kill_actor, 17: kill_actor})


def data_processes() -> list[psutil.Process]:
    """The data processes of this Ray cluster that read streams."""
    return [one for one in psutil.process_iter() if is_data_process(one)]


def is_data_process(process: psutil.Process) -> bool:
    """Whether a process, of which others may be on the machine, is one that a worker of this cluster has started."""
    try:
        if "raypar.worker.data.stream_feed_process" not in " ".join(process.cmdline()):
            return False
        return process.environ().get("RAYPAR_TEST_CLUSTER") == str(os.getpid())
    except psutil.Error:
        return False


def data_process_killed(run: StreamedRun) -> Result:
    """That which reads the stream for all workers, twice; the next one reads it again, or from a cursor on."""
    run.words.append("model.args.sleep_s=0.03")

    def kill() -> None:
        (one,) = data_processes()
        one.kill()

    return run.run(then={7: kill, 17: kill})


def resumed(*plan: str) -> Callable[[StreamedRun], Result]:
    """Stopped, rewound to a checkpoint before the last steps, and resumed under another plan."""

    def history(run: StreamedRun) -> Result:
        job = load_job(run.path, [*run.words, f"checkpoint.every={SAVED}", "checkpoint.keep=9"])
        train_job_in_new_folder(job, lambda event: None, stop_at_step=STOPPED)
        return resume_from_first_checkpoint(run, *plan)

    return history


def resume_from_first_checkpoint(run: StreamedRun, *plan: str) -> Result:
    """All later steps are executed again, under this plan."""
    found = RunFolder.find(run.folder / "runs/tiny")
    for path in sorted(found.checkpoints.glob("step_*"))[1:]:
        shutil.rmtree(path)
    return resume_job(load_job(found.job, list(plan)), found, lambda event: None)


HISTORIES: dict[str, tuple[tuple[str, ...], Callable[[StreamedRun], Result]]] = {
    "undisturbed": (BOTH, undisturbed),
    "worker killed": (REPLICAS, worker_killed),
    "three workers killed": (BOTH, three_workers_killed),
    "driver killed": (REPLICAS, driver_killed),
    "resumed, other plan": (REPLICAS, resumed(*STAGES)),
    "resumed, other number of readers": (BOTH, resumed("plan.stages=1", "plan.replicas=3")),
}
CASES = [(source, history) for source in SOURCES for history in HISTORIES]
HISTORIES["actor killed"] = (REPLICAS, actor_killed)
CASES.append(("Ray Data", "actor killed"))
HISTORIES["data process killed"] = (REPLICAS, data_process_killed)
CASES += [(source, "data process killed") for source in SOURCES if "by a process" in source]


@pytest.mark.chaos
@pytest.mark.parametrize(("source", "history"), CASES)
def test_every_history_of_every_source_reads_what_one_process_reads(
    source: str, history: str, folder: Path, tmp_path: Path
) -> None:
    plan, act = HISTORIES[history]
    run = StreamedRun(tmp_path, source, *plan)
    check(run, act(run), folder, source)


@pytest.mark.full
def test_a_stream_through_a_killed_worker_and_a_resume_under_another_plan(folder: Path, tmp_path: Path) -> None:
    source = "IterableDataset with state_dict, shuffled"
    run = StreamedRun(tmp_path, source, "plan.stages=1", "plan.replicas=2", f"checkpoint.every={SAVED}", "checkpoint.keep=9")
    worker_killed(run)
    check(run, resume_from_first_checkpoint(run, "plan.stages=2", "plan.replicas=1"), folder, source)


@pytest.mark.chaos
def test_a_data_set_of_ray_data_that_trainer_gets_is_a_stream_and_resumed(tmp_path: Path) -> None:
    folder = tmp_path / "files"
    write_files(folder)
    given: dict[str, Any] = {"model": "helpers.tiny_job:model", "loss": "helpers.tiny_job:loss", "seed": 5}
    given |= {"batch_size": 8, "microbatches": 4, "optimizer": ("torch.optim:SGD", {"lr": 0.1}), "checkpoint": {"every": 5}}

    def train(name: str, steps: int, plan: dict[str, int], **more: Any) -> Result:
        rows = ray.data.read_parquet(str(folder / "parquet"))
        rows = rows.map_batches(lambda batch: {name: numpy.stack(batch[name]).astype("float32") for name in ("x", "y")})
        data = {"function": rows, "streams": 1, "shuffle_window": 6}
        return raypar.Trainer(data=data, steps=steps, plan=plan, run_dir=str(tmp_path / name), **given, **more).fit()

    whole = train("whole", 12, {"stages": 1, "replicas": 3})
    begun = train("begun", 7, {"stages": 2, "replicas": 2})
    resumed = train("resumed", 12, {"stages": 1, "replicas": 2}, resume_from_checkpoint=begun.checkpoint_path)
    assert resumed.end == "done" and resumed.weights_sha256 == whole.weights_sha256
