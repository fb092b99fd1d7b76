"""The mirror: copies of committed states in memory, this worker's own and those of the workers it keeps for (DESIGN 4.8).

A cut is taken by all workers right after the same step. The own copy is made at once; what the keeper gets leaves from that
copy beside the following steps, in chunks, so that activations never queue behind a whole state. The vote of the step that
takes the next cut waits for it: so a whole vote says that the last cut is complete everywhere, and only then older ones go.
"""

from __future__ import annotations

import math
import pickle
import time
import zlib
from collections import deque
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from raypar.comm.buffer_pool import BufferPool
from raypar.comm.transport import Handle, Routine, Transport, Wait
from raypar.errors import CommError
from raypar.plan.pieces import Digest, Piece
from raypar.worker.checkpoint import PARAMETER
from raypar.worker.parameter_state import Kept, ParameterSlice, ParameterState
from raypar.worker.tags import mirror_tag

CHUNKS = 64
"""A copy travels in about so many messages: a step has that many moments at which the next one can be sent."""
CHUNK_BYTES = (256 << 10, 8 << 20)
"""Least and most."""
WINDOW = 2
"""Chunks on their way at once."""
WHOLE = ParameterSlice()
OWN = -1
"""Whose copy it is: this worker's, or that of a rank."""


@dataclass(frozen=True, slots=True)
class TensorRegion:
    """Where a tensor lies in a copy's memory: `shape`, and bytes from `start`."""

    dtype: torch.dtype
    shape: tuple[int, ...]
    start: int


@dataclass(frozen=True)
class StateCopy:
    """Some parameters and their optimizer state in one block of memory [bytes], without gaps; numbers lie in the list."""

    lines: tuple[tuple[str, str, Any], ...]
    """(parameter, key, `TensorRegion` or number)"""
    memory: Tensor
    slices: Mapping[str, ParameterSlice] = field(default_factory=dict)
    """Which part it is of parameters that are cut over shards."""

    @staticmethod
    def of(state: Mapping[str, Kept], pool: BufferPool, slices: Mapping[str, ParameterSlice] | None = None) -> StateCopy:
        """A copy in memory of `pool`. Wide elements come first, so that all are aligned; the order is that of names."""
        tensors = [(n, k, v) for n, kept in state.items() for k, v in kept.items() if isinstance(v, Tensor)]
        tensors.sort(key=lambda entry: (-entry[2].dtype.itemsize, *entry[:2]))
        lines: list[tuple[str, str, Any]] = []
        at = 0
        for name, key, tensor in tensors:
            lines.append((name, key, TensorRegion(tensor.dtype, tuple(tensor.shape), at)))
            at += tensor.nbytes
        lines += [(n, k, v) for n, kept in state.items() for k, v in kept.items() if not isinstance(v, Tensor)]
        copy = StateCopy(tuple(lines), pool.empty((at,), torch.uint8), slices or {})
        with torch.no_grad():
            for (_, _, tensor), (_, _, view) in zip(tensors, copy.values(), strict=False):
                view.copy_(tensor)
        return copy

    def values(self) -> Iterator[tuple[str, str, Any]]:
        """(parameter, key, tensor that lies in the memory, or number)"""
        for name, key, value in self.lines:
            if isinstance(value, TensorRegion):
                stop = value.start + math.prod(value.shape) * value.dtype.itemsize
                yield name, key, self.memory[value.start : stop].view(value.dtype).view(value.shape)
            else:
                yield name, key, value

    def pieces(self) -> Iterator[Piece]:
        """The elements of parameters that it holds."""
        for name, key, value in self.lines:
            if key == PARAMETER:
                place = self.slices.get(name, WHOLE)
                for start, stop in place.spans(place.size(value.shape)):
                    yield Piece(name, start, stop)

    def holdings(self) -> dict[str, ParameterState]:
        """By parameter; the tensors lie in the memory."""
        found: dict[str, Kept] = {}
        for name, key, value in self.values():
            found.setdefault(name, {})[key] = value
        return {name: ParameterState(kept, self.slices.get(name, WHOLE), lent=True) for name, kept in found.items()}

    def digest(self) -> Digest:
        """32 bits each; the second depend on every bit and its place."""
        rooms = [line for line in self.lines if isinstance(line[2], TensorRegion)]
        numbers = self.lines[len(rooms) :]
        bits = zlib.crc32(memoryview(self.memory.numpy()), zlib.crc32(repr(numbers).encode()))
        return zlib.crc32(repr((rooms, sorted(self.slices.items()))).encode()), bits

    @property
    def header(self) -> Tensor:
        """The list, the number of bytes and which slices it is, as bytes."""
        return torch.frombuffer(bytearray(pickle.dumps((self.lines, self.memory.nbytes, self.slices))), dtype=torch.uint8)


