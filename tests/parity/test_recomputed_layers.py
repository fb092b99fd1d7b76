"""Layers as people write them, recomputed: what runs twice, what stays counted once, and what is refused before a run."""

import functools
import json
import warnings
import weakref
from dataclasses import replace

import numpy
import pytest
import torch
from helpers import reference, ugly_models
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from raypar import Trainer
from raypar.errors import ConfigError, PlanError, UserCodeError
from raypar.job import Job, LossConfig, ModelConfig, PlanConfig
from raypar.job.plain_values import to_plain_values
from raypar.launch.choose_plan import choose_plan, describe_chosen_plan, plan_json
from raypar.model.graph import Graph
from raypar.plan import MicrobatchRouting, ParallelPlan
from raypar.worker.job_preflight import preflight
from raypar.worker.layer_graph_of_job import make_layer_graph
from raypar.worker.measure_profile import MeasuredLayers, one_microbatch_of_each_size, profile_layers, read_microbatches
from raypar.worker.run_in_one_process import OneProcessRun
from raypar.worker.stage_builder import build_stage

pytestmark = pytest.mark.part(4)

SIZE = ugly_models.SEQ


class Checkpointed(nn.Module):
    """Activation checkpointing inside the layer."""

    def __init__(self, reentrant: bool) -> None:
        super().__init__()
        self.up, self.down, self.reentrant = nn.Linear(SIZE, 2 * SIZE), nn.Linear(2 * SIZE, SIZE), reentrant

    def forward(self, x: Tensor) -> Tensor:
        inner = checkpoint(lambda x: self.down(torch.tanh(self.up(x))), x, use_reentrant=self.reentrant)
        return x + nn.functional.dropout(inner, 0.2, self.training)


class Penalised(nn.Linear):
    """Takes a gradient in its forward."""

    def __init__(self) -> None:
        super().__init__(SIZE, SIZE)

    def forward(self, x: Tensor) -> Tensor:
        y = super().forward(x).tanh()
        (slope,) = torch.autograd.grad(y.square().sum(), x, create_graph=True)
        return y + 0.1 * slope


class Noisy(nn.Linear):
    """Draws from three generators."""

    def __init__(self) -> None:
        super().__init__(SIZE, SIZE)

    def forward(self, x: Tensor) -> Tensor:
        return nn.functional.dropout(super().forward(x), 0.3, self.training) * (1 + numpy.random.rand())


class Offloading(nn.Linear):
    """Keeps what it saves by hooks of its own."""

    def __init__(self) -> None:
        super().__init__(SIZE, SIZE)

    def forward(self, x: Tensor) -> Tensor:
        with torch.autograd.graph.save_on_cpu():
            return super().forward(x).sigmoid()


class Cached(nn.Linear):
    """Replaces a cache, a buffer that is not persistent, by an equal one."""

    def __init__(self) -> None:
        super().__init__(SIZE, SIZE)
        self.register_buffer("scale", torch.ones(SIZE), persistent=False)

    def forward(self, x: Tensor) -> Tensor:
        self.scale = torch.linspace(0.5, 1.5, SIZE)
        return super().forward(x) * self.scale


class GradAware(nn.Linear):
    """Computes something else where gradients are off."""

    def __init__(self) -> None:
        super().__init__(SIZE, SIZE)

    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x) * (1.0 if torch.is_grad_enabled() else 2.0)


KINDS = {
    "checkpoint": lambda: Checkpointed(reentrant=False),
    "reentrant checkpoint": lambda: Checkpointed(reentrant=True),
    "inner gradient": Penalised,
    "noise": Noisy,
    "hooks of its own": Offloading,
    "cache": Cached,
    "asks whether gradients are on": GradAware,
}


def model(kind) -> nn.Sequential:
    """Four layers, two of the kind."""
    return nn.Sequential(nn.Linear(SIZE, SIZE), kind(), kind(), nn.Linear(SIZE, 1))


def job(make) -> Job:
    """Three steps of four ragged microbatches."""
    return ugly_models.job("plain", steps=3, virtual_replicas=2).replace(model=ModelConfig(function=make))


@functools.cache
def in_one_process(name: str) -> tuple[Job, Graph, reference.Result]:
    """The job of a kind, its model, and what one process makes of it: once for all plans."""
    spec = job(lambda: model(KINDS[name]))
    graph = make_layer_graph(spec)
    return spec, graph, reference.train(graph, spec)


