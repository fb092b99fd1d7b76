"""Whole parameters of a worker's start go back to the system where replicas divide parameters, and gather them part by part."""

import os
import subprocess
import sys
from pathlib import Path

import pytest
from helpers.memory_after_start import MODEL_MIB

TESTS = Path(__file__).parents[1]


@pytest.mark.parametrize("gather", ["layer", pytest.param("microbatch", marks=pytest.mark.ci)])
def test_two_workers_that_own_a_half_each_have_little_more_than_one_model_when_they_are_built(gather):
    command = [sys.executable, "-m", "helpers.memory_after_start", gather]
    given = {**os.environ, "PYTHONPATH": os.pathsep.join([str(TESTS), str(TESTS.parent)])}
    done = subprocess.run(command, capture_output=True, text=True, timeout=300, env=given, check=False)
    assert done.returncode == 0, done.stderr
    assert int(done.stdout) <= MODEL_MIB + 16, done.stdout
