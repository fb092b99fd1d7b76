"""A convolution whose weight gradient is put off has the bits of torch's own backward."""

from __future__ import annotations

import random
from collections import OrderedDict
from collections.abc import Callable
from dataclasses import dataclass, field

import pytest
import torch
from helpers import drawn_layouts, pretend, ugly_models
from helpers.late_device import World
from helpers.late_runs import late
from helpers.on_shards import graph_of, on_shards
from helpers.parity import check_gradients, different_gradients
from helpers.reference import train
from helpers.shard_grid import different, run_job
from torch import Tensor, nn
from torch.nn.utils.parametrizations import weight_norm
from torch.utils.checkpoint import checkpoint

from raypar.job import Job, PrecisionConfig
from raypar.model.graph import Graph
from raypar.model.split_backward import Stash, defer_weight_gradients
from raypar.model.tensor_parallel.build_shard_modules import materialise_shard
from raypar.model.tensor_parallel.compute_shard_layout import compute_shard_layout
from raypar.model.tensor_parallel.shard_group import ShardGroup
from raypar.model.tensor_parallel.split_shards_backward import defer_sharded_weight_gradients
from raypar.plan import ParallelPlan
from raypar.schedule import registry
from raypar.worker.measure_profile import one_microbatch_of_each_size, profile_layers, read_microbatches
from raypar.worker.run_in_one_process import OneProcessRun

CONVOLUTIONS = {1: (nn.Conv1d, nn.ConvTranspose1d), 2: (nn.Conv2d, nn.ConvTranspose2d), 3: (nn.Conv3d, nn.ConvTranspose3d)}
CHANNELS_LAST = {2: torch.channels_last, 3: torch.channels_last_3d}
DTYPES = (torch.float32, torch.float64, torch.bfloat16)
S = ugly_models.SEQ


# -- one layer ---------------------------------------------------------------------------------------------------------------


@dataclass
class Drawn:
    """A convolution and what it reads, drawn by lot."""

    seed: int
    layer: nn.Module = field(init=False)
    input: Tensor = field(init=False)
    more: tuple[tuple[int, ...], ...] = ()
    """Further arguments of the call: the size of the output."""

    def __post_init__(self) -> None:
        dice, dims = random.Random(self.seed), random.Random(self.seed).choice([1, 2, 2, 3])
        torch.manual_seed(self.seed)
        transposed, dtype = dice.random() < 0.35, dice.choice(DTYPES)
        groups = dice.choice([1, 1, 2, 3])
        given, made = (groups * dice.choice([1, 2, 3, 8]) for _ in range(2))
        if dice.random() < 0.2:
            given = groups = dice.choice([3, 8])
            made = given * dice.choice([1, 2])
        kernel, stride, dilation = (tuple(dice.choice(some) for _ in range(dims)) for some in ((1, 2, 3), (1, 1, 2), (1, 1, 2)))
        options = {"stride": stride, "dilation": dilation, "groups": groups, "bias": dice.random() < 0.5, "dtype": dtype}
        padding: str | tuple[int, ...] = tuple(dice.choice([0, 1, 2]) for _ in range(dims))
        if transposed:
            options["output_padding"] = tuple(dice.choice([0, max(s, d) - 1]) for s, d in zip(stride, dilation, strict=True))
        else:
            options["padding_mode"] = dice.choice(["zeros", "zeros", "zeros", "reflect", "replicate", "circular"])
            if set(stride) == {1} and dice.random() < 0.5:
                padding = dice.choice(["same", "valid"])
        self.layer = CONVOLUTIONS[dims][transposed](given, made, kernel, padding=padding, **options)
        shape = [dice.randint(6, {1: 40, 2: 17, 3: 9}[dims]) for _ in range(dims)]
        batch = [] if dice.random() < 0.1 and (dims > 1 or not transposed) else [dice.choice([1, 2, 3, 16])]
        self.input = torch.randn(*batch, given, *shape, dtype=dtype)
        if dims > 1 and batch and dice.random() < 0.5:
            self.input = self.input.to(memory_format=CHANNELS_LAST[dims])
        if transposed and dice.random() < 0.3:
            sizes = zip(self.layer(self.input).shape[-dims:], options["output_padding"], stride, strict=True)
            self.more = (tuple(size - more + dice.randrange(s) for size, more, s in sizes),)

    def __str__(self) -> str:
        return f"{self.seed}: {self.layer} of {list(self.input.shape)} {self.input.stride()}"

    def gradient(self, output: Tensor) -> Tensor:
        """As different layers hand it on."""
        dice = random.Random(self.seed)
        if dice.random() < 0.2:
            return torch.randn((), dtype=output.dtype).expand(output.shape)
        found = torch.randn(output.shape, dtype=output.dtype, generator=torch.Generator().manual_seed(self.seed))
        memory = CHANNELS_LAST.get(output.dim() - 2)
        return found if memory is None or dice.random() < 0.5 else found.to(memory_format=memory)


