"""Memory for state in files of a local folder: the system may write it to disk, and use its memory otherwise."""

from __future__ import annotations

import mmap
import os
import tempfile
import weakref
from pathlib import Path
from typing import NamedTuple

import numpy as np
from torch import Tensor

from raypar.comm.buffer_pool import BufferPool
from raypar.errors import ConfigError
from raypar.files.file_systems import mark_folder_as_used, network_file_system_of

PAGE_BYTES = 4096
"""Files are mapped by whole pages."""


class FolderUse(NamedTuple):
    """What a job has a folder for, in messages."""

    key: str
    """The job's key."""
    holds: str
    """What lies in its files."""
    room: str
    """How much room it takes."""
    otherwise: str
    """What becomes of it without the key."""

    @property
    def cure(self) -> str:
        """What to do about a folder that does not serve."""
        return (
            f"give a folder that workers can write to, on a local disk with room for {self.room}, or leave {self.key} out: "
            f"{self.otherwise}"
        )


MIRROR_COPIES = FolderUse("elastic.mirror_in", "the mirror's copies", "a few times their state", "copies then lie in memory")
OPTIMIZER_STATE = FolderUse(
    "plan.optimizer_in", "optimizer state", "about three times that state (checkpoints copy it)", "it then lies in memory"
)


class FileMemoryPool(BufferPool):
    """A pool whose blocks are mapped files without a name, which are gone with their process, however it ends.

    Their room on the disk is taken when a block is made: without it a write to the memory would end the process (SIGBUS).
    """

    def __init__(self, folder: str, use: FolderUse = MIRROR_COPIES) -> None:
        super().__init__()
        self._folder, self._use = folder, use
        self._mapped: dict[int, mmap.mmap] = {}
        """Address of a block -> its mapped file."""
        self._in_use = False
        """Whether other runs can tell that the folder is used."""

    def _block_bytes(self, nbytes: int) -> int:
        """See `BufferPool._block_bytes`: no more than is needed, since all of it takes room on the disk."""
        return -(-nbytes // PAGE_BYTES) * PAGE_BYTES

    def _new_block(self, size: int) -> np.ndarray:
        """See `BufferPool._new_block`. Raises `ConfigError` where the folder does not take it."""
        mapped = _map_file(self._folder, size, self._use, f"no {size / 2**20:,.1f} MiB")
        if not self._in_use:
            weakref.finalize(self, os.close, mark_folder_as_used(self._folder))
            self._in_use = True
        block = np.frombuffer(mapped, dtype=np.uint8)
        self._mapped[block.ctypes.data] = mapped
        return block

    def copy_of(self, tensor: Tensor) -> Tensor:
        """A copy of a tensor in host memory, with its strides where these leave no gaps: in a file, unless it is small."""
        flat = self.empty((tensor.numel(),), tensor.dtype)
        made = flat.as_strided(tensor.shape, tensor.stride()) if _is_dense(tensor) else flat.view(tensor.shape)
        return made.copy_(tensor.detach())

    def contiguous_copy_of(self, tensor: Tensor) -> Tensor:
        """A contiguous copy of a tensor in host memory: in a file, unless it is small."""
        return self.empty(tensor.shape, tensor.dtype).copy_(tensor.detach())

    def has(self, tensor: Tensor) -> bool:
        """Whether a tensor lies at the beginning of one of the files."""
        return tensor.data_ptr() in self._mapped

    def read_ahead(self, tensor: Tensor) -> None:
        """Have the system begin to read the file of a tensor, if it lies at the beginning of a block; waits for nothing."""
        mapped = self._mapped.get(tensor.data_ptr())
        if mapped is not None:
            mapped.madvise(mmap.MADV_WILLNEED)


def check_folder_for_copies(folder: str, use: FolderUse = MIRROR_COPIES) -> None:
    """Raise `ConfigError` where a folder takes nothing at all, is a file, or is on another machine."""
    if Path(folder).exists() and not Path(folder).is_dir():
        raise ConfigError(f"{use.key} {folder} is a file, and {use.holds} would lie in a folder", cure=use.cure)
    _map_file(folder, PAGE_BYTES, use, "none")
    kind = network_file_system_of(folder)
    if kind is not None:
        raise ConfigError(f"{use.key} {folder} is on another machine ({kind}): every step would wait for it", cure=use.cure)


def _map_file(folder: str, size: int, use: FolderUse, refused: str) -> mmap.mmap:
    """The memory of a new file in the folder, which has room on the disk. `refused`: what the folder does not take, if so."""
    try:
        Path(folder).mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryFile(dir=folder) as file:
            os.posix_fallocate(file.fileno(), 0, size)
            return mmap.mmap(file.fileno(), size)
    except OSError as error:
        raise ConfigError(f"{use.key} {folder} takes {refused} of {use.holds}: {error}", cure=use.cure) from error


def _is_dense(tensor: Tensor) -> bool:
    """Whether the elements lie side by side, in whatever order of the dimensions."""
    expected = 1
    for stride, size in sorted((t, s) for t, s in zip(tensor.stride(), tensor.shape, strict=True) if s != 1):
        if stride != expected:
            return False
        expected *= size
    return True
