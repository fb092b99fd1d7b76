"""Parquet files as a map-style data set: sample i is row i, read with its row group when it is first needed."""

from __future__ import annotations

import contextlib
import hashlib
from collections import OrderedDict
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import TYPE_CHECKING, NamedTuple

import numpy
import torch

from raypar.data.file_list import DataFile, Files, find_data_files
from raypar.data.open_files import OpenFiles
from raypar.errors import DataError
from raypar.files.printable_text import shorten

if TYPE_CHECKING:
    from pyarrow import Schema, Table
    from pyarrow.parquet import ParquetFile

CACHED_BYTES = 256 << 20
"""Bytes of row groups that a process keeps, unless the job says otherwise."""
READING_THREADS = 8
"""Ends of files that are read at a time, when the data set is made."""
_TRAILER = 8
"""Bytes of a Parquet file behind its footer: the footer's length, and `PAR1`."""


class _Footer(NamedTuple):
    """What the end of a file says."""

    rows: list[int]
    """Rows of each row group."""
    schema: Schema
    """Names and types of the columns that are read."""
    digest: bytes
    """Of the footer's bytes: it has sizes and places of all columns, and mostly their smallest and largest values."""


class ParquetFiles(torch.utils.data.Dataset[dict[str, object]]):
    """The rows of Parquet files, file after file in the order of their names: column -> value, as Python has it.

    `files`: a path or URI, or several, with wildcards (`data/*.parquet`); all have the same columns. `columns`: those that are
    read; by default all. `cached_bytes`: of the row groups that were read last so many bytes are kept, and always one; a
    sample of another one reads it. Raises `DataError` for files that cannot be that.
    """

    raypar_thread_safe = True
    """Draws no random numbers: nothing needs to be seeded before a sample."""

    def __init__(self, files: Files, *, columns: Sequence[str] | None = None, cached_bytes: int = CACHED_BYTES) -> None:
        self.files = find_data_files(files, "Parquet file")
        self.columns = None if columns is None else list(columns)
        self.cached_bytes = cached_bytes
        with ThreadPoolExecutor(min(READING_THREADS, len(self.files))) as threads:
            footers = list(threads.map(self._read_footer, self.files))
        for file, footer in zip(self.files, footers, strict=True):
            if not footer.schema.equals(footers[0].schema):
                raise _other_columns_error(self.files[0], footers[0].schema, file, footer.schema)
        rows = [count for footer in footers for count in footer.rows]
        self._ends = numpy.cumsum(numpy.array(rows, dtype=numpy.int64))
        """The row after the last one of each row group."""
        self._first_groups = numpy.cumsum([0, *(len(footer.rows) for footer in footers)])
        """The number of the first row group of each file."""
        self.raypar_content_digest = hashlib.blake2b(b"".join(one.digest for one in footers), digest_size=8).hexdigest()
        """Of what the files hold, wherever they lie: a run that is resumed with other files is told so."""
        self._start()

    def _start(self) -> None:
        self._open = OpenFiles(self._opened)
        self._groups: OrderedDict[int, Table] = OrderedDict()
        self._kept_bytes = 0

    def __getstate__(self) -> dict[str, object]:
        """Another process opens the files itself; what was read does not travel."""
        return {name: value for name, value in self.__dict__.items() if name not in ("_open", "_groups", "_kept_bytes")}

    def __setstate__(self, state: dict[str, object]) -> None:
        self.__dict__.update(state)
        self._start()

    def __len__(self) -> int:
        return int(self._ends[-1]) if len(self._ends) else 0

    def __getitem__(self, index: int) -> dict[str, object]:
        if not 0 <= index < len(self):
            raise IndexError(f"no row {index}: the Parquet files have rows 0 to {len(self) - 1:,} ({len(self):,} in all)")
        number = int(numpy.searchsorted(self._ends, index, side="right"))
        table = self._group(number)
        place = index - (int(self._ends[number]) - table.num_rows)
        return {name: table.column(at)[place].as_py() for at, name in enumerate(table.column_names)}

    @property
    def line_about_random_order(self) -> str | None:
        """What a random order of the rows costs, if the row groups do not all fit into the kept bytes."""
        if not len(self):
            return None
        with_rows = numpy.flatnonzero(numpy.diff(self._ends, prepend=0))
        first = self._group(int(with_rows[0]))
        nbytes = first.nbytes / first.num_rows * len(self)  # files have less: equal values are written once
        if nbytes <= self.cached_bytes:
            return None
        return (
            f"the Parquet files have about {nbytes / 2**20:,.1f} MiB in {len(with_rows):,} row groups, and each process keeps "
            f"{self.cached_bytes / 2**20:,.1f} MiB of them: in random order {1 - self.cached_bytes / nbytes:.0%} of the "
            f"samples read {len(self) / len(with_rows):,.0f} rows for one\n"
            "  cure: raise data.args.cached_bytes if there is memory; or write the files anew, with row groups of a few "
            "hundred rows (row_group_size), or in random order for data.shuffle: false"
        )

    def _group(self, number: int) -> Table:
        """The rows of a row group, read or kept."""
        if number not in self._groups:
            at = int(numpy.searchsorted(self._first_groups, number, side="right")) - 1
            with _parquet_errors(self.files[at]):
                read = self._open.get(at).read_row_group(
                    number - int(self._first_groups[at]), columns=self.columns, use_threads=False
                )
                read = read.combine_chunks()
            self._kept_bytes += read.nbytes
            while self._groups and self._kept_bytes > self.cached_bytes:
                self._kept_bytes -= self._groups.popitem(last=False)[1].nbytes
            self._groups[number] = read
        self._groups.move_to_end(number)
        return self._groups[number]

    @contextlib.contextmanager
    def _opened(self, number: int) -> Iterator[ParquetFile]:
        from pyarrow.parquet import ParquetFile

        with self.files[number].opened() as file, _parquet_errors(self.files[number]):
            yield ParquetFile(file)

    def _read_footer(self, file: DataFile) -> _Footer:
        import pyarrow
        from pyarrow.parquet import ParquetFile

        with file.opened() as opened, _parquet_errors(file):
            parquet = ParquetFile(opened)
            metadata, schema = parquet.metadata, parquet.schema_arrow.remove_metadata()
            if self.columns is not None:
                if lacking := [name for name in self.columns if name not in schema.names]:
                    raise DataError(
                        f"Parquet file {shorten(file.location)} has no column {lacking[0]!r}",
                        cure=f"it has {', '.join(schema.names)}",
                    )
                schema = pyarrow.schema([schema.field(name) for name in self.columns])
            groups = [metadata.row_group(number) for number in range(metadata.num_row_groups)]
            opened.seek(file.size - _TRAILER)
            footer = int.from_bytes(opened.read(4), "little")
            opened.seek(max(0, file.size - _TRAILER - footer))
            digest = hashlib.blake2b(f"{file.size}".encode() + opened.read(footer), digest_size=16).digest()
            return _Footer([group.num_rows for group in groups], schema, digest)


