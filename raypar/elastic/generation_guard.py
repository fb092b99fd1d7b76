"""What the driver and a worker say to each other: the guard that refuses calls of old generations, and the worker's status.

One rule keeps the generations apart: a worker obeys no call of a generation older than the newest one that it knows of.
`enter_generation` may be called at any moment, from another thread; all other calls come one after the other.
"""

from __future__ import annotations

from collections.abc import Callable, Generator, Mapping
from dataclasses import dataclass, field
from typing import Any, Protocol, TypeVar

from raypar.errors import GroupAborted, RayparError
from raypar.plan.pieces import Digest, Piece
from raypar.plan.vote_result import VoteResult
from raypar.plan.wording import after_steps

T = TypeVar("T")
Routine = Generator[Any, Any, T]
"""A routine as in `comm.transport`: it yields where it has to wait."""

KEPT_VOTE_RESULTS = 3
"""Steps whose vote result a worker remembers. It is more than can be in flight, so that a new driver misses none."""


@dataclass(frozen=True, slots=True)
class WorkerStatus:
    """What a worker reports in a recovery: the steps that it has applied, and the state that it holds."""

    worker: int
    """Its number."""
    done: int | None = None
    """Steps applied to the worker's state; None: the worker has no seat and no state."""
    can_apply_late: bool = False
    """Whether it keeps the reduced gradients of step `done` and can apply that step late."""
    vote_results: Mapping[int, VoteResult] = field(default_factory=dict)
    """Step -> result of the vote on it, for the last steps."""
    pieces: tuple[Piece, ...] = ()
    """The pieces that it holds of the state after `done` steps."""
    mirror_snapshots: Mapping[int, tuple[Piece, ...]] = field(default_factory=dict)
    """Number of steps -> pieces that it holds of the mirror snapshot after them: its own and copies of others' state."""
    digests: Mapping[int, Digest] = field(default_factory=dict)
    """Number of steps -> digest of its own state after them, if other workers should hold the same state."""
    skipped_steps: tuple[int, ...] = ()
    """The steps that were skipped so far, ascending, where the loss is scaled: its scale follows from them."""
    samples: Mapping[tuple[int, int], int] = field(default_factory=dict)
    """(step, microbatch) -> digest of what it has read of a stream, for the last steps."""


class WorkerTrainingBackend(Protocol):
    """The part of a worker that computes: with torch, or with hashes in the simulation of the protocol."""

    def step(self, step: int, into_mirror: bool) -> Routine[Any]:
        """Run a step, vote on it, apply it, and return the report for the driver.

        `into_mirror`: whether the mirror takes a snapshot of the state after the step.
        """

    def validate(self) -> Routine[Any]:
        """Run a pass over the validation data."""

    def applied(self) -> int:
        """The number of steps applied to the state; it grows at the moment when the optimizer has run."""

    def vote_result(self) -> VoteResult | None:
        """The result of the vote on the step that was applied last."""

    def can_apply_late(self) -> bool:
        """Whether the reduced gradients of the next step are complete and kept, but not applied."""

    def apply_late(self, step: int, vote_result: VoteResult) -> None:
        """Apply the kept gradients of `step` with the vote's result."""

    def adopt(self, order: Any) -> Routine[None]:
        """Connect, exchange state, build the stages of the new plan. The old state is given up at the very end, all at once."""

    def share_out_anew(self, order: Any) -> bool:
        """Run other blocks of the same stages from the next step on; False, and nothing has changed, if that takes more."""

    def pieces(self) -> tuple[Piece, ...]:
        """All pieces held of the state after `applied()` steps, including pieces left over from a former plan."""

    def held_snapshots(self) -> Mapping[int, tuple[Piece, ...]]:
        """Number of steps -> the pieces held of the mirror snapshot after them."""

    def digests(self) -> Mapping[int, Digest]:
        """Number of steps -> digest of the own state in that snapshot, if other workers should hold the same state."""

    def steps_skipped(self) -> tuple[int, ...]:
        """The steps that were skipped up to the state here, ascending, where the loss is scaled; else none."""

    def abort(self, reason: str) -> None:
        """Make every pending wait raise. Safe from any thread."""


class StaleGeneration(RayparError):
    """Raised for a call of a generation that is over: its driver has been replaced, or has begun a newer one."""


