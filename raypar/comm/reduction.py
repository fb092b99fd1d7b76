"""Reduction of a stage's gradients over its replicas, in buckets that overlap with the backward pass (DESIGN 4.5).

*Canonical* (the default): every replica adds the complete subtrees of its run of blocks by itself. Between replicas, each
owner of a slice gets everybody's subtree sums of it (all-to-all), adds them in the order of the tree, and hands the total
round (all-gather). The additions are those of one process, whatever the number of replicas; where each run is one
complete subtree the bytes are those of a ring, 2 (R-1)/R N per replica. *Fast*: a plain all-reduce of each replica's own sum.

An undefined gradient travels as -0.0, the one value x with a + x == a bit for bit for every a (IEEE 754, round to nearest),
so nobody needs to know which sums are defined before adding; one small all-reduce of counts a step tells which results are.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from raypar.comm.collectives import ALIGN, slices
from raypar.comm.transport import Handle, Routine, Transport, Wait
from raypar.errors import CommError
from raypar.plan.tree import Node, children, cover, fold

BUCKET_BYTES = 2 << 20
"""Small enough that the last bucket, which nothing hides, is short; from 0.5 to 8 MB the step time hardly changes."""
Rows = Mapping[Node, Sequence[Tensor | None] | Mapping[int, Tensor | None]]
"""node -> parameter -> sum of the node's blocks, None where no gradient was defined"""
Parameter = tuple[torch.Size, torch.dtype]


@dataclass(frozen=True)
class Layout:
    """Where the parameters of one bucket lie in a flat buffer of `length` elements; each starts at a 64-byte boundary."""

    dtype: torch.dtype
    indices: tuple[int, ...]
    offsets: tuple[int, ...]
    shapes: tuple[torch.Size, ...]
    length: int

    def views(self, flat: Tensor) -> list[Tensor]:
        """The parameters inside a buffer [length]."""
        return [flat[o : o + s.numel()].view(s) for o, s in zip(self.offsets, self.shapes, strict=True)]


