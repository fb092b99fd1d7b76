"""Layers that draw random numbers, with samples on shards: numbers are those of the whole microbatch; else one error."""

import random
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from helpers import on_shards
from torch import Tensor, nn

from raypar.errors import ModelError
from raypar.model.tensor_parallel.compute_shard_layout import compute_shard_layout
from raypar.model.tensor_parallel.meta_check import check_shards_on_meta

SAMPLES, LENGTH, WIDTH, HEADS = 4, 5, 6, 2


class Drawing(nn.Module):
    """A linear layer, then `draw` of its values and of a module."""

    def __init__(self, draw: Callable[..., Tensor], *modules: nn.Module) -> None:
        super().__init__()
        self.linear, self.draw, self.modules_of = nn.Linear(WIDTH, WIDTH), draw, nn.ModuleList(modules)

    def forward(self, x: Tensor) -> Tensor:
        random.seed(9)  # as a stage seeds it
        return self.draw(self.linear(x), *self.modules_of)


def image(x: Tensor) -> Tensor:
    return x.transpose(1, 2).unsqueeze(-1) * torch.ones(2, dtype=torch.float64)


def by_heads(x: Tensor) -> Tensor:
    return x.view(len(x), LENGTH, HEADS, -1).transpose(1, 2)


def drop_path(x: Tensor) -> Tensor:
    """As timm has it."""
    kept = x.new_empty((x.shape[0],) + (1,) * (x.ndim - 1)).bernoulli_(0.5)
    kept.div_(0.5)
    return x * kept


def attend(x: Tensor, attention: nn.Module, **named: Any) -> Tensor:
    out, weights = attention(x, x, x, **named)
    return out if weights is None else out + weights.mean(2, keepdim=True)


DRAWS: dict[str, tuple[Any, ...]] = {
    "dropout": (lambda x: F.dropout(x, 0.5),),
    "dropout of a moved value": (lambda x: F.dropout(x.transpose(1, 2), 0.5).transpose(1, 2),),
    "dropout of a moved value's function": (lambda x: F.dropout(x.transpose(0, 1).relu() + 1, 0.5).transpose(0, 1),),
    "dropout of a moved value's copy": (lambda x: F.dropout(x.transpose(0, 1).contiguous(), 0.5).transpose(0, 1),),
    "dropout of parts of a moved value": (
        lambda x: torch.cat([F.dropout(part * 2, 0.5) for part in x.transpose(0, 1).chunk(2, -1)], -1).transpose(0, 1),
    ),
    "dropout1d": (lambda x, drop: drop(x), lambda: nn.Dropout1d(0.5)),
    "dropout2d": (lambda x, drop: drop(image(x)).mean(-1).transpose(1, 2), lambda: nn.Dropout2d(0.5)),
    "dropout3d": (lambda x: F.dropout3d(image(x).unsqueeze(-1), 0.5).mean((-1, -2)).transpose(1, 2),),
    "attention": (lambda x: F.scaled_dot_product_attention(*[by_heads(x)] * 3, dropout_p=0.5).transpose(1, 2).flatten(2),),
    "rand": (lambda x: x * torch.rand(x.shape, dtype=x.dtype),),
    "rand for each sample": (lambda x: x + torch.randn(len(x), 1, WIDTH, dtype=x.dtype),),
    "rand for all samples": (lambda x: x * torch.rand(x.shape[1:], dtype=x.dtype),),
    "rand_like": (lambda x: x * torch.rand_like(x) + torch.randn_like(x) * torch.randint_like(x, 5),),
    "rand_like of a moved value": (lambda x: x * torch.randn_like(x.transpose(1, 2)).transpose(1, 2),),
    "bernoulli of a tensor": (lambda x: x * torch.bernoulli(torch.full(x.shape, 0.5)),),
    "in place": (lambda x: x * torch.zeros_like(x).normal_() + torch.empty_like(x).uniform_(-1, 1).exponential_(2.0),),
    "drop path": (drop_path,),
    "random": (lambda x: x * random.random(),),
    "MultiheadAttention": (attend, lambda: nn.MultiheadAttention(WIDTH, HEADS, batch_first=True)),
    "MultiheadAttention with a mask for each head": (
        lambda x, layer: attend(x, layer, attn_mask=torch.randn(len(x) * HEADS, LENGTH, LENGTH, dtype=x.dtype)),
        lambda: nn.MultiheadAttention(WIDTH, HEADS, batch_first=True),
    ),
    "TransformerEncoderLayer": (
        lambda x, layer: layer(x, src_key_padding_mask=x[..., 0] > 1),
        lambda: nn.TransformerEncoderLayer(WIDTH, HEADS, 8, 0.0, batch_first=True),
    ),
}


