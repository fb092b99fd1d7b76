"""The built-in orders: drawn, then held to their closed forms wherever those hold, uneven replicas and odd counts included."""

import subprocess
import sys
import time
from itertools import product

import pytest

from raypar.plan import Microbatches, MicrobatchRouting, ParallelPlan, StageConnections
from raypar.schedule import registry
from raypar.schedule.one_f_one_b import default_warmups
from raypar.schedule.simulate import SimulationCosts, simulate_schedule


def built(name, replicas, microbatches, chunks=None, warmup=None):
    chunks = registry.resolve_chunks_per_worker(name, chunks)
    plan = ParallelPlan.of(list(replicas), chunks=chunks, placement=registry.placement_of_schedule(name))
    routing = MicrobatchRouting(plan, Microbatches(microbatches, blocks=microbatches))
    return registry.build_schedule(name, routing, warmup=warmup), routing


def grid(name, replicas, microbatches, chunks=None, warmup=None):
    """A row a worker; the letter tells the chunk: F and B of the first, f and b of the second."""
    schedule, routing = built(name, replicas, microbatches, chunks, warmup)
    rows = []
    for rank, order in enumerate(schedule):
        first = routing.plan.stages_of(rank)[0]
        words = [str(i).removeprefix(str(i.stage)) for i in order]
        rows.append(" ".join(w if i.stage == first else w.lower() for i, w in zip(order, words, strict=True)))
    return "\n".join(rows)


def timeline(name, replicas, microbatches, forward=1, inputs=1, weights=1, chunks=None):
    """`forward` and the others: of one microbatch through one worker, one value or one per position."""
    schedule, routing = built(name, replicas, microbatches, chunks)
    at = routing.plan.grid_of_stage
    share = len(replicas) / len(at)
    costs = SimulationCosts(
        *(tuple((ms if isinstance(ms, int) else ms[position]) * share for position in at) for ms in (forward, inputs, weights))
    )
    return simulate_schedule(schedule, routing, StageConnections.chain(len(at)), costs)


def test_naive_ends_a_microbatch_before_the_next():
    assert grid("naive", [1, 1], 3) == "F0 B0 F1 B1 F2 B2\nF0 B0 F1 B1 F2 B2"


def test_interleaved_takes_groups_of_p_through_one_chunk_after_the_other():
    assert grid("interleaved", [1, 1], 4) == (
        "F0 F1 f0 f1 F2 b0 F3 b1 f2 B0 f3 B1 b2 b3 B2 B3\nF0 F1 f0 b0 f1 b1 F2 B0 F3 B1 f2 b2 f3 b3 B2 B3"
    )


def test_interleaved_makes_groups_larger_where_p_does_not_divide_m():
    assert grid("interleaved", [1, 1], 3) == ("F0 F1 F2 f0 f1 f2 b0 b1 b2 B0 B1 B2\nF0 F1 F2 f0 b0 f1 b1 f2 b2 B0 B1 B2")


def test_zb_v_turns_at_the_last_worker_and_comes_back():
    assert grid("zb-v", [1, 1], 3) == (
        "F0 F1 F2 f0 i0 w0 f1 i1 w1 I0 W0 f2 i2 w2 I1 W1 I2 W2\nF0 f0 F1 f1 i0 w0 F2 I0 W0 f2 i1 w1 I1 i2 I2 W1 w2 W2"
    )


def test_1f1b_with_a_stage_that_has_three_replicas():
    plan = ParallelPlan.of([1, 1, 3, 1])
    assert default_warmups(plan) == (8, 7, 2, 1)
    assert grid("1f1b", [1, 2], 4, warmup=[2, 2]) == "F0 F2 B0 F1 B2 F3 B1 B3\nF0 F1 B0 B1\nF2 F3 B2 B3"


@pytest.mark.parametrize("pp, microbatches", list(product(range(1, 7), range(1, 15))))
def test_interleaving_divides_the_time_to_fill_by_v_whatever_m_is(pp, microbatches):
    """With less than p microbatches every round through the p workers but the last waits for p - m of them."""
    for chunks in (1, 2, 3, 4):
        waits = max(0, pp - microbatches) * (chunks - 1)
        wanted = 3 * microbatches + 3 * (pp - 1 + waits) / chunks
        assert timeline("interleaved", [1] * pp, microbatches, chunks=chunks).makespan_ms == pytest.approx(wanted)


