"""Who keeps whose copy: on another node wherever there is one, and evenly."""

import itertools
from collections import Counter

import pytest

from raypar.elastic.mirror_schedule_and_buddies import assign_buddies
from raypar.plan import ModelOutline, ParallelPlan
from raypar.plan.ownership import Ownership
from raypar.plan.shard_ranges import TensorCut, even_ranges_by_shard


def test_two_nodes_of_two_keep_for_each_other():
    assert assign_buddies(["a", "a", "b", "b"]) == {0: 2, 1: 3, 2: 0, 3: 1}


def test_one_alone_has_nobody_and_one_node_keeps_for_itself_in_a_ring():
    assert assign_buddies(["a"]) == {}
    assert assign_buddies(["a"] * 3) == {0: 1, 1: 2, 2: 0}


@pytest.mark.parametrize("nodes", ["abca", "abab", "aabb", "abcd", "aaaa", "abcb"])
def test_another_stage_keeps_the_copy_where_a_replica_has_that_state_anyway(nodes):
    keepers = assign_buddies(nodes, [0, 0, 1, 1])
    assert sorted(Counter(keepers.values()).values()) == sorted(Counter(assign_buddies(nodes).values()).values())
    assert all(rank // 2 != keeper // 2 for rank, keeper in keepers.items()), keepers
    if len(set(nodes)) > 1:
        assert all(nodes[rank] != nodes[keeper] for rank, keeper in keepers.items())


@pytest.mark.parametrize("world", range(2, 8))
def test_the_keeper_is_elsewhere_and_nobody_keeps_more_than_its_share(world):
    for nodes in itertools.product("abcd", repeat=world):
        keepers = assign_buddies(nodes)
        assert set(keepers) == set(range(world))
        assert all(rank != keeper for rank, keeper in keepers.items())
        if len(set(nodes)) > 1:
            assert all(nodes[rank] != nodes[keeper] for rank, keeper in keepers.items()), nodes
        crowd = max(Counter(nodes).values())
        fair = 1 if 2 * crowd <= world or crowd == world else -(-crowd // (world - crowd))
        assert max(Counter(keepers.values()).values()) == fair, nodes


@pytest.mark.parametrize("nodes", ["aabb", "abab", "aaaa"])
def test_of_two_replicas_on_shards_another_shard_keeps_the_copy(nodes):
    outline = ModelOutline((), elements=({"a": 8},), shardings={2: {"a": TensorCut(0, 4, even_ranges_by_shard(4, 2))}})
    copies = Ownership(ParallelPlan.mesh(dp=2, tp=2), outline).first_rank_with_same_state
    keepers = assign_buddies(nodes, copies)
    assert all(copies[rank] != copies[keeper] for rank, keeper in keepers.items()), keepers
