"""Tar files as a stream of samples, as `webdataset` writes them: members side by side with one basename are a sample."""

from __future__ import annotations

import contextlib
import functools
import hashlib
import importlib
import io
import json
import tarfile
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from typing import Any, BinaryIO, NamedTuple, TypeAlias, cast

import numpy
import torch

from raypar.data.file_list import DataFile, Files, find_data_files
from raypar.errors import DataError
from raypar.files.json_type import Json
from raypar.files.printable_text import shorten

KEY = "__key__"
"""The field with the basename of a sample's members."""
UNPICKLED = ("pyd", "pickle", "pkl", "pth", "pt", "joblib", "dill")
"""Kinds of members that only unpickling would read, which runs what they say."""
MEMBER_BYTES = 1 << 30
"""The largest member that is read."""
PIECED_FILES, PIECES, PIECE_BYTES = 8, 4, 16384
"""Of so many files so many pieces of so many bytes are in the digest: 512 KiB, in a few milliseconds from a disk, and a second
or two from object storage."""
BUFFER_BYTES = 1 << 20
"""How much of a file on shared storage is read at a time."""


def _image(content: bytes) -> torch.Tensor:
    """uint8 [channels, height, width], with the channels that the image has: of a palette its indices."""
    image = importlib.import_module("PIL.Image").open(io.BytesIO(content))
    pixels = torch.from_numpy(numpy.array(image))
    return pixels.unsqueeze(0) if pixels.dim() == 2 else pixels.permute(2, 0, 1).contiguous()


def _array(content: bytes) -> numpy.ndarray:
    found: numpy.ndarray = numpy.load(io.BytesIO(content), allow_pickle=False)
    return found


def _arrays(content: bytes) -> dict[str, numpy.ndarray]:
    with numpy.load(io.BytesIO(content), allow_pickle=False) as found:
        return dict(found)


MemberValue: TypeAlias = "Json | bytes | numpy.ndarray | dict[str, numpy.ndarray] | torch.Tensor"
"""What is made of a member of a tar file."""
_KINDS: dict[str, Callable[[bytes], MemberValue]] = {
    "txt text transcript": lambda content: content.decode(),
    "json jsn": json.loads,
    "cls cls2 class count index inx id": int,
    "npy": _array,
    "npz": _arrays,
    "jpg jpeg png ppm pgm pbm": _image,
}
DECODERS = {kind: decode for kinds, decode in _KINDS.items() for kind in kinds.split()}
"""Last part of a member's name -> what makes a value of its bytes; those of other members are given as they are."""


class TarPlace(NamedTuple):
    """Where the next sample of a stream begins."""

    shard: int
    """Number of the file among those of the stream."""
    offset: int
    """Byte in it at which the sample's first member begins."""


class TarShards(torch.utils.data.IterableDataset[dict[str, MemberValue]]):
    """The samples in tar files, file after file: `7.jpg` and `7.cls` are a sample with the fields `jpg`, `cls` and `__key__`.

    The key of a member is its path up to the first dot in its name, the field what comes after it, in small letters. `files`: a
    path or URI, or several, with wildcards and braces. Stream k of S reads the files k, k + S, ... (`get_worker_info`).
    `fields`: those that are read; by default all. `decode`: whether values are made of the members (`DECODERS`), or they are
    given as bytes. `shuffle_shards`: whether a stream reads its files in another order in each epoch. Members whose name begins
    with a dot or has none belong to no sample. Raises `DataError` for files that cannot be that, and for what would be
    unpickled.
    """

    raypar_thread_safe = True
    """Draws no random numbers for samples: nothing needs to be seeded before one."""

    def __init__(
        self, files: Files, *, fields: Collection[str] | None = None, decode: bool = True, shuffle_shards: bool = False
    ) -> None:
        self.files = find_data_files(files, "tar file")
        self.fields = None if fields is None else frozenset(name.lower() for name in fields)
        self.decode, self.shuffle_shards = decode, shuffle_shards
        self._begin = self._place = TarPlace(0, 0)

    @functools.cached_property
    def raypar_content_digest(self) -> str:
        """Of the sizes of all files and pieces of some, wherever they lie: a run that is resumed with others is told so."""
        sizes = " ".join(str(file.size) for file in self.files)
        return f"{hashlib.blake2b(sizes.encode(), digest_size=8).hexdigest()}+{digest_of_pieces(self.files)}"

    @property
    def num_shards(self) -> int:
        """Into how many streams the samples can be divided."""
        return len(self.files)

    def state_dict(self) -> dict[str, int]:
        """Where the next sample begins."""
        return {"shard": self._place.shard, "offset": self._place.offset}

    def load_state_dict(self, state: Mapping[str, int]) -> None:
        """Let the next iterator begin where `state_dict` said."""
        self._begin = TarPlace(int(state["shard"]), int(state["offset"]))

    def set_epoch(self, epoch: int) -> None:
        """Let the next iterator begin at the first sample."""
        self._begin = TarPlace(0, 0)

    def __iter__(self) -> Iterator[dict[str, MemberValue]]:
        info = torch.utils.data.get_worker_info()
        own = self.files[info.id :: info.num_workers] if info is not None else self.files
        if self.shuffle_shards:
            own = tuple(own[at] for at in torch.randperm(len(own)).tolist())
        self._place, self._begin = self._begin, TarPlace(0, 0)
        return self._samples(own, self._place)

    def _samples(self, files: tuple[DataFile, ...], begin: TarPlace) -> Iterator[dict[str, MemberValue]]:
        for shard in range(begin.shard, len(files)):
            offset = begin.offset if shard == begin.shard else 0
            for after, sample in self._samples_of_file(files[shard], offset):
                self._place = TarPlace(shard, after) if after else TarPlace(shard + 1, 0)
                yield sample

    def _samples_of_file(self, file: DataFile, offset: int) -> Iterator[tuple[int, dict[str, MemberValue]]]:
        """(where the next sample begins, or 0 at the end, a sample), from a byte of the file on."""
        sample: dict[str, MemberValue] = {}
        for at, name, read in _members(file, offset):
            key, field = split_name(name)
            if not field or (self.fields is not None and field not in self.fields):
                continue
            if sample and sample[KEY] != key:
                yield at, sample
                sample = {}
            if field in sample:
                raise DataError(
                    f"{shorten(file.location)} has two members {shorten(name)} in one sample",
                    cure="name members of different samples differently, up to the first dot",
                )
            sample.setdefault(KEY, key)
            sample[field] = self._value(file, name, field, read)
        if sample:
            yield 0, sample

    def _value(self, file: DataFile, name: str, field: str, read: Callable[[], bytes]) -> MemberValue:
        kind = field.rpartition(".")[2]
        if not self.decode:
            return read()
        where = f"member {shorten(name)} of {shorten(file.location)}"
        if kind in UNPICKLED:
            raise DataError(
                f"{where} would have to be unpickled, which runs what the file says",
                cure="write it as .npy, .npz or .json; or leave it out: data.args.fields names the fields that are read",
            )
        if kind not in DECODERS:
            return read()
        content = read()
        try:
            return DECODERS[kind](content)
        except ModuleNotFoundError as error:
            raise DataError(
                f"{where} is an image, and {error.name} is not installed",
                cure="pip install pillow; or set data.args.decode: false, and decode the bytes in data.collate",
            ) from error
        except (OSError, ValueError, EOFError, RecursionError, tarfile.TarError) as error:
            text = (str(error).strip() or type(error).__name__).splitlines()[0]
            raise DataError(
                f"{where} cannot be read as {kind}: {shorten(text)}",
                cure="write it anew, or leave it out: data.args.fields names the fields that are read",
            ) from error


