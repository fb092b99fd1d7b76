"""Buffers that forward writes, running statistics and others: under every plan those of one process with the modules."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable, Iterable
from dataclasses import replace
from functools import partial
from itertools import product
from pathlib import Path

import pytest
import torch
import torch.nn.functional as F
from helpers import norm_models, reference, ugly_models
from helpers.generations import Generations
from helpers.parity import Layout, check_local, differences, expected
from helpers.torch_flesh import TorchJob
from torch import nn

from raypar import Trainer
from raypar.errors import ConfigError, DataError, ModelError, UserCodeError
from raypar.files.safe_yaml import dump_yaml
from raypar.job import Job, LossConfig, ModelConfig, PlanConfig, ValidationConfig
from raypar.job.contract import contract_of_job
from raypar.job.read_job import load_job, parse_job
from raypar.model.capture.sequential import capture_layer_graph
from raypar.plan import ParallelPlan
from raypar.worker.check_model_can_shard import check_model_can_shard
from raypar.worker.checkpoint.checkpoint_files import PARAMETER
from raypar.worker.elastic_worker import ElasticWorker
from raypar.worker.job_preflight import preflight
from raypar.worker.layer_graph_of_job import make_layer_graph
from raypar.worker.measure_profile import one_microbatch_of_each_size, profile_layers, read_microbatches
from raypar.worker.run_in_one_process import OneProcessRun
from raypar.worker.stage.running_statistics import NormCall, NormCallRecorder, fold_norm_calls, make_stand_ins
from raypar.worker.step.buffer_exchange import BufferExchange

pytestmark = pytest.mark.part(7)

QUICK = [
    Layout("norms", "1f1b", (2, 2), 4),
    Layout("norms", "gpipe", (3, 1), 5),
    Layout("norms", "interleaved", (2, 1), 3),
    Layout("splittable norms", "zb-v", (2, 2), 5),
    Layout("norms", "1f1b", (1,), 1),
    Layout("norms", "1f1b", (2, 3), 5, blocks=2),
    Layout("norms", "1f1b", (2, 2), 4, compute="bf16"),
]
GRID = [
    Layout("splittable norms" if schedule.startswith("zb") else "norms", schedule, (replicas,) * stages, m, compute=compute)
    for schedule, stages, replicas, m, compute in product(
        ("1f1b", "gpipe", "interleaved", "zb-v", "zb-h1"), (1, 2, 3), (1, 2, 3), (1, 2, 3, 4, 5), (None, "bf16")
    )
]


@pytest.mark.parametrize("layout", QUICK, ids=str)
def test_running_statistics_are_those_of_one_process(layout: Layout):
    check_local(layout)


@pytest.mark.full
@pytest.mark.parametrize("layout", GRID, ids=str)
def test_running_statistics_are_those_of_one_process_in_every_layout(layout: Layout):
    check_local(layout)


# -- recomputation and activation checkpointing ------------------------------------------------------------------------------


def check(spec: Job, plan: ParallelPlan, schedule: str, want: reference.Result) -> None:
    """Run a plan and compare losses, parameters and buffers with the reference."""
    with OneProcessRun(spec, plan, schedule, seed=1) as run:
        losses = [{report.loss for report in run.step(step)} for step in range(spec.steps)]
        bad = [d for n, p in want.parameters.items() for d in differences(n, run.parameters()[n], p)]
        bad += [d for n, b in want.buffers.items() for d in differences(n, run.buffers()[n], b)]
        assert not bad, f"{plan.describe()} {schedule}: {bad}"
        assert losses == [{loss} for loss in want.losses]


@pytest.mark.ci
@pytest.mark.parametrize("schedule, recompute", [("1f1b", range(8)), ("gpipe", (0, 2, 3, 4)), ("zb-h1", range(8))], ids=str)
def test_a_recomputed_microbatch_counts_once(schedule, recompute):
    name = "splittable norms" if schedule == "zb-h1" else "norms"
    spec = ugly_models.job(name).replace(steps=5)
    check(spec, ParallelPlan.mesh(dp=2, pp=2, layers=8, recompute=recompute), schedule, expected(name, 4, 0))


# -- other buffers -----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("policy", ["last", "sum"])
@pytest.mark.parametrize(
    "replicas, schedule, microbatches, recompute",
    [((2, 2), "1f1b", 4, ()), ((3,), "gpipe", 5, range(8)), ((1, 2), "zb-h1", 3, (1, 3))],
    ids=str,
)
def test_other_buffers_follow_the_policy(policy, replicas, schedule, microbatches, recompute):
    spec = ugly_models.job("counters", microbatches=microbatches)
    spec = spec.replace(model=spec.model.replace(buffers=policy))
    want = reference.train(make_layer_graph(spec), spec)
    plan = replace(ParallelPlan.of(replicas, layers=8), recompute=tuple(recompute))
    check(spec, plan, schedule, want)
    last_sizes = spec.batch_size - (microbatches - 1) * spec.batch_size // microbatches
    assert want.buffers["1.samples"] == spec.steps * (spec.batch_size if policy == "sum" else last_sizes)
    before = dict(norm_models.counters().named_buffers())
    changed = {name for name, value in want.buffers.items() if not torch.equal(value, before[name])}
    assert changed >= {f"{layer}.{buffer}" for layer in (1, 3, 6) for buffer in ("average", "prototype", "positive")}
    assert changed >= {"2.running_mean", "4.mean", "4.variance"} and not changed & {"1.cache", "1.scale"}


class WritesSometimes(norm_models.Counters):
    """Writes some of its buffers only where a microbatch is bright, which differs from step to step."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        bright = bool(x[0].sum() > 0)
        self.train(self.training and bright)
        try:
            return super().forward(x)
        finally:
            self.train()


