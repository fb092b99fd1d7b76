"""What the loss reads: one value or several, of any layer, whoever else reads them."""

from dataclasses import replace
from typing import Any

import pytest
import torch
from helpers import reference, relayed_models, ugly_models
from helpers.parity import validation_on
from torch import Tensor, nn

from raypar.errors import ModelError, UserCodeError
from raypar.job import LossConfig, ModelConfig
from raypar.model.graph import Graph, Layer
from raypar.plan import ParallelPlan
from raypar.worker.check_layer_shapes import check_layer_shapes
from raypar.worker.layer_graph_of_job import make_layer_graph
from raypar.worker.measure_profile import profile_layers, read_microbatches
from raypar.worker.run_in_one_process import OneProcessRun

pytestmark = pytest.mark.part(4)

S = ugly_models.SEQ


def linear() -> nn.Linear:
    return nn.Linear(S, S)


LAYERS = (
    Layer("first", linear, ("x",), ("a",)),
    Layer("second", linear, ("a",), ("b",)),
    Layer("third", linear, ("b",), ("c",)),
    Layer("aside", linear, ("a",), ("d",)),
)


def early() -> Graph:
    """The output is written by the second layer, and read by the third; what the others write is for nobody."""
    return Graph(LAYERS, output="b")


def pair() -> Graph:
    return Graph(LAYERS, outputs=("c", "a"), rebuild_output=lambda c, a: (c, a))


def loss_of_one(output: Tensor, target: Tensor) -> Tensor:
    return (output.mean(1) - target).square().mean()


def loss_of_two(output: tuple[Tensor, Tensor], target: Tensor) -> Tensor:
    return loss_of_one(output[0] + output[1], target) + output[1].exp().mean()


def job(model: Any, loss: Any, **changes: Any):
    return ugly_models.job("plain", microbatches=3, steps=2).replace(
        model=ModelConfig(function=model), loss=LossConfig(function=loss), **changes
    )


@pytest.mark.parametrize("recompute", [(), (0, 1), range(4)], ids=["kept", "some", "all"])
@pytest.mark.parametrize("cuts", [(), (1,), (2,), (3,), (1, 2, 3)], ids=str)
@pytest.mark.parametrize("model, loss", [(early, loss_of_one), (pair, loss_of_two)], ids=["early", "pair"])
def test_the_loss_reads_values_of_any_layer_that_others_may_read_too(model, loss, cuts, recompute):
    spec = job(model, loss)
    want = reference.train(make_layer_graph(spec), spec)
    plan = ParallelPlan.mesh(pp=len(cuts) + 1, layers=4, cuts=cuts, recompute=recompute)
    with OneProcessRun(spec, plan, "1f1b") as run:
        for step in range(2):
            assert {report.loss for report in run.step(step)} == {want.losses[step]}
            found = run.gradients()
            for name, gradient in want.gradients[step].items():
                assert all(c is None if gradient is None else torch.equal(c, gradient) for c in found[name]), name


def test_what_the_loss_reads_crosses_to_the_last_stage():
    plan = ParallelPlan.mesh(pp=4, layers=4)
    assert [(e.src, e.dst, e.values) for e in early().crossing(plan).edges] == [
        (0, 1, ("a",)),
        (0, 3, ("a",)),
        (1, 2, ("b",)),
        (1, 3, ("b",)),
    ]
    # The loss needs nothing of stage 2.
    assert [(r.src, r.dst, r.values, set(r.apart)) for r in early().crossing(plan).relays] == [
        (1, 0, ("a",), set()),
        (2, 1, ("b",), {"b"}),
        (3, 1, ("a", "b"), set()),
    ]
    assert (early().consumers("b"), early().reading_layers("b"), early().consumers("c")) == ((2, 4), (2, 3), ())


def test_validation_rebuilds_the_output_too():
    spec = job(pair, loss_of_two)
    spec = spec.replace(validation=validation_on(spec.data, every=1, samples=6))
    found = []
    for cuts in ((), (1, 2)):
        with OneProcessRun(spec, ParallelPlan.mesh(pp=len(cuts) + 1, layers=4, cuts=cuts), "1f1b") as run:
            found.append(run.validate(0))
    assert found[0] == found[1]


def test_a_model_with_several_outputs_is_checked_and_measured():
    spec = ugly_models.job("relayed", microbatches=2)
    graph = make_layer_graph(spec)
    (batch,) = read_microbatches(spec, graph, [0])
    check_layer_shapes(spec, graph, batch)
    measured = profile_layers(spec, graph, [batch])
    readers = {(output.producer, output.consumer) for output in measured.outputs}
    assert {(0, 9), (7, 9), (0, 1), (0, 4), (0, 5), (0, 7)} <= readers
    wrong = replace(graph, rebuild_output=lambda *values: values[1])
    with pytest.raises(ModelError, match="not a scalar"):
        check_layer_shapes(spec.replace(loss=LossConfig(function=lambda output, target: output)), wrong, batch)


@pytest.mark.parametrize(
    "given",
    [
        {},
        {"output": "b", "outputs": ("b", "c"), "rebuild_output": relayed_models.rebuild},
        {"outputs": ("b", "c")},
        {"output": "b", "rebuild_output": relayed_models.rebuild},
    ],
)
def test_a_graph_says_once_what_the_loss_gets(given):
    with pytest.raises(ModelError, match=r"cure: give output, the value that the loss gets, or outputs and rebuild_output"):
        Graph(LAYERS, **given)


def test_an_output_that_no_layer_writes_is_refused():
    for given in ({"output": "x"}, {"outputs": ("b", "z"), "rebuild_output": relayed_models.rebuild}):
        with pytest.raises(ModelError, match=r"the output '[xz]' is written by no layer"):
            Graph(LAYERS, **given)


def test_an_error_in_rebuilding_the_output_is_one_of_the_loss():
    def broken(c: Tensor, a: Tensor) -> Tensor:
        raise ValueError("cannot be rebuilt")

    spec = job(pair, loss_of_two)
    graph = replace(pair(), rebuild_output=broken)
    with (
        OneProcessRun(spec, ParallelPlan.mesh(pp=2, layers=4), "1f1b", graph=graph) as run,
        pytest.raises(UserCodeError, match=r"the loss \(output \[\d, 6\], \[\d, 6\], target \[\d\]\) raised ValueError"),
    ):
        run.step(0)
