"""Ctrl-C, or SIGTERM to the group, ends a run on local nodes within 5 s with a resumable checkpoint and nothing left behind."""

import contextlib
import json
import os
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import psutil
import pytest
from helpers.tiny_job import write_job

ROOT = Path(__file__).parents[2]
START_S = 120.0


def addresses(processes: list[psutil.Process]) -> set[str]:
    """On which they listen."""
    found = set()
    for process in processes:
        with contextlib.suppress(psutil.NoSuchProcess):  # it was one of the start only
            sockets = process.net_connections("inet")
            found |= {socket.laddr.ip for socket in sockets if socket.status in ("LISTEN", "NONE")}
    return found


@pytest.mark.ci
@pytest.mark.parametrize("number, stages", [(signal.SIGINT, 1), pytest.param(signal.SIGTERM, 2, marks=pytest.mark.full)])
def test_a_signal_to_the_group_leaves_a_resumable_checkpoint_and_nothing_else(number, stages, tmp_path):
    home = tmp_path / "home"
    home.mkdir()
    temp = Path(tempfile.mkdtemp(prefix="rp"))  # short: Ray puts its sockets in it
    env = {k: v for k, v in os.environ.items() if k != "RAY_ADDRESS"}
    env |= {"HOME": str(home), "TMPDIR": str(temp), "PYTHONPATH": f"{ROOT / 'tests'}:{ROOT}"}
    job = write_job(tmp_path)
    plan = f"plan={{stages: {stages}}}"
    words = [
        "train",
        str(job),
        "--local-nodes",
        "2",
        "--set",
        "steps=100000",
        "--set",
        plan,
        "--set",
        "model.args.sleep_s=0.02",
    ]
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
        deadline, said = time.monotonic() + START_S, ""
        for line in run.stdout:
            assert time.monotonic() < deadline
            said += line
            if line.startswith("step 1/"):
                break
        family = psutil.Process(run.pid).children(recursive=True)
        listening = addresses(family)
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
    assert not [process for process in family if process.is_running() and process.status() != psutil.STATUS_ZOMBIE]

    nodes = json.loads((tmp_path / "runs/tiny/cluster.json").read_text())["nodes"]
    assert [(node["head"], node["cpus"]) for node in nodes] == [(True, stages), (False, stages)], (
        "one more than workers, halved"
    )
    assert "2 nodes" in said and all(f"{node['pid']}" in said for node in nodes)
    assert {node["pid"] for node in nodes} <= {process.pid for process in family}
    assert listening == {"127.0.0.1", "::ffff:127.0.0.1"}
    assert str(temp) not in subprocess.run(["ps", "axww", "-o", "args"], capture_output=True, text=True).stdout
