"""Owners divide tensors in pieces: everything once, few runs, even loads, and few moves when an owner comes or goes."""

import itertools
import random

import pytest

from raypar.elastic.seating import keep_replica_numbers
from raypar.plan.nested_shares import NestedTensorShares
from raypar.plan.ownership import CANONICAL_PIECE as PIECE
from raypar.plan.ownership import consecutive_tensor_share


def drawn_sizes(dice, most=40 * PIECE):
    return tuple(dice.choice([dice.randint(1, 300), dice.randint(1, most)]) for _ in range(dice.randint(1, 30)))


def runs_of(sizes, owners, undivided=frozenset()):
    """By owner: its runs."""
    shares = NestedTensorShares(sizes, owners, PIECE, undivided)
    return [list(shares.runs_of_owner(owner)) for owner in range(owners)]


def elements(runs):
    return sum(stop - start for _, start, stop in runs)


def lacks(need, have):
    """How many elements of some runs are not in others."""
    found = elements(need)
    for index, start, stop in need:
        found -= sum(max(0, min(stop, b) - max(start, a)) for of, a, b in have if of == index)
    return found


def numbers(owners):
    """Worker -> the number of its replica."""
    return {worker: worker for worker in range(owners)}


def test_the_second_of_two_owners_has_the_end_of_the_sequence_and_short_ends_even_out_the_rest():
    assert runs_of((5 * PIECE + 10, 4 * PIECE, 100), 2) == [
        [(0, 0, 5 * PIECE)],
        [(0, 5 * PIECE, 5 * PIECE + 10), (1, 0, 4 * PIECE), (2, 0, 100)],
    ]


def test_one_owner_has_every_tensor_whole():
    assert runs_of((PIECE + 1, 7, 0), 1) == [[(0, 0, PIECE + 1), (1, 0, 7)]]


@pytest.mark.parametrize("seed", range(60))
def test_every_element_has_one_owner_and_runs_are_few_and_begin_at_canonical_pieces(seed):
    dice = random.Random(seed)
    sizes, owners = drawn_sizes(dice), dice.randint(1, 16)
    runs = runs_of(sizes, owners)
    covered = sorted(run for mine in runs for run in mine)
    for index, size in enumerate(sizes):
        here = [(start, stop) for i, start, stop in covered if i == index]
        assert [start for start, _ in here] == [0, *(stop for _, stop in here[:-1])] and here[-1][1] == size
        assert all(start % PIECE == 0 and start < stop for start, stop in here)
    loads = [elements(mine) for mine in runs]
    assert max(loads) - min(loads) <= PIECE
    assert all(mine == sorted(mine) for mine in runs)
    assert all(len(mine) <= len(sizes) + 2 * owners for mine in runs)
    assert all(a[0] != b[0] or a[2] < b[1] for mine in runs for a, b in itertools.pairwise(mine)), "joined"


@pytest.mark.parametrize("seed", range(20))
def test_tensors_that_may_not_be_divided_have_one_owner_and_the_others_even_out_what_they_can(seed):
    dice = random.Random(seed)
    sizes = tuple(dice.randint(1, 20 * PIECE) for _ in range(dice.randint(1, 30)))
    undivided = frozenset(index for index in range(len(sizes)) if dice.random() < 0.4)
    runs = runs_of(sizes, dice.randint(1, 16), undivided)
    covered = sorted(run for mine in runs for run in mine)
    assert [run for run in covered if run[0] in undivided] == [(index, 0, sizes[index]) for index in sorted(undivided)]
    assert elements(covered) == sum(sizes)
    loads = [elements(mine) for mine in runs]
    assert max(loads) - min(loads) <= max(PIECE, *(sizes[index] for index in undivided), 0)


@pytest.mark.parametrize("seed", range(40))
def test_when_an_owner_comes_only_what_it_gets_moves(seed):
    """The least: each owner keeps what it has but its part of that."""
    dice = random.Random(seed)
    sizes = drawn_sizes(dice, 1000 * PIECE)
    undivided = frozenset(index for index in range(len(sizes)) if dice.random() < 0.2 * (seed % 2))
    for owners in range(2, 17):
        before, now = runs_of(sizes, owners - 1, undivided), runs_of(sizes, owners, undivided)
        assert [lacks(need, have) for need, have in zip(now, before, strict=False)] == [0] * (owners - 1)
        if not undivided:
            assert elements(now[-1]) <= sum(sizes) / owners + PIECE


@pytest.mark.parametrize("seed", range(40))
def test_when_an_owner_goes_twice_the_least_moves_at_most(seed):
    """The last one takes the place of one that goes (`seating.keep_replica_numbers`). The least is what was lost."""
    dice = random.Random(seed)
    sizes = tuple(dice.randint(300 * PIECE, 3000 * PIECE) for _ in range(dice.randint(1, 30)))
    for owners in range(3, 17):
        before, now = runs_of(sizes, owners, frozenset()), runs_of(sizes, owners - 1)
        for gone in {0, owners - 2, owners - 1, dice.randrange(owners)}:
            seats = [place for (place,) in keep_replica_numbers([[p] for p in range(owners) if p != gone], numbers(owners))]
            moved = sum(lacks(now[number], before[place]) for number, place in enumerate(seats))
            assert elements(before[gone]) <= moved <= (1 if gone == owners - 1 else 2) * elements(before[gone])


def test_a_bucket_of_consecutive_tensors_has_several_owners():
    """Otherwise one replica would add up a whole bucket of gradients while the others wait."""
    runs = runs_of((8 * PIECE, 100) * 48, 4)
    for first in range(0, 96, 16):
        of_owners = [elements([run for run in mine if first <= run[0] < first + 16]) for mine in runs]
        assert max(of_owners) <= 0.5 * sum(of_owners), (first, of_owners)


@pytest.mark.parametrize("sizes", [[], [0], [5], [3, 0, 0, 4], [1] * 7, [100, 1, 1, 1], [0, 0, 9]], ids=str)
@pytest.mark.parametrize("parts", [1, 2, 3, 8])
def test_consecutive_shares_are_everything_in_order(sizes, parts):
    indices = list(range(len(sizes)))
    assert [i for part in range(parts) for i in indices[consecutive_tensor_share(sizes, part, parts)]] == indices
