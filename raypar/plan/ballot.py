"""What workers tell each other before a step counts: exact sums, which may be added up in any order and by anybody."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field
from itertools import chain

from raypar.plan.exact_sum import ExactSum

_BITS = 48
"""Bits of `Ballot.defined` in one number, which float64 has exactly."""


@dataclass(frozen=True, order=True, slots=True)
class OrderOfSamples:
    """The order in which a worker reads samples, where the job names it."""

    rank: int
    """The worker's."""
    digest: int
    """64 bits over the ids of the epochs that the step reaches."""

    def to_floats(self) -> list[float]:
        """Three numbers, which float64 has exactly."""
        return [float(self.rank), float(self.digest >> 32), float(self.digest & 0xFFFFFFFF)]


@dataclass(frozen=True, slots=True)
class Ballot:
    """The votes of some workers on a step, added up (rules 7 and 8 of the numerics contract)."""

    workers: int = 0
    """Number of workers whose votes are in it: a worker votes when it is ready to apply the step."""
    losses: ExactSum = field(default_factory=ExactSum)
    """Of the microbatches' loss sums."""
    counts: ExactSum = field(default_factory=ExactSum)
    """Of the microbatches' counts."""
    squares: ExactSum = field(default_factory=ExactSum)
    """Of the squared elements of the gradient."""
    defined: int = 0
    """Bits, one for each parameter of the model: whether any of the workers has a gradient of it. Told where a stage has
    replicas, whose gradients are reduced without asking."""
    orders: tuple[OrderOfSamples, ...] = ()
    """The order of the lowest rank that tells one; after it, if any rank tells another order, that of the lowest such rank."""

    def __add__(self, other: Ballot) -> Ballot:
        orders = sorted((*self.orders, *other.orders))
        different = [one for one in orders if one.digest != orders[0].digest]
        return Ballot(
            self.workers + other.workers,
            self.losses + other.losses,
            self.counts + other.counts,
            self.squares + other.squares,
            self.defined | other.defined,
            (*orders[:1], *different[:1]),
        )

    def to_floats(self) -> list[float]:
        """Numbers that `from_floats` reads: few whatever was added, but for one for each 48 parameters in `defined`."""
        sums = self.losses.to_floats() + self.counts.to_floats() + self.squares.to_floats()
        places = range(0, self.defined.bit_length(), _BITS)
        digits = [float(self.defined >> place & (1 << _BITS) - 1) for place in places]
        return [
            float(self.workers),
            *sums,
            float(len(digits)),
            *digits,
            *chain.from_iterable(order.to_floats() for order in self.orders),
        ]

    @classmethod
    def from_floats(cls, values: Iterable[float]) -> Ballot:
        """The ballot that `to_floats` has written."""
        numbers = iter(values)
        workers = int(next(numbers))
        losses, counts, squares = (ExactSum.take(numbers) for _ in range(3))
        defined = sum(int(next(numbers)) << _BITS * place for place in range(int(next(numbers))))
        orders = tuple(OrderOfSamples(int(rank), int(next(numbers)) << 32 | int(next(numbers))) for rank in numbers)
        return cls(workers, losses, counts, squares, defined, orders)