def made(draw: Callable[..., Tensor], *modules: Callable[[], nn.Module], shards: int = 2) -> tuple[Any, Any, Tensor, Tensor]:
    graph = on_shards.graph_of(lambda: [("m", Drawing(draw, *(make() for make in modules)))])
    x, y = torch.randn(2, SAMPLES, LENGTH, WIDTH, dtype=torch.float64, generator=torch.Generator().manual_seed(1))
    return graph, compute_shard_layout(graph, shards, None, {"samples": "shards"}), x, y


@pytest.mark.parametrize("shards", [2, SAMPLES])
@pytest.mark.parametrize("name", [pytest.param(name, marks=() if "moved" in name else pytest.mark.part(2)) for name in DRAWS])
def test_numbers_are_those_of_the_whole_microbatch(name: str, shards: int):
    """Shards with equally many samples, or one, have different ones, and those that one process draws."""
    graph, layout, x, y = made(*DRAWS[name], shards=shards)
    whole = on_shards.whole(graph, F.mse_loss, x, y)
    runs, _ = on_shards.sharded(graph, layout, F.mse_loss, x, y)
    assert max(on_shards.errors(runs, whole, layout).values()) <= 1e-12


REFUSED: dict[str, tuple[Any, ...]] = {
    "alpha_dropout": (lambda x, drop: drop(x), lambda: nn.AlphaDropout(0.5)),
    "feature_alpha_dropout": (lambda x, drop: drop(x), lambda: nn.FeatureAlphaDropout(0.5)),
    "bernoulli": (lambda x: x * torch.bernoulli(x.sigmoid()),),
    "bernoulli_": (lambda x: x * torch.zeros_like(x).bernoulli_(x.detach().sigmoid()),),
    "normal": (lambda x: torch.normal(x, 1.0) + x,),
    "poisson": (lambda x: x * torch.poisson(x.exp()),),
    "multinomial": (lambda x: x * torch.multinomial(x.mean(1).softmax(-1), 1).unsqueeze(1),),
    "indexing": (lambda x: x + x[torch.randperm(len(x))],),
    "gumbel_softmax": (lambda x: F.gumbel_softmax(x, dim=-1),),
    "rrelu": (lambda x: F.rrelu(x, training=True),),
    "nn.MultiheadAttention with dropout": (attend, lambda: nn.MultiheadAttention(WIDTH, HEADS, 0.5, batch_first=True)),
    "lstm": (lambda x, layer: layer(x)[0], lambda: nn.LSTM(WIDTH, WIDTH, 2, dropout=0.5, batch_first=True)),
    "gru": (lambda x, layer: layer(x)[0], lambda: nn.GRU(WIDTH, WIDTH, 2, dropout=0.5, batch_first=True)),
}


@pytest.mark.parametrize("name", REFUSED)
def test_what_cannot_draw_the_numbers_of_the_whole_microbatch_is_refused_before_the_run(name: str):
    graph, layout, x, y = made(*REFUSED[name])
    with pytest.raises(ModelError, match=rf"{name} of a value \[.*\(the samples: plan\.layout\)") as error:
        check_shards_on_meta(graph, layout, F.mse_loss, {"x": x, "y": y}, "y", dtype=torch.float64)
    assert "take samples out of plan.layout" in error.value.cure
