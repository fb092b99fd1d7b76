"""How many bytes of state a rank is predicted to hold: what `Ownership` says it keeps, times what each tensor takes."""

from dataclasses import replace

import pytest

from raypar.plan import Microbatches, MicrobatchRouting, ModelOutline, ParallelPlan, StagePlan
from raypar.plan.ownership import Ownership
from raypar.plan.shard_ranges import TensorCut, even_ranges_by_shard
from raypar.plan.state_bytes import StateBytes
from raypar.planner.memory_sheet import memory_sheets
from raypar.planner.model_profile import LayerProfile, ModelProfile
from raypar.planner.open_gradient_sums import open_sums
from raypar.planner.predicted_step import state_bytes
from raypar.schedule import registry

MODEL = ModelOutline(
    (),
    elements=({"embed": 600, "mask": 50}, {"1.weight": 1200, "1.old": 300}, {"2.norm": 100}, {"3.bias": 20, "embed": 600}),
    shardings={
        2: {"embed": TensorCut(0, 30, even_ranges_by_shard(30, 2)), "1.weight": TensorCut(0, 3, even_ranges_by_shard(3, 2))}
    },
    buffers=frozenset({"mask"}),
    frozen=frozenset({"1.old"}),
)
"""The last layer uses the first one's embedding again, the second has a frozen parameter; three rows on 2 shards: 1 and 2."""

TRAINED = {"embed": 600, "1.weight": 1200, "2.norm": 100, "3.bias": 20}
STATE = StateBytes(
    MODEL,
    {
        "parameter": {name: 4 * size for name, size in {**TRAINED, "1.old": 300}.items()},
        "gradient": {name: 4 * size for name, size in TRAINED.items()},
        "optimizer": {name: 8 * size for name, size in TRAINED.items()},
    },
)
PROFILE = ModelProfile(tuple(LayerProfile(f"l{i}", 1.0, 2.0, 1.0, 1.0) for i in range(4)), state=STATE)


def predicted(plan: ParallelPlan, blocks: int = 1, zero: int = 0) -> list[tuple[int, int, int]]:
    """By rank: bytes of parameters, gradients and optimizer state."""
    routing = MicrobatchRouting(plan.with_zero(zero), Microbatches(blocks, blocks))
    found = state_bytes(PROFILE, routing, registry.build_schedule("gpipe", routing))
    return list(zip(found["parameter"], found["gradient"], found["optimizer"], strict=True))


def test_a_tie_inside_a_stage_is_one_tensor_with_one_state_and_a_gradient_for_each_layer_that_uses_it():
    assert predicted(ParallelPlan.mesh(layers=4)) == [(4 * 2220, 4 * (1920 + 600), 8 * 1920)]


def test_a_tie_over_two_stages_of_one_worker_is_a_tensor_in_each_of_them():
    plan = ParallelPlan.mesh(pp=2, chunks=2, placement="v", layers=4)
    first = {"embed": 2 * 600, "3.bias": 20}
    assert predicted(plan)[0] == tuple(n * sum(first.values()) for n in (4, 4, 8))


def test_frozen_parameters_have_neither_gradients_nor_optimizer_state():
    assert predicted(ParallelPlan.mesh(pp=4, layers=4))[1] == (4 * 1500, 4 * 1200, 8 * 1200)


def test_each_shard_holds_what_its_cuts_say_and_what_is_not_cut_whole():
    found = predicted(ParallelPlan.mesh(pp=4, tp=2, layers=4))
    assert [parameters for parameters, _, _ in found] == [4 * n for n in (300, 300, 700, 1100, 100, 100, 320, 320)]
    assert [optimizer for _, _, optimizer in found] == [8 * n for n in (300, 300, 400, 800, 100, 100, 320, 320)]


def test_gradients_are_the_open_sums_of_a_replicas_blocks():
    for blocks, sums in ((1, 1), (2, 2), (4, 3), (8, 4)):
        assert predicted(ParallelPlan.mesh(pp=4, layers=4), blocks)[2][1] == 4 * 100 * sums
    assert [g for _, g, _ in predicted(ParallelPlan.mesh(dp=2, layers=4), 8)] == [4 * (1920 + 600) * 3] * 2


