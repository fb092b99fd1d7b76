"""What promises autograd's bits makes autograd's calls: the same operations, shapes, strides and places in memory."""

from collections import Counter
from itertools import product

import pytest
import torch
import torch.nn.functional as F
from helpers.kernel_calls import calls_of, elsewhere, products_in
from helpers.model_zoo import import_transformers
from helpers.on_shards import on_shards
from torch import Tensor, nn

from raypar.model.split_backward import Stash, defer_weight_gradients
from raypar.model.tensor_parallel.linear import ColumnLinear, RowLinear
from raypar.model.tensor_parallel.local_part_layout import LocalPartLayout
from raypar.model.tensor_parallel.sharded_value import ShardedValue
from raypar.model.tensor_parallel.split_shards_backward import defer_sharded_weight_gradients
from raypar.plan.shard_ranges import even_ranges_by_shard

pytestmark = pytest.mark.part(5)

LEADING = [(), (1,), (7,), (0,), (1, 1), (1, 5), (5, 1), (4, 17), (0, 3), (2, 1, 3, 4)]
SIZES = [(1, 1), (1, 4), (4, 1), (5, 3)]


def whole(*shape: int) -> Tensor:
    return torch.randn(shape, dtype=torch.float64)


def by_column(*shape: int) -> Tensor:
    """The last dim is the slowest in memory, as after a transpose."""
    return whole(shape[-1], *shape[:-1]).movedim(0, -1)


def sliced(*shape: int) -> Tensor:
    return whole(*shape[:-1], 2 * shape[-1])[..., : shape[-1]]


def swapped(*shape: int) -> Tensor:
    """The leading dims the other way round in memory, as after a transpose of batch and sequence."""
    return whole(*shape[-2::-1], shape[-1]).permute(*range(len(shape) - 2, -1, -1), len(shape) - 1)


def expanded(*shape: int) -> Tensor:
    """What the backward of a sum hands on."""
    return whole().expand(shape)


def same_rows(*shape: int) -> Tensor:
    return whole(shape[-1]).expand(shape)


def every_second(*shape: int) -> Tensor:
    """Of the first dim: of a single row every second feature."""
    return whole(2 * shape[0], *shape[1:])[::2]


def unaligned(*shape: int) -> Tensor:
    return elsewhere(whole(*shape))


LAYOUTS = [whole, by_column, sliced, swapped, expanded, same_rows, every_second, unaligned]
CASES = [
    *((x, whole, whole) for x in LAYOUTS),
    *((whole, weight, whole) for weight in (by_column, sliced, unaligned)),
    *((whole, whole, gradient) for gradient in LAYOUTS[1:]),
    *((x, whole, gradient) for x, gradient in product((by_column, swapped), (by_column, expanded))),
]


def linear_of(fan_in: int, fan_out: int, bias: bool, weight: Tensor) -> nn.Linear:
    linear = nn.Linear(fan_in, fan_out, bias=bias, dtype=torch.float64)
    linear.weight = nn.Parameter(weight)
    return linear


class Ends(torch.autograd.Function):
    """A value that is computed of something and whose gradient is kept: `gradients` gets it."""

    @staticmethod
    def forward(ctx, x, start, gradients):
        ctx.gradients = gradients
        return x.view_as(x)

    @staticmethod
    def backward(ctx, gradient):
        ctx.gradients.append(gradient)
        return None, None, None


def of_autograd(linear: nn.Linear, x: Tensor, gradient: Tensor, trained: bool, mixed: bool = False) -> list[Tensor]:
    """Output and gradients of weight, bias and (`trained`: what comes before is trained too) input. `mixed`: in bfloat16."""
    start, of_input = torch.zeros((), requires_grad=True), []
    value = Ends.apply(x, start, of_input) if trained else x
    with torch.autocast("cpu", torch.bfloat16, enabled=mixed, cache_enabled=False):
        made = F.linear(value, linear.weight, linear.bias)
    leaves = [*linear.parameters(), *([start] if trained else [])]
    return [made, *torch.autograd.grad(made, leaves, gradient, allow_unused=True)[: len(leaves) - trained], *of_input]


