"""Behind frozen layers alone nothing needs a gradient, wherever the model is cut into stages: kernels and layers ask for it."""

import warnings
from dataclasses import replace

import pytest
import torch
from helpers import reference, ugly_models
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from raypar.model.layer_skeletons import values_with_gradients
from raypar.plan import MicrobatchRouting, ParallelPlan
from raypar.worker.job_spec import Ref
from raypar.worker.run_in_one_process import OneProcessRun
from raypar.worker.stage_builder import build_stage
from raypar.worker.worker_assignments import make_layer_graph

SIZE = ugly_models.SEQ


class Aware(nn.Linear):
    """Asks whether its input needs a gradient."""

    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x) * (2.0 if x.requires_grad else 1.0)


class Reentrant(nn.Linear):
    """A reentrant checkpoint trains nothing inside it if no input of it needs a gradient."""

    def forward(self, x: Tensor) -> Tensor:
        return checkpoint(super().forward, x, use_reentrant=True).tanh()


def frozen() -> nn.Linear:
    return nn.Linear(SIZE, SIZE).requires_grad_(False)


KINDS = {"asks": Aware, "reentrant checkpoint": Reentrant}


@pytest.mark.parametrize("recompute", [(), range(4)], ids=["kept", "recomputed"])
@pytest.mark.parametrize("cuts", [(1,), (2,), (1, 2)], ids=str)
@pytest.mark.parametrize("kind", KINDS)
def test_a_stage_behind_frozen_layers_gives_the_bits_of_one_process(kind, cuts, recompute):
    def model() -> nn.Sequential:
        return nn.Sequential(frozen(), nn.Tanh(), KINDS[kind](SIZE, SIZE), nn.Linear(SIZE, 1))

    spec = replace(ugly_models.job("plain", steps=2, virtual_replicas=2), model=Ref(model))
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # of the reentrant checkpoint, about its inputs
        want = reference.train(make_layer_graph(spec), spec)
        plan = ParallelPlan.mesh(pp=len(cuts) + 1, layers=4, cuts=cuts, recompute=recompute)
        with OneProcessRun(spec, plan, "gpipe") as run:
            for step in range(2):
                assert {report.norm for report in run.step(step)} == {want.norms[step]}
            found = run.parameters()
    assert not [name for name, value in want.parameters.items() if not all(torch.equal(copy, value) for copy in found[name])]


def test_values_behind_frozen_layers_alone_are_received_without_a_leaf_and_no_gradient_is_sent_back():
    spec = replace(
        ugly_models.job("plain"), model=Ref(lambda: nn.Sequential(frozen(), nn.Tanh(), nn.Linear(SIZE, 1), nn.Tanh()))
    )
    graph = make_layer_graph(spec)
    assert values_with_gradients(graph) == {*graph.layers[2].outputs, *graph.layers[3].outputs}
    plan = ParallelPlan.mesh(pp=2, layers=4, cuts=(1,))
    routing = MicrobatchRouting(plan, spec.batching)
    stage = build_stage(graph, plan, 1, spec=spec, routing=routing, replica=0, loss_fn=spec.loss.partial())
    stage.begin_step(0)
    (value,) = graph.layers[0].outputs
    stage.forward(0, {value: torch.randn(2, SIZE)}, {"y": torch.rand(2)})
    assert stage._live[0].received == {}
    assert stage.backward(0, {}) == {value: (None,)}
