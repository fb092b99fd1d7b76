"""Runs whose workers come and go have the bits of one with its first plan: the number of shards changes, that of virtual
shards does not."""

from dataclasses import replace
from itertools import pairwise
from pathlib import Path

import pytest
import torch
from helpers import checkpoint_folders as checkpoint_files
from helpers import torch_flesh
from helpers.generations import SHARDS, Generations, mesh
from helpers.protocol import Fault, random_faults
from helpers.shard_grid import SHALLOW, Cell, graph
from helpers.virtual_shards import divided

from raypar.errors import GroupAborted
from raypar.plan import ParallelPlan, bundle_parts
from raypar.plan.bundle_parts import node_of_each_replica
from raypar.worker.run_in_one_process import OneProcessRun
from raypar.worker.step import bundle_gather

VIRTUAL = 4
PATHS = [
    [(1, 1, 4), (1, 1, 1), (1, 1, 2)],
    [(1, 1, 1), (2, 1, 2), (1, 2, 4)],
    [(2, 2, 2), (1, 2, 1), (1, 1, 4)],
]
"""replicas x stages x shards of one generation after the other."""


def virtual(model: str, replicas: int, stages: int, shards: int) -> ParallelPlan:
    return mesh(model, replicas, stages, shards).with_virtual_shards(VIRTUAL)


def read(folder: Path):
    return checkpoint_files.read_checkpoint_state(folder)


@pytest.mark.parametrize(
    "model, path",
    [
        (SHALLOW, PATHS[0]),
        pytest.param("llama", PATHS[1], marks=pytest.mark.ci),
        pytest.param("dropped", PATHS[2], marks=pytest.mark.ci),
    ],
    ids=str,
)
def test_workers_that_change_their_shards_have_the_bits_of_those_that_do_not(model, path, tmp_path):
    """Two steps under each plan; state in memory, and a checkpoint of one plan read under the next."""
    spec = Cell(model, "1f1b", (1,), (1,), 3, True).job.replace(steps=2 * len(path))
    job = torch_flesh.TorchJob(spec, graph(model), shards=SHARDS)
    live = Generations(job)
    for number, shape in enumerate(path):
        plan = virtual(model, *shape)
        first = plan.world // 2 if number == 2 else 0  # new workers in half of the seats
        live.adopt(plan, list(range(first, first + plan.world)), 2 * number)
        live.step(2 * number)
        live.step(2 * number + 1)
    found = read(live.save(tmp_path / "live", 2 * len(path)))

    there: Path | None = None
    for number, shape in enumerate(path):
        with OneProcessRun(spec, virtual(model, *shape), "1f1b", graph=graph(model)) as local:
            for core in local.cores if there is not None else ():
                core.load(there)
            local.step(2 * number), local.step(2 * number + 1)
            there = checkpoint_files.save_run(local, tmp_path / "resumed", 2 * number + 2, contract={})

    with OneProcessRun(spec, virtual(model, 1, 1, VIRTUAL), "1f1b", graph=graph(model)) as local:
        for step in range(2 * len(path)):
            local.step(step)
        want = read(checkpoint_files.save_run(local, tmp_path / "one plan", 2 * len(path), contract={}))
    for other in (found, read(there)):
        assert other.keys() == want.keys()
        for name, kinds in want.items():
            assert other[name].keys() == kinds.keys()
            for kind, value in kinds.items():
                assert torch.equal(torch.as_tensor(other[name][kind]), torch.as_tensor(value)), (name, kind)


SHARDS_FIRST = {4: (1, 1, 4), 3: (1, 1, 2), 2: (1, 1, 2), 1: (1, 1, 1)}
REPLICAS_OF_FEWER = {4: (2, 1, 2), 3: (3, 1, 1), 2: (1, 1, 2), 1: (1, 1, 1)}
"""Workers -> replicas x stages x shards."""


def planner(model: str, shapes: dict[int, tuple[int, int, int]]):
    return lambda generation, workers: virtual(model, *shapes[min(workers, 4)])


