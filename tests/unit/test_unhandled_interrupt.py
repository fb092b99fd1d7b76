"""The end of a script whose `Trainer.fit` was stopped, as the shell sees it."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
FIT = """
import raypar.trainer
from raypar.errors import ConfigError, Interrupted

error = {error}

def stopped(*given, **named):
    raise error

raypar.trainer.train_job_in_new_folder = stopped
trainer = raypar.Trainer(model="m:m", loss="m:l", data="m:d", steps=2, batch_size=8, microbatches=4)
"""
INTERRUPTED = "Interrupted('stopped after 3 steps (SIGINT): there is a checkpoint', cure='raypar resume runs/a')"
LINES = ["stopped after 3 steps (SIGINT): there is a checkpoint", "next: raypar resume runs/a"]


def run(body: str, *, error: str = INTERRUPTED, way: str = "script", **env: str) -> subprocess.CompletedProcess[str]:
    text = FIT.format(error=error) + body
    words = ["-c", text] if way == "script" else ["-i", "-c", text]
    return subprocess.run(
        [sys.executable, *words], env=os.environ | {"PYTHONPATH": str(ROOT)} | env, capture_output=True, text=True, input=""
    )


def test_a_stopped_script_ends_with_the_line_and_130():
    ended = run("trainer.fit()")
    assert (ended.returncode, ended.stderr.splitlines()) == (130, LINES)


def test_the_full_traceback_is_there_if_it_was_asked_for():
    ended = run("trainer.fit()", RAYPAR_TRACEBACK="whole")
    assert ended.returncode == 130 and "Traceback" in ended.stderr and LINES[0] in ended.stderr


@pytest.mark.parametrize(
    "body, status",
    [
        ("try:\n    trainer.fit()\nexcept Interrupted:\n    print('caught')", 0),
        ("try:\n    trainer.fit()\nexcept Interrupted:\n    raise ZeroDivisionError('mine') from None", 1),
    ],
)
def test_a_script_that_catches_it_ends_as_it_likes(body: str, status: int):
    ended = run(body)
    assert ended.returncode == status and LINES[0] not in ended.stderr


def test_other_errors_end_a_script_as_ever():
    ended = run("trainer.fit()", error="ConfigError('no such key', cure='correct it')")
    assert ended.returncode == 1 and "raypar.errors.ConfigError: no such key" in ended.stderr


@pytest.mark.ci
def test_an_interactive_session_goes_on():
    ended = run("trainer.fit()", way="interactive")
    assert ended.returncode == 0 and "Interrupted: stopped after 3 steps" in ended.stderr
