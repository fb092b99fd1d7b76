"""Prints a message if this process is killed: Ray ends all processes of a node that it has given up, without an error.

A killed process prints nothing itself. So a shell process waits for its end and prints the message, as in
`local_cluster_temp_folder.py`.
"""

from __future__ import annotations

import contextlib
import subprocess
from collections.abc import Iterator

MESSAGE_SCRIPT = """
text=$1
while read -r line; do
    case "$line" in
        over) exit ;;
        again) text=$1 ;;
        *) text=$line ;;
    esac
done
printf '%s\\n' "$text" | tr '\\t' '\\n' >&2
"""
"""The script of the shell that outlives this process: prints a text, at first `$1`, if its input ends without the line `over`.

This process writes the lines: `over` when all is well, `again` to return to `$1`, and any other line as the new text, in which
tabs stand for line breaks."""
SHELL_END_S = 5.0
"""How long the shell may take to end after the line `over`."""


def killed_client_text(run: str, address: str) -> str:
    """The message for a client process, which follows a run, that is killed before the run is over."""
    return (
        f"error: the process that followed run {run!r} was ended from outside before it had printed how the run ended. Ray "
        "does that, with exit code 1, to all processes of a node that has not reached the control store for about half a "
        f"minute, or whose raylet has died\n  cure: look at the network between this node and the control store at {address}, "
        f"and at the raylet's log; `raypar resume {run}` goes on from the last checkpoint"
    )


def killed_while_silent_text(run: str, address: str) -> str:
    """The message for a client process that is killed while Ray's control store does not answer."""
    return (
        f"error: Ray's control store at {address} does not answer, and the process that followed run {run!r} was ended from "
        "outside: Ray does that, with exit code 1, after about a minute\n  cure: look at the head node of the cluster; "
        f"`raypar resume {run}` goes on from the run's last checkpoint, on this cluster when its head is back or on another one"
    )


class KilledNotice:
    """The text that will be printed if this process is killed."""

    def __init__(self, shell: subprocess.Popen[bytes]) -> None:
        self.shell = shell
        """Runs `MESSAGE_SCRIPT`."""

    def replace(self, text: str | None) -> None:
        """Have `text` printed instead; None: the first text again."""
        assert self.shell.stdin is not None
        line = "again" if text is None else text.replace("\n", "\t")
        with contextlib.suppress(OSError, ValueError):  # the shell, or the block, has ended
            self.shell.stdin.write(f"{line}\n".encode())
            self.shell.stdin.flush()


@contextlib.contextmanager
def print_if_killed(text: str) -> Iterator[KilledNotice]:
    """Print `text` to stderr if this process is killed in the block. The shell has its own session: Ctrl-C does not end it."""
    shell = subprocess.Popen(
        ["sh", "-c", MESSAGE_SCRIPT, "raypar-notice", text],
        stdin=subprocess.PIPE,
        stdout=subprocess.DEVNULL,
        cwd="/",  # Ray may remove the folder that a job runs in, which the shell would complain of
        start_new_session=True,
    )
    try:
        yield KilledNotice(shell)
    finally:
        with contextlib.suppress(BrokenPipeError):
            shell.communicate(b"over\n", timeout=SHELL_END_S)
