"""Replicas divide the optimizer's state, and owners of parts of it die: the bits are those of a run that lost nobody.

A part that dies with its owner is in the mirror, so all go back to its last snapshot; a death between the vote and the end of
the gather that follows leaves owners at one version of their parts, and caches of the others' that nobody may compute with.
Real stages, optimizers and transports, under the real elastic protocol on a virtual clock.
"""

from collections import Counter
from collections.abc import Iterator
from dataclasses import replace
from functools import cache

import pytest
from helpers import membership
from helpers.membership import QUICK, Case, history
from helpers.membership import STEPS as ALL_STEPS
from helpers.protocol import KINDS, Change, Fault, places, random_faults, single_faults
from helpers.torch_flesh import simulate
from helpers.zero_layouts import small_pieces

from raypar.plan import ParallelPlan

TANGLED = 0
LAYERS = 9
STEPS = 3
PLANS = {
    "three replicas": ParallelPlan.mesh(dp=3, layers=LAYERS),
    "two stages": ParallelPlan.of([1, 3], layers=LAYERS),
    "ties of divided stages": ParallelPlan.of([2, 3], layers=LAYERS),
    "a V": ParallelPlan.mesh(dp=2, pp=2, chunks=2, placement="v", layers=LAYERS),
}


LEVEL = 3
"""It moves state as level 1 does, and frees gradients and parameters besides."""


@cache
def undisturbed(spec: int, steps: int = ALL_STEPS) -> int:
    """As `helpers.membership.undisturbed`, with small pieces of the norm."""
    with small_pieces():
        return membership.undisturbed.__wrapped__(spec, steps)


@pytest.fixture(autouse=True)
def parameters_are_divided() -> Iterator[None]:
    with small_pieces():
        yield


def ends(faults: list[list[Fault]], plan: ParallelPlan, holders: int = 1, **policy: object) -> Counter[str]:
    """Run each; how they began again: from live state, from the mirror, from a checkpoint or the beginning; `again`:
    after a step was done. With two holders there is no mirror."""
    work = replace(membership.job(TANGLED, STEPS), mirror_every=int(holders == 1))
    reference = undisturbed(TANGLED, STEPS)
    found: Counter[str] = Counter()
    for case in faults:
        world, end = simulate(work, plan.with_zero(LEVEL, holders), case, **QUICK | policy)
        assert world.over.end == "done", world.tell(f"{case}: {world.over.why}")
        assert end == reference, world.tell(f"{case}: other bits")
        adopted = [line for line in world.story if "AdoptPlan(" in line]
        for way in ("from_mirror=True", "from_checkpoint=True"):
            found[way] += sum(way in line for line in adopted)
        first = next((at for at, line in enumerate(world.story) if "EmitStep(" in line), len(world.story))
        back = [line for line in world.story[first:] if "from_mirror=True" in line or "from_checkpoint=True" in line]
        found["again"] += len(back)
        found["late"] += any("ApplyKeptGradients(" in line for line in world.story)
    return found


def kills(plan: ParallelPlan, every: int, first: int = 0, holders: int = 1) -> list[list[Fault]]:
    """A kill at every so many places of a quiet run."""
    work = replace(membership.job(TANGLED, STEPS), mirror_every=int(holders == 1))
    plain, found = simulate(work, plan.with_zero(LEVEL, holders), **QUICK)
    assert found == undisturbed(TANGLED, STEPS), "the level changes no bit"
    return [[fault] for fault in single_faults(plain, ["kill"])[first::every]]


@pytest.mark.ci
@pytest.mark.parametrize("name", PLANS)
def test_kills_leave_the_bits(name):
    found = ends(kills(PLANS[name], 29), PLANS[name])
    assert found["from_mirror=True"] > 0


@pytest.mark.full
@pytest.mark.parametrize("name", PLANS)
def test_a_kill_at_any_message_and_instruction_leaves_the_bits(name):
    found = ends(kills(PLANS[name], 1), PLANS[name])
    assert found["from_mirror=True"] > 0 and found["late"] > 0


