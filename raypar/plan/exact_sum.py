"""Sums of float64 numbers that depend on no order and on no division among workers: exact until they are rounded, once.

A sum is kept as an integer in units of the smallest denormal number (a long accumulator: Kulisch, "Computer Arithmetic and
Validity", 2013; reproducible sums are compared in Ahrens, Demmel and Nguyen, "Algorithms for Efficient Reproducible
Floating Point Summation", 2020). It travels as few float64 numbers, however many were added.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass

_DENORMAL_BITS = 1074
"""A unit is 2**-1074, float64's smallest denormal number."""
_DIGIT_BITS = 48
"""Bits of a digit in `ExactSum.to_floats`; each is a whole number that float64 has exactly."""


@dataclass(frozen=True, slots=True)
class ExactSum:
    """The exact sum of float64 numbers."""

    units: int = 0
    """Sum of the finite numbers, in units of 2**-1074."""
    non_finite: float = 0.0
    """Sum of the infinite ones and those that are not a number: 0.0 (there are none), infinity, -infinity or NaN."""

    @classmethod
    def of(cls, values: Iterable[float]) -> ExactSum:
        """The sum of `values`, in any order the same."""
        values = list(values)
        try:
            return cls(_units_of(values))
        except (OverflowError, ValueError):  # a number that is not finite, or a sum on the way beyond the largest number
            finite = [value for value in values if math.isfinite(value)]
            return cls(sum(map(_in_units, finite)), sum((value for value in values if not math.isfinite(value)), 0.0))

    def __add__(self, other: ExactSum) -> ExactSum:
        return ExactSum(self.units + other.units, self.non_finite + other.non_finite)

    def rounded(self) -> float:
        """The sum as float64, rounded to nearest, half to even; beyond the largest number it is infinity."""
        if self.non_finite != 0.0:
            return self.non_finite
        try:
            return self.units / (1 << _DENORMAL_BITS)
        except OverflowError:
            return math.inf if self.units > 0 else -math.inf

    def to_floats(self) -> list[float]:
        """Few numbers that `take` reads again: the sum of what is not finite, how many digits follow, the place of the last
        one, and the digits to the base 2**48, the last one first, each with the sum's sign: nine at most for float32."""
        left, sign, place = abs(self.units), -1.0 if self.units < 0 else 1.0, 0
        if left:
            place = ((left & -left).bit_length() - 1) // _DIGIT_BITS
            left >>= place * _DIGIT_BITS
        digits = []
        while left:
            digits.append(sign * (left & (1 << _DIGIT_BITS) - 1))
            left >>= _DIGIT_BITS
        return [self.non_finite, float(len(digits)), float(place), *digits]

    @classmethod
    def take(cls, numbers: Iterator[float]) -> ExactSum:
        """The sum that `numbers` begin with, as `to_floats` wrote it; what follows it is left."""
        non_finite, count, place = next(numbers), int(next(numbers)), int(next(numbers))
        units = sum(int(next(numbers)) << _DIGIT_BITS * (place + index) for index in range(count))
        return cls(units, non_finite)


def _units_of(values: Sequence[float]) -> int:
    """The sum of numbers, in units of 2**-1074. Raises `OverflowError` or `ValueError` where one of them is not finite, and may
    where they are huge."""
    left, units = list(values), 0
    while part := math.fsum(left):  # what rounding leaves is added, until nothing is left: two or three times
        left.append(-part)
        units += _in_units(part)
    return units


def _in_units(value: float) -> int:
    mantissa, denominator = value.as_integer_ratio()
    return mantissa * ((1 << _DENORMAL_BITS) // denominator)
