"""Convolutions cut by channels have the bits of the same shards in one process, and the numbers of the whole layers."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable
from typing import NamedTuple

import pytest
import torch
from helpers.networks_on_shards import (
    MIXED_PRECISIONS,
    SHARDS,
    check_gradients,
    check_layouts,
    check_numbers_of_whole,
    check_recomputation_and_zero_bubble,
    check_same,
    numbers,
    slices_of,
    steps_of,
    two_steps,
)
from helpers.on_shards import SEED, check, graph_of, sharded
from helpers.same_shards_of_convolutions import SameShards
from helpers.virtual_shards import divided
from torch import Tensor, nn

from raypar.errors import ModelError, PlanError
from raypar.job import Job
from raypar.model.materialise import materialise
from raypar.model.tensor_parallel.build_shard_modules import shard_slice_of
from raypar.model.tensor_parallel.compute_shard_layout import compute_shard_layout
from raypar.model.tensor_parallel.meta_check import check_shards_on_meta
from raypar.plan import ParallelPlan
from raypar.plan.seeds import seed_of
from raypar.worker.layer_graph_of_job import make_layer_graph
from raypar.worker.run_in_one_process import OneProcessRun


class Chain(NamedTuple):
    """Modules in a row with their styles, and the shape of their input."""

    modules: Callable[[], list[nn.Module]]
    styles: tuple[str, ...]
    input: tuple[int, ...]

    def make(self) -> nn.Sequential:
        return nn.Sequential(OrderedDict([("net", nn.Sequential(*self.modules()))]))

    @property
    def by_name(self) -> dict[str, str]:
        return {f"net.{number}": style for number, style in enumerate(self.styles) if style}


def pair(first: Callable[..., nn.Module], second: Callable[..., nn.Module], *input: int) -> Chain:
    return Chain(lambda: [first(4, 7), nn.ReLU(), second(7, 5)], ("column", "", "row"), input)


def conv(kind: type[nn.Module], *args: int, **kwargs: object) -> Callable[..., nn.Module]:
    return lambda given, made: kind(given, made, *args, **kwargs)


K2 = nn.Conv2d
T2 = nn.ConvTranspose2d
PAIRS = {
    "1x1": pair(conv(K2, 1), conv(K2, 1), 3, 4, 6, 5),
    "3x3": pair(conv(K2, 3, padding=1), conv(K2, 3), 3, 4, 6, 5),
    "3x1": pair(conv(K2, (3, 1), padding=(1, 0)), conv(K2, (1, 3), bias=False), 3, 4, 6, 5),
    "stride 2": pair(conv(K2, 3, stride=2), conv(K2, 3, stride=2, padding=1), 2, 4, 9, 8),
    "dilation 2": pair(conv(K2, 3, dilation=2), conv(K2, 3, dilation=(1, 2), padding="same"), 2, 4, 9, 8),
    "circular": pair(
        conv(K2, 3, padding=1, padding_mode="circular"), conv(K2, 3, padding="same", padding_mode="reflect"), 2, 4, 6, 5
    ),
    "1 dim": pair(conv(nn.Conv1d, 3, padding=1), conv(nn.Conv1d, 4, padding="same", padding_mode="replicate"), 3, 4, 9),
    "3 dims": pair(conv(nn.Conv3d, 3, padding=1), conv(nn.Conv3d, (1, 2, 3)), 2, 4, 4, 5, 4),
    "transposed": pair(conv(T2, 3, stride=2, output_padding=1), conv(T2, 2, padding=1), 2, 4, 4, 5),
    "transposed, 1 dim": pair(conv(nn.ConvTranspose1d, 3), conv(nn.ConvTranspose1d, 3, dilation=2), 2, 4, 7),
    "transposed, 3 dims": pair(conv(nn.ConvTranspose3d, 2, bias=False), conv(nn.ConvTranspose3d, 2), 2, 4, 3, 2, 3),
}

NETS = {
    "norm, pool, dense": Chain(
        lambda: [
            nn.Conv2d(3, 12, 3, padding=1),
            nn.BatchNorm2d(12),
            nn.ReLU(),
            nn.MaxPool2d(2),
            nn.Conv2d(12, 9, 3, padding=1, stride=2),
            nn.BatchNorm2d(9),
            nn.Conv2d(9, 8, 1),
            nn.GroupNorm(4, 8),
            nn.AdaptiveAvgPool2d(2),
            nn.Flatten(1),
            nn.Linear(32, 10),
        ],
        ("column", "", "", "", "row", "", "column:4", "", "", "", "row:4"),
        (4, 3, 8, 8),
    ),
    "dense in pairs": Chain(
        lambda: [
            nn.Conv2d(3, 7, 3),
            nn.AvgPool2d(2),
            nn.Flatten(1),
            nn.Linear(63, 6),
            nn.Linear(6, 8),
            nn.Tanh(),
            nn.Linear(8, 3),
        ],
        ("column", "", "", "row:7", "column", "", "row"),
        (4, 3, 8, 8),
    ),
    "groups": Chain(
        lambda: [
            nn.Conv2d(4, 12, 1),
            nn.Hardswish(),
            nn.Conv2d(12, 24, 3, padding=1, groups=6),
            nn.InstanceNorm2d(24, affine=True),
            nn.Conv2d(24, 5, 1),
        ],
        ("column:6", "", "groups", "", "row:6"),
        (3, 4, 6, 5),
    ),
    "depthwise": Chain(
        lambda: [nn.Conv2d(4, 8, 1), nn.Conv2d(8, 8, 3, stride=2, padding=1, groups=8), nn.SiLU(), nn.Conv2d(8, 5, 1)],
        ("column", "groups", "", "row"),
        (4, 4, 6, 5),
    ),
    "transposed groups": Chain(
        lambda: [nn.Conv2d(4, 6, 1), nn.ConvTranspose2d(6, 12, 3, groups=3), nn.Upsample(scale_factor=2), nn.Conv2d(12, 5, 1)],
        ("column:3", "groups", "", "row:3"),
        (2, 4, 3, 3),
    ),
}


def squares(output: Tensor, target: Tensor) -> Tensor:
    return (output * output).sum() + output[0].sum()


def check_chain(chain: Chain, shards: int) -> None:
    """Numbers of the whole layers in float64; bits of the same shards in float32."""
    check(chain.make, squares, numbers(*chain.input), torch.zeros(1), shards, styles=chain.by_name)
    check_bits(chain, chain.make, shards)


def check_bits(
    chain: Chain, make: Callable[[], nn.Module], shards: int, call: Callable[[SameShards, Tensor], Tensor] = SameShards.run
) -> None:
    """Bits of the same shards in float32. `make`: the chain as a layer; `call`: runs the same shards."""
    x, y = numbers(*chain.input, dtype=torch.float32), torch.zeros(1)
    graph = graph_of(make)
    layout = compute_shard_layout(graph, shards, chain.by_name)
    runs, _ = sharded(graph, layout, squares, x, y, dtype=torch.float32)
    modules = materialise(graph, 0, 1, seed=SEED, dtype=torch.float32)["net"]
    plain = SameShards(list(modules.children()), chain.styles, shards)
    leaf = x.clone().requires_grad_()
    loss = squares(call(plain, leaf), y)
    loss.backward()
    for shard, run in enumerate(runs):
        assert torch.equal(run.loss, loss) and torch.equal(run.inputs, leaf.grad)
        want = {f"net.{path}": gradient for path, gradient in plain.gradients(shard).items()}
        check_gradients(run, want)


@pytest.mark.part(6)
@pytest.mark.parametrize("shards", SHARDS)
@pytest.mark.parametrize("name", PAIRS)
def test_a_column_and_a_row_have_the_bits_of_the_same_shards(name: str, shards: int):
    check_chain(PAIRS[name], shards)


@pytest.mark.part(3)
@pytest.mark.parametrize("shards", SHARDS)
@pytest.mark.parametrize("name", NETS)
def test_what_lies_between_is_computed_by_channels(name: str, shards: int):
    check_chain(NETS[name], shards)


class InAutocast(nn.Sequential):
    """Modules in a row, which compute in bfloat16."""

    def forward(self, x: Tensor) -> Tensor:
        with torch.autocast("cpu", torch.bfloat16, cache_enabled=False):
            return super().forward(x)


PADDED = {
    "column and row": Chain(
        lambda: [
            nn.Conv2d(4, 7, 3, padding=1, padding_mode="circular"),
            nn.ReLU(),
            nn.Conv2d(7, 5, 3, padding="same", padding_mode="reflect", bias=False),
        ],
        ("column", "", "row"),
        (2, 4, 6, 5),
    ),
    "groups": Chain(
        lambda: [
            nn.Conv2d(4, 8, 3, padding=1, padding_mode="reflect"),
            nn.Conv2d(8, 8, 3, padding=1, groups=8, padding_mode="replicate"),
            nn.SiLU(),
            nn.Conv2d(8, 5, 3, padding=1, padding_mode="circular", bias=False),
        ],
        ("column", "groups", "", "row"),
        (4, 4, 6, 5),
    ),
}


@pytest.mark.parametrize("shards", [1, 2])
@pytest.mark.parametrize("name", PADDED)
def test_under_autocast_an_input_is_padded_before_it_is_cast(name: str, shards: int):
    """So the gradients of what is copied into the padding are added in float32."""
    chain = PADDED[name]

    def in_autocast(plain: SameShards, x: Tensor) -> Tensor:
        with torch.autocast("cpu", torch.bfloat16, cache_enabled=False):
            return plain.run(x)

    check_bits(chain, lambda: nn.Sequential(OrderedDict([("net", InAutocast(*chain.modules()))])), shards, in_autocast)


# -- whole runs ----------------------------------------------------------------------------------------------------------------


class Images:
    """Sample i: an image and its class."""

    def __init__(self, dtype: str = "float32") -> None:
        self._dtype = getattr(torch, dtype)

    def __len__(self) -> int:
        return 24

    def __getitem__(self, index: int) -> tuple[Tensor, Tensor]:
        generator = torch.Generator().manual_seed(index)
        return torch.randn(3, 8, 8, generator=generator).to(self._dtype), torch.randint(0, 5, (), generator=generator)


class Network(nn.Module):
    """Convolutions, norms, pooling, a depthwise convolution, dropouts, dense layers, in a forward of its own."""

    def __init__(self, p: float = 0.2) -> None:
        super().__init__()
        self.conv1, self.bn1, self.pool = nn.Conv2d(3, 12, 3, padding=1), nn.BatchNorm2d(12), nn.MaxPool2d(2)
        self.depthwise, self.bn2 = nn.Conv2d(12, 12, 3, padding=1, groups=12, bias=False), nn.BatchNorm2d(12, momentum=None)
        self.conv2, self.bn3 = nn.Conv2d(12, 6, 1, bias=False), nn.BatchNorm2d(6)
        self.conv3, self.norm, self.drop = nn.Conv2d(6, 12, 3), nn.GroupNorm(6, 12), nn.Dropout2d(p)
        self.relu = nn.ReLU(inplace=True)
        self.fc1, self.fc2, self.fc3 = nn.Linear(48, 8), nn.Linear(8, 12), nn.Linear(12, 5)

    def forward(self, x: Tensor) -> Tensor:
        x = self.pool(self.relu(self.bn1(self.conv1(x))))
        x = self.relu(self.bn2(self.depthwise(x)))
        x = self.bn3(self.conv2(x))
        x = self.drop(self.relu(self.norm(self.conv3(x))))
        x = self.fc1(torch.flatten(x, 1)).relu()
        return self.fc3(self.fc2(x).relu())


STYLES = {
    "conv1": "column",
    "depthwise": "groups",
    "conv2": "row",
    "conv3": "column",
    "fc1": "row",
    "fc2": "column",
    "fc3": "row",
}


def job_of(model: object = Network, styles: dict[str, str] = STYLES, data: object = Images, **given: object) -> Job:
    return two_steps(model, data, styles, **given)


class TensorsOfChain:
    """Samples for a chain: inputs of its shape, all of one batch."""

    def __init__(self, name: str) -> None:
        self._x = numbers(*NETS[name].input, dtype=torch.float32)

    def __len__(self) -> int:
        return len(self._x)

    def __getitem__(self, index: int) -> tuple[Tensor, Tensor]:
        return self._x[index], torch.zeros(())


def chain_of(name: str) -> nn.Module:
    return NETS[name].make()


@pytest.mark.part(6)
@pytest.mark.parametrize("division", [(2,), (1, 1), (3,), (2, 1), (1, 2), (1, 1, 1)], ids=str)
@pytest.mark.parametrize("name", ["norm, pool, dense", "depthwise"])
def test_any_workers_have_the_bits_of_the_same_shards_built_by_hand(name: str, division: tuple[int, ...]):
    chain, shards = NETS[name], sum(division)
    job = job_of(
        (chain_of, {"name": name}),
        chain.by_name,
        data=(TensorsOfChain, {"name": name}),
        loss=squares,
        steps=1,
        batch_size=chain.input[0],
        microbatches=1,
    )
    graph = make_layer_graph(job)
    plan = divided(ParallelPlan.mesh(tp=len(division), layers=1), division)
    torch.set_num_threads(1)
    modules = materialise(graph, 0, 1, seed=job.seed, dtype=torch.float32)["net"]
    plain = SameShards(list(modules.children()), chain.styles, shards)
    order = torch.randperm(chain.input[0], generator=torch.Generator().manual_seed(seed_of(job.seed, "epoch", 0)))
    squares(plain.run(numbers(*chain.input, dtype=torch.float32)[order]), torch.zeros(())).backward()
    with OneProcessRun(job, plan, "1f1b", graph=graph) as run:
        run.step(0)
        found, buffers = run.gradients(), run.buffers()
    for shard in range(shards):
        for path, gradient in plain.gradients(shard).items():
            got = found[f"net.{path}"][shard]
            assert got is not None and torch.equal(got, gradient), (path, shard)
    wanted = {f"net.{path}": buffer for path, buffer in plain.buffers().items()}
    assert buffers.keys() == wanted.keys()
    assert all(torch.equal(copy, wanted[name]) for name, copies in buffers.items() for copy in copies)


@pytest.mark.part(4)
@pytest.mark.parametrize("shards", SHARDS)
@pytest.mark.parametrize("mesh", [{"pp": 2}, {"pp": 3, "dp": 2}], ids=str)
def test_a_captured_network_has_the_same_bits_in_every_layout(mesh: dict[str, int], shards: int):
    job = job_of()
    check_layouts(job, shards, mesh)


@pytest.mark.ci
@MIXED_PRECISIONS
def test_bf16_recomputation_and_zero_bubble_have_the_same_bits_in_every_layout(precision: dict[str, str]):
    check_recomputation_and_zero_bubble(job_of(precision=precision))


@pytest.mark.part(2)
@pytest.mark.parametrize("shards", SHARDS)
def test_a_captured_network_has_the_numbers_of_the_whole_one(shards: int):
    job = job_of((Network, {"p": 0.0}), dtype="float64", data=(Images, {"dtype": "float64"}))
    check_numbers_of_whole(job, shards)


class Uneven(nn.Module):
    """Five groups of channels, which neither two nor three shards share evenly, and their flattened pixels."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.grouped = nn.Conv2d(3, 20, 3), nn.Conv2d(20, 10, 3, groups=5)
        self.norm, self.flat, self.dense = nn.BatchNorm2d(10), nn.Flatten(1), nn.Linear(160, 5)

    def forward(self, x: Tensor) -> Tensor:
        return self.dense(self.flat(self.norm(self.grouped(self.first(x)).relu())))


