"""What cannot be cut over shards is said before anything starts, in one error with its cure."""

from collections import OrderedDict

import pytest
import torch
from helpers.shard_grid import VOCAB, WIDTH, Cell, graph
from torch import nn

from examples import gpt
from raypar.errors import ConfigError, InputError, ModelError, PlanError
from raypar.job import Job, ModelConfig, OptimizerConfig, PlanConfig
from raypar.job.read_job import parse_job
from raypar.launch.choose_plan import choose_plan
from raypar.plan import MicrobatchRouting, ParallelPlan
from raypar.schedule import registry
from raypar.worker.job_preflight import preflight
from raypar.worker.step.optimizer_trial import OptimizerKind, OptimizerTrial, try_optimizer

pytestmark = pytest.mark.part(5)

ARGS = {"vocab": VOCAB, "width": WIDTH, "depth": 2, "heads": 5, "context": 8}


def spec_of(model: ModelConfig | None = None, styles=(), sequence_parallel=False, **changes) -> Job:
    job, plan = Cell("gpt", "1f1b", (1,), (1,), 5).job, PlanConfig(styles=dict(styles), sequence_parallel=sequence_parallel)
    return job.replace(model=model or ModelConfig(function=gpt.layers, args=ARGS), plan=plan, **changes)


def check(spec: Job, *shards: int) -> None:
    """As far as `raypar train` comes before it starts workers."""
    checked = preflight(spec)
    plan = ParallelPlan.of([1] * len(shards), shards, layers=len(checked.graph.layers))
    choose_plan(spec, checked, lambda layers: plan, "1f1b", 1)


class NoHeads(nn.Module):
    """Does not say how many heads it has."""

    def __init__(self) -> None:
        super().__init__()
        self.qkv, self.project = nn.Linear(WIDTH, 3 * WIDTH), nn.Linear(WIDTH, WIDTH)

    def forward(self, x):
        return self.project(self.qkv(x).chunk(3, -1)[0])


class Normed(nn.Module):
    """Norms what a column layer returns over all features."""

    def __init__(self) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(WIDTH, 4 * WIDTH), nn.Linear(4 * WIDTH, WIDTH)

    def forward(self, x):
        return self.down(torch.softmax(self.up(x), -1))


class Tied(nn.Sequential):
    """The output layer's weight is the embedding's."""

    def __init__(self) -> None:
        parts = gpt.layers(**ARGS)
        super().__init__(OrderedDict(parts.named_children()))
        self.head.logits.weight = self.embed.token.weight


def between(middle: type[nn.Module]):
    def make() -> nn.Sequential:
        parts = OrderedDict(gpt.layers(**ARGS).named_children())
        return nn.Sequential(OrderedDict(embed=parts["embed"], middle=middle(), head=parts["head"]))

    return ModelConfig(function=make)


BAD = {
    "a pattern that matches nothing": (
        {"styles": (("block0.upp", "column"),)},
        (2,),
        PlanError,
        r"the pattern 'block0.upp' of plan.styles matches no layer \(nearest: block0.up",
    ),
    "also without shards": ({"styles": (("blok*", "column"),)}, (1,), PlanError, "matches no layer"),
    "a style there is not": ({"styles": (("*.up", "colum"),)}, (2,), PlanError, r"'colum' is no style \(nearest: column\)"),
    "more shards than heads": ({}, (6,), PlanError, "block0.qkv has 5 heads for 6 shards: some would have none"),
    "in one stage only": ({}, (1, 6), PlanError, "has 5 heads for 6 shards"),
    "nothing that is cut": ({"styles": (("*", "whole"),)}, (2,), PlanError, "none of the model's layers has a style"),
    "heads that nobody knows": (
        {"model": between(NoHeads), "styles": (("middle.qkv", "qkv"),)},
        (2,),
        PlanError,
        "the style qkv of middle.qkv goes by heads, and the module it is in does not say how many",
    ),
    "a style on a layer that it does not fit": (
        {"styles": (("block0.norm1", "column"),)},
        (2,),
        PlanError,
        "the style column does not fit block0.norm1, a LayerNorm",
    ),
    "heads that the features are no multiple of": (
        {"styles": (("block0.qkv", "qkv:7"),)},
        (2,),
        PlanError,
        "60 output features are no multiple of 21",
    ),
    "a tie cut by unequal styles": (
        {"model": ModelConfig(function=Tied), "styles": (("head.logits", "gathered"), ("embed.token", "whole"))},
        (2,),
        PlanError,
        "the tie embed.token.weight = head.logits.weight is cut by unequal styles: whole and gathered",
    ),
    "an operation that needs all parts": (
        {"model": between(Normed)},
        (2,),
        ModelError,
        r"layer 'middle' \(test_shards_preflight.py, line \d+: return self.down\(torch.softmax\(self.up\(x\), -1\)\)\): "
        r"softmax of a value \[2, 7, 80\] that is cut along dim 2 over 2 shards needs the parts of other shards",
    ),
    "neighbours that are cut otherwise": (
        {"styles": (("block0.down", "row"), ("block0.up", "column/2"))},
        (3,),
        ModelError,
        "block0.down has the features",
    ),
    "an optimizer of whole parameters": (
        {"optimizer": OptimizerConfig(function=torch.optim.Adafactor)},
        (2,),
        ConfigError,
        "cannot be used with 2 shards: its step of one element depends on other elements of the parameter",
    ),
}


