"""Buckets of gradients: flat buffers that one reduction over replicas fills, exchanges and adds up."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from raypar.comm.buffer_pool import CPU, alignment_on
from raypar.comm.collectives import ALIGN, even_slices
from raypar.comm.recursive_halving import halving_scratch
from raypar.comm.transport import FAST_REDUCTION_CHANNELS, Handle, Transport
from raypar.plan.addition_tree import TreeNode, addition_tree_children, fold_tree
from raypar.torch_compat.multi_tensor import copy_all

SubtreeSums = Mapping[TreeNode, Sequence[Tensor | None] | Mapping[int, Tensor | None]]
"""Node of the addition tree -> parameter index -> sum of its gradients over the node's blocks; None: no gradient."""
ShapeAndDtype = tuple[torch.Size, torch.dtype]


@dataclass(frozen=True)
class BucketLayout:
    """Which parameters one bucket has, and where each stands in its flat buffer; each starts where a new tensor might."""

    dtype: torch.dtype
    indices: tuple[int, ...]
    """Indices of the parameters."""
    offsets: tuple[int, ...]
    """First element of each parameter in the buffer."""
    shapes: tuple[torch.Size, ...]
    length: int
    """Elements of the buffer."""

    @property
    def nbytes(self) -> int:
        """Bytes of the buffer."""
        return self.length * self.dtype.itemsize

    def nbytes_shared_by(self, replica: int) -> int:
        """Bytes that one of two replicas lets the other read in place."""
        return self.nbytes

    def views(self, flat: Tensor) -> list[Tensor]:
        """The parameters inside a buffer [length]."""
        return [flat[o : o + s.numel()].view(s) for o, s in zip(self.offsets, self.shapes, strict=True)]


Runs = Sequence[tuple[int, int]]
"""Runs of elements [start, stop) of a flattened parameter, ascending."""


@dataclass(frozen=True)
class OwnerLayout(BucketLayout):
    """A bucket whose buffer has what each replica owns of its parameters side by side: `offsets` and `views` mean nothing."""

    segments: tuple[tuple[int, int], ...]
    """By replica: its part of the buffer."""
    places: tuple[tuple[tuple[int, int, int, int], ...], ...]
    """By parameter: (replica, first element in the buffer, elements [start, stop) of the parameter) of each run."""

    def nbytes_shared_by(self, replica: int) -> int:
        """Bytes that one of two replicas lets the other read in place: of what the other one owns."""
        start, stop = self.segments[1 - replica]
        return (stop - start) * self.dtype.itemsize

    def views(self, flat: Tensor) -> list[Tensor]:
        """None: see `OwnerBucket.own_runs`."""
        return []


