"""The planner takes the fastest plan that fits, and says why; the simulator is its only objective."""

import json
import re
from dataclasses import replace
from itertools import combinations

import pytest

from raypar.errors import PlanError
from raypar.plan import Microbatches, MicrobatchRouting, ModelOutline, ParallelPlan, StagePlan
from raypar.plan.shard_ranges import TensorCut, even_ranges_by_shard
from raypar.plan.stage_connections import MAX_VALUES_OF_MESSAGE
from raypar.plan.state_bytes import StateBytes
from raypar.plan.tensor_parallel_layout import ShardWorkShare, TensorParallelLayout
from raypar.planner.candidate_plans import enumerate_candidates
from raypar.planner.model_profile import LayerProfile, LinkProfile, ModelProfile, largest_work_shares
from raypar.planner.plan_report import plan_report, plan_report_as_dict, short_plan_report
from raypar.planner.plan_search import ABOUT_AS_FAST, evaluate_candidate, reachable_shard_counts, search_plans
from raypar.planner.predicted_step import predict_step, simulation_costs

MIB = 1 << 20


def model(layers: int = 8, *, link: LinkProfile | None = None, memory_bytes: int | None = None, **each: float) -> ModelProfile:
    sizes = {"activation_bytes": 1000, "output_bytes": 100, "parameter_bytes": 1000, "optimizer_bytes": 2000} | each
    return ModelProfile(
        tuple(LayerProfile(f"l{i}", 1.0, 2.0, 1.0, 1.0, **sizes) for i in range(layers)),
        link=link or LinkProfile(),
        memory_bytes=memory_bytes,
    )


def test_free_communication_is_spent_on_replicas():
    choice = search_plans(model(), 4, Microbatches(8))
    assert (choice.best.candidate.replicas, choice.best.candidate.stages) == (4, 1)
    assert choice.best.predicted_ms == 2 * 8 * 3
    assert choice.best.bubble == 0


def test_heavy_parameters_over_a_slow_link_are_not_reduced_but_piped():
    profile = model(parameter_bytes=100 * MIB, link=LinkProfile(0.1, 0.1 * MIB))
    choice = search_plans(profile, 4, Microbatches(8))
    assert choice.best.candidate.replicas == 1 and choice.best.candidate.stages > 1


def test_a_model_too_large_for_one_worker_is_cut():
    cut = Microbatches(8)
    uncut = [evaluate_candidate(model(), c, cut).memory_bytes for c in enumerate_candidates(model(), 4, cut) if c.stages == 1]
    choice = search_plans(model(memory_bytes=min(uncut) - 1), 4, cut)
    assert choice.best.candidate.stages > 1
    assert any("more than there is" in v.reason for v in choice.verdicts)


def test_nothing_fits_is_said_with_numbers():
    with pytest.raises(PlanError, match=r"the smallest needs .* MiB a worker"):
        search_plans(model(memory_bytes=10), 4, Microbatches(8))


def test_no_plan_is_chosen_whose_messages_would_have_too_many_values():
    profile = model(4, parameter_bytes=100 * MIB, link=LinkProfile(0.1, 0.1 * MIB))
    many = tuple((1, 2, 1, f"v{index}") for index in range(MAX_VALUES_OF_MESSAGE + 1))
    choice = search_plans(replace(profile, outputs=((0, 1, 1, "a"), *many, (2, 3, 1, "b"))), 4, Microbatches(8))
    assert all(stage.last != 2 for stage in choice.plan.stages)
    assert any("values pass from stage" in verdict.reason for verdict in choice.verdicts)


