"""Gathers in programs: where parameters that come and go by microbatch are there, who serves whom, and what is found wrong."""

from collections import Counter
from dataclasses import replace

import pytest

from raypar.errors import ScheduleError
from raypar.plan import Microbatches, MicrobatchRouting, ParallelPlan, StageConnections, StagePlan
from raypar.schedule import registry
from raypar.schedule.gathering import gathers_of_order, insert_gathers, owners, readers, requests
from raypar.schedule.instructions import Compute, Gather, Instruction, Program, Release, ServeParameters, compute_instructions
from raypar.schedule.lower import lower_schedule, lower_validation_pass
from raypar.schedule.schedule_csv import parse_schedule_csv
from raypar.schedule.simulate import SimulationCosts, simulate_schedule
from raypar.schedule.validate import find_schedule_problems, validate_schedule


def with_gathers(text: str, *stages: int) -> str:
    """One worker's order with its gathers."""
    (order,) = parse_schedule_csv(text.replace(" ", ","))
    gathers = gathers_of_order(order, stages)
    shown = []
    for before, i, after in zip(gathers.before, order, gathers.after, strict=True):
        shown += [*map(str, map(Gather, before)), str(i), *map(str, map(Release, after))]
    return " ".join(shown)


def test_a_gather_is_posted_before_the_instruction_ahead_of_its_use_begins():
    assert with_gathers("0F0 1F0 2F0 2B0 1B0 0B0", 0, 1, 2) == ("0A 1A 0F0 0Z 2A 1F0 1Z 2F0 1A 2B0 2Z 0A 1B0 1Z 0B0 0Z")


def test_a_stage_stays_where_it_would_be_gathered_again_before_the_next_instruction_begins():
    assert with_gathers("0F0 0F1 0B0 0B1", 0) == "0A 0F0 0F1 0B0 0B1 0Z"
    assert with_gathers("0F0 1F0 0F1 1F1", 0, 1) == "0A 1A 0F0 1F0 0F1 0Z 1F1 1Z"
    assert with_gathers("0F0 1F0 1F1 0F1", 0, 1) == "0A 1A 0F0 0Z 1F0 0A 1F1 1Z 0F1 0Z"


def test_weight_gradients_need_no_parameters_and_keep_none():
    assert with_gathers("0F0 0I0 0W0 0F1 0I1 0W1", 0) == "0A 0F0 0I0 0W0 0F1 0I1 0Z 0W1"
    assert with_gathers("0F0 0I0 0F1 0I1 0W0 0W1", 0) == "0A 0F0 0I0 0F1 0I1 0Z 0W0 0W1"
    assert with_gathers("0F0 0F1 0F2 0I0 0I1 0W0 0W1 0I2 0W2", 0) == "0A 0F0 0F1 0F2 0I0 0I1 0Z 0W0 0A 0W1 0I2 0Z 0W2"


def test_stages_that_are_whole_anyway_are_not_gathered():
    assert with_gathers("0F0 1F0 2F0 2B0 1B0 0B0", 1) == "1A 0F0 1F0 1Z 2F0 1A 2B0 1B0 1Z 0B0"


def there_at(program: Program) -> list[set[int]]:
    """By compute instruction: the gathered stages that are there while it computes."""
    found, there = [], set[int]()
    for i in program:
        if isinstance(i, Compute):
            found.append(set(there))
        elif type(i) is Gather:
            there.add(i.stage)
        elif type(i) is Release:
            there.remove(i.stage)
    assert not there
    return found


CASES = [
    (schedule, replicas, microbatches)
    for schedule in ("naive", "gpipe", "1f1b", "interleaved", "zb-h1", "zb-v", "list")
    for replicas, microbatches in (((2, 2), 4), ((2, 3), 5), ((3, 2), 3), ((2, 2), 1))
]


def programs_of(schedule: str, replicas: tuple[int, ...], microbatches: int, gather: str, **of_plan) -> tuple:
    """(routing, connections, programs) of a pass of training."""
    chunks = {"interleaved": 3}.get(schedule, registry.resolve_chunks_per_worker(schedule))
    placement = registry.placement_of_schedule(schedule)
    plan = ParallelPlan.of(replicas, chunks=chunks, placement=placement, **of_plan).with_zero(3).with_gather(gather)
    routing, crossing = (
        MicrobatchRouting(plan, Microbatches(microbatches, microbatches)),
        StageConnections.chain(len(plan.stages)),
    )
    orders = registry.build_schedule(schedule, routing, connections=crossing)
    return routing, crossing, lower_schedule(orders, routing, crossing)


