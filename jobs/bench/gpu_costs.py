"""One GPU: parts of raypar's step that a plain loop has not, each by itself, beside what a plain loop does in its place."""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable
from typing import Any, NamedTuple

import torch
from gpu_loop import finish
from models import CLIP_NORM, SEED, Batches, Workload
from torch import Tensor

from examples import gpt
from raypar.worker.norm_and_weights_hash import read_together, square_gradients
from raypar.worker.process.gpu_setup import DeviceBatchSource
from raypar.worker.process.seed_generators import make_seeder
from raypar.worker.process.torch_state_guard import TorchStateGuard


class Part(NamedTuple):
    """A call of raypar's, and the plain loop's call in its place."""

    name: str
    """What both do."""
    times_a_step: str
    """How often a step has it."""
    ours: Callable[[], object]
    """raypar's call."""
    plain: Callable[[], object] | None
    """The plain loop's; None: it has none."""


class HostBatches:
    """See `BatchSource`: one microbatch in host memory, again and again."""

    def __init__(self, fields: dict[str, Tensor]) -> None:
        self._fields = fields

    def get(self, step: int, microbatch: int) -> dict[str, Tensor]:
        """See `BatchSource.get`."""
        return self._fields


def parts(work: Workload, vocab: int, microbatches: int, device: torch.device) -> list[Part]:
    """All that are measured, with a model of such sizes."""
    with torch.device("meta"):
        shapes = [parameter.shape for parameter in gpt.layers(vocab=vocab, **work.model_args).parameters()]
    torch.manual_seed(SEED)
    parameters = [torch.nn.Parameter(torch.zeros(shape, device=device)) for shape in shapes]
    for parameter in parameters:
        parameter.grad = torch.randn(parameter.shape, device=device)
    gradients = [parameter.grad for parameter in parameters if parameter.grad is not None]
    x, y = (field.chunk(microbatches)[0] for field in Batches(work).get(0))
    source = DeviceBatchSource(HostBatches({"x": x, "y": y}), device)
    on_gpu = device.type == "cuda"
    pinned = [field.pin_memory() if on_gpu else field for field in (x, y)]
    guard, seed = TorchStateGuard(torch.get_num_threads()), make_seeder(device)
    guard.accept()
    return [
        Part(
            f"norm of {len(gradients)} gradients, {sum(map(Tensor.numel, gradients)):,} elements",
            "once",
            lambda: read_together(square_gradients(gradients)),
            lambda: torch.nn.utils.clip_grad_norm_(parameters, CLIP_NORM).item(),
        ),
        Part(
            "a microbatch to the device",
            "each microbatch",
            lambda: source.get(0, 0),
            lambda: [field.to(device, non_blocking=True) for field in pinned],
        ),
        Part("generators seeded", "each layer and microbatch", lambda: seed(SEED), None),
        Part("the process's state compared", "each layer and microbatch", lambda: guard.check("the bench"), None),
        Part("all of the process's state compared", "once", lambda: guard.check_all("the bench"), None),
    ]


def measure(work: Workload, vocab: int, microbatches: int, rounds: int, device: torch.device) -> list[dict[str, Any]]:
    """Medians in microseconds, of each part in turns with the plain loop's: until the call returns, and until the device has
    done what it asked for."""
    rows = []
    for part in parts(work, vocab, microbatches, device):
        found: dict[str, Any] = {"name": part.name, "times": part.times_a_step}
        calls = {"ours": part.ours, **({"plain": part.plain} if part.plain is not None else {})}
        took: dict[str, list[tuple[float, float]]] = {who: [] for who in calls}
        for number in range(rounds + 1):
            for who, call in calls.items():
                timed = _microseconds(call, device)
                if number:  # the first one loads kernels
                    took[who].append(timed)
        for who, times in took.items():
            found[who] = [statistics.median(column) for column in zip(*times, strict=True)]
        rows.append(found)
    return rows


def _microseconds(call: Callable[[], object], device: torch.device) -> tuple[float, float]:
    finish(device)
    start = time.perf_counter()
    call()
    returned = time.perf_counter()
    finish(device)
    return 1e6 * (returned - start), 1e6 * (time.perf_counter() - start)
