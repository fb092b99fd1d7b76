"""Who is wrong, when workers that should hold the same do not."""

from raypar.elastic.replica_digests import find_differing_workers


def test_equal_digests_accuse_nobody():
    assert find_differing_workers({0: (1, 7), 1: (1, 7), 2: (2, 8), 3: (2, 8)}) == (set(), set())


def test_the_one_that_differs_from_a_majority_is_wrong():
    assert find_differing_workers({0: (1, 7), 1: (1, 6), 2: (1, 7), 3: (2, 1)}) == ({1}, set())


def test_of_two_that_differ_nobody_knows_which_is_right():
    assert find_differing_workers({0: (1, 7), 1: (1, 6), 2: (2, 8), 3: (2, 8)}) == (set(), {0, 1})
    assert find_differing_workers({0: (1, 1), 1: (1, 1), 2: (1, 2), 3: (1, 2)}) == (set(), {0, 1, 2, 3})


def test_who_has_not_reported_is_not_compared():
    assert find_differing_workers({0: (1, 7)}) == (set(), set())
    assert find_differing_workers({}) == (set(), set())
