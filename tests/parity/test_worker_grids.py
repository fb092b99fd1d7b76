"""Plans whose stages have any grids of workers, so that a worker is a replica of some layers and a shard of others.

The bits are those of the same shards in one process.
"""

from __future__ import annotations

import random
from collections import Counter
from dataclasses import replace
from itertools import pairwise

import pytest
from helpers.drawn_cells import check_drawn, draw_cell
from helpers.random_grids import ANY_PLAN, plan_of_grids, random_plan
from helpers.shard_grid import Cell, check_plan, run

from raypar.errors import PlanError, ScheduleError
from raypar.plan import Microbatches, MicrobatchRouting, ParallelPlan, StageConnections
from raypar.schedule import registry
from raypar.schedule.instructions import Recv, Send
from raypar.schedule.program_assignment import assign_programs_to_ranks
from raypar.schedule.simulate import SimulationCosts, simulate_schedule

SHARED = plan_of_grids(4, (0, ((0,), (1,))), (2, ((0, 1),)))
"""Two workers that are replicas of the first layers and shards of the last: the shape of an AlexNet hybrid (Krizhevsky 2014,
arXiv:1404.5997, section 3)."""


@pytest.mark.parametrize("schedule", ANY_PLAN)
def test_the_same_workers_are_replicas_of_some_layers_and_shards_of_others(schedule: str):
    cell = Cell("shallow gpt", schedule, (), (), 4, dtype="float32")
    check_plan(cell, SHARED)
    check_plan(
        replace(cell, microbatches=3, sequence=True), plan_of_grids(4, (0, ((0, 1),)), (1, ((0,), (1,))), (3, ((0, 1),)))
    )


@pytest.mark.parametrize("schedule", ANY_PLAN)
def test_gradients_of_shards_go_to_replicas_on_the_same_workers_without_a_message(schedule: str):
    """Every shard has the whole gradient, so a replica takes that of its own worker; of the values each replica sends the other
    shards theirs."""
    routing, chain = MicrobatchRouting(SHARED, Microbatches(4, 4)), StageConnections.chain(2, 1000)
    orders = registry.build_schedule(schedule, routing)
    parts = assign_programs_to_ranks(orders, SHARED, chain, routing.microbatches, routing.microbatches)
    sent = [i for part in parts for i in (*part.program, *part.validation_program) if isinstance(i, Send)]
    assert Counter(i.kind for i in sent) == {"activation": 2 * 4}
    slow = replace(SimulationCosts.uniform(2), latency_ms=100)
    times = [simulate_schedule(lists, routing, chain, slow).makespan_ms for lists in (orders, [p.program for p in parts])]
    if schedule == "gpipe":
        assert max(times) < 2 * 100, "the values' latency, once"


@pytest.mark.parametrize("seed", range(20))
def test_every_shard_gets_every_bundle_once_and_from_its_own_worker_if_that_has_it(seed: int):
    dice = random.Random(seed)
    plan = random_plan(dice, 6)
    routing, chain = MicrobatchRouting(plan, Microbatches(6, 6)), StageConnections.chain(len(plan.stages))
    parts = assign_programs_to_ranks(registry.build_schedule("list", routing), plan, chain, routing.microbatches)
    received = ((rank, i) for rank, part in enumerate(parts) for i in part.program if isinstance(i, Recv))
    got = Counter((i.kind, i.stage, i.microbatch, rank) for rank, i in received)
    wanted: Counter[tuple[str, int, int, int]] = Counter()
    for kind, maker, user in [(k, *pair[::way]) for k, way in (("activation", 1), ("gradient", -1)) for pair in pairs(plan)]:
        for m in range(6):
            makers = set(routing.ranks(maker, m))
            wanted += Counter((kind, user, m, rank) for rank in routing.ranks(user, m) if rank not in makers)
    assert got == wanted


