"""Rows that are computed once, in order, and handed to several readers: by number, as long as they are kept, and waited for."""

from __future__ import annotations

import contextlib
import threading
import time
from collections import deque
from collections.abc import Callable, Generator, Iterator
from itertools import islice
from typing import TYPE_CHECKING, NamedTuple, Protocol

from raypar.data.ray_rows import row_of
from raypar.errors import DataError

if TYPE_CHECKING:
    from pyarrow import Table

CHUNK_BYTES = 4 << 20
"""About so many bytes of rows are handed over at a time."""
AHEAD_BYTES = 64 << 20
"""So many bytes of rows are computed before somebody asks for them; then the computation waits."""
KEPT_BYTES = 128 << 20
"""So many bytes of the rows that were given are kept, for readers that come later."""
MOST_PASSES = 2
"""Readers at the end of an epoch and at the beginning of the next one need two."""
ANSWER_S = 1.0
"""A reader is answered within this time, with rows or with how far they have come."""
SILENT_S = 120.0
"""A reader gives up when its rows have come no further for so long."""
MOST_NEW_PASSES = 5
"""A reader gives up when its pass was given up for other readers more often, before it had its rows."""


class FedRows(NamedTuple):
    """An answer to a reader."""

    reached: int
    """How many rows have been computed so far."""
    ended: bool
    """Whether these are all."""
    first: int = 0
    """Number of the first row in `content`."""
    content: bytes = b""
    """Rows as a stream of Arrow's format, the wanted one among them; empty if it was not asked for, or is not there yet."""


class RowsLostError(DataError):
    """What has computed the rows is gone: they must be computed again, and those before the wanted one skipped."""


class FedChunk(NamedTuple):
    """Rows that are handed over together."""

    rows: int
    """Their number."""
    content: bytes
    """The rows themselves."""


class KeptChunk(NamedTuple):
    """Such rows with their numbers."""

    first: int
    """Number of the first row."""
    stop: int
    """Number of the row after the last one."""
    content: bytes
    """The rows themselves."""


class RowFeed:
    """Answers readers. `open_rows` begins to compute the rows, and gives them block by block; each time the same ones.

    Readers that are near to each other share one pass over the rows; one that asks for a row that is kept no more gets a new
    pass. A pass waits while nobody asks for what it has computed.
    """

    def __init__(self, open_rows: Callable[[], Generator[Table]]) -> None:
        self._open_rows = open_rows
        self._passes: list[RowPass] = []
        self._lock = threading.Lock()

    def read(self, row: int, *, with_content: bool = True) -> FedRows:
        """The rows from a chunk with this one on, or how far they are; `with_content=False`: only how far, when it is reached.

        Waits up to `ANSWER_S`. Raises what computing the rows raises.
        """
        with self._lock:
            one = self._pass_for(row)
        one.wait_for(row)
        found = next(iter(one.chunks_from(row)), None) if with_content else None
        content = (found.first, found.content) if found is not None else ()
        return FedRows(one.reached, one.ended, *content)

    def close(self) -> None:
        """End the computation. Idempotent."""
        with self._lock:
            for one in self._passes:
                one.close()
            self._passes.clear()

    def _pass_for(self, row: int) -> RowPass:
        """The pass that has the row or is the nearest before it, as the one that was used last."""
        usable = [one for one in self._passes if one.first <= row and one.error is None]
        if not usable:
            while len(self._passes) >= MOST_PASSES:
                self._passes.pop(0).close()
            found = RowPass(self._chunks, kept_bytes=KEPT_BYTES)
        else:
            found = max(usable, key=lambda one: (one.reached > row, one.reached))
            self._passes.remove(found)
        self._passes.append(found)
        return found

    def _chunks(self) -> Generator[FedChunk]:
        with contextlib.closing(self._open_rows()) as blocks:
            for block in blocks:
                for chunk in _chunks_of(block):
                    yield FedChunk(chunk.num_rows, _as_bytes(chunk))


