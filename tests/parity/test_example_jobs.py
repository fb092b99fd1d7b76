"""The example jobs with unmodified modules: their first steps are those of one worker, and they learn."""

from pathlib import Path

import pytest
import torch
from helpers.model_zoo import import_transformers

from raypar.job import Job
from raypar.job.read_job import load_job
from raypar.plan import ParallelPlan
from raypar.worker.layer_graph_of_job import make_layer_graph
from raypar.worker.run_in_one_process import OneProcessRun

pytestmark = pytest.mark.part(5)

JOBS = Path(__file__).parents[2] / "jobs"
UNMODIFIED = ("resnet_digits", "unet_shapes", "lstm", "gpt2", "llama", "vit_digits", "t5_reversal", "inception_branches")
STAGES = {"unet_shapes": 3, "t5_reversal": 3, "inception_branches": 9}
"""Stages of the jobs that have another number than 2."""


@pytest.fixture(scope="module", autouse=True)
def transformers():
    """The package, which is imported before the jobs ask for it."""
    import_transformers()


def spec_of(name: str, **changed: object) -> Job:
    """The job as its file says, without validation."""
    return load_job(str(JOBS / f"{name}.yaml")).replace(validation=None, **changed)


def losses(run: OneProcessRun, steps: int) -> list[float]:
    """The losses of the first steps."""
    found = []
    for step in range(steps):
        run.step(step)
        found.append(run.cores[0].step_commit.outcome.loss)
    return found


@pytest.mark.parametrize(
    "name", [pytest.param(name, marks=[pytest.mark.full] * (name == "resnet_digits")) for name in UNMODIFIED]
)  # `tests/parity/test_written_buffers.py` trains the ResNet as one plain process does
def test_the_first_steps_of_the_job_are_those_of_one_worker(name: str):
    spec, job = spec_of(name, batch_size=8), load_job(str(JOBS / f"{name}.yaml"))
    graph = make_layer_graph(spec)
    plan = job.to_plan([layer.name for layer in graph.layers])
    assert len(plan.stages) == STAGES.get(name, 2)
    one = OneProcessRun(spec, ParallelPlan.mesh(layers=len(graph.layers)), "1f1b", graph=graph)
    many = OneProcessRun(spec, plan, job.schedule_name, graph=graph)
    assert losses(many, 2) == losses(one, 2)
    for found, wanted in ((many.parameters(), one.parameters()), (many.buffers(), one.buffers())):
        assert found.keys() == wanted.keys()
        assert [n for n, copies in found.items() for each in copies if not torch.equal(each, wanted[n][0])] == []


def test_the_same_workers_in_two_roles_have_the_bits_of_stages_on_workers_of_their_own():
    spec, job = spec_of("vgg_hybrid", batch_size=8), load_job(str(JOBS / "vgg_hybrid.yaml"))
    graph = make_layer_graph(spec)
    plan = job.to_plan([layer.name for layer in graph.layers])
    assert [stage.workers for stage in plan.stages] == [((0,), (1,)), ((0, 1),)] and job.schedule_name == "list"
    shared = OneProcessRun(spec, plan, "list", graph=graph)
    apart = OneProcessRun(spec, ParallelPlan.of([1, 1], [1, 2], layers=7, cuts=[6]), "1f1b", graph=graph)
    alone = OneProcessRun(spec, ParallelPlan.mesh(layers=7).with_virtual_shards(2), "1f1b", graph=graph)
    assert losses(shared, 2) == losses(apart, 2) == losses(alone, 2)
    found, wanted = shared.parameters(), apart.parameters()
    assert found.keys() == wanted.keys()
    for name, copies in found.items():
        assert all(any(torch.equal(copy, other) for other in wanted[name]) for copy in copies), name


def test_lstms_cut_by_gates_have_the_bits_of_one_worker_with_as_many_virtual_shards():
    spec, job = spec_of("lstm_gates", batch_size=8), load_job(str(JOBS / "lstm_gates.yaml"))
    graph = make_layer_graph(spec)
    plan = job.to_plan([layer.name for layer in graph.layers])
    assert [(stage.shards, stage.virtual_shards) for stage in plan.stages] == [(2, 2)]
    alone = ParallelPlan.mesh(layers=len(graph.layers)).with_virtual_shards(2)
    one, two = (OneProcessRun(spec, each, "1f1b", graph=graph) for each in (alone, plan))
    assert losses(two, 2) == losses(one, 2)
    found, wanted = two.parameters(), one.parameters()
    assert found.keys() == wanted.keys()
    for name, copies in found.items():
        assert all(any(torch.equal(copy, other) for other in wanted[name]) for copy in copies), name


@pytest.mark.full
@pytest.mark.parametrize("name", [*UNMODIFIED, "vgg_hybrid", "lstm_gates"])
def test_the_job_learns(name: str):
    spec = spec_of(name)
    graph = make_layer_graph(spec)
    found = losses(OneProcessRun(spec, ParallelPlan.mesh(layers=len(graph.layers)), "1f1b", graph=graph), 30)
    assert sum(found[-3:]) < 0.9 * sum(found[:3])
