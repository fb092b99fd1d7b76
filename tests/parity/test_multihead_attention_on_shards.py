"""`nn.MultiheadAttention` of style `attention` makes the calls that PyTorch makes for its heads, and returns their dtype."""

import copy
from functools import partial
from typing import Any

import pytest
import torch
from helpers.on_shards import on_shards
from helpers.same_shards_of_attention import SameShardsOfAttention
from torch import Tensor, nn

from raypar.comm.local_transport import LocalMesh
from raypar.model.graph import Graph
from raypar.model.tensor_parallel.build_shard_modules import build_shard_modules
from raypar.model.tensor_parallel.compute_shard_layout import compute_shard_layout
from raypar.model.tensor_parallel.local_part_layout import sequence_part_layout
from raypar.model.tensor_parallel.multihead_attention import ShardedMultiheadAttention
from raypar.model.tensor_parallel.shard_group import ShardGroup
from raypar.model.tensor_parallel.sharded_value import ShardedValue

pytestmark = pytest.mark.part(4)

WIDTH, HEADS, SAMPLES, LENGTH, SOURCES = 48, 6, 3, 5, 7
READS = {"one tensor": "aaa", "keys and values": "abb", "queries and keys": "bba", "all others": "abc"}


def attention(**options: Any) -> nn.MultiheadAttention:
    torch.manual_seed(3)
    made = nn.MultiheadAttention(WIDTH, HEADS, **options)
    nn.init.normal_(made.in_proj_bias)
    return made


def inputs(reads: str, batch_first: bool) -> list[Tensor]:
    """Query, key and value; equal letters are one tensor."""
    lengths = {"a": LENGTH, "b": LENGTH if reads == "bba" else SOURCES, "c": SOURCES}
    made = {}
    for letter in sorted(set(reads)):
        shape = (SAMPLES, lengths[letter], WIDTH) if batch_first else (lengths[letter], SAMPLES, WIDTH)
        made[letter] = torch.randn(shape, generator=torch.Generator().manual_seed(ord(letter))).requires_grad_()
    return [made[letter] for letter in reads]


def gradients_of(found: tuple[Tensor, Tensor | None]) -> Tensor:
    """A loss in which all that is returned has a gradient of its own."""
    total = torch.zeros(())
    for each in (x for x in found if x is not None):
        total = total + (each.float() * torch.randn(each.shape, generator=torch.Generator().manual_seed(5))).sum()
    return total


@pytest.mark.parametrize("batch_first", [True, False])
@pytest.mark.parametrize("options", [{"need_weights": False}, {"average_attn_weights": False}, {}], ids=str)
@pytest.mark.parametrize("reads", READS.values(), ids=READS)
def test_all_heads_on_one_shard_have_the_bits_of_the_module(reads: str, options: dict[str, bool], batch_first: bool):
    """In both directions. A bias of 0 is added without rounding: the module adds it in the product, a shard to the sum."""
    whole = attention(batch_first=batch_first)
    group = ShardGroup(LocalMesh(1).transports[0], range(1))
    part = ShardedMultiheadAttention(copy.deepcopy(whole), "a", group, ((0, HEADS),))
    given = inputs(reads, batch_first)
    sources = len(given[1][0]) if batch_first else len(given[1])
    added = torch.randn(SAMPLES * HEADS, LENGTH, sources, generator=torch.Generator().manual_seed(2))
    absent = torch.arange(sources).expand(SAMPLES, -1) >= torch.tensor([[sources], [4], [2]])
    padding = torch.zeros(SAMPLES, sources).masked_fill(absent, float("-inf"))
    masks = ({"attn_mask": added[0] > 1}, {"key_padding_mask": absent}, {"attn_mask": added, "key_padding_mask": padding})
    for named in ({}, *masks):
        wanted, found = (module(*given, **options, **named) for module in (whole, part))
        for one, other in zip(found, wanted, strict=True):
            assert (one is None) == (other is None)
            assert one is None or (torch.equal(one, other) and one.stride() == other.stride())
        gradients = [
            torch.autograd.grad(gradients_of(each), [*module.parameters(), *set(given)])
            for each, module in ((wanted, whole), (found, part))
        ]
        assert all(torch.equal(*pair) for pair in zip(*gradients, strict=True))


def on_each_shard(whole: nn.MultiheadAttention, shards: int, call: Any) -> list[Any]:
    """What `call(module)` gives on every shard, the module being the shard's."""
    graph = Graph.sequential([("a", lambda: copy.deepcopy(whole))], input="x")

    def work(group: ShardGroup) -> Any:
        layout = compute_shard_layout(graph, shards, {"a": "attention"}, infer=False)
        build = {"first": 0, "last": 1, "layout": layout, "group": group, "whole": True}
        part: Any = build_shard_modules(graph, make=lambda index: copy.deepcopy(whole), **build)["a"]
        part.forward = partial(type(part).forward, part)
        return call(part, group)

    return on_shards(shards, work)[0]


