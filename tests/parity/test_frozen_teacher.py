"""Distillation and DPO: a module that holds a frozen teacher or reference beside what is trained, and returns the loss."""

from __future__ import annotations

from collections import Counter
from typing import Any

import pytest
import torch
from helpers import torch_flesh
from helpers.protocol import Fault
from torch import Tensor, nn

import raypar
from examples.distill import Distillation, Text, train_in_one_process
from examples.dpo import Pairs, Preferences
from raypar.comm.local_transport import LocalTransport
from raypar.job import Job
from raypar.model.graph import Graph
from raypar.plan import ParallelPlan
from raypar.worker.layer_graph_of_job import make_layer_graph
from raypar.worker.run_in_one_process import OneProcessRun

pytestmark = pytest.mark.part(5)

STEPS, BATCH, MICROBATCHES, LR = 2, 8, 4, 1e-2
GRADIENT, KIND_SHIFT = 1, 47
"""What the tag of a gradient between stages says, and where (`worker/step/message_tags.py`)."""


class TeacherFirst(Distillation):
    """The teacher is called before the student, and without `no_grad`."""

    def forward(self, ids: Tensor, labels: Tensor) -> dict[str, Tensor]:
        wanted = self.teacher(ids).flatten(0, 1).log_softmax(-1)
        logits = self.student(ids).flatten(0, 1)
        divergence = nn.functional.kl_div(logits.log_softmax(-1), wanted, reduction="batchmean", log_target=True)
        return {"loss": divergence + nn.functional.cross_entropy(logits, labels.flatten())}


CASES: dict[str, tuple[type[nn.Module], Any, str, str]] = {
    "student first": (Distillation, {"function": Text}, "student.", "teacher."),
    "teacher first": (TeacherFirst, {"function": Text}, "student.", "teacher."),
    "preferences": (Preferences, {"function": Pairs, "target": "answers"}, "policy.", "reference."),
}
PLANS: list[tuple[str, dict[str, Any]]] = [
    ("1f1b", {"pp": 2, "dp": 2}),
    ("zb-h1", {"pp": 4}),
    ("interleaved", {"pp": 2, "chunks": 2}),
    ("gpipe", {"pp": 2, "cuts": (3,), "recompute": range(12)}),
]


class Case:
    """A job, its captured model, and the plain loop's weights."""

    def __init__(self, name: str) -> None:
        self.model, self.data, self.trained, self.frozen = CASES[name]
        job: dict[str, Any] = {"steps": STEPS, "batch_size": BATCH, "microbatches": MICROBATCHES, "loss": "model"}
        job |= {"data": self.data, "optimizer": (torch.optim.AdamW, {"lr": LR})}
        self.job: Job = raypar.Trainer(model=self.model, **job).job
        self.graph: Graph = make_layer_graph(self.job)
        torch.manual_seed(self.job.seed)
        self.plain = self.model()
        data = self.data["function"]()
        train_in_one_process(self.plain, data, steps=STEPS, batch=BATCH, microbatches=MICROBATCHES, lr=LR)


@pytest.fixture(scope="module")
def made() -> dict[str, Case]:
    """Those that a test has asked for."""
    return {}


@pytest.fixture(params=CASES)
def case(request: pytest.FixtureRequest, made: dict[str, Case]) -> Case:
    if request.param not in made:
        made[request.param] = Case(request.param)
    return made[request.param]


@pytest.fixture
def sent(monkeypatch: pytest.MonkeyPatch) -> Counter[tuple[int, int | None]]:
    """(rank, the rank of another stage, or None for other replicas) -> number of elements of gradients that the one has sent to
    the other."""
    found: Counter[tuple[int, int | None]] = Counter()
    post = LocalTransport.post_send

    def counted(transport: LocalTransport, message: Any) -> None:
        between_replicas = message.channel != 0
        if message.tensor.is_floating_point() and (between_replicas or message.tag >> KIND_SHIFT & 7 == GRADIENT):
            found[transport.rank, None if between_replicas else message.peer] += message.tensor.numel()
        post(transport, message)

    monkeypatch.setattr(LocalTransport, "post_send", counted)
    return found


@pytest.mark.ci
@pytest.mark.parametrize(("schedule", "mesh"), PLANS, ids=[schedule for schedule, _ in PLANS])
def test_what_is_trained_has_the_bits_of_a_plain_loop_and_what_is_frozen_costs_its_weights_alone(
    schedule: str, mesh: dict[str, Any], case: Case, sent: Counter[tuple[int, int | None]]
):
    plan = ParallelPlan.mesh(layers=len(case.graph.layers), **mesh)
    with OneProcessRun(case.job, plan, schedule, graph=case.graph) as run:
        run.step(0)
        exchanged = dict(sent)  # of the first step: later ones may be packed otherwise
        run.step(1)
        found, gradients, state = run.parameters(), run.gradients(), run.optimizer_state()
        trained_elements = [
            sum(p.numel() for stage in core.stages.values() for p in stage.parameters.values() if p.requires_grad)
            for core in run.cores
        ]
    wanted = dict(case.plain.named_parameters())
    assert found.keys() == wanted.keys()
    assert [name for name, copies in found.items() if not all(torch.equal(copy, wanted[name]) for copy in copies)] == []
    trained = {name for name in wanted if name.startswith(case.trained)}
    assert {name for name in wanted if name.startswith(case.frozen)} == wanted.keys() - trained
    assert state.keys() == trained
    assert {name for name, copies in gradients.items() if any(copy is not None for copy in copies)} == trained
    for rank, elements in enumerate(trained_elements):
        assert exchanged.get((rank, None), 0) == (elements if "dp" in mesh else 0), "replicas exchange what is trained"
        assert elements or not [by for (by, to), number in sent.items() if to == rank and number], "the frozen part gets none"


@pytest.mark.ci
@pytest.mark.parametrize("case", ["teacher first", pytest.param("student first", marks=pytest.mark.full)], indirect=True)
@pytest.mark.parametrize("mesh", [{"pp": 2, "dp": 2}, pytest.param({"pp": 4}, marks=pytest.mark.full)], ids=str)
def test_a_worker_or_driver_that_dies_beside_a_stage_that_trains_nothing_changes_no_bit(mesh: dict[str, int], case: Case):
    work = torch_flesh.TorchJob(case.job.replace(steps=3), case.graph, mirror_every=1)
    plan = ParallelPlan.mesh(layers=work.layers, **mesh)
    plain, reference = torch_flesh.simulate(work, plan, validates=False)
    for kind, at in (("kill", plain.points // 2), ("kill", plain.points * 3 // 4), ("kill_driver", plain.points * 5 // 8)):
        world, found = torch_flesh.simulate(work, plan, [Fault(at, kind)], validates=False)
        assert found == reference, world.tell(f"{kind} at {at}: {world.over.why}")
