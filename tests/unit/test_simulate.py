"""The simulator against hand-made orders and against a slow, obvious one."""

import random
from collections import Counter
from dataclasses import replace
from fractions import Fraction

import pytest

from raypar.errors import ScheduleError
from raypar.plan import GradientRelay, Microbatches, MicrobatchRouting, ParallelPlan, StageConnections, StageEdge, StagePlan
from raypar.plan.bundle_parts import LEAST_BYTES_IN_PARTS
from raypar.schedule.instructions import Backward, BackwardInput, BackwardWeight, ExchangeVotes, Forward, ReduceGradients, Send
from raypar.schedule.lower import lower_schedule
from raypar.schedule.registry import NAMES, build_schedule, placement_of_schedule, resolve_chunks_per_worker
from raypar.schedule.simulate import SimulationCosts, simulate_schedule
from raypar.schedule.step_timeline import Timeline, TimelineSpan, parse_instruction
from raypar.schedule.validate import validate_schedule


def orders(*lines):
    return tuple(tuple(parse_instruction(word) for word in line.split()) for line in lines)


def routed(replicas, microbatches, shards=None):
    return MicrobatchRouting(ParallelPlan.of(replicas, shards), Microbatches(microbatches, blocks=microbatches))


def times(timeline, rank):
    return [(str(i), start, end) for i, start, end in timeline.spans[rank]]


def longest_paths(schedule, routing, crossing, costs):
    """End of every instruction by relaxation until nothing changes; links in order of sending. Slow and obvious."""
    ms = {Forward: costs.forward_ms, BackwardInput: costs.input_ms, BackwardWeight: costs.weight_ms}
    ms[Backward] = [a + b for a, b in zip(costs.input_ms, costs.weight_ms, strict=True)]
    end: dict[tuple[int, int], float] = {}
    while True:
        before = dict(end)
        arrival = {}
        for rank, order in enumerate(schedule):
            link: dict[int, float] = {}
            for index, i in enumerate(order):
                made = end.get((rank, index), 0.0)
                forward = isinstance(i, Forward)
                sent = () if isinstance(i, BackwardWeight) else crossing.relays_from(i.stage)
                for edge in crossing.out_of(i.stage) if forward else sent:
                    other = edge.dst
                    to = routing.rank(other, i.microbatch)
                    there = made
                    if to != rank:
                        link[to] = max(made, link.get(to, 0.0)) + edge.nbytes / costs.bandwidth_bytes_per_ms
                        there = link[to] + costs.latency_ms
                    arrival[forward, i.stage, other, i.microbatch] = there
        for rank, order in enumerate(schedule):
            clock = 0.0
            for index, i in enumerate(order):
                if isinstance(i, Forward):
                    keys = [(True, e.src, e.dst, i.microbatch) for e in crossing.into(i.stage)]
                elif isinstance(i, BackwardWeight):
                    keys = []
                else:
                    keys = [(False, r.src, r.dst, i.microbatch) for r in crossing.relays_to(i.stage)]
                clock = max([clock, *(arrival[key] for key in keys)]) + ms[type(i)][i.stage]
                end[rank, index] = clock
        if end == before:
            return end


def test_two_stages_and_two_microbatches_by_hand():
    schedule = orders("0F0 0F1 0B0 0B1", "1F0 1B0 1F1 1B1")
    timeline = simulate_schedule(schedule, routed([1, 1], 2), StageConnections.chain(2), SimulationCosts.uniform(2))
    assert times(timeline, 0) == [("0F0", 0, 1), ("0F1", 1, 2), ("0B0", 4, 6), ("0B1", 7, 9)]
    assert times(timeline, 1) == [("1F0", 1, 2), ("1B0", 2, 4), ("1F1", 4, 5), ("1B1", 5, 7)]
    assert (timeline.makespan_ms, timeline.busy_ms, timeline.peak_activations) == (9, (6, 6), (2, 1))
    assert timeline.names == ("worker 0 (stage 0, replica 0)", "worker 1 (stage 1, replica 0)")


def test_latency_and_bandwidth_delay_messages_and_one_link_carries_them_in_order():
    costs = SimulationCosts((1, 1), (1, 1), (1, 1), latency_ms=10, bandwidth_bytes_per_ms=2)
    timeline = simulate_schedule(
        orders("0F0 0F1 0B0 0B1", "1F0 1F1 1B0 1B1"), routed([1, 1], 2), StageConnections.chain(2, nbytes=8), costs
    )
    # 0F0 ends at 1: 4 ms on the link until 5, there at 15. 0F1 ends at 2 but the link is busy until 5: there at 19.
    assert [start for _, start, _ in timeline.spans[1]] == [15, 19, 20, 22]
    assert [start for _, start, _ in timeline.spans[0]] == [0, 1, 22 + 4 + 10, 26 + 4 + 10]


