"""The files that a job names as its data: paths and URIs with wildcards and braces, as one sorted list."""

from __future__ import annotations

import contextlib
import fnmatch
import glob
import itertools
import os
import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import BinaryIO

from raypar.errors import DataError
from raypar.files.printable_text import shorten
from raypar.files.untrusted_files import open_regular_file
from raypar.storage.storage_uri import StorageUri, local_path_of_file_uri, parse_storage_uri

MOST_FILES = 10**6
"""The most files that braces may stand for."""
_BRACES = re.compile(r"\{([^{}]*)\}")
_RANGE = re.compile(r"(\d+)\.\.(\d+)")
_SCHEME = re.compile(r"[A-Za-z][A-Za-z0-9+.-]+:/")
_MAGIC = re.compile(r"[*?\[]")

Files = str | os.PathLike[str] | Sequence[str | os.PathLike[str]]
"""A path or URI, with wildcards and braces or without, or several."""


@dataclass(frozen=True)
class DataFile:
    """A file of samples, on this machine or on shared storage."""

    location: str
    """Its path or URI."""
    size: int
    """Bytes."""
    modified_ns: int
    """When it was written last, in ns since 1970; 0 where the storage does not say."""

    @contextlib.contextmanager
    def opened(self) -> Iterator[BinaryIO]:
        """The file, open for reading at any place. Raises `DataError` if it cannot be opened, or has another size."""
        with _uri_opened(self.location) if _SCHEME.match(self.location) else _path_opened(self.location) as file:
            size = file.seek(0, os.SEEK_END)
            if size != self.size:
                raise DataError(
                    f"{shorten(self.location)} has {size:,} bytes, and it had {self.size:,}",
                    cure="do not change files while a job reads them",
                )
            file.seek(0)
            yield file


def find_data_files(files: Files, what: str) -> tuple[DataFile, ...]:
    """The files that paths and URIs name, sorted by their names, whatever the order in which they were given.

    `*`, `?` and `[...]` stand for parts of names, `**` for folders, as in Python's `glob`; `{000..007}` and `{a,b}` for each of
    these (in URIs `?` begins the settings). `what`: the kind of files, for messages. Raises `DataError` for a name without a
    file and for a file that is named twice, `ConfigError` for URIs of unknown storage.
    """
    found: dict[str, DataFile] = {}
    for given in [files] if isinstance(files, (str, os.PathLike)) else files:
        for pattern in expand_braces(os.fspath(given)):
            for file in _matches(pattern, what):
                one = file.location if _SCHEME.match(file.location) else os.path.abspath(file.location)
                if one in found:
                    raise DataError(
                        f"{what} {shorten(file.location)} is named twice: its samples would be read twice as often",
                        cure="name each file once",
                    )
                found[one] = file
    if not found:
        raise DataError(f"no {what} is named", cure="give the path of one, or a list of paths")
    return tuple(sorted(found.values(), key=lambda file: file.location))


def expand_braces(pattern: str) -> Iterator[str]:
    """`a-{0..2}` is `a-0`, `a-1`, `a-2` with as many digits as the first number has; `{x,y}` is `x` and `y`. Other braces stay.

    Raises `DataError` for more than `MOST_FILES` of them.
    """
    for braces in _BRACES.finditer(pattern):
        if ends := _RANGE.fullmatch(braces[1]):
            first, last, width = int(ends[1]), int(ends[2]), len(ends[1])
            if not 0 <= last - first < MOST_FILES:
                raise DataError(
                    f"{shorten(pattern)}: {{{braces[1]}}} stands for {max(0, last - first + 1):,} numbers",
                    cure=f"give numbers that rise, {MOST_FILES:,} at most: {{000..007}}",
                )
            parts: Iterator[str] = (f"{number:0{width}}" for number in range(first, last + 1))
        elif "," in braces[1]:
            parts = iter(braces[1].split(","))
        else:
            continue
        for part in parts:
            yield from expand_braces(pattern[: braces.start()] + part + pattern[braces.end() :])
        return
    yield pattern


