"""Recomputation as data: which layers, where in a schedule, what it costs in time and memory."""

import json
from pathlib import Path

import pytest

from raypar.draw.swimlane_svg import swimlane_svg
from raypar.draw.text_grid import order_grid
from raypar.errors import ConfigError, PlanError, ScheduleError
from raypar.job.read_job import load_job
from raypar.plan import Microbatches, MicrobatchRouting, ParallelPlan, StageConnections
from raypar.plan.layer_patterns import describe_layers
from raypar.plan.recomputation import resolve_recomputed_layers
from raypar.planner.model_profile import LayerProfile, ModelProfile
from raypar.planner.plan_search import search_plans
from raypar.schedule import registry
from raypar.schedule.instructions import ACTIVATIONS, KEPT_INPUTS, STASH
from raypar.schedule.lower import lower_schedule
from raypar.schedule.program_assignment import assign_programs_to_ranks
from raypar.schedule.recomputation import insert_recomputation, stages_not_worth_recomputing
from raypar.schedule.schedule_csv import format_schedule_csv, parse_schedule_csv
from raypar.schedule.simulate import SimulationCosts, simulate_schedule
from raypar.schedule.step_timeline import Timeline, peak_kept_bytes
from raypar.schedule.validate import find_schedule_problems

QUICKSTART = Path(__file__).parents[2] / "jobs/quickstart.yaml"
NAMES = ("embed", "block0", "block1", "block2", "head")


def full(pp: int, *, schedule: str = "1f1b", dp: int = 1, layers: int | None = None) -> ParallelPlan:
    """A plan that recomputes everything, one layer a stage unless `layers` says otherwise."""
    chunks = registry.resolve_chunks_per_worker(schedule)
    count = layers or pp * chunks
    return ParallelPlan.mesh(
        dp=dp, pp=pp, layers=count, chunks=chunks, placement=registry.placement_of_schedule(schedule), recompute=range(count)
    )


def grid(schedule: str, plan: ParallelPlan, microbatches: int) -> str:
    """The orders as text."""
    return order_grid(registry.build_schedule(schedule, MicrobatchRouting(plan, Microbatches(microbatches))))


# -- which layers --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "policy, found",
    [
        ("none", ()),
        ("full", (0, 1, 2, 3, 4)),
        (("block*",), (1, 2, 3)),
        (("block1", "emb?d"), (0, 2)),
        ("head", (4,)),
    ],
)
def test_a_policy_names_layers_by_patterns(policy, found):
    assert resolve_recomputed_layers(policy, NAMES) == found


def test_a_pattern_that_matches_nothing_is_refused_with_the_names_there_are():
    with pytest.raises(PlanError, match="'blocks', which matches none of the 5 layers") as error:
        resolve_recomputed_layers(("block*", "blocks"), NAMES)
    assert "did you mean block" in error.value.cure and "embed, block0" in error.value.cure


def test_layers_in_words():
    assert describe_layers((), NAMES) == ""
    assert describe_layers(range(5), NAMES) == "all 5 layers"
    assert describe_layers((1, 3), NAMES) == "2 of 5 layers: block0, block2"


def test_a_plan_knows_the_recomputed_layers_of_each_stage():
    plan = ParallelPlan.mesh(pp=2, layers=6, recompute=(4, 1, 2))
    assert plan.recompute == (1, 2, 4)
    assert [plan.recomputed_layers(s) for s in range(2)] == [(1, 2), (4,)]
    assert plan != ParallelPlan.mesh(pp=2, layers=6)


@pytest.mark.parametrize("wrong", [(6,), (-1,), (1, 1)])
def test_a_plan_with_layers_that_it_does_not_have_is_refused(wrong):
    with pytest.raises(PlanError, match="recompute names the layers"):
        ParallelPlan.mesh(pp=2, layers=6, recompute=wrong)


# -- where in a schedule -------------------------------------------------------------------------------------------------


def test_a_recomputation_stands_right_before_its_backward_and_a_forward_used_at_once_keeps_its_activations():
    assert grid("1f1b", full(3), 4) == (
        "C0 C1 C2 R0 B0 C3 R1 B1 R2 B2 R3 B3\n"
        "C0 C1 R0 B0 C2 R1 B1 C3 R2 B2 R3 B3\n"
        "F0 B0 F1 B1 F2 B2 F3 B3"
    )  # fmt: skip
    assert grid("gpipe", full(2), 2) == "C0 C1 R0 B0 R1 B1\nC0 C1 R0 B0 R1 B1"
    assert grid("zb-h1", full(2), 3) == "C0 C1 R0 I0 W0 C2 R1 I1 W1 R2 I2 W2\nF0 I0 F1 I1 W0 F2 I2 W1 W2"


