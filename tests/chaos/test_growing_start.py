"""Runs that begin with fewer workers than their plan has, on the real machines and a virtual clock: the others come late, one
by one, never, or only for the planner to decline them. No run may hang, and each ends with the bits of the undisturbed one.

The default suite takes a part of each set; the whole of it is `pytest -m full tests/chaos/test_growing_start.py`.
"""

import pytest
from helpers.hash_body import Job
from helpers.protocol import EVERYBODY, Fault, Kind, World, random_faults, simulate, single_faults

from raypar.plan import ParallelPlan

QUICK = {
    "step_deadline_s": 0.5,
    "start_deadline_s": 1.0,
    "pass_deadline_s": 2.0,
    "status_s": 0.5,
    "adopt_s": 2.0,
    "capacity_s": 5.0,
    "hires": True,
    "grow_after_s": 0.002,
    "move_s": -1.0,
    "tick_ms": 5.0,
}
GRID = ParallelPlan.mesh(dp=2, pp=2, layers=4)
ONE = ParallelPlan.mesh(layers=4)
TWO = ParallelPlan.mesh(pp=2, layers=4)
KINDS: tuple[Kind, ...] = ("kill", "zombie", "late_answer", "kill_driver", "stop_driver", "drain", "place")
WHOLE = [False, pytest.param(True, marks=pytest.mark.full)]


def job(**more):
    return Job(**({"steps": 8, "mirror_every": 2} | more))


def undisturbed():
    return simulate(job(), GRID, **(QUICK | {"hires": False}))[1]


def sizes(world: World) -> list[int]:
    """Workers of each generation."""
    return [len(members) for _, (_, members) in sorted(world.records.items())]


def run(plan: ParallelPlan, first: ParallelPlan, faults=(), **more) -> World:
    """To its end, with the undisturbed bits or the one error that has a name."""
    world, found = simulate(job(), plan, faults, **(QUICK | {"first": first, "room": first.world} | more))
    lost = "the only copies" in world.over.why or "no workers came" in world.over.why
    lost = lost or not any(p.alive and p.placed for p in world.processes)
    assert found == undisturbed() or (faults and lost), world.tell(f"{faults}: {world.over.why}")
    return world


@pytest.mark.parametrize("first", [ONE, TWO], ids=["one", "two"])
def test_workers_that_come_late_get_seats_and_the_bits_stay_the_same(first):
    places = [Fault(at, "place") for at in (5, 25, 45)[: GRID.world - first.world]]
    world = run(GRID, first, places)
    assert sizes(world)[0] == first.world and sizes(world)[-1] == 4, world.tell(f"{sizes(world)}")
    assert not world.given_back


def test_workers_that_never_come_are_asked_for_once_and_the_run_goes_on_without():
    world = run(GRID, TWO)
    assert sizes(world) == [2] and len(world.processes) == 4 and not world.given_back


@pytest.mark.parametrize("whole", WHOLE)
@pytest.mark.parametrize("first", [ONE, TWO], ids=["one", "two"])
def test_a_late_worker_at_every_place(first, whole: bool):
    once = run(GRID, first)
    for at in range(0, once.points, 1 if whole else 13):
        world = run(GRID, first, [Fault(at, "place"), Fault(at + 30, "place")])
        assert world.over.end == "done" and sizes(world)[-1] >= first.world


@pytest.mark.parametrize("whole", WHOLE)
def test_another_fault_at_every_place_of_a_growth(whole: bool):
    places = [Fault(30, "place"), Fault(60, "place")]
    once = run(GRID, TWO, places)
    assert sizes(once)[-1] == 4
    for fault in single_faults(once, KINDS)[:: 1 if whole else 29]:
        run(GRID, TWO, [*places, fault])


@pytest.mark.parametrize("whole", WHOLE)
def test_seeded_histories_of_a_cluster_that_gives_and_takes(whole: bool):
    kinds: tuple[Kind, ...] = (*KINDS, "place", "place")
    once = run(GRID, TWO, [Fault(30, "place"), Fault(60, "place")])
    for seed in range(600 if whole else 25):
        faults = random_faults(seed, 5, once, workers=4, kinds=kinds)
        run(
            GRID,
            (ONE, TWO)[seed % 2],
            faults,
            standbys=seed % 3 // 2,
            room=(1, 2, 3, EVERYBODY)[seed % 4],
            min_workers=1 + seed % 2,
        )


