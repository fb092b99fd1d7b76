"""The state of a run, with the three operations of rules: decide on an action, change the phase, end the run."""

from __future__ import annotations

from collections.abc import Callable

from raypar.elastic.actions import Action, ActionWithReason, EndKind, Teardown
from raypar.elastic.events import RunEvent
from raypar.elastic.mirror_schedule import MirrorSchedule
from raypar.elastic.phases import Phase
from raypar.elastic.run_policy import RunPolicy
from raypar.elastic.run_state_parts import (
    Membership,
    PendingStop,
    PhaseTimeLimit,
    PlannedChange,
    RecoveryState,
    RunProgress,
    StateTrust,
    WorkerHealth,
    WorkerStarts,
)
from raypar.elastic.shard_count_history import ShardCountHistory
from raypar.elastic.step_times import StepTimes
from raypar.elastic.stragglers import StragglerWatch
from raypar.plan import ParallelPlan
from raypar.plan.pieces import Piece

HeldPieces = Callable[[ParallelPlan], tuple[tuple[Piece, ...], ...]]
"""The pieces of state that each rank of a plan has to hold."""


class RunState:
    """The state of the run machine for one run. Rules read and change it."""

    def __init__(self, policy: RunPolicy, plan: ParallelPlan | None = None, held_pieces: HeldPieces = lambda plan: ()) -> None:
        """Start in the phase `STARTING`. Only elastic runs need `plan` and `held_pieces`."""
        first = policy.steps_before_run
        self.policy = policy
        """The limits of the run."""
        self.held_pieces = held_pieces
        """Plan -> by rank, the pieces of state that it has to hold."""
        self.phase = Phase.STARTING
        """The present phase."""
        self.timer = PhaseTimeLimit()
        """The time of the present event, and the phase's time limit."""
        self.progress = RunProgress(first, first, first, first, first, saved=first or None)
        """How many steps are issued, committed, emitted and saved."""
        self.membership = Membership(plan, tuple(range(policy.workers)))
        """The workers, their seats and their generation."""
        self.hiring = WorkerStarts(policy.workers)
        """Workers that are being started."""
        self.planned = PlannedChange()
        """The change of plan or members that is planned for the next moment between two steps."""
        self.stopping = PendingStop()
        """The request to end early."""
        self.health = WorkerHealth(StragglerWatch(policy.straggler_times, policy.straggler_steps))
        """Silence, slowness and failures."""
        self.trust = StateTrust(agreed=first)
        """Which state can be trusted, by the comparison of replicas' digests."""
        self.recovery = RecoveryState("")
        """The recovery that is under way, or the last one."""
        self.mirror = MirrorSchedule(policy.mirror_every, policy.mirror_cost)
        """Which steps end with a snapshot for the mirror."""
        self.replay = ShardCountHistory(first, plan.shards_by_layer if plan is not None else None)
        """The numbers of shards with which steps were executed."""
        self.step_times = StepTimes()
        """How long steps take."""
        self.decisions: list[ActionWithReason] = []
        """The actions that the present event has led to so far."""
        self.next_event: RunEvent | None = None
        """An event that a rule derives from the present one; it is handled next."""

    def decide(self, action: Action, reason: str) -> None:
        """Add an action for the driver to carry out."""
        self.decisions.append(ActionWithReason(action, reason))

    def enter(self, phase: Phase, *, deadline_s: float | None = None) -> None:
        """Change the phase. `deadline_s`: its time limit in seconds; None: it has no limit."""
        self.phase = phase
        self.timer.begin_phase(deadline_s)

    def end_run(self, end: EndKind, why: str, error: Exception | None = None) -> None:
        """Enter the phase `OVER` and decide on `Teardown`, the last action of the run."""
        self.health.silent_since_s.clear()
        self.enter(Phase.OVER)
        self.decide(Teardown(end, why, self.progress.emitted, error), why)

    @property
    def waits(self) -> bool:
        """Whether the run waits for workers to join, or for a silent worker that holds the only copy of some state."""
        standing = self.phase is Phase.STANDING and self.recovery.waited_from_s is not None
        return self.phase is Phase.WAITING or standing or bool(self.health.silent_since_s)