def written_sometimes() -> nn.Sequential:
    return nn.Sequential(nn.Flatten(), nn.Linear(75, 12), WritesSometimes(12), nn.Linear(12, 3))


@pytest.mark.parametrize("policy", ["last", "sum"])
@pytest.mark.parametrize("replicas", [(2,), (3, 2)], ids=str)
def test_what_is_written_may_differ_from_step_to_step_and_is_told_anew_only_then(policy, replicas, monkeypatch):
    spec = ugly_models.job("counters", steps=7).replace(model=ModelConfig(function=written_sometimes, buffers=policy))
    want = reference.train(make_layer_graph(spec), spec)
    told: list[tuple[int, list[int]]] = []
    tell = BufferExchange._tell
    monkeypatch.setattr(
        BufferExchange, "_tell", lambda self, step, due: (told.append((step, [*due])), tell(self, step, due))[1]
    )
    check(spec, ParallelPlan.of(replicas, layers=4), "1f1b", want)
    steps = [step for step, due in told if due]
    assert 0 in steps and 1 < len(set(steps)) < spec.steps
    with OneProcessRun(ugly_models.job("norms"), ParallelPlan.mesh(dp=2, layers=8), "1f1b") as run:
        for step in range(4):
            told.clear()
            run.step(step)
            assert any(due for _, due in told) == (step == 0)


def spectral() -> nn.Sequential:
    """Power iteration writes two buffers of each Linear in every forward."""
    made = [nn.utils.parametrizations.spectral_norm(nn.Linear(*size)) for size in ((75, 12), (12, 12), (12, 3))]
    return nn.Sequential(nn.Flatten(), *made)


@pytest.mark.parametrize("recompute", [(), range(4)], ids=str)
def test_spectral_norm_trains_under_the_policy_last(recompute):
    spec = ugly_models.job("counters").replace(model=ModelConfig(function=spectral, buffers="last"))
    want = reference.train(make_layer_graph(spec), spec)
    assert len(want.buffers) == 6
    check(spec, ParallelPlan.mesh(dp=2, pp=2, layers=4, recompute=recompute), "1f1b", want)


@pytest.mark.parametrize("layer, path", [(norm_models.Counters, "samples"), (norm_models.OwnNorm, "mean")])
def test_other_buffers_are_refused_by_default_and_the_cure_is_the_policy(layer, path):
    spec = ugly_models.job("counters").replace(
        model=ModelConfig(function=lambda: nn.Sequential(nn.Flatten(), layer(75), nn.Linear(75, 3)))
    )
    with OneProcessRun(spec, ParallelPlan.mesh(layers=3), "1f1b") as run, pytest.raises(UserCodeError) as error:
        run.step(0)
    assert f"layer '1' writes into its buffer '{path}' in forward" in error.value.what
    assert "model.buffers: last, or sum" in error.value.cure