def test_the_choice_is_the_best_of_an_exhaustive_search():
    profile, cut = model(7, link=LinkProfile(0.05, 1000.0)), Microbatches(6)
    choice = search_plans(profile, 5, cut)
    candidates = list(enumerate_candidates(profile, 5, cut))
    every = [
        evaluate_candidate(profile, replace(c, plan=c.plan.with_split_points(points)), cut).predicted_ms
        for c in candidates
        for points in combinations(range(1, 7), len(c.plan.stages) - 1)
    ]
    assert min(v.predicted_ms for v in choice.verdicts if v.predicted_ms is not None) == min(every)
    assert choice.best.predicted_ms <= (1 + ABOUT_AS_FAST) * min(every)
    assert len(choice.verdicts) == len(candidates)


def test_of_plans_about_as_fast_the_one_with_the_fewest_workers_wins_then_with_the_fewest_stages():
    cut = Microbatches(8)
    for shared in (replace(model(), processors=1), replace(model(), processors=1, step_ms=0.3)):
        assert search_plans(shared, 4, cut).plan.world == 1, "workers on one processor gain nothing"
    # A third worker saves 2 % of a step that is nearly all the optimizer's, which replicas do not share.
    for optimizer_ms, workers in ((40.0, 4), (4000.0, 1)):
        profile = model(2, optimizer_ms=optimizer_ms)
        choice = search_plans(replace(profile, layers=profile.layers[:1]), 4, cut)
        assert choice.plan.world == workers
        told = plan_report_as_dict(choice)["candidates"]
        fastest = min(v["predicted_ms"] for v in told if v["predicted_ms"] is not None)
        assert choice.best.predicted_ms <= (1 + ABOUT_AS_FAST) * fastest
    assert "chosen: the fewest workers within 3 % of the fastest" in plan_report(choice)
    assert "% faster" in plan_report(choice)
    # Two stages of a worker each are as fast as two replicas of it, whose gradients are reduced in no time.
    piped = search_plans(replace(model(), processors=2), 2, Microbatches(64))
    assert (piped.best.candidate.replicas, piped.best.candidate.stages) == (2, 1)


def test_one_worker_and_two_replicas_are_always_among_the_plans_that_are_shown_with_their_times():
    profile = model(12, link=LinkProfile(0.01, 1000.0))
    for rows in (1, 12, 40):
        choice = search_plans(profile, 12, Microbatches(24))
        lines = plan_report(choice, rows=rows).splitlines()
        for name in ("1 x 1", "2 x 1"):
            (line,) = (line for line in lines if line.startswith(f"{name} "))
            assert "% slower" in line and " ms " not in line, line
    assert f"and {len(choice.verdicts) - len(lines) + 4} more" in lines[-3]


def test_the_bound_of_every_candidate_is_below_its_simulation():
    profile, cut = model(9, link=LinkProfile(0.05, 1000.0)), Microbatches(7, 4)
    for candidate in enumerate_candidates(profile, 6, cut):
        assert evaluate_candidate(profile, candidate, cut).predicted_ms >= candidate.bound_ms - 1e-9


def test_candidates_give_every_worker_something_to_do():
    for candidate in enumerate_candidates(model(3), 8, Microbatches(4, 2)):
        assert candidate.replicas <= 2 and candidate.stages <= 3 and candidate.plan.world <= 8
        routing = MicrobatchRouting(candidate.plan, Microbatches(4, 2))
        assert all(routing.microbatches_of_replica(s, r) for s in range(candidate.stages) for r in range(candidate.replicas))


def test_unsplit_schedules_count_the_backward_as_measured_whole():
    profile = ModelProfile((LayerProfile("a", 1.0, 2.0, 1.5, 1.5),))
    plan = ParallelPlan.mesh(layers=1)
    whole, split = simulation_costs(profile, plan, split=False), simulation_costs(profile, plan, split=True)
    assert whole.input_ms[0] + whole.weight_ms[0] == 2.0
    assert split.input_ms[0] + split.weight_ms[0] == 3.0


def test_the_optimizer_of_the_busiest_worker_is_added_once():
    profile = model(4, optimizer_ms=5.0)
    one = evaluate_candidate(profile, next(iter(enumerate_candidates(profile, 1, Microbatches(2)))), Microbatches(2))
    assert one.predicted_ms == 2 * 4 * 3 + 4 * 5.0


