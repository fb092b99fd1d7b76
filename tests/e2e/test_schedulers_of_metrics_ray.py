"""A learning rate that follows validations, on a real Ray: a worker and the driver die, and the run is resumed for longer."""

import os
import re
import signal
from pathlib import Path

import pytest
from helpers.full_disk import no_bytecode
from helpers.trainee import Trainee, Undisturbed, kill

from raypar.actors.ray_connection import connect_ray
from raypar.job.read_job import load_job
from raypar.launch import resume_job
from raypar.storage.run_folder import RunFolder

WORDS = [
    "lr_schedule={function: torch.optim.lr_scheduler:ReduceLROnPlateau, args: {patience: 0, factor: 0.5, threshold: 0.02}, "
    "metric: validation_loss}",
    "validation={function: helpers.tiny_job:data, every: 3, samples: 12}",
]


@pytest.mark.full
def test_kills_and_a_resume_change_no_bit_of_a_run_whose_rate_follows_validations(tmp_path: Path):
    """The checkpoint after 30 steps is saved before the validation that the longer run has there too."""
    longer = Undisturbed.of(tmp_path, *WORDS, "steps=40")
    with no_bytecode(), connect_ray(None, 4, Path(__file__).parents[1]):
        trainee = Trainee(tmp_path, *WORDS, "elastic.min_workers=1", "plan.stages=2", "plan.replicas=2")
        kill_driver = {20: lambda: os.kill(trainee.members["driver_pid"], signal.SIGKILL)}
        result = trainee.run(kill(3), at=10, then=kill_driver)
        assert result.end == "done", result.why
        assert trainee.told("recovering") and trainee.told("driver") and trainee.losses == longer.losses[:30]
        job = load_job(trainee.path, [*trainee.words, "steps=40", "plan.stages=1"])
        result = resume_job(job, RunFolder(tmp_path / "runs/tiny"), lambda event: trainee.events.append(event.facts()))
    assert result.end == "done" and result.weights_sha256 == longer.weights_sha256
    assert trainee.losses == longer.losses
    lines = [event["text"] for event in trainee.told("learning_rate")]
    assert len(lines) >= 2 and all(" -> " in line and "validation_loss was " in line for line in lines), lines
    records = list(RunFolder(tmp_path / "runs/tiny").read_lines(tmp_path / "runs/tiny/metrics.jsonl"))
    assert [one["step"] for one in records if "validation_loss" in one] == [*range(3, 40, 3), 40]


@pytest.mark.full
def test_a_validation_of_state_that_a_flipped_bit_has_changed_is_run_again(tmp_path: Path):
    """The bit flips in step 15; the replicas have agreed last after 12 steps, and are compared again after 16."""
    whole = Undisturbed.of(tmp_path, *WORDS)
    flips = f"model.args={{sleep_s: 0.01, at: 14, flip: {tmp_path / 'flipped'}}}"
    with no_bytecode(), connect_ray(None, 4, Path(__file__).parents[1]):
        trainee = Trainee(tmp_path, *WORDS, "plan.stages=1", "plan.replicas=4", "elastic={min_workers: 1, mirror: 4}", flips)
        result = trainee.run()
    assert (tmp_path / "flipped").exists()
    assert result.end == "done" and result.weights_sha256 == whole.weights_sha256, result.why
    warnings = [event["text"] for event in trainee.told("warning")]
    assert any("silent corruption" in text for text in warnings), warnings
    assert any(re.search(r"validation_loss after 15 steps: .* is right and used from now on", text) for text in warnings), (
        warnings
    )
    records = list(RunFolder(tmp_path / "runs/tiny").read_lines(tmp_path / "runs/tiny/metrics.jsonl"))
    assert [one["step"] for one in records if "validation_loss" in one] == [*range(3, 31, 3)]
