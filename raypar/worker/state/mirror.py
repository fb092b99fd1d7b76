"""The mirror: copies of committed states in this worker's memory, of its own state and of the states of its wards.

All workers copy their state right after the same step: together the copies are a mirror snapshot. Each worker sends its copy to
another worker, its keeper, during the steps that follow: in chunks, so that activations never queue behind a whole state. The
workers whose keeper this worker is are its wards. Before a step that ends in the next snapshot a worker votes only when the
copies of the last one have arrived. So once that vote is whole, the last snapshot is complete everywhere, and older ones are
dropped.
"""

from __future__ import annotations

import math
import pickle
import time
import zlib
from collections import deque
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from typing import TypeVar

import torch
from torch import Tensor

from raypar.comm.buffer_pool import BufferPool
from raypar.comm.routine import Routine, RoutineWait, interleave_with_routine
from raypar.comm.transport import Handle, Transport
from raypar.errors import CommError
from raypar.plan.pieces import Digest, Piece
from raypar.worker.checkpoint.state_key import PARAMETER, StateKey
from raypar.worker.state.parameter_state import ParameterSlice, ParameterState, StateByKey, StatePart
from raypar.worker.step.message_tags import mirror_tag
from raypar.worker.step.optimizer_state import Value

T = TypeVar("T")

CHUNKS = 64
"""About how many messages a copy is sent in; a step has about as many moments at which a message can be sent."""
CHUNK_BYTES = (256 << 10, 8 << 20)
"""Fewest and most bytes of a message."""
WINDOW = 2
"""Number of messages of a copy that are on their way at once."""
OWN = -1
"""Key of the copy of this worker's own state, where copies are found by the ward's rank."""


@dataclass(frozen=True, slots=True)
class PackedTensorPlace:
    """Where a tensor lies in a copy's memory."""

    dtype: torch.dtype
    shape: tuple[int, ...]
    start: int
    """Index of its first byte."""


@dataclass(frozen=True)
class StateCopy:
    """Copies of some parameters and buffers, with what the optimizer keeps for them, in one block of memory."""

    entries: tuple[tuple[StatePart, StateKey, PackedTensorPlace | Value], ...]
    """(parameter or buffer, key, place in `memory` or number) of all that is copied."""
    memory: Tensor
    """The bytes of all tensors, without gaps."""
    slices: Mapping[StatePart, ParameterSlice] = field(default_factory=dict)
    """What is cut over shards -> the part of its parameter that it is."""

    @staticmethod
    def of(
        state: Mapping[StatePart, StateByKey], pool: BufferPool, slices: Mapping[StatePart, ParameterSlice] | None = None
    ) -> StateCopy:
        """Copy `state` into memory of `pool`. Tensors with the widest elements come first, so that all are aligned."""
        tensors = [(n, k, v) for n, kept in state.items() for k, v in kept.items() if isinstance(v, Tensor)]
        tensors.sort(key=lambda entry: (-entry[2].dtype.itemsize, *entry[:2]))
        entries: list[tuple[StatePart, StateKey, PackedTensorPlace | Value]] = []
        at = 0
        for name, key, tensor in tensors:
            entries.append((name, key, PackedTensorPlace(tensor.dtype, tuple(tensor.shape), at)))
            at += tensor.nbytes
        entries += [(n, k, v) for n, kept in state.items() for k, v in kept.items() if not isinstance(v, Tensor)]
        copy = StateCopy(tuple(entries), pool.empty((at,), torch.uint8), slices or {})
        with torch.no_grad():
            for (_, _, tensor), (_, _, view) in zip(tensors, copy.values(), strict=False):
                assert isinstance(view, Tensor)
                view.copy_(tensor)
        return copy

    def values(self) -> Iterator[tuple[StatePart, StateKey, Value]]:
        """(parameter or buffer, key, tensor inside `memory` or number) of all that is copied."""
        for name, key, value in self.entries:
            if isinstance(value, PackedTensorPlace):
                stop = value.start + math.prod(value.shape) * value.dtype.itemsize
                yield name, key, self.memory[value.start : stop].view(value.dtype).view(value.shape)
            else:
                yield name, key, value

    def pieces(self) -> Iterator[Piece]:
        """The elements of parameters and buffers that are copied."""
        for name, key, value in self.entries:
            if key == PARAMETER and isinstance(value, PackedTensorPlace):
                place = self.slices.get(name, ParameterSlice())
                for start, stop in place.spans(place.size(value.shape)):
                    yield Piece(name[0], start, stop)

    def holdings(self) -> dict[StatePart, ParameterState]:
        """Parameter or buffer, or a slice of it -> its state; the tensors lie inside `memory`."""
        found: dict[StatePart, StateByKey] = {}
        for part, key, value in self.values():
            found.setdefault(part, {})[key] = value
        slices, whole = self.slices, ParameterSlice()
        return {part: ParameterState(kept, slices.get(part, whole), is_read_only=True) for part, kept in found.items()}

    def digest(self) -> Digest:
        """Two digests of 32 bits: of the list of what is copied, and of the copied bits."""
        rooms = [entry for entry in self.entries if isinstance(entry[2], PackedTensorPlace)]
        numbers = self.entries[len(rooms) :]
        bits = zlib.crc32(self.memory.numpy().data, zlib.crc32(repr(numbers).encode()))
        return zlib.crc32(repr((rooms, sorted(self.slices.items()))).encode()), bits

    @property
    def header(self) -> Tensor:
        """`entries`, the number of bytes and `slices`, pickled: what a keeper has to know before it receives the memory."""
        return torch.frombuffer(bytearray(pickle.dumps((self.entries, self.memory.nbytes, self.slices))), dtype=torch.uint8)