@pytest.mark.part(2)
@pytest.mark.parametrize("shards", SHARDS)
def test_values_between_layers_may_be_in_uneven_parts(shards: int):
    job = job_of(Uneven, {"first": "column:5", "grouped": "groups", "dense": "row:5"}, steps=1)
    layers = len(make_layer_graph(job).layers)
    wanted = slices_of(steps_of(job, ParallelPlan.mesh(tp=shards, layers=layers)))
    check_same(steps_of(job, ParallelPlan.mesh(tp=shards, pp=4, layers=layers)), wanted)
    whole = steps_of(job, ParallelPlan.mesh(layers=layers))
    assert torch.allclose(wanted["norm.running_var"][0], whole.buffers()["norm.running_var"][0], rtol=1e-5)
    for name, copies in wanted.items():
        if name in whole.parameters() and len(copies) == shards:
            layout = compute_shard_layout(make_layer_graph(job), shards, dict(job.styles))
            for shard, got in enumerate(copies):
                want = shard_slice_of(layout, name, whole.parameters()[name][0], shard)
                assert torch.allclose(got, want, rtol=1e-4, atol=1e-6), name


class Joined(nn.Module):
    """Two convolutions side by side, joined; slopes, dropout and weights by channel (squeeze and excitation)."""

    def __init__(self) -> None:
        super().__init__()
        self.a, self.b, self.c = nn.Conv2d(4, 6, 3, padding=1), nn.Conv2d(4, 6, 1), nn.Conv2d(12, 4, 1)
        self.act, self.drop = nn.PReLU(12), nn.Dropout2d(0.3)
        self.squeeze, self.excite = nn.Conv2d(12, 5, 1), nn.Conv2d(5, 12, 1)

    def forward(self, x: Tensor) -> Tensor:
        h = self.drop(self.act(torch.cat([self.a(x), self.b(x)], 1)))
        by_channel = torch.sigmoid(self.excite(torch.relu(self.squeeze(h.mean((2, 3), keepdim=True)))))
        return x + self.c(nn.functional.interpolate(h * by_channel, scale_factor=2.0)[..., ::2, ::2])


