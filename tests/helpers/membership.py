"""Seeded histories of a run's membership: 8 -> 7 -> 5 -> 3 -> 1 -> 6 ..., by kills, hangs, drains, joins and dead drivers."""

from __future__ import annotations

import itertools
import random
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, field, fields
from functools import cache
from typing import Any

from helpers import ugly_models
from helpers.protocol import EVERYBODY, Change, ChangeKind, World
from helpers.torch_flesh import TorchJob
from helpers.watched import Record, WatchedFlesh

from raypar.job import OptimizerConfig
from raypar.plan import ParallelPlan
from raypar.schedule import registry
from raypar.worker.layer_graph_of_job import make_layer_graph

STEPS = 12
TICK_MS = 5.0
"""About a step: who waits for a seat is looked at every tick."""
QUICK: dict[str, Any] = {
    "step_deadline_s": 0.5,
    "start_deadline_s": 1.0,
    "pass_deadline_s": 10.0,
    "status_s": 0.5,
    "adopt_s": 2.0,
    "capacity_s": 60.0,
}
SGD = OptimizerConfig(function="torch.optim:SGD", args={"lr": 3e-2, "momentum": 0.9, "weight_decay": 0.01})
SPECS: tuple[dict[str, Any], ...] = (
    {"model": "tangled", "microbatches": 4},
    {"model": "plain", "microbatches": 4},
    {"model": "tangled", "microbatches": 6, "virtual_replicas": 3, "optimizer": SGD},
    {"model": "plain", "microbatches": 5, "virtual_replicas": 4, "optimizer": SGD},
    {"model": "tangled", "microbatches": 3, "virtual_replicas": 5},
    {"model": "plain", "microbatches": 8, "virtual_replicas": 2},
)
"""Data sets of 37 and 23 samples, read for three to ten epochs; no batch divides them."""


@cache
def job(index: int, steps: int = STEPS) -> TorchJob:
    """Of `SPECS`; one for all histories."""
    spec = ugly_models.job(**SPECS[index], steps=steps)
    return TorchJob(spec, make_layer_graph(spec), registry.NAMES)


@cache
def undisturbed(index: int, steps: int = STEPS) -> int:
    """Hash of parameters, optimizer state and losses of one worker that nothing happens to."""
    return run(Case(index, ParallelPlan.mesh(layers=job(index).layers), (), steps=steps))[1]


@dataclass(frozen=True)
class Case:
    """One run: what is trained, where it begins, what happens, and what the policy says besides `QUICK`."""

    spec: int
    plan: ParallelPlan
    changes: tuple[Change, ...]
    seed: int = 0
    replicas: int = 1
    """Of each stage at least, as long as there are workers for it."""
    policy: tuple[tuple[str, Any], ...] = ()
    steps: int = STEPS


def run(case: Case, plans: Callable[[int, int], ParallelPlan] | None = None) -> tuple[World, int, Record]:
    """To its end: the world, the final hash, and what was watched. `plans`: the planner, (generation, workers) -> plan."""
    work = job(case.spec, case.steps)

    def seeded(generation: int, workers: int) -> ParallelPlan:
        dice = random.Random(f"{case.seed}/{generation}/{workers}")
        return any_plan(dice, workers, work.layers, case.replicas)

    policy = QUICK | dict(case.policy)
    world = World(work, case.plan, changes=case.changes, plans=plans or seeded, flesh=WatchedFlesh, tick_ms=TICK_MS, **policy)
    try:
        over = world.run()
        assert over.end == "done", world.tell(f"{case}: {over.why}")
        return world, world.final_hash(), world.flesh.check()
    finally:
        world.flesh.close()


