"""`precision: {parameters: bf16, master: float32}`: layers compute with bfloat16 copies of float32 parameters, whose gradients
are added in float32, or, with `gradients: bf16`, in bfloat16 (rule 13)."""

from __future__ import annotations

import gc
import math
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from helpers import checkpoint_folders as checkpoint_files
from helpers import reference, shard_grid, torch_flesh, ugly_models
from helpers.parity import PRECISIONS, STEPS, Layout, Precision, check_local, layouts
from helpers.precisions_through_changes import check_growing_and_shrinking, check_through_faults, tangled
from helpers.recomputed_layouts import RecomputedLayout, check_recomputed, recomputed_layouts
from torch import Tensor, nn

from raypar.errors import DataError, ModelError
from raypar.job import DataConfig, Job, LossConfig, LossScaleConfig, ModelConfig, OptimizerConfig
from raypar.plan import MicrobatchRouting, ParallelPlan
from raypar.planner.memory_sheet import memory_sheets
from raypar.planner.model_profile import LinkProfile
from raypar.planner.predicted_step import predict_step, reduction_ms
from raypar.schedule import registry
from raypar.worker.check_layer_shapes import check_layer_shapes
from raypar.worker.checkpoint.checkpoint_files import PARAMETER
from raypar.worker.layer_graph_of_job import make_layer_graph
from raypar.worker.measure_profile import profile_job
from raypar.worker.run_in_one_process import OneProcessRun
from raypar.worker.stage.gradient_accumulator import GradientAccumulator
from raypar.worker.worker_core import WorkerCore

ROUNDED: Precision = "bf16 parameters"
BF16_SUMS: Precision = "bf16 gradients"
PRECISION = PRECISIONS[ROUNDED]

# -- plans ---------------------------------------------------------------------------------------------------------------------

COMPUTE: dict[int, Precision] = {0: ROUNDED, 1: BF16_SUMS}
CELLS = [replace(cell, compute=COMPUTE[number % 3]) for number, cell in enumerate(layouts()) if number % 3 in COMPUTE]
SHARDED = [
    replace(cell, compute=COMPUTE[number % 5], dtype="float32")
    for number, cell in enumerate(shard_grid.cells())
    if number % 5 in COMPUTE
]
RECOMPUTED = [
    replace(cell, layout=replace(cell.layout, compute=COMPUTE[number % 3]))
    for number, cell in enumerate(recomputed_layouts())
    if number % 6 in (0, 1)
]
SAMPLE = [
    Layout("tangled", "1f1b", (3, 1, 2), 7, compute=BF16_SUMS),
    Layout("tangled", "zb-v", (2, 2), 5, compute=BF16_SUMS),
    Layout("plain", "gpipe", (2,), 5, blocks=2, compute=BF16_SUMS),
    Layout("plain", "interleaved", (2, 2), 5, blocks=5, compute=ROUNDED),
    Layout("tangled", "zb-h1", (1, 2), 3, compute=ROUNDED),
    Layout("relayed", "1f1b", (1, 1, 1), 3, compute=ROUNDED),
]
SHARDED_SAMPLE = [
    shard_grid.Cell("gpt", "zb-h1", (2, 1), (2, 2), 4, True, "float32", compute=ROUNDED),
    shard_grid.Cell("gpt", "1f1b", (2, 2), (2, 2), 5, True, "float32", compute=BF16_SUMS),
    shard_grid.Cell("llama", "1f1b", (2, 1), (2, 2), 4, False, "float32", compute=BF16_SUMS),
]
RECOMPUTED_SAMPLE = [
    RecomputedLayout(Layout("tangled", "1f1b", (2, 1), 5, compute=ROUNDED), "full"),
    RecomputedLayout(Layout("tangled", "gpipe", (1, 2), 4, compute=BF16_SUMS), "full"),
]


