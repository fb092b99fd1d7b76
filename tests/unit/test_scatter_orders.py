"""Gradients that are scattered: who runs which microbatch, how owners add, with how many open sums, and which schedules run."""

from itertools import product

import pytest
from helpers.parity import layouts

from raypar.errors import ConfigError, ScheduleError
from raypar.job import PlanConfig
from raypar.plan import Microbatches, MicrobatchRouting, ParallelPlan, StageConnections
from raypar.plan.addition_tree import fold_tree
from raypar.plan.gradient_pool import GradientPool
from raypar.plan.gradient_scatter import most_open_sums, replicas_by_share, rounds_of, stack_steps
from raypar.plan.model_outline import ModelOutline
from raypar.schedule import registry
from raypar.schedule.instructions import Backward, Forward
from raypar.schedule.program_assignment import assign_programs_to_ranks, check_programs_run
from raypar.schedule.validate import find_schedule_problems


def test_equal_shares_take_turns():
    assert replicas_by_share(7, (1, 1, 1)) == (0, 1, 2, 0, 1, 2, 0)
    assert replicas_by_share(4, (3, 3)) == (0, 1, 0, 1)


def test_microbatches_go_where_the_fewest_for_the_share_were_given():
    assert replicas_by_share(8, (3, 1)) == (0, 0, 0, 1, 0, 0, 0, 1)
    assert replicas_by_share(6, (1, 2)) == (1, 0, 1, 1, 0, 1)
    for shares in product(range(1, 5), repeat=3):
        given = replicas_by_share(sum(shares), shares)
        assert [given.count(r) for r in range(3)] == list(shares)


def test_a_round_has_each_replica_once_at_most():
    assert rounds_of((0, 1, 2, 0, 1, 2, 0)) == (range(3), range(3, 6), range(6, 7))
    assert rounds_of((0, 0, 0, 1, 0)) == (range(1), range(1, 2), range(2, 4), range(4, 5))


def by_one_process(microbatches):
    """The additions of rule 6, as a text."""
    blocks = {}
    for block in range(microbatches.blocks):
        for m in microbatches.microbatches_of_block(block):
            blocks[block] = f"({blocks[block]}+{m})" if block in blocks else str(m)
    sums = {(block, block + 1): text for block, text in blocks.items()}
    return fold_tree(sums, (0, microbatches.blocks), lambda left, right: f"({left}+{right})")


def by_owner(microbatches, rounds):
    """(the same by `stack_steps`, the most sums that are open between rounds)."""
    stack, most, steps = [], 0, stack_steps(microbatches)
    for of_round in rounds:
        for m in of_round:
            if steps[m].opens:
                stack.append(str(m))
            else:
                stack[-1] = f"({stack[-1]}+{m})"
            for _ in range(steps[m].merges):
                right = stack.pop()
                stack[-1] = f"({stack[-1]}+{right})"
        most = max(most, len(stack))
    (total,) = stack
    return total, most


SHARES = [(1,) * n for n in range(1, 6)] + [(3, 1), (1, 2), (2, 3), (1, 5, 2)]


@pytest.mark.parametrize("count", range(1, 18))
def test_owners_make_the_additions_of_one_process_with_few_open_sums(count):
    for blocks, shares in product({1, 2, 3, 5, 7, 8, count, count + 3}, SHARES):
        microbatches = Microbatches(count, blocks)
        rounds = rounds_of(replicas_by_share(count, shares))
        total, most = by_owner(microbatches, rounds)
        assert total == by_one_process(microbatches), (count, blocks, shares)
        assert most == most_open_sums(stack_steps(microbatches), rounds) <= blocks.bit_length(), (count, blocks, shares)


@pytest.mark.parametrize("count, replicas, of_all", [(8, 2, 1.0), (64, 8, 0.375)])
def test_an_owner_keeps_fewer_gradients_than_a_replica_with_a_run_of_blocks(count, replicas, of_all):
    microbatches = Microbatches(count, count)
    sums = most_open_sums(stack_steps(microbatches), rounds_of(replicas_by_share(count, (1,) * replicas)))
    assert sums / replicas == of_all
    one_block = Microbatches(count, 1)
    assert most_open_sums(stack_steps(one_block), rounds_of(replicas_by_share(count, (1,) * replicas))) == 1


def plan_of(*replicas, layers=None, **more):
    return ParallelPlan.of(replicas, layers=layers, **more).with_zero(2).with_gradients("scatter")


def test_microbatches_enter_by_index_and_validation_is_routed_as_ever():
    plan = plan_of(2, 3)
    routing = MicrobatchRouting(plan, Microbatches(6))
    assert routing.entry_order == tuple(range(6))
    assert routing.microbatches_of_replica(0, 1) == (1, 3, 5) and routing.microbatches_of_replica(1, 2) == (2, 5)
    assert routing.rounds_of_stage == ((range(2), range(2, 4), range(4, 6)), (range(3), range(3, 6)))
    passes = MicrobatchRouting(plan, Microbatches(6), forward_only=True)
    assert passes.microbatches_of_replica(0, 1) == (4, 3, 5) and not passes.scatters(0)


# -- schedules -------------------------------------------------------------------------------------------------------------


UNEVEN = [(1, 2), (3, 1), (1, 3), (2, 3), (1, 2, 1), (2, 1, 3), (1, 2, 3, 1), (2, 3, 1, 2)]
EVEN = [(n,) * stages for stages in range(1, 5) for n in (2, 3)]


AHEAD = {"naive": 1, "interleaved": 1, "zb-v": 1}
"""Whole microbatches that have to find room under some uneven layouts, by schedule; others need room for none."""


