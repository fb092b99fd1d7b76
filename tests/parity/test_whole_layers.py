"""Layers that no style cuts are computed once by a worker with several virtual shards, with the bits of a worker for each."""

from __future__ import annotations

import copy
import math
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path

import pytest
import torch
from helpers import checkpoint_folders
from helpers.generations import Generations
from helpers.parity import PRECISIONS
from helpers.shard_grid import Run, different, run_job
from helpers.torch_flesh import TorchJob
from helpers.virtual_shards import divided
from helpers.zero_layouts import small_pieces
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils.checkpoint import checkpoint

from raypar.job import AverageConfig, DataConfig, Job, LossConfig, ModelConfig, OptimizerConfig, PlanConfig, ValidationConfig
from raypar.model.graph import Graph, Layer
from raypar.plan import ParallelPlan, StagePlan
from raypar.schedule import registry
from raypar.worker.measure_profile import profile_job
from raypar.worker.run_in_one_process import OneProcessRun
from raypar.worker.stage.stage import Stage

STEPS, MICROBATCHES, WIDTH = 3, 3, 12
CUT, KINDS = ("cut1", "cut4", "head"), ("weight", "bias")
STYLES = {"*up": "column", "*down": "row", "whole*": "whole", "stem*": "whole"}


@dataclass
class Calls:
    """How often the counted modules ran, forward and backward."""

    forward: dict[str, int] = field(default_factory=dict)
    backward: dict[str, int] = field(default_factory=dict)


CALLS = Calls()


class Counts(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x, name):
        ctx.name = name
        CALLS.forward[name] = CALLS.forward.get(name, 0) + 1
        return x.clone()

    @staticmethod
    def backward(ctx, gradient):
        CALLS.backward[ctx.name] = CALLS.backward.get(ctx.name, 0) + 1
        return gradient.clone(), None


class Doubles(torch.autograd.Function):
    """Its backward pass writes into the gradient that it is given."""

    @staticmethod
    def forward(ctx, x):
        return x.clone()

    @staticmethod
    def backward(ctx, gradient):
        return gradient.mul_(2)


