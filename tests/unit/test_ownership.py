"""Which rank keeps which piece of which kind of state, and how many bytes that is."""

import time
from collections import Counter
from dataclasses import replace
from itertools import product

import pytest

from raypar.elastic.seating import keep_replica_numbers
from raypar.errors import PlanError
from raypar.plan import ModelOutline, ParallelPlan
from raypar.plan.ownership import CANONICAL_PIECE, SHARED_OUT_FROM, OwnedRun, Ownership
from raypar.plan.pieces import Piece, merge_pieces, plan_moves, subtract_pieces
from raypar.plan.shard_ranges import TensorCut, even_ranges_by_shard

KEYS = {
    1: (((0, 2),),),
    2: (((0, 1),), ((1, 2),)),
    3: (((0, 1),), ((0, 2),), ((1, 2),)),
    4: (((0, 1),),) * 2 + (((1, 2),),) * 2,
}


def cuts(shards):
    return {
        "a.weight": TensorCut(0, 12, even_ranges_by_shard(12, shards)),
        "a.bias": TensorCut(0, 12, even_ranges_by_shard(12, shards)),
        "b.weight": TensorCut(1, 12, even_ranges_by_shard(12, shards)),
        "k.weight": TensorCut(0, 2, KEYS[shards]),
    }


SIZES = ({"a.weight": 84, "a.bias": 12}, {"b.weight": 84, "b.norm": 7}, {"k.weight": 8})
SMALL = ModelOutline((), elements=SIZES, shardings={shards: cuts(shards) for shards in (2, 3, 4)})
"""Small parameters, cut over shards in all ways: `k.weight`'s two heads are shared by shards where there are more than two."""

TIED = ModelOutline(
    (),
    elements=(
        {"0.embed": 90_000, "0.mask": 100},
        {"1.weight": 200_000, "1.old": 70_000, "1.bias": 300},
        {"2.weight": 150_000, "2.count": 1},
        {"3.norm": 40, "0.embed": 90_000},
    ),
    shardings={
        2: {
            "0.embed": TensorCut(0, 300, even_ranges_by_shard(300, 2)),
            "1.weight": TensorCut(0, 20, even_ranges_by_shard(20, 2)),
        }
    },
    buffers=frozenset({"0.mask", "2.count"}),
    frozen=frozenset({"1.old"}),
)
"""The last layer uses the first one's embedding again; `1.old` is frozen, two tensors are buffers."""

PLANS = {
    "alone": ParallelPlan.mesh(layers=4),
    "3 replicas": ParallelPlan.mesh(dp=3, layers=4),
    "2 stages": ParallelPlan.mesh(pp=2, layers=4),
    "3 and 2 replicas": ParallelPlan.of([3, 2], layers=4),
    "2 chunks": ParallelPlan.mesh(dp=2, pp=2, chunks=2, layers=4),
    "V": ParallelPlan.mesh(dp=2, pp=2, chunks=2, placement="v", layers=4),
    "2 shards": ParallelPlan.mesh(dp=2, tp=2, layers=4),
    "shards in one stage": ParallelPlan.of([3, 2], [2, 1], layers=4),
}


def held(plan, outline=SMALL):
    return Ownership(plan, outline).held


# -- kinds of state ----------------------------------------------------------------------------------------------------


def test_every_replica_keeps_all_state_of_its_stages():
    keeps = Ownership(PLANS["2 stages"], TIED)
    assert keeps.pieces(0, "parameter") == (
        Piece("0.embed", 0, 90_000),
        Piece("1.weight", 0, 200_000),
        Piece("1.old", 0, 70_000),
        Piece("1.bias", 0, 300),
    )
    assert {p.name for p in keeps.pieces(1, "parameter")} == {"2.weight", "3.norm", "0.embed"}, "ties, in every stage"
    assert keeps.pieces(0, "buffer") == (Piece("0.mask", 0, 100),)


@pytest.mark.parametrize("kind", ["gradient", "master", "optimizer", "average"])
def test_frozen_parameters_have_no_state_of_training(kind):
    assert [p.name for p in Ownership(PLANS["alone"], TIED).pieces(0, kind)] == [
        *("0.embed", "1.weight", "1.bias", "2.weight", "3.norm")
    ]


def test_a_tie_counts_once_where_its_layers_are_together():
    assert Counter(p.name for p in Ownership(PLANS["V"], TIED).pieces(0, "parameter"))["0.embed"] == 1


