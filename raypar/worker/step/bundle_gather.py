"""Bundles that travel in parts between nodes (`plan.bundle_parts`): what is sent of them, and how the receivers gather them.

The first message of such a bundle is a description: integers in host memory, which say of each tensor whether it is cut, and if
so its shape, strides and place. The tensors follow, each whole or as this receiver's run of elements, in the order in which
they lie in memory. The receivers of a replica gather the runs in memory of the whole tensor's place, so that it has the same
strides and place as if it had come whole. A gather is posted where layers on shards would post theirs, at the inputs of an
instruction that all shards compute together: in one order everywhere.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, field

import torch
from torch import Tensor

from raypar.comm.buffer_pool import BufferPool
from raypar.comm.collectives import even_slices
from raypar.comm.routine import Routine, RoutineWait, StreamWaits
from raypar.comm.sent_tensor_layout import Allocate, TensorLayout, empty_message, layout_of, message_of, tensor_of_message
from raypar.comm.transport import SHARD_CHANNELS, Handle, Transport
from raypar.plan import MicrobatchRouting, bundle_parts

_WHOLE = -1
"""In a description, in the place of the number of dims: this tensor travels whole."""


def is_cut(tensor: Tensor, layout: TensorLayout | None) -> bool:
    """Whether a tensor of a bundle in parts is cut: its message is large, and it has floating point numbers and no gaps."""
    elements = tensor.numel() if layout is None else math.prod(layout.sent_shape)
    large = elements * tensor.itemsize >= bundle_parts.LEAST_BYTES_IN_PARTS
    return large and tensor.is_floating_point() and (layout is None or layout.is_dense)


def cut_bundle(tensors: Sequence[Tensor], part: int, parts: int) -> tuple[Tensor, list[Tensor]]:
    """The description of a bundle, and what the receiver of one part gets of each tensor."""
    description, messages = list[int](), list[Tensor]()
    for tensor in tensors:
        layout = layout_of(tensor)
        if not is_cut(tensor, layout):
            description.append(_WHOLE)
            messages.append(tensor)
            continue
        description += [tensor.dim(), tensor.requires_grad, layout is not None, *tensor.shape]
        description += [] if layout is None else [*layout.strides, layout.offset]
        message = message_of(tensor, layout).detach().view(-1)
        start, stop = even_slices(message.numel(), parts)[part]
        messages.append(message[start:stop])
    return torch.tensor(description, dtype=torch.int64, device="cpu"), messages


@dataclass(frozen=True, slots=True)
class CutTensor:
    """A tensor that has come in parts, as its description says."""

    shape: tuple[int, ...]
    requires_grad: bool
    layout: TensorLayout | None
    """How the sender's tensor lies; None: as a new tensor."""


def read_description(description: Tensor) -> list[CutTensor | None]:
    """By tensor of a bundle in parts: what has been cut; None for one that travels whole."""
    numbers, at, found = [int(number) for number in description], 0, list[CutTensor | None]()
    while at < len(numbers):
        dims = numbers[at]
        if dims == _WHOLE:
            found.append(None)
            at += 1
            continue
        requires_grad, laid_out = bool(numbers[at + 1]), bool(numbers[at + 2])
        shape, behind = tuple(numbers[at + 3 : at + 3 + dims]), at + 3 + dims
        layout = TensorLayout(shape, tuple(numbers[behind : behind + dims]), numbers[behind + dims]) if laid_out else None
        found.append(CutTensor(shape, requires_grad, layout))
        at = behind + (dims + 1) * laid_out
    return found


@dataclass
class BundleGather:
    """One worker's bundles in parts, under one plan."""

    routing: MicrobatchRouting
    """Which replica runs which microbatch."""
    nodes: Sequence[int]
    """By rank: the number of its node; empty: all travels whole, as on one node."""
    transport: Transport
    stream_waits: StreamWaits
    """What only the stream waits for."""
    _pool: BufferPool = field(default_factory=BufferPool)
    """Host memory of whole tensors."""

    def __post_init__(self) -> None:
        if len(set(self.nodes)) == 1:
            self.nodes = ()

    def in_parts(self, maker: int, user: int, microbatch: int) -> bool:
        """Whether what stage `maker` makes of a microbatch travels in parts to stage `user`."""
        if not self.nodes:
            return False
        ranks = self.routing.ranks
        return bundle_parts.travels_in_parts(ranks(maker, microbatch), ranks(user, microbatch), self.nodes)

    def gather(self, stage: int, microbatch: int, came: Sequence[Tensor], what: str) -> Routine[list[Tensor]]:
        """The tensors of a bundle for a stage here, of which the description and this worker's parts have come."""
        group, described = self.routing.ranks(stage, microbatch), read_description(came[0])
        under_way = list[tuple[Handle, int, CutTensor, Tensor]]()
        tensors = list(came[1:])
        for index, (part, cut) in enumerate(zip(tensors, described, strict=True)):
            if cut is None:
                continue
            message = self._room_for(part, cut)
            flat = message.view(-1)
            pieces = [flat[start:stop] for start, stop in even_slices(flat.numel(), len(group))]
            handle = self.transport.all_gather(pieces, part, group=group, channel=SHARD_CHANNELS + stage)
            under_way.append((handle, index, cut, message))
        for handle, index, cut, message in under_way:
            if not handle.done():
                yield RoutineWait(handle, f"the parts of {what}", on_stream=True)
            self.stream_waits.add(handle, f"the parts of {what}")
            whole = message.data if cut.layout is None else tensor_of_message(message, cut.layout, self._allocate_on(message))
            tensors[index] = whole.requires_grad_(cut.requires_grad)
        return tensors

    def _room_for(self, part: Tensor, cut: CutTensor) -> Tensor:
        """Memory for a whole tensor on the device of a part, at the place that the whole is to have."""
        allocate = self._allocate_on(part)
        return allocate(cut.shape, part.dtype) if cut.layout is None else empty_message(cut.layout, part.dtype, allocate)

    def _allocate_on(self, other: Tensor) -> Allocate:
        if other.is_cpu:
            return self._pool.empty
        return lambda shape, dtype: torch.empty(tuple(shape), dtype=dtype, device=other.device)
