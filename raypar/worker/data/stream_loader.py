"""Makes microbatches of the samples of streams, each of which its worker reads once (raypar/NUMERICS.md, rule 1)."""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field

from torch import Tensor

from raypar.data.batch_fields import digest_of_fields
from raypar.data.shared_rows import RowsLostError
from raypar.errors import RayparError
from raypar.job import DataConfig, Job
from raypar.plan.microbatches import Microbatches
from raypar.worker.data.collate import MicrobatchPlace
from raypar.worker.data.fed_stream_reader import FedPart, FedStreamReader
from raypar.worker.data.microbatch_loader import AHEAD_BYTES
from raypar.worker.data.microbatch_stream_positions import EpochMark, StreamCursor, StreamPositions, StreamsRead
from raypar.worker.data.mixed_stream_reader import make_stream_reader
from raypar.worker.data.sample_order import SamplePosition
from raypar.worker.data.sample_reader import SampleReader
from raypar.worker.data.sample_stream_protocol import PlaceKeeping, SampleStream
from raypar.worker.data.stream_feed_process import StreamFeedProcess
from raypar.worker.data.stream_source import MadeDatasets
from raypar.worker.process.torch_state_guard import TorchStateGuard

KEPT_DIGESTS = 4
"""Of so many of the last steps a worker keeps the digests: more than a driver that dies can have left unwritten."""

TOLD_S = 2.0
"""Who reads a stream for longer than this to find a place in it tells the user."""


