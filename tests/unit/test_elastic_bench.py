"""What the elastic bench reads out of a run's lines: which seconds are steps, and which are the answer to a fault."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).parents[2] / "jobs" / "bench"))

from elastic_read import Line, Story, percentile

STEP_S = 0.5


def run_with_a_pause(steps: int, *, pause_after: int, pause_s: float) -> tuple[list[tuple[float, int]], list[Line]]:
    """Steps of half a second each, and one recovery of `pause_s` after step `pause_after`."""
    commits, time = [], 0.0
    for step in range(1, steps + 1):
        time += STEP_S + (pause_s if step == pause_after + 1 else 0.0)
        commits.append((time, step))
    lost = commits[pause_after - 1][0] + 0.2
    events: list[Line] = [
        {"kind": "started", "time": 0.0, "workers": [0, 1, 2, 3]},
        {
            "kind": "generation",
            "time": 0.0,
            "step": 0,
            "workers": [0, 1, 2, 3],
            "plan": "2 x 2",
            "again": 0,
            "moved_elements": 0,
        },
        {"kind": "recovering", "time": lost, "workers": [0, 1, 2]},
        {
            "kind": "generation",
            "time": lost + 0.1,
            "step": pause_after,
            "workers": [0, 1, 2],
            "plan": "3",
            "again": 0,
            "moved_elements": 7,
        },
    ]
    return commits, events


def test_the_pause_of_an_earlier_fault_is_no_step() -> None:
    commits, events = run_with_a_pause(40, pause_after=20, pause_s=3.0)
    assert Story(commits, events).p99_s(commits[-1][0]) == pytest.approx(STEP_S)


def test_a_step_that_took_long_without_any_fault_is_one() -> None:
    commits, _ = run_with_a_pause(40, pause_after=20, pause_s=3.0)
    assert Story(commits, []).p99_s(commits[-1][0]) == pytest.approx(STEP_S + 3.0)


def test_an_answer_begins_at_the_fault_and_ends_with_the_first_step_of_the_new_generation() -> None:
    commits, events = run_with_a_pause(40, pause_after=20, pause_s=3.0)
    answer = Story(commits, events).after(commits[19][0] + 0.1)
    assert answer is not None
    assert answer.latency_s == pytest.approx(STEP_S + 3.0 - 0.1)
    assert answer.gap_s == pytest.approx(STEP_S + 3.0)
    assert answer.step_s == pytest.approx(STEP_S)
    assert (answer.workers, answer.plan, answer.moved_elements) == (3, "3", 7)


def test_percentiles_are_nearest_ranks() -> None:
    assert percentile([3.0, 1.0, 2.0], 0.5) == 2.0
    assert percentile([float(n) for n in range(1, 101)], 0.99) == 99.0
    assert percentile([5.0], 0.95) == 5.0