def split_into_chunks(memory: Tensor) -> list[Tensor]:
    """The memory in the chunks in which it is sent; sender and receiver split it alike."""
    least, most = CHUNK_BYTES
    return list(memory.split(min(max(memory.nbytes // CHUNKS, least), most))) if memory.nbytes else []


class PolledRoutine:
    """A routine that advances whenever it is polled, beside other work."""

    def __init__(self, routine: Routine[None]) -> None:
        self._routine = routine
        self._at = next(routine, None)

    def poll(self) -> None:
        """Advance as far as possible without waiting. Errors of communication are left to `finish`."""
        try:
            while isinstance(self._at, RoutineWait) and self._at.handle.done():
                self._at = next(self._routine, None)
        except CommError:
            return

    def finish(self) -> Routine[None]:
        """Run the routine to its end. Raises its errors."""
        while isinstance(self._at, RoutineWait):
            if self._at.handle.done():
                self._at = next(self._routine, None)
            else:
                yield self._at  # `poll` may advance the routine during this wait


@dataclass
class Mirror:
    """One worker's part of the mirror snapshots: its own copies and those of its wards, by the number of steps done."""

    keeper_of: Mapping[int, int] = field(default_factory=dict)
    """Rank -> the rank that is its keeper, in the present generation."""
    rank: int = 0
    """This worker's rank, in the present generation."""
    compares_digests: bool = False
    """Whether other ranks should hold the same state, so that digests are compared."""
    digests: dict[int, Digest] = field(default_factory=dict)
    """Number of steps done -> digest of the copy of this worker's own state; empty if no digests are compared."""
    pool: BufferPool = field(default_factory=BufferPool)
    """The memory of all copies."""
    _snapshots: dict[int, dict[int, StateCopy]] = field(default_factory=dict, init=False)
    """Number of steps done -> ward's rank, or `OWN` -> copy."""
    _complete: int | None = field(default=None, init=False)
    """The last snapshot (its number of steps done) that is known to be complete on all workers."""
    _open: int | None = field(default=None, init=False)
    """The snapshot whose copies are being exchanged; None when there is none."""
    _exchange: list[PolledRoutine] = field(default_factory=list, init=False)
    """Sends this worker's copy and receives its wards'."""
    _seconds: float = field(default=0.0, init=False)
    """Time spent since the last call of `pop_seconds_spent`."""

    @property
    def held_bytes(self) -> int:
        """Bytes of all copies here."""
        return sum(copy.memory.nbytes for copies in self._snapshots.values() for copy in copies.values())

    @property
    def memory_kind(self) -> str:
        """The kind of memory that they take, in reports."""
        return "mirror" if type(self.pool) is BufferPool else "mirror files"

    # -- while a generation runs ---------------------------------------------------------------------------------------------

    def take_snapshot(
        self,
        done: int,
        state: Mapping[StatePart, StateByKey],
        transport: Transport | None,
        slices: Mapping[StatePart, ParameterSlice] | None = None,
    ) -> None:
        """Copy `state`, the state after `done` steps, and begin to exchange copies. Without a transport none are exchanged.

        `slices`: what is cut over shards -> the part of its parameter that it is. Older snapshots are dropped, except for the
        last complete one.
        """
        start = time.perf_counter()
        self._exchange = []
        self._snapshots = {step: copies for step, copies in self._snapshots.items() if step == self._complete}
        own = StateCopy.of(state, self.pool, slices)
        self.digests = {step: digest for step, digest in self.digests.items() if step in self._snapshots}
        if self.compares_digests:
            self.digests[done] = own.digest()
        self._snapshots[done], self._open = {OWN: own}, done
        if transport is not None:
            wards = [ward for ward, keeper in self.keeper_of.items() if keeper == self.rank]
            try:
                if self.rank in self.keeper_of:
                    self._exchange.append(PolledRoutine(self._give(own, done, self.keeper_of[self.rank], transport)))
                self._exchange += [PolledRoutine(self._keep(done, ward, transport)) for ward in wards]
            except CommError:
                self._open = None  # aborted just now: the next generation takes a snapshot at once
        self._seconds += time.perf_counter() - start

    def run_beside_exchange(self, routine: Routine[T]) -> Routine[T]:
        """`routine`, with the exchange advanced wherever it waits or is about to compute."""
        return interleave_with_routine(routine, self.poll)

    def poll(self) -> None:
        """Advance the exchange of copies as far as possible without waiting."""
        if self._exchange:
            start = time.perf_counter()
            for part in self._exchange:
                part.poll()
            self._seconds += 2 * (time.perf_counter() - start)  # receiving costs another thread about as much

    def finish(self) -> Routine[None]:
        """Wait until the exchange of copies is complete, before the vote that precedes the next snapshot. Raises its errors."""
        start, before = time.perf_counter(), self._seconds
        for part in self._exchange:
            yield from part.finish()
        if self._open is not None:
            self._complete, self._open = self._open, None
        self._exchange = []
        self._seconds = before + time.perf_counter() - start

    def pop_seconds_spent(self) -> float:
        """Seconds spent on copies, messages and waiting for messages since the last call; starts again from 0."""
        seconds, self._seconds = self._seconds, 0.0
        return seconds

    def _give(self, own: StateCopy, done: int, keeper: int, transport: Transport) -> Routine[None]:
        window: deque[Handle] = deque()
        for index, tensor in enumerate([own.header, *split_into_chunks(own.memory)]):
            if len(window) == WINDOW:
                yield RoutineWait(window.popleft(), "the mirror's copy to be taken by its keeper")
            window.append(transport.send(tensor, to=keeper, tag=mirror_tag(done, index)))
        for handle in window:
            yield RoutineWait(handle, "the mirror's copy to be taken by its keeper")

    def _keep(self, done: int, ward: int, transport: Transport) -> Routine[None]:
        header = transport.recv(None, source=ward, tag=mirror_tag(done, 0))
        yield RoutineWait(header, f"the list of the mirror's copy of rank {ward}")
        entries, nbytes, slices = pickle.loads(header.tensor().numpy().tobytes())
        copy = StateCopy(entries, self.pool.empty((nbytes,), torch.uint8), slices)
        parts = enumerate(split_into_chunks(copy.memory), 1)
        for handle in [transport.recv(out, source=ward, tag=mirror_tag(done, index)) for index, out in parts]:
            yield RoutineWait(handle, f"the mirror's copy of rank {ward}")
        self._snapshots[done][ward] = copy

    # -- between generations -------------------------------------------------------------------------------------------------

    def give_up_exchange(self) -> None:
        """Drop the copies that have not arrived, because the generation is over."""
        self.poll()
        self._exchange, self._open = [], None

    def pieces(self) -> dict[int, tuple[Piece, ...]]:
        """Number of steps done -> the pieces of that snapshot held here, in copies that have arrived whole."""
        self.poll()
        return {
            step: tuple(sorted({piece for copy in copies.values() for piece in copy.pieces()}))
            for step, copies in self._snapshots.items()
        }

    def state_of_snapshot(self, done: int) -> dict[str, list[ParameterState]]:
        """Parameter or buffer -> the parts of its state after `done` steps held here; the tensors lie inside the copies."""
        self.poll()
        found: dict[str, list[ParameterState]] = {}
        for copy in self._snapshots.get(done, {}).values():
            for (name, _), holding in copy.holdings().items():
                found.setdefault(name, []).append(holding)
        return found
