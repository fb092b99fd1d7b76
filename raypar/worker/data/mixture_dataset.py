"""The data set of `data.mix`: several map-style data sets as one, whose ids follow each other, or several iterable ones."""

from __future__ import annotations

import hashlib
from collections.abc import Iterator, Sequence
from typing import Protocol

import numpy

from raypar.errors import DataError

Digests = Sequence[str | None]


class _Samples(Protocol):
    def __len__(self) -> int: ...

    def __getitem__(self, index: int, /) -> object: ...


class Mixture:
    """The samples of all sources: those of the first have the ids from 0 on, those of the next one follow.

    In which order they are read is `MixedOrder`'s to say. `digests`: what the sources say of what they hold, or None.
    """

    def __init__(self, sources: Sequence[_Samples], digests: Digests = ()) -> None:
        self.sources = list(sources)
        self._ends = numpy.cumsum([len(source) for source in self.sources])
        self.raypar_thread_safe = all(getattr(source, "raypar_thread_safe", False) for source in self.sources)
        """Whether no source draws random numbers."""
        text = f"{self.sizes} {list(digests)}".encode()
        self.raypar_content_digest = hashlib.blake2b(text, digest_size=8).hexdigest()
        """Of the sources' numbers of samples, and of what those hold that say it."""

    @property
    def sizes(self) -> list[int]:
        """Number of samples of each source."""
        return [len(source) for source in self.sources]

    @property
    def line_about_random_order(self) -> str | None:
        """That of the first source that has one."""
        lines = (getattr(source, "line_about_random_order", None) for source in self.sources)
        return next((line for line in lines if line is not None), None)

    def __len__(self) -> int:
        return int(self._ends[-1])

    def __getitem__(self, index: int) -> object:
        if not 0 <= index < len(self):
            raise IndexError(f"no sample {index}: the sources have {len(self):,} together")
        source = int(numpy.searchsorted(self._ends, index, side="right"))
        return self.sources[source][index - (int(self._ends[source - 1]) if source else 0)]


def known_parts(dataset: object) -> int | None:
    """Into how many parts an iterable data set can be divided, where it says so: `num_shards` of `datasets`."""
    found = getattr(dataset, "num_shards", getattr(dataset, "n_shards", None))
    return found if isinstance(found, int) and not isinstance(found, bool) and found > 0 else None


class StreamMixture:
    """The sources of a mixture of iterable data sets, which `MixedStreamReader` reads. `digests`: see `Mixture`."""

    def __init__(self, sources: Sequence[object], digests: Digests = ()) -> None:
        self.num_shards = min((number for source in sources if (number := known_parts(source)) is not None), default=None)
        """Into how many streams the source with the fewest shards can be divided; None if no source says it."""
        self.sources = tuple(sources)
        """The data sets."""
        self._digests = digests

    @property
    def raypar_content_digest(self) -> str:
        """Of what the sources hold that say it: of the first parts of their digests, and of all."""
        found = list(self._digests)
        first = [one.partition("+")[0] if one is not None else None for one in found]
        texts = dict.fromkeys([f"{first}", f"{found}"])
        return "+".join(hashlib.blake2b(text.encode(), digest_size=8).hexdigest() for text in texts)

    def __iter__(self) -> Iterator[object]:
        raise DataError("data.mix of iterable data sets has no end", cure="give one of its sources as the data set")
