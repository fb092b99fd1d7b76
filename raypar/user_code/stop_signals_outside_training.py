"""Ctrl-C, SIGTERM or SIGHUP before training has begun, after it has ended, or unhandled in a script: a line, no traceback.

While a run is followed, `actors/driver_client.py` collects these signals, and its driver saves the state.
"""

from __future__ import annotations

import contextlib
import functools
import sys
from collections.abc import Callable, Iterator
from types import TracebackType
from typing import ParamSpec, TypeVar

from raypar.errors import Interrupted
from raypar.user_code.stop_signals import stop_signal_name, stop_signals_raise
from raypar.user_code.traceback_filter import shows_raypar_frames


@contextlib.contextmanager
def stopped_before_training(resume: str = "") -> Iterator[None]:
    """The body starts a run and follows it. Raises `Interrupted` where a signal ends the body before training has begun.

    What comes after the end of training is to be in `after_the_run`. `resume`: how a run that is resumed can be resumed again;
    empty for a new run.
    """
    with stop_signals_raise():
        try:
            yield
        except KeyboardInterrupt as error:
            if (name := stop_signal_name(error)) is None:
                raise
            left = "the run's checkpoints are as they were" if resume else "nothing is left of this start"
            raise before_training_error(name, left, resume) from None


@contextlib.contextmanager
def after_the_run(end: str) -> Iterator[None]:
    """The body comes after the end of a run. Raises `Interrupted` where a signal ends the body. `end`: the end in words."""
    try:
        yield
    except KeyboardInterrupt as error:
        if (name := stop_signal_name(error)) is None:
            raise
        raise Interrupted(f"stopped by {name} when the run was over: {end}") from None


def before_training_error(why: str, left: str, resume: str = "") -> Interrupted:
    """The error of a run that was stopped before its first step. `why`: the signal; `left`: what is left of this start."""
    return Interrupted(f"stopped before training began ({why}): nothing was trained, and {left}", cure=resume)


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
