"""Layers are cut into stages where the step is predicted to be fastest, and stay where they are if that is as good."""

import itertools
import json
import random
from dataclasses import replace

import pytest

from raypar.errors import ScheduleError
from raypar.plan import Microbatches, MicrobatchRouting, ParallelPlan
from raypar.planner import stage_balance
from raypar.planner.candidate_plans import enumerate_candidates
from raypar.planner.model_profile import LayerProfile, LinkProfile, ModelProfile
from raypar.planner.plan_report import processors_of_prediction, stage_balance_as_dict, stage_balance_text
from raypar.planner.plan_search import balance_stages, evaluate_candidate, search_plans
from raypar.planner.predicted_step import predict_step
from raypar.schedule import registry

pytestmark = pytest.mark.part(4)

SCHEDULES = [
    ("naive", 1),
    ("gpipe", 1),
    ("gpipe", 2),
    ("1f1b", 1),
    ("interleaved", 2),
    ("interleaved", 3),
    ("zb-h1", 1),
    ("zb-v", 2),
]


def layer(name: str, forward_ms: float, **sizes: float) -> LayerProfile:
    return LayerProfile(name, forward_ms, 2 * forward_ms, forward_ms, forward_ms, **sizes)


def profile(*forward_ms: float, **more: object) -> ModelProfile:
    return ModelProfile(
        tuple(layer(f"l{i}", ms, activation_bytes=1000, parameter_bytes=1000) for i, ms in enumerate(forward_ms)), **more
    )


def plan_of(schedule: str, workers: int, layers: int, chunks: int | None = None, **counts: object) -> ParallelPlan:
    replicas, shards = counts.get("replicas", [1] * workers), counts.get("shards", [1] * workers)
    return ParallelPlan.of(
        replicas,
        shards,
        layers=layers,
        chunks=registry.resolve_chunks_per_worker(schedule, chunks),
        placement=registry.placement_of_schedule(schedule),
    )


def all_cuts(plan: ParallelPlan) -> list[ParallelPlan]:
    """Every cut that leaves each layer its number of shards."""
    every = itertools.combinations(range(1, plan.stages[-1].last), len(plan.stages) - 1)
    found = [plan.with_split_points(points) for points in every]
    return [other for other in found if other.shards_by_layer == plan.shards_by_layer]


def step_ms(found: ModelProfile, plan: ParallelPlan, schedule: str, cut: Microbatches) -> float:
    return predict_step(found, plan, schedule, cut)[0].makespan_ms


# What users see.


def test_ten_layers_under_zb_v_on_two_workers_keep_both_busy():
    gpt = profile(0.2, *[5.0] * 8, 1.2)
    even = plan_of("zb-v", 2, 10)
    found = balance_stages(gpt, even, "zb-v", Microbatches(8))
    assert even.split_points == (2, 5, 7)
    assert [round(100 * (1 - bubble)) for bubble in found.even_step.bubbles] == [65, 99]
    assert min(1 - bubble for bubble in found.best_step.bubbles) > 0.9
    assert found.plan is found.best and found.gain > 0.15
    every = {other: step_ms(gpt, other, "zb-v", Microbatches(8)) for other in all_cuts(even)}
    assert every[found.plan] <= min(every.values()) * (1 + stage_balance.TIE_SHARE)


def test_the_line_about_the_cut_names_it_the_other_and_what_it_gains():
    gpt = profile(0.2, *[5.0] * 8, 1.2)
    found = balance_stages(gpt, plan_of("zb-v", 2, 10), "zb-v", Microbatches(8))
    assert stage_balance_text(found) == (
        "stages cut by measured times, plan.cuts=[3, 5, 7]: predicted 18 % faster than by number of layers, [2, 5, 7]; "
        "with a processor each workers are busy 93 to 100 % of the time instead of 65 to 99 %"
    )
    told = json.loads(json.dumps(stage_balance_as_dict(found)))
    assert told["chosen"] == "measured times"
    assert told["by_number_of_layers"]["cuts"] == [2, 5, 7]
    assert told["by_measured_times"]["cuts"] == list(found.best.split_points)
    assert told["by_measured_times"]["predicted_ms"] < told["by_number_of_layers"]["predicted_ms"]