def pairs(plan: ParallelPlan) -> list[tuple[int, int]]:
    """Neighbouring stages."""
    return list(pairwise(range(len(plan.stages))))


@pytest.mark.parametrize("seed", range(12))
def test_any_grids_of_workers_have_the_bits_of_the_same_shards(seed: int):
    check_random(seed)


@pytest.mark.full
@pytest.mark.parametrize("seeds", [range(at, at + 20) for at in range(12, 512, 20)], ids=str)
def test_five_hundred_plans_with_any_grids(seeds: range):
    for seed in seeds:
        check_random(seed)


def check_random(seed: int) -> None:
    dice = random.Random(seed)
    cell = draw_cell(dice)
    check_drawn(dice, cell, random_plan(dice, len(cell.graph.layers)), seed)


def test_a_schedule_of_pipelines_refuses_a_worker_with_several_roles():
    routing = MicrobatchRouting(SHARED, Microbatches(4))
    for name in set(registry.NAMES) - set(ANY_PLAN):
        with pytest.raises(ScheduleError, match="one that takes any plan: naive, gpipe, list"):
            registry.build_schedule(name, routing)
        assert not registry.schedule_fits_plan(name, SHARED)
    assert all(registry.schedule_fits_plan(name, SHARED) for name in ANY_PLAN)


def test_a_tied_parameter_of_which_a_worker_would_have_two_parts_is_refused():
    cell = Cell("llama", "list", (), (), 2)
    layers = len(cell.graph.layers)
    plan = plan_of_grids(layers, (0, ((0, 1),)), (1, ((0,), (2,))), (layers - 1, ((1, 2),)))
    with pytest.raises(PlanError, match=r"share the parameter .*, and worker 1 would have it as shards 0 and 1"):
        run(cell, plan)


def test_orders_in_which_shards_meet_at_different_places_are_refused():
    routing, chain = MicrobatchRouting(SHARED, Microbatches(2, 2)), StageConnections.chain(2)
    schedule = registry.build_schedule("gpipe", routing)
    turned = list(schedule[1])
    at = [n for n, i in enumerate(turned) if str(i) in ("1F0", "1F1")]
    turned[at[0]], turned[at[1]] = turned[at[1]], turned[at[0]]
    with pytest.raises(ScheduleError, match=r"together: worker 1 .*1F1 is instruction 0 here of those computed with worker 0"):
        assign_programs_to_ranks((schedule[0], tuple(turned)), SHARED, chain, routing.microbatches)


def test_list_scheduling_lets_shards_begin_together_before_one_of_them_goes_on_alone():
    """Else worker 0 begins 0B0, which takes long, and worker 1 waits for it with 1F1, although both could compute that."""
    orders = registry.build_schedule("list", MicrobatchRouting(SHARED, Microbatches(2, 2)))
    assert [" ".join(map(str, order)) for order in orders] == ["0F0 1F0 1B0 1F1 1B1 0B0", "0F1 1F0 1B0 1F1 1B1 0B1"]


def test_the_simulator_lets_shards_wait_for_each_other():
    """Worker 1 has twice the microbatches of the first stage, so the shards of the second begin when it has done them."""
    plan = plan_of_grids(2, (0, ((0,), (1,))), (1, ((0, 1),)))
    routing = MicrobatchRouting(plan, Microbatches(3, 3))
    schedule = registry.build_schedule("gpipe", routing)
    costs = SimulationCosts.uniform(2)
    for lists in (
        schedule,
        [part.program for part in assign_programs_to_ranks(schedule, plan, StageConnections.chain(2), routing.microbatches)],
    ):
        step = simulate_schedule(lists, routing, StageConnections.chain(2), costs)
        starts = [[span.start_ms for span in row if str(span.instruction).startswith("1")] for row in step.spans]
        assert starts[0] == starts[1] and starts[0][0] == 2
        assert step.makespan_ms == 2 + 3 * 3 + 2 * 2
