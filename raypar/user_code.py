"""What user code may end in: an exception like any other, or one that Python means for the whole process.

`sys.exit()` in a data set, or a `KeyboardInterrupt` that a layer raises, is no `Exception`: caught nowhere, the one ends a
worker without a word and the other looks like a Ctrl-C. Wherever user code is called, `ENDS` is caught instead.
"""

from __future__ import annotations

import contextlib
import signal
import threading
from collections.abc import Iterator
from types import FrameType

ENDS = (Exception, SystemExit, KeyboardInterrupt)
"""For `except` around a call of user code; `unless_ctrl_c(error)` comes first there."""


class _Noting:
    """A handler of SIGINT that remembers it."""

    def __init__(self) -> None:
        self.pressed = False

    def __call__(self, number: int, frame: FrameType | None) -> None:
        self.pressed = True
        signal.default_int_handler(number, frame)


@contextlib.contextmanager
def noting_ctrl_c() -> Iterator[None]:
    """Meanwhile `unless_ctrl_c` can tell a Ctrl-C from a `KeyboardInterrupt` that user code raises."""
    in_main = threading.current_thread() is threading.main_thread()
    if not in_main or signal.getsignal(signal.SIGINT) is not signal.default_int_handler:
        yield
        return
    signal.signal(signal.SIGINT, _Noting())
    try:
        yield
    finally:
        signal.signal(signal.SIGINT, signal.default_int_handler)


def unless_ctrl_c(error: BaseException) -> None:
    """Raise `error` again if somebody has pressed Ctrl-C, which is nobody's mistake.

    Only a process's main thread hears of that, and not where it ignores SIGINT, as in a data process.
    """
    if not isinstance(error, KeyboardInterrupt) or threading.current_thread() is not threading.main_thread():
        return
    handler = signal.getsignal(signal.SIGINT)
    if handler is signal.SIG_IGN or (isinstance(handler, _Noting) and not handler.pressed):
        return
    raise error


def said(error: BaseException) -> str:
    """`ValueError: no such file`; of what is no `Exception` also what it would have done."""
    if isinstance(error, SystemExit):
        return f"SystemExit: {error.code} (sys.exit or exit was called: that would have ended the process)"
    if isinstance(error, KeyboardInterrupt):
        return "KeyboardInterrupt (raised by the code itself: nobody has pressed Ctrl-C)"
    return f"{type(error).__name__}: {error}"
