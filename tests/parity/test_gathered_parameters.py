"""ZeRO stage 3: whole parameters live from a gather to their last use in a step; layers that need them longer are refused."""

from __future__ import annotations

import pytest
import torch
from helpers import ugly_models
from helpers.parity import Layout
from helpers.zero_layouts import small_pieces, storages
from torch import nn

from raypar.errors import UserCodeError
from raypar.job import ModelConfig, OptimizerConfig, ValidationConfig
from raypar.model.graph import Graph, Layer
from raypar.model.layer_skeletons import make_model_outline
from raypar.plan import ParallelPlan
from raypar.plan.stage_plan import GATHER_SPANS, GatherSpan
from raypar.plan.state_bytes import StateBytes
from raypar.worker.layer_graph_of_job import make_layer_graph
from raypar.worker.measure_profile import profile_layers, read_microbatches
from raypar.worker.run_in_one_process import OneProcessRun
from raypar.worker.step import step_commit
from raypar.worker.step.step_commit import StepCommit
from raypar.worker.worker_core import WorkerCore

pytestmark = pytest.mark.part(4)


def live_parameters(core: WorkerCore) -> int:
    """Bytes of what a worker has of parameters, masters and copies."""
    found = []
    for index, stage in core.stages.items():
        found += [p for name, p in stage.parameters.items() if name not in stage.weights.freed_masters]
        found += [*stage.weights.rounded.values(), *(each.parameter for each in core.step_commit.owned[index])]
    return storages(found)


def sheet_of(layout: Layout, plan: ParallelPlan) -> list[tuple[int, int]]:
    """By rank: predicted bytes of parameters and masters, and of what is gathered beside."""
    measured = profile_layers(layout.job, layout.graph, read_microbatches(layout.job, layout.graph, [0]))
    state = StateBytes(make_model_outline(layout.graph), measured.state, measured.copies)
    kinds, none = state.of_plan(plan), (0,) * plan.world
    kept = map(sum, zip(kinds["parameter"], kinds.get("master", none), strict=True))
    return list(zip(kept, state.gathered(plan), strict=True))


@pytest.mark.parametrize(
    "layout, holders",
    [
        (Layout("tangled", "1f1b", (2, 3), 6), 1),
        pytest.param(Layout("tangled", "zb-v", (3, 3), 7), 2, marks=pytest.mark.ci),
        pytest.param(Layout("plain", "1f1b", (3,), 7), 1, marks=pytest.mark.ci),
        (Layout("tangled", "1f1b", (3,), 7, compute="bf16 parameters"), 1),
    ],
    ids=str,
)
def test_parameters_of_others_live_from_the_gather_to_the_last_use_as_the_sheet_says(layout, holders, monkeypatch):
    plan, seen = layout.plan.with_zero(3, holders), dict[tuple[str, int], int]()
    vote, apply = StepCommit.vote, StepCommit.apply

    def look(when: str, commit: StepCommit) -> None:
        seen[when, commit.rank] = live_parameters(next(core for core in run.cores if core.step_commit is commit))

    def looks_and_votes(commit):
        look("vote", commit)
        yield from vote(commit)

    def applies_and_looks(commit):
        apply(commit)
        look("apply", commit)

    monkeypatch.setattr(StepCommit, "vote", looks_and_votes)
    monkeypatch.setattr(StepCommit, "apply", applies_and_looks)
    with small_pieces():
        sheet = sheet_of(layout, plan)
        with OneProcessRun(layout.job, plan, layout.schedule, graph=layout.graph) as run:
            for step in range(2):
                run.step(step)
                for core in run.cores:
                    kept, gathered = sheet[core.rank]
                    assert live_parameters(core) == kept + gathered, "the gather for the next step is on its way"
                    there = seen["vote", core.rank]
                    assert there == seen["apply", core.rank]
                    assert there == kept if layout.compute is None else there <= kept, "copies are made in the gather"
    assert any(gathered for _, gathered in sheet)


def test_a_skipped_step_brings_parameters_back_too():
    layout = Layout("tangled", "1f1b", (3,), 4)
    job = layout.job.replace(non_finite="skip")
    with small_pieces(), OneProcessRun(job, layout.plan.with_zero(3), "1f1b", graph=layout.graph) as run:
        run.step(0)
        before = {name: [one.clone() for one in of] for name, of in run.parameters().items()}
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(step_commit, "divide_by_count", lambda losses, counts: (float("nan"), 1.0))
            assert all(report.skipped for report in run.step(1))
        after = run.parameters()
        assert all(torch.equal(one, other) for name in before for one, other in zip(before[name], after[name], strict=True))
        assert not any(report.skipped for report in run.step(2))


