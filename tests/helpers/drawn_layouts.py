"""Small models of many kinds in layouts drawn by lot, each compared with one worker that has all virtual shards."""

from __future__ import annotations

import functools
import itertools
import random
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any

import torch
from helpers import plain_module, reference, relayed_models, ugly_models
from helpers.branching_networks import Blocks, GoogLeNetBlock
from helpers.captured_jobs import BatchesOf
from helpers.model_zoo import ZOO, ZooModel, images
from helpers.norm_networks import BasicBlock
from helpers.on_shards import error
from helpers.random_grids import ANY_PLAN, random_division, random_pipeline, random_plan, recompute_by_lot
from helpers.shard_grid import Run, different, run_job
from torch import Tensor, nn
from torch.nn import functional as F

from raypar.errors import PlanError
from raypar.job import DataConfig, Job, LossConfig, ModelConfig, OptimizerConfig, PlanConfig
from raypar.model.graph import Graph
from raypar.model.tensor_parallel.build_shard_modules import shard_slice_of
from raypar.model.tensor_parallel.compute_shard_layout import compute_shard_layout
from raypar.plan import ParallelPlan
from raypar.plan.stage_connections import check_ties_are_cut_alike
from raypar.schedule import registry
from raypar.worker.layer_graph_of_job import make_layer_graph

STEPS, MICROBATCHES, BATCH = 2, 4, 10
"""Microbatches of two and three samples."""
MOST_WORKERS = 5


# -- models --------------------------------------------------------------------------------------------------------------------


class ResNet18(nn.Module):
    """He et al. 2016 (arXiv:1512.03385), 18 layers, of eight channels in the place of 64."""

    def __init__(self) -> None:
        super().__init__()
        self.stem = nn.Sequential(nn.Conv2d(3, 8, 7, 2, 3, bias=False), nn.BatchNorm2d(8), nn.ReLU(), nn.MaxPool2d(3, 2, 1))
        widths = [8, *(width for width in (8, 16, 24, 32) for _ in range(2))]
        pairs = enumerate(itertools.pairwise(widths))
        self.blocks = nn.ModuleList(BasicBlock(a, b, 2 if n in (2, 4, 6) else 1) for n, (a, b) in pairs)
        self.fc = nn.Linear(32, 7)

    def forward(self, x: Tensor) -> Tensor:
        x = self.stem(x)
        for block in self.blocks:
            x = block(x)
        return self.fc(x.mean((2, 3)))


class Vgg11(nn.Module):
    """Simonyan and Zisserman 2015 (arXiv:1409.1556), configuration A: eight convolutions, three dense layers with dropout."""

    def __init__(self, p: float) -> None:
        super().__init__()
        widths = [3, 4, 8, 12, 12, 16, 16, 16, 16]
        self.convolutions = nn.ModuleList(nn.Conv2d(a, b, 3, padding=1) for a, b in itertools.pairwise(widths))
        self.fc1, self.fc2, self.fc3, self.drop = nn.Linear(16, 24), nn.Linear(24, 24), nn.Linear(24, 7), nn.Dropout(p)

    def forward(self, x: Tensor) -> Tensor:
        for number, convolution in enumerate(self.convolutions):
            x = F.relu(convolution(x))
            if number in (0, 1, 3, 5, 7):
                x = F.max_pool2d(x, 2)
        x = self.drop(F.relu(self.fc1(x.flatten(1))))
        return self.fc3(self.drop(F.relu(self.fc2(x))))


class LanguageLSTM(nn.Module):
    """LSTMs whose state goes from one to the next, with residuals, tied embeddings and dropout."""

    def __init__(self, p: float) -> None:
        super().__init__()
        self.embedding, self.drop, self.logits = nn.Embedding(99, 16), nn.Dropout(p), nn.Linear(16, 99)
        self.rnns = nn.ModuleList(nn.LSTM(16, 16, batch_first=True) for _ in range(3))
        self.logits.weight = self.embedding.weight

    def forward(self, input_ids: Tensor) -> Tensor:
        x = self.drop(self.embedding(input_ids))
        state = (x.new_zeros(1, x.shape[0], 16),) * 2
        for rnn in self.rnns:
            y, state = rnn(x, state)
            x = x + y
        return self.logits(x)


def loss_of(output: Any, target: Tensor) -> Tensor:
    """Cross-entropy of all logits with targets that are made up; squares of images."""
    if isinstance(output, Tensor) and output.dim() == 4:
        return (output.sin() + output * output).mean()
    parts = output if isinstance(output, tuple) else (getattr(output, "logits", output),)
    flat = [part.reshape(-1, part.shape[-1]) for part in parts if part is not None]
    return sum(F.cross_entropy(rows, torch.arange(len(rows)) % rows.shape[-1]) for rows in flat)  # type: ignore[return-value]


