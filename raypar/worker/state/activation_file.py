"""The file to which a worker's activations are offloaded: written in one background thread, read in another.

The file has no name, so that it is gone with its process, however that ends. What has been read back gives its room in the file
to what is written next.
"""

from __future__ import annotations

import os
import tempfile
import threading
import time
import weakref
from concurrent.futures import Future, ThreadPoolExecutor
from concurrent.futures import TimeoutError as FutureTimeout
from pathlib import Path
from typing import NamedTuple

import torch
from torch import Tensor

from raypar.errors import CommTimeout, ConfigError
from raypar.files.file_systems import mark_folder_as_used
from raypar.plan import offloading
from raypar.worker.state.file_memory import PAGE_BYTES, FolderUse

ACTIVATIONS = FolderUse("plan.activations_in", "activations", "those of all microbatches in flight", "they then lie in memory")


class Room(NamedTuple):
    """A piece of the file, in whole pages."""

    start: int
    nbytes: int

    @property
    def stop(self) -> int:
        """Where it ends."""
        return self.start + self.nbytes


class ActivationFile:
    """One worker's file for activations."""

    def __init__(self, folder: str, timeout_s: float) -> None:
        """`timeout_s`: how long a worker may wait for the disk."""
        self._folder, self._timeout_s = folder, timeout_s
        self._file: int | None = None
        """Descriptor; None before anything was written."""
        self.nbytes = 0
        """Size of the file: what was in it when that was most."""
        self._free: list[Room] = []
        """Rooms that hold nothing, in order; no two of them are neighbours."""
        self._unwritten = 0
        """Bytes that are still to be written."""
        self.most_unwritten = 0
        """How many those were when they were most."""
        self._changed = threading.Condition()
        """Guards the four above; notified when less is unwritten."""
        self._failure: OSError | None = None
        """Why something could not be written."""
        self._writer = ThreadPoolExecutor(1, "raypar-offload")
        self._reader = ThreadPoolExecutor(1, "raypar-fetch")

    def close(self) -> None:
        """End the threads; what is not written yet is not. The file goes when nothing refers to this object any more."""
        for threads in (self._writer, self._reader):
            threads.shutdown(wait=False, cancel_futures=True)

    def write(self, memory: Tensor, limit: int | None = None) -> OffloadedMemory:
        """Have some memory (uint8) written, once no more than `limit` waits for that (at most `MOST_UNWRITTEN_BYTES`).

        Raises `ConfigError` if the folder does not take it, or has not taken what came before; `CommTimeout` if too much waits
        for too long.
        """
        nbytes, until = memory.numel(), time.monotonic() + self._timeout_s
        most = min(offloading.MOST_UNWRITTEN_BYTES, offloading.MOST_UNWRITTEN_BYTES if limit is None else limit)
        with self._changed:
            while self._unwritten and self._unwritten + nbytes > most and self._failure is None:
                if not self._changed.wait(until - time.monotonic()):
                    raise CommTimeout(
                        f"{self._unwritten / 2**20:,.1f} MiB of activations were not written to {ACTIVATIONS.key} "
                        f"{self._folder} within {self._timeout_s:g} s",
                        cure=ACTIVATIONS.cure,
                    )
            if self._failure is not None:
                raise self._error(self._failure)
            room = self._take(nbytes)
            self._unwritten += nbytes
            self.most_unwritten = max(self.most_unwritten, self._unwritten)
        return OffloadedMemory(self, memory, room)

    def settle(self) -> None:
        """Wait until all writes and reads that have begun are done."""
        for threads in (self._writer, self._reader):
            threads.submit(lambda: None).result(self._timeout_s)

    def begin_writing(self, memory: OffloadedMemory) -> Future[None]:
        """Write something in the background."""
        return self._writer.submit(self._write, memory)

    def _write(self, memory: OffloadedMemory) -> None:
        try:
            data, done = memory.source(), 0
            while done < memory.nbytes:
                done += os.pwrite(self._descriptor(), data[done:], memory.room.start + done)
            del data
            memory.drop_source()
        except OSError as error:
            self._failure = error
        finally:
            self.count_written(memory.nbytes)

    def count_written(self, nbytes: int) -> None:
        """Count bytes that are no longer to be written."""
        with self._changed:
            self._unwritten -= nbytes
            self._changed.notify_all()

    def begin_reading(self, room: Room, nbytes: int) -> tuple[Tensor, Future[None]]:
        """Begin to read what is in a room: new memory [nbytes], uint8, and when it is filled."""
        memory = torch.empty(nbytes, dtype=torch.uint8)
        return memory, self._reader.submit(self._read, room, memory)

    def _read(self, room: Room, memory: Tensor) -> None:
        data, done = memory.numpy().data, 0
        while done < len(data):
            count = os.preadv(self._descriptor(), [data[done:]], room.start + done)
            if not count:
                raise OSError(f"it ends after {room.start + done:,} bytes")
            done += count

    def wait(self, reading: Future[None], what: str) -> None:
        """Wait until something is read; `what`: in words. Raises `CommTimeout` after the time limit, and `ConfigError` if it
        cannot be read."""
        try:
            reading.result(self._timeout_s)
        except FutureTimeout:
            raise CommTimeout(
                f"{what} were not read from {ACTIVATIONS.key} {self._folder} within {self._timeout_s:g} s",
                cure=ACTIVATIONS.cure,
            ) from None
        except OSError as error:
            raise self._error(error) from error

    def _error(self, error: OSError) -> ConfigError:
        return ConfigError(
            f"{ACTIVATIONS.key} {self._folder} does not keep {ACTIVATIONS.holds}: {error}", cure=ACTIVATIONS.cure
        )

    # -- room ----------------------------------------------------------------------------------------------------------

    def give_back(self, room: Room) -> None:
        """Let a room be used for something else."""
        with self._changed:
            before = [free for free in self._free if free.start < room.start]
            behind = [free for free in self._free if free.start > room.start]
            if before and before[-1].stop == room.start:
                room = Room(before[-1].start, before.pop().nbytes + room.nbytes)
            if behind and room.stop == behind[0].start:
                room = Room(room.start, room.nbytes + behind.pop(0).nbytes)
            self._free = [*before, room, *behind]

    def _take(self, nbytes: int) -> Room:
        """Room for so many bytes: of the smallest free one that is large enough, else at the end of the file."""
        size = -(-nbytes // PAGE_BYTES) * PAGE_BYTES
        found = min((free for free in self._free if free.nbytes >= size), key=lambda free: free.nbytes, default=None)
        if found is not None:
            left = [Room(found.start + size, found.nbytes - size)] if found.nbytes > size else []
            at = self._free.index(found)
            self._free[at : at + 1] = left
            return Room(found.start, size)
        try:
            os.posix_fallocate(self._descriptor(), self.nbytes, size)  # a hole could not be filled on a full disk
        except OSError as error:
            raise self._error(error) from error
        self.nbytes += size
        return Room(self.nbytes - size, size)

    def _descriptor(self) -> int:
        if self._file is None:
            Path(self._folder).mkdir(parents=True, exist_ok=True)
            with tempfile.TemporaryFile(dir=self._folder) as file:
                self._file = os.dup(file.fileno())
            for descriptor in (self._file, mark_folder_as_used(self._folder)):
                weakref.finalize(self, os.close, descriptor)
        return self._file


class OffloadedMemory:
    """Memory that is written to the file, and read back once."""

    def __init__(self, file: ActivationFile, memory: Tensor, room: Room) -> None:
        """Begins to write. `memory` is kept until that is over; `room`: its place in the file."""
        self._file, self.room, self.nbytes = file, room, memory.numel()
        self._lock = threading.Lock()
        self._source: Tensor | None = memory
        """The memory, until it is written; None afterwards. Guarded by the lock."""
        self._restored: Tensor | None = None
        """The memory itself, if it was fetched before it was written, or new memory into which it is read."""
        self._reading: Future[None] | None = None
        """Done when `_restored` is filled; None: it is, or was not asked for yet."""
        self._room_goes_back = False
        """Whether the room will be given back."""
        self._writing = file.begin_writing(self)

    @property
    def is_back(self) -> bool:
        """Whether the memory is there again, or on its way back."""
        return self._restored is not None

    def source(self) -> memoryview:
        """The bytes to write."""
        assert self._source is not None
        return self._source.numpy().data

    def drop_source(self) -> None:
        """Let go of the memory, all of which is in the file now."""
        with self._lock:
            self._source = None

    def fetch(self) -> None:
        """Begin to read the memory; what is not written yet is still there."""
        if self._restored is not None:
            return
        if self._writing.cancel():
            self._file.count_written(self.nbytes)
        with self._lock:
            self._restored = self._source
        if self._restored is None:
            self._restored, self._reading = self._file.begin_reading(self.room, self.nbytes)
        self._give_room_back(self._reading or self._writing)

    def wait(self, what: str) -> Tensor:
        """The memory; waits until it is back. `what`: whose it is, in words, for an error after the time limit."""
        self.fetch()
        assert self._restored is not None
        if self._reading is not None:
            self._file.wait(self._reading, what)
            self._reading = None
        return self._restored

    def release(self) -> None:
        """Drop the bytes, in memory and in the file."""
        if not self._room_goes_back and self._writing.cancel():
            self._file.count_written(self.nbytes)
        self._give_room_back(self._writing)
        self._restored = self._source = None

    def _give_room_back(self, after: Future[None]) -> None:
        if not self._room_goes_back:
            self._room_goes_back, file, room = True, self._file, self.room
            after.add_done_callback(lambda _: file.give_back(room))