@pytest.mark.ci
@pytest.mark.parametrize("case", BAD)
def test_bad_shards_are_one_error_with_its_cure_before_anything_starts(case):
    changes, shards, kind, said = BAD[case]
    with pytest.raises(kind, match=said) as found:
        check(spec_of(**changes), *shards)
    assert isinstance(found.value, InputError) and found.value.exit_code == 2
    assert found.value.cure


@pytest.mark.ci
@pytest.mark.parametrize(
    "shards, sequence",
    [
        *(((2,), False), ((5,), True), ((2, 1), True), ((1, 3), False)),
        *(pytest.param(shards, rest, marks=pytest.mark.full) for shards, rest in (((2,), True), ((5,), False))),
        *(pytest.param(shards, rest, marks=pytest.mark.full) for shards, rest in (((2, 1), False), ((1, 3), True))),
    ],
)
def test_good_shards_pass(shards, sequence):
    check(spec_of(sequence_parallel=sequence), *shards)
    check(spec_of(ModelConfig(function=Tied), sequence_parallel=sequence), *shards)


def tried(spec: OptimizerConfig) -> OptimizerTrial:
    """What a trial finds on parameters of these shapes."""
    return try_optimizer(spec, {"a.weight": (6, 4), "a.bias": (6,), "b.weight": (3, 6)})


@pytest.mark.ci
@pytest.mark.parametrize(
    "name", ["SGD", "Adam", "AdamW", "Adagrad", "Adadelta", "RMSprop", "Rprop", "NAdam", "RAdam", "Adamax"]
)
def test_optimizers_that_take_each_element_by_itself_may_have_slices(name):
    found = tried(
        OptimizerConfig(function=getattr(torch.optim, name), args={"lr": 0.1}, groups=({"match": "*.bias", "lr": 1.0},))
    )
    assert found.kind is OptimizerKind.ELEMENTWISE
    found.check_plan(ParallelPlan.mesh(tp=2, pp=2, layers=2))


class Factored(torch.optim.Optimizer):
    """Takes each element by itself where a parameter is small; `whole`: nowhere."""

    def __init__(self, params, least: int = 128, whole: bool = False) -> None:
        super().__init__(params, {"lr": 0.1, "least": least, "whole": whole})

    @torch.no_grad()
    def step(self, closure=None):
        for group in self.param_groups:
            for parameter in group["params"]:
                square = parameter.grad.square()
                if group["whole"] or min(square.shape) >= group["least"]:
                    square = square.mean(0, keepdim=True)
                parameter -= group["lr"] * parameter.grad / (square.sqrt() + 1.0)


@pytest.mark.parametrize("groups", [(), (("*.weight", {"whole": True}),)], ids=["large parameters", "one group"])
def test_an_optimizer_that_takes_some_elements_together_is_found(groups):
    spec = OptimizerConfig(
        function=Factored,
        args={"least": 10_000 if groups else 128},
        groups=tuple({"match": pattern, **given} for pattern, given in groups),
    )
    found = tried(spec)
    assert found.kind is OptimizerKind.PER_PARAMETER
    found.check_plan(ParallelPlan.mesh(pp=2, layers=2))
    with pytest.raises(ConfigError, match="cannot be used with 2 shards: its step of one element depends on other elements"):
        found.check_plan(ParallelPlan.mesh(tp=2, layers=2))