class RowPass:
    """One pass over rows, computed by a thread, which waits while nobody asks for what it has computed.

    `open_chunks` computes them, from row `first` on. Of the rows before the last one that was asked for, `kept_rows` are kept,
    and as many more as are `kept_bytes` large. `ahead_rows`: at most so many are computed before somebody asks for them.
    """

    first: int
    """Number of the first row that is kept."""
    reached: int
    """Number of the row that is computed next."""
    ended: bool
    """Whether all rows have been computed."""
    error: BaseException | None
    """What computing them has raised."""
    _chunks: deque[KeptChunk]
    """The rows that are kept."""
    _largest: int
    """The most rows that a chunk had."""
    _wanted: int
    """The last row that was asked for."""
    _ahead: int
    """Chunks at the end of `_chunks` that begin after it."""
    _ahead_bytes: int
    """Their size."""
    _bytes: int
    """The size of all chunks that are kept."""

    def __init__(
        self,
        open_chunks: Callable[[], Generator[FedChunk]],
        first: int = 0,
        *,
        kept_bytes: int,
        kept_rows: int = 0,
        ahead_rows: int | None = None,
    ) -> None:
        self.first, self.reached, self.ended, self.error = first, first, False, None
        self._open_chunks, self._kept_bytes, self._kept_rows, self._ahead_rows = open_chunks, kept_bytes, kept_rows, ahead_rows
        self._chunks, self._largest, self._wanted, self._closing = deque(), 1, first, False
        self._ahead, self._ahead_bytes, self._bytes = 0, 0, 0
        self._changed = threading.Condition()
        self._thread = threading.Thread(target=self._compute, name="rows", daemon=True)
        self._thread.start()

    def wait_for(self, row: int) -> None:
        """Wait until a row is computed or there is none, up to `ANSWER_S`. Raises what computing the rows raises."""
        with self._changed:
            if row > self._wanted:
                self._wanted = row
                for chunk in islice(self._chunks, len(self._chunks) - self._ahead, None):
                    if chunk.first > row:
                        break
                    self._ahead, self._ahead_bytes = self._ahead - 1, self._ahead_bytes - len(chunk.content)
                self._changed.notify_all()
            self._changed.wait_for(lambda: self.reached > row or self.ended or self.error is not None, ANSWER_S)
            if self.error is not None and self.reached <= row:
                raise self.error

    def chunks_from(self, row: int, rows: int = 1) -> list[KeptChunk]:
        """The chunks with this row and the next ones, as far as they are kept, up to about `CHUNK_BYTES`."""
        found: list[KeptChunk] = []
        room = CHUNK_BYTES
        with self._changed:
            for chunk in islice(self._chunks, max(0, row - self.first) // self._largest, None):
                if chunk.first >= row + rows or room <= 0:
                    break
                if chunk.stop > row and (found or chunk.first <= row):
                    found.append(chunk)
                    room -= len(chunk.content)
        return found

    def close(self) -> None:
        """Let the thread end, as soon as it has what it computes now."""
        with self._changed:
            self._closing = True
            self._chunks.clear()
            self._ahead, self._ahead_bytes, self._bytes = 0, 0, 0
            self._changed.notify_all()

    def _compute(self) -> None:
        try:
            with contextlib.closing(self._open_chunks()) as chunks:
                for chunk in chunks:
                    if not self._add(chunk):
                        return
            with self._changed:
                self.ended = True
                self._changed.notify_all()
        except BaseException as error:  # readers raise it
            with self._changed:
                self.error = error
                self._changed.notify_all()

    def _add(self, chunk: FedChunk) -> bool:
        """Keep rows, then wait until there is room for more. False if the pass is closed."""
        with self._changed:
            self._changed.wait_for(lambda: self._closing or self.reached <= self._wanted or self._has_room())
            if self._closing:
                return False
            kept = KeptChunk(self.reached, self.reached + chunk.rows, chunk.content)
            self._chunks.append(kept)
            self._bytes, self._largest = self._bytes + len(chunk.content), max(self._largest, chunk.rows)
            if kept.first > self._wanted:
                self._ahead, self._ahead_bytes = self._ahead + 1, self._ahead_bytes + len(chunk.content)
            self.reached = kept.stop
            while self._chunks and self._is_behind(self._chunks[0]) and self._bytes - self._ahead_bytes > self._kept_bytes:
                self._bytes -= len(self._chunks.popleft().content)
            self.first = self._chunks[0].first if self._chunks else self.reached
            self._changed.notify_all()
        return True

    def _is_behind(self, chunk: KeptChunk) -> bool:
        """Whether all rows of a chunk are so far before the last one that was asked for that they may be dropped."""
        return chunk.stop <= self._wanted - self._kept_rows

    def _has_room(self) -> bool:
        """Whether more may be computed before somebody asks for it."""
        rows = self.reached - self._wanted
        return self._ahead_bytes < AHEAD_BYTES and (self._ahead_rows is None or rows <= self._ahead_rows)


def _chunks_of(block: Table) -> Iterator[Table]:
    rows = max(1, block.num_rows * CHUNK_BYTES // max(1, block.nbytes))
    for first in range(0, block.num_rows, rows):
        yield block.slice(first, rows)


def _as_bytes(table: Table) -> bytes:
    import pyarrow

    sink = pyarrow.BufferOutputStream()
    with pyarrow.ipc.new_stream(sink, table.schema) as writer:
        writer.write_table(table)
    return bytes(sink.getvalue())


class PassProgress:
    """How far the pass has come for which a reader waits. One that is given up for readers at other places is begun anew."""

    def __init__(self) -> None:
        self.reached, self._new_passes, self._since_s = -1, 0, time.monotonic()

    @property
    def is_silent(self) -> bool:
        """Whether it has come no further for `SILENT_S`."""
        return time.monotonic() - self._since_s > SILENT_S

    def note(self, reached: int, who: str, waited: str) -> None:
        """Note how far it is. Raises `DataError` after too many passes. `who`: who makes them, `waited`: for what, in words."""
        if reached == self.reached:
            return
        self._new_passes += reached < self.reached
        self.reached, self._since_s = reached, time.monotonic()
        if self._new_passes > MOST_NEW_PASSES:
            raise DataError(
                f"{who} has begun {self._new_passes} times anew, for readers at other places; {waited} is waited for",
                cure=f"it reads at {MOST_PASSES} places at a time: resume the run, whose workers then begin at one place; "
                "report this if it happens again",
            )


class RowReader(Protocol):
    """How a reader asks: `RowFeed.read`, also of another process."""

    def __call__(self, row: int, *, with_content: bool) -> FedRows: ...


class FedRowIterator:
    """The rows of an epoch as samples: column -> value, as `RayRows` gives them. `who`: what computes them, for messages."""

    def __init__(self, read: RowReader, who: Callable[[], str]) -> None:
        self._read, self._who = read, who
        self._row, self._first, self._table = 0, 0, None

    def __iter__(self) -> FedRowIterator:
        return self

    def __next__(self) -> dict[str, object]:
        if self._table is None or self._row >= self._first + self._table.num_rows:
            answer = self._wait(self._row)
            if not answer.content:
                raise StopIteration
            self._first, self._table = answer.first, _from_bytes(answer.content)
        self._row += 1
        return row_of(self._table, self._row - 1 - self._first)

    def raypar_skip(self, count: int) -> int:
        """Go past `count` rows, or as many of them as are computed soon; how many, 0 at the end of the epoch."""
        answer = self._wait(self._row, self._row + count - 1)
        passed = max(0, min(answer.reached - self._row, count))
        self._row, self._table = self._row + passed, None
        return passed

    def _wait(self, row: int, last: int | None = None) -> FedRows:
        """The answer about a row, as soon as it is computed or there is none. `last`: no content, for all rows up to this one.

        Raises `DataError` if the rows come no further for `SILENT_S`.
        """
        progress = PassProgress()
        while True:
            answer = self._read(row if last is None else last, with_content=last is None)
            if answer.content or (answer.ended and answer.reached <= row) or (last is not None and answer.reached > row):
                return answer
            progress.note(answer.reached, self._who(), f"row {row:,}")
            if progress.is_silent:
                raise DataError(
                    f"{self._who()} has computed {answer.reached:,} rows, and none for {SILENT_S:.0f} s; row {row:,} is waited "
                    "for",
                    cure="look at what its functions wait for; its tasks need processors that workers leave free: give "
                    "the cluster more, or the run fewer workers",
                )


def _from_bytes(content: bytes) -> Table:
    import pyarrow

    return pyarrow.ipc.open_stream(content).read_all()