@pytest.mark.parametrize("holders", [1, 2])
@pytest.mark.parametrize("zero, name", list(product(range(4), PLANS)))
def test_replicas_together_keep_every_element_as_often_as_the_zero_stage_says(zero, name, holders):
    plan, whole = PLANS[name], Ownership(PLANS[name], TIED)
    keeps = Ownership(plan.with_zero(zero, holders), TIED)
    for kind, shared_from in SHARED_OUT_FROM.items():
        for first in range(plan.world):
            group = [rank for rank in range(plan.world) if plan.compute_keys[rank] == plan.compute_keys[first]]
            together = [piece for rank in group for piece in keeps.pieces(rank, kind)]
            assert merge_pieces(together) == merge_pieces(whole.pieces(first, kind)), "nothing is missing"
            copies = min(holders, len(group)) if zero >= shared_from else len(group)
            assert sum(p.size for p in together) == copies * whole.elements(first, kind), kind


def test_buffers_are_whole_on_every_replica_under_every_stage_of_zero():
    for zero in range(4):
        keeps = Ownership(PLANS["3 replicas"].with_zero(zero), TIED)
        assert {keeps.pieces(rank, "buffer") for rank in range(3)} == {(Piece("0.mask", 0, 100), Piece("2.count", 0, 1))}


def test_frozen_parameters_are_shared_out_by_the_last_stage_of_zero_alone():
    kept = [Ownership(PLANS["3 replicas"].with_zero(zero), TIED).pieces(0, "parameter") for zero in (2, 3)]
    sizes = [sum(piece.size for piece in pieces if piece.name == "1.old") for pieces in kept]
    assert sizes[0] == 70_000 > sizes[1] > 0


def test_a_share_of_a_slice_begins_at_a_canonical_piece_of_the_slice():
    larger = replace(TIED, elements=tuple({n: 10 * s for n, s in layer.items()} for layer in TIED.elements))
    keeps = Ownership(PLANS["2 shards"].with_zero(1), larger)
    runs = [p for rank in (1, 3) for p in keeps.pieces(rank, "optimizer") if p.name == "1.weight"]
    assert merge_pieces(runs) == (Piece("1.weight", 1_000_000, 2_000_000),)
    assert all((run.start - 1_000_000) % CANONICAL_PIECE == 0 for run in runs) and len(runs) > 1


ROWS = replace(TIED, shardings={2: {**TIED.shardings[2], "1.weight": TensorCut(1, 20, even_ranges_by_shard(20, 2))}})
"""`1.weight` is cut along its second dim."""


@pytest.mark.parametrize("name", ["2 shards", "shards in one stage"])
def test_a_slice_along_another_dim_than_the_first_has_one_owner(name):
    """A run of it in memory is no run of elements as plans number them, and the norm's terms are runs in memory."""
    plan = PLANS[name].with_zero(1)
    keeps = Ownership(plan, ROWS)
    shares = [[run for run in keeps.runs(0, 1, r) if run.name == "1.weight"] for r in range(plan.stages[0].replicas)]
    assert sorted(shares, key=len)[-1] == [OwnedRun("1.weight", 0, 100_000)] and sum(map(len, shares)) == 1
    held = [p for rank in range(plan.world) for p in keeps.pieces(rank, "optimizer") if p.name == "1.weight"]
    assert sorted(held) == [Piece("1.weight", 0, 100_000), Piece("1.weight", 100_000, 200_000)]


def test_it_has_one_owner_under_plans_without_shards_too_where_the_job_may_have_shards():
    keeps = [Ownership(PLANS["3 replicas"].with_zero(1), outline) for outline in (ROWS, replace(ROWS, shardings={}))]
    assert [sum(run.name == "1.weight" for r in range(3) for run in of.runs(0, 0, r)) for of in keeps] == [1, 3]


@pytest.mark.parametrize("runs", [(1, 1), (2,)], ids=["two workers", "one worker"])
def test_slices_with_common_elements_have_one_owner_on_all_shards(runs):
    """Their gradients are added up over shards: whoever has one of them needs all."""
    cut = TensorCut(0, 100, (((0, 60),), ((40, 100),)))
    outline = replace(TIED, shardings={2: {**TIED.shardings[2], "1.weight": cut}})
    plan = ParallelPlan.mesh(dp=2, tp=len(runs), layers=4)
    plan = replace(plan, stages=tuple(replace(stage, division=runs) for stage in plan.stages)).with_zero(1)
    keeps = Ownership(plan, outline)
    owned = [[[run for run in keeps.runs(0, n, r) if run.name == "1.weight"] for n in range(2)] for r in range(2)]
    assert sorted(owned) == [[[], []], [[OwnedRun("1.weight", 0, 120_000)]] * 2]


