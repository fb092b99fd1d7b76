"""The journal of the samples of streams: a digest of every microbatch, and where epochs begin, as 8 bytes each, by step.

A step that is executed again, in the same run or after a resume, must have read the same. And whoever reads a stream from the
middle on learns here from which epoch on it has to read.
"""

from __future__ import annotations

import contextlib
import json
import os
import struct
from array import array
from collections import OrderedDict
from collections.abc import Callable, Mapping
from pathlib import Path

from raypar.errors import DataError
from raypar.files.atomic_write import replace_file_atomically
from raypar.files.json_values import Json
from raypar.files.os_error_cure import cure_of_os_error
from raypar.plan.microbatches import Microbatches
from raypar.worker.data.stream_positions import EpochMark, StreamCursor, StreamsRead

KEPT_STEPS = 10_000
"""Of so many steps the digests are in memory, to be compared with those of a step that is executed again."""
CURSOR_STEPS, KEPT_CURSORS = 100, 4
"""At most so many steps lie between two cursors; of so many of the last ones, and of the last checkpoints, they are kept."""
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

    cursors: dict[int, list[StreamCursor]]
    """Stream -> places from which it can be read: the last ones, and those of the last checkpoints."""

    def __init__(
        self,
        path: Path,
        cursors_path: Path,
        batching: Microbatches,
        streams: int,
        save_every: int,
        tell: Callable[[str], None],
    ) -> None:
        """`save_every`: steps from one checkpoint to the next; `tell`: gets a line for the user if a file cannot be read or
        written."""
        self.path, self.streams, self.epochs = path, streams, {stream: {} for stream in range(streams)}
        self.cursors, self._cursors_path, self._save_every = {stream: [] for stream in range(streams)}, cursors_path, save_every
        self._of_checkpoints: dict[int, list[StreamCursor]] = {stream: [] for stream in range(streams)}
        self._cursors_to_write = False
        self._microbatches, self._tell = batching.count, tell
        self._records: OrderedDict[int, array[int]] = OrderedDict()
        self._told = False

    @property
    def _record_bytes(self) -> int:
        return 8 * (self._microbatches + self.streams)

    @property
    def _header(self) -> bytes:
        return _HEADER.pack(_MAGIC, 1, self._microbatches, self.streams)

    def wants_cursors(self, step: int) -> bool:
        """Whether the report of a step shall have cursors."""
        every = min(self._save_every or CURSOR_STEPS, CURSOR_STEPS)
        return (step + 1) % every == 0 or self._is_saved(step)

    def _is_saved(self, step: int) -> bool:
        return bool(self._save_every) and (step + 1) % self._save_every == 0

    def open(self, done: int) -> None:
        """Read what the file has of the steps from `done` on, and of the one before. A file of another job is begun anew."""
        try:
            with open(self.path, "rb") as file:
                if file.read(_HEADER.size) != self._header:
                    raise FileNotFoundError
                first = max(0, done - 1)
                file.seek(_HEADER.size + first * self._record_bytes)
                content = file.read(KEPT_STEPS * self._record_bytes)
            self._read_cursors()
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
        with contextlib.suppress(OSError):
            self._cursors_path.unlink(missing_ok=True)

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
        for stream, cursor in read.cursors.items():
            self._keep_cursor(stream, cursor, saved=self._is_saved(step))
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

    def _keep_cursor(self, stream: int, cursor: StreamCursor, *, saved: bool) -> None:
        for kept in (self.cursors, self._of_checkpoints) if saved else (self.cursors,):
            kept[stream] = sorted({one.position: one for one in (*kept[stream], cursor)}.values())[-KEPT_CURSORS:]
        self._cursors_to_write = True

    def record(self, step: int) -> tuple[bytes, str]:
        """What is known of a step, to be written: its record, and all cursors if there are new ones."""
        text = json.dumps(self.known_cursors()) if self._cursors_to_write else ""
        self._cursors_to_write = False
        return self._record(step).tobytes(), text

    def write(self, step: int, known: tuple[bytes, str]) -> None:
        """Write what is known of a step to the files."""
        record, cursors = known
        self._write_at(_HEADER.size + step * self._record_bytes, record)
        if cursors:
            try:
                replace_file_atomically(self._cursors_path, cursors.encode())
            except OSError as error:
                self._tell_once("written", error)

    def _read_cursors(self) -> None:
        """Read the cursors of a former driver. What is no such file is left out: cursors only save time."""
        try:
            found = json.loads(self._cursors_path.read_bytes())
            for stream in range(self.streams):
                for position, epoch, index, state in found.get(str(stream), ()):
                    if all(type(number) is int and number >= 0 for number in (position, epoch, index)) and type(state) is str:
                        self._of_checkpoints[stream].append(StreamCursor(position, epoch, index, state))
        except (OSError, ValueError, AttributeError, TypeError, RecursionError):
            return

    def known_cursors(self) -> dict[int, tuple[StreamCursor, ...]]:
        """Stream -> places from which it can be read."""
        found = {k: sorted({*self.cursors[k], *self._of_checkpoints[k]}) for k in range(self.streams)}
        return {stream: tuple(cursors) for stream, cursors in found.items() if cursors}

    def digests(self, done: int) -> dict[int, int]:
        """Microbatch -> digest, of the last of the steps that are done, as far as it is known."""
        record = self._records.get(done - 1)
        return {} if record is None else {m: digest for m, digest in enumerate(record[: self._microbatches]) if digest}

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