def _line_about_skipping(count: int, seconds: float, sources: Sequence[PlaceKeeping]) -> str:
    """The line about a place in a stream that was found by reading. `sources`: those of which the stream is."""
    reasons = dict.fromkeys(one.why_places_are_read_for for one in [one for one in sources if not one.keeps_place] or sources)
    found = f"{count:,} samples of a stream were read again to find its place, in {seconds:.1f} s"
    return "\n".join(f"{found}; {reason}" for reason in reasons)


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

    process: StreamFeedProcess | None = None
    """The node's data process, where one reads the stream for all its workers."""
    readers: dict[int, SampleStream] = field(default_factory=dict)
    """Stream -> its reader."""
    read: dict[tuple[int, int], StreamMicrobatch] = field(default_factory=dict)
    """(step, microbatch) -> the microbatch, of the step under way and of those read ahead: a step that is executed again
    needs no reading."""
    marks: dict[int, dict[int, int]] = field(default_factory=dict)
    """Stream of a source -> epoch -> position of its first sample, as other workers have found them."""
    wants_cursors: bool = False
    """Whether places are noted from which streams can be read, at the end of the steps whose microbatches are read."""
    noted: dict[tuple[int, int], StreamCursor] = field(default_factory=dict)
    """(step, stream) -> such a place, not reported yet."""
    cursors: dict[int, tuple[StreamCursor, ...]] = field(default_factory=dict)
    """Stream -> places from which it can be read, as workers have reported them."""
    known: dict[tuple[int, int], int] = field(default_factory=dict)
    """(step, microbatch) -> digest, of the last step that is done: what a place that a cursor has found is compared with."""
    again: dict[tuple[int, int], int] = field(default_factory=dict)
    """(step, microbatch) -> digest, of microbatches that were read again to find a place, and are to be reported."""

    digests: dict[tuple[int, int], int] = field(default_factory=dict)
    """(step, microbatch) -> digest, of what was read in the last `KEPT_DIGESTS` steps."""
    made: dict[int, MadeDatasets] = field(default_factory=dict)
    """By source, what is known of the data sets that the job's function makes."""
    reported: tuple[int, float] = (0, 0.0)
    """(samples, seconds) that were reported."""

    @property
    def skipped(self) -> int:
        """Samples that were read to find places."""
        return sum(reader.skipped for reader in list(self.readers.values()))

    def read_since_report(self) -> tuple[int, float]:
        """(samples, seconds) that data sets have given since the last report."""
        given = sum(reader.given for reader in self.readers.values())
        seconds = sum(reader.seconds for reader in self.readers.values())
        before, self.reported = self.reported, (given, seconds)
        return given - before[0], seconds - before[1]

    def note(self, step: int, microbatch: int, digest: int) -> None:
        """Keep the digest of a microbatch that was read."""
        for old in [key for key in self.digests if key[0] <= step - KEPT_DIGESTS]:
            del self.digests[old]
        self.digests[step, microbatch] = digest

    def learn(
        self,
        marks: Mapping[int, Collection[EpochMark]],
        cursors: Mapping[int, Collection[tuple[int, int, int, str]]],
        known: Mapping[tuple[int, int], int],
    ) -> None:
        """Take over what all workers have found of the streams: where epochs begin, cursors, and digests of microbatches."""
        self.cursors = {stream: tuple(StreamCursor(*one) for one in found) for stream, found in cursors.items()}
        self.known = dict(known)
        for number, epochs in marks.items():
            self.marks.setdefault(number, {}).update(epochs)
        for reader in self.readers.values():
            for number, part in reader.parts.items():
                part.epochs.update(marks.get(number, ()))

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
    _owns_streams: bool
    """Whether they end with this loader."""
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
        self._open, self._owns_streams = (OpenStreams(), True) if streams is None else (streams, False)
        self._queue = _Queue()
        self._reader = SampleReader.of(self._queue, spec, seed, fields, guard=guard, batch_names=batch_names)
        if self._open.process is not None:
            self._open.process.begin()

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

    def report(self, step: int) -> StreamsRead:
        """What was read of a step that is over."""
        digests = {m: found.digest for (at, m), found in sorted(self._open.read.items()) if at == step}
        streams = {self.positions.stream_of(m) for m in digests}
        epochs: dict[int, EpochMark] = {}
        for reader in (self._open.readers[stream] for stream in sorted(streams)):
            end = self.positions.samples_before(step + 1, reader.stream)
            epochs |= {number: part.epoch_of(reader.position_of(number, end)) for number, part in reader.parts.items()}
        again, self._open.again = self._open.again, {}
        cursors = {stream: cursor for (at, stream), cursor in sorted(self._open.noted.items()) if at == step}
        for old in [key for key in self._open.noted if key[0] <= step]:
            del self._open.noted[old]
        return StreamsRead(digests, epochs, cursors, again, self._open.read_since_report())

    def digest(self, step: int, microbatch: int) -> int:
        """The digest of a microbatch of the step under way that was read."""
        return self._open.read[step, microbatch].digest

    def sample_positions(self, step: int, microbatch: int) -> list[SamplePosition]:
        """(epoch, index) of the samples of a microbatch of the step under way."""
        found = self._open.read.get((step, microbatch))
        return list(found.samples) if found is not None else []

    def close(self) -> None:
        """Close the streams, unless they were given: those outlive plans, and their owner closes them."""
        if self._owns_streams:
            self._open.close()

    def _read_until(self, step: int, microbatch: int) -> None:
        """Read this microbatch, after those of its stream that come before it in the step and that this worker runs too."""
        if not self._keeps:
            self._open.read[step, microbatch] = self._read(step, microbatch)
            return
        before = [m for m in self._own if m <= microbatch and m % self.positions.streams == microbatch % self.positions.streams]
        for one in before:
            if (step, one) not in self._open.read:
                found = self._open.read[step, one] = self._read(step, one)
                self._open.note(step, one, found.digest)
                self._note_cursor(step, one)

    def _note_cursor(self, step: int, microbatch: int) -> None:
        """Note where the stream of a microbatch goes on, if that is wanted and the step has read its part of it."""
        stream = self.positions.stream_of(microbatch)
        if self._open.wants_cursors and microbatch == max(m for m in self._own if self.positions.stream_of(m) == stream):
            for number, part in self._open.readers[stream].parts.items():
                if (cursor := part.cursor()) is not None:
                    self._open.noted[step, number] = cursor

    def _read(self, step: int, microbatch: int) -> StreamMicrobatch:
        reader = self._reader_of(self.positions.stream_of(microbatch))
        while True:
            try:
                if self._keeps and not reader.is_before(self.positions.of(step, microbatch).start):
                    self._open.again |= self._find(reader, self.positions.leading_to(step, microbatch))
                return self._read_from(reader, step, microbatch)
            except RowsLostError:  # the node's data process is gone: the stream is opened again, by what is known now
                for number, part in reader.parts.items():
                    if isinstance(part, FedPart):
                        self._open.cursors[number] = tuple({*self._open.cursors.get(number, ()), *part.cursors})
                reader.forget()

    def _find(self, reader: SampleStream, places: Sequence[tuple[int, int]]) -> dict[tuple[int, int], int]:
        """Go to the end of these microbatches, which follow one another; returns their digests. A cursor that does not lead to
        those that are known is not used: a data set that shuffles by a buffer of its own does not keep it."""
        if not places:
            return {}
        start = self.positions.of(*places[0]).start
        known = {**self._open.digests, **self._open.known}
        due = {place: known[place] for place in places if place in known}
        usable: dict[int, StreamCursor] = {}
        for number in reader.parts:
            position = reader.position_of(number, start)
            cursors = [cursor for cursor in self._open.cursors.get(number, ()) if cursor.position <= position]
            usable |= {number: max(cursors)} if cursors else {}
        if due and usable:
            epochs = {number: dict(part.epochs) for number, part in reader.parts.items()}
            try:
                reader.forget()
                for number, cursor in usable.items():
                    reader.parts[number].open_at(cursor)
                found = {place: self._read_from(reader, *place).digest for place in places}
                if due.items() <= found.items():
                    return found
            except RowsLostError:
                raise
            except RayparError:
                pass
            for number, part in reader.parts.items():
                part.epochs = epochs[number]  # what a wrong cursor has found is not where epochs begin
        reader.forget(distrust_cursors=bool(due and usable))
        begun, skipped = time.perf_counter(), reader.skipped
        found = {place: self._read_from(reader, *place).digest for place in places}
        seconds, count = time.perf_counter() - begun, reader.skipped - skipped
        if seconds > TOLD_S and self._guard is not None:
            line = _line_about_skipping(count, seconds, [part.source for part in reader.parts.values()])
            self._guard.pass_on([("streams read again", line)])
        return found

    def _reader_of(self, stream: int) -> SampleStream:
        """The reader of a stream, made when it is first needed."""
        reader = self._open.readers.get(stream)
        if reader is None:
            if self._open.process is not None:
                count = max(len(self.positions.batching.samples(microbatch)) for microbatch in self._own)
                reader = FedStreamReader(self._open.process, self._spec, count, self._guard)
            else:
                reader = make_stream_reader(self._spec, stream, self._seed, self._guard, self._open.made)
            self._open.readers[stream] = reader
            for number, part in reader.parts.items():
                part.epochs.update(self._open.marks.get(number, ()))
        return reader

    def _read_from(self, reader: SampleStream, step: int, microbatch: int) -> StreamMicrobatch:
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
            error.add_place(f"stream {self.positions.stream_of(at[1])} of {self.positions.streams}")
            raise


class FirstSamples(list[object]):
    """The samples of a first microbatch, as a data set."""


def first_samples(spec: Job, data: DataConfig | None = None) -> FirstSamples:
    """The samples of a job's first microbatch.

    `data`: that of training, which it is by default, or of validation. Forward passes over fewer samples have these repeated.
    """
    data = data if data is not None else spec.data
    assert data.streams is not None, "the checks before a run say how many streams there are"
    count, passes = len(spec.batching.samples(0)), spec.forward_passes
    reader = make_stream_reader(data, 0, spec.seed)
    try:
        reader.seek(0)
        read = [reader.read()[1] for _ in range(count if passes is None else min(count, passes.samples))]
    finally:
        reader.close()
    return FirstSamples(read[index % len(read)] for index in range(count))


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