def of_split(linear: nn.Linear, x: Tensor, gradient: Tensor, trained: bool, mixed: bool = False) -> list[Tensor]:
    """The same, the weight gradients after the backward pass."""
    start, of_input, stash = torch.zeros((), requires_grad=True), [], Stash()
    defer_weight_gradients(linear, lambda: stash)
    value = Ends.apply(x, start, of_input) if trained else x
    with torch.autocast("cpu", torch.bfloat16, enabled=mixed, cache_enabled=False):
        made = linear(value)
    made.backward(gradient)
    (deferred,) = stash
    with torch.no_grad():
        own = [gradient for _, gradient in deferred.gradients()]
        return [made, *([gradient.to(linear.weight.dtype) for gradient in own] if mixed else own), *of_input]


@pytest.mark.parametrize("inputs, weights, gradients", CASES, ids=lambda make: make.__name__)
def test_a_split_linear_makes_autograds_calls(inputs, weights, gradients):
    torch.set_num_threads(1)
    for leading, (fan_in, fan_out), (bias, trained) in product(LEADING, SIZES, [(True, True), (False, True), (True, False)]):
        linear = linear_of(fan_in, fan_out, bias, weights(fan_out, fan_in))
        x, gradient = inputs(*leading, fan_in), gradients(*leading, fan_out)
        want, plain = calls_of(of_autograd, linear, x, gradient, trained)
        got, split = calls_of(of_split, linear, x, gradient, trained)
        case = f"{leading} {fan_in} -> {fan_out}, bias {bias}, gradient of the input {trained}"
        assert got == want, f"{case}: {list((got - want).elements())} instead of {list((want - got).elements())}"
        for a, b in zip(split, plain, strict=True):
            assert a.stride() == b.stride() and torch.equal(a, b), case


@pytest.mark.parametrize("leading", [(1,), (7,), (1, 1), (1, 5), (5, 1), (4, 17)], ids=str)
def test_a_split_transposed_linear_makes_autograds_calls(leading):
    torch.set_num_threads(1)
    conv = import_transformers().pytorch_utils.Conv1D
    for (fan_in, fan_out), trained in product(SIZES, [True, False]):
        linear = conv(fan_out, fan_in).double()
        x, gradient = whole(*leading, fan_in), whole(*leading, fan_out)

        def of_plain(linear: nn.Module = linear, x: Tensor = x, gradient: Tensor = gradient, trained: bool = trained):
            start, of_input = torch.zeros((), requires_grad=True), []
            made = type(linear).forward(linear, Ends.apply(x, start, of_input) if trained else x)
            leaves = [*linear.parameters(), *([start] if trained else [])]
            return [made, *torch.autograd.grad(made, leaves, gradient, allow_unused=True)[: len(leaves) - trained], *of_input]

        want, plain = calls_of(of_plain)
        got, split = calls_of(of_split, linear, x, gradient, trained)
        assert got == want, f"{fan_in} -> {fan_out}: {list((got - want).elements())} not {list((want - got).elements())}"
        assert all(a.stride() == b.stride() and torch.equal(a, b) for a, b in zip(split, plain, strict=True))


@pytest.mark.parametrize("inputs, gradients", [(whole, whole), (by_column, whole), (sliced, whole), (whole, expanded)])
def test_a_split_linear_makes_autograds_calls_in_bfloat16_too(inputs, gradients):
    """Casts aside, which autograd asks for with more words."""
    torch.set_num_threads(1)
    for leading, (fan_in, fan_out), (bias, trained) in product(LEADING, SIZES, [(True, True), (False, True), (True, False)]):
        linear = linear_of(fan_in, fan_out, bias, whole(fan_out, fan_in)).float()
        x, gradient = inputs(*leading, fan_in).float(), gradients(*leading, fan_out).bfloat16()
        (want, plain), (got, split) = (calls_of(run, linear, x, gradient, trained, True) for run in (of_autograd, of_split))
        want, got = (Counter({c: n for c, n in calls.items() if not c.startswith("_to_copy(")}) for calls in (want, got))
        case = f"{leading} {fan_in} -> {fan_out}, bias {bias}, gradient of the input {trained}"
        assert got == want, f"{case}: {list((got - want).elements())} instead of {list((want - got).elements())}"
        assert all(a.dtype == b.dtype and torch.equal(a, b) for a, b in zip(split, plain, strict=True)), case


