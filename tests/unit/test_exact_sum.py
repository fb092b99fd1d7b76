"""Exact sums: correctly rounded, the same whoever adds what, with whatever numbers (rules 7 and 8 of raypar/NUMERICS.md)."""

import math
import random
import struct
from fractions import Fraction

import pytest

from raypar.plan.exact_sum import ExactSum

LARGEST, SMALLEST = struct.unpack("<dd", struct.pack("<QQ", 0x7FEFFFFFFFFFFFFF, 1))


def any_number(dice: random.Random, kind: str) -> float:
    """Any finite number: of float32 or float64, tiny, huge, denormal, zero, or near to one."""
    if kind == "near":
        return dice.gauss(0.0, 1.0)
    if kind == "float32":
        return struct.unpack("<f", struct.pack("<I", dice.getrandbits(31) % 0x7F800000 | dice.getrandbits(1) << 31))[0]
    if kind == "denormal":
        return math.copysign(dice.randrange(0, 1 << 52) * SMALLEST, dice.random() - 0.5)
    return struct.unpack("<d", struct.pack("<Q", dice.getrandbits(63) % 0x7FF0000000000000 | dice.getrandbits(1) << 63))[0]


def rounded(exact: Fraction) -> float:
    try:
        return float(exact)  # a Fraction is divided with one rounding, half to even
    except OverflowError:
        return math.inf if exact > 0 else -math.inf


def same(one: float, other: float) -> bool:
    return struct.pack("<d", one) == struct.pack("<d", other) or one == other == 0.0 or (math.isnan(one) and math.isnan(other))


def travelled(one: ExactSum) -> ExactSum:
    numbers = iter([*one.to_floats(), 7.0])
    found = ExactSum.take(numbers)
    assert list(numbers) == [7.0]
    return found


@pytest.mark.parametrize("kind", ["near", "float32", "denormal", "any", "cancels"])
def test_sums_are_those_of_fractions_however_they_are_divided(kind):
    dice = random.Random(kind)
    for _ in range(2_000):
        values = [
            any_number(dice, kind if kind != "cancels" else dice.choice(["near", "any"])) for _ in range(dice.randrange(13))
        ]
        if kind == "cancels":
            values += [-value for value in values[dice.randrange(1 + len(values)) :]]
        want = rounded(sum(map(Fraction, values), Fraction()))
        assert same(ExactSum.of(values).rounded(), want), values
        dice.shuffle(values)
        owners = [ExactSum.of(values[owner::3]) for owner in range(3)]
        assert sum(map(travelled, dice.sample(owners, 3)), ExactSum()) == ExactSum.of(values)


@pytest.mark.parametrize(
    "values, want",
    [
        ([], 0.0),
        ([-0.0, -0.0], 0.0),
        ([math.inf, 1.0, -LARGEST], math.inf),
        ([-math.inf, LARGEST], -math.inf),
        ([math.inf, -math.inf], math.nan),
        ([math.nan, math.inf], math.nan),
        ([LARGEST, LARGEST], math.inf),
        ([-LARGEST, -LARGEST], -math.inf),
        ([LARGEST, LARGEST, -LARGEST], LARGEST),
        ([LARGEST, LARGEST / 2**54], LARGEST),
        ([LARGEST, LARGEST / 2**53, 1.0], math.inf),
        ([1.0, 2.0**-53], 1.0),
        ([1.0, 2.0**-53, SMALLEST], 1.0 + 2.0**-52),
        ([1.0 + 2.0**-52, 2.0**-53], 1.0 + 2.0**-51),
        ([SMALLEST] * 3, 3 * SMALLEST),
    ],
)
def test_what_is_not_finite_and_what_lies_in_the_middle(values, want):
    for cut in range(len(values) + 1):
        assert same((travelled(ExactSum.of(values[:cut])) + travelled(ExactSum.of(values[cut:]))).rounded(), want)


def test_a_sum_travels_as_few_numbers_however_many_were_added():
    dice = random.Random(0)
    assert len(ExactSum.of(dice.random() for _ in range(10_000)).to_floats()) <= 6
    largest_float32, smallest_float32 = 2.0**128 - 2.0**104, 2.0**-149
    assert len(ExactSum.of([largest_float32] * 10_000 + [smallest_float32]).to_floats()) <= 3 + 9
    assert len(ExactSum.of([LARGEST] * 10_000 + [SMALLEST]).to_floats()) <= 3 + 45
