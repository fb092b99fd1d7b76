"""Cells of replicas x stages x shards x schedules, and their comparison with the same shards in one process and with none."""

from __future__ import annotations

import functools
import math
from collections import OrderedDict
from collections.abc import Iterator
from dataclasses import dataclass, field, replace
from itertools import product
from typing import Any

import torch
from helpers import reference, same_shards
from helpers import sharded_models as models
from helpers.on_shards import SEED, error, graph_of
from helpers.parity import PRECISIONS, Precision, Shares, with_shares
from helpers.recomputed_layouts import count_recomputations
from helpers.ugly_models import Uneasy
from torch import Tensor, nn

from examples import gpt
from raypar.comm.buffer_pool import CPU
from raypar.job import DataConfig, Job, LossConfig, ModelConfig, OptimizerConfig, PlanConfig, PrecisionConfig
from raypar.model.graph import Graph
from raypar.model.materialise import materialise
from raypar.model.tensor_parallel.build_shard_modules import shard_slice_of
from raypar.model.tensor_parallel.compute_shard_layout import compute_shard_layout
from raypar.plan import ParallelPlan
from raypar.plan.tensor_parallel_layout import TensorParallelLayout
from raypar.schedule import registry
from raypar.worker.run_in_one_process import OneProcessRun
from raypar.worker.worker_core import WorkerCore

STEPS, BATCH, VOCAB, SEQ = 3, 10, 23, 7
DEPTH, HEADS, WIDTH = 6, 5, 20
SHALLOW = "shallow gpt"
DEPTHS = {"gpt": DEPTH, SHALLOW: 2}
"""Model -> blocks, of the example GPT; the shallow one is for claims that its number of blocks has no part in."""
LR, CLIP = 1e-2, 0.5
EPS = 1e-5
"""Of AdamW. Attention does not see the bias of its keys: that gradient is rounding alone, 1e-17, of which the default of 1e-8
would make differences of 1e-10 between runs that round differently."""
TOLERANCE = 1e-12
"""max error / max value of a tensor, float64, against the model without shards."""


class Tokens:
    """Sample i: random ids and the ids that follow."""

    raypar_thread_safe = True

    def __len__(self) -> int:
        return 40

    def __getitem__(self, index: int) -> tuple[Tensor, Tensor]:
        window = torch.randint(0, VOCAB, (SEQ + 1,), generator=torch.Generator().manual_seed(index))
        return window[:-1], window[1:]


def summed(logits: Tensor, targets: Tensor) -> tuple[Tensor, int]:
    """Token-weighted, as `gpt.loss`, for models that end in any logits."""
    return gpt.loss(logits, targets)


def seeded_gpt(model: str = "gpt") -> nn.Module:
    """The model function of `graph(model)`, with the same values under every seed of a job."""
    torch.manual_seed(SEED)
    return gpt.layers(VOCAB, WIDTH, DEPTHS[model], HEADS, SEQ + 1)


def uneasy_llama() -> nn.Sequential:
    """The LLaMA with frozen parameters, one of them cut over shards, and a layer of uneasy ones between its blocks."""
    parts = dict(models.llama().named_children())
    first, second = parts["layer0"], parts["layer1"]
    for module in (first.self_attn.q_proj, second.input_layernorm):
        module.requires_grad_(False)
    order = {"model": parts["model"], "layer0": first, "uneasy": Uneasy(12), "layer1": second, "head": parts["head"]}
    return nn.Sequential(OrderedDict(order))


@functools.cache
def graph(model: str) -> Graph:
    """`gpt`, `shallow gpt`: the example; `llama`: fewer key heads than shards, norms of heads, a tie; `uneasy llama`: with
    parameters that are frozen, empty, and without gradients; `dropped`: dropouts."""
    if model in DEPTHS:
        return graph_of(lambda: gpt.layers(VOCAB, WIDTH, DEPTHS[model], HEADS, SEQ + 1))
    if model in ("llama", "uneasy llama"):
        made = models.llama if model == "llama" else uneasy_llama
        return graph_of(made, ties=(("model.embed_tokens.weight", "head.lm_head.weight"),))
    return graph_of(models.dropped)


