"""Every fault at every place of a step, of a recovery and of a rescaling, on the real machines and a virtual clock.

No run may hang, and each ends with the bits of the undisturbed one or with the one named error. The default suite takes a
part of each set (every so many cases); the whole of it, over 10,000 cases, is `pytest -m full tests/chaos/test_protocol.py`.
"""

import subprocess
import sys
from collections import Counter
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

import pytest
from helpers.hash_body import Job
from helpers.protocol import KINDS, Fault, Kind, World, random_faults, simulate, single_faults

from raypar.plan import Microbatches, ParallelPlan

pytestmark = pytest.mark.part(10)

QUICK = {
    "validates": True,
    "validate_every": 2,
    "step_deadline_s": 0.5,
    "start_deadline_s": 1.0,
    "pass_deadline_s": 2.0,
    "status_s": 0.5,
    "adopt_s": 2.0,
    "capacity_s": 5.0,
}
GRID = ParallelPlan.mesh(dp=2, pp=2, layers=4)
LINE = ParallelPlan.mesh(pp=4, layers=4)
UNEVEN = ParallelPlan.of([1, 3, 1], layers=4)
"""One replica, three, one."""
EVERY = 41
"""The default suite takes every so many cases."""


def job(**more):
    return Job(**({"steps": 5} | more))


def try_all(cases: Sequence[Sequence[Fault]], plan: ParallelPlan, work, *, losable: bool = False, **policy) -> Counter[str]:
    """Runs all; returns how they ended. `losable`: the only copy of something may die."""
    reference = simulate(work, plan, **QUICK)[1]
    ends: Counter[str] = Counter()
    for faults in cases:
        world, found = simulate(work, plan, faults, **(QUICK | policy))
        assert world.over is not None
        ends[world.over.end] += 1
        if world.over.end == "done":
            assert found == reference, world.tell(f"{faults}: other bits")
        else:
            gone = losable and ("the only copies" in world.over.why or not any(p.alive for p in world.processes))
            assert gone, world.tell(f"{faults}: {world.over.why}")
    return ends


def portions(cases: list, whole: bool) -> list:
    return cases if whole else cases[::EVERY]


WHOLE = [False, pytest.param(True, marks=pytest.mark.full)]


@pytest.mark.parametrize("whole", WHOLE)
def test_one_fault_anywhere(whole: bool):
    """Two replicas of everything: no single fault loses anything."""
    plain = simulate(job(), GRID, **QUICK)[0]
    try_all(portions([[f] for f in single_faults(plain)], whole), GRID, job())


LAST: dict[str, tuple] = {
    "one worker": (ParallelPlan.mesh(layers=4), {}),
    "one replica, no mirror": (LINE, {}),
    "one replica, a mirror": (LINE, {"mirror_every": 2}),
    "one worker is left": (ParallelPlan.mesh(dp=2, layers=4), {}, Fault(12, "kill", 0)),
}


@pytest.mark.parametrize("whole", WHOLE)
@pytest.mark.parametrize("kind", ["sleep", "zombie"])
@pytest.mark.parametrize("base", LAST)
def test_silence_alone_loses_nothing(base: str, kind: Kind, whole: bool):
    """Wherever a worker stands still for 25 s, in its step or as a whole process: the run goes on with the same bits, also
    where that worker has the only copy."""
    plan, more, *first = LAST[base]
    work = job(steps=6, **more)
    once = World(work, plan, first, **QUICK)
    once.run()
    cases = [[*first, Fault(at, kind, ms=25_000.0)] for at in range(13 if first else 0, once.points)]
    assert set(try_all(cases if whole else cases[::13], plan, work)) == {"done"}