def channels_last(*shape: int) -> Tensor:
    return whole(*shape).to(memory_format=torch.channels_last)


HALVES = ["[True, False, False]", "[False, True, True]"]
"""The gradients that the two calls of a split convolution's backward pass ask for: of the input; of weight and bias."""


@pytest.mark.parametrize(
    "inputs, gradients", [(whole, whole), (channels_last, whole), (whole, channels_last), (sliced, expanded)]
)
@pytest.mark.parametrize(
    "kind, options",
    [
        (nn.Conv2d, {"padding": 1, "groups": 2}),
        (nn.Conv2d, {"padding": "same", "dilation": 2}),
        (nn.Conv2d, {"stride": 2, "padding": 1, "padding_mode": "circular"}),
        (nn.ConvTranspose2d, {"stride": 2, "output_padding": 1}),
    ],
    ids=str,
)
def test_a_split_convolution_asks_for_the_halves_of_autograds_call(kind, options, inputs, gradients):
    """Each with all arguments of the whole call; all other calls are autograd's, too."""
    torch.set_num_threads(1)
    layer = kind(4, 6, (2, 3), dtype=torch.float64, **options)
    x = inputs(3, 4, 7, 8)
    gradient = gradients(*layer(x).shape)

    def run(put_off: bool) -> None:
        stash, start, of_input = Stash(), torch.zeros((), requires_grad=True), []
        if put_off:
            defer_weight_gradients(layer, lambda: stash)
        layer(Ends.apply(x, start, of_input)).backward(gradient)
        with torch.no_grad():
            assert len([deferred.gradients() for deferred in stash]) == put_off

    want, got = (calls_of(run, put_off)[0] for put_off in (False, True))
    (call,) = {one for one in want if one.startswith("convolution_backward(")}
    assert call.endswith("[True, True, True])")
    halves = Counter([call.replace("[True, True, True])", f"{half})") for half in HALVES])
    assert got == want - Counter([call]) + halves


def of_shard(kind: str, group, x: Tensor, gradient: Tensor, linear: nn.Linear, put_off: bool):
    """What a shard computes with its slice, which is `linear`, and what it adds to the bits of one process beside that."""
    stash = Stash()
    fan_out, fan_in = linear.weight.shape
    value: Tensor | ShardedValue = x.detach().requires_grad_()
    if kind == "row":
        linear.in_features = 2 * fan_in
        held = even_ranges_by_shard(2 * fan_in, 2)[group.shard]
        layer = RowLinear(linear, "row", group, held)
        value = ShardedValue(value, LocalPartLayout(x.dim() - 1, 2 * fan_in, held, "features"), group)
    else:
        linear.out_features = 2 * fan_out
        held = even_ranges_by_shard(2 * fan_out, 2)[group.shard]
        layer = ColumnLinear(linear, "column", group, held, shares_input=kind == "shared column")
    if put_off:
        defer_sharded_weight_gradients(layer, lambda: stash)
    made = layer(value)
    made = made.local if isinstance(made, ShardedValue) else made
    made.backward(gradient)
    with torch.no_grad():
        for deferred in stash:
            deferred.gradients()


@pytest.mark.parametrize("kind", ["column", "shared column", "row"])
@pytest.mark.parametrize("put_off", [False, True])
def test_a_shard_makes_autograds_products_of_its_slice(kind, put_off):
    torch.set_num_threads(1)
    for inputs, leading, (fan_in, fan_out) in product((whole, by_column, swapped), [(7,), (1, 5), (4, 3)], SIZES):
        x, gradient = inputs(*leading, fan_in), whole(*leading, fan_out)
        bias = kind != "row"  # else it is added to the sum over shards

        def work(group, x=x, gradient=gradient, fan_in=fan_in, fan_out=fan_out):
            linear = linear_of(fan_in, fan_out, True, whole(fan_out, fan_in))
            return calls_of(of_shard, kind, group, x, gradient, linear, put_off)[0]

        linear = linear_of(fan_in, fan_out, bias, whole(fan_out, fan_in))
        want = products_in(calls_of(of_autograd, linear, x, gradient, True)[0])
        for got in on_shards(2, work)[0]:
            assert products_in(got) == want, f"{inputs.__name__} {leading} {fan_in} -> {fan_out}"