BRANCHES = StageConnections(
    (*(StageEdge(0, s, ("x",)) for s in range(1, 5)), *(StageEdge(s, 5, (f"y{s}",)) for s in range(1, 5)))
)
"""Stage 0, four branches that read its value, and stage 5, which joins them."""


def test_four_branches_on_four_workers_take_9_ms_where_each_sends_its_gradients_straight_to_the_producer():
    """15 if each waited for the sum of those after it, and 18 on one worker."""
    four = ParallelPlan(tuple(StagePlan(s, s + 1, ((worker,),)) for s, worker in enumerate((0, 0, 1, 2, 3, 0))))
    on_four = orders("0F0 1F0 5F0 5B0 1B0 0B0", "2F0 2B0", "3F0 3B0", "4F0 4B0")
    on_one = orders("0F0 1F0 2F0 3F0 4F0 5F0 5B0 4B0 3B0 2B0 1B0 0B0")
    by_relay = replace(BRANCHES)
    relays = [GradientRelay(s, s - 1) for s in range(1, 5)] + [GradientRelay(5, s) for s in range(1, 5)]
    object.__setattr__(by_relay, "relays", tuple(relays))

    def makespan(schedule, plan, crossing):
        routing = MicrobatchRouting(plan, Microbatches(1))
        validate_schedule(schedule, routing, crossing)
        timeline = simulate_schedule(schedule, routing, crossing, SimulationCosts.uniform(6))
        programs = lower_schedule(schedule, routing, crossing)
        assert simulate_schedule(programs, routing, crossing, SimulationCosts.uniform(6)).makespan_ms == timeline.makespan_ms
        return timeline.makespan_ms

    assert makespan(on_four, four, BRANCHES) == 9
    assert makespan(on_four, four, by_relay) == 15
    assert makespan(on_one, ParallelPlan.mesh(pp=1, chunks=6), BRANCHES) == 18


def test_branches_send_their_gradients_to_the_producer_and_to_nobody_else():
    routing = MicrobatchRouting(ParallelPlan.mesh(pp=6), Microbatches(2))
    programs = lower_schedule(build_schedule("gpipe", routing), routing, BRANCHES)
    back = Counter((i.stage, i.to_stage) for p in programs for i in p if isinstance(i, Send) and i.kind == "gradient")
    assert back == {**{(s, 0): 2 for s in range(1, 5)}, **{(5, s): 2 for s in range(1, 5)}}


def test_weight_gradients_wait_for_nothing_and_hold_the_activation():
    schedule = orders("0F0 0F1 0I0 0I1 0W0 0W1", "1F0 1I0 1F1 1I1 1W0 1W1")
    timeline = simulate_schedule(schedule, routed([1, 1], 2), StageConnections.chain(2), SimulationCosts.uniform(2))
    assert times(timeline, 0)[2:] == [("0I0", 3, 4), ("0I1", 5, 6), ("0W0", 6, 7), ("0W1", 7, 8)]
    assert timeline.peak_activations == (2, 2)


def test_peak_bytes_follow_the_activation_bytes_of_each_stage():
    costs = SimulationCosts((1, 1), (1, 1), (1, 1), activation_bytes=(10, 7))
    timeline = simulate_schedule(
        orders("0F0 0F1 0B0 0B1", "1F0 1B0 1F1 1B1"), routed([1, 1], 2), StageConnections.chain(2), costs
    )
    assert timeline.peak_bytes == (20, 7)


def test_a_skip_goes_straight_to_its_consumer_and_its_gradient_comes_straight_back():
    crossing = StageConnections((StageEdge(0, 1), StageEdge(0, 2), StageEdge(1, 2)))
    costs = SimulationCosts((1, 5, 1), (1, 1, 1), (1, 1, 1))
    timeline = simulate_schedule(orders("0F0 0B0", "1F0 1B0", "2F0 2B0"), routed([1, 1, 1], 1), crossing, costs)
    assert times(timeline, 2) == [("2F0", 6, 7), ("2B0", 7, 9)]
    assert times(timeline, 0)[1] == ("0B0", 11, 13)


def test_values_without_gradient_do_not_hold_back_the_backward_pass():
    crossing = StageConnections((StageEdge(0, 1, differentiable=False),))
    timeline = simulate_schedule(orders("0F0 0B0", "1F0 1B0"), routed([1, 1], 1), crossing, SimulationCosts.uniform(2))
    assert times(timeline, 0) == [("0F0", 0, 1), ("0B0", 1, 3)]