def test_only_stages_with_recomputed_layers_have_it():
    plan = ParallelPlan.mesh(pp=3, layers=6, recompute=(2,))
    orders = registry.build_schedule("gpipe", MicrobatchRouting(plan, Microbatches(2)))
    assert order_grid(orders) == "F0 F1 B0 B1\nC0 C1 R0 B0 R1 B1\nF0 F1 B0 B1"
    assert stages_not_worth_recomputing(orders, plan) == ()


def test_stages_that_gain_nothing_are_known():
    plan = full(3)
    assert stages_not_worth_recomputing(registry.build_schedule("1f1b", MicrobatchRouting(plan, Microbatches(4))), plan) == (2,)


def test_without_recomputation_a_schedule_stays_as_it_is():
    plan = ParallelPlan.mesh(pp=3)
    orders = registry.build_schedule("1f1b", MicrobatchRouting(plan, Microbatches(4)))
    assert insert_recomputation(orders, plan) is orders


@pytest.mark.parametrize("schedule", registry.NAMES)
@pytest.mark.parametrize("pp", [1, 2, 3, 4])
@pytest.mark.parametrize("dp", [1, 2])
@pytest.mark.parametrize("microbatches", [1, 2, 5, 8])
def test_every_schedule_with_recomputation_is_correct_before_and_after_lowering(schedule, pp, dp, microbatches):
    plan = full(pp, schedule=schedule, dp=dp)
    routing, crossing = MicrobatchRouting(plan, Microbatches(microbatches)), StageConnections.chain(len(plan.stages))
    orders = registry.build_schedule(schedule, routing)
    assert find_schedule_problems(orders, routing, crossing) == []
    assert find_schedule_problems(lower_schedule(orders, routing, crossing), routing, crossing) == []
    assert parse_schedule_csv(format_schedule_csv(orders)) == orders


def problems(text: str) -> list[str]:
    """What is wrong with a schedule of one worker."""
    routing = MicrobatchRouting(full(1), Microbatches(2))
    return [p.text for p in find_schedule_problems(parse_schedule_csv(text), routing, StageConnections.chain(1))]


def test_wrong_orders_are_found():
    assert problems("0C0,0C1,0R0,0B0,0R1,0B1\n") == []
    assert problems("0C0,0F1,0R0,0B0,0B1\n") == []
    assert problems("0C0,0C1,0B0,0R1,0B1\n") == ["0B0 stands before 0R0"]
    assert problems("0R0,0C0,0C1,0B0,0R1,0B1\n") == ["0R0 stands before 0C0"]
    assert problems("0F0,0R0,0B0,0F1,0B1\n") == ["0R0 stands before 0C0"]
    assert problems("0C0,0F0,0C1,0R0,0B0,0R1,0B1\n") == ["0F0 1 times, 0C0 1 times"]


def test_a_users_schedule_may_say_itself_where_it_recomputes():
    plan = full(1)
    own = parse_schedule_csv("0C0,0F1,0R0,0B0,0B1\n")
    assert insert_recomputation(own, plan) is own
    assert assign_programs_to_ranks(own, plan, StageConnections.chain(1), Microbatches(2))


def test_a_schedule_that_recomputes_what_the_plan_does_not_is_refused():
    own = parse_schedule_csv("0C0,0F1,0R0,0B0,0B1\n")
    with pytest.raises(ScheduleError, match=r"worker 0 .*has 0C0, but plan.recompute names no layer of stage 0") as error:
        assign_programs_to_ranks(own, ParallelPlan.mesh(), StageConnections.chain(1), Microbatches(2))
    assert "write 0F0 and leave 0R0 out" in error.value.cure


# -- what it costs -------------------------------------------------------------------------------------------------------

UNIT = SimulationCosts.uniform(3, forward_ms=1, backward_ms=2)


def simulated(plan: ParallelPlan, costs: SimulationCosts = UNIT, schedule: str = "1f1b", microbatches: int = 4) -> Timeline:
    """The simulated step."""
    routing = MicrobatchRouting(plan, Microbatches(microbatches))
    return simulate_schedule(
        registry.build_schedule(schedule, routing), routing, StageConnections.chain(len(plan.stages)), costs
    )