HELD_TWICE = {
    "three replicas": ParallelPlan.mesh(dp=3, layers=LAYERS),
    "two stages": ParallelPlan.of([3, 4], layers=LAYERS),
}


@pytest.mark.parametrize("name", [pytest.param(n, marks=pytest.mark.ci if n == "two stages" else ()) for n in HELD_TWICE])
def test_with_two_holders_a_kill_runs_nothing_twice(name):
    plan = HELD_TWICE[name]
    found = ends(kills(plan, 13, holders=2), plan, holders=2)
    assert not found["again"]


@pytest.mark.full
@pytest.mark.parametrize("name", HELD_TWICE)
def test_with_two_holders_a_kill_at_any_message_and_instruction_runs_nothing_twice(name):
    plan = HELD_TWICE[name]
    found = ends(kills(plan, 1, holders=2), plan, holders=2)
    assert not found["again"] and found["late"] > 0


@pytest.mark.parametrize("every", [pytest.param(7, marks=pytest.mark.ci), pytest.param(1, marks=pytest.mark.full)])
def test_who_loses_an_owner_and_its_mirror_without_a_checkpoint_begins_again(every):
    """Two of three die at once, at any place: one has kept the mirror's copy of the other's part."""
    plan = PLANS["three replicas"]
    both = [[replace(fault, worker=(n + i) % 3) for i in (0, 1)] for n, (fault,) in enumerate(kills(plan, every))]
    found = ends(both, plan, restarts=True)
    assert found["from_checkpoint=True"] > 0 and found["again"] > len(both) // 3


@pytest.mark.parametrize("seeds", [range(1), pytest.param(range(1, 60), marks=pytest.mark.full)])
def test_faults_of_all_kinds_leave_the_bits(seeds):
    plan = PLANS["three replicas"]
    work = replace(membership.job(TANGLED, STEPS), mirror_every=1)
    plain, _ = simulate(work, plan.with_zero(LEVEL), **QUICK, save_every=1)
    kinds = [kind for kind in KINDS if places(plain, kind)]
    ends([random_faults(seed, 2, plain, workers=3, kinds=kinds) for seed in seeds], plan, save_every=1)


@pytest.mark.ci
def test_levels_and_sizes_change_as_workers_come_and_go():
    plan = ParallelPlan.mesh(dp=2, pp=2, layers=LAYERS)
    changes = (Change(2, 1.3, "kill"), Change(5, 0.4, "join"), Change(7, 2.1, "kill", seed=3), Change(9, 0.4, "join"))

    def plans(generation: int, workers: int) -> ParallelPlan:
        made = ParallelPlan.mesh(layers=LAYERS, pp=2 if workers > 1 else 1, dp=max(1, workers // 2))
        return made.with_zero((0, 1, LEVEL)[(generation + 1) % 3])

    case = Case(TANGLED, plan.with_zero(1), changes, policy=(("save_every", 1),))
    world, found, _ = membership.run(case, plans)
    assert found == undisturbed(TANGLED)
    assert {adopted.most_zero for adopted, _ in world.records.values()} == {0, 1, LEVEL}


@pytest.mark.full
@pytest.mark.parametrize("seed", range(500, 800))
def test_histories_of_joins_losses_and_hangs_leave_the_bits(seed):
    case = history(seed)

    def plans(generation: int, workers: int) -> ParallelPlan:
        dice = membership.random.Random(f"{case.seed}/{generation}/{workers}")
        layers = membership.job(case.spec, case.steps).layers
        return membership.any_plan(dice, workers, layers, case.replicas).with_zero(dice.randrange(4), dice.choice([1, 2]))

    policy = (*case.policy, ("save_every", 1)) if "save_every" not in dict(case.policy) else case.policy
    case = replace(case, plan=case.plan.with_zero(1), policy=policy)
    world, found, _ = membership.run(case, plans)
    assert found == undisturbed(case.spec), world.tell(f"seed {seed}: other bits, {case}")
