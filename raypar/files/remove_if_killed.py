"""Removes files and folders of a block if this process is killed in it, which then can remove nothing itself."""

from __future__ import annotations

import contextlib
import os
import subprocess
from collections.abc import Iterator

SCRIPT = """
read -r word && exit
for pause in 0 5; do
    sleep "$pause"
    rm -rf -- "$@"
done
"""
"""The script of the shell that outlives this process. A word on its input means that the block has ended; the end of the input,
that this process was killed. Who writes into a folder of the block, such as a run's driver, may do so for some seconds."""
SHELL_END_S = 5.0
"""How long the shell may take to end after the word."""


@contextlib.contextmanager
def removed_if_killed(*paths: str | os.PathLike[str]) -> Iterator[None]:
    """Have `paths` removed if this process is killed in the block. The shell has its own session: Ctrl-C does not end it."""
    shell = subprocess.Popen(
        ["sh", "-c", SCRIPT, "raypar-cleaner", *(os.path.abspath(path) for path in paths)],
        stdin=subprocess.PIPE,
        stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL,
        cwd="/",
        start_new_session=True,
    )
    try:
        yield
    finally:
        with contextlib.suppress(BrokenPipeError):
            shell.communicate(b"over\n", timeout=SHELL_END_S)