def test_equal_layers_are_shared_out_by_their_number():
    found = balance_stages(profile(*[5.0] * 12), plan_of("1f1b", 4, 12), "1f1b", Microbatches(8))
    assert found.plan.split_points == (3, 6, 9)
    assert stage_balance_text(found).endswith(
        "plan.cuts=[3, 6, 9]: no cut that was compared is predicted to be faster by more than 2 % and 1 ms"
    )
    assert stage_balance_as_dict(found)["chosen"] == "number of layers"


@pytest.mark.parametrize("seed", range(20))
def test_what_differs_from_run_to_run_by_a_little_does_not_move_the_cut(seed: int):
    noise = random.Random(seed)
    times = [5.0 * noise.uniform(0.99, 1.01) for _ in range(12)]
    found = balance_stages(profile(*times), plan_of("1f1b", 4, 12), "1f1b", Microbatches(8))
    assert found.plan.split_points == (3, 6, 9)


def test_which_of_many_equal_cuts_is_taken_is_not_left_to_noise():
    """Of ten layers under ZB-V many cuts are equal but for noise."""
    taken = []
    for seed in range(20):
        noise = random.Random(seed)
        gpt = profile(*(ms * noise.uniform(0.998, 1.002) for ms in (0.2, *[5.0] * 8, 1.2)))
        taken.append(balance_stages(gpt, plan_of("zb-v", 2, 10), "zb-v", Microbatches(8)).plan.split_points)
    assert set(taken) == {(3, 5, 7)}


def test_a_step_of_a_few_ms_keeps_its_cut_and_the_line_says_why():
    tiny = profile(0.002, 0.02, 0.02, 0.04)
    found = balance_stages(tiny, plan_of("1f1b", 2, 4), "1f1b", Microbatches(4))
    assert found.gain > stage_balance.MIN_GAIN_SHARE and found.plan.split_points == (2,)
    assert stage_balance_text(found) == (
        "stages cut by number of layers, plan.cuts=[2]: by measured times, [3], a step is predicted to be 0.2 ms (27.2 %) "
        "faster; only more than 2 % and 1 ms moves a cut"
    )


def test_the_worker_with_three_replicas_has_more_layers():
    found = balance_stages(profile(*[5.0] * 12), plan_of("1f1b", 2, 12, replicas=[1, 3]), "1f1b", Microbatches(12))
    assert found.plan.split_points[0] in (3, 4)


def test_workers_that_share_processors_are_balanced_as_if_they_did_not():
    """The run may join a cluster with a processor for each."""
    gpt = profile(0.2, *[5.0] * 8, 1.2)
    shared = balance_stages(replace(gpt, processors=1), plan_of("zb-v", 2, 10), "zb-v", Microbatches(8))
    assert shared.plan == balance_stages(gpt, plan_of("zb-v", 2, 10), "zb-v", Microbatches(8)).plan


# The cut is the best there is.


def random_profile(chance: random.Random, layers: int) -> ModelProfile:
    def one(index: int) -> LayerProfile:
        forward = chance.choice((0.1, 1, 1, 2, 4)) * chance.uniform(1, 1.1)
        inputs, weights = forward * chance.uniform(0.8, 1.2), forward * chance.uniform(0.5, 1.2)
        sizes = {
            name: chance.randint(1, 1000) for name in ("activation_bytes", "output_bytes", "parameter_bytes", "optimizer_bytes")
        }
        whole = inputs + weights * chance.uniform(0.8, 1)
        return LayerProfile(f"l{index}", forward, whole, inputs, weights, **sizes, optimizer_ms=chance.choice((0, 0.5)))

    link = LinkProfile(0.05, 2000.0) if chance.random() < 0.5 else LinkProfile()
    return ModelProfile(tuple(one(index) for index in range(layers)), link)


def random_case(seed: int, schedule: str, chunks: int) -> tuple[ModelProfile, ParallelPlan, Microbatches]:
    chance = random.Random(seed)
    workers = chance.randint(2, 4)
    layers = chance.randint(workers * chunks, max(12, workers * chunks))
    replicas = [chance.choice((1, 1, 2))] * workers if seed % 3 else [chance.randint(1, 3) for _ in range(workers)]
    shards = [1] * workers if seed % 2 else [chance.randint(1, 2) for _ in range(workers)]
    plan = plan_of(schedule, workers, layers, chunks, replicas=replicas, shards=shards)
    return random_profile(chance, layers), plan, Microbatches(chance.choice((2, 4, 8)))


