"""The journal of the samples of streams: a digest of every microbatch, and where epochs begin, as 8 bytes each, by step.

A step that is executed again, in the same run or after a resume, must have read the same. And whoever reads a stream from the
middle on learns here from which epoch on it has to read. A digest of 0 is not known: the only worker that had read the
microbatch died before the driver had heard of it, in a step that the others had applied. The user is told of microbatches that
are read again and cannot be compared.
"""

from __future__ import annotations

import contextlib
import json
import os
import struct
from array import array
from collections import OrderedDict, defaultdict
from collections.abc import Callable, Collection, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from raypar.errors import DataError
from raypar.files.atomic_write import replace_file_atomically
from raypar.files.json_type import Json
from raypar.files.os_error_cure import cure_of_os_error
from raypar.plan.microbatches import Microbatches
from raypar.plan.wording import after_steps, count_noun, word_form
from raypar.worker.data.microbatch_stream_positions import EpochMark, StreamCursor, StreamPositions, StreamsRead
from raypar.worker.data.mixed_order import MixPattern

if TYPE_CHECKING:
    from raypar.actors.messages import RunRequest
    from raypar.storage.run_folder import RunFolder

KEPT_STEPS = 10_000
"""Of so many steps the digests are in memory, to be compared with those of a step that is executed again."""
LOOKED_BACK = 8
"""So many steps before those that may be executed again are read too: a former driver may not have written all of them."""
CURSOR_STEPS, KEPT_CURSORS = 100, 4
"""At most so many steps lie between two cursors; of so many of the last ones, and of the last checkpoints, they are kept."""
TOLD_S, TOLD_SAMPLES = 2.0, 10_000
"""Finding places in streams is told before if it will take longer, or if nobody knows how long, for more samples."""
GIVEN_EPOCHS = 64
"""Workers learn of so many epochs of a stream where they begin."""
_HEADER = struct.Struct("<8sQQQ")
_MAGIC = b"raypar-s"
_RATE = "samples and seconds"
"""Key of cursors.json beside the numbers of streams: how many samples were read, and the seconds that it took."""
_POSITION_BITS = 40
"""Of a mark; the rest is the epoch. A mark of larger numbers is left out: it only saves time."""


def stream_count_of_contract(contract: Mapping[str, Json]) -> int:
    """As how many streams the training data of a job is read; 0 for a map-style data set."""
    data = contract.get("data")
    found = data.get("streams") if isinstance(data, dict) else None
    return found if isinstance(found, int) else 0


def mix_of_contract(contract: Mapping[str, Json]) -> MixPattern | None:
    """Which source has which position, of a job whose data is a mixture."""
    data = contract.get("data")
    mix = data.get("mix") if isinstance(data, dict) else None
    ratios = [one["ratio"] for one in mix if isinstance(one, dict)] if isinstance(mix, list) else []
    return MixPattern.of_ratios([one for one in ratios if isinstance(one, float)]) if ratios else None