def memory_chunks(memory: Tensor) -> list[Tensor]:
    """The memory [bytes] in the pieces in which it travels; the same at both ends."""
    least, most = CHUNK_BYTES
    return list(memory.split(min(max(memory.nbytes // CHUNKS, least), most))) if memory.nbytes else []


class BackgroundRoutine:
    """A routine that goes on whenever it is polled, beside other work."""

    def __init__(self, routine: Routine[None]) -> None:
        self._routine = routine
        self._at = next(routine, None)

    def poll(self) -> None:
        """As far as it can without waiting. An error stays for `finish`."""
        try:
            while isinstance(self._at, Wait) and self._at.handle.done():
                self._at = next(self._routine, None)
        except CommError:
            return

    def finish(self) -> Routine[None]:
        """To its end."""
        while isinstance(self._at, Wait):
            if self._at.handle.done():
                self._at = next(self._routine, None)
            else:
                yield self._at  # it may be polled meanwhile, and stand elsewhere afterwards


@dataclass
class Mirror:
    """The cuts of one worker. `buddies`: rank -> rank that keeps its copy, in the present generation; `rank`: this one's;
    `compared`: others should hold the same as this one. `digests`: steps done -> of the own copy, where it is compared."""

    buddies: Mapping[int, int] = field(default_factory=dict)
    rank: int = 0
    compared: bool = False
    digests: dict[int, Digest] = field(default_factory=dict)

    def __post_init__(self) -> None:
        self._pool = BufferPool()
        self._cuts: dict[int, dict[int, StateCopy]] = {}
        """Steps done -> whose -> copy."""
        self._complete: int | None = None
        """The last cut that is known to be complete everywhere."""
        self._open: int | None = None
        self._exchange: list[BackgroundRoutine] = []
        self._seconds = 0.0

    # -- while a generation runs ---------------------------------------------------------------------------------------------

    def take(
        self,
        done: int,
        state: Mapping[str, Kept],
        transport: Transport | None,
        slices: Mapping[str, ParameterSlice] | None = None,
    ) -> None:
        """Copy `state`, that after `done` steps, and begin to exchange copies; without a transport there is only the own one.
        `slices`: which part it is of parameters that are cut over shards.

        Cuts older than the last complete one go: the vote before this said that it is complete everywhere.
        """
        start = time.perf_counter()
        self._exchange = []
        self._cuts = {step: copies for step, copies in self._cuts.items() if step == self._complete}
        own = StateCopy.of(state, self._pool, slices)
        self.digests = {step: digest for step, digest in self.digests.items() if step in self._cuts}
        if self.compared:
            self.digests[done] = own.digest()
        self._cuts[done], self._open = {OWN: own}, done
        if transport is not None:
            wards = [ward for ward, keeper in self.buddies.items() if keeper == self.rank]
            try:
                if self.rank in self.buddies:
                    self._exchange.append(BackgroundRoutine(self._give(own, done, self.buddies[self.rank], transport)))
                self._exchange += [BackgroundRoutine(self._keep(done, ward, transport)) for ward in wards]
            except CommError:
                self._open = None  # aborted just now: the next generation takes a cut at once
        self._seconds += time.perf_counter() - start

    def beside(self, routine: Routine[Any]) -> Routine[Any]:
        """`routine`, with the exchange going on wherever it waits or is about to compute."""
        failed: Exception | None = None
        while True:
            try:
                operation = next(routine) if failed is None else routine.throw(failed)
            except StopIteration as end:
                return end.value
            failed = None
            self.poll()
            try:
                yield operation
            except Exception as error:
                failed = error

    def poll(self) -> None:
        """Go on with the exchange."""
        if self._exchange:
            start = time.perf_counter()
            for part in self._exchange:
                part.poll()
            self._seconds += 2 * (time.perf_counter() - start)  # receiving costs another thread about as much

    def finish(self) -> Routine[None]:
        """Before the vote on the step that takes the next cut: this one is complete here. Raises what broke the exchange."""
        start, before = time.perf_counter(), self._seconds
        for part in self._exchange:
            yield from part.finish()
        if self._open is not None:
            self._complete, self._open = self._open, None
        self._exchange = []
        self._seconds = before + time.perf_counter() - start

    def spent(self) -> float:
        """Seconds since the last call that went into copies, messages and waiting for them."""
        seconds, self._seconds = self._seconds, 0.0
        return seconds

    def _give(self, own: StateCopy, done: int, keeper: int, transport: Transport) -> Routine[None]:
        window: deque[Handle] = deque()
        for index, tensor in enumerate([own.header, *memory_chunks(own.memory)]):
            if len(window) == WINDOW:
                yield Wait(window.popleft(), "the mirror's copy to be taken by its keeper")
            window.append(transport.send(tensor, to=keeper, tag=mirror_tag(done, index)))
        for handle in window:
            yield Wait(handle, "the mirror's copy to be taken by its keeper")

    def _keep(self, done: int, ward: int, transport: Transport) -> Routine[None]:
        header = transport.recv(None, source=ward, tag=mirror_tag(done, 0))
        yield Wait(header, f"the list of the mirror's copy of rank {ward}")
        lines, nbytes, slices = pickle.loads(header.tensor().numpy().tobytes())
        copy = StateCopy(lines, self._pool.empty((nbytes,), torch.uint8), slices)
        parts = enumerate(memory_chunks(copy.memory), 1)
        for handle in [transport.recv(out, source=ward, tag=mirror_tag(done, index)) for index, out in parts]:
            yield Wait(handle, f"the mirror's copy of rank {ward}")
        self._cuts[done][ward] = copy

    # -- between generations -------------------------------------------------------------------------------------------------

    def leave(self) -> None:
        """The generation is over: what has not arrived will not come."""
        self.poll()
        self._exchange, self._open = [], None

    def pieces(self) -> dict[int, tuple[Piece, ...]]:
        """What is held of each cut, wholly: steps done -> pieces."""
        self.poll()
        return {
            step: tuple(sorted({piece for copy in copies.values() for piece in copy.pieces()}))
            for step, copies in self._cuts.items()
        }

    def at(self, done: int) -> dict[str, list[ParameterState]]:
        """All that is held of one cut, by parameter; the tensors lie in the copies."""
        self.poll()
        found: dict[str, list[ParameterState]] = {}
        for copy in self._cuts.get(done, {}).values():
            for name, holding in copy.holdings().items():
                found.setdefault(name, []).append(holding)
        return found
