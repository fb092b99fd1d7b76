"""What a checkpoint needs of the storage that it lies in, and folders as one such storage; all others are `PyarrowStore`.

    checkpoints/ (a store)   step_00000050/ (a checkpoint)   manifest.json, worker_0000.safetensors, ... (its files)

Another storage is a class with the methods of `CheckpointStore`, and its line in `STORES`. Locations are text where they
travel (requests, workers, events): `open_checkpoint_store` and `open_checkpoint` lead from a text to what lies there.
"""

from __future__ import annotations

import contextlib
import os
import re
import shutil
from collections.abc import Callable, Hashable, Iterator
from contextlib import AbstractContextManager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import BinaryIO, Protocol

from raypar.errors import CheckpointError, ConfigError
from raypar.files.os_error_cure import cure_of_os_error
from raypar.files.untrusted_files import READABLE, open_regular_file, read_limited_bytes
from raypar.storage.pyarrow_store import PyarrowStore
from raypar.storage.storage_uri import FILESYSTEM_SCHEME, SCHEMES, local_path_of_file_uri, parse_storage_uri


class OpenedFile(Protocol):
    """A file that is open for reading. All methods may raise `OSError`."""

    @property
    def stream(self) -> BinaryIO:
        """The bytes from the start; seekable."""

    @property
    def nbytes(self) -> int:
        """Size of the file."""

    def version(self) -> Hashable:
        """Another value when the file has other content than before."""

    def read_at(self, memory: memoryview, offset: int) -> int:
        """Fill `memory` with the bytes from `offset`; returns their number, which is less where the file ends."""


class CheckpointStore(Protocol):
    """A storage that holds checkpoints by name, each of which holds files by name.

    A checkpoint that is being written has a name of its own (`begin`). Under its final name it is there whole or not at all.
    Errors of the storage are `CheckpointError`s that name the location.
    """

    def checkpoint_location(self, name: str, file: str = "") -> str:
        """The text of a checkpoint's location, or of a file's in it: in messages, and for `open_checkpoint`."""

    def absolute_location(self, name: str) -> str:
        """The same for other processes, which may have another working directory."""

    def names(self) -> list[str]:
        """Names of what lies in the store, checkpoints among them; none if there is no store. Raises `CheckpointError`."""

    def begin(self, name: str) -> str:
        """Make room for a new checkpoint. Returns the name under which its files are written. Raises `CheckpointError`."""

    def file_name(self, begun: str, file: str) -> str:
        """The name under which a begun checkpoint has `file`: one that no other attempt gives, where nothing is renamed."""

    def write(self, name: str, file: str) -> AbstractContextManager[BinaryIO]:
        """Write a file in the block. At its end the file is durable. Raises `CheckpointError`."""

    def commit(self, begun: str, name: str, last_file: str, content: bytes) -> None:
        """Add the last file to the checkpoint begun as `begun`, and give it its name, in the place of one that has this name.

        All is durable at the end. A reader sees the former checkpoint, none, or all of the new one. Raises `CheckpointError`.
        """

    def has_file(self, name: str, file: str) -> bool:
        """Whether a checkpoint has anything by this file name."""

    def read(self, name: str, file: str, *, limit: int, cure: str) -> bytes:
        """The whole of a file of at most `limit` bytes. Raises `CheckpointError` with this cure."""

    def open(self, name: str, file: str, *, cure: str) -> AbstractContextManager[OpenedFile]:
        """Open a file for reading. Nothing but a file of this very checkpoint is opened. Raises `CheckpointError`."""

    def remove(self, name: str) -> None:
        """Remove what has this name, as far as that is possible; raises nothing."""

    def leftovers(self) -> list[tuple[str, str]]:
        """(name to remove, name of its checkpoint) of what was begun and not committed, or replaced and not removed."""


OF_AVERAGES = "@average"
"""Behind a checkpoint's location: the averages of its weights are read in their place."""


