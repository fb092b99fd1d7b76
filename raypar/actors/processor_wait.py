"""How long a thread has waited for a processor that others had: what Linux counts for every thread."""

from __future__ import annotations

from pathlib import Path


def processor_wait_s(thread: int) -> float:
    """Seconds in which `thread` (of this process, its native id) could have run and did not, since it began; 0 where the kernel
    does not say, so that nothing is excused there."""
    try:
        return int(Path(f"/proc/self/task/{thread}/schedstat").read_text().split()[1]) / 1e9
    except (OSError, ValueError, IndexError):
        return 0.0
