"""The buffer writes of a layer's forward passes, kept per microbatch and applied when the step commits.

Every microbatch of a step begins with the buffers of the step's beginning, so replicas may run microbatches anywhere. At the
commit all holders of a layer make the same new values of the updates of all microbatches, in microbatch order (rule 14 of the
numerics contract). A step that is not applied changes nothing.

Norms with running statistics are served always (`running_statistics.py`), other buffers by the policy of the job
(`model.buffers`), `refuse` by default.
"""

from __future__ import annotations

import contextlib
from collections.abc import Collection, Iterator, Sequence
from dataclasses import dataclass, field

import torch
from torch import Tensor, nn

from raypar.errors import UserCodeError
from raypar.model.graph import BufferPolicy
from raypar.model.layer_skeletons import norms_with_running_statistics
from raypar.torch_compat.modules import NormBase
from raypar.worker.stage.layer_tensors import LayerBuffer
from raypar.worker.stage.running_statistics import (
    STATISTICS,
    NormCall,
    NormCallRecorder,
    check_update_arithmetic,
    fold_norm_calls,
)


@dataclass
class BufferUpdate:
    """What one microbatch's forward through one layer adds to the layer's buffers."""

    calls: list[NormCall] = field(default_factory=list)
    """The calls of norms with running statistics, in order."""
    written: dict[str, Tensor] = field(default_factory=dict)
    """Path of another buffer that the forward has written -> its value afterwards."""


@dataclass(frozen=True)
class _Writable:
    """A buffer that forward may write under the job's policy."""

    buffer: LayerBuffer
    """The buffer as the stage keeps it."""
    places: tuple[tuple[nn.Module, str], ...]
    """(module, key) of every place where the layer has it."""


