"""The key `plan.zero`: what it accepts, which plans have it, and what is said where it cannot help."""

from dataclasses import replace

import pytest
from helpers import optimizers

import raypar
from raypar.errors import ConfigError, PlanError
from raypar.job import OptimizerConfig, PlanConfig
from raypar.job.read_job import parse_job
from raypar.launch.choose_plan import lines_about_zero
from raypar.plan import Microbatches, ModelOutline, ParallelPlan, StagePlan
from raypar.plan.gradient_pool import GradientPool
from raypar.plan.ownership import Ownership
from raypar.plan.placements import plan_for_fewer_workers
from raypar.plan.state_bytes import StateBytes
from raypar.planner.fit_to_memory import fit_to_memory
from raypar.planner.memory_sheet import describe_changes_that_fit, largest_worker_bytes, memory_sheets, sheets_by_holders
from raypar.planner.model_profile import LayerProfile, LinkProfile, ModelProfile
from raypar.planner.plan_report import plan_report, plan_report_as_dict, short_plan_report
from raypar.planner.plan_search import search_plans
from raypar.planner.predicted_step import predict_step, simulation_costs
from raypar.record.stages_of_plan import plan_of_stages, stages_as_data
from raypar.worker.step.optimizer_trial import try_optimizer

JOB = """
model: {function: "helpers.tiny_job:model"}
loss: {function: "helpers.tiny_job:loss"}
data: {function: "helpers.tiny_job:data"}
steps: 2
batch_size: 8
microbatches: 4
"""


@pytest.mark.parametrize("given, levels", [(0, [0, 0]), (3, [3, 3]), ([0, 1], [0, 1])], ids=str)
def test_one_level_or_one_for_each_stage(given, levels):
    config = PlanConfig(stages=2, replicas=2, zero=given)
    plan = config.to_plan(5)
    assert [stage.zero for stage in plan.stages] == levels
    assert PlanConfig.of_plan(plan, "1f1b").zero == (given if isinstance(given, int) else tuple(given))
    assert PlanConfig(stages=2, replicas=2, chunks=2, schedule="interleaved", zero=given).to_plan(5).zero_levels == tuple(
        levels
    )


@pytest.mark.parametrize("given", [[1, 4], -1, 4, True, "1", 0.5, [], None], ids=str)
def test_other_values_are_refused(given):
    with pytest.raises(ConfigError, match=r"expected 0, 1, 2 or 3, a list with one"):
        PlanConfig(stages=2, replicas=2, zero=given)


def test_a_whole_plan_may_have_any_level():
    plan = ParallelPlan.mesh(dp=2, pp=2, layers=5).with_zero(3)
    raypar.Trainer(model="m:m", loss="m:l", data="m:d", steps=1, batch_size=2, microbatches=1, plan=plan)


def test_as_many_levels_as_stages_are_asked_for():
    with pytest.raises(PlanError, match=r"plan.zero has 3 entries for 2 stages"):
        PlanConfig(stages=2, replicas=2, zero=[1, 0, 1])
    placements = [{"layers": "a", "workers": [[0], [1]]}]
    with pytest.raises(PlanError, match=r"plan.zero has 1 entries, and plan.placements"):
        PlanConfig(placements=placements, zero=[1])
    assert PlanConfig(placements=placements, zero=1).to_plan(["a", "b"]).most_zero == 1


@pytest.mark.parametrize("key", ["zero", "fsdp", "zero_optimization", "sharding_strategy", "zero_redundancy_optimizer"])
def test_names_of_other_frameworks_lead_to_it(key):
    with pytest.raises(ConfigError, match=r"plan\.zero: 0, 1 for the optimizer's state, 2 for gradients"):
        parse_job(JOB + f"{key}: 1\n")


def test_stages_of_one_grid_of_workers_have_one_level():
    stages = ParallelPlan.mesh(dp=2, pp=2, chunks=2, layers=4).stages
    with pytest.raises(PlanError, match="different ZeRO stages"):
        ParallelPlan((replace(stages[0], zero=1), *stages[1:]))


