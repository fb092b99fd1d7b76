"""A command that is killed leaves neither half an output nor its temporary folder."""

from __future__ import annotations

import subprocess
import sys
import time
from pathlib import Path

import pytest

pytestmark = pytest.mark.part(4)

PROGRAM = """
import os, sys, time
from pathlib import Path
from raypar.files.remove_if_killed import removed_if_killed
from raypar.launch.parquet_writer import open_parquet_file
folder, out = Path(sys.argv[1]) / "-rf folder", Path(sys.argv[1]) / "out.parquet"
folder.mkdir()
with removed_if_killed(folder), open_parquet_file(out) as file:
    file.write({columns})
    (folder / "run").mkdir()
    {end}
"""


@pytest.mark.ci
@pytest.mark.parametrize(
    ("end", "left"), [("os.kill(os.getpid(), 9)", []), ("pass", ["-rf folder", "out.parquet"]), ("sys.exit(3)", ["-rf folder"])]
)
def test_a_killed_process_leaves_nothing_and_one_that_ends_what_it_wants(end: str, left: list[str], tmp_path: Path):
    program = PROGRAM.replace("{columns}", '{"sample": __import__("torch").arange(3)}').replace("{end}", end)
    subprocess.run([sys.executable, "-c", program, str(tmp_path)], timeout=60, check=False)
    deadline = time.monotonic() + 10
    while sorted(path.name for path in tmp_path.iterdir()) != left:
        assert time.monotonic() < deadline, list(tmp_path.iterdir())
        time.sleep(0.05)