@pytest.mark.parametrize("schedule", ["gpipe", "1f1b", "zb-h1"])
def test_open_sums_are_counted_in_the_order_of_the_backward_passes(schedule):
    """A stage that gets microbatches of two replicas in turn has a block of each under way; one in order has floor(log2) + 1,
    but for runs that are no subtree of the tree: of 4, 5 and 6 the last two wait for each other."""

    def sums(replicas: tuple[int, ...], microbatches: Microbatches, rank: int) -> int:
        routing = MicrobatchRouting(ParallelPlan.of(replicas, layers=4), microbatches)
        (stage,) = routing.plan.stages_of(rank)
        return open_sums(routing, stage, rank, registry.build_schedule(schedule, routing)[rank])

    assert [sums((1, 1), Microbatches(8, blocks), 1) for blocks in (1, 2, 4, 8)] == [1, 2, 3, 4]
    assert [sums((2, 2), Microbatches(8, blocks), 2) for blocks in (1, 2, 4, 8)] == [1, 1, 2, 3]
    in_turn = [
        i.microbatch
        for i in registry.build_schedule(schedule, MicrobatchRouting(ParallelPlan.of((2, 1), layers=4), Microbatches(8, 4)))[2]
        if i.letter == ("W" if schedule == "zb-h1" else "B")
    ]
    assert in_turn != sorted(in_turn) and sums((2, 1), Microbatches(8, 4), 2) == 4
    assert [sums((3,), Microbatches(8, 8), rank) for rank in range(3)] == [2, 2, 3]


