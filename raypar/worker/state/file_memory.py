"""Memory for copies of state in files of a local folder: the system may write it to disk, and use its memory otherwise."""

from __future__ import annotations

import mmap
import os
import tempfile
from pathlib import Path

import numpy as np

from raypar.comm.buffer_pool import BufferPool
from raypar.errors import ConfigError

PAGE_BYTES = 4096
"""Files are mapped by whole pages."""


class FileMemoryPool(BufferPool):
    """A pool whose blocks are mapped files without a name, which are gone with their process, however it ends.

    Their room on the disk is taken when a block is made: without it a write to the memory would end the process (SIGBUS).
    """

    def __init__(self, folder: str) -> None:
        super().__init__()
        self._folder = folder

    def _block_bytes(self, nbytes: int) -> int:
        """See `BufferPool._block_bytes`: no more than is needed, since all of it takes room on the disk."""
        return -(-nbytes // PAGE_BYTES) * PAGE_BYTES

    def _new_block(self, size: int) -> np.ndarray:
        """See `BufferPool._new_block`. Raises `ConfigError` where the folder does not take it."""
        return np.frombuffer(_map_file(self._folder, size, f"no {size / 2**20:,.1f} MiB"), dtype=np.uint8)


def check_folder_for_copies(folder: str) -> None:
    """Raise `ConfigError` where a folder takes no copies at all."""
    _map_file(folder, PAGE_BYTES, "none")


def _map_file(folder: str, size: int, refused: str) -> mmap.mmap:
    """The memory of a new file in the folder, which has room on the disk. `refused`: what the folder does not take, if so."""
    try:
        Path(folder).mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryFile(dir=folder) as file:
            os.posix_fallocate(file.fileno(), 0, size)
            return mmap.mmap(file.fileno(), size)
    except OSError as error:
        raise ConfigError(
            f"elastic.mirror_in {folder} takes {refused} of the mirror's copies: {error}",
            cure="give a folder that workers can write to, on a local disk with room for a few times their state, or leave "
            "elastic.mirror_in out: copies then lie in memory",
        ) from error
