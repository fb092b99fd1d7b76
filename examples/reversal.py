"""Digits to be written backwards, a task for encoder-decoder models. Nothing here knows raypar."""

from __future__ import annotations

import torch
from torch import Tensor

START, FIRST_DIGIT, VOCAB = 0, 1, 11
"""The token that begins the decoder's input; that of the digit 0; tokens in all."""


class Reversal(torch.utils.data.Dataset[dict[str, Tensor]]):
    """Sample: random digits `input_ids` [length], and the same from the last to the first, `labels`. Made from the index."""

    def __init__(self, samples: int = 20_000, first: int = 0, length: int = 8) -> None:
        self.samples, self.first, self.length = samples, first, length

    def __len__(self) -> int:
        return self.samples

    def __getitem__(self, index: int) -> dict[str, Tensor]:
        generator = torch.Generator().manual_seed(self.first + index)
        digits = torch.randint(FIRST_DIGIT, VOCAB, (self.length,), generator=generator)
        return {"input_ids": digits, "labels": digits.flip(0)}
