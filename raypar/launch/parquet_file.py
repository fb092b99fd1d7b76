"""Writes named rows to a Parquet file, part by part, whole or not at all."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

from raypar.errors import ConfigError, RayparError, UserCodeError
from raypar.files.os_error_cure import cure_of_os_error

if TYPE_CHECKING:
    from torch import Tensor


class ParquetFile:
    """A Parquet file that is being written. A part is a row group; in memory is one part."""

    def __init__(self, path: Path) -> None:
        self.path = path
        """Where the file will be."""
        self.rows = 0
        """Rows written so far."""
        self.columns: list[str] = []
        """The columns' names; empty before the first part."""
        self._aside = path.with_name(f".{path.name}.{os.getpid()}.tmp")
        self._writer: Any = None

    def write(self, columns: Mapping[str, Tensor]) -> None:
        """Add rows: name -> [rows, ...]. Further dimensions become lists in the rows; bfloat16 becomes float32.

        Raises `UserCodeError` for other columns than in the first part, and for a dtype that Parquet does not have.
        """
        import pyarrow
        from pyarrow import parquet

        try:
            table = pyarrow.table({name: arrow_column(tensor) for name, tensor in columns.items()})
        except (pyarrow.ArrowException, TypeError) as error:
            raise UserCodeError(
                f"the outputs cannot be written to Parquet: {error}", cure="let a function of the output return real numbers"
            ) from error
        if self._writer is None:
            self._writer, self.columns = parquet.ParquetWriter(self._aside, table.schema), table.column_names
        elif table.schema != self._writer.schema:
            raise UserCodeError(
                f"the outputs of samples from {self.rows} on have the columns {describe(table.schema)}, and those before "
                f"{describe(self._writer.schema)}",
                cure="return the same tensors, of the same dtypes, for every microbatch",
            )
        self._writer.write_table(table)
        self.rows += table.num_rows

    def columns_in_memory(self) -> dict[str, Tensor]:
        """Nothing: the rows are in the file."""
        return {}

    def finish(self) -> None:
        """Give the file its name."""
        if self._writer is not None:
            self._writer.close()
            os.replace(self._aside, self.path)

    def discard(self) -> None:
        """Remove what has been written of a file that is not finished."""
        with contextlib.suppress(Exception):
            if self._writer is not None:
                self._writer.close()
        with contextlib.suppress(OSError):
            self._aside.unlink()


@contextlib.contextmanager
def open_parquet_file(given: str | os.PathLike[str]) -> Iterator[ParquetFile]:
    """Gives the block a file to write, which appears at its end. Raises `ConfigError` for a place where none can be, and
    `RayparError` for a disk that refuses."""
    from raypar.storage.run_folder import check_local_path

    path = check_local_path(given, "--out")
    if path.suffix != ".parquet" or not path.absolute().parent.is_dir() or path.is_dir():
        raise ConfigError(f"cannot write --out {given}", cure="name a .parquet file in a folder that exists")
    file = ParquetFile(path)
    try:
        yield file
        file.finish()
    except OSError as error:
        raise RayparError(
            f"cannot write {path}: {error.strerror or error}",
            cure=cure_of_os_error(error, "free disk space, or name another file"),
        ) from error
    finally:
        file.discard()


def describe(schema: Any) -> str:
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
