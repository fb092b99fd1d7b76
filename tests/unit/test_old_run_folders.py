"""Run folders of older releases are read, and what is said of them stays word for word what it was.

`tests/data/old_runs/said.json` has what release 0.1.0 of November 2026 said. Write it anew, by running this file, only for
words that are meant to change.
"""

import contextlib
import io
import json
import os
import re
import shutil
import sys
import tempfile
import time
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import pytest

from raypar.actors.metrics_lines import finite
from raypar.cli import main
from raypar.record.folder import EVENTS, METRICS
from raypar.record.parse_events import parse_event, parse_metrics

RUNS = Path(__file__).parents[1] / "data/old_runs"
NOW_S = {"elastic": 1795733580.0, "oldest": 2015.0}
COMMANDS = ("status", "status --json", "top --once", "logs", "logs --json", "runs", "report", "status --svg x.svg")


def said(run: str, command: str) -> str:
    """What a command says of a copy of a run in the working directory, at the time of the run, in UTC."""
    time_was, zone_was, columns_was = time.time, os.environ.get("TZ"), os.environ.get("COLUMNS")
    name, *options = command.split()
    text = io.StringIO()
    os.environ |= {"TZ": "UTC", "COLUMNS": "120"}
    time.tzset()
    time.time = lambda: NOW_S[run]
    try:
        with contextlib.redirect_stdout(text):
            assert main([name, *(["runs"] if name == "runs" else [f"runs/{run}"]), *options]) == 0
    finally:
        time.time = time_was
        for key, value in (("TZ", zone_was), ("COLUMNS", columns_was)):
            os.environ.pop(key) if value is None else os.environ.update({key: value})
        time.tzset()
    if name == "report":
        page = re.sub(r"<style>.*?</style>", "", Path(f"{run}.html").read_text(), flags=re.S)
        return " ".join(re.sub(r"<[^>]*>", " ", page).split())
    return text.getvalue() + (Path("x.svg").read_text() if "--svg" in options else "")


@contextlib.contextmanager
def copy_of(run: str, folder: Path) -> Iterator[None]:
    """A working directory in which `runs/` has a copy of the run, as old as its start."""
    made = folder / "runs" / run
    shutil.copytree(RUNS / run, made)
    for file in made.iterdir():
        os.utime(file, (NOW_S[run] - 60, NOW_S[run] - 60))
    before = os.getcwd()
    os.chdir(folder)
    try:
        yield
    finally:
        os.chdir(before)


def same(text: str) -> object:
    """JSON lines as data, in which the order of keys says nothing; other texts as they are."""
    lines = text.splitlines()
    return [json.loads(line) for line in lines] if lines and all(line.startswith("{") for line in lines) else text


@pytest.mark.parametrize("command", COMMANDS)
@pytest.mark.parametrize("run", NOW_S)
def test_what_is_said_of_an_old_run_stays_as_it_was(run: str, command: str, tmp_path: Path):
    expected = json.loads((RUNS / "said.json").read_text())
    with copy_of(run, tmp_path):
        assert same(said(run, command)) == same(expected[f"{run}: {command}"])


@pytest.mark.parametrize("file", [EVENTS, METRICS])
def test_a_line_that_is_read_and_written_again_is_the_same_to_the_byte(file: str):
    for text in (RUNS / "elastic" / file).read_text().splitlines():
        line = json.loads(text)
        event = (parse_event if file == EVENTS else parse_metrics)(line)
        facts = replace(event, time=None).facts()
        if file == METRICS:
            del facts["kind"]
        assert json.dumps(finite({"time": event.time, **facts})) == text


if __name__ == "__main__":
    found = {}
    for each in NOW_S:
        with tempfile.TemporaryDirectory() as place, copy_of(each, Path(place)):
            found |= {f"{each}: {command}": said(each, command) for command in COMMANDS}
    (RUNS / "said.json").write_text(json.dumps(found, indent=1) + "\n")
    sys.exit(0)
