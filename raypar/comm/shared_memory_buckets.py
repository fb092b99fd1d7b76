"""Buckets of two replicas on one machine, which read each other's sums in place.

Each replica writes its sums to memory that both see. It has two turns, which alternate: a *group* of buckets is filled in one
turn, with one message that says so. A group is filled once the totals of the group before it are there, so the message for a
group proves that its sender has finished reading the group before: the turn after it may be written again.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from raypar.comm.bucket_layout import BucketLayout
from raypar.comm.gradient_buckets import (
    GradientBucket,
    Place,
    ReplicaGroup,
    Sums,
    add_pair,
    fill_places,
    flat_parts,
    places_in,
    put,
)
from raypar.comm.routine import Routine, RoutineWait
from raypar.comm.shared_memory import NO_ADDRESS, SharedMemoryBlock, open_shared_memory
from raypar.comm.transport import Handle
from raypar.torch_compat.multi_tensor import add_all


@dataclass(frozen=True)
class SharedTurns:
    """The memory of two replicas that both see."""

    memories: tuple[Tensor, Tensor]
    """By replica: its memory [bytes]; the turns lie one behind the other."""

    def buffers(self, starts: Sequence[int], layout: BucketLayout) -> list[list[Tensor]]:
        """By replica and turn: the buffer of a bucket, which begins `starts[replica]` bytes behind the turn's begin."""
        found = []
        for replica, (memory, start) in enumerate(zip(self.memories, starts, strict=True)):
            nbytes, turn = layout.nbytes_shared_by(replica), memory.numel() // 2
            found.append([memory[at : at + nbytes].view(layout.dtype) for at in (start, turn + start)])
        return found


def bucket_groups(layouts: Sequence[BucketLayout], turn_bytes: int) -> list[range]:
    """Consecutive buckets that one turn has room for; larger ones are alone."""
    found: list[range] = []
    first, taken = 0, [0, 0]
    for number, layout in enumerate(layouts):
        needed = [paged(layout.nbytes_shared_by(replica)) for replica in range(2)]
        if number > first and any(have + more > turn_bytes for have, more in zip(taken, needed, strict=True)):
            found.append(range(first, number))
            first, taken = number, [0, 0]
        taken = [have + more for have, more in zip(taken, needed, strict=True)]
    return [*found, range(first, len(layouts))] if layouts else []


def turn_bytes(layouts: Sequence[BucketLayout], groups: Sequence[range]) -> list[int]:
    """By replica: the bytes of one turn."""
    return [
        max(sum(paged(layouts[number].nbytes_shared_by(replica)) for number in group) for group in groups)
        for replica in range(2)
    ]


