"""Keeps stdout pure JSON for `--json`: whatever else this process and its children print there goes to stderr."""

from __future__ import annotations

import contextlib
import fcntl
import json
import math
import os
import sys
from collections.abc import Iterator
from typing import TextIO

from raypar.files.json_type import Json


@contextlib.contextmanager
def json_stdout(as_json: bool) -> Iterator[TextIO]:
    """The stream for the command's own output. With `as_json` nothing else reaches it during the body.

    Ray prints worker logs and autoscaler lines on stdout; the user's functions and child processes may print there too.
    """
    real = sys.stdout
    if not as_json:
        yield real
        return
    real.flush()
    with contextlib.ExitStack() as stack:
        out = real
        if _is_stdout_of_process(real):
            elsewhere = _stderr_or_null(stack)
            out = os.fdopen(_copy_of_stdout(), "w", encoding=real.encoding, errors=real.errors)
            stack.callback(_close, out)
            stack.callback(_restore_stdout, _copy_of_stdout())
            os.dup2(elsewhere, 1)
        stack.enter_context(contextlib.redirect_stdout(sys.stderr))
        yield out
        out.flush()


def json_text(value: Json) -> str:
    """The value as JSON; NaN and infinities, which JSON has not, are null."""
    try:
        return json.dumps(value, allow_nan=False)
    except ValueError:
        return json.dumps(_finite(value))


def _finite(value: Json) -> Json:
    """The value with None for every number that is not finite."""
    if isinstance(value, dict):
        return {key: _finite(one) for key, one in value.items()}
    if isinstance(value, (list, tuple)):
        return [_finite(one) for one in value]
    return None if isinstance(value, float) and not math.isfinite(value) else value


def _is_stdout_of_process(stream: TextIO) -> bool:
    """Whether `stream` writes to file descriptor 1; a test's or notebook's replacement does not."""
    try:
        return stream.fileno() == 1
    except (OSError, ValueError, AttributeError):
        return False


def _stderr_or_null(stack: contextlib.ExitStack) -> int:
    """File descriptor 2, or one that discards what is written if that is closed (`2>&-`)."""
    try:
        os.fstat(2)
        return 2
    except OSError:
        null = os.open(os.devnull, os.O_WRONLY)
        stack.callback(os.close, null)
        return null


def _copy_of_stdout() -> int:
    """A copy of file descriptor 1, which is not the number of a closed stderr."""
    return fcntl.fcntl(1, fcntl.F_DUPFD_CLOEXEC, 3)


def _restore_stdout(saved: int) -> None:
    """Make file descriptor 1 the process's stdout again."""
    os.dup2(saved, 1)
    os.close(saved)


def _close(out: TextIO) -> None:
    """Close; a reader that has gone (head) was reported by the write before."""
    with contextlib.suppress(OSError):
        out.close()
