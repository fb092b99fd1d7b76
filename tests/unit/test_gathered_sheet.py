"""Gathered parameters in predictions: memory by step, microbatch and layer, bytes sent, time, and which way `auto` takes."""

from collections.abc import Sequence
from dataclasses import replace

import pytest

from raypar.console.plan_text import plan_as_text
from raypar.errors import PlanError
from raypar.launch.plan_as_dict import plan_as_dict
from raypar.model.layer_skeletons import LayerSize
from raypar.plan import Microbatches, MicrobatchRouting, ModelOutline, ParallelPlan
from raypar.plan.gradient_pool import GradientPool
from raypar.plan.ownership import Ownership
from raypar.plan.stage_plan import GatherSpan
from raypar.plan.state_bytes import StateBytes
from raypar.planner.fit_to_memory import fit_to_memory
from raypar.planner.gathered_parameters import GatherTraffic, gather_traffic, ms_with_gathers
from raypar.planner.gradient_route import predict_plan
from raypar.planner.memory_sheet import describe_changes_that_fit, memory_sheets
from raypar.planner.model_profile import LayerProfile, LinkProfile, ModelProfile
from raypar.planner.plan_report import plan_report, plan_report_as_dict
from raypar.planner.plan_search import search_plans
from raypar.planner.predicted_step import predict_step, simulation_costs
from raypar.planner.ways_to_fit import ways_to_fit
from raypar.schedule import registry
from raypar.schedule.instructions import Gather, Schedule

KIB = 1 << 18
"""Elements of a MiB in float32."""
MIB = 1 << 20


def profile_of(sizes: Sequence[int], *, stay: bool = False, **more) -> ModelProfile:
    """A chain of layers with one parameter of so many MiB each (0: none), 1 ms forward and 2 ms backward.

    `stay`: whether parameters that a replica owns whole stay; else layers compute with copies, which come and go.
    """
    elements = tuple({f"l{i}.w": size * KIB} if size else {} for i, size in enumerate(sizes))
    by_tensor = {
        kind: {name: width * of for layer in elements for name, of in layer.items()}
        for kind, width in {"parameter": 4, "gradient": 4, "optimizer": 8}.items()
    }
    layers = tuple(
        LayerProfile(f"l{i}", 1.0, 2.0, 1.0, 1.0, activation_bytes=MIB, parameter_bytes=size * MIB)
        for i, size in enumerate(sizes)
    )
    outline = ModelOutline((), elements=elements)
    copies = {} if stay else by_tensor["parameter"]
    return ModelProfile(
        layers, state=StateBytes(outline, by_tensor, copies), link=LinkProfile(bandwidth=MIB), most_zero=3, **more
    )


def made(profile: ModelProfile, plan: ParallelPlan, schedule: str, count: int) -> tuple[Microbatches, Schedule]:
    batching = Microbatches(count, count, 64)
    routing = MicrobatchRouting(plan, batching)
    return batching, registry.build_schedule(schedule, routing, connections=profile.crossing(plan))


