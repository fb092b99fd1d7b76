"""`precision: {compute: fp16}` and its copies: float16 with a scaled loss, whose overflows all plans have alike (rule 13)."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from helpers import checkpoint_folders as checkpoint_files
from helpers import reference, shard_grid, torch_flesh
from helpers.parity import Layout, Precision, check_local, expected, layouts
from helpers.precisions_through_changes import check_growing_and_shrinking, check_through_faults, tangled
from helpers.recomputed_layouts import RecomputedLayout, check_recomputed, recomputed_layouts
from torch import Tensor, nn

from raypar.errors import CheckpointError, NonFiniteError
from raypar.job import (
    AverageConfig,
    DataConfig,
    Job,
    LossConfig,
    LossScaleConfig,
    LrScheduleConfig,
    ModelConfig,
    OptimizerConfig,
    OptimizerEntry,
    PrecisionConfig,
)
from raypar.job.contract import SKIPPED_STEPS, contract_of_job
from raypar.plan import ParallelPlan
from raypar.schedule import registry
from raypar.worker.checkpoint.contract_comparison import list_contract_differences
from raypar.worker.run_in_one_process import OneProcessRun
from raypar.worker.step.optimizer_state import read_optimizer_state
from raypar.worker.worker_core import WorkerCore

pytestmark = pytest.mark.part(4)

AUTOCAST: Precision = "fp16"
COPIES: Precision = "fp16 parameters"
FP16_SUMS: Precision = "fp16 gradients"

# -- plans ---------------------------------------------------------------------------------------------------------------------

COMPUTE: dict[int, Precision] = {0: AUTOCAST, 1: COPIES, 2: FP16_SUMS}
CELLS = [replace(cell, compute=COMPUTE[number // 2 % 3]) for number, cell in enumerate(layouts()) if number % 2 == 0]
SHARDED = [
    replace(cell, compute=COMPUTE[number // 3 % 3], dtype="float32")
    for number, cell in enumerate(shard_grid.cells())
    if number % 3 == 0
]
RECOMPUTED = [
    replace(cell, layout=replace(cell.layout, compute=COMPUTE[number // 6 % 3]))
    for number, cell in enumerate(recomputed_layouts())
    if number % 6 == 2
]
SAMPLE = [
    Layout("tangled", "1f1b", (2, 1), 5, compute=AUTOCAST),
    Layout("tangled", "zb-h1", (1, 2), 3, compute=AUTOCAST),
    Layout("plain", "zb-v", (2,), 4, compute=COPIES),
    Layout("tangled", "gpipe", (3, 1, 2), 7, compute=COPIES),
    Layout("tangled", "interleaved", (2, 2), 5, blocks=1, compute=FP16_SUMS),
    Layout("relayed", "1f1b", (1, 1, 1), 3, compute=AUTOCAST),
    Layout("norms", "1f1b", (2, 2), 4, compute=AUTOCAST),
    Layout("norms", "zb-h1", (1, 2), 5, compute=COPIES),
]
SHARDED_SAMPLE = [
    shard_grid.Cell("gpt", "zb-h1", (2, 1), (2, 2), 4, True, "float32", compute=AUTOCAST),
    shard_grid.Cell("gpt", "1f1b", (2, 2), (2, 2), 5, True, "float32", compute=COPIES),
    shard_grid.Cell("llama", "1f1b", (2, 1), (2, 2), 4, False, "float32", compute=FP16_SUMS),
]
RECOMPUTED_SAMPLE = [RecomputedLayout(Layout("tangled", "1f1b", (2, 1), 5, compute=AUTOCAST), "full")]


@pytest.mark.parametrize("compute", COMPUTE.values())
def test_the_grids_have_all_schedules_and_more_than_20_plans(compute):
    cells, sharded = ([cell for cell in grid if cell.compute == compute] for grid in (CELLS, SHARDED))
    assert min(map(len, (cells, sharded))) >= 20
    assert {cell.schedule for cell in cells} == {cell.schedule for cell in sharded} == set(registry.NAMES)


@pytest.mark.parametrize("layout", [*SAMPLE, *(pytest.param(cell, marks=pytest.mark.full) for cell in CELLS)], ids=str)
def test_a_layout_skips_the_steps_of_one_process_and_has_its_bits(layout):
    skipped = expected(layout.model, layout.microbatches, layout.blocks, layout.compute).skipped
    assert any(skipped) or layout not in SAMPLE
    assert not all(skipped)
    check_local(layout)


@pytest.mark.parametrize("cell", [*SHARDED_SAMPLE, *(pytest.param(cell, marks=pytest.mark.full) for cell in SHARDED)], ids=str)
def test_a_layout_with_shards_skips_the_steps_of_the_same_shards_in_one_process_and_has_their_bits(cell):
    shard_grid.check(cell)


@pytest.mark.parametrize(
    "cell", [*RECOMPUTED_SAMPLE, *(pytest.param(cell, marks=pytest.mark.full) for cell in RECOMPUTED)], ids=str
)
def test_recomputed_layers_give_the_bits_of_one_process(cell):
    check_recomputed(cell)


# -- as in a loop with GradScaler ----------------------------------------------------------------------------------------------


class Loss(nn.Module):
    """A sum over samples, and their number."""

    def forward(self, output: Tensor, target: Tensor) -> tuple[Tensor, int]:
        return F.cross_entropy(output, target, reduction="sum"), len(target)


def network() -> nn.Sequential:
    return nn.Sequential(nn.Linear(6, 16), nn.Tanh(), nn.Linear(16, 16), nn.GELU(), nn.Linear(16, 5))


class Points(torch.utils.data.Dataset[tuple[Tensor, int]]):
    """Thirty points; a few are so far away that their gradients overflow."""

    def __len__(self) -> int:
        return 30

    def __getitem__(self, index: int) -> tuple[Tensor, int]:
        far = 40.0 if index % 13 == 12 else 1.0
        return torch.randn(6, generator=torch.Generator().manual_seed(index)) * far, index % 5


def network_job(**given: Any) -> Job:
    return Job(
        **{
            "name": "points",
            "seed": 5,
            "steps": 24,
            "batch_size": 6,
            "microbatches": 3,
            "virtual_replicas": 1,
            "model": ModelConfig(function=network),
            "loss": LossConfig(function=Loss),
            "data": DataConfig(function=Points, shuffle=False),
            "optimizer": OptimizerConfig(function=torch.optim.AdamW, args={"lr": 1e-2}),
            "precision": PrecisionConfig(compute="fp16", loss_scale=LossScaleConfig(init_scale=2.0**14, growth_interval=4)),
            **given,
        }
    )


def test_a_plain_loop_with_gradscaler_skips_the_same_steps_and_has_the_same_weights():
    """Of one block, without clipping. The loop divides by the number of samples, a power of two, in an operation of its own."""
    spec = network_job(batch_size=8, microbatches=2)
    torch.manual_seed(spec.seed)
    model, data = network(), Points()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    scaler = torch.amp.GradScaler("cpu", init_scale=2.0**14, growth_interval=4)
    scales, weights = [], []
    for step in range(spec.steps):
        scales.append(scaler.get_scale())
        optimizer.zero_grad()
        for microbatch in range(2):
            ids = [(step * 8 + microbatch * 4 + place) % 30 for place in range(4)]
            x, y = torch.stack([data[index][0] for index in ids]), torch.tensor([data[index][1] for index in ids])
            with torch.autocast("cpu", torch.float16, cache_enabled=False):
                total = F.cross_entropy(model(x), y, reduction="sum")
            scaler.scale(total).backward()
        scaler.unscale_(optimizer)
        for parameter in model.parameters():
            parameter.grad /= 8
        scaler.step(optimizer)
        scaler.update()
        weights.append([parameter.detach().clone() for parameter in model.parameters()])
    with OneProcessRun(spec, ParallelPlan.of((2, 1), layers=5), "1f1b") as run:
        for step in range(spec.steps):
            report = run.step(step)[0]
            assert report.loss_scale == scales[step]
            for copies, want in zip(run.parameters().values(), weights[step], strict=True):
                assert all(torch.equal(copy, want) for copy in copies)
        skipped = run.cores[0].skipped_steps
    assert 2 <= len(skipped) < 12 and max(scales) > min(scales) and len(set(scales[12:])) > 1, (skipped, scales)


# -- what ends a run, and what does not ----------------------------------------------------------------------------------------


class NoNumber(Loss):
    """NaN where a sample is far away."""

    def forward(self, output: Tensor, target: Tensor) -> tuple[Tensor, int]:
        total, count = super().forward(output, target)
        return (total * torch.nan if bool((target == 2).any()) else total), count


class TooSteep(torch.autograd.Function):
    """An identity whose gradient is infinite whatever it is given."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        return x.clone()

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Tensor:
        return gradient + torch.inf