def test_other_numbers_of_replicas_keep_the_level_and_another_number_of_stages_has_the_highest():
    plan = ParallelPlan.of([3, 2], layers=4).with_zero([0, 1])
    assert plan.with_replicas([1, 4]).zero_levels == (0, 1)
    assert ParallelPlan.of([2, 2, 2], layers=4).with_zero(plan.zero_levels).zero_levels == (1, 1, 1)
    shared = ParallelPlan(
        (StagePlan(0, 1, ((0,), (1,)), zero=1), StagePlan(1, 2, ((0, 1),)), StagePlan(2, 3, ((0,), (1,)), zero=1))
    )
    assert plan_for_fewer_workers(shared, 1, 0).world == 1, "grids that become one have one level"


def test_it_is_written_down_with_the_stages():
    plan = ParallelPlan.of([3, 2], layers=4).with_zero([0, 1])
    assert plan_of_stages(stages_as_data(plan)) == plan
    assert plan.describe() == "2 stages x 3/2 replicas, ZeRO 0/1"
    older = [{key: value for key, value in stage.items() if "zero" not in key} for stage in stages_as_data(plan)]
    assert plan_of_stages(older) == plan.with_zero(0)
    assert plan_of_stages(stages_as_data(plan.with_zero(1, 2))) == plan.with_zero(1, 2)


def test_without_replicas_a_line_says_that_nothing_is_divided():
    job = parse_job(JOB)
    (line,) = lines_about_zero(ParallelPlan.mesh(pp=2, layers=4).with_zero(1), job)
    assert line == "plan.zero is 1, and no stage has replicas to divide state: each worker keeps all of its own"
    assert not lines_about_zero(ParallelPlan.of([1, 2], layers=4).with_zero(1), job)
    assert not lines_about_zero(ParallelPlan.mesh(pp=2, layers=4), job)


def test_without_a_mirror_a_line_says_what_the_loss_of_a_worker_costs():
    divided, whole = (ParallelPlan.mesh(dp=2, layers=4).with_zero(level) for level in (1, 0))
    alone, mirrored = (parse_job(JOB + f"elastic: {{mirror: {mirror}}}\n") for mirror in ("off", "auto"))
    (line,) = lines_about_zero(divided, alone)
    assert line.startswith("plan.zero is 1, and elastic.mirror is off: each replica's part of the state has no other copy")
    assert not lines_about_zero(divided, mirrored) and not lines_about_zero(whole, alone)


def test_two_holders_of_each_part_are_a_key_of_their_own():
    plan = PlanConfig(stages=2, replicas=3, zero=1, zero_holders=2).to_plan(5)
    assert (plan.zero_levels, plan.zero_holders, plan.most_zero) == ((1, 1), 2, 1)
    made = PlanConfig.of_plan(plan, "1f1b")
    assert made.zero_holders == 2 and made.to_plan(5) == plan
    assert PlanConfig.of_plan(plan.with_zero(0), "1f1b").zero_holders == 1
    placed = PlanConfig(placements=({"layers": ["*"], "workers": [[0], [1], [2]]},), zero=1, zero_holders=2)
    assert placed.to_plan(["a", "b"]).zero_holders == 2
    assert ParallelPlan.mesh(dp=4, layers=4).with_zero(1, 2).with_replicas([3]).zero_holders == 2


@pytest.mark.parametrize("given", [0, 3, "2", 1.5])
def test_one_or_two_replicas_hold_a_part(given):
    with pytest.raises(ConfigError, match=r"zero_holders"):
        PlanConfig(replicas=3, zero=1, zero_holders=given)


def test_two_holders_of_state_that_nobody_divides_are_an_error():
    for levels in (0, [0, 0]):
        with pytest.raises(PlanError, match=r"plan.zero_holders is 2, and plan.zero is 0: each replica holds all") as error:
            PlanConfig(stages=2, replicas=3, zero=levels, zero_holders=2)
        assert "set plan.zero: 1" in error.value.cure


