"""Lowering: what is added to orders, where, and for whom."""

import re
from dataclasses import replace
from itertools import product

import pytest

from raypar.errors import ScheduleError
from raypar.plan import Microbatches, MicrobatchRouting, ModelOutline, ParallelPlan, StageConnections, StageEdge, TiedParameter
from raypar.schedule import registry
from raypar.schedule.instructions import ExchangeTies, FreeActivations, Recv, ReduceGradients, Send
from raypar.schedule.lower import lower_schedule, lower_validation_pass
from raypar.schedule.program_assignment import assign_programs_to_ranks
from raypar.schedule.schedule_csv import parse_schedule_csv
from raypar.schedule.simulate import SimulationCosts, simulate_schedule
from raypar.schedule.validate import validate_schedule


def case(name="1f1b", replicas=(1, 1), microbatches=2, shards=None, edges=(), ties=(), buffers=()):
    plan = ParallelPlan.of(
        list(replicas), shards, chunks=registry.resolve_chunks_per_worker(name), placement=registry.placement_of_schedule(name)
    )
    crossing = StageConnections.chain(len(plan.stages))
    routing = MicrobatchRouting(plan, Microbatches(microbatches))
    return routing, replace(crossing, edges=(*crossing.edges, *edges), ties=tuple(ties), exchanges_buffers=tuple(buffers))


def text(programs):
    return [" ".join(map(str, program)) for program in programs]


def lowered(name="1f1b", **shape):
    routing, crossing = case(name, **shape)
    programs = lower_schedule(registry.build_schedule(name, routing), routing, crossing)
    validate_schedule(programs, routing, crossing)
    return programs


def test_activations_go_on_gradients_go_back_and_the_receiver_posts_at_once():
    assert text(lowered()) == [
        "0F0 0SEND_F0>1@1 0F1 0SEND_F1>1@1 0RECV_B0<1@1 0B0 0X0 0RECV_B1<1@1 0B1 0X1 0G V O",
        "1RECV_F0<0@0 1RECV_F1<0@0 1F0 1B0 1SEND_B0>0@0 1X0 1F1 1B1 1SEND_B1>0@0 1X1 1G V O",
    ]


def test_with_split_backwards_gradients_leave_after_i_and_activations_are_freed_after_w():
    assert text(lowered("zb-h1", microbatches=1)) == [
        "0F0 0SEND_F0>1@1 0RECV_B0<1@1 0I0 0W0 0X0 0G V O",
        "1RECV_F0<0@0 1F0 1I0 1SEND_B0>0@0 1W0 1X0 1G V O",
    ]


def test_an_order_in_which_an_instruction_is_missing_is_told_so():
    plan = ParallelPlan.of([1], layers=1)
    order = parse_schedule_csv("0F0,0B0,0W0\n")
    with pytest.raises(ScheduleError, match="0B0 1 times, 0I0 0 times, 0W0 1 times"):
        assign_programs_to_ranks(order, plan, StageConnections.chain(1), Microbatches(1))


def test_stages_on_one_worker_send_each_other_nothing():
    assert text(lowered("zb-v", replicas=[1], microbatches=1)) == ["0F0 1F0 1I0 1W0 1X0 1G 0I0 0W0 0X0 0G V O"]


def test_a_skip_goes_straight_to_its_consumer_and_no_gradient_returns_where_none_exists():
    programs = lowered(replicas=[1, 1, 1], microbatches=1, edges=[StageEdge(0, 2, ("mask",), differentiable=False)])
    assert text(programs) == [
        "0F0 0SEND_F0>1@1 0SEND_F0>2@2 0RECV_B0<1@1 0B0 0X0 0G V O",
        "1RECV_F0<0@0 1F0 1SEND_F0>2@2 1RECV_B0<2@2 1B0 1SEND_B0>0@0 1X0 1G V O",
        "2RECV_F0<0@0 2RECV_F0<1@1 2F0 2B0 2SEND_B0>1@1 2X0 2G V O",
    ]


def test_tied_parameters_are_exchanged_between_the_reductions_and_the_vote():
    for program in lowered(ties=[TiedParameter("embedding.weight", (0, 1))]):
        assert isinstance(program[-3], ExchangeTies)
        assert max(n for n, i in enumerate(program) if isinstance(i, ReduceGradients)) < len(program) - 3


