"""Offloading of activations as data: which layers, where in a schedule, what it costs in time and memory."""

from itertools import product

import pytest

from raypar.draw.swimlane_svg import swimlane_svg
from raypar.draw.text_grid import order_grid
from raypar.errors import ConfigError, PlanError, ScheduleError
from raypar.job.read_job import parse_job
from raypar.launch.check_offload_folder import lines_about_new_folders
from raypar.plan import Microbatches, MicrobatchRouting, ParallelPlan, StageConnections, offloading
from raypar.plan.offloading import resolve_offloaded_layers
from raypar.planner.memory_sheet import describe_changes_that_fit, memory_sheets
from raypar.planner.model_profile import KeptStorages, LayerProfile, LayerStorages, ModelProfile, ReadStorage
from raypar.planner.offload_advice import lines_about_activations
from raypar.planner.offloaded_activations import wait_for_reads
from raypar.planner.plan_search import search_plans
from raypar.planner.predicted_step import predict_step
from raypar.schedule import registry
from raypar.schedule.instructions import ACTIVATIONS, FETCHED, KEPT_INPUTS, RESIDENT
from raypar.schedule.lower import lower_schedule
from raypar.schedule.offloading import insert_offloading, stages_not_worth_offloading, without_offloading
from raypar.schedule.program_assignment import assign_programs_to_ranks
from raypar.schedule.schedule_csv import format_schedule_csv, parse_schedule_csv
from raypar.schedule.simulate import SimulationCosts, simulate_schedule
from raypar.schedule.step_timeline import Timeline
from raypar.schedule.validate import find_schedule_problems

NAMES = ("embed", "block0", "block1", "block2", "head")
MIB = 1 << 20


def full(pp: int, *, schedule: str = "1f1b", dp: int = 1, layers: int | None = None, recompute=()) -> ParallelPlan:
    """A plan that offloads all layers that it does not recompute, one layer a stage unless `layers` says otherwise."""
    chunks = registry.resolve_chunks_per_worker(schedule)
    count = layers or pp * chunks
    made = ParallelPlan.mesh(
        dp=dp, pp=pp, layers=count, chunks=chunks, placement=registry.placement_of_schedule(schedule), recompute=recompute
    )
    return made.with_offload(set(range(count)) - set(recompute))


def grid(schedule: str, plan: ParallelPlan, microbatches: int) -> str:
    """The orders as text."""
    return order_grid(registry.build_schedule(schedule, MicrobatchRouting(plan, Microbatches(microbatches))))


# -- which layers --------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "policy, recomputed, found",
    [
        ("none", (), ()),
        ("full", (), (0, 1, 2, 3, 4)),
        ("full", (1, 2), (0, 3, 4)),
        (("block*",), (0,), (1, 2, 3)),
        ("head", (), (4,)),
    ],
)
def test_a_policy_names_layers_by_patterns_or_those_that_are_not_recomputed(policy, recomputed, found):
    assert resolve_offloaded_layers(policy, NAMES, recomputed) == found


def test_unknown_layers_and_those_that_are_recomputed_are_refused():
    with pytest.raises(PlanError, match=r"plan.offload has 'blocks', which matches none of the 5 layers") as error:
        resolve_offloaded_layers(("blocks",), NAMES)
    assert "did you mean block" in error.value.cure
    with pytest.raises(PlanError, match=r"plan.offload and plan.recompute both name block0, block2: what is computed again"):
        resolve_offloaded_layers(("block*",), NAMES, (1, 3))
    with pytest.raises(PlanError, match=r"layers \[2\] are both recomputed and offloaded"):
        ParallelPlan.mesh(pp=2, layers=6, recompute=(1, 2)).with_offload((2, 3))
    with pytest.raises(PlanError, match="offload names the layers"):
        ParallelPlan.mesh(pp=2, layers=6).with_offload((6,))


