"""Sets up a process that may compute on a GPU: environment, PyTorch's settings, batches copied from the host."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import torch
from torch import Tensor

from raypar.comm.buffer_pool import CPU
from raypar.worker.data.microbatch_loader import BatchSource

GPU_WORKER_ENVIRONMENT = {"CUBLAS_WORKSPACE_CONFIG": ":4096:8", "RAY_EXPERIMENTAL_NOSET_CUDA_VISIBLE_DEVICES": "0"}
"""Variables that a GPU worker's process is started with. Without the first, the order of cuBLAS's sums may depend on what else
the GPU is doing. Without the second, Ray may show every worker all GPUs (some clusters are set up so), and each would take the
first."""


def configure_torch(device: torch.device, *, exact: bool) -> None:
    """Set PyTorch's options for a worker on `device`; once per process.

    `exact`: equal computations must give equal bits at all times (`raypar/NUMERICS.md`, the numerics contract). Operations that
    cannot promise that raise. A warning would not do: PyTorch then leaves some that can (memory-efficient attention) inexact.
    """
    if device == CPU or not exact:
        return
    torch.use_deterministic_algorithms(True)
    torch.utils.deterministic.fill_uninitialized_memory = False  # type: ignore[attr-defined]  # filling would write all memory once more
    torch.backends.cudnn.benchmark = False


@dataclass(frozen=True)
class DeviceBatchSource:
    """A `BatchSource` whose tensors are copies, on a device, of those of another source."""

    source: BatchSource
    """Reads the batches into host memory."""
    device: torch.device
    """Where the copies lie."""

    def get(self, step: int, microbatch: int) -> Mapping[str, Tensor]:
        """See `BatchSource.get`."""
        return {name: tensor.to(self.device) for name, tensor in self.source.get(step, microbatch).items()}