def test_two_holders_of_two_replicas_save_nothing_and_a_line_says_so():
    job = parse_job(JOB + "elastic: {mirror: off}\n")
    (line,) = lines_about_zero(ParallelPlan.mesh(dp=2, layers=4).with_zero(1, 2), job)
    assert line == (
        "plan.zero_holders is 2, and a stage has 2 replicas: each holds everything, and nothing is saved (of 3 replicas each "
        "would hold 2 parts of 3)"
    )
    assert not lines_about_zero(ParallelPlan.mesh(dp=3, layers=4).with_zero(1, 2), job), "no mirror is needed"
    (line,) = lines_about_zero(ParallelPlan.mesh(pp=2, layers=4).with_zero(1, 2), job)
    assert line == "plan.zero is 1, and no stage has replicas to divide state: each worker keeps all of its own"


def test_the_sheet_has_both_copies_of_each_part():
    plan = ParallelPlan.mesh(dp=4, layers=1)
    sheets = [memory_sheets(PROFILE, plan.with_zero(1, n), "1f1b", Microbatches(4, 4))[0].state for n in (1, 2)]
    assert sheets[1]["optimizer"] == 2 * sheets[0]["optimizer"] and sheets[1]["parameter"] == sheets[0]["parameter"]


def test_an_optimizer_that_couples_parameters_is_refused():
    trial = try_optimizer(OptimizerConfig(function=optimizers.NormalisesAll, args={"lr": 0.1}), {"a": (8, 8), "b": (8,)})
    plan = ParallelPlan.mesh(dp=2, layers=2).with_zero(1)
    with pytest.raises(ConfigError, match=r"cannot be used with plan.zero: 1: its step of one parameter") as error:
        trial.check_plan(plan)
    assert "set plan.zero: 0" in error.value.cure and "measured: " in error.value.cure
    trial.check_plan(plan.with_zero(0))


SIZE = 4 << 20
WIDTHS = {"parameter": 4, "gradient": 4, "optimizer": 8}
PROFILE = ModelProfile(
    (LayerProfile("l", 1.0, 2.0, 1.0, 1.0, parameter_bytes=4 * SIZE),),
    link=LinkProfile(bandwidth=1e6),
    state=StateBytes(ModelOutline((), elements=({"a": SIZE},)), {kind: {"a": n * SIZE} for kind, n in WIDTHS.items()}),
)


def test_the_sheet_counts_what_a_replica_owns():
    plan = ParallelPlan.mesh(dp=4, layers=1).with_zero(1)
    sheet = memory_sheets(PROFILE, plan, "1f1b", Microbatches(4, 4))[2]
    assert sheet.state == {"parameter": 4 * SIZE, "gradient": 4 * SIZE, "optimizer": 2 * SIZE}
    assert Ownership(plan, PROFILE.state.outline).elements(2, "optimizer") == SIZE // 4


@pytest.mark.parametrize("holders", [1, 2])
def test_the_sheet_has_parameters_that_are_gathered(holders):
    """As many in all as at level 2; what a replica keeps is its own part."""
    plan, batching = ParallelPlan.mesh(dp=4, layers=1), Microbatches(4, 4)
    three, two = (memory_sheets(PROFILE, plan.with_zero(level, holders), "1f1b", batching)[2] for level in (3, 2))
    assert three.state["parameter"] == holders * SIZE and three.gathered == (4 - holders) * SIZE
    assert three.total == two.total and two.gathered == 0
    assert f"{(4 - holders) * 4}.0 MiB of gathered parameters" in str(three)