@pytest.mark.parametrize("holders", [1, 2])
def test_of_what_every_shard_has_whole_a_replica_owns_the_same_runs_on_all(holders):
    """Also where shards have more or less of what is cut: gradients of whole parameters may be added up over shards."""
    ragged = replace(TIED, shardings={2: {**TIED.shardings[2], "1.weight": TensorCut(0, 20, (((0, 17),), ((17, 20),)))}})
    keeps = Ownership(ParallelPlan.mesh(dp=3, tp=2, layers=4).with_zero(1, holders), ragged)
    for replica in range(3):
        first, second = ([run for run in keeps.runs(0, n, replica) if run.name not in ragged.shardings[2]] for n in range(2))
        assert first == second and first


def test_of_a_tied_parameter_the_first_stage_counts_runs_for_the_norm():
    plan = ParallelPlan.mesh(dp=3, pp=2, layers=4).with_zero(1)
    keeps = Ownership(plan, TIED)
    counted = [run for stage in range(2) for r in range(3) for run in keeps.counted_runs(stage, 0, r)]
    sizes = Counter()
    for run in counted:
        sizes[run.name] += run.stop - run.start
    assert sizes == {"0.embed": 90_000, "1.weight": 200_000, "1.bias": 300, "2.weight": 150_000, "3.norm": 40}
    assert any(run.name == "0.embed" for r in range(3) for run in keeps.owned_runs(1, 0, r))


def test_each_virtual_shard_of_a_worker_is_divided_by_itself():
    plan = ParallelPlan.mesh(dp=2, layers=4).with_virtual_shards(2).with_zero(1)
    keeps = Ownership(plan, TIED)
    for number in range(2):
        runs = [run for r in range(2) for run in keeps.runs(0, number, r)]
        assert sum(run.stop - run.start for run in runs if run.name == "0.embed") == 45_000
        assert all(run.start % CANONICAL_PIECE == 0 for run in runs)
    assert keeps.runs(0, 0, 0) != keeps.runs(0, 1, 0)
    whole = [[run for run in keeps.runs(0, number, r) if run.name == "2.weight"] for number in range(2) for r in range(2)]
    assert whole[:2] == whole[2:], "what is not cut has one owner for all virtual shards"


def test_the_replica_after_an_owner_holds_its_runs_too_as_runs_by_themselves():
    plan = PLANS["3 replicas"].with_zero(1, 2)
    keeps = Ownership(plan, TIED)
    for replica in range(3):
        own, before = (set(keeps.owned_runs(0, 0, r)) for r in (replica, (replica - 1) % 3))
        assert set(keeps.runs(0, 0, replica)) == own | before and not own & before
        lost = [piece for rank in range(3) if rank != replica for piece in keeps.held[rank]]
        assert not subtract_pieces(keeps.held[replica], lost), "whoever dies, all of its state is elsewhere"


def test_with_as_many_holders_as_replicas_nothing_is_divided():
    plan = PLANS["3 and 2 replicas"].with_zero(1, 2)
    assert [Ownership(plan, TIED).divides(stage, "optimizer") for stage in range(2)] == [True, False]
    assert (plan.zero_levels, plan.most_zero, plan.zero_holders) == ((1, 1), 1, 2)
    assert plan.with_replicas([2, 1]).most_zero == 0 and "ZeRO 1, 2 holders" in plan.describe()
    with pytest.raises(PlanError, match="has 3 holders of divided state"):
        plan.with_zero(1, 3)


def test_there_are_three_stages_of_zero():
    with pytest.raises(PlanError, match="no ZeRO stage 4"):
        PLANS["alone"].with_zero(4)


def test_one_replica_divides_with_nobody():
    assert Ownership(PLANS["2 stages"].with_zero(3), TIED).held == Ownership(PLANS["2 stages"], TIED).held


# -- bytes -------------------------------------------------------------------------------------------------------------

