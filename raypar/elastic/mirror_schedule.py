"""Which steps end with a snapshot for the mirror: every so many, or as often as the measured cost allows.

The mirror is a second copy of each worker's state in another worker's memory; a snapshot of it is a *cut*: all workers' state
after the same step.
"""

from __future__ import annotations

from dataclasses import dataclass, field


@dataclass
class MirrorSchedule:
    """Chooses the steps. The first step of every generation is always one, because nobody new has a copy of anything.

    With `every` and `cost` both 0 the mirror is off.
    """

    every: int = 0
    """Steps between two cuts; 0: `cost` decides."""
    cost: float = 0.0
    """A cut is due once its seconds are this fraction of the time since the last cut."""
    last: int | None = None
    """The step of this generation that took the last cut."""
    first: int | None = None
    """The step of the run that took the very first cut."""
    complete: bool = False
    """Whether some cut is known to be complete on all workers."""
    _steps_s: float = field(default=0.0, init=False)
    """Seconds of the committed steps since the last cut, its own included."""
    _spent_s: float = field(default=0.0, init=False)
    """Seconds of them that were spent on the mirror."""
    _measured: bool = field(default=False, init=False)
    """Whether the last cut's step is committed, so that its cost is known."""
    _reported: dict[int, float] = field(default_factory=dict, init=False)
    """Step -> the longest time that a worker spent on the mirror in it."""
    _before: bool = field(default=False, init=False)
    """Whether this generation took a cut before the last one."""

    def begin(self) -> None:
        """Start a new generation: its first step takes a cut."""
        self.last = None
        self._steps_s = self._spent_s = 0.0
        self._measured = False
        self._reported = {}
        self._before = False

    @property
    def awaits_report(self) -> bool:
        """Whether a cut is under way that no worker has reported. Another one could push out the last good cut."""
        return self.last is not None and not self._measured

    def begin_if_due(self, step: int, anyway: bool = False) -> bool:
        """Whether `step`, which is issued now, takes a cut. `anyway`: there is a reason beside time, as a checkpoint."""
        if not (self.every or self.cost) or self.awaits_report:
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
        """Take what one worker spent on the mirror in `step`. The slowest worker counts."""
        self._reported[step] = max(self._reported.get(step, 0.0), mirror_seconds)

    def commit(self, step: int, seconds: float) -> None:
        """Note that all workers have reported `step`.

        A cut's exchange goes on beside later steps, whose reports have the rest of its cost.
        """
        spent = self._reported.pop(step, 0.0)
        if self.last is not None and step >= self.last:
            self._steps_s += seconds
            self._spent_s += spent
            self._measured = True
            self.complete = self.complete or self._before  # the vote on a cut's step says that the one before is complete
