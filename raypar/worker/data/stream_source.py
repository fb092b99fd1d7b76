"""The user's iterable data set as one of several streams sees it: a data set of its own, begun anew for each epoch (rule 1)."""

from __future__ import annotations

import copy
import json
import traceback
import weakref
from collections import deque
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any, Protocol

from raypar.errors import DataError, RayparError, UserCodeError, with_article
from raypar.job import DataConfig
from raypar.plan.seeds import seed_of
from raypar.torch_compat.worker_info import seen_as_worker
from raypar.user_code.stop_signals import reraise_ctrl_c
from raypar.user_code.user_code_errors import error_text
from raypar.worker.data.user_dataset import is_stream, make_dataset
from raypar.worker.process.seed_generators import seed_host_generators
from raypar.worker.process.torch_state_guard import TorchStateGuard


class IterableDataset(Protocol):
    """The user's data set, whose samples can only be read one after the other."""

    def __iter__(self) -> Iterator[object]: ...


_in_use: weakref.WeakValueDictionary[int, object] = weakref.WeakValueDictionary()
"""Data sets of this process that streams have read: each stream needs one of its own, which keeps where it is."""
_without_weak_references: deque[object] = deque(maxlen=256)
"""The last of them that cannot be referred to weakly: iterators of Python's own types."""


@dataclass
class MadeDatasets:
    """What is known of the data sets that a job's function makes, for all its streams in this process."""

    are_iterators: bool = False
    """Whether it returns iterators: then it is called for each stream and epoch, as that worker. Other data sets are made once
    for each stream and divide themselves when they are read, as those of a `DataLoader`, which are made before its workers."""
    original: IterableDataset | None = None
    """A data set of `datasets`, which is copied for each stream: it takes long to make, and little to copy."""
    first_state: str = ""
    """The state of a new data set as JSON, with which a copy of one that was read begins; empty if data sets keep no place."""