@pytest.mark.parametrize("first", [0, *(pytest.param(n, marks=pytest.mark.ci) for n in range(1, 20))])
def test_output_and_all_gradients_are_those_of_autograd(first: int):
    for seed in range(25 * first, 25 * first + 25):
        torch.set_num_threads(2 if seed % 10 == 0 else 1)
        drawn, stash = Drawn(seed), Stash()
        plain = drawn.input.detach().requires_grad_()
        want = drawn.layer(plain, *drawn.more)
        gradient = drawn.gradient(want)
        want.backward(gradient)
        wanted = [p.grad for p in drawn.layer.parameters()]
        drawn.layer.zero_grad()

        assert defer_weight_gradients(drawn.layer, lambda stash=stash: stash) == [drawn.layer], drawn
        split = drawn.input.detach().requires_grad_()
        got = drawn.layer(split, *drawn.more)
        got.backward(gradient)
        assert all(p.grad is None for p in drawn.layer.parameters()), drawn
        assert torch.equal(got, want) and got.stride() == want.stride(), drawn
        assert torch.equal(split.grad, plain.grad) and split.grad.stride() == plain.grad.stride(), drawn
        found = [each for deferred in stash for each in deferred.gradients()]
        for (parameter, own), p, theirs in zip(found, drawn.layer.parameters(), wanted, strict=True):
            assert parameter is p and torch.equal(own, theirs) and own.stride() == theirs.stride(), drawn


def test_between_the_halves_a_convolution_keeps_its_input_and_the_gradient_of_its_output():
    layer, stash = nn.Conv2d(3, 5, 3), Stash()
    defer_weight_gradients(layer, lambda: stash)
    x = torch.randn(2, 3, 8, 8, requires_grad=True)
    layer(x.sin()).sin().sum().backward()
    ((gradient, read),) = (deferred.kept for deferred in stash)
    assert gradient.shape == (2, 5, 6, 6) and read.shape == x.shape and read.grad_fn is None


