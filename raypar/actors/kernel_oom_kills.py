"""Counts the processes that the kernel's OOM killer has ended on this machine, in containers too."""

from __future__ import annotations

from pathlib import Path

VMSTAT = Path("/proc/vmstat")
"""The file whose line `oom_kill` has the count since the machine was started."""


class KernelOomKills:
    """Counts OOM kills since the last call of `new`."""

    def __init__(self, path: Path = VMSTAT) -> None:
        self._path = path
        """The kernel's counters."""
        self._seen = self._count()
        """The count at the last look."""

    def new(self) -> int:
        """How many there were since the last look; 0 where the kernel does not say."""
        before, self._seen = self._seen, self._count()
        return max(0, self._seen - before)

    def _count(self) -> int:
        """The kernel's count; 0 where it cannot be read."""
        try:
            lines = self._path.read_text().splitlines()
            return next((int(line.split()[1]) for line in lines if line.startswith("oom_kill ")), 0)
        except (OSError, ValueError, IndexError):
            return 0
