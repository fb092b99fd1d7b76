"""When the mirror takes a cut (DESIGN 4.8): every so many steps, or as often as its measured cost allows."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass
class MirrorSchedule:
    """`every` k steps, or (k = 0) once the steps since the last cut took so long that the cut's seconds are the fraction `cost`
    of it. The first step of every generation takes one, because nobody new has a copy of anything. Both 0: never.
    """

    every: int = 0
    cost: float = 0.0
    last: int | None = None
    """The step of this generation that took the last cut."""
    first: int | None = None
    """The step of the run that took the very first cut."""
    complete: bool = False
    """Some cut is known to be complete everywhere."""

    def __post_init__(self) -> None:
        self.begin()

    def begin(self) -> None:
        """A new generation."""
        self.last = None
        self._steps_s = self._spent_s = 0.0
        self._measured = False
        self._reported: dict[int, float] = {}
        self._before = False

    @property
    def waits(self) -> bool:
        """A cut is under way of which nobody has reported yet. Another one could push out the last that is known to be good."""
        return self.last is not None and not self._measured

    def take(self, step: int, anyway: bool = False) -> bool:
        """Whether `step`, which is issued now, takes a cut; `anyway`: there is a reason beside time."""
        if not (self.every or self.cost) or self.waits:
            return False
        due = (
            anyway
            or self.last is None
            or ((step + 1) % self.every == 0 if self.every else self.cost * self._steps_s >= self._spent_s)
        )
        if due:
            self._before = self.last is not None
            self.first = step if self.first is None else self.first
            self.last, self._measured = step, False
            self._steps_s = self._spent_s = 0.0
        return due

    def report(self, step: int, mirror_seconds: float) -> None:
        """What one worker spent on the mirror in `step`; the slowest one counts."""
        self._reported[step] = max(self._reported.get(step, 0.0), mirror_seconds)

    def commit(self, step: int, seconds: float) -> None:
        """All have reported `step`. Its exchange goes on beside later steps, whose reports have the rest of its cost."""
        spent = self._reported.pop(step, 0.0)
        if self.last is not None and step >= self.last:
            self._steps_s += seconds
            self._spent_s += spent
            self._measured = True
            self.complete = self.complete or self._before  # the vote on a cut's step says that the one before is complete
