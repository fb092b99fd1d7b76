"""Which samples of which stream a microbatch has: pure arithmetic on the step, the batch and the number of streams (rule 1)."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import NamedTuple

from raypar.plan.microbatches import Microbatches

EpochMark = tuple[int, int]
"""(epoch, position in its stream of its first sample): where a stream can be read from."""


def last_epoch_before(epochs: Mapping[int, int], position: int) -> EpochMark:
    """The last of these epochs, with the positions of their first samples, that begins at a position or before it."""
    return max((epoch, start) for epoch, start in epochs.items() if start <= position)


class StreamCursor(NamedTuple):
    """Where a data set that keeps its place (`state_dict`) can go on reading a stream."""

    position: int
    """Position in the stream of the sample that comes next."""
    epoch: int
    """Its epoch."""
    number: int
    """Its number in the epoch."""
    state: str
    """The data set's state, as JSON."""


@dataclass(frozen=True)
class StreamPositions:
    """Microbatch m reads stream m modulo `streams`; samples of a stream are given in order of steps, then of microbatches."""

    streams: int
    """Number of streams."""
    batching: Microbatches
    """The microbatches of a step, and their sizes."""

    def stream_of(self, microbatch: int) -> int:
        """The stream that a microbatch reads."""
        return microbatch % self.streams

    def microbatches_of(self, stream: int) -> range:
        """The microbatches of a step that read a stream, ascending."""
        return range(stream, self.batching.count, self.streams)

    def samples_before(self, step: int, stream: int) -> int:
        """How many samples of a stream all steps before a step have."""
        return sum(
            steps * sum(len(batching.samples(microbatch)) for microbatch in range(stream, batching.count, self.streams))
            for steps, batching in self.batching.steps_before(step)
        )

    def of(self, step: int, microbatch: int) -> range:
        """The positions in its stream of a microbatch's samples; the first sample that the stream gives has position 0."""
        stream = self.stream_of(microbatch)
        if self.streams == 1:  # of which a pass over a whole data set has many microbatches
            first, here = self.samples_before(step, 0) if step else 0, self.batching.samples(microbatch)
            return range(first + here.start, first + here.stop)
        before = sum(len(self.batching.samples(m)) for m in range(stream, microbatch, self.streams))
        start = self.samples_before(step, stream) + before
        return range(start, start + len(self.batching.samples(microbatch)))

    def leading_to(self, step: int, microbatch: int) -> list[tuple[int, int]]:
        """(step, microbatch) of the samples that come before these in the stream, in their order: those of the step before and
        of this one. None of the step before at the stream's beginning, and in the first step with other batches."""
        stream = self.stream_of(microbatch)
        former = sum(one.steps for one in self.batching.former)
        before = [(step - 1, other) for other in self.microbatches_of(stream)] if step > former else []
        return before + [(step, other) for other in range(stream, microbatch, self.streams)]


@dataclass(frozen=True)
class StreamsRead:
    """What a worker has read of streams in a step, for the run's journal."""

    digests: Mapping[int, int] = field(default_factory=dict)
    """Microbatch of the step -> digest of its fields."""
    epochs: Mapping[int, EpochMark] = field(default_factory=dict)
    """Stream -> the epoch in which it is at the end of the step. Of a mixture source * streams + stream -> the source's."""
    cursors: Mapping[int, StreamCursor] = field(default_factory=dict)
    """Likewise a place from which it can be read, if that was asked for and the data set keeps its place."""
    again: Mapping[tuple[int, int], int] = field(default_factory=dict)
    """(step, microbatch) -> digest, of microbatches that were read again to find a place."""
    read: tuple[int, float] = (0, 0.0)
    """Samples that the data set has given since the last report, and the seconds that it took over them."""
