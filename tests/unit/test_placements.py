"""Placements of layers on workers, and what is left of them with fewer workers."""

from __future__ import annotations

import itertools
import random

import pytest

from raypar.errors import PlanError
from raypar.plan import ParallelPlan, StagePlan
from raypar.plan.placements import LayerPlacement, check_placements, plan_for_fewer_workers, plan_of_placements

NAMES = ["stem", "conv1", "conv2", "pool", "fc1", "fc2", "head"]
CONVOLUTIONS, DENSE = LayerPlacement(("conv*",), ((0,), (1,))), LayerPlacement(("fc*",), ((0, 1),))
HYBRID = plan_of_placements((CONVOLUTIONS, DENSE), NAMES)


def test_a_layer_that_no_placement_names_joins_the_one_before_it():
    assert HYBRID.stages == (StagePlan(0, 4, ((0,), (1,))), StagePlan(4, 7, ((0, 1),)))
    assert plan_of_placements((DENSE, CONVOLUTIONS), NAMES) == HYBRID, "stages come in layer order"


@pytest.mark.parametrize(
    ("placements", "text"),
    [
        (
            (CONVOLUTIONS, LayerPlacement(("*2",), ((0,),))),
            r"layer conv2 is in plan.placements\[0\] and in plan.placements\[1\]",
        ),
        (
            (CONVOLUTIONS, LayerPlacement(("fcs*",), ((0,),))),
            r"placements\[1\] has 'fcs\*', which matches none of the 7 layers",
        ),
        (
            (LayerPlacement(("conv*", "head"), ((0,),)), DENSE),
            r"placements\[0\] \(conv\*, head\) are not consecutive: fc1 lies between",
        ),
    ],
)
def test_patterns_that_give_no_runs_of_layers_are_refused(placements, text):
    with pytest.raises(PlanError, match=text):
        plan_of_placements(placements, NAMES)


def test_the_nearest_names_are_told():
    with pytest.raises(PlanError) as refused:
        plan_of_placements((LayerPlacement(("fcl",), ((0,),)),), NAMES)
    assert (
        refused.value.cure
        == "did you mean fc2 or fc1? layers are stem, conv1, conv2, pool, ..., head; a pattern may have * and ?"
    )


@pytest.mark.parametrize(
    ("workers", "share", "text"),
    [
        (((0, 0),), (), r"plan.placements\[1\] has worker 0 twice"),
        (((0,), (1, 2)), (), r"the replicas of plan.placements\[1\] have 1, 2 shards"),
        (((0, 3),), (), "4 workers, but no stage is computed by worker 2"),
        (((1, 0),), (), "do not ascend"),
        (((0,), (1,)), (4, 0), r"plan.placements\[1\] gives its 2 replicas the shares \[4, 0\]"),
        (((0,), (1,)), (4,), r"plan.placements\[1\] gives its 2 replicas the shares \[4\]"),
        ((), (), r"plan.placements\[1\] has no workers"),
    ],
)
def test_grids_that_no_model_makes_right_are_refused_before_there_is_one(workers, share, text):
    with pytest.raises(PlanError, match=text):
        check_placements((CONVOLUTIONS, LayerPlacement(("fc*",), workers, share)))


def test_with_fewer_workers_replicas_go_first_then_shards_then_stages():
    wide = plan_of_placements(
        (LayerPlacement(("conv*",), ((0,), (1,), (2,), (3,))), LayerPlacement(("fc*",), ((0, 1),))), NAMES
    )
    assert [s.workers for s in plan_for_fewer_workers(wide, 3).stages] == [((0,), (1,), (2,)), ((0, 1),)]
    assert plan_for_fewer_workers(wide, 2) == HYBRID
    assert [s.workers for s in plan_for_fewer_workers(wide, 1).stages] == [((0,),), ((0,),)]
    four = plan_of_placements((LayerPlacement(("conv*",), ((0,),)), LayerPlacement(("fc*",), ((0, 1, 2, 3),))), NAMES)
    assert [s.workers for s in plan_for_fewer_workers(four, 3).stages] == [((0,),), ((0, 1),)], (
        "three shards do not divide four"
    )
    apart = ParallelPlan.mesh(pp=3, layers=7)
    assert [(s.last, s.workers) for s in plan_for_fewer_workers(apart, 2).stages] == [(2, ((0,),)), (7, ((1,),))]


def test_every_number_of_workers_has_a_whole_plan():
    for seed in range(300):
        rng = random.Random(seed)
        grids = []
        for _ in range(rng.randint(1, 4)):
            shards, replicas = rng.choice((1, 2, 3, 4)), rng.randint(1, 3)
            ranks = iter(sorted(rng.sample(range(12), shards * replicas)))
            grids.append([[next(ranks) for _ in range(shards)] for _ in range(replicas)])
        number = {rank: index for index, rank in enumerate(sorted({r for grid in grids for row in grid for r in row}))}
        plan = ParallelPlan(
            tuple(StagePlan(i, i + 1, tuple(tuple(number[r] for r in row) for row in grid)) for i, grid in enumerate(grids))
        )
        found = [plan_for_fewer_workers(plan, workers) for workers in range(plan.world, 0, -1)]
        assert found[0] == plan and all(one.world <= plan.world - n for n, one in enumerate(found))
        for more, fewer in itertools.pairwise(found):
            assert fewer.stages[-1].last == plan.stages[-1].last
            assert all(
                a % b == 0
                for a, b in zip(more.shards_by_layer, fewer.shards_by_layer, strict=True)
                if len(more.stages) == len(fewer.stages)
            )
