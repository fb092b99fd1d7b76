"""Reduction of a stage's gradients over its replicas, in buckets that overlap with the backward pass.

*Canonical* (the default): every replica adds the complete subtrees of its run of blocks by itself. Between replicas, each
owner of a slice receives all replicas' subtree sums of the slice (all-to-all), adds them in the order of the tree, and sends
the total to all (all-gather). The additions are those of one process, whatever the number of replicas. Where each run is one
complete subtree, the bytes are those of a ring: 2 (R-1)/R N per replica; if there are 2^k of one size, small buckets, and all
on a GPU, are exchanged by recursive halving and doubling between neighbours (`plan/gradient_exchange.py` chooses). *Fast*: a
plain all-reduce of each replica's own sum. Where replicas own runs of parameters, the first exchange ends at the owners of
runs, who keep the totals.

On the host a bucket's additions and all-gather follow when somebody finds its all-to-all done. On a GPU nobody would before the
backward pass is over, because the host is ahead of it: there all of it is enqueued when the bucket is complete
(`Transport.run_after`), and runs beside that pass.

An undefined gradient travels as -0.0, the one value x for which a + x == a bit for bit for every a (IEEE 754, round to
nearest). So nobody needs to know which sums are defined before adding, and the result is -0.0 where no replica has a gradient:
the votes tell (`GradientReduction.defined_here`). Where it is asked for, one small all-reduce a step tells which parameters a
replica has marked (`GradientReduction.parameters_to_mark`).
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Collection, Sequence

import torch
from torch import Tensor

from raypar.comm.buffer_pool import CPU, aligned_contiguous
from raypar.comm.gradient_buckets import (
    BucketLayout,
    CanonicalBucket,
    CombinedMessage,
    FastBucket,
    GradientBucket,
    HalvingBucket,
    OwnerBucket,
    OwnerLayout,
    PairBucket,
    ReplicaGroup,
    Runs,
    ShapeAndDtype,
    SharedMemoryOwnerBucket,
    SharedMemoryPairBucket,
    SubtreeSums,
    bucket_layouts,
)
from raypar.comm.routine import Routine, RoutineWait, StreamWaits
from raypar.comm.shared_memory import NO_ADDRESS, SharedMemoryBlock, open_shared_memory
from raypar.comm.transport import Handle, Transport
from raypar.errors import CommError
from raypar.plan.addition_tree import covering_nodes, fold_tree
from raypar.plan.gradient_exchange import gradient_exchange
from raypar.torch_compat.multi_tensor import add_all

BUCKET_BYTES = 2 << 20
"""Small enough that the last bucket, which nothing hides, is short; from 0.5 to 8 MB the step time hardly changes."""


class GradientReduction(ABC):
    """Base of the reductions: buckets, posted in one fixed order as their gradients become ready.

    `group`: ranks of the stage's replicas, ascending; `runs[r]`: blocks of replica r; `parameters`: (shape, dtype) of every
    use of a parameter, in layer order; `channel`: one that no other reduction of the group uses (the stage's number);
    `device`: of the gradients; `owners`: by use, the runs that each replica owns, where only owners get totals; None: all do.
    """

    parameters_to_mark: Callable[[], Collection[int]] | None
    """Returns the indices of parameters that this replica marks for all; called once a step, with the first submission. None,
    for all replicas: nothing is marked, and no message is needed."""
    marked_parameters: frozenset[int]
    """After `finish`: indices of parameters that any replica has marked in this step."""
    defined_here: frozenset[int]
    """After `finish`: indices of parameters of which this replica has a gradient."""
    owned_totals: dict[int, list[Tensor]]
    """After `finish`: parameter that replicas own in runs -> the totals of this replica's runs of it, flat."""
    stream_waits: StreamWaits
    """What only the stream waits for."""

    def __init__(
        self,
        transport: Transport,
        *,
        group: Sequence[int],
        runs: Sequence[range],
        block_count: int,
        parameters: Sequence[ShapeAndDtype],
        bucket_bytes: int = BUCKET_BYTES,
        channel: int = 0,
        device: torch.device = CPU,
        owners: Sequence[Sequence[Runs] | None] = (),
    ) -> None:
        if len(runs) != len(group):
            raise CommError(f"{len(runs)} runs of blocks for {len(group)} replicas", cure="give one run per replica")
        self.transport = transport
        self.group = tuple(group)
        self.block_count = block_count
        self.parameters = tuple(parameters)
        self.channel = channel
        self.own_index = self.group.index(transport.rank)
        """This rank's index in the group."""
        self.subtrees_by_replica = [covering_nodes(run, block_count) for run in runs]
        """Subtrees of each replica, left to right."""
        self.replicas = ReplicaGroup(
            transport, self.group, self.own_index, channel, block_count, tuple(map(tuple, self.subtrees_by_replica)), device
        )
        self._rows: list[SubtreeSums | None] = [None] * len(self.parameters)
        """By parameter: its subtree sums, once they are ready in this step."""
        self._totals: list[Tensor | None] = [None] * len(self.parameters)
        """By parameter: its total, where there is one replica only."""
        self._marks = torch.zeros(len(self.parameters), dtype=torch.int32)
        """By parameter: how many replicas mark it."""
        self._marked: Handle | None = None
        """The all-reduce of the marks, once it is posted in this step."""
        self.parameters_to_mark, self.owned_totals = None, {}
        self.marked_parameters = self.defined_here = frozenset()
        self.stream_waits = StreamWaits()
        self._unready = 0
        """Parameters that are not ready in this step."""
        self._next_first = self._next_second = 0
        """The first bucket whose first, second phase is not posted in this step."""
        layouts = bucket_layouts(self.parameters, bucket_bytes, device, owners) if len(self.group) > 1 else []
        self.buckets: list[GradientBucket] = [self._bucket(layout) for layout in layouts]
        """The buckets, in the order in which they are posted; none with one replica."""
        self._bucket_of = {i: b for b in self.buckets for i in b.layout.indices}
        """Parameter -> its bucket."""
        self._next_buckets: list[GradientBucket] | None = None
        """What `buckets` will be from the next step on."""
        self._negotiated = False
        """Whether `_negotiate_buckets` has run."""

    @abstractmethod
    def _bucket(self, layout: BucketLayout) -> GradientBucket:
        """Allocate one bucket."""

    def start(self) -> None:
        """Begin a step. Results of the step before are no longer valid. A replica without blocks posts everything now."""
        self._rows = [None] * len(self.parameters)
        self._totals = [None] * len(self.parameters)
        self._marked = None
        self._unready = len(self.parameters)
        self._next_first = self._next_second = 0
        if self._next_buckets is not None:
            self.buckets, self._next_buckets = self._next_buckets, None
            self._bucket_of = {i: b for b in self.buckets for i in b.layout.indices}
        for bucket in self.buckets:
            bucket.begin()
        if not self.subtrees_by_replica[self.own_index]:
            self.submit_gradients(range(len(self.parameters) - 1, -1, -1), {})

    def submit_gradients(self, indices: Sequence[int], rows: SubtreeSums) -> None:
        """Hand over the final subtree sums of some parameters, `rows[node][index]`; None or no row: no gradient.

        Each parameter is handed over once per step. Instead of a node its children may be given, which are added here. The sums
        belong to the reduction from now on and must stay unchanged until `finish` is done. Posts the first phase of every
        complete bucket.
        """
        known, alone = self._rows, len(self.group) == 1
        if self._marked is None and not alone:
            self._post_marks()
        for index in indices:
            if known[index] is not None:
                raise CommError(
                    f"parameter {index} was declared ready twice in one step", cure="call `submit_gradients` once per step"
                )
            known[index] = rows
            if not alone:
                self._bucket_of[index].unready_count -= 1
        self._unready -= len(indices)
        if alone:
            self._add_up_alone(indices, rows)
        else:
            self._post_ready()
            self.poll()

    def _post_marks(self) -> None:
        """Tell the other replicas what this one marks: long before anybody asks."""
        if self.parameters_to_mark is not None:
            self._marks.zero_()
            self._marks[list(self.parameters_to_mark())] = 1
            self._marked = self.transport.all_reduce(self._marks, group=self.group, channel=self.channel)

    def _post_ready(self) -> None:
        while self._next_first < len(self.buckets):
            bucket = self.buckets[self._next_first]
            if bucket.unready_count:
                return
            with torch.no_grad():
                bucket.fill([self._rows[i] or {} for i in bucket.layout.indices])
            bucket.first_phase = bucket.post_first()
            if self._next_second == self._next_first:
                bucket.second_phase = bucket.post_chained()
                self._next_second += bucket.second_phase is not None
            self._next_first += 1

    def poll(self) -> None:
        """Start the second phase of buckets whose first phase is done. Cheap; never blocks."""
        while self._next_second < self._next_first:
            bucket = self.buckets[self._next_second]
            assert bucket.first_phase is not None
            if not bucket.first_phase.done():
                return
            self._start_second(bucket)

    def _start_second(self, bucket: GradientBucket) -> None:
        with torch.no_grad():
            bucket.second_phase = bucket.post_second()
        self._next_second += 1

    def finish(self) -> Routine[list[Tensor | None]]:
        """Bring the rest to its end. Returns each parameter's reduced gradient, 64-byte aligned: -0.0 where no replica has one;
        of one replica the given sum itself, or None; None where replicas own runs, which `owned_totals` has.

        The tensors are views of the buckets, valid until the next `start`; a device's stream waits for them, and the host only
        where `stream_waits` are finished.
        """
        if self._unready:
            left = [i for i, rows in enumerate(self._rows) if rows is None]
            raise CommError(
                f"gradients of {len(left)} parameters (first: {left[0]}) were not declared ready",
                cure="call `submit_gradients` for every parameter of the stage, also for those without a gradient",
            )
        if len(self.group) == 1:
            self.marked_parameters = frozenset(self.parameters_to_mark() if self.parameters_to_mark is not None else ())
            self.defined_here = frozenset(index for index, total in enumerate(self._totals) if total is not None)
            return self._totals
        self.defined_here = frozenset(
            index for index, rows in enumerate(self._rows) if any(row[index] is not None for row in (rows or {}).values())
        )
        names = [
            f"gradient bucket {number} of {len(self.buckets)}, channel {self.channel}" for number in range(len(self.buckets))
        ]
        for bucket, name in list(zip(self.buckets, names, strict=True))[self._next_second :]:
            # Only additions follow: a device's stream may wait for the sums while the host posts the next bucket's totals.
            assert bucket.first_phase is not None
            yield RoutineWait(bucket.first_phase, f"{name}, sums", on_stream=True)
            self.stream_waits.add(bucket.first_phase, f"{name}, sums")
            self._start_second(bucket)
        for bucket, name in zip(self.buckets, names, strict=True):
            if bucket.second_phase is not None:
                yield RoutineWait(bucket.second_phase, f"{name}, totals", on_stream=True)
                self.stream_waits.add(bucket.second_phase, f"{name}, totals")
        if self._marked is not None:
            if not self._marked.done():
                yield RoutineWait(self._marked, f"which gradients are parts of sums over shards, channel {self.channel}")
            self.marked_parameters = frozenset(self._marks.nonzero().view(-1).tolist())
        results: list[Tensor | None] = [None] * len(self.parameters)
        self.owned_totals = {}
        for bucket in self.buckets:
            if isinstance(bucket, (OwnerBucket, SharedMemoryOwnerBucket)):
                self.owned_totals.update(zip(bucket.layout.indices, bucket.own_runs, strict=True))
                continue
            for index, view in zip(bucket.layout.indices, bucket.views, strict=True):
                results[index] = view
        self._rows = [None] * len(self.parameters)
        if not self._negotiated:
            self._negotiated = True
            self._next_buckets = yield from self._negotiate_buckets()
        return results

    def _negotiate_buckets(self) -> Routine[list[GradientBucket] | None]:
        """The buckets of all later steps, agreed with the other replicas after the first step; None: the same as now."""
        return None
        yield

    @torch.no_grad()
    def _add_up_alone(self, indices: Sequence[int], rows: SubtreeSums) -> None:
        """Set the totals of parameters where there is one replica, whose sums are the tree's root, or the root's children."""
        into: list[Tensor] = []
        added: list[Tensor] = []

        def add(left: list[Tensor | None], right: list[Tensor | None]) -> list[Tensor | None]:
            for x, y in zip(left, right, strict=True):
                if x is not None and y is not None:
                    into.append(x)
                    added.append(y)
            return [y if x is None else x for x, y in zip(left, right, strict=True)]

        sums = {node: [row[index] for index in indices] for node, row in rows.items()}
        totals = fold_tree(sums, (0, self.block_count), add) or [None] * len(indices)
        if into:
            add_all(into, added)
        for index, total in zip(indices, totals, strict=True):
            self._totals[index] = None if total is None else aligned_contiguous(total)


class CanonicalReduction(GradientReduction):
    """Reduction with the bits of one process, whatever the number of replicas (see the module's docstring)."""

    def _bucket(self, layout: BucketLayout) -> GradientBucket:
        if isinstance(layout, OwnerLayout):
            return OwnerBucket(self.replicas, layout)
        host_bytes = layout.length * layout.dtype.itemsize if self.replicas.device == CPU else None
        kinds = {"swap": PairBucket, "halving": HalvingBucket, "owners": CanonicalBucket}
        return kinds[gradient_exchange(self.subtrees_by_replica, host_bytes)](self.replicas, layout)

    def _negotiate_buckets(self) -> Routine[list[GradientBucket] | None]:
        """Buckets in shared memory, for two replicas on one machine that both find that they can read each other's."""
        one_subtree_each = [len(nodes) for nodes in self.subtrees_by_replica] == [1, 1]
        pairs = one_subtree_each and self.replicas.device == CPU
        shares_memory = pairs and self.transport.can_share_memory(self.group[1 - self.own_index])
        if not shares_memory or not all(turn_bytes := self._turn_bytes()):
            return None
        try:
            block = SharedMemoryBlock(2 * turn_bytes[self.own_index])
        except OSError:
            block = None
        addresses = [torch.zeros_like(NO_ADDRESS) for _ in self.group]
        address = block.address if block is not None else NO_ADDRESS
        yield RoutineWait(self._gather(addresses, address), "where the other replica's memory is")
        memories: list[Tensor] = []
        if block is not None:
            try:
                memories = [
                    block.memory if r == self.own_index else open_shared_memory(address, 2 * turn_bytes[r])
                    for r, address in enumerate(addresses)
                ]
            except OSError:
                memories = []
        found = [torch.zeros(1, dtype=torch.uint8) for _ in self.group]
        mine = torch.tensor([bool(memories)], dtype=torch.uint8)
        yield RoutineWait(self._gather(found, mine), "whether the other replica can read our memory")
        if block is not None:
            block.close()
        if not all(map(bool, found)):
            return None
        made: list[GradientBucket] = []
        together = CombinedMessage(self.replicas, len(self.buckets))
        starts = [0, 0]
        for bucket in self.buckets:
            layout = bucket.layout
            shared = [layout.nbytes_shared_by(replica) for replica in range(2)]
            sums = [
                [memory[at : at + nbytes].view(layout.dtype) for at in (start, turn + start)]
                for memory, start, turn, nbytes in zip(memories, starts, turn_bytes, shared, strict=True)
            ]
            if isinstance(layout, OwnerLayout):
                made.append(SharedMemoryOwnerBucket(self.replicas, layout, sums, together))
            else:
                made.append(SharedMemoryPairBucket(self.replicas, layout, sums, together))
            starts = [start + _paged(nbytes) for start, nbytes in zip(starts, shared, strict=True)]
        return made

    def _turn_bytes(self) -> list[int]:
        """By replica, of two: the bytes that it shares with the other one in a turn."""
        return [sum(_paged(bucket.layout.nbytes_shared_by(replica)) for bucket in self.buckets) for replica in range(2)]

    def _gather(self, found: list[Tensor], mine: Tensor) -> Handle:
        return self.transport.all_gather(found, mine, group=self.group, channel=self.channel)


def _paged(nbytes: int) -> int:
    """Rounded up to a multiple of 4,096: buckets share no page, and are aligned for vector instructions."""
    return -(-nbytes // 4096) * 4096


class FastReduction(GradientReduction):
    """Reduction by a plain all-reduce: the bits depend on the number of replicas."""

    def _bucket(self, layout: BucketLayout) -> GradientBucket:
        return FastBucket(self.replicas, layout)
