"""Buckets of gradients: flat buffers that one reduction over replicas fills, exchanges and adds up."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import NamedTuple

import torch
from torch import Tensor

from raypar.comm.bucket_layout import BucketLayout, BucketPart
from raypar.comm.buffer_pool import CPU, alignment_on
from raypar.comm.collectives import even_slices
from raypar.comm.gradient_sums import GradientSum
from raypar.comm.recursive_halving import halving_scratch
from raypar.comm.transport import FAST_REDUCTION_CHANNELS, Handle, Transport
from raypar.plan.addition_tree import TreeNode, fold_tree
from raypar.torch_compat.multi_tensor import add_all, copy_all

Sums = Mapping[int, GradientSum]
"""Parameter -> what this replica has of its gradient."""


class SlotMemory:
    """Memory of a bounded pool that several buckets use, one after the other."""

    def __init__(self, nbytes: int, device: torch.device = CPU) -> None:
        self._memory, self._alignment = torch.zeros(nbytes, dtype=torch.uint8, device=device), alignment_on(device)
        self._taken = 0
        """Bytes that the bucket which is being made has taken."""

    def begin_bucket(self) -> None:
        """Give all of the memory to another bucket."""
        self._taken = 0

    def take(self, length: int, dtype: torch.dtype) -> Tensor:
        """A buffer [length] for the bucket."""
        start, nbytes = self._taken, length * dtype.itemsize
        self._taken += -(-nbytes // self._alignment) * self._alignment
        return self._memory[start : start + nbytes].view(dtype)


@dataclass(frozen=True)
class ReplicaGroup:
    """The replicas that reduce gradients together."""

    transport: Transport
    ranks: tuple[int, ...]
    """Ranks of the replicas, ascending."""
    own_index: int
    """This rank's index in the group."""
    channel: int
    """See `GradientReduction`."""
    block_count: int
    """Number of blocks of a step."""
    subtrees_by_replica: tuple[tuple[TreeNode, ...], ...]
    """Complete subtrees of each replica's run of the blocks, left to right."""
    device: torch.device = CPU
    """Device of the gradients."""
    slot: SlotMemory | None = None
    """Where a bucket has its buffers; None: in memory of its own."""
    holders: int = 1
    """How many replicas get the total of a run that one of them owns: it, and those that follow."""

    @property
    def own_subtrees(self) -> tuple[TreeNode, ...]:
        """Subtrees of this replica."""
        return self.subtrees_by_replica[self.own_index]

    def zeros(self, length: int, dtype: torch.dtype) -> Tensor:
        """A buffer [length] on the device, of finite numbers; without a slot, of zeros."""
        if self.slot is not None:
            return self.slot.take(length, dtype)
        return torch.zeros(length, dtype=dtype, device=self.device)


class Place(NamedTuple):
    """Where a run of a parameter's elements goes."""

    memory: Tensor
    """In the parameter's shape if the run is all of it, else flat."""
    parameter: int
    """Its index."""
    start: int
    stop: int
    """The run, flattened."""
    is_whole: bool
    """Whether it is all of the parameter."""


def places_in(layout: BucketLayout, flat: Tensor) -> list[Place]:
    """A place for each part of a bucket, in a buffer [length]."""
    return [
        Place(layout.view(flat, part), part.parameter, part.start, part.stop, layout.is_whole(part)) for part in layout.parts
    ]