FP32 = {"parameter": 4, "gradient": 4, "optimizer": 8}
BF16_COPY = {"parameter": 2, "gradient": 4, "master": 4, "optimizer": 8}
BF16_GRADIENTS = {"parameter": 2, "gradient": 2, "master": 4, "optimizer": 8}
TABLE = [
    (FP32, [(16, 0), (8, 8), (4, 12), (0, 16)]),
    (BF16_COPY, [(18, 0), (6, 12), (2, 16), (0, 18)]),
    (BF16_GRADIENTS, [(16, 0), (4, 12), (2, 14), (0, 16)]),
]
"""Adam: bytes of each kind for a parameter; by ZeRO stage (bytes that every replica keeps, bytes that replicas share out)."""


def gpt(width, layers, vocabulary=50_257, context=1024):
    """Elements of a GPT-2, by layer."""
    block = {
        "norm1.weight": width,
        "norm1.bias": width,
        "qkv.weight": 3 * width * width,
        "qkv.bias": 3 * width,
        "out.weight": width * width,
        "out.bias": width,
        "norm2.weight": width,
        "norm2.bias": width,
        "up.weight": 4 * width * width,
        "up.bias": 4 * width,
        "down.weight": 4 * width * width,
        "down.bias": width,
    }
    blocks = ({f"{i}.{name}": size for name, size in block.items()} for i in range(layers))
    first = {"tokens.weight": vocabulary * width, "positions.weight": context * width}
    return ModelOutline((), elements=(first, *blocks, {"norm.weight": width, "norm.bias": width}))


@pytest.mark.parametrize("replicas", [2, 3, 8])
@pytest.mark.parametrize("bytes_of, by_stage", TABLE, ids=["fp32", "bf16 copy", "bf16 copy and gradients"])
@pytest.mark.parametrize("zero", range(4))
def test_state_bytes_of_a_replica(bytes_of, by_stage, zero, replicas):
    outline = gpt(256, 6, 5000)
    count = sum(size for layer in outline.elements for size in layer.values())
    keeps = Ownership(ParallelPlan.mesh(dp=replicas, layers=8).with_zero(zero), outline)
    of = [sum(n * keeps.elements(rank, kind) for kind, n in bytes_of.items()) for rank in range(replicas)]
    everywhere, shared = by_stage[zero]
    assert sum(of) == replicas * everywhere * count + shared * count
    assert max(of) <= 1.01 * (everywhere + shared / replicas) * count


@pytest.mark.parametrize("width, layers, replicas", [(128, 4, 8), (256, 6, 8), (768, 12, 8), (768, 12, 64), (4096, 32, 1000)])
def test_shares_are_within_one_percent_or_one_canonical_piece_of_even(width, layers, replicas):
    keeps = Ownership(ParallelPlan.mesh(dp=replicas, layers=layers + 2).with_zero(1), gpt(width, layers))
    of = [keeps.elements(rank, "optimizer") for rank in range(replicas)]
    even = sum(of) / replicas
    assert max(of) <= (1.01 * even if replicas == 8 else even + CANONICAL_PIECE)


def test_shares_are_even_in_every_stage_for_each_shard():
    outline = replace(TIED, elements=tuple({n: 50 * s for n, s in layer.items()} for layer in TIED.elements))
    plan = PLANS["shards in one stage"]
    keeps = Ownership(plan.with_zero(3), outline)
    for key in set(plan.compute_keys):
        of = [keeps.elements(rank, "optimizer") for rank in range(plan.world) if plan.compute_keys[rank] == key]
        assert max(of) <= 1.01 * sum(of) / len(of)


def moved(before, now, seats):
    """Elements that replicas of the second list need and have not: each holds what its seat in the first one says."""
    lacking = (subtract_pieces(need, before[seat] if seat < len(before) else ()) for need, seat in zip(now, seats, strict=True))
    return sum(piece.size for pieces in lacking for piece in pieces)