@pytest.mark.parametrize("kind", ["sleep", "zombie"])
def test_who_has_the_only_copy_and_is_not_waited_for_ends_the_run(kind: Kind):
    """What the wait is for; and only then is anything lost."""
    plan, more = LAST["one replica, no mirror"]
    cases = [[Fault(at, kind, ms=25_000.0)] for at in range(60, 200, 20)]
    ends = try_all(cases, plan, job(steps=6, **more), losable=True, last_copy_wait_s=0.0)
    assert ends["failed"], ends


BASES: dict[str, tuple] = {
    "re-route": (GRID, {}, Fault(100, "kill")),
    "hung": (GRID, {}, Fault(140, "zombie", ms=4000.0)),
    "join": (GRID, {}, Fault(20, "join")),
    "drain": (GRID, {}, Fault(90, "drain")),
    "new driver": (GRID, {}, Fault(8, "kill_driver")),
    "two drivers": (GRID, {}, Fault(8, "stop_driver", ms=3000.0)),
    "roll back": (LINE, {"mirror_every": 2, "steps": 6}, Fault(180, "kill")),
    "refill": (UNEVEN, {"mirror_every": 2, "steps": 6}, Fault(150, "kill")),
    "replaced": (GRID, {"steps": 8}, Fault(100, "kill"), {"hires": True}),
    "replaced after a roll back": (LINE, {"mirror_every": 2, "steps": 8}, Fault(180, "kill"), {"hires": True}),
    "zero": (GRID, {"zero": True, "mirror_every": 2}, Fault(130, "kill")),
    "zero, two holders": (GRID, {"zero": True, "holders": 2}, Fault(130, "kill")),
}


@pytest.mark.parametrize("whole", WHOLE)
@pytest.mark.parametrize("base", BASES)
def test_another_fault_at_every_place_after_the_first(base: str, whole: bool):
    """Places of the recovery or rescaling itself, and of what follows it."""
    plan, more, first, *policy = BASES[base]
    work, quick = job(**more), QUICK | (policy[0] if policy else {})
    once = World(work, plan, [first], **quick)
    once.run()
    kinds: tuple[Kind, ...] = ("kill", "zombie", "delay", "duplicate", "late_answer", "kill_driver", "stop_driver")
    cases = [[first, second] for second in single_faults(once, kinds, start=0.35)]
    try_all(portions(cases, whole), plan, work, losable=True, **quick)


@pytest.mark.parametrize("whole", WHOLE)
@pytest.mark.parametrize("count", [2, 3, 5])
def test_seeded_histories(count: int, whole: bool):
    """Several faults of any kind, at the worker that is there or at another one."""
    for plan, work in (
        (GRID, job()),
        (LINE, job(mirror_every=2, steps=6)),
        (UNEVEN, job(mirror_every=1, steps=6, batching=Microbatches(5, 3, 10))),
        (GRID, job(zero=True, mirror_every=2, steps=6)),
        (ParallelPlan.mesh(dp=4, layers=4), job(zero=True, holders=2, steps=6)),
    ):
        plain = simulate(work, plan, **QUICK)[0]
        cases = [random_faults(seed, count, plain, workers=plan.world) for seed in range(400)]
        try_all(portions(cases, whole), plan, work, losable=True, save_every=2)
        kinds = tuple(kind for kind in KINDS if kind != "join")
        cases = [random_faults(seed, count, plain, workers=plan.world, kinds=kinds) for seed in range(400, 500)]
        try_all(portions(cases, whole), plan, work, losable=True, hires=True)


@pytest.mark.parametrize("whole", WHOLE)
@pytest.mark.parametrize("together_ms", [1.0, 30.0])
def test_seeded_histories_of_reports_that_come_together(together_ms: float, whole: bool):
    """As of many workers, who are called by way of agents: of some of them one event, early or when others are lost already."""
    for plan, work in ((GRID, job()), (LINE, job(mirror_every=2, steps=6)), (UNEVEN, job(mirror_every=1, steps=6))):
        plain, alone = simulate(work, plan, together_ms=together_ms, **QUICK)[0], simulate(work, plan, **QUICK)[0]
        assert plain.seen == alone.seen and plain.actions <= alone.actions
        cases = [random_faults(seed, 2 + seed % 2, plain, workers=plan.world) for seed in range(600, 900)]
        try_all(portions(cases, whole), plan, work, losable=True, save_every=2, together_ms=together_ms)