def test_a_plan_knows_the_offloaded_layers_of_each_stage():
    plan = ParallelPlan.mesh(pp=2, layers=6).with_offload((4, 1, 2))
    assert [plan.offloaded_layers(s) for s in range(2)] == [(1, 2), (4,)] and plan != ParallelPlan.mesh(pp=2, layers=6)


JOB = """
model: {function: helpers.tiny_job:model}
loss: helpers.tiny_job:loss
data: {function: helpers.tiny_job:data}
steps: 2
batch_size: 8
microbatches: 4
"""


@pytest.mark.parametrize(
    "plan, device, words",
    [
        ("{offload: full}", "cpu", "plan.activations_in does not say where to"),
        ("{activations_in: /fast, recompute: full}", "cpu", "plan.recompute: full drops all activations"),
        ("{activations_in: host}", "cpu", "activations lie in the host's memory already"),
        ("{activations_in: /fast}", "gpu", "activations of GPUs go to the host's memory, and not to files"),
        ("{activations_in: /fast, offload: block}", "cpu", "expected full, or a list of patterns of layer names"),
        ("{activations_in: /fast, offload: []}", "cpu", "expected full, or a list of patterns of layer names"),
    ],
)
def test_keys_that_contradict_each_other_are_refused(plan, device, words):
    with pytest.raises((ConfigError, PlanError), match=words):
        parse_job(f"{JOB}device: {device}\nplan: {plan}\n")


@pytest.mark.parametrize(
    "plan, policy",
    [
        ("{}", "none"),
        ("auto", "none"),
        ("{activations_in: /fast}", "full"),
        ('{activations_in: /fast, offload: ["a*"], recompute: [b]}', ("a*",)),
    ],
)
def test_a_job_says_what_is_offloaded(plan, policy):
    assert parse_job(f"{JOB}plan: {plan}\n").offload == policy


def test_activations_of_gpus_go_to_the_memory_of_the_host():
    job = parse_job(f"{JOB}device: gpu\nplan: {{activations_in: host, offload: [a]}}\n")
    assert (job.activations_in, job.activations_folder, job.offload) == (offloading.HOST, None, ("a",))
    layer = LayerProfile("layer", 1.0, 2.0, 1.0, 1.0, parameter_bytes=100, output_bytes=10)
    profile = ModelProfile((layer,) * 3, kept=(KEPT,), activations_place=offloading.HOST)
    (sheet,) = memory_sheets(profile, full(1, layers=3), "1f1b", Microbatches(6, 6, 24))
    assert sheet.activation_files == 0 and sheet.activation_host == (4 + 2 + 4 + 8) * MIB, "in powers of two"
    advice = describe_changes_that_fit(profile, ParallelPlan.mesh(layers=3), "gpipe", Microbatches(6, 6, 24), 50 * MIB)
    assert "or plan.activations_in=host (" in advice
    assert not lines_about_new_folders(job), "no folder is made"


def test_a_folder_that_is_not_there_is_told_with_the_one_in_which_it_is_made(tmp_path):
    job = parse_job(f"{JOB}plan: {{activations_in: {tmp_path}/fast/disk}}\n")
    (line,) = lines_about_new_folders(job)
    assert line == f"plan.activations_in {tmp_path}/fast/disk is not there yet: workers make it in {tmp_path}"


# -- where in a schedule -------------------------------------------------------------------------------------------------------


def orders_of(schedule: str, plan: ParallelPlan, microbatches: int):
    return registry.build_schedule(schedule, MicrobatchRouting(plan, Microbatches(microbatches)))


def test_a_fetch_stands_one_instruction_ahead_of_its_backward_and_what_would_be_read_at_once_stays():
    assert grid("1f1b", full(3), 5) == (
        "U0 U1 H0 U2 B0 H1 U3 B1 H2 U4 H3 B2 H4 B3 B4\n"
        "F0 U1 B0 H1 U2 B1 H2 U3 B2 H3 F4 B3 B4\n"
        "F0 B0 F1 B1 F2 B2 F3 B3 F4 B4"
    )  # fmt: skip
    assert grid("gpipe", full(1), 4) == "U0 U1 U2 H0 U3 H1 B0 H2 B1 H3 B2 B3"
    assert stages_not_worth_offloading(orders_of("1f1b", full(3), 5), full(3)) == (2,)


