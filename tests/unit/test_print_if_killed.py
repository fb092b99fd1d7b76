"""A process that is ended without a word leaves one behind: what has happened, and the cure."""

import subprocess
import sys

import pytest

from raypar.actors.print_if_killed import killed_client_text, killed_while_silent_text

PROGRAM = """
import os, sys
from raypar.actors.print_if_killed import print_if_killed
with print_if_killed("error: it is over") as notice:
    {end}
"""


@pytest.mark.parametrize(
    "end, code, said",
    [
        ("os._exit(1)", 1, "error: it is over\n"),
        ("os.kill(os.getpid(), 9)", -9, "error: it is over\n"),
        ("notice.replace('error: the store\\n  cure: wait'); os._exit(1)", 1, "error: the store\n  cure: wait\n"),
        ("notice.replace('error: the store'); notice.replace(None); os._exit(1)", 1, "error: it is over\n"),
        ("notice.replace('error: the store')", 0, ""),
        ("pass", 0, ""),
        ("sys.exit(3)", 3, ""),
    ],
)
def test_only_a_process_that_could_not_speak_is_spoken_for(end, code, said):
    done = subprocess.run(
        [sys.executable, "-c", PROGRAM.format(end=end)], capture_output=True, text=True, timeout=30, check=False
    )
    assert (done.returncode, done.stderr, done.stdout) == (code, said, "")


def test_the_text_names_the_run_the_control_store_and_the_cure():
    text = killed_client_text("tiny", "10.0.0.7:6379")
    assert text.startswith("error: ") and "  cure: " in text
    assert all(word in text for word in ("'tiny'", "10.0.0.7:6379", "raypar resume tiny"))


def test_while_the_control_store_is_silent_the_text_says_so_first():
    text = killed_while_silent_text("tiny", "10.0.0.7:6379")
    assert text.startswith("error: Ray's control store at 10.0.0.7:6379 does not answer")
    assert "  cure: " in text and "raypar resume tiny" in text