def test_reductions_run_beside_compute_once_all_replicas_are_done():
    routing = routed([2, 1], 2)
    costs = SimulationCosts((1, 1), (1, 1), (1, 1), reduce_ms=(4, 0), step_ms=2)
    timeline = simulate_schedule(orders("0F0 0B0", "0F1 0B1", "1F0 1B0 1F1 1B1"), routing, StageConnections.chain(2), costs)
    assert times(timeline, 2)[-2:] == [("1B1", 5, 7), ("V", 7, 15)]
    assert times(timeline, 0)[-2:] == [("0G", 9, 13), ("V", 13, 15)]
    assert timeline.makespan_ms == 15
    assert timeline.busy_ms == (3, 3, 6)


def test_overhead_is_paid_for_each_compute_instruction_after_its_inputs_came():
    costs = SimulationCosts((1, 1), (1, 1), (1, 1), overhead_ms=0.5)
    timeline = simulate_schedule(orders("0F0 0B0", "1F0 1B0"), routed([1, 1], 1), StageConnections.chain(2), costs)
    assert [start for row in timeline.spans for _, start, _ in row] == [0.5, 6, 2, 3.5]


def test_shards_of_a_seat_move_in_lockstep():
    plan = ParallelPlan.of([1, 1], [2, 2])
    routing = MicrobatchRouting(plan, Microbatches(3, blocks=3))
    schedule = build_schedule("1f1b", routing)
    crossing = StageConnections.chain(2, nbytes=4)
    costs = SimulationCosts((1, 1), (1, 1), (1, 1), latency_ms=0.5, bandwidth_bytes_per_ms=8)
    timeline = simulate_schedule(schedule, routing, crossing, costs)
    alone = simulate_schedule(schedule[::2], routed([1, 1], 3), crossing, costs)
    assert timeline.spans == tuple(row for row in alone.spans for _ in range(2))
    assert simulate_schedule(lower_schedule(schedule, routing, crossing), routing, crossing, costs).spans == timeline.spans