def test_written_buffers_are_exchanged_after_ties_and_before_the_vote_and_only_where_a_stage_has_replicas():
    for program in lowered(replicas=[1, 2], buffers=[1], ties=[TiedParameter("embedding.weight", (0, 1))]):
        assert text([program])[0].endswith("T S V O")
    outline = ModelOutline(tuple((str(i), (f"v{i}",), (f"v{i + 1}",)) for i in range(4)), writes_buffers=frozenset({0, 3}))
    for replicas, stages in (((1, 1), ()), ((2, 1), (0,)), ((2, 2), (0, 1))):
        assert outline.crossing(ParallelPlan.of(replicas, layers=4)).exchanges_buffers == stages
    assert outline.crossing(ParallelPlan.of((2, 2), layers=4, cuts=(3,))).exchanges_buffers == (0, 1)
    assert replace(outline, writes_buffers=frozenset({1})).crossing(ParallelPlan.of((2, 2), layers=4)).exchanges_buffers == (0,)


def test_a_replica_without_microbatches_takes_part_in_reduction_and_vote():
    assert text(lowered(replicas=[1, 3], microbatches=2))[1:] == [
        "1G V O",
        "1RECV_F0<0@0 1F0 1B0 1SEND_B0>0@0 1X0 1G V O",
        "1RECV_F1<0@0 1F1 1B1 1SEND_B1>0@0 1X1 1G V O",
    ]


@pytest.mark.parametrize("name", ["gpipe", "interleaved", "zb-v"])
def test_replicas_reduce_their_chunks_in_one_order_whatever_they_have_to_do(name):
    for replicas, microbatches in product(([3, 3], [1, 2, 3], [3, 1]), (1, 2, 5, 7)):
        plan = ParallelPlan.of(replicas, chunks=2, placement=registry.placement_of_schedule(name))
        routing, crossing = MicrobatchRouting(plan, Microbatches(microbatches)), StageConnections.chain(len(plan.stages))
        turns = {}
        for (role,), program in zip(
            plan.roles, lower_schedule(registry.build_schedule(name, routing), routing, crossing), strict=True
        ):
            mine = [i for i in program if isinstance(i, ReduceGradients)]
            assert turns.setdefault(role.grid, mine) == mine


@pytest.mark.parametrize("shards", [[2, 2], [1, 2], [2, 1], [4, 2], [2, 3]])
def test_each_shard_is_served_once_by_a_shard_of_the_neighbour(shards):
    routing, crossing = case(shards=shards, microbatches=1)
    programs = lower_schedule(registry.build_schedule("1f1b", routing), routing, crossing)
    validate_schedule(programs, routing, crossing)
    roles = [role for (role,) in routing.plan.roles]
    for rank, program in enumerate(programs):
        received = [i for i in program if isinstance(i, Recv)]
        assert [roles[i.peer].shard for i in received] == [roles[rank].shard % shards[1 - roles[rank].grid]]


@pytest.mark.parametrize("name", registry.NAMES)
def test_lists_depend_on_nothing_but_their_arguments(name):
    assert lowered(name, replicas=[2, 2, 2], microbatches=7) == lowered(name, replicas=[2, 2, 2], microbatches=7)


def test_a_validation_pass_has_forwards_and_frees_only():
    routing, crossing = case("interleaved", replicas=[1, 2], microbatches=3, ties=[TiedParameter("w", (0, 3))])
    programs = lower_validation_pass(routing, crossing)
    validate_schedule(programs, routing, crossing, training=False)
    assert {type(i) for p in programs for i in p} == {type(programs[0][0]), Send, Recv, FreeActivations}


def test_a_validation_pass_of_several_chunks_keeps_every_worker_busy():
    routing, crossing = case("interleaved", replicas=[1] * 4, microbatches=16)
    programs = lower_validation_pass(routing, crossing)
    timeline = simulate_schedule(programs, routing, crossing, SimulationCosts.uniform(8, 1, 2))
    assert timeline.makespan_ms == 2 * 16 + 3


def test_orders_that_cannot_run_are_refused_with_what_is_missing():
    routing, crossing = case()
    orders = parse_schedule_csv("0F0,0B0,0F1,0B1\n1F1,1F0,1B0,1B1\n")
    wanted = "2 of 2 workers cannot finish: worker 0 (stage 0, replica 0) stands at 0B0, which needs 1B0"
    with pytest.raises(ScheduleError, match=re.escape(wanted)):
        lower_schedule(orders, routing, crossing)