def test_a_recomputation_that_fills_a_bubble_costs_no_time():
    """Both R run while their gradient is on its way; the last stage has none."""
    plain, again = (simulated(plan, SimulationCosts.uniform(2), microbatches=2) for plan in (ParallelPlan.mesh(pp=2), full(2)))
    assert again.makespan_ms == plain.makespan_ms == (2 + 1) * 3
    assert plain.busy_ms == (6, 6) and again.busy_ms == (8, 6)


def test_a_recomputation_takes_as_long_as_the_forward_or_what_the_costs_say():
    assert simulated(full(1), SimulationCosts.uniform(1), "gpipe").makespan_ms == 4 * (1 + 1 + 2)
    costs = SimulationCosts((1,), (1,), (1,), recompute_ms=(0.25,))
    assert simulated(full(1), costs, "gpipe").makespan_ms == 4 * (1 + 0.25 + 2)


def test_at_most_one_microbatch_of_activations_is_alive_beside_the_inputs():
    assert simulated(ParallelPlan.mesh(pp=3)).peak_activations == (3, 2, 1)
    assert simulated(full(3)).peak_activations == (1, 1, 1)


def test_bytes_are_counted_by_kind_stage_and_microbatch():
    sizes = {ACTIVATIONS: [[100, 130]], KEPT_INPUTS: [[10, 13]], STASH: [[90, 117]]}
    (order,) = parse_schedule_csv("0C0,0C1,0R0,0I0,0R1,0I1,0W0,0W1\n")
    assert peak_kept_bytes(order, sizes) == {ACTIVATIONS: 130, KEPT_INPUTS: 0, STASH: 90}
    (plain,) = parse_schedule_csv("0F0,0F1,0I0,0I1,0W0,0W1\n")
    assert peak_kept_bytes(plain, sizes) == {ACTIVATIONS: 230, KEPT_INPUTS: 0, STASH: 0}
    (whole,) = parse_schedule_csv("0C0,0C1,0R0,0B0,0R1,0B1\n")
    assert peak_kept_bytes(whole, sizes) == {ACTIVATIONS: 130, KEPT_INPUTS: 0, STASH: 0}
    timeline = simulated(full(1), SimulationCosts((1,), (1,), (1,), kept_bytes=sizes), "gpipe", 2)
    assert timeline.peak_bytes == (130,) and timeline.peak_kept == ({ACTIVATIONS: 130, KEPT_INPUTS: 0, STASH: 0},)


def test_where_bytes_are_known_kept_inputs_count_as_a_part_of_the_activations():
    """A stage that recomputes one of its layers keeps the activations of the others."""
    sizes = {ACTIVATIONS: [[100] * 4], KEPT_INPUTS: [[75] * 4], STASH: [[0] * 4]}
    costs = SimulationCosts((1,), (1,), (1,), kept_bytes=sizes)
    assert simulated(full(1), costs, "gpipe").peak_activations == (3 * 0.75 + 1,)
    assert simulated(full(1), SimulationCosts.uniform(1), "gpipe").peak_activations == (1,)


def test_the_picture_has_a_colour_and_a_legend_for_each():
    svg = swimlane_svg(simulated(full(3)), title="t")
    assert "recomputation (R)" in svg and "forward, keeps inputs only (C)" in svg and "forward (F)" in svg


# -- what a job says -----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "given, policy", [("none", "none"), ("full", "full"), (["block*"], ("block*",)), (("a", "b"), ("a", "b")), (None, "none")]
)
def test_a_plan_section_takes_none_full_or_patterns(given, policy):
    job = load_job(QUICKSTART, [] if given is None else [f"plan.recompute={json.dumps(given)}"])
    assert job.recompute == policy


@pytest.mark.parametrize("given", ["ful", "block*", True, 3, [], [""], [1], {"block*": True}, None])
def test_anything_else_is_refused_with_what_it_may_be(given):
    with pytest.raises(ConfigError, match=r"recompute: expected none, full, auto, or a list of patterns of layer names"):
        load_job(QUICKSTART, [f"plan.recompute={json.dumps(given)}"])


def test_the_planner_keeps_the_recomputation_that_it_is_given():
    layer = LayerProfile("layer", 1.0, 2.0, 1.0, 1.0, activation_bytes=1000, parameter_bytes=10, output_bytes=10)
    choice = search_plans(ModelProfile((layer,) * 6), 3, Microbatches(6), recompute=(0, 1, 2))
    assert {verdict.candidate.plan.recompute for verdict in choice.verdicts} == {(0, 1, 2)}
    assert ModelProfile((layer,) * 3).work_sums((1,)) == (0, 3, 7, 10)
