"""Pickles of objects with a large part in common are small work, and are read by `pickle.loads`."""

import pickle

from raypar.actors.shared_pickles import SharedPickles
from raypar.plan import ParallelPlan
from raypar.plan.pieces import AdoptPlanCommand, Piece, PieceMove


class Counted:
    """Counts how often it is pickled."""

    times = 0

    def __reduce__(self):
        Counted.times += 1
        return Counted, ()


def test_what_is_shared_is_pickled_once_and_what_is_read_is_equal():
    plan, ranks = ParallelPlan.mesh(dp=2, pp=2, layers=4), {worker: worker for worker in range(4)}
    pickles = SharedPickles([plan, ranks])
    for worker in range(4):
        part = AdoptPlanCommand(plan, ranks, worker, (PieceMove(worker, 3, Piece("a", 0, 4)),), mirror_keepers={0: 1})
        read = pickle.loads(pickles.dumps(part))
        assert read == part and isinstance(read, AdoptPlanCommand)
    large = Counted()
    pickles = SharedPickles([large])
    found = [pickle.loads(pickles.dumps((large, number, large))) for number in range(3)]
    assert Counted.times == 1 and [one[1] for one in found] == [0, 1, 2]
    assert all(one[0] is one[2] for one in found)


def test_an_equal_object_that_is_not_the_shared_one_is_pickled_by_itself():
    shared, equal = [1, 2], [1, 2]
    read = pickle.loads(SharedPickles([shared]).dumps((shared, equal)))
    assert read == ([1, 2], [1, 2]) and read[0] is not read[1]