class GradientBucket(ABC):
    """One bucket: buffers kept over all steps, and the state of the current step.

    Its buffers lie in a slot that other buckets use in the same step, so totals are put where the parameter's sum says
    (`put_totals`).
    """

    adds_into_totals = False
    """Whether `put_totals` is what adds, so that there is nothing to do before."""
    first_operation = last_operation = "all_gather"
    """The first collective of the exchange, and the last one."""

    def __init__(self, replicas: ReplicaGroup, layout: BucketLayout, result: Tensor) -> None:
        self.replicas = replicas
        """The replicas that reduce together."""
        self.layout = layout
        self.result = result
        """[length], valid when the last phase is done."""
        self.begin()

    @property
    def channel(self) -> int:
        """The channel of its collectives."""
        return self.replicas.channel

    def begin(self) -> None:
        """Begin a step: no gradient is ready."""
        self.unready_count = len(self.layout.shapes)
        """Parameters whose gradients are not ready."""
        self.first_phase: Handle | None = None
        """The first phase, once it is posted."""
        self.second_phase: Handle | None = None
        """The second phase, once it is posted, if there is one."""

    @abstractmethod
    def fill(self, sums: Sums) -> None:
        """Copy this replica's subtree sums into the buffers."""

    @abstractmethod
    def post_first(self) -> Handle:
        """Start the first phase."""

    def post_second(self) -> Handle | None:
        """Combine what the first phase has brought, and start the second, if there is one.

        Called when the first phase is done, or the device's stream waits for it.
        """
        self.add_up()
        return self.gather()

    def enqueue(self, sums: Sums, after: Handle | None) -> Handle | None:
        """Give all of the exchange to the device, beside what is computed: the buffers are filled when the sums are there, and
        `after` is over. Returns what is done when the totals are where they stay; None: the host has to take each step."""
        r, parameters = self.replicas, [sums[index] for index in self.layout.indices]
        terms = [term for mine in parameters for of_subtree in mine.terms for term in of_subtree]
        fill, put = partial(self.fill, sums), partial(self.put_totals, sums)
        first, last = self.first_operation, self.last_operation
        filled = r.transport.run_before(first, fill, group=r.ranks, channel=self.channel, after=after, keep=terms)
        if filled is None:
            return None
        self.first_phase = self.post_first()
        there = self._enqueue_second(self.first_phase)
        done = r.transport.run_after(there, put, group=r.ranks, channel=self.channel, operation=last)
        return there if done is None else done  # then it has failed

    def _enqueue_second(self, first: Handle) -> Handle:
        """Enqueue what `put_totals` follows on a device, behind the first phase; returns that."""
        return first

    def add_up(self) -> None:  # noqa: B027
        """Combine what the first phase has brought, where something is left to do."""

    def gather(self) -> Handle | None:
        """Start the second phase; None: there is none."""
        return None

    def receive_in_place(self, sums: Sums) -> None:  # noqa: B027
        """Prepare to receive totals where they stay, if the bucket can."""

    def put_totals(self, sums: Sums) -> None:
        """Copy the totals from `result` to where they stay; the buffers may be used otherwise from then on."""
        parts = self.layout.parts
        copy_all(
            [sums[part.parameter].place(part.start, part.stop) for part in parts], [_flat(self.result, part) for part in parts]
        )


def _flat(buffer: Tensor, part: BucketPart) -> Tensor:
    return buffer[part.offset : part.offset + part.stop - part.start]


def fill_places(places: Sequence[Place], sums: Sums, subtree: int) -> None:
    """Put this replica's sum over one subtree, by its number, into the places: every sum is copied, or added, once."""
    to: list[Tensor] = []
    source: list[Tensor] = []
    for memory, index, start, stop, is_whole in places:
        terms = sums[index].terms[subtree] if is_whole else sums[index].flat_terms(subtree, start, stop)
        if len(terms) == 1:
            to.append(memory)
            source.append(terms[0])
        else:
            put(memory, terms)
    if to:
        copy_all(to, source)


def fill_places_with_all(places: Sequence[Place], sums: Sums, subtrees: int) -> None:
    """Put this replica's sum over all its subtrees, so many, into the places."""
    for memory, index, start, stop, is_whole in places:
        mine = sums[index]
        of_subtrees = [mine.terms[k] if is_whole else mine.flat_terms(k, start, stop) for k in range(subtrees)]
        put(memory, [term for terms in of_subtrees for term in terms])


def put(place: Tensor, terms: Sequence[Tensor]) -> None:
    """Write the sum of terms, left to right, or "no gradient", to its place."""
    if not terms:
        place.fill_(-0.0)
    elif len(terms) == 1:
        place.copy_(terms[0])
    else:
        torch.add(*terms[:2], out=place)
        for term in terms[2:]:
            place.add_(term)


class TreeAdditions:
    """The additions of the tree over subtree sums of some elements, planned once."""

    def __init__(self, sums: Mapping[TreeNode, Tensor], blocks: int, total: Tensor) -> None:
        """`total`: where the root goes. It may be the memory of a sum; that of all sums is used on the way."""
        self._adds: list[tuple[Tensor, Tensor, Tensor]] = []
        """(left, right, out) of each, in order."""

        def add(left: Tensor, right: Tensor) -> Tensor:
            out = total if len(self._adds) == len(sums) - 2 else left  # the last addition writes the total
            self._adds.append((left, right, out))
            return out

        self._root, self._total = fold_tree(sums, (0, blocks), add), total
        """`_root`: where the additions leave the total; None: there is no sum."""

    def run(self) -> None:
        """Add."""
        for left, right, out in self._adds:
            torch.add(left, right, out=out)
        if self._root is not None and self._root.data_ptr() != self._total.data_ptr():
            self._total.copy_(self._root)