def paged(nbytes: int) -> int:
    """Rounded up to a multiple of 4,096: buckets share no page, and are aligned for vector instructions."""
    return -(-nbytes // 4096) * 4096


def share_turns(replicas: ReplicaGroup, sizes: Sequence[int]) -> Routine[SharedTurns | None]:
    """Memory with two turns of `sizes[replica]` bytes for each of two replicas; None unless both can read the other's."""
    own, sizes = replicas.own_index, [2 * size for size in sizes]

    def gather(found: list[Tensor], mine: Tensor) -> Handle:
        return replicas.transport.all_gather(found, mine, group=replicas.ranks, channel=replicas.channel)

    try:
        block = SharedMemoryBlock(sizes[own])
    except OSError:
        block = None
    addresses = [torch.zeros_like(NO_ADDRESS) for _ in replicas.ranks]
    address = block.address if block is not None else NO_ADDRESS
    yield RoutineWait(gather(addresses, address), "where the other replica's memory is")
    memories: list[Tensor] = []
    if block is not None:
        try:
            memories = [
                block.memory if r == own else open_shared_memory(address, sizes[r]) for r, address in enumerate(addresses)
            ]
        except OSError:
            memories = []
    found = [torch.zeros(1, dtype=torch.uint8) for _ in replicas.ranks]
    mine = torch.tensor([bool(memories)], dtype=torch.uint8)
    yield RoutineWait(gather(found, mine), "whether the other replica can read our memory")
    if block is not None:
        block.close()
    return SharedTurns((memories[0], memories[1])) if all(map(bool, found)) else None


class CombinedMessage:
    """One message for a group of buckets, posted when the last of them is filled; also the `Handle` of each bucket.

    The buckets' bytes lie in shared memory: a message for each would only interrupt the other processor's work.
    """

    def __init__(self, replicas: ReplicaGroup, buckets: int) -> None:
        self._replicas = replicas
        self._buckets = buckets
        """Number of buckets, all of which are filled in every step."""
        self._left = buckets
        """Buckets that are not filled in this step."""
        self._signals = [torch.zeros(1, dtype=torch.uint8) for _ in replicas.ranks]
        self._posted: Handle | None = None
        """The message, once it is posted in this step."""

    def add_filled_bucket(self) -> Handle:
        """Count a filled bucket; returns the bucket's handle. Every step fills the same number of them."""
        if self._left == 0:
            self._left, self._posted = self._buckets, None
        self._left -= 1
        if self._left == 0:
            r = self._replicas
            self._posted = r.transport.all_gather(self._signals, self._signals[r.own_index], group=r.ranks, channel=r.channel)
        return self

    def done(self) -> bool:
        """See `Handle.done`."""
        return self._posted is not None and self._posted.done()

    def wait(self, timeout_s: float | None = None) -> None:
        """See `Handle.wait`; all buckets must be filled."""
        assert self._posted is not None, "waited for before the last bucket was filled"
        self._posted.wait(timeout_s)

    def wait_on_stream(self, timeout_s: float | None = None) -> None:
        """See `Handle.wait_on_stream`: the memory is the host's."""
        self.wait(timeout_s)

    def tensor(self) -> Tensor:
        """See `Handle.tensor`."""
        return self.tensors()[0]

    def tensors(self) -> list[Tensor]:
        """See `Handle.tensors`."""
        return [] if self._posted is None else self._posted.tensors()


class SharedMemoryBucket(GradientBucket):
    """Base of the buckets of this module: `sums[r][t]` is the memory of replica r that both see, in turn t."""

    adds_into_totals = True

    def __init__(
        self, replicas: ReplicaGroup, layout: BucketLayout, sums: Sequence[Sequence[Tensor]], together: CombinedMessage
    ) -> None:
        self._sums = sums
        self._together = together
        self.begins_group = False
        """Whether it is the first bucket of its group."""
        self.turn = 0
        """The turn in which the bucket is filled next, or was: 0 or 1."""
        super().__init__(replicas, layout, sums[replicas.own_index][0])

    def post_first(self) -> Handle:
        """See `GradientBucket.post_first`."""
        return self._together.add_filled_bucket()

    def _count(self) -> None:
        nbytes = self._sums[1 - self.replicas.own_index][self.turn].nbytes
        self.replicas.transport.ledger.count("window", sent=nbytes, received=nbytes)


class SharedMemoryPairBucket(SharedMemoryBucket):
    """Bucket of which both replicas get all totals."""

    def __init__(
        self, replicas: ReplicaGroup, layout: BucketLayout, sums: Sequence[Sequence[Tensor]], together: CombinedMessage
    ) -> None:
        super().__init__(replicas, layout, sums, together)
        self._places = [places_in(layout, mine) for mine in sums[replicas.own_index]]
        """By turn: the places in this replica's memory."""
        self._parts = [[flat_parts(layout, of[turn]) for of in sums] for turn in range(2)]
        """By turn and replica: its parts."""

    def fill(self, sums: Sums) -> None:
        """See `GradientBucket.fill`."""
        fill_places(self._places[self.turn], sums, 0)

    def put_totals(self, sums: Sums) -> None:
        """See `GradientBucket.put_totals`: the root of the tree."""
        add_pair(self._parts[self.turn], self.replicas.own_index, self.layout, sums)
        self._count()


class SharedMemoryOwnerBucket(SharedMemoryBucket):
    """Bucket of parameters whose runs replicas own: an owner reads the other's sums of its runs, and adds them to its own,
    which nobody else sees: they become the total in place."""

    def __init__(
        self, replicas: ReplicaGroup, layout: BucketLayout, sums: Sequence[Sequence[Tensor]], together: CombinedMessage
    ) -> None:
        super().__init__(replicas, layout, sums, together)
        own = replicas.own_index
        assert layout.segments is not None
        firsts = [start for start, _ in layout.segments]

        def places(buffer: Tensor, owner: int) -> list[Place]:
            moved = [part._replace(offset=part.offset - firsts[owner]) for part in layout.parts if part.owner == owner]
            return [Place(layout.view(buffer, p), p.parameter, p.start, p.stop, layout.is_whole(p)) for p in moved]

        self._given = [places(mine, 1 - own) for mine in sums[own]]
        """By turn: the places in this replica's memory for its sums of what the other one owns."""
        self._taken = [[p._replace(memory=p.memory.view(-1)) for p in places(theirs, own)] for theirs in sums[1 - own]]
        """By turn: where the other one's sums of this replica's runs are."""

    def fill(self, sums: Sums) -> None:
        """See `GradientBucket.fill`."""
        fill_places(self._given[self.turn], sums, 0)
        for _, index, start, stop, _ in self._taken[self.turn]:
            total, terms = sums[index].place(start, stop), sums[index].flat_terms(0, start, stop)
            if len(terms) != 1 or terms[0].data_ptr() != total.data_ptr():
                put(total, terms)

    def put_totals(self, sums: Sums) -> None:
        """See `GradientBucket.put_totals`: the root of the tree, whose two terms may be added in either order."""
        taken = self._taken[self.turn]
        if taken:
            add_all([sums[place.parameter].place(place.start, place.stop) for place in taken], [one.memory for one in taken])
        self._count()


def make_shared_buckets(
    replicas: ReplicaGroup, layouts: Sequence[BucketLayout], groups: Sequence[range], turns: SharedTurns
) -> list[SharedMemoryBucket]:
    """The buckets of all groups, in memory that both replicas see."""
    made: list[SharedMemoryBucket] = []
    for group in groups:
        together, starts = CombinedMessage(replicas, len(group)), [0, 0]
        for number in group:
            layout = layouts[number]
            kind = SharedMemoryPairBucket if layout.segments is None else SharedMemoryOwnerBucket
            made.append(kind(replicas, layout, turns.buffers(starts, layout), together))
            made[-1].begins_group = number == group.start
            starts = [start + paged(layout.nbytes_shared_by(replica)) for replica, start in enumerate(starts)]
    return made