def owner_layout(
    dtype: torch.dtype, indices: Sequence[int], shapes: Sequence[torch.Size], owners: Sequence[Sequence[Runs]], align: int
) -> OwnerLayout:
    """The layout of one bucket. `owners`: by parameter and replica, the runs that it owns; each begins at a multiple of `align`
    elements of the buffer."""
    places: list[list[tuple[int, int, int, int]]] = [[] for _ in indices]
    segments, at = [], 0
    for replica in range(len(owners[0])):
        first = at
        for own, found in zip(owners, places, strict=True):
            for start, stop in own[replica]:
                found.append((replica, at, start, stop))
                at += -(-(stop - start) // align) * align
        segments.append((first, at))
    everywhere = tuple(tuple(found) for found in places)
    return OwnerLayout(dtype, tuple(indices), (0,) * len(indices), tuple(shapes), at, tuple(segments), everywhere)


def bucket_layouts(
    parameters: Sequence[ShapeAndDtype],
    bucket_bytes: int,
    device: torch.device,
    owners: Sequence[Sequence[Runs] | None] = (),
) -> list[BucketLayout]:
    """Buckets of about `bucket_bytes` and one dtype each, last layer first: the order in which gradients become final.

    `device`: where the buffers will be. `owners`: by parameter, which runs each replica owns, where they get these alone; those
    parameters have buckets of their own.
    """
    buckets: list[BucketLayout] = []
    indices: list[int] = []
    offsets: list[int] = []
    length = 0

    def owners_of(index: int) -> Sequence[Runs] | None:
        return owners[index] if owners else None

    def close() -> None:
        nonlocal length
        if indices:
            shapes, dtype = tuple(parameters[i][0] for i in indices), parameters[indices[0]][1]
            here = [own for i in indices if (own := owners_of(i)) is not None]
            if here:
                buckets.append(owner_layout(dtype, indices, shapes, here, max(ALIGN, alignment_on(device) // dtype.itemsize)))
            else:
                buckets.append(BucketLayout(dtype, tuple(indices), tuple(offsets), shapes, length))
            indices.clear()
            offsets.clear()
            length = 0

    for index in reversed(range(len(parameters))):
        shape, dtype = parameters[index]
        if indices:
            unlike = (owners_of(index) is None) != (owners_of(indices[0]) is None)
            if unlike or dtype != parameters[indices[0]][1] or length * dtype.itemsize >= bucket_bytes:
                close()
        align = max(ALIGN, alignment_on(device) // dtype.itemsize)
        indices.append(index)
        offsets.append(length)
        length += -(-shape.numel() // align) * align
    close()
    return buckets


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

    def zeros(self, length: int, dtype: torch.dtype) -> Tensor:
        """A buffer [length] on the device."""
        return torch.zeros(length, dtype=dtype, device=self.device)


class GradientBucket(ABC):
    """One bucket: buffers kept over all steps, and the state of the current step."""

    def __init__(self, layout: BucketLayout, result: Tensor) -> None:
        self.layout = layout
        self.result = result
        """[length], valid at the end of the step."""
        self.views = layout.views(result)
        """The parameters in `result`."""
        self.begin()

    def begin(self) -> None:
        """Begin a step: no gradient is ready."""
        self.unready_count = len(self.layout.indices)
        """Parameters whose gradients are not ready."""
        self.first_phase: Handle | None = None
        """The first phase, once it is posted."""
        self.second_phase: Handle | None = None
        """The second phase, once it is posted, if there is one."""

    @abstractmethod
    def fill(self, rows: Sequence[SubtreeSums]) -> None:
        """Copy this replica's subtree sums into the buffers; `rows`: for each parameter of the layout."""

    @abstractmethod
    def post_first(self) -> Handle:
        """Start the first phase."""

    def post_second(self) -> Handle | None:
        """Combine what the first phase has brought, and start the second, if there is one.

        Called when the first phase is done, or the device's stream waits for it.
        """
        self.add_up()
        return self.gather()

    def post_chained(self) -> Handle | None:
        """As `post_second`, right after the first phase is posted, beside what is computed; None: nothing was done, because the
        host has to wait for that phase (`Transport.run_after`)."""
        return None

    @abstractmethod
    def add_up(self) -> None:
        """Combine what the first phase has brought."""

    def gather(self) -> Handle | None:
        """Start the second phase; None: there is none."""
        return None


def _terms(rows: SubtreeSums, index: int, node: TreeNode) -> list[Tensor]:
    """The terms of a parameter's sum over a node: that sum, or one or both of its children's; none if it is undefined."""
    parts = (node,) if node in rows or node[1] - node[0] == 1 else addition_tree_children(node)
    return [term for part in parts if part in rows and (term := rows[part][index]) is not None]


def _put(place: Tensor, terms: Sequence[Tensor]) -> None:
    """Write the sum of at most two terms, or "no gradient", to its place."""
    if not terms:
        place.fill_(-0.0)
    elif len(terms) == 1:
        place.copy_(terms[0])
    else:
        torch.add(*terms, out=place)


class CanonicalBucket(GradientBucket):
    """Bucket of which every replica owns a slice: the owner receives all subtree sums of it, adds them, sends the total to all.

    With K subtrees here, L_o elements in owner o's slice, S in this rank's, `length` N: `pieces[o]` [K L_o] goes to owner o,
    subtree after subtree; `parts[r]` [K_r S] comes from replica r. Together K N elements are sent and sum(K_r) S received.
    `result` [N] is the send buffer itself when K = 1 (its memory is free once the sums are sent).
    """

    def __init__(self, replicas: ReplicaGroup, layout: BucketLayout) -> None:
        nodes, me = replicas.subtrees_by_replica, replicas.own_index
        own = len(nodes[me])
        cut = self._slices(layout, len(nodes))
        start, stop = cut[me]
        outgoing = replicas.zeros(own * layout.length, layout.dtype)
        super().__init__(layout, self._make_result(replicas, layout, outgoing, own))
        self.replicas = replicas
        """The replicas that reduce together."""
        self.pieces = [outgoing[own * a : own * b] for a, b in cut]
        """By owner: the memory from which its slice of this replica's subtree sums is sent."""
        self.parts = [
            self.pieces[me] if r == me else replicas.zeros(len(n) * (stop - start), layout.dtype) for r, n in enumerate(nodes)
        ]
        """By replica: the memory for its subtree sums of this rank's slice."""
        self.totals = self._totals_in_result(cut)
        """By owner: its slice of `result`."""
        self.own_total = self.totals[me]
        """This rank's slice of `result`, to which the additions write."""
        self._targets = [self._places(outgoing, cut, own, k) for k in range(own)]
        """By subtree, then parameter of the layout: the places that `fill` writes to (see `_places`)."""
        self._adds: list[tuple[Tensor, Tensor, Tensor]] = []
        """(left, right, out) of each addition of the tree over this rank's slice, in order."""
        self._total = self._plan_adds(stop - start)
        """Where the additions leave the total of this rank's slice; None: there is no sum."""

    def _slices(self, layout: BucketLayout, replicas: int) -> list[tuple[int, int]]:
        """By owner: its slice of the buffer."""
        return even_slices(layout.length, replicas)

    def _make_result(self, replicas: ReplicaGroup, layout: BucketLayout, outgoing: Tensor, subtrees: int) -> Tensor:
        """The memory for the totals: that of the only subtree's sums, if there is one."""
        return outgoing if subtrees == 1 else replicas.zeros(layout.length, layout.dtype)

    def _totals_in_result(self, cut: Sequence[tuple[int, int]]) -> list[Tensor]:
        return [self.result[a:b] for a, b in cut]

    def _places(self, outgoing: Tensor, cut: list[tuple[int, int]], own: int, k: int) -> list[list[tuple[Tensor, int, int]]]:
        """For each parameter: where its elements [from, to) of the k-th subtree's sum go; several places at slice borders."""
        places: list[list[tuple[Tensor, int, int]]] = []
        for offset, shape in zip(self.layout.offsets, self.layout.shapes, strict=True):
            end = offset + shape.numel()
            found = []
            for a, b in cut:
                lo, hi = max(a, offset), min(b, end)
                if lo < hi:
                    at = own * a + k * (b - a) + (lo - a)
                    found.append((outgoing[at : at + hi - lo], lo - offset, hi - offset))
            if len(found) == 1:
                found = [(found[0][0].view(shape), 0, shape.numel())]
            places.append(found)
        return places

    def _plan_adds(self, length: int) -> Tensor | None:
        """List the additions of the tree over all sums of this rank's slice; returns where the total will be."""
        sums: dict[TreeNode, Tensor | None] = {}
        for part, nodes in zip(self.parts, self.replicas.subtrees_by_replica, strict=True):
            for k, node in enumerate(nodes):
                sums[node] = part[k * length : (k + 1) * length]

        def add(left: Tensor, right: Tensor) -> Tensor:
            out = self.own_total if len(self._adds) == len(sums) - 2 else left  # the last addition writes the result
            self._adds.append((left, right, out))
            return out

        return fold_tree(sums, (0, self.replicas.block_count), add)

    def fill(self, rows: Sequence[SubtreeSums]) -> None:
        """See `GradientBucket.fill`: every sum is copied, or added, once."""
        to: list[Tensor] = []
        source: list[Tensor] = []
        for k, node in enumerate(self.replicas.subtrees_by_replica[self.replicas.own_index]):
            for index, given, places in zip(self.layout.indices, rows, self._targets[k], strict=True):
                terms = _terms(given, index, node)
                if len(terms) == 1 and len(places) == 1:
                    to.append(places[0][0])
                    source.append(terms[0])
                elif len(places) == 1:
                    _put(places[0][0], terms)
                else:
                    flat = [term.reshape(-1) for term in terms]
                    for place, lo, hi in places:
                        if len(flat) == 1:
                            to.append(place)
                            source.append(flat[0][lo:hi])
                        else:
                            _put(place, [term[lo:hi] for term in flat])
        if to:
            copy_all(to, source)

    def post_first(self) -> Handle:
        """See `GradientBucket.post_first`."""
        r = self.replicas
        return r.transport.all_to_all(self.parts, self.pieces, group=r.ranks, channel=r.channel)

    def post_chained(self) -> Handle | None:
        """See `GradientBucket.post_chained`."""
        assert self.first_phase is not None
        r = self.replicas
        added = r.transport.run_after(self.first_phase, self.add_up, group=r.ranks, channel=r.channel)
        return None if added is None else self.gather()

    def add_up(self) -> None:
        """See `GradientBucket.add_up`."""
        for left, right, out in self._adds:
            torch.add(left, right, out=out)
        if self._total is not None and self._total.data_ptr() != self.own_total.data_ptr():
            self.own_total.copy_(self._total)

    def gather(self) -> Handle:
        """See `GradientBucket.gather`."""
        r = self.replicas
        return r.transport.all_gather(self.totals, self.own_total, group=r.ranks, channel=r.channel)


def own_runs(layout: OwnerLayout, own: int, total: Tensor) -> list[list[Tensor]]:
    """By parameter of the layout: the runs that replica `own` owns, flat, in `total`, its segment of the buffer."""
    first = layout.segments[own][0]
    return [
        [total[at - first : at - first + stop - start] for replica, at, start, stop in places if replica == own]
        for places in layout.places
    ]


class OwnerBucket(CanonicalBucket):
    """Bucket of parameters whose runs replicas own: an owner receives all subtree sums of its runs, adds them, and keeps the
    totals; nobody has all of them."""

    layout: OwnerLayout

    def __init__(self, replicas: ReplicaGroup, layout: OwnerLayout) -> None:
        super().__init__(replicas, layout)
        self.own_runs = own_runs(layout, replicas.own_index, self.own_total)
        """By parameter of the layout: the totals of the runs that this replica owns, valid at the end of the step."""

    def _slices(self, layout: BucketLayout, replicas: int) -> list[tuple[int, int]]:
        assert isinstance(layout, OwnerLayout)
        return list(layout.segments)

    def _make_result(self, replicas: ReplicaGroup, layout: BucketLayout, outgoing: Tensor, subtrees: int) -> Tensor:
        """The memory for this replica's totals."""
        start, stop = self._slices(layout, len(replicas.ranks))[replicas.own_index]
        return outgoing[start:stop] if subtrees == 1 else replicas.zeros(stop - start, layout.dtype)

    def _totals_in_result(self, cut: Sequence[tuple[int, int]]) -> list[Tensor]:
        """The result is this replica's total; the others' are not here."""
        return [self.result] * len(cut)

    def _places(self, outgoing: Tensor, cut: list[tuple[int, int]], own: int, k: int) -> list[list[tuple[Tensor, int, int]]]:
        """As in `CanonicalBucket`, for the runs of all owners."""
        found = []
        for shape, places in zip(self.layout.shapes, self.layout.places, strict=True):
            here = []
            for replica, offset, start, stop in places:
                a, b = cut[replica]
                at = own * a + k * (b - a) + offset - a
                here.append((outgoing[at : at + stop - start], start, stop))
            if len(here) == 1:
                here = [(here[0][0].view(shape), 0, shape.numel())]
            found.append(here)
        return found

    def post_chained(self) -> Handle | None:
        """See `GradientBucket.post_chained`."""
        assert self.first_phase is not None
        r = self.replicas
        return r.transport.run_after(self.first_phase, self.add_up, group=r.ranks, channel=r.channel)

    def gather(self) -> Handle | None:  # type: ignore[override]
        """Nothing: each owner keeps its totals."""
        return None


def _fill(views: Sequence[Tensor], layout: BucketLayout, rows: Sequence[SubtreeSums], nodes: Sequence[TreeNode]) -> None:
    """Put the sum over `nodes`, left to right, of every parameter of the layout into its view."""
    to: list[Tensor] = []
    source: list[Tensor] = []
    for index, given, view in zip(layout.indices, rows, views, strict=True):
        terms = [term for node in nodes for term in _terms(given, index, node)]
        if len(terms) == 1:
            to.append(view)
            source.append(terms[0])
        else:
            _put(view, terms[:2])
            for term in terms[2:]:
                view.add_(term)
    if to:
        copy_all(to, source)


class FastBucket(GradientBucket):
    """Bucket of the fast reduction: one buffer [length], all-reduced in place."""

    def __init__(self, replicas: ReplicaGroup, layout: BucketLayout) -> None:
        super().__init__(layout, replicas.zeros(layout.length, layout.dtype))
        self.replicas = replicas

    def fill(self, rows: Sequence[SubtreeSums]) -> None:
        """See `GradientBucket.fill`: this replica's subtrees are added here."""
        _fill(self.views, self.layout, rows, self.replicas.subtrees_by_replica[self.replicas.own_index])

    def post_first(self) -> Handle:
        """See `GradientBucket.post_first`."""
        r = self.replicas
        return r.transport.all_reduce(self.result, group=r.ranks, channel=FAST_REDUCTION_CHANNELS + r.channel)

    def add_up(self) -> None:
        """See `GradientBucket.add_up`: nothing is left to do."""


class PairBucket(FastBucket):
    """Bucket of two replicas with one subtree each: they swap whole sums, and both add.

    Sends as many bytes as `CanonicalBucket` and gives the same bits, with one phase less.
    """

    def __init__(self, replicas: ReplicaGroup, layout: BucketLayout) -> None:
        super().__init__(replicas, layout)
        self._pair = [self.result if r == replicas.own_index else torch.zeros_like(self.result) for r in range(2)]

    def post_first(self) -> Handle:
        """See `GradientBucket.post_first`."""
        r = self.replicas
        return r.transport.all_gather(self._pair, self.result, group=r.ranks, channel=r.channel)

    def post_chained(self) -> Handle | None:
        """See `GradientBucket.post_chained`."""
        assert self.first_phase is not None
        r = self.replicas
        return r.transport.run_after(self.first_phase, self.add_up, group=r.ranks, channel=r.channel)

    def add_up(self) -> None:
        """See `GradientBucket.add_up`: the root of the tree."""
        torch.add(self._pair[0], self._pair[1], out=self.result)


class HalvingBucket(FastBucket):
    """Bucket of 2^k replicas with one subtree of the same size each: recursive halving and doubling adds their sums.

    Sends as many bytes as `CanonicalBucket` and gives the same bits, in one operation of 2k messages from each rank.
    """

    def __init__(self, replicas: ReplicaGroup, layout: BucketLayout) -> None:
        super().__init__(replicas, layout)
        self._scratch = replicas.zeros(halving_scratch(even_slices(layout.length, len(replicas.ranks))), layout.dtype)

    def post_first(self) -> Handle:
        """See `GradientBucket.post_first`."""
        r = self.replicas
        return r.transport.halving_all_reduce(self.result, self._scratch, group=r.ranks, channel=r.channel)


class CombinedMessage:
    """One message for several buckets, posted when the last of them is filled; also the `Handle` of each bucket.

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


class SharedMemoryPairBucket(GradientBucket):
    """Bucket of two replicas on one machine: each reads the other's sums in shared memory; a message says that they are ready.

    `sums[r][t]` [length]: memory of replica r that both see, in turn t; turns alternate, step by step. The total of turn t is
    written to this replica's memory of the other turn, which the other replica no longer reads: its message for step n proves
    that it has finished reading step n - 1. The same holds for filling.
    """

    def __init__(
        self, replicas: ReplicaGroup, layout: BucketLayout, sums: Sequence[Sequence[Tensor]], together: CombinedMessage
    ) -> None:
        self.replicas = replicas
        self._together = together
        self._left, self._right = sums
        self._mine = sums[replicas.own_index]
        self._places = [layout.views(one) for one in self._mine]
        """By turn: the parameters in this replica's memory."""
        self._turn = 0
        """The turn of this step: 0 or 1."""
        super().__init__(layout, self._mine[1])

    def begin(self) -> None:
        """See `GradientBucket.begin`."""
        self._turn = 1 - self._turn
        self.result = self._mine[1 - self._turn]
        self.views = self._places[1 - self._turn]
        super().begin()

    def fill(self, rows: Sequence[SubtreeSums]) -> None:
        """See `GradientBucket.fill`."""
        _fill(self._places[self._turn], self.layout, rows, self.replicas.subtrees_by_replica[self.replicas.own_index])

    def post_first(self) -> Handle:
        """See `GradientBucket.post_first`."""
        return self._together.add_filled_bucket()

    def add_up(self) -> None:
        """See `GradientBucket.add_up`: the root of the tree."""
        torch.add(self._left[self._turn], self._right[self._turn], out=self.result)
        self.replicas.transport.ledger.count("window", sent=self.result.nbytes, received=self.result.nbytes)


class SharedMemoryOwnerBucket(GradientBucket):
    """`OwnerBucket` of two replicas on one machine with one subtree each: an owner reads the other's sums of its runs in shared
    memory, in turns as `SharedMemoryPairBucket` does, and adds them to its own, which nobody else sees.

    `sums[r][t]`: memory of replica r in turn t for its sums of what the other one owns.
    """

    def __init__(
        self, replicas: ReplicaGroup, layout: OwnerLayout, sums: Sequence[Sequence[Tensor]], together: CombinedMessage
    ) -> None:
        self.replicas = replicas
        self._together = together
        own = replicas.own_index
        self._theirs = sums[1 - own]
        start, stop = layout.segments[own]
        total = replicas.zeros(stop - start, layout.dtype)
        self._targets = [_places_of_owners(layout, [mine, total] if own else [total, mine]) for mine in sums[own]]
        """By turn, then parameter: the places that `fill` writes to."""
        self._turn = 0
        """The turn of this step: 0 or 1."""
        super().__init__(layout, total)
        self.own_runs = own_runs(layout, own, self.result)
        """See `OwnerBucket.own_runs`."""

    def begin(self) -> None:
        """See `GradientBucket.begin`."""
        self._turn = 1 - self._turn
        super().begin()

    def fill(self, rows: Sequence[SubtreeSums]) -> None:
        """See `GradientBucket.fill`."""
        to: list[Tensor] = []
        source: list[Tensor] = []
        (node,) = self.replicas.subtrees_by_replica[self.replicas.own_index]
        for index, given, places in zip(self.layout.indices, rows, self._targets[self._turn], strict=True):
            terms = [term.reshape(-1) for term in _terms(given, index, node)]
            for place, lo, hi in places:
                if len(terms) == 1:
                    to.append(place)
                    source.append(terms[0][lo:hi])
                else:
                    _put(place, [term[lo:hi] for term in terms])
        if to:
            copy_all(to, source)

    def post_first(self) -> Handle:
        """See `GradientBucket.post_first`."""
        return self._together.add_filled_bucket()

    def add_up(self) -> None:
        """See `GradientBucket.add_up`: the root of the tree, whose two terms may be added in either order."""
        self.result.add_(self._theirs[self._turn])
        self.replicas.transport.ledger.count("window", sent=self.result.nbytes, received=self.result.nbytes)


def _places_of_owners(layout: OwnerLayout, buffers: Sequence[Tensor]) -> list[list[tuple[Tensor, int, int]]]:
    """For each parameter: where its elements [from, to) go in a buffer for each owner."""
    firsts = [start for start, _ in layout.segments]
    return [
        [(buffers[r][at - firsts[r] : at - firsts[r] + stop - start], start, stop) for r, at, start, stop in places]
        for places in layout.places
    ]
