"""Models that are ugly on purpose, as layer graphs of at least eight layers, and jobs around them.

`tangled`: a parameter tied within a stage and across stages, a skip with three consumers, convolution and LayerNorm, a
layer that returns a transposed (not contiguous) value, frozen parameters, dropout drawn from torch's generator, a
token-weighted loss whose counts differ, an integer value that crosses stages. `uneasy`: the same, with parameters that are
empty, never used, and used for some microbatches only. `plain`: a Sequential with a mean loss (sample-weighted). `relayed`,
`branching`: see `relayed_models.py`.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import torch
import torch.nn.functional as F
from helpers import norm_models, relayed_models
from torch import Tensor, nn

from raypar.job import DataConfig, Job, LossConfig, LrScheduleConfig, ModelConfig, OptimizerConfig
from raypar.model.graph import Graph, Layer

WIDTH, VOCAB, SEQ = 8, 11, 6


class Embed(nn.Module):
    """tokens [mb, seq] -> x [mb, seq, width], and the padding mask as an integer value that later layers use."""

    def __init__(self) -> None:
        super().__init__()
        self.table = nn.Embedding(VOCAB, WIDTH)

    def forward(self, tokens: Tensor) -> tuple[Tensor, Tensor]:
        return self.table(tokens), (tokens != 0).long()


class Mix(nn.Module):
    """Uses its input three times, so that it gathers gradients inside the layer."""

    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(WIDTH)
        self.up = nn.Linear(WIDTH, 2 * WIDTH)
        self.down = nn.Linear(2 * WIDTH, WIDTH, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.down(F.gelu(self.up(self.norm(x)))) + 0.1 * x.tanh()


class Convolve(nn.Module):
    """x [mb, seq, width] -> the same, transposed twice: its output is not contiguous."""

    def __init__(self) -> None:
        super().__init__()
        self.conv = nn.Conv1d(WIDTH, WIDTH, 3, padding=1)

    def forward(self, x: Tensor) -> Tensor:
        return self.conv(x.transpose(1, 2)).relu().transpose(1, 2)


class SkipAdd(nn.Module):
    """Adds a skip value through a weight of its own."""

    def __init__(self, frozen: bool = False) -> None:
        super().__init__()
        self.gate = nn.Linear(WIDTH, WIDTH)
        self.gate.bias.requires_grad_(not frozen)

    def forward(self, x: Tensor, skip: Tensor) -> Tensor:
        return x + self.gate(skip)


class Drop(nn.Module):
    """Dropout, on rows that are not padding."""

    def forward(self, x: Tensor, mask: Tensor) -> Tensor:
        return F.dropout(x, 0.2, self.training) * mask.unsqueeze(-1)


class Uneasy(nn.Module):
    """x [.., width] -> the same. Its parameters: `none` has no elements, `never` no gradient, `frozen` neither, and `rare` has
    one from microbatches whose values add up to more than 0."""

    def __init__(self, width: int = WIDTH) -> None:
        super().__init__()
        self.none, self.never = nn.Parameter(torch.empty(0, width)), nn.Parameter(torch.ones(3, width))
        self.rare, self.often = nn.Parameter(torch.ones(width)), nn.Parameter(torch.ones(width))
        self.frozen = nn.Parameter(torch.linspace(0.9, 1.1, width), requires_grad=False)

    def forward(self, x: Tensor) -> Tensor:
        y = (x * self.often + F.linear(x, self.none).sum(-1, keepdim=True)) * self.frozen
        return y * self.rare if x.is_meta or x.detach().sum() > 0 else y


class Frozen(nn.Linear):
    """A Linear that is not trained."""

    def __init__(self) -> None:
        super().__init__(WIDTH, WIDTH)
        self.requires_grad_(False)


class Tail(nn.Module):
    """x [mb, seq, width] and the skip -> logits [mb, seq, vocab] by the embedding's own table (tied)."""

    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(WIDTH)
        self.table = nn.Embedding(VOCAB, WIDTH)

    def forward(self, x: Tensor, skip: Tensor) -> Tensor:
        return F.linear(self.norm(x + skip), self.table.weight)


def tangled() -> Graph:
    """Nine layers; `e` is read by four layers, `mask` by two."""
    return Graph(
        (
            Layer("embed", Embed, ("x",), ("e", "mask")),
            Layer("mix0", Mix, ("e",), ("a",)),
            Layer("conv", Convolve, ("a",), ("b",)),
            Layer("skip0", SkipAdd, ("b", "e"), ("c",)),
            Layer("mix1", Mix, ("c",), ("d",)),
            Layer("drop", Drop, ("d", "mask"), ("f",)),
            Layer("skip1", lambda: SkipAdd(frozen=True), ("f", "e"), ("g",)),
            Layer("frozen", Frozen, ("g",), ("h",)),
            Layer("tail", Tail, ("h", "e"), ("logits",)),
        ),
        output="logits",
        ties=(
            ("embed.table.weight", "tail.table.weight"),
            ("mix0.up.weight", "mix1.up.weight"),
            ("skip0.gate.weight", "skip1.gate.weight"),
        ),
    )


