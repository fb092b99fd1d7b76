"""The state machine of a run: it takes every event and returns the actions to carry out. Pure: time is an argument.

Its state is in `run_state.py`, its table in `transition_table.py`; `RUN_MACHINE.md` has the diagram that is made from it.
"""

from __future__ import annotations

from collections import deque

from raypar.elastic.actions import ActionWithReason
from raypar.elastic.events import RunEvent, Tick
from raypar.elastic.phases import UnexpectedEvent
from raypar.elastic.run_policy import RunPolicy
from raypar.elastic.run_state import HeldPieces, MemoryLacking, RunState
from raypar.elastic.transition_table import ON_ENTER, TABLE
from raypar.plan import ParallelPlan

KEPT_EVENTS = 40
"""Events that are kept for the text of an error."""


class RunMachine(RunState):
    """One run of one job. Its state is read by all and changed by `handle` alone."""

    def __init__(
        self,
        policy: RunPolicy,
        plan: ParallelPlan | None = None,
        held_pieces: HeldPieces | None = None,
        memory_lacking: MemoryLacking | None = None,
    ) -> None:
        """Start in the phase `STARTING`; arguments as of `RunState`."""
        super().__init__(policy, plan, held_pieces, memory_lacking)
        self.story: deque[str] = deque(maxlen=KEPT_EVENTS)
        """The last events that led to an action or a new phase, as text."""

    def handle(self, event: RunEvent, now_s: float) -> list[ActionWithReason]:
        """The actions that follow from `event` at `now_s` (any monotonic clock), each with its reason.

        Raises `UnexpectedEvent` if the table has no row for the event, or the rule leads to a phase that its row does not
        name.
        """
        self.timer.now_s, self.decisions, before = now_s, [], self.phase
        if isinstance(event, Tick):
            self._count_time(event)
        self._apply(event)
        while self.next_event is not None:
            following, self.next_event = self.next_event, None
            self._apply(following)
        if self.decisions or before is not self.phase:
            names = ", ".join(str(d.action) for d in self.decisions)
            self.story.append(f"{before.value}: {event} -> {self.phase.value}" + (f": {names}" if names else ""))
        return self.decisions

    def _apply(self, event: RunEvent) -> None:
        """Apply the table's rule, enter the phases that follow, and check where that has led to."""
        before, row = self.phase, TABLE.get((self.phase, type(event)))
        if row is None:
            raise UnexpectedEvent(f"{event} while {before.value}; {self._story_text()}")
        following = row.apply(self, event)
        while following is not None:
            self.phase = following
            self.timer.begin_phase()
            following = ON_ENTER[following](self)
        if self.phase is not before and self.phase not in row.to:
            raise UnexpectedEvent(f"{event} led from {before.value} to {self.phase.value}; {self._story_text()}")

    def _count_time(self, event: Tick) -> None:
        """Leave out the time that no limit counts, and note which workers have answered no pings since when.

        The answers that came while the driver was stopped have not been read yet.
        """
        now_s, since_s = self.timer.now_s, self.health.unheard_since_s
        self.timer.skip(event.stalled_s)
        self.health.unheard_since_s = {w: min(now_s, since_s.get(w, now_s) + event.stalled_s) for w in event.unheard}

    def _story_text(self) -> str:
        return "the story so far:\n  " + "\n  ".join(self.story)
