"""Temporary folders whose owners were killed with all that would have removed them: found again, and told from those in use.

A folder in use has a file that its owner keeps locked. The kernel releases such a lock with the last process that has it open,
however that ends, so what can be locked has no owner any more, whatever has its process id now.
"""

from __future__ import annotations

import contextlib
import fcntl
import os
import stat
from collections.abc import Iterator
from pathlib import Path

OWNER = "owner"
"""The locked file in a folder. It holds the id of the kernel's boot, since locks of another machine that shares the folder may
not be seen here, and the number of the folder's inode, which a copy of the folder does not have: nobody locks that."""
BOOT_ID = Path("/proc/sys/kernel/random/boot_id")


@contextlib.contextmanager
def owned_folder(folder: Path) -> Iterator[tuple[int, ...]]:
    """Mark `folder` as in use until the block ends, and all processes that have inherited the descriptor, which the block gets.

    Where no file can be written it gets none, and nobody takes the folder for abandoned.
    """
    lock = -1
    with contextlib.suppress(OSError):
        begun = folder / f".{OWNER}"
        begun.write_bytes(_owner_text(folder))
        lock = os.open(begun, os.O_RDONLY | os.O_CLOEXEC)
        fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        begun.rename(folder / OWNER)  # it has its name once it is locked
    try:
        yield (lock,) if lock >= 0 else ()
    finally:
        if lock >= 0:
            os.close(lock)


def abandoned_folders(base: Path, prefix: str) -> Iterator[Path]:
    """The folders of this user in `base` whose names begin with `prefix`, and whose owners are gone; each locked meanwhile."""
    for folder in sorted(base.glob(f"{prefix}*")):
        with contextlib.suppress(OSError), _taken(folder) as abandoned:
            if abandoned:
                yield folder


@contextlib.contextmanager
def _taken(folder: Path) -> Iterator[bool]:
    """Gives the block whether the folder is abandoned. Raises `OSError` if it has no owner's file, or a live owner."""
    found = folder.lstat()
    if not stat.S_ISDIR(found.st_mode) or found.st_uid != os.geteuid():
        yield False
        return
    lock = os.open(folder / OWNER, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC)
    try:
        fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        text, owner = _owner_text(folder), os.fstat(lock)
        # Without a link it was removed after it had been opened. In a folder that all may write in, anybody may have put one.
        yield owner.st_nlink > 0 and owner.st_uid == found.st_uid and os.read(lock, len(text) + 1) == text
    finally:
        os.close(lock)


def _owner_text(folder: Path) -> bytes:
    return BOOT_ID.read_bytes() + b"%d\n" % folder.lstat().st_ino