@pytest.mark.ci
@pytest.mark.parametrize("recompute", [range(4), (1,), (2, 3)], ids=str)
@pytest.mark.parametrize("schedule", ["gpipe", "zb-h1"])
@pytest.mark.parametrize("name", KINDS)
def test_a_recomputed_layer_has_the_bits_of_one_that_is_not(name, schedule, recompute):
    if name == "reentrant checkpoint" and schedule == "zb-h1":
        schedule = "1f1b"  # its weight gradients come from a backward of its own, which cannot be split
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        spec, graph, want = in_one_process(name)
        plan = ParallelPlan.mesh(pp=2, layers=4, recompute=recompute)
        with OneProcessRun(spec, plan, schedule, graph=graph) as run:
            for step in range(3):
                assert {r.loss for r in run.step(step)} == {want.losses[step]}
                found = run.gradients()
                assert all(torch.equal(copy, g) for n, g in want.gradients[step].items() for copy in found[n])


def profile(make, recompute) -> MeasuredLayers:
    """What a run measures, and refuses, before it starts."""
    spec = job(make)
    graph = make_layer_graph(spec)
    batches = read_microbatches(spec, graph, one_microbatch_of_each_size(spec.batching))
    return profile_layers(spec, graph, batches, recompute)


class Counting(nn.Linear):
    """Counts its calls in a buffer."""

    def __init__(self, how: str) -> None:
        super().__init__(SIZE, SIZE)
        self.how = how
        self.register_buffer("calls", torch.zeros(()), persistent=how == "in place")

    def forward(self, x: Tensor) -> Tensor:
        if self.how == "in place":
            self.calls += 1
        else:
            self.calls = self.calls + 1
        return super().forward(x)


@pytest.mark.parametrize(
    "how, words",
    [("in place", "writes into its buffer 'calls' in forward"), ("replaced", r"writes its buffer '1.calls' whenever")],
)
def test_a_recomputed_layer_that_writes_a_buffer_is_refused_before_the_run(how, words):
    with pytest.raises(UserCodeError, match=f"layer '1' {words}"):
        profile(lambda: model(lambda: Counting(how)), (1,))
    if how == "replaced":
        profile(lambda: model(lambda: Counting(how)), (0, 3))


class Slope(nn.Linear):
    """Takes gradients by `torch.func`, which refuses hooks on saved tensors."""

    def __init__(self) -> None:
        super().__init__(SIZE, SIZE)

    def forward(self, x: Tensor) -> Tensor:
        slopes = torch.func.vmap(torch.func.grad(lambda row: row.sin().square().sum()))(x)
        return torch.func.vmap(super().forward)(x) + slopes


class Directional(nn.Linear):
    """What it saves are wrappers without memory."""

    def __init__(self) -> None:
        super().__init__(SIZE, SIZE)

    def forward(self, x: Tensor) -> Tensor:
        return sum(torch.func.jvp(lambda x: super(Directional, self).forward(x).tanh(), (x,), (torch.ones_like(x),)))


@pytest.mark.parametrize("kind", [Slope, Directional])
def test_a_layer_that_uses_torch_func_can_be_measured_and_split(kind):
    spec = job(lambda: model(kind))
    profile(lambda: model(kind), ())
    want = reference.train(make_layer_graph(spec), spec)
    with OneProcessRun(spec, ParallelPlan.mesh(pp=2, layers=4), "zb-h1") as run:
        for step in range(3):
            assert {r.norm for r in run.step(step)} == {want.norms[step]}


def test_a_layer_that_refuses_hooks_is_not_recomputed():
    with pytest.raises(UserCodeError, match="saved tensor hooks") as error:
        profile(lambda: model(Slope), (1,))
    assert "leave the layer out of plan.recompute" in error.value.cure
    assert profile(lambda: model(Slope), None).recomputable == (0, 3)


class Alternating(nn.Linear):
    """Computes something else in every second call."""

    def __init__(self, extra: bool) -> None:
        super().__init__(SIZE, SIZE)
        self.calls, self.extra = 0, extra

    def forward(self, x: Tensor) -> Tensor:
        self.calls += 1
        y = super().forward(x)
        if self.calls % 2:
            return y
        return y.tanh() if self.extra else y * 1.5


