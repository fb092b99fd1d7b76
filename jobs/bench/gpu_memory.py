"""A transport whose callers hold host memory and whose tensors travel through a device's: the cases of the conformance suite,
which are written for the CPU, then try everything on a GPU."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from raypar.comm.sent_tensor_layout import empty_message, layout_of, message_of, tensor_of_message
from raypar.comm.transport import Handle, Transport

HOST = torch.device("cpu")


def copied(tensor: Tensor, device: torch.device) -> Tensor:
    """A copy on a device, which lies there as the tensor does and requires a gradient if that does."""
    layout = layout_of(tensor)
    message = message_of(tensor.detach(), layout).to(device, copy=True)
    if layout is None:
        return message.requires_grad_(tensor.requires_grad)

    def allocate(shape: Sequence[int], dtype: torch.dtype) -> Tensor:
        return torch.empty(shape, dtype=dtype, device=device)

    there = empty_message(layout, message.dtype, allocate).copy_(message)
    return tensor_of_message(there, layout, allocate).requires_grad_(tensor.requires_grad)


class Fetched:
    """A handle that brings results back: `back` are pairs (on the device, the caller's)."""

    def __init__(self, handle: Handle, device: torch.device, back: Sequence[tuple[Tensor, Tensor | None]]) -> None:
        self._handle, self._device, self._back = handle, device, list(back)
        self._here: list[Tensor] | None = None

    def done(self) -> bool:
        """See `Handle.done`."""
        found = self._handle.done()
        if found:
            self._fetch()
        return found

    def wait(self, timeout_s: float | None = None) -> None:
        """See `Handle.wait`."""
        self._handle.wait(timeout_s)
        self._fetch()

    def wait_on_stream(self, timeout_s: float | None = None) -> None:
        """See `Handle.wait_on_stream`: the caller's tensors are the host's."""
        self.wait(timeout_s)

    def tensor(self) -> Tensor:
        """See `Handle.tensor`."""
        return self.tensors()[0]

    def tensors(self) -> list[Tensor]:
        """See `Handle.tensors`."""
        there = self._handle.tensors()
        given = {id(tensor): own for tensor, own in self._back}
        return [given[id(tensor)] if given.get(id(tensor)) is not None else copied(tensor, HOST) for tensor in there]

    def _fetch(self) -> None:
        if self._here is None:
            self._here = []
            with torch.no_grad():
                for there, own in self._back:
                    if own is not None:
                        own.copy_(there)


class OnDevice:
    """See `Transport`; whatever is given is copied to `device` first."""

    def __init__(self, inner: Transport, device: torch.device) -> None:
        self._inner, self._device = inner, device
        self.rank, self.size, self.generation = inner.rank, inner.size, inner.generation
        self.ledger = inner.ledger

    def _there(self, tensor: Tensor) -> Tensor:
        """A copy; what cannot be moved is left as it is, and refused."""
        return tensor.detach().to(self._device, copy=True) if tensor.is_contiguous() else tensor

    def send(self, tensor: Tensor, *, to: int, tag: int, keep_layout: bool = False) -> Handle:
        """See `Transport.send`."""
        there = copied(tensor, self._device) if keep_layout or tensor.is_contiguous() else tensor
        return self._inner.send(there, to=to, tag=tag, keep_layout=keep_layout)

    def recv(self, out: Tensor | None, *, source: int, tag: int) -> Handle:
        """See `Transport.recv`."""
        there = None if out is None else self._there(out)
        return self._fetched(self._inner.recv(there, source=source, tag=tag), [(there, out)])

    def batch(self, sends: Sequence[tuple[Tensor, int, int]], recvs: Sequence[tuple[Tensor | None, int, int]]) -> Handle:
        """See `Transport.batch`."""
        outs = [None if out is None else self._there(out) for out, _, _ in recvs]
        posted = self._inner.batch(
            [(self._there(tensor), to, tag) for tensor, to, tag in sends],
            [(there, source, tag) for there, (_, source, tag) in zip(outs, recvs, strict=True)],
        )
        return self._fetched(posted, [(there, out) for there, (out, _, _) in zip(outs, recvs, strict=True)])

    def all_reduce(self, flat: Tensor, *, group: Sequence[int], channel: int = 0) -> Handle:
        """See `Transport.all_reduce`."""
        there = self._there(flat)
        return self._fetched(self._inner.all_reduce(there, group=group, channel=channel), [(there, flat)])

    def halving_all_reduce(self, flat: Tensor, scratch: Tensor, *, group: Sequence[int], channel: int = 0) -> Handle:
        """See `Transport.halving_all_reduce`."""
        there = self._there(flat)
        posted = self._inner.halving_all_reduce(there, self._there(scratch), group=group, channel=channel)
        return self._fetched(posted, [(there, flat)])

    def reduce_scatter(self, out: Tensor, pieces: Sequence[Tensor], *, group: Sequence[int], channel: int = 0) -> Handle:
        """See `Transport.reduce_scatter`."""
        there, parts = self._there(out), [self._there(piece) for piece in pieces]
        return self._fetched(self._inner.reduce_scatter(there, parts, group=group, channel=channel), [(there, out)])

    def all_gather(self, pieces: Sequence[Tensor], mine: Tensor, *, group: Sequence[int], channel: int = 0) -> Handle:
        """See `Transport.all_gather`."""
        there = [self._there(piece) for piece in pieces]
        posted = self._inner.all_gather(there, self._there(mine), group=group, channel=channel)
        return self._fetched(posted, list(zip(there, pieces, strict=True)))

    def all_to_all(self, outs: Sequence[Tensor], pieces: Sequence[Tensor], *, group: Sequence[int], channel: int = 0) -> Handle:
        """See `Transport.all_to_all`."""
        there = [self._there(out) for out in outs]
        posted = self._inner.all_to_all(there, [self._there(piece) for piece in pieces], group=group, channel=channel)
        return self._fetched(posted, list(zip(there, outs, strict=True)))

    def broadcast(self, tensor: Tensor, *, root: int, group: Sequence[int], channel: int = 0) -> Handle:
        """See `Transport.broadcast`."""
        there = self._there(tensor)
        return self._fetched(self._inner.broadcast(there, root=root, group=group, channel=channel), [(there, tensor)])

    def barrier(self, *, group: Sequence[int], channel: int = 0) -> Handle:
        """See `Transport.barrier`."""
        return self._inner.barrier(group=group, channel=channel)

    def _fetched(self, handle: Handle, back: Sequence[tuple[Any, Tensor | None]]) -> Handle:
        return Fetched(handle, self._device, [(there, own) for there, own in back if there is not None])
