"""Samples of a stream that are read once, in order, and handed to several workers by position: what a node's reader holds."""

from __future__ import annotations

import threading
import time
from collections import deque
from collections.abc import Generator, Mapping

from raypar.data.shared_rows import FedChunk, RowPass
from raypar.errors import DataError
from raypar.job import DataConfig
from raypar.user_code.stop_signals import reraise_ctrl_c
from raypar.user_code.user_code_errors import USER_CODE_ERRORS, error_text
from raypar.worker.data.microbatch_stream_positions import StreamCursor
from raypar.worker.data.mixed_stream_reader import MixedStreamReader, make_stream_reader
from raypar.worker.data.pickled_sample import pickle_sample
from raypar.worker.data.sample_order import SamplePosition
from raypar.worker.data.stream_feed_messages import FedSamples, FedSource, Opening, SampleRequest, digest_of_sample
from raypar.worker.data.stream_reader import StreamReader
from raypar.worker.data.stream_source import MadeDatasets
from raypar.worker.process.torch_state_guard import TorchStateGuard

KEPT_STEPS, AHEAD_STEPS = 3, 3
"""Of so many steps samples are kept that were asked for, and read before they are. A worker that finds its place compares the
step before the one that others do, while these read the one after it ahead."""
NOTES_A_STEP, NOTE_SHARE = 4, 0.05
"""How often places are noted from which the stream can be read, and the largest share of the time that may take."""
CHECK_EVERY = 64
"""After so many samples the whole state of the process is compared."""
MOST_PASSES = 2
"""Readers that go back to a checkpoint while others have not begun to need two."""


class _WrongCursorError(Exception):
    """A cursor has led to other samples than those that a worker had been given."""


class StreamFeed:
    """Answers the workers of a node. They share one pass over the stream; who asks for a sample that is kept no more gets a new
    one. `batch_size`: samples of a step.

    Memory: the samples of `KEPT_STEPS` steps, and ahead of them those of `AHEAD_STEPS`, up to 64 MiB.
    """

    def __init__(self, spec: DataConfig, seed: int, batch_size: int, guard: TorchStateGuard) -> None:
        self._spec, self._seed, self._batch_size, self._guard = spec, seed, batch_size, guard
        self._made: dict[int, MadeDatasets] = {}
        self._passes: list[_StreamPass] = []
        self._lock, self._turn = threading.Lock(), threading.Lock()
        self._uses_cursors = True  # until one has led to other samples

    def read(self, request: SampleRequest) -> FedSamples | None:
        """The samples; None if the stream must be opened for them. Waits up to `shared_rows.ANSWER_S`.

        Raises as reading does.
        """
        with self._lock:
            found = self._pass_for(request)
        try:
            return found.read(request) if found is not None else None
        except _WrongCursorError:
            with self._lock:
                self._uses_cursors = False
                self._passes = [one for one in self._passes if not one.by_cursor]
            return None

    def close(self) -> None:
        """Let go of the stream. Idempotent."""
        with self._lock:
            for one in self._passes:
                one.rows.close()
            self._passes.clear()

    def _pass_for(self, request: SampleRequest) -> _StreamPass | None:
        """The pass that has the sample or is the nearest before it."""
        usable = [one for one in self._passes if one.leads_to(request)]
        if usable:
            found = max(usable, key=lambda one: (one.rows.reached > request.position, one.rows.reached))
            self._passes.remove(found)
            self._passes.append(found)
            return found
        if request.opening is None:
            return None
        self._passes = [one for one in self._passes if one.rows.error is None]
        while len(self._passes) >= MOST_PASSES:
            self._passes.pop(0).rows.close()
        reader = make_stream_reader(self._spec, 0, self._seed, self._guard, self._made)
        opening = request.opening if self._uses_cursors else request.opening._replace(cursors={})
        found = _StreamPass(reader, request.position, opening, self._batch_size, self._turn, self._guard, self._spec.label)
        self._passes.append(found)
        return found


