"""Ctrl-C, SIGTERM or SIGHUP before training has begun, or after it has ended: one line instead of a traceback.

While a run is followed, `actors/driver_client.py` collects these signals, and its driver saves the state.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator

from raypar.errors import Interrupted
from raypar.user_code.user_code_errors import StopSignal, stop_signals_raise


@contextlib.contextmanager
def stopped_before_training(resume: str = "") -> Iterator[None]:
    """The body starts a run and follows it. Raises `Interrupted` where a signal ends the body before training has begun.

    What comes after the end of training is to be in `after_the_run`. `resume`: how a run that is resumed can be resumed again;
    empty for a new run.
    """
    with stop_signals_raise():
        try:
            yield
        except StopSignal as signal:
            left = "the run's checkpoints are as they were" if resume else "nothing is left of this start"
            raise before_training_error(str(signal), left, resume) from None


@contextlib.contextmanager
def after_the_run(end: str) -> Iterator[None]:
    """The body comes after the end of a run. Raises `Interrupted` where a signal ends the body. `end`: the end in words."""
    try:
        yield
    except StopSignal as signal:
        raise Interrupted(f"stopped by {signal} when the run was over: {end}") from None


def before_training_error(why: str, left: str, resume: str = "") -> Interrupted:
    """The error of a run that was stopped before its first step. `why`: the signal; `left`: what is left of this start."""
    return Interrupted(f"stopped before training began ({why}): nothing was trained, and {left}", cure=resume)