@pytest.mark.parametrize("schedule", registry.NAMES)
def test_every_schedule_runs_with_a_pool_for_one_microbatch_and_most_with_any(schedule):
    for replicas, count in product([*UNEVEN, *EVEN], (1, 2, 3, 5, 8)):
        chunks, placement = registry.resolve_chunks_per_worker(schedule), registry.placement_of_schedule(schedule)
        plan = plan_of(*replicas, chunks=chunks, placement=placement)
        routing = MicrobatchRouting(plan, Microbatches(count))
        crossing = StageConnections.chain(len(plan.stages))
        orders = registry.build_schedule(schedule, routing, connections=crossing)
        found = find_schedule_problems(orders, routing, crossing, ahead=AHEAD.get(schedule, 0))
        assert not found, (replicas, count, found[0])


@pytest.mark.ci
def test_so_they_do_in_all_layouts_of_the_grid():
    for layout in layouts():
        plan = layout.plan.with_zero(2).with_gradients("scatter")
        routing = MicrobatchRouting(plan, Microbatches(layout.microbatches, layout.blocks))
        crossing = StageConnections.chain(len(plan.stages))
        orders = registry.build_schedule(layout.schedule, routing, connections=crossing)
        elements = tuple({f"w{layer}": 8} for layer in range(plan.stages[-1].last))
        pool = GradientPool(1 << 20, ModelOutline((), elements=elements), 4)
        assert assign_programs_to_ranks(orders, plan, crossing, routing.microbatches, pool=pool), str(layout)


def waits_in_a_circle():
    """Orders in which the first stage's replica 0 makes gradients of microbatch 0, for which there is room only when those of
    microbatch 1 are made, which the second stage puts behind the forward that follows on replica 0."""
    routing = MicrobatchRouting(plan_of(2, 1), Microbatches(4))
    f, b = Forward, Backward
    first = (f(0, 0), b(0, 0), f(0, 2), b(0, 2)), (f(0, 1), b(0, 1), f(0, 3), b(0, 3))
    second = (f(1, 0), b(1, 0), f(1, 2), f(1, 1), b(1, 1), b(1, 2), f(1, 3), b(1, 3))
    return (*first, second), routing, StageConnections.chain(2)


def test_waiting_for_room_counts_in_the_deadlock_check():
    orders, routing, crossing = waits_in_a_circle()
    first = find_schedule_problems(orders, routing, crossing)[0]
    assert first.rule == "deadlock-free" and first.rank == 0
    assert (
        first.text
        == "waits for ever at 0B0 for room for its gradients: those of microbatch 1 of stage 0 have not begun to be made"
    )
    assert not find_schedule_problems(orders, routing, crossing, ahead=1)
    folded = MicrobatchRouting(routing.plan.with_gradients("fold"), Microbatches(4, 4))
    assert not [p for p in find_schedule_problems(orders, folded, crossing) if p.rule == "deadlock-free"]


def test_a_pool_that_is_too_small_is_refused_with_the_size_that_works():
    orders, routing, crossing = waits_in_a_circle()
    model = ModelOutline((), elements=({"first": 10 << 18}, {"second": 1 << 18}))
    with pytest.raises(ScheduleError, match=r"1 microbatch find room on their way: in 8 MiB they do not") as error:
        check_programs_run(orders, routing, crossing, GradientPool(8 << 20, model, 4))
    assert "set plan.reduction_buffer_mib: 16" in error.value.cure, "what is sent, and the other replica's half meanwhile"
    check_programs_run(orders, routing, crossing, GradientPool(16 << 20, model, 4))
    with pytest.raises(ScheduleError, match=r"plan\.reduction_buffer_mib"):
        assign_programs_to_ranks(orders, routing.plan, crossing, routing.microbatches)


def test_gradients_of_a_replica_come_by_index():
    plan = plan_of(2)
    routing = MicrobatchRouting(plan, Microbatches(4, 4))
    f, b = Forward, Backward
    orders = (f(0, 0), f(0, 2), b(0, 2), b(0, 0)), (f(0, 1), b(0, 1), f(0, 3), b(0, 3))
    found = find_schedule_problems(orders, routing, StageConnections.chain(1))
    assert [(p.rule, p.text) for p in found] == [("canonical", "0B0 stands after microbatch 2 of the same stage")]


# -- the key ---------------------------------------------------------------------------------------------------------------


def test_the_key_is_part_of_the_plan_and_back():
    config = PlanConfig(stages=2, replicas=2, zero=2, gradients="scatter")
    plan = config.to_plan(4)
    assert plan.gradients == "scatter" and plan.describe().endswith("gradients scattered")
    assert PlanConfig.of_plan(plan, "1f1b").gradients == "scatter"
    assert plan.with_replicas([1, 3]).gradients == "scatter" and plan.with_zero(1).gradients == "scatter"
    assert PlanConfig(stages=2, replicas=[2, 1], zero=[2, 0], gradients="scatter").to_plan(4).gradients == "scatter"


@pytest.mark.parametrize("zero", [0, 1, [2, 1]], ids=str)
def test_any_level_and_shards_may_scatter(zero):
    plan = PlanConfig(stages=2, replicas=2, shards=2, zero=zero, gradients="scatter").to_plan(4)
    assert plan.gradients == "scatter" and plan.zero_levels == ((zero, zero) if isinstance(zero, int) else tuple(zero))


def test_other_words_are_refused():
    with pytest.raises(ConfigError, match="fold"):
        PlanConfig(replicas=2, zero=2, gradients="reduce")
