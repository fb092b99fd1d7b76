"""The cure for an `OSError`: what raises the limit where no file descriptor is left, what to do about a read-only disk, else
the caller's own cure."""

from __future__ import annotations

import errno
import resource

NO_DESCRIPTOR_ERRNOS = frozenset({errno.EMFILE, errno.ENFILE})
"""Error numbers for no file descriptor left: in this process, on this machine."""


def cure_of_os_error(error: BaseException, otherwise: str) -> str:
    """What raises the limit on open files, or makes a disk writable, if the error is about that; else `otherwise`."""
    number = getattr(error, "errno", None)
    if number == errno.EMFILE:
        soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
        most = "unlimited" if hard == resource.RLIM_INFINITY else f"{hard}"
        may = f"this process may have {soft} files and connections open"
        if soft == hard:
            return f"{may}, and its hard limit (`ulimit -Hn`) is no higher: raise that (/etc/security/limits.conf, LimitNOFILE)"
        return f"{may}: `ulimit -n {most}` before the command raises that"
    if number == errno.ENFILE:
        return "this machine has as many files open as it may: end what opens them, or raise fs.file-max (sysctl)"
    if number == errno.EROFS:
        another = otherwise.removeprefix("free disk space").removeprefix(",").removeprefix(" or ")
        writable = "make that disk writable again: it is mounted read-only (`dmesg` says whether after an error of its own)"
        return f"{writable}; or {another}" if another else writable
    return otherwise