@pytest.mark.parametrize("extra, words", [(True, "saves . tensors where it had saved|computes another"), (False, "computes")])
def test_a_recomputed_layer_that_computes_something_else_the_second_time_is_refused_before_the_run(extra, words):
    with pytest.raises(UserCodeError, match=words) as error:
        profile(lambda: model(lambda: Alternating(extra)), (1,))
    assert "layer '1'" in error.value.what and "plan.recompute" in error.value.cure


def test_a_last_layer_that_computes_something_else_the_second_time_is_refused_too():
    class Last(Alternating):
        def forward(self, x: Tensor) -> Tensor:
            return super().forward(x)[..., :1]

    with pytest.raises(UserCodeError, match="layer '1' computes another 'loss'"):
        profile(lambda: nn.Sequential(nn.Linear(SIZE, SIZE), Last(extra=False)), (1,))


def chosen(plan, **recompute):
    """What a run would start with."""
    spec = ugly_models.job("tangled")
    return choose_plan(spec, preflight(spec), lambda layers: plan, "gpipe", plan.world, **recompute)


@pytest.mark.ci
def test_the_plan_that_a_run_starts_with_says_what_is_recomputed():
    plan = ParallelPlan.mesh(pp=2, layers=9)
    found = chosen(plan, recompute=("mix*", "tail"))
    assert found.plan.recompute == (1, 4, 8)
    assert "schedule gpipe, recomputing 3 of 9 layers; predicted" in describe_chosen_plan(found)
    assert json.loads(plan_json(found))["recompute"] == [1, 4, 8]
    assert found.predicted.peak_kept is not None and found.profile.kept
    assert chosen(replace(plan, recompute=(2, 3))).plan.recompute == (2, 3), "a whole plan says it itself"
    assert "recompute" not in json.loads(plan_json(chosen(plan)))
    with pytest.raises(PlanError, match=r"plan\.recompute has 'mx', which matches none of the 9 layers"):
        chosen(plan, recompute=("mx",))


@pytest.mark.ci
def test_the_report_names_stages_that_keep_their_activations_all_the_same():
    spec = ugly_models.job("plain")
    plan = ParallelPlan.mesh(pp=2, layers=8)
    found = choose_plan(spec, preflight(spec), lambda layers: plan, "1f1b", 2, recompute="full")
    text = describe_chosen_plan(found)
    assert "recomputing 4 of 8 layers (stage 1 keeps its activations: each backward follows its forward at once" in text


def trainer(**more) -> Trainer:
    """With the arguments that every trainer needs."""
    return Trainer(
        model=lambda: model(Noisy),
        loss=ugly_models.mean_loss,
        data=ugly_models.Numbers,
        steps=1,
        batch_size=8,
        microbatches=2,
        **more,
    )


def test_a_trainers_plan_says_what_is_recomputed():
    assert trainer(plan={"stages": 2, "recompute": "full"}).job.recompute == "full"
    assert trainer(plan={"stages": 2, "recompute": ["1", "2"]}).job.recompute == ("1", "2")
    of_plan = trainer(plan=ParallelPlan.mesh(pp=2, layers=4, recompute=(1,))).job
    assert of_plan.recompute == "none" and of_plan.to_plan(4).recompute == (1,)
    with pytest.raises(ConfigError, match=r"unknown argument recompute: did you mean plan.recompute"):
        trainer(recompute="full")


def test_a_plan_that_recomputes_layers_by_number_has_no_text_unless_all_are():
    all_of_them, one = (
        PlanConfig.of_plan(ParallelPlan.mesh(pp=2, layers=4, recompute=layers), "1f1b") for layers in (range(4), (1,))
    )
    assert to_plain_values(all_of_them)[0]["recompute"] == "full" and not to_plain_values(all_of_them)[1]
    assert to_plain_values(one)[1] == ["plan.recompute has numbers of layers, [1]: a job file has patterns of their names"]


class Overwrites(nn.Linear):
    """Writes into a tensor that autograd has saved."""

    def __init__(self) -> None:
        super().__init__(SIZE, SIZE)

    def forward(self, x: Tensor) -> Tensor:
        y = super().forward(x).exp()
        z = y * 2
        y.add_(1)
        return z


