"""The current directory of a process that Ray has started."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Iterator

GONE = " (deleted)"
NOWHERE = "/"


class Footing:
    """Several raylets of one machine share a folder of unpacked `working_dir`s, and each that needs one removes it and unpacks
    it anew: whoever works there stands in a folder that is gone, and whatever asks for the current directory fails. The new
    one has the same path."""

    def __init__(self) -> None:
        self._wanted: str | None = None
        """Where we were before it was gone, until it is there again."""

    def keep(self) -> None:
        """Stand somewhere, and where we stood if that is possible."""
        try:
            here = os.getcwd()
        except FileNotFoundError:
            self._wanted = os.readlink("/proc/self/cwd").removesuffix(GONE)
            os.chdir(NOWHERE)
            here = NOWHERE
        if self._wanted is not None and here == NOWHERE:
            with contextlib.suppress(FileNotFoundError):
                os.chdir(self._wanted)
                self._wanted = None

    @contextlib.contextmanager
    def elsewhere(self) -> Iterator[None]:
        """In a place that nobody removes: torch asks for the current directory in the middle of its imports, and half an import
        cannot be made good. Not for code of the user's, which may open files of the job's folder."""
        self.keep()
        if self._wanted is None:
            self._wanted = os.getcwd()
        os.chdir(NOWHERE)
        try:
            yield
        finally:
            self.keep()
