"""What differs where a worker computes on a GPU: settings of its process, the generator of its masks, batches from the host."""

from __future__ import annotations

import random
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, Protocol

import numpy
import torch
from torch import Tensor

from raypar.comm.buffer_pool import CPU

ENVIRONMENT = {"CUBLAS_WORKSPACE_CONFIG": ":4096:8", "RAY_EXPERIMENTAL_NOSET_CUDA_VISIBLE_DEVICES": "0"}
"""What a GPU worker's process is to be started with, or cuBLAS may take a sum's order from what else the GPU is doing, and, on
a cluster set up for others, Ray may show every worker all GPUs, of which each would take the first."""


def configure_process(device: torch.device, *, exact: bool) -> None:
    """Once per process. `exact`: the same numbers again, whatever the hour (DESIGN 4.5); operations that cannot promise that
    raise, because a warning would leave those that can as they are (memory-efficient attention)."""
    if device == CPU or not exact:
        return
    torch.use_deterministic_algorithms(True)
    torch.utils.deterministic.fill_uninitialized_memory = False  # it would write all memory once more
    torch.backends.cudnn.benchmark = False


def make_seeder(device: torch.device) -> Callable[[int], Any]:
    """A function that seeds the generators that layers draw from: PyTorch's, Python's and NumPy's (rule 3).

    Cheaper than `torch.manual_seed`, which visits every kind of device (65 us).
    """
    generators = [torch.default_generator]
    if device.type == "cuda":
        generators.append(torch.cuda.default_generators[device.index or 0])

    def seed(number: int) -> None:
        for generator in generators:
            generator.manual_seed(number)
        random.seed(number % 2**32)
        numpy.random.seed(number % 2**32)

    return seed


class HostBatchSource(Protocol):
    """See `interpreter.BatchSource`."""

    def get(self, step: int, microbatch: int) -> Mapping[str, Tensor]:
        """The fields of one microbatch."""


@dataclass(frozen=True)
class DeviceBatchSource:
    """A source of batches, whose tensors are brought to a device."""

    source: HostBatchSource
    device: torch.device

    def get(self, step: int, microbatch: int) -> Mapping[str, Tensor]:
        """See `Source.get`."""
        return {name: tensor.to(self.device) for name, tensor in self.source.get(step, microbatch).items()}
