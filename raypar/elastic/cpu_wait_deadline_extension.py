"""The time that deadlines leave out because some process was runnable but had no processor."""

from __future__ import annotations

from collections.abc import Hashable

REPORT_VALID_S = 1.2
"""Age up to which a report counts. A process that was stopped since its last report did not lack a processor."""
MIN_SHARE = 0.6
"""Smaller shares are ignored: they are normal with a few more workers than cores, and deadlines have room for them."""
MAX_SHARE = 0.95
"""Larger shares count as this: some time always counts, so that every deadline ends."""


class CpuWaitDeadlineExtension:
    """Computes from every process's wait for a processor how much time deadlines leave out."""

    def __init__(self) -> None:
        self._last: dict[Hashable, tuple[float, float]] = {}
        """Process -> (its total wait in seconds, when that was reported)."""
        self._shares: dict[Hashable, tuple[float, float]] = {}
        """Process -> (share of the time between its last two reports that it waited, when the last one came)."""

    def report(self, who: Hashable, waited_s: float, now_s: float) -> None:
        """Take a process's total wait so far. A total smaller than before is another thread's, and counts as no wait."""
        before_s, at_s = self._last.get(who, (waited_s, now_s))
        if now_s > at_s:
            self._shares[who] = (min(1.0, max(0.0, waited_s - before_s) / (now_s - at_s)), now_s)
        self._last[who] = (waited_s, now_s)

    def uncounted_s(self, now_s: float, since_s: float) -> float:
        """Seconds since `since_s` that no deadline counts: that time x the largest share, if it reaches `MIN_SHARE`."""
        fresh = (share for share, at_s in self._shares.values() if now_s - at_s <= REPORT_VALID_S)
        share = max(fresh, default=0.0)
        return min(share, MAX_SHARE) * (now_s - since_s) if share >= MIN_SHARE else 0.0