def _matches(pattern: str, what: str) -> Iterator[DataFile]:
    if _SCHEME.match(pattern) and (path := local_path_of_file_uri(pattern, what)) is None:
        yield from _matches_on_storage(parse_storage_uri(pattern, what), what)
        return
    text = str(path) if _SCHEME.match(pattern) else os.path.expanduser(pattern)
    names = [text] if os.path.lexists(text) or not _MAGIC.search(text) else glob.glob(text, recursive=True)
    files = [name for name in names if len(names) == 1 or not os.path.isdir(name)]
    if not files or not os.path.lexists(files[0]):
        raise DataError(f"no {what} is named {shorten(text)}", cure=_cure(text))
    for name in files:
        if os.path.isdir(name):
            raise DataError(f"{what} {shorten(name)} is a folder", cure=f"name the files in it: {shorten(name.rstrip('/'))}/*")
        try:
            status = os.stat(name)
            yield DataFile(name, status.st_size, status.st_mtime_ns)
        except OSError as error:
            raise DataError(f"cannot read {what} {shorten(name)}: {error.strerror or error}", cure=_cure(name)) from error


def _cure(path: str) -> str:
    """The cure for a path without a file: what there is of it."""
    known = Path(path)
    while not known.is_dir() and known != known.parent:
        known = known.parent
    with contextlib.suppress(OSError):
        there = sorted(name for name in os.listdir(known) if not name.startswith("."))[:6]
        return f"correct the path; in {shorten(os.path.abspath(known))} are {', '.join(map(shorten, there)) or 'no files'}"
    return "correct the path"


def _matches_on_storage(uri: StorageUri, what: str) -> Iterator[DataFile]:
    from pyarrow.fs import FileSelector, FileType

    from raypar.storage.filesystems import STORAGE_CURE, open_filesystem, storage_errors

    parts = uri.path.split("/")
    fixed = list(itertools.takewhile(lambda part: not _MAGIC.search(part), parts))
    with storage_errors(f"cannot look for {what} {shorten(str(uri))}", DataError, STORAGE_CURE):
        if fixed == parts:
            filesystem, path = open_filesystem(uri)
            infos = [filesystem.get_file_info(path)]
        else:
            below = parts[len(fixed) :]
            filesystem, path = open_filesystem(StorageUri(uri.scheme, "/".join(fixed), uri.query))
            infos = filesystem.get_file_info(
                FileSelector(path, allow_not_found=True, recursive=len(below) > 1 or "**" in below)
            )
            infos = [info for info in infos if _fits(info.path[len(path) :].strip("/").split("/"), below)]
    files = [info for info in infos if info.type is FileType.File]
    if not files:
        raise DataError(
            f"no {what} is named {shorten(str(uri))}", cure="correct the URI; a folder is named with the files in it: .../*"
        )
    for info in files:
        name = "/".join([*fixed, info.path[len(path) :].strip("/")]).strip("/")
        yield DataFile(str(StorageUri(uri.scheme, name, uri.query)), info.size, info.mtime_ns or 0)


def _fits(names: Sequence[str], patterns: Sequence[str]) -> bool:
    """Whether the parts of a path fit those of a pattern, in which `**` stands for any number of folders."""
    if not patterns or not names:
        return not names and all(pattern == "**" for pattern in patterns)
    if patterns[0] == "**":
        return _fits(names, patterns[1:]) or _fits(names[1:], patterns)
    hidden = names[0].startswith(".") and not patterns[0].startswith(".")
    return not hidden and fnmatch.fnmatchcase(names[0], patterns[0]) and _fits(names[1:], patterns[1:])


@contextlib.contextmanager
def _path_opened(path: str) -> Iterator[BinaryIO]:
    with open_regular_file(Path(path), follow=True, error=DataError, cure="it was there when the data set was made") as file:
        yield file


@contextlib.contextmanager
def _uri_opened(location: str) -> Iterator[BinaryIO]:
    from raypar.storage.filesystems import STORAGE_CURE, open_filesystem, storage_errors

    with storage_errors(f"cannot read {shorten(location)}", DataError, STORAGE_CURE):
        filesystem, path = open_filesystem(parse_storage_uri(location, "the data"))
        file: BinaryIO = filesystem.open_input_file(path)
    with file:
        yield file