@pytest.mark.parametrize("compute", [ROUNDED, BF16_SUMS])
def test_the_grids_have_all_schedules_and_more_than_40_plans(compute):
    cells, sharded = ([cell for cell in grid if cell.compute == compute] for grid in (CELLS, SHARDED))
    assert min(map(len, (cells, sharded))) >= 40
    assert sum(cell.layout.compute == compute for cell in RECOMPUTED) >= 8
    for grid in (cells, sharded):
        assert {cell.schedule for cell in grid} == set(registry.NAMES)
    assert {cell.model for cell in sharded} == {"gpt", "llama", "dropped"}


@pytest.mark.parametrize("layout", [*SAMPLE, *(pytest.param(cell, marks=pytest.mark.full) for cell in CELLS)], ids=str)
def test_a_layout_gives_the_bits_of_one_process_with_bfloat16_modules_and_float32_masters(layout):
    check_local(layout)


@pytest.mark.parametrize("cell", [*SHARDED_SAMPLE, *(pytest.param(cell, marks=pytest.mark.full) for cell in SHARDED)], ids=str)
def test_a_layout_with_shards_gives_the_bits_of_the_same_shards_in_one_process(cell):
    shard_grid.check(cell)


@pytest.mark.parametrize(
    "cell", [*RECOMPUTED_SAMPLE, *(pytest.param(cell, marks=pytest.mark.full) for cell in RECOMPUTED)], ids=str
)
def test_recomputed_layers_give_the_bits_of_one_process(cell):
    check_recomputed(cell)


# -- through faults, growth and a resume ---------------------------------------------------------------------------------------

CHANGES = {
    "a kill": (ParallelPlan.of((2, 2), layers=9), [("kill", 0.6)], 0),
    "all copies lost": (ParallelPlan.of((1, 1), layers=9), [("kill", 0.7)], 2),
}
"""(plan, losses, every how many steps the mirror is made)."""


@pytest.mark.ci
@pytest.mark.parametrize("compute", [ROUNDED, BF16_SUMS])
@pytest.mark.parametrize("change", CHANGES)
def test_workers_that_come_and_go_change_no_bit(change, compute):
    plan, faults, mirror_every = CHANGES[change]
    spec, graph = tangled(4, compute)
    want = reference.train(graph, spec).parameters
    work = torch_flesh.TorchJob(spec, graph, ("1f1b",), mirror_every=mirror_every)
    check_through_faults(work, plan, faults, lambda core: assert_masters_and_copies(core, want))


@pytest.mark.ci
@pytest.mark.parametrize("compute", [ROUNDED, BF16_SUMS])
def test_growing_and_shrinking_plans_change_no_bit(compute):
    spec, graph = tangled(4, compute)
    want = reference.train(graph, spec).parameters
    check_growing_and_shrinking(spec, graph, lambda core: assert_masters_and_copies(core, want))


def assert_masters_and_copies(core: WorkerCore, want: dict[str, Tensor]) -> None:
    """The parameters are those wanted, and what layers compute with is these, rounded."""
    for stage in core.stages.values():
        for name, parameter in stage.parameters.items():
            assert parameter.dtype == torch.float32 and torch.equal(parameter, want[name]), name
            assert torch.equal(stage.weights.rounded[name], want[name].bfloat16()), name


@pytest.mark.ci
@pytest.mark.parametrize("compute", [ROUNDED, BF16_SUMS])
def test_a_run_that_is_resumed_under_another_plan_has_the_bits_of_one_process(tmp_path: Path, compute):
    spec, graph = tangled(4, compute)
    want = reference.train(graph, spec)
    half = reference.train(graph, spec.replace(steps=2))
    with OneProcessRun(spec, ParallelPlan.of((1, 2), layers=9), "1f1b", graph=graph) as run:
        for step in range(2):
            run.step(step)
        path = checkpoint_files.save_run(run, tmp_path, 2)
    kept = checkpoint_files.read_checkpoint_state(path)
    assert all(torch.equal(kept[name][PARAMETER], p) for name, p in half.parameters.items()), "float32, not rounded"
    with OneProcessRun(spec, ParallelPlan.of((1, 1, 1), layers=9), "gpipe", graph=graph) as run:
        for core in run.cores:
            core.load(path)
        losses = [run.step(step)[0].loss for step in (2, 3)]
        assert losses == want.losses[2:]
        for core in run.cores:
            assert_masters_and_copies(core, want.parameters)


