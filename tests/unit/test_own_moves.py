"""A worker is told only of state that it sends or gets; whether state moves from device to device is the same for all."""

import pickle

import pytest

from raypar.plan.pieces import MAX_DIRECT, AdoptPlanCommand, Piece, PieceMove, may_move_directly, moves_by_worker


def move(source: int, dest: int, name: str = "a") -> PieceMove:
    return PieceMove(source, dest, Piece(name, 0, 4))


def test_each_move_is_told_to_the_two_workers_that_it_is_between_in_one_order():
    moves = (move(1, 2), move(1, 3), move(3, 2), move(4, 4), move(1, 2, "b"))
    assert moves_by_worker(moves) == {
        1: (move(1, 2), move(1, 3), move(1, 2, "b")),
        2: (move(1, 2), move(3, 2), move(1, 2, "b")),
        3: (move(1, 3), move(3, 2)),
        4: (move(4, 4),),
    }
    assert moves_by_worker(()) == {}


@pytest.mark.parametrize("neighbours", [1, MAX_DIRECT, MAX_DIRECT + 1])
def test_state_moves_directly_where_nobody_has_more_neighbours_than_communicators_are_kept_for(neighbours: int):
    spread = tuple(move(0, dest, name) for dest in range(1, neighbours + 1) for name in ("a", "b"))
    assert may_move_directly(spread) == (neighbours <= MAX_DIRECT)
    assert may_move_directly((*spread, move(20, 20), move(21, 22))) == (neighbours <= MAX_DIRECT)


def test_what_a_worker_is_told_does_not_grow_with_moves_between_others():
    """A thousand workers, each of which hands a hundred pieces to the next."""
    moves = tuple(move(worker, worker + 1, f"layer{n}.weight") for worker in range(1000) for n in range(100))
    own = moves_by_worker(moves)
    ranks = {worker: worker for worker in range(1001)}
    told = [len(pickle.dumps(AdoptPlanCommand(None, ranks, 5, own[worker]))) for worker in (0, 500, 1000)]
    assert max(told) < 30_000
