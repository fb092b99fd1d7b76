"""The guides' files and commands, run as they stand there."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
GUIDES = sorted((ROOT / "examples" / "guides").glob("*.md"))
COMMAND_TIMEOUT_S = 240.0


def blocks(guide: Path) -> list[tuple[str, str]]:
    """(language, text) of each block of code."""
    return re.findall(r"^```(\w+)\n(.*?)^```", guide.read_text(), re.DOTALL | re.MULTILINE)


LONG = {"watch_a_run"}
"""Guides whose commands are run by `pytest -m chaos` only: each command of theirs has a test of its own."""


@pytest.mark.parametrize(
    "guide", [pytest.param(guide, id=guide.stem, marks=[pytest.mark.chaos] * (guide.stem in LONG)) for guide in GUIDES]
)
def test_the_guides_commands_do_what_it_says(guide: Path, tmp_path: Path):
    """A block that begins with `# file: NAME` is written to that file; commands run in the folder of these files."""
    bin_folder = Path(sys.executable).parent
    env = os.environ | {
        "PATH": f"{bin_folder}:{os.environ['PATH']}",
        "PYTHONPATH": str(ROOT),
        "RAY_USAGE_STATS_ENABLED": "0",
    }
    for language, text in blocks(guide):
        named = re.match(r"# file: (\S+)\n", text)
        if named:
            (tmp_path / named[1]).write_text(text)
        elif language == "bash":
            for command in text.strip().splitlines():
                done = subprocess.run(
                    command,
                    shell=True,
                    cwd=tmp_path,
                    env=env,
                    timeout=COMMAND_TIMEOUT_S,
                    capture_output=True,
                    text=True,
                    check=False,
                )
                assert done.returncode == 0, f"{command}\n{done.stdout[-3000:]}\n{done.stderr[-3000:]}"


def test_every_guide_is_in_the_readme():
    readme = (ROOT / "README.md").read_text()
    assert [guide.name for guide in GUIDES if f"examples/guides/{guide.name}" not in readme] == []


def test_pictures_of_the_guides_are_there_and_load_nothing():
    for guide in GUIDES:
        for name in re.findall(r"!\[[^]]*\]\(([^)]+)\)", guide.read_text()):
            picture = guide.parent / name
            assert picture.is_file() and picture.stat().st_size < 400_000, name
            if picture.suffix == ".svg":
                assert set(re.findall(r"[a-z]+://[^\s\"'<)]+", picture.read_text())) <= {"http://www.w3.org/2000/svg"}, name
