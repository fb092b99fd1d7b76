"""`cluster/slurm.sh` trains, is stopped by Slurm, and goes on: real Ray and raypar, stand-ins for `srun` and `scontrol`."""

from __future__ import annotations

import json
import os
import re
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path

import psutil
import pytest

ROOT = Path(__file__).parents[2]
JOB = "jobs/quickstart.yaml"
STEPS = 30
OVERRIDES = [f"steps={STEPS}", "validation=null", "name=slurm", "checkpoint.every=100"]
JOB_TIMEOUT_S = 420.0
ENDS_WITHIN_S = 120.0

SRUN = """#!/bin/bash
# As many copies of the command as --ntasks says; as Slurm's, it hands signals on and returns the worst exit code.
echo "srun $*" >>"$SLURM_STUB_LOG"
n=1
while [[ "$1" == --* ]]; do
    if [[ "$1" == --ntasks=* ]]; then n="${1#--ntasks=}"; fi
    shift
done
tasks=()
for ((i = 0; i < n; i++)); do "$@" & tasks+=("$!"); done
trap 'kill -TERM "${tasks[@]}" 2>/dev/null' TERM
worst=0
for task in "${tasks[@]}"; do
    while kill -0 "$task" 2>/dev/null; do wait "$task"; done
    wait "$task" || worst="$?"
done
exit "$worst"
"""
SCONTROL = """#!/bin/bash
echo "scontrol $*" >>"$SLURM_STUB_LOG"
"""


@pytest.mark.chaos
def test_a_slurm_job_that_is_stopped_is_queued_again_and_goes_on(tmp_path: Path, request: pytest.FixtureRequest):
    """The weights are those of one plain process; nothing is left, neither processes nor the token."""
    stubs, job_id = tmp_path / "stubs", str(os.getpid())
    request.addfinalizer(lambda: shutil.rmtree(f"/tmp/ray-{job_id}", ignore_errors=True))
    stubs.mkdir()
    for name, text in (("srun", SRUN), ("scontrol", SCONTROL)):
        (stubs / name).write_text(text)
        (stubs / name).chmod(0o755)
    log = tmp_path / "slurm.log"
    env = os.environ | {
        "PATH": f"{stubs}:{Path(sys.executable).parent}:{os.environ['PATH']}",
        "PYTHONPATH": str(ROOT),
        "HOME": str(tmp_path),
        "SLURM_STUB_LOG": str(log),
        "SLURM_JOB_ID": job_id,
        "SLURM_JOB_NUM_NODES": "3",
        "SLURM_CPUS_PER_TASK": "2",
        "RAYPAR_HEAD_IP": "127.0.0.1",
        "RAYPAR_RUN_DIR": str(tmp_path / "runs"),
    }
    env.pop("RAY_AUTH_MODE", None)
    overrides = [word for each in OVERRIDES for word in ("--set", each)]

    def submit(output: Path) -> subprocess.Popen[bytes]:
        with output.open("wb") as file:
            return subprocess.Popen(["bash", "cluster/slurm.sh", JOB, *overrides], cwd=ROOT, env=env, stdout=file, stderr=file)

    first, text = tmp_path / "first.txt", ""
    script = submit(first)
    token = tmp_path / f".raypar/slurm-{job_id}/token"
    try:
        deadline = time.monotonic() + JOB_TIMEOUT_S
        while not re.search(rf"^step \d+/{STEPS} ", text := first.read_text(errors="replace"), re.MULTILINE):
            assert script.poll() is None and time.monotonic() < deadline, text[-3000:]
            time.sleep(0.2)
        assert token.stat().st_mode & 0o077 == 0 and len(token.read_text()) == 64
        script.send_signal(signal.SIGTERM)  # what `--signal=B:TERM@180` sends
        assert script.wait(ENDS_WITHIN_S) not in (0, 2), first.read_text(errors="replace")[-3000:]
    finally:
        _end(script)
    assert not token.exists(), "the token goes with the job"
    assert f"scontrol requeue {job_id}" in log.read_text()
    checkpoints = list((tmp_path / "runs/slurm/checkpoints").glob("step_*"))
    assert len(checkpoints) == 1 and 0 < int(checkpoints[0].name[-8:]) < STEPS

    second = tmp_path / "second.txt"
    script = submit(second)
    try:
        assert script.wait(JOB_TIMEOUT_S) == 0, second.read_text(errors="replace")[-3000:]
    finally:
        _end(script)
    said = second.read_text(errors="replace")
    assert [path.name for path in (tmp_path / "runs").iterdir()] == ["slurm"], "the run goes on, no other begins"
    steps = [json.loads(line)["step"] for line in (tmp_path / "runs/slurm/metrics.jsonl").read_text().splitlines()]
    assert sorted(set(steps)) == list(range(1, STEPS + 1))
    assert log.read_text().count("scontrol") == 1, "a job that is done is not queued again"
    assert [
        process for process in psutil.process_iter(["cmdline"]) if f"/tmp/ray-{job_id}" in str(process.info["cmdline"])
    ] == []

    plain = subprocess.run(
        [sys.executable, "examples/plain_gpt.py", JOB, *overrides],
        cwd=ROOT,
        env=env,
        capture_output=True,
        text=True,
        check=True,
        timeout=JOB_TIMEOUT_S,
    )
    hashes = [re.findall(r"\b[0-9a-f]{64}\b", each)[-1] for each in (said, plain.stdout)]
    assert hashes[0] == hashes[1]


def _end(script: subprocess.Popen[bytes]) -> None:
    """Kill what a test that has failed would leave: the script and all that it has started."""
    if script.poll() is None:
        for process in [*psutil.Process(script.pid).children(recursive=True), psutil.Process(script.pid)]:
            process.kill()
        script.wait()