@pytest.mark.parametrize("replicas, level", [(3, 1), (4, 2), (5, 3), (6, 1), (7, 2), (8, 1), (8, 3)])
def test_of_a_gpt2_the_least_moves_when_a_replica_comes_and_twice_that_when_one_goes(replicas, level):
    """The least: what the new one is to have, or what the lost one had. A replica then has few runs, too."""
    outline, counts = gpt(768, 12), (replicas - 1, replicas)
    keeps = [Ownership(ParallelPlan.mesh(dp=n, layers=14).with_zero(level), outline) for n in counts]
    few, many = ([keeps[at].pieces(rank, "optimizer") for rank in range(n)] for at, n in enumerate(counts))
    had = [sum(piece.size for piece in pieces) for pieces in many]
    assert moved(few, many, range(replicas)) <= 1.02 * sum(had) / replicas
    for gone in {0, replicas // 2, replicas - 1}:
        left = [[rank] for rank in range(replicas) if rank != gone]
        seats = [place for (place,) in keep_replica_numbers(left, {rank: rank for rank in range(replicas)})]
        assert had[gone] <= moved(many, few, seats) <= 2 * had[gone]
    tensors = sum(map(len, outline.elements))
    assert all(len(keeps[1].runs(0, 0, replica)) <= tensors + 2 * replicas for replica in range(replicas))


def test_a_thousand_ranks_and_thousands_of_parameters_take_seconds():
    outline = ModelOutline((), elements=tuple({f"{i}.{j}": 40_000 * (j + 1) for j in range(10)} for i in range(300)))
    plan, begin_s = ParallelPlan.mesh(dp=100, pp=10, layers=300), time.perf_counter()
    assert len(set(Ownership(plan, outline).first_rank_with_same_state)) == 10
    keeps = Ownership(plan.with_zero(3), outline)
    assert sum(keeps.elements(rank, "parameter") for rank in range(plan.world)) == 300 * 40_000 * 55
    assert time.perf_counter() - begin_s < 20, "2 s when nothing else runs"


# -- who holds the same, who writes what -----------------------------------------------------------------------------------


def test_replicas_of_a_shard_hold_the_same_until_they_share_state_out():
    plan = ParallelPlan.of([2, 1], [2, 1], layers=4)
    assert Ownership(plan, TIED).first_rank_with_same_state == (0, 1, 0, 1, 4)
    assert [Ownership(plan, TIED).has_copies(rank) for rank in range(5)] == [True] * 4 + [False]
    assert Ownership(plan.with_zero(1), TIED).first_rank_with_same_state == (0, 1, 2, 3, 4)
    assert plan.compute_keys == (((0, 0),), ((0, 1),), ((0, 0),), ((0, 1),), ((1, 0),)), "they compute the same all the same"


def test_there_are_no_copies_of_no_state():
    """Two stages without parameters hold the same, which is nothing to compare."""
    outline = ModelOutline((), elements=({"a": 4}, {}, {}))
    assert [Ownership(ParallelPlan.mesh(pp=3, layers=3), outline).has_copies(rank) for rank in range(3)] == [False] * 3


def test_only_ranks_with_the_same_tensors_are_asked_for_copies():
    outline = ModelOutline((), elements=tuple({f"weight{layer}": 4} for layer in range(64)))
    ownership = Ownership(ParallelPlan.mesh(dp=2, pp=64, layers=64), outline)
    assert ownership.has_copies(0) and ownership.checkpoint_pieces(0)
    assert {key[1] for key in ownership._answers} == {((0, 0),)}, "of one position, not of all"


def test_what_is_handed_over_is_where_the_optimizers_state_is():
    plan = PLANS["3 replicas"]
    for zero in range(4):
        keeps = Ownership(plan.with_zero(zero), TIED)
        for rank in range(3):
            trained = [p for p in keeps.held[rank] if p.name not in TIED.frozen | TIED.buffers]
            assert merge_pieces(trained) == merge_pieces(keeps.pieces(rank, "optimizer"))
            assert {"1.old", "0.mask"} <= {p.name for p in keeps.held[rank]} or zero == 3


def written_pieces(keeps, rank):
    return [piece for names in keeps.checkpoint_pieces(rank).values() for pieces in names.values() for piece in pieces]


@pytest.mark.parametrize("holders", [1, 2])
@pytest.mark.parametrize("zero, name", list(product(range(4), PLANS)))
def test_every_element_is_written_by_one_rank_that_holds_it(zero, name, holders):
    keeps = Ownership(PLANS[name].with_zero(zero, holders), TIED)
    written = [written_pieces(keeps, rank) for rank in range(PLANS[name].world)]
    everything = {name: size for layer in TIED.elements for name, size in layer.items()}
    assert merge_pieces(p for mine in written for p in mine) == tuple(sorted(Piece(n, 0, s) for n, s in everything.items()))
    assert sum(p.size for mine in written for p in mine) == sum(everything.values()), "nothing twice"
    assert all(not subtract_pieces(mine, keeps.held[rank]) for rank, mine in enumerate(written))


def test_replicas_take_turns_at_writing():
    names = [list(Ownership(PLANS["3 replicas"], TIED).checkpoint_pieces(rank)[0]) for rank in range(3)]
    assert names == [["0.embed", "1.bias", "0.mask"], ["1.weight", "2.weight", "2.count"], ["1.old", "3.norm"]]


def test_a_tie_is_written_with_its_first_stage_and_an_empty_tensor_by_one_rank_too():
    outline = ModelOutline((), elements=({"a": 3, "none": 0}, {"a": 3}, {"a": 3, "b": 2}))
    keeps = Ownership(ParallelPlan.mesh(dp=2, pp=3, layers=3), outline)
    assert [list(names) for rank in range(6) for names in keeps.checkpoint_pieces(rank).values()] == [
        ["a"],
        ["none"],
        [],
        [],
        [],
        ["b"],
    ]
    assert keeps.checkpoint_pieces(1) == {0: {"none": ()}} and "none" not in keeps.sizes(0)


def test_replicas_take_consecutive_parameters_of_the_norm():
    counted = [Ownership(PLANS["3 replicas"], TIED).norm_parameters(rank)[0] for rank in range(3)]
    assert counted == [("0.embed", "1.weight"), ("1.bias", "2.weight"), ("3.norm",)]


@pytest.mark.parametrize("name", PLANS)
def test_every_trained_parameter_is_counted_once_by_each_shard_of_its_first_stage_in_layer_order(name):
    plan, keeps = PLANS[name], Ownership(PLANS[name], TIED)
    trained = ["0.embed", "1.weight", "1.bias", "2.weight", "3.norm"]
    shards = max(stage.shards for stage in plan.stages)
    for shard in range(shards):
        by_stage: dict[int, list[str]] = {}
        for rank in range(plan.world):
            if plan.roles[rank][0].shard == shard:
                for stage, names in keeps.norm_parameters(rank).items():
                    by_stage.setdefault(stage, []).extend(names)
        found = [name for stage in sorted(by_stage) for name in by_stage[stage]]
        assert found == [name for name in trained if shard == 0 or plan.stages[keeps._first_stage[name]].shards > shard]


# -- shards ------------------------------------------------------------------------------------------------------------


def test_a_shard_holds_its_runs_and_all_of_what_is_whole():
    assert held(ParallelPlan.mesh(tp=2, layers=3))[1] == (
        Piece("a.bias", 6, 12),
        Piece("a.weight", 42, 84),
        Piece("b.norm", 0, 7),
        Piece("b.weight", 42, 84),
        Piece("k.weight", 4, 8),
    )


@pytest.mark.parametrize("shards", [1, 2, 3, 4])
@pytest.mark.parametrize("stages", [1, 2, 3])
def test_together_they_hold_everything(shards, stages):
    found = merge_pieces(piece for rank in held(ParallelPlan.mesh(pp=stages, tp=shards, layers=3)) for piece in rank)
    assert found == tuple(sorted(Piece(name, 0, size) for layer in SIZES for name, size in layer.items()))


def test_stages_of_other_shards_stand_beside_each_other():
    found = held(ParallelPlan.of([1, 1], [2, 1], layers=3, cuts=[1]))
    assert [sum(piece.size for piece in rank) for rank in found] == [48, 48, 99]


def test_an_unknown_number_of_shards_is_refused():
    with pytest.raises(PlanError, match="not known how the model is cut over 5 shards"):
        held(ParallelPlan.mesh(tp=5, layers=3))


def test_twice_as_many_shards_take_half_of_what_there_is_and_keep_the_rest():
    """Ranks 0 and 1 go on with parts of what they have; ranks 2 and 3 are new."""
    have = dict(enumerate(held(ParallelPlan.mesh(tp=2, layers=3))))
    need = dict(enumerate(held(ParallelPlan.mesh(tp=4, layers=3))))
    found = plan_moves(have, need)
    assert {move.dest for move in found} == {1, 2, 3}
    assert sum(move.piece.size for move in found if move.dest == 3) == 21 + 3 + 21 + 7 + 4
    assert sum(move.piece.size for move in found if move.dest == 1) == 21 + 3 + 21 + 4
