"""The shards of one replica of a stage: their collectives, and the base of the modules that call them."""

from __future__ import annotations

import time
from collections.abc import Collection, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from raypar.comm import blocking_code_as_routine
from raypar.comm.routine import StreamWaits
from raypar.comm.transport import Handle, Transport
from raypar.comm.virtual_shards import VirtualShardHandle, VirtualShardMember
from raypar.model.tensor_parallel.local_part_layout import LocalPartLayout
from raypar.plan.shard_ranges import IndexRanges, even_ranges_by_shard
from raypar.plan.spatial_shards import RowPlan


class ShardGroup:
    """The shards that compute one replica of a stage together, seen by one of them: collectives, and notes of running layers.

    `transport`: of the ranks, or, where a worker has several virtual shards, of these: their numbers are the ranks then.
    `timeout_s`: how long a collective may wait for the other shards.
    """

    def __init__(
        self,
        transport: Transport | VirtualShardMember,
        ranks: Sequence[int],
        *,
        channel: int = 0,
        sequence_parallel: bool = False,
        timeout_s: float | None = None,
    ) -> None:
        self.transport = transport
        self.ranks = tuple(ranks)
        """Ranks of the shards, ascending."""
        self.shard = self.ranks.index(transport.rank)
        """The number of this shard."""
        self.channel = channel
        """Sets the collectives of this group apart from all others."""
        self.sequence_parallel = sequence_parallel and self.size > 1
        """Whether values between the layers of the stage are cut along dim 1 (sequence parallelism)."""
        self.timeout_s = timeout_s
        self.stream_waits: StreamWaits | None = None
        """Takes what the stream alone waits for, for who looks at it before results leave the worker; None: the host waits."""
        self.partially_used_parameters: dict[int, nn.Parameter] = {}
        """Id -> parameter that every shard holds whole but computes with a part of a value only.

        What a backward pass adds to its gradient is a part of a sum over shards (`sum_partial_gradients`). All of
        them are known after the step's last forward pass. One layer must not compute with such a parameter on parts and on
        whole values: its gradient would be of both kinds."""
        self.shared_input: Any = None
        """(`linear.InputOfSeveralLayers`, its tensor) of the value that column layers of the running layer read last."""
        self.grad_enabled = False
        """Whether the running layer was called with gradients."""
        self.output_layouts: dict[str, LocalPartLayout] = {}
        """Value that the loss alone reads -> how the last forward pass left it cut; values without an entry are whole."""
        self.value_layouts: dict[str, LocalPartLayout] = {}
        """Value that stays in parts between layers -> how the last forward pass left it cut."""
        self.waited_ns = 0
        """Time that layers have waited for other shards since somebody set it to 0."""

    @property
    def size(self) -> int:
        """Number of shards."""
        return len(self.ranks)

    def wait(self, handle: Handle, tensor: Tensor, what: str) -> None:
        """Have what follows wait until the operation on `tensor` is done; under the cooperative scheduler other workers run
        meanwhile.

        On a GPU the stream waits, and not the host, except for integers: an abort leaves memory undefined, and indices without
        meaning would fail an assertion on the device.
        """
        if handle.done():
            return
        start, label = time.perf_counter_ns(), f"{what} of shard {self.shard}"
        on_stream = self.stream_waits is not None and tensor.is_floating_point()
        blocking_code_as_routine.wait_for_handle(handle, label, self.timeout_s, on_stream=on_stream)
        if on_stream and self.stream_waits is not None:
            self.stream_waits.add(handle, label)
        self.waited_ns += time.perf_counter_ns() - start

    def note_rows(self, x: Tensor, made: Tensor, dim: int, plan: RowPlan) -> None:
        """Called with what a function of PyTorch exchanges: rows of its input `x`, and backward of the gradient of `made`.
        Does nothing here: for who lists them."""

    def note_sum(self, total: Tensor, kept: Collection[int], dims: int) -> None:
        """Called with what such a function sums over the shards, of a value of `dims` dims of which these are left."""

    def post_all_reduce(self, tensor: Tensor) -> Handle:
        """Start to sum a contiguous tensor over the shards, in place, over the tree of shards."""
        return self.transport.all_reduce(tensor, group=self.ranks, channel=self.channel)

    def post_sum(self, tensor: Tensor, added: Tensor | None = None) -> PendingSum:
        """Start to sum a contiguous tensor, which is the sum's from here on, over the shards, and to add `added`, of which all
        have the same."""
        transport = self.transport
        if isinstance(transport, VirtualShardMember):
            return PendingSum(self, tensor, transport.sum(tensor, channel=self.channel, added=added), None)
        return PendingSum(self, tensor, self.post_all_reduce(tensor), added)

    def all_reduce(self, tensor: Tensor, what: str, *, added: Tensor | None = None) -> Tensor:
        """The sum over the shards, with `added`: see `post_sum`. `tensor` is overwritten where it is contiguous."""
        return self.post_sum(tensor.contiguous(), added).take(what)

    def all_gather_in_place(self, whole: Tensor, what: str) -> None:
        """Fill `whole` [shards, ...], contiguous, of which this shard has put its own part in place."""
        pieces = list(whole.unbind())
        self.wait(self.transport.all_gather(pieces, pieces[self.shard], group=self.ranks, channel=self.channel), whole, what)

    def gather_and_concat(
        self, tensor: Tensor, dim: int, held: Sequence[IndexRanges], what: str, *, out: Tensor | None = None
    ) -> Tensor:
        """The whole value, of which each shard holds one run of indices along `dim`, in shard order (maybe an empty one); in
        `out` where it is given."""
        tensor = tensor.contiguous()
        pieces = []
        for shard, spans in enumerate(held):
            shape = list(tensor.shape)
            shape[dim] = sum(stop - start for start, stop in spans)
            pieces.append(tensor if shard == self.shard else tensor.new_empty(shape))
        self.wait(self.transport.all_gather(pieces, tensor, group=self.ranks, channel=self.channel), tensor, what)
        return torch.cat(pieces, dim, out=out)

    def post_reduce_scatter(self, tensor: Tensor, dim: int) -> tuple[Tensor, Handle, list[Tensor]]:
        """Start to sum over the shards and keep this shard's even part of `dim`.

        Returns (where the part will be, handle, tensors that must stay alive until it is done).
        """
        pieces = [
            tensor[(slice(None),) * dim + (slice(*(spans[0] if spans else (0, 0))),)].contiguous()
            for spans in even_ranges_by_shard(tensor.shape[dim], self.size)
        ]
        out = torch.empty_like(pieces[self.shard])
        return out, self.transport.reduce_scatter(out, pieces, group=self.ranks, channel=self.channel), pieces

    def reduce_scatter(self, tensor: Tensor, dim: int, what: str) -> Tensor:
        """This shard's even part, along `dim`, of the sum over the shards."""
        out, handle, _pieces = self.post_reduce_scatter(tensor, dim)
        self.wait(handle, out, what)
        return out