class ReplacesItsWeight(nn.Linear):
    def forward(self, x):
        self.weight = nn.Parameter(self.weight * 0.5)
        return super().forward(x)


class ReplacesItsMemory(nn.Linear):
    def forward(self, x):
        self.weight.data = self.weight.data * 0.5
        return super().forward(x)


class KeepsAView(nn.Linear):
    def forward(self, x):
        self.kept = {"transposed": [self.weight.t()]}
        return super().forward(x)


class KeepsItself(nn.Linear):
    def forward(self, x):
        self.kept = [self.weight, self.weight.t().clone()]
        return super().forward(x)


def run_of_layers(first: type[nn.Module], level: int, gather: GatherSpan = "step") -> OneProcessRun:
    def model() -> nn.Sequential:
        return nn.Sequential(first(ugly_models.SEQ, 8), nn.Linear(8, 1))

    job = ugly_models.job("plain")
    validation = ValidationConfig(function=job.data.function, args=job.data.args, every=1)
    job = job.replace(model=ModelConfig(function=model), validation=validation)
    graph = make_layer_graph(job)
    return OneProcessRun(job, ParallelPlan.mesh(dp=2, layers=2).with_zero(level).with_gather(gather), "1f1b", graph=graph)


class ReplacesInEvaluation(nn.Linear):
    def forward(self, x):
        if not self.training:
            self.weight.data = self.weight.data.clone()
        return super().forward(x)


class ReplacesLater(nn.Linear):
    calls = 0

    def forward(self, x):
        self.calls += 1
        if self.calls == 3:
            self.weight.data = self.weight.data.clone()
        return super().forward(x)


@pytest.mark.parametrize("level, gather", [(1, "step"), (2, "step"), *((3, gather) for gather in GATHER_SPANS)])
@pytest.mark.parametrize("kind", [ReplacesItsWeight, ReplacesItsMemory, ReplacesInEvaluation, ReplacesLater])
def test_layers_that_replace_parameters_of_which_owners_have_runs_are_refused(kind, level, gather):
    """Owners went on with the memory that a parameter had before."""
    with (
        run_of_layers(kind, level, gather) as run,
        pytest.raises(UserCodeError, match="layer '0' replaces its parameter 'weight'") as error,
    ):
        for step in range(3):
            run.step(step)
            run.validate(step)
    assert "set plan.zero: 0" in error.value.cure


class MovesItsMemory(torch.optim.SGD):
    """Ends its step with `p.data = ...`, as old optimizers do."""

    def step(self, closure=None):
        for group in self.param_groups:
            for parameter in group["params"]:
                parameter.data = parameter.data - group["lr"] * parameter.grad


@pytest.mark.parametrize("level, gather", [(1, "step"), (2, "step"), *((3, gather) for gather in GATHER_SPANS)])
def test_an_optimizer_that_gives_parameters_other_memory_is_refused(level, gather):
    """Layers went on with the memory that the parameters had before."""
    job = ugly_models.job("plain").replace(optimizer=OptimizerConfig(function=MovesItsMemory, args={"lr": 0.1}))
    graph = make_layer_graph(job)
    plan = ParallelPlan.mesh(dp=2, layers=len(graph.layers))
    with OneProcessRun(job, plan, "1f1b", graph=graph) as run:
        run.step(0), run.step(1)
    words = "gives a parameter other memory"
    plan = plan.with_zero(level).with_gather(gather)
    with OneProcessRun(job, plan, "1f1b", graph=graph) as run, pytest.raises(UserCodeError, match=words):
        run.step(0), run.step(1)


class MomentumEncoder(nn.Module):
    """A frozen copy follows in forward, as in MoCo (https://arxiv.org/abs/1911.05722, section 3.2)."""

    def __init__(self, *size: int) -> None:
        super().__init__()
        self.query, self.key = nn.Linear(*size), nn.Linear(*size).requires_grad_(False)

    def forward(self, x):
        with torch.no_grad():
            for kept, followed in zip(self.key.parameters(), self.query.parameters(), strict=True):
                kept.mul_(0.9).add_(followed, alpha=0.1)
        return self.query(x) + self.key(x)


class FollowsByData(MomentumEncoder):
    """The same as code for BYOL has it: what is written through `.data` counts no version."""

    def forward(self, x):
        for kept, followed in zip(self.key.parameters(), self.query.parameters(), strict=True):
            kept.data.mul_(0.9).add_(followed.data, alpha=0.1)
        return self.query(x) + self.key(x)