@dataclass(frozen=True)
class Cell:
    """`replicas` and `shards`: one number per position."""

    model: str
    schedule: str
    replicas: tuple[int, ...]
    shards: tuple[int, ...]
    microbatches: int
    sequence: bool = False
    dtype: str = "float64"
    blocks: int = 0
    compute: Precision = None
    recompute: tuple[int, ...] = ()
    """Indices of the layers that are recomputed."""
    shares: Shares = ()

    def __str__(self) -> str:
        each = ["-".join(map(str, counts)) for counts in (self.replicas, self.shards)]
        extra = " sequence" * self.sequence + (f" V={self.blocks}" if self.blocks else "")
        extra += f" recompute {','.join(map(str, self.recompute))}" if self.recompute else ""
        extra += f" shares {self.shares}" if self.shares else ""
        extra += f" {self.compute or self.dtype}"
        return f"{self.model} {self.schedule} replicas {each[0]} shards {each[1]} m={self.microbatches}{extra}"

    @property
    def job(self) -> Job:
        """Three AdamW steps with clipping on a ragged batch."""
        return Job(
            name="grid",
            seed=3,
            steps=STEPS,
            batch_size=BATCH,
            microbatches=self.microbatches,
            model=ModelConfig(function=lambda: None),
            virtual_replicas=self.blocks,
            loss=LossConfig(function=summed),
            data=DataConfig(function=Tokens),
            optimizer=OptimizerConfig(function=torch.optim.AdamW, args={"lr": LR, "eps": EPS}),
            clip_norm=CLIP,
            dtype=self.dtype,
            precision=PRECISIONS[self.compute],
            plan=PlanConfig(sequence_parallel=self.sequence),
        )

    @property
    def graph(self) -> Graph:
        """The model."""
        return graph(self.model)

    @property
    def plan(self) -> ParallelPlan:
        """The plan of this cell."""
        plan = ParallelPlan.of(
            self.replicas,
            self.shards,
            layers=len(self.graph.layers),
            chunks=registry.resolve_chunks_per_worker(self.schedule, None),
            placement=registry.placement_of_schedule(self.schedule),
            recompute=self.recompute,
        )
        return with_shares(plan, self.shares)


def cells() -> list[Cell]:
    """Replicas x stages x shards, 1 to 4 each, at most 8 workers, at least 2 shards, under every schedule; then uneven shards,
    uneven replicas, spares, and models with ties, dropout and key heads that shards share."""
    found = []
    counts = (1, 2, 3, 4, 5, 7, 10)
    for schedule in registry.NAMES:
        for replicas, stages, shards in product(range(1, 5), range(1, 5), range(2, 5)):
            if replicas * stages * shards <= 8:
                n = len(found)
                cell = Cell("gpt", schedule, (replicas,) * stages, (shards,) * stages, counts[n % 7], n % 3 == 0)
                found.append(replace(cell, dtype="float32") if n % 5 == 0 else cell)
        for shards in ((1, 2), (2, 1), (2, 4), (4, 2), (2, 3), (3, 1), (1, 2, 1), (2, 1, 3)):
            n = len(found)
            found.append(Cell("gpt", schedule, (1,) * len(shards), shards, counts[n % 7], n % 2 == 0))
        found.append(Cell("gpt", schedule, (1, 2, 1), (2, 1, 2), 5))
        found.append(Cell("gpt", schedule, (2, 1), (1, 2), 4, sequence=True))
        found.append(Cell("gpt", schedule, (3,), (2,), 2, sequence=True))  # one replica has no microbatches
        found.append(Cell("gpt", schedule, (2, 2), (2, 2), 3, sequence=True, blocks=1))
    for schedule, sequence in product(("1f1b", "gpipe", "zb-h1"), (False, True)):
        for replicas, shards in (
            ((1, 1), (2, 2)),
            ((2,), (4,)),
            ((1, 1), (1, 3)),
            ((1, 1), (4, 2)),
            ((3, 1), (2, 2)),
            ((1,), (3,)),
        ):
            found.append(Cell("llama", schedule, replicas, shards, 5, sequence))
        for replicas, shards in (((2, 1), (2, 2)), ((1, 1), (3, 2)), ((1, 1, 1), (2, 2, 2))):
            found.append(Cell("dropped", schedule, replicas, shards, 4, sequence))
    return found