@pytest.mark.parametrize("recompute", [(), (1,)], ids=["kept", "recomputed"])
def test_a_layer_that_writes_into_what_is_saved_is_refused_recomputed_or_not(recompute):
    plan = ParallelPlan.mesh(pp=1, layers=4, recompute=recompute)
    with (
        OneProcessRun(job(lambda: model(Overwrites)), plan, "gpipe") as run,
        pytest.raises(UserCodeError, match="modified by an inplace operation"),
    ):
        run.step(0)


class Keeps(nn.Linear):
    """Takes a gradient of its former output."""

    def __init__(self) -> None:
        super().__init__(SIZE, SIZE)
        self.former: Tensor | None = None

    def forward(self, x: Tensor) -> Tensor:
        if self.former is not None:
            torch.autograd.grad(self.former.sum(), self.weight, allow_unused=True)
        y = super().forward(x).tanh()
        self.former = y
        return y


def test_a_gradient_through_dropped_activations_says_what_to_do():
    plan = ParallelPlan.mesh(pp=1, layers=4, recompute=(1, 2))
    with (
        OneProcessRun(job(lambda: model(Keeps)), plan, "gpipe") as run,
        pytest.raises(Exception, match="before its activations are recomputed") as error,
    ):
        run.step(0)
    assert "leave the layer out of plan.recompute" in str(error.value)


def test_an_output_that_a_layer_keeps_holds_no_recomputed_activations():
    class KeepsOutput(nn.Linear):
        def forward(self, x: Tensor) -> Tensor:
            made = super().forward(x).exp()
            held.append(weakref.ref(made.untyped_storage()))
            self.last = made.cos()
            return self.last

    held: list[weakref.ref] = []
    spec = job(lambda: model(lambda: KeepsOutput(SIZE, SIZE)))
    with OneProcessRun(spec, ParallelPlan.mesh(pp=1, layers=4, recompute=(1, 2)), "gpipe") as run:
        run.step(0)
        assert held and not [ref for ref in held if ref() is not None]


def test_losses_counts_and_the_users_loss_count_once_and_forward_hooks_run_twice():
    calls: list[str] = []

    def loss(output: Tensor, target: Tensor) -> Tensor:
        calls.append("loss")
        return ((output.squeeze(-1) - target) ** 2).mean()

    class Told(nn.Linear):
        def forward(self, x: Tensor) -> Tensor:
            calls.append("layer")
            return super().forward(x)

    spec = job(lambda: nn.Sequential(Told(SIZE, SIZE), Told(SIZE, 1))).replace(loss=LossConfig(function=loss))
    seen = []
    for recompute in ((), range(2)):
        calls.clear()
        plan = ParallelPlan.mesh(pp=1, layers=2, recompute=recompute)
        with OneProcessRun(spec, plan, "gpipe") as run:
            (report,) = run.step(0)
        seen.append((report.loss, report.norm, calls.count("loss"), calls.count("layer")))
    assert seen[0][:2] == seen[1][:2]
    assert [counts[2:] for counts in seen] == [(4, 8), (8, 16)]


def test_a_validation_pass_recomputes_nothing():
    spec = job(lambda: model(Noisy))
    spec = spec.replace(validation=None)
    graph = make_layer_graph(spec)
    plan = ParallelPlan.mesh(pp=1, layers=4, recompute=range(4))
    routing = MicrobatchRouting(plan, spec.batching)
    stage = build_stage(graph, plan, 0, spec=spec, routing=routing, replica=0, loss_fn=spec.loss.partial())
    stage.begin_step(0)
    stage.evaluate(0, {}, {"x": torch.randn(2, SIZE), "y": torch.rand(2)})
    assert stage._live == {} and list(stage.losses) == [0]


@pytest.mark.ci
def test_an_output_that_is_read_twice_and_a_frozen_layer_are_recomputed_like_any_other():
    """`tangled` has both; here every single layer is recomputed alone."""
    spec = ugly_models.job("tangled", steps=2)
    graph: Graph = make_layer_graph(spec)
    want = reference.train(graph, spec)
    for layer in range(len(graph.layers)):
        with OneProcessRun(spec, ParallelPlan.mesh(pp=1, layers=9, recompute=(layer,)), "gpipe", graph=graph) as run:
            for step in range(2):
                assert {r.norm for r in run.step(step)} == {want.norms[step]}