class Stem(nn.Module):
    """x [mb, 2, 4, 4] -> [mb, width], by a convolution with a batch norm."""

    def __init__(self) -> None:
        super().__init__()
        self.conv, self.norm = nn.Conv2d(2, WIDTH, 3), nn.BatchNorm2d(WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        return Counts.apply(F.relu(self.norm(self.conv(x))).mean((2, 3)), "stem")


class Cut(nn.Module):
    """Two linear layers, cut, which end in a function that writes into its gradient."""

    def __init__(self) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(WIDTH, 20), nn.Linear(20, WIDTH)

    def forward(self, x: Tensor, *more: Tensor) -> Tensor:
        return Doubles.apply(sum(more, x) + self.down(torch.tanh(self.up(x))))


class Whole(nn.Module):
    """Reads its first value twice, uses its weight twice, and draws."""

    def __init__(self, name: str) -> None:
        super().__init__()
        self.name, self.linear, self.norm = name, nn.Linear(WIDTH, WIDTH), nn.LayerNorm(WIDTH)

    def forward(self, x: Tensor, *more: Tensor) -> tuple[Tensor, Tensor]:
        made = F.dropout(self.linear(x) * torch.tanh(self.linear(x)), 0.2, training=self.training)
        return Counts.apply(self.norm(sum(more, made) + x), self.name), torch.sigmoid(made)


class Head(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(WIDTH, 8), nn.Linear(8, 5)

    def forward(self, x: Tensor, y: Tensor) -> Tensor:
        return self.down(F.relu(self.up(x + y)))


Made = dict[str, tuple[nn.Module, tuple[str, ...], tuple[str, ...]]]
"""Layer -> module, what it reads, what it returns."""


def graph() -> Graph:
    """Whole layers before, between and behind cut ones; values that both kinds read, newer and older readers."""
    torch.manual_seed(3)
    made = {
        "stem": (Stem(), ("x",), ("a",)),
        "cut1": (Cut(), ("a",), ("b",)),
        "whole2": (Whole("whole2"), ("b", "a"), ("c", "c2")),
        "whole3": (Whole("whole3"), ("c", "b"), ("d", "unread")),
        "cut4": (Cut(), ("d", "b", "c"), ("e",)),
        "whole5": (Whole("whole5"), ("a",), ("f", "f2")),
        "head": (Head(), ("e", "f"), ("logits",)),
    }
    return graph_of(made)


def graph_of(made: Made) -> Graph:
    layers = [Layer(name, partial(copy.deepcopy, module), reads, makes) for name, (module, reads, makes) in made.items()]
    return Graph(tuple(layers), output="logits")


class Images:
    def __len__(self) -> int:
        return 20

    def __getitem__(self, index: int) -> dict[str, Tensor]:
        return {"x": torch.randn(2, 4, 4, generator=torch.Generator().manual_seed(index)), "y": torch.tensor(index % 5)}


JOB = Job(
    name="whole",
    steps=STEPS,
    batch_size=7,
    microbatches=MICROBATCHES,
    model=ModelConfig(function=lambda: None),
    loss=LossConfig(function=F.cross_entropy),
    data=DataConfig(function=Images),
    optimizer=OptimizerConfig(function=torch.optim.AdamW, args={"lr": 1e-2}),
    clip_norm=0.5,
    plan=PlanConfig(styles=STYLES),
)


def trained(
    division: tuple[int, ...], schedule: str, job: Job = JOB, *, stages: int = 1, replicas: int = 1, recompute=()
) -> Run:
    CALLS.forward.clear(), CALLS.backward.clear()
    made = graph()
    plan = ParallelPlan.of(
        (replicas,) * stages,
        (len(division),) * stages,
        layers=len(made.layers),
        chunks=registry.resolve_chunks_per_worker(schedule, None),
        placement=registry.placement_of_schedule(schedule),
        recompute=recompute,
    )
    return run_job(job, made, divided(plan, division), schedule)


def test_a_worker_with_two_virtual_shards_computes_whole_layers_once():
    trained((2,), "1f1b")
    once = dict.fromkeys(("stem", "whole2", "whole3", "whole5"), STEPS * MICROBATCHES)
    assert (CALLS.forward, CALLS.backward) == (once, once)
    trained((1, 1), "1f1b")
    assert CALLS.forward == CALLS.backward == {name: 2 * count for name, count in once.items()}


CASES = {
    "plain": {},
    "recomputed": {"recompute": tuple(range(7))},
    "some recomputed": {"recompute": (1, 2, 4)},
    "split backward": {"schedule": "zb-h1"},
    "stages and replicas": {"stages": 2, "replicas": 2},
    "bf16": {"job": JOB.replace(precision=PRECISIONS["bf16"])},
    "bf16 parameters": {"job": JOB.replace(precision=PRECISIONS["bf16 parameters"])},
}


DEFAULT = [("plain", (2,)), ("recomputed", (4,)), ("split backward", (1, 2))]
"""Cases of the default suite."""


@pytest.mark.parametrize(
    "case, division",
    [
        pytest.param(case, division, marks=() if (case, division) in DEFAULT else pytest.mark.ci)
        for case in CASES
        for division in [(2,), (1, 2), (4,)]
    ],
    ids=str,
)
def test_whole_layers_have_the_bits_of_a_worker_for_each_virtual_shard(case, division):
    given = {"schedule": "1f1b", **CASES[case]}
    got, want = trained(division, **given), trained((1,) * sum(division), **given)
    assert not list(different(got, want))


def plan_of(replicas: int, division: tuple[int, ...]) -> ParallelPlan:
    return divided(ParallelPlan.of((replicas,), (len(division),), layers=len(graph().layers)), division)


def state_of(folder: Path) -> dict[str, dict[object, object]]:
    return checkpoint_folders.read_checkpoint_state(folder)


PATH = [(1, (2,)), (1, (1, 1)), (2, (2,)), (1, (2,))]
"""replicas, division of one generation after the other."""


@pytest.mark.parametrize("zero", [0, pytest.param(3, marks=pytest.mark.ci)])
def test_state_of_whole_layers_moves_and_is_saved(zero, tmp_path):
    """Parameters, buffers and what the optimizer keeps of whole layers, from one plan to the next, and by checkpoints."""
    spec = JOB.replace(steps=2 * len(PATH), average=AverageConfig(decay=0.9))
    with small_pieces():
        live = Generations(TorchJob(spec, graph(), shards=(2,)))
        there: Path | None = None
        for number, shape in enumerate(PATH):
            plan = plan_of(*shape).with_zero(zero)
            live.adopt(plan, list(range(number % 2, number % 2 + plan.world)), 2 * number)
            with OneProcessRun(spec, plan, "1f1b", graph=graph()) as local:
                for core in local.cores if there is not None else ():
                    core.load(there)
                for step in (2 * number, 2 * number + 1):
                    live.step(step), local.step(step)
                there = checkpoint_folders.save_run(local, tmp_path / "resumed", 2 * number + 2, contract={})
        found = live.save(tmp_path / "live", spec.steps)
        with OneProcessRun(spec, plan_of(1, (1, 1)), "1f1b", graph=graph()) as local:
            for step in range(spec.steps):
                local.step(step)
            want = state_of(checkpoint_folders.save_run(local, tmp_path / "one plan", spec.steps, contract={}))
    for other in (state_of(found), state_of(there)):
        assert other.keys() == want.keys()
        for name, kinds in want.items():
            assert other[name].keys() == kinds.keys()
            assert all(torch.equal(torch.as_tensor(other[name][k]), torch.as_tensor(value)) for k, value in kinds.items()), name


def test_a_worker_has_the_parameters_of_whole_layers_once():
    with OneProcessRun(JOB, plan_of(1, (2,)), "1f1b", graph=graph()) as local:
        (core,) = local.cores
        first, other = core.stages.values()
    assert {"stem.conv.weight", "whole2.linear.bias", "cut1.up.weight"} < first.parameters.keys()
    assert set(other.parameters) == {f"{name}.{part}.{kind}" for name in CUT for part in ("up", "down") for kind in KINDS}
    assert not other.buffers


def test_validation_computes_whole_layers_once_too():
    job = JOB.replace(validation=ValidationConfig(function=Images, every=1))
    losses = []
    for division in ((2,), (1, 1)):
        CALLS.forward.clear()
        with OneProcessRun(job, plan_of(1, division), "1f1b", graph=graph()) as local:
            losses.append(local.validate(0))
        assert len(set(CALLS.forward.values())) == 1
        losses.append(CALLS.forward["stem"] // len(division))
    assert losses[:2] == losses[2:]


@pytest.mark.parametrize("division", [(2,), (1, 2), (1, 1)], ids=str)
def test_the_planner_counts_whole_layers_once(division):
    count, plan = sum(division), plan_of(1, division)
    profile = profile_job(JOB.replace(virtual_shards=count), workers=1, graph=graph(), shards={count})
    with OneProcessRun(JOB, plan, "1f1b", graph=graph()) as local:
        for core, told in zip(local.cores, profile.state.of_plan(plan)["gradient"], strict=True):
            assert told == sum(parameter.nbytes for stage in core.stages.values() for parameter in stage.parameters.values())
    shares, cut = profile.work_shares(plan.stages[0]), [1, 4, 6]
    assert [share for index, share in enumerate(shares) if index not in cut] == [1.0] * 4
    for index, layer in enumerate(profile.layers):
        assert (layer.in_parts_keep == 1.0) == (index not in cut), layer.name


def test_of_a_stage_of_whole_layers_one_virtual_shard_runs_alone():
    job = JOB.replace(validation=ValidationConfig(function=Images, every=1))
    plan = ParallelPlan((StagePlan(0, 1, ((0,), (1,))), StagePlan(1, 7, ((0, 1),)))).with_virtual_shards(2)
    with OneProcessRun(job, plan, "list", graph=graph()) as local:
        assert all(isinstance(core.interpreter.stages[0], Stage) for core in local.cores)
        CALLS.forward.clear()
        losses = [local.step(0)[0].loss, local.validate(1), local.step(1)[0].loss]
    assert CALLS.forward["stem"] == 2 * MICROBATCHES + math.ceil(len(Images()) / 3)
    with OneProcessRun(job, plan_of(1, (1, 1)), "1f1b", graph=graph()) as local:
        assert losses == [local.step(0)[0].loss, local.validate(1), local.step(1)[0].loss]


class Hooked(nn.Module):
    """Triples the gradient of what it reads, by a hook on it or on the node behind it, and returns it, too."""

    def __init__(self, on: str) -> None:
        super().__init__()
        self.on, self.linear = on, nn.Linear(WIDTH, WIDTH)

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        if x.requires_grad and self.on == "value":
            x.register_hook(lambda gradient: gradient * 3)
        elif x.requires_grad:
            x.grad_fn.register_prehook(lambda gradients: (gradients[0] * 3,))
        return torch.tanh(self.linear(x)) * torch.sigmoid(x), x


@pytest.mark.parametrize("on", ["value", "node"])
def test_hooks_of_a_whole_layer_on_what_it_alone_reads_are_called_for_all_virtual_shards(on):
    got, want = (run_of(hooked(on), division) for division in ((2,), (1, 1)))
    assert not list(different(got, want))


def hooked(on: str) -> Made:
    torch.manual_seed(3)
    return {
        "stem": (Stem(), ("x",), ("a",)),
        "cut1": (Cut(), ("a",), ("b",)),
        "whole2": (Hooked(on), ("b",), ("c", "same")),
        "cut4": (Cut(), ("c",), ("d",)),
        "head": (Head(), ("d", "same"), ("logits",)),
    }


def run_of(made: Made, division: tuple[int, ...]) -> Run:
    plan = divided(ParallelPlan.of((1,), (len(division),), layers=len(made)), division)
    return run_job(JOB, graph_of(made), plan, "1f1b")


class Checkpointed(Cut):
    """Runs its forward again in the backward pass, where it sums over shards."""

    def forward(self, x: Tensor) -> Tensor:
        return x + checkpoint(lambda a: self.down(torch.tanh(self.up(a))), x, use_reentrant=False)


class Unmixed(nn.Module):
    """Makes its first value of one of what it reads, the second one of the other, and the third one of both."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(WIDTH, WIDTH)

    def forward(self, x: Tensor, y: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        return torch.tanh(self.linear(x)) * x, torch.sigmoid(y), x + y * y


@pytest.mark.parametrize("read", [("d", "b"), ("d", "e"), ("e", "f"), ("d", "f")], ids=str)
def test_the_backward_pass_reaches_the_same_layers_on_all_virtual_shards(read):
    torch.manual_seed(3)
    made = {
        "stem": (Stem(), ("x",), ("a",)),
        "cut1": (Cut(), ("a",), ("b",)),
        "cut2": (Checkpointed(), ("b",), ("c",)),
        "whole3": (Unmixed(), ("b", "c"), ("d", "e", "f")),
        "head": (Head(), read, ("logits",)),
    }
    got, want = (run_of(made, division) for division in ((2,), (1, 1)))
    assert not list(different(got, want))


def test_gradients_of_a_stage_of_whole_layers_may_be_added_in_a_lower_precision():
    job = JOB.replace(precision=PRECISIONS["bf16 gradients"])
    plan = ParallelPlan((StagePlan(0, 1, ((0,),)), StagePlan(1, 7, ((1,),)))).with_virtual_shards(2)
    got, want = run_job(job, graph(), plan, "1f1b"), trained((1, 1), "1f1b", job)
    assert (got.losses, got.norms) == (want.losses, want.norms)


class Passes(nn.Module):
    """Returns what it reads, in evaluation twice, and a value without gradient under two names."""

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        again, mask = (x * 2 if self.training else x), x.detach().sign()
        return x, again, mask, mask


class Asks(Cut):
    """Asks whether what it reads is one tensor."""

    def forward(self, x: Tensor, *more: Tensor) -> Tensor:
        read = (x, *more)
        return super().forward(x) * (2 ** sum(a is b for place, a in enumerate(read) for b in read[:place]))


def asking() -> Made:
    torch.manual_seed(3)
    return {
        "stem": (Stem(), ("x",), ("a",)),
        "cut1": (Cut(), ("a",), ("b",)),
        "whole2": (Passes(), ("b",), ("c", "d", "e", "f")),
        "cut4": (Asks(), ("b", "c", "d", "e", "f"), ("g",)),
        "head": (Head(), ("g", "a"), ("logits",)),
    }


@pytest.mark.parametrize("recompute", [(), tuple(range(5))], ids=["kept", "recomputed"])
def test_each_value_is_a_tensor_of_its_own_under_every_plan(recompute):
    """Training and validation; the plan of two virtual shards, of two workers on shards, of one worker, and of two stages."""
    styles = PlanConfig(styles={"*up": "column", "*down": "row"})
    job, layers = JOB.replace(validation=ValidationConfig(function=Images, every=1), plan=styles), graph_of(asking())
    found: dict[int, list[list[float]]] = {1: [], 2: []}
    for division, cuts in [((2,), ()), ((1, 1), ()), ((2,), (3,)), ((1,), ()), ((1,), (3,))]:
        stages = len(cuts) + 1
        plan = ParallelPlan.of((1,) * stages, (len(division),) * stages, layers=5, cuts=list(cuts), recompute=recompute)
        with OneProcessRun(job, divided(plan, division), "1f1b", graph=layers) as local:
            found[sum(division)].append([local.step(0)[0].loss, local.validate(1), local.step(1)[0].norm, local.validate(2)])
    assert all(each == of[0] for of in found.values() for each in of)
