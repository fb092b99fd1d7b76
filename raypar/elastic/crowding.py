"""How crowded the processors are: for which part of the last moments somebody wanted to compute and got none."""

from __future__ import annotations

from collections.abc import Hashable

FRESH_S = 1.2
"""A report that is older says nothing about now: who was stopped since was not short of a processor."""
ENOUGH = 0.6
"""Less than that is what a machine with a few more workers than cores is always like; the deadlines have room for it."""
MOST = 0.95
"""Of any time some counts, so that every deadline comes."""


class Crowding:
    """Hears how long each process has waited for a processor, as a sum since it began."""

    def __init__(self) -> None:
        self._last: dict[Hashable, tuple[float, float]] = {}
        """process -> its sum, and when it was heard"""
        self._shares: dict[Hashable, tuple[float, float]] = {}
        """process -> part of the time up to its last report that it waited, and when that was"""

    def heard(self, who: Hashable, waited_s: float, now_s: float) -> None:
        """A report; a sum that has become smaller is that of another thread, and begins anew."""
        before_s, at_s = self._last.get(who, (waited_s, now_s))
        if now_s > at_s:
            self._shares[who] = (min(1.0, max(0.0, waited_s - before_s) / (now_s - at_s)), now_s)
        self._last[who] = (waited_s, now_s)

    def lost_s(self, now_s: float, since_s: float) -> float:
        """Seconds since `since_s` that no deadline may count: in so many the one who is shortest of processors got none."""
        fresh = (share for share, at_s in self._shares.values() if now_s - at_s <= FRESH_S)
        share = max(fresh, default=0.0)
        return min(share, MOST) * (now_s - since_s) if share >= ENOUGH else 0.0
