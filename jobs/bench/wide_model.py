"""A model whose state is large and whose steps are short; every worker writes down what it receives of the state of others."""

from __future__ import annotations

import json
import time
from collections import OrderedDict
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from raypar.worker.elastic_worker import ElasticWorker

LAYERS = 8
COPIES = 3
"""A parameter and the two moments that AdamW keeps for it."""

_diary: str | None = None
_exchange = ElasticWorker._exchange


def _counted(self: ElasticWorker, part: Any, transport: Any, base: Any) -> Any:
    start = time.time()
    found = yield from _exchange(self, part, transport, base)
    tensors = [
        v for holdings in found.values() for holding in holdings for v in holding.state.values() if isinstance(v, Tensor)
    ]
    received = sum(v.numel() * v.element_size() for v in tensors)
    if _diary is not None:
        line = {"worker": self.worker, "time": time.time(), "seconds": time.time() - start, "bytes": received}
        with Path(_diary).open("a") as file:
            file.write(json.dumps(line) + "\n")
    return found


ElasticWorker._exchange = _counted  # type: ignore[method-assign]


class Layer(nn.Module):
    """x [samples, width] -> same shape: linear, tanh."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.linear = nn.Linear(width, width)

    def forward(self, x: Tensor) -> Tensor:
        return torch.tanh(self.linear(x))


def layers(width: int, diary: str | None = None) -> nn.Sequential:
    """`LAYERS` layers; `diary`: a file that gets a line for every exchange of state."""
    global _diary
    _diary = diary
    return nn.Sequential(OrderedDict((f"layer{i}", Layer(width)) for i in range(LAYERS)))


def width_for(state_bytes: float) -> int:
    """The width with which parameters and optimizer state in float32 take about so many bytes."""
    return round((state_bytes / (LAYERS * COPIES * 4)) ** 0.5)


def layer_bytes(width: int) -> int:
    """State of one layer."""
    return (width * width + width) * COPIES * 4


def samples(width: int, size: int = 200) -> torch.utils.data.TensorDataset:
    """(x [width], y [width])."""
    x, y = torch.randn(2, size, width, generator=torch.Generator().manual_seed(1))
    return torch.utils.data.TensorDataset(x, y)
