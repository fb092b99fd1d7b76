"""Streams through losses, joins, drains and new drivers: the samples of one process, none lost, none given twice.

The default suite runs one history, `.ci/run` four, `pytest -m full tests/chaos/test_stream_histories.py` all 300.
"""

from collections.abc import Iterable

import pytest
from helpers.stream_histories import run, stream_history, undisturbed

ONE = 3
"""A history in which streams that move give their cursors."""
SOME = 4
ALL = 300


def try_all(seeds: Iterable[int]) -> tuple[int, int, float]:
    """Each of these histories reads and ends as the undisturbed run; how many microbatches were read more than once, how many
    cursors were given, and of which share of the microbatches no driver has heard."""
    again, cursors, unknown, all_of_them = 0, 0, 0, 0
    for seed in seeds:
        case = stream_history(seed)
        world, found, repeated = run(case)
        assert found == undisturbed(case.spec), world.tell(f"seed {seed}: other bits, {case}")
        again, cursors, unknown = again + repeated, cursors + world.flesh.given_cursors, unknown + world.flesh.unknown
        all_of_them += world.flesh.job.steps * world.flesh.job.spec.microbatches
    return again, cursors, unknown / all_of_them


@pytest.mark.parametrize(
    "seeds",
    [
        range(ONE, ONE + 1),
        pytest.param(range(SOME), marks=pytest.mark.ci),
        pytest.param(range(SOME, ALL), marks=pytest.mark.full),
    ],
)
def test_every_history_reads_the_samples_of_one_process(seeds: range):
    again, cursors, unknown = try_all(seeds)
    assert again > len(seeds) and cursors > len(seeds) and unknown < 0.02, (again, cursors, unknown)
