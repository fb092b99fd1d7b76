"""Memory of a worker that another process of the same machine reads in place (MPI's shared windows).

A socket copies every byte twice and keeps both processors busy with it; a reader of shared memory only touches what it adds.
The memory has no name in any file system: it is an anonymous file (`memfd_create`), which the other process opens through
/proc. It is gone with its last mapping, however the processes end.
"""

from __future__ import annotations

import fcntl
import mmap
import os
import secrets

import torch
from torch import Tensor

PREFIX = "raypar-"
SEALS = fcntl.F_SEAL_SHRINK | fcntl.F_SEAL_GROW | fcntl.F_SEAL_SEAL
"""Seals that fix the size: if it were reduced, a process that reads the memory would be killed (SIGBUS)."""


class SharedMemoryBlock:
    """Memory that this process writes. Raises `OSError` where the system has no such memory.

    `close` it once the readers have opened it (a mapping needs no descriptor).
    """

    def __init__(self, nbytes: int) -> None:
        self._token = secrets.randbits(63)
        self._fd = os.memfd_create(PREFIX + format(self._token, "x"), os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING)
        try:
            os.ftruncate(self._fd, nbytes)
            fcntl.fcntl(self._fd, fcntl.F_ADD_SEALS, SEALS)
            self.memory = _map(self._fd, nbytes)
            """[nbytes] uint8, zeros, page aligned."""
        except BaseException:
            self.close()
            raise
        self.address = torch.tensor([os.getpid(), self._fd, nbytes, self._token], dtype=torch.int64)
        """What `open_shared_memory` of another process needs: process id, descriptor, size, token of the file's name."""

    def close(self) -> None:
        """Close the descriptor: no other process can open the memory any more; those that have it open keep it. Idempotent."""
        if self._fd >= 0:
            os.close(self._fd)
            self._fd = -1

    __del__ = close


NO_ADDRESS = torch.zeros(4, dtype=torch.int64)
"""The address that a process without a shared memory block sends."""


def open_shared_memory(address: Tensor, nbytes: int) -> Tensor:
    """The memory [nbytes] of another process, to be read only. Raises `OSError` if it cannot be reached.

    The token in the file's name tells apart a process of the same number in another pid namespace. The address is not trusted:
    its size must be the expected one, and the file's.
    """
    pid, their_fd, their_nbytes, token = address.tolist()
    place, wanted = f"/proc/{pid}/fd/{their_fd}", f"/memfd:{PREFIX}{token:x} (deleted)"
    if their_nbytes != nbytes:
        raise OSError(f"process {pid} has {their_nbytes} bytes of memory to be read, {nbytes} were expected")
    if os.readlink(place) != wanted:  # opened before this check, a FIFO might block, and a device might act
        raise OSError(f"{place} is not the memory of process {pid} that was asked for")
    fd = os.open(place, os.O_RDWR | os.O_CLOEXEC)
    try:
        name, size = os.readlink(f"/proc/self/fd/{fd}"), os.fstat(fd).st_size
        if name != wanted or size != nbytes or fcntl.fcntl(fd, fcntl.F_GET_SEALS) & SEALS != SEALS:
            raise OSError(f"{name} of {size} bytes is not the memory of process {pid} that was asked for")
        return _map(fd, nbytes)
    finally:
        os.close(fd)


def _map(fd: int, nbytes: int) -> Tensor:
    """Map all pages at once: touched one by one inside a step, each would cost a page fault."""
    return torch.frombuffer(mmap.mmap(fd, nbytes, mmap.MAP_SHARED | mmap.MAP_POPULATE), dtype=torch.uint8)
