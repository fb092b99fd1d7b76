"""Ctrl-C, or SIGTERM to the group, ends a run within 5 s with a resumable checkpoint and nothing left behind."""

import os
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import pytest
from helpers.tiny_job import write_job

ROOT = Path(__file__).parents[2]
START_S = 120.0


@pytest.mark.parametrize("number, stages", [(signal.SIGINT, 1), pytest.param(signal.SIGTERM, 2, marks=pytest.mark.full)])
def test_a_signal_to_the_group_leaves_a_resumable_checkpoint_and_nothing_else(number, stages, tmp_path):
    home = tmp_path / "home"
    home.mkdir()
    temp = Path(tempfile.mkdtemp(prefix="rp"))  # short: Ray puts its sockets in it
    env = {k: v for k, v in os.environ.items() if k != "RAY_ADDRESS"}
    env |= {"HOME": str(home), "TMPDIR": str(temp), "PYTHONPATH": f"{ROOT / 'tests'}:{ROOT}"}
    job = write_job(tmp_path)
    plan = f"plan={{stages: {stages}}}"
    words = ["train", str(job), "--set", "steps=100000", "--set", plan, "--set", "model.args.sleep_s=0.02"]
    run = subprocess.Popen(
        [sys.executable, "-m", "raypar", *words, "--set", "validation=null", "--set", "checkpoint.every=1000"],
        env=env,
        cwd=ROOT / "tests",
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        start_new_session=True,
    )
    try:
        deadline = time.monotonic() + START_S
        for line in run.stdout:
            assert time.monotonic() < deadline
            if line.startswith("step 1/"):
                break
        time.sleep(0.5)
        started = time.monotonic()
        os.killpg(run.pid, number)  # as a terminal (SIGINT), Slurm or `timeout` (SIGTERM) does
        out, err = run.communicate(timeout=30)
        seconds = time.monotonic() - started
    finally:
        if run.poll() is None:
            os.killpg(run.pid, signal.SIGKILL)
        # torch makes its compiler's cache folder when torch.optim is first used; it is the user's and stays.
        left = [path for path in temp.iterdir() if not path.name.startswith("torchinductor_")]
        shutil.rmtree(temp)
    assert run.returncode == 130, err
    assert "stopped after" in err and f"next: raypar resume {tmp_path / 'runs/tiny'}" in err and "error: " not in err
    assert "checkpoint" in out
    assert seconds < 5.0
    checkpoints = list((tmp_path / "runs/tiny/checkpoints").iterdir())
    assert len(checkpoints) == 1 and (checkpoints[0] / "manifest.json").is_file()
    assert not list(home.iterdir()) and not left
    assert str(temp) not in subprocess.run(["ps", "axww", "-o", "args"], capture_output=True, text=True).stdout
