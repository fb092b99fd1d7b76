"""Owners share tensors out in canonical pieces: everything once, few runs, equally many elements."""

import random
from collections import Counter

import pytest

from raypar.plan.ownership import CANONICAL_PIECE as PIECE
from raypar.plan.ownership import BalancedTensorShares, consecutive_tensor_share


def test_pieces_of_a_tensor_lie_side_by_side_and_short_ends_even_out_the_rest():
    shares = BalancedTensorShares((5 * PIECE + 10, 4 * PIECE, 100), 2)
    assert [list(shares.runs_of_owner(owner)) for owner in range(2)] == [
        [(0, 0, 3 * PIECE), (1, 2 * PIECE, 4 * PIECE)],
        [(0, 3 * PIECE, 5 * PIECE + 10), (1, 0, 2 * PIECE), (2, 0, 100)],
    ]


def test_one_owner_has_every_tensor_whole():
    assert list(BalancedTensorShares((PIECE + 1, 7), 1).runs_of_owner(0)) == [(0, 0, PIECE + 1), (1, 0, 7)]


@pytest.mark.parametrize("seed", range(60))
def test_every_element_has_one_owner_and_runs_begin_at_canonical_pieces(seed):
    dice = random.Random(seed)
    sizes = tuple(dice.choice([dice.randint(1, 300), dice.randint(1, 40 * PIECE)]) for _ in range(dice.randint(1, 30)))
    shares = BalancedTensorShares(sizes, dice.randint(1, 9))
    runs = [list(shares.runs_of_owner(owner)) for owner in range(shares.owners)]
    covered = sorted(run for mine in runs for run in mine)
    for index, size in enumerate(sizes):
        here = [(start, stop) for i, start, stop in covered if i == index]
        assert [start for start, _ in here] == [0, *(stop for _, stop in here[:-1])] and here[-1][1] == size
        assert all(start % PIECE == 0 and start < stop for start, stop in here)
    loads = [sum(stop - start for _, start, stop in mine) for mine in runs]
    assert max(loads) - min(loads) <= PIECE
    assert all(mine == sorted(mine) for mine in runs)
    assert all(count <= 2 for mine in runs for count in Counter(index for index, _, _ in mine).values()), "few runs"


@pytest.mark.parametrize("seed", range(20))
def test_tensors_that_may_not_be_divided_have_one_owner_and_the_others_even_out_what_they_can(seed):
    dice = random.Random(seed)
    sizes = tuple(dice.randint(1, 20 * PIECE) for _ in range(dice.randint(1, 30)))
    undivided = frozenset(index for index in range(len(sizes)) if dice.random() < 0.4)
    shares = BalancedTensorShares(sizes, dice.randint(1, 5), undivided)
    covered = sorted(run for owner in range(shares.owners) for run in shares.runs_of_owner(owner))
    assert [run for run in covered if run[0] in undivided] == [(index, 0, sizes[index]) for index in sorted(undivided)]
    assert sum(stop - start for _, start, stop in covered) == sum(sizes)
    loads = [sum(stop - start for _, start, stop in shares.runs_of_owner(owner)) for owner in range(shares.owners)]
    assert max(loads) - min(loads) <= max(PIECE, *(sizes[index] for index in undivided), 0)


@pytest.mark.parametrize("sizes", [[], [0], [5], [3, 0, 0, 4], [1] * 7, [100, 1, 1, 1], [0, 0, 9]], ids=str)
@pytest.mark.parametrize("parts", [1, 2, 3, 8])
def test_consecutive_shares_are_everything_in_order(sizes, parts):
    indices = list(range(len(sizes)))
    assert [i for part in range(parts) for i in indices[consecutive_tensor_share(sizes, part, parts)]] == indices
