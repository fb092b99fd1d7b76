"""Streams through losses, joins, drains and new drivers: the samples of one process, none lost, none given twice.

The default suite runs some histories, `pytest -m full tests/chaos/test_stream_histories.py` all 300.
"""

from collections.abc import Iterable

import pytest
from helpers.stream_histories import run, stream_history, undisturbed

SOME = 6
ALL = 300


def try_all(seeds: Iterable[int]) -> int:
    """Each of these histories reads and ends as the undisturbed run; how many microbatches were read more than once."""
    again = 0
    for seed in seeds:
        case = stream_history(seed)
        world, found, repeated = run(case)
        assert found == undisturbed(case.spec), world.tell(f"seed {seed}: other bits, {case}")
        again += repeated
    return again


@pytest.mark.parametrize("seeds", [range(SOME), pytest.param(range(SOME, ALL), marks=pytest.mark.full)])
def test_every_history_reads_the_samples_of_one_process(seeds: range):
    assert try_all(seeds) > len(seeds)