def check_against_every_cut(seed: int, schedule: str, chunks: int) -> None:
    model, even, cut = random_case(seed, schedule, chunks)
    found = balance_stages(model, even, schedule, cut)
    every = [step_ms(model, other, schedule, cut) for other in all_cuts(even)]
    assert min(every) * (1 - 1e-9) <= found.best_step.makespan_ms <= min(every) * (1 + stage_balance.TIE_SHARE)
    assert found.best.shards_by_layer == even.shards_by_layer
    chosen = step_ms(model, found.plan, schedule, cut)
    assert chosen <= max(min(every) * (1 + stage_balance.MIN_GAIN_SHARE), min(every) + stage_balance.MIN_GAIN_MS)
    assert found == balance_stages(model, even, schedule, cut)


@pytest.mark.parametrize(("schedule", "chunks", "seed"), [(*kind, number % 2) for number, kind in enumerate(SCHEDULES)])
def test_no_other_cut_is_predicted_to_be_faster(schedule: str, chunks: int, seed: int):
    """With seed 0 stages have other numbers of replicas and of shards each."""
    check_against_every_cut(seed, schedule, chunks)


@pytest.mark.full
@pytest.mark.parametrize(("schedule", "chunks"), SCHEDULES)
@pytest.mark.parametrize("seed", range(60))
def test_no_other_cut_is_predicted_to_be_faster_in_full(schedule: str, chunks: int, seed: int):
    check_against_every_cut(seed, schedule, chunks)


@pytest.mark.parametrize(("schedule", "chunks"), SCHEDULES)
@pytest.mark.parametrize("is_chain", [True, False])
def test_the_bound_of_every_cut_is_below_its_step(schedule: str, chunks: int, is_chain: bool):
    model, even, cut = random_case(len(schedule), schedule, chunks)
    if not is_chain:  # the second layer reads the batch, and the third what the first two have made
        pairs = [(i, i + 1, 8) for i in range(2, len(model.layers) - 1)]
        model = replace(model, outputs=((0, 2, 8), (1, 2, 8), *pairs))
    routing = MicrobatchRouting(even, cut)
    made = registry.build_schedule(schedule, routing)
    search = searched(model, even, schedule, cut, most_compared=0)
    for other in all_cuts(even)[::3]:
        assert search.bound.ms(other.split_points) <= predict_step(model, other, made, cut)[0].makespan_ms + 1e-9


def searched(model: ModelProfile, even: ParallelPlan, schedule: str, cut: Microbatches, *, most_compared: int):
    """The search that `balance_stages` has made, for a look inside."""
    made: list[stage_balance._SplitPointSearch] = []
    kind = stage_balance._SplitPointSearch

    class Watched(kind):
        def __init__(self, *given: object) -> None:
            super().__init__(*given)
            made.append(self)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(stage_balance, "_SplitPointSearch", Watched)
        patch.setattr(stage_balance, "MAX_COMPARED_CUTS", most_compared)
        balance_stages(model, even, schedule, cut)
    return made[-1]


@pytest.mark.parametrize(("schedule", "chunks"), SCHEDULES)
def test_of_more_cuts_than_can_be_compared_a_good_one_is_found(schedule: str, chunks: int):
    model, even, cut = random_case(1, schedule, chunks)
    best = searched(model, even, schedule, cut, most_compared=0)
    every = min(step_ms(model, other, schedule, cut) for other in all_cuts(even))
    assert best.score(best.best)[1] <= 1.05 * every


@pytest.mark.parametrize("schedule", ["1f1b", "zb-v"])
def test_two_hundred_layers_on_sixteen_workers_are_cut_by_few_simulations(schedule: str):
    """Instructions are what a search costs; how long they take is the machine's."""
    chance = random.Random(1)
    times = [chance.choice((0.2, 1, 1, 1, 3)) for _ in range(200)]
    even = plan_of(schedule, 16, 200)
    search = searched(profile(*times), even, schedule, Microbatches(64), most_compared=stage_balance.MAX_COMPARED_CUTS)
    assert len(search.predicted) * search.simulation_cost <= stage_balance.MAX_SIMULATED_INSTRUCTIONS + search.simulation_cost
    assert step_ms(profile(*times), even, schedule, Microbatches(64)) > 1.15 * search.score(search.best)[1]


