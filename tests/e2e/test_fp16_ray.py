"""float16 with a scaled loss, on a real Ray: a worker and the driver die, and the run is resumed for longer."""

import os
import signal
import time
from pathlib import Path

import pytest
from helpers import reference
from helpers.full_disk import no_bytecode
from helpers.trainee import Trainee, Undisturbed, kill

from raypar.actors.ray_connection import connect_ray
from raypar.console.read_run_folder import read_status
from raypar.console.run_status import format_status
from raypar.job.read_job import load_job
from raypar.launch import resume_job
from raypar.record.fold import RunView
from raypar.storage.run_folder import RunFolder
from raypar.worker.layer_graph_of_job import make_layer_graph

WORDS = ["precision={compute: fp16, loss_scale: {init_scale: 33554432, growth_interval: 3}}"]


@pytest.mark.full
def test_kills_and_a_resume_change_no_bit_of_a_run_in_float16_and_skip_the_same_steps(tmp_path: Path):
    longer = Undisturbed.of(tmp_path, *WORDS, "steps=40")
    spec = load_job(tmp_path / "tiny.yaml", ["steps=40", *WORDS])
    skipped = reference.train(make_layer_graph(spec), spec).skipped
    assert sum(skipped[:10]) >= 2 and sum(skipped[10:20]) and sum(skipped[20:30]) and sum(skipped[30:])
    with no_bytecode(), connect_ray(None, 4, Path(__file__).parents[1]):
        trainee = Trainee(tmp_path, *WORDS, "elastic.min_workers=1", "plan.stages=2", "plan.replicas=2")
        kill_driver = {20: lambda: os.kill(trainee.members["driver_pid"], signal.SIGKILL)}
        result = trainee.run(kill(3), at=10, then=kill_driver)
        assert result.end == "done", result.why
        assert trainee.told("recovering") and trainee.told("driver") and trainee.losses == longer.losses[:30]
        assert not [event for event in trainee.told("warning") if "skipped" in event["text"]], "overflows are no news"
        job = load_job(trainee.path, [*trainee.words, "steps=40", "plan.stages=1"])
        result = resume_job(job, RunFolder(tmp_path / "runs/tiny"), lambda event: trainee.events.append(event.facts()))
    assert result.end == "done" and result.weights_sha256 == longer.weights_sha256
    assert trainee.losses == longer.losses
    run = RunFolder(tmp_path / "runs/tiny")
    records = [one for one in run.read_lines(run.metrics) if "loss" in one]
    assert [bool(one.get("skipped")) for one in records] == skipped
    scales = [2.0 ** reference.loss_scale_exponent(spec.precision.loss_scale, skipped[:step]) for step in range(40)]
    assert [one["loss_scale"] for one in records] == scales
    status = read_status(run, RunView.of(run.read_timeline()), 40, time.time())
    assert status.skipped_steps == sum(skipped) and status.facts()["loss_scale"] == scales[-1]
    assert "computing in fp16 (loss scale 2^" in format_status(status)
