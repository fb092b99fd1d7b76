"""The current directory of a process that Ray has started."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Iterator
from pathlib import Path

GONE = " (deleted)"


def keep_footing() -> None:
    """Several raylets of one machine share a folder of unpacked `working_dir`s, and each that needs one removes it and unpacks
    it anew: whoever works there stands in a folder that is gone, and whatever asks for the current directory fails. The new
    one has the same path."""
    try:
        os.getcwd()
    except FileNotFoundError:
        enter(os.readlink("/proc/self/cwd").removesuffix(GONE))


@contextlib.contextmanager
def elsewhere() -> Iterator[None]:
    """In a place that nobody removes: torch asks for the current directory in the middle of its imports, and half an import
    cannot be made good. Not for code of the user's, which may open files of the job's folder."""
    keep_footing()
    before = os.getcwd()
    os.chdir("/")
    try:
        yield
    finally:
        enter(before)


def enter(path: str) -> None:
    """There, or where our own code is while there is no such folder."""
    os.chdir(path if Path(path).is_dir() else Path(__file__).parents[2])