class Own(nn.Conv2d):
    def _conv_forward(self, input: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
        return super()._conv_forward(input, weight * 2, bias)


def test_only_plain_trainable_convolutions_are_split():
    frozen = nn.Conv2d(2, 2, 1).requires_grad_(False)
    shared, twin = nn.Conv2d(2, 2, 1), nn.Conv2d(2, 2, 1)
    twin.weight = shared.weight
    plain, up = nn.Conv2d(2, 2, 1, bias=False), nn.ConvTranspose3d(2, 2, 1)
    layer = nn.Sequential(plain, Own(2, 2, 1), frozen, shared, twin, weight_norm(nn.Conv2d(2, 2, 1)), up)
    assert defer_weight_gradients(layer, list) == [plain, up]


def test_what_pytorch_refuses_has_pytorchs_error_and_complex_numbers_are_whole():
    def error_of(layer: nn.Module, *given: object) -> str:
        with pytest.raises((RuntimeError, ValueError)) as caught:
            layer(*given)
        return str(caught.value)

    for make, given in [
        (lambda: nn.Conv2d(3, 4, 3), (torch.zeros(2, 3),)),
        (lambda: nn.Conv2d(3, 4, 3), (torch.zeros(2, 5, 8, 8),)),
        (lambda: nn.Conv1d(3, 4, 3), (torch.zeros(2, 3, 8, dtype=torch.float64),)),
        (lambda: nn.ConvTranspose1d(3, 4, 3, stride=2), (torch.zeros(2, 3, 8), [50])),
        (lambda: nn.ConvTranspose1d(3, 4, 3, stride=2), (torch.zeros(2, 3, 8), [18, 1, 1, 1])),
    ]:
        plain, split, stash = make(), make(), Stash()
        defer_weight_gradients(split, lambda stash=stash: stash)
        assert error_of(split, *given) == error_of(plain, *given)
    turned, stash = nn.Conv1d(2, 3, 2, dtype=torch.complex64), Stash()
    defer_weight_gradients(turned, lambda: stash)
    turned(torch.randn(1, 2, 5, dtype=torch.complex64)).abs().sum().backward()
    assert not stash and turned.weight.grad is not None


def test_a_gradient_that_a_layer_takes_itself_can_be_differentiated_again():
    def run(layer: nn.Module) -> list[Tensor]:
        x = torch.linspace(-1, 1, 24).view(1, 2, 12).requires_grad_()
        (of_weight,) = torch.autograd.grad(layer(x).sin().sum(), layer.weight, create_graph=True)
        return list(torch.autograd.grad(of_weight.square().sum(), [x, layer.weight]))

    torch.manual_seed(1)
    layer, stash = nn.Conv1d(2, 3, 3), Stash()
    want = run(layer)
    defer_weight_gradients(layer, lambda: stash)
    assert all(map(torch.equal, run(layer), want)) and not stash


# -- whole runs --------------------------------------------------------------------------------------------------------------


class Images(nn.Module):
    """x [mb, seq] -> the same, by convolutions of images that it makes of them."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Conv2d(1, 4, 3, padding=1, padding_mode="circular")
        self.last = nn.ConvTranspose2d(4, 1, 2, stride=2, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        images = x.view(len(x), 1, 1, S).expand(-1, -1, 4, -1).contiguous(memory_format=torch.channels_last)
        return x + self.last(self.first(images).relu_()).mean((1, 2))[:, :S]


class Recomputed(Images):
    """Runs its convolutions again in backward, when other microbatches have gone forward since."""

    def forward(self, x: Tensor) -> Tensor:
        return checkpoint(super().forward, x, use_reentrant=True)


class Thrice(nn.Module):
    """Calls a convolution three times, once without samples."""

    def __init__(self) -> None:
        super().__init__()
        self.conv = nn.Conv1d(1, 1, 3, padding="same")

    def forward(self, x: Tensor) -> Tensor:
        y = self.conv(self.conv(x.unsqueeze(1)).tanh()).squeeze(1)
        return y + self.conv(y[0].unsqueeze(0))


class Autocast(Images):
    """In bfloat16, in a context of its own."""

    def forward(self, x: Tensor) -> Tensor:
        with torch.autocast("cpu", torch.bfloat16):
            images = x.view(len(x), 1, 1, S).expand(-1, -1, 4, -1)
            y = self.last(self.first(self.last(self.first(images))[:, :, :4])).mean((1, 2))[:, :S]
        return x + y.float()


def check_bits(graph: Graph, job: Job, plan: ParallelPlan, schedule: str, splits: int) -> None:
    """Gradients and norms are those of one plain process, and each stage splits so many convolutions at least."""
    want = train(graph, job)
    with OneProcessRun(job, plan, schedule, graph=graph) as run:
        for step in range(job.steps):
            reports = run.step(step)
            assert not different_gradients(run, want, step)
            assert {r.norm for r in reports} == {want.norms[step]}
        for stage in (stage for core in run.cores for stage in core.stages.values()):
            found = [p for p in stage.parameters.values() if p.dim() > 2 and id(p) in stage.deferred.parameters]
            assert len(found) >= splits


@pytest.mark.part(8)
@pytest.mark.parametrize("middle", [Images, Recomputed, Thrice, Autocast])
@pytest.mark.parametrize("schedule", ["zb-h1", "zb-v"])
def test_zero_bubble_has_the_bits_of_one_process(middle: Callable[[], nn.Module], schedule: str):
    graph = Graph.sequential([(name, middle) for name in "abcd"] + [("e", lambda: nn.Linear(S, 1))], input="x")
    job = ugly_models.job("plain", microbatches=7, steps=2, virtual_replicas=2)
    chunks = registry.resolve_chunks_per_worker(schedule)
    plan = ParallelPlan.of((1, 1), layers=5, chunks=chunks, placement=registry.placement_of_schedule(schedule))
    check_bits(graph, job, plan, schedule, 1)


def resnet_job(**given: object) -> Job:
    return drawn_layouts.job_of("resnet-18").replace(**given)


def pipeline_of(graph: Graph, schedule: str, **more: object) -> ParallelPlan:
    """Two workers."""
    chunks, placement = registry.resolve_chunks_per_worker(schedule), registry.placement_of_schedule(schedule)
    return ParallelPlan.of((1, 1), layers=len(graph.layers), chunks=chunks, placement=placement, **more)


PRECISIONS = {
    "float32": None,
    "autocast": PrecisionConfig(compute="bf16"),
    "bf16 parameters": PrecisionConfig(parameters="bf16", master="float32"),
}


@pytest.mark.part(12)
@pytest.mark.parametrize("again", [False, True])
@pytest.mark.parametrize("precision", PRECISIONS)
@pytest.mark.parametrize("schedule", ["zb-v", "zb-h1"])
def test_a_residual_network_has_the_bits_of_one_worker(schedule: str, precision: str, again: bool):
    job, graph = resnet_job(precision=PRECISIONS[precision]), drawn_layouts.graph_of("resnet-18")
    layers = len(graph.layers)
    want = run_job(job, graph, ParallelPlan.mesh(layers=layers), "gpipe")
    plan = pipeline_of(graph, schedule, recompute=tuple(range(0, layers, 2)) if again else ())
    assert not list(different(run_job(job, graph, plan, schedule), want))


@pytest.mark.part(2)
@pytest.mark.parametrize("schedule", ["zb-v", "zb-h1"])
def test_a_residual_network_has_the_bits_of_the_plain_module(schedule: str):
    job, graph = drawn_layouts.job_of("resnet-18"), drawn_layouts.graph_of("resnet-18")
    want = drawn_layouts.train_plainly("resnet-18")
    with OneProcessRun(job, pipeline_of(graph, schedule), schedule, graph=graph) as run:
        check_gradients(run, want)


def chain() -> nn.Sequential:
    """Convolutions that are cut in all ways."""
    layers = [
        nn.Conv2d(3, 8, 3, padding=1, padding_mode="reflect"),
        nn.Conv2d(8, 8, 3, padding="same", groups=4),
        nn.Conv2d(8, 5, 2),
        nn.Conv2d(5, 4, 3, stride=2),
        nn.ConvTranspose2d(4, 3, 3, stride=2, output_padding=1),
    ]
    return nn.Sequential(OrderedDict([("net", nn.Sequential(*layers))]))


CUT = {f"net.{n}": style for n, style in enumerate(["column:4", "groups", "row:4", "spatial-gathered", "spatial-gathered"])}
PUT_OFF = [1, 2, 1, 2, 2]
"""By layer, last first: how many parameters' gradients. A row's bias, and a transposed one's by rows, are added apart."""


@pytest.mark.parametrize("shards", [2, 3])
def test_on_shards_all_kinds_of_convolutions_put_off_their_weight_gradients(shards: int):
    graph = graph_of(chain)
    layout = compute_shard_layout(graph, shards, CUT)
    x = torch.randn(3, 3, 9, 11, generator=torch.Generator().manual_seed(2))

    def work(group: ShardGroup) -> list[dict[str, Tensor]]:
        found = []
        for put_off in (False, True):
            (module,) = materialise_shard(graph, 0, 1, layout=layout, group=group, seed=1, dtype=torch.float32).values()
            stash, value = Stash(), x.clone().requires_grad_()
            if put_off:
                assert len(defer_sharded_weight_gradients(module, lambda stash=stash: stash)) == 5
            module(value).sin().sum().backward()
            names = {id(p): name for name, p in module.named_parameters()}
            gradients = {name: p.grad for name, p in module.named_parameters() if p.grad is not None}
            late = [deferred.gradients() for deferred in stash]
            assert [len(pairs) for pairs in late] == (PUT_OFF if put_off else [])
            gradients |= {names[id(parameter)]: gradient for pairs in late for parameter, gradient in pairs}
            found.append({"input": value.grad, **gradients})
        return found

    for plain, split in on_shards(shards, work)[0]:
        assert plain.keys() == split.keys() and len(plain) == 11
        assert all(torch.equal(plain[name], split[name]) for name in plain)


@pretend.NEEDED
@pytest.mark.part(2)
@pytest.mark.parametrize("schedule", ["zb-v", "zb-h1"])
def test_a_pretended_device_has_the_bits_of_one_worker(schedule: str):
    graph = Graph.sequential([(name, Images) for name in "abcd"] + [("e", lambda: nn.Linear(S, 1))], input="x")
    job = ugly_models.job("plain", microbatches=5, steps=2)

    def parameters(plan: ParallelPlan, schedule: str) -> dict[str, list[Tensor]]:
        with (
            pretend.differentiable(),
            World(1, plan.world) as world,
            late(world),
            OneProcessRun(job, plan, schedule, graph=graph, device=pretend.device()) as run,
        ):
            for step in range(job.steps):
                run.step(step)
            return {name: [copy.cpu() for copy in copies] for name, copies in run.parameters().items()}

    want, got = parameters(ParallelPlan.mesh(layers=5), "1f1b"), parameters(pipeline_of(graph, schedule), schedule)
    assert want.keys() == got.keys()
    assert all(torch.equal(copy, want[name][0]) for name, copies in got.items() for copy in copies)


# -- what a plan knows of it -------------------------------------------------------------------------------------------------


def test_a_profile_has_the_weight_gradients_of_convolutions_apart_and_the_bytes_that_they_wait_in():
    job, graph = drawn_layouts.job_of("resnet-18"), drawn_layouts.graph_of("resnet-18")
    measured = profile_layers(job, graph, read_microbatches(job, graph, one_microbatch_of_each_size(job.batching)))
    by_name = {layer.name: (layer, kept) for layer, kept in zip(measured.layers, measured.kept[0].layers, strict=True)}
    layer, kept = by_name["blocks.0"]
    assert layer.weight_ms > 0.02 * layer.backward_ms  # beside other processes times are rough: with nothing to do it is less
    value = measured.kept[0].samples * 8 * 16 * 16 * 4
    assert [measured.kept[0].sizes[storage] for storage in kept.stash] == [value] * 4  # of two convolutions
    assert set(kept.stash) & {read.storage for read in kept.reads}  # what it reads is kept once