def uneasy() -> Graph:
    """`tangled` with a tenth layer in its middle."""
    graph = tangled()
    before, drop, after = graph.layers[:5], graph.layers[5], graph.layers[6:]
    return replace(
        graph, layers=(*before, Layer("uneasy", Uneasy, ("d",), ("u",)), replace(drop, inputs=("u", "mask")), *after)
    )


def token_loss(logits: Tensor, targets: Tensor) -> tuple[Tensor, Tensor]:
    """Cross-entropy over tokens that are not padding: (sum, count)."""
    total = F.cross_entropy(logits.flatten(0, 1), targets.flatten(), ignore_index=0, reduction="sum")
    return total, (targets != 0).sum()


def plain() -> nn.Sequential:
    """Eight layers, a chain, one parameter shared by two of them."""
    first, again = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH)
    again.weight = first.weight
    return nn.Sequential(
        nn.Linear(SEQ, WIDTH),
        nn.Tanh(),
        first,
        nn.LayerNorm(WIDTH),
        again,
        nn.ReLU(),
        nn.Linear(WIDTH, WIDTH),
        nn.Linear(WIDTH, 1),
    )


def mean_loss(output: Tensor, target: Tensor) -> Tensor:
    """Mean squared error over the samples of a microbatch."""
    return ((output.squeeze(-1) - target) ** 2).mean()


class Tokens(torch.utils.data.Dataset[tuple[Tensor, Tensor]]):
    """`size` samples made from a fixed seed; some tokens are padding (0)."""

    def __init__(self, size: int = 37) -> None:
        self.tokens = torch.randint(0, VOCAB, (size, SEQ + 1), generator=torch.Generator().manual_seed(5))

    def __len__(self) -> int:
        return len(self.tokens)

    def __getitem__(self, index: int) -> tuple[Tensor, Tensor]:
        return self.tokens[index, :-1], self.tokens[index, 1:]


class Numbers(torch.utils.data.Dataset[dict[str, Any]]):
    """Dict samples with noise drawn in `__getitem__`: augmentation that must not depend on the worker."""

    def __len__(self) -> int:
        return 23

    def __getitem__(self, index: int) -> dict[str, Any]:
        x = torch.linspace(-1, 1, SEQ) * (index + 1) / 23 + 0.05 * torch.randn(SEQ)
        return {"x": x, "y": float(index % 5) / 5}


MODELS: dict[str, tuple[Any, Any, Any, str]] = {
    "tangled": (tangled, token_loss, Tokens, "*norm*"),
    "uneasy": (uneasy, token_loss, Tokens, "*norm*"),
    "plain": (plain, mean_loss, Numbers, "*.bias"),
    **norm_models.MODELS,
    "relayed": (relayed_models.relayed, relayed_models.loss, Numbers, "*.bias"),
    "branching": (relayed_models.branching, relayed_models.loss, Numbers, "*.bias"),
}
"""Name -> model, loss, data set, pattern of the parameters without weight decay."""


def job(model: str = "tangled", *, microbatches: int = 4, batch_size: int = 0, steps: int = 5, **changes: Any) -> Job:
    """A job of `steps` AdamW steps with clipping; by default a ragged cut: 2 or 3 samples a microbatch."""
    made, loss, data, undecayed = MODELS[model]
    fields: dict[str, Any] = {
        "name": model.replace(" ", "-"),
        "seed": 11,
        "steps": steps,
        "batch_size": batch_size or 2 * microbatches + microbatches // 2 + 1,
        "microbatches": microbatches,
        "model": ModelConfig(function=made),
        "loss": LossConfig(function=loss),
        "data": DataConfig(function=data),
        "optimizer": OptimizerConfig(
            function="torch.optim:AdamW",
            args={"lr": 1e-2, "weight_decay": 0.1},
            groups=({"match": undecayed, "weight_decay": 0.0},),
        ),
        "lr_schedule": LrScheduleConfig(function=warm),
        "clip_norm": 0.5,
    }
    return Job(**{**fields, **changes})


def warm(step: int) -> float:
    """Learning-rate factor."""
    return min(1.0, (step + 1) / 3)