def any_plan(dice: random.Random, workers: int, layers: int, replicas_of_each: int = 1) -> ParallelPlan:
    """Any stages, chunks, cuts and replicas that this many workers can have; sometimes one of them is left over."""
    chunks, placement = dice.choice([(1, "loop"), (1, "loop"), (2, "loop"), (2, "v")])
    used = workers - (workers > 2 and dice.random() < 0.1)
    positions = dice.randint(1, max(1, min(used // replicas_of_each, layers // chunks)))
    if dice.random() < 0.5:
        replicas = [used // positions] * positions
    else:
        least = min(replicas_of_each, used // positions)
        replicas = [least] * positions
        for _ in range(used - least * positions):
            replicas[dice.randrange(positions)] += 1
    cuts = None
    if dice.random() < 0.5:
        cuts = sorted(dice.sample(range(1, layers), positions * chunks - 1))
    return ParallelPlan.of(replicas, layers=layers, chunks=chunks, placement=placement, cuts=cuts)


def walk(dice: random.Random) -> list[int]:
    """Sizes that the run goes through; 0: everybody dies at once."""
    if dice.random() < 0.2:
        return [8, 7, 5, 3, 1, 6]
    sizes = [dice.choice([8, 8, 8, 6, 5, 4])]
    while len(sizes) < 6:
        sizes.append(dice.choice([n for n in range(9) if n != sizes[-1]]))
    return sizes if sizes[-1] else sizes[:-1]


def history(seed: int) -> Case:
    """The case of a seed."""
    dice = random.Random(seed)
    spec = seed % len(SPECS)
    policy: dict[str, Any] = {"max_workers": 8, "grow_after_s": dice.choice([0.0, 0.002, 0.02])}
    saves = dice.random() < 0.5
    if saves:
        policy["save_every"] = dice.choice([1, 2, 3, 5])
    policy["min_workers"] = dice.choice([1, 1, 2, 3])
    if dice.random() < 0.15:
        policy |= {"hires": True, "retry_s": 0.05}
    replicas = 1 if saves or dice.random() < 0.3 else 2
    sizes = walk(dice)
    plan = any_plan(dice, sizes[0], job(spec).layers, replicas)

    found: list[Change] = []
    at = dice.randrange(2)

    def happens(kind: ChangeKind, workers: int = 1) -> None:
        found.append(Change(at, round(dice.uniform(0.0, 25.0), 1), kind, workers, dice.randrange(1 << 20)))

    def later(size: int) -> int:
        """No step passes while the run waits for workers."""
        return at if size < policy["min_workers"] else min(STEPS - 1, at + dice.choice([0, 0, 1, 1, 1, 2]))

    size = sizes[0]
    for target in sizes[1:]:
        if not target:
            happens("kill", EVERYBODY)
            size = 0
        while size > target:
            lost = min(size - target, dice.choice([1, 1, 2]))
            happens(dice.choice(["kill", "kill", "kill", "drain", "drain", "zombie"]), lost)
            size -= lost
            at = later(size)
        while size < target:
            new = min(target - size, dice.choice([1, 2, 3]))
            happens("join", new)
            size += new
            at = later(size)
        if dice.random() < 0.3:
            happens(dice.choice(["kill_driver", "stop_driver", "stop"]))
    if size < policy["min_workers"]:
        happens("join", 3)
    return Case(spec, plan, tuple(found), seed, replicas, tuple(policy.items()))


@dataclass
class Report:
    """Of many histories."""

    histories: int = 0
    seconds: float = 0.0
    changes: Counter[str] = field(default_factory=Counter)
    sizes: Counter[tuple[int, int]] = field(default_factory=Counter)
    """(from, to) -> how often a generation followed another of that size."""
    replayed: int = 0
    waited: int = 0
    total: Record = field(default_factory=Record)

    def add(self, world: World, found: Record) -> None:
        """One more."""
        self.histories += 1
        for change in world.changed:
            pair = " of two" if change.kind in ("kill", "zombie") and change.workers == 2 else ""
            self.changes[change.kind + (" of more" if change.workers > 2 and change.kind == "kill" else pair)] += 1
        self.sizes.update(itertools.pairwise(world.flesh.sizes))
        self.replayed += world.replayed
        self.waited += any("of 1 CPU each" in line for line in world.story)
        for each in fields(Record):
            value = getattr(self.total, each.name) + getattr(found, each.name)
            setattr(self.total, each.name, value)

    def __str__(self) -> str:
        total = self.total
        way = ", ".join(f"{count} {kind}" for kind, count in self.changes.most_common())
        grew, shrank = (sum(n for (a, b), n in self.sizes.items() if sign * (b - a) > 0) for sign in (1, -1))
        return "\n".join(
            [
                f"{self.histories} membership histories in {self.seconds:.0f} s: each ended with the undisturbed run's hash of "
                "parameters, optimizer state and losses",
                f"changes: {way}",
                f"generations: {total.generations}, of them {grew} larger and {shrank} smaller than the one before; "
                f"{len(self.sizes)} different pairs of sizes; {self.waited} histories waited for workers",
                f"from a checkpoint: {total.loads} generations, {self.replayed} steps executed again with the same losses",
                f"samples: {total.samples} of committed steps, {total.epochs} epochs begun, none lost, none repeated",
                f"state moved: {total.elements} elements, set difference {total.lacked_elements}; {total.bytes} bytes with the "
                f"optimizer's, set difference {total.lacked_bytes}; lists of what follows {total.header_bytes} bytes",
            ]
        )
