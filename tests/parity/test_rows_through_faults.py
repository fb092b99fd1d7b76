"""A U-Net on rows of images: a run that loses workers and changes its number of shards has the bits of one worker."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from helpers import torch_flesh
from helpers.protocol import Fault

from raypar.job import Job
from raypar.job.read_job import load_job
from raypar.plan import ParallelPlan
from raypar.worker.layer_graph_of_job import make_layer_graph
from raypar.worker.run_in_one_process import OneProcessRun

JOB = Path(__file__).parents[2] / "jobs" / "unet_rows.yaml"
VIRTUAL = 4


def job_of(steps: int) -> Job:
    """The example job, smaller."""
    smaller = ["model.args={width: 4, depth: 2}", "batch_size=4", "microbatches=2", f"steps={steps}"]
    return load_job(str(JOB), smaller).replace(validation=None)


def plan_of(layers: int, shards: int) -> ParallelPlan:
    return ParallelPlan.mesh(tp=shards, layers=layers).with_virtual_shards(VIRTUAL)


@pytest.mark.ci
def test_kills_that_change_the_number_of_bands_a_worker_has_change_no_bit():
    spec = job_of(4)
    graph = make_layer_graph(spec)
    layers = len(graph.layers)
    shards = {4: 4, 3: 2, 2: 2, 1: 1}
    job = torch_flesh.TorchJob(spec, graph, shards=(1, 2, 4), mirror_every=1)
    plans = lambda generation, workers: plan_of(layers, shards[min(workers, 4)])  # noqa: E731
    plain, reference = torch_flesh.simulate(job, plan_of(layers, 4), plans=plans, **torch_flesh.QUICK)
    assert reference is not None
    for at in range(plain.points // 3, plain.points, plain.points // 3):
        world, found = torch_flesh.simulate(job, plan_of(layers, 4), [Fault(at, "kill")], plans=plans, **torch_flesh.QUICK)
        assert world.over.end == "done", world.tell(f"{at}: {world.over.why}")
        assert found == reference, world.tell(f"{at}: other bits")


@pytest.mark.parametrize("shards", [2, pytest.param(4, marks=pytest.mark.ci)])
def test_the_job_has_the_bits_of_one_worker_with_as_many_bands(shards: int):
    spec = job_of(1)
    graph = make_layer_graph(spec)
    found = []
    for workers in (1, shards):
        with OneProcessRun(spec, plan_of(len(graph.layers), workers), "1f1b", graph=graph) as run:
            run.step(0)
            found.append(run.parameters() | run.buffers())
    one, many = found
    assert one.keys() == many.keys()
    assert [name for name, copies in many.items() for copy in copies if not torch.equal(copy, one[name][0])] == []
