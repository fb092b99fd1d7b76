"""A line that several workers print is shown once, and the others are counted; what one worker prints again is shown again."""

from __future__ import annotations

import tracemalloc

import pytest
from ray._private import worker as ray_worker

from raypar.ray_compat.ray_log_filter import PRINTING, filtering_ray_lines
from raypar.ray_compat.worker_line_dedup import COUNT_S, MOST_LINES, SAME_S, RepeatedWorkerLines

WARNING = ["[transformers] Model config: bos_token_id must be within the vocabulary", '  warnings.warn("a warning")']
SAME = ", the same as another worker's just before (RAY_DEDUP_LOGS=0 shows all)"


def test_lines_of_several_workers_are_shown_once_and_counted_in_one_line():
    lines = RepeatedWorkerLines({})
    assert lines.shown(WARNING, ("a", 1), 0.0) == WARNING and lines.count(0.0) is None
    assert lines.shown([*WARNING, "only worker 2 says so"], ("a", 2), 1.0) == ["only worker 2 says so"]
    assert lines.shown(WARNING, ("b", 2), 2.0) == [], "another machine's process with the same pid"
    assert lines.count(1.0 + COUNT_S - 0.1) is None
    assert lines.count(1.0 + COUNT_S) == f"not shown: 4 lines of 2 workers{SAME}"
    assert lines.count(100.0, at_end=True) is None, "they are counted once"


def test_one_line_of_one_worker_is_counted_at_the_end():
    lines = RepeatedWorkerLines({})
    lines.shown(["x"], 1, 0.0)
    lines.shown(["x"], 2, 0.0)
    assert lines.count(0.1, at_end=True) == f"not shown: 1 line of 1 worker{SAME}"


def test_what_a_worker_prints_again_is_shown_again():
    lines = RepeatedWorkerLines({})
    for step in range(3):
        assert lines.shown(["begin"], 1, step) == ["begin"]
        assert lines.shown(["begin"], 2, step) == []
    assert lines.shown(["begin", "begin"], 3, 3.0) == ["begin"]


def test_the_same_line_after_a_while_is_shown():
    lines = RepeatedWorkerLines({})
    lines.shown(["x"], 1, 0.0)
    assert lines.shown(["x"], 2, SAME_S) == ["x"]


def test_empty_lines_are_shown():
    lines = RepeatedWorkerLines({})
    assert [lines.shown(["", "  "], source, 0.0) for source in (1, 2)] == [["", "  "]] * 2


@pytest.mark.parametrize("environment", [{"RAY_DEDUP_LOGS": "0"}, {"RAY_DEDUP_LOGS_ALLOW_REGEX": "^\\[trans|warn"}])
def test_rays_settings_that_show_all_lines_are_respected(environment: dict[str, str]):
    lines = RepeatedWorkerLines(environment)
    assert [lines.shown(WARNING, source, 0.0) for source in (1, 2)] == [WARNING] * 2
    assert lines.count(0.0, at_end=True) is None


def test_the_memory_of_lines_is_bounded():
    lines = RepeatedWorkerLines({})
    for number in range(MOST_LINES + 1):
        lines.shown([f"line {number}"], 1, 0.0)
    assert lines.shown([f"line {MOST_LINES}", "line 0"], 2, 0.0) == ["line 0"]


def test_the_memory_of_long_lines_is_bounded():
    lines = RepeatedWorkerLines({})
    tracemalloc.start()
    for number in range(100):
        lines.shown([f"{number} " + "x" * 200_000], 1, 0.0)
    held, _ = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    assert held < 1e6
    assert lines.shown(["99 " + "x" * 200_000, "99 " + "x" * 199_999 + "y"], 2, 0.0) == ["99 " + "x" * 199_999 + "y"]


def test_what_ray_prints_of_workers_goes_through_it(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]):
    monkeypatch.delenv("RAY_DEDUP_LOGS", raising=False)
    printed: list[tuple[str, list[str]]] = []
    monkeypatch.setattr(
        ray_worker, "print_to_stdstream", lambda data, ignore_prefix: printed.append((data["pid"], data["lines"]))
    )
    with filtering_ray_lines():
        for pid, is_error in (("7", True), ("8", True), ("8", False), ("raylet", True), ("raylet", True)):
            batch = {"ip": "127.0.0.1", "pid": pid, "is_err": is_error, "lines": [*WARNING]}
            ray_worker.print_to_stdstream(batch, ignore_prefix=False)
    assert printed == [("7", WARNING), ("8", WARNING), ("raylet", WARNING), ("raylet", WARNING)]
    out, err = capsys.readouterr()
    assert (out, err) == ("", f"not shown: 2 lines of 1 worker{SAME}\n")


def test_what_ray_prints_without_an_address_is_shown(monkeypatch: pytest.MonkeyPatch):
    """Ray itself takes a process without one."""
    monkeypatch.setattr(type(PRINTING), "warn_of_unexpected_answer", lambda *_: pytest.fail("it is no unexpected answer"))
    printed: list[list[str]] = []
    monkeypatch.setattr(ray_worker, "print_to_stdstream", lambda data, ignore_prefix: printed.append(data["lines"]))
    with filtering_ray_lines():
        ray_worker.print_to_stdstream({"pid": "7", "lines": ["a line"]}, ignore_prefix=False)
    assert printed == [["a line"]]