def test_a_stage_of_more_than_two_layers_offloads_also_where_a_backward_follows_its_forward_at_once():
    assert grid("1f1b", full(1, layers=3), 3) == "U0 H0 B0 U1 H1 B1 U2 H2 B2"
    assert grid("1f1b", full(1, layers=2), 3) == "F0 B0 F1 B1 F2 B2"
    assert grid("1f1b", full(2, layers=6), 3) == "U0 H0 U1 B0 H1 U2 H2 B1 B2\nU0 H0 B0 U1 H1 B1 U2 H2 B2"
    assert grid("1f1b", full(1, layers=5, recompute=(1, 2)), 2) == "U0 H0 B0 U1 H1 B1", "to recompute at once saves nothing"
    orders = orders_of("zb-h1", full(2, layers=8, recompute=(1, 5)), 3)
    assert without_offloading(orders) == orders_of("zb-h1", ParallelPlan.mesh(pp=2, layers=8, recompute=(1, 5)), 3)


def test_where_layers_are_recomputed_too_their_inputs_are_there_before():
    assert grid("gpipe", full(1, layers=2, recompute=(1,)), 4) == "J0 J1 J2 K0 J3 R0 K1 B0 R1 K2 B1 R2 K3 B2 R3 B3"


def test_only_stages_with_offloaded_layers_have_it():
    plan = ParallelPlan.mesh(pp=2, layers=4).with_offload((1,))
    assert grid("gpipe", plan, 3) == "U0 U1 H0 U2 H1 B0 H2 B1 B2\nF0 F1 F2 B0 B1 B2"
    assert (orders := orders_of("1f1b", ParallelPlan.mesh(pp=3), 4)) is insert_offloading(orders, ParallelPlan.mesh(pp=3))


@pytest.mark.parametrize("schedule", registry.NAMES)
@pytest.mark.parametrize("pp, dp, microbatches", [*product((1, 2, 3), (1, 2), (1, 3, 5)), (4, 1, 8)])
def test_every_schedule_with_offloading_is_correct_before_and_after_lowering(schedule, pp, dp, microbatches):
    chunks = registry.resolve_chunks_per_worker(schedule)
    plan = full(pp, schedule=schedule, dp=dp, layers=2 * pp * chunks, recompute=range(0, 2 * pp * chunks, 3))
    routing, crossing = MicrobatchRouting(plan, Microbatches(microbatches)), StageConnections.chain(len(plan.stages))
    orders = registry.build_schedule(schedule, routing)
    assert find_schedule_problems(orders, routing, crossing) == []
    assert find_schedule_problems(lower_schedule(orders, routing, crossing), routing, crossing) == []
    assert parse_schedule_csv(format_schedule_csv(orders)) == orders


def test_a_users_schedule_may_say_itself_where_it_offloads():
    own, plan = parse_schedule_csv("0U0,0F1,0H0,0B0,0B1\n"), full(1)
    assert insert_offloading(own, plan) is own
    assert assign_programs_to_ranks(own, plan, StageConnections.chain(1), Microbatches(2))
    with pytest.raises(ScheduleError, match=r"worker 0 .*has 0U0, but plan.offload names no layer of stage 0") as error:
        assign_programs_to_ranks(own, ParallelPlan.mesh(), StageConnections.chain(1), Microbatches(2))
    assert "write 0F0 and leave 0H0 out" in error.value.cure
    wrong = parse_schedule_csv("0U0,0F1,0K0,0R0,0B0,0B1\n")
    with pytest.raises(ScheduleError, match=r"worker 0 .*has 0K0 after a forward that needs 0H0"):
        assign_programs_to_ranks(wrong, full(1, layers=2, recompute=(1,)), StageConnections.chain(1), Microbatches(2))


