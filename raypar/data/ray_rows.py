"""The rows of a `ray.data.Dataset`, in its order: block by block, or held as one Arrow table, a map-style data set."""

from __future__ import annotations

import contextlib
import hashlib
from collections.abc import Generator, Iterator
from typing import TYPE_CHECKING, Protocol

from raypar.errors import DataError, with_article

if TYPE_CHECKING:
    from pyarrow import Table

MOST_BYTES = 1 << 30
"""The most bytes of rows that are held: by every worker that reads samples."""


class _Schema(Protocol):
    names: list[str]
    types: list[object]


class _ExecutionOptions(Protocol):
    preserve_order: bool


class _Context(Protocol):
    execution_options: _ExecutionOptions


class RayDataset(Protocol):
    """What is used of a `ray.data.Dataset`."""

    @property
    def context(self) -> _Context:
        """Its settings."""

    def iter_batches(self, *, batch_size: int | None, batch_format: str) -> Iterator[Table]:
        """Its rows, block by block."""

    def has_serializable_lineage(self) -> bool:
        """Whether another process can compute it, of files that it reads."""

    def serialize_lineage(self) -> bytes:
        """How it is computed."""

    def schema(self) -> _Schema | None:
        """The columns."""


class RayRows:
    """Row i: column -> value, as Python has it (of a tensor column an array)."""

    raypar_thread_safe = True
    """Draws no random numbers: nothing needs to be seeded before a sample."""

    def __init__(self, table: Table) -> None:
        self._table = table
        found = hashlib.blake2b(digest_size=8)
        for batch in table.to_batches():
            found.update(batch.serialize())
        self.raypar_content_digest = found.hexdigest()
        """Of the rows: a run that is resumed with others is told so."""

    def __repr__(self) -> str:
        return f"RayRows({len(self)} rows, {self.raypar_content_digest})"

    def __len__(self) -> int:
        return int(self._table.num_rows)

    def __getitem__(self, index: int) -> dict[str, object]:
        if not 0 <= index < len(self):
            raise IndexError(f"no row {index}: there are rows 0 to {len(self) - 1:,}")
        return row_of(self._table, index)


def row_of(table: Table, index: int) -> dict[str, object]:
    """A row of a table: column -> value, as Python has it (of a tensor column an array)."""
    return {name: table.column(at)[index].as_py() for at, name in enumerate(table.column_names)}


def is_ray_data(value: object) -> bool:
    """Whether a value is a data set of Ray Data, or an iterator over one."""
    return hasattr(value, "iter_batches") and not isinstance(value, type)


def require_ordered(dataset: RayDataset, what: str) -> None:
    """Raise `DataError` for an iterator over a data set of Ray Data. `what`: for messages."""
    if not hasattr(dataset, "streaming_split"):
        raise DataError(
            f"{what} is {with_article(type(dataset).__name__)}, of streaming_split or Ray Train: it guarantees no order, drops "
            "rows where parts shall be equal, and does not outlive a failure",
            cure="give the ray.data.Dataset itself, or write it once by its write_parquet(FOLDER), and give data={'parquet': "
            "'FOLDER/*.parquet'}",
        )


def blocks_in_order(dataset: RayDataset) -> Generator[Table]:
    """Compute a data set and give its rows block by block, in its order (`preserve_order`)."""
    options = dataset.context.execution_options
    before, options.preserve_order = options.preserve_order, True
    try:
        yield from dataset.iter_batches(batch_size=None, batch_format="pyarrow")
    finally:
        options.preserve_order = before


def read_ray_rows(dataset: RayDataset, what: str) -> RayRows | None:
    """Compute a data set of Ray Data and take its rows, in its order; None if they are more than `MOST_BYTES`.

    Raises `DataError` for one without rows. `what`: for messages.
    """
    import pyarrow

    blocks, nbytes = [], 0
    with contextlib.closing(blocks_in_order(dataset)) as given:
        for block in given:
            blocks.append(block)
            nbytes += block.nbytes
            if nbytes > MOST_BYTES:
                return None
    if not blocks:
        raise DataError(f"{what} is a ray.data.Dataset without rows", cure="look at what it reads and filters")
    return RayRows(pyarrow.concat_tables(blocks, promote_options="default").combine_chunks())


def lineage_of(dataset: RayDataset, what: str) -> tuple[bytes, str]:
    """(how a data set of Ray Data is computed, its columns in words), for processes that compute it again.

    Raises `DataError` for one whose rows only the cluster's memory has, and for one without rows. `what`: for messages.
    """
    if not dataset.has_serializable_lineage():
        raise DataError(
            f"{what} is a ray.data.Dataset that is to be read as a stream, and not of files alone (from_items, from_pandas, "
            "union, zip, ...): nobody could compute its rows again after a failure",
            cure="write it once by its write_parquet(FOLDER), where all workers can read it, and give "
            f"ray.data.read_parquet(FOLDER), or {what}={{'parquet': 'FOLDER/*.parquet'}}, which is read by id; up to "
            f"{MOST_BYTES >> 20:,} MiB of rows are held without {what}.streams",
        )
    schema = dataset.schema()
    if schema is None:
        raise DataError(f"{what} is a ray.data.Dataset without rows", cure="look at what it reads and filters")
    columns = ", ".join(f"{name}: {kind}" for name, kind in zip(schema.names, schema.types, strict=True))
    return dataset.serialize_lineage(), columns