class StreamDigestJournal:
    """Digests and epochs by step, in memory and in a file. A file that cannot be written is told once, and training goes on."""

    path: Path
    """The file: a header, then for each step a digest of each microbatch and a mark of each stream; 0: not known. Of a mixture
    the streams of each source are numbered: source * streams + stream."""
    streams: int
    """Number of streams that microbatches read."""
    epochs: dict[int, dict[int, int]]
    """Stream -> epoch -> position of its first sample, of the last epochs."""

    cursors: dict[int, list[StreamCursor]]
    """Stream -> places from which it can be read: the last ones, and those of the last checkpoints."""
    _first: int
    """Nothing is known of the steps before this one."""
    _given: int
    """Samples that data sets have given in the run."""
    _seconds: float
    """Seconds that it took over them, on all workers together."""
    _changed: set[int]
    """Steps of which more is known than the file has, besides the one that is written next."""
    _done: int
    """Number of steps that are done, or of which the file had something: these have been read before."""

    def __init__(
        self,
        path: Path,
        cursors_path: Path,
        batching: Microbatches,
        streams: int,
        save_every: int,
        tell: Callable[[str], None],
        mix: MixPattern | None = None,
    ) -> None:
        """`save_every`: steps from one checkpoint to the next; `tell`: gets a line for the user if a file cannot be read or
        written, and of samples that cannot be compared; `mix`: of a mixture, whose sources have streams of their own."""
        self._numbers = range(streams * (mix.source_count if mix is not None else 1))
        self.path, self.streams, self.epochs, self._mix = path, streams, {number: {} for number in self._numbers}, mix
        self.cursors, self._cursors_path, self._save_every = {number: [] for number in self._numbers}, cursors_path, save_every
        self._of_checkpoints: dict[int, list[StreamCursor]] = {number: [] for number in self._numbers}
        self._cursors_to_write = False
        self._microbatches, self._tell = batching.count, tell
        self._records: OrderedDict[int, array[int]] = OrderedDict()
        self._first, self._changed, self._done = 0, set[int](), 0
        self._positions, self._given, self._seconds = StreamPositions(streams, batching), 0, 0.0
        self._told = False

    @staticmethod
    def of_run(request: RunRequest, folder: RunFolder, tell: Callable[[str], None]) -> StreamDigestJournal | None:
        """The journal of a run; None for a map-style data set, and for a run of forward passes, which has no steps."""
        streams, policy = stream_count_of_contract(request.contract), request.policy
        if not streams or policy.forward_passes:
            return None
        mix = mix_of_contract(request.contract)
        return StreamDigestJournal(folder.samples, folder.cursors, request.batching, streams, policy.save_every, tell, mix)

    @property
    def _record_bytes(self) -> int:
        return 8 * (self._microbatches + len(self._numbers))

    @property
    def _header(self) -> bytes:
        return _HEADER.pack(_MAGIC, 1, self._microbatches, len(self._numbers))

    def wants_cursors(self, step: int) -> bool:
        """Whether workers shall note cursors while they read for a step, and ahead for the next one."""
        every = min(self._save_every or CURSOR_STEPS, CURSOR_STEPS)
        return any((following + 1) % every == 0 or self._is_saved(following) for following in (step + 1, step + 2))

    def _is_saved(self, step: int) -> bool:
        """Whether there is a checkpoint after this step. A resume reads this step again, from a cursor before it."""
        return bool(self._save_every) and (step + 1) % self._save_every == 0

    def open(self, done: int) -> None:
        """Read what the file has of the steps from `done` on, and of the last before. A file of another job is begun anew.

        Tells the user if it has nothing of the last step that is done.
        """
        self._read_file(max(0, done - LOOKED_BACK))
        if done and not self.digests(done) and not self._told:
            self._tell(
                f"{self.path} does not say which samples were read before: that the streams give the same again "
                f"{after_steps(done)} cannot be checked\n"
                "  cure: put the file back if there is a copy; else make sure that the data has not changed"
            )

    def _read_file(self, first: int) -> None:
        """Read what the file has of the steps from `first` on; begin it anew if it is not this job's."""
        try:
            with open(self.path, "rb") as file:
                if file.read(_HEADER.size) != self._header:
                    raise FileNotFoundError
                file.seek(_HEADER.size + first * self._record_bytes)
                content = file.read(KEPT_STEPS * self._record_bytes)
            self._read_cursors()
        except FileNotFoundError:
            self._begin_file(first)
            return
        except OSError as error:
            self._tell_once("read", error)
            return
        self._first = first
        for number in range(len(content) // self._record_bytes):
            record = array("Q", content[number * self._record_bytes : (number + 1) * self._record_bytes])
            self._records[first + number] = record
            self._done = first + number + 1
            for stream, mark in enumerate(record[self._microbatches :]):
                self._learn(stream, _unpacked(mark))

    def begin_anew(self, done: int) -> None:
        """Forget what the file has: after `done` steps other data, or other batches, are read. Tells the user what is lost."""
        with contextlib.suppress(OSError):
            if done and self.path.stat().st_size > _HEADER.size:
                self._tell(
                    f"{self.path} forgets which samples were read in the {count_noun(done, 'step')} before: with other data or "
                    "batches they are compared with nothing\n  cure: to keep it, copy the file before such a resume"
                )
        self._begin_file(done)

    def _begin_file(self, done: int) -> None:
        """Write a file in which nothing is known, also not of the steps before `done`, and forget the cursors."""
        self._first = done
        self._write_at(0, self._header, begin=True)
        with contextlib.suppress(OSError):
            self._cursors_path.unlink(missing_ok=True)

    def note(self, step: int, read: StreamsRead) -> DataError | None:
        """Take what a worker has read in a step. The error for a microbatch that was other samples when it was read before."""
        found = {**{(step, m): digest for m, digest in read.digests.items()}, **read.again}
        self._tell_of_unknown(found)
        if (different := self.note_digests(found)) is not None:
            return different
        record = self._record(step)
        self._given, self._seconds = self._given + read.read[0], self._seconds + read.read[1]
        self._cursors_to_write |= self.wants_cursors(step)
        for stream, cursor in read.cursors.items():
            self._keep_cursor(stream, cursor, saved=self._is_saved(step + 1))
        for stream, mark in read.epochs.items():
            record[self._microbatches + stream] = _packed(mark)
            self._learn(stream, mark)
        return None

    def note_digests(self, digests: Mapping[tuple[int, int], int]) -> DataError | None:
        """Take digests of microbatches, by (step, microbatch). The error for one that was other samples when it was read
        before."""
        for (step, microbatch), digest in digests.items():
            if step < self._first:
                continue
            known = self._record(step)
            if known[microbatch] not in (0, digest):
                return DataError(
                    f"step {step + 1}, microbatch {microbatch}: stream {microbatch % self.streams} of {self.streams} gave "
                    "other samples than when it was read before",
                    cure="let the data give the same samples each time that a stream is read: no clock, no network, no random "
                    "numbers but those of the seeded generators of python, numpy and torch",
                )
            if not known[microbatch]:
                known[microbatch] = digest
                self._changed.add(step)
        return None

    def _tell_of_unknown(self, read: Collection[tuple[int, int]]) -> None:
        """Tell the user of the (step, microbatch) in `read` that were read before, and whose digest is not known."""
        unknown = defaultdict[int, list[str]](list)
        for step, microbatch in sorted(read):
            if self._first <= step < self._done and not self._record(step)[microbatch]:
                unknown[step].append(str(microbatch))
        for step, microbatches in unknown.items():
            which = f"{word_form(microbatches, 'microbatch', 'microbatches')} {', '.join(microbatches)}"
            was = word_form(microbatches, "was", "were")
            self._tell(
                f"step {step + 1}, {which} {was} read again, and the samples could not be compared: the worker that had read "
                "them before died without a report"
            )

    def _record(self, step: int) -> array[int]:
        record = self._records.get(step)
        if record is None:
            record = self._records[step] = array("Q", bytes(self._record_bytes))
            while len(self._records) > KEPT_STEPS:
                self._records.popitem(last=False)
        return record

    def _keep_cursor(self, stream: int, cursor: StreamCursor, *, saved: bool) -> None:
        for kept in (self.cursors, self._of_checkpoints) if saved else (self.cursors,):
            kept[stream] = sorted({one.position: one for one in (*kept[stream], cursor)}.values())[-KEPT_CURSORS:]
        self._cursors_to_write = True

    def record(self, step: int) -> tuple[dict[int, bytes], str]:
        """What is known of a step that is done, to be written: its record, those of former steps of which more is known than
        the file has, and all cursors if there are new ones."""
        self._done = max(self._done, step + 1)
        text = json.dumps({**self.known_cursors(), _RATE: (self._given, self._seconds)}) if self._cursors_to_write else ""
        self._cursors_to_write = False
        due = sorted({step, *(at for at in self._changed if at <= step)})
        self._changed.difference_update(due)
        return {at: self._record(at).tobytes() for at in due}, text

    def write(self, known: tuple[dict[int, bytes], str]) -> None:
        """Write what is known of steps to the files."""
        records, cursors = known
        for step, record in records.items():
            self._write_at(_HEADER.size + step * self._record_bytes, record)
        if cursors:
            try:
                replace_file_atomically(self._cursors_path, cursors.encode())
            except OSError as error:
                self._tell_once("written", error)

    def _read_cursors(self) -> None:
        """Read the cursors of a former driver. What is no such file is left out: cursors only save time."""
        try:
            found = json.loads(self._cursors_path.read_bytes())
            given, seconds = found.get(_RATE, (0, 0.0))
            if type(given) is int and type(seconds) is float and given >= 0 and seconds >= 0:
                self._given, self._seconds = given, seconds
            for stream in self._numbers:
                for position, epoch, index, state in found.get(str(stream), ()):
                    if all(type(number) is int and number >= 0 for number in (position, epoch, index)) and type(state) is str:
                        self._of_checkpoints[stream].append(StreamCursor(position, epoch, index, state))
        except (OSError, ValueError, AttributeError, TypeError, RecursionError):
            return

    def known_cursors(self) -> dict[int, tuple[StreamCursor, ...]]:
        """Stream -> places from which it can be read."""
        found = {k: sorted({*self.cursors[k], *self._of_checkpoints[k]}) for k in self._numbers}
        return {stream: tuple(cursors) for stream, cursors in found.items() if cursors}

    def line_about_places(self, done: int, readers: int) -> str | None:
        """A line about the time that it will take to find the places of streams after `done` steps, if that is long.
        `readers`: workers that read at the same time."""
        again = {number: self._samples_before_place(done, number) for number in self._numbers}
        total, longest = sum(again.values()), max(again.values())
        seconds = self._seconds / self._given * total / min(readers, self.streams) if self._given else None
        if total <= TOLD_SAMPLES if seconds is None else seconds <= TOLD_S:
            return None
        how_long = "nobody knows how long that takes"
        if seconds is not None:
            how_long = f"about {seconds:.0f} s at the rate of the run so far, {self._given / self._seconds:,.0f} a second"
        several = len(self._numbers)
        of_each = f"up to {longest:,} samples of each of {several} streams" if several > 1 else f"{longest:,} samples"
        return (
            f"{of_each} are read again to find the place {after_steps(done)}: {how_long}\n"
            "  cure: give the data set state_dict and load_state_dict that lead to the next sample; of a ray.data.Dataset, "
            "read the files that its write_parquet(FOLDER) has written"
        )

    def _samples_before_place(self, done: int, number: int) -> int:
        """How many samples of a stream, of a mixture of a source's, are read in vain to find its place after `done` steps."""
        source, stream = divmod(number, self.streams)
        places = self._positions.leading_to(done, stream)
        start = self._positions.of(*(places[0] if places else (done, stream))).start
        start = start if self._mix is None else self._mix.count(source, start)
        cursors = self.known_cursors().get(number, ()) if self.digests(done) else ()
        known = [*(one.position for one in cursors), *self.epochs[number].values()]
        return start - max((position for position in known if position <= start), default=0)

    def digests(self, done: int) -> dict[int, int]:
        """Microbatch -> digest, of the last of the steps that are done, as far as it is known."""
        return {microbatch: digest for microbatch, digest in enumerate(self.digests_of(done - 1)) if digest}

    def digests_of(self, step: int) -> Sequence[int]:
        """The digest of each microbatch of a step; 0 for one that is not known."""
        record = self._records.get(step)
        return () if record is None else record[: self._microbatches]

    def known_epochs(self) -> dict[int, tuple[EpochMark, ...]]:
        """Stream -> the last epochs, for workers that begin to read it."""
        return {stream: tuple(sorted(epochs.items())) for stream, epochs in self.epochs.items() if epochs}

    def _learn(self, stream: int, mark: EpochMark | None) -> None:
        if mark is not None:
            epochs = self.epochs[stream]
            epochs[mark[0]] = mark[1]
            while len(epochs) > GIVEN_EPOCHS:
                del epochs[min(epochs)]

    def _write_at(self, position: int, content: bytes, *, begin: bool = False) -> None:
        try:
            file = os.open(self.path, os.O_WRONLY | os.O_CREAT | (os.O_TRUNC if begin else 0), 0o644)
            try:
                os.pwrite(file, content, position)
            finally:
                os.close(file)
        except OSError as error:
            self._tell_once("written", error)

    def _tell_once(self, what: str, error: OSError) -> None:
        if not self._told:
            self._told = True
            self._tell(
                f"{self.path} cannot be {what} ({error}): after a resume, samples are not compared with those that were read "
                f"before\n  cure: {cure_of_os_error(error, 'free disk space, or put the run folder back')}"
            )


def _packed(mark: EpochMark) -> int:
    """An epoch and its position in 8 bytes; 0 for one that does not fit."""
    epoch, position = mark
    fits = epoch < 1 << (64 - _POSITION_BITS) and position < 1 << _POSITION_BITS
    return (epoch << _POSITION_BITS) | position if fits else 0


def _unpacked(mark: int) -> EpochMark | None:
    return (mark >> _POSITION_BITS, mark & ((1 << _POSITION_BITS) - 1)) if mark else None
