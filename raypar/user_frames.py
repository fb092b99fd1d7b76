"""Errors as users see them: with the frames of their own code, and without raypar's.

All frames are shown if the environment variable `RAYPAR_TRACEBACK` is `whole`. The error of a failed run is also written whole
into the run's folder.
"""

from __future__ import annotations

import functools
import os
import re
import sys
import traceback
from collections.abc import Callable
from pathlib import Path
from types import TracebackType
from typing import ParamSpec, TypeVar

from raypar.errors import RayparError

PACKAGE = Path(__file__).resolve().parent
"""The folder of raypar's own code."""
WHOLE = "RAYPAR_TRACEBACK"
"""Environment variable that shows all frames if it is `whole`."""
HEADER = "Traceback (most recent call last):"
"""The first line of a traceback as text."""
_FRAME = re.compile(r'  File "([^"]*)", line \d+')
_GROUP = "Exception Group Traceback"
_GROUP_MARGIN = re.compile(r"(?: +\| )?")
"""What an `ExceptionGroup` has before each line of its tracebacks."""

P = ParamSpec("P")
R = TypeVar("R")


def shows_all_frames() -> bool:
    """Whether the user has asked for raypar's frames too."""
    return os.environ.get(WHOLE) == "whole"


def is_own_file(name: str) -> bool:
    """Whether a frame's file is raypar's, on this machine or on a worker's, where raypar may lie elsewhere."""
    path = Path(name)
    if path.is_relative_to(PACKAGE):
        return True
    _, found, inside = name.rpartition("/raypar/")
    return bool(found) and (PACKAGE / inside).is_file() and not path.is_file()


@functools.cache
def _library_folders() -> tuple[str, ...]:
    """The folders of Python's own modules and of installed packages, as beginnings of paths."""
    import sysconfig

    paths = sysconfig.get_paths()
    return tuple(f"{paths[kind]}{os.sep}" for kind in ("stdlib", "platstdlib", "purelib", "platlib"))


def is_users_file(name: str) -> bool:
    """Whether a frame's file is neither raypar's nor a library's."""
    library = name.startswith(("<frozen", *_library_folders())) or "/site-packages/" in name or "/dist-packages/" in name
    return not library and not is_own_file(name)


def drop_own_frames_of_text(text: str) -> str:
    """A text without raypar's frames in the tracebacks that it holds. A traceback without other frames loses its header too."""
    kept: list[str] = []
    own = False  # whether the present line belongs to a frame of raypar
    margin = _GROUP_MARGIN if _GROUP in text else re.compile("")
    for line in text.splitlines():
        bare = margin.sub("", line, count=1)
        frame = _FRAME.match(bare)
        if frame is not None:
            own = is_own_file(frame[1])
        elif not bare.startswith(("    ", "  [Previous line repeated")):
            own = False
            if kept and kept[-1].endswith(HEADER) and not bare.endswith(HEADER):
                kept.pop()
        if not own:
            kept.append(line)
    return "\n".join(kept)


def drop_own_frames(frames: TracebackType | None) -> TracebackType | None:
    """The frames of a traceback from the first one of the user's on, without raypar's; None if none is the user's."""
    kept: list[TracebackType] = []
    while frames is not None:
        name = frames.tb_frame.f_code.co_filename
        if is_users_file(name) or (kept and not is_own_file(name)):
            kept.append(frames)
        frames = frames.tb_next
    for number, frame in enumerate(kept):
        frame.tb_next = kept[number + 1] if number + 1 < len(kept) else None
    return kept[0] if kept else None


def show_users_frames(error: RayparError) -> bool:
    """Leave of an error, its text and its causes only what is about the user's code; returns whether frames of its text went.

    An error of raypar's own (a plain `RayparError`) keeps its text: its frames say what was wrong.
    """
    what = error.what if type(error) is RayparError else drop_own_frames_of_text(error.what)
    changed = what != error.what
    error.what = what
    error.args = (what, error.cure)
    cause: BaseException = error
    while cause.__cause__ is not None:
        cause.__suppress_context__ = True
        inner = drop_own_frames(cause.__cause__.__traceback__)
        if inner is None or HEADER in what:
            cause.__cause__ = None
            break
        cause = cause.__cause__.with_traceback(inner)
    cause.__suppress_context__ = True
    return changed


def hide_own_frames(function: Callable[P, R]) -> Callable[P, R]:
    """`function`, whose `RayparError`s are raised as if by the line that calls it: without the frames below.

    The frames of the user's own code below, if there are any, are kept.
    """

    @functools.wraps(function)
    def called(*given: P.args, **named: P.kwargs) -> R:
        __tracebackhide__ = True
        try:
            return function(*given, **named)
        except RayparError as error:
            if shows_all_frames():
                raise
            show_users_frames(error)
            error.__traceback__ = frames = drop_own_frames(error.__traceback__)
            if sys.version_info < (3, 11):  # a bare `raise` would bring the old frames back
                raise error.with_traceback(frames)  # noqa: B904
            raise  # a bare one adds no frame of its own

    return called


def whole_text(error: BaseException) -> str:
    """An error with all frames and causes, as text."""
    return "".join(traceback.format_exception(error))