def recomputing_cells() -> list[Cell]:
    """Every second cell of the grid, without the naive schedule, recomputing all layers, every second one or the last in turn.

    Cells under which nothing is recomputed (single stages under 1F1B, all of the naive schedule) are left out.
    """
    found = []
    for number, cell in enumerate([cell for cell in cells() if cell.schedule != "naive"][::2]):
        layers = range(len(cell.graph.layers))
        parts = (layers, layers[1::2], layers, layers[:-1:2], layers[-1:])
        found.append(replace(cell, recompute=tuple(parts[number % len(parts)])))
    return [cell for cell in found if count_recomputations(cell.plan, cell.schedule, cell.job.batching)]


def check(cell: Cell, order_seed: int = 0) -> None:
    """Run the cell: the bits of the same shards in one process, and the numbers of no shards at all."""
    check_plan(cell, cell.plan, order_seed)


def check_plan(cell: Cell, plan: ParallelPlan, order_seed: int = 0) -> None:
    """`check` of a plan that need not be that of the cell."""
    got = run(cell, plan, order_seed)
    assert len(set(got.losses)) == STEPS
    shards = plan.shards_by_layer
    alike = one_process(replace(cell, schedule="gpipe", replicas=(1,), shards=(), recompute=(), shares=()), shards)
    bad = list(different(got, alike))
    assert not bad, f"{cell} {plan}, against the same shards in one process: {bad[:8]} and {len(bad) - 8} more"
    if cell.dtype == "float64":
        job = cell.job.replace(plan=PlanConfig(sequence_parallel=False))
        worst = errors(got, whole(cell.model, job.microbatches, job.virtual_replicas), cell.model)
        wrong = {name: value for name, value in worst.items() if not value <= TOLERANCE}
        assert not wrong, f"{cell} {plan}, against no shards: {wrong}"


# -- runs ----------------------------------------------------------------------------------------------------------------------

Key = tuple[str, int, int]
"""(parameter, number of shards, shard)"""


@dataclass
class Run:
    """After each step loss, norm and scaled gradients; at the end parameters and optimizer state; lists have all holders."""

    losses: list[float]
    norms: list[float]
    gradients: list[dict[Key, list[Tensor | None]]]
    parameters: dict[Key, list[Tensor]]
    state: dict[Key, list[dict[str, Any]]]
    buffers: dict[Key, list[Tensor]] = field(default_factory=dict)


def held(local: OneProcessRun) -> Iterator[tuple[Key, Tensor, dict[str, Any]]]:
    """Every holder's (what it is, parameter, optimizer state)."""
    for core in local.cores:
        for key, name, having in virtual_shards_with(core):
            parameter = core.stages[having].parameters[name]
            state = core.step_commit.optimizers[having].state[parameter]
            yield (name, local.plan.stages[key[0]].virtual_shards, key[1]), parameter, state


def virtual_shards_with(core: WorkerCore) -> Iterator[tuple[tuple[int, int], str, tuple[int, int]]]:
    """(virtual shard of a stage, parameter, virtual shard of this worker that has it): of whole layers the first one has them
    for all."""
    for index, number in core.stages:
        first = next(key for key in core.stages if key[0] == index)
        for name in core.stages[first].parameters:
            yield (index, number), name, (index, number) if name in core.stages[index, number].parameters else first