class Captured(nn.Module):
    """Two blocks; one of them, or the code between them, keeps an average."""

    def __init__(self, writes: str) -> None:
        super().__init__()
        self.blocks = nn.ModuleList([nn.Linear(75, 12), norm_models.Counters(12) if writes == "a unit" else nn.Linear(12, 12)])
        self.head, self.writes = nn.Linear(12, 3), writes
        self.register_buffer("average", torch.zeros(12))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        hidden = self.blocks[0](x.flatten(1))
        if self.writes == "code between units":
            with torch.no_grad():
                self.average.lerp_(hidden.mean(0), 0.1)
        return self.head(self.blocks[1](hidden) + self.average)


@pytest.mark.ci
@pytest.mark.parametrize("writes, buffer", [("a unit", "blocks.1.average"), ("code between units", "average")])
def test_a_captured_model_that_writes_buffers_is_refused_before_it_starts(writes, buffer):
    spec = ugly_models.job("counters").replace(model=ModelConfig(function=Captured, args={"writes": writes}))
    with pytest.raises(ModelError, match=f"the model's forward writes its buffer '{buffer}'") as error:
        preflight(spec)
    assert "model.buffers: last, or sum" in error.value.cure
    if writes == "a unit":
        preflight(spec.replace(model=spec.model.replace(buffers="last")))
    else:  # each of the layers reads what the one before it has written
        with pytest.raises(UserCodeError, match="which another layer has too and would not see"):
            preflight(spec.replace(model=spec.model.replace(buffers="last")))
    preflight(spec.replace(model=ModelConfig(function=Captured, args={"writes": ""})))


# -- other plans, checkpoints, validation ------------------------------------------------------------------------------------


def held(bodies: Iterable[ElasticWorker]) -> dict[str, list[torch.Tensor]]:
    """Parameter or buffer -> the copy of every worker that has it."""
    found: dict[str, list[torch.Tensor]] = {}
    for body in bodies:
        for (name, _), kept in body._stages_state().items():
            found.setdefault(name, []).append(kept[PARAMETER])
    return found


@pytest.mark.ci
@pytest.mark.parametrize("name, policy", [("norms", "refuse"), ("counters", "last"), ("counters", "sum")])
def test_replicas_that_join_and_leave_and_a_checkpoint_have_the_buffers_of_one_process(name, policy, tmp_path):
    spec = ugly_models.job(name).replace(model=ModelConfig(function=ugly_models.MODELS[name][0], buffers=policy))
    graph = make_layer_graph(spec)
    want = reference.train(graph, spec)
    job = TorchJob(spec, graph)
    plans = [((2, 2), 4), ((3, 3), 6), ((1, 2), 3), ((1,), 1), ((1, 1, 1, 1), 4)]
    run, checkpoint = Generations(job), None
    for step, (replicas, workers) in enumerate(plans):
        run.adopt(ParallelPlan.of(replicas, layers=8), list(range(workers)), step)
        run.step(step)
        if step == 2:
            checkpoint = run.save(tmp_path, 3)
    state = {**want.parameters, **want.buffers}
    assert not [d for n, t in held(run.bodies.values()).items() for d in differences(n, t, state[n])]
    plan = ParallelPlan.of((2, 1), layers=8)
    with OneProcessRun(spec, plan, "gpipe") as again:
        for core in again.cores:
            core.load(str(checkpoint))
        for step in (3, 4):
            again.step(step)
        got = {**again.parameters(), **again.buffers()}
        assert not [d for n, value in state.items() for d in differences(n, got[n], value)]


class Mlp(nn.Module):
    """What shards cut: up is a column layer, down a row layer."""

    def __init__(self) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(12, 24), nn.Linear(24, 12)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + self.down(self.up(x).relu())