@dataclass
class GenerationGuard:
    """One worker's side of the elastic protocol."""

    worker: int
    """Its number."""
    backend: WorkerTrainingBackend
    """The part that computes."""
    newest_generation: int = 0
    """The newest generation that it knows of."""
    generation: int = 0
    """The generation whose plan it has adopted."""
    seated: bool = False
    """Whether it has adopted any plan."""
    broken: bool = False
    """Whether a step has failed or is running: no other one may start."""
    vote_results: dict[int, VoteResult] = field(default_factory=dict)
    """Step -> result of the vote on it, for the last `KEPT_VOTE_RESULTS` steps."""
    outcomes: dict[int, Any] = field(default_factory=dict)
    """Step of this generation -> its report, or the error that it ended with, for the last `KEPT_VOTE_RESULTS` steps."""

    def enter_generation(self, generation: int, reason: str) -> bool:
        """Take note of a generation; if it is new, abort work for older ones. Raises `StaleGeneration` for an old one.

        Returns whether it is new.
        """
        self.admit(generation)
        new = generation > self.newest_generation
        if new:
            self.newest_generation = generation
            self.backend.abort(reason)
        return new

    def step(self, generation: int, step: int, into_mirror: bool = False) -> Routine[Any]:
        """Run one step of the plan of `generation`; returns the backend's report.

        After a failure all later steps of that generation fail. Who asks for a step again, because the answer was lost on its
        way, gets the same answer, and the step is not executed again.
        """
        self.admit(generation)
        if generation == self.generation and step in self.outcomes:
            if isinstance(self.outcomes[step], Exception):
                raise self.outcomes[step]  # without a name here, which would have the error hold itself
            return self.outcomes[step]
        if self.broken or generation != self.generation:
            raise GroupAborted(f"worker {self.worker} has left generation {generation}", cure="see the first failure")
        if step < self.backend.applied():
            raise StaleGeneration(f"step {step + 1} is long done", cure="nothing: the call was repeated, and has come late")
        assert step == self.backend.applied(), f"step {step} was asked for, {self.backend.applied()} are applied"
        self.broken = True
        try:
            report = yield from self.backend.step(step, into_mirror)
            self._remember(step, self.backend.vote_result())
        except Exception as error:
            if self.backend.applied() == step + 1:
                self._remember(step, self.backend.vote_result())
            self.outcomes[step] = error
            raise
        self.broken = False
        self.outcomes[step] = report
        self.outcomes.pop(step - KEPT_VOTE_RESULTS, None)
        return report

    def validate(self, generation: int) -> Routine[Any]:
        """Run a validation pass. The pass changes no state, so it may be aborted and run again."""
        self.admit(generation)
        if self.broken or generation != self.generation:
            raise GroupAborted(f"worker {self.worker} has left generation {generation}", cure="see the first failure")
        report = yield from self.backend.validate()
        return report

    def report_status(self, generation: int) -> WorkerStatus:
        """Enter the generation and return this worker's status.

        It is called after all earlier calls have ended. `enter_generation` comes another way, perhaps later.
        """
        self.enter_generation(generation, f"generation {generation} begins")
        self.outcomes.clear()  # nobody asks for them any more, and an error's frames have all that the step has computed
        backend = self.backend
        if not self.seated:
            return WorkerStatus(
                self.worker,
                mirror_snapshots=dict(backend.held_snapshots()),
                digests=dict(backend.digests()),
                skipped_steps=backend.steps_skipped(),
            )
        return WorkerStatus(
            self.worker,
            backend.applied(),
            backend.can_apply_late(),
            dict(self.vote_results),
            backend.pieces(),
            dict(backend.held_snapshots()),
            dict(backend.digests()),
            backend.steps_skipped(),
        )

    def apply_kept_gradients(self, generation: int, step: int, vote_result: VoteResult) -> WorkerStatus:
        """Apply a step late, because some worker received all votes on it. Returns this worker's status after that.

        A second call for the same step does not apply it again.
        """
        self.admit(generation)
        if self.backend.applied() == step:
            assert self.backend.can_apply_late(), f"worker {self.worker} has not kept the gradients of step {step}"
            self.backend.apply_late(step, vote_result)
            self._remember(step, vote_result)
        return self.report_status(generation)

    def save(self, generation: int, done: int, copy: Callable[[], T]) -> T:
        """Call `copy` if the state has had exactly `done` steps; a driver that was stopped may ask for an older state."""
        self.admit(generation)
        if generation != self.generation or self.backend.applied() != done:
            what = f"worker {self.worker} holds the state {after_steps(self.backend.applied())} of generation {self.generation}"
            raise GroupAborted(f"{what}, not {after_steps(done)} of {generation}", cure="the next checkpoint will be complete")
        return copy()

    def adopt(self, generation: int, order: Any) -> Routine[None]:
        """Adopt this worker's part of a new plan, or only send pieces to workers that need them."""
        self.admit(generation)
        yield from self.backend.adopt(order)
        self.admit(generation)
        self.generation, self.broken = generation, False
        self.seated = True
        self.outcomes.clear()

    def share_out_anew(self, generation: int, order: Any) -> bool:
        """Take other blocks of the same plan between two steps of `generation`; False if that needs a new generation."""
        self.admit(generation)
        if self.broken or generation != self.generation:
            raise GroupAborted(f"worker {self.worker} has left generation {generation}", cure="see the first failure")
        return self.backend.share_out_anew(order)

    def admit(self, generation: int) -> None:
        """Raise `StaleGeneration` for a generation older than the newest one that is known."""
        if generation < self.newest_generation:
            raise StaleGeneration(
                f"worker {self.worker} obeys generation {self.newest_generation}, not {generation}", cure="end this driver"
            )

    def _remember(self, step: int, vote_result: VoteResult | None) -> None:
        if vote_result is not None:
            self.vote_results[step] = vote_result
        for old in [s for s in self.vote_results if s <= step - KEPT_VOTE_RESULTS]:
            del self.vote_results[old]
