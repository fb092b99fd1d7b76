"""Reduction of a stage's gradients over its replicas, in buckets that overlap with the backward pass.

*Canonical* (the default): every replica adds the complete subtrees of its run of blocks by itself. Between replicas, each
owner of a slice receives all replicas' subtree sums of the slice (all-to-all), adds them in the order of the tree, and sends
the total to all (all-gather). The additions are those of one process, whatever the number of replicas. Where each run is one
complete subtree, the bytes are those of a ring: 2 (R-1)/R N per replica; if there are 2^k of one size, small buckets, and all
on a GPU, are exchanged by recursive halving and doubling between neighbours (`plan/gradient_exchange.py` chooses). *Fast*: a
plain all-reduce of each replica's own sum. Where replicas own runs of parameters, the first exchange of either ends at the
holders of runs, who keep the totals.

Buckets share a pool of bounded memory: a bucket is filled when its gradients are final and the bucket that had its memory
before has its totals. Until then gradients wait where they are, so a full pool stops nobody; and totals are put where the
gradients were.

On the host each step of a bucket follows when somebody finds the one before done. On a GPU nobody would before the backward
pass is over, because the host is ahead of it: there all of it is enqueued when the bucket is complete, in the streams of its
collectives (`Transport.run_before`, `run_after`), and runs beside that pass, which never waits for it.

An undefined gradient travels as -0.0, the one value x for which a + x == a bit for bit for every a (IEEE 754, round to
nearest). So nobody needs to know which sums are defined before adding, and the result is -0.0 where no replica has a gradient:
the votes tell (`GradientReduction.defined_here`). Where it is asked for, one small all-reduce a step tells which parameters a
replica has marked (`GradientReduction.parameters_to_mark`).
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Collection, Sequence
from dataclasses import replace

import torch
from torch import Tensor

from raypar.comm.bucket_layout import BucketLayout, BucketRoom, Runs, ShapeAndDtype, bucket_layouts
from raypar.comm.buffer_pool import CPU, aligned_contiguous, alignment_on
from raypar.comm.gradient_buckets import (
    CanonicalBucket,
    FastBucket,
    GradientBucket,
    HalvingBucket,
    PairBucket,
    ReplicaGroup,
    SlotMemory,
)
from raypar.comm.gradient_sums import GradientSum, SubtreeSums, terms_of
from raypar.comm.holder_buckets import FastOwnerBucket, OwnerBucket
from raypar.comm.parameter_marks import ParameterMarks
from raypar.comm.routine import Routine, RoutineWait, StreamWaits
from raypar.comm.shared_memory_buckets import (
    SharedMemoryBucket,
    bucket_groups,
    make_shared_buckets,
    share_turns,
    turn_bytes,
)
from raypar.comm.transport import Handle, Transport
from raypar.errors import CommError
from raypar.plan.addition_tree import covering_nodes, fold_tree
from raypar.plan.gradient_exchange import gradient_exchange
from raypar.torch_compat.multi_tensor import add_all

BUCKET_BYTES = 2 << 20
"""Small enough that the last bucket, which nothing hides, is short; from 0.5 to 8 MB the step time hardly changes."""
POOL_BYTES = 8 << 20
"""Memory of all buckets of a stage."""
SLOTS = 2
"""Buckets on their way at once that a pool has room for. With four, half as large, four replicas on two processors took 1.04
times the processor time: each bucket costs as many messages."""


class GradientReduction(ABC):
    """Base of the reductions: buckets, posted in one fixed order as their gradients become ready.

    `group`: ranks of the stage's replicas, ascending; `runs[r]`: blocks of replica r; `parameters`: (shape, dtype) of every
    use of a parameter, in layer order; `channel`: one that no other reduction of the group uses (the stage's number);
    `device`: of the gradients; `owners`: by use, the runs that each replica owns, where it and the `holders - 1` replicas that
    follow alone get their totals; empty: all get all.
    `pool_bytes`: memory of all buckets. `keeps_gradients_of_others`: whether totals of runs may lie in the memory of whole
    gradients, which then stays until the next step.
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
        owners: Sequence[Sequence[Runs]] = (),
        holders: int = 1,
        pool_bytes: int = POOL_BYTES,
        keeps_gradients_of_others: bool = True,
    ) -> None:
        if len(runs) != len(group):
            raise CommError(f"{len(runs)} runs of blocks for {len(group)} replicas", cure="give one run per replica")
        self.transport, self.channel = transport, channel
        self.group, self.block_count = tuple(group), block_count
        self.parameters = tuple(parameters)
        self.own_index = self.group.index(transport.rank)
        """This rank's index in the group."""
        self.subtrees_by_replica = [covering_nodes(run, block_count) for run in runs]
        """Subtrees of each replica, left to right."""
        nodes = tuple(map(tuple, self.subtrees_by_replica))
        self.replicas = ReplicaGroup(transport, self.group, self.own_index, channel, block_count, nodes, device, None, holders)
        self.owners, self._keeps_gradients_of_others = owners, keeps_gradients_of_others
        self._held_runs: list[Runs] = [held_runs(of, self.own_index, holders) for of in owners]
        """By parameter: the runs of which this replica gets totals; empty: all of every parameter."""
        self.pool_bytes = pool_bytes
        self._sums: dict[int, GradientSum] = {}
        """Parameter -> what this replica has of its gradient, once that is final in this step, until the next step."""
        self._totals: list[Tensor | None] = [None] * len(self.parameters)
        """By parameter: its total, where there is one replica only."""
        self._marks = ParameterMarks(transport, self.group, channel, len(self.parameters))
        self.parameters_to_mark, self.owned_totals = None, {}
        self.marked_parameters = self.defined_here = frozenset()
        self.stream_waits = StreamWaits()
        self._unready = 0
        """Parameters that are not ready in this step."""
        self._next_first = self._next_second = self._next_put = 0
        """The first bucket whose first, second phase is not posted, whose totals are not where they stay, in this step."""
        self._negotiated, self._turn = False, 0
        """Whether `_negotiate_buckets` has run, and the turn of the next group of buckets in shared memory."""
        self._take_buckets(*self._make_buckets(bucket_bytes))

    def _make_buckets(self, bucket_bytes: int) -> tuple[list[GradientBucket], list[int]]:
        """The buckets, and see `_puts_needed`."""
        if len(self.group) == 1:
            return [], []
        device, subtrees = self.replicas.device, self._sums_by_replica()
        room = BucketRoom(self.pool_bytes // SLOTS, subtrees, self.replicas.holders, alignment_on(device))
        layouts = bucket_layouts(self.parameters, bucket_bytes, device, self.owners, room=room)
        made, slots = list[GradientBucket](), list[SlotMemory]()
        for number, layout in enumerate(layouts):
            if number < SLOTS:
                slots.append(SlotMemory(max(room.bytes_of(each) for each in layouts[number::SLOTS]), device))
            slots[number % SLOTS].begin_bucket()
            made.append(self._bucket(layout, replace(self.replicas, slot=slots[number % SLOTS])))
        return made, [max(0, number + 1 - SLOTS) for number in range(len(layouts))]

    def _take_buckets(self, buckets: Sequence[GradientBucket], puts_needed: Sequence[int]) -> None:
        self.buckets = list(buckets)
        """The buckets, in the order in which they are posted; none with one replica."""
        self._puts_needed = puts_needed
        """By bucket: how many buckets must have their totals where these stay before it may be filled."""
        self._buckets_of: list[list[GradientBucket]] = [[] for _ in self.parameters]
        """By parameter: the buckets that have a part of it."""
        for bucket in buckets:
            for index in bucket.layout.indices:
                self._buckets_of[index].append(bucket)

    def _sums_by_replica(self) -> tuple[int, ...]:
        """By replica: how many sums it sends."""
        return tuple(map(len, self.subtrees_by_replica))

    @abstractmethod
    def _bucket(self, layout: BucketLayout, replicas: ReplicaGroup) -> GradientBucket:
        """Allocate one bucket, by `replicas.zeros`."""

    def start(self) -> None:
        """Begin a step. Results of the step before are no longer valid. A replica without blocks posts everything now."""
        self._sums.clear()
        self.owned_totals = {}
        self._totals = [None] * len(self.parameters)
        if len(self.group) > 1:
            self._marks.begin(self.parameters_to_mark)
        self._unready = len(self.parameters)
        self._next_first = self._next_second = self._next_put = 0
        for bucket in self.buckets:
            bucket.begin()
        if not self.subtrees_by_replica[self.own_index]:
            self.submit_gradients(range(len(self.parameters) - 1, -1, -1), {})

    def submit_gradients(self, indices: Sequence[int], rows: SubtreeSums) -> None:
        """Hand over the final subtree sums of some parameters, `rows[node][index]`; None or no row: no gradient.

        Each parameter is handed over once per step. Instead of a node its children may be given, which are added here. The sums
        belong to the reduction from now on, which may write to them. Posts the first phase of every complete bucket.
        """
        alone = len(self.group) == 1
        self._marks.post()
        nodes = self.subtrees_by_replica[self.own_index]
        for index in indices:
            if index in self._sums:
                raise CommError(
                    f"parameter {index} was declared ready twice in one step", cure="call `submit_gradients` once per step"
                )
            terms = [] if alone else [terms_of(rows, index, node) for node in nodes]
            self._sums[index] = GradientSum(self.parameters[index][0], terms, len(self._buckets_of[index]))
            for bucket in self._buckets_of[index]:
                bucket.unready_count -= 1
        self._unready -= len(indices)
        if alone:
            self._add_up_alone(indices, rows)
        else:
            self._post_ready()
            self.poll()

    def _post_ready(self) -> None:
        while self._next_first < len(self.buckets) and not self.buckets[self._next_first].unready_count:
            with torch.no_grad():
                is_enqueued = self._enqueue()
            if is_enqueued:
                continue
            if self._puts_needed[self._next_first] > self._next_put:
                return
            bucket = self.buckets[self._next_first]
            self._fill(bucket)
            bucket.first_phase = bucket.post_first()
            self._next_first += 1

    def _enqueue(self) -> bool:
        """Give the whole exchange of the next bucket to the device; False where the host takes each step."""
        number = self._next_first
        if self.replicas.device == CPU or self._next_put < number:
            return False
        bucket, needed = self.buckets[number], self._puts_needed[number]
        self._find_memory(bucket)
        bucket.second_phase = bucket.enqueue(self._sums, self.buckets[needed - 1].second_phase if needed else None)
        if bucket.second_phase is None:
            return False
        self._note_filled(bucket)
        self._next_first = self._next_second = self._next_put = number + 1
        return True

    @torch.no_grad()
    def _fill(self, bucket: GradientBucket) -> None:
        if isinstance(bucket, SharedMemoryBucket):
            if bucket.begins_group:
                self._turn = 1 - self._turn
            bucket.turn = self._turn
        self._find_memory(bucket)
        bucket.fill(self._sums)
        self._note_filled(bucket)

    def _find_memory(self, bucket: GradientBucket) -> None:
        for index in bucket.layout.indices:
            if not self._sums[index].has_memory:
                runs, keep = self._held_runs[index] if self._held_runs else None, self._keeps_gradients_of_others
                self._sums[index].find_memory(bucket.layout.dtype, runs, keep_others=keep, device=self.replicas.device)

    def _note_filled(self, bucket: GradientBucket) -> None:
        for index in bucket.layout.indices:
            self._sums[index].note_filled()

    def poll(self) -> None:
        """Start the second phase of buckets whose first phase is done, put totals where they stay, and fill what has got
        memory by that. Cheap; never blocks."""
        while True:
            while self._next_second < self._next_first and _is_done(self.buckets[self._next_second].first_phase):
                self._start_second(self.buckets[self._next_second])
            before = self._next_put
            while self._next_put < self._next_second and _is_done(self.buckets[self._next_put].second_phase):
                with torch.no_grad():
                    self.buckets[self._next_put].put_totals(self._sums)
                self._next_put += 1
            if self._next_put == before:
                return
            self._post_ready()

    def _start_second(self, bucket: GradientBucket) -> None:
        if not bucket.adds_into_totals:
            with torch.no_grad():
                bucket.receive_in_place(self._sums)
                bucket.second_phase = bucket.post_second()
        self._next_second += 1

    def finish(self) -> Routine[list[Tensor | None]]:
        """Bring the rest to its end. Returns each parameter's reduced gradient, 64-byte aligned: -0.0 where no replica has one;
        of one replica the given sum itself, or None; None where replicas own runs, which `owned_totals` has.

        The tensors are valid until the next `start`; a device's stream waits for them, and the host only where `stream_waits`
        are finished.
        """
        if self._unready:
            left = [i for i in range(len(self.parameters)) if i not in self._sums]
            raise CommError(
                f"gradients of {len(left)} parameters (first: {left[0]}) were not declared ready",
                cure="call `submit_gradients` for every parameter of the stage, also for those without a gradient",
            )
        if len(self.group) == 1:
            self.marked_parameters = frozenset(self.parameters_to_mark() if self.parameters_to_mark is not None else ())
            self.defined_here = frozenset(index for index, total in enumerate(self._totals) if total is not None)
            return self._totals
        self.defined_here = frozenset(index for index, mine in self._sums.items() if mine.is_defined)
        yield from self._empty_pool()
        self.marked_parameters = yield from self._marks.of_all()
        results = self._take_totals()
        if not self._negotiated and self.replicas.device == CPU:
            self._negotiated = True
            yield from self._negotiate_buckets(self.pool_bytes)
        return results

    def _name(self, number: int) -> str:
        return f"gradient bucket {number} of {len(self.buckets)}, channel {self.channel}"

    def _empty_pool(self) -> Routine[None]:
        """Bring the buckets to their end, one after the other, and those that wait for memory."""
        self.poll()
        while self._next_put < len(self.buckets):
            self._post_ready()
            bucket, name = self.buckets[self._next_put], self._name(self._next_put)
            if self._next_put == self._next_second:
                assert bucket.first_phase is not None
                yield RoutineWait(bucket.first_phase, f"{name}, sums")
            else:
                assert bucket.second_phase is not None
                yield RoutineWait(bucket.second_phase, f"{name}, totals")
            self.poll()
        last = self.buckets[-1].second_phase if self.buckets else None
        if last is not None and not last.done():  # enqueued, behind all others
            name = f"{self._name(len(self.buckets) - 1)}, totals"
            yield RoutineWait(last, name, on_stream=True)
            self.stream_waits.add(last, name)

    def _take_totals(self) -> list[Tensor | None]:
        """The totals by parameter; sets `owned_totals`."""
        results: list[Tensor | None] = [None] * len(self.parameters)
        self.owned_totals = {}
        for index, mine in self._sums.items():
            if not self._held_runs:
                results[index] = None if mine.total is None else mine.total.view(mine.shape)
            else:
                self.owned_totals[index] = mine.memory
        for mine in self._sums.values():
            mine.forget()
        return results

    def _negotiate_buckets(self, pool_bytes: int) -> Routine[None]:
        """Take other buckets for all later steps, agreed with the other replicas after the first step, if there are better ones
        in a pool."""
        return
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


def held_runs(owners: Sequence[Runs], replica: int, holders: int) -> Runs:
    """The runs of a parameter that a replica holds, ascending: its own, and those of the replicas before it."""
    return sorted(run for before in range(holders) for run in owners[(replica - before) % len(owners)])


def _is_done(handle: Handle | None) -> bool:
    """Whether a phase is over; None: there is none."""
    return handle is None or handle.done()


class CanonicalReduction(GradientReduction):
    """Reduction with the bits of one process, whatever the number of replicas (see the module's docstring)."""

    def _bucket(self, layout: BucketLayout, replicas: ReplicaGroup) -> GradientBucket:
        if layout.segments is not None:
            return OwnerBucket(replicas, layout)
        host_bytes = layout.nbytes if replicas.device == CPU else None
        kinds: dict[str, type[PairBucket | HalvingBucket | CanonicalBucket]]
        kinds = {"swap": PairBucket, "halving": HalvingBucket, "owners": CanonicalBucket}
        return kinds[gradient_exchange(self.subtrees_by_replica, host_bytes)](replicas, layout)

    def _negotiate_buckets(self, pool_bytes: int) -> Routine[None]:
        """Take buckets in shared memory, if two replicas on one machine both find that they can read each other's."""
        one_subtree_each = [len(nodes) for nodes in self.subtrees_by_replica] == [1, 1]
        if not one_subtree_each or not self.transport.can_share_memory(self.group[1 - self.own_index]):
            return
        layouts = [bucket.layout for bucket in self.buckets]
        groups = bucket_groups(layouts, pool_bytes // 2)
        sizes = turn_bytes(layouts, groups) if groups else []
        if not sizes or not all(sizes):
            return
        turns = yield from share_turns(self.replicas, sizes)
        if turns is not None:
            made = make_shared_buckets(self.replicas, layouts, groups, turns)
            self._take_buckets(made, [group.start for group in groups for _ in group])


class FastReduction(GradientReduction):
    """Reduction by a plain all-reduce, or, to owners, of one sum a replica: the bits depend on the number of replicas."""

    def _sums_by_replica(self) -> tuple[int, ...]:
        return (1,) * len(self.group) if self.owners else super()._sums_by_replica()

    def _bucket(self, layout: BucketLayout, replicas: ReplicaGroup) -> GradientBucket:
        return FastBucket(replicas, layout) if layout.segments is None else FastOwnerBucket(replicas, layout)
