"""The one line about what a run has survived."""

import pytest

from raypar.console.fault_summary import summarize_faults

LOST = [{"kind": "lost", "worker": worker} for worker in (2, 3)]
DRIVER = {"kind": "driver", "text": "the driver was lost"}
DRAINED = [{"kind": "draining", "worker": worker, "node": "b09a"} for worker in (4, 5)]
JOINED = [{"kind": "joined", "worker": worker} for worker in (6, 7, 8)]
CHANGES = [{"kind": "generation", "generation": n, "workers": [0], "pause_s": 5.5, "again": 0} for n in (2, 3)]
PAUSES = "11.0 s of pauses in all, 0 steps executed again"


@pytest.mark.parametrize(
    "events, words",
    [
        (
            [*LOST, DRIVER, *DRAINED, *JOINED, *CHANGES],
            f"2 workers and the driver lost, 1 node drained, 3 workers joined; {PAUSES}",
        ),
        ([LOST[0], {**CHANGES[0], "again": 1}], "1 worker lost; 5.5 s of pauses in all, 1 step executed again"),
        ([DRIVER, *CHANGES], f"the driver lost; {PAUSES}"),
        ([LOST[0], DRIVER, DRIVER, *CHANGES], f"1 worker lost, the driver lost 2 times; {PAUSES}"),
        ([*LOST, {"kind": "node", "node": "b09a"}, *CHANGES], f"2 workers (1 whole node) lost; {PAUSES}"),
        (CHANGES, PAUSES),
        ([{"kind": "generation", "generation": 1, "workers": [0]}, {"kind": "checkpoint", "step": 3}], None),
    ],
)
def test_losses_drains_joins_and_pauses_are_counted(events, words):
    assert summarize_faults(events) == words