class CanonicalBucket(GradientBucket):
    """Bucket of which every replica owns a slice: the owner receives all subtree sums of it, adds them, sends the total to all.

    With K subtrees here, L_o elements in owner o's slice, S in this rank's, `length` N: `pieces[o]` [K L_o] goes to owner o,
    subtree after subtree; `parts[r]` [K_r S] comes from replica r. Together K N elements are sent and sum(K_r) S received.
    `result` [N] is the send buffer itself when K = 1 (its memory is free once the sums are sent).
    """

    first_operation = "all_to_all"

    def __init__(self, replicas: ReplicaGroup, layout: BucketLayout) -> None:
        nodes, me = replicas.subtrees_by_replica, replicas.own_index
        own = len(nodes[me])
        cut = even_slices(layout.length, len(nodes))
        start, stop = cut[me]
        outgoing = replicas.zeros(own * layout.length, layout.dtype)
        super().__init__(replicas, layout, outgoing if own == 1 else replicas.zeros(layout.length, layout.dtype))
        self.pieces = [outgoing[own * a : own * b] for a, b in cut]
        """By owner: the memory from which its slice of this replica's subtree sums is sent."""
        self.parts = [
            self.pieces[me] if r == me else replicas.zeros(len(n) * (stop - start), layout.dtype) for r, n in enumerate(nodes)
        ]
        """By replica: the memory for its subtree sums of this rank's slice."""
        self.totals = [self.result[a:b] for a, b in cut]
        """By owner: its slice of `result`."""
        self.own_total = self.totals[me]
        """This rank's slice of `result`, to which the additions write."""
        self._targets = [self._places(outgoing, cut, own, k) for k in range(own)]
        """By subtree: the places that `fill` writes to (see `_places`)."""
        size = stop - start
        sums = {node: part[k * size :][:size] for part, of in zip(self.parts, nodes, strict=True) for k, node in enumerate(of)}
        self._additions = TreeAdditions(sums, replicas.block_count, self.own_total)
        """Those over this rank's slice."""
        self._in_place: list[Tensor] | None = None
        """By owner: where its slice stays, if it is received there."""

    def _places(self, outgoing: Tensor, cut: list[tuple[int, int]], own: int, k: int) -> list[Place]:
        """Where the k-th subtree's sums go: a part in several places at slice borders."""
        found = []
        for part in self.layout.parts:
            end = part.offset + part.stop - part.start
            borders = [(a, b) for a, b in cut if max(a, part.offset) < min(b, end)]
            for a, b in borders:
                lo, hi = max(a, part.offset), min(b, end)
                at, first = own * a + k * (b - a) + (lo - a), part.start + lo - part.offset
                memory, is_whole = outgoing[at : at + hi - lo], len(borders) == 1 and self.layout.is_whole(part)
                memory = memory.view(self.layout.shapes[part.parameter]) if is_whole else memory
                found.append(Place(memory, part.parameter, first, first + hi - lo, is_whole))
        return found

    def fill(self, sums: Sums) -> None:
        """See `GradientBucket.fill`."""
        for k, places in enumerate(self._targets):
            fill_places(places, sums, k)

    def post_first(self) -> Handle:
        """See `GradientBucket.post_first`."""
        r = self.replicas
        return r.transport.all_to_all(self.parts, self.pieces, group=r.ranks, channel=r.channel)

    def _enqueue_second(self, first: Handle) -> Handle:
        """See `GradientBucket._enqueue_second`: the additions run in the stream of the all-gather that follows them."""
        r = self.replicas
        added = r.transport.run_after(first, self.add_up, group=r.ranks, channel=r.channel)
        return first if added is None else self.gather()

    def add_up(self) -> None:
        """See `GradientBucket.add_up`."""
        self._additions.run()

    def gather(self) -> Handle:
        """See `GradientBucket.gather`."""
        r = self.replicas
        if self._in_place is None:
            return r.transport.all_gather(self.totals, self.own_total, group=r.ranks, channel=r.channel)
        mine = self.own_total[: self._in_place[r.own_index].numel()]
        return r.transport.all_gather(self._in_place, mine, group=r.ranks, channel=r.channel)

    def receive_in_place(self, sums: Sums) -> None:
        """See `GradientBucket.receive_in_place`."""
        if len(self.layout.parts) == 1:
            (part,) = self.layout.parts
            total, size = sums[part.parameter].place(part.start, part.stop), part.stop - part.start
            cut = even_slices(self.layout.length, len(self.replicas.ranks))
            self._in_place = [total[a : max(a, min(b, size))] for a, b in cut]

    def put_totals(self, sums: Sums) -> None:
        """See `GradientBucket.put_totals`."""
        if self._in_place is None:
            super().put_totals(sums)
        self._in_place = None


