"""Sentences of unequal length, collate functions for them, and a small model that reads what these make."""

from __future__ import annotations

import dataclasses
import random
from typing import Any, NamedTuple

import numpy
import torch
from torch import Tensor, nn

WORDS = 40


class Sentences:
    """Lists of ids, 3 to 9 of them, and labels: the next word."""

    def __init__(self, size: int = 23) -> None:
        self.size = size

    def __len__(self) -> int:
        return self.size

    def __getitem__(self, index: int) -> dict[str, Any]:
        length = 3 + 5 * index % 7
        ids = [(7 * index + 3 * place) % (WORDS - 1) + 1 for place in range(length)]
        return {"ids": ids, "labels": [*ids[1:], -100], "title": f"sentence {index}"}


def longest(samples: list[dict[str, Any]]) -> dict[str, Any]:
    """Pads to the longest sentence of the batch, with a mask; titles stay a list of texts."""
    most = max(len(one["ids"]) for one in samples)
    return {
        "ids": torch.tensor([one["ids"] + [0] * (most - len(one["ids"])) for one in samples]),
        "mask": torch.tensor([[1] * len(one["ids"]) + [0] * (most - len(one["ids"])) for one in samples]),
        "labels": torch.tensor([one["labels"] + [-100] * (most - len(one["labels"])) for one in samples]),
        "title": [one["title"] for one in samples],
    }


def noisy(samples: list[dict[str, Any]], share: float = 0.3) -> dict[str, Any]:
    """As `longest`; ids are replaced by random ones, drawn from python, numpy and torch."""
    batch = longest(samples)
    where = torch.rand(batch["ids"].shape) < share
    batch["ids"] = torch.where(where, random.randrange(1, WORDS), batch["ids"])
    batch["ids"][:, 0] = int(numpy.random.randint(1, WORDS))
    return batch


class Noisy:
    """A class of collate functions, as a `DataCollator` is."""

    def __init__(self, share: float) -> None:
        self.share = share

    def __call__(self, samples: list[dict[str, Any]]) -> dict[str, Any]:
        return noisy(samples, self.share)


class Inputs(NamedTuple):
    """What the model reads."""

    ids: Tensor
    mask: Tensor


@dataclasses.dataclass
class Batch:
    """A batch as an object, with a named tuple in it."""

    inputs: Inputs
    labels: Tensor
    title: list[str]


def nested(samples: list[dict[str, Any]]) -> Batch:
    """As `longest`, in an object."""
    batch = longest(samples)
    return Batch(Inputs(batch["ids"], batch["mask"]), batch["labels"], batch["title"])


class Reader(nn.Module):
    """Words are embedded, looked up in the whole sentence, and the next one is told."""

    def __init__(self, width: int = 16, layers: int = 3) -> None:
        super().__init__()
        self.embed = nn.Embedding(WORDS, width)
        self.blocks = nn.ModuleList(
            nn.TransformerEncoderLayer(width, 2, 2 * width, 0.1, batch_first=True) for _ in range(layers)
        )
        self.head = nn.Linear(width, WORDS)

    def forward(self, ids: Tensor, mask: Tensor) -> Tensor:
        x = self.embed(ids)
        for block in self.blocks:
            x = block(x, src_key_padding_mask=mask == 0)
        return self.head(x)


def next_word(output: Tensor, labels: Tensor) -> tuple[Tensor, Tensor]:
    """The sum over words that count, and how many they are."""
    lost = nn.functional.cross_entropy(output.flatten(0, 1), labels.flatten(), reduction="sum")
    return lost, (labels != -100).sum()


class Masked(Sentences):
    """Sentences with a mask, without titles."""

    def __getitem__(self, index: int) -> dict[str, Any]:
        sample = super().__getitem__(index)
        return {"ids": sample["ids"], "mask": [1] * len(sample["ids"]), "labels": sample["labels"]}


class Plain(nn.Module):
    """Layers that shards can divide, and no mask."""

    def __init__(self, width: int = 16) -> None:
        super().__init__()
        self.embed = nn.Embedding(WORDS, width)
        self.blocks = nn.ModuleList(nn.Sequential(nn.Linear(width, 32), nn.ReLU(), nn.Linear(32, width)) for _ in range(3))
        self.head = nn.Linear(width, WORDS)

    def forward(self, ids: Tensor) -> Tensor:
        x = self.embed(ids)
        for block in self.blocks:
            x = x + block(x).cumsum(1)
        return self.head(x)
