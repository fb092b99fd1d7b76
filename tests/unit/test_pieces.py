"""Arithmetic of pieces, and what moves: exactly the set difference, from those who have it."""

import random

import pytest

from raypar.errors import PlanError
from raypar.plan.pieces import (
    Piece,
    PieceMove,
    count_shared_elements,
    merge_pieces,
    pieces_nobody_holds,
    plan_moves,
    subtract_pieces,
)


def test_union_joins_what_touches_and_keeps_names_apart():
    pieces = [Piece("b", 0, 2), Piece("a", 4, 6), Piece("a", 0, 4), Piece("a", 7, 8), Piece("a", 1, 2)]
    assert merge_pieces(pieces) == (Piece("a", 0, 6), Piece("a", 7, 8), Piece("b", 0, 2))


def test_without_is_the_set_difference():
    assert subtract_pieces([Piece("a", 0, 10)], [Piece("a", 2, 4), Piece("a", 6, 12), Piece("b", 0, 9)]) == (
        Piece("a", 0, 2),
        Piece("a", 4, 6),
    )


def test_an_empty_piece_is_refused():
    with pytest.raises(PlanError, match=r"a\[3:3\] is empty"):
        Piece("a", 3, 3)


def test_what_is_held_does_not_move_and_holders_take_turns():
    whole = (Piece("a", 0, 4), Piece("b", 0, 4))
    found = plan_moves({0: whole, 1: whole, 2: ()}, {0: whole, 2: whole})
    assert found == (PieceMove(0, 2, Piece("a", 0, 4)), PieceMove(1, 2, Piece("b", 0, 4)))


def test_what_nobody_holds_is_named():
    have, need = {0: (Piece("a", 0, 4),)}, {1: (Piece("a", 2, 6),)}
    assert pieces_nobody_holds(have, need) == (Piece("a", 4, 6),)
    with pytest.raises(PlanError, match=r"nobody holds a\[4:6\]\n.*mirror or a checkpoint"):
        plan_moves(have, need)


@pytest.mark.parametrize("seed", range(40))
def test_random_holdings_agree_with_sets_of_elements(seed: int):
    dice = random.Random(seed)

    def some() -> tuple[Piece, ...]:
        starts = [(name, dice.randrange(12)) for name in "ab" for _ in range(2) if dice.random() < 0.7]
        return tuple(Piece(name, at, at + dice.randint(1, 8)) for name, at in starts)

    def elements(pieces) -> set[tuple[str, int]]:
        return {(p.name, e) for p in pieces for e in range(p.start, p.stop)}

    have, need = {w: some() for w in range(4)}, {w: some() for w in range(2, 6)}
    held = set().union(*(elements(p) for p in have.values()))
    wanted = set().union(*(elements(p) for p in need.values()))
    assert elements(pieces_nobody_holds(have, need)) == wanted - held
    assert count_shared_elements(have[0], have[1]) == len(elements(have[0]) & elements(have[1]))
    need = {w: merge_pieces(Piece(n, e, e + 1) for n, e in elements(p) & held) for w, p in need.items()}
    found = plan_moves(have, need)
    for dest, pieces in need.items():
        got = [e for move in found if move.dest == dest for e in sorted(elements([move.piece]))]
        assert len(got) == len(set(got)), "nothing is sent twice"
        assert set(got) == elements(pieces) - elements(have.get(dest, ())), "exactly what was lacking"
    for move in found:
        assert elements([move.piece]) <= elements(have[move.source])
