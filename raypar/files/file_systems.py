"""Which file system a path is on, whether its files lie on another machine, and whether a folder is used by processes."""

from __future__ import annotations

import contextlib
import fcntl
import os
import re

MOUNTS = "/proc/self/mountinfo"
"""Lines of `36 35 98:0 /root /mount/point options - type source options` (proc_pid_mountinfo(5))."""
ON_THE_NETWORK = re.compile(
    r"(nfs4?|cifs|smb3|smbfs|ceph|lustre|gpfs|beegfs|afs|orangefs|pvfs2|panfs|wekafs|ncpfs|"
    r"fuse\.(sshfs|glusterfs|ceph.*|s3fs|gcsfuse|juicefs|blobfuse2?|rclone|mount-s3|goofys|moosefs|mfs|dfuse))"
)
"""File systems whose files lie on another machine."""


def file_system_of(path: str | os.PathLike[str], mounts: str | None = None) -> str | None:
    """The type of the file system on which a path is, or would be; None where nothing says so. `mounts`: the lines of `MOUNTS`,
    by default those of this process."""
    if mounts is None:
        with contextlib.suppress(OSError), open(MOUNTS, errors="surrogateescape") as file:
            mounts = file.read()
    real, longest, found = os.path.realpath(path), -1, None
    for line in (mounts or "").splitlines():
        before, separator, after = line.partition(" - ")
        fields, kind = before.split(" "), after.partition(" ")[0]
        if not separator or len(fields) < 5:
            continue
        place = re.sub(r"\\([0-7]{3})", lambda escaped: chr(int(escaped[1], 8)), fields[4])
        if len(place) >= longest and (real == place or real.startswith(place.rstrip("/") + "/")):
            longest, found = len(place), kind  # of several at one place the last one hides the others
    return found


def network_file_system_of(path: str | os.PathLike[str], mounts: str | None = None) -> str | None:
    """The type of the file system of a path whose files lie on another machine; None for any other path."""
    kind = file_system_of(path, mounts)
    return kind if kind is not None and ON_THE_NETWORK.fullmatch(kind) else None


def mark_folder_as_used(folder: str | os.PathLike[str]) -> int:
    """Let other processes know that this one uses a folder, until the descriptor that is returned is closed or the process
    ends, however it does. Nothing is written."""
    descriptor = os.open(folder, os.O_RDONLY | os.O_DIRECTORY)
    with contextlib.suppress(OSError):  # a file system without locks: then nobody can tell
        fcntl.flock(descriptor, fcntl.LOCK_SH | fcntl.LOCK_NB)
    return descriptor


def is_folder_used(folder: str | os.PathLike[str]) -> bool:
    """Whether a process has marked a folder as used and lives; False where that cannot be told."""
    try:
        descriptor = os.open(folder, os.O_RDONLY | os.O_DIRECTORY)
    except OSError:
        return False
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return True
    except OSError:
        return False
    finally:
        os.close(descriptor)
    return False
