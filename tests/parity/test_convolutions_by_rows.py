"""Convolutions cut along a spatial dim have the bits of the same pieces in one process, and the numbers of the whole layers."""

from __future__ import annotations

import random
from collections import OrderedDict
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from helpers.networks_on_shards import (
    MIXED_PRECISIONS,
    SHARDS,
    check_division,
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
from helpers.on_shards import SEED, check, error, graph_of, sharded
from helpers.same_rows import SameRows
from helpers.virtual_shards import divided
from torch import Tensor, nn

from examples.inception_digits import GoogLeNet
from examples.resnet_digits import ResNet18
from raypar.errors import ModelError, PlanError
from raypar.job import Job
from raypar.model.materialise import materialise
from raypar.model.tensor_parallel.compute_shard_layout import compute_shard_layout
from raypar.model.tensor_parallel.meta_check import check_shards_on_meta
from raypar.plan import ParallelPlan
from raypar.plan.seeds import seed_of
from raypar.plan.spatial_shards import RowPlan, Window, plan_linear, plan_transposed
from raypar.worker.layer_graph_of_job import make_layer_graph
from raypar.worker.run_in_one_process import OneProcessRun

NAMES = {1: ("length",), 2: ("height", "width"), 3: ("depth", "height", "width")}


def in_a_row(*modules: nn.Module) -> Callable[[], nn.Sequential]:
    return lambda: nn.Sequential(OrderedDict([("net", nn.Sequential(*modules))]))


def spatial_styles(*modules: nn.Module, style: str = "spatial") -> dict[str, str]:
    kinds = (nn.modules.conv._ConvNd,)
    return {f"net.{number}": style for number, module in enumerate(modules) if isinstance(module, kinds)}


def waves(output: Tensor, target: Tensor) -> Tensor:
    """A loss with another gradient for each element, which no norm takes away."""
    ramp = torch.linspace(-1, 1, output.numel(), dtype=output.dtype, device=output.device).view(output.shape)
    return (output * ramp.cos()).sum() + (output * output).sum()


# -- one layer ---------------------------------------------------------------------------------------------------------------


def drawn(seed: int) -> tuple[Callable[[], nn.Module], tuple[int, ...], str, int]:
    """(makes a convolution, shape of its input, its style, shards)."""
    draw = random.Random(seed)
    dims = draw.randint(1, 3)
    axis = draw.randrange(dims)

    def each(low: int, high: int) -> tuple[int, ...]:
        return tuple(draw.randint(low, high) for _ in range(dims))

    kernel, stride, dilation = each(1, 4), each(1, 3), each(1, 2)
    extent = tuple((k - 1) * d + 1 for k, d in zip(kernel, dilation, strict=True))
    size = tuple(draw.randint(max(e, 6), 20) if i == axis else max(e, draw.randint(2, 6)) for i, e in enumerate(extent))
    options: dict[str, Any] = {"dilation": dilation, "groups": draw.choice([1, 1, 2, 4]), "bias": draw.random() < 0.7}
    channels = 4, draw.choice([4, 8])
    if draw.random() < 0.35:
        more = tuple(draw.randint(0, max(s, d) - 1) for s, d in zip(stride, dilation, strict=True))
        padding = tuple(min(2, (e - 1) // 2) for e in extent)
        kind = getattr(nn, f"ConvTranspose{dims}d")
        made = lambda: kind(*channels, kernel, stride, padding, output_padding=more, **options)  # noqa: E731
    else:
        mode = draw.choice(["zeros", "zeros", "reflect" if dims < 3 else "zeros", "circular", "replicate"])
        sides = tuple(min(e - 1 if i == axis else e // 2, n - 1, 4) for i, (e, n) in enumerate(zip(extent, size, strict=True)))
        same = draw.random() < 0.2 and all(e // 2 < n for e, n in zip(extent, size, strict=True))
        stride, padding = ((1,) * dims, "same") if same else (stride, sides)
        kind = getattr(nn, f"Conv{dims}d")
        made = lambda: kind(*channels, kernel, stride, padding, padding_mode=mode, **options)  # noqa: E731
    return made, (2, 4, *size), f"spatial:{NAMES[dims][axis]}", draw.randint(2, 4)


@pytest.mark.filterwarnings("ignore:Using padding='same' with even kernel")
@pytest.mark.parametrize("first", [0, *(pytest.param(n, marks=pytest.mark.ci) for n in (40, 120, 200, 280))])
def test_drawn_convolutions_have_the_numbers_of_the_whole_layer(first: int):
    """Of 1 to 3 dims along any of them, with stride, dilation, groups, padding of all modes, transposed."""
    refused = 0
    for seed in range(first, first + (40 if first == 0 else 80)):
        make, shape, style, shards = drawn(seed)
        try:
            check(lambda make=make: in_a_row(make())(), waves, numbers(*shape), torch.zeros(1), shards, styles={"net.0": style})
        except ModelError as problem:
            assert "rows for" in problem.what or "the halo is larger than a part" in problem.what, seed
            refused += 1
        except AssertionError as wrong:
            raise AssertionError(f"seed {seed}: {make()} on {shards} shards") from wrong
    assert refused <= 5


EXACT = {
    "3x3": [nn.Conv2d(3, 5, 3, padding=1), nn.ReLU(), nn.Conv2d(5, 4, 3)],
    "stride 2": [nn.Conv2d(3, 5, 3, stride=2, padding=1), nn.Tanh(), nn.Conv2d(5, 4, 1, bias=False)],
    "5x1, dilation 2": [nn.Conv2d(3, 4, (5, 1), padding=(2, 0)), nn.Conv2d(4, 4, 3, dilation=2, padding=2)],
    "groups": [nn.Conv2d(3, 6, 3, padding=1), nn.Conv2d(6, 6, 3, stride=2, padding=1, groups=6)],
    "transposed": [
        nn.Conv2d(3, 4, 3, padding=1),
        nn.ConvTranspose2d(4, 5, 2, stride=2),
        nn.ConvTranspose2d(5, 4, 3, padding=1),
    ],
    "transposed, more rows": [nn.ConvTranspose2d(3, 4, 3, stride=2, padding=1, output_padding=1, bias=False)],
    "norms": [nn.Conv2d(3, 6, 3, padding=1), nn.BatchNorm2d(6), nn.ReLU(), nn.Conv2d(6, 4, 3, padding=1), nn.BatchNorm2d(4)],
}


@pytest.mark.part(2)
@pytest.mark.parametrize("shards", [2, 3, 4])
@pytest.mark.parametrize("name", EXACT)
def test_shards_have_the_bits_of_the_pieces_in_one_process(name: str, shards: int):
    modules, x, y = EXACT[name], numbers(2, 3, 12, 7, dtype=torch.float32), torch.zeros(1)
    graph = graph_of(in_a_row(*modules))
    layout = compute_shard_layout(graph, shards, spatial_styles(*modules))
    runs, _ = sharded(graph, layout, waves, x, y, dtype=torch.float32)
    made = materialise(graph, 0, 1, seed=SEED, dtype=torch.float32)["net"]
    plain, leaf = SameRows(list(made.children()), shards), x.clone().requires_grad_()
    loss = waves(plain.run(leaf), y)
    loss.backward()
    want = {f"net.{path}": gradient for path, gradient in plain.gradients().items()}
    for run in runs:
        assert torch.equal(run.loss, loss) and run.inputs is not None and torch.equal(run.inputs, leaf.grad)
        check_gradients(run, want)


# -- what lies between -------------------------------------------------------------------------------------------------------


class Glue(nn.Module):
    """A function as a module."""

    def __init__(self, function: Callable[[Tensor], Tensor]) -> None:
        super().__init__()
        self.function = function

    def forward(self, x: Tensor) -> Tensor:
        return self.function(x)


BETWEEN: dict[str, list[nn.Module]] = {
    "batch norm": [nn.BatchNorm2d(6), nn.ReLU()],
    "group norm": [nn.GroupNorm(3, 6)],
    "instance norm": [nn.InstanceNorm2d(6, affine=True)],
    "layer norm over rows": [nn.LayerNorm([6, 12, 9])],
    "layer norm of rows": [nn.LayerNorm([9])],
    "max pool": [nn.MaxPool2d(2)],
    "overlapping max pool": [nn.MaxPool2d(3, 2, 1), nn.MaxPool2d(3, 1, 1)],
    "max pool, ceil, dilation": [nn.MaxPool2d(2, 3, ceil_mode=True, dilation=2)],
    "average pool": [nn.AvgPool2d(3, 1, 1), nn.AvgPool2d(2)],
    "average pool, ceil": [nn.AvgPool2d(3, 2, 1, ceil_mode=True)],
    "average pool without padding's zeros": [nn.AvgPool2d(5, 2, 1, ceil_mode=True, count_include_pad=False)],
    "mean of all": [nn.AdaptiveAvgPool2d(1), nn.Flatten(1), nn.Linear(6, 3)],
    "mean of all rows": [nn.AdaptiveAvgPool2d((1, 4))],
    "adaptive pool": [nn.AdaptiveAvgPool2d((6, 4)), nn.AdaptiveMaxPool2d((3, None))],
    "nearest": [nn.Upsample(scale_factor=2)],
    "bilinear": [nn.Upsample(scale_factor=(2, 1.5), mode="bilinear"), nn.Upsample(size=(48, 20), mode="bilinear")],
    "bicubic": [nn.Upsample(scale_factor=3, mode="bicubic")],
    "zero padding": [nn.ZeroPad2d((1, 0, 2, 1))],
    "reflection": [nn.ReflectionPad2d(2)],
    "circular padding": [nn.CircularPad2d((1, 1, 2, 1))],
    "replication, less": [nn.ReplicationPad2d((0, 0, 3, 0)), nn.ConstantPad2d((0, 1, -1, 2), 1.5)],
    "slices": [Glue(lambda x: x[:, 1:3, 1:-1]), Glue(lambda x: x[..., ::2, 2:])],
    "means": [Glue(lambda x: x + x.mean((2, 3), keepdim=True) - x.sum(2, keepdim=True) / 7)],
    "dropouts": [nn.Dropout(0.3), nn.Dropout2d(0.3)],
    "slopes, softmax": [nn.PReLU(6), nn.Softmax(1)],
    "cat": [Glue(lambda x: torch.cat([x, x.relu()], 1))],
    "views": [Glue(lambda x: x.view(2, 3, 2, 12, 9)[:, :, 0].flatten(2).transpose(1, 2) * 2)],
}


@pytest.mark.part(3)
@pytest.mark.parametrize("shards", SHARDS)
@pytest.mark.parametrize("name", BETWEEN)
def test_what_lies_between_has_the_numbers_of_the_whole(name: str, shards: int):
    modules = [nn.Conv2d(3, 6, 3, padding=1), *BETWEEN[name]]
    check(in_a_row(*modules), waves, numbers(2, 3, 12, 9), torch.zeros(1), shards, styles=spatial_styles(*modules))


@pytest.mark.part(2)
@pytest.mark.parametrize("shards", SHARDS)
def test_a_whole_layer_after_a_gathered_one(shards: int):
    modules = [nn.Conv2d(3, 6, 3, padding=1), nn.Conv2d(6, 4, 3, stride=2), nn.Flatten(1), nn.Linear(4 * 5 * 4, 7)]
    styles = {"net.0": "spatial", "net.1": "spatial-gathered", "net.3": "whole"}
    check(in_a_row(*modules), waves, numbers(2, 3, 12, 9), torch.zeros(1), shards, styles=styles)


@pytest.mark.part(2)
def test_values_without_a_batch_and_sizes_that_callers_give():
    class Up(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.down, self.up = nn.Conv2d(3, 4, 3, padding=1, stride=2), nn.ConvTranspose2d(4, 3, 3, stride=2, padding=1)

        def forward(self, x: Tensor) -> Tensor:
            size = x.shape[-2:]
            return self.up(self.down(x), output_size=size) + x

    for shape in ((2, 3, 12, 9), (3, 12, 9)):
        make = lambda: nn.Sequential(OrderedDict([("net", Up())]))  # noqa: E731
        check(make, waves, numbers(*shape), torch.zeros(1), 3, styles={"net.*": "spatial"})


# -- bytes -------------------------------------------------------------------------------------------------------------------


def halo_bytes(plan: RowPlan, shard: int, given: int, made: int, backward: bool = True) -> int:
    """What a shard sends in float64: rows of `given` numbers forward, of `made` backward."""
    return 8 * (plan.forward.rows_sent_by(shard) * given + backward * plan.backward.rows_sent_by(shard) * made)


@pytest.mark.parametrize("shards", [2, 3, 4])
@pytest.mark.parametrize("name", ["3x3", "7x7", "1x1", "stride 2", "dilation 3", "transposed"])
def test_halos_are_as_many_bytes_as_the_formula_says(name: str, shards: int):
    """Rows of B C_in W numbers forward, of B C_out W' backward; to each neighbour (k - 1) / 2 of a kernel of k and stride 1."""
    module, window = {
        "3x3": (nn.Conv2d(4, 6, 3, padding=1), Window(3, before=1, after=1)),
        "7x7": (nn.Conv2d(4, 6, (7, 1), padding=(3, 0)), Window(7, before=3, after=3)),
        "1x1": (nn.Conv2d(4, 6, 1), Window()),
        "stride 2": (nn.Conv2d(4, 6, 3, stride=(2, 1), padding=1), Window(3, 2, 1, 1, 1)),
        "dilation 3": (nn.Conv2d(4, 6, 3, dilation=3, padding=3), Window(3, 1, 3, 3, 3)),
        "transposed": (nn.ConvTranspose2d(4, 6, (4, 1), stride=(2, 1), padding=(1, 0)), Window(4, 2, 1, 1, 1)),
    }[name]
    graph = graph_of(in_a_row(module))
    layout = compute_shard_layout(graph, shards, {"net.0": "spatial"})
    _, ledgers = sharded(graph, layout, waves, numbers(2, 4, 24, 5), torch.zeros(1))
    outputs = {"transposed": 48, "stride 2": 12}.get(name, 24)
    plan = (plan_transposed if name == "transposed" else plan_linear)(window, 24, outputs, shards)
    for shard, ledger in enumerate(ledgers):
        assert ledger.sent["all_to_all"] == halo_bytes(plan, shard, 2 * 4 * 5, 2 * 6 * 5)
    if name in ("3x3", "7x7", "1x1"):
        k, neighbours = {"3x3": 3, "7x7": 7, "1x1": 1}[name], 2 * (shards - 1)
        assert sum(ledger.sent["all_to_all"] for ledger in ledgers) == 8 * neighbours * (k - 1) // 2 * 2 * 5 * (4 + 6)


# -- whole runs --------------------------------------------------------------------------------------------------------------


class Images:
    """Sample i: an image and the classes of its pixels."""

    def __init__(self, dtype: str = "float32", rows: int = 12) -> None:
        self._dtype, self._rows = getattr(torch, dtype), rows

    def __len__(self) -> int:
        return 24

    def __getitem__(self, index: int) -> tuple[Tensor, Tensor]:
        generator = torch.Generator().manual_seed(index)
        shape = self._rows, 8
        return torch.randn(3, *shape, generator=generator).to(self._dtype), torch.randint(0, 4, shape, generator=generator)


class SmallUNet(nn.Module):
    """A skip, pooling, norms, dropout, a transposed and a plain enlargement, weights by channel, in a forward of its own."""

    def __init__(self, p: float = 0.2) -> None:
        super().__init__()
        self.down1, self.norm1, self.pool = nn.Conv2d(3, 6, 3, padding=1, bias=False), nn.BatchNorm2d(6), nn.MaxPool2d(2)
        self.down2, self.norm2 = nn.Conv2d(6, 8, 3, padding=1), nn.BatchNorm2d(8, momentum=None)
        self.drop, self.group = nn.Dropout(p), nn.GroupNorm(2, 8)
        self.squeeze, self.excite = nn.Linear(8, 4), nn.Linear(4, 8)
        self.up, self.join = nn.ConvTranspose2d(8, 6, 2, stride=2), nn.Conv2d(20, 6, 3, padding=1)
        self.logits, self.relu = nn.Conv2d(6, 4, 1), nn.ReLU(inplace=True)

    def forward(self, x: Tensor) -> Tensor:
        skip = self.relu(self.norm1(self.down1(x)))
        h = self.drop(self.relu(self.norm2(self.down2(self.pool(skip)))))
        weights = torch.sigmoid(self.excite(torch.relu(self.squeeze(h.mean((2, 3))))))
        h = self.group(h) * weights[:, :, None, None]
        larger = F.interpolate(h, size=skip.shape[-2:], mode="bilinear")
        h = self.relu(self.join(torch.cat([skip, self.up(h), larger], 1)))
        return self.logits(h)


STYLES = {"down*": "spatial", "up": "spatial", "join": "spatial", "logits": "spatial"}


def job_of(model: object = SmallUNet, styles: dict[str, str] = STYLES, data: object = Images, **given: object) -> Job:
    return two_steps(model, data, styles, **given)


def check_shared(found: dict[str, list[Tensor]]) -> None:
    """All shards have the same parameters and buffers, but those of the two dense layers."""
    assert {name for name, slices in found.items() if len(slices) > 1} <= {"squeeze.weight", "squeeze.bias", "excite.weight"}


@pytest.mark.part(6)
@pytest.mark.parametrize("shards", SHARDS)
@pytest.mark.parametrize("mesh", [{"pp": 2}, {"pp": 3, "dp": 2}, {"pp": 5}], ids=str)
def test_a_network_has_the_same_bits_in_every_layout(mesh: dict[str, int], shards: int):
    job = job_of()
    check_shared(check_layouts(job, shards, mesh))


@pytest.mark.part(5)
@pytest.mark.parametrize("division", [(1, 3), (2, 2), (3, 1), (1, 1, 2), (4,)], ids=str)
def test_any_workers_have_the_bits_of_four_pieces(division: tuple[int, ...]):
    check_shared(check_division(job_of(data=(Images, {"rows": 16})), division))


@pytest.mark.ci
@MIXED_PRECISIONS
def test_bf16_recomputation_and_zero_bubble_have_the_same_bits_in_every_layout(precision: dict[str, str]):
    check_shared(check_recomputation_and_zero_bubble(job_of(precision=precision)))


@pytest.mark.part(2)
@pytest.mark.parametrize("shards", SHARDS)
def test_a_network_has_the_numbers_of_the_whole_one(shards: int):
    job = job_of((SmallUNet, {"p": 0.0}), dtype="float64", data=(Images, {"dtype": "float64"}))
    check_numbers_of_whole(job, shards)


class Photographs:
    """Sample i: an image and its class."""

    def __len__(self) -> int:
        return 8

    def __getitem__(self, index: int) -> tuple[Tensor, Tensor]:
        generator = torch.Generator().manual_seed(index)
        image = torch.randn(1, 32, 32, dtype=torch.float64, generator=generator)
        return image, torch.randint(0, 10, (), generator=generator)


@pytest.mark.ci
@pytest.mark.parametrize("model", [ResNet18, GoogLeNet])
def test_networks_that_end_in_a_dense_layer_have_the_numbers_of_the_whole_ones(model: type[nn.Module]):
    """Their last pooling makes the value whole."""
    styles = {"head": "whole", "*": "spatial"}
    job = job_of((model, {"width": 8}), styles, dtype="float64", data=Photographs, batch_size=4)
    layers = len(make_layer_graph(job).layers)
    whole, cut = (steps_of(job, ParallelPlan.mesh(tp=n, layers=layers)) for n in (1, 2))
    found, wanted = cut.parameters() | cut.buffers(), whole.parameters() | whole.buffers()
    assert found.keys() == wanted.keys()
    assert [name for name, copies in found.items() for got in copies if error(got, wanted[name][0]) > 1e-11] == []
    check_same(steps_of(job, divided(ParallelPlan.mesh(layers=layers, pp=2), (2,))), slices_of(cut))


def chain() -> nn.Module:
    return in_a_row(*EXACT["norms"])()


class TensorsOfChain:
    """Samples for the chain."""

    def __len__(self) -> int:
        return 4

    def __getitem__(self, index: int) -> tuple[Tensor, Tensor]:
        return numbers(4, 3, 12, 7, dtype=torch.float32)[index], torch.zeros(())


@pytest.mark.part(2)
@pytest.mark.parametrize("division", [(2,), (1, 1), (2, 1), (1, 1, 1), (2, 2)], ids=str)
def test_workers_have_the_gradients_and_statistics_of_the_pieces(division: tuple[int, ...]):
    job = job_of(chain, spatial_styles(*EXACT["norms"]), data=TensorsOfChain, loss=waves, steps=1, batch_size=4, microbatches=1)
    graph = make_layer_graph(job)
    torch.set_num_threads(1)
    modules = materialise(graph, 0, 1, seed=job.seed, dtype=torch.float32)["net"]
    plain = SameRows(list(modules.children()), sum(division))
    order = torch.randperm(4, generator=torch.Generator().manual_seed(seed_of(job.seed, "epoch", 0)))
    waves(plain.run(numbers(4, 3, 12, 7, dtype=torch.float32)[order]), torch.zeros(())).backward()
    plan = divided(ParallelPlan.mesh(tp=len(division), layers=1), division)
    with OneProcessRun(job, plan, "1f1b", graph=graph) as run:
        run.step(0)
        found, buffers = run.gradients(), run.buffers()
    for path, gradient in plain.gradients().items():
        assert all(got is not None and torch.equal(got, gradient) for got in found[f"net.{path}"]), path
    for path, buffer in plain.buffers().items():
        assert all(torch.equal(got, buffer) for got in buffers[f"net.{path}"]), path


# -- what is refused -----------------------------------------------------------------------------------------------------------


def layout_of(shards: int, styles: dict[int, str], *modules: nn.Module) -> None:
    """Raises what `compute_shard_layout` or the pass on the meta device raises for these modules in a row."""
    graph = graph_of(in_a_row(*modules))
    layout = compute_shard_layout(graph, shards, {f"net.{number}": style for number, style in styles.items()})
    check_shards_on_meta(graph, layout, waves, {"x": numbers(2, 4, 14, 14, dtype=torch.float32), "y": torch.zeros(1)}, "y")


class Attention(nn.Module):
    """Every pixel looks at every other."""

    def forward(self, x: Tensor) -> Tensor:
        tokens = x.flatten(2).transpose(1, 2)
        return F.scaled_dot_product_attention(tokens, tokens, tokens)


C = nn.Conv2d(4, 4, 3, padding=1)
ONE = nn.Conv2d(4, 4, 1)
S = {0: "spatial"}


@pytest.mark.parametrize(
    "shards, styles, modules, words, cure",
    [
        (6, S, [nn.Conv2d(4, 4, 7, padding=3)], "needs 3 below them, of which the shard next to it has 2", "plan.shards: 5"),
        (8, S, [nn.Conv2d(4, 4, 3, stride=2, padding=1)], "net.0 makes 7 rows for 8 shards", "plan.shards <= 7"),
        (2, {0: "spatial:depth"}, [C], "the spatial dims of a Conv2d are height, width", "spatial:width"),
        (2, {0: "spatial:3"}, [C], "'spatial:3' is no style: spatial has no option '3'", "spatial:width"),
        (2, {0: "spatial:widht"}, [C], "spatial has no option 'widht' (nearest: width)", "spatial:width"),
        (2, S, [nn.Linear(14, 3)], "the style spatial does not fit net.0, a Linear", "put net.0: whole before"),
        (
            2,
            S,
            [C, ONE],
            "conv2d of a value [2, 4, 14, 14] that is cut along dim 2",
            "reads the value the style",
        ),
        (
            2,
            {0: "spatial", 1: "spatial:width"},
            [C, ONE],
            "net.1 is cut along dim 3 of [2, 4, 14, 14]",
            "same dim",
        ),
        (
            2,
            {0: "spatial", 1: "column"},
            [C, ONE],
            "net.1 needs all channels of its input, which is cut along dim 2",
            "spatial",
        ),
        (2, S, [C, nn.Flatten(1), nn.Linear(784, 3)], "linear of a value [2, 784] that is cut along dim 1", "spatial-gathered"),
        (2, S, [C, nn.AdaptiveAvgPool2d(5)], "adaptive_avg_pool2d to 5 of 14 rows", "spatial-gathered"),
        (2, S, [C, nn.AdaptiveMaxPool2d(1)], "adaptive_max_pool2d to 1 of 14 rows", "spatial-gathered"),
        (2, S, [C, Attention()], "scaled_dot_product_attention", "spatial-gathered"),
        (2, S, [C, nn.Upsample(scale_factor=1.5)], "interpolate (nearest) by 1.5 of a value", "spatial-gathered"),
        (2, S, [C, Glue(lambda x: x.amax((2, 3)))], "amax of a value [2, 4, 14, 14]", "spatial-gathered"),
        (2, S, [C, Glue(lambda x: x.flip(2))], "flip of a value", "spatial-gathered"),
        (2, S, [C, Glue(lambda x: torch.cat([x, x], 2)), nn.MaxPool2d(2)], "meets uneven parts", "spatial-gathered"),
        (
            2,
            S,
            [C, Glue(lambda x: torch.cat([x, x], 2))],
            "returns 'net.out' [2, 4, 28, 14] cut",
            "spatial-gathered",
        ),
        (2, S, [C, nn.MaxPool2d(2, return_indices=True)], "max_pool2d_with_indices of a value", "spatial-gathered"),
        (4, S, [C, nn.MaxPool2d(8, 8, 4)], "makes 2 rows for 4 shards", "plan.shards <= 2"),
    ],
)
def test_what_needs_the_whole_is_refused_with_the_cure(
    shards: int, styles: dict[int, str], modules: list[nn.Module], words: str, cure: str
):
    with pytest.raises((PlanError, ModelError)) as problem:
        layout_of(shards, styles, *modules)
    assert words in problem.value.what, problem.value.what
    assert cure in problem.value.cure, problem.value.cure


def test_second_derivatives_are_refused():
    class Penalty(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.conv = nn.Conv2d(3, 4, 3, padding=1)

        def forward(self, x: Tensor) -> Tensor:
            made = self.conv(x).sum((1, 2, 3))
            (found,) = torch.autograd.grad(made.sum(), x, create_graph=True)
            return found

    make = lambda: nn.Sequential(OrderedDict([("net", Penalty())]))  # noqa: E731
    with pytest.raises(ModelError, match="no second derivatives"):
        check(make, waves, numbers(2, 3, 6, 6), torch.zeros(1), 2, styles={"net.conv": "spatial"})
