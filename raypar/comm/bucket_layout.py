"""Which runs of which parameters a bucket of gradients has, and where in its buffer: the cut of all gradients into buckets."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import accumulate, pairwise
from typing import NamedTuple

import torch
from torch import Tensor

from raypar.comm.buffer_pool import ALIGNED, alignment_on
from raypar.comm.collectives import ALIGN, even_slices
from raypar.plan.gradient_exchange import buffer_elements

ShapeAndDtype = tuple[torch.Size, torch.dtype]
Runs = Sequence[tuple[int, int]]
"""Runs of elements [start, stop) of a flattened parameter, ascending."""


class BucketPart(NamedTuple):
    """A run of one parameter's elements in a bucket."""

    parameter: int
    """Its index."""
    start: int
    stop: int
    """Its elements [start, stop), flattened."""
    offset: int
    """The first one's place in the bucket's buffer: where a new tensor might begin."""
    owner: int | None = None
    """The replica that owns the run; None: all get its total."""


@dataclass(frozen=True)
class BucketLayout:
    """What one bucket has, and where each part stands in its flat buffer."""

    dtype: torch.dtype
    parts: tuple[BucketPart, ...]
    """Parameter by parameter, in the order in which they became part of it."""
    shapes: dict[int, torch.Size]
    """Parameter -> its shape, of each that the bucket has a part of."""
    length: int
    """Elements of the buffer."""
    segments: tuple[tuple[int, int], ...] | None = None
    """By replica: the elements of the buffer that it owns, where replicas own runs; None: all get all totals."""

    @property
    def indices(self) -> tuple[int, ...]:
        """The parameters of which the bucket has a part."""
        return tuple(self.shapes)

    @property
    def nbytes(self) -> int:
        """Bytes of the buffer."""
        return self.length * self.dtype.itemsize

    def nbytes_shared_by(self, replica: int) -> int:
        """Bytes that one of two replicas lets the other read in place: all, or what the other one owns."""
        if self.segments is None:
            return self.nbytes
        start, stop = self.segments[1 - replica]
        return (stop - start) * self.dtype.itemsize

    def is_whole(self, part: BucketPart) -> bool:
        """Whether a part is all of its parameter."""
        return part.stop - part.start == self.shapes[part.parameter].numel()

    def view(self, flat: Tensor, part: BucketPart) -> Tensor:
        """A part inside a buffer [length]: in the parameter's shape if it is all of it, else flat."""
        found = flat[part.offset : part.offset + part.stop - part.start]
        return found.view(self.shapes[part.parameter]) if self.is_whole(part) else found


@dataclass(frozen=True)
class BucketRoom:
    """How much memory one bucket may take, with all buffers that its exchange needs."""

    nbytes: int
    """At most so many bytes, if a bucket can be cut that small."""
    subtrees: tuple[int, ...]
    """By replica: the number of its subtree sums."""
    holders: int = 1
    """How many replicas get the total of a run that one of them owns."""
    alignment: int = ALIGNED
    """Bytes: buffers begin at multiples of it."""

    def needed(self, length: int, segments: Sequence[int] | None, itemsize: int) -> int:
        """Bytes that a bucket of `length` elements takes on the replica where it takes most, whichever way it is exchanged.
        `segments`: how many elements each replica owns; None: even shares."""
        held = segments
        if segments is not None and self.holders > 1:
            held = [sum(segments[(r - before) % len(segments)] for before in range(self.holders)) for r in range(len(segments))]
        return (buffer_elements(length, self.subtrees, held) + ALIGN * sum(self.subtrees)) * itemsize

    def bytes_of(self, layout: BucketLayout) -> int:
        """`needed` of a bucket, whose buffers begin at multiples of the alignment."""
        segments = None if layout.segments is None else [stop - start for start, stop in layout.segments]
        return self.needed(layout.length, segments, layout.dtype.itemsize) + self.alignment * (len(self.subtrees) + 3)


Piece = list[tuple[int | None, int, int]]
"""(owner, first element, element behind the last) of runs of one parameter that are in the same bucket."""


