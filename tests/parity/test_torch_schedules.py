"""torch.distributed.pipelining's own action lists, imported as text: the right ones are accepted, the wrong ones refused."""

import pytest
from torch.distributed.pipelining import schedules as torch_schedules

from raypar.errors import ScheduleError
from raypar.plan import Microbatches, MicrobatchRouting, ParallelPlan, StageConnections
from raypar.schedule.instructions import Forward
from raypar.schedule.lower import lower_schedule
from raypar.schedule.schedule_csv import schedule_from_torch_actions
from raypar.schedule.validate import find_schedule_problems, validate_schedule


def imported(name, pp, microbatches, chunks=1):
    """Torch's lists, one per rank, without building stages or process groups."""
    made = object.__new__(getattr(torch_schedules, name))
    made._num_stages = made.num_stages = pp * chunks
    made._n_microbatches = microbatches
    made.pp_group_size = pp
    made.n_local_stages = chunks
    made.number_of_rounds = max(1, microbatches // pp)
    made.microbatches_per_round = microbatches // made.number_of_rounds
    made._stages = [None] * chunks
    if chunks == 1:
        rows = made._get_pipeline_order()
    else:
        rows = {rank: made._calculate_single_rank_operations(rank) for rank in range(pp)}
    return [rows[rank] for rank in range(pp)]


def judged(name, pp, microbatches, chunks=1, placement="loop"):
    schedule = schedule_from_torch_actions(imported(name, pp, microbatches, chunks))
    plan = ParallelPlan.mesh(pp=pp, chunks=chunks, placement=placement)
    routing, crossing = MicrobatchRouting(plan, Microbatches(microbatches, 1)), StageConnections.chain(pp * chunks)
    return schedule, find_schedule_problems(schedule, routing, crossing), routing, crossing


@pytest.mark.parametrize(
    "name, pp, microbatches, chunks, placement",
    [
        ("ScheduleGPipe", 4, 8, 1, "loop"),
        ("ScheduleInterleaved1F1B", 4, 8, 2, "loop"),
        ("ScheduleInterleavedZeroBubble", 4, 8, 2, "loop"),
        ("ScheduleZBVZeroBubble", 4, 8, 2, "v"),
        ("ScheduleZBVZeroBubble", 2, 6, 2, "v"),
        ("ScheduleZBVZeroBubble", 4, 3, 2, "v"),
        ("ScheduleDualPipeV", 3, 6, 2, "v"),
        ("ScheduleDualPipeV", 4, 8, 2, "v"),
    ],
)
def test_right_lists_are_accepted_and_lower_to_valid_programs(name, pp, microbatches, chunks, placement):
    schedule, found, routing, crossing = judged(name, pp, microbatches, chunks, placement)
    assert found == []
    validate_schedule(lower_schedule(schedule, routing, crossing), routing, crossing)


def test_the_1f1b_list_lacks_the_first_forward_of_the_last_rank_and_is_refused():
    schedule, found, routing, crossing = judged("Schedule1F1B", 4, 8)
    assert Forward(3, 0) not in schedule[3]
    assert any(p.rule == "complete" and p.rank == 3 and "3F0 stands 0 times" in p.text for p in found)
    with pytest.raises(ScheduleError, match="complete"):
        validate_schedule(schedule, routing, crossing)


def test_looped_bfs_runs_its_backwards_in_reverse_and_is_refused_as_not_canonical():
    _, found, _, _ = judged("ScheduleLoopedBFS", 2, 4, 2)
    assert {p.rule for p in found} == {"canonical"}