# -- a plain loop, as people write it ------------------------------------------------------------------------------------------

WIDTH = 6


class Rows(torch.utils.data.Dataset[tuple[Tensor, Tensor]]):
    def __len__(self) -> int:
        return 48

    def __getitem__(self, index: int) -> tuple[Tensor, Tensor]:
        x = torch.randn(WIDTH, generator=torch.Generator().manual_seed(index))
        return x, x.sum()


class Centred(nn.Module):
    """Has a float32 buffer, which it casts where it is used."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("shift", torch.tensor(1 / 3))
        self.up = nn.Linear(WIDTH, 2 * WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        shift: Tensor = self.shift  # type: ignore[assignment]
        assert (x.dtype, shift.dtype, self.up.weight.dtype) == (torch.bfloat16, torch.float32, torch.bfloat16)
        return self.up(x - shift.to(x.dtype)).relu()


def network() -> nn.Sequential:
    return nn.Sequential(Centred(), nn.BatchNorm1d(2 * WIDTH), nn.LayerNorm(2 * WIDTH), nn.Linear(2 * WIDTH, 1), nn.Flatten(0))


def squares(output: Tensor, target: Tensor) -> Tensor:
    assert output.dtype == target.dtype == torch.float32
    return ((output - target) ** 2).mean()


def job(**more: object) -> Job:
    given: dict[str, object] = {
        "seed": 4,
        "steps": 3,
        "batch_size": 12,
        "microbatches": 3,
        "virtual_replicas": 1,
        "model": ModelConfig(function=network),
        "loss": LossConfig(function=squares),
        "data": DataConfig(function=Rows, shuffle=False),
        "optimizer": OptimizerConfig(function=torch.optim.Adam, args={"lr": 0.01}),
        "precision": PRECISION,
    }
    return Job(**(given | more))


@pytest.mark.parametrize("sums_in", ["float32", "bf16"])
def test_a_run_has_the_bits_of_a_plain_loop_with_a_bfloat16_module(sums_in):
    """With `gradients: bf16` PyTorch itself adds, to the module's own `.grad`."""
    spec = job(precision=PRECISIONS[ROUNDED if sums_in == "float32" else BF16_SUMS])
    torch.set_num_threads(spec.threads)  # decides the order of a layer norm's sums
    torch.manual_seed(spec.seed)
    model = network()
    master = [p.detach().clone() for p in model.parameters()]
    for part in model.children():
        if not isinstance(part, nn.BatchNorm1d):
            for p in part.parameters():
                p.data = p.data.bfloat16()
    optimizer, rows, losses = torch.optim.Adam(master, lr=0.01), Rows(), []
    for step in range(3):
        sums, total = [torch.zeros_like(p) for p in master], []
        for first in range(12 * step, 12 * step + 12, 4):
            x, y = map(torch.stack, zip(*(rows[i] for i in range(first, first + 4)), strict=True))
            loss = squares(model(x.bfloat16()).float(), y) * 4.0
            loss.backward()
            total.append(loss.item())
            for gradient, p in zip(sums, model.parameters(), strict=True) if sums_in == "float32" else ():
                gradient += p.grad.float()
                p.grad = None
        if sums_in == "bf16":
            sums = [p.grad.float() for p in model.parameters()]
            model.zero_grad()
        for p, gradient in zip(master, sums, strict=True):
            p.grad = gradient * (1 / 12)
        optimizer.step()
        for p, own in zip(model.parameters(), master, strict=True):
            p.data.copy_(own)
        losses.append(math.fsum(total) / 12)
    names = [name for name, _ in model.named_parameters()]
    graph = make_layer_graph(spec)
    with OneProcessRun(spec, ParallelPlan.of((1, 1), layers=5), "1f1b", graph=graph) as run:
        assert [run.step(step)[0].loss for step in range(3)] == losses
        found = run.parameters()
        assert [n for n, p in zip(names, master, strict=True) if not torch.equal(found[n][0], p)] == []
        buffers = run.buffers()
        assert [n for n, b in model.named_buffers() if not torch.equal(buffers[n][0], b)] == []


