"""A script that does not catch `Interrupted` ends as one that Ctrl-C has ended: a line and exit code 130, no traceback."""

from __future__ import annotations

import functools
import sys
from collections.abc import Callable
from types import TracebackType
from typing import ParamSpec, TypeVar

from raypar.errors import Interrupted
from raypar.user_code.traceback_filter import shows_raypar_frames

P = ParamSpec("P")
R = TypeVar("R")


def describe_interrupt(stopped: Interrupted) -> str:
    """What was stopped, and what goes on with it, for the terminal."""
    return stopped.what + (f"\nnext: {stopped.cure}" if stopped.cure else "")


def ends_script_if_unhandled(function: Callable[P, R]) -> Callable[P, R]:
    """Decorator: an `Interrupted` of the function that nobody catches ends the script with its line and exit code 130.

    Python gives 130 for `KeyboardInterrupt` itself only. An interactive session goes on, with the traceback as usual.
    """

    @functools.wraps(function)
    def called(*given: P.args, **named: P.kwargs) -> R:
        __tracebackhide__ = True
        try:
            return function(*given, **named)
        except Interrupted:
            _set_excepthook()
            raise

    return called


def _set_excepthook() -> None:
    former = sys.excepthook
    if getattr(former, "__module__", "") == __name__:
        return

    def excepthook(kind: type[BaseException], error: BaseException, frames: TracebackType | None) -> None:
        interactive = hasattr(sys, "ps1") or sys.flags.inspect or sys.flags.interactive
        if not isinstance(error, Interrupted) or interactive:
            former(kind, error, frames)
            return
        if shows_raypar_frames():
            former(kind, error, frames)
        else:
            print(describe_interrupt(error), file=sys.stderr)
        raise SystemExit(error.exit_code)

    sys.excepthook = excepthook
