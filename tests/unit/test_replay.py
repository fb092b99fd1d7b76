"""Which steps come out otherwise when they are executed again with other shards."""

from raypar.elastic.run_state import ShardCountHistory
from raypar.plan import ParallelPlan

ONE, TWO, UNEVEN = (1, 1), (2, 2), (1, 2)


def test_the_shards_of_layers_are_what_counts_not_who_holds_them():
    plans = [ParallelPlan.mesh(tp=2, layers=4), ParallelPlan.mesh(pp=2, dp=3, tp=2, layers=4)]
    assert [plan.shards_by_layer for plan in plans] == [(2, 2, 2, 2)] * 2
    assert ParallelPlan.of([1, 2], [1, 2], layers=4, cuts=[3]).shards_by_layer == (1, 1, 1, 2)


def test_with_the_same_shards_every_step_comes_out_as_it_was_seen():
    reruns = ShardCountHistory(0, TWO)
    assert not reruns.begin(3, TWO, 9) and not reruns.begin(0, TWO, 12) and not reruns.begin(12, TWO, 12)


def test_with_others_those_after_the_roll_back_may_differ_and_none_where_nothing_is_executed_again():
    reruns = ShardCountHistory(0, TWO)
    assert reruns.begin(6, ONE, 9) == range(6, 9)
    assert not reruns.begin(12, TWO, 12)
    assert not reruns.begin(14, TWO, 20)


def test_a_step_that_differs_makes_all_later_ones_differ():
    """0 to 9 with two, 10 to 19 with one, then with two again."""
    reruns = ShardCountHistory(0, TWO)
    reruns.begin(10, ONE, 10)
    reruns.begin(20, TWO, 20)
    assert not ShardCountHistory(0, TWO).begin(22, TWO, 25)
    assert reruns.begin(5, TWO, 25) == range(10, 25)
    assert not reruns.begin(21, TWO, 25), "they have been executed again"


def test_what_a_driver_before_this_one_has_seen_may_be_of_other_shards():
    assert ShardCountHistory(0, None).begin(4, TWO, 7) == range(4, 7)
    assert ShardCountHistory(0, UNEVEN).begin(4, TWO, 7) == range(4, 7)
