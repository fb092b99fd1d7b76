"""Who sends whom which elements of a tied parameter's gradient: each worker gets what it has of the parameter, once."""

from collections import Counter
from dataclasses import replace
from itertools import product

import pytest

from raypar.plan import ModelOutline, ParallelPlan
from raypar.plan.ownership import Ownership
from raypar.plan.pieces import Piece, merge_pieces
from raypar.plan.shard_ranges import TensorCut, count_indices, even_ranges_by_shard, intersect_ranges
from raypar.plan.stage_connections import TiedParameter
from raypar.plan.tied_gradient_transfers import tied_gradient_pairs, tied_gradient_transfers

ELEMENTS = ({"table": 720_000, "first": 90_000}, {"second": 300_000}, {"table": 720_000, "last": 500_000})
CUTS = {
    "by rows": {count: TensorCut(0, 12, even_ranges_by_shard(12, count)) for count in (2, 3, 4)},
    "by columns": {count: TensorCut(1, 12, even_ranges_by_shard(12, count)) for count in (2, 3, 4)},
    "common rows": {2: TensorCut(0, 3, (((0, 2),), ((1, 3),))), 3: TensorCut(0, 3, even_ranges_by_shard(3, 3)), 4: None},
    "whole": {2: None, 3: None, 4: None},
}


def outline(cut: str) -> ModelOutline:
    of_table = CUTS[cut]
    return ModelOutline((), elements=ELEMENTS, shardings={n: {"table": of} if of else {} for n, of in of_table.items()})


LEVELS = [(0, 0), (1, 1), (2, 2), (0, 2), (2, 0)]
GRIDS = [((2, 3), (1, 1)), ((3, 1), (2, 2)), ((2, 3), (2, 1)), ((4, 3), (1, 3)), ((1, 3), (3, 2)), ((3, 3), (4, 2))]


def divided(plan: ParallelPlan, levels: tuple[int, int], holders: int) -> ParallelPlan:
    stages = (replace(each, zero=level, zero_holders=holders) for each, level in zip(plan.stages, levels, strict=True))
    return replace(plan, stages=tuple(stages))


def parts_of(plan, keeps):
    def held(stage, replica, number):
        return keeps.gradient_runs(stage, number, replica, "table")

    return held, list(tied_gradient_transfers(plan, TiedParameter("table", (0, 1)), held))


@pytest.mark.parametrize("holders", [1, 2])
@pytest.mark.parametrize("cut", CUTS)
@pytest.mark.parametrize("grid, levels", list(product(GRIDS, LEVELS)), ids=str)
def test_each_worker_gets_each_element_that_it_has_once_from_one_that_has_it(grid, levels, cut, holders):
    plan = divided(ParallelPlan.of(*grid, layers=3, cuts=[2]), levels, holders)
    held, found = parts_of(plan, Ownership(plan, outline(cut)))
    got: Counter[tuple[int, int, int]] = Counter()
    for each in found:
        has = [run.elements for run in held(each.source, plan.role_in(each.sender, each.source).replica, each.giver)]
        assert sum(count_indices(intersect_ranges(spans, each.elements)) for spans in has) == count_indices(each.elements) > 0
        got[each.source, each.taker, each.receiver] += count_indices(each.elements)
    for source, stage in ((0, 1), (1, 0)):
        for replica, row in enumerate(plan.stages[stage].workers):
            for number, rank in enumerate(row):
                runs = held(stage, replica, number)
                sent = [each.elements for each in found if (each.source, each.taker, each.receiver) == (source, number, rank)]
                assert merge_pieces(Piece("table", a, b) for spans in sent for a, b in spans) == merge_pieces(
                    Piece("table", a, b) for run in runs for a, b in run.elements
                )
                assert got[source, number, rank] == sum(count_indices(run.elements) for run in runs), "nothing twice"


@pytest.mark.parametrize("cut", CUTS)
@pytest.mark.parametrize("grid, levels", list(product(GRIDS, LEVELS)), ids=str)
def test_workers_that_send_have_communicators(grid, levels, cut):
    plan = divided(ParallelPlan.of(*grid, layers=3, cuts=[2]), levels, 1)
    _, found = parts_of(plan, Ownership(plan, outline(cut)))
    cuts = {**CUTS[cut], 1: None}
    pairs = set(tied_gradient_pairs(plan, TiedParameter("table", (0, 1)), cuts))
    used = {(each.sender, each.receiver) for each in found}
    assert used <= pairs
    if not any(levels):
        assert used == pairs


@pytest.mark.parametrize("holders", [1, 2])
@pytest.mark.parametrize("shards", [(1, 1), (2, 2)])
def test_where_both_stages_have_as_many_replicas_each_exchanges_with_one(shards, holders):
    """Whatever else they have."""
    plan = ParallelPlan.of((4, 4), shards, layers=3, cuts=[2]).with_zero(2, holders)
    _, found = parts_of(plan, Ownership(plan, outline("by rows")))
    used = {(each.sender, each.receiver) for each in found}
    assert used == set(tied_gradient_pairs(plan, TiedParameter("table", (0, 1)), {**CUTS["by rows"], 1: None}))
    assert len(used) == plan.world and all(abs(a - b) == plan.world // 2 for a, b in used)


def test_workers_of_both_stages_exchange_nothing_where_they_have_the_same_runs():
    plan = ParallelPlan.mesh(dp=2, pp=2, chunks=2, placement="v", layers=4).with_zero(2)
    elements = ({"table": 720_000}, {"a": 400_000}, {"b": 7}, {"table": 720_000})
    keeps = Ownership(plan, ModelOutline((), elements=elements))
    tie = TiedParameter("table", (0, 3))
    assert plan.grid_of_stage[0] == plan.grid_of_stage[3]
    assert not list(tied_gradient_transfers(plan, tie, lambda stage, r, n: keeps.gradient_runs(stage, n, r, "table")))
    assert not list(tied_gradient_pairs(plan, tie, {1: None}))


def test_of_an_empty_parameter_it_is_told_whether_there_is_a_gradient():
    plan = ParallelPlan.of((1, 2), layers=2)
    keeps = Ownership(plan, ModelOutline((), elements=({"none": 0}, {"none": 0})))
    found = list(
        tied_gradient_transfers(plan, TiedParameter("none", (0, 1)), lambda s, r, n: keeps.gradient_runs(s, n, r, "none"))
    )
    assert [(each.sender, each.receiver, each.elements) for each in found] == [(0, 1, ()), (0, 2, ()), (1, 0, ())]
