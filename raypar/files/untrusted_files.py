"""Reads files that are not trusted: regular files only, up to a size limit, and JSON up to a nesting depth.

Used for checkpoints, run folders, job files, schedules and token files. A FIFO or a device is refused before it is opened, so
that no read hangs.
"""

from __future__ import annotations

import contextlib
import json
import os
import re
import stat
from collections.abc import Iterator
from pathlib import Path
from typing import Any, BinaryIO

from raypar.errors import ConfigError, InputError
from raypar.files.json_type import Json
from raypar.files.os_error_cure import cure_of_os_error
from raypar.files.printable_text import shorten

TEXT_BYTES = 4 << 20
"""Size limit of a file that users write or read."""
SCHEDULE_BYTES = 64 << 20
"""Size limit of a schedule file: some million instructions."""
READ_AHEAD_BYTES = 1 << 17
"""How much of a file is read at a time: lines of a megabyte take a third of the time that they take with Python's default."""
PIECE_BYTES = 1 << 20
"""Size of one read: memory is allocated only for bytes that exist."""
MAX_DEPTH = 64
"""Nesting limit of JSON and YAML. raypar's own files have 6 levels at most."""

READABLE = "make it, and the folders that it is in, readable (chmod u+rx), or work as a user who may read it"
"""The cure for a missing permission."""
_CURE = "give the path of a file"
_KINDS = {
    stat.S_IFIFO: "a FIFO",
    stat.S_IFSOCK: "a socket",
    stat.S_IFCHR: "a device",
    stat.S_IFBLK: "a device",
    stat.S_IFDIR: "a folder",
    stat.S_IFLNK: "a symbolic link",
}
_STRING = re.compile(rb'"(?:[^"\\]|\\.)*"?', re.DOTALL)
_NO_BRACKET = bytes(set(range(256)) - set(b"[]{}"))
_SAME_BRACKET = bytes.maketrans(b"{}", b"[]")


def describe_special_file(mode: int) -> str | None:
    """The kind of a file by its mode: `a FIFO`, `a symbolic link`, ...; None for a regular file."""
    return None if stat.S_ISREG(mode) else _KINDS.get(stat.S_IFMT(mode), "a special file")


def cure_of_read_error(error: OSError) -> str:
    """The cure for a path that could not be read."""
    return READABLE if isinstance(error, PermissionError) else cure_of_os_error(error, "give another path")


class JsonTooDeep(ValueError):
    """A JSON text has more than `MAX_DEPTH` brackets within each other."""


@contextlib.contextmanager
def open_regular_file(
    path: Path, *, follow: bool, error: type[InputError] = ConfigError, cure: str = _CURE, what: str = ""
) -> Iterator[BinaryIO]:
    """Open a regular file for reading. Anything else is refused at once: opening a FIFO, for example, would wait for a writer.

    `follow`: whether `path` may be a symbolic link. It may if the user gave this very path; it may not if the name was read
    from a file, or if the user gave only its folder. `what`: `job file `, for messages. Raises `error`.
    """
    flags = os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC | (0 if follow else os.O_NOFOLLOW)
    try:
        # Looked at first: opening a device can have effects of its own. The open file is looked at again, since it may have
        # been replaced in between.
        refused = describe_special_file((os.stat if follow else os.lstat)(path).st_mode)
        descriptor = -1 if refused else os.open(path, flags)
    except OSError as failed:
        cure = READABLE if isinstance(failed, PermissionError) else cure
        raise error(f"cannot read {what}{shorten(path)}: {failed.strerror or failed}", cure=cure) from failed
    except ValueError as failed:  # a path with a null character
        raise error(f"cannot read {what}{shorten(path)}: {failed}", cure=cure) from failed
    if refused is None:
        file = os.fdopen(descriptor, "rb", READ_AHEAD_BYTES)
        refused = describe_special_file(os.fstat(descriptor).st_mode)
        if refused is None:
            with file:
                yield file
            return
        file.close()
    raise error(f"cannot read {what}{shorten(path)}: it is {refused}, not a regular file", cure=cure)


def read_limited_bytes(
    path: Path,
    *,
    follow: bool,
    limit: int = TEXT_BYTES,
    error: type[InputError] = ConfigError,
    cure: str = _CURE,
    what: str = "",
) -> bytes:
    """The whole of a regular file of at most `limit` bytes. Raises `error`."""
    with open_regular_file(path, follow=follow, error=error, cure=cure, what=what) as file:
        size = os.fstat(file.fileno()).st_size
        pieces, left = [], limit + 1
        try:
            while size <= limit and (piece := file.read(min(left, PIECE_BYTES))):  # allocates only for bytes that exist
                pieces.append(piece)
                left -= len(piece)
        except OSError as failed:
            raise error(f"cannot read {what}{shorten(path)}: {failed.strerror or failed}", cure=cure) from failed
    content = b"".join(pieces)
    if size > limit or len(content) > limit:
        raise error(
            f"{what}{shorten(path)} has {max(size, len(content)):,} bytes, more than the {limit:,} that are read",
            cure=cure,
        )
    return content


def read_limited_text(path: Path, *, follow: bool, limit: int = TEXT_BYTES, cure: str = _CURE, what: str = "") -> str:
    """The whole of a regular UTF-8 file of at most `limit` bytes. Raises `ConfigError`."""
    try:
        return read_limited_bytes(path, follow=follow, limit=limit, cure=cure, what=what).decode()
    except UnicodeDecodeError as failed:
        what += f"{shorten(path)} is not UTF-8 text: {failed.reason} at byte {failed.start:,}"
        raise ConfigError(what, cure=cure) from failed


def parse_untrusted_json(content: bytes) -> Any:
    """The value of a JSON text.

    Raises `ValueError` for invalid JSON, for more than `MAX_DEPTH` nested brackets (before parsing), and for duplicate keys.
    """
    if json_nesting_depth(content) > MAX_DEPTH:
        raise JsonTooDeep(f"more than {MAX_DEPTH} brackets within each other")
    return json.loads(content.decode(), object_pairs_hook=_without_duplicate_keys)


def json_nesting_depth(content: bytes) -> int:
    """How deep the brackets of a JSON text are nested, outside of strings; `MAX_DEPTH` + 1 for any greater depth."""
    left = _STRING.sub(b"", content).translate(_SAME_BRACKET, _NO_BRACKET)
    depth = 0
    while left and depth <= MAX_DEPTH:
        inner = left.replace(b"[]", b"")
        if inner == left:  # brackets that do not match: each may open a level
            return min(MAX_DEPTH + 1, depth + len(left))
        left, depth = inner, depth + 1
    return depth


def _without_duplicate_keys(pairs: list[tuple[str, Json]]) -> dict[str, Json]:
    found = dict(pairs)
    if len(found) < len(pairs):
        seen: set[str] = set()
        twice = next(name for name, _ in pairs if name in seen or seen.add(name))  # type: ignore[func-returns-value]
        raise ValueError(f"key {shorten(twice)!r} is given twice")
    return found


@contextlib.contextmanager
def explain_read_errors(path: Path) -> Iterator[None]:
    """Turn an `OSError` of the body into a `ConfigError` that names the file of the error, else `path`."""
    try:
        yield
    except OSError as error:
        raise ConfigError(
            f"cannot read {error.filename or path}: {error.strerror or error}", cure=cure_of_read_error(error)
        ) from error
