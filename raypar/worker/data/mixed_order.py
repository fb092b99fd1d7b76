"""Which sample lies at each position where several data sets are mixed by fixed ratios (rule 1)."""

from __future__ import annotations

import bisect
import math
from collections.abc import Sequence
from dataclasses import dataclass
from fractions import Fraction
from typing import Protocol

from raypar.errors import ConfigError
from raypar.plan.seeds import seed_of

MOST_SHARES = 10**5
"""The longest pattern in which sources alternate."""


class SourceOrder(Protocol):
    """The order of one source's samples."""

    def ids(self, start: int, stop: int) -> list[tuple[int, int]]:
        """(epoch, id) of positions [start, stop) in the endless stream of the source's samples."""


class MixPattern:
    """Which source has which position: a pattern of sources that repeats."""

    def __init__(self, pattern: Sequence[int]) -> None:
        self._pattern = pattern
        self._places: list[list[int]] = [[] for _ in range(max(pattern) + 1)]
        for place, source in enumerate(pattern):
            self._places[source].append(place)

    @staticmethod
    def of_ratios(ratios: Sequence[float]) -> MixPattern:
        """Raises `ConfigError`, see `whole_shares`."""
        return MixPattern(largest_deficit_pattern(whole_shares(ratios)))

    @property
    def source_count(self) -> int:
        """Number of sources."""
        return len(self._places)

    def source_at(self, position: int) -> int:
        """The source of a position."""
        return self._pattern[position % len(self._pattern)]

    def count(self, source: int, position: int) -> int:
        """How many of the positions before this one are a source's."""
        rounds, rest = divmod(position, len(self._pattern))
        places = self._places[source]
        return rounds * len(places) + bisect.bisect_left(places, rest)


@dataclass(frozen=True)
class MixedOrder:
    """Sources alternate in a pattern that repeats; each is read in an order of its own, epoch after epoch."""

    orders: Sequence[SourceOrder]
    """The order of each source's samples, whose ids begin at 0."""
    offsets: Sequence[int]
    """What is added to the ids of each source."""
    pattern: MixPattern
    """Which source has which position."""

    def ids(self, start: int, stop: int) -> list[tuple[int, int]]:
        """(epoch of its source, id) of stream positions [start, stop)."""
        count = self.pattern.count
        found = [iter(order.ids(count(source, start), count(source, stop))) for source, order in enumerate(self.orders)]
        at = [self.pattern.source_at(position) for position in range(start, stop)]
        return [(epoch, self.offsets[source] + index) for source in at for epoch, index in [next(found[source])]]

    def digest(self, start: int, stop: int) -> None:
        """None: no function of the user's decides the order."""


def seed_of_source(seed: int, source: int) -> int:
    """The seed of the order of a source's samples."""
    return seed_of(seed, "mix", source)


def whole_shares(ratios: Sequence[float]) -> list[int]:
    """The smallest whole numbers in these ratios, decimal fractions as they are written: 0.7 and 0.3 are 7 and 3.

    Raises `ConfigError` if they are more than `MOST_SHARES` together.
    """
    exact = [Fraction(str(ratio)) for ratio in ratios]
    scale = math.lcm(*(one.denominator for one in exact))
    shares = [int(one * scale) for one in exact]
    shares = [share // math.gcd(*shares) for share in shares]
    if sum(shares) > MOST_SHARES:
        raise ConfigError(
            f"data.mix has the ratios {', '.join(f'{ratio:g}' for ratio in ratios)}: so many samples in turn repeat after "
            f"{_short_number(sum(shares))} only, and up to {MOST_SHARES:,} are kept",
            cure="give ratios of fewer digits, such as 3 and 1, or 0.75 and 0.25",
        )
    return shares


def _short_number(number: int) -> str:
    """A number from 1 on with all its digits, or as a power of ten if these are many."""
    return f"{number:,}" if number < 10**15 else f"10^{len(str(number)) - 1}"


def largest_deficit_pattern(shares: Sequence[int]) -> list[int]:
    """The sources in turn, each as often as its share: always the one that lacks most of it, of several the first.

    After any number of places a source has been given its share of them, to less than one.
    """
    total, given = sum(shares), [0] * len(shares)
    pattern = []
    for place in range(1, total + 1):
        source = max(range(len(shares)), key=lambda one: (shares[one] * place - total * given[one], -one))
        given[source] += 1
        pattern.append(source)
    return pattern
