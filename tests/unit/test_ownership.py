"""What ranks hold when parameters are cut over shards, and what moves when the number of shards changes."""

import pytest

from raypar.plan import ParallelPlan
from raypar.plan.ownership import SlicedParameters
from raypar.plan.pieces import Piece, merge_pieces, plan_moves
from raypar.plan.shard_ranges import Cut, even_range

SIZES = ({"a.weight": 84, "a.bias": 12}, {"b.weight": 84, "b.norm": 7}, {"k.weight": 8})
KEYS = {
    1: (((0, 2),),),
    2: (((0, 1),), ((1, 2),)),
    3: (((0, 1),), ((0, 2),), ((1, 2),)),
    4: (((0, 1),),) * 2 + (((1, 2),),) * 2,
}


def cuts(shards):
    return {
        "a.weight": Cut(0, 12, even_range(12, shards)),
        "a.bias": Cut(0, 12, even_range(12, shards)),
        "b.weight": Cut(1, 12, even_range(12, shards)),
        "k.weight": Cut(0, 2, KEYS[shards]),
    }


NEED = SlicedParameters(SIZES, {shards: cuts(shards) for shards in (1, 2, 3, 4)})


def test_a_shard_holds_its_runs_and_all_of_what_is_whole():
    assert NEED(ParallelPlan.mesh(tp=2, layers=3))[1] == (
        Piece("a.bias", 6, 12),
        Piece("a.weight", 42, 84),
        Piece("b.norm", 0, 7),
        Piece("b.weight", 42, 84),
        Piece("k.weight", 4, 8),
    )


@pytest.mark.parametrize("shards", [1, 2, 3, 4])
@pytest.mark.parametrize("stages", [1, 2, 3])
def test_together_they_hold_everything(shards, stages):
    held = merge_pieces(piece for rank in NEED(ParallelPlan.mesh(pp=stages, tp=shards, layers=3)) for piece in rank)
    assert held == tuple(sorted(Piece(name, 0, size) for layer in SIZES for name, size in layer.items()))


def test_stages_of_other_shards_stand_beside_each_other():
    found = NEED(ParallelPlan.of([1, 1], [2, 1], layers=3, cuts=[1]))
    assert [sum(piece.size for piece in rank) for rank in found] == [48, 48, 99]


def test_twice_as_many_shards_take_half_of_what_there_is_and_keep_the_rest():
    """Ranks 0 and 1 go on with parts of what they have; ranks 2 and 3 are new."""
    have = dict(enumerate(NEED(ParallelPlan.mesh(tp=2, layers=3))))
    need = dict(enumerate(NEED(ParallelPlan.mesh(tp=4, layers=3))))
    found = plan_moves(have, need)
    assert {move.dest for move in found} == {1, 2, 3}
    assert sum(move.piece.size for move in found if move.dest == 3) == 21 + 3 + 21 + 7 + 4
    assert sum(move.piece.size for move in found if move.dest == 1) == 21 + 3 + 21 + 4