class BufferUpdates:
    """The updates of one layer's buffers in the step under way."""

    layer: str
    """The layer's name."""
    policy: BufferPolicy
    """What becomes of buffers that no norm has as its running statistics."""
    by_microbatch: dict[int, BufferUpdate]
    """Microbatch -> its update; of the microbatches that ran here, and once exchanged those of all replicas."""
    _norms: dict[str, NormBase]
    """Path -> norm with running statistics."""
    recorders: list[NormCallRecorder]
    """What stands in for the norms' forwards."""
    _writable: dict[str, _Writable]
    """Path -> other buffer; empty under `refuse`."""
    _shared: Collection[str]
    """Qualified names of buffers that several layers have, each a copy of its own here: they may be read only."""
    _written: set[str]
    """Paths of the buffers that a forward here has written so far."""

    def __init__(
        self,
        layer: str,
        module: nn.Module,
        buffers: Sequence[LayerBuffer],
        policy: BufferPolicy,
        shared: Collection[str] = (),
    ) -> None:
        self.layer, self.policy, self.by_microbatch, self._shared = layer, policy, {}, shared
        self._norms = dict(norms_with_running_statistics(module))
        if any(norm.running_mean is not None and norm.running_mean.device.type == "cpu" for norm in self._norms.values()):
            check_update_arithmetic()
        self.recorders = [NormCallRecorder(path, norm) for path, norm in self._norms.items()]
        statistics = {id(norm._buffers[name]) for norm in self._norms.values() for name in STATISTICS}
        others = [buffer for buffer in buffers if id(buffer.tensor) not in statistics] if policy != "refuse" else []
        self._writable = {buffer.path: _Writable(buffer, _places(module, buffer.tensor)) for buffer in others}
        self._written = set()

    @staticmethod
    def of(
        layer: str, module: nn.Module, buffers: Sequence[LayerBuffer], policy: BufferPolicy, shared: Collection[str] = ()
    ) -> BufferUpdates | None:
        """The updates of a layer; None if its forward may write no buffer. `shared`: names of buffers that other layers have
        too."""
        made = BufferUpdates(layer, module, buffers, policy, shared)
        return made if made._norms or made._writable else None

    def begin_step(self) -> None:
        """Forget the last step."""
        self.by_microbatch = {}

    @contextlib.contextmanager
    def recording(self, microbatch: int, *, counts: bool) -> Iterator[None]:
        """Context of the layer's forward in training. `counts`: False for a forward that runs again, whose updates are dropped.

        Raises `UserCodeError` for a buffer that is replaced by something else than a tensor of its shape and dtype.
        """
        update = BufferUpdate()
        for recorder in self.recorders:
            recorder.take = update.calls.append if counts else None
        try:
            with self._copies(tuple(self._writable.values())) as found:
                yield
        finally:
            for recorder in self.recorders:
                recorder.take = recorder.stand_ins = None
        self._written |= set(found)
        if counts:
            update.written = found if self.policy == "sum" else self._without_superseded(microbatch, found)
            self.by_microbatch[microbatch] = update

    def _without_superseded(self, microbatch: int, found: dict[str, Tensor]) -> dict[str, Tensor]:
        """Under `last`: the values in `found` that no later microbatch has written; those of earlier ones are dropped."""
        for other, update in self.by_microbatch.items():
            for path in sorted(found.keys() & update.written.keys()):
                del (found if other > microbatch else update.written)[path]
        return found

    def refusing(self) -> contextlib.AbstractContextManager[None]:
        """Context of a backward pass, in which activation checkpointing may run forward again: it may write no buffer but
        running statistics.

        Raises `UserCodeError` if it does: what the first forward began with is not known for the parts that run again.
        """
        return self._refusing() if self._written else contextlib.nullcontext()

    @contextlib.contextmanager
    def _refusing(self) -> Iterator[None]:
        with self._copies([self._writable[path] for path in sorted(self._written)]) as found:
            yield
        if found:
            raise UserCodeError(
                f"layer {self.layer!r} writes its buffer {next(iter(found))!r} when activation checkpointing runs its forward "
                "again in the backward pass: it would begin with another value than the first time",
                cure="leave this part of the layer out of torch.utils.checkpoint, and name the layer in plan.recompute instead",
            )

    @contextlib.contextmanager
    def _copies(self, buffers: Sequence[_Writable]) -> Iterator[dict[str, Tensor]]:
        """Context in which the layer has copies of these buffers. Yields a dict that afterwards has what was written: path ->
        value. Non-persistent buffers that forward replaces are caches, and stay replaced."""
        made = [(each, _copy_of(each.buffer.tensor)) for each in buffers if _is_in_place(each)]
        for each, copy in made:
            _put(each, copy)
        versions = [copy._version for _, copy in made]
        found: dict[str, Tensor] = {}
        written: dict[str, Tensor | None] = {}
        try:
            yield found
        finally:
            for (each, copy), version in zip(made, versions, strict=True):
                now = each.buffer.owner._buffers.get(each.buffer.key)
                if now is not copy and not each.buffer.persistent:
                    continue
                _put(each, each.buffer.tensor)
                if now is not copy or copy._version != version or not same_bits(copy, each.buffer.tensor):
                    written[each.buffer.path] = now
        found.update({path: self._checked(self._writable[path].buffer, value) for path, value in written.items()})

    def _checked(self, buffer: LayerBuffer, value: Tensor | None) -> Tensor:
        """The value that forward has written. Raises `UserCodeError` for one that cannot be the buffer's."""
        tensor = buffer.tensor
        if value is None or value.shape != tensor.shape or value.dtype != tensor.dtype:
            now = "nothing" if value is None else f"{list(value.shape)} {value.dtype}"
            raise UserCodeError(
                f"layer {self.layer!r} replaces its buffer {buffer.path!r}, {list(tensor.shape)} {tensor.dtype}, by {now} in "
                "forward",
                cure="keep its shape and dtype, or register a buffer that is only a cache with persistent=False",
            )
        if f"{self.layer}.{buffer.path}" in self._shared:
            raise UserCodeError(
                f"layer {self.layer!r} writes its buffer {buffer.path!r}, which another layer has too and would not see",
                cure="put the layers that share it into one layer, or make a module around them a unit (model.units)",
            )
        if self.policy == "sum" and tensor.dtype == torch.bool:
            raise UserCodeError(
                f"layer {self.layer!r} writes its buffer {buffer.path!r}, which is bool, and has no differences to add",
                cure="set model.buffers: last, or register it as integers",
            )
        return value.detach().clone()  # forward may keep what it has assigned

    def norm_calls(self) -> Iterator[tuple[NormBase, list[NormCall]]]:
        """Each norm, and its calls of all microbatches, in microbatch order."""
        by_norm: dict[str, list[NormCall]] = {path: [] for path in self._norms}
        for update in self._in_order():
            for call in update.calls:
                by_norm[call.norm].append(call)
        return ((self._norms[path], calls) for path, calls in by_norm.items())

    @torch.no_grad()
    def write_others(self) -> None:
        """Give the buffers that are no norm's their new values."""
        new: dict[str, Tensor] = {}
        for update in self._in_order():
            for path, value in update.written.items():
                tensor = self._writable[path].buffer.tensor
                new[path] = value if self.policy == "last" else new.get(path, tensor) + (value - tensor)
        for path, value in new.items():
            self._writable[path].buffer.tensor.copy_(value)

    def _in_order(self) -> list[BufferUpdate]:
        return [self.by_microbatch[microbatch] for microbatch in sorted(self.by_microbatch)]


def apply_buffer_updates(layers: Collection[BufferUpdates]) -> None:
    """Change the buffers of layers by the updates of all microbatches, in microbatch order."""
    fold_norm_calls(pair for updates in layers for pair in updates.norm_calls())
    for updates in layers:
        updates.write_others()


def _places(module: nn.Module, tensor: Tensor) -> tuple[tuple[nn.Module, str], ...]:
    return tuple((part, key) for part in module.modules() for key, held in part._buffers.items() if held is tensor)


def _is_in_place(each: _Writable) -> bool:
    """Whether the module has the buffer itself, and not a cache that has replaced it."""
    return each.buffer.owner._buffers.get(each.buffer.key) is each.buffer.tensor


def _put(each: _Writable, tensor: Tensor) -> None:
    for module, key in each.places:
        module._buffers[key] = tensor


def _copy_of(tensor: Tensor) -> Tensor:
    """A copy, with the attributes that users have set on the tensor."""
    copy = tensor.clone()
    vars(copy).update(vars(tensor))
    return copy


def same_bits(a: Tensor, b: Tensor) -> bool:
    """Whether two tensors of one shape and dtype are equal, NaN too. Not all writes count a version: F.batch_norm's do not."""
    return torch.equal(a, b) or (a.is_floating_point() and bool(((a == b) | ((a != a) & (b != b))).all()))
