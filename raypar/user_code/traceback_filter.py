"""Leaves raypar's own frames, and those between PyTorch's modules, out of the tracebacks that users see.

Frames of their own code and of libraries stay.

The environment variable `RAYPAR_TRACEBACK=whole` switches this off. The full error of a failed run is in its folder.
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

PACKAGE = Path(__file__).resolve().parents[1]
"""The folder of raypar's own code."""
TRACEBACK_VARIABLE = "RAYPAR_TRACEBACK"
"""Environment variable; with the value `whole`, nothing is filtered."""
HEADER = "Traceback (most recent call last):"
"""The first line of a traceback as text."""
_FRAME = re.compile(r'  File "([^"]*)", line \d+')
_TORCH_PLUMBING = re.compile(
    r'/torch/(nn/modules/module\.py", line \d+, in (_wrapped_call_impl|_call_impl|inner)'
    r"|(_compile|_ops|_meta_registrations|_dynamo/\w+|_prims_common/\w+|_decomp/\w+|_refs/\w+|_subclasses/\w+)\.py"
    r'|__init__\.py", line \d+, in _check)'
)
"""Frames by which PyTorch comes from a module to its forward, and from an operation to what computes it."""
_GROUP = "Exception Group Traceback"
_GROUP_MARGIN = re.compile(r"(?: +\| )?")
"""What an `ExceptionGroup` has before each line of its tracebacks."""

P = ParamSpec("P")
R = TypeVar("R")


def shows_raypar_frames() -> bool:
    """Whether the user has switched the filter off."""
    return os.environ.get(TRACEBACK_VARIABLE) == "whole"


def is_raypar_file(name: str) -> bool:
    """Whether a frame's file belongs to raypar, here or on a worker's machine, where raypar may be in another folder."""
    path = Path(name)
    if path.is_relative_to(PACKAGE):
        return True
    _, found, inside = name.rpartition("/raypar/")
    return bool(found) and (PACKAGE / inside).is_file() and not path.is_file()


@functools.cache
def _library_folders() -> tuple[str, ...]:
    """Path prefixes of Python's own modules and of installed packages."""
    import sysconfig

    paths = sysconfig.get_paths()
    return tuple(f"{paths[kind]}{os.sep}" for kind in ("stdlib", "platstdlib", "purelib", "platlib"))


def is_user_file(name: str) -> bool:
    """Whether a frame's file belongs neither to raypar nor to a library."""
    library = name.startswith(("<frozen", *_library_folders())) or "/site-packages/" in name or "/dist-packages/" in name
    return not library and not is_raypar_file(name)


def filter_traceback_text(text: str) -> str:
    """The text without raypar's frames in the tracebacks that it contains. A traceback of nothing else goes with its header."""
    kept: list[str] = []
    own = False  # whether the line belongs to a frame of raypar
    margin = _GROUP_MARGIN if _GROUP in text else re.compile("")
    for line in text.splitlines():
        bare = margin.sub("", line, count=1)
        frame = _FRAME.match(bare)
        if frame is not None:
            own = is_raypar_file(frame[1]) or bool(_TORCH_PLUMBING.search(bare))
        elif not bare.startswith(("    ", "  [Previous line repeated")):
            own = False
            if kept and kept[-1].endswith(HEADER) and not bare.endswith(HEADER):
                kept.pop()
        if not own:
            kept.append(line)
    return "\n".join(kept)


def filter_traceback(frames: TracebackType | None) -> TracebackType | None:
    """The traceback from the first frame of the user's code on, without raypar's frames; None if it has no such frame."""
    kept: list[TracebackType] = []
    while frames is not None:
        name = frames.tb_frame.f_code.co_filename
        # What `dataclass` has written is in the file `<string>`, as the user's code is under `python -c`.
        own = is_raypar_file(name) or str(frames.tb_frame.f_globals.get("__name__")).partition(".")[0] == "raypar"
        if not own and (kept or is_user_file(name)):
            kept.append(frames)
        frames = frames.tb_next
    for number, frame in enumerate(kept):
        frame.tb_next = kept[number + 1] if number + 1 < len(kept) else None
    return kept[0] if kept else None


def remove_raypar_frames(error: RayparError) -> bool:
    """Filter the text and the causes of an error, in place. Returns whether its text has lost frames.

    A plain `RayparError`, which reports a bug of raypar itself, keeps its text: there raypar's frames matter.
    """
    what = error.what if type(error) is RayparError else filter_traceback_text(error.what)
    changed = what != error.what
    error.what = what
    error.args = (what, error.cure)
    cause: BaseException = error
    while cause.__cause__ is not None:
        cause.__suppress_context__ = True
        inner = filter_traceback(cause.__cause__.__traceback__)
        if inner is None or HEADER in what:
            cause.__cause__ = None
            break
        cause = cause.__cause__.with_traceback(inner)
    cause.__suppress_context__ = True
    return changed


def without_raypar_frames(function: Callable[P, R]) -> Callable[P, R]:
    """Decorator: a `RayparError` of the function shows no frames of raypar, as if the user's line had raised it.

    Frames of the user's own code that raypar has called are kept.
    """

    @functools.wraps(function)
    def called(*given: P.args, **named: P.kwargs) -> R:
        __tracebackhide__ = True
        try:
            return function(*given, **named)
        except RayparError as error:
            if shows_raypar_frames():
                raise
            remove_raypar_frames(error)
            error.__traceback__ = frames = filter_traceback(error.__traceback__)
            if sys.version_info < (3, 11):  # a bare `raise` would bring the old frames back
                raise error.with_traceback(frames)  # noqa: B904
            raise  # a bare one adds no frame of its own

    return called


def full_traceback(error: BaseException) -> str:
    """The text of an error with all frames and causes."""
    return "".join(traceback.format_exception(error))
