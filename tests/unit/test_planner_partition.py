"""The layer cut is the best there is, and a profile adds up."""

import random
from itertools import accumulate, combinations, pairwise

import pytest

from raypar.errors import PlanError
from raypar.plan import ParallelPlan
from raypar.planner.candidate_plans import balanced_cuts
from raypar.planner.model_profile import LayerProfile, LinkProfile, ModelProfile
from raypar.schedule.instructions import KEPT_INPUTS


def slowest(costs: list[float], cuts: tuple[int, ...]) -> float:
    return max(sum(costs[a:b]) for a, b in pairwise((0, *cuts, len(costs))))


@pytest.mark.parametrize("seed", range(60))
def test_no_other_cut_has_a_faster_slowest_stage(seed: int):
    chance = random.Random(seed)
    costs = [chance.choice((0, 1, 1, 2, 3, 8)) * chance.choice((1, 0.5)) for _ in range(chance.randint(1, 10))]
    for stages in range(1, len(costs) + 1):
        cuts = balanced_cuts([0, *accumulate(costs)], stages)
        assert all(a < b for a, b in pairwise((0, *cuts, len(costs))))
        best = min(slowest(costs, c) for c in combinations(range(1, len(costs)), stages - 1))
        assert slowest(costs, cuts) == best


def test_equal_layers_are_shared_out_evenly():
    assert balanced_cuts([0, *accumulate([1.0] * 12)], 4) == (3, 6, 9)


def test_a_thousand_layers_are_cut_at_once():
    sums = [0.0, *accumulate(1 + (i * 37 % 11) for i in range(1000))]
    cuts = balanced_cuts(sums, 64)
    assert max(sums[b] - sums[a] for a, b in pairwise((0, *cuts, 1000))) < 1.2 * sums[-1] / 64


def test_fewer_layers_than_stages_are_refused():
    with pytest.raises(PlanError, match="3 layers cannot fill 4 stages"):
        balanced_cuts([0, 1, 2, 3], 4)


def chain(count: int) -> ModelProfile:
    return ModelProfile(
        tuple(
            LayerProfile(f"l{i}", 1.0 + i, 2.0, 1.5, 1.0, activation_bytes=10, output_bytes=i, parameter_bytes=100)
            for i in range(count)
        )
    )


def test_a_stage_is_the_sum_of_its_layers():
    stage = chain(5).of(1, 4)
    assert (stage.name, stage.forward_ms, stage.backward_ms, stage.input_ms, stage.weight_ms) == ("l1..l3", 9, 6, 4.5, 3)
    assert (stage.activation_bytes, stage.output_bytes, stage.parameter_bytes) == (30, 3, 300)


def test_a_chain_crosses_with_the_last_layers_output():
    plan = ParallelPlan.mesh(pp=3, layers=6)
    assert [(e.src, e.dst, e.nbytes) for e in chain(6).crossing(plan).edges] == [(0, 1, 1), (1, 2, 3)]


def test_a_skip_crosses_once_to_each_consuming_stage():
    profile = ModelProfile(chain(4).layers, outputs=((0, 1, 8), (0, 2, 8), (0, 3, 8), (1, 2, 4), (2, 3, 2)))
    edges = profile.crossing(ParallelPlan.mesh(pp=2, layers=4)).edges
    assert [(e.src, e.dst, e.nbytes, e.readers) for e in edges] == [(0, 1, 12, (2, 1))]
    edges = profile.crossing(ParallelPlan.mesh(pp=4, layers=4)).edges
    assert [(e.src, e.dst, e.nbytes) for e in edges] == [(0, 1, 8), (0, 2, 8), (0, 3, 8), (1, 2, 4), (2, 3, 2)]


def test_values_of_one_layer_add_up_and_each_crosses_once_to_a_stage():
    outputs = ((0, 1, 8, "h"), (0, 1, 8, "mask"), (0, 2, 8, "h"), (0, 3, 5, "skip"), (1, 2, 4, "a"), (2, 3, 2, "b"))
    profile = ModelProfile(chain(4).layers, outputs=outputs)
    edges = profile.crossing(ParallelPlan.mesh(pp=2, layers=4)).edges
    assert [(e.src, e.dst, e.nbytes, e.values) for e in edges] == [(0, 1, 17, ("h", "skip", "a"))]
    edges = profile.crossing(ParallelPlan.of((1, 1), layers=4, cuts=(1,))).edges
    assert [(e.nbytes, e.values, e.value_bytes) for e in edges] == [(21, ("h", "mask", "skip"), (8, 8, 5))]


def test_recomputed_layers_keep_every_value_that_they_read():
    outputs = ((0, 1, 8, "h"), (0, 1, 8, "mask"), (0, 2, 8, "h"), (1, 2, 4, "a"))
    profile = ModelProfile(chain(3).layers, outputs=outputs)
    plan = ParallelPlan.mesh(pp=1, layers=3, recompute=(1, 2))
    assert profile.kept_bytes(plan, 0, 1, recompute=True)[KEPT_INPUTS] == 10 + 8 + 8


def test_a_message_takes_latency_and_bytes_over_bandwidth():
    assert LinkProfile(0.5, 1000).ms(2000) == 2.5
    assert LinkProfile().ms(1 << 40) == 0
