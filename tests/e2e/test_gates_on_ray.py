"""The example job whose LSTMs are cut by gates, on Ray: a worker is killed, the other one goes on with all hidden units."""

import os
import re
import signal
from pathlib import Path

import pytest

from raypar.actors.ray_connection import connect_ray
from raypar.job.read_job import load_job
from raypar.launch import Result, train_job_in_new_folder
from raypar.record.events import Event

ROOT = Path(__file__).parents[2]


def train(folder: Path, *words: str, kill_at: int | None = None) -> tuple[Result, list[dict]]:
    """Train the job with fewer steps; kill its second worker after a step. Returns the result and the events of generations."""
    job = load_job(
        ROOT / "jobs/lstm_gates.yaml", ["steps=12", "validation=null", "checkpoint.every=0", f"run_dir={folder}", *words]
    )
    pids: list[int] = []
    generations: list[dict] = []

    def tell(given: Event) -> None:
        event = given.facts()
        if event["kind"] == "stage" and event["stage"] == "started":
            pids[:] = [int(pid) for pid in re.findall(r"\d+", event["text"].split("pids")[1])]
        if event["kind"] == "step" and event["step"] == kill_at:
            os.kill(pids[1], signal.SIGKILL)
        if event["kind"] == "generation":
            generations.append(event)

    return train_job_in_new_folder(job, tell), generations


@pytest.mark.chaos
def test_a_run_that_loses_half_of_the_hidden_units_has_the_bits_of_one_worker(tmp_path: Path):
    with connect_ray(None, 2, ROOT):
        alone, _ = train(tmp_path / "alone", "plan.shards=1")
        killed, generations = train(tmp_path / "killed", kill_at=4)
    assert (alone.end, killed.end) == ("done", "done"), killed.why
    assert [event["workers"] for event in generations] == [[0]]
    assert killed.weights_sha256 == alone.weights_sha256
