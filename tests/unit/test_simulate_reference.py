"""Makespans, bubbles and peaks that were published, or follow from formulas, exactly."""

import pytest

from raypar.plan import Microbatches, MicrobatchRouting, ParallelPlan, StageConnections
from raypar.schedule import registry
from raypar.schedule.simulate import SimulationCosts, Timeline, simulate_schedule


def simulated(
    name, stages, microbatches, *, chunks=None, replicas=None, forward_ms=None, backward_ms=None, warmup=None
) -> Timeline:
    chunks = registry.resolve_chunks_per_worker(name, chunks)
    plan = ParallelPlan.of(replicas or [1] * stages, chunks=chunks, placement=registry.placement_of_schedule(name))
    routing = MicrobatchRouting(plan, Microbatches(microbatches, blocks=microbatches))
    forward, backward = forward_ms or [1] * stages, backward_ms or [2] * stages
    at = plan.grid_of_stage
    costs = SimulationCosts(
        *(tuple(ms[p] / chunks for p in at) for ms in (forward, [b / 2 for b in backward], [b / 2 for b in backward]))
    )
    return simulate_schedule(
        registry.build_schedule(name, routing, warmup=warmup), routing, StageConnections.chain(len(at)), costs
    )


@pytest.mark.parametrize(
    "name, chunks, stages, microbatches, makespan_ms, peaks",
    [
        ("naive", None, 4, 8, 96, None),
        ("gpipe", None, 4, 8, 33, [8, 8, 8, 8]),
        ("afab", None, 4, 8, 33, [8, 8, 8, 8]),
        ("1f1b", None, 4, 8, 33, [4, 3, 2, 1]),
        ("interleaved", 2, 4, 8, 28.5, [5.5, 4.5, 3.5, 2.5]),
        ("interleaved", 4, 4, 8, 26.25, None),
        ("zb-h1", None, 4, 8, 27, None),
        ("zb-v", None, 4, 8, 25.5, [4, 4, 4, 4]),
        ("gpipe", None, 8, 32, 117, [32] * 8),
        ("1f1b", None, 8, 32, 117, [8, 7, 6, 5, 4, 3, 2, 1]),
        ("interleaved", 2, 8, 32, 106.5, None),
        ("interleaved", 4, 8, 32, 101.25, None),
        ("zb-v", None, 8, 32, 99.5, None),
    ],
)
def test_makespan_and_peak_activations_are_the_published_ones(name, chunks, stages, microbatches, makespan_ms, peaks):
    timeline = simulated(name, stages, microbatches, chunks=chunks)
    assert timeline.makespan_ms == makespan_ms
    assert timeline.busy_ms == (3 * microbatches,) * stages
    if peaks is not None:
        assert list(timeline.peak_activations) == peaks


@pytest.mark.parametrize(
    "name, microbatches, busy_ms, all_ms", [("naive", 1, 12, 48), ("afab", 4, 48, 84), ("afab", 8, 96, 132)]
)
def test_utilization_on_four_stages_is_that_of_the_pipeline_article(name, microbatches, busy_ms, all_ms):
    """25 %, 57 % and 72 %."""
    timeline = simulated(name, 4, microbatches)
    assert (sum(timeline.busy_ms), 4 * timeline.makespan_ms) == (busy_ms, all_ms)
    assert timeline.utilization == busy_ms / all_ms


@pytest.mark.parametrize("stages", [1, 2, 3, 4, 8])
@pytest.mark.parametrize("microbatches", [1, 2, 5, 8, 32])
@pytest.mark.parametrize("name", ["gpipe", "1f1b"])
def test_the_bubble_is_that_of_the_closed_form(name, stages, microbatches):
    timeline = simulated(name, stages, microbatches)
    assert timeline.makespan_ms == 3 * (microbatches + stages - 1)
    assert timeline.bubble_of_ideal == pytest.approx((stages - 1) / microbatches, rel=1e-12)
    assert timeline.bubble_of_total == pytest.approx((stages - 1) / (microbatches + stages - 1), rel=1e-12)
    in_flight = [microbatches if name == "gpipe" else min(stages - s, microbatches) for s in range(stages)]
    assert list(timeline.peak_activations) == in_flight


@pytest.mark.parametrize("stages, chunks, microbatches", [(2, 2, 4), (4, 2, 8), (4, 3, 8), (4, 4, 16), (8, 2, 32)])
def test_interleaving_divides_the_bubble_by_the_number_of_chunks(stages, chunks, microbatches):
    timeline = simulated("interleaved", stages, microbatches, chunks=chunks)
    assert timeline.bubble_of_ideal == pytest.approx((stages - 1) / (chunks * microbatches), rel=1e-12)


@pytest.mark.parametrize("stages, microbatches", [(2, 4), (3, 6), (4, 8), (4, 16), (6, 12), (8, 32)])
def test_zb_h1_has_the_bubble_and_memory_of_its_paper(stages, microbatches):
    """(p-1)(F + I - W) per worker, and the memory of 1F1B (Qi et al. 2023, arXiv:2401.10241, table 2), at F = I = W = 1."""
    timeline = simulated("zb-h1", stages, microbatches)
    assert timeline.makespan_ms == 3 * microbatches + (stages - 1)
    assert max(timeline.peak_activations) == stages


@pytest.mark.parametrize(
    "replicas, warmup, microbatches, makespan_ms",
    [
        ([1, 1, 1, 1], None, 24, 222),
        ([1, 1, 3, 1], [8, 7, 2, 1], 12, 51),
        ([1, 1, 3, 1], [8, 7, 2, 1], 24, 87),
        ([1, 1, 3, 1], [8, 7, 2, 1], 48, 159),
        ([1, 1, 3, 1], [6, 5, 2, 1], 24, 144),
        ([1, 1, 3, 1], [8, 7, 3, 1], 24, 237),
    ],
)
def test_a_slow_stage_with_three_replicas(replicas, warmup, microbatches, makespan_ms):
    timeline = simulated(
        "1f1b", 4, microbatches, replicas=replicas, forward_ms=[1, 1, 3, 1], backward_ms=[2, 2, 6, 2], warmup=warmup
    )
    assert timeline.makespan_ms == makespan_ms