def mlps(inside: bool = False) -> nn.Sequential:
    """Blocks that shards cut, between norms; `inside`: with a norm of a part."""
    first: list[nn.Module] = [nn.Flatten(), nn.Linear(75, 12), nn.BatchNorm1d(12)]
    blocks = [Mlp(), nn.BatchNorm1d(12, momentum=None), Mlp(), nn.BatchNorm1d(12), nn.Linear(12, 3)]
    if inside:
        blocks[0] = nn.Sequential(OrderedDict(up=nn.Linear(12, 24), norm=nn.BatchNorm1d(24), down=nn.Linear(24, 12)))
    return nn.Sequential(*first, *blocks)


@pytest.mark.ci
def test_shards_have_whole_norms_that_agree_with_those_of_all_replicas():
    spec = ugly_models.job("counters").replace(
        model=ModelConfig(function=mlps), plan=PlanConfig(styles={"*.up": "column", "*.down": "row", "*": "whole"})
    )
    shapes = ({"tp": 2}, {"dp": 2, "tp": 2}, {"dp": 3, "pp": 2, "tp": 2})
    found: list[dict[str, list[torch.Tensor]]] = []
    for shape in shapes:
        with OneProcessRun(spec, ParallelPlan.mesh(**shape, layers=8), "1f1b") as run:
            for step in range(spec.steps):
                run.step(step)
                if step == 0:
                    first_step = {name: copies[0].clone() for name, copies in run.buffers().items()}
            found.append({name: [copy.clone() for copy in copies] for name, copies in run.buffers().items()})
    for copies in found:
        assert not [d for n, first in found[0].items() for d in differences(n, copies[n], first[0])]
    whole = reference.train(make_layer_graph(spec), spec.replace(steps=1)).buffers
    assert all(torch.allclose(first_step[name], value, rtol=1e-5, atol=1e-7) for name, value in whole.items())


def test_shards_agree_on_the_statistics_of_a_norm_of_a_part_of_the_features():
    styles = {"3.up": "column", "3.down": "row", "*": "whole"}
    spec = ugly_models.job("counters").replace(
        model=ModelConfig(function=mlps, args={"inside": True}), plan=PlanConfig(styles=styles)
    )
    check_model_can_shard(spec, preflight(spec), ParallelPlan.mesh(tp=2, layers=8))
    found: list[dict[str, list[torch.Tensor]]] = []
    for shape in ({"tp": 2}, {"dp": 2, "tp": 2}):
        with OneProcessRun(spec, ParallelPlan.mesh(**shape, layers=8), "1f1b") as run:
            run.step(0)
            found.append({name: [copy.clone() for copy in copies] for name, copies in run.buffers().items()})
    for copies in found:
        assert not [d for n, first in found[0].items() for d in differences(n, copies[n], first[0])]
    whole = reference.train(make_layer_graph(spec), spec.replace(steps=1)).buffers
    assert "3.norm.running_var" in whole
    assert all(torch.allclose(found[0][name][0], value, rtol=1e-5, atol=1e-7) for name, value in whole.items())


def test_validation_reads_running_statistics_and_a_skipped_step_changes_none():
    spec = ugly_models.job("norms", steps=3).replace(
        non_finite="skip",
        loss=LossConfig(function=nan_in_step_1),
        validation=ValidationConfig(function=norm_models.Images, samples=6),
    )
    graph = make_layer_graph(spec)
    with OneProcessRun(spec, ParallelPlan.mesh(dp=2, pp=2, layers=8), "1f1b", graph=graph) as run:
        run.step(0)
        before = {name: [copy.clone() for copy in copies] for name, copies in run.buffers().items()}
        NAN.append(True)
        try:
            assert all(report.skipped for report in run.step(1))
        finally:
            NAN.clear()
        after = run.buffers()
        assert all(torch.equal(a, b) for name in before for a, b in zip(before[name], after[name], strict=True))
        loss = run.validate(1)
        assert all(torch.equal(a, b) for name in before for a, b in zip(before[name], run.buffers()[name], strict=True))
        whole = norm_models.norms()
        state = {name: copies[0] for name, copies in {**run.parameters(), **run.buffers()}.items()}
        whole.load_state_dict(state)
        whole.eval()
        data = norm_models.Images()
        x, y = torch.stack([data[i][0] for i in range(6)]), torch.tensor([data[i][1] for i in range(6)])
        assert loss == pytest.approx(float(norm_models.class_loss(whole(x), y).detach()), rel=1e-6)


