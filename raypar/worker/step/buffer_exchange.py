"""The exchange of written buffers: at a step's end each replica gets what forward has written into buffers in the others.

One message from each replica of a stage to each other one, in host memory. Shards have whole norms and buffers, all equal, so
each shard exchanges with its own in the other replicas.
"""

from __future__ import annotations

import pickle
from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from raypar.comm.routine import Routine, RoutineWait
from raypar.comm.transport import Handle, Transport
from raypar.worker.stage.buffer_updates import BufferUpdate
from raypar.worker.stage.running_statistics import NormCall
from raypar.worker.stage.stage import Stage
from raypar.worker.step.message_tags import buffers_tag

_LENGTH_BYTES = 8
"""Bytes of the number, at a message's beginning, that says how long its list is."""
_ALIGNMENT = 64
"""The tensors of a message begin at a multiple of so many bytes."""


def exchange_buffer_updates(
    step: int, rank: int, stages: Mapping[int, Stage], groups: Mapping[int, Sequence[int]], transport: Transport
) -> Routine[None]:
    """Give each stage's `buffer_updates` those of its other replicas. `groups`: stage -> ranks of its replicas."""
    sent: list[Handle] = []
    awaited: list[tuple[int, int, Handle]] = []
    for index in sorted(stages):
        others = [other for other in groups[index] if other != rank]
        if not stages[index].buffer_updates or not others:
            continue
        message = pack_updates({name: kept.by_microbatch for name, kept in stages[index].buffer_updates.items()})
        tag = buffers_tag(step, index)
        awaited += [(index, other, transport.recv(None, source=other, tag=tag)) for other in others]
        sent += [transport.send(message, to=other, tag=tag) for other in others]
    for index, other, handle in awaited:
        if not handle.done():
            yield RoutineWait(handle, f"what rank {other} has written into buffers of stage {index} in step {step}")
        kept, device = stages[index].buffer_updates, stages[index].buffer_device
        for name, by_microbatch in unpack_updates(handle.tensor(), device).items():
            kept[name].by_microbatch.update(by_microbatch)
    for handle in sent:
        if not handle.done():
            yield RoutineWait(handle, "what forward has written into buffers to be taken")


Updates = Mapping[str, Mapping[int, BufferUpdate]]
"""Layer -> microbatch -> what its forward has written."""


def pack_updates(updates: Updates) -> Tensor:
    """The updates as one message: the list's length, the list, and the bytes of all tensors, those of the widest dtype first,
    so that each lies where its dtype may."""
    lines: list[tuple[Any, ...]] = []
    tensors: list[Tensor] = []
    for layer, by_microbatch in updates.items():
        for microbatch, update in by_microbatch.items():
            calls = [(c.norm, c.arithmetic, _layout(c.mean), _layout(c.variance)) for c in update.calls]
            written = [(path, _layout(value)) for path, value in update.written.items()]
            lines.append((layer, microbatch, calls, written))
            tensors += [tensor for call in update.calls for tensor in (call.mean, call.variance)]
            tensors += update.written.values()
    text = pickle.dumps(lines)
    text += bytes(-(_LENGTH_BYTES + len(text)) % _ALIGNMENT)  # which a pickle that has ended ignores
    head = torch.frombuffer(bytearray(len(text).to_bytes(_LENGTH_BYTES, "little") + text), dtype=torch.uint8)
    body = [tensor.detach().contiguous().reshape(-1).view(torch.uint8) for tensor in sorted(tensors, key=_width)]
    return torch.cat([head, torch.cat(body).cpu()]) if body else head  # one copy to the host, whatever there is


def unpack_updates(message: Tensor, device: torch.device) -> dict[str, dict[int, BufferUpdate]]:
    """The updates in a message of `pack_updates`, their tensors on `device`, in one piece of memory."""
    length = int.from_bytes(message[:_LENGTH_BYTES].numpy().tobytes(), "little")
    start = _LENGTH_BYTES + length
    lines = pickle.loads(message[_LENGTH_BYTES:start].numpy().tobytes())
    layouts = [
        layout
        for _, _, calls, written in lines
        for layout in (*(each for *_, mean, variance in calls for each in (mean, variance)), *(layout for _, layout in written))
    ]
    tensors = iter(_tensors(message[start:].to(device), layouts))
    found: dict[str, dict[int, BufferUpdate]] = {}
    for layer, microbatch, calls, written in lines:
        made = [NormCall(norm, arithmetic, next(tensors), next(tensors)) for norm, arithmetic, *_ in calls]
        values = {path: next(tensors) for path, _ in written}
        found.setdefault(layer, {})[microbatch] = BufferUpdate(made, values)
    return found


_Layout = tuple[tuple[int, ...], torch.dtype]
"""Shape and dtype of a tensor."""


def _layout(tensor: Tensor) -> _Layout:
    return tuple(tensor.shape), tensor.dtype


def _width(tensor: Tensor) -> int:
    return -tensor.dtype.itemsize


def _tensors(body: Tensor, layouts: Sequence[_Layout]) -> list[Tensor]:
    """The tensors of these layouts, which lie in `body` in the order of their dtypes' widths."""
    found: dict[int, Tensor] = {}
    at = 0
    for place in sorted(range(len(layouts)), key=lambda place: -layouts[place][1].itemsize):
        shape, dtype = layouts[place]
        size = torch.Size(shape).numel() * dtype.itemsize
        found[place] = body[at : at + size].view(dtype).reshape(shape)
        at += size
    return [found[place] for place in range(len(layouts))]
