"""Makes microbatches of the samples of streams, each of which its worker reads once (raypar/NUMERICS.md, rule 1)."""

from __future__ import annotations

import contextlib
import hashlib
import time
from collections import deque
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field

import torch
from torch import Tensor

from raypar.errors import RayparError
from raypar.job import DataConfig, Job
from raypar.plan.microbatches import Microbatches
from raypar.worker.data.collate import MicrobatchPlace
from raypar.worker.data.microbatch_loader import AHEAD_BYTES
from raypar.worker.data.sample_order import SamplePosition
from raypar.worker.data.sample_reader import SampleReader
from raypar.worker.data.stream_positions import EpochMark, StreamCursor, StreamPositions, StreamsRead
from raypar.worker.data.stream_reader import StreamReader
from raypar.worker.data.stream_source import StreamSource
from raypar.worker.process.torch_state_guard import TorchStateGuard


def digest_of_fields(fields: Mapping[str, Tensor]) -> int:
    """8 bytes of hash of a microbatch: names, dtypes, shapes and numbers of its fields."""
    found = hashlib.blake2b(digest_size=8)
    for name in sorted(fields):
        value = fields[name]
        found.update(f"{name} {value.dtype} {tuple(value.shape)}".encode())
        found.update(value.contiguous().reshape(-1).view(torch.uint8).numpy().data if value.numel() else b"")
    return int.from_bytes(found.digest(), "little")


TOLD_S = 2.0
"""Who reads a stream for longer than this to find a place in it tells the user."""


def _line_about_skipping(count: int, seconds: float, *, has_state: bool) -> str:
    """The line about a place in a stream that was found by reading."""
    why = "where the data set's state_dict leads was not used" if has_state else "the data set has no state_dict"
    return (
        f"{count:,} samples of a stream were read again to find its place, in {seconds:.1f} s; {why}\n"
        "  cure: give the data set state_dict and load_state_dict that lead to the next sample (with a buffer of its own in it)"
    )


@dataclass(frozen=True)
class StreamMicrobatch:
    """A microbatch that was read."""

    fields: dict[str, Tensor]
    """Field -> [samples, ...]."""
    samples: tuple[SamplePosition, ...]
    """(epoch, index in the epoch) of its samples, in the stream of the microbatch."""
    digest: int
    """`digest_of_fields`."""


class _Queue:
    """Samples that were read, as a data set that gives each once: `SampleReader` makes batches of them."""

    raypar_thread_safe = True

    def __init__(self) -> None:
        self.samples: deque[object] = deque()

    def __len__(self) -> int:
        return len(self.samples)

    def __getitem__(self, index: int) -> object:
        return self.samples.popleft()


@dataclass
class OpenStreams:
    """What a worker keeps of its streams from one plan to the next: readers where they are, and microbatches read ahead."""

    readers: dict[int, StreamReader] = field(default_factory=dict)
    """Stream -> its reader."""
    read: dict[tuple[int, int], StreamMicrobatch] = field(default_factory=dict)
    """(step, microbatch) -> the microbatch, of the step under way and of those read ahead: a step that is executed again
    needs no reading."""
    marks: dict[int, dict[int, int]] = field(default_factory=dict)
    """Stream -> epoch -> position of its first sample, as other workers have found them."""
    cursors: dict[int, tuple[StreamCursor, ...]] = field(default_factory=dict)
    """Stream -> places from which it can be read, as workers have reported them."""
    known: dict[tuple[int, int], int] = field(default_factory=dict)
    """(step, microbatch) -> digest, of the last step that is done: what a place that a cursor has found is compared with."""
    again: dict[tuple[int, int], int] = field(default_factory=dict)
    """(step, microbatch) -> digest, of microbatches that were read again to find a place, and are to be reported."""

    def learn(
        self,
        marks: Mapping[int, Collection[EpochMark]],
        cursors: Mapping[int, Collection[tuple[int, int, int, str]]],
        known: Mapping[tuple[int, int], int],
    ) -> None:
        """Take over what all workers have found of the streams: where epochs begin, cursors, and digests of microbatches."""
        self.cursors = {stream: tuple(StreamCursor(*one) for one in found) for stream, found in cursors.items()}
        self.known = dict(known)
        for stream, epochs in marks.items():
            self.marks.setdefault(stream, {}).update(epochs)
            if stream in self.readers:
                self.readers[stream].epochs.update(epochs)

    def close(self) -> None:
        """Let go of everything."""
        for reader in self.readers.values():
            reader.close()
        self.readers.clear()
        self.read.clear()