@dataclass(frozen=True)
class CheckpointRef:
    """One checkpoint, whole or being written. Its text is its location."""

    store: CheckpointStore
    """Where it lies."""
    name: str
    """Its name there."""
    averages: bool = False
    """Whether the averages of its weights are read in their place."""

    def __str__(self) -> str:
        return self.location + OF_AVERAGES * self.averages

    @property
    def location(self) -> str:
        """The text of its location, whether weights or averages are read."""
        return self.store.checkpoint_location(self.name)

    def file_location(self, file: str) -> str:
        """The text of a file's location."""
        return self.store.checkpoint_location(self.name, file)

    def absolute_location(self) -> str:
        """See `CheckpointStore.absolute_location`; `open_checkpoint` reads it."""
        return self.store.absolute_location(self.name) + OF_AVERAGES * self.averages

    def has_file(self, file: str) -> bool:
        """See `CheckpointStore.has_file`."""
        return self.store.has_file(self.name, file)


# -- folders -----------------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class LocalFile:
    """An `OpenedFile` of a file system."""

    stream: BinaryIO
    """The open file."""

    @property
    def nbytes(self) -> int:
        """See `OpenedFile`."""
        return os.fstat(self.stream.fileno()).st_size

    def version(self) -> Hashable:
        """See `OpenedFile`."""
        about = os.fstat(self.stream.fileno())
        return about.st_dev, about.st_ino, about.st_size, about.st_mtime_ns

    def read_at(self, memory: memoryview, offset: int) -> int:
        """See `OpenedFile`."""
        done = 0
        while done < len(memory) and (got := os.preadv(self.stream.fileno(), [memory[done:]], offset + done)):
            done += got
        return done


@dataclass(frozen=True)
class LocalCheckpointStore:
    """A `CheckpointStore` in a folder, with a folder for each checkpoint.

    A checkpoint is written into `.tmp-NAME`, which is renamed; one that it replaces is `.old-NAME` until it is removed.
    """

    root: Path
    """The folder that holds the checkpoints' folders."""

    def checkpoint_location(self, name: str, file: str = "") -> str:
        """See `CheckpointStore`."""
        return str(self.root / name / file)

    def absolute_location(self, name: str) -> str:
        """See `CheckpointStore`. Links are followed."""
        return str((self.root / name).resolve())

    def names(self) -> list[str]:
        """See `CheckpointStore`."""
        try:
            return [path.name for path in self.root.iterdir()]
        except (FileNotFoundError, NotADirectoryError):
            return []
        except OSError as error:
            raise CheckpointError(f"cannot read {self.root}: {error.strerror or error}", cure=READABLE) from error

    def begin(self, name: str) -> str:
        """See `CheckpointStore`."""
        begun = f".tmp-{name}"
        folder = self.root / begun
        with _write_errors(folder):
            shutil.rmtree(folder, ignore_errors=True)
            folder.mkdir(parents=True)
        return begun

    def file_name(self, begun: str, file: str) -> str:
        """See `CheckpointStore`: the folder of each attempt is its own."""
        return file

    def write(self, name: str, file: str) -> AbstractContextManager[BinaryIO]:
        """See `CheckpointStore`."""
        return write_and_fsync(self.root / name / file)

    def commit(self, begun: str, name: str, last_file: str, content: bytes) -> None:
        """See `CheckpointStore`."""
        folder, final, old = self.root / begun, self.root / name, self.root / f".old-{name}"
        with _write_errors(final):
            with open(folder / last_file, "wb") as file:
                file.write(content)
                file.flush()
                os.fsync(file.fileno())
            _sync(folder)
            if final.exists():
                shutil.rmtree(old, ignore_errors=True)
                final.rename(old)
            folder.rename(final)
            _sync(final.parent)
            shutil.rmtree(old, ignore_errors=True)

    def has_file(self, name: str, file: str) -> bool:
        """See `CheckpointStore`."""
        return os.path.lexists(self.root / name / file)

    def read(self, name: str, file: str, *, limit: int, cure: str) -> bytes:
        """See `CheckpointStore`. Links are refused."""
        return read_limited_bytes(self.root / name / file, follow=False, limit=limit, error=CheckpointError, cure=cure)

    @contextlib.contextmanager
    def open(self, name: str, file: str, *, cure: str) -> Iterator[LocalFile]:
        """See `CheckpointStore`. Links, FIFOs and devices are refused."""
        with open_regular_file(self.root / name / file, follow=False, error=CheckpointError, cure=cure) as opened:
            yield LocalFile(opened)

    def remove(self, name: str) -> None:
        """See `CheckpointStore`."""
        shutil.rmtree(self.root / name, ignore_errors=True)

    def leftovers(self) -> list[tuple[str, str]]:
        """See `CheckpointStore`."""
        found = [re.fullmatch(r"\.(?:tmp|old)-(.+)", path.name) for path in self.root.glob(".*-*")]
        return [(match[0], match[1]) for match in found if match]


