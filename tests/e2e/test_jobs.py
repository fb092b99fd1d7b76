"""`raypar submit`, `runs`, `logs` and `stop` with a real job server, on a cluster with room for one of two jobs."""

import contextlib
import json
import os
import subprocess
import sys
import time
from pathlib import Path

import pytest

from examples.submit_and_stop import SMALL, cluster
from raypar.console.read_run_folder import has_checkpoints
from raypar.storage.run_folder import RunFolder

ROOT = Path(__file__).parents[2]
DEADLINE_S = 240.0

pytestmark = [pytest.mark.chaos]


@pytest.fixture(scope="module")
def home(tmp_path_factory) -> Path:
    return tmp_path_factory.mktemp("home")


@pytest.fixture(scope="module")
def address(home):
    with cluster(1, home) as found:
        yield found


@pytest.fixture
def raypar(address):
    env = {**os.environ, "RAY_API_SERVER_ADDRESS": address, "RAY_AUTH_MODE": "disabled"}
    running: list[subprocess.Popen] = []

    def call(*words: str) -> subprocess.Popen:
        command = [sys.executable, "-m", "raypar", *words]
        made = subprocess.Popen(command, cwd=ROOT, env=env, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
        running.append(made)
        return made

    yield call
    for one in running:
        with contextlib.suppress(ProcessLookupError):
            one.kill()
        one.communicate()


def ended(called: subprocess.Popen) -> tuple[int, str, str]:
    out, err = called.communicate(timeout=DEADLINE_S)
    return called.returncode, out, err


def rows(raypar) -> dict[str, dict]:
    code, out, err = ended(raypar("runs", "--json"))
    assert code == 0, err
    return {row["submission_id"]: row for row in json.loads(out)}


def wait_for(raypar, fact, what: str) -> dict[str, dict]:
    until_s = time.monotonic() + DEADLINE_S
    while True:
        found = rows(raypar)
        if fact(found):
            return found
        assert time.monotonic() < until_s, f"{what}: {found}"
        time.sleep(0.5)


def words(*settings: str) -> list[str]:
    return [word for setting in (*SMALL, *settings) for word in ("--set", setting)]


def test_two_jobs_on_a_small_cluster_run_one_after_the_other_and_a_stopped_one_is_told_from_a_finished_one(raypar, home):
    first = raypar("submit", "jobs/quickstart.yaml", "--submission-id", "a", "--json", *words("name=first", "steps=5000"))
    found = wait_for(raypar, lambda now: (now.get("a", {}).get("step") or 0) > 0, "the first job has done a step")
    assert found["a"]["state"] == "running" and found["a"]["name"] == "first" and found["a"]["loss"] > 0
    second = raypar("submit", "jobs/quickstart.yaml", "--submission-id", "b", *words("name=second", "steps=5"))
    found = wait_for(raypar, lambda now: now.get("b", {}).get("state") == "waiting", "the second job waits")
    assert found["b"]["why"] == "waiting for 4 CPUs: 2 of 6 are free, run first has 4"
    code, out, err = ended(raypar("stop", "first", "--json"))
    stopped = json.loads(out)
    assert code == 0 and stopped["state"] == "stopped" and stopped["step"] > 0, err
    assert f"stopped after {stopped['step']} steps (SIGTERM): the checkpoint " in stopped["saved"]
    assert has_checkpoints(RunFolder(home / "raypar/runs/first"))
    code, out, _ = ended(first)
    told = [json.loads(line) for line in out.splitlines()]
    assert code == 130 and told[0]["kind"] == "submitted" and {one["kind"] for one in told[1:-1]} == {"log"}
    assert told[-1] == {"kind": "end", "submission_id": "a", "state": "stopped", "exit_code": 130}
    code, out, err = ended(second)
    assert code == 0, out + err
    assert "the cluster has room for run second now" in out and out.splitlines()[-1] == "job b is done"
    found = rows(raypar)
    assert (found["b"]["state"], found["b"]["step"], found["a"]["state"]) == ("done", 5, "stopped")


def test_bad_input_of_a_submitted_job_has_its_exit_code_and_an_id_is_used_once(raypar):
    code, out, err = ended(
        raypar("submit", "jobs/quickstart.yaml", "--submission-id", "c", *words("model.function=examples.gpt:no"))
    )
    assert code == 2, out + err
    assert "error: " in out and "cure: " in out and out.splitlines()[-1] == "job c has failed, with exit code 2"
    why = rows(raypar)["c"]["why"]
    assert why and f"error: {why}" in out, "`raypar runs` says why it has failed"
    code, out, err = ended(raypar("submit", "jobs/quickstart.yaml", "--submission-id", "c"))
    assert code == 2 and "a job 'c' has been submitted" in err and "Traceback" not in err
    code, _, err = ended(raypar("logs", "nobody"))
    assert code == 2 and "no job 'nobody' at http://127.0.0.1:" in err


def test_a_queued_job_that_is_stopped_ends_at_once_without_a_stack_and_a_killed_submitter_leaves_its_job_alone(raypar, home):
    holder = raypar("submit", "jobs/quickstart.yaml", "--submission-id", "d", *words("name=holder", "steps=5000"))
    wait_for(raypar, lambda now: (now.get("d", {}).get("step") or 0) > 0, "the first job has done a step")
    holder.kill()
    assert ended(raypar("submit", "jobs/quickstart.yaml", "--no-wait", "--submission-id", "e", *words("name=queued")))[0] == 0
    wait_for(raypar, lambda now: now.get("e", {}).get("state") == "waiting", "the second job waits")
    code, out, err = ended(raypar("submit", "jobs/quickstart.yaml", "--no-wait", *words("name=queued", "steps=1")))
    assert code == 0 and "warning: job e of the same name (queued) is running" in err and "`raypar stop e` first" in err
    code, out, err = ended(raypar("stop", "e"))
    assert code == 0 and "job e (queued) was stopped before it had saved anything new" in out, out + err
    code, out, err = ended(raypar("logs", "e", "-f"))
    assert code == 130 and "run queued has not begun: SIGTERM while it was waiting for 4 CPUs" in out, out + err
    assert "SIGTERM received" not in out and "Traceback" not in out
    assert not (home / "raypar/runs/queued/metrics.jsonl").exists()
    assert rows(raypar)["d"]["state"] == "running", "who submitted it is gone, and it is not"
    for job in ("d", *(one for one in rows(raypar) if one.startswith("raysubmit_"))):
        assert ended(raypar("stop", job))[0] == 0
