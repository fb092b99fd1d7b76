"""Recorded fleets of spot instances, read and scaled for the chaos bench."""

import sys
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).parents[2] / "jobs" / "bench"))

import spot

RECORDED = "0,0\n600,0\n600,4\n610,4\n610,12\n700,12\n700,1\n900,1\n900,0\n1000,0\n1000,6\n"


@pytest.fixture
def history(tmp_path) -> spot.History:
    path = tmp_path / "fleet.csv"
    path.write_text(RECORDED)
    return spot.read(path)


def test_each_change_of_a_recorded_history_counts_once(history):
    assert history.changes == ((0, 0), (600, 4), (610, 12), (700, 1), (900, 0), (1000, 6))


def test_a_scaled_history_begins_with_its_first_instance_and_keeps_the_last_one(history):
    scaled = history.scaled(10, most=6)
    assert scaled.changes == ((0, 2), (1, 6), (10, 1), (30, 0), (40, 3))
    assert [scaled.at(seconds) for seconds in (0, 0.9, 1, 29, 31, 99)] == [2, 2, 6, 1, 0, 3]


@pytest.mark.parametrize("seed", range(20))
def test_a_generated_history_has_storms_and_never_an_empty_fleet(seed):
    history = spot.generated(seed)
    times = [seconds for seconds, _ in history.changes]
    counts = [count for _, count in history.changes]
    assert times == sorted(times) and 2 <= min(counts) < max(counts) == 12
    assert spot.generated(seed) == history