NAN: list[bool] = []
"""Whether the loss is NaN now."""


def nan_in_step_1(output: torch.Tensor, target: torch.Tensor) -> torch.Tensor:
    return norm_models.class_loss(output, target) * (float("nan") if NAN else 1.0)


# -- the update is PyTorch's -------------------------------------------------------------------------------------------------

MOMENTA = (0.1, 0.01, 0.3, 1 / 3, 1 / 7, None, 0.0, 1.0)
SHAPES = ((4, 8), (64, 33), (4, 8, 5), (4, 8, 5, 5), (2, 8, 32, 32), (16, 8, 1, 1), (3, 4, 2, 3, 5))
LAYOUTS = {
    "contiguous": lambda x: x,
    "channels last": lambda x: x.movedim(1, -1).contiguous().movedim(-1, 1),
    "channels first": lambda x: x.transpose(0, 1).contiguous().transpose(0, 1),
    "every second": lambda x: x.repeat_interleave(2, -1)[..., ::2],
    "every second channel": lambda x: x.repeat_interleave(2, 1)[:, ::2],
    "reversed": lambda x: x.permute(*reversed(range(x.dim()))).contiguous().permute(*reversed(range(x.dim()))),
    "expanded": lambda x: x[:1].expand_as(x),
}


def check_update(
    norm: Callable[[], nn.Module], shape, given: torch.dtype, dtype: torch.dtype, layout: str, scale: float
) -> None:
    """Six calls of PyTorch's norm, and of the same norm with stand-ins, whose calls are folded in two parts."""
    generator = torch.Generator().manual_seed(1)
    plain, own = norm().to(dtype), norm().to(dtype)
    calls: list[NormCall] = []
    recorded = NormCallRecorder("", own)
    recorded.take = calls.append
    for call in range(6):
        x = torch.randn(shape, dtype=torch.float64, generator=generator) * scale * (call + 1) + call
        x = LAYOUTS[layout](x.to(given))
        with torch.no_grad():
            assert torch.equal(plain(x), own(x))
        if call == 3:
            fold_norm_calls([(own, calls)])
            calls.clear()
    fold_norm_calls([(own, calls)])
    for (name, a), b in zip(plain.named_buffers(), own.buffers(), strict=True):
        assert torch.equal(a, b), f"{name} of {plain}, {shape} {given} {layout}: {a} {b}"


def test_norms_of_a_stage_are_folded_together_with_the_bits_of_each():
    made = [
        (partial(nn.BatchNorm1d, 8), 4, LAYOUTS["contiguous"]),
        (partial(nn.BatchNorm1d, 5), 4, LAYOUTS["contiguous"]),
        (partial(nn.BatchNorm1d, 3), 2, LAYOUTS["contiguous"]),  # called less often
        (partial(nn.BatchNorm1d, 8, momentum=None), 4, LAYOUTS["contiguous"]),
        (partial(nn.BatchNorm1d, 4, momentum=0.3), 4, LAYOUTS["reversed"]),
        (partial(nn.InstanceNorm1d, 4, affine=True, track_running_stats=True), 3, LAYOUTS["contiguous"]),
        (partial(nn.BatchNorm1d, 6), 0, LAYOUTS["contiguous"]),
    ]
    generator = torch.Generator().manual_seed(1)
    folded, norms = [], []
    for norm, times, layout in made:
        plain, own = norm(), norm()
        calls: list[NormCall] = []
        recorded = NormCallRecorder("", own)
        recorded.take = calls.append
        for call in range(times):
            x = layout(torch.randn(6, own.num_features, 7, generator=generator) * (call + 1))
            if call != 1:  # one call makes stand-ins of its own
                make_stand_ins([recorded])
            assert torch.equal(plain(x), own(x)) and recorded.stand_ins is None
        folded.append((own, calls))
        norms.append((plain, own))
    fold_norm_calls(folded)
    for plain, own in norms:
        assert all(torch.equal(a, b) for a, b in zip(plain.buffers(), own.buffers(), strict=True)), plain