@pytest.mark.parametrize("level", [0, 1, 3])
@pytest.mark.parametrize("layer", [MomentumEncoder, FollowsByData])
def test_a_forward_that_changes_frozen_parameters_is_refused_where_there_are_replicas(layer, level):
    """Each replica changed its own, as often as it had microbatches."""
    words = "layer '0' changes its frozen parameter 'key.weight' in forward"
    with run_of_layers(layer, level) as run, pytest.raises(UserCodeError, match=words) as error:
        run.step(0)
    assert "plan.replicas: 1" in error.value.cure and "average" in error.value.cure


@pytest.mark.parametrize("gather", GATHER_SPANS)
def test_a_layer_that_keeps_a_view_of_what_is_freed_is_refused_at_the_first_microbatch(gather):
    words = "layer '0' keeps a view of its parameter 'weight' in 'kept' after its forward"
    with run_of_layers(KeepsAView, 3, gather) as run, pytest.raises(UserCodeError, match=words) as error:
        run.step(0)
    assert "set plan.zero: 2" in error.value.cure
    with run_of_layers(KeepsAView, 2) as run:
        run.step(0)


@pytest.mark.parametrize("gather", GATHER_SPANS)
def test_layers_may_keep_their_parameters_and_copies(gather):
    with run_of_layers(KeepsItself, 3, gather) as run:
        run.step(0), run.step(1)


class Queries(nn.Module):
    """Returns two of its parameters, a frozen one too, and a view of one, as values."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Linear(ugly_models.SEQ, 8)
        self.queries = nn.Parameter(torch.linspace(-1, 1, 64).view(8, 8))
        self.frozen = nn.Parameter(torch.linspace(0, 1, 64).view(8, 8), requires_grad=False)

    def forward(self, x):
        return self.embed(x), self.queries, self.queries.t(), self.frozen


class Answers(nn.Module):
    def forward(self, x, queries, turned, frozen):
        return (x @ queries.tanh() @ turned @ frozen).mean(-1)


@pytest.mark.parametrize("stages", [2, 1])
@pytest.mark.parametrize("schedule", ["1f1b", "gpipe"])
@pytest.mark.parametrize("gather", GATHER_SPANS)
def test_values_that_are_parameters_outlast_these_as_copies(schedule, gather, stages):
    """They leave their stage as such, or the layer, where parameters come layer by layer."""
    names = ("h", "queries", "turned", "frozen")
    layers = (Layer("queries", Queries, ("x",), names), Layer("answers", Answers, names, ("out",)))
    job = ugly_models.job("plain").replace(model=ModelConfig(function=lambda: Graph(layers, output="out")))
    made, found = make_layer_graph(job), []
    for plan in (ParallelPlan.mesh(layers=2), ParallelPlan.mesh(dp=3, pp=stages, layers=2).with_zero(3).with_gather(gather)):
        with small_pieces(), OneProcessRun(job, plan, schedule, graph=made) as run:
            losses = [run.step(step)[0].loss for step in range(3)]
            found.append((losses, {name: of[0].clone() for name, of in run.parameters().items()}))
    (losses, parameters), (same_losses, same_parameters) = found
    assert losses == same_losses and all(torch.equal(value, same_parameters[name]) for name, value in parameters.items())


@pytest.mark.parametrize("level", [1, 3])
def test_frozen_parameters_are_whole_everywhere_below_level_3_and_divided_there(level):
    spec = ugly_models.job("tangled", microbatches=4)
    made = make_layer_graph(spec)
    plan = ParallelPlan.mesh(dp=2, layers=len(made.layers)).with_zero(level)
    with small_pieces(), OneProcessRun(spec, plan, "1f1b", graph=made) as run:
        run.step(0)
        held = []
        for core in run.cores:
            (stage,) = core.stages.values()
            frozen = {name: parameter.numel() for name, parameter in stage.parameters.items() if not parameter.requires_grad}
            pieces = [piece for piece in core.ownership.held[core.rank] if piece.name in frozen]
            held.append(sum(piece.size for piece in pieces))
            kept = [each for each in core.step_commit.owned[0, 0] if each.name in frozen and each.parameter.numel()]
            assert sum(each.parameter.numel() for each in kept) == (held[-1] if level == 3 else 0)
        assert sum(held) == sum(frozen.values()) * (1 if level == 3 else 2) > 0
