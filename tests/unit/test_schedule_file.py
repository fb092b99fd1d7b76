"""Schedules as CSV: exact round trip, comments, and errors that say where."""

import pytest

from raypar.errors import ScheduleError
from raypar.plan import Microbatches, MicrobatchRouting, ParallelPlan
from raypar.schedule import registry
from raypar.schedule.instructions import Backward, BackwardInput, BackwardWeight, Forward
from raypar.schedule.schedule_csv import format_schedule_csv, parse_schedule_csv, schedule_from_torch_actions


@pytest.mark.parametrize("name", registry.NAMES)
@pytest.mark.parametrize("replicas, microbatches", [([1, 1, 1], 5), ([1, 3, 2], 4), ([2, 2, 4], 2)])
def test_what_is_written_is_read_back_exactly_idle_workers_included(name, replicas, microbatches):
    plan = ParallelPlan.of(
        replicas, chunks=registry.resolve_chunks_per_worker(name), placement=registry.placement_of_schedule(name)
    )
    schedule = registry.build_schedule(name, MicrobatchRouting(plan, Microbatches(microbatches)))
    assert parse_schedule_csv(format_schedule_csv(schedule)) == schedule
    assert () in schedule or microbatches >= max(replicas)


def test_a_file_may_have_comments_blank_lines_idle_cells_and_idle_workers():
    text = "# two workers and a spare\n\n0F0, 0F1,,0B0,0B1  # the first\n,1F0,1I0,1W0\n-\n"
    assert parse_schedule_csv(text) == (
        (Forward(0, 0), Forward(0, 1), Backward(0, 0), Backward(0, 1)),
        (Forward(1, 0), BackwardInput(1, 0), BackwardWeight(1, 0)),
        (),
    )


@pytest.mark.parametrize(
    "text, where",
    [
        ("0F0,0B0\n1F0,1Q0\n", "row 2, column 2: '1Q0'"),
        ("# note\n\n0F0;0B0\n", "row 3, column 1: '0F0;0B0'"),
        ("0F0,F1\n", "row 1, column 2: 'F1'"),
        ("0f0\n", "row 1, column 1: '0f0'"),
        ("0F0,(0F1;0X0)OVERLAP_F_B\n", "row 1, column 2: '0X0'"),
    ],
)
def test_a_bad_cell_is_named_by_row_and_column_with_its_text_and_a_cure(text, where):
    with pytest.raises(ScheduleError) as error:
        parse_schedule_csv(text)
    assert error.value.what == f"{where} is not an instruction"
    assert "for example 1F0" in error.value.cure


@pytest.mark.parametrize("text", ["", "# nothing\n", "-\n", ",,\n"])
def test_a_file_without_instructions_is_refused(text):
    with pytest.raises(ScheduleError, match="no instruction"):
        parse_schedule_csv(text)


def test_torch_actions_come_as_text_rows_or_lists_and_lose_their_communication():
    wanted = ((Forward(0, 0), Backward(0, 0)), (Forward(1, 0), Backward(1, 0)))
    text = "0F0,0SEND_F0,0RECV_B0,,0B0,0REDUCE_GRAD\n1RECV_F0,1F0,,1B0,1SEND_B0,1RESHARD\n"
    assert schedule_from_torch_actions(text) == wanted
    assert schedule_from_torch_actions(text.splitlines()) == wanted
    assert schedule_from_torch_actions([["0F0", None, "0B0"], [None, "1F0", "1B0", "1REDUCE_GRAD"]]) == wanted


def test_actions_that_torch_overlaps_come_one_after_the_other():
    assert schedule_from_torch_actions(["0F0,(0F1;0B0)OVERLAP_F_B,0B1"]) == (
        (Forward(0, 0), Forward(0, 1), Backward(0, 0), Backward(0, 1)),
    )