NORMS = {2: nn.BatchNorm1d, 3: nn.BatchNorm1d, 4: nn.BatchNorm2d, 5: nn.BatchNorm3d}
INSTANCE_NORMS = {3: nn.InstanceNorm1d, 4: nn.InstanceNorm2d, 5: nn.InstanceNorm3d}
DTYPES = ((torch.float32, torch.float32), (torch.float64, torch.float64), (torch.bfloat16, torch.float32))


def check_updates(shapes, momenta, scales) -> None:
    for shape, momentum, (given, dtype), layout, scale in product(shapes, momenta, DTYPES, LAYOUTS, scales):
        check_update(partial(NORMS[len(shape)], shape[1], momentum=momentum), shape, given, dtype, layout, scale)
        if len(shape) > 2 and shape[2] > 1 and layout != "expanded":
            kind = INSTANCE_NORMS[len(shape)]
            made = partial(kind, shape[1], momentum=momentum, affine=given != dtype, track_running_stats=True)
            check_update(made, shape, given, dtype, layout, scale)


@pytest.mark.ci
def test_folded_statistics_are_those_of_the_norm_itself():
    check_updates(SHAPES[:1] + SHAPES[3:4], (0.1, 1 / 3, None), (1.0,))


@pytest.mark.full
@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_folded_statistics_are_those_of_the_norm_itself_in_every_case(shape):
    check_updates((shape,), MOMENTA, (1e-3, 1.0, 1e4))


# -- what is refused ---------------------------------------------------------------------------------------------------------


class ChecksAgain(nn.Module):
    """Writes a buffer inside an activation checkpoint."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(12, 12)
        self.register_buffer("calls", torch.zeros(()))

    def inner(self, x: torch.Tensor) -> torch.Tensor:
        self.calls += 1
        return self.linear(x).tanh()

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return torch.utils.checkpoint.checkpoint(self.inner, x, use_reentrant=False)


class Replaces(nn.Linear):
    """Replaces a buffer by one of another shape, or writes one in evaluation mode."""

    def __init__(self, how: str) -> None:
        super().__init__(12, 12)
        self.how = how
        self.register_buffer("seen", torch.zeros(3, dtype=torch.bool if how == "bool" else torch.float32))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        if self.how == "shape":
            self.seen = torch.zeros(4)
        elif self.how == "bool":
            self.seen |= True
        elif not self.training:
            self.seen += 1
        return super().forward(x)


@pytest.mark.parametrize(
    "layer, policy, words, cure",
    [
        (
            ChecksAgain,
            "last",
            "writes its buffer 'calls' when activation checkpointing runs its forward again",
            "plan.recompute",
        ),
        (lambda: Replaces("shape"), "sum", r"replaces its buffer 'seen', \[3\] torch.float32, by \[4\]", "keep its shape"),
        (lambda: Replaces("bool"), "sum", "'seen', which is bool", "model.buffers: last"),
        (lambda: Replaces("evaluation"), "last", "writes into its buffer 'seen' in forward", "in training only"),
    ],
)
def test_writes_that_no_policy_serves_are_refused_with_the_cure(layer, policy, words, cure):
    model = ModelConfig(function=lambda: nn.Sequential(nn.Flatten(), nn.Linear(75, 12), layer(), nn.Linear(12, 3)))
    validation = ValidationConfig(function=norm_models.Images, samples=6)
    spec = ugly_models.job("counters").replace(model=model.replace(buffers=policy), validation=validation)
    with (
        OneProcessRun(spec, ParallelPlan.mesh(dp=2, layers=4), "1f1b") as run,
        pytest.raises(UserCodeError, match=words) as error,
    ):
        run.step(0)
        run.validate(1)
    assert cure in error.value.cure


@pytest.mark.ci
def test_one_value_per_channel_is_an_error_with_its_place_and_cure_before_the_run_and_in_it():
    spec = ugly_models.job("norms", microbatches=4, batch_size=7)
    with pytest.raises(DataError, match=r"layer 'head'(.|\n)*Expected more than 1 value per channel") as error:
        preflight(spec)
    assert "batch_size >= 2 x microbatches" in error.value.cure
    with OneProcessRun(spec, ParallelPlan.mesh(pp=2, layers=8), "1f1b") as run, pytest.raises(UserCodeError) as late:
        run.step(0)
    assert "layer 'head'" in late.value.what and "Expected more than 1 value per channel" in late.value.what
    assert "GroupNorm" in late.value.cure


def test_a_line_says_which_bits_running_statistics_on_gpus_have():
    spec = ugly_models.job("norms")
    (line,) = (note for note in preflight(spec.replace(device="gpu")).notes if "running statistics" in note)
    assert "of stem.1 (BatchNorm2d)" in line and "used in evaluation only" in line
    assert not [note for note in preflight(spec).notes if "running statistics" in note]


def synchronised() -> nn.Module:
    """The model with `nn.SyncBatchNorm` in the place of PyTorch's own batch norms."""
    made = norm_models.norms()
    for part in made.modules():
        if type(part) in (nn.BatchNorm1d, nn.BatchNorm2d):
            part.__class__, part.process_group = nn.SyncBatchNorm, None
    return made


