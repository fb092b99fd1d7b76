"""Writes files whole or not at all, and explains why a file cannot be written."""

from __future__ import annotations

import contextlib
import errno
import os
import shutil
import stat
from collections.abc import Iterator
from pathlib import Path

from raypar.errors import ConfigError
from raypar.files.os_error_cure import cure_of_os_error
from raypar.files.untrusted_files import read_limited_bytes

DISK_FULL_ERRNOS = frozenset({errno.ENOSPC, errno.EDQUOT, errno.EFBIG})
"""Error numbers for no room left: full disk, quota, file size limit."""
DISK_FULL_CURE = "free disk space, or choose a folder on a disk that has some"
NOT_WRITABLE_CURE = "choose a folder you may write to"


def regular_file_opener(path: str | os.PathLike[str], flags: int) -> int:
    """An `opener` for `open` that opens regular files only: it follows no link and waits for no FIFO. Raises `OSError`."""
    descriptor = os.open(path, flags | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC, 0o666)
    if not stat.S_ISREG(os.fstat(descriptor).st_mode):
        os.close(descriptor)
        raise OSError(errno.EINVAL, "not a regular file", os.fspath(path))
    return descriptor


@contextlib.contextmanager
def explain_write_errors(path: Path, cure: str = "") -> Iterator[None]:
    """Turn an `OSError` of the body into a `ConfigError` that names `path`. `cure`: for errors other than a full disk."""
    try:
        yield
    except OSError as error:
        raise ConfigError(
            f"cannot write {path}: {error.strerror or error}",
            cure=DISK_FULL_CURE if error.errno in DISK_FULL_ERRNOS else cure_of_os_error(error, cure or NOT_WRITABLE_CURE),
        ) from error


def write_text_atomically(path: Path, text: str, cure: str = "") -> None:
    """Write a text file whole, or leave its old content. Raises `ConfigError`; `cure`: for errors other than a full disk."""
    with explain_write_errors(path, cure):
        target = Path(os.path.realpath(path))
        if target.exists() and not target.is_file():  # /dev/stdout, a pipe; for a folder the error is raised here
            target.write_text(text, encoding="utf-8")
        else:
            replace_file_atomically(target, text.encode())


@contextlib.contextmanager
def written_aside(path: Path) -> Iterator[Path]:
    """Gives the block a path beside `path`. The file or folder that the block makes there gets the name `path` at its end, or
    is removed if the block raises. Raises `OSError`."""
    aside = path.with_name(f".{path.name}.{os.getpid()}.tmp")
    try:
        yield aside
        os.replace(aside, path)
    finally:
        with contextlib.suppress(OSError):  # it has its name, or the disk is read-only
            if aside.is_dir():
                shutil.rmtree(aside)
            else:
                aside.unlink()


def replace_file_atomically(path: Path, content: bytes, *, lasting: bool = True) -> None:
    """Replace the file at `path` by one with this content, or leave everything as it was. A link is replaced, not followed.

    `lasting`: wait for the disk, so that the new file outlives a crash of the machine. Raises `OSError`.
    """
    with written_aside(path) as aside, open(aside, "wb", opener=regular_file_opener) as file:
        file.write(content)
        file.flush()
        if lasting:
            os.fsync(file.fileno())


def file_has_content(path: Path, content: bytes) -> bool:
    """Whether `path` is a regular file with this content."""
    try:
        return read_limited_bytes(path, follow=False, limit=len(content)) == content
    except ConfigError:
        return False
