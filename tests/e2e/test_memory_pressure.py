"""Ray's memory monitor kills a run's processes: two lines and a run folder, or a lost worker like any other."""

import re

import psutil
import pytest
from helpers.run_commands import Command
from helpers.tiny_job import write_job

pytestmark = pytest.mark.chaos

QUICK = ("--set", "validation=null", "--set", "checkpoint.every=0")


def test_a_run_on_a_full_node_ends_with_two_lines_and_keeps_its_folder(tmp_path, monkeypatch):
    monkeypatch.setenv("RAY_memory_usage_threshold", "0.01")
    monkeypatch.setenv("RAY_memory_monitor_refresh_ms", "100")
    command = Command(tmp_path, "train", str(write_job(tmp_path)), *QUICK)
    assert command.wait(240) == 1
    what, cure = command.text().strip().splitlines()[-2:]
    assert what.startswith("error: ") and "was killed by Ray because its node ran out of memory: " in what
    assert "Ray kills from 1 % on" in what and cure.startswith("  cure: use fewer workers on a node")
    assert "Traceback" not in command.text() and "Eviction Stats" not in command.text()
    full = (tmp_path / "runs/tiny/error.txt").read_text()
    assert "Top 10 memory users" in full, "all that Ray says is kept"


def test_a_worker_that_takes_too_much_memory_is_replaced_and_the_weights_are_those_of_an_undisturbed_run(tmp_path, monkeypatch):
    words = ("train", str(write_job(tmp_path)), *QUICK, "--set", "steps=40", "--set", "elastic={}")
    calm = Command(tmp_path, *words)
    assert calm.wait(240) == 0, calm.text()
    memory = psutil.virtual_memory()
    taken_gib = 3.0
    if memory.available < (taken_gib + 2) * 2**30:
        pytest.skip(f"{memory.available / 2**30:.1f} GiB of memory are free: too few to fill some of them")
    threshold = (memory.total - memory.available + 2 * 2**30) / memory.total
    monkeypatch.setenv("RAY_memory_usage_threshold", f"{threshold:.3f}")
    monkeypatch.setenv("RAY_memory_monitor_refresh_ms", "100")
    hungry = tmp_path / "hungry"
    more = ("--set", f"data.args.hungry={hungry}", "--set", f"data.args.gigabytes={taken_gib}", "--set", "name=full")
    full = Command(tmp_path, *words, *more)
    assert full.wait(300) == 0, full.text()
    assert hungry.exists() and "lost" in full.text(), "a worker, or the driver beside it"
    assert "Traceback" not in full.text() and "Eviction Stats" not in full.text()
    assert weights_hash(calm.text()) == weights_hash(full.text())


def weights_hash(text: str) -> str:
    (found,) = re.findall(r"sha256 (\w+)", text)
    return found
