"""Named dimensions of layers: what each shard holds, sends and computes follows from which dimension is divided."""

import itertools
import random
from dataclasses import replace
from math import prod

import pytest
import torch
from torch import nn

from raypar.model.tensor_parallel.styles import layer_kinds
from raypar.model.tensor_parallel.styles.layer_kinds import LINEAR, TRANSPOSED_LINEAR, dimensions_of
from raypar.model.tensor_parallel.styles.registry import parse_style
from raypar.plan.layer_dimensions import LayerDimensions, LayerKind, divide
from raypar.plan.shard_ranges import merge_ranges

ORDERS = {
    "features": ("features each",),
    "parts": ("parts features each",),
    "heads": ("heads width", "heads parts width"),
    "key heads": ("key_heads width", "parts key_heads width", "heads width + key_heads width + key_heads width"),
}
DIVIDED = {"features": "features", "parts": "features", "heads": "heads", "key heads": "heads"}


def drawn_linear(random: random.Random, how: str) -> LayerDimensions:
    """A small linear layer, transposed or not, one of whose axes lies in such an order and is divided."""
    axis, other = random.choice([("out", "in"), ("in", "out")])
    key_heads = random.randint(1, 3)
    sizes = {"features": random.randint(4, 7), "each": random.randint(1, 3), "parts": random.randint(2, 3), "width": 2}
    sizes |= {"key_heads": key_heads, "heads": key_heads * random.randint(2, 3) + 4 * key_heads, other: random.randint(1, 5)}
    kind = random.choice([LINEAR, TRANSPOSED_LINEAR])
    layer = LayerDimensions(
        kind,
        tuple(sizes.items()),
        random.choice([("weight",), ("weight", "bias")]),
        orders=((axis, random.choice(ORDERS[how])),),
        divided=DIVIDED[how],
        followers=(("key_heads", "heads"),),
    )
    return layer


def lengths_of(layer: LayerDimensions, key: str) -> list[int]:
    """By dim: how long a parameter is."""
    sizes = dict(layer.sizes)
    return [sum(prod(sizes[d] for d in block) for block in axis) for axis in layer.axes(dict(layer.kind.parameters)[key])]


def indices_one_by_one(axis, sizes, held) -> list[int]:
    """The indices of an axis whose divided dimensions have a coordinate in `held`: each index looked at by itself."""
    places = [(block, place) for block in axis for place in itertools.product(*(range(sizes[d]) for d in block))]
    return [
        index
        for index, (block, place) in enumerate(places)
        if all(any(a <= at < b for a, b in held[d]) for d, at in zip(block, place, strict=True) if d in held)
    ]


