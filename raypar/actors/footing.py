"""The current directory of a process that Ray has started."""

from __future__ import annotations

import os
from pathlib import Path

GONE = " (deleted)"


def keep_footing() -> None:
    """Several raylets of one machine share a folder of unpacked `working_dir`s, and each that needs one removes it and unpacks it
    anew: whoever works there stands in a folder that is gone, and whatever asks for the current directory fails (so does the
    import of torch._dynamo). The new one has the same path."""
    try:
        os.getcwd()
    except FileNotFoundError:
        path = Path(os.readlink("/proc/self/cwd").removesuffix(GONE))
        os.chdir(path if path.is_dir() else Path(__file__).parents[2])