def digest_of_pieces(files: Sequence[DataFile]) -> str:
    """Of `PIECES` pieces of each of `PIECED_FILES` files at most, the first and the last one among them.

    Raises `DataError` for a file that cannot be read.
    """
    found = hashlib.blake2b(digest_size=8)
    for place in sorted({round(at * (len(files) - 1) / (PIECED_FILES - 1)) for at in range(PIECED_FILES)}):
        with files[place].opened() as file:
            for at in range(PIECES):
                file.seek(at * max(0, files[place].size - PIECE_BYTES) // (PIECES - 1))
                found.update(file.read(PIECE_BYTES))
    return found.hexdigest()


def split_name(name: str) -> tuple[str, str]:
    """(key, field) of a member: `a/b.seg.PNG` has the key `a/b` and the field `seg.png`. No field: it belongs to no sample."""
    folder, slash, last = name.rpartition("/")
    base, _, field = last.partition(".")
    return folder + slash + base, field.lower() if base else ""


def _members(file: DataFile, offset: int) -> Iterator[tuple[int, str, Callable[[], bytes]]]:
    """(byte at which it begins, name, function that reads it) of each regular member from a byte of a tar file on.

    Raises `DataError` for links, for a file that is cut off, and for one that is compressed.
    """
    with file.opened() as opened:
        source = opened if isinstance(opened, io.BufferedReader) else io.BufferedReader(cast(Any, opened), BUFFER_BYTES)
        source.seek(offset)
        with _tar_errors(file), tarfile.open(fileobj=source, mode="r:") as tar:
            while (member := tar.next()) is not None:
                tar.members = []  # type: ignore[attr-defined]  # it would keep all
                if member.isdir():
                    continue
                if not member.isreg() or member.size > MEMBER_BYTES:
                    what = f"{member.size:,} bytes long" if member.isreg() else "no regular file"
                    raise DataError(
                        f"member {shorten(member.name)} of {shorten(file.location)} is {what}",
                        cure=f"write regular files of up to {MEMBER_BYTES:,} bytes into it",
                    )
                yield member.offset, member.name, _reader(tar, member, file)
            _refuse_cut_off(source, tar.offset, file)


def _reader(tar: tarfile.TarFile, member: tarfile.TarInfo, file: DataFile) -> Callable[[], bytes]:
    def read() -> bytes:
        with _tar_errors(file):
            part = tar.extractfile(member)
            assert part is not None, "it is a regular file"
            return part.read()

    return read


def _refuse_cut_off(source: BinaryIO, offset: int, file: DataFile) -> None:
    """Raise `DataError` for a tar file without the empty block behind its last member: `tarfile` takes any end for the end."""
    source.seek(offset)
    if source.read(tarfile.BLOCKSIZE) != bytes(tarfile.BLOCKSIZE):
        raise _damaged(file, f"behind byte {offset:,}")


@contextlib.contextmanager
def _tar_errors(file: DataFile) -> Iterator[None]:
    """Turns what reading a tar file raises into `DataError`."""
    try:
        yield
    except (OSError, tarfile.TarError) as error:
        raise _damaged(file, (str(error) or type(error).__name__).splitlines()[0]) from error


def _damaged(file: DataFile, why: str) -> DataError:
    if file.location.endswith(("gz", "bz2", "xz", "zst")):
        return DataError(
            f"tar file {shorten(file.location)} is compressed", cure="decompress it: its members are read by their places"
        )
    return DataError(
        f"tar file {shorten(file.location)} is cut off, damaged or none: {shorten(why)}", cure="copy or write it anew"
    )
