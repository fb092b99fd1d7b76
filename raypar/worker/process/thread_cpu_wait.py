"""How long a thread was runnable without a processor, as Linux counts it for every thread."""

from __future__ import annotations

from pathlib import Path


def thread_cpu_wait_s(thread: int) -> float:
    """Seconds since its start in which `thread` (native id, of this process) was runnable but had no processor.

    0 where the kernel does not report it.
    """
    try:
        return int(Path(f"/proc/self/task/{thread}/schedstat").read_text().split()[1]) / 1e9
    except (OSError, ValueError, IndexError):
        return 0.0
