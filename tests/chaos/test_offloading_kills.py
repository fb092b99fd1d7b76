"""Workers that offload are killed in the middle of a step: the bits are those of a run that lost nobody and kept all in memory.

Real stages, optimizers and reductions over the local transport, under the real elastic protocol on a virtual clock.
"""

from collections.abc import Iterator
from dataclasses import replace

import pytest
from helpers.membership import Case, run, undisturbed
from helpers.offloaded_layouts import small_memory_offloaded
from helpers.protocol import Change

from raypar.job import Job
from raypar.plan import ParallelPlan
from raypar.schedule.offloading import has_offloading

TANGLED, PLAIN = 0, 1
LAYERS = {TANGLED: 9, PLAIN: 8}


@pytest.fixture(autouse=True)
def into_files(tmp_path, monkeypatch) -> Iterator[None]:
    monkeypatch.setattr(Job, "activations_in", property(lambda job: str(tmp_path)))
    with small_memory_offloaded():
        yield


def shape(spec: int, recompute=(), **mesh) -> ParallelPlan:
    layers = LAYERS[spec]
    return ParallelPlan.mesh(layers=layers, recompute=recompute, **mesh).with_offload(set(range(layers)) - set(recompute))


CASES = {
    "three stages": (TANGLED, shape(TANGLED, pp=3, dp=2)),
    "two chunks, beside recomputation": (TANGLED, shape(TANGLED, (1, 4, 6), pp=2, dp=2, chunks=2)),
    "a V": (PLAIN, shape(PLAIN, pp=2, dp=2, chunks=2, placement="v")),
}


@pytest.mark.parametrize("name", [pytest.param(n, marks=[] if i == 1 else pytest.mark.full) for i, n in enumerate(CASES)])
def test_a_run_that_offloads_goes_through_kills_with_the_bits_of_an_undisturbed_one(name):
    spec, plan = CASES[name]
    changes = (Change(2, 1.3, "kill"), Change(5, 0.4, "join"), Change(7, 2.1, "kill", seed=3))

    def plans(generation: int, workers: int) -> ParallelPlan:
        return shape(spec, plan.recompute, pp=2, dp=workers // 2) if workers > 1 else shape(spec, plan.recompute, pp=1)

    world, found, _ = run(Case(spec, plan, changes), plans)
    assert found == undisturbed(spec)
    assert world.driver.machine.membership.generation >= 2, world.tell("nobody was killed")
    plans_adopted = {adopted for adopted, _ in world.records.values()}
    assert all(adopted.offload == plan.offload for adopted in plans_adopted) and len(plans_adopted) > 1
    assert any(has_offloading(part.program) for parts in world.job.lowered.values() for part in parts)


def test_refilled_seats_keep_the_offloading(tmp_path):
    spec, plan = CASES["three stages"]
    world, found, _ = run(Case(spec, plan, (Change(2, 0.0, "kill"),)), lambda generation, workers: replace(plan))
    assert found == undisturbed(spec)
    assert all(adopted.offload == plan.offload for adopted, _ in world.records.values())
    assert not any(tmp_path.iterdir())