# -- what it costs -------------------------------------------------------------------------------------------------------------


def simulated(plan: ParallelPlan, costs: SimulationCosts, microbatches: int = 4) -> Timeline:
    routing = MicrobatchRouting(plan, Microbatches(microbatches))
    return simulate_schedule(registry.build_schedule("gpipe", routing), routing, StageConnections.chain(1), costs)


@pytest.mark.parametrize("offload_ms, makespan_ms", [(0, 12), (1, 12), (2, 12), (3, 12 + 2), (4, 12 + 6)])
def test_writing_and_reading_go_on_beside_compute_and_a_backward_waits_for_what_it_needs(offload_ms, makespan_ms):
    """U0 U1 U2 H0 U3 H1 B0 H2 B1 H3 B2 B3: the reads queue up behind the writes."""
    found = simulated(full(1), SimulationCosts((1,), (1,), (1,), offload_ms=(offload_ms,)))
    ends = [span.start_ms for span in found.spans[0] if str(span.instruction) in ("0B0", "0B1", "0B2", "0B3")]
    free, reads = 0, {}
    clock = 0
    for i in orders_of("gpipe", full(1), 4)[0]:
        name = str(i)
        if name[1] == "B":
            clock = max(clock, reads[name[2]]) + 2
        if name[1] == "U":
            clock += 1
            free = max(free, clock) + offload_ms
        if name[1] == "H":
            reads[name[2]] = free = max(free, clock) + offload_ms
    assert found.makespan_ms == clock and len(ends) == 4
    assert found.busy_ms == (12,)


def test_a_backward_that_reads_layer_by_layer_waits_for_what_is_read_more_slowly_than_it_computes():
    """Layer 3 is there, 2 is read while 3 computes, and so on."""
    reads, layers = {3: 9.0, 2: 1.0, 0: 5.0}, {3: 2.0, 2: 2.0, 1: 2.0, 0: 2.0}
    assert wait_for_reads(reads, layers) == 1.0, "layer 0 is asked for when layer 2 begins"
    assert wait_for_reads({3: 9.0, 2: 3.0, 1: 3.0, 0: 3.0}, layers) == 3.0
    assert wait_for_reads({3: 9.0}, layers) == wait_for_reads({}, layers) == 0.0
    costs = SimulationCosts((1,), (1,), (1,), offload_ms=(4,), first_read_ms=(1,), read_wait_ms=(3,))
    found = simulate_schedule(
        orders_of("1f1b", full(1, layers=3), 1),
        MicrobatchRouting(full(1, layers=3), Microbatches(1)),
        StageConnections.chain(1),
        costs,
    )
    # U0 until 1, written until 5, H0 until 6, then B0: 2 ms and 3 that it waits, which is longer than the 3 ms of the reads
    assert [(str(span.instruction), span.start_ms, span.end_ms) for span in found.spans[0]] == [
        ("0U0", 0, 1), ("0H0", 1, 6), ("0B0", 6, 11)
    ]  # fmt: skip


def test_one_microbatch_of_one_stage_has_two_layers_of_six_at_a_time(monkeypatch):
    monkeypatch.setattr(offloading, "MOST_UNWRITTEN_BYTES", MIB)
    layer = LayerProfile("layer", 1.0, 2.0, 1.0, 1.0, activation_bytes=10 * MIB, output_bytes=10)
    profile, plan = ModelProfile((layer,) * 6), full(1, layers=6)
    (plain,), (sheet,) = (memory_sheets(profile, each, "1f1b", Microbatches(4)) for each in (ParallelPlan.mesh(layers=6), plan))
    assert plain.kept[ACTIVATIONS] == 60 * MIB
    assert (sheet.kept[ACTIVATIONS], sheet.kept[FETCHED], sheet.kept[RESIDENT]) == (10 * MIB, 10 * MIB, 0)
    assert sheet.unwritten == MIB and sheet.activation_files == 60 * MIB
    timeline, (total,) = predict_step(profile, plan, "1f1b", Microbatches(4))
    assert total == sheet.total == 21 * MIB and timeline.peak_activations == (pytest.approx(1 / 3),)