@pytest.mark.parametrize("whole", WHOLE)
def test_another_fault_at_every_place_after_an_on_demand_worker_is_lost(whole: bool):
    """A worker in reserve takes its seat, and gives the seat to an on-demand worker as soon as one is there; once only."""
    work, more, lost = job(steps=30), QUICK | {"standbys": 1, "room": EVERYBODY, "on_demand": 2}, Fault(90, "kill", 0)
    once = World(work, GRID, [lost], **more)
    once.run()
    assert [members for _, (_, members) in sorted(once.records.items())][-2:] == [(1, 4, 2, 3), (1, 5, 2, 3)]
    reference = simulate(work, GRID, **(QUICK | {"hires": False}))[1]
    for fault in single_faults(once, KINDS)[:: 11 if whole else 197]:
        world, found = simulate(work, GRID, [lost, fault], **more)
        assert found == reference or "the only copies" in world.over.why, world.tell(f"{fault}: {world.over.why}")
        assert len(world.records) < 12, world.tell("workers give their seats to each other for ever")


# -- the planner declines --------------------------------------------------------------------------------------------------


def at_most(useful: int):
    """A planner that has no use for more workers."""
    return lambda generation, workers: ParallelPlan.mesh(dp=min(workers, useful), layers=4)


def test_workers_that_the_planner_declines_are_given_back_and_not_asked_for_again():
    pair = ParallelPlan.mesh(dp=2, layers=4)
    world, found = simulate(job(steps=40), pair, plans=at_most(2), max_workers=6, **(QUICK | {"room": EVERYBODY}))
    assert found == simulate(job(steps=40), pair, **(QUICK | {"hires": False}))[1]
    assert sorted(world.given_back) == [2, 3, 4, 5] and len(world.processes) == 6, world.tell(f"{world.given_back}")
    assert sizes(world) == [2]
    world, _ = simulate(job(steps=40), pair, plans=at_most(2), max_workers=6, standbys=1, **(QUICK | {"room": EVERYBODY}))
    assert len(world.given_back) == 4 and len(world.processes) == 7, "one stays in reserve"


def test_a_new_driver_does_not_ask_again_for_workers_that_the_planner_has_declined():
    pair, more = ParallelPlan.mesh(dp=2, layers=4), QUICK | {"plans": at_most(2), "max_workers": 5, "room": EVERYBODY}
    once = World(job(steps=16), pair, **more)
    once.run()
    assert once.useful == 2 and sorted(once.given_back) == [2, 3, 4]
    kills = single_faults(once, ("kill_driver",))
    for fault in kills[-len(kills) // 3 :: 4]:
        world = World(job(steps=16), pair, [fault], **more)
        world.run()
        assert world.over.end == "done" and len(world.processes) == 5, world.tell(f"{fault}: workers are asked for again")


@pytest.mark.parametrize("whole", WHOLE)
def test_faults_while_workers_are_given_back(whole: bool):
    pair, more = ParallelPlan.mesh(dp=2, layers=4), {"plans": at_most(2), "max_workers": 5, "room": EVERYBODY}
    work, reference = job(steps=16), simulate(job(steps=16), pair, **(QUICK | {"hires": False}))[1]
    once = World(work, pair, **(QUICK | more))
    once.run()
    assert once.given_back
    for fault in single_faults(once, KINDS)[:: 1 if whole else 37]:
        world, found = simulate(work, pair, [fault], **(QUICK | more))
        assert found == reference or "the only copies" in world.over.why, world.tell(f"{fault}: {world.over.why}")
        assert world.over.end != "done" or len(world.processes) <= 12, world.tell(
            "workers are asked for and given back in a loop"
        )


def test_spares_that_help_only_with_others_are_kept_for_a_while_then_given_back_with_the_demand():
    """Three workers are no better than two; four are, and the fourth has no place."""
    triple = lambda generation, workers: ParallelPlan.mesh(dp={3: 2}.get(workers, workers), layers=4)  # noqa: E731
    work, pair, four = job(steps=60), ParallelPlan.mesh(dp=2, layers=4), ParallelPlan.mesh(dp=4, layers=4)
    policy = QUICK | {"plans": triple, "first": pair, "room": 2}
    reference = simulate(work, four, **(QUICK | {"hires": False}))[1]
    world, found = simulate(work, four, [Fault(40, "place")], **(policy | {"capacity_s": 0.02}))
    assert found == reference and sorted(world.given_back) == [2, 3] and len(world.processes) == 4, world.tell("given back")
    world, found = simulate(work, four, [Fault(40, "place")], **(policy | {"capacity_s": 60.0}))
    assert found == reference and not world.given_back, "they may still come"
    world, found = simulate(work, four, [Fault(40, "place"), Fault(80, "place")], **(policy | {"capacity_s": 60.0}))
    assert found == reference and sizes(world)[-1] == 4
