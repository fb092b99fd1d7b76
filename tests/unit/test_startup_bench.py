"""The account of `jobs/bench/startup.py --submitted`: processor-seconds read off between looks, phases, the limit."""

import sys
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).parents[2] / "jobs/bench"))

from startup_submitted import BEYOND_LIMIT_S, KINDS, OWN, PHASES, ProcessorLog, Submission, submission_report


def submission(seconds: float) -> Submission:
    return Submission(dict.fromkeys(PHASES, seconds), {phase: dict.fromkeys(KINDS, 0.5) for phase in PHASES})


def test_processor_seconds_of_a_phase_are_read_off_between_the_looks():
    log = ProcessorLog(read=dict, times=[10.0, 11.0, 13.0], seconds=[dict.fromkeys(KINDS, at) for at in (1.0, 2.0, 6.0)])
    assert log.between(10.5, 12.0) == dict.fromkeys(KINDS, pytest.approx(4.0 - 1.5))
    assert log.between(0.0, 99.0) == dict.fromkeys(KINDS, pytest.approx(5.0)), "before the first look and after the last"


def test_the_limit_is_for_all_phases_but_rays_own():
    others = len(PHASES) - 1
    assert submission(1.0).beyond_s == pytest.approx(others)
    for seconds, held in ((BEYOND_LIMIT_S / others - 0.1, True), (BEYOND_LIMIT_S / others + 0.1, False)):
        text, holds = submission_report([submission(seconds)] * 3)
        assert holds is held and ("DOES NOT HOLD" in text) is not held
        assert text.splitlines()[2].startswith(f"| {OWN} ") and text.count("|\n") == len(PHASES) + 3