def test_a_profile_knows_what_shards_hold_and_that_they_talk():
    spec = spec_of()
    checked = preflight(spec)
    plans = [ParallelPlan.mesh(tp=shards, layers=4) for shards in (1, 2, 4)]
    planned = [choose_plan(spec, checked, lambda layers, plan=plan: plan, "1f1b", 1) for plan in plans]
    from raypar.planner.memory_sheet import memory_sheets
    from raypar.worker.run_in_one_process import OneProcessRun

    for plan, made in zip(plans[1:], planned[1:], strict=True):
        with OneProcessRun(spec, plan, "1f1b") as local:
            held = [sum(p.nbytes for p in next(iter(core.stages.values())).parameters.values()) for core in local.cores]
        found = [sheet.state["parameter"] for sheet in memory_sheets(made.profile, plan, "1f1b", spec.batching)]
        assert found == held
        assert made.predicted.makespan_ms > 0 and len(made.schedule_instructions) == plan.world


@pytest.mark.ci
def test_a_job_file_with_shards_makes_the_plan_and_the_job():
    job = parse_job(
        "name: x\nsteps: 3\nbatch_size: 10\nmicrobatches: 5\nmodel: {function: examples.gpt:layers, args: "
        "{vocab: 23, width: 20, depth: 2, heads: 5, context: 8}}\nloss: examples.gpt:loss\n"
        "data: helpers.shard_grid:Tokens\noptimizer: torch.optim:AdamW\nplan: {stages: 2, shards: 2, styles: {'*.up': whole, "
        "'*.down': whole}, sequence_parallel: true}\n"
    )
    spec = job
    checked = preflight(spec)
    planned = choose_plan(spec, checked, job.to_plan, "1f1b", job.workers)
    assert planned.plan.world == job.workers == 4 and planned.plan.describe() == "2 stages x 1 replica x 2 shards"
    assert len(graph("gpt").layers) == 8 and len(checked.graph.layers) == 4


def bytes_of_tied(plan: ParallelPlan) -> tuple[list[tuple[int, int]], list[tuple[int, int]]]:
    """By rank, (parameters, optimizer state) in bytes: as the memory sheet predicts them, and as they are after a step."""
    from raypar.planner.predicted_step import state_bytes
    from raypar.worker.measure_profile import profile_job
    from raypar.worker.run_in_one_process import OneProcessRun
    from raypar.worker.step.optimizer_state import read_optimizer_state

    spec = spec_of(ModelConfig(function=Tied), steps=1)
    with OneProcessRun(spec, plan, "zb-v" if len(plan.stages) > len(plan.grids) else "1f1b") as local:
        local.step(0)
        profile = profile_job(spec, workers=1, graph=local.graph, shards={stage.shards for stage in plan.stages})
        there = []
        for core in local.cores:
            states = [
                entry for o in core.step_commit.optimizers.values() for entry in read_optimizer_state(o).parameters.values()
            ]
            kept = sum(v.nbytes for entry in states for v in entry.values() if isinstance(v, torch.Tensor))
            there.append((sum(p.nbytes for stage in core.stages.values() for p in stage.parameters.values()), kept))
    routing = MicrobatchRouting(plan, spec.batching)
    found = state_bytes(profile, routing, registry.build_schedule("gpipe", routing))
    return list(zip(found["parameter"], found["optimizer"], strict=True)), there


@pytest.mark.parametrize(
    "plan",
    [
        ParallelPlan.mesh(dp=2, layers=4),
        ParallelPlan.mesh(pp=2, layers=4),
        ParallelPlan.mesh(pp=2, chunks=2, placement="v", layers=4),
    ],
    ids=["one stage", "two stages", "two stages a worker"],
)
def test_the_memory_sheet_counts_a_tie_as_often_as_a_worker_has_it(plan):
    found, there = bytes_of_tied(plan)
    assert found == there


def test_the_memory_sheet_counts_a_tie_on_shards():
    found, there = bytes_of_tied(ParallelPlan.mesh(pp=2, tp=2, layers=4))
    assert [parameters for parameters, _ in found] == [parameters for parameters, _ in there]
    for (_, predicted), (_, kept) in zip(found, there, strict=True):
        assert kept == pytest.approx(predicted, abs=4 * 40), "each shard has a step count of its own for each parameter"


def test_a_profile_knows_what_a_layer_takes_that_is_a_stage_of_its_own():
    """A tie counts in each of its layers."""
    from raypar.worker.measure_profile import profile_job
    from raypar.worker.run_in_one_process import OneProcessRun

    spec, plan = spec_of(ModelConfig(function=Tied)), ParallelPlan.mesh(pp=4, tp=2, layers=4)
    with OneProcessRun(spec, plan, "1f1b") as local:
        held = [
            sum(p.nbytes for p in core.stages[rank // 2, rank % 2].parameters.values()) for rank, core in enumerate(local.cores)
        ]
        state = profile_job(spec, workers=1, graph=local.graph, shards={2}).state
        assert [state.on_fullest_shard("parameter", place) for place in plan.stages] == list(map(max, held[::2], held[1::2]))