def test_layers_have_rounded_copies_and_all_that_is_added_up_is_float32():
    spec = job(microbatches=6, virtual_replicas=3, optimizer=OptimizerConfig(function=torch.optim.AdamW))
    graph = make_layer_graph(spec)
    with OneProcessRun(spec, ParallelPlan.of((2, 1), layers=5), "1f1b", graph=graph) as run:
        run.step(0)
        stages = [stage for core in run.cores for stage in core.stages.values()]
        for stage in stages:
            for use, leaf in zip(stage.uses, stage.weights.leaves, strict=True):
                assert leaf.dtype == (torch.float32 if use.name.startswith("1.") else torch.bfloat16), "1 is a batch norm"
            assert {use.dtype for use in stage.uses} == {torch.float32}
            assert {b.dtype for n, b in stage.buffers.items() if "num_batches" not in n} <= {torch.float32}
            assert all(leaf.grad is None for leaf in stage.weights.leaves if leaf.dtype == torch.bfloat16)
        assert {p.dtype for copies in run.parameters().values() for p in copies} == {torch.float32}
        assert {g.dtype for copies in run.gradients().values() for g in copies if g is not None} == {torch.float32}
        moments = [s["exp_avg"].dtype for copies in run.optimizer_state().values() for s in copies]
        assert set(moments) == {torch.float32}
        stage = stages[0]
        batch = {"x": torch.randn(2, WIDTH)}
        stage.begin_step(0)
        sent = stage.forward(0, {}, batch)
        assert {value.dtype for value in sent.values()} == {torch.bfloat16}, "values between stages"
        received = stage.backward(0, {name: torch.ones_like(value) for name, value in sent.items()})
        assert not received and {leaf.grad.dtype for leaf in stage.gradients.leaves} == {torch.float32}


def half_frozen() -> nn.Sequential:
    made = network()
    made[3].weight.requires_grad_(False)
    return made


def test_a_step_rounds_the_parameters_that_it_has_changed_and_no_frozen_ones():
    spec = job(model=ModelConfig(function=half_frozen))
    with OneProcessRun(spec, ParallelPlan.of((1,), layers=5), "1f1b", graph=make_layer_graph(spec)) as run:
        rounded = run.cores[0].stages[0, 0].weights.rounded
        before = {name: copy._version for name, copy in rounded.items()}
        run.step(0)
        assert {name for name, copy in rounded.items() if copy._version == before[name]} == {"3.weight"}


def test_a_validation_measures_what_a_bfloat16_module_computes():
    from raypar.job import ValidationConfig

    spec = job(validation=ValidationConfig(function=Rows, every=1, samples=12))
    graph = make_layer_graph(spec)
    with OneProcessRun(spec, ParallelPlan.of((1, 1), layers=5), "1f1b", graph=graph) as run:
        run.step(0)
        found = run.validate(1)
        model = network()
        model.load_state_dict({n: copies[0] for n, copies in (run.parameters() | run.buffers()).items()})
    for part in model.eval().children():
        if not isinstance(part, nn.BatchNorm1d):
            for p in part.parameters():
                p.data = p.data.bfloat16()
    totals = []
    with torch.no_grad():
        for first in range(0, 12, 4):
            x, y = map(torch.stack, zip(*(Rows()[i] for i in range(first, first + 4)), strict=True))
            totals.append(float(squares(model(x.bfloat16()).float(), y) * 4.0))
    assert found == math.fsum(totals) / 12


# -- what is planned, and what is wrong ----------------------------------------------------------------------------------------


