"""Writes named rows to a Parquet file, part by part, whole or not at all."""

from __future__ import annotations

import contextlib
import math
import os
import shutil
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

from raypar.errors import ConfigError, RayparError, UserCodeError
from raypar.files.atomic_write import written_aside
from raypar.files.os_error_cure import cure_of_os_error
from raypar.files.remove_if_killed import removed_if_killed

if TYPE_CHECKING:
    from pyarrow import NativeFile
    from torch import Tensor


Rows = Mapping[str, "Tensor"]
"""Column -> its rows: `sample`, the numbers of the samples, and the outputs by name."""


class ParquetFile:
    """A Parquet file that is being written. A part is a row group; in memory is one part."""

    def __init__(self, sink: Path | NativeFile, folder: Path | None = None) -> None:
        """`sink`: where it is written; `folder`: whose disk must have room for it, None: none is looked at."""
        self.rows = 0
        """Rows written so far."""
        self.columns: list[str] = []
        """The columns' names; empty before the first part."""
        self._sink, self._folder = sink, folder
        self._writer: Any = None
        self._expected = 0

    def expect(self, rows: int) -> None:
        """Know how many rows there will be in all."""
        self._expected = rows

    def write(self, columns: Rows) -> None:
        """Add rows: name -> [rows, ...]. Further dimensions become lists in the rows; bfloat16 becomes float32.

        Raises `UserCodeError` for other columns than in the first part, and for a dtype that Parquet does not have;
        `RayparError` if by the size of the first part the disk has no room for all rows.
        """
        import pyarrow
        from pyarrow import parquet

        try:
            table = pyarrow.table({name: arrow_column(tensor) for name, tensor in columns.items()})
        except (pyarrow.ArrowException, TypeError) as error:
            raise UserCodeError(
                f"the outputs cannot be written to Parquet: {error}", cure="let a function of the output return real numbers"
            ) from error
        first = self._writer is None
        if first:
            self._writer, self.columns = parquet.ParquetWriter(self._sink, table.schema), table.column_names
        elif table.schema != self._writer.schema:
            raise UserCodeError(
                f"the outputs of samples from {self.rows} on have the columns {describe_schema(table.schema)}, and "
                f"those before {describe_schema(self._writer.schema)}",
                cure="return the same tensors, of the same dtypes, for every microbatch",
            )
        self._writer.write_table(table)
        self.rows += table.num_rows
        if first and self._folder is not None and isinstance(self._sink, Path):
            self._check_room(self._sink, self._folder)

    def _check_room(self, sink: Path, folder: Path) -> None:
        """Raise `RayparError` if the rows that are to come have no room, as large as those that are written."""
        size = sink.stat().st_size / self.rows
        needed, free = math.ceil(size * (self._expected - self.rows)), shutil.disk_usage(folder).free
        if needed > free:
            raise RayparError(
                f"the outputs of {self._expected:,} samples need {needed / 2**20:,.1f} MiB more, at {size:,.0f} bytes "
                f"a sample, and {folder} has {free / 2**20:,.1f} MiB free",
                cure="keep less of each output, by a function of it (--function; from Python function=), free disk space, or "
                "name a file on another disk",
            )

    def columns_in_memory(self) -> dict[str, Tensor]:
        """Nothing: the rows are in the file."""
        return {}

    def close(self) -> None:
        """Write the end of the file. Raises `OSError`."""
        writer, self._writer = self._writer, None
        if writer is not None:
            writer.close()


@contextlib.contextmanager
def open_parquet_file(given: str | os.PathLike[str], *, overwrite: bool = False) -> Iterator[ParquetFile]:
    """Gives the block a file to write, which appears at its end, whole, or not at all; it may be a URI.

    `overwrite`: whether it may replace a file that is there. Raises `ConfigError` for a file that it may not replace and for a
    place where none can be, and `RayparError` for a disk or a storage that refuses.
    """
    from raypar.storage.pyarrow_store import file_exists, open_for_writing
    from raypar.storage.run_folder import check_local_path, parse_storage_location

    shared = parse_storage_location(given, "--out")
    path = check_local_path(given, "--out").absolute() if shared is None else Path(shared.name)
    if path.suffix != ".parquet" or (shared is None and (not path.parent.is_dir() or path.is_dir())):
        raise ConfigError(f"cannot write --out {given}", cure="name a .parquet file in a folder that exists")
    if not overwrite and (os.path.lexists(path) if shared is None else file_exists(shared)):
        raise ConfigError(
            f"--out {given} is there already: nothing was written",
            cure="name another file, or replace it: --overwrite; from Python overwrite=True",
        )
    if shared is not None:
        with open_for_writing(shared) as writer, _closed(ParquetFile(writer.stream)) as file:
            yield file
        return
    try:
        with written_aside(path) as aside, removed_if_killed(aside), _closed(ParquetFile(aside, path.parent)) as file:
            yield file
    except OSError as error:
        raise RayparError(
            f"cannot write {path}: {os.strerror(error.errno) if error.errno else error}",
            cure=cure_of_os_error(error, "free disk space, or name another file"),
        ) from error


@contextlib.contextmanager
def _closed(file: ParquetFile) -> Iterator[ParquetFile]:
    """The file, which is ended with the block; if that raises, as far as it goes."""
    try:
        yield file
        file.close()
    finally:
        with contextlib.suppress(Exception):
            file.close()


def describe_schema(schema: Any) -> str:
    """The columns of a schema with their types."""
    return ", ".join(f"{field.name} ({field.type})" for field in schema)


def arrow_column(tensor: Tensor) -> Any:
    """A column of an Arrow table: numbers, or for further dimensions lists of them."""
    import numpy
    import pyarrow
    import torch

    values = tensor.float() if tensor.dtype == torch.bfloat16 else tensor
    made = pyarrow.array(values.reshape(-1).numpy())
    for dim in reversed(range(1, values.dim())):
        rows, length = int(numpy.prod(values.shape[:dim])), values.shape[dim]
        made = pyarrow.ListArray.from_arrays(pyarrow.array(numpy.arange(rows + 1) * length, pyarrow.int32()), made)
    return made