@pytest.mark.part(2)
@pytest.mark.parametrize("shards", SHARDS)
def test_joined_channels_and_weights_by_channel_have_the_numbers_of_the_whole_layers(shards: int):
    styles = {"a": "column", "b": "column", "squeeze": "row/2", "excite": "column/2", "c": "row/2"}
    check(
        lambda: nn.Sequential(OrderedDict([("net", Joined())])),
        squares,
        numbers(3, 4, 6, 5),
        torch.zeros(1),
        shards,
        styles={f"net.{name}": style for name, style in styles.items()},
    )


class Alone(nn.Module):
    """Cut layers that stand alone, a size that the caller gives, values without a batch dim."""

    def __init__(self) -> None:
        super().__init__()
        self.gathered, self.row = nn.Conv2d(4, 7, 3, padding=1), nn.Conv2d(7, 6, 1)
        self.groups, self.after = nn.Conv2d(6, 12, 3, padding=1, groups=3), nn.Conv2d(12, 5, 1)
        self.up, self.down = nn.ConvTranspose2d(5, 7, 3, stride=2, padding=1), nn.Conv2d(7, 4, 1)

    def forward(self, x: Tensor) -> Tensor:
        h = self.after(self.groups(self.row(self.gathered(x).tanh())))
        h = self.up(h, output_size=(12, 10)) if h.dim() == 4 else self.up(h)
        return self.down(h.sin())


