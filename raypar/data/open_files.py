"""Keeps the files of a data set that were read last open, so that most samples need no opening."""

from __future__ import annotations

import contextlib
from collections import OrderedDict
from collections.abc import Callable
from contextlib import AbstractContextManager
from typing import Generic, TypeVar

T = TypeVar("T")

MOST_OPEN = 16
"""Files of a data set that are open at a time."""


class OpenFiles(Generic[T]):
    """What was opened last, by number of file. Pickled without it: each process opens its own files."""

    def __init__(self, open_file: Callable[[int], AbstractContextManager[T]]) -> None:
        self._open_file = open_file
        self._open: OrderedDict[int, tuple[T, contextlib.ExitStack]] = OrderedDict()

    def get(self, number: int) -> T:
        """The file of this number, open. Raises what opening it does."""
        if number not in self._open:
            while len(self._open) >= MOST_OPEN:
                self._open.popitem(last=False)[1][1].close()
            stack = contextlib.ExitStack()
            self._open[number] = stack.enter_context(self._open_file(number)), stack
        self._open.move_to_end(number)
        return self._open[number][0]