def test_the_report_names_the_choice_first_and_what_the_job_gave():
    choice = search_plans(model(), 4, Microbatches(8, 4))
    lines = plan_report(choice, rows=5).splitlines()
    assert lines[1].startswith("4 x 1") and "chosen: the fastest" in lines[1]
    assert lines[-1] == "given by the job: 8 microbatches in 4 blocks; available: 4 workers"
    told = json.loads(json.dumps(plan_report_as_dict(choice)))
    assert told["candidates"][0]["verdict"] == "chosen"


def test_the_short_report_has_the_choice_the_next_shape_and_one_worker_in_two_lines():
    choice = search_plans(model(), 4, Microbatches(8, 4))
    why, where = short_plan_report(choice).splitlines()
    assert re.fullmatch(
        r"chosen: the fastest of \d+ plans of up to 4 workers "
        r"\(then 2 stages x 2 replicas [\d.]+ ms, 1 stage x 1 replica [\d.]+ ms\)",
        why,
    )
    assert where == "all of them: `raypar plan JOB --workers N`, or candidates in the run's plan.json"
    staged = search_plans(replace(model(), most_stages=None), 2, Microbatches(1, 1))
    assert ("plan.cuts=" in short_plan_report(staged)) == (len(staged.plan.stages) > 1)


def test_microbatches_and_blocks_are_never_chosen():
    cut = Microbatches(5, 3)
    assert search_plans(replace(model(), step_ms=1.0), 4, cut).microbatches is cut


def test_workers_that_share_processors_take_turns():
    alone, shared = model(), replace(model(), processors=2)
    cut, plan = Microbatches(8), ParallelPlan.mesh(dp=4, layers=8)
    assert predict_step(alone, plan, "1f1b", cut)[0].makespan_ms == 2 * 8 * 3
    assert predict_step(shared, plan, "1f1b", cut)[0].makespan_ms == 8 * 8 * 3 / 2
    choice = search_plans(shared, 4, cut)
    assert (choice.best.candidate.replicas, choice.best.candidate.stages) == (2, 1)


def test_every_plan_that_is_considered_has_the_shards_that_were_asked_for():
    profile, cut = model(), Microbatches(8)
    assert {(c.replicas * c.stages, c.plan.world) for c in enumerate_candidates(profile, 7, cut, 2)} == {
        (n, 2 * n) for n in (1, 2, 3)
    }
    choice = search_plans(profile, 7, cut, 2)
    assert choice.plan.world == 6 and {stage.shards for stage in choice.plan.stages} == {2}
    for candidate in enumerate_candidates(profile, 8, cut, 4):
        assert candidate.bound_ms <= evaluate_candidate(profile, candidate, cut).predicted_ms