@pytest.mark.parametrize("zero, shared", [(0, ""), (1, "optimizer"), (2, "optimizer"), (3, "optimizer parameter")])
def test_replicas_share_out_what_the_zero_stage_says(zero, shared):
    """One stage without a tie, large enough to be shared evenly. Each replica adds up whole gradients of its blocks: what
    level 2 frees is freed when they are reduced."""
    size = 4 << 20
    outline = ModelOutline((), elements=({"a": size},))
    profile = ModelProfile(
        (LayerProfile("l", 1.0, 2.0, 1.0, 1.0),),
        state=StateBytes(outline, {kind: {"a": n * size} for kind, n in (("parameter", 4), ("gradient", 4), ("optimizer", 8))}),
    )
    routing = MicrobatchRouting(ParallelPlan.mesh(dp=4, layers=1).with_zero(zero), Microbatches(4, 4))
    found = state_bytes(profile, routing, registry.build_schedule("gpipe", routing))
    for kind, width in (("parameter", 4), ("gradient", 4), ("optimizer", 8)):
        assert set(found[kind]) == {width * size // (4 if kind in shared else 1)}
    plan = routing.plan
    assert memory_sheets(profile, plan, "1f1b", routing.microbatches)[3].state["optimizer"] == 8 * size // (4 if zero else 1)


PLANS = [
    ParallelPlan.mesh(dp=3, layers=4),
    ParallelPlan.of([3, 2], layers=4),
    ParallelPlan.mesh(dp=2, pp=2, tp=2, layers=4),
    ParallelPlan.of([3, 2], [2, 1], layers=4),
    ParallelPlan.mesh(dp=2, pp=2, chunks=2, layers=4),
]
"""The embedding's two layers are in one stage, or on two workers."""


@pytest.mark.parametrize("zero", range(4))
@pytest.mark.parametrize("plan", PLANS, ids=lambda plan: plan.describe())
def test_a_rank_holds_the_pieces_that_ownership_gives_it(plan, zero):
    state, keeps = StateBytes(MODEL, {"parameter": STATE.by_tensor["parameter"], "optimizer": STATE.by_tensor["optimizer"]}), {}
    found = state.of_plan(plan.with_zero(zero))
    for kind, width in (("parameter", 4), ("optimizer", 8)):
        keeps[kind] = tuple(width * Ownership(plan.with_zero(zero), MODEL).elements(rank, kind) for rank in range(plan.world))
    assert found == keeps


def test_layers_without_tensors_count_by_their_bytes_and_are_cut_evenly():
    layers = tuple(LayerProfile(f"l{i}", 1.0, 2.0, 1.0, 1.0, parameter_bytes=800, optimizer_bytes=1600) for i in range(4))
    for shards in (1, 2, 4):
        routing = MicrobatchRouting(ParallelPlan.mesh(pp=2, tp=shards, layers=4), Microbatches(1))
        orders = registry.build_schedule("gpipe", routing)
        found = {kind: set(by_rank) for kind, by_rank in state_bytes(ModelProfile(layers), routing, orders).items()}
        assert found == {"parameter": {1600 // shards}, "gradient": {1600 // shards}, "optimizer": {3200 // shards}}


def test_the_fullest_shard_of_a_stage_is_told_layer_by_layer():
    def found(first: int, last: int, shards: int) -> int:
        return STATE.on_fullest_shard("parameter", StagePlan(first, last, (tuple(range(shards)),)))

    assert [found(i, i + 1, 2) for i in range(4)] == [4 * n for n in (300, 1100, 100, 320)]
    assert found(0, 4, 2) == 4 * 1820 and found(0, 4, 1) == 4 * 2820, "a tie, in each of its layers"


def test_answers_are_kept_so_that_a_search_over_thousands_of_plans_asks_once():
    outline = ModelOutline((), elements=tuple({f"{i}.{j}": 1000 for j in range(20)} for i in range(200)))
    nbytes = {name: 4000 for layer in outline.elements for name in layer}
    state = StateBytes(outline, {"parameter": nbytes, "gradient": nbytes, "optimizer": nbytes})
    plans = [ParallelPlan.mesh(dp=dp, pp=20, layers=200) for dp in range(1, 201, 5)]
    assert {found for plan in plans for found in state.of_plan(plan)["parameter"]} == {10 * 20 * 4000}
    assert len(state._on_ranks) == 3 * 20, "one answer for each kind and stage, whatever the number of replicas"
    assert replace(state) == state, "what has been answered is no part of the value"


def test_the_sheet_counts_every_kind_of_state_that_was_measured():
    """One that is new needs no change of the planner."""
    averages = {name: 4 * size for name, size in TRAINED.items()}
    profile = replace(PROFILE, state=replace(STATE, by_tensor={**STATE.by_tensor, "average": averages}))
    plan, batching = ParallelPlan.mesh(dp=2, layers=4), Microbatches(1)
    before, after = (memory_sheets(known, plan, "1f1b", batching)[0] for known in (PROFILE, profile))
    assert after.state["average"] == after.total - before.total == sum(averages.values())
    assert "of averages and at most" in str(after)


@pytest.mark.parametrize("zero, holders", [(0, 1), (1, 1), (1, 2), (2, 1), (3, 1)])
@pytest.mark.parametrize("plan", PLANS, ids=lambda plan: plan.describe())
def test_a_rank_owns_what_it_has_to_hold(plan, zero, holders):
    """Of each element of `held`, its parameter and what the optimizer keeps for it; a tie counts in each stage of a worker."""
    nbytes = {name: 12 * size for name, size in TRAINED.items()} | {"1.old": 4 * 300, "mask": 4 * 50}
    state = StateBytes(MODEL, {**STATE.by_tensor, "buffer": {"mask": 4 * 50}})
    placed = plan.with_zero(zero, holders)
    sizes = {name: size for layer in MODEL.elements for name, size in layer.items()}
    held = Ownership(placed, MODEL).held
    wanted = [sum(nbytes[piece.name] * piece.size // sizes[piece.name] for piece in pieces) for pieces in held]
    twice = len(plan.grids) < len(plan.stages)  # of the worker with both ends, the embedding
    found = state.owned_by(placed)
    assert all(theirs == wanted[rank] or (twice and theirs > wanted[rank]) for rank, theirs in enumerate(found)), (
        found,
        wanted,
    )
    masters = StateBytes(MODEL, {**STATE.by_tensor, "master": {name: 8 * n for name, n in TRAINED.items()}})
    assert sum(masters.owned_by(placed)) > sum(STATE.owned_by(placed)), "the most precise of its copies"
