"""One NCCL communicator with a stream of its own: carries operations that all its ranks post in the same order.

Each directed pair of ranks has a communicator for its messages, each (operation, group, channel) one for its collectives: the
units of which the transport protocol says that they match in order. So no call waits for the order of another communicator,
and an enqueued operation waits only for its counterparts, which their ranks enqueue without waiting.
"""

from __future__ import annotations

import threading
from collections.abc import Sequence
from functools import partial

import torch
from torch import Tensor

from raypar.comm.collectives import ONE_PHASE_BYTES, even_slices
from raypar.comm.nccl.bindings import NCCL_DTYPES, NcclCommunicator
from raypar.comm.nccl.device import Device, Stream
from raypar.comm.nccl.tree_sum import add_over_tree_on_device
from raypar.comm.recursive_halving import halving_partners, halving_steps
from raypar.comm.transport import CommunicatorKey


class CommunicatorStream:
    """A communicator and its stream. All calls only enqueue; the caller holds `lock`, and keeps the tensors' memory."""

    def __init__(
        self, key: CommunicatorKey, me: int, communicator: NcclCommunicator, device: Device, *, exact: bool = True
    ) -> None:
        self.key = key
        """Names the operations that the communicator carries."""
        self.name = str(key)
        self.own_index = me
        """This rank's index among the members."""
        self.size = len(key.members)
        self.communicator = communicator
        self.exact = exact
        """Whether sums are added over the tree of ranks; else by NCCL, in an order of its own."""
        self.device = device
        self.device_stream: Stream = device.stream()
        self.lock = threading.Lock()
        """Held by the thread that enqueues."""
        self.operation_count = 0
        """Operations enqueued so far."""
        self._token = device.empty((self.size,), torch.int32, self.device_stream)
        """The tensor that `warm_up` sends around."""

    @property
    def others(self) -> list[int]:
        """Indices of the other ranks."""
        return [i for i in range(self.size) if i != self.own_index]

    def warm_up(self) -> None:
        """Make all connections now; NCCL would make them at first use, inside the first step."""
        self.device_stream.run(self._token.zero_)
        if self.key.operation == "message":
            self.send_or_receive(self._token[:1])
            return
        if self.key.operation == "halving_all_reduce":
            for partner in halving_partners(self.own_index, self.size):
                self._swap(partner, self._token[self.own_index :][:1], self._token[partner:][:1])
            return
        token = [self._token[i : i + 1] for i in range(self.size)]
        self.exchange([token[self.own_index]] * self.size, token)
        self.communicator.all_reduce(self._token.data_ptr(), 1, self._token.dtype, self.device_stream.cuda_stream)

    def send_or_receive(self, tensor: Tensor) -> list[Tensor]:
        """Send the tensor (index 0 of the pair) or receive it (index 1)."""
        if not tensor.nbytes:
            return []
        if self.own_index == 0:
            self.communicator.send(tensor.data_ptr(), tensor.nbytes, 1, self.device_stream.cuda_stream)
        else:
            self.communicator.recv(tensor.data_ptr(), tensor.nbytes, 0, self.device_stream.cuda_stream)
        return []

    def exchange(self, pieces: Sequence[Tensor], outs: Sequence[Tensor]) -> None:
        """Send `pieces[i]` to the i-th rank and receive `outs[i]` from it, as one group; this rank's own are not touched."""
        with self.communicator.group_calls():
            for i in self.others:
                if pieces[i].nbytes:
                    self.communicator.send(pieces[i].data_ptr(), pieces[i].nbytes, i, self.device_stream.cuda_stream)
                if outs[i].nbytes:
                    self.communicator.recv(outs[i].data_ptr(), outs[i].nbytes, i, self.device_stream.cuda_stream)

    def _swap(self, partner: int, sent: Tensor, out: Tensor) -> None:
        """Send to one rank and receive from it."""
        pieces, outs = [sent[:0]] * self.size, [out[:0]] * self.size
        pieces[partner], outs[partner] = sent, out
        self.exchange(pieces, outs)

    # -- collectives; each (like `message`) returns scratch memory, to be kept until the stream has done the work

    def all_reduce(self, flat: Tensor) -> list[Tensor]:
        """Sum in place, over the tree of ranks. NCCL sums two ranks in that order; more than two in one of its own."""
        if (self.size == 2 or not self.exact) and flat.dtype in NCCL_DTYPES:
            self.communicator.all_reduce(flat.data_ptr(), flat.numel(), flat.dtype, self.device_stream.cuda_stream)
            return []
        if flat.nbytes <= ONE_PHASE_BYTES:
            parts = self._scratch(flat)
            self.exchange([flat] * self.size, parts)
            self.device_stream.run(partial(add_over_tree_on_device, parts, self.own_index, flat))
            return parts
        cut = [flat.view(-1)[a:b] for a, b in even_slices(flat.numel(), self.size)]
        parts = self._scratch(cut[self.own_index])
        self.exchange(cut, parts)
        self.device_stream.run(partial(add_over_tree_on_device, parts, self.own_index, cut[self.own_index]))
        self.exchange([cut[self.own_index]] * self.size, cut)
        return parts

    def halving_all_reduce(self, flat: Tensor, scratch: Tensor) -> list[Tensor]:
        """Sum in place, by recursive halving and doubling: all in this stream, where each step follows the one before."""
        steps = halving_steps(even_slices(flat.numel(), self.size), self.own_index)
        for step in steps:
            received = scratch[: step.kept.stop - step.kept.start]
            self._swap(step.partner, flat[step.given], received)
            self.device_stream.run(partial(step.add, flat, received, self.own_index))
        for step in reversed(steps):
            self._swap(step.partner, flat[step.kept], flat[step.given])
        return []

    def reduce_scatter(self, out: Tensor, pieces: Sequence[Tensor]) -> list[Tensor]:
        """`out` = the sum over all ranks of their `pieces[me]`, over the tree of ranks, or by NCCL (see `all_reduce`)."""
        # All ranks must choose the same call, so the choice depends on what all know: the pieces' sizes, not their addresses.
        alike = len({piece.numel() for piece in pieces}) == 1
        if (self.size == 2 or not self.exact) and out.dtype in NCCL_DTYPES and alike:
            whole, held = self._whole(pieces, filled=True)
            self.communicator.reduce_scatter(whole, out.data_ptr(), out.numel(), out.dtype, self.device_stream.cuda_stream)
            return held
        parts = self._scratch(out)
        parts[self.own_index] = pieces[self.own_index]
        self.exchange(pieces, parts)
        self.device_stream.run(partial(add_over_tree_on_device, parts, self.own_index, out))
        return parts

    def all_gather(self, pieces: Sequence[Tensor], mine: Tensor) -> list[Tensor]:
        """`pieces[i]` = `mine` of the i-th rank."""
        if len({piece.nbytes for piece in pieces}) == 1:
            whole, held = self._whole(pieces, filled=False)
            self.communicator.all_gather(mine.data_ptr(), whole, mine.nbytes, self.device_stream.cuda_stream)
            if held:
                for i, piece in enumerate(pieces):
                    self._copy(held[0][i].view(piece.shape), piece)
            return held
        self._copy(mine, pieces[self.own_index])
        self.exchange([mine] * self.size, pieces)
        return []

    def all_to_all(self, outs: Sequence[Tensor], pieces: Sequence[Tensor]) -> list[Tensor]:
        """`outs[i]` = `pieces[me]` of the i-th rank."""
        self._copy(pieces[self.own_index], outs[self.own_index])
        self.exchange(pieces, outs)
        return []

    def broadcast(self, tensor: Tensor, root: int) -> list[Tensor]:
        """`tensor` of the root-th rank, in place."""
        self.communicator.broadcast(tensor.data_ptr(), tensor.nbytes, root, self.device_stream.cuda_stream)
        return []

    def _copy(self, source: Tensor, target: Tensor) -> None:
        """Enqueue a copy, unless source and target are one."""
        if source.data_ptr() != target.data_ptr():
            self.device_stream.run(partial(target.copy_, source))

    def _scratch(self, like: Tensor) -> list[Tensor]:
        """A buffer for each other rank's part, and `like` itself for this rank's."""
        return [
            like if i == self.own_index else self.device.empty(like.shape, like.dtype, self.device_stream)
            for i in range(self.size)
        ]

    def _whole(self, pieces: Sequence[Tensor], *, filled: bool) -> tuple[int, list[Tensor]]:
        """(address, memory to keep) of pieces of equal size in one block: their own memory if they are adjacent, else scratch.

        `filled`: copy the pieces into the scratch memory.
        """
        first, step = pieces[0].data_ptr(), pieces[0].nbytes
        if all(piece.data_ptr() == first + i * step for i, piece in enumerate(pieces)):
            return first, []
        whole = self.device.empty((self.size, pieces[0].numel()), pieces[0].dtype, self.device_stream)
        if filled:
            for i, piece in enumerate(pieces):
                self._copy(piece, whole[i].view(piece.shape))
        return whole.data_ptr(), [whole]