def gathered(profile: ModelProfile, plan: ParallelPlan, schedule: str = "1f1b", count: int = 4) -> list[int]:
    """By rank: MiB of gathered parameters in the sheet."""
    batching, orders = made(profile, plan, schedule, count)
    return [sheet.gathered // MIB for sheet in memory_sheets(profile, plan, orders, batching)]


def by(span: GatherSpan, plan: ParallelPlan, holders: int = 1) -> ParallelPlan:
    return plan.with_zero(3, holders).with_gather(span)


SIZES = [1, 8, 2, 0, 4, 3]


def test_by_layer_two_layers_that_follow_each_other_are_there():
    profile, plan = profile_of(SIZES), ParallelPlan.mesh(dp=2, layers=6)
    assert gathered(profile, by("step", plan)) == [9, 9], "half of all"
    assert gathered(profile, by("microbatch", plan)) == [18, 18], "parts lie apart from the whole"
    assert gathered(profile, by("layer", plan)) == [10, 10], "8 and 2"
    assert gathered(profile_of([1, 1, 2, 0, 4]), by("layer", ParallelPlan.mesh(dp=2, layers=5))) == [6, 6], "over one without"
    pipeline = ParallelPlan.mesh(dp=2, pp=2, layers=6)
    assert gathered(profile, by("layer", pipeline)) == [10, 10, 7, 7]
    assert gathered(profile, by("layer", pipeline.with_split_points([1]))) == [1, 1, 10, 10], "a layer alone"


def test_from_one_instruction_to_the_next_its_first_layer_arrives():
    """Under GPipe forward follows forward: the last layer computes while the first one arrives."""
    profile, plan = profile_of([8, 1, 1, 6]), by("layer", ParallelPlan.mesh(dp=2, layers=4))
    assert gathered(profile, plan, "1f1b") == [9, 9]
    assert gathered(profile, plan, "gpipe") == [14, 14]


def test_by_microbatch_two_stages_are_there():
    """Stages of 1, 8 and 6 MiB on the first two workers, of 2, 4 and 3 on the others."""
    profile = profile_of([1, 2, 8, 4, 6, 3])
    plan = ParallelPlan.mesh(dp=2, pp=2, chunks=3, layers=6)
    assert gathered(profile, by("step", plan), "interleaved") == [7, 7, 4, 4]
    assert gathered(profile, by("microbatch", plan), "interleaved") == [14, 14, 7, 7]
    two = profile_of([4, 2, 8, 4])
    assert gathered(two, by("microbatch", ParallelPlan.mesh(dp=2, pp=2, chunks=2, layers=4)), "interleaved") == [12, 12, 6, 6]


def test_what_one_replica_owns_whole_stays():
    """Of layers of 1, 8, 2, 4 and 3 MiB the first replica owns 1, 3, 2, 0 and 3, of 8 and 4 a part."""
    profile, plan = profile_of([1, 8, 2, 4, 3], stay=True), ParallelPlan.mesh(dp=2, layers=5)
    owned = [profile.state.owned_by_layer(by("layer", plan), 0, rank)[0] for rank in (0, 1)]
    assert [[sum(layer.values()) // MIB for layer in of] for of in owned] == [[1, 3, 2, 0, 3], [0, 5, 0, 4, 0]]
    assert gathered(profile, by("layer", plan)) == [8 + 4, 8 + 2], "layers that follow each other of those that come"
    assert gathered(profile, by("microbatch", plan)) == [8 + 4, 1 + 8 + 2 + 3]
    three = by("layer", ParallelPlan.mesh(dp=3, layers=2), holders=2)
    assert gathered(profile_of([3, 3], stay=True), three) == [6, 6, 6], "two runs are not one"


def test_the_rest_of_the_sheet_is_as_by_step():
    profile, plan = profile_of(SIZES, stay=True), ParallelPlan.mesh(dp=3, layers=6)
    batching, orders = made(profile, plan, "1f1b", 4)
    sheets = [memory_sheets(profile, by(span, plan), orders, batching)[1] for span in ("step", "microbatch", "layer")]
    assert len({tuple({**sheet.by_kind, "gathered": 0}.items()) for sheet in sheets}) == 1
    assert sheets[2].state["parameter"] == 6 * MIB, "what it owns"


def test_of_copies_of_masters_that_come_and_go_nothing_is_kept():
    profile, plan = profile_of(SIZES), ParallelPlan.mesh(dp=3, layers=6)
    batching, orders = made(profile, plan, "1f1b", 4)
    kept = [
        memory_sheets(profile, by(s, plan), orders, batching)[1].state["parameter"] for s in ("step", "microbatch", "layer")
    ]
    assert kept == [6 * MIB, 0, 0]


# -- bytes sent -------------------------------------------------------------------------------------------------------------


def traffic(profile: ModelProfile, plan: ParallelPlan, schedule: str, count: int) -> tuple[GatherTraffic, ...]:
    return gather_traffic(profile, plan, made(profile, plan, schedule, count)[1])


def bytes_of(profile: ModelProfile, plan: ParallelPlan, rank: int, gathers: str) -> int:
    """Bytes of gathers of layers, as their numbers: what other replicas hold of each."""
    ownership = Ownership(plan, profile.state.outline)
    sizes = [sum(layer.values()) for layer in profile.state.outline.elements]
    for name, start, stop in ownership.runs(0, 0, rank):
        sizes[int(name[1])] -= stop - start
    return sum(4 * sizes[int(layer)] for layer in gathers)


@pytest.mark.parametrize("schedule, layer", [
    # two microbatches: F B F B, where what one pass ends with is there when the next begins
    ("1f1b", "012" "10" "12" "10"),
    # F F B B
    ("gpipe", "012" "012" "10" "210"),
])  # fmt: skip
def test_each_gather_brings_what_others_keep(schedule, layer):
    profile, plan = profile_of([4, 5, 3]), ParallelPlan.mesh(dp=2, layers=3)
    for span, gathers in (("step", "012"), ("microbatch", "012"), ("layer", layer)):
        found = traffic(profile, by(span, plan), schedule, 4)
        nbytes = [bytes_of(profile, by(span, plan), rank, gathers) for rank in (0, 1)]
        assert [each.received for each in found] == nbytes and [each.sent for each in found] == nbytes[::-1]
        assert [each.gathers for each in found] == [len(gathers) if span == "layer" else 1] * 2
        assert sum(nbytes) == MIB * sum((4, 5, 3)[int(i)] for i in gathers), "(n - 1) / n of each, on each of n"
    assert traffic(profile, plan.with_zero(2), schedule, 4) == (GatherTraffic(0, 0, 0),) * 2


def test_replicas_with_other_numbers_of_microbatches_and_holders_ask_for_other_bytes():
    profile, plan = profile_of([4, 4, 4]), ParallelPlan.mesh(dp=3, layers=3)
    for holders in (1, 2):
        divided = by("layer", plan, holders)
        found = traffic(profile, divided, "1f1b", 4)
        gathers = ["01210", "01210", "012101210"]
        assert [each.gathers for each in found] == [5, 5, 9], "1, 1 and 2 microbatches"
        assert [each.received for each in found] == [bytes_of(profile, divided, r, g) for r, g in enumerate(gathers)]
        assert sum(each.sent for each in found) == sum(each.received for each in found)


def test_what_a_replica_has_whole_it_does_not_ask_for():
    profile, plan = profile_of([4, 4], stay=True), by("layer", ParallelPlan.mesh(dp=2, layers=2))
    assert traffic(profile, plan, "1f1b", 2) == (GatherTraffic(1, 4 * MIB, 4 * MIB),) * 2, "F of the other's, which stays for B"


def test_a_gather_of_recomputation_is_one_of_the_recomputed_layers():
    profile = profile_of([4, 4, 4])
    plan = replace(by("layer", ParallelPlan.mesh(dp=2, layers=3)), recompute=(1,))
    # two microbatches under GPipe: C C R B R B; the recomputed layer is there from the pass before
    (first, _) = traffic(profile, plan, "gpipe", 4)
    gathers = "012012210210"
    assert (first.gathers, first.received) == (len(gathers), bytes_of(profile, plan, 0, gathers))


# -- time -------------------------------------------------------------------------------------------------------------------


def test_a_layer_arrives_while_the_one_before_it_computes():
    """Forward 1 ms a layer, backward 2 ms; a gather takes half of the MiB in ms."""
    plan = by("layer", ParallelPlan.mesh(dp=2, layers=3))
    costs = simulation_costs(profile_of([1, 1, 1]), plan, split=False)
    assert (costs.forward_ms, costs.input_ms) == ((3.0,), (6.0,)), "hidden"
    costs = simulation_costs(profile_of([8, 4, 6]), plan, split=False)
    assert costs.forward_ms == (2.0 + 3.0 + 1.0,), "the layers behind are waited for: 2 and 3 ms"
    assert costs.input_ms == (2.0 + 4.0 + 2.0,)
    split = simulation_costs(profile_of([8, 4, 6]), plan, split=True)
    assert (split.input_ms, split.weight_ms) == ((2.0 + 4.0 + 1.0,), (3.0,)), "weight gradients need no parameters"
    again = replace(plan, recompute=(1, 2))
    assert simulation_costs(profile_of([8, 4, 6]), again, split=False).recompute_ms == (3.0 + 1.0,)
    with_empty = simulation_costs(profile_of([0, 4, 0, 6]), by("layer", ParallelPlan.mesh(dp=2, layers=4)), split=False)
    assert with_empty.forward_ms == (2.0 + 3.0 + 1.0,), "layers without parameters hide, too"


def test_a_stage_that_has_no_parameters_and_takes_no_time_waits_for_nothing():
    """As the backward pass of a first stage that only reshapes what it reads."""
    profile = profile_of([0, 8, 2])
    profile = replace(profile, layers=(replace(profile.layers[0], forward_ms=0.0, backward_ms=0.0), *profile.layers[1:]))
    plan = by("layer", ParallelPlan.mesh(dp=2, pp=2, layers=3).with_split_points([1]))
    costs = simulation_costs(profile, plan, split=False)
    assert costs.forward_ms[0] == costs.input_ms[0] == 0.0 < costs.forward_ms[1]
    assert ms_with_gathers(profile, plan.stages[0], {}, backward=True) == 0.0


def test_parameters_that_come_again_are_no_part_of_the_reduction():
    profile, plan = profile_of([4, 4]), ParallelPlan.mesh(dp=2, layers=2)
    by_step, by_layer = (simulation_costs(profile, by(span, plan), split=False).reduce_ms for span in ("step", "layer"))
    assert (by_step, by_layer) == ((8.0,), (4.0 + 2.0,)), "but the first layer's, before which nothing computes"


def test_a_step_ends_with_the_last_message_of_scattered_gradients():
    """Where nothing comes after it: parameters come again before each use."""
    plan = ParallelPlan.mesh(dp=2, pp=2, chunks=3, layers=6).with_zero(3).with_gather("microbatch")
    slow = replace(profile_of([4] * 6), link=LinkProfile(0.0, MIB / 1000))
    step, _ = predict_step(slow, plan.with_gradients("scatter"), "interleaved", Microbatches(8, 8))
    scatter_ms = simulation_costs(slow, plan.with_gradients("scatter"), split=False).scatter_ms
    assert step.makespan_ms > 4 * 3 * min(scatter_ms) > 0


def test_the_predicted_step_has_gathers_by_microbatch():
    profile = profile_of([4] * 6)
    plan = ParallelPlan.mesh(dp=2, pp=2, chunks=3, layers=6)
    costs = simulation_costs(profile, by("microbatch", plan), split=False)
    assert costs.gather_ms == (2.0,) * 6 and not simulation_costs(profile, by("step", plan), split=False).gather_ms
    timeline, _ = predict_step(profile, by("microbatch", plan), "interleaved", Microbatches(8, 8))
    gathers = [span for span in timeline.spans[0] if type(span.instruction) is Gather]
    assert gathers and all(span.end_ms - span.start_ms == 2.0 for span in gathers)
    starts = [span.start_ms for span in timeline.spans[0]]
    assert starts == sorted(starts)


# -- what auto takes --------------------------------------------------------------------------------------------------------


def unused_pool(plan: ParallelPlan) -> GradientPool:
    raise AssertionError("nothing is scattered")


def chosen(memory: float, plan: ParallelPlan, schedule: str = "1f1b", sizes: Sequence[int] = (4,) * 12) -> tuple[str, str]:
    """(the chosen way, the line about it) for workers of so many MiB."""
    profile = replace(profile_of(sizes), memory_bytes=round(memory * MIB))
    found, why = fit_to_memory(profile, plan, schedule, Microbatches(4, 4, 4), unused_pool)
    return f"{found.most_zero} {found.gather_spans[0]}", why


def test_auto_chooses_the_level_together_with_the_way_of_gradients_and_with_recomputation():
    """Not of plans that fold alone: parameters would be gathered layer by layer, where less scatters and costs less."""
    plan, batching = ParallelPlan.mesh(dp=4, layers=12), Microbatches(8, 8)
    known = replace(profile_of([4] * 12), memory_bytes=160 * MIB, recomputable=tuple(range(12)))

    def pool(of: ParallelPlan) -> GradientPool:
        return GradientPool(8 << 20, known.state.outline, 4)

    ways = ways_to_fit(known, plan, zero_is_open=True, scatter_is_open=True, recompute_is_open=True)
    for link, fastest in ((1, "the fastest"), (100, "within 3 % of the fastest")):
        profile = replace(known, link=LinkProfile(bandwidth=link * MIB))
        predicted = {way.plan: predict_plan(profile, way.plan, "1f1b", batching, pool) for way in ways}
        fit = [each.ms for each in predicted.values() if each.fits(160 * MIB)]
        assert (len(predicted), len(fit)) == (16, 8)
        found, why = fit_to_memory(profile, plan, "1f1b", batching, pool, scatter_is_open=True, recompute_is_open=True)
        assert predicted[found].fits(160 * MIB) and predicted[found].ms <= 1.03 * min(fit)
        assert why.startswith(f"plan.zero=1 and plan.gradients=scatter, predicted to be {fastest} of 8 ways that fit: "), why
        assert "does not fit" not in why and "\n" not in why


def test_auto_goes_from_level_to_level_and_then_gathers_by_layer():
    plan = ParallelPlan.mesh(dp=4, layers=12)
    # parameters and gradients 48 MiB each, optimizer state 96: 12 + 12 of activations
    assert chosen(300, plan)[0] == "0 step"
    assert chosen(150, plan)[0] == "1 step"
    which, why = chosen(110, plan)
    assert which == "3 layer"
    assert why.startswith("plan.zero=3 and plan.gather=layer, the only way that fits: the largest worker needs 92.0 MiB (")
    assert "204.0 MiB with plan.zero=0, 132.0 MiB with plan.zero=1, 132.0 MiB with plan.zero=2)" in why
    which, why = chosen(50, plan)
    assert which == "3 layer" and "which needs least, and does not fit" in why
    assert why.endswith("; to try next: plan.recompute=full, then plan.activations_in=FOLDER, then plan.optimizer_in=FOLDER")


def test_auto_gathers_by_microbatch_where_a_worker_has_stages_enough():
    """Six stages of 8 MiB on each of two replicas of one position."""
    plan = ParallelPlan.of([2], layers=12, chunks=6)
    needs = {
        span: memory_sheets(profile_of([4] * 12), by(span, plan), "gpipe", Microbatches(4, 4, 4))[0].total / MIB
        for span in ("step", "microbatch", "layer")
    }
    assert needs["layer"] < needs["microbatch"] < needs["step"]
    assert chosen(needs["step"], plan, "gpipe")[0] == "1 step"
    assert chosen(needs["microbatch"], plan, "gpipe")[0] == "3 microbatch"
    assert chosen(needs["layer"], plan, "gpipe")[0] == "3 layer"


def test_the_planner_gathers_by_layer_where_a_plan_would_not_fit_and_says_so():
    batching = Microbatches(4, 4, 4)
    tight = replace(profile_of([4] * 12), memory_bytes=110 * MIB, most_stages=None)
    one_stage = replace(tight, link=LinkProfile(0.0, 1e12), most_stages=1)
    assert one_stage.zero_levels == range(1), "couples parameters"
    choice = search_plans(replace(tight, link=LinkProfile(0.0, 1e12)), 4, batching, zero=None)
    texts = [v.changed_for_memory for v in choice.verdicts]
    assert any("plan.zero=3 and plan.gather=layer" in text for text in texts), texts
    assert {each["gather"] for each in plan_report_as_dict(choice)["candidates"]} == {"step", "layer"}
    fixed = search_plans(tight, 4, batching, zero=3, gather="layer")
    assert set(fixed.plan.gather_spans) == {"layer"} and "ZeRO 3 by layer" in plan_report(fixed)
    with pytest.raises(PlanError, match="no plan for 1 worker fits"):
        search_plans(tight, 1, batching, zero=None)


def test_advice_names_it_where_levels_do_not_suffice():
    plan, batching = ParallelPlan.mesh(dp=4, layers=12), Microbatches(4, 4, 4)
    profile = profile_of([4] * 12)
    text = describe_changes_that_fit(profile, plan, "1f1b", batching, 140 * MIB)
    assert text.startswith("predicted to fit: plan.zero=1 (") and "gather" not in text
    text = describe_changes_that_fit(replace(profile, most_stages=1), plan, "1f1b", batching, 110 * MIB)
    assert "gather" not in text, "nothing can be divided"
    text = describe_changes_that_fit(replace(profile, recomputable=()), plan.with_zero(3), "1f1b", batching, 80 * MIB)
    assert "plan.gather=layer" in text
    assert "plan.gather" not in describe_changes_that_fit(profile, by("layer", plan), "1f1b", batching, 60 * MIB)


def test_the_plan_says_what_gathers_send():
    profile, plan, batching = profile_of([4, 5, 3]), ParallelPlan.mesh(dp=2, layers=3), Microbatches(4, 4, 4)
    sizes = tuple(LayerSize(f"l{i}", KIB * of, MIB * of) for i, of in enumerate((4, 5, 3)))

    def text(plan: ParallelPlan) -> str:
        return plan_as_text(plan_as_dict(plan, "1f1b", batching, sizes, profile))

    assert "gathered by" not in text(plan.with_zero(2))
    assert "parameters are gathered by step: worker 0 gets 6.0 MiB in a step, in 1 gather\n" in text(by("step", plan)) + "\n"
    found = plan_as_dict(by("layer", plan), "1f1b", batching, sizes, profile)
    assert [row["gathers"] for row in found["gathers"]] == [9, 9]
    received = [row["received_bytes"] for row in found["gathers"]]
    most = received.index(max(received))
    assert (
        f"parameters are gathered by layer: worker {most} gets {received[most] / MIB:.1f} MiB in a step, in 9 gathers; once a "
        "step (plan.gather: step) it would get 6.0 MiB"
    ) in text(by("layer", plan))
    assert "gathered parameters" in text(by("layer", plan)), "the sheet"