@pytest.mark.parametrize("whole", WHOLE)
@pytest.mark.parametrize("first", [None, "kill", "zombie", "kill_driver", "stop_driver", "drain", "join", "late_answer"])
def test_ctrl_c_anywhere_saves_what_people_have_seen(first: Kind | None, whole: bool):
    """Before, during and after the answer to another fault: two replicas of everything, so nothing is lost, and the run ends
    with a checkpoint of the undisturbed run's state after so many steps, or done."""
    work, quiet = job(steps=6), QUICK | {"validates": False, "save_at_end": True}
    right = simulate(work, GRID, **quiet, save_every=1)[0].flesh.checkpoints
    plain = simulate(work, GRID, **quiet)[0]
    others = single_faults(plain, [first], start=0.2)[:: 1 + len(single_faults(plain, [first])) // 9] if first else [None]
    for other in others:
        faults = [other] if other is not None else []
        once = World(work, GRID, faults, **quiet)
        once.run()
        for at in range(0, once.points, 1 if whole else 37):
            for grace_ms in (0.0, 5.0, 1500.0):
                asked = [*faults, Fault(at, "ctrl_c", ms=grace_ms)]
                world, _ = simulate(work, GRID, asked, **quiet)
                assert world.over.end in ("interrupted", "done"), world.tell(f"{asked}: {world.over.why}")
                for done, state in world.flesh.checkpoints.items():
                    assert state == right[done], world.tell(f"{asked}: other state after {done} steps")
                saved = world.over.end == "done" or len(world.seen) in world.flesh.checkpoints
                assert saved, world.tell(f"{asked}: {world.over.why}")


@pytest.mark.parametrize("whole", WHOLE)
@pytest.mark.parametrize("model", ["plain", "tangled"])
def test_seeded_histories_with_real_tensors(model: str, whole: bool):
    """The same protocol with real stages, optimizers and reductions: parameters, optimizer state and losses, bit for bit."""
    from helpers import torch_flesh, ugly_models

    from raypar.worker.layer_graph_of_job import make_layer_graph

    spec = ugly_models.job(model, microbatches=4, steps=4)
    work = torch_flesh.TorchJob(spec, make_layer_graph(spec))
    plan = ParallelPlan.mesh(dp=2, pp=2, layers=work.layers)
    quiet = QUICK | {"validates": False}
    plain, reference = torch_flesh.simulate(work, plan, **quiet)
    alone = torch_flesh.simulate(work, ParallelPlan.mesh(layers=work.layers), **quiet)[1]
    assert alone == reference
    kinds: tuple[Kind, ...] = ("kill", "zombie", "stop", "late_answer", "kill_driver", "stop_driver", "join", "drain")
    for seed in range(60 if whole else 4):
        faults = random_faults(seed, 3, plain, workers=4, kinds=kinds)
        world, found = torch_flesh.simulate(work, plan, faults, **quiet)
        assert world.over.end == "done" or "the only copies" in world.over.why, world.tell(f"{faults}: {world.over.why}")
        assert found in (reference, None), world.tell(f"{faults}: other bits")


@pytest.mark.parametrize("whole", [pytest.param(False, marks=pytest.mark.ci), *WHOLE[1:]])
@pytest.mark.parametrize("model", ["plain", pytest.param("tangled", marks=pytest.mark.full)])
def test_the_only_copy_of_real_tensors_comes_back_from_the_mirror(model: str, whole: bool):
    """One replica of every stage and no checkpoint: wherever a worker dies, its buddy has what it held; before the first cut
    is complete everybody begins anew."""
    from helpers import torch_flesh, ugly_models

    from raypar.worker.layer_graph_of_job import make_layer_graph

    spec = ugly_models.job(model, microbatches=4, steps=6)
    quiet = QUICK | {"validates": False}
    cured = 0
    for every in (1, 3):
        work = torch_flesh.TorchJob(spec, make_layer_graph(spec), mirror_every=every)
        plan = ParallelPlan.mesh(pp=4, layers=work.layers)
        plain, reference = torch_flesh.simulate(work, plan, **quiet)
        assert reference == torch_flesh.simulate(replace(work, mirror_every=0), plan, **quiet)[1]
        for at in range(plain.points // 8, plain.points, 7 if whole else 47):
            world, found = torch_flesh.simulate(work, plan, [Fault(at, "kill")], **quiet)
            assert found == reference, world.tell(f"a kill at {at}: {world.over.why}")
            adopted = [line for line in world.story if "AdoptPlan(" in line]
            assert all("from_mirror=True" in line or "after 0 steps" in line for line in adopted), adopted
            cured += "from_mirror=True" in "".join(adopted)
        for seed in range(30 if whole else 2):
            faults = random_faults(seed, 3, plain, workers=4, kinds=("kill", "zombie", "late_answer", "join"))
            world, found = torch_flesh.simulate(work, plan, faults, **quiet)
            assert world.over.end == "done" or "the only copies" in world.over.why, world.tell(f"{faults}: {world.over.why}")
            assert found in (reference, None), world.tell(f"{faults}: other bits")
    assert cured > 8


REPLICAS = {plan: ParallelPlan.mesh(dp=plan[0], pp=plan[1], layers=4) for plan in ((2, 2), (3, 1), (4, 1))}


@pytest.mark.parametrize("whole", WHOLE)
@pytest.mark.parametrize("every", [1, 3])
@pytest.mark.parametrize("shape", [(2, 2), (3, 1)])
def test_state_that_changes_by_itself_is_found_and_executed_again(shape, every: int, whole: bool):
    """One of three is given up; of two nobody knows which is right, so both go back to the last cut that agreed."""
    work, plan = job(steps=7, mirror_every=every), REPLICAS[shape]
    quiet = QUICK | {"validates": False}
    plain, reference = simulate(work, plan, **quiet)
    for at in range(plain.points // 8, plain.points, 1 if whole else 17):  # before that nobody holds anything
        world, end = simulate(work, plan, [Fault(at, "corrupt")], **quiet)
        assert any("silent corruption" in line for line in world.story), world.tell(f"changed at {at}")
        assert end == reference, world.tell(f"changed at {at}")
        assert len(world.driver.machine.membership.members) == (4 if shape == (2, 2) else 2)


@pytest.mark.parametrize("whole", WHOLE)
@pytest.mark.parametrize("every", [1, 3])
@pytest.mark.parametrize("shape", [(2, 2), (3, 1)])
def test_a_validation_of_wrong_state_that_learning_rates_follow_is_run_again(shape, every: int, whole: bool):
    """The steps after it are executed again with the rates that its right value gives, and nobody sees it twice."""
    work, plan = job(steps=9, mirror_every=every), REPLICAS[shape]
    quick = QUICK | {"rates_follow_validations": True}
    plain, reference = simulate(work, plan, **quick)
    assert reference != simulate(work, plan, **QUICK)[1]
    again = 0
    for at in range(plain.points // 8, plain.points * 3 // 4, 1 if whole else 17):  # what changes last is seen by nobody
        world, end = simulate(work, plan, [Fault(at, "corrupt")], **quick)
        assert any("silent corruption" in line for line in world.story), world.tell(f"changed at {at}")
        assert end == reference, world.tell(f"changed at {at}")
        again += any("ForgetValidations" in line for line in world.story)
    assert again > 1


@pytest.mark.parametrize("whole", WHOLE)
def test_such_a_validation_is_run_again_or_the_run_ends_whatever_else_happens(whole: bool):
    plan, quick = REPLICAS[4, 1], QUICK | {"rates_follow_validations": True}
    kinds: tuple[Kind, ...] = ("corrupt", "kill_driver", "stop_driver", "ctrl_c", "stop", "delay", "late_answer")
    ends, again = Counter[str](), 0
    work = job(steps=9, mirror_every=3)
    plain, _ = simulate(work, plan, **quick)
    reference = plain.flesh.final([plain.processes[w].body for w in plain.driver.machine.membership.members])
    for seed in range(400 if whole else 30):
        faults = [Fault(plain.points * (seed % 10 + 2) // 16, "corrupt", 1), *random_faults(seed, 2, plain, kinds=kinds)]
        early = plain.points // 2  # what changes after the last step is seen by nobody
        faults = [replace(f, at=f.at % early) if f.kind == "corrupt" else f for f in faults]
        world, _ = simulate(work, plan, faults, **quick)
        ends[world.over.end] += 1
        again += any("ForgetValidations" in line for line in world.story)
        if world.over.end == "done":
            bodies = [world.processes[w].body for w in world.driver.machine.membership.members]
            assert world.flesh.final(bodies) == reference, world.tell(f"{faults}: other bits")
        elif world.over.end == "failed":
            why = world.over.why
            assert any(known in why for known in ("the only copies", "executed again", "lost with a driver")), world.tell(why)
    assert again > 3 and ends["done"] > 3, (again, ends)


@pytest.mark.parametrize("whole", WHOLE)
@pytest.mark.parametrize("second", ["kill_driver", "stop_driver"])
def test_a_driver_that_goes_on_after_its_successors_have_validated_changes_no_learning_rate(second: Kind, whole: bool):
    """It was stopped in a validation, whose value it stores when it goes on; then that of its successors is lost."""
    work, plan, quick = job(mirror_every=3), REPLICAS[2, 2], QUICK | {"validate_every": 1, "rates_follow_validations": True}
    plain, reference = simulate(work, plan, **quick)
    validated = [at for at, line in enumerate(plain.story) if "driver 0: Validate(" in line]
    late = 0
    for first in validated[: None if whole else 2]:
        for then in range(first + 1, first + 12, 1 if whole else 5):
            for last in range(then + 1, then + 30, 1 if whole else 4):
                kinds: tuple[tuple[int, Kind], ...] = ((first, "stop_driver"), (then, second), (last, "kill_driver"))
                faults = [Fault(at, kind, ms=3000.0) for at, kind in kinds]
                world, found = simulate(work, plan, faults, **quick)
                assert found == reference, world.tell(f"{faults}: {world.over.why}")
                late += any("driver 0: EmitValidation(" in line for line in world.story)
    assert late > 9


@pytest.mark.parametrize("whole", WHOLE)
def test_after_a_step_that_may_not_be_called_for_no_later_one_is(whole: bool):
    """Its learning rate follows a value that was lost with a driver: that is why the run ends, and nobody is asked for more."""
    work, plan, quick = job(mirror_every=3), REPLICAS[2, 2], QUICK | {"rates_follow_validations": True}
    ends = Counter[str]()
    for at in range(20, 100, 1 if whole else 9):
        for then in (25, 26):
            faults = [Fault(then, "kill_driver"), Fault(19, "kill_driver"), Fault(at, "corrupt", 0)]
            ends[simulate(work, plan, faults, **quick)[0].over.why] += 1
    assert ends.keys() <= {"all 5 steps are done", "the value after 2 steps was lost with a driver"} and len(ends) == 2, ends


@pytest.mark.parametrize("whole", WHOLE)
@pytest.mark.parametrize("shape", REPLICAS)
def test_silent_corruption_among_other_faults(shape, whole: bool):
    """While every stage keeps replicas to compare with, the end has the right bits or is an error with a name.

    Who dies is not one whose state has changed: what it had sent before could not be told from what was right.
    """
    plan, quiet = REPLICAS[shape], QUICK | {"validates": False}
    kinds: tuple[Kind, ...] = ("corrupt", "corrupt", "stop", "late_answer", "delay", "duplicate")
    if shape == (4, 1):
        kinds += ("kill", "zombie")
    for every, saves in ((1, 0), (3, 0), (3, 3)):
        work = job(steps=8, mirror_every=every)
        plain, reference = simulate(work, plan, **quiet)
        for seed in range(200 if whole else 12):
            faults = random_faults(seed, 3, plain, workers=plan.world, kinds=kinds)
            if "kill" in kinds:
                targets = {"corrupt": 1 + seed % 3, "kill": 0, "zombie": 0}
                faults = [replace(f, worker=targets.get(f.kind, f.worker)) for f in faults]
            world, found = simulate(work, plan, faults, save_every=saves, **quiet)
            assert found == reference or "the only copies" in world.over.why, world.tell(f"{faults}: {world.over.why}")


@pytest.mark.parametrize("whole", WHOLE)
def test_a_new_driver_finds_silent_corruption_too(whole: bool):
    """From what the workers tell it. Losses that people had seen before may have been wrong; the state is right."""
    plan, quiet = REPLICAS[4, 1], QUICK | {"validates": False}
    work = job(steps=8, mirror_every=3)
    plain, _ = simulate(work, plan, **quiet)
    reference = plain.flesh.final([plain.processes[w].body for w in plain.driver.machine.membership.members])
    for seed in range(400 if whole else 20):
        faults = random_faults(seed, 3, plain, kinds=("corrupt", "corrupt", "kill_driver", "stop_driver"))
        early = plain.points // 2  # what changes after the last step is seen by nobody
        faults = [replace(f, at=f.at % early) if f.kind == "corrupt" else f for f in faults]
        world, _ = simulate(work, plan, faults, **quiet)
        if world.over.end == "done":
            bodies = [world.processes[w].body for w in world.driver.machine.membership.members]
            assert world.flesh.final(bodies) == reference, world.tell(f"{faults}: other bits")
        else:
            assert "the only copies" in world.over.why or "executed again" in world.over.why, world.tell(f"{faults}")


@pytest.mark.ci
def test_a_bit_of_a_real_weight_that_flips_is_found_and_executed_again():
    from helpers import torch_flesh, ugly_models

    from raypar.worker.layer_graph_of_job import make_layer_graph

    spec = ugly_models.job("tangled", microbatches=4, steps=6)
    work = torch_flesh.TorchJob(spec, make_layer_graph(spec), mirror_every=2)
    quiet = QUICK | {"validates": False}
    for plan in (ParallelPlan.mesh(dp=2, pp=2, layers=work.layers), ParallelPlan.mesh(dp=3, layers=work.layers)):
        plain, reference = torch_flesh.simulate(work, plan, **quiet)
        assert not any("silent corruption" in line for line in plain.story)
        for at in range(plain.points // 6, plain.points, plain.points // 5):
            world, found = torch_flesh.simulate(work, plan, [Fault(at, "corrupt")], **quiet)
            assert any("silent corruption" in line for line in world.story), world.tell(f"changed at {at}")
            assert found == reference, world.tell(f"changed at {at}: {world.over.why}")


def test_the_simulation_needs_no_torch():
    code = "import sys, helpers.protocol; sys.exit('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], cwd=Path(__file__).parents[1], timeout=60).returncode == 0


def test_every_kind_of_fault_is_known():
    assert set(KINDS) == {f.kind for f in single_faults(simulate(job(), GRID, **QUICK)[0])}


@pytest.mark.parametrize("shape", REPLICAS)
def test_a_straggler_is_replaced_wherever_it_is_and_the_bits_stay_the_same(shape):
    work, plan, quiet = job(steps=24), REPLICAS[shape], QUICK | {"validates": False}
    reference = simulate(work, plan, **quiet)[1]
    for worker in range(plan.world):
        more = {"hires": True, "replace_stragglers": True, "straggler_steps": 5, "slow": {worker: 2.0}}
        world, found = simulate(work, plan, **quiet, **more)
        assert found == reference, world.tell(f"worker {worker} is slow: {world.over.why}")
        assert not world.processes[worker].alive, "it was drained, then removed"
        assert sum("ReportStraggler(" in line for line in world.story) == 1, "told once, and nobody else left"
        assert sorted(world.driver.machine.membership.members) == sorted({*range(plan.world), plan.world} - {worker})
        world, found = simulate(work, plan, **quiet, **(more | {"replace_stragglers": False}))
        assert found == reference and world.processes[worker].alive


@pytest.mark.parametrize("whole", WHOLE)
def test_stragglers_among_other_faults(whole: bool):
    work, plan, quiet = job(steps=24, mirror_every=2), GRID, QUICK | {"validates": False}
    plain, reference = simulate(work, plan, **quiet)
    more = {"hires": True, "replace_stragglers": True, "straggler_steps": 4, "slow": {1: 2.0, 3: 3.0, 4: 2.5}}
    kinds: tuple[Kind, ...] = ("kill", "zombie", "stop", "delay", "late_answer", "kill_driver", "stop_driver", "drain")
    for seed in range(300 if whole else 12):
        faults = random_faults(seed, 3, plain, workers=4, kinds=kinds)
        world, found = simulate(work, plan, faults, **quiet, **more)
        gone = world.over.end == "failed" and "the only copies" in world.over.why
        assert found == reference or gone, world.tell(f"{faults}: {world.over.why}")


SHARED_OUT = {"rebalance_stragglers": True, "straggler_steps": 4, "block_work": (1,) * 12}


def of_twelve_blocks(**more) -> Job:
    return job(steps=40, batching=Microbatches(12, 12, 24), **more)


@pytest.mark.parametrize("misfits", [(), (1,)], ids=["in place", "by a new generation"])
def test_a_straggler_gets_fewer_blocks_and_the_bits_stay_the_same(misfits):
    work, plan, quiet = of_twelve_blocks(), ParallelPlan.of([3, 2], layers=4), QUICK | {"validates": False}
    reference = simulate(work, plan, **quiet)[1]
    for worker in range(plan.world):
        world, found = simulate(work, plan, **quiet, **SHARED_OUT, slow={worker: 2.0}, misfits=misfits)
        now = world.driver.machine.membership
        assert found == reference, world.tell(f"worker {worker} is slow: {world.over.why}")
        assert now.members == tuple(range(plan.world)) and now.generation == 1 + bool(misfits)
        (mine,) = now.plan.roles[worker]
        for stage, grid in zip(now.plan.stages, now.plan.grid_of_stage, strict=True):
            assert stage.share == () if grid != mine.grid else stage.share[mine.replica] == min(stage.share)


@pytest.mark.parametrize("whole", WHOLE)
def test_shares_change_among_other_faults(whole: bool):
    work, plan, quiet = of_twelve_blocks(mirror_every=2), ParallelPlan.of([3, 2], layers=4), QUICK | {"validates": False}
    plain, reference = simulate(work, plan, **quiet)
    kinds: tuple[Kind, ...] = ("kill", "zombie", "stop", "delay", "late_answer", "kill_driver", "stop_driver", "drain")
    for seed in range(300 if whole else 12):
        faults = random_faults(seed, 3, plain, workers=4, kinds=kinds)
        more = {"hires": True, "slow": {seed % 3: 2.0, 4: 3.0}, "misfits": (2,) if seed % 4 == 0 else ()}
        world, found = simulate(work, plan, faults, **quiet, **SHARED_OUT, **more)
        gone = world.over.end == "failed" and "the only copies" in world.over.why
        assert found == reference or gone, world.tell(f"{faults}: {world.over.why}")