class StreamLoader:
    """The microbatches of one iterable data set that a worker computes, by (step, microbatch).

    `own`: the microbatches that this worker runs. Where other workers run some of the same stream, their samples are read too,
    and dropped. `keeps`: whether microbatches are kept until the next step begins; else each is given once. `fields`,
    `batch_names`: see `SampleReader.of`.
    """

    positions: StreamPositions
    """Which samples of which stream a microbatch has."""
    _spec: DataConfig
    """The data set, its fields and the window."""
    _seed: int
    """The job's seed."""
    _own: Sequence[int]
    """The microbatches of a step that this worker runs, ascending."""
    _keeps: bool
    """Whether microbatches are kept until the next step begins."""
    _guard: TorchStateGuard | None
    """Restores process state that samples leave changed."""
    _open: OpenStreams
    """Readers and microbatches."""
    _queue: _Queue
    """The samples of the microbatch that is collated."""
    _reader: SampleReader
    """Collates them."""

    def __init__(
        self,
        spec: DataConfig,
        batching: Microbatches,
        *,
        seed: int,
        fields: Sequence[str],
        own: Collection[int],
        streams: OpenStreams | None = None,
        keeps: bool = True,
        guard: TorchStateGuard | None = None,
        batch_names: Sequence[str] = (),
    ) -> None:
        assert spec.streams is not None, "the checks before a run say how many streams there are"
        self.positions = StreamPositions(spec.streams, batching)
        self._spec, self._seed, self._own = spec, seed, sorted(own)
        self._keeps, self._guard = keeps, guard
        self._open = streams if streams is not None else OpenStreams()
        self._queue = _Queue()
        self._reader = SampleReader.of(self._queue, spec, seed, fields, guard=guard, batch_names=batch_names)

    def get(self, step: int, microbatch: int) -> dict[str, Tensor]:
        """One microbatch: field -> [samples, ...]. Raises `DataError` or `UserCodeError`."""
        key, read = (step, microbatch), self._open.read
        for old in [k for k in read if k[0] < step]:
            del read[old]
        if key not in read:
            self._read_until(step, microbatch)
        return (read[key] if self._keeps else read.pop(key)).fields

    def prefetch(self, step: int, microbatches: Sequence[int]) -> None:
        """Nothing: a stream is read where it is needed."""

    def read_ahead(self, step: int, microbatches: Sequence[int]) -> None:
        """Read these microbatches now, up to about `AHEAD_BYTES`, while the step waits for others. `get` raises the errors."""
        room = AHEAD_BYTES
        for key in [(step, microbatch) for microbatch in microbatches if (step, microbatch) not in self._open.read]:
            if room <= 0:
                return
            try:
                self._read_until(*key)
            except RayparError:
                return
            room -= sum(tensor.nbytes for tensor in self._open.read[key].fields.values())

    def report(self, step: int, *, with_cursors: bool = False) -> StreamsRead:
        """What was read of a step that is over."""
        digests = {m: found.digest for (at, m), found in sorted(self._open.read.items()) if at == step}
        streams = {self.positions.stream_of(m) for m in digests}
        epochs = {k: self._open.readers[k].epoch_of(self.positions.samples_before(step + 1, k)) for k in sorted(streams)}
        again, self._open.again = self._open.again, {}
        found = {k: self._open.readers[k].cursor() for k in sorted(streams)} if with_cursors else {}
        cursors = {stream: cursor for stream, cursor in found.items() if cursor is not None}
        return StreamsRead(digests, epochs, cursors, again)

    def digest(self, step: int, microbatch: int) -> int:
        """The digest of a microbatch of the step under way that was read."""
        return self._open.read[step, microbatch].digest

    def sample_positions(self, step: int, microbatch: int) -> list[SamplePosition]:
        """(epoch, index) of the samples of a microbatch of the step under way."""
        found = self._open.read.get((step, microbatch))
        return list(found.samples) if found is not None else []

    def close(self) -> None:
        """Nothing: streams outlive plans, and their owner closes them."""

    def _read_until(self, step: int, microbatch: int) -> None:
        """Read this microbatch, after those of its stream that come before it in the step and that this worker runs too."""
        before = [m for m in self._own if m <= microbatch and m % self.positions.streams == microbatch % self.positions.streams]
        for one in before:
            if (step, one) not in self._open.read and (self._keeps or one == microbatch):
                self._open.read[step, one] = self._read(step, one)

    def _read(self, step: int, microbatch: int) -> StreamMicrobatch:
        reader, before = self._reader_of(self.positions.stream_of(microbatch)), self.positions.before(step, microbatch)
        if before is not None and self._keeps and not reader.is_before(self.positions.of(step, microbatch).start):
            self._open.again[before] = self._find(reader, *before)
        return self._read_from(reader, step, microbatch)

    def _find(self, reader: StreamReader, step: int, microbatch: int) -> int:
        """Go to the end of a microbatch, and return its digest. A cursor that does not lead to the microbatch that is known is
        not used: a data set that shuffles by a buffer of its own does not keep it."""
        due, start = self._open.known.get((step, microbatch)), self.positions.of(step, microbatch).start
        usable = [cursor for cursor in self._open.cursors.get(reader.source.stream, ()) if cursor.position <= start]
        if due is not None and usable:
            epochs = dict(reader.epochs)
            with contextlib.suppress(RayparError):
                reader.open_at(max(usable))
                if self._read_from(reader, step, microbatch).digest == due:
                    return due
            reader.epochs = epochs  # what a wrong cursor has found is not where epochs begin
        reader.forget()
        begun, skipped = time.perf_counter(), reader.skipped
        found = self._read_from(reader, step, microbatch).digest
        seconds, count = time.perf_counter() - begun, reader.skipped - skipped
        if seconds > TOLD_S and self._guard is not None:
            line = _line_about_skipping(count, seconds, has_state=reader.source.keeps_place)
            self._guard.pass_on([("streams read again", line)])
        return found

    def _reader_of(self, stream: int) -> StreamReader:
        """The reader of a stream, made when it is first needed."""
        reader = self._open.readers.get(stream)
        if reader is None:
            source = StreamSource(self._spec, stream, self.positions.streams, self._seed, self._guard)
            reader = self._open.readers[stream] = StreamReader(source, self._seed, self._spec.shuffle_window)
            reader.epochs.update(self._open.marks.get(stream, {}))
        return reader

    def _read_from(self, reader: StreamReader, step: int, microbatch: int) -> StreamMicrobatch:
        positions = self.positions.of(step, microbatch)
        reader.seek(positions.start)
        found = [reader.read() for _ in positions]
        places = [place for place, _ in found]
        fields = self._collate([sample for _, sample in found], places, (step, microbatch))
        return StreamMicrobatch(fields, tuple(places), digest_of_fields(fields))

    def _collate(self, samples: Sequence[object], places: Sequence[SamplePosition], at: MicrobatchPlace) -> dict[str, Tensor]:
        self._queue.samples.extend(samples)
        try:
            return self._reader.read(places, at)
        except RayparError as error:
            self._queue.samples.clear()
            stream = self.positions.stream_of(at[1])
            error.args = (f"stream {stream} of {self.positions.streams}: {error.what}", error.cure)
            error.what = error.args[0]
            raise