def _images(make: Callable[[float], nn.Module], size: int) -> ZooModel:
    return ZooModel(make, lambda: {"x": images(3, size)}, lambda: {"x": images(2, size)}, lambda output: output)


MODELS = {
    "resnet-18": _images(lambda p: ResNet18(), 64),
    "vgg-11": _images(lambda p: Vgg11(p), 32),
    "googlenet": _images(lambda p: Blocks(GoogLeNetBlock), 8),
    "inception-v3": ZOO["inception"],
    "lstm": replace(ZOO["lstm"], make=lambda p: LanguageLSTM(p)),
    **{name: ZOO[name] for name in ("unet", "gpt2", "llama", "t5", "vit")},
}
"""Models that are captured."""
DRAWN = {"branches": relayed_models.branched, "graph": relayed_models.drawn}
"""Graphs drawn by lot, by the number behind this word; some layers do not need each other."""
NAMES = [*MODELS, "branches 3", "graph 8"]
STYLES = {
    "resnet-18": {"blocks.*.conv1": "column", "blocks.*.conv2": "row", "fc": "gathered"},
    "vgg-11": {
        **{f"convolutions.{n}": ("column", "row")[n % 2] for n in range(6)},
        "convolutions.6": "gathered",
        "convolutions.7": "column",
        "fc1": "row",
        "fc2": "column",
        "fc3": "row",
    },
    "googlenet": {"*.three.0.conv": "column", "*.three.1.conv": "row", "*.one.conv": "gathered"},
    "inception-v3": {"*.branch5x5.0.0": "column", "*.branch5x5.1.0": "row", "fc": "gathered"},
    "unet": {"*first.0": "column", "*first.4": "row", "*s.*.0": "column", "*s.*.4": "row"},
    "lstm": {"embedding": "vocabulary", "rnns.*": "gates", "logits": "vocabulary"},
}
"""Model -> pattern of layers -> style; those of the others are found by raypar."""
COUNTS = {"inception-v3": (1, 2), "googlenet": (1, 2)}
"""Model -> virtual shards to draw from, if not these."""


class Batches(BatchesOf):
    """Samples like those of a model's batch, in a dtype."""

    def __init__(self, name: str, dtype: str) -> None:
        self.batch, self.samples, self._dtype = MODELS[name].batch(), 29, getattr(torch, dtype)

    def __getitem__(self, index: int) -> dict[str, Tensor]:
        return {name: f.to(self._dtype) if f.is_floating_point() else f for name, f in super().__getitem__(index).items()}


class Numbers(ugly_models.Numbers):
    """Those of `ugly_models`, in a dtype."""

    def __init__(self, dtype: str) -> None:
        super().__init__()
        self._dtype = getattr(torch, dtype)

    def __getitem__(self, index: int) -> dict[str, Any]:
        return {name: torch.as_tensor(value, dtype=self._dtype) for name, value in super().__getitem__(index).items()}


def make_model(name: str, p: float) -> nn.Module:
    return MODELS[name].make(p)


@functools.cache
def job_of(name: str, dtype: str = "float32", p: float = 0.1) -> Job:
    """AdamW steps with clipping on ragged batches; in float64 SGD, which does not make rounding as large as a step."""
    kind, _, number = name.partition(" ")
    if kind in DRAWN:
        spec = ugly_models.job("relayed", microbatches=MICROBATCHES, batch_size=BATCH, steps=STEPS, dtype=dtype)
        data = DataConfig(function=Numbers, args={"dtype": dtype})
        model = ModelConfig(function=partial(DRAWN[kind], int(number)))
        return spec.replace(model=model, data=data, plan=PlanConfig(styles={"*.shared": "gathered"}))
    exact = dtype == "float64"
    return Job(
        name="drawn",
        seed=11,
        steps=STEPS,
        batch_size=BATCH,
        microbatches=MICROBATCHES,
        model=ModelConfig(function=make_model, args={"name": name, "p": p}),
        loss=LossConfig(function=loss_of),
        data=DataConfig(function=Batches, args={"name": name, "dtype": dtype}, target="y"),
        optimizer=OptimizerConfig(function="torch.optim:SGD" if exact else "torch.optim:AdamW", args={"lr": 1e-2}),
        clip_norm=0.5,
        dtype=dtype,
        plan=PlanConfig(styles=STYLES.get(name, {})),
    )


@functools.cache
def graph_of(name: str, dtype: str = "float32", p: float = 0.1) -> Graph:
    return make_layer_graph(job_of(name, dtype, p))


