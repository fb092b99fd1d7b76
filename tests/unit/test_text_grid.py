"""Schedules and timelines as text."""

from raypar.draw.text_grid import format_milliseconds, order_grid, round_tick_step, text_grid
from raypar.plan import Microbatches, MicrobatchRouting, ParallelPlan, StageConnections
from raypar.schedule import registry
from raypar.schedule.simulate import SimulationCosts, simulate_schedule
from raypar.schedule.step_timeline import Timeline


def timeline_of(name, stages, microbatches, replicas=None, forward_ms=1.0, backward_ms=2.0):
    chunks = registry.resolve_chunks_per_worker(name)
    plan = ParallelPlan.of(replicas or [1] * stages, chunks=chunks, placement=registry.placement_of_schedule(name))
    routing = MicrobatchRouting(plan, Microbatches(microbatches, blocks=microbatches))
    count = stages * chunks
    costs = SimulationCosts.uniform(count, forward_ms / chunks, backward_ms / chunks)
    return simulate_schedule(registry.build_schedule(name, routing), routing, StageConnections.chain(count), costs)


def lines(text):
    return [line.strip() for line in text.splitlines()]


def test_1f1b_on_three_stages_and_four_microbatches_in_order():
    routing = MicrobatchRouting(ParallelPlan.mesh(pp=3), Microbatches(4, blocks=4))
    assert order_grid(registry.build_schedule("1f1b", routing)) == (
        "F0 F1 F2 B0 F3 B1 B2 B3\n"
        "F0 F1 B0 F2 B1 F3 B2 B3\n"
        "F0 B0 F1 B1 F2 B2 F3 B3"
    )  # fmt: skip


def test_chunks_are_told_apart_by_their_stage_in_order():
    routing = MicrobatchRouting(ParallelPlan.mesh(pp=1, chunks=2), Microbatches(1, blocks=1))
    assert order_grid(registry.build_schedule("interleaved", routing)) == "0F0 1F0 1B0 0B0"


def test_the_grid_is_to_scale_with_idle_units_and_the_bubble_of_each_row():
    assert text_grid(timeline_of("1f1b", 2, 3)) == (
        "                                                bubble\n"
        "worker 0  F0 F1 .  .  B0--- F2 B1--- .  B2---      25%\n"
        "worker 1  .  F0 B0--- F1 B1--- F2 B2--- .  .       25%\n"
        "          0              5              10 ms"
    )


def test_a_narrow_terminal_gets_letters_only():
    assert text_grid(timeline_of("1f1b", 2, 3), width=36) == (
        "                        bubble\n"
        "worker 0  FF..B FB .B      25%\n"
        "worker 1  .FB FB FB ..     25%\n"
        "          0         10 ms"
    )


def test_the_second_chunk_is_in_lower_case():
    grid = text_grid(timeline_of("interleaved", 2, 2))
    assert "lower case: second chunk" in grid
    assert "F0 F1 f0 f1" in grid
    assert "worker 1 stage 1,3" in grid


def test_workers_of_a_replicated_stage_are_named_by_stage():
    rows = lines(text_grid(timeline_of("1f1b", 2, 4, replicas=[1, 2])))
    assert [row.split("  ")[0] for row in rows[1:4]] == ["worker 0 stage 0", "worker 1 stage 1", "worker 2 stage 1"]


def test_measured_times_without_a_common_unit_are_drawn_at_about_the_right_place():
    measured = Timeline.from_spans([[("0F0", 0.0, 1.013), ("0B0", 4.02, 6.1)], [("1F0", 1.04, 2.0), ("1B0", 2.01, 3.98)]])
    assert text_grid(measured) == (
        "                               bubble\n"
        "worker 0  F0 .  .  .  .B0---      49%\n"
        "worker 1  .  F0 B0--- .  .  .     52%\n"
        "          0               5 ms"
    )


def test_axis_steps_are_round_numbers():
    assert [round_tick_step(extent, 10) for extent in (33, 7, 0.07, 1000, 99.5)] == [5, 1, 0.01, 100, 10]
    assert round_tick_step(0, 4) == 1


def test_milliseconds_have_no_needless_digits():
    assert [format_milliseconds(t) for t in (33, 101.25, 0.1234, 1234.5678, 0)] == [
        "33 ms",
        "101.25 ms",
        "0.123 ms",
        "1,234.57 ms",
        "0 ms",
    ]