@pytest.mark.parametrize("lowered", [False, True])
@pytest.mark.parametrize(
    ("nodes", "message_ms"),
    [((), 0.5 + 8), ((0, 0, 0, 0), 0.5 + 8), ((0, 1, 2, 3), 0.5 + 8), ((0, 0, 1, 1), 2 * 0.5 + 4)],
    ids=["not known", "one node", "a node for each", "a node for each stage"],
)
def test_between_nodes_each_shard_is_sent_a_part_which_they_gather(nodes, message_ms, lowered):
    routing = MicrobatchRouting(ParallelPlan.of([1, 1], [2, 2]), Microbatches(1, blocks=1))
    crossing = StageConnections.chain(2, nbytes=LEAST_BYTES_IN_PARTS)
    costs = SimulationCosts(
        (1, 1), (1, 1), (1, 1), latency_ms=0.5, bandwidth_bytes_per_ms=LEAST_BYTES_IN_PARTS / 8, nodes=nodes
    )
    schedule = build_schedule("1f1b", routing)
    if lowered:
        schedule = lower_schedule(schedule, routing, crossing)
    assert simulate_schedule(schedule, routing, crossing, costs).makespan_ms == 1 + message_ms + 3 + message_ms + 2
    small = StageConnections.chain(2, nbytes=LEAST_BYTES_IN_PARTS // 2)
    assert simulate_schedule(schedule, routing, small, costs).makespan_ms == 1 + 4.5 + 3 + 4.5 + 2


def test_parts_are_sent_where_workers_have_several_roles_too():
    """Two replicas on nodes of their own, whose values go to two shards of another stage on a third one."""
    plan = ParallelPlan((StagePlan(0, 1, ((0,), (1,))), StagePlan(1, 2, ((2, 3),)), StagePlan(2, 3, ((0, 1),))))
    routing = MicrobatchRouting(plan, Microbatches(2, blocks=2))
    crossing = StageConnections.chain(3, nbytes=[LEAST_BYTES_IN_PARTS, 0])
    costs = SimulationCosts((1,) * 3, (1,) * 3, (1,) * 3, bandwidth_bytes_per_ms=LEAST_BYTES_IN_PARTS / 8)
    schedule = build_schedule("list", routing, connections=crossing)
    steps = [simulate_schedule(schedule, routing, crossing, replace(costs, nodes=nodes)) for nodes in ((), (0, 1, 2, 2))]
    assert [step.spans[2][0].start_ms for step in steps] == [1 + 8, 1 + 4]


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("seed", range(4))
def test_random_costs_give_the_longest_paths(name, seed):
    dice = random.Random(seed)
    chunks = resolve_chunks_per_worker(name)
    replicas = [dice.choice([1, 2, 3]) for _ in range(3)] if chunks == 1 else [2, 2, 2]
    plan = ParallelPlan.of(replicas, chunks=chunks, placement=placement_of_schedule(name))
    routing = MicrobatchRouting(plan, Microbatches(6, blocks=6))
    count = len(plan.stages)
    nbytes = [dice.randrange(50) for _ in range(count - 1)]
    crossing = StageConnections((*StageConnections.chain(count, nbytes).edges, StageEdge(0, 2, nbytes=9)))
    times_ms = [tuple(dice.uniform(0.5, 3) for _ in range(count)) for _ in range(3)]
    costs = SimulationCosts(*times_ms, latency_ms=dice.uniform(0, 1), bandwidth_bytes_per_ms=dice.uniform(10, 100))
    schedule = build_schedule(name, routing)
    timeline = simulate_schedule(schedule, routing, crossing, costs)
    expected = longest_paths(schedule, routing, crossing, costs)
    for rank, row in enumerate(timeline.spans):
        assert [end for _, _, end in row] == pytest.approx([expected[rank, i] for i in range(len(row))], rel=1e-12)


@pytest.mark.parametrize("name", ["gpipe", "1f1b"])
def test_a_program_takes_as_long_as_the_schedule_it_was_lowered_from(name):
    routing = routed([2, 1, 3], 12)
    crossing = StageConnections.chain(3, nbytes=10)
    schedule = build_schedule(name, routing)
    costs = SimulationCosts((1, 2, 3), (2, 1, 2), (1, 1, 2), 0.25, 16, reduce_ms=(1, 0, 2), step_ms=0.5)
    lowered = simulate_schedule(lower_schedule(schedule, routing, crossing), routing, crossing, costs)
    assert lowered == simulate_schedule(schedule, routing, crossing, costs)


def test_fractions_stay_exact():
    third = Fraction(1, 3)
    timeline = simulate_schedule(
        orders("0F0 0B0", "1F0 1B0"),
        routed([1, 1], 1),
        StageConnections.chain(2),
        SimulationCosts((third,) * 2, (third,) * 2, (third,) * 2),
    )
    assert timeline.makespan_ms == 2


def test_workers_that_wait_for_each_other_are_named():
    with pytest.raises(ScheduleError, match=r"2 workers wait .* worker 0 \(stage 0, replica 0\) at 0B0; worker 1 .* at 1F1"):
        simulate_schedule(
            orders("0F0 0B0 0F1 0B1", "1F0 1F1 1B0 1B1"),
            routed([1, 1], 2),
            StageConnections.chain(2),
            SimulationCosts.uniform(2),
        )


def test_a_schedule_for_another_number_of_workers_is_refused():
    with pytest.raises(ScheduleError, match="1 worker, the plan 2"):
        simulate_schedule(orders("0F0 0B0"), routed([1, 1], 1), StageConnections.chain(2), SimulationCosts.uniform(2))


def test_a_replica_without_microbatches_idles():
    routing = routed([2], 1)
    timeline = simulate_schedule(
        build_schedule("1f1b", routing), routing, StageConnections.chain(1), SimulationCosts.uniform(1)
    )
    assert sorted(timeline.busy_ms) == [0, 3]
    assert timeline.bubble_of_total == 0.5


def test_measured_spans_become_a_timeline_that_starts_at_zero():
    timeline = Timeline.from_spans(
        [[("0F0", 105.0, 106.0), ("0B0", 108.0, 110.0), ("V", 110.0, 112.0)], [("1F0", 106.5, 107.5)]]
    )
    assert timeline.spans[1] == (TimelineSpan(Forward(1, 0), 1.5, 2.5),)
    assert timeline.makespan_ms == 7
    assert timeline.busy_ms == (3, 1)
    assert timeline.peak_activations == (1, 1)
    assert timeline.names == ("worker 0", "worker 1")


def test_labels_are_read_back_into_the_instructions_that_print_them():
    some = [Forward(1, 2), Backward(0, 11), BackwardInput(3, 0), BackwardWeight(12, 1), ReduceGradients(2), ExchangeVotes()]
    assert [parse_instruction(str(i)) for i in some] == some
    with pytest.raises(ScheduleError, match="'1Q0' is no instruction"):
        parse_instruction("1Q0")