class FastBucket(GradientBucket):
    """Bucket of the fast reduction: one buffer [length], all-reduced in place."""

    first_operation = last_operation = "all_reduce"

    def __init__(self, replicas: ReplicaGroup, layout: BucketLayout) -> None:
        super().__init__(replicas, layout, replicas.zeros(layout.length, layout.dtype))
        self._places = places_in(layout, self.result)

    @property
    def channel(self) -> int:
        """See `GradientBucket.channel`."""
        return FAST_REDUCTION_CHANNELS + self.replicas.channel

    def fill(self, sums: Sums) -> None:
        """See `GradientBucket.fill`: this replica's subtrees are added here, left to right."""
        fill_places_with_all(self._places, sums, len(self.replicas.own_subtrees))

    def post_first(self) -> Handle:
        """See `GradientBucket.post_first`."""
        r = self.replicas
        return r.transport.all_reduce(self.result, group=r.ranks, channel=self.channel)


class PairBucket(GradientBucket):
    """Bucket of two replicas with one subtree each: they swap whole sums, and both add.

    Sends as many bytes as `CanonicalBucket` and gives the same bits, with one phase less.
    """

    adds_into_totals = True

    def __init__(self, replicas: ReplicaGroup, layout: BucketLayout) -> None:
        super().__init__(replicas, layout, replicas.zeros(layout.length, layout.dtype))
        self._places = places_in(layout, self.result)
        other = replicas.zeros(layout.length, layout.dtype)
        self._pair = [self.result if r == replicas.own_index else other for r in range(2)]
        self._parts = [flat_parts(layout, buffer) for buffer in self._pair]
        """By replica: its parts."""

    def fill(self, sums: Sums) -> None:
        """See `GradientBucket.fill`."""
        fill_places(self._places, sums, 0)

    def post_first(self) -> Handle:
        """See `GradientBucket.post_first`."""
        r = self.replicas
        return r.transport.all_gather(self._pair, self.result, group=r.ranks, channel=r.channel)

    def put_totals(self, sums: Sums) -> None:
        """See `GradientBucket.put_totals`: the root of the tree."""
        add_pair(self._parts, self.replicas.own_index, self.layout, sums)


def add_pair(pair: Sequence[Sequence[Tensor]], own: int, layout: BucketLayout, sums: Sums) -> None:
    """Add what two replicas have of each part, to where totals stay. `pair[r]`: flat parts of replica r; where this replica's
    sum lies there already, the other's is added to it: two terms may be added in either order."""
    into: list[Tensor] = []
    added: list[Tensor] = []
    for part, left, right in zip(layout.parts, *pair, strict=True):
        mine = sums[part.parameter]
        total = mine.place(part.start, part.stop)
        if mine.total_is_only_term:
            into.append(total)
            added.append(left if own else right)
        else:
            torch.add(left, right, out=total)
    if into:
        add_all(into, added)


def flat_parts(layout: BucketLayout, buffer: Tensor) -> list[Tensor]:
    """The parts of a bucket in a buffer [length], flat."""
    return [_flat(buffer, part) for part in layout.parts]


class HalvingBucket(GradientBucket):
    """Bucket of 2^k replicas with one subtree of the same size each: recursive halving and doubling adds their sums.

    Sends as many bytes as `CanonicalBucket` and gives the same bits, in one operation of 2k messages from each rank.
    """

    first_operation = last_operation = "halving_all_reduce"

    def __init__(self, replicas: ReplicaGroup, layout: BucketLayout) -> None:
        super().__init__(replicas, layout, replicas.zeros(layout.length, layout.dtype))
        self._places = places_in(layout, self.result)
        self._scratch = replicas.zeros(halving_scratch(even_slices(layout.length, len(replicas.ranks))), layout.dtype)

    def fill(self, sums: Sums) -> None:
        """See `GradientBucket.fill`."""
        fill_places(self._places, sums, 0)

    def post_first(self) -> Handle:
        """See `GradientBucket.post_first`."""
        r = self.replicas
        return r.transport.halving_all_reduce(self.result, self._scratch, group=r.ranks, channel=r.channel)
