"""The map names every file there is, and no other."""

import re
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
MAP = (ROOT / "raypar/README.md").read_text()


@pytest.mark.parametrize("place", ["raypar", "tests/helpers", "jobs", "examples", "cluster"])
def test_the_map_names_every_module(place):
    names = {path.name for path in (ROOT / place).rglob("*.py")} - {"__init__.py"}
    assert sorted(name for name in names if name not in MAP) == []


def test_what_the_map_names_is_there():
    there = {path.name for place in ("raypar", "tests", "jobs", "examples", "cluster") for path in (ROOT / place).rglob("*.py")}
    assert sorted({*re.findall(r"\w+\.py", MAP)} - there) == []