def run(cell: Cell, plan: ParallelPlan, order_seed: int = 0, device: torch.device = CPU) -> Run:
    """In one process, by the engine; what is found is on the CPU."""
    return run_job(cell.job, cell.graph, plan, cell.schedule, order_seed, device)


def run_job(job: Job, graph: Graph, plan: ParallelPlan, schedule: str, order_seed: int = 0, device: torch.device = CPU) -> Run:
    """`run` of any job and its layers."""
    found = Run([], [], [], {}, {})
    with OneProcessRun(job, plan, schedule, graph=graph, seed=order_seed, device=device) as local:
        for step in range(job.steps):
            reports = local.step(step)
            assert len({repr((r.loss, r.norm)) for r in reports}) == 1
            found.losses.append(reports[0].loss)
            found.norms.append(reports[0].norm)
            gradients: dict[Key, list[Tensor | None]] = {}
            for key, parameter, _ in held(local):
                gradients.setdefault(key, []).append(None if parameter.grad is None else parameter.grad.cpu().clone())
            found.gradients.append(gradients)
        for key, parameter, state in held(local):
            assert parameter.device == device and all(value.device == device for value in state.values() if value.dim())
            found.parameters.setdefault(key, []).append(parameter.detach().cpu())
            found.state.setdefault(key, []).append({kind: value.cpu() for kind, value in state.items()})
        for core in local.cores:
            for (index, number), stage in core.stages.items():
                first = next(of for (at, _), of in core.stages.items() if at == index)
                for name, buffer in {**first.buffers, **stage.buffers}.items():
                    found.buffers.setdefault((name, plan.stages[index].virtual_shards, number), []).append(buffer.cpu())
    return found


@functools.cache
def one_process(cell: Cell, shards: tuple[int, ...]) -> Run:
    """The same shards of every layer, one replica: plain PyTorch for the example GPT, else one stage after the other."""
    if cell.model in DEPTHS:
        return plain(cell, shards)
    stages = [i for i in range(1, len(shards)) if shards[i] != shards[i - 1]]
    counts = [shards[0], *(shards[i] for i in stages)]
    return run(cell, ParallelPlan.of([1] * len(counts), counts, layers=len(shards), cuts=stages))


def initial(job: Job, model: str = "gpt") -> dict[str, Tensor]:
    """The whole GPT's parameters before the first step."""
    modules = materialise(graph(model), 0, len(graph(model).layers), seed=job.seed, dtype=getattr(torch, job.dtype))
    return {f"{layer}.{path}": p.detach() for layer, m in modules.items() for path, p in m.named_parameters()}


