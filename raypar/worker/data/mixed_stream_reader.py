"""Reads one stream of a mixture: its samples are those of the sources' own streams, in the pattern of the ratios (rule 1)."""

from __future__ import annotations

from collections.abc import Iterator, Mapping

from raypar.job import DataConfig
from raypar.worker.data.mixed_order import MixPattern, seed_of_source
from raypar.worker.data.sample_order import SamplePosition
from raypar.worker.data.stream_reader import StreamReader
from raypar.worker.data.stream_source import MadeDatasets, StreamSource
from raypar.worker.process.torch_state_guard import TorchStateGuard


def sources_with_seeds(spec: DataConfig, seed: int) -> Iterator[tuple[DataConfig, int]]:
    """(a source as the data of a job, the seed of that job), for each of a mixture; else the data itself, with `seed`."""
    if not spec.mix:
        yield spec, seed
    for number, source in enumerate(spec.mix):
        yield spec.replace(function=source.function, args=source.args, mix=()), seed_of_source(seed, number)


def make_stream_reader(
    spec: DataConfig,
    stream: int,
    seed: int,
    guard: TorchStateGuard | None = None,
    made: dict[int, MadeDatasets] | None = None,
) -> StreamReader | MixedStreamReader:
    """The reader of one of the `spec.streams` streams. `made`: by source, what is known of the data sets that its function
    makes, for all streams of a process."""
    assert spec.streams is not None, "the checks before a run say how many streams there are"
    made, parts = {} if made is None else made, {}
    for number, (source, own_seed) in enumerate(sources_with_seeds(spec, seed)):
        known = made.setdefault(number, MadeDatasets())
        opened = StreamSource(source, stream, spec.streams, own_seed, guard, made=known)
        parts[number * spec.streams + stream] = StreamReader(opened, own_seed, spec.shuffle_window)
    return MixedStreamReader(stream, parts, MixPattern.of_ratios(spec.ratios)) if spec.mix else parts[stream]


class MixedStreamReader:
    """A `SampleStream`, read forwards. Each source is a stream by itself."""

    stream: int
    """Number of the stream."""
    parts: Mapping[int, StreamReader]
    """Number of a source's stream (source * streams + stream) -> its reader, in the order of the sources."""
    _pattern: MixPattern
    """Which source has which position."""
    _position: int | None
    """Position of the sample that is given next; None before the first, and after an error."""

    def __init__(self, stream: int, parts: Mapping[int, StreamReader], pattern: MixPattern) -> None:
        self.stream, self.parts, self._pattern, self._position = stream, parts, pattern, None
        self._sources, self._readers = {number: source for source, number in enumerate(parts)}, list(parts.values())

    @property
    def skipped(self) -> int:
        """See `SampleStream`."""
        return sum(reader.skipped for reader in self._readers)

    @property
    def given(self) -> int:
        """See `SampleStream`."""
        return sum(reader.given for reader in self._readers)

    @property
    def seconds(self) -> float:
        """See `SampleStream`."""
        return sum(reader.seconds for reader in self._readers)

    def position_of(self, number: int, position: int) -> int:
        """See `SampleStream`."""
        return self._pattern.count(self._sources[number], position)

    def seek(self, position: int) -> None:
        """See `SampleStream`."""
        self._position = None
        for number, reader in self.parts.items():
            reader.seek(self.position_of(number, position))
        self._position = position

    def is_before(self, position: int) -> bool:
        """See `SampleStream`."""
        return self._position is not None and self._position <= position

    def forget(self, *, distrust_cursors: bool = False) -> None:
        """See `SampleStream`."""
        self._position = None
        for reader in self._readers:
            reader.forget()

    def read(self) -> tuple[SamplePosition, object]:
        """See `SampleStream`."""
        assert self._position is not None, "seek comes first"
        position, self._position = self._position, None
        found = self._readers[self._pattern.source_at(position)].read()
        self._position = position + 1
        return found

    def close(self) -> None:
        """Let go of the data sets."""
        self._position = None
        for reader in self._readers:
            reader.close()