@pytest.mark.parametrize("how", ORDERS)
def test_what_a_shard_has_follows_from_the_names_index_by_index(how):
    draw = random.Random(how)
    for _ in range(25):
        layer, shards = drawn_linear(draw, how), draw.randint(1, 4)
        sizes, division = dict(layer.sizes), divide(layer, shards)
        texts = {key: text for key, text in layer.kind.parameters if key in layer.parameters}
        assert merge_ranges(s for spans in division.indices for s in spans) == ((0, sizes[layer.divided]),)
        each = sizes["heads"] // sizes["key_heads"]
        for shard in range(shards):
            own = division.indices[shard]
            held = {layer.divided: own}
            if layer.divided == "heads":
                held["key_heads"] = merge_ranges((head // each, head // each + 1) for a, b in own for head in range(a, b))
            elements = dict.fromkeys(texts, 0)
            for key, text in texts.items():
                axes, lengths = layer.axes(text), lengths_of(layer, key)
                kept = [indices_one_by_one(axis, sizes, held) for axis in axes]
                elements[key] = prod(map(len, kept))
                cut = division.cuts.get(key)
                if cut is None:
                    assert list(map(len, kept)) == lengths
                else:
                    assert cut.whole_size == lengths[cut.dim]
                    assert [i for a, b in cut.indices_by_shard[shard] for i in range(a, b)] == kept[cut.dim]
                    assert all(len(k) == n for d, (k, n) in enumerate(zip(kept, lengths, strict=True)) if d != cut.dim)
            whole = {key: prod(lengths_of(layer, key)) for key in texts}
            assert division.shares[shard].bytes == sum(elements.values()) / sum(whole.values())
            assert division.shares[shard].compute == elements["weight"] / whole["weight"]


def sums(layer: LayerDimensions) -> set[tuple[str, str]]:
    """(pass, value) of what is said to be a sum over the shards."""
    found = divide(layer, 2).collectives
    return {(each.direction, each.value) for each in found.plain if each.operation == "all_reduce"}


def check_product(parts: list[torch.Tensor], whole: torch.Tensor, *, is_sum: bool, dim: int, held: list[list[int]]) -> None:
    """Parts of a sum are added; other products have a part of the numbers of the whole one, as they are."""
    if is_sum:
        assert torch.equal(sum(parts), whole) and not any(torch.equal(part, whole) for part in parts)
    else:
        for part, indices in zip(parts, held, strict=True):
            assert torch.equal(part.index_select(dim, torch.tensor(indices)), whole.index_select(dim, torch.tensor(indices)))


@pytest.mark.parametrize("how", ["features", "parts", "heads"])
def test_a_product_is_a_sum_over_the_shards_exactly_where_its_result_lacks_the_dimension(how):
    """In whole numbers, so that sums are exact."""
    draw, generator = random.Random(how), torch.Generator().manual_seed(1)
    for _ in range(25):
        layer, shards = drawn_linear(draw, how), draw.randint(2, 4)
        cut = divide(layer, shards).cuts["weight"]
        shape = lengths_of(layer, "weight")
        transposed = layer.kind is TRANSPOSED_LINEAR
        weight = torch.randint(1, 9, shape, generator=generator)
        fan_out, fan_in = reversed(shape) if transposed else shape
        x, gradient = (torch.randint(1, 9, (3, n), generator=generator) for n in (fan_in, fan_out))
        held = [[i for a, b in spans for i in range(a, b)] for spans in cut.indices_by_shard]
        slices = []
        for indices in held:
            own = torch.zeros_like(weight).index_copy_(
                cut.dim, torch.tensor(indices), weight.index_select(cut.dim, torch.tensor(indices))
            )
            slices.append(own.t() if transposed else own)
        whole, said = weight.t() if transposed else weight, sums(layer)
        outputs, gradients = [x @ own.t() for own in slices], [gradient @ own for own in slices]
        assert len(said) == 1
        check_product(outputs, x @ whole.t(), is_sum=("forward", "output") in said, dim=1, held=held)
        check_product(gradients, gradient @ whole, is_sum=("backward", "input") in said, dim=1, held=held)


def test_groups_need_no_sum_and_a_vocabulary_sums_what_is_looked_up():
    convolution = nn.Conv2d(12, 8, 3, groups=4)
    layer = replace(dimensions_of(convolution), divided="groups")
    assert sums(layer) == set()
    assert {key: (cut.dim, cut.whole_size) for key, cut in divide(layer, 2).cuts.items()} == {"weight": (0, 8), "bias": (0, 8)}
    embedding = replace(dimensions_of(nn.Embedding(10, 4)), divided="vocabulary")
    assert sums(embedding) == {("forward", "output")}, "indices have no gradient"
    assert [share.compute for share in divide(embedding, 2).shares] == [1.0, 1.0], "each shard looks up each id"
    by_features = replace(embedding, divided="features")
    assert sums(by_features) == set()
    assert [share.compute for share in divide(by_features, 2).shares] == [0.5, 0.5]


def test_a_kind_that_is_not_there_yet_is_a_line():
    """A bilinear layer, y_o = a_i W_oij b_j: by o the gradients of what it reads are sums, by i the output and none else."""
    kind = LayerKind("samples (in)", "samples (out)", (("weight", "(out) (in) in2"), ("bias", "(out)")))
    layer = LayerDimensions(kind, (("in", 6), ("out", 4), ("in2", 5)), ("weight", "bias"), divided="out")
    assert sums(layer) == {("backward", "input")}
    assert divide(layer, 2).cuts["weight"].indices_by_shard == (((0, 2),), ((2, 4),))
    assert sums(replace(layer, divided="in")) == {("forward", "output")}
    assert sums(replace(layer, divided="in2")) == {("forward", "output"), ("backward", "input")}


@pytest.mark.parametrize(
    ("style", "module", "plain", "sequence"),
    [
        ("column", nn.Linear(4, 8), "back all_reduce B C_in", "all_gather B C_in, back reduce_scatter B C_in"),
        ("row", nn.Linear(8, 4), "all_reduce B C_out", "reduce_scatter B C_out, back all_gather B C_out"),
        (
            "gathered",
            nn.Linear(4, 8),
            "all_gather B C_out, back all_reduce B C_in",
            "all_gather B C_in, all_gather B C_out, back reduce_scatter B C_in",
        ),
        ("column", nn.Conv2d(4, 8, 3), "back all_reduce B C_in H W", "back all_reduce B C_in H W"),
        ("row", nn.ConvTranspose1d(4, 8, 3), "all_reduce B C_out L", "all_reduce B C_out L"),
        ("spatial:width", nn.Conv2d(4, 8, 3), *["all_to_all h B C_in H, back all_to_all h B C_out H"] * 2),
        ("spatial-gathered", nn.Conv1d(4, 8, 3), *["all_to_all h B C_in, back all_to_all h B C_out, all_gather B C_out L"] * 2),
        ("spatial", nn.BatchNorm2d(4), "", ""),
        ("groups", nn.Conv2d(4, 8, 3, groups=2), "", ""),
        ("vocabulary", nn.Embedding(8, 4), "all_reduce B C", "reduce_scatter B C, back all_gather B C"),
        ("vocabulary", nn.Linear(4, 8), "back all_reduce B C_in", "all_gather B C_in, back reduce_scatter B C_in"),
        (
            "attention",
            nn.MultiheadAttention(4, 2),
            "all_reduce B C_out, back all_reduce B C_in",
            "all_gather B C_in, reduce_scatter B C_out, back all_gather B C_out, back all_reduce B C_in",
        ),
        ("heads:2", nn.Linear(4, 8), "back all_reduce B C_in", "all_gather B C_in, back reduce_scatter B C_in"),
        ("heads-row:2", nn.Linear(8, 4), "all_reduce B C_out", "reduce_scatter B C_out, back all_gather B C_out"),
        ("whole", nn.Linear(4, 8), "", ""),
    ],
)
def test_each_style_says_what_travels_and_how_much(style, module, plain, sequence):
    found = parse_style(style).collectives(module)

    def text(collectives):
        back = {"forward": "", "backward": "back "}
        return ", ".join(f"{back[each.direction]}{each.operation} {each.formula}" for each in collectives)

    assert (text(found.plain), text(found.sequence)) == (plain, sequence)


def test_dimensions_that_are_declared_are_those_of_the_parameters():
    modules = [
        nn.Linear(3, 5),
        nn.Linear(3, 5, bias=False),
        nn.Embedding(7, 3),
        nn.Conv2d(6, 4, (3, 5), groups=2),
        nn.ConvTranspose3d(6, 4, 3, groups=2),
        nn.MultiheadAttention(8, 2),
        nn.MultiheadAttention(8, 2, kdim=3, vdim=5, bias=False),
    ]
    for module in modules:
        attention = isinstance(module, nn.MultiheadAttention)
        layer = layer_kinds.attention_dimensions(module) if attention else dimensions_of(module)
        parameters = dict(module.named_parameters())
        assert set(layer.parameters) == parameters.keys() <= dict(layer.kind.parameters).keys()
        for name, parameter in parameters.items():
            lengths = lengths_of(layer, name)
            assert prod(lengths) == parameter.numel() and lengths[:2] == list(parameter.shape[: len(lengths)][:2])