def test_offloading_is_never_predicted_to_take_more_than_it_saves():
    """What is on its way to a file is in memory once, whoever reads it meanwhile."""
    profile, cut = ModelProfile((LAYER,) * 3, kept=(KEPT,)), Microbatches(6, 6, 24)
    for schedule in ("gpipe", "1f1b", "zb-h1"):
        for recompute in ((), (1,)):
            plan = full(1, layers=3, recompute=recompute)
            with_it, without = (memory_sheets(profile, each, schedule, cut)[0] for each in (plan, plan.with_offload(())))
            assert with_it.total <= without.total, (schedule, recompute, with_it, without)


def lines(plan: ParallelPlan, schedule: str, profile: ModelProfile, cut: Microbatches) -> tuple[str, ...]:
    orders = registry.build_schedule(schedule, MicrobatchRouting(plan, cut))
    return lines_about_activations(profile, plan, orders, cut, memory_sheets(profile, plan, orders, cut))


def test_a_line_says_why_nothing_is_offloaded_and_another_where_no_memory_is_saved(monkeypatch):
    profile, cut = ModelProfile((LAYER,) * 3, kept=(KEPT,)), Microbatches(6, 6, 24)
    assert lines(full(1, layers=3), "gpipe", profile, cut) == lines(ParallelPlan.mesh(layers=3), "gpipe", profile, cut) == ()
    (line,) = lines(ParallelPlan.mesh(layers=3).with_offload((1, 2)), "1f1b", profile, cut)
    keep = "stage 0 keeps its activations in memory: each backward follows its forward at once"
    assert line.startswith(f"plan.activations_in offloads nothing: {keep}") and line.endswith("leave plan.activations_in out")
    monkeypatch.setattr(offloading, "SMALLEST_OFFLOADED_BYTES", 5 * MIB)
    (line,) = lines(ParallelPlan.mesh(pp=2, layers=3, cuts=(2,), recompute=(1,)).with_offload((0, 2)), "zb-h1", profile, cut)
    assert "offloads nothing: no offloaded layer of stage 0 keeps 5120 KiB or more of a microbatch in one piece" in line
    assert "other layer keeps; stage 1 keeps its activations in memory: each backward follows its forward at once" in line
    monkeypatch.undo()
    (line,) = lines(full(2, layers=3), "1f1b", profile, cut)
    assert line.startswith("plan.activations_in does not save worker 0 (stage 0, replica 0) any memory: predicted to hold ")


def test_at_most_two_microbatches_are_there():
    assert simulated(ParallelPlan.mesh(), SimulationCosts.uniform(1), 6).peak_activations == (6,)
    assert simulated(full(1), SimulationCosts.uniform(1), 6).peak_activations == (2,)


KEPT = KeptStorages(
    samples=4,
    sizes=(100, 4 * MIB, 2 * MIB, 3 * MIB, 5 * MIB),
    layers=(
        LayerStorages((0, 1), (), (ReadStorage(0, -1, False),)),
        LayerStorages((1, 2), (), (ReadStorage(1, 0, True),)),
        LayerStorages((2, 3, 4), (), (ReadStorage(2, 1, True),)),
    ),
)
LAYER = LayerProfile("layer", 1.0, 2.0, 1.0, 1.0, parameter_bytes=100, output_bytes=10)