def test_of_copies_in_a_lower_precision_what_is_gathered_is_the_copy():
    """A frozen master is kept with its copy: both by owners, and while layers compute the copies of all."""
    outline = ModelOutline((), elements=({"a": SIZE, "old": SIZE},), frozen=frozenset({"old"}))
    by_tensor = {"parameter": {"a": 2 * SIZE, "old": 6 * SIZE}, "master": {"a": 4 * SIZE}}
    state = StateBytes(outline, by_tensor, {"a": 2 * SIZE, "old": 2 * SIZE})
    assert set(state.gathered(ParallelPlan.mesh(dp=4, layers=1).with_zero(3))) == {2 * (2 * SIZE - SIZE // 2)}
    assert set(state.gathered(ParallelPlan.mesh(dp=4, layers=1).with_zero(2))) == {0}


def test_it_is_a_way_to_need_less_memory():
    plan, limit = ParallelPlan.mesh(dp=4, layers=1), 15 * SIZE
    text = describe_changes_that_fit(PROFILE, plan, "1f1b", Microbatches(4, 4, 4), limit)
    assert "plan.zero=1 (40.0 MiB a worker, the same results)" in text
    assert "plan.zero" not in describe_changes_that_fit(PROFILE, plan.with_zero(1), "1f1b", Microbatches(4, 4, 4), limit)


def test_a_stage_and_recomputation_are_named_together_where_neither_suffices():
    profile = replace(PROFILE, layers=(replace(PROFILE.layers[0], activation_bytes=8 * SIZE),), mirror=None)
    plan, batching = ParallelPlan.mesh(dp=2, layers=1), Microbatches(8, 2, 8)
    text = describe_changes_that_fit(profile, plan, "gpipe", batching, 21 * SIZE)
    assert text.startswith("predicted to fit: plan.recompute=full and plan.zero=1 (80.0 MiB a worker, the same results)"), text
    text = describe_changes_that_fit(replace(profile, mirror="memory"), plan, "gpipe", batching, 21 * SIZE)
    assert "elastic.mirror_in=FOLDER and plan.recompute=full and plan.zero=1 (80.0 MiB" in text


def test_scattered_gradients_are_named_where_levels_alone_do_not_suffice():
    plan, batching = ParallelPlan.mesh(dp=4, layers=1), Microbatches(8, 8, 8)
    known = replace(PROFILE, most_zero=3)
    text = describe_changes_that_fit(known, plan, "1f1b", batching, 15 * SIZE)
    assert text.startswith("predicted to fit: plan.zero=1 (56.0 MiB"), text
    assert "scatter" not in text
    text = describe_changes_that_fit(known, plan, "1f1b", batching, 12 * SIZE)
    assert text.startswith("predicted to fit: plan.zero=2 and plan.gradients=scatter ("), text
    text = describe_changes_that_fit(known, plan.with_zero(2), "1f1b", batching, 12 * SIZE)
    assert text.startswith("predicted to fit: plan.gradients=scatter ("), text


def pool(plan: ParallelPlan) -> GradientPool:
    """Room for all gradients."""
    return GradientPool(8 << 20, PROFILE.state.outline, 4)


def fitted(profile: ModelProfile, plan: ParallelPlan, **more: bool) -> tuple[ParallelPlan, str]:
    """The plan with what is chosen of ZeRO stages below 3."""
    batching = Microbatches(4, 4, 4)
    return fit_to_memory(replace(profile, most_zero=2), plan, "1f1b", batching, pool, **more)


@pytest.mark.parametrize("mib, level, line", [
    (100, 0, "plan.zero=0, which fits: the largest worker needs 64.0 MiB, a worker has 100.0 MiB"),
    (
        50, 1,
        "plan.zero=1, predicted to be the fastest of 2 ways that fit: 28.2 ms a step (28.2 with plan.zero=2); the "
        "largest worker needs 40.0 MiB (64.0 MiB with plan.zero=0), a worker has 50.0 MiB",
    ),
    (
        30, 1,
        "plan.zero=1, which needs least, and does not fit: the largest worker needs 40.0 MiB (64.0 MiB with plan.zero=0, "
        "40.0 MiB with plan.zero=2), a worker has 30.0 MiB; to try next: plan.recompute=full, then plan.activations_in=FOLDER, "
        "then plan.optimizer_in=FOLDER",
    ),
])  # fmt: skip
def test_auto_is_the_lowest_level_that_fits_and_says_why(mib, level, line):
    plan, why = fitted(replace(PROFILE, memory_bytes=mib << 20), ParallelPlan.mesh(dp=4, layers=1))
    assert (plan.zero_levels, why) == ((level,), line)


def test_auto_divides_nothing_where_nothing_can_be_divided_or_nobody_knows_the_memory():
    def chosen(profile: ModelProfile, plan: ParallelPlan) -> tuple[int, str]:
        found, why = fitted(profile, plan)
        return max(found.zero_levels), why

    four, small = ParallelPlan.mesh(dp=4, layers=1), replace(PROFILE, memory_bytes=1 << 30)
    assert chosen(small, ParallelPlan.mesh(layers=1)) == (0, "plan.zero=0: no stage has replicas to divide state")
    assert chosen(replace(small, most_stages=1), four) == (0, "plan.zero=0: the optimizer couples parameters")
    assert chosen(PROFILE, four) == (0, "plan.zero=0: it is not known how much memory a worker has")


def test_what_was_tried_is_not_named_as_what_to_try_next():
    layer = replace(PROFILE.layers[0], activation_bytes=4 << 20)
    tight = replace(PROFILE, layers=(layer,), memory_bytes=36 << 20, recomputable=(0,))
    _, why = fitted(tight, ParallelPlan.mesh(dp=4, layers=1), recompute_is_open=True)
    assert "which needs least, and does not fit" in why and "plan.recompute=full, then" not in why


def test_auto_recomputes_without_replicas():
    kept = replace(PROFILE.layers[0], activation_bytes=8 * SIZE, output_bytes=SIZE)
    profile = replace(PROFILE, layers=(kept, kept), state=None, memory_bytes=0, recomputable=(0, 1))
    plan = ParallelPlan.mesh(layers=2)
    whole, again = (
        largest_worker_bytes(profile, replace(plan, recompute=r), "gpipe", Microbatches(4, 4, 4)) for r in ((), (0, 1))
    )
    assert again < whole
    profile = replace(profile, memory_bytes=again)
    found, why = fit_to_memory(profile, plan, "gpipe", Microbatches(4, 4, 4), pool, recompute_is_open=True)
    assert found.recompute == (0, 1)
    assert why.startswith("plan.zero=0 and plan.recompute=full, the only way that fits: the largest worker needs ")


def test_auto_is_a_value_of_the_key_and_level_0_until_it_is_chosen():
    config = PlanConfig(stages=2, replicas=3, zero="auto", zero_holders=2)
    assert config.zero == "auto" and config.to_plan(5).zero_levels == (0, 0) and config.to_plan(5).zero_holders == 2
    assert parse_job(JOB + "plan: {replicas: 2, zero: auto}").leaves_zero_open
    assert parse_job(JOB + "plan: auto").leaves_zero_open and not parse_job(JOB).leaves_zero_open


def test_auto_leaves_recomputation_open_unless_the_job_says_which():
    job = parse_job(JOB + "plan: {replicas: 2, zero: auto}")
    assert job.leaves_recompute_open and job.plan.recompute == "auto" and job.recompute == "none"
    assert parse_job(JOB + "plan: auto").leaves_recompute_open and not parse_job(JOB).leaves_recompute_open
    for given in ("none", "full", "['a']"):
        assert not parse_job(JOB + f"plan: {{replicas: 2, zero: auto, recompute: {given}}}").leaves_recompute_open


def test_the_planner_divides_state_where_a_plan_would_not_fit_and_says_so():
    """One layer of 16 MiB on four workers: replicas of it, or one."""
    slow = replace(PROFILE, most_zero=2, link=LinkProfile(0.0, 1e9))
    assert search_plans(slow, 4, Microbatches(4, 4, 4), zero=None).plan.most_zero == 0
    tight = replace(slow, memory_bytes=50 << 20)
    choice = search_plans(tight, 4, Microbatches(4, 4, 4), zero=None)
    assert choice.plan.zero_levels == (1,) and choice.plan.stages[0].replicas == 4
    report = plan_report(choice)
    assert "plan.zero=1, for memory: without, a worker would need 64.0 MiB, and it has 50.0 MiB" in report
    assert "1f1b, ZeRO 1" in report.splitlines()[1] and "; plan.zero=1, for memory" in short_plan_report(choice)
    assert plan_report_as_dict(choice)["candidates"][0]["zero"] == 1
    with pytest.raises(PlanError, match="no plan for 4 workers fits"):
        search_plans(tight, 4, Microbatches(4, 4, 4))
    with pytest.raises(PlanError, match="no plan for 4 workers fits"):
        search_plans(replace(tight, most_stages=1), 4, Microbatches(4, 4, 4), zero=None)


def test_both_numbers_of_holders_stand_side_by_side():
    mirrored = replace(PROFILE, mirror="memory")
    plan, batching = ParallelPlan.mesh(dp=4, layers=1).with_zero(1), Microbatches(4, 4, 4)
    found = sheets_by_holders(mirrored, plan, "1f1b", batching)
    assert [(each.holders, each.is_mirrored) for each in found] == [(1, True), (2, True), (2, False)]
    assert [each.divided_bytes for each in found] == [2 * SIZE, 4 * SIZE, 4 * SIZE]
    # of each of two snapshots a worker has its own quarter (or half) of parameters and optimizer state, and another's
    assert [each.sheet.mirror for each in found] == [4 * 3 * SIZE, 4 * 6 * SIZE, 0]
    assert not sheets_by_holders(mirrored, plan.with_zero(0), "1f1b", batching)
    assert not sheets_by_holders(mirrored, ParallelPlan.mesh(dp=2, layers=1).with_zero(1), "1f1b", batching)


def test_plans_for_other_numbers_of_workers_have_the_level():
    choice = search_plans(PROFILE, 2, Microbatches(4, 4, 4), zero=1, zero_holders=2)
    assert choice.plan.zero_levels == (1,) * len(choice.plan.grids) and choice.plan.zero_holders == 2


def test_the_predicted_step_has_the_gather():
    plan = ParallelPlan.mesh(dp=4, layers=1)
    plain, divided = (simulation_costs(PROFILE, p, split=False).reduce_ms[0] for p in (plan, plan.with_zero(1)))
    assert divided == plain, "gradients go to their owners, and parameters come back"
    twice = simulation_costs(PROFILE, plan.with_zero(1, 2), split=False).reduce_ms[0]
    assert twice == pytest.approx(plain * (2 * 3 + 2) / (2 * 3)), "gradients to both holders, parameters to two replicas"


def test_the_sheet_has_the_open_sums_of_scattered_gradients_at_their_owners():
    for replicas, count, of_all in ((2, 8, 1.0), (8, 64, 0.375)):
        plan = ParallelPlan.mesh(dp=replicas, layers=1).with_zero(2).with_gradients("scatter")
        sheet = memory_sheets(PROFILE, plan, "1f1b", Microbatches(count, count))[0]
        assert sheet.state["gradient"] == of_all * 4 * SIZE
        at_level_1 = memory_sheets(PROFILE, plan.with_zero(1), "1f1b", Microbatches(count, count))[0]
        assert at_level_1.state["gradient"] == sheet.state["gradient"], "owners alone have totals"
        at_level_0 = memory_sheets(PROFILE, plan.with_zero(0), "1f1b", Microbatches(count, count))[0]
        own = 4 * SIZE // replicas
        assert at_level_0.state["gradient"] == max(sheet.state["gradient"], 4 * SIZE + own), "the totals of all in the end"
        one_block = memory_sheets(PROFILE, plan, "1f1b", Microbatches(count, 1))[0]
        assert one_block.state["gradient"] == own, "one open sum"


def test_the_predicted_step_has_the_messages_of_scattered_gradients():
    link = replace(PROFILE, link=LinkProfile(latency_ms=0.0, bandwidth=SIZE))
    plan, batching = ParallelPlan.mesh(dp=2, layers=1), Microbatches(8, 8)
    fold, scatter = (predict_step(link, one, "1f1b", batching)[0] for one in (plan, plan.with_gradients("scatter")))
    sent_ms = link.link.ms(link.layers[0].reduced_bytes / 2)
    compute_ms = max(fold.busy_ms)
    assert fold.makespan_ms == pytest.approx(compute_ms + 2 * sent_ms + link.step_ms)
    first_ms, each_ms = compute_ms / 4, max(compute_ms / 4, sent_ms)
    last_ms = first_ms + 3 * each_ms + sent_ms  # four microbatches of a replica, one message after the other
    assert scatter.makespan_ms == pytest.approx(last_ms + sent_ms + link.step_ms)
