"""The exchange of written buffers: at a step's end each replica gets what forward has written into buffers in the others.

What is written has the same layout in every step as a rule. So each replica tells the others its layout once, with the bytes,
in host memory; from the next step on bytes alone are gathered, where they lie, and a flag before them says whether they are of
that layout. The flags are read with the numbers of the vote, so that no host waits; if any is up, all tell anew. Shards have
whole norms and buffers, all equal, so each shard exchanges with its own in the other replicas.
"""

from __future__ import annotations

import pickle
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import islice
from typing import Any

import torch
from torch import Tensor

from raypar.comm.routine import Routine, RoutineWait, StreamWaits
from raypar.comm.transport import Handle, Transport
from raypar.worker.stage.buffer_updates import BufferUpdate
from raypar.worker.stage.running_statistics import NormCall
from raypar.worker.stage.stage import Stage
from raypar.worker.stage.stage_in_virtual_shards import ShardOfStage
from raypar.worker.step.message_tags import buffers_tag

_LENGTH_BYTES = 8
"""Bytes of the number, at a message's beginning, that says how long its list is."""
_ALIGNMENT = 64
"""The tensors of a message begin at a multiple of so many bytes; a flag takes as many."""

Lines = list[tuple[Any, ...]]
"""What updates consist of: (layer, microbatch, calls of norms, other buffers), with the layouts of their tensors."""


@dataclass
class BufferExchange:
    """One worker's part of the exchange, while a plan lasts."""

    rank: int
    """This worker's rank."""
    stages: Mapping[ShardOfStage, Stage]
    """This worker's stages, each virtual shard of one by itself."""
    groups: Mapping[ShardOfStage, Sequence[int]]
    """Stage -> ranks of its replicas, ascending."""
    channels: Mapping[ShardOfStage, int]
    """Stage -> channel of its collectives over replicas."""
    transport: Transport
    """Connects the workers."""
    stream_waits: StreamWaits
    """What only the stream waits for."""
    _layouts: dict[ShardOfStage, list[Lines]] = field(default_factory=dict)
    """Stage -> by replica: what it has told last."""
    _gathered: dict[ShardOfStage, list[Tensor]] = field(default_factory=dict)
    """Stage -> by replica: flag and bytes, in the step under way."""
    _flags: dict[torch.device, Tensor] = field(default_factory=dict)
    """Device -> a flag that is down."""

    def run(self, step: int) -> Routine[None]:
        """Begin the exchange of a step. Collectives of the reduction over replicas are all posted by then."""
        self._gathered.clear()
        due = [index for index in sorted(self.stages) if self.stages[index].buffer_updates and len(self.groups[index]) > 1]
        for index in due:
            if index in self._layouts:
                yield from self._gather(index)
        yield from self._tell(step, [index for index in due if index not in self._gathered])

    def flags(self) -> list[Tensor]:
        """Tensors without dims, to be read for `finish`."""
        return [piece[:4].view(torch.float32)[0] for pieces in self._gathered.values() for piece in pieces]

    def finish(self, step: int, flags: Iterator[float]) -> Routine[None]:
        """Give each stage's `buffer_updates` those of its other replicas. `flags`: the numbers in `flags`."""
        again = [index for index, pieces in self._gathered.items() if any(list(islice(flags, len(pieces))))]
        for index, pieces in self._gathered.items():
            if index not in again:
                for rank, lines, piece in zip(self.groups[index], self._layouts[index], pieces, strict=True):
                    if rank != self.rank:
                        self._take(index, lines, piece[_ALIGNMENT:])
        self._gathered = {}
        yield from self._tell(step, again)

    def _gather(self, index: ShardOfStage) -> Routine[None]:
        """Gather the bytes of all replicas of a stage, where everybody knows their layouts."""
        stage, group, layouts = self.stages[index], self.groups[index], self._layouts[index]
        mine, device = group.index(self.rank), stage.buffer_device
        pieces = [torch.empty(_ALIGNMENT + _size(lines), dtype=torch.uint8, device=device) for lines in layouts]
        lines, tensors = _described(stage)
        if lines == layouts[mine]:
            if device not in self._flags:
                self._flags[device] = torch.zeros(_ALIGNMENT, dtype=torch.uint8, device=device)
            torch.cat([self._flags[device], *_bytes(tensors)], out=pieces[mine])
        else:
            pieces[mine].zero_()[:4].view(torch.float32).fill_(1.0)
        handle = self.transport.all_gather(pieces, pieces[mine], group=group, channel=self.channels[index])
        what = f"what the replicas of stage {index[0]} have written into buffers"
        yield RoutineWait(handle, what, on_stream=True)
        self.stream_waits.add(handle, what)
        self._gathered[index] = pieces

    def _tell(self, step: int, indices: Collection[ShardOfStage]) -> Routine[None]:
        """Exchange layouts and bytes in host memory."""
        sent: list[Handle] = []
        awaited: list[tuple[ShardOfStage, int, Handle]] = []
        for index in indices:
            others = [other for other in self.groups[index] if other != self.rank]
            lines, tensors = _described(self.stages[index])
            self._layouts[index] = [lines for _ in self.groups[index]]
            message, tag = pack_updates(lines, tensors), buffers_tag(step, *index)
            awaited += [(index, other, self.transport.recv(None, source=other, tag=tag)) for other in others]
            sent += [self.transport.send(message, to=other, tag=tag) for other in others]
        for index, other, handle in awaited:
            if not handle.done():
                yield RoutineWait(handle, f"what rank {other} has written into buffers of stage {index[0]} in step {step}")
            lines, body = unpack_updates(handle.tensor(), self.stages[index].buffer_device)
            self._layouts[index][self.groups[index].index(other)] = lines
            self._take(index, lines, body)
        for handle in sent:
            if not handle.done():
                yield RoutineWait(handle, "what forward has written into buffers to be taken")

    def _take(self, index: ShardOfStage, lines: Lines, body: Tensor) -> None:
        for name, by_microbatch in updates_of(lines, body).items():
            self.stages[index].buffer_updates[name].by_microbatch.update(by_microbatch)