def test_what_is_small_received_or_kept_by_another_layer_is_not_offloaded():
    assert KEPT.bytes_by_kind(0, 3, (), (0, 1, 2))[RESIDENT] == 100
    assert KEPT.offloaded_bytes(0, 3, (0, 1, 2)) == 14 * MIB
    assert KEPT.bytes_by_kind(0, 3, (), (0,))[RESIDENT] == 100 + (4 + 2 + 3 + 5) * MIB, "layer 1 keeps what layer 0 does"
    assert KEPT.bytes_by_kind(1, 3, (), (1, 2))[RESIDENT] == 4 * MIB and KEPT.offloaded_bytes(1, 3, (1, 2)) == 10 * MIB
    assert KEPT.bytes_by_kind(0, 3, (2,), (0, 1))[RESIDENT] == 100 + 2 * MIB, "layer 2 reads what layer 1 has made"
    assert KEPT.bytes_by_kind(0, 3, (), (0, 1, 2))[ACTIVATIONS] == KEPT.bytes_by_kind(0, 3)[ACTIVATIONS]
    assert KEPT.bytes_by_kind(0, 3, (1,), (0, 2))[KEPT_INPUTS] == KEPT.bytes_by_kind(0, 3, (1,))[KEPT_INPUTS]


def test_the_sheet_has_what_stays_what_is_on_its_way_and_what_lies_in_files(monkeypatch):
    monkeypatch.setattr(offloading, "MOST_UNWRITTEN_BYTES", 8 * MIB)
    profile, cut = ModelProfile((LAYER,) * 3, kept=(KEPT,)), Microbatches(6, 6, 24)
    (plain,) = memory_sheets(profile, ParallelPlan.mesh(layers=3), "gpipe", cut)
    plan = full(1, layers=3)
    (sheet,) = memory_sheets(profile, plan, "gpipe", cut)
    each = 100 + 14 * MIB
    assert plain.kept[ACTIVATIONS] == 6 * each and plain.activation_files == plain.unwritten == 0
    top, below = 10 * MIB, 4 * MIB  # what the last layer saves; what is read while it computes
    assert (sheet.kept[ACTIVATIONS], sheet.kept[FETCHED], sheet.kept[RESIDENT]) == (2 * (100 + top), below, 4 * 100)
    assert sheet.unwritten == 8 * MIB and sheet.activation_files == 6 * 14 * MIB
    assert "8.0 MiB of activations on their way out" in str(sheet)
    assert sheet.total == max(predict_step(profile, plan, "gpipe", cut)[1])


def test_advice_names_files_for_activations_after_recomputation(monkeypatch):
    monkeypatch.setattr(offloading, "MOST_UNWRITTEN_BYTES", MIB)
    profile, cut = ModelProfile((LAYER,) * 3, kept=(KEPT,)), Microbatches(6, 6, 24)
    advice = describe_changes_that_fit(profile, ParallelPlan.mesh(layers=3), "gpipe", cut, 50 * MIB)
    assert advice.startswith("predicted to fit: plan.recompute=full (")
    assert "; or plan.activations_in=FOLDER (29.0 MiB a worker, the same results)" in advice
    with pytest.raises(PlanError, match="no plan for 1 worker fits") as error:
        search_plans(ModelProfile((LAYER,) * 3, kept=(KEPT,), memory_bytes=MIB), 1, cut)
    assert "plan.activations_in" not in error.value.cure


def test_the_planner_keeps_what_it_is_given_and_names_files_where_nothing_else_fits():
    layer = LayerProfile("layer", 1.0, 2.0, 1.0, 1.0, activation_bytes=30 * MIB, parameter_bytes=10, output_bytes=10)
    choice = search_plans(ModelProfile((layer,) * 6), 3, Microbatches(6), offload=(0, 1, 2))
    assert {verdict.candidate.plan.offload for verdict in choice.verdicts} == {(0, 1, 2)}
    tight = ModelProfile((layer,) * 6, memory_bytes=110 * MIB)
    with pytest.raises(PlanError, match="no plan for 3 workers fits") as error:
        search_plans(tight, 3, Microbatches(12))
    assert error.value.cure.startswith("offloaded activations (plan.activations_in: FOLDER) are predicted to fit, with ")


def test_the_picture_has_a_colour_and_a_legend_for_each():
    svg = swimlane_svg(simulated(full(1), SimulationCosts((1,), (1,), (1,), offload_ms=(1,))), title="t")
    assert "forward, activations offloaded (U)" in svg and "fetch of offloaded activations (H)" in svg