@contextlib.contextmanager
def _parquet_errors(file: DataFile) -> Iterator[None]:
    """Turns what pyarrow raises about a file into `DataError`."""
    try:
        yield
    except (OSError, ValueError, NotImplementedError) as error:  # pyarrow's own classes derive from these
        text = (str(error).strip() or type(error).__name__).splitlines()[0]
        raise DataError(
            f"cannot read Parquet file {shorten(file.location)}: {shorten(text)}",
            cure="it was cut off, or is of another format",
        ) from error


def _other_columns_error(one: DataFile, columns: Schema, other: DataFile, other_columns: Schema) -> DataError:
    """The error for two files that have not the same columns."""
    theirs = {field.name: str(field.type) for field in other_columns}
    ours = {field.name: str(field.type) for field in columns}
    differ = [name for name in {**ours, **theirs} if ours.get(name) != theirs.get(name)]
    what = "the same columns in another order"
    if differ:
        has, had = (f"of type {kinds[differ[0]]}" if differ[0] in kinds else "missing" for kinds in (theirs, ours))
        what = f"column {differ[0]!r} is {has}, and in {shorten(one.location)} it is {had}"
    return DataError(
        f"Parquet file {shorten(other.location)}: {what}",
        cure="name files with the same columns, or those columns that are alike: data.args.columns",
    )