@pytest.mark.part(2)
@pytest.mark.parametrize("shape", [(3, 4, 6, 5), (4, 6, 5)], ids=str)
@pytest.mark.parametrize("shards", SHARDS)
def test_layers_that_stand_alone_have_the_numbers_of_the_whole_layers(shards: int, shape: tuple[int, ...]):
    styles = {"gathered": "gathered", "row": "row", "groups": "groups", "after": "row:3", "up": "column", "down": "row"}
    check(
        lambda: nn.Sequential(OrderedDict([("net", Alone())])),
        squares,
        numbers(*shape),
        torch.zeros(1),
        shards,
        styles={f"net.{name}": style for name, style in styles.items()},
    )


# -- what is refused -----------------------------------------------------------------------------------------------------------


def layout_of(shards: int, styles: dict[str, str], *modules: nn.Module) -> None:
    """Raises what `compute_shard_layout` or the pass on the meta device raises for these modules in a row."""
    graph = graph_of(lambda: nn.Sequential(OrderedDict([("net", nn.Sequential(*modules))])))
    layout = compute_shard_layout(graph, shards, {f"net.{number}": style for number, style in styles.items()})
    check_shards_on_meta(graph, layout, squares, {"x": numbers(2, 4, 6, 6, dtype=torch.float32), "y": torch.zeros(1)}, "y")