def test_synchronised_norms_are_read_as_batch_norms_with_a_line():
    """The same bits, running statistics too, under a plan with replicas."""
    given = synchronised()
    count = sum(type(part) is nn.SyncBatchNorm for part in given.modules())
    spec = ugly_models.job("norms")
    made = spec.replace(model=ModelConfig(function=synchronised))
    (line,) = [note for note in preflight(made).notes if "SyncBatchNorm" in note]
    assert line.startswith(f"{count} SyncBatchNorm are read as BatchNorm (") and "those of one microbatch" in line
    found = []
    for each in (spec, made):
        with OneProcessRun(each, ParallelPlan.mesh(dp=2, layers=8), "1f1b") as run:
            run.step(0), run.step(1)
            found.append({**run.parameters(), **run.buffers()})
    assert found[0].keys() == found[1].keys()
    assert all(torch.equal(x, y) for name, several in found[0].items() for x, y in zip(several, found[1][name], strict=True))


class OwnForward(nn.BatchNorm1d):
    """A norm with a forward of its own."""

    def __init__(self, how: str) -> None:
        super().__init__(4)
        self.how = how
        self.register_buffer("scale", torch.full((4,), 2.0))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        if self.how == "twice":
            return super().forward(super().forward(x))
        if self.how == "other factor":
            return F.batch_norm(x, self.running_mean, self.running_var, training=True, momentum=0.5 * self.momentum)
        return super().forward(F.batch_norm(x * self.scale, None, None, training=True).T.contiguous().T)


def test_a_norm_with_a_forward_of_its_own_is_followed_or_refused():
    plain, own = OwnForward("scaled"), OwnForward("scaled")
    calls: list[NormCall] = []
    NormCallRecorder("", own).take = calls.append
    for _ in range(3):
        x = torch.randn(5, 4)
        assert torch.equal(plain(x), own(x))
    fold_norm_calls([(own, calls)])
    assert [call.arithmetic for call in calls] == ["strided"] * 3
    assert all(torch.equal(a, b) for a, b in zip(plain.buffers(), own.buffers(), strict=True))
    for how, words in (("twice", r"an OwnForward \(a\.b\) .* statistics 2 times"), ("other factor", "another factor than its")):
        norm = OwnForward(how)
        NormCallRecorder("a.b", norm).take = calls.append
        with pytest.raises(UserCodeError, match=words):
            norm(torch.randn(5, 4))
        assert norm.momentum == 0.1 and torch.equal(norm.running_mean, torch.zeros(4))


@pytest.mark.parametrize("of", ["variance", "views"])
def test_norms_of_one_layer_that_share_statistics_are_refused(of: str):
    """They are folded together, each from the averages before the step."""
    one, other = nn.BatchNorm1d(12), nn.BatchNorm1d(12)
    if of == "variance":
        other.running_var = one.running_var
    else:
        both = torch.stack([torch.zeros(12), torch.ones(12)])
        for norm in (one, other):
            norm.running_mean, norm.running_var = both[0], both[1]
    with pytest.raises(ModelError, match=r"0\.0 and 0\.1 share the running statistics of a norm"):
        capture_layer_graph([nn.Sequential(one, other)], input="x")