def _described(stage: Stage) -> tuple[Lines, list[Tensor]]:
    return describe_updates({name: kept.by_microbatch for name, kept in stage.buffer_updates.items()})


Updates = Mapping[str, Mapping[int, BufferUpdate]]
"""Layer -> microbatch -> what its forward has written."""


def describe_updates(updates: Updates) -> tuple[Lines, list[Tensor]]:
    """What updates consist of, and their tensors."""
    lines: Lines = []
    tensors: list[Tensor] = []
    for layer, by_microbatch in updates.items():
        for microbatch, update in by_microbatch.items():
            calls = [(c.norm, c.arithmetic, _layout(c.mean), _layout(c.variance)) for c in update.calls]
            written = [(path, _layout(value)) for path, value in update.written.items()]
            lines.append((layer, microbatch, calls, written))
            tensors += [tensor for call in update.calls for tensor in (call.mean, call.variance)]
            tensors += update.written.values()
    return lines, tensors


def pack_updates(lines: Lines, tensors: Sequence[Tensor]) -> Tensor:
    """Updates as one message: the list's length, the list, and the bytes of all tensors."""
    text = pickle.dumps(lines)
    text += bytes(-(_LENGTH_BYTES + len(text)) % _ALIGNMENT)  # which a pickle that has ended ignores
    head = torch.frombuffer(bytearray(len(text).to_bytes(_LENGTH_BYTES, "little") + text), dtype=torch.uint8)
    return torch.cat([head, torch.cat(_bytes(tensors)).cpu()]) if tensors else head  # one copy to the host, whatever there is


def unpack_updates(message: Tensor, device: torch.device) -> tuple[Lines, Tensor]:
    """The list in a message of `pack_updates`, and the tensors' bytes on `device`."""
    length = int.from_bytes(message[:_LENGTH_BYTES].numpy().tobytes(), "little")
    start = _LENGTH_BYTES + length
    return pickle.loads(message[_LENGTH_BYTES:start].numpy().tobytes()), message[start:].to(device)


def updates_of(lines: Lines, body: Tensor) -> dict[str, dict[int, BufferUpdate]]:
    """The updates, their tensors in the memory of `body`."""
    tensors = iter(_tensors(body, _layouts_of(lines)))
    found: dict[str, dict[int, BufferUpdate]] = {}
    for layer, microbatch, calls, written in lines:
        made = [NormCall(norm, arithmetic, next(tensors), next(tensors)) for norm, arithmetic, *_ in calls]
        values = {path: next(tensors) for path, _ in written}
        found.setdefault(layer, {})[microbatch] = BufferUpdate(made, values)
    return found


_Layout = tuple[tuple[int, ...], torch.dtype]
"""Shape and dtype of a tensor."""


def _layouts_of(lines: Lines) -> list[_Layout]:
    return [
        layout
        for _, _, calls, written in lines
        for layout in (*(each for *_, mean, variance in calls for each in (mean, variance)), *(layout for _, layout in written))
    ]


def _size(lines: Lines) -> int:
    return sum(torch.Size(shape).numel() * dtype.itemsize for shape, dtype in _layouts_of(lines))


def _bytes(tensors: Sequence[Tensor]) -> list[Tensor]:
    """The tensors' bytes, those of the widest dtype first, so that each lies where its dtype may."""
    return [tensor.detach().contiguous().reshape(-1).view(torch.uint8) for tensor in sorted(tensors, key=_width)]


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