class Strange(nn.Conv2d):
    """A convolution with a step of its own."""

    def _conv_forward(self, x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
        return -super()._conv_forward(x, weight, bias)


FIRST, GROUPED = nn.Conv2d(4, 12, 3), nn.Conv2d(12, 12, 3, groups=6)


@pytest.mark.parametrize(
    "shards, styles, modules, words, cure",
    [
        (5, {0: "column"}, [nn.Conv2d(8, 4, 3)], "4 output channels for 5 shards", "plan.shards <= 4"),
        (5, {0: "row"}, [nn.Conv2d(4, 8, 3)], "4 input channels for 5 shards", "plan.shards <= 4"),
        (3, {0: "groups"}, [nn.Conv2d(4, 8, 3, groups=2)], "2 groups for 3 shards", "plan.shards <= 2"),
        (2, {0: "column"}, [nn.Conv2d(4, 8, 3, groups=2)], "a channel cut across groups", "style groups"),
        (2, {0: "groups"}, [FIRST], "a Conv2d without groups", "column, row"),
        (2, {0: "column"}, [Strange(4, 8, 3)], "does not fit net.0, a Strange with a forward of its own", "keep its forward"),
        (2, {0: "heads:2"}, [FIRST], "the style heads:2 does not fit net.0, a Conv2d", "column, row and gathered"),
        (2, {0: "column:5"}, [FIRST], "12 output features are no multiple of 5", "numbers of heads or parts"),
        (
            5,
            {0: "column", 1: "groups", 2: "row:6"},
            [FIRST, GROUPED, nn.Conv2d(12, 4, 1)],
            "reads the channels",
            "across groups",
        ),
        (2, {0: "column", 1: "row:4"}, [FIRST, nn.Conv2d(12, 4, 3)], None, None),
        (5, {0: "column", 1: "row:6"}, [FIRST, nn.Conv2d(12, 4, 3)], "net.1 reads the channels", "column:8, row:8"),
        (2, {0: "column"}, [FIRST, nn.Conv2d(12, 4, 3)], "conv2d of a value", "after the row layer"),
        (2, {0: "column", 1: "column"}, [FIRST, nn.Conv2d(12, 4, 3)], "net.1 needs all channels of its input", "style row"),
        (2, {0: "column"}, [FIRST], "cut along dim 1", "row layer"),
        (2, {0: "column", 2: "row"}, [FIRST, nn.GroupNorm(3, 12), nn.Conv2d(12, 4, 3)], "3 groups of 4 channels", "column:3"),
        (2, {0: "column", 2: "row"}, [FIRST, nn.LocalResponseNorm(3), nn.Conv2d(12, 4, 3)], "of a value", "row layer"),
        (2, {0: "column", 2: "row"}, [FIRST, nn.PixelShuffle(2), nn.Conv2d(3, 4, 3)], "pixel_shuffle of a value", "row layer"),
    ],
)
def test_what_does_not_fit_is_refused_before_anything_is_started(
    shards: int, styles: dict[int, str], modules: list[nn.Module], words: str | None, cure: str
):
    if words is None:
        layout_of(shards, styles, *modules)
        return
    with pytest.raises((PlanError, ModelError)) as raised:
        layout_of(shards, styles, *modules)
    assert words in raised.value.what and cure in raised.value.cure, str(raised.value)