def test_buffers_that_two_layers_share_are_refused_once_they_are_written():
    norm, counter = nn.BatchNorm1d(12), norm_models.Counters(12)
    with pytest.raises(ModelError, match=r"0\.0 and 1\.0 share the running statistics of a norm") as error:
        capture_layer_graph([nn.Sequential(norm), nn.Sequential(norm)], input="x")
    assert "a norm for each" in error.value.cure
    with pytest.raises(ModelError, match="0 and 1 share the running statistics"):
        capture_layer_graph([norm, norm], input="x")

    def shared() -> list[nn.Module]:
        return [nn.Flatten(), nn.Linear(75, 12), nn.Sequential(counter), nn.Sequential(counter), nn.Linear(12, 3)]

    spec = ugly_models.job("counters").replace(model=ModelConfig(function=shared, buffers="last"))
    with OneProcessRun(spec, ParallelPlan.mesh(layers=5), "1f1b") as run, pytest.raises(UserCodeError) as late:
        run.step(0)
    assert "layer '2' writes its buffer '0.samples', which another layer has too" in late.value.what


def test_an_instance_norm_whose_averages_pytorch_would_round_to_bfloat16_is_refused():
    norm = nn.InstanceNorm1d(4, track_running_stats=True)
    NormCallRecorder("1", norm).take = lambda call: None
    with pytest.raises(UserCodeError, match=r"an InstanceNorm1d \(1\) without weights gets torch.bfloat16") as error:
        norm(torch.randn(2, 4, 5).bfloat16())
    assert "affine=True" in error.value.cure


def test_the_contract_of_a_job_names_the_policy_only_where_it_is_set():
    spec = ugly_models.job("norms")
    assert "buffers" not in contract_of_job(spec)
    assert contract_of_job(spec.replace(model=spec.model.replace(buffers="sum"))) == contract_of_job(spec) | {"buffers": "sum"}


# -- whole jobs --------------------------------------------------------------------------------------------------------------


@pytest.mark.ci
def test_the_resnet_of_the_jobs_is_that_of_one_process_with_two_stages_and_two_replicas():
    job = load_job(str(Path(__file__).parents[2] / "jobs" / "resnet_digits.yaml"))
    spec = job.replace(steps=2, batch_size=8, validation=None)
    plan = job.to_plan(10)
    assert [stage.replicas for stage in plan.stages] == [2, 2] and job.schedule_name == "1f1b"
    want = reference.train(make_layer_graph(spec), spec)
    assert len(want.buffers) == 60 and want.buffers["blocks.7.bn2.num_batches_tracked"] == 8
    check(spec, plan, "1f1b", want)


@pytest.mark.ci
def test_layers_that_write_buffers_are_measured_and_may_be_recomputed():
    for name, policy in (("norms", "refuse"), ("counters", "last"), ("counters", "sum")):
        spec = ugly_models.job(name).replace(model=ModelConfig(function=ugly_models.MODELS[name][0], buffers=policy))
        graph = preflight(spec).graph
        batches = read_microbatches(spec, graph, one_microbatch_of_each_size(spec.batching))
        assert profile_layers(spec, graph, batches, None).recomputable == tuple(range(8))


def test_initial_values_by_name_reset_running_statistics_too():
    spec = ugly_models.job("norms", steps=2).replace(init="by-name")
    with OneProcessRun(spec, ParallelPlan.mesh(dp=2, pp=2, layers=8), "1f1b") as run:
        for step in range(2):
            run.step(step)
        assert run.buffers()["stem.1.num_batches_tracked"][0] == 2 * spec.microbatches
        assert run.buffers()["twice.norm.num_batches_tracked"][0] == 4 * spec.microbatches


def test_a_job_file_and_the_trainer_take_the_policy_with_the_model():
    given = {"steps": 1, "batch_size": 4, "microbatches": 2, "loss": "helpers.norm_models:class_loss"}
    data = {"function": "helpers.norm_models:Images"}
    model = {"function": "helpers.norm_models:counters", "buffers": "sum"}
    assert Trainer(model=model, data=data, **given).job.model.buffers == "sum"
    assert parse_job(dump_yaml({"model": model, "data": data, **given})).model.buffers == "sum"
    assert Trainer(model="helpers.norm_models:counters", data=data, **given).job.model.buffers == "refuse"
    with pytest.raises(ConfigError, match="buffers"):
        Trainer(model=model | {"buffers": "first"}, data=data, **given)