def test_the_memory_sheet_has_copies_masters_and_gradients():
    spec, plain = job(optimizer=OptimizerConfig(function=torch.optim.AdamW)), job(precision=None)
    spec = spec.replace(
        model=ModelConfig(function=lambda: nn.Sequential(nn.Linear(WIDTH, 64), nn.Linear(64, 1), nn.Flatten(0)))
    )
    graph = make_layer_graph(spec)
    elements = WIDTH * 64 + 64 + 64 + 1
    routing = MicrobatchRouting(ParallelPlan.mesh(layers=3), spec.batching)
    profile = profile_job(spec, workers=1, graph=graph)
    (sheet,) = memory_sheets(profile, routing.plan, "1f1b", spec.batching)
    state = {kind: nbytes for kind, nbytes in sheet.state.items() if kind in ("parameter", "master", "gradient")}
    assert state == {"parameter": 2 * elements, "master": 4 * elements, "gradient": 4 * elements}
    assert sum(layer.parameter_bytes for layer in profile.layers) == 4 * elements, "what a reduction sends"
    assert "master parameters" in str(sheet)
    profile = profile_job(plain.replace(model=spec.model), workers=1, graph=graph)
    (sheet,) = memory_sheets(profile, routing.plan, "1f1b", spec.batching)
    assert sheet.state["parameter"] == 4 * elements and "master" not in sheet.state


def test_with_bf16_gradients_it_has_half_of_them_and_what_the_optimizers_float32_gradients_take_beyond_activations():
    """When the optimizer runs no activation is left: of the two moments the larger one counts."""
    spec = job(precision=PRECISIONS[BF16_SUMS], batch_size=4, microbatches=4, virtual_replicas=4)
    for width, activations_are_larger in ((256, False), (1, True)):
        layers = [nn.Linear(WIDTH, width), nn.Linear(width, 1), nn.Flatten(0)]
        spec = spec.replace(model=ModelConfig(function=lambda layers=layers: nn.Sequential(*layers)))
        graph = make_layer_graph(spec)
        elements = WIDTH * width + width + width + 1
        profile = profile_job(spec, workers=1, graph=graph)
        routing = MicrobatchRouting(ParallelPlan.mesh(layers=len(layers)), spec.batching)
        (sheet,) = memory_sheets(profile, routing.plan, "gpipe", spec.batching)
        kept = sum(sheet.kept.values())
        assert (kept > 2 * elements) is activations_are_larger
        state = {kind: nbytes for kind, nbytes in sheet.state.items() if kind in ("parameter", "master", "gradient")}
        assert state == {"parameter": 2 * elements, "master": 4 * elements, "gradient": 3 * 2 * elements}
        assert sheet.state["widened"] == max(0, 2 * elements - kept)
        assert ("float32 gradients" in str(sheet)) is not activations_are_larger
        _, (memory,) = predict_step(profile, routing.plan, "gpipe", spec.batching)
        assert memory == sheet.total


def two_linears() -> nn.Sequential:
    return nn.Sequential(nn.Linear(WIDTH, 64), nn.Linear(64, 1, bias=False), nn.Flatten(0))