class FirstSamples(list[object]):
    """The samples of a first microbatch, as a data set."""


def first_samples(spec: Job) -> FirstSamples:
    """The samples of a job's first microbatch."""
    assert spec.data.streams is not None, "the checks before a run say how many streams there are"
    reader = StreamReader(StreamSource(spec.data, 0, spec.data.streams, spec.seed), spec.seed, spec.data.shuffle_window)
    reader.seek(0)
    found = FirstSamples(reader.read()[1] for _ in spec.batching.samples(0))
    reader.close()
    return found


def read_stream_microbatches(
    spec: Job, fields: Sequence[str], places: Sequence[tuple[int, int]], guard: TorchStateGuard | None = None
) -> list[StreamMicrobatch]:
    """The microbatches of a job at these (step, microbatch), read here, in order of their places in the streams."""
    assert spec.data.streams is not None, "the checks before a run say how many streams there are"
    streams = OpenStreams()
    loader = StreamLoader(
        spec.training_data,
        spec.batching,
        seed=spec.seed,
        fields=fields,
        own=range(spec.microbatches),
        streams=streams,
        guard=guard,
    )
    try:
        found = {}
        for step in sorted({step for step, _ in places}):
            for microbatch in sorted(m for at, m in places if at == step):
                loader.get(step, microbatch)
            found.update(streams.read)
        return [found[place] for place in places]
    finally:
        streams.close()