class StreamSource:
    """One stream of an iterable data set, as worker `stream` of `streams` of a PyTorch `DataLoader` would read it.

    `begin` opens an epoch, `read` gives its samples. Generators of random numbers are seeded before each call of the data set
    by its place: (epoch, stream), and (epoch, stream, index) for a sample.
    """

    stream: int
    """Number of the stream."""
    streams: int
    """Number of all streams."""
    _seeded_as: int
    """The stream whose seeds are used: the stream's own, unless streams are compared."""
    _spec: DataConfig
    """The data set's function and arguments."""
    _seed: int
    """The job's seed."""
    _guard: TorchStateGuard | None
    """Restores process state that the data set leaves changed."""
    _made: MadeDatasets
    """What all streams know of the data sets that the function makes."""
    _dataset: IterableDataset | None
    """The data set; None before the first epoch. One that is an iterator itself is made anew for each epoch."""
    _iterator: Iterator[object] | None
    """Of the epoch under way; None before the first, and after an error."""
    _epoch: int
    """The epoch under way."""
    _index: int
    """How many samples it has given."""
    _state_at_begin: str | None
    """The state with which the epoch under way was opened, or an empty text, until it has given a sample; else None."""
    _has_loaded: bool
    """Whether a state was loaded into the data set."""
    _seeds_samples: bool
    """Whether generators are seeded before each sample; not for a data set that promises to draw no random numbers."""

    def __init__(
        self,
        spec: DataConfig,
        stream: int,
        streams: int,
        seed: int,
        guard: TorchStateGuard | None = None,
        *,
        seeded_as: int | None = None,
        made: MadeDatasets | None = None,
    ) -> None:
        self.stream, self.streams, self._seeded_as = stream, streams, stream if seeded_as is None else seeded_as
        self._spec, self._seed, self._guard = spec, seed, guard
        self._dataset, self._iterator, self._epoch, self._index = None, None, -1, 0
        self._state_at_begin, self._has_loaded = None, False
        self._seeds_samples, self._made = True, made or MadeDatasets()

    def begin(self, epoch: int, index: int = 0, state: str = "") -> None:
        """Open an epoch at its first sample, or at sample `index`, for which the data set's state is given (`state`).

        Raises `UserCodeError` for what the data set raises.
        """
        self._iterator = None
        if self._dataset is None or self._has_loaded or hasattr(self._dataset, "__next__"):
            self._dataset, self._has_loaded = self._make(), False  # a state that was loaded may stay, as in those of `datasets`
        self._seeds_samples = not getattr(self._dataset, "raypar_thread_safe", False)
        here = seed_of(self._seed, "stream", epoch, self._seeded_as)
        self._epoch, self._index, self._state_at_begin = epoch, index, state
        seed_host_generators(here)
        try:
            with seen_as_worker(self.stream, self.streams, here, self._dataset):
                if hasattr(self._dataset, "set_epoch"):
                    self._dataset.set_epoch(epoch)
                if state:
                    self._has_loaded = True
                    self._dataset.load_state_dict(json.loads(state))  # type: ignore[attr-defined]
                self._iterator = iter(self._dataset)
        except RayparError:
            raise
        except BaseException as error:  # some classes of libraries are no Exception
            raise self._raised(error, f"the beginning of epoch {epoch}") from error
        if self._guard is not None:
            self._guard.check("the data set's __iter__")

    def read(self) -> tuple[object, ...]:
        """The next sample, alone in a tuple; nothing if the epoch has ended. Raises `UserCodeError`."""
        assert self._iterator is not None, "no epoch is open"
        here = seed_of(self._seed, "stream", self._epoch, self._seeded_as, self._index)
        if self._seeds_samples:
            seed_host_generators(here)
        iterator, self._iterator = self._iterator, None  # a generator that has raised is over
        try:
            with seen_as_worker(self.stream, self.streams, here, self._dataset):
                sample = next(iterator)
        except StopIteration:
            return ()
        except RayparError:
            raise
        except BaseException as error:  # some classes of libraries are no Exception
            raise self._raised(error, f"sample {self._index} (epoch {self._epoch})") from error
        if self._guard is not None:
            self._guard.check("the data set's __iter__")
        self._iterator, self._state_at_begin = iterator, None
        self._index += 1
        return (sample,)

    @property
    def skips(self) -> bool:
        """Whether samples of the epoch under way can be skipped without being read."""
        return hasattr(self._iterator, "raypar_skip")

    def skip(self, count: int) -> int:
        """Skip up to `count` samples; how many, 0 if the epoch has ended. Raises `RowsLostError`, `UserCodeError`."""
        iterator, self._iterator = self._iterator, None
        try:
            found: int = iterator.raypar_skip(count)  # type: ignore[union-attr]
        except RayparError:
            raise
        except BaseException as error:  # some classes of libraries are no Exception
            raise self._raised(error, f"sample {self._index} (epoch {self._epoch})") from error
        self._iterator, self._state_at_begin = iterator, None
        self._index += found
        return found

    @property
    def keeps_place(self) -> bool:
        """Whether the data set tells its state, and can begin with it."""
        return _keeps_place(self._dataset)

    @property
    def why_places_are_read_for(self) -> str:
        """Why a place in the stream is found by reading samples, and the cure: in the data set's own words, if it has some."""
        own = getattr(self._dataset, "raypar_why_places_are_read_for", None)
        if isinstance(own, str):
            return own
        why = "the data set's state_dict did not lead there" if self.keeps_place else "the data set has no state_dict"
        cure = "give the data set state_dict and load_state_dict that lead to the next sample (with a buffer of its own in it)"
        return f"{why}\n  cure: {cure}"

    def state(self) -> str:
        """The data set's state as JSON, for `begin`; empty if it has none, or one that JSON does not keep."""
        if self._state_at_begin is not None:  # before its first sample a data set may still tell where it was before
            return self._state_at_begin
        return _state_of(self._dataset)

    def close(self) -> None:
        """Let go of the data set: generators close their files."""
        if (close := getattr(self._dataset, "raypar_close", None)) is not None:
            close()
        self._iterator, self._dataset, self._epoch = None, None, -1

    def _make(self) -> IterableDataset:
        """A data set that no other stream reads. Raises `DataError` for one that cannot be had twice."""
        if self._made.original is not None:
            return copy.deepcopy(self._made.original)
        here = seed_of(self._seed, "stream")  # the same for all streams: they divide what is made here
        seed_host_generators(here)
        made: IterableDataset | None = None if self._made.are_iterators else make_dataset(self._spec)
        self._made.are_iterators = made is None or hasattr(made, "__next__")
        if self._made.are_iterators:
            seed_host_generators(here)
            with seen_as_worker(self.stream, self.streams, here, None):
                made = make_dataset(self._spec)
        assert made is not None
        if not is_stream(made):
            raise DataError(
                f"data set {self._spec.label} is {with_article(type(made).__name__)}, which is read by sample id, and not as "
                f"streams (data.streams: {self.streams})",
                cure="leave data.streams out",
            )
        if _in_use.get(id(made)) is made or any(made is one for one in _without_weak_references):
            if hasattr(made, "__next__"):
                raise DataError(
                    f"data set {self._spec.label} is {with_article(type(made).__name__)}, an iterator that is read once, and "
                    "each stream and epoch begins one",
                    cure="give the function that makes it: it is called for each stream and epoch",
                )
            try:
                made = copy.deepcopy(made)
            except BaseException as error:  # some classes of libraries are no Exception
                reraise_ctrl_c(error)
                raise DataError(
                    f"data set {self._spec.label} is one object for all streams, and cannot be copied: {error_text(error)}",
                    cure="give a function or class that makes a new one at each call",
                ) from error
            if self._made.first_state:  # it may have been read, or have had a state loaded that stays
                made.load_state_dict(json.loads(self._made.first_state))  # type: ignore[attr-defined]
        else:
            self._made.first_state = self._made.first_state or _state_of(made)
        if type(made).__module__.partition(".")[0] == "datasets":
            self._made.original = copy.deepcopy(made)
        try:
            _in_use[id(made)] = made
        except TypeError:
            _without_weak_references.append(made)
        return made

    def _raised(self, error: BaseException, what: str) -> UserCodeError:
        reraise_ctrl_c(error)
        return UserCodeError(
            f"stream {self.stream} of {self.streams}, {what}: "
            f"the data set raised {error_text(error)}\n{traceback.format_exc()}",
            cure="read the data set by itself: for sample in data(): ...; its worker is torch.utils.data.get_worker_info()",
        )


def _keeps_place(dataset: object) -> bool:
    return all(hasattr(dataset, name) for name in ("state_dict", "load_state_dict"))


def _state_of(dataset: Any) -> str:
    """A data set's state as JSON; empty if it has none, or one that JSON does not keep."""
    if not _keeps_place(dataset):
        return ""
    try:
        found = dataset.state_dict()
        text = json.dumps(found)
        return text if json.loads(text) == found else ""
    except BaseException as error:  # of users' code, or of JSON: the place is found by reading then
        reraise_ctrl_c(error)
        return ""