# -- layouts -------------------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class DrawnLayout:
    """A plan of a model, its schedule, and into how many virtual shards it cuts the layers; all follow from the seed."""

    model: str
    seed: int
    schedule: str = field(init=False)
    plan: ParallelPlan = field(init=False)

    def __post_init__(self) -> None:
        dice, layers = random.Random(f"{self.model} {self.seed}"), len(graph_of(self.model).layers)
        while not self._draw(dice, layers):
            pass

    def __str__(self) -> str:
        return f"{self.model} {self.seed}: {self.schedule}, {self.plan}"

    def _draw(self, dice: random.Random, layers: int) -> bool:
        """Whether a parameter that several layers share is cut alike where one worker has it twice."""
        count = dice.choice(COUNTS.get(self.model, (1, 2, 2, 3, 4)))
        shards, schedule = range(1, count + 1), dice.choice(registry.NAMES)
        if schedule in ANY_PLAN and dice.random() < 0.8:
            plan = random_plan(dice, layers, most_workers=MOST_WORKERS, most_stages=6, shards=shards)
        else:
            plan = random_pipeline(dice, layers, schedule, shards, MOST_WORKERS)
        plan = recompute_by_lot(dice, random_division(dice, plan, count))
        object.__setattr__(self, "schedule", schedule)
        object.__setattr__(self, "plan", plan)
        try:
            check_ties_are_cut_alike(plan, graph_of(self.model).crossing(plan).ties)
        except PlanError:
            return False
        return True


@functools.cache
def one_worker(name: str, virtual_shards: int, dtype: str = "float32", p: float = 0.1) -> Run:
    """All on one worker: one stage, and as many virtual shards."""
    graph = graph_of(name, dtype, p)
    plan = ParallelPlan.mesh(layers=len(graph.layers)).with_virtual_shards(virtual_shards)
    return run_job(job_of(name, dtype, p), graph, plan, "gpipe")


def check_layout(layout: DrawnLayout) -> None:
    """Losses, norms, gradients, parameters, buffers and optimizers' tensors are those of one worker, to the last bit."""
    (count,) = layout.plan.virtual_shard_counts
    want = one_worker(layout.model, count)
    got = run_job(job_of(layout.model), graph_of(layout.model), layout.plan, layout.schedule, layout.seed)
    bad = list(different(got, want))
    assert not bad and len(set(got.losses)) == STEPS, f"{layout}: {bad[:6]} and {len(bad) - 6} more"


# -- the plain module ----------------------------------------------------------------------------------------------------------


def train_plainly(name: str, dtype: str = "float32", p: float = 0.1) -> reference.Result:
    """By one plain process: the module itself, or, of a graph, its layers one after the other."""
    graph, job = graph_of(name, dtype, p), job_of(name, dtype, p)
    return plain_module.train(graph, job)[0] if name in MODELS else reference.train(graph, job)


def errors_of_plain(name: str, virtual_shards: int) -> dict[str, float]:
    """In float64 and without dropout: max error / max value of losses, gradients, parameters and buffers, against the module.

    What cancels is compared with the largest gradient of the step, or the largest parameter.
    """
    got, want = one_worker(name, virtual_shards, "float64", 0.0), train_plainly(name, "float64", 0.0)
    styles = dict(job_of(name, "float64", 0.0).styles)
    layout, found = compute_shard_layout(graph_of(name, "float64", 0.0), virtual_shards, styles), {}

    def note(label: str, key: tuple[str, int, int], value: Tensor, whole: Tensor, largest: float) -> None:
        part = shard_slice_of(layout, key[0], whole, key[2])
        found[f"{label} {key[0]}"] = max(found.get(f"{label} {key[0]}", 0.0), error(value, part, largest))

    for step in range(STEPS):
        found[f"loss {step}"] = abs(got.losses[step] - want.losses[step]) / abs(want.losses[step])
        found[f"norm {step}"] = abs(got.norms[step] - want.norms[step]) / abs(want.norms[step])
        given = want.gradients[step]
        largest = max(gradient.abs().max().item() for gradient in given.values() if gradient is not None)
        for key, (value,) in got.gradients[step].items():
            whole = given[key[0]]
            assert (value is None) == (whole is None), key
            if value is not None and whole is not None:
                note(f"gradient {step}", key, value, whole, largest)
    for key, (value,) in got.parameters.items():
        note("parameter", key, value, want.parameters[key[0]], 1.0)
    for key, (value,) in got.buffers.items():
        note("buffer", key, value, want.buffers[key[0]], 1.0)
    return found
