"""The journal of the samples of streams: a digest of every microbatch, and where epochs begin, as 8 bytes each, by step.

A step that is executed again, in the same run or after a resume, must have read the same. And whoever reads a stream from the
middle on learns here from which epoch on it has to read.
"""

from __future__ import annotations

import os
import struct
from array import array
from collections import OrderedDict
from collections.abc import Callable, Mapping
from pathlib import Path

from raypar.errors import DataError
from raypar.files.json_values import Json
from raypar.files.os_error_cure import cure_of_os_error
from raypar.plan.microbatches import Microbatches
from raypar.worker.data.stream_positions import EpochMark, StreamsRead

KEPT_STEPS = 10_000
"""Of so many steps the digests are in memory, to be compared with those of a step that is executed again."""
GIVEN_EPOCHS = 64
"""Workers learn of so many epochs of a stream where they begin."""
_HEADER = struct.Struct("<8sQQQ")
_MAGIC = b"raypar-s"
_POSITION_BITS = 40
"""Of a mark; the rest is the epoch. A mark of larger numbers is left out: it only saves time."""


def streams_of_contract(contract: Mapping[str, Json]) -> int:
    """As how many streams the training data of a job is read; 0 for a map-style data set."""
    data = contract.get("data")
    found = data.get("streams") if isinstance(data, dict) else None
    return found if isinstance(found, int) else 0


class SampleJournal:
    """Digests and epochs by step, in memory and in a file. A file that cannot be written is told once, and training goes on."""

    path: Path
    """The file: a header, then for each step a digest of each microbatch and a mark of each stream; 0: not known."""
    streams: int
    """Number of streams."""
    epochs: dict[int, dict[int, int]]
    """Stream -> epoch -> position of its first sample, of the last epochs."""

    def __init__(self, path: Path, batching: Microbatches, streams: int, tell: Callable[[str], None]) -> None:
        """`tell`: gets a line for the user if the file cannot be read or written."""
        self.path, self.streams = path, streams
        self.epochs = {stream: {} for stream in range(streams)}
        self._microbatches, self._tell = batching.count, tell
        self._records: OrderedDict[int, array[int]] = OrderedDict()
        self._told = False

    @property
    def _record_bytes(self) -> int:
        return 8 * (self._microbatches + self.streams)

    @property
    def _header(self) -> bytes:
        return _HEADER.pack(_MAGIC, 1, self._microbatches, self.streams)

    def open(self, done: int) -> None:
        """Read what the file has of the steps from `done` on, and of the one before. A file of another job is begun anew."""
        try:
            with open(self.path, "rb") as file:
                if file.read(_HEADER.size) != self._header:
                    raise FileNotFoundError
                first = max(0, done - 1)
                file.seek(_HEADER.size + first * self._record_bytes)
                content = file.read(KEPT_STEPS * self._record_bytes)
        except FileNotFoundError:
            self.begin_anew()
            return
        except OSError as error:
            self._tell_once("read", error)
            return
        for number in range(len(content) // self._record_bytes):
            record = array("Q", content[number * self._record_bytes : (number + 1) * self._record_bytes])
            self._records[first + number] = record
            for stream, mark in enumerate(record[self._microbatches :]):
                self._learn(stream, _unpacked(mark))

    def begin_anew(self) -> None:
        """Forget what the file has: from here on other data, or other batches, are read."""
        self._write_at(0, self._header, begin=True)

    def note(self, step: int, read: StreamsRead) -> DataError | None:
        """Take what a worker has read in a step. The error for a microbatch that was other samples when it was read before."""
        record = self._record(step)
        found = [*(((step, m), digest) for m, digest in read.digests.items()), *read.again.items()]
        for (at, microbatch), digest in found:
            known = self._record(at) if at == step else self._records.get(at)
            if known is None:
                continue
            if known[microbatch] not in (0, digest):
                return DataError(
                    f"step {at + 1}, microbatch {microbatch}: stream {microbatch % self.streams} of {self.streams} gave other "
                    "samples than when it was read before",
                    cure="let the data give the same samples each time that a stream is read: no clock, no network, no random "
                    "numbers but those of the seeded generators of python, numpy and torch",
                )
            known[microbatch] = digest
        for stream, mark in read.epochs.items():
            record[self._microbatches + stream] = _packed(mark)
            self._learn(stream, mark)
        return None

    def _record(self, step: int) -> array[int]:
        record = self._records.get(step)
        if record is None:
            record = self._records[step] = array("Q", bytes(self._record_bytes))
            while len(self._records) > KEPT_STEPS:
                self._records.popitem(last=False)
        return record

    def record(self, step: int) -> bytes:
        """What is known of a step, to be written."""
        return self._record(step).tobytes()

    def write(self, step: int, record: bytes) -> None:
        """Write what is known of a step to the file."""
        self._write_at(_HEADER.size + step * self._record_bytes, record)

    def known_epochs(self) -> dict[int, tuple[EpochMark, ...]]:
        """Stream -> the last epochs, for workers that begin to read it."""
        return {stream: tuple(sorted(epochs.items())) for stream, epochs in self.epochs.items() if epochs}

    def _learn(self, stream: int, mark: EpochMark | None) -> None:
        if mark is not None:
            epochs = self.epochs[stream]
            epochs[mark[0]] = mark[1]
            while len(epochs) > GIVEN_EPOCHS:
                del epochs[min(epochs)]

    def _write_at(self, position: int, content: bytes, *, begin: bool = False) -> None:
        try:
            file = os.open(self.path, os.O_WRONLY | os.O_CREAT | (os.O_TRUNC if begin else 0), 0o644)
            try:
                os.pwrite(file, content, position)
            finally:
                os.close(file)
        except OSError as error:
            self._tell_once("written", error)

    def _tell_once(self, what: str, error: OSError) -> None:
        if not self._told:
            self._told = True
            self._tell(
                f"{self.path} cannot be {what} ({error}): after a resume, samples are not compared with those that were read "
                f"before\n  cure: {cure_of_os_error(error, 'free disk space, or put the run folder back')}"
            )


def _packed(mark: EpochMark) -> int:
    """An epoch and its position in 8 bytes; 0 for one that does not fit."""
    epoch, position = mark
    fits = epoch < 1 << (64 - _POSITION_BITS) and position < 1 << _POSITION_BITS
    return (epoch << _POSITION_BITS) | position if fits else 0


def _unpacked(mark: int) -> EpochMark | None:
    return (mark >> _POSITION_BITS, mark & ((1 << _POSITION_BITS) - 1)) if mark else None
