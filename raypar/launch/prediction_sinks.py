"""Where the rows of a prediction go: into memory, into a Parquet file, or to a function of the user's."""

from __future__ import annotations

import contextlib
import os
import traceback
from collections.abc import Callable
from typing import TYPE_CHECKING, Protocol

from raypar.errors import RayparError, UserCodeError
from raypar.job import FunctionConfig
from raypar.job.importable_name import is_importable_name
from raypar.job.read_job import parse_function_argument
from raypar.launch.parquet_writer import Rows, open_parquet_file
from raypar.user_code.stop_signals import reraise_ctrl_c
from raypar.user_code.user_code_errors import USER_CODE_ERRORS, error_text

if TYPE_CHECKING:
    from torch import Tensor


class RowSink(Protocol):
    """Takes rows in the order of samples."""

    @property
    def rows(self) -> int:
        """Rows taken so far."""

    @property
    def columns(self) -> list[str]:
        """The columns' names; empty before the first rows."""

    def expect(self, rows: int) -> None:
        """Know how many rows there will be in all."""

    def write(self, columns: Rows) -> None:
        """Take the rows of further samples."""

    def columns_in_memory(self) -> dict[str, Tensor]:
        """Column -> all its rows; empty if they are elsewhere."""


def open_rows(
    out: str | os.PathLike[str] | Callable[[Rows], object] | None, *, overwrite: bool = False
) -> contextlib.AbstractContextManager[RowSink]:
    """What takes the rows, as the context of a block: None: memory; a function, or `module:name` of one; the path or URI of a
    Parquet file, which replaces one that is there only with `overwrite`. Raises `ConfigError`."""
    if out is None:
        return contextlib.nullcontext(RowsInMemory())
    if callable(out) or (isinstance(out, str) and is_importable_name(out)):
        return contextlib.nullcontext(RowsForFunction(parse_function_argument(out, "--out")))
    return open_parquet_file(out, overwrite=overwrite)


class RowsForFunction:
    """Gives rows to a function of the user's, part by part."""

    def __init__(self, function: FunctionConfig) -> None:
        self.rows = 0
        self.columns: list[str] = []
        self._config = function
        self._call: Callable[[Rows], object] | None = None

    def expect(self, rows: int) -> None:
        """See `RowSink`. Imports the function."""
        self._call = self._config.partial()

    def write(self, columns: Rows) -> None:
        """See `RowSink`. Raises `UserCodeError` for what the function raises."""
        assert self._call is not None
        try:
            self._call(dict(columns))
        except RayparError:
            raise
        except USER_CODE_ERRORS as error:
            reraise_ctrl_c(error)
            raise UserCodeError(
                f"{self._config.label} raised {error_text(error)}, for the rows of samples from {self.rows} on\n"
                f"{traceback.format_exc()}",
                cure="the last lines of the traceback are where it did",
            ) from error
        self.columns = list(columns)
        self.rows += len(columns["sample"])

    def columns_in_memory(self) -> dict[str, Tensor]:
        """Nothing: the function has the rows."""
        return {}


class RowsInMemory:
    """Keeps all rows."""

    def __init__(self) -> None:
        self.rows = 0
        self.columns: list[str] = []
        self._parts: list[Rows] = []

    def expect(self, rows: int) -> None:
        """See `RowSink`."""

    def write(self, columns: Rows) -> None:
        """See `RowSink`."""
        self._parts.append(columns)
        self.columns = list(columns)
        self.rows += len(columns["sample"])

    def columns_in_memory(self) -> dict[str, Tensor]:
        """Column -> all its rows. Raises `UserCodeError` where rows differ in size."""
        import torch

        found = {}
        for name in self._parts[0] if self._parts else ():
            rows = [part[name] for part in self._parts]
            if any(part.shape[1:] != rows[0].shape[1:] for part in rows):
                raise UserCodeError(
                    f"the rows of the output {name!r} differ in size: {list(rows[0].shape[1:])} and others",
                    cure="give out=FILE.parquet, whose rows may, or a function that makes them alike",
                )
            found[name] = torch.cat(rows)
        return found