def layout_of(whole: nn.MultiheadAttention, shards: int) -> Any:
    graph = Graph.sequential([("a", lambda: copy.deepcopy(whole))], input="x")
    return compute_shard_layout(graph, shards, {"a": "attention"}, infer=False)


@pytest.mark.parametrize("compute", ["float32", "bf16"])
@pytest.mark.parametrize("average", [None, False, True], ids=["no weights", "weights", "mean weights"])
@pytest.mark.parametrize("reads", READS.values(), ids=READS)
def test_shards_have_the_bits_of_the_same_heads_in_one_process(reads: str, average: bool | None, compute: str):
    """Also inside of autocast, where the output has the module's dtype: the bias is cast before it is added."""
    whole, shards = attention(batch_first=reads != "abb"), 2
    nn.init.normal_(whole.out_proj.bias)
    given = inputs(reads, whole.batch_first)
    sources = given[1].shape[1 if whole.batch_first else 0]
    mask = torch.randn(SAMPLES * HEADS, LENGTH, sources, generator=torch.Generator().manual_seed(2)).requires_grad_()
    mixed = partial(torch.autocast, "cpu", torch.bfloat16, enabled=compute == "bf16", cache_enabled=False)
    same = SameShardsOfAttention(whole, shards)
    with mixed():
        wanted = same(*given, mask, average)
        dtypes = [None if x is None else x.dtype for x in whole(*given, attn_mask=mask, need_weights=average is not None)]
    distinct = list({id(x): x for x in (*given, mask)}.values())
    leaves = [leaf[name] for leaf in same.leaves for name in sorted(leaf) if name != "out_proj.bias"]
    leaves += [same.leaves[0]["out_proj.bias"], *distinct]
    of_leaves = torch.autograd.grad(gradients_of(wanted), leaves)

    def call(module: nn.Module, group: ShardGroup) -> Any:
        mine = {id(x): x.detach().clone().requires_grad_() for x in (*given, mask)}
        with mixed():
            q, k, v, own = (mine[id(x)] for x in (*given, mask))
            found = module(q, k, v, None, average is not None, own, average_attn_weights=average is True)
        parameters = dict(module.named_parameters())
        names = sorted(name for name in parameters if name != "out_proj.bias")
        read = [*(parameters[name] for name in names), parameters["out_proj.bias"], *mine.values()]
        return found, torch.autograd.grad(gradients_of(found), read)

    each = (len(leaves) - 1 - len(distinct)) // shards
    for shard, (found, gradients) in enumerate(on_each_shard(whole, shards, call)):
        assert [None if x is None else x.dtype for x in found] == dtypes
        assert all(one is other or torch.equal(one, other) for one, other in zip(found, wanted, strict=True))
        of_shard = [*of_leaves[shard * each : (shard + 1) * each], *of_leaves[shards * each :]]
        assert all(torch.equal(one, other) for one, other in zip(gradients, of_shard, strict=True))


@pytest.mark.parametrize("sequence", [False, True], ids=["whole", "sequence"])
@pytest.mark.parametrize("compute", ["autocast", "bf16 parameters"])
def test_the_output_in_bfloat16_has_the_dtype_and_numbers_of_the_module(compute: str, sequence: bool):
    whole, length = attention(batch_first=True), 6
    nn.init.normal_(whole.out_proj.bias)
    x = torch.randn(SAMPLES, length, WIDTH, generator=torch.Generator().manual_seed(1))
    exact = whole(x, x, x, need_weights=False)[0]
    if compute == "bf16 parameters":
        whole, x = whole.bfloat16(), x.bfloat16()
    mixed = partial(torch.autocast, "cpu", torch.bfloat16, enabled=compute == "autocast", cache_enabled=False)
    with mixed():
        wanted = whole(x, x, x, need_weights=False)[0]
    assert wanted.dtype == torch.bfloat16

    def call(module: nn.Module, group: ShardGroup) -> tuple[Tensor, Tensor]:
        given: Any = x
        if sequence:
            group.sequence_parallel = True
            part = sequence_part_layout(length, group.shard, group.size)
            ((start, stop),) = part.ranges
            given = ShardedValue(x[:, start:stop].contiguous(), part, group)
        with mixed():
            made = module(given, given, given, need_weights=False)[0]
        local = made.local if sequence else made
        local.float().sum().backward()
        return local.detach(), dict(module.named_parameters())["out_proj.bias"].grad

    found = on_each_shard(whole, 2, call)
    outputs = torch.cat([out for out, _ in found], 1) if sequence else found[0][0]
    assert outputs.dtype == torch.bfloat16
    torch.testing.assert_close(outputs.float(), exact.detach(), rtol=0.02, atol=0.05)
    for _, gradient in found:
        assert gradient.dtype == whole.out_proj.bias.dtype
        torch.testing.assert_close(gradient.float(), torch.full([WIDTH], SAMPLES * length / (2.0 if sequence else 1.0)))
