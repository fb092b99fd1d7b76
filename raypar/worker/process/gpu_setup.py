"""Sets up a process that may compute on a GPU: environment, PyTorch's settings, batches copied from the host."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping

import torch
from torch import Tensor

from raypar.comm.buffer_pool import CPU
from raypar.errors import error_first_line
from raypar.model.copy_on_device import remember_source
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


class DeviceBatchSource:
    """A `BatchSource` whose tensors are copies, on a device, of those of another source.

    On a GPU the host does not wait for a copy: it is made from pinned memory, in a stream of its own, beside the computation
    that the host is ahead of; the stream that computes waits for it. `tell` gets a (key, line) if memory cannot be pinned.
    """

    def __init__(
        self, source: BatchSource, device: torch.device, tell: Callable[[Iterable[tuple[str, str]]], None] = lambda lines: None
    ) -> None:
        self.source = source
        """Reads the batches into host memory."""
        self.device = device
        """Where the copies lie."""
        self._tell, self._can_pin = tell, True
        self._copying = torch.cuda.Stream(device) if device.type == "cuda" else None

    def get(self, step: int, microbatch: int) -> Mapping[str, Tensor]:
        """See `BatchSource.get`."""
        fields = self.source.get(step, microbatch)
        copies = self._copies(fields)
        for name, copied in copies.items():
            remember_source(copied, fields[name])
        return copies

    def _copies(self, fields: Mapping[str, Tensor]) -> dict[str, Tensor]:
        if self._copying is None:
            return {name: tensor.to(self.device) for name, tensor in fields.items()}
        computing, copies = torch.cuda.current_stream(self.device), {}
        for name, tensor in fields.items():
            if tensor.layout is torch.strided:
                with torch.cuda.stream(self._copying):
                    copies[name] = self._pinned(tensor).to(self.device, non_blocking=True)
                copies[name].record_stream(computing)  # else the allocator gives its memory to the next copy too early
            else:  # the parts of sparse tensors cannot be recorded
                copies[name] = tensor.to(self.device)
        computing.wait_stream(self._copying)
        return copies

    def _pinned(self, tensor: Tensor) -> Tensor:
        """The tensor in page-locked memory, which PyTorch gives to others only after the copy from it; itself if that is
        refused."""
        if self._can_pin:
            try:
                return tensor.pin_memory()
            except RuntimeError as error:
                self._can_pin = False
                line = f"no pinned memory ({error_first_line(error)}): the host waits while batches are copied to {self.device}"
                self._tell([("pinned memory", line)])
        return tensor
