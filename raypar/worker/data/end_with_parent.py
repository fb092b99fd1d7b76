"""Ends a data process when its parent has ended, also while it still imports torch and the data set's modules."""

from __future__ import annotations

import os
import signal
import threading
import time
from collections.abc import Callable
from typing import ParamSpec, TypeVar

CHECK_EVERY_S = 0.5
"""How often a data process looks whether its parent is there."""

P = ParamSpec("P")
T = TypeVar("T")


class EndWithParent:
    """The first argument with which a process is started: from there on it follows its parent, before the next is unpickled.

    Not PR_SET_PDEATHSIG: that follows the thread which started the process, and actor methods run in threads that come and go.
    """

    def __reduce__(self) -> tuple[Callable[[int], EndWithParent], tuple[int]]:
        return _begin, (os.getpid(),)


def call_in_child(_: EndWithParent, function: Callable[P, T], *given: P.args, **named: P.kwargs) -> T:
    """The result of `function`, which is not imported before the parent is followed, as an initializer would be."""
    return function(*given, **named)


def _begin(parent: int) -> EndWithParent:
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C reaches the whole terminal; the parent decides
    threading.Thread(target=_follow, args=(parent,), daemon=True).start()
    return EndWithParent()


def _follow(parent: int) -> None:
    while os.getppid() == parent:
        time.sleep(CHECK_EVERY_S)
    os._exit(1)
