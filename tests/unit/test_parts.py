"""Of a large grid the default suite takes a part whose cases differ most; nothing is left out by both it and `.ci/run`."""

import subprocess
import sys
from itertools import product
from pathlib import Path

import pytest
from helpers.parts import choose_part

CASES = [f"{schedule}-{replicas}-m={m}" for schedule, replicas, m in product(("1f1b", "gpipe", "zb-v"), (1, 2), (3, 4, 5))]


@pytest.mark.parametrize("one_in, count", [(1, 18), (4, 5), (18, 1), (1000, 1)])
def test_one_in_so_many_is_chosen_and_at_least_one(one_in, count):
    chosen = choose_part(CASES, one_in)
    assert len(chosen) == count and chosen <= set(CASES) and chosen == choose_part(CASES, one_in)


def test_the_chosen_cases_have_all_values_of_all_parameters():
    words = {word for name in choose_part(CASES, 4) for word in name.split("-")}
    assert words == {word for name in CASES for word in name.split("-")}


GRID = """
import pytest

pytestmark = pytest.mark.part(3)


@pytest.mark.parametrize("a", [1, 2, 3, pytest.param(4, marks=pytest.mark.full)])
@pytest.mark.parametrize("b", [5, 6])
def test_grid(a, b):
    pass


def test_single():
    pass
"""


def test_the_default_suite_and_the_rest_are_all_cases_that_are_not_long(tmp_path: Path):
    """Markers as a module sets them, with this project's `conftest.py` and options."""
    file = tmp_path / "test_grid.py"
    file.write_text(GRID)
    tests = Path(__file__).parents[1]

    def names(*words: str) -> set[str]:
        command = [
            sys.executable,
            "-m",
            "pytest",
            "--collect-only",
            "-n",
            "0",
            "-p",
            "no:cacheprovider",
            "--rootdir",
            str(tests),
        ]
        command += ["-c", str(tests.parent / "pyproject.toml"), "-p", "conftest", *words, str(file)]
        out = subprocess.run(command, capture_output=True, text=True, cwd=tests, timeout=60).stdout
        return {line.partition("::")[2] for line in out.splitlines() if "::" in line}

    default, rest = names(), names("-m", "ci")
    assert len(default) == 3 and "test_single" in default and len(rest) == 4 and not default & rest
    assert default | rest == names("-m", "not full")
