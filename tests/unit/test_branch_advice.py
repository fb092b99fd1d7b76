"""What `raypar plan` says of a model's branches: side by side with few microbatches, replicas with as many as workers."""

import pytest

from raypar.console.plan_text import branch_lines
from raypar.launch.plan_as_dict import branch_advice_as_dict
from raypar.plan import Microbatches, ParallelPlan, StagePlan
from raypar.planner.branch_advice import BranchAdvice, advise_on_branches, place_branches, places_branches
from raypar.planner.model_profile import LayerProfile, LinkProfile, ModelProfile
from raypar.planner.predicted_step import predict_step

BLOCK = (1.0, 1.0, 3.0, 2.0)
"""Forward times of a block's branches."""


def model_of_branches(blocks: int = 2, link: LinkProfile | None = None) -> ModelProfile:
    """A stem, then blocks of branches that a layer joins."""
    times, outputs, given = [1.0], [], 0
    for _ in range(blocks):
        first = len(times)
        join = first + len(BLOCK)
        outputs += [(given, branch, 8) for branch in range(first, join)] + [(branch, join, 8) for branch in range(first, join)]
        times += [*BLOCK, 0.1]
        given = join
    layers = tuple(LayerProfile(f"l{i}", ms, 2 * ms, ms, ms) for i, ms in enumerate(times))
    return ModelProfile(layers, link or LinkProfile(), outputs=tuple(outputs))


def advice(workers: int, microbatches: int, shown: ParallelPlan | None = None) -> BranchAdvice:
    profile, cut = model_of_branches(), Microbatches(microbatches)
    plan = shown or ParallelPlan.mesh(layers=len(profile.layers), dp=workers)
    plan_ms = predict_step(profile, plan, "list" if shown else "1f1b", cut)[0].makespan_ms
    found = advise_on_branches(profile, plan, plan_ms, cut, workers)
    assert found is not None
    return found


def test_two_workers_divide_the_branches_so_that_both_end_at_once():
    profile = model_of_branches()
    plan = place_branches(profile, 2)
    assert plan is not None
    owner = {i: stage.workers[0][0] for stage in plan.stages for i in range(stage.first, stage.last)}
    for first in (1, 6):
        mine = [sum(ms for i, ms in enumerate(BLOCK, first) if owner[i] == worker) for worker in (0, 1)]
        assert sorted(mine) == [3.0, 4.0]
    assert places_branches(plan, profile.crossing(plan))


def test_a_branch_of_several_layers_stays_on_one_worker():
    """Layers 1 to 3 and 4 to 6 are branches; layer by layer the first would go on where the shorter one has ended."""
    outputs = [(0, 1, 8), (1, 2, 8), (2, 3, 8), (0, 4, 8), (4, 5, 8), (5, 6, 8), (3, 7, 8), (6, 7, 8)]
    times = (0.1, 3.0, 3.0, 3.0, 0.5, 0.5, 2.0, 0.1)
    layers = tuple(LayerProfile(f"l{i}", ms, 2 * ms, ms, ms) for i, ms in enumerate(times))
    plan = place_branches(ModelProfile(layers, outputs=tuple(outputs)), 2)
    assert plan is not None
    owner = [stage.workers[0][0] for stage in plan.stages for _ in range(stage.first, stage.last)]
    assert len({*owner[1:4]}) == len({*owner[4:7]}) == 1 and owner[1] != owner[4]
    assert [(stage.first, stage.last) for stage in plan.stages] == [(0, 1), (1, 4), (4, 7), (7, 8)]


def test_a_chain_has_no_branches_and_slow_links_leave_all_to_one_worker():
    profile = model_of_branches()
    stages = ParallelPlan.mesh(layers=len(profile.layers), pp=2)
    assert not places_branches(stages, profile.crossing(stages))
    chain = ModelProfile(profile.layers)
    assert advise_on_branches(chain, stages, 1.0, Microbatches(1), 2) is None
    divided = ParallelPlan.mesh(layers=len(profile.layers)).with_virtual_shards(2)  # its bits are those of two shards
    assert advise_on_branches(profile, divided, 1.0, Microbatches(1), 2) is None
    assert place_branches(model_of_branches(link=LinkProfile(latency_ms=100.0)), 2) is None


def test_with_fewer_microbatches_than_workers_branches_are_faster():
    found = advice(workers=2, microbatches=1)
    whole = 3 * (1 + 2 * (sum(BLOCK) + 0.1))
    assert found.replicas_ms == pytest.approx(whole)
    assert found.branches_ms == pytest.approx(whole - 2 * 3 * 3.0)
    assert not found.replicas_win and not found.is_placed
    (line,) = branch_lines({"branches": branch_advice_as_dict(found, [f"l{i}" for i in range(11)])})
    assert line == (
        "parallel branches, computed side by side by 2 workers (plan.placements; --json names them), would take 27.6 ms a step "
        "in the place of 45.6: 2 replicas take 45.6 ms, for there are fewer microbatches (1) than workers"
    )


def test_two_replicas_of_two_branches_each_are_better_than_both_alone():
    found = advice(workers=4, microbatches=2)
    assert found.plan.describe().startswith("2 replicas") or max(s.replicas for s in found.plan.stages) == 2
    assert found.branches_ms < found.replicas_ms / 1.5


@pytest.mark.parametrize("microbatches", [2, 4])
def test_from_as_many_microbatches_as_workers_on_replicas_are_faster(microbatches: int):
    plan = place_branches(model_of_branches(), 2)
    found = advice(2, microbatches, shown=plan)
    assert found.replicas_win and found.is_placed
    (line,) = branch_lines({"branches": branch_advice_as_dict(found, [f"l{i}" for i in range(11)])})
    assert line.startswith("this plan computes parallel branches side by side: 2 replicas would take")
    assert f"there are as many microbatches ({microbatches}) as workers, or more" in line


def test_a_plan_whose_branches_are_placed_badly_is_told_of_better_places():
    profile = model_of_branches()
    plan = ParallelPlan(tuple(StagePlan(i, i + 1, ((0 if i in (0, 1, 5, 6, 10) else 1,),)) for i in range(11)))
    assert places_branches(plan, profile.crossing(plan))
    found = advice(2, 1, shown=plan)
    (line,) = branch_lines({"branches": branch_advice_as_dict(found, [f"l{i}" for i in range(11)])})
    assert line.endswith("; placed otherwise (plan.placements; --json names them), branches would take 27.6 ms")