# What the cut must not change, and what limits it.


def test_layers_keep_their_numbers_of_shards_because_results_depend_on_them():
    times = [9.0, 1.0, 1.0, 1.0, 1.0, 1.0, 1.0, 4.0]
    even = plan_of("1f1b", 4, 8, shards=[2, 2, 1, 1])
    found = balance_stages(profile(*times), even, "1f1b", Microbatches(8))
    assert found.plan.shards_by_layer == even.shards_by_layer == (2,) * 4 + (1,) * 4
    assert found.plan.split_points == (1, 4, 7)


def test_where_every_stage_has_other_shards_or_one_layer_nothing_can_move():
    assert not plan_of("1f1b", 2, 9, shards=[1, 2]).has_movable_split_points
    assert not plan_of("1f1b", 4, 4).has_movable_split_points and not plan_of("1f1b", 1, 4).has_movable_split_points
    assert plan_of("1f1b", 3, 9, shards=[1, 2, 2]).has_movable_split_points
    found = balance_stages(profile(*range(1, 10)), plan_of("1f1b", 2, 9, shards=[1, 2]), "1f1b", Microbatches(8))
    assert found.plan == found.best == found.even


def test_a_cut_that_does_not_fit_into_memory_is_not_taken():
    layers = tuple(layer(f"l{i}", 5.0, parameter_bytes=size) for i, size in enumerate((500, 500, 500, 100, 100, 100)))
    even, cut = plan_of("1f1b", 2, 6), Microbatches(4, 1)

    def cut_at(memory_bytes: int | None) -> stage_balance.StageBalance:
        return balance_stages(ModelProfile(layers, memory_bytes=memory_bytes), even, "1f1b", cut)

    assert cut_at(None).plan.split_points == (3,)
    tight = cut_at(2500)  # parameters and gradients of three heavy layers take 3000 bytes
    assert tight.plan.split_points == (2,) and (tight.best_lacks_bytes, tight.even_lacks_bytes) == (0, 500)
    assert "by number of layers, [3], a worker would need 0.0 MiB more memory than there is" in stage_balance_text(tight)
    assert cut_at(1000).plan.split_points == (3,), "where none fits memory does not count"


def test_a_schedule_that_does_not_fit_is_refused_before_anything_is_searched():
    even = plan_of("1f1b", 2, 6)
    made = registry.build_schedule("1f1b", MicrobatchRouting(even, Microbatches(4)))
    with pytest.raises(ScheduleError, match="the schedule has 1 worker, the plan 2"):
        balance_stages(profile(*[1.0] * 6), even, lambda routing, connections: made[:1], Microbatches(4))


def test_the_planner_balances_its_fastest_candidates_too():
    gpt = profile(0.2, *[5.0] * 8, 1.2, link=LinkProfile(0.1, 100.0))
    heavy = replace(gpt, layers=tuple(replace(x, parameter_bytes=100_000) for x in gpt.layers))
    cut = Microbatches(8)
    choice = search_plans(heavy, 2, cut)
    assert choice.best.candidate.stages == 2
    every = [evaluate_candidate(heavy, c, cut).predicted_ms for c in enumerate_candidates(heavy, 2, cut)]
    assert choice.best.predicted_ms <= min(every)
    assert len(choice.verdicts) == len(every)


def test_the_cuts_are_weighed_for_a_processor_each_and_the_step_for_those_there_are():
    """Both say which: where workers share processors the plan's step is longer than that of its cut, and else equal."""
    for processors, told_for in ((None, "a processor for each worker"), (2, "4 workers on 2 processors")):
        shared = replace(profile(*[5.0] * 12), processors=processors)
        found = balance_stages(shared, plan_of("1f1b", 4, 12), "1f1b", Microbatches(8))
        step, _ = predict_step(shared, found.plan, "1f1b", Microbatches(8))
        assert (step.makespan_ms == found.best_step.makespan_ms) is (processors is None)
        assert processors_of_prediction(processors, 4) == told_for
        assert stage_balance_as_dict(found)["predicted_for"] == "a processor for each worker"
