"""The tangled model in a lower precision while workers come and go: losses, growth, and plans that follow each other."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from helpers import ugly_models
from helpers.generations import Generations
from helpers.parity import PRECISIONS, Precision
from helpers.protocol import Fault, World
from helpers.torch_flesh import QUICK, TorchFlesh, TorchJob

from raypar.job import Job
from raypar.model.graph import Graph
from raypar.plan import ParallelPlan
from raypar.worker.layer_graph_of_job import make_layer_graph
from raypar.worker.worker_core import WorkerCore

LAYERS = 9
"""Of the tangled model."""
GROWING_AND_SHRINKING = (
    (ParallelPlan.of((1,), layers=LAYERS), [0]),
    (ParallelPlan.of((2, 1), layers=LAYERS), [0, 1, 2]),
    (ParallelPlan.of((1, 1, 2), layers=LAYERS), [3, 1, 2, 4]),
    (ParallelPlan.of((1, 1), layers=LAYERS), [4, 5]),
)
"""Plans that follow each other, step by step, and their workers by rank."""


def tangled(steps: int, compute: Precision) -> tuple[Job, Graph]:
    """The model with ties within a stage and across stages."""
    spec = ugly_models.job("tangled", microbatches=4, steps=steps, precision=PRECISIONS[compute])
    return spec, make_layer_graph(spec)


def check_through_faults(
    work: TorchJob, plan: ParallelPlan, faults: Sequence[tuple[str, float]], check: Callable[[WorkerCore], None]
) -> None:
    """Run a job undisturbed, and with faults: (kind, at which part of the undisturbed run's messages and instructions). Both
    end, with other numbers of workers; `check` looks at each worker at the end."""
    sizes, points = [], 0
    for events in ([], faults):
        world = World(work, plan, [Fault(int(at * points), kind) for kind, at in events], flesh=TorchFlesh, **QUICK)
        try:
            assert world.run().end == "done", world.tell(str(world.over))
            points = world.points
            members = world.driver.machine.membership.members
            sizes.append(len(members))
            for worker in members:
                check(world.processes[worker].body.core)
        finally:
            world.flesh.close()
    assert sizes[0] != sizes[1], "nobody came or went"


def check_growing_and_shrinking(spec: Job, graph: Graph, check: Callable[[WorkerCore], None]) -> None:
    """Run all steps of a job, the first ones under another plan each; `check` looks at each worker at the end."""
    live = Generations(TorchJob(spec, graph))
    for done in range(spec.steps):
        if done < len(GROWING_AND_SHRINKING):
            assert live.adopt(*GROWING_AND_SHRINKING[done], done) or not done
        live.step(done)
    for body in live.bodies.values():
        check(body.core)
