"""Ctrl-C, SIGTERM and SIGHUP as exceptions, also where users' code has caught them."""

from __future__ import annotations

import contextlib
import os
import signal
import sys
import threading
from collections.abc import Iterator
from types import FrameType


class StopSignal(KeyboardInterrupt):
    """Ctrl-C or a signal has asked this process to end; `args[0]` is its name. No user code raises this."""


STOP_SIGNALS = {signal.SIGINT: "Ctrl-C", signal.SIGTERM: "SIGTERM", signal.SIGHUP: "SIGHUP"}
"""The signals that ask a process to end, and their names for people."""

REPEAT_SIGNAL_S = 0.05
"""Time after which a signal comes again whose `StopSignal` was ignored: the code that ignores it is over by then."""


class StopHandler:
    """A signal handler that raises `StopSignal`."""

    def __init__(self) -> None:
        self.name: str | None = None
        """The last signal that came."""

    def __call__(self, number: int, frame: FrameType | None = None) -> None:
        self.name = STOP_SIGNALS[signal.Signals(number)]
        raise StopSignal(self.name)


def stop_signal_name(error: KeyboardInterrupt) -> str | None:
    """The signal from which `error` comes: calls of Ray make a plain `KeyboardInterrupt` of a `StopSignal`. None: user code."""
    if isinstance(error, StopSignal):
        return str(error)
    handler = signal.getsignal(signal.SIGINT)
    return handler.name if isinstance(handler, StopHandler) else None


def heard_stop_signals() -> list[signal.Signals]:
    """The signals that ask this process to end: without SIGHUP under `nohup`, which is respected."""
    return [number for number in STOP_SIGNALS if number != signal.SIGHUP or signal.getsignal(number) != signal.SIG_IGN]


@contextlib.contextmanager
def stop_signals_raise() -> Iterator[None]:
    """Within the body Ctrl-C, SIGTERM and SIGHUP raise `StopSignal` in the main thread; in other threads nothing changes.

    Also where Python ignores what is raised, as in `__del__` and callbacks of weak references: then the signal comes again.
    """
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    hook = sys.unraisablehook

    def repeat_ignored_signal(ignored: sys.UnraisableHookArgs) -> None:
        error = ignored.exc_value
        if not isinstance(error, StopSignal):
            hook(ignored)
            return
        number = next(number for number, name in STOP_SIGNALS.items() if name == error.args[0])
        if isinstance(signal.getsignal(number), StopHandler):  # else a handler that has noted the signal
            threading.Timer(REPEAT_SIGNAL_S, os.kill, (os.getpid(), number)).start()

    handler = StopHandler()
    before = {number: signal.signal(number, handler) for number in heard_stop_signals()}
    sys.unraisablehook = repeat_ignored_signal
    try:
        yield
    finally:
        sys.unraisablehook = hook
        for number, former in before.items():
            signal.signal(number, former)


class _RecordingHandler:
    """Python's own SIGINT handler, which also remembers that it was called."""

    def __init__(self) -> None:
        self.pressed = False
        """Whether there was a Ctrl-C."""

    def __call__(self, number: int, frame: FrameType | None) -> None:
        self.pressed = True
        signal.default_int_handler(number, frame)


@contextlib.contextmanager
def recording_ctrl_c() -> Iterator[None]:
    """Within the body, `reraise_ctrl_c` can tell a Ctrl-C from a `KeyboardInterrupt` that user code raises."""
    in_main = threading.current_thread() is threading.main_thread()
    if not in_main or signal.getsignal(signal.SIGINT) is not signal.default_int_handler:
        yield
        return
    signal.signal(signal.SIGINT, _RecordingHandler())
    try:
        yield
    finally:
        signal.signal(signal.SIGINT, signal.default_int_handler)


def reraise_ctrl_c(error: BaseException) -> None:
    """Raise `error` again if it comes from a real Ctrl-C, which is not an error of the user's code.

    A Ctrl-C reaches the main thread only, and no process that ignores SIGINT, such as a data process.
    """
    if isinstance(error, StopSignal):
        raise error
    if not isinstance(error, KeyboardInterrupt) or threading.current_thread() is not threading.main_thread():
        return
    handler = signal.getsignal(signal.SIGINT)
    if isinstance(handler, StopHandler):
        if (name := stop_signal_name(error)) is not None:
            raise StopSignal(name) from error
        return
    if handler is signal.SIG_IGN:
        return
    if isinstance(handler, _RecordingHandler) and not handler.pressed:
        return
    raise error
