"""Reads one stream of samples from any position on: epoch after epoch, shuffled in windows if the job asks for it (rule 1)."""

from __future__ import annotations

import contextlib
import time
from collections import deque
from collections.abc import Mapping
from dataclasses import dataclass, field

import torch

from raypar.data.shared_rows import RowsLostError
from raypar.errors import DataError
from raypar.plan.seeds import seed_of
from raypar.worker.data.microbatch_stream_positions import EpochMark, StreamCursor, last_epoch_before
from raypar.worker.data.sample_order import SamplePosition
from raypar.worker.data.stream_source import StreamSource

KEPT_EPOCHS = 256
"""Of so many epochs a reader knows where they begin."""


@dataclass
class PlaceSearch:
    """How far a reader has come that reads samples only to find a place; its text says how long it will still take."""

    count: int
    """Samples to read."""
    done: int = 0
    """Samples that were read."""
    begun_s: float = field(default_factory=time.monotonic)
    """When it began."""

    def __str__(self) -> str:
        left_s = (self.count - self.done) * (time.monotonic() - self.begun_s) / max(1, self.done)
        return f"to find its place: {self.done:,} of {self.count:,}, about {left_s:.0f} s left"


class StreamReader:
    """The samples of a stream by position: 0 is the first that it gives, and an epoch that ends is followed by the next one.

    Positions are read forwards; an earlier one than the last is found by reading its epoch again from the beginning.
    """

    source: StreamSource
    """The stream's data set."""
    epochs: dict[int, int]
    """Epoch -> the position of its first sample, of the epochs that were found, by this worker or by others."""
    skipped: int
    """Samples read in vain so far, to find a place."""
    given: int
    """Samples that the data set has given so far."""
    seconds: float
    """Seconds that it took over them."""
    _seed: int
    """The job's seed."""
    _window: int
    """Samples that are permuted together; 1: none."""
    _position: int | None
    """Position of the sample that is given next; None before the first, and after an error."""
    _epoch: int
    """The epoch that is being read."""
    _read: int
    """Samples that the epoch has given to windows so far."""
    _ended: bool
    """Whether the epoch has given its last sample."""
    _window_start: StreamCursor | None
    """The place of the window under way, with the state of a data set that keeps its place; None without."""
    _ahead: deque[tuple[SamplePosition, object]]
    """The rest of the window under way: ((epoch, index in the epoch), sample)."""

    def __init__(self, source: StreamSource, seed: int, window: int = 0) -> None:
        self.source, self.epochs, self.skipped = source, {0: 0}, 0
        self.given, self.seconds = 0, 0.0
        self._seed, self._window = seed, max(1, window)
        self._window_start = None
        self._position, self._epoch, self._read, self._ended, self._ahead = None, 0, 0, True, deque()

    def seek(self, position: int) -> None:
        """Go to a position; samples before it are read and dropped. Raises as `read` does."""
        while self._position != position:
            with contextlib.suppress(RowsLostError):
                if self._position is None or position < self._position:
                    epoch, start = self.epoch_of(position)
                    self._open(epoch)
                    self._position = start
                if position > self._position:
                    self._skip(position - self._position)

    @property
    def stream(self) -> int:
        """See `SampleStream`."""
        return self.source.stream

    @property
    def parts(self) -> Mapping[int, StreamReader]:
        """Number -> the reader of a source; of a stream that is no mixture the reader itself."""
        return {self.stream: self}

    def position_of(self, number: int, position: int) -> int:
        """See `SampleStream`."""
        return position

    def epoch_of(self, position: int) -> EpochMark:
        """See `StreamPart`."""
        return last_epoch_before(self.epochs, position)

    def is_before(self, position: int) -> bool:
        """See `SampleStream`."""
        return self._position is not None and self._position <= position

    def cursor(self) -> StreamCursor | None:
        """Where the window under way begins, or without windows the next sample. None if the data set keeps no place."""
        if self._window > 1:
            return self._window_start
        return None if self._position is None else self._cursor(self._position)

    def _cursor(self, position: int) -> StreamCursor | None:
        state = self.source.state() if self.source.keeps_place and not self._ended else ""
        return StreamCursor(position, self._epoch, self._read, state) if state else None

    def open_at(self, cursor: StreamCursor) -> None:
        """Go to a cursor's place, as its data set finds it. Raises `UserCodeError`."""
        self._open(cursor.epoch, cursor.number, cursor.state)
        self._position = cursor.position

    def forget(self, *, distrust_cursors: bool = False) -> None:
        """See `SampleStream`: the next `seek` begins an epoch."""
        self._position = None

    def read(self) -> tuple[SamplePosition, object]:
        """See `SampleStream`."""
        assert self._position is not None, "seek comes first"
        position, self._position = self._position, None
        if not self._ahead:
            try:
                self._fill(position)
            except RowsLostError:
                self.seek(position)
                return self.read()
        self._position = position + 1
        return self._ahead.popleft()

    def close(self) -> None:
        """Let go of the data set."""
        self._position = None
        self._ahead.clear()
        self.source.close()

    def _skip(self, count: int) -> None:
        search = PlaceSearch(count)  # `thread_activity` tells of it
        while search.done < count:
            done = self._skip_windows(count - search.done)
            if not done:
                self.read()
                done = 1
            search.done += done
            self.skipped += done

    def _skip_windows(self, most: int) -> int:
        """Skip whole windows among so many samples, if the source can; some of them, then the next call goes on. How many."""
        count = (self._read + most) // self._window * self._window - self._read
        if not self.source.skips or self._ahead or self._ended or count <= 0:
            return 0
        assert self._position is not None, "seek comes first"
        position, self._position = self._position, None
        found = self.source.skip(count)
        self._ended = not found
        self._position, self._read = position + found, self._read + found
        return found

    def _open(self, epoch: int, index: int = 0, state: str = "") -> None:
        self._ahead.clear()
        self._position, self._window_start = None, None
        self.source.begin(epoch, index, state)
        self._epoch, self._read, self._ended = epoch, index, False

    def _fill(self, position: int) -> None:
        """Read the window that begins at a position: of the epoch, or of the next one if that has no more samples."""
        samples = self._read_window(position)
        if not samples:
            if not self._read:
                raise self._empty_error()
            self._open(self._epoch + 1)
            self._note_start(position)
            samples = self._read_window(position)
            if not samples:
                raise self._empty_error()
        order = list(range(len(samples)))
        if self._window > 1:
            here = seed_of(self._seed, "window", self._epoch, self.source.stream, self._read // self._window)
            order = torch.randperm(len(samples), generator=torch.Generator().manual_seed(here)).tolist()
        self._ahead.extend(((self._epoch, self._read + place), samples[place]) for place in order)
        self._read += len(samples)

    def _read_window(self, position: int) -> list[object]:
        """The next samples of the epoch, from this position on, as many as a window has; fewer at its end."""
        if self._window > 1:
            self._window_start = self._cursor(position)
        samples: list[object] = []
        begun = time.perf_counter()
        while len(samples) < self._window and not self._ended:
            found = self.source.read()
            self._ended = not found
            samples += found
        self.given, self.seconds = self.given + len(samples), self.seconds + time.perf_counter() - begun
        return samples

    def _note_start(self, position: int) -> None:
        """Keep where the epoch begins. Raises `DataError` if it has begun elsewhere before."""
        known = self.epochs.setdefault(self._epoch, position)
        if len(self.epochs) > KEPT_EPOCHS:
            del self.epochs[min(epoch for epoch in self.epochs if epoch)]
        if known != position:
            raise DataError(
                f"stream {self.source.stream}: epoch {self._epoch} began with sample {known:,} of the stream, and when it was "
                f"read again with sample {position:,}",
                cure="let the data set give the same samples each time that an epoch is read",
            )

    def _empty_error(self) -> DataError:
        several = self.source.streams > 1
        return DataError(
            f"stream {self.source.stream} of {self.source.streams} gave no sample in epoch {self._epoch}",
            cure=f"set data.streams < {self.source.streams}, or give every stream some samples in each epoch"
            if several
            else "let the data set give at least one sample each time that it is iterated",
        )
