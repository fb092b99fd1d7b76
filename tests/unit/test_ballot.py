"""Votes of workers: sums that depend on no order and no tree, and the orders of samples that differ."""

import random
from functools import reduce
from operator import add

import pytest

from raypar.plan.ballot import Ballot, OrderOfSamples
from raypar.plan.exact_sum import ExactSum
from raypar.plan.vote_tree import TreeNeighbours


def ballot_of(rank: int, draw: random.Random, digest: int | None = None) -> Ballot:
    numbers = [[draw.uniform(-1, 1) * 2.0 ** draw.randint(-60, 60) for _ in range(draw.randint(0, 5))] for _ in range(3)]
    defined = draw.choice([0, 1, draw.getrandbits(48), 1 << 48, draw.getrandbits(200)])
    return Ballot(
        1, *map(ExactSum.of, numbers), defined=defined, orders=() if digest is None else (OrderOfSamples(rank, digest),)
    )


@pytest.mark.parametrize("seed", range(20))
def test_a_sum_of_ballots_is_the_same_by_every_tree_and_after_every_way(seed):
    draw = random.Random(seed)
    digests = draw.choice([[None], [2**64 - 1], [5, None], [5, 2**63 + 9, None]])
    ballots = [ballot_of(rank, draw, draw.choice(digests)) for rank in range(draw.randint(1, 30))]
    wanted = reduce(add, ballots, Ballot())
    told = [order for ballot in ballots for order in ballot.orders]
    others = [order for order in told if order.digest != told[0].digest]
    assert wanted.orders == (*told[:1], *others[:1]), "the lowest ranks"
    assert all(wanted.defined & ballot.defined == ballot.defined for ballot in ballots), "whatever any has"
    assert wanted.defined.bit_count() <= sum(ballot.defined.bit_count() for ballot in ballots)
    while len(ballots) > 1:
        first, second = (ballots.pop(draw.randrange(len(ballots))) for _ in range(2))
        ballots.append(Ballot.from_floats((first + second).to_floats()))
    assert ballots == [wanted]


@pytest.mark.parametrize("fanout", [2, 8])
@pytest.mark.parametrize("world", [1, 2, 9, 33, 74, 1024])
def test_every_worker_but_the_first_has_one_above_it_and_none_has_more_than_fanout_below(world, fanout):
    places = [TreeNeighbours.of(rank, world, fanout) for rank in range(world)]
    assert places[0].above is None
    assert sorted(rank for place in places for rank in place.below) == list(range(1, world))
    assert all(places[below].above == rank for rank, place in enumerate(places) for below in place.below)
    assert max(len(place.below) for place in places) <= fanout
    depth, rank = 0, world - 1
    while (above := places[rank].above) is not None:
        depth, rank = depth + 1, above
    assert fanout ** (depth - 1) < world, "as low as it can be"
