"""Nothing of a Ray of our own outlives us: a shell that waits for our end, however it comes, and then clears its folder."""

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
"""With a word on its input all has ended well; at the end of the input we were killed. Then Ray's processes die with us, and
workers end by themselves within 3 s. Left are those that are stuck: workers that are stopped, and Ray's agents, which look for
its control store for a minute. They are known by their output: a worker's (1) goes to a file of our folder, and an agent has
inherited that of its raylet (3)."""

PATIENCE_S = 15.0


@contextlib.contextmanager
def remove_ray_on_exit(folder: Path) -> Iterator[None]:
    """After the body: no process that writes its output below `folder`, and no folder. In a session of its own, as Ray is."""
    shell = subprocess.Popen(["sh", "-c", SCRIPT, "raypar-cleaner", str(folder)], stdin=subprocess.PIPE, start_new_session=True)
    try:
        yield
    finally:
        with contextlib.suppress(BrokenPipeError):
            shell.communicate(b"done\n", timeout=PATIENCE_S)
