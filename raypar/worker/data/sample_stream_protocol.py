"""What a worker needs of a stream of samples, which it reads by itself, or which its node's data process reads for it."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Protocol

from raypar.worker.data.microbatch_stream_positions import EpochMark, StreamCursor
from raypar.worker.data.sample_order import SamplePosition


class PlaceKeeping(Protocol):
    """What is known of a source's data set."""

    @property
    def keeps_place(self) -> bool:
        """Whether the data set tells its state, and can begin with it."""

    @property
    def why_places_are_read_for(self) -> str:
        """Why a place in the stream is found by reading samples, and the cure."""


class StreamPart(Protocol):
    """A source of a stream, whose places are known by epochs and cursors."""

    epochs: dict[int, int]
    """Epoch -> the position of its first sample, of the epochs that were found, by this worker or by others."""

    @property
    def source(self) -> PlaceKeeping:
        """Its data set."""

    def epoch_of(self, position: int) -> EpochMark:
        """The last known epoch that begins at a position or before it."""

    def cursor(self) -> StreamCursor | None:
        """The last known place from which the data set can go on; None if it keeps none."""

    def open_at(self, cursor: StreamCursor) -> None:
        """Read from this place on. Raises `UserCodeError`."""


class SampleStream(Protocol):
    """The samples of a stream by position: 0 is the first that it gives, and an epoch that ends is followed by the next one."""

    @property
    def stream(self) -> int:
        """Number of the stream."""

    @property
    def parts(self) -> Mapping[int, StreamPart]:
        """Number of a source's stream (source * streams + stream) -> what is known of it, in the order of the sources."""

    @property
    def skipped(self) -> int:
        """Samples read in vain so far, to find a place."""

    @property
    def given(self) -> int:
        """Samples that data sets, or the data process, have given so far."""

    @property
    def seconds(self) -> float:
        """Seconds that they took over them."""

    def position_of(self, number: int, position: int) -> int:
        """How many samples the source with this number has given before a position of the stream."""

    def seek(self, position: int) -> None:
        """Go to a position. Raises as `read` does."""

    def is_before(self, position: int) -> bool:
        """Whether a position can be reached by reading on."""

    def forget(self, *, distrust_cursors: bool = False) -> None:
        """Forget where the reader is. `distrust_cursors`: they have led to other samples."""

    def read(self) -> tuple[SamplePosition, object]:
        """((epoch of its source, index in it), sample) at the present position, and go to the next one.

        Raises `UserCodeError` for what the data set raises, `DataError` for an epoch without samples, `RowsLostError` if the
        data process is gone: the stream is to be opened again.
        """

    def close(self) -> None:
        """Read no more."""
