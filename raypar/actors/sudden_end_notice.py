"""Says why this process has ended where it cannot: Ray ends the processes of a node that it has given up without a word.

A shell process waits for the end of this one, as in `local_ray_cleanup.py`.
"""

from __future__ import annotations

import contextlib
import subprocess
from collections.abc import Iterator

SCRIPT = """
read -r word || printf '%s\\n' "$1" >&2
"""
"""The shell's script; `$1` is what it prints unless a word on its input says that this process has ended well."""
PATIENCE_S = 5.0
"""How long the shell may take after a good end."""


def sudden_end_text(run: str, address: str) -> str:
    """What is printed when the process that follows a run is gone before the run is over."""
    return (
        f"error: the process that followed run {run!r} was ended from outside before the run was over. Ray does that, with "
        "exit code 1, to all processes of a node that has not reached the control store for about half a minute, or whose "
        f"raylet has died\n  cure: look at the network between this node and the control store at {address}, and at the "
        f"raylet's log; `raypar resume {run}` goes on from the last checkpoint"
    )


@contextlib.contextmanager
def explain_sudden_end(text: str) -> Iterator[None]:
    """Print `text` to stderr if this process ends during the body. The shell has its own session: Ctrl-C does not end it."""
    shell = subprocess.Popen(
        ["sh", "-c", SCRIPT, "raypar-notice", text], stdin=subprocess.PIPE, stdout=subprocess.DEVNULL, start_new_session=True
    )
    try:
        yield
    finally:
        with contextlib.suppress(BrokenPipeError):
            shell.communicate(b"over\n", timeout=PATIENCE_S)