class PendingSum:
    """A sum over shards that is under way."""

    __slots__ = ("_added", "_group", "_handle", "_tensor")

    def __init__(self, group: ShardGroup, tensor: Tensor, handle: Handle, added: Tensor | None) -> None:
        """`tensor`: what this shard adds, in whose memory the sum comes unless virtual shards share it; `added`: what is still
        to be added to it."""
        self._group, self._tensor, self._handle, self._added = group, tensor, handle, added

    def take(self, what: str) -> Tensor:
        """The sum, once it is there; for who takes it alone. `what`: in messages."""
        handle, tensor = self._handle, self._tensor
        self._group.wait(handle, tensor, what)
        if isinstance(handle, VirtualShardHandle):
            return handle.tensor()
        return tensor if self._added is None else tensor.add_(self._added)


class ShardedModule(nn.Module):
    """A layer whose parameters are this shard's slices. No code but the layer itself may compute with them."""

    def __init__(self, name: str, group: ShardGroup) -> None:
        super().__init__()
        self.name = name
        """Qualified name of the layer that it stands for."""
        self.group = group
        """The shards that compute the layer together."""

    def numbers_of_last_call(self) -> Mapping[tuple[str, str], int]:
        """(direction, formula) of a collective -> how many numbers the last call moves or makes its backward pass move, where
        the whole input or output does not say it."""
        return {}