@pytest.mark.parametrize(
    "forward, inputs, weights", [(1, 1, 1), (2, 2, 1), (3, 4, 2), (1, 2, 1), (3, 2, 1), (1, 3, 3), (2, 3, 4), (2, 1, 2)]
)
def test_the_bubble_of_zb_h1_is_that_of_its_paper(forward, inputs, weights):
    """(p-1)(F + I - W) (arXiv:2401.10241, table 2) while W <= min(F, I). A longer W cannot hide more: the last worker
    waits (p-1) F for its first microbatch, and the first one, with p activations, (p-1) I for the first gradient."""
    for pp, rounds in product((1, 2, 3, 4, 6), (1, 2, 5)):
        microbatches = rounds * pp + 1
        found = timeline("zb-h1", [1] * pp, microbatches, forward, inputs, weights)
        bubble = (pp - 1) * max(forward + inputs - weights, forward, inputs)
        assert found.makespan_ms == microbatches * (forward + inputs + weights) + bubble
        assert set(found.peak_activations) == {min(pp, microbatches)}


@pytest.mark.parametrize("pp", range(1, 9))
def test_zb_v_only_waits_for_the_first_microbatch_to_come_down(pp):
    for microbatches in (2 * pp - 1, 2 * pp + 3, 20):
        found = timeline("zb-v", [1] * pp, microbatches)
        assert found.makespan_ms == 3 * microbatches + (pp - 1) / 2
        assert max(found.peak_activations) <= pp


@pytest.mark.parametrize(
    "replicas", [[1, 1, 3, 1], [3, 1, 1, 1], [1, 2, 3], [3, 2, 1], [2, 1, 2, 1], [2, 4, 4, 2], [1, 3, 2, 3, 1]]
)
def test_zero_bubble_schedules_keep_their_order_of_merit_when_slow_stages_have_more_replicas(replicas):
    """Stages are as slow as they have replicas, so that none need wait for another: 3 m is the least."""
    lasts = {n: timeline(n, replicas, 24, replicas, replicas, replicas).makespan_ms for n in ("1f1b", "zb-h1", "zb-v")}
    assert 72 < lasts["zb-v"] < lasts["zb-h1"] < lasts["1f1b"]
    assert lasts["zb-v"] < 1.1 * 72


@pytest.mark.parametrize("name", registry.NAMES)
def test_replicas_of_a_uniform_plan_run_the_schedule_of_one_pipeline(name):
    (alone, _), (both, routing) = built(name, [1, 1, 1], 5), built(name, [2, 2, 2], 10)
    for rank, (role,) in enumerate(routing.plan.roles):
        mine = routing.microbatches_of_replica(0, role.replica)
        assert both[rank] == tuple(type(i)(i.stage, mine[i.microbatch]) for i in alone[role.grid])


@pytest.mark.parametrize("name", registry.NAMES)
def test_all_shards_of_a_seat_have_one_order(name):
    chunks, placement = registry.resolve_chunks_per_worker(name), registry.placement_of_schedule(name)
    plan = ParallelPlan.of([1, 2], [2, 3], chunks=chunks, placement=placement)
    schedule = registry.build_schedule(name, MicrobatchRouting(plan, Microbatches(6)))
    orders = {}
    for (role,), order in zip(plan.roles, schedule, strict=True):
        assert orders.setdefault((role.grid, role.replica), order) == order


def test_a_thousand_small_schedules_take_a_second():
    start = time.process_time()
    for _ in range(5):
        for name, microbatches in product(registry.NAMES, range(1, 9)):
            for pp in range(1, 5):
                built(name, [1] * pp, microbatches)
    assert time.process_time() - start < 1


LARGE = """
import resource, sys, time
from raypar.plan import Microbatches, MicrobatchRouting, ParallelPlan, StageConnections
from raypar.schedule import registry
from raypar.schedule.lower import lower_schedule
name = sys.argv[1]
chunks, placement = registry.resolve_chunks_per_worker(name), registry.placement_of_schedule(name)
plan = ParallelPlan.of([16] * 64, chunks=chunks, placement=placement)
routing = MicrobatchRouting(plan, Microbatches(2048, blocks=2048))
start = time.process_time()
programs = lower_schedule(registry.build_schedule(name, routing), routing, StageConnections.chain(len(plan.stages)))
assert len(programs) == 1024
print(time.process_time() - start, resource.getrusage(resource.RUSAGE_SELF).ru_maxrss)
"""


@pytest.mark.full
@pytest.mark.parametrize("name", ["1f1b", "interleaved", "zb-h1", "zb-v"])
def test_a_thousand_workers_are_scheduled_and_lowered_in_eight_seconds_and_a_gigabyte(name):
    done = subprocess.run([sys.executable, "-c", LARGE, name], capture_output=True, text=True, timeout=120, check=True)
    seconds, kilobytes = map(float, done.stdout.split())
    assert seconds < 8
    assert kilobytes < 1024 * 1024
