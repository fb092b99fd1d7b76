"""What one worker may do: generations, steps, and where it stands. Pure; the body does the work.

One rule keeps everything apart: a worker obeys no call of a generation older than the newest it has heard of. `hear` may
come at any moment, from another thread; everything else is called in order, one after the other.
"""

from __future__ import annotations

from collections.abc import Callable, Generator, Mapping
from dataclasses import dataclass, field
from typing import Any, Protocol, TypeVar

from raypar.errors import GroupAborted, RayparError
from raypar.plan.pieces import Digest, Piece

T = TypeVar("T")
Routine = Generator[Any, Any, T]
"""As `comm.transport.Routine`: yields where it has to wait."""

KEPT_OUTCOMES = 3
"""Steps whose outcome a worker remembers: more than can be in flight, so that a new driver finds what the old one missed."""


@dataclass(frozen=True, slots=True)
class WorkerStatus:
    """Where a worker stands.

    done: steps applied to the state it holds, None when it holds none (it waits for a seat). votable: it keeps the reduced
    gradients of step `done` and may apply it late. outcomes: of its last steps. pieces: what it holds of the state after
    `done` steps. cuts: steps -> what it holds of the mirror's cut after so many steps, own and others'. digests: steps -> of
    its own state then, where others should hold the same.
    """

    worker: int
    done: int | None = None
    votable: bool = False
    outcomes: Mapping[int, Any] = field(default_factory=dict)
    pieces: tuple[Piece, ...] = ()
    cuts: Mapping[int, tuple[Piece, ...]] = field(default_factory=dict)
    digests: Mapping[int, Digest] = field(default_factory=dict)


class MemberBackend(Protocol):
    """What does the work: torch in the product, hashes in the simulation of the protocol."""

    def step(self, step: int, cut: bool) -> Routine[Any]:
        """Run, vote, apply; with `cut` the state after it goes into the mirror. Returns what the driver wants to know."""

    def validate(self) -> Routine[Any]:
        """A pass over the validation data."""

    def applied(self) -> int:
        """Steps applied to the state held: counts in the very moment the optimizer has run."""

    def outcome(self) -> Any:
        """Of the step that was applied last."""

    def votable(self) -> bool:
        """Whether the reduced gradients of the step that was run last are complete, kept, and not applied."""

    def apply_late(self, step: int, outcome: Any) -> None:
        """Apply the kept gradients as `outcome` says."""

    def adopt(self, order: Any) -> Routine[None]:
        """Connect, exchange state, build. The old part is given up only at the very end, all at once."""

    def pieces(self) -> tuple[Piece, ...]:
        """All that is held of the state after `applied()` steps, also what a former plan left here."""

    def cuts(self) -> Mapping[int, tuple[Piece, ...]]:
        """What is held of each cut of the mirror."""

    def digests(self) -> Mapping[int, Digest]:
        """Of the own state in each cut that is held, where others should hold the same."""

    def abort(self, reason: str) -> None:
        """From any thread: every pending wait raises."""


class StaleGeneration(RayparError):
    """The call is of a generation that is over: its driver has been replaced, or has moved on."""


@dataclass
class Member:
    """One worker. `heard`: the newest generation it knows of; `generation`: the one whose plan its body has."""

    worker: int
    body: MemberBackend
    heard: int = 0
    generation: int = 0
    seated: bool = False
    broken: bool = False
    outcomes: dict[int, Any] = field(default_factory=dict)

    def hear(self, generation: int, reason: str) -> None:
        """A new generation begins: whatever is done for an older one is aborted. Raises `StaleGeneration`."""
        self._admit(generation)
        if generation > self.heard:
            self.heard = generation
            self.body.abort(reason)

    def step(self, generation: int, step: int, cut: bool = False) -> Routine[Any]:
        """One step of the plan of `generation`; returns the body's report. After a failure all later ones of that generation
        fail."""
        self._admit(generation)
        if self.broken or generation != self.generation:
            raise GroupAborted(f"worker {self.worker} has left generation {generation}", cure="see the first failure")
        assert step == self.body.applied(), f"step {step} was asked for, {self.body.applied()} are applied"
        self.broken = True
        try:
            report = yield from self.body.step(step, cut)
            self._remember(step, self.body.outcome())
        except Exception:
            if self.body.applied() == step + 1:
                self._remember(step, self.body.outcome())
            raise
        self.broken = False
        return report

    def validate(self, generation: int) -> Routine[Any]:
        """A validation pass of the plan of `generation`: changes nothing, so it may be broken off and run again."""
        self._admit(generation)
        if self.broken or generation != self.generation:
            raise GroupAborted(f"worker {self.worker} has left generation {generation}", cure="see the first failure")
        report = yield from self.body.validate()
        return report

    def stand(self, generation: int) -> WorkerStatus:
        """Where this worker stands, after everything before has ended. It may come before `hear`, which comes another way."""
        self.hear(generation, f"generation {generation} begins")
        body = self.body
        if not self.seated:
            return WorkerStatus(self.worker, cuts=dict(body.cuts()), digests=dict(body.digests()))
        outcomes, cuts, digests = dict(self.outcomes), dict(body.cuts()), dict(body.digests())
        return WorkerStatus(self.worker, body.applied(), body.votable(), outcomes, body.pieces(), cuts, digests)

    def settle(self, generation: int, step: int, outcome: Any) -> WorkerStatus:
        """Apply a step late, because somebody holds the whole vote; asked twice, it is done once. Where this worker stands
        then."""
        self._admit(generation)
        if self.body.applied() == step:
            assert self.body.votable(), f"worker {self.worker} has not kept the gradients of step {step}"
            self.body.apply_late(step, outcome)
            self._remember(step, outcome)
        return self.stand(generation)

    def save(self, generation: int, done: int, copy: Callable[[], T]) -> T:
        """`copy` the state after `done` steps: that and no other, whatever a driver asks for that stood still meanwhile."""
        self._admit(generation)
        if generation != self.generation or self.body.applied() != done:
            what = f"worker {self.worker} holds the state after {self.body.applied()} steps of generation {self.generation}"
            raise GroupAborted(f"{what}, not after {done} steps of {generation}", cure="the next checkpoint will be complete")
        return copy()

    def adopt(self, generation: int, order: Any) -> Routine[None]:
        """Take a part of a new plan, or hand over what is held for it."""
        self._admit(generation)
        yield from self.body.adopt(order)
        self._admit(generation)
        self.generation, self.broken = generation, False
        self.seated = True

    def _admit(self, generation: int) -> None:
        if generation < self.heard:
            raise StaleGeneration(
                f"worker {self.worker} obeys generation {self.heard}, not {generation}", cure="end this driver"
            )

    def _remember(self, step: int, outcome: Any) -> None:
        self.outcomes[step] = outcome
        for old in [s for s in self.outcomes if s <= step - KEPT_OUTCOMES]:
            del self.outcomes[old]