@contextlib.contextmanager
def write_and_fsync(path: Path) -> Iterator[BinaryIO]:
    """Write a file in the block; at its end the bytes are on the disk. Raises `CheckpointError` (disk full, ...)."""
    with _write_errors(path), open(path, "wb") as file:
        yield file
        file.flush()
        os.fsync(file.fileno())


@contextlib.contextmanager
def _write_errors(path: Path) -> Iterator[None]:
    """Turn errors of the file system inside into a `CheckpointError` that says `path` cannot be written."""
    try:
        yield
    except OSError as error:
        raise CheckpointError(
            f"cannot write {path}: {error.strerror or error}",
            cure=cure_of_os_error(error, "free disk space or set run_dir to a disk that has some"),
        ) from error


def _sync(folder: Path) -> None:
    descriptor = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


# -- from a location's text to what lies there ---------------------------------------------------------------------------------


def _open_folder(location: str) -> CheckpointStore:
    return LocalCheckpointStore(local_path_of_file_uri(location, "the location of checkpoints") or Path(location))


def _open_with_pyarrow(location: str) -> CheckpointStore:
    return PyarrowStore(parse_storage_uri(location, "the location of checkpoints"))


STORES: dict[str, Callable[[str], CheckpointStore]] = {
    "": _open_folder,
    "file": _open_folder,
    **dict.fromkeys(SCHEMES, _open_with_pyarrow),
}
"""Scheme of a location's URL (none: it is a path) -> opens the store at a location."""
_URL = re.compile(r"([A-Za-z][A-Za-z0-9+.-]+):/")
"""`s3://...`, also with one slash: that is what `pathlib.Path` makes of it."""

Location = str | os.PathLike[str]


def storage_scheme(location: Location) -> str:
    """The scheme of a location that is a URL, such as `s3`; empty for a path."""
    found = _URL.match(os.fspath(location))
    return found[1] if found else ""


def unknown_storage_error(location: Location, what: str) -> ConfigError:
    """The error for a URL of a storage that raypar does not know. `what`: the argument or key that gave it."""
    shown = os.fspath(location).partition("?")[0]
    known = ", ".join(f"{scheme}://" for scheme in STORES if scheme not in ("", FILESYSTEM_SCHEME))
    return ConfigError(
        f"{what} is {shown!r}: raypar does not read or write {storage_scheme(location)} storage",
        cure=f"give the path of a folder (on a cluster, of storage that all nodes have mounted), or a URI: {known}",
    )


def open_checkpoint_store(location: Location, what: str = "the location of checkpoints") -> CheckpointStore:
    """The store at a location, which need not exist yet. Raises `ConfigError` for a URL of a storage that is not there.

    `what`: the argument or key that gave the location, for the error.
    """
    opener = STORES.get(storage_scheme(location))
    if opener is None:
        raise unknown_storage_error(location, what)
    return opener(os.fspath(location))


def open_checkpoint(location: Location, what: str = "the checkpoint") -> CheckpointRef:
    """The checkpoint at a location, which need not exist. Raises as `open_checkpoint_store` does."""
    text = os.fspath(location)
    if isinstance(text, str) and text.endswith(OF_AVERAGES):
        return replace(open_checkpoint(text.removesuffix(OF_AVERAGES), what), averages=True)
    if scheme := storage_scheme(location):
        if scheme not in STORES:
            raise unknown_storage_error(location, what)
        place, mark, settings = os.fspath(location).partition("?")
        store, _, name = place.rstrip("/").rpartition("/")
        return CheckpointRef(open_checkpoint_store(store + mark + settings, what), name)
    path = Path(location)
    return CheckpointRef(LocalCheckpointStore(path.parent), path.name)