def steps_of(
    job: Job, steps: range, counts: int | dict[str, int], slices: Any, state: Any = (), *, model: str = "gpt"
) -> same_shards.Trained:
    """`helpers.same_shards` on the grid's data."""
    torch.set_num_threads(1)
    m, data = job.microbatches, Tokens()
    batches = []
    for step in steps:
        each = [
            reference.samples(data, job, step * BATCH + i * BATCH // m, step * BATCH + (i + 1) * BATCH // m) for i in range(m)
        ]
        batches.append([(fields["x"], fields["y"]) for fields in each])
    return same_shards.train(
        slices,
        batches,
        blocks=job.batching.blocks,
        depth=DEPTHS[model],
        heads=HEADS,
        shards=counts,
        sequence=job.sequence_parallel,
        lr=LR,
        eps=EPS,
        clip_norm=CLIP,
        state=state,
        compute=next(name for name, precision in PRECISIONS.items() if precision == (job.precision or PrecisionConfig())),
        loss_scale=None if job.loss_scaling is None or job.precision is None else job.precision.loss_scale,
    )


def plain(cell: Cell, shards: tuple[int, ...]) -> Run:
    """The cell's steps in plain PyTorch."""
    job = cell.job
    counts = {layer.name: count for layer, count in zip(cell.graph.layers, shards, strict=True)}
    like = initial(job, cell.model)
    made = steps_of(job, range(STEPS), counts, same_shards.gpt_slices(like, HEADS, counts), model=cell.model)

    def keyed(by_shard: list[dict[str, Any]]) -> dict[Key, list[Any]]:
        return {(n, counts[n.split(".")[0]], i): [value] for i, mine in enumerate(by_shard) for n, value in mine.items()}

    return Run(made.losses, made.norms, [keyed(g) for g in made.gradients], keyed(made.slices), keyed(made.state))


@functools.cache
def whole(model: str, microbatches: int, blocks: int) -> reference.Result:
    """Without shards, in one plain process."""
    job = Cell(model, "gpipe", (1,), (1,), microbatches, blocks=blocks).job
    return reference.train(graph(model), job)


# -- comparisons ---------------------------------------------------------------------------------------------------------------


def same(got: Any, want: Any) -> bool:
    if got is None or want is None:
        return got is want
    return torch.equal(torch.as_tensor(got), torch.as_tensor(want))


def different(got: Run, want: Run) -> Iterator[str]:
    """What is not bit for bit equal."""
    if got.losses != want.losses:
        yield f"losses {got.losses}, {want.losses}"
    if repr(got.norms) != repr(want.norms):
        yield f"norms {got.norms}, {want.norms}"
    for step, (mine, wanted) in enumerate(zip(got.gradients, want.gradients, strict=True)):
        if not math.isfinite(want.norms[step]):
            continue  # it was skipped
        assert mine.keys() == wanted.keys()
        for key, copies in mine.items():
            if not all(same(copy, wanted[key][0]) for copy in copies):
                yield f"gradient of {key} in step {step}"
    for key, copies in got.parameters.items():
        if not all(same(copy, want.parameters[key][0]) for copy in copies):
            yield f"parameter {key}"
        for kind, value in want.state[key][0].items():
            if not all(same(copy[kind], value) for copy in got.state[key]):
                yield f"{kind} of {key}"
    for key, copies in got.buffers.items() if want.buffers else ():
        if not all(same(copy, want.buffers[key][0]) for copy in copies):
            yield f"buffer {key}"


@functools.cache
def layout_for(model: str, shards: int) -> TensorParallelLayout:
    return compute_shard_layout(graph(model), shards)


def errors(got: Run, want: reference.Result, model: str) -> dict[str, float]:
    """max error / max value of every tensor, the largest over steps, shards and holders."""
    worst: dict[str, float] = {}

    def note(label: str, key: Key, value: Tensor | None, whole: Tensor | None) -> None:
        name, shards, shard = key
        assert (value is None) == (whole is None), (label, key)
        if value is not None and whole is not None:
            layout = layout_for(model, shards)
            top = whole.abs().max().item() or 1.0
            part = shard_slice_of(layout, name, whole, shard)
            assert value.shape == part.shape
            found = (value - part).abs().max().item() / top if part.numel() else 0.0
            worst[f"{label} {name}"] = max(worst.get(f"{label} {name}", 0.0), found)

    for step in range(STEPS):
        worst[f"loss {step}"] = error(torch.tensor(got.losses[step]), torch.tensor(want.losses[step]))
        worst[f"norm {step}"] = error(torch.tensor(got.norms[step]), torch.tensor(want.norms[step]))
        for key, copies in got.gradients[step].items():
            for copy in copies:
                note("gradient", key, copy, want.gradients[step][key[0]])
    for key, parameters in got.parameters.items():
        for parameter in parameters:
            note("parameter", key, parameter, want.parameters[key[0]])
        for state in got.state[key]:
            for kind, value in state.items():
                if isinstance(value, Tensor) and value.dim():
                    note(kind, key, value, want.state[key[0]][kind])
    return worst
