"""When people are told what a run waits for, and in which words. Pure."""

from __future__ import annotations

from collections.abc import Mapping

from raypar.elastic.message_wording import format_worker_numbers, verb_form

SILENCE_S = 2.0
"""Time without a word after which people are told what is waited for."""
CHANGED_S, AGAIN_S = 5.0, 30.0
"""Time from one such line to the next: if it is something else now, and if it is not."""


class WaitAnnouncer:
    """Decides which lines people get while nothing else is told. Times are of one clock, in seconds."""

    def __init__(self) -> None:
        self.since_s: float | None = None
        """When the present silence began; None before the first."""
        self.said_s = 0.0
        """When the last line of this silence was told."""
        self.said: str | None = None
        """What it told; None while there was none."""

    def line(self, doing: str | None, now_s: float, since_s: float, patience_s: float = SILENCE_S) -> str | None:
        """The line to be told now, `loading PyTorch, for 3 s so far`, or None. `doing`: what is waited for, if that is known.

        `since_s`: when something was last told that was no such line. `patience_s`: how long a silence may last.
        """
        if since_s != self.since_s:
            self.since_s, self.said = since_s, None
        if doing is None or now_s - since_s < patience_s:
            return None
        if self.said is not None and now_s - self.said_s < (CHANGED_S if doing != self.said else AGAIN_S):
            return None
        self.said, self.said_s = doing, now_s
        return f"{doing}, for {now_s - since_s:.0f} s so far"


def describe_waited_workers(activities: Mapping[int, str], workers: int, idle: str) -> str:
    """`waiting for 1 of 4 workers (worker 2 is reading sample 17)`. `activities`: worker -> what it is doing.

    Workers that only wait for others (`idle`) are left out, unless all do.
    """
    busy = {number: doing for number, doing in activities.items() if doing != idle} or dict(activities)
    together: dict[str, list[int]] = {}
    for number, doing in sorted(busy.items()):
        together.setdefault(doing, []).append(number)
    each = [
        f"{format_worker_numbers(numbers)} {verb_form(numbers, 'is', 'are')} {doing}" for doing, numbers in together.items()
    ]
    return f"waiting for {len(busy)} of {max(workers, len(busy))} worker{'s' * (workers != 1)} ({'; '.join(each)})"
