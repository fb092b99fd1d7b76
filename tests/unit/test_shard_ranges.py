"""Which indices a shard holds: spans are sets of numbers, cuts of parameters lose nothing and count nothing twice."""

import itertools
import random

import pytest

from raypar.plan.shard_ranges import (
    TensorCut,
    count_indices,
    even_ranges_by_shard,
    intersect_ranges,
    merge_ranges,
    positions_of_indices,
    ranges_within,
    repeat_ranges,
    scale_ranges,
    shift_ranges,
    subtract_ranges,
    view_ranges_as_dims,
)


def indices(spans):
    return [i for start, stop in spans for i in range(start, stop)]


def spans_of(numbers):
    return merge_ranges((n, n + 1) for n in numbers)


def test_seven_over_two_is_three_and_four():
    assert even_ranges_by_shard(7, 2) == (((0, 3),), ((3, 7),))


@pytest.mark.parametrize("total", range(9))
@pytest.mark.parametrize("shards", range(1, 6))
def test_an_even_cut_covers_all_once_in_order_with_sizes_that_differ_by_one(total, shards):
    parts = even_ranges_by_shard(total, shards)
    assert [i for part in parts for i in indices(part)] == list(range(total))
    sizes = [count_indices(part) for part in parts]
    assert max(sizes) - min(sizes) <= 1


def test_spans_are_sets_of_numbers():
    chance = random.Random(5)
    for _ in range(300):
        first = sorted(chance.sample(range(12), chance.randint(0, 12)))
        second = sorted(chance.sample(range(12), chance.randint(0, 12)))
        a, b = spans_of(first), spans_of(second)
        assert indices(a) == first and count_indices(a) == len(first)
        assert set(indices(intersect_ranges(a, b))) == set(first) & set(second)
        assert set(indices(subtract_ranges(a, b))) == set(first) - set(second)
        assert indices(ranges_within(a, 3, 9)) == [i - 3 for i in first if 3 <= i < 9]
        assert indices(shift_ranges(a, 4)) == [i + 4 for i in first]
        assert indices(scale_ranges(a, 3)) == [3 * i + k for i in first for k in range(3)]
        assert indices(repeat_ranges(a, 12, 2)) == first + [i + 12 for i in first]
        assert [first[i] for i in indices(positions_of_indices(a, intersect_ranges(a, b)))] == sorted(set(first) & set(second))
        for spans in (intersect_ranges(a, b), subtract_ranges(a, b), scale_ranges(a, 3), repeat_ranges(a, 12, 2)):
            assert spans == spans_of(indices(spans)), "neighbours are joined"


@pytest.mark.parametrize("sizes", [(4, 3), (3, 4), (2, 3, 2), (12,), (1, 12), (3, 2, 2)])
def test_a_view_is_found_exactly_where_the_indices_are_a_block_of_it(sizes):
    """Against all sets that are blocks, and every set of a small dim that is none."""
    blocks = {}
    for place, size in enumerate(sizes):
        inner = 1
        for n in sizes[place + 1 :]:
            inner *= n
        for chosen in itertools.chain.from_iterable(itertools.combinations(range(size), k) for k in range(1, size + 1)):
            blocks.setdefault(tuple(i for i in range(12) if i // inner % size in chosen), set()).add((place, spans_of(chosen)))
    for k in range(1, 13):
        for chosen in itertools.combinations(range(12), k):
            found = view_ranges_as_dims(spans_of(chosen), sizes)
            assert (found in blocks[chosen]) if chosen in blocks else found is None, (chosen, found)


def test_fused_q_k_and_v_are_cut_by_heads_in_the_order_of_the_view():
    heads = ((2, 4),)  # of 4, of width 5
    fused = merge_ranges(s for part in range(3) for s in shift_ranges(scale_ranges(heads, 5), part * 20))
    assert view_ranges_as_dims(fused, (3, 4, 5)) == (1, heads)
    assert view_ranges_as_dims(fused, (4, 15)) is None  # [heads, q k v]


def test_what_several_shards_hold_has_one_owner():
    cut = TensorCut(0, 4, (((0, 1),), ((0, 2),), ((1, 4),)))
    assert [cut.owned(shard) for shard in range(3)] == [((0, 1),), ((1, 2),), ((2, 4),)]
    assert cut.shared == ((0, 2),)
    assert TensorCut(1, 7, even_ranges_by_shard(7, 2)).shared == ()


def test_a_slice_is_few_runs_of_elements_whichever_dim_is_cut():
    rows, columns = TensorCut(0, 6, even_ranges_by_shard(6, 2)), TensorCut(1, 4, even_ranges_by_shard(4, 2))
    assert rows.element_ranges(rows.indices_by_shard[1], 24) == ((12, 24),)
    assert columns.element_ranges(columns.indices_by_shard[1], 24) == ((12, 24),)
