"""`raypar submit`, `runs`, `logs` and `stop` on a cluster that asks for a token: with the right one, a wrong one, and none."""

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
TOKEN = "a-token-of-the-tests-0123456789abcdef"
VARIABLES = ("RAY_AUTH_MODE", "RAY_AUTH_TOKEN", "RAY_AUTH_TOKEN_PATH")

pytestmark = [pytest.mark.chaos]


@pytest.fixture(scope="module")
def home(tmp_path_factory) -> Path:
    return tmp_path_factory.mktemp("home")


@pytest.fixture(scope="module")
def address(home):
    with cluster(1, home, RAY_AUTH_MODE="token", RAY_AUTH_TOKEN=TOKEN) as found:
        yield found


def raypar(address: str, home: Path, *words: str, **token: str) -> tuple[int, str, str]:
    """(exit code, stdout, stderr) of a command of a user whose home is `home`, with these variables about the token."""
    env = {name: value for name, value in os.environ.items() if name not in VARIABLES}
    env |= {"RAY_API_SERVER_ADDRESS": address, "HOME": str(home), **token}
    command = [sys.executable, "-m", "raypar", *words]
    done = subprocess.run(command, cwd=ROOT, env=env, capture_output=True, text=True, timeout=DEADLINE_S, check=False)
    return done.returncode, done.stdout, done.stderr


SUBMIT = ("submit", "jobs/quickstart.yaml", *(word for setting in (*SMALL, "steps=5000") for word in ("--set", setting)))
RIGHT = {"RAY_AUTH_MODE": "token", "RAY_AUTH_TOKEN": TOKEN}


@pytest.mark.parametrize("words", [SUBMIT, ("runs",), ("logs", "a"), ("stop", "a")], ids=["submit", "runs", "logs", "stop"])
@pytest.mark.parametrize(
    "token, said",
    [
        ({}, "lets nobody in without its token (HTTP 401)"),
        ({"RAY_AUTH_MODE": "token", "RAY_AUTH_TOKEN": "wr0ng-token"}, "does not take this token (HTTP 403)"),
        ({"RAY_AUTH_MODE": "token"}, "RAY_AUTH_MODE is token, and the token cannot be read from"),
    ],
    ids=["none", "wrong", "nowhere"],
)
def test_without_the_right_token_there_is_one_error_with_a_cure(address, tmp_path, words, token, said):
    began_s = time.monotonic()
    code, out, err = raypar(address, tmp_path, *words, **token)
    assert code in (1, 2) and said in err and err.count("error: ") == 1 and "cure: " in err and "Traceback" not in err, err
    assert out == "" and TOKEN not in err and "wr0ng" not in err and time.monotonic() - began_s < 60


def test_with_the_right_token_a_job_runs_and_stops_and_leaves_no_token(address, home, tmp_path):
    code, out, err = raypar(address, tmp_path, *SUBMIT, "--no-wait", "--submission-id", "a", "--json", **RIGHT)
    assert code == 0 and json.loads(out)["submission_id"] == "a", out + err
    in_file = tmp_path / "token"
    in_file.write_text(f"{TOKEN}\n")
    from_file = {"RAY_AUTH_MODE": "token", "RAY_AUTH_TOKEN_PATH": str(in_file)}
    until_s = time.monotonic() + DEADLINE_S
    while True:
        code, out, err = raypar(address, tmp_path, "runs", "--json", **from_file)
        (row,) = json.loads(out)
        if row["step"]:
            break
        assert time.monotonic() < until_s and row["state"] not in ("failed", "done"), raypar(
            address, home, "logs", "a", **RIGHT
        )
        time.sleep(0.5)
    code, out, err = raypar(address, tmp_path, "stop", "quickstart", **RIGHT)
    assert code == 0 and "has stopped\nstopped after " in out, out + err
    run = RunFolder(home / "raypar/runs/quickstart")
    assert has_checkpoints(run)
    assert raypar(address, tmp_path, "status", str(run.path))[0] == 0, "a run's folder asks for no token"
    code, out, err = raypar(address, tmp_path, "logs", "a", **RIGHT)
    assert code == 0 and TOKEN not in out + err
    for path in run.path.rglob("*"):
        assert not path.is_file() or TOKEN.encode() not in path.read_bytes(), path
