"""What one worker may do: which calls it obeys, and where it stands. Its backend does the work.

One rule keeps the generations apart: a worker obeys no call of a generation older than the newest it has heard of. `hear` may
be called at any moment, from another thread; all other calls come one after the other.
"""

from __future__ import annotations

from collections.abc import Callable, Generator, Mapping
from dataclasses import dataclass, field
from typing import Any, Protocol, TypeVar

from raypar.errors import GroupAborted, RayparError
from raypar.plan.pieces import Digest, Piece

T = TypeVar("T")
Routine = Generator[Any, Any, T]
"""A routine as in `comm.transport`: it yields where it has to wait."""

KEPT_OUTCOMES = 3
"""Steps whose outcome a worker remembers. More than can be in flight: a new driver finds there what the old one missed."""


@dataclass(frozen=True, slots=True)
class WorkerStatus:
    """Where a worker stands."""

    worker: int
    """Its number."""
    done: int | None = None
    """Steps applied to the state that it holds; None: it holds none and waits for a seat."""
    can_apply_late: bool = False
    """Whether it keeps the reduced gradients of step `done` and may apply it late."""
    vote_results: Mapping[int, Any] = field(default_factory=dict)
    """Step -> result of its vote, for the last steps."""
    pieces: tuple[Piece, ...] = ()
    """What it holds of the state after `done` steps."""
    mirror_snapshots: Mapping[int, tuple[Piece, ...]] = field(default_factory=dict)
    """Steps -> what it holds of the mirror's snapshot after so many steps: its own state and that of others."""
    digests: Mapping[int, Digest] = field(default_factory=dict)
    """Steps -> digest of its own state then, where other workers should hold the same."""


class WorkerTrainingBackend(Protocol):
    """The part of a worker that computes: torch in the product, hashes in the simulation of the protocol."""

    def step(self, step: int, cut: bool) -> Routine[Any]:
        """Run a step, vote on it, apply it. With `cut` the state after it goes into the mirror. Returns the driver's report."""

    def validate(self) -> Routine[Any]:
        """Run a pass over the validation data."""

    def applied(self) -> int:
        """The number of steps applied to the state; it grows in the moment in which the optimizer has run."""

    def vote_result(self) -> Any:
        """The result of the vote on the step that was applied last."""

    def can_apply_late(self) -> bool:
        """Whether the reduced gradients of the last step are complete, kept, and not applied."""

    def apply_late(self, step: int, outcome: Any) -> None:
        """Apply the kept gradients as `outcome` says."""

    def adopt(self, order: Any) -> Routine[None]:
        """Connect, exchange state, build the new part. The old part is given up at the very end, all at once."""

    def pieces(self) -> tuple[Piece, ...]:
        """All pieces of the state after `applied()` steps, also those that a former plan left here."""

    def mirror_snapshots(self) -> Mapping[int, tuple[Piece, ...]]:
        """Steps -> the pieces of the mirror's snapshot after so many steps."""

    def digests(self) -> Mapping[int, Digest]:
        """Steps -> digest of the own state in that snapshot, where other workers should hold the same."""

    def abort(self, reason: str) -> None:
        """Let every pending wait raise. Safe from any thread."""


class StaleGeneration(RayparError):
    """The call belongs to a generation that is over: its driver has been replaced, or has moved on."""


@dataclass
class GenerationGuard:
    """One worker's side of the protocol."""

    worker: int
    """Its number."""
    backend: WorkerTrainingBackend
    """What does the work."""
    newest_generation: int = 0
    """The newest generation that it knows of."""
    generation: int = 0
    """The generation whose plan it has adopted."""
    seated: bool = False
    """Whether it has adopted any plan."""
    broken: bool = False
    """Whether a step has failed or is running: no other one may start."""
    vote_results: dict[int, Any] = field(default_factory=dict)
    """Step -> result of its vote, for the last `KEPT_OUTCOMES` steps."""

    def enter_generation(self, generation: int, reason: str) -> None:
        """Begin a new generation: abort what is done for an older one. Raises `StaleGeneration`."""
        self._admit(generation)
        if generation > self.newest_generation:
            self.newest_generation = generation
            self.backend.abort(reason)

    def step(self, generation: int, step: int, cut: bool = False) -> Routine[Any]:
        """Run one step of the plan of `generation`; returns the backend's report.

        After a failure all later steps of that generation fail.
        """
        self._admit(generation)
        if self.broken or generation != self.generation:
            raise GroupAborted(f"worker {self.worker} has left generation {generation}", cure="see the first failure")
        assert step == self.backend.applied(), f"step {step} was asked for, {self.backend.applied()} are applied"
        self.broken = True
        try:
            report = yield from self.backend.step(step, cut)
            self._remember(step, self.backend.vote_result())
        except Exception:
            if self.backend.applied() == step + 1:
                self._remember(step, self.backend.vote_result())
            raise
        self.broken = False
        return report

    def validate(self, generation: int) -> Routine[Any]:
        """Run a validation pass. It changes nothing, so it may be broken off and run again."""
        self._admit(generation)
        if self.broken or generation != self.generation:
            raise GroupAborted(f"worker {self.worker} has left generation {generation}", cure="see the first failure")
        report = yield from self.backend.validate()
        return report

    def report_status(self, generation: int) -> WorkerStatus:
        """Where this worker stands, once all calls before have ended. `hear` comes another way, perhaps later."""
        self.enter_generation(generation, f"generation {generation} begins")
        body = self.backend
        if not self.seated:
            return WorkerStatus(self.worker, mirror_snapshots=dict(body.mirror_snapshots()), digests=dict(body.digests()))
        outcomes, cuts, digests = dict(self.vote_results), dict(body.mirror_snapshots()), dict(body.digests())
        return WorkerStatus(self.worker, body.applied(), body.can_apply_late(), outcomes, body.pieces(), cuts, digests)

    def apply_kept_gradients(self, generation: int, step: int, outcome: Any) -> WorkerStatus:
        """Apply a step late, because some worker held the whole vote. Returns where this worker stands then.

        Asked twice, it applies the step once.
        """
        self._admit(generation)
        if self.backend.applied() == step:
            assert self.backend.can_apply_late(), f"worker {self.worker} has not kept the gradients of step {step}"
            self.backend.apply_late(step, outcome)
            self._remember(step, outcome)
        return self.report_status(generation)

    def save(self, generation: int, done: int, copy: Callable[[], T]) -> T:
        """Call `copy` if the state is that after `done` steps; a driver that stood still may ask for an old one."""
        self._admit(generation)
        if generation != self.generation or self.backend.applied() != done:
            what = f"worker {self.worker} holds the state after {self.backend.applied()} steps of generation {self.generation}"
            raise GroupAborted(f"{what}, not after {done} steps of {generation}", cure="the next checkpoint will be complete")
        return copy()

    def adopt(self, generation: int, order: Any) -> Routine[None]:
        """Take a part of a new plan, or hand over the pieces that others need for theirs."""
        self._admit(generation)
        yield from self.backend.adopt(order)
        self._admit(generation)
        self.generation, self.broken = generation, False
        self.seated = True

    def _admit(self, generation: int) -> None:
        if generation < self.newest_generation:
            raise StaleGeneration(
                f"worker {self.worker} obeys generation {self.newest_generation}, not {generation}", cure="end this driver"
            )

    def _remember(self, step: int, outcome: Any) -> None:
        self.vote_results[step] = outcome
        for old in [s for s in self.vote_results if s <= step - KEPT_OUTCOMES]:
            del self.vote_results[old]
