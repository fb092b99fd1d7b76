"""A stream that the node's data process reads, as its workers see it: samples by position."""

from __future__ import annotations

import pickle
import time
from collections import deque
from collections.abc import Mapping

from raypar.data.shared_rows import SILENT_S, PassProgress
from raypar.errors import DataError
from raypar.job import DataConfig
from raypar.user_code.stop_signals import reraise_ctrl_c
from raypar.user_code.user_code_errors import USER_CODE_ERRORS, error_text
from raypar.worker.data.microbatch_stream_positions import EpochMark, StreamCursor, last_epoch_before
from raypar.worker.data.mixed_order import MixPattern
from raypar.worker.data.sample_order import SamplePosition
from raypar.worker.data.stream_feed_messages import FedSamples, FedSource, Opening, SampleRequest, digest_of_sample
from raypar.worker.data.stream_feed_process import StreamFeedProcess
from raypar.worker.data.stream_reader import KEPT_EPOCHS
from raypar.worker.process.torch_state_guard import TorchStateGuard

KEPT_CURSORS = 32
"""So many of the last places are kept from which the stream can be read."""


class FedPart:
    """A `StreamPart`: what is known of it here."""

    epochs: dict[int, int]
    """Epoch -> the position of its first sample."""
    cursors: deque[StreamCursor]
    """The last such places, in their order."""
    source: FedSource
    """Its data set."""
    chosen: StreamCursor | None
    """The place from which the stream is opened, if the data process has to."""

    def __init__(self) -> None:
        self.epochs, self.cursors, self.chosen = {0: 0}, deque(maxlen=KEPT_CURSORS), None
        self.source = FedSource()

    def epoch_of(self, position: int) -> EpochMark:
        """See `StreamPart`."""
        return last_epoch_before(self.epochs, position)

    def cursor(self) -> StreamCursor | None:
        """See `StreamPart`."""
        return self.cursors[-1] if self.cursors else None

    def open_at(self, cursor: StreamCursor) -> None:
        """See `StreamPart`: if the stream is not open, it is opened there."""
        self.chosen = cursor


class FedStreamReader:
    """A `SampleStream`, the job's only one. Any position can be asked for.

    `count`: the samples of a microbatch, which are asked for together.
    """

    stream = 0
    """Number of the stream."""
    parts: Mapping[int, FedPart]
    """Number of a source's stream -> what is known of it."""
    given: int
    """Samples that this worker was given so far."""
    seconds: float
    """Seconds that it waited for them."""
    skipped: int
    """Samples that the data process has read, as far as this worker knows, to find a place for which it waited."""
    _position: int | None
    """Position of the sample that is given next; None before the first, and after an error."""
    _samples: dict[int, tuple[SamplePosition, object]]
    """Position -> a sample that was handed over, and not given yet."""
    _last_contents: deque[tuple[int, bytes]]
    """(position, pickle) of the samples of the last two microbatches that were handed over."""
    _from_epochs: bool
    """Whether cursors have led to other samples."""

    def __init__(self, process: StreamFeedProcess, spec: DataConfig, count: int, guard: TorchStateGuard | None) -> None:
        self.parts = {number: FedPart() for number in range(max(1, len(spec.mix)))}
        self.given, self.seconds, self.skipped = 0, 0.0, 0
        self._process, self._label, self._count, self._guard = process, spec.label, count, guard
        self._pattern = MixPattern.of_ratios(spec.ratios) if spec.mix else None
        self._position, self._samples, self._from_epochs = None, {}, False
        self._last_contents = deque(maxlen=2 * count)

    def position_of(self, number: int, position: int) -> int:
        """See `SampleStream`."""
        return position if self._pattern is None else self._pattern.count(number, position)

    def seek(self, position: int) -> None:
        """See `SampleStream`."""
        self._position = position

    def is_before(self, position: int) -> bool:
        """See `SampleStream`."""
        return self._position is not None and self._position <= position

    def forget(self, *, distrust_cursors: bool = False) -> None:
        """See `SampleStream`."""
        self._position = None
        self._samples.clear()
        self._from_epochs = self._from_epochs or distrust_cursors
        for part in self.parts.values():
            part.chosen = None

    def read(self) -> tuple[SamplePosition, object]:
        """See `SampleStream`."""
        assert self._position is not None, "seek comes first"
        position, self._position = self._position, None
        if position not in self._samples:
            begun_s = time.perf_counter()
            self._wait_for(position)
            self.seconds += time.perf_counter() - begun_s
        self.given, self._position = self.given + 1, position + 1
        return self._samples.pop(position)

    def close(self) -> None:
        """Read no more."""
        self.forget()
        self._process.close()

    def _wait_for(self, position: int) -> None:
        """Have samples handed over, this one and those that come after it in its microbatch."""
        self._samples.clear()
        opening: Opening | None = None
        progress = PassProgress()
        skipped: int | None = None
        while True:
            known = {number: max(part.epochs) for number, part in self.parts.items()}
            answer = self._process.read(SampleRequest(position, self._count, known, self._from_epochs, opening))
            if answer is None:
                opening, skipped = self._opening(), 0
                continue
            opening = None
            self.skipped += max(0, answer.skipped - (answer.skipped if skipped is None else skipped))
            skipped = answer.skipped
            if self._take(position, answer):
                return
            progress.note(answer.progress, self._process.who, f"sample {position:,} of the stream")
            if progress.is_silent:
                raise DataError(
                    f"{self._process.who} has read no sample for {SILENT_S:.0f} s; sample {position:,} of the stream is "
                    "waited for",
                    cure="find what the data set waits for: a source that does not answer, or a lock",
                )

    def _opening(self) -> Opening:
        epochs = {number: tuple(part.epochs.items()) for number, part in self.parts.items()}
        cursors = {number: part.chosen for number, part in self.parts.items() if part.chosen is not None}
        seen = {position: digest_of_sample(content) for position, content in self._last_contents}
        return Opening(epochs, {} if self._from_epochs else cursors, seen)

    def _take(self, position: int, answer: FedSamples) -> bool:
        """Keep what an answer brings. True if there are samples in it."""
        for number, source in answer.sources.items():
            self.parts[number].source = source
        for number, marks in answer.epochs.items():
            epochs = self.parts[number].epochs
            epochs.update(marks)
            while len(epochs) > KEPT_EPOCHS:
                del epochs[min(epoch for epoch in epochs if epoch)]
        for number, cursor in answer.cursors.items():
            if cursor != self.parts[number].cursor():
                self.parts[number].cursors.append(cursor)
        if self._guard is not None and answer.warnings:
            self._guard.pass_on(answer.warnings)
        for place, content in enumerate(answer.contents, position):
            try:
                self._samples[place] = pickle.loads(content)
            except USER_CODE_ERRORS as error:
                reraise_ctrl_c(error)
                raise DataError(
                    f"sample {place:,} of {self._label} cannot be opened in this worker: {error_text(error)}",
                    cure="let its class be importable in workers, or leave data.processes out",
                ) from error
        self._last_contents.extend(enumerate(answer.contents, position))
        return bool(answer.contents)