def test_with_bf16_gradients_half_as_many_bytes_are_sent_and_a_prediction_says_so():
    def of_replicas(compute: Precision) -> tuple[dict[str, int], float]:
        spec = job(precision=PRECISIONS[compute], virtual_replicas=3, model=ModelConfig(function=two_linears))
        graph, plan = make_layer_graph(spec), ParallelPlan.of((3,), layers=3)
        with OneProcessRun(spec, plan, "1f1b", graph=graph) as run:
            run.step(0)
            ledger = run.mesh.transports[0].ledger
            sent = {kind: ledger.sent[kind] for kind in ("all_to_all", "all_gather")}
        profile = replace(profile_job(spec, workers=3, graph=graph), link=LinkProfile(bandwidth=1.0))
        return sent, reduction_ms(profile.stages(plan)[0], plan.stages[0], profile.link)

    (sent, ms), (half, less_ms) = of_replicas(ROUNDED), of_replicas(BF16_SUMS)
    assert half == {kind: nbytes // 2 for kind, nbytes in sent.items()} and all(half.values())
    assert ms == 2 * less_ms > 0


def test_when_the_optimizer_runs_the_bfloat16_sums_are_gone_and_its_gradients_are_float32():
    """Two complete subtrees of blocks: both sums, and the total, are dropped as the float32 gradient is made of them."""
    alive: list[int] = []

    class Watching(torch.optim.SGD):
        def step(self, closure=None):
            assert {p.grad.dtype for group in self.param_groups for p in group["params"]} == {torch.float32}
            gc.collect()
            found = {
                tensor.untyped_storage().data_ptr()
                for tensor in gc.get_objects()
                if type(tensor) is Tensor and tensor.dtype == torch.bfloat16 and tensor.shape == (64, WIDTH)
            }
            alive.append(len(found))
            return super().step(closure)

    spec = job(
        microbatches=4,
        virtual_replicas=4,
        precision=PRECISIONS[BF16_SUMS],
        model=ModelConfig(function=two_linears),
        optimizer=OptimizerConfig(function=Watching, args={"lr": 0.1}),
    )
    with OneProcessRun(spec, ParallelPlan.of((1,), layers=3), "1f1b", graph=make_layer_graph(spec)) as run:
        run.step(0)
        stage = run.cores[0].stages[0, 0]
        assert {use.dtype for use in stage.uses} == {torch.bfloat16} and not stage.gradients.rounded
    assert alive[-1] == 0, "the copies of parameters are no plain tensors"


class Positions(nn.Module):
    """Adds a float32 buffer, so that what it returns is float32."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("table", torch.arange(float(WIDTH)))

    def forward(self, x: Tensor) -> Tensor:
        return x + self.table  # type: ignore[no-any-return]


def test_a_float32_value_that_meets_bfloat16_parameters_is_told_before_the_run_with_the_cure():
    spec = job(model=ModelConfig(function=lambda: nn.Sequential(Positions(), nn.Linear(WIDTH, 1), nn.Flatten(0))))
    graph = make_layer_graph(spec)
    batch = {"x": torch.randn(4, WIDTH), "y": torch.randn(4)}
    with pytest.raises(DataError, match=r"layer '1' takes torch.bfloat16, and its input .* is torch.float32") as caught:
        check_layer_shapes(spec, graph, batch)
    assert "x.to(self.weight.dtype)" in caught.value.cure and "precision.parameters buffers stay float32" in caught.value.cure
    check_layer_shapes(spec.replace(precision=None), graph, batch)


def test_a_gradient_that_comes_after_it_was_added_is_refused():
    leaf = nn.Parameter(torch.ones(2, dtype=torch.bfloat16))
    sums = GradientAccumulator([leaf], ["w"], [torch.float32], range(1), 1, {0: 1})
    sums.begin()
    sums.switch_to_block(0)
    leaf.grad = torch.ones_like(leaf)
    sums.add_rounded([0])
    leaf.grad = torch.ones_like(leaf)
    with pytest.raises(ModelError, match="w got a gradient after autograd had completed it"):
        sums.record_finished_halves(0, 2)


@pytest.mark.parametrize("dtype, wanted", [(torch.float32, 257.0), (torch.bfloat16, 256.0)])
def test_gradients_of_microbatches_are_added_in_the_dtype_of_the_sum(dtype, wanted):
    """256 + 1 is 256 in bfloat16."""
    leaf = nn.Parameter(torch.ones(2, dtype=torch.bfloat16))
    sums = GradientAccumulator([leaf], ["w"], [dtype], range(1), 1, {0: 2})
    sums.begin()
    for value in (256.0, 1.0):
        sums.switch_to_block(0)
        (leaf * value).sum().backward()
        found: dict[int, Tensor | None] = {}
        sums.on_ready = lambda uses, rows, found=found: found.update({u: rows[0, 1][u] for u in uses})
        sums.record_finished_halves(0, 2)
    assert found[0] is not None and found[0].dtype == dtype and found[0].tolist() == [wanted, wanted]


def test_the_reference_rounds_too():
    """Else the grids would compare two runs in float32. Of float16 without steps that are skipped."""
    spec = ugly_models.job("tangled", microbatches=3, steps=STEPS)
    graph, scale = make_layer_graph(spec), LossScaleConfig(init_scale=16.0)
    precisions = [one.replace(loss_scale=scale) for one in PRECISIONS.values()]
    losses = [reference.train(graph, spec.replace(precision=precision)).losses for precision in precisions]
    assert len(set(map(tuple, losses))) == len(PRECISIONS) == 7
    for lower in losses[1:]:
        assert all(math.isclose(a, b, rel_tol=0.05) for a, b in zip(losses[0], lower, strict=True))
