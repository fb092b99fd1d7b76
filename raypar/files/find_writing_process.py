"""Finds the process of this machine that has a file open for writing, and says since when it runs."""

from __future__ import annotations

import contextlib
import os
import time
from collections.abc import Iterable, Mapping
from pathlib import Path

START_FIELD = 22 - 3
"""Index of a process's start in /proc/PID/stat (clock ticks since the machine was started) behind its name; see proc(5)."""


def find_writing_process(path: Path, proc: Path = Path("/proc")) -> int | None:
    """The process that has `path` open for writing, of several the one that is the parent of the others; None without one.

    Only processes that this user may look at are seen. /proc/locks would say it too, but not in every container.
    """
    wanted = path.stat()
    found: dict[int, int] = {}
    for folder in proc.iterdir():
        if folder.name.isdecimal() and int(folder.name) != os.getpid():
            with contextlib.suppress(OSError, ValueError):  # it has ended, or is somebody else's
                if any(_writes(fd, folder, wanted) for fd in (folder / "fd").iterdir()):
                    found[int(folder.name)] = _parent(folder)
    return oldest_process(found)


def oldest_process(parents: Mapping[int, int]) -> int | None:
    """Of processes, given with their parents, the first one whose parent is none of them; None for none."""
    heads: Iterable[int] = (pid for pid, parent in parents.items() if parent not in parents)
    return min(heads, default=None)


def _writes(fd: Path, process: Path, wanted: os.stat_result) -> bool:
    """Whether a descriptor is the file `wanted`, open for writing."""
    with contextlib.suppress(OSError, ValueError, IndexError):
        seen = fd.stat()
        if (seen.st_dev, seen.st_ino) != (wanted.st_dev, wanted.st_ino):
            return False
        flags = (process / "fdinfo" / fd.name).read_text().partition("flags:")[2].split()[0]
        return int(flags, 8) & os.O_ACCMODE != os.O_RDONLY
    return False


def _parent(process: Path) -> int:
    """The process's parent."""
    return int((process / "stat").read_text().rpartition(")")[2].split()[1])


def describe_process(pid: int, proc: Path = Path("/proc")) -> str:
    """`process 4711, which was started 3 minutes ago (at 22:40:05)`; without its start where /proc does not say it."""
    try:
        ticks = int((proc / str(pid) / "stat").read_text().rpartition(")")[2].split()[START_FIELD])
        up_s = float((proc / "uptime").read_text().split()[0])
        age_s = max(0.0, up_s - ticks / os.sysconf("SC_CLK_TCK"))
    except (OSError, ValueError, IndexError):
        return f"process {pid}"
    began = time.localtime(time.time() - age_s)
    day = time.strftime("%Y-%m-%d ", began) if age_s > DAY_S / 2 else ""
    return f"process {pid}, which was started {describe_age(age_s)} ago (at {day}{time.strftime('%H:%M:%S', began)})"


DAY_S = 24 * 3600.0


def describe_age(seconds: float) -> str:
    """A time in its largest unit of which there are two: `90 s`, `5 minutes`, `30 hours`."""
    for unit, length_s in (("days", DAY_S), ("hours", 3600.0), ("minutes", 60.0)):
        if seconds >= 2 * length_s:
            return f"{seconds / length_s:.0f} {unit}"
    return f"{seconds:.0f} s"
