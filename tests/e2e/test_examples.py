"""The example scripts do what they say."""

import subprocess
import sys
from pathlib import Path

import pytest

EXAMPLES = Path(__file__).parents[2] / "examples"


@pytest.mark.chaos
def test_a_run_that_loses_a_node_ends_with_the_weights_of_one_that_does_not(tmp_path):
    command = [sys.executable, str(EXAMPLES / "lose_a_node.py"), str(tmp_path)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=180, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    assert done.stdout.splitlines()[-1] == "equal"
    assert (tmp_path / "throughput.svg").read_text().startswith("<svg")