@pytest.mark.parametrize("recompute", [False, True], ids=["kept", "recomputed"])
@pytest.mark.parametrize("schedule, replicas, microbatches", CASES)
def test_what_computes_with_parameters_has_them_and_at_most_two_stages_are_there(schedule, replicas, microbatches, recompute):
    chunks = {"interleaved": 3}.get(schedule, registry.resolve_chunks_per_worker(schedule))
    layers = range(2 * chunks) if recompute else ()
    routing, crossing, programs = programs_of(schedule, replicas, microbatches, "microbatch", recompute=layers)
    validate_schedule(programs, routing, crossing)
    for program in programs:
        there = there_at(program)
        for i, stages in zip(compute_instructions(program), there, strict=True):
            assert not i.needs_weights or i.stage in stages
            assert len(stages) <= 2


@pytest.mark.parametrize("gather", ["microbatch", "layer"])
def test_owners_serve_all_that_the_readers_programs_ask_for(gather):
    """Replicas of a stage may have other numbers of microbatches: 5 on 2 and on 3 replicas, and one replica has none."""
    for replicas, microbatches in (((2, 3), 5), ((3, 2), 2)):
        routing, _, programs = programs_of("1f1b", replicas, microbatches, gather, layers=4)
        plan = routing.plan
        for rank, program in enumerate(programs):
            served = [i for i in program if type(i) is ServeParameters]
            assert list(program[: len(served)]) == served, "in front of all that waits"
            uses = Counter(
                (i.stage, reader) for reader, of in enumerate(programs) for i in compute_instructions(of) if i.needs_weights
            )
            for stage in plan.stages_of(rank):
                for reader in readers(plan, stage, rank):
                    gathers = sum(i == Gather(stage) for i in programs[reader])
                    count = gathers if gather == "microbatch" else 2 * uses[stage, reader]
                    here = [i.count for i in served if (i.stage, i.reader) == (stage, reader)]
                    assert here == ([count] if count else [])
        assert any(not requests(programs, plan).get((0, rank)) for rank in plan.replica_ranks(0)) == (replicas == (3, 2))


def test_readers_are_the_same_shard_of_the_other_replicas_that_do_not_hold_it_too():
    plan = ParallelPlan.mesh(dp=3, tp=2).with_zero(3).with_gather("microbatch")
    assert readers(plan, 0, 2) == [0, 4] and owners(plan, 0, 2) == [0, 4]
    twice = plan.with_zero(3, 2)
    assert readers(twice, 0, 2) == [0], "the replica that follows holds it"
    assert owners(twice, 0, 2) == [4]
    assert readers(ParallelPlan.mesh(dp=2).with_zero(3, 2), 0, 0) == []


@pytest.mark.parametrize("plan", [
    ParallelPlan.mesh(dp=2, pp=2).with_zero(3),
    ParallelPlan.mesh(pp=2).with_zero(3).with_gather("layer"),
    ParallelPlan.mesh(dp=2, pp=2).with_zero(3, 2).with_gather("microbatch"),
], ids=["by step", "one replica", "two holders of two"])  # fmt: skip
def test_programs_that_gather_once_a_step_or_never_are_as_they_were(plan):
    programs: tuple[Program, ...] = ((Gather(0),),) * 4
    assert insert_gathers(programs, plan) == programs


def test_a_validation_pass_gathers_too():
    routing, crossing, _ = programs_of("interleaved", (2, 2), 4, "microbatch")
    routing = replace(routing, microbatches=Microbatches(8, 8), forward_only=True)
    programs = lower_validation_pass(routing, crossing)
    assert not find_schedule_problems(programs, routing, crossing, training=False)
    assert all(len(stages) <= 2 for program in programs for stages in there_at(program))
    first = programs[0]
    assert sum(type(i) is Gather for i in first) == 3, "each stage once: it goes through one after the other"
    assert [str(i) for i in first if type(i) is ServeParameters] == ["0SERVE_1@1", "2SERVE_1@1", "4SERVE_1@1"]


def test_grids_of_workers_may_differ():
    """Stages 0 and 2 are two replicas, stage 1 one replica of two shards, on the same workers."""
    rows = ((0,), (1,))
    plan = ParallelPlan(
        (
            StagePlan(0, 1, rows, zero=3, gather="microbatch"),
            StagePlan(1, 2, ((0, 1),), zero=3, gather="layer"),
            StagePlan(2, 3, rows, zero=3, gather="microbatch"),
        )
    )
    routing, crossing = MicrobatchRouting(plan, Microbatches(2, 2)), StageConnections.chain(3)
    programs = lower_schedule(registry.build_schedule("list", routing, connections=crossing), routing, crossing)
    validate_schedule(programs, routing, crossing)
    assert {i.stage for i in programs[0] if type(i) is Gather} == {0, 2}, "one replica has whole layers"


def changed(programs: tuple[Program, ...], rank: int, change) -> tuple[Program, ...]:
    """The programs with those of one rank after `change`, a function of the list."""
    return tuple(tuple(change(list(program))) if r == rank else program for r, program in enumerate(programs))


