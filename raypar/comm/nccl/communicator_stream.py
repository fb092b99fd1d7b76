"""A lane: one NCCL communicator with a stream of its own, for operations that its ranks post in one order.

Each directed pair of ranks has a lane for its messages, each (operation, group, channel) one for its collectives: exactly
what the transport protocol says matches in order. So no call ever waits for the order of another lane, and every operation
that is enqueued waits only for its counterparts, which their ranks enqueue without waiting.
"""

from __future__ import annotations

import threading
from collections.abc import Sequence
from functools import partial

import torch
from torch import Tensor

from raypar.comm.collectives import ONE_PHASE_BYTES, add_in_order, even_slices
from raypar.comm.communicator_key import CommunicatorKey
from raypar.comm.nccl.bindings import NUMBERS, NcclCommunicator
from raypar.comm.nccl.device import Device, Stream


class CommunicatorStream:
    """`me`: this rank's index in the communicator. What is called enqueues only; the caller holds `lock` and the memory."""

    def __init__(self, wire: CommunicatorKey, me: int, communicator: NcclCommunicator, device: Device) -> None:
        self.wire = wire
        self.name = str(wire)
        self.me = me
        self.size = len(wire.members)
        self.communicator = communicator
        self.device = device
        self.stream: Stream = device.stream()
        self.lock = threading.Lock()
        self.calls = 0
        """Operations posted so far; of a lane for messages on the receiving side, received so far."""
        self._token = device.empty((self.size,), torch.int32, self.stream)

    @property
    def others(self) -> list[int]:
        """Indices of the other ranks."""
        return [i for i in range(self.size) if i != self.me]

    def warm_up(self) -> None:
        """Make the connections that NCCL would make at first use, inside the first step."""
        self.stream.run(self._token.zero_)
        if self.wire.operation == "message":
            self.message(self._token[:1])
            return
        token = [self._token[i : i + 1] for i in range(self.size)]
        self.exchange([token[self.me]] * self.size, token)
        self.communicator.all_reduce(self._token.data_ptr(), 1, self._token.dtype, self.stream.handle)

    def message(self, tensor: Tensor) -> list[Tensor]:
        """Send it (index 0) or receive it (index 1)."""
        if not tensor.nbytes:
            return []
        if self.me == 0:
            self.communicator.send(tensor.data_ptr(), tensor.nbytes, 1, self.stream.handle)
        else:
            self.communicator.recv(tensor.data_ptr(), tensor.nbytes, 0, self.stream.handle)
        return []

    def exchange(self, pieces: Sequence[Tensor], outs: Sequence[Tensor]) -> None:
        """`pieces[i]` to the i-th rank, `outs[i]` from it, as one group; the own ones are not touched."""
        with self.communicator.together():
            for i in self.others:
                if pieces[i].nbytes:
                    self.communicator.send(pieces[i].data_ptr(), pieces[i].nbytes, i, self.stream.handle)
                if outs[i].nbytes:
                    self.communicator.recv(outs[i].data_ptr(), outs[i].nbytes, i, self.stream.handle)

    # -- collectives; each (like `message`) returns the scratch memory to be kept until the lane's stream has come by

    def all_reduce(self, flat: Tensor) -> list[Tensor]:
        """Sum in place in rank order. NCCL's own sum of two is that; of more it has the order of a ring, which is another."""
        if self.size == 2 and flat.dtype in NUMBERS:
            self.communicator.all_reduce(flat.data_ptr(), flat.numel(), flat.dtype, self.stream.handle)
            return []
        if flat.nbytes <= ONE_PHASE_BYTES:
            parts = self._scratch(flat)
            self.exchange([flat] * self.size, parts)
            self.stream.run(partial(add_in_order, parts, self.me, flat))
            return parts
        cut = [flat.view(-1)[a:b] for a, b in even_slices(flat.numel(), self.size)]
        parts = self._scratch(cut[self.me])
        self.exchange(cut, parts)
        self.stream.run(partial(add_in_order, parts, self.me, cut[self.me]))
        self.exchange([cut[self.me]] * self.size, cut)
        return parts

    def reduce_scatter(self, out: Tensor, pieces: Sequence[Tensor]) -> list[Tensor]:
        """`out` = the sum of everybody's `pieces[me]`, in rank order."""
        # What decides is known to all ranks alike, so that all call the same: the pieces' sizes, not where they lie.
        if self.size == 2 and out.dtype in NUMBERS and pieces[0].numel() == pieces[1].numel():
            whole, held = self._whole(pieces, filled=True)
            self.communicator.reduce_scatter(whole, out.data_ptr(), out.numel(), out.dtype, self.stream.handle)
            return held
        parts = self._scratch(out)
        parts[self.me] = pieces[self.me]
        self.exchange(pieces, parts)
        self.stream.run(partial(add_in_order, parts, self.me, out))
        return parts

    def all_gather(self, pieces: Sequence[Tensor], mine: Tensor) -> list[Tensor]:
        """`pieces[i]` = `mine` of the i-th rank."""
        if len({piece.nbytes for piece in pieces}) == 1:
            whole, held = self._whole(pieces, filled=False)
            self.communicator.all_gather(mine.data_ptr(), whole, mine.nbytes, self.stream.handle)
            if held:
                for i, piece in enumerate(pieces):
                    self._copy(held[0][i].view(piece.shape), piece)
            return held
        self._copy(mine, pieces[self.me])
        self.exchange([mine] * self.size, pieces)
        return []

    def all_to_all(self, outs: Sequence[Tensor], pieces: Sequence[Tensor]) -> list[Tensor]:
        """`outs[i]` = `pieces[me]` of the i-th rank."""
        self._copy(pieces[self.me], outs[self.me])
        self.exchange(pieces, outs)
        return []

    def broadcast(self, tensor: Tensor, root: int) -> list[Tensor]:
        """`tensor` of the root-th rank, in place."""
        self.communicator.broadcast(tensor.data_ptr(), tensor.nbytes, root, self.stream.handle)
        return []

    def _copy(self, source: Tensor, target: Tensor) -> None:
        """In the stream's turn, unless they are one."""
        if source.data_ptr() != target.data_ptr():
            self.stream.run(partial(target.copy_, source))

    def _scratch(self, like: Tensor) -> list[Tensor]:
        """A buffer for each other rank's part, and `like` itself in our place."""
        return [like if i == self.me else self.device.empty(like.shape, like.dtype, self.stream) for i in range(self.size)]

    def _whole(self, pieces: Sequence[Tensor], *, filled: bool) -> tuple[int, list[Tensor]]:
        """Where pieces of one size lie one behind the other: their own memory if so, else scratch (filled with them)."""
        first, step = pieces[0].data_ptr(), pieces[0].nbytes
        if all(piece.data_ptr() == first + i * step for i, piece in enumerate(pieces)):
            return first, []
        whole = self.device.empty((self.size, pieces[0].numel()), pieces[0].dtype, self.stream)
        if filled:
            for i, piece in enumerate(pieces):
                self._copy(piece, whole[i].view(piece.shape))
        return whole.data_ptr(), [whole]
