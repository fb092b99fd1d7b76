"""Which samples of which stream a microbatch has: pure arithmetic on the step, the batch and the number of streams (rule 1)."""

from __future__ import annotations

from dataclasses import dataclass

from raypar.plan.microbatches import Microbatches


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

    def samples_a_step(self, stream: int) -> int:
        """How many samples of a stream a step has."""
        return sum(len(self.batching.samples(microbatch)) for microbatch in self.microbatches_of(stream))

    def of(self, step: int, microbatch: int) -> range:
        """The positions in its stream of a microbatch's samples; the first sample that the stream gives has position 0."""
        stream = self.stream_of(microbatch)
        before = sum(len(self.batching.samples(m)) for m in range(stream, microbatch, self.streams))
        start = step * self.samples_a_step(stream) + before
        return range(start, start + len(self.batching.samples(microbatch)))
