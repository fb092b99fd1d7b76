"""Room that is kept in the temporary folder of a local Ray cluster, for a new driver: Ray starts no process while its logs have
none. A process that it starts dies at its first line, and Ray starts the next one.
"""

from __future__ import annotations

import contextlib
import os
import shutil
from collections.abc import Iterator
from pathlib import Path

RESERVE_BYTES = 1 << 20
"""Room that is kept: some lines for each of many processes."""
SHARE = 8
"""A small disk is asked for no more than one part of so many of its free room."""
FULL_BYTES = 64 << 10
"""With less room than this Ray's processes may not begin."""

_reserves: list[Path] = []
"""The reserve of this process's local Ray cluster, if there is one."""


@contextlib.contextmanager
def room_for_new_driver(folder: Path) -> Iterator[None]:
    """Keep some room in `folder`, of a local Ray cluster, during the block. Where there is too little nothing is kept."""
    path = folder / "reserve"
    with contextlib.suppress(OSError):  # no room: the cluster may still do
        size = min(RESERVE_BYTES, shutil.disk_usage(folder).free // SHARE)
        with path.open("wb") as file:
            os.posix_fallocate(file.fileno(), 0, max(1, size))
    _reserves.append(path)
    try:
        yield
    finally:
        _reserves.remove(path)
        path.unlink(missing_ok=True)


def describe_full_temp() -> str:
    """Text such as `/tmp has 0 KiB left` if the temporary folder of this process's local Ray cluster is full; else empty."""
    with contextlib.suppress(OSError):
        for path in _reserves:
            free = shutil.disk_usage(path.parent).free
            if free < FULL_BYTES:
                return f"{path.parent.parent} has {free // 1024} KiB left"
    return ""


def give_reserve_to_ray() -> str:
    """Free the reserve if the temporary folder is full. Returns what is said of it; empty if nothing was freed."""
    full = describe_full_temp()
    given = 0
    for path in _reserves if full else ():
        with contextlib.suppress(OSError):
            given += path.stat().st_size
            path.unlink()
    if not given:
        return ""
    return (
        f"{full}, where Ray's processes write their logs and without which none begins: {given // 1024} KiB that were kept for "
        "a new driver are free now\n  cure: free disk space there, or set TMPDIR to another folder"
    )
