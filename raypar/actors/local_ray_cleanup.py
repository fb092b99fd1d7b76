"""Removes the local Ray cluster when this process ends, even by SIGKILL: a shell process waits for the end and cleans up."""

from __future__ import annotations

import contextlib
import subprocess
from collections.abc import Iterator
from pathlib import Path

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
    """After the body, kill the processes that write below `folder` and remove it. The shell has its own session, like Ray."""
    shell = subprocess.Popen(["sh", "-c", SCRIPT, "raypar-cleaner", str(folder)], stdin=subprocess.PIPE, start_new_session=True)
    try:
        yield
    finally:
        with contextlib.suppress(BrokenPipeError):
            shell.communicate(b"done\n", timeout=PATIENCE_S)
