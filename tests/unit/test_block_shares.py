"""Shares of blocks for replicas that are not equally fast: the slowest one's time is the least possible, and little changes."""

import random
from itertools import combinations, pairwise

import pytest

from raypar.elastic.block_shares import choose_shares, even_shares, slowest_replica_s


@pytest.mark.parametrize(
    "seconds, blocks, shares",
    [
        ((1, 1, 2), 12, (5, 5, 2)),
        ((2, 1, 1), 12, (2, 5, 5)),
        ((1, 2, 1), 12, (5, 2, 5)),
        ((1, 1), 16, (8, 8)),
        ((3, 1), 16, (4, 12)),
        ((1, 10, 1), 12, (4, 1, 7)),
        ((1, 1, 2), 3, (1, 1, 1)),
        ((1, 1, 1), 16, (5, 5, 6)),
        ((1, 1.01, 2.03), 12, (5, 5, 2)),
    ],
)
def test_a_replica_gets_blocks_by_its_speed(seconds, blocks, shares):
    assert choose_shares(seconds, blocks, even_shares(len(seconds), blocks)) == shares


def every_shares(replicas, blocks):
    for bounds in combinations(range(1, blocks), replicas - 1):
        yield tuple(b - a for a, b in pairwise((0, *bounds, blocks)))


def test_no_other_shares_have_a_shorter_step_and_the_best_are_kept():
    chance = random.Random(4)
    for _ in range(400):
        replicas, blocks = chance.randint(1, 4), chance.randint(4, 9)
        seconds = [chance.choice((1.0, 1.0, 1.3, 2.0, 3.7)) for _ in range(replicas)]
        work = [2] * blocks
        now = even_shares(replicas, blocks) if chance.random() < 0.5 else chance.choice(list(every_shares(replicas, blocks)))
        found = choose_shares(seconds, blocks, now)
        least = min(slowest_replica_s(seconds, work, shares) for shares in every_shares(replicas, blocks))
        assert len(found) == replicas and min(found) >= 1 and sum(found) == blocks
        assert slowest_replica_s(seconds, work, found) == pytest.approx(least), (seconds, now, found)
        if slowest_replica_s(seconds, work, now) <= least:
            assert found == now, (seconds, now)


def test_a_thousand_replicas_take_no_time():
    seconds = [1.0] * 1023 + [2.0]
    assert sum(choose_shares(seconds, 4096, even_shares(1024, 4096))) == 4096