class _Bucket:
    """A bucket that is being filled with parts."""

    def __init__(self, dtype: torch.dtype, replicas: int | None, align: int) -> None:
        self.dtype, self.replicas, self.align = dtype, replicas, align
        """`replicas`: their number, where they own runs."""
        self.runs: list[tuple[int, int | None, int, int]] = []
        """(parameter, owner, first element, element behind the last) of each part."""
        self.shapes: dict[int, torch.Size] = {}
        self.taken = [0] * (replicas or 1)
        """Elements of each owner; of all parts, where there are no owners."""

    def add(self, index: int, shape: torch.Size, piece: Piece) -> None:
        """Add runs of a parameter."""
        self.shapes[index], self.taken = shape, self.with_more(piece)
        self.runs += [(index, owner, start, stop) for owner, start, stop in piece]

    def with_more(self, piece: Piece) -> list[int]:
        """`taken` with more runs."""
        found = list(self.taken)
        for owner, start, stop in piece:
            found[owner or 0] += self._padded(stop - start)
        return found

    def needed_with(self, piece: Piece, room: BucketRoom) -> int:
        """Bytes that the bucket needs with more runs."""
        taken = self.with_more(piece)
        return room.needed(sum(taken), None if self.replicas is None else taken, self.dtype.itemsize)

    def fits_with(self, piece: Piece, room: BucketRoom) -> bool:
        """Whether there is room for more runs."""
        return self.needed_with(piece, room) <= room.nbytes

    def _padded(self, size: int) -> int:
        return -(-size // self.align) * self.align

    def layout(self) -> BucketLayout:
        """The bucket: parts side by side, those of each owner together."""
        bounds = [0, *accumulate(self.taken)]
        places, parts = list(bounds), []
        for index, owner, start, stop in self.runs:
            parts.append(BucketPart(index, start, stop, places[owner or 0], owner))
            places[owner or 0] += self._padded(stop - start)
        segments = None if self.replicas is None else tuple(pairwise(bounds))
        return BucketLayout(self.dtype, tuple(parts), self.shapes, bounds[-1], segments)


def bucket_layouts(
    parameters: Sequence[ShapeAndDtype],
    bucket_bytes: int,
    device: torch.device,
    owners: Sequence[Sequence[Runs]] = (),
    *,
    room: BucketRoom,
) -> list[BucketLayout]:
    """Buckets of about `bucket_bytes` and one dtype each, last layer first: the order in which gradients become final.

    `device`: where the buffers will be. `owners`: by parameter, which runs each replica owns; empty: they own none. `room`:
    what a bucket may take at most; larger parameters are cut, each owner's runs alike, so that all owners have something to add
    of each bucket.
    """
    found: list[BucketLayout] = []
    current: _Bucket | None = None
    for index in reversed(range(len(parameters))):
        shape, dtype = parameters[index]
        own = owners[index] if owners else None
        replicas, align = None if own is None else len(own), max(ALIGN, alignment_on(device) // dtype.itemsize)
        for piece in _pieces(_Bucket(dtype, replicas, align), shape, own, room):
            if current is not None:
                full = sum(current.taken) * dtype.itemsize >= bucket_bytes
                if full or dtype != current.dtype or not current.fits_with(piece, room):
                    found.append(current.layout())
                    current = None
            current = current or _Bucket(dtype, replicas, align)
            current.add(index, shape, piece)
    return found if current is None else [*found, current.layout()]


def _pieces(empty: _Bucket, shape: torch.Size, owners: Sequence[Runs] | None, room: BucketRoom) -> list[Piece]:
    """One parameter's runs, as they go into buckets: all into one, or cut into the fewest pieces that fit."""
    whole: Piece = [(None, 0, shape.numel())]
    if owners is not None:
        whole = [(owner, start, stop) for owner, runs in enumerate(owners) for start, stop in runs]
    longest = max((stop - start for _, start, stop in whole), default=0)
    if empty.fits_with(whole, room):
        return [whole]
    count = max(2, empty.needed_with(whole, room) // room.nbytes)
    while not all(empty.fits_with(piece, room) for piece in _cut(whole, count, empty.align)) and count * empty.align < longest:
        count += 1
    return _cut(whole, count, empty.align)


def _cut(whole: Piece, count: int, align: int) -> list[Piece]:
    """Runs cut into `count` nearly equal pieces, each of which has a part of every run that is long enough."""
    cut = [[(owner, start + a, start + b) for a, b in even_slices(stop - start, count, align)] for owner, start, stop in whole]
    pieces = [[run for run in runs if run[1] < run[2]] for runs in zip(*cut, strict=True)]
    return [piece for piece in pieces if piece]
