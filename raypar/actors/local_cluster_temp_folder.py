"""The temporary folder of a local Ray cluster: its removal with all that writes there, and room in it for a new driver."""

from __future__ import annotations

import contextlib
import os
import shutil
import subprocess
from collections.abc import Iterator
from pathlib import Path

from raypar.files.abandoned_folders import abandoned_folders, owned_folder

SCRIPT = """
read -r word || sleep 3
for turn in 1 2; do
    ls -l /proc/[0-9]*/fd/[13] 2>/dev/null | while read -r line; do
        case "$line" in l?w*" -> $1/"*)
            pid=${line#*/proc/} pid=${pid%%/*}
            [ "$pid" = "$PPID" ] || kill -9 "$pid" 2>/dev/null
        esac
    done
    rm -rf "$1"
done
"""
"""The shell's script; `$1` is the folder of the local Ray cluster.

A word on its input means that this process has ended well. The end of the input means that it was killed: Ray's processes then
die too, and workers exit within 3 s. What remains is stuck: workers that are stopped, and Ray's agents, which look for the
control store for a minute. The script recognises them by their open files: a worker's output (1) goes to a file below the
folder, and an agent has inherited that of its raylet (3)."""

PATIENCE_S = 15.0
"""How long the shell may take after a good end."""


@contextlib.contextmanager
def remove_local_ray_on_exit(folder: Path) -> Iterator[None]:
    """After the body, kill the processes that write below `folder` and remove it. The shell has its own session, like Ray.

    If this process and the shell are killed, the next local Ray cluster on this machine does it (`remove_abandoned_local_ray`).
    """
    with owned_folder(folder) as lock:
        shell = subprocess.Popen(_removal(folder), stdin=subprocess.PIPE, start_new_session=True, pass_fds=lock)
        try:
            yield
        finally:
            with contextlib.suppress(BrokenPipeError):
                shell.communicate(b"done\n", timeout=PATIENCE_S)


def remove_abandoned_local_ray(base: Path, prefix: str) -> None:
    """Do so for the folders in `base` whose names begin with `prefix`, and whose owners were killed with their shells."""
    for folder in abandoned_folders(base, prefix):
        with contextlib.suppress(subprocess.TimeoutExpired):
            subprocess.run(_removal(folder), input=b"done\n", timeout=PATIENCE_S, check=False)


def _removal(folder: Path) -> list[str]:
    return ["sh", "-c", SCRIPT, "raypar-cleaner", str(folder)]


RESERVE_BYTES = 1 << 20
"""Room that is kept in the temporary folder of a local Ray cluster, for a new driver: some lines for each of many processes.
Where logs have no room, a process that Ray starts dies at its first line, and Ray starts the next one."""
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
