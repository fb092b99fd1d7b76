"""Reads `nn.SyncBatchNorm` as the batch norm of one microbatch.

In PyTorch it sums its statistics over all processes that train. Here other microbatches of the step may not be there yet, and
a microbatch is one whole, on however many shards: its statistics are those of a microbatch, as every batch norm's are.
"""

from __future__ import annotations

from torch import Tensor, nn

from raypar.torch_compat.modules import BatchNorm


class BatchNormOfMicrobatch(BatchNorm):
    """A batch norm of values with two dims or more, as `nn.SyncBatchNorm` takes them."""

    def _check_input_dim(self, input: Tensor) -> None:
        if input.dim() < 2:
            raise ValueError(f"expected at least 2D input (got {input.dim()}D input)")


def read_synchronised_norms(module: nn.Module) -> None:
    """Make every `nn.SyncBatchNorm` inside a module a `BatchNormOfMicrobatch`. Subclasses of it are left alone."""
    for part in module.modules():
        if type(part) is nn.SyncBatchNorm:
            part.process_group = None  # cannot be sent to workers
            part.__class__ = BatchNormOfMicrobatch  # type: ignore[assignment]
