"""What a step may take, by what steps took."""

from __future__ import annotations

from raypar.elastic.run_state import StepTimes


def test_nothing_is_known_before_the_first_step():
    assert StepTimes().longest_s(4) is None
    assert StepTimes().usual_s(4) == 0.0


def test_fewer_workers_are_given_as_much_longer_and_more_no_less():
    pace = StepTimes()
    pace.add(1.0, 4)
    assert [pace.longest_s(workers) for workers in (1, 2, 4, 8)] == [4.0, 2.0, 1.0, 1.0]


def test_shrinking_and_growing_again_and_again_leaves_what_is_expected_as_it_was():
    pace = StepTimes()
    for _ in range(20):
        pace.add(1.0, 4)
        pace.add(4 / 3, 3)
    assert pace.longest_s(4) == 4 / 3
    assert pace.usual_s(4) == 1.0


def test_the_usual_step_is_that_of_as_many_workers_when_there_has_been_one():
    pace = StepTimes()
    for seconds in (1.0, 1.0, 9.0):
        pace.add(seconds, 4)
    assert pace.usual_s(2) == 2.0
    for seconds in (5.0, 1.5, 1.5):
        pace.add(seconds, 2)
    assert pace.usual_s(2) == 1.5


def test_a_long_step_is_forgotten_after_a_hundred_others():
    pace = StepTimes()
    pace.add(60.0, 2)
    for _ in range(100):
        pace.add(1.0, 2)
    assert pace.longest_s(2) == 1.0
