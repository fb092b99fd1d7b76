"""How much memory a process and its GPU use. Torch is imported in a function only, so the driver starts quickly."""

from __future__ import annotations

import contextlib
import os
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    import torch

STATM = "/proc/self/statm"
"""Its second number is the resident memory, in pages."""
PAGE_BYTES = os.sysconf("SC_PAGE_SIZE")


def memory_in_use(device: torch.device) -> dict[str, int]:
    """Kind of memory -> bytes: `rss`, the resident memory of this process; on a GPU also what PyTorch's allocator has given to
    tensors (`gpu_allocated`) and holds in all (`gpu_reserved`). A kind that cannot be read is left out."""
    found: dict[str, int] = {}
    with contextlib.suppress(OSError, ValueError, IndexError), open(STATM) as file:
        found["rss"] = int(file.read().split()[1]) * PAGE_BYTES
    if device.type == "cuda":
        import torch

        found["gpu_allocated"] = torch.cuda.memory_allocated(device)
        found["gpu_reserved"] = torch.cuda.memory_reserved(device)
    return found
