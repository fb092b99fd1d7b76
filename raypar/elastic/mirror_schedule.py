"""The steps after which the mirror takes a snapshot: every n steps, or as often as the measured cost allows.

The mirror is a second copy of each worker's state in another worker's memory. A *mirror snapshot* is the copy of all workers'
state after the same step.
"""

from __future__ import annotations

from dataclasses import dataclass, field


@dataclass
class MirrorSchedule:
    """Chooses the steps with a mirror snapshot. The first step of every generation has one: new workers hold no copy yet.

    With `every` and `cost` both 0 the mirror is off.
    """

    every: int = 0
    """Steps between two snapshots; 0: `cost` decides."""
    cost: float = 0.0
    """A snapshot is due once the seconds spent on the last one are at most this fraction of the time since then."""
    last: int | None = None
    """The step of this generation that took the last snapshot; None: no step has."""
    first: int | None = None
    """The step of the run that took the very first snapshot; None: no step has."""
    complete: bool = False
    """Whether some snapshot is known to be complete on all workers."""
    complete_in_generation: bool = False
    """Whether a snapshot of this generation is complete, so that none of an earlier generation is needed."""
    _steps_s: float = field(default=0.0, init=False)
    """Seconds of the committed steps since the last snapshot, including its own step."""
    _spent_s: float = field(default=0.0, init=False)
    """Seconds that were spent on the mirror in these steps."""
    _measured: bool = field(default=False, init=False)
    """Whether the step of the last snapshot is committed, so that its cost is known."""
    _reported: dict[int, float] = field(default_factory=dict, init=False)
    """Step -> the longest time that a worker spent on the mirror in it."""
    _before: bool = field(default=False, init=False)
    """Whether this generation took a snapshot before the last one."""

    def begin(self) -> None:
        """Start a new generation: its first step takes a snapshot."""
        self.last = None
        self._steps_s = self._spent_s = 0.0
        self._measured = False
        self._reported = {}
        self._before = self.complete_in_generation = False

    @property
    def enabled(self) -> bool:
        """Whether snapshots are taken at all."""
        return bool(self.every or self.cost)

    @property
    def awaits_report(self) -> bool:
        """Whether the last snapshot's step is not committed yet. A further snapshot could replace the last complete one."""
        return self.last is not None and not self._measured

    def begin_if_due(self, step: int, anyway: bool = False) -> bool:
        """Begin a snapshot with `step`, which is issued now, if one is due. Returns whether it was.

        `anyway`: whether a snapshot is due whatever the time, for instance before a checkpoint.
        """
        if not self.enabled or self.awaits_report:
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

        A snapshot is exchanged beside later steps, so their reports have the rest of its cost.
        """
        spent = self._reported.pop(step, 0.0)
        if self.last is not None and step >= self.last:
            self._steps_s += seconds
            self._spent_s += spent
            self._measured = True
            if self._before:  # a snapshot's step is voted on once the one before is complete
                self.complete = self.complete_in_generation = True