def without(program: list[Instruction], *gone: Instruction) -> list[Instruction]:
    return [i for i in program if i not in gone]


@pytest.mark.parametrize("change, text", [
    (lambda p: without(p, Gather(0)), "0F0 computes with parameters of stage 0 that are not gathered for it"),
    (lambda p: without(p, Release(2)), "2A gathers parameters that are there"),
    (lambda p: [*without(p, *p[-2:]), Release(1), *p[-2:]], "1Z releases parameters that are not there"),
    (lambda p: [Gather(1), *p], "1A gathers parameters of stage 1, which do not come and go by microbatch"),
    (lambda p: p[1:], "serves worker 1 parameters of stage 0 0 times, asked for 2 times"),
    (lambda p: [ServeParameters(0, 1, 1), *p], "serves worker 1 parameters of stage 0 3 times, asked for 2 times"),
    (lambda p: [*p[1:-2], p[0], *p[-2:]], "0SERVE_2@1 stands behind a computation, for which readers would wait"),
])  # fmt: skip
def test_wrong_gathers_are_found(change, text):
    routing, crossing, programs = programs_of("interleaved", (2, 2), 2, "microbatch")
    assert not find_schedule_problems(programs, routing, crossing)
    found = find_schedule_problems(changed(programs, 0, change), routing, crossing)
    assert text in [problem.text for problem in found if problem.rule == "gathered" and problem.rank == 0]
    with pytest.raises(ScheduleError, match="gathered: worker 0"):
        validate_schedule(changed(programs, 0, change), routing, crossing)


def test_gathers_without_anything_to_gather_are_found():
    plan = ParallelPlan.mesh(dp=2)
    routing, crossing = MicrobatchRouting(plan, Microbatches(2, 2)), StageConnections.chain(1)
    programs = lower_schedule(registry.build_schedule("1f1b", routing), routing, crossing)
    found = find_schedule_problems(changed(programs, 0, lambda p: [Gather(0), *p]), routing, crossing)
    assert [problem.rule for problem in found] == ["gathered"] * 2


def test_an_owner_that_serves_too_late_is_a_deadlock(monkeypatch):
    """Worker 0 serves worker 1 once it has got what worker 1 makes of it."""
    monkeypatch.setattr("raypar.schedule.validate.check_gathers", lambda case: [])
    routing, crossing, programs = programs_of("interleaved", (2, 2), 2, "microbatch")
    late = changed(programs, 0, lambda p: [*p[3:-2], *p[:3], *p[-2:]])
    alone = changed(late, 1, lambda p: [*p[3:-2], *p[:3], *p[-2:]])
    found = find_schedule_problems(alone, routing, crossing)
    assert {p.rule for p in found} == {"deadlock-free"}
    assert "waits for ever at 0F0 for parameters of stage 0, which worker 1 does not serve yet" in found[0].text


def test_a_gather_is_hidden_behind_one_instruction_and_waited_for_where_it_takes_longer():
    """One worker with three stages, forward 1 ms, backward 2 ms; a gather of each takes 0.5 ms, then 3 ms."""
    rows = ((0,), (1,))
    plan = ParallelPlan(tuple(StagePlan(s, s + 1, rows, zero=3, gather="microbatch") for s in range(3)))
    routing, crossing = MicrobatchRouting(plan, Microbatches(2, 2)), StageConnections.chain(3)
    orders = parse_schedule_csv("0F0,1F0,2F0,2B0,1B0,0B0\n0F1,1F1,2F1,2B1,1B1,0B1\n")
    costs = SimulationCosts.uniform(3)
    short = simulate_schedule(orders, routing, crossing, replace(costs, gather_ms=(0.5, 0.5, 0.5)))
    assert short.makespan_ms == 0.5 + 9, "the first one is waited for"
    gathers = [(str(s.instruction), s.start_ms, s.end_ms) for s in short.spans[0] if type(s.instruction) is Gather]
    assert gathers == [("0A", 0, 0.5), ("1A", 0.5, 1.0), ("2A", 1.5, 2.0), ("1A", 3.5, 4.0), ("0A", 5.5, 6.0)]
    assert short.busy_ms == (9, 9)
    long = simulate_schedule(orders, routing, crossing, replace(costs, gather_ms=(3, 3, 3)))
    # 0A to 3, 1A to 6 (0F 3-4), 2A 6-9 (1F 6-7), 2F 9-10, 1A 10-13 (2B 10-12), 1B 13-15, 0A 13-16, 0B 16-18
    assert long.makespan_ms == 18
    lowered = lower_schedule(orders, routing, crossing)
    assert simulate_schedule(lowered, routing, crossing, replace(costs, gather_ms=(3, 3, 3))).makespan_ms == 18
    assert simulate_schedule(orders, routing, crossing, costs).makespan_ms == 9