def layouts(parameters: Sequence[Parameter], bucket_bytes: int) -> list[Layout]:
    """Buckets of about `bucket_bytes` and one dtype each, last layer first: the order in which gradients become final."""
    buckets: list[Layout] = []
    indices: list[int] = []
    offsets: list[int] = []
    length = 0

    def close() -> None:
        nonlocal length
        if indices:
            shapes = tuple(parameters[i][0] for i in indices)
            buckets.append(Layout(parameters[indices[0]][1], tuple(indices), tuple(offsets), shapes, length))
            indices.clear()
            offsets.clear()
            length = 0

    for index in reversed(range(len(parameters))):
        shape, dtype = parameters[index]
        if indices and (dtype != parameters[indices[0]][1] or length * dtype.itemsize >= bucket_bytes):
            close()
        align = max(ALIGN, 64 // dtype.itemsize)
        indices.append(index)
        offsets.append(length)
        length += -(-shape.numel() // align) * align
    close()
    return buckets


class Bucket(ABC):
    """One bucket: buffers kept over all steps, and the state of the current one.

    `result` [length] is valid at the end of the step; `views` are the parameters in it.
    """

    def __init__(self, layout: Layout, result: Tensor) -> None:
        self.layout = layout
        self.result = result
        self.views = layout.views(result)
        self.missing = len(layout.indices)
        self.first: Handle | None = None
        self.second: Handle | None = None

    @abstractmethod
    def fill(self, rows: Sequence[Rows]) -> None:
        """Copy this replica's subtree sums into the buffers; `rows`: for each parameter of the layout."""

    @abstractmethod
    def post_first(self) -> Handle:
        """Start the first phase."""

    @abstractmethod
    def post_second(self) -> Handle | None:
        """The first phase is done: combine and start the second, if there is one."""


class Reduction(ABC):
    """What `CanonicalReduction` and `FastReduction` share: buckets posted in one fixed order as their gradients get ready.

    `group`: ranks of the stage's replicas, ascending; `runs[r]`: blocks of replica r; `parameters`: (shape, dtype) of every
    use of a parameter, in layer order; `channel`: apart from all other reductions of the group (the stage's number).
    """

    def __init__(
        self,
        transport: Transport,
        *,
        group: Sequence[int],
        runs: Sequence[range],
        blocks: int,
        parameters: Sequence[Parameter],
        bucket_bytes: int = BUCKET_BYTES,
        channel: int = 0,
    ) -> None:
        if len(runs) != len(group):
            raise CommError(f"{len(runs)} runs of blocks for {len(group)} replicas", cure="give one run per replica")
        self.transport = transport
        self.group = tuple(group)
        self.blocks = blocks
        self.parameters = tuple(parameters)
        self.channel = channel
        self.me = self.group.index(transport.rank)
        self.nodes = [cover(run, blocks) for run in runs]
        """Subtrees of each replica, left to right."""
        self._rows: list[Rows | None] = [None] * len(self.parameters)
        self._totals: list[Tensor | None] = [None] * len(self.parameters)
        self._counts = torch.zeros(len(self.parameters), dtype=torch.int32)
        self._counted: Handle | None = None
        self._unready = 0
        self._next_first = self._next_second = 0
        self.buckets: list[Bucket] = []
        self._bucket_of: dict[int, Bucket] = {}
        if len(self.group) > 1:
            self.buckets = [self._bucket(layout) for layout in layouts(self.parameters, bucket_bytes)]
            self._bucket_of = {i: b for b in self.buckets for i in b.layout.indices}

    @abstractmethod
    def _bucket(self, layout: Layout) -> Bucket:
        """Allocate one bucket."""

    def start(self) -> None:
        """Begin a step. Results of the step before are no longer valid. A replica without blocks posts everything now."""
        self._rows = [None] * len(self.parameters)
        self._totals = [None] * len(self.parameters)
        self._counted = None
        self._unready = len(self.parameters)
        self._next_first = self._next_second = 0
        for bucket in self.buckets:
            bucket.missing = len(bucket.layout.indices)
            bucket.first = bucket.second = None
        if not self.nodes[self.me]:
            self.ready(range(len(self.parameters) - 1, -1, -1), {})

    def ready(self, indices: Sequence[int], rows: Rows) -> None:
        """The subtree sums of some parameters are final: `rows[node][index]`; None or no row: no gradient. Once per step each.

        Instead of a node its children may be given, which are added here. The sums belong to the reduction from now on and
        must stay as they are until `finish` is done. Posts the first phase of every bucket that nothing is missing of.
        """
        known, alone = self._rows, len(self.group) == 1
        for index in indices:
            if known[index] is not None:
                raise CommError(f"parameter {index} was declared ready twice in one step", cure="call `ready` once per step")
            known[index] = rows
            if alone:
                self._totals[index] = self._alone(index, rows)
            else:
                self._bucket_of[index].missing -= 1
        self._unready -= len(indices)
        if not alone:
            self._post_ready()
            self.poll()

    def _post_ready(self) -> None:
        while self._next_first < len(self.buckets):
            bucket = self.buckets[self._next_first]
            if bucket.missing:
                return
            with torch.no_grad():
                bucket.fill([self._rows[i] or {} for i in bucket.layout.indices])
            bucket.first = bucket.post_first()
            self._next_first += 1
        if self._unready == 0 and self._counted is None:
            defined = [any(row[i] is not None for row in (rows or {}).values()) for i, rows in enumerate(self._rows)]
            self._counts.copy_(torch.tensor(defined))
            self._counted = self.transport.all_reduce(self._counts, group=self.group, channel=self.channel)

    def poll(self) -> None:
        """Start the second phase of buckets whose first is done. Cheap; never blocks."""
        while self._next_second < self._next_first:
            bucket = self.buckets[self._next_second]
            assert bucket.first is not None
            if not bucket.first.done():
                return
            with torch.no_grad():
                bucket.second = bucket.post_second()
            self._next_second += 1

    def finish(self) -> Routine[list[Tensor | None]]:
        """Wait for the rest. Returns each parameter's reduced gradient, 64-byte aligned; None where no replica has one.

        The tensors are views of the buckets, the same ones in every step, valid until the next `start` (of one replica: the
        given sum itself).
        """
        if self._unready:
            left = [i for i, rows in enumerate(self._rows) if rows is None]
            raise CommError(
                f"gradients of {len(left)} parameters (first: {left[0]}) were not declared ready",
                cure="call `ready` for every parameter of the stage, also for those without a gradient",
            )
        if len(self.group) == 1:
            return self._totals
        for number, bucket in enumerate(self.buckets):
            if bucket.first is not None and self._next_second <= number:
                yield Wait(bucket.first, f"gradient bucket {number} of {len(self.buckets)}, channel {self.channel}, sums")
            self.poll()
        for number, bucket in enumerate(self.buckets):
            if bucket.second is not None:
                yield Wait(bucket.second, f"gradient bucket {number} of {len(self.buckets)}, channel {self.channel}, totals")
        results: list[Tensor | None] = [None] * len(self.parameters)
        if self._counted is not None:
            yield Wait(self._counted, f"which gradients are defined, channel {self.channel}")
        counts = self._counts.tolist()
        for bucket in self.buckets:
            for index, view in zip(bucket.layout.indices, bucket.views, strict=True):
                results[index] = view if counts[index] else None
        self._rows = [None] * len(self.parameters)
        return results

    def _alone(self, index: int, rows: Rows) -> Tensor | None:
        with torch.no_grad():
            total = fold({node: row[index] for node, row in rows.items()}, (0, self.blocks), Tensor.add_)
            if total is None or (total.is_contiguous() and total.data_ptr() % 64 == 0):
                return total
            return total.clone(memory_format=torch.contiguous_format)


def _terms(rows: Rows, index: int, node: Node) -> list[Tensor]:
    """What adds up to a parameter's sum over a node: the sum itself, or one or both of its children's; nothing if undefined."""
    parts = (node,) if node in rows or node[1] - node[0] == 1 else children(node)
    return [term for part in parts if part in rows and (term := rows[part][index]) is not None]


def _put(place: Tensor, terms: Sequence[Tensor]) -> None:
    """The sum of at most two terms, or "no gradient", at its place."""
    if not terms:
        place.fill_(-0.0)
    elif len(terms) == 1:
        place.copy_(terms[0])
    else:
        torch.add(*terms, out=place)


class CanonicalBucket(Bucket):
    """Buffers of one bucket. With K subtrees here, L_o elements in owner o's slice, S in ours, `length` N:

    `pieces[o]` [K L_o] goes to owner o: subtree after subtree; `parts[r]` [K_r S] comes from replica r. Together K N sent and
    sum(K_r) S received; `result` [N] is the send buffer itself when K = 1 (its places are free once the sums have gone).
    """

    def __init__(self, reduction: CanonicalReduction, layout: Layout) -> None:
        nodes, me = reduction.nodes, reduction.me
        own = len(nodes[me])
        cut = slices(layout.length, len(nodes))
        start, stop = cut[me]
        outgoing = torch.zeros(own * layout.length, dtype=layout.dtype)
        super().__init__(layout, outgoing if own == 1 else torch.zeros(layout.length, dtype=layout.dtype))
        self.reduction = reduction
        self.pieces = [outgoing[own * a : own * b] for a, b in cut]
        self.parts = [
            self.pieces[me] if r == me else torch.zeros(len(n) * (stop - start), dtype=layout.dtype)
            for r, n in enumerate(nodes)
        ]
        self.totals = [self.result[a:b] for a, b in cut]
        self.mine = self.totals[me]
        self._targets = [self._places(outgoing, cut, own, k) for k in range(own)]
        self._adds: list[tuple[Tensor, Tensor, Tensor]] = []
        self._total = self._plan_adds(stop - start)

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
        """Write down the additions of the tree over everybody's sums of our slice; returns where the total will be."""
        sums: dict[Node, Tensor | None] = {}
        for part, nodes in zip(self.parts, self.reduction.nodes, strict=True):
            for k, node in enumerate(nodes):
                sums[node] = part[k * length : (k + 1) * length]

        def add(left: Tensor, right: Tensor) -> Tensor:
            out = self.mine if len(self._adds) == len(sums) - 2 else left  # the last addition writes the result
            self._adds.append((left, right, out))
            return out

        return fold(sums, (0, self.reduction.blocks), add)

    def fill(self, rows: Sequence[Rows]) -> None:
        """See `Bucket.fill`: one copy, or one addition, of every sum."""
        to: list[Tensor] = []
        source: list[Tensor] = []
        for k, node in enumerate(self.reduction.nodes[self.reduction.me]):
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
                        _put(place, [term[lo:hi] for term in flat])
        if to:
            torch._foreach_copy_(to, source)

    def post_first(self) -> Handle:
        """See `Bucket.post_first`."""
        r = self.reduction
        return r.transport.all_to_all(self.parts, self.pieces, group=r.group, channel=r.channel)

    def post_second(self) -> Handle:
        """See `Bucket.post_second`."""
        for left, right, out in self._adds:
            torch.add(left, right, out=out)
        if self._total is not None and self._total.data_ptr() != self.mine.data_ptr():
            self.mine.copy_(self._total)
        r = self.reduction
        return r.transport.all_gather(self.totals, self.mine, group=r.group, channel=r.channel)


class FastBucket(Bucket):
    """One buffer [length], reduced in place."""

    def __init__(self, reduction: Reduction, layout: Layout) -> None:
        super().__init__(layout, torch.zeros(layout.length, dtype=layout.dtype))
        self.reduction = reduction

    def fill(self, rows: Sequence[Rows]) -> None:
        """See `Bucket.fill`: this replica's subtrees are added here, left to right."""
        to: list[Tensor] = []
        source: list[Tensor] = []
        nodes = self.reduction.nodes[self.reduction.me]
        for index, given, view in zip(self.layout.indices, rows, self.views, strict=True):
            terms = [term for node in nodes for term in _terms(given, index, node)]
            if len(terms) == 1:
                to.append(view)
                source.append(terms[0])
            else:
                _put(view, terms[:2])
                for term in terms[2:]:
                    view.add_(term)
        if to:
            torch._foreach_copy_(to, source)

    def post_first(self) -> Handle:
        """See `Bucket.post_first`."""
        r = self.reduction
        return r.transport.all_reduce(self.result, group=r.group, channel=r.channel + (1 << 32))

    def post_second(self) -> Handle | None:
        """See `Bucket.post_second`: nothing is left to do."""
        return None


class PairBucket(FastBucket):
    """Two replicas with one subtree each: they swap them whole and both add. The same bytes and bits, one phase less."""

    def __init__(self, reduction: CanonicalReduction, layout: Layout) -> None:
        super().__init__(reduction, layout)
        self._pair = [self.result if r == reduction.me else torch.zeros_like(self.result) for r in range(2)]

    def post_first(self) -> Handle:
        """See `Bucket.post_first`."""
        r = self.reduction
        return r.transport.all_gather(self._pair, self.result, group=r.group, channel=r.channel)

    def post_second(self) -> Handle | None:
        """See `Bucket.post_second`: the root of the tree."""
        torch.add(self._pair[0], self._pair[1], out=self.result)
        return None


class CanonicalReduction(Reduction):
    """The bits of one process for every number of replicas. See the module."""

    def _bucket(self, layout: Layout) -> Bucket:
        if [len(nodes) for nodes in self.nodes] == [1, 1]:
            return PairBucket(self, layout)
        return CanonicalBucket(self, layout)


class FastReduction(Reduction):
    """Same interface, a plain all-reduce: bits depend on the number of replicas."""

    def _bucket(self, layout: Layout) -> Bucket:
        return FastBucket(self, layout)