class Steep(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        found: Tensor = TooSteep.apply(x)
        return found


def test_a_loss_that_is_no_number_is_the_policys_and_lowers_the_scale_where_that_skips_it():
    spec = network_job(loss=LossConfig(function=NoNumber), batch_size=2, microbatches=1, steps=4)
    with OneProcessRun(spec, ParallelPlan.of((1,), layers=5), "1f1b") as run:
        assert not run.step(0)[0].skipped
        with pytest.raises(NonFiniteError, match="step 2: loss nan, gradient norm nan"):
            run.step(1)
    with OneProcessRun(spec.replace(non_finite="skip"), ParallelPlan.of((1,), layers=5), "1f1b") as run:
        found = [run.step(step)[0] for step in range(3)]
        assert [report.skipped for report in found] == [False, True, False]
        assert [report.loss_scale for report in found] == [2.0**14, 2.0**14, 2.0**13]


@pytest.mark.parametrize("policy", ["stop", "skip"])
def test_gradients_that_are_not_finite_with_the_smallest_scale_end_the_run(policy):
    scale = LossScaleConfig(init_scale=2.0**-20, backoff_factor=0.25)
    spec = network_job(
        model=ModelConfig(function=lambda: nn.Sequential(nn.Linear(6, 5), Steep())),
        precision=PrecisionConfig(compute="fp16", loss_scale=scale),
        non_finite=policy,
    )
    with OneProcessRun(spec, ParallelPlan.of((1,), layers=2), "1f1b") as run:
        assert [run.step(step)[0].loss_scale for step in range(2)] == [2.0**-20, 2.0**-22]
        with pytest.raises(NonFiniteError) as caught:
            run.step(2)
    assert caught.value.what == (
        "step 3: gradient norm nan with the smallest loss scale, 2^-24, after 2 skipped steps: a smaller one would not make "
        "the gradients finite"
    )


# -- through faults, growth, other plans and a resume --------------------------------------------------------------------------

CHANGES = {
    "a kill": (ParallelPlan.of((2, 2), layers=9), [("kill", 0.6)], 0),
    "two kills": (ParallelPlan.of((3, 1), layers=9), [("kill", 0.3), ("kill", 0.7)], 2),
    "all copies lost": (ParallelPlan.of((1, 1), layers=9), [("kill", 0.7)], 2),
}
"""(plan, losses, every how many steps the mirror is made)."""


def assert_weights_and_skipped_steps(core: WorkerCore, want: reference.Result) -> None:
    assert [step in core.skipped_steps for step in range(len(want.skipped))] == want.skipped
    for stage in core.stages.values():
        assert all(torch.equal(p, want.parameters[name]) for name, p in stage.parameters.items())


@pytest.mark.ci
@pytest.mark.parametrize("change", CHANGES)
def test_workers_that_come_and_go_have_the_scale_of_the_step(change):
    """The scale of this model grows and falls all the time."""
    plan, faults, mirror_every = CHANGES[change]
    spec, graph = tangled(7, AUTOCAST)
    want = reference.train(graph, spec)
    assert 2 <= sum(want.skipped) <= 5
    work = torch_flesh.TorchJob(spec, graph, ("1f1b",), mirror_every=mirror_every)
    check_through_faults(work, plan, faults, lambda core: assert_weights_and_skipped_steps(core, want))


@pytest.mark.ci
@pytest.mark.parametrize("compute", COMPUTE.values())
def test_growing_and_shrinking_plans_change_no_bit(compute):
    spec, graph = tangled(6, compute)
    want = reference.train(graph, spec)
    assert any(want.skipped[:3]) and not all(want.skipped)
    check_growing_and_shrinking(spec, graph, lambda core: assert_weights_and_skipped_steps(core, want))


def test_a_run_that_is_resumed_under_another_plan_goes_on_with_its_scale(tmp_path: Path):
    spec, graph = tangled(6, AUTOCAST)
    want = reference.train(graph, spec)
    with OneProcessRun(spec, ParallelPlan.of((1, 2), layers=9), "1f1b", graph=graph) as run:
        for step in range(3):
            run.step(step)
        folder = checkpoint_files.create_checkpoint(tmp_path, 3)
        for core in run.cores:
            core.start_save(folder)
        scale = run.step(3)[0].loss_scale  # the files are written meanwhile
        records = [core.save_result() for core in run.cores]
    path = checkpoint_files.commit_checkpoint(folder, records, steps_done=3, contract=contract_of_job(spec))
    manifest = checkpoint_files.load_manifest(path)
    assert list(manifest.skipped_steps) == [step for step in range(3) if want.skipped[step]]
    assert not list_contract_differences(manifest, spec)
    with OneProcessRun(spec, ParallelPlan.of((1, 1, 1), layers=9), "gpipe", graph=graph) as run:
        for core in run.cores:
            core.load(path)
        reports = [run.step(step)[0] for step in (3, 4, 5)]
        assert reports[0].loss_scale == scale
        assert [report.loss for report in reports] == want.losses[3:]
        assert [report.skipped for report in reports] == want.skipped[3:]
        assert all(torch.equal(copy, want.parameters[name]) for name, copies in run.parameters().items() for copy in copies)


@pytest.mark.parametrize("steps", [[2, 1], [1, 1], [-1], [3], [True], ["1"], 2, {"1": 2}], ids=str)
def test_a_checkpoint_whose_skipped_steps_no_run_writes_is_refused(steps, tmp_path: Path):
    spec = network_job()
    with OneProcessRun(spec, ParallelPlan.of((1,), layers=5), "1f1b") as run:
        folder = checkpoint_files.create_checkpoint(tmp_path, 3)
        run.cores[0].start_save(folder)
        record = replace(run.cores[0].save_result(), skipped_steps=None)
    contract = {**contract_of_job(spec), SKIPPED_STEPS: steps}
    with pytest.raises(CheckpointError, match="skipped_steps has"):
        checkpoint_files.commit_checkpoint(folder, [record], steps_done=3, contract=contract)


@pytest.mark.parametrize("zero", [0, 3])
def test_several_optimizers_averages_and_state_that_replicas_divide_skip_the_same_steps(zero):
    """An average and a scheduler's step count, of several optimizers: the average begins with the weights of step 3."""
    entries = [
        {"match": "0.*", "function": torch.optim.SGD, "args": {"lr": 0.1, "momentum": 0.9}},
        {"match": "*", "function": torch.optim.AdamW, "args": {"lr": 1e-2}},
    ]
    spec = network_job(
        optimizer=[OptimizerEntry(**entry) for entry in entries],
        average=AverageConfig(decay=0.5, from_step=3),
        lr_schedule=LrScheduleConfig(function=lambda step: 1.0 / (1 + step)),
        clip_norm=0.5,
        virtual_replicas=3,
    )
    found = []
    for plan in (ParallelPlan.of((1,), layers=5), ParallelPlan.of((3, 2), layers=5).with_zero(zero)):
        with OneProcessRun(spec, plan, "1f1b") as run:
            reports = [run.step(step)[0] for step in range(12)]
            parameters = run.parameters()
            assert all(torch.equal(copy, copies[0]) for copies in parameters.values() for copy in copies)
            averages = [
                (name, value)
                for core in run.cores
                for optimizer in core.step_commit.optimizers.values()
                for name, value in read_optimizer_state(optimizer).averages.items()
            ]
            told = [(report.loss, repr(report.norm), report.skipped, report.loss_scale, report.lr) for report in reports]
            found.append((told, {name: copies[0] for name, copies in parameters.items()}, averages))
    (told, weights, averages), (again, others, others_averages) = found
    whole = dict(averages)
    assert others_averages and all(torch.equal(value, whole[name]) for name, value in others_averages if name in whole)
    assert told == again and 1 <= sum(skipped for _, _, skipped, _, _ in told) <= 6
    assert all(torch.equal(weights[name], others[name]) for name in weights)