@pytest.mark.parametrize(
    "shapes, mirror_every",
    [pytest.param(SHARDS_FIRST, 1, id="mirror", marks=pytest.mark.ci), pytest.param(REPLICAS_OF_FEWER, 0, id="copies")],
)
def test_kills_that_change_the_number_of_shards_change_no_bit(shapes, mirror_every):
    """The real run machine and real bodies, killed at any moment; the state comes from the mirror, or from the other replica.
    Where the number of shards decides the bits the result is another one (`test_shards_elastic`)."""
    spec = Cell(SHALLOW, "1f1b", (1,), (1,), 2).job.replace(steps=5)
    job = torch_flesh.TorchJob(spec, graph(SHALLOW), shards=SHARDS, mirror_every=mirror_every)
    plan, plans = virtual(SHALLOW, *shapes[4]), planner(SHALLOW, shapes)
    plain, reference = torch_flesh.simulate(job, plan, plans=plans, **torch_flesh.QUICK)
    assert reference is not None
    for at in range(plain.points // 8, plain.points, plain.points // 5):
        world, found = torch_flesh.simulate(job, plan, [Fault(at, "kill")], plans=plans, **torch_flesh.QUICK)
        assert world.over.end == "done", world.tell(f"{at}: {world.over.why}")
        assert found == reference, world.tell(f"{at}: other bits")


@pytest.mark.ci
def test_kills_inside_a_gather_of_what_travels_in_parts_change_no_bit(monkeypatch):
    """Two stages of two shards on a node each. A shard is killed while the other one waits for its part of a bundle."""
    spec = Cell(SHALLOW, "1f1b", (1,), (1,), 2).job.replace(steps=4)
    job = torch_flesh.TorchJob(spec, graph(SHALLOW), shards=SHARDS, mirror_every=1)
    shapes = {4: (1, 2, 2), 3: (1, 2, 1), 2: (1, 1, 2), 1: (1, 1, 1)}
    plan, plans = virtual(SHALLOW, *shapes[4]), planner(SHALLOW, shapes)
    _, reference = torch_flesh.simulate(job, plan, plans=plans, **torch_flesh.QUICK)
    command, gather, interrupted = torch_flesh.TorchFlesh.command, bundle_gather.BundleGather.gather, list[str]()

    def on_nodes(self, order, workers, worker):
        return replace(command(self, order, workers, worker), nodes=node_of_each_replica(order.plan))

    def watched(self, stage, microbatch, came, what):
        try:
            return (yield from gather(self, stage, microbatch, came, what))
        except GroupAborted:
            interrupted.append(what)
            raise

    monkeypatch.setattr(bundle_parts, "LEAST_BYTES_IN_PARTS", 1)
    monkeypatch.setattr(torch_flesh.TorchFlesh, "command", on_nodes)
    monkeypatch.setattr(bundle_gather.BundleGather, "gather", watched)
    plain, found = torch_flesh.simulate(job, plan, plans=plans, **torch_flesh.QUICK)
    assert found == reference
    for at in range(plain.points // 3, plain.points // 3 + 60, 5):
        world, found = torch_flesh.simulate(job, plan, [Fault(at, "kill")], plans=plans, **torch_flesh.QUICK)
        assert world.over.end == "done", world.tell(f"{at}: {world.over.why}")
        assert found == reference, world.tell(f"{at}: other bits")
    assert interrupted


@pytest.mark.ci
def test_four_virtual_shards_on_any_workers_and_on_four_then_one_then_two_of_them_have_one_hash():
    """On 1, 2 and 4 shards, on two with 1 and 3 of them, and killed so that a run goes from four shards to one, then to two."""
    spec = Cell(SHALLOW, "1f1b", (1,), (1,), 2).job.replace(steps=6)
    job = torch_flesh.TorchJob(spec, graph(SHALLOW), shards=SHARDS, mirror_every=1)
    layers = len(graph(SHALLOW).layers)

    def on(*division: int) -> ParallelPlan:
        return divided(ParallelPlan.mesh(tp=len(division), layers=layers), division)

    hashes = set()
    for division in ((4,), (2, 2), (1, 3), (3, 1), (1, 1, 1, 1)):
        plain, found = torch_flesh.simulate(job, on(*division), plans=lambda *_, of=division: on(*of), **torch_flesh.QUICK)
        hashes.add(found)
    assert len(hashes) == 1 and None not in hashes
    of_workers = {1: on(4), 2: on(2, 2), 3: on(4), 4: on(1, 1, 1, 1)}
    went: list[list[int]] = []

    def choose(generation: int, workers: int) -> ParallelPlan:
        plan = of_workers[min(workers, 4)]
        went[-1].append(plan.world)
        return plan

    for at in range(plain.points // 6, plain.points // 3, plain.points // 12):
        went.append([4])
        kills = [Fault(at, "kill", 3), Fault(at + 60, "kill", 0)]
        world, found = torch_flesh.simulate(job, on(1, 1, 1, 1), kills, plans=choose, **torch_flesh.QUICK)
        assert found in hashes, world.tell(f"{at}: other bits")
    assert [4, 1, 2] in went, went


@pytest.mark.full
@pytest.mark.parametrize("seeds", [range(at, at + 10) for at in range(0, 100, 10)], ids=str)
def test_a_hundred_histories(seeds):
    spec = Cell("llama", "1f1b", (1,), (1,), 2, True).job.replace(steps=5)
    job = torch_flesh.TorchJob(spec, graph("llama"), shards=SHARDS, mirror_every=1)
    plan, plans = virtual("llama", 1, 1, 4), planner("llama", SHARDS_FIRST)
    plain, reference = torch_flesh.simulate(job, plan, plans=plans, **torch_flesh.QUICK)
    for seed in seeds:
        kinds = ("kill", "zombie", "stop", "late_answer", "kill_driver", "join", "drain")
        faults = random_faults(seed, 2, plain, workers=4, kinds=kinds)
        world, found = torch_flesh.simulate(job, plan, faults, plans=plans, **torch_flesh.QUICK)
        assert world.over.end == "done" or "the only copies" in world.over.why, world.tell(f"{faults}: {world.over.why}")
        assert found in (reference, None), world.tell(f"{faults}: other bits")


def test_neighbouring_shapes_differ():
    assert all(one != other for path in PATHS for one, other in pairwise(path))
