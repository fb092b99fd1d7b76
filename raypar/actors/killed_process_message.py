"""Prints a message if this process is killed: Ray ends all processes of a node that it has given up, without an error.

A killed process prints nothing itself. So a shell process waits for its end and prints the message, as in
`local_ray_cleanup.py`.
"""

from __future__ import annotations

import contextlib
import subprocess
from collections.abc import Iterator

MESSAGE_SCRIPT = """
read -r word || printf '%s\\n' "$1" >&2
"""
"""The shell's script: prints `$1` if its input ends before a line has come, which this process writes when all is well."""
SHELL_END_S = 5.0
"""How long the shell may take to end after that line."""


def killed_client_text(run: str, address: str) -> str:
    """The message for a client process, which follows a run, that is killed before the run is over."""
    return (
        f"error: the process that followed run {run!r} was ended from outside before the run was over. Ray does that, with "
        "exit code 1, to all processes of a node that has not reached the control store for about half a minute, or whose "
        f"raylet has died\n  cure: look at the network between this node and the control store at {address}, and at the "
        f"raylet's log; `raypar resume {run}` goes on from the last checkpoint"
    )


@contextlib.contextmanager
def print_if_killed(text: str) -> Iterator[None]:
    """Print `text` to stderr if this process is killed in the block. The shell has its own session: Ctrl-C does not end it."""
    shell = subprocess.Popen(
        ["sh", "-c", MESSAGE_SCRIPT, "raypar-notice", text],
        stdin=subprocess.PIPE,
        stdout=subprocess.DEVNULL,
        cwd="/",  # Ray may remove the folder that a job runs in, which the shell would complain of
        start_new_session=True,
    )
    try:
        yield
    finally:
        with contextlib.suppress(BrokenPipeError):
            shell.communicate(b"over\n", timeout=SHELL_END_S)
