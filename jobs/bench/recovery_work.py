"""What all contenders of the recovery bench train: a small GPT whose blocks also rest, so that a step has a length, and
what they write down: a line a committed step. Needs torch and nothing else: torchft lives in an environment of its own.
"""

from __future__ import annotations

import hashlib
import json
import os
import time
from pathlib import Path
from typing import Any

import torch
from models import Batches, Workload, mean_loss
from torch import Tensor, nn

from examples import gpt

WORK = Workload(depth=4, width=32, heads=2, context=16, batch_size=24)
MICROBATCHES = 12
"""Of two samples: 12 can be shared out evenly among 1, 2, 3 and 4 workers."""

STEP_S = 0.3
"""The rest of 4 data-parallel workers in a step."""

REST_MS = 1e3 * STEP_S * 4 / WORK.batch_size / WORK.depth
"""Of one block for one sample; a third of it in the forward pass."""

OPTIMIZER = {"lr": 1e-3}
SEED = 1337


class _RestsInBackward(torch.autograd.Function):
    """Identity whose backward sleeps."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, seconds: float) -> Tensor:
        ctx.seconds = seconds
        return x.view_as(x)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor, None]:
        time.sleep(ctx.seconds)
        return gradients[0], None


class Resting(nn.Module):
    """x [samples, seq, width] -> same shape: `block`, and a rest that grows with the number of samples."""

    def __init__(self, block: nn.Module, rest_ms: float) -> None:
        super().__init__()
        self.block, self.rest_ms = block, rest_ms

    def forward(self, x: Tensor) -> Tensor:
        y: Tensor = self.block(x)
        if not self.training or x.is_meta:
            return y
        seconds = len(x) * self.rest_ms / 1e3
        time.sleep(seconds / 3)
        return _RestsInBackward.apply(y, seconds * 2 / 3)  # type: ignore[no-any-return, no-untyped-call]


def layers(rest_ms: float = REST_MS) -> nn.Sequential:
    """The model; the blocks between embedding and head rest."""
    model = gpt.layers(**WORK.model_args)
    for name, layer in model.named_children():
        if isinstance(layer, gpt.Block):
            setattr(model, name, Resting(layer, rest_ms))
    return model


def training(share: tuple[int, int]) -> tuple[nn.Sequential, Batches]:
    """A peer's model, with the same weights in every process, and its part (index, of) of every batch."""
    torch.set_num_threads(1)
    torch.manual_seed(SEED)
    return layers(), Batches(WORK, share)


def loss(model: nn.Module, pair: tuple[Tensor, Tensor]) -> Tensor:
    """Mean over the samples given."""
    return mean_loss(model(pair[0]), pair[1])


def weights_sha256(model: nn.Module) -> str:
    """Over all parameters by name, as raypar does: name, zero byte, bytes."""
    digest = hashlib.sha256()
    for name, parameter in sorted(model.named_parameters()):
        digest.update(name.encode() + b"\0")
        digest.update(bytes(parameter.detach().contiguous().flatten().view(torch.uint8).tolist()))
    return digest.hexdigest()


class Diary:
    """One file a process, one JSON line an event: `at_s` on the clock that all processes of a machine share."""

    def __init__(self, folder: str | Path) -> None:
        self.file = (Path(folder) / f"{os.getpid()}.jsonl").open("a", buffering=1)

    def note(self, kind: str, **facts: Any) -> None:
        """Write at once."""
        self.file.write(json.dumps({"at_s": time.monotonic(), "kind": kind, "pid": os.getpid(), **facts}, default=str) + "\n")

    def step(self, step: int, *, workers: int, samples: int) -> None:
        """`step`, counted from 1, is committed: `workers` computed it and `samples` are in its gradient."""
        self.note("step", step=step, workers=workers, samples=samples)