def test_shards_compute_their_part_hold_their_part_and_sum_four_times_a_layer():
    cut, link = Microbatches(4), LinkProfile(0.5, 1000.0)
    parameters = {f"{i}.{kind}": size for i in range(2) for kind, size in (("cut", 600), ("whole", 200))}
    layers = tuple({name: size for name, size in parameters.items() if name.startswith(str(i))} for i in range(2))
    outline = ModelOutline(
        (), elements=layers, shardings={2: {f"{i}.cut": TensorCut(0, 6, even_ranges_by_shard(6, 2)) for i in range(2)}}
    )
    optimizer = {name: 2000 * size // 800 for name, size in parameters.items()}
    state = StateBytes(outline, {"parameter": parameters, "gradient": parameters, "optimizer": optimizer})
    profile = replace(model(2, link=link, parameter_bytes=800), state=state)
    plan = ParallelPlan.mesh(tp=2, layers=2)
    sums_ms = 2 * 2 * (0.5 + 2 * 1 / 2 * 100 / 1000)
    found = simulation_costs(profile, plan, split=False)
    assert found.forward_ms == (2 / 2 + sums_ms,) and found.input_ms == (4 / 2 + sums_ms,)
    timeline, memory = predict_step(profile, plan, "1f1b", cut)
    assert timeline.makespan_ms == pytest.approx(4 * (3 + 2 * sums_ms))
    # Parameters, gradients (4 blocks: 3 open sums), and optimizer state as parameters' part of 1600.
    assert memory == (1000 * (1 + 3) + 2500 + 2 * 1000 // 2,) * 2


def test_a_layer_that_no_style_cuts_is_computed_whole_by_every_shard_and_sums_nothing():
    sizes = ({"a.up.weight": 600, "a.norm.weight": 200}, {"b.up.weight": 800}, {"a.up.weight": 600})
    half = (ShardWorkShare(0.5, 0.5), ShardWorkShare(0.5, 0.5))
    uneven = (ShardWorkShare(0.5, 0.5), ShardWorkShare(0.25, 0.25))  # heads that two shards cannot share out
    layout = TensorParallelLayout(2, {}, {}, costs={"a.up": half, "c.down": uneven})
    outline = ModelOutline(
        (("a", (), ()), ("b", (), ()), ("c", (), ())),
        ties=(("a.up.weight", "c.down.weight"),),
        elements=sizes,
        shardings={2: {}},
        layouts={2: layout},
    )
    assert largest_work_shares(outline, StagePlan(0, 3, ((0, 1),))) == ((600 * 0.5 + 200) / 800, 1.0, 0.5)
    link = LinkProfile(0.5, 1000.0)
    bare = model(3, link=link)
    known = replace(bare, state=StateBytes(outline, {"parameter": {}, "gradient": {}, "optimizer": {}}))
    sums_ms = 2 * (0.5 + 2 * 1 / 2 * 100 / 1000)
    plan = ParallelPlan.mesh(pp=3, tp=2, layers=3)
    assert simulation_costs(bare, plan, split=False).forward_ms == (0.5 + sums_ms,) * 3, "evenly where styles are not known"
    assert simulation_costs(known, plan, split=False).forward_ms == (0.625 + sums_ms, 1.0, 0.5 + sums_ms)
    assert simulation_costs(known, plan, split=True).weight_ms == (0.625, 1.0, 0.5)


def test_layers_are_recomputed_where_memory_asks_for_it_and_nowhere_else():
    heavy, cut = model(8, activation_bytes=10_000, output_bytes=10), Microbatches(4)
    may = replace(heavy, recomputable=tuple(range(8)))
    least = min(evaluate_candidate(heavy, c, cut).memory_bytes for c in enumerate_candidates(heavy, 2, cut))
    for roomy in (may, replace(may, memory_bytes=least)):
        choice = search_plans(roomy, 2, cut)
        assert choice.plan.recompute == () and "recomputing" not in plan_report(choice, rows=1).splitlines()[1]
    tight = search_plans(replace(may, memory_bytes=least - 1), 2, cut)
    assert tight.plan.recompute == tuple(range(8)) and tight.best.memory_bytes < least
    assert ", recomputing" in plan_report(tight, rows=1)
    assert plan_report_as_dict(tight)["candidates"][0]["recompute"] == list(range(8))
    some = search_plans(replace(may, memory_bytes=least - 1, recomputable=(0, 1, 2)), 2, cut)
    assert some.plan.recompute == (0, 1, 2), "layers that may not be recomputed are not"
    with pytest.raises(PlanError, match="no plan for 2 workers fits"):
        search_plans(replace(heavy, memory_bytes=least - 1), 2, cut)


def test_a_job_may_come_to_have_the_shards_it_has_and_what_divides_the_most():
    assert reachable_shard_counts(ParallelPlan.mesh(tp=4, layers=2)) == (4, 2, 1)
    assert reachable_shard_counts(ParallelPlan.of((1, 1), (6, 4), layers=2)) == (6, 4, 3, 2, 1)
    assert reachable_shard_counts(ParallelPlan.mesh(layers=2)) == (1,)