class _StreamPass:
    """One pass over the stream. `turn`: held while the data set computes, since its generators and state are the process's."""

    rows: RowPass
    """The samples, each as a row."""
    by_cursor: bool
    """Whether cursors have led to them."""
    _checked_until: int
    """Nobody is given a sample of a pass that a cursor has opened before it has come to this position: to the last sample that
    the worker which opened it had been given before, and which is compared."""

    def __init__(
        self,
        reader: StreamReader | MixedStreamReader,
        position: int,
        opening: Opening,
        batch_size: int,
        turn: threading.Lock,
        guard: TorchStateGuard,
        label: str,
    ) -> None:
        self._reader, self._opening, self._guard, self._turn = reader, opening, guard, turn
        self._notes: deque[tuple[int, Mapping[int, StreamCursor]]] = deque(maxlen=NOTES_A_STEP * (KEPT_STEPS + AHEAD_STEPS + 1))
        self._source = label
        self._note_every = max(1, batch_size // NOTES_A_STEP)
        self.by_cursor = bool(self._opening.cursors)
        kept = KEPT_STEPS * batch_size
        self._first = position if self.by_cursor else max(0, position - kept)
        self._checked_until = max((place + 1 for place in self._opening.seen if place >= self._first), default=0)
        self.rows = RowPass(self._samples, self._first, kept_bytes=0, kept_rows=kept, ahead_rows=AHEAD_STEPS * batch_size)

    def leads_to(self, request: SampleRequest) -> bool:
        """Whether a sample is kept, or is still to come."""
        if request.from_epochs and self.by_cursor:
            return False
        return self.rows.first <= request.position and (self.rows.error is None or request.position < self.rows.reached)

    def read(self, request: SampleRequest) -> FedSamples:
        """See `StreamFeed.read`."""
        rows = self.rows
        rows.wait_for(max(request.position + request.samples, self._checked_until if self.by_cursor else 0) - 1)
        contents: tuple[bytes, ...] = ()
        if not self.by_cursor or rows.reached >= self._checked_until:
            contents = tuple(chunk.content for chunk in rows.chunks_from(request.position, request.samples))
        end = request.position + max(1, len(contents))
        epochs = {
            number: {epoch: start for epoch, start in list(part.epochs.items()) if epoch > request.known.get(number, -1)}
            for number, part in self._reader.parts.items()
        }
        cursors = next((found for place, found in reversed(list(self._notes)) if place <= end), {})
        skipped, parts = self._reader.skipped, self._reader.parts.items()
        sources = {number: FedSource(part.source.keeps_place, part.source.why_places_are_read_for) for number, part in parts}
        return FedSamples(contents, rows.reached + skipped, skipped, epochs, cursors, sources, self._guard.lines())

    def _samples(self) -> Generator[FedChunk]:
        """The samples from the first one on, for ever."""
        reader, position, due_s = self._reader, self._first, 0.0
        with self._turn:
            self._guard.establish()
            self._guard.compare_everything = True
            for number, marks in self._opening.epochs.items():
                reader.parts[number].epochs.update(marks)
            for number, cursor in self._opening.cursors.items():
                reader.parts[number].open_at(cursor)
            reader.seek(position)
        try:
            while True:
                with self._turn:
                    if position % self._note_every == 0 and time.monotonic() >= due_s:
                        due_s = self._note(position)
                    place, sample = reader.read()
                    if position % CHECK_EVERY == CHECK_EVERY - 1:
                        self._guard.check_all("the data set's __iter__")
                content = self._pickle(place, sample)
                if self.by_cursor and self._opening.seen.get(position, digest := digest_of_sample(content)) != digest:
                    raise _WrongCursorError
                yield FedChunk(1, content)
                position += 1
        finally:
            reader.close()

    def _note(self, position: int) -> float:
        """Note where the stream goes on; returns when that may be done again."""
        begun_s = time.monotonic()
        found = {number: cursor for number, part in self._reader.parts.items() if (cursor := part.cursor()) is not None}
        if found:
            self._notes.append((position, found))
        now_s = time.monotonic()
        return now_s + (now_s - begun_s) / NOTE_SHARE

    def _pickle(self, place: SamplePosition, sample: object) -> bytes:
        try:
            return pickle_sample((place, sample))
        except USER_CODE_ERRORS as error:
            reraise_ctrl_c(error)
            raise unpicklable(self._source, error, f"sample {place[1]} (epoch {place[0]})") from error


def unpicklable(label: str, error: BaseException, what: str) -> DataError:
    """The error for a sample that other processes cannot be given."""
    return DataError(
        f"{what} of data set {label} cannot be handed from the process that reads it to the workers: {error_text(error)}",
        cure="let it give tensors, arrays, numbers and texts, or objects of classes in a module; or leave data.processes out",
    )
