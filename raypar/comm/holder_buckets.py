"""Buckets of gradients of which each replica gets the totals of what it holds alone."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import replace
from functools import partial
from itertools import accumulate

from torch import Tensor

from raypar.comm.bucket_layout import BucketLayout, BucketPart
from raypar.comm.collectives import add_over_tree
from raypar.comm.gradient_buckets import (
    GradientBucket,
    Place,
    ReplicaGroup,
    Sums,
    TreeAdditions,
    fill_places,
    fill_places_with_all,
)
from raypar.comm.transport import Handle
from raypar.plan.addition_tree import TreeNode
from raypar.torch_compat.multi_tensor import copy_all


class OwnerBucket(GradientBucket):
    """Bucket of parameters whose runs replicas own: the holders of a run receive all subtree sums of it, add them, and keep the
    totals; nobody has all of them.

    The runs of one owner are a *segment*. With K subtrees here, and N elements in all segments, a replica has K N elements to
    send: segment after segment, those of one subtree after subtree. The segments stand in a circle that begins with the
    replica's own, so that all segments which another replica holds lie side by side, and travel as one message: each element
    is copied once, however many replicas it goes to.
    """

    adds_into_totals = True
    first_operation = last_operation = "all_to_all"

    def __init__(self, replicas: ReplicaGroup, layout: BucketLayout) -> None:
        assert layout.segments is not None
        me, nodes, count = replicas.own_index, replicas.subtrees_by_replica, len(replicas.ranks)
        own, lengths = len(nodes[me]), [stop - start for start, stop in layout.segments]
        held = [owner % count for owner in range(me + 1 - replicas.holders, me + 1)]
        size = sum(lengths[owner] for owner in held)
        outgoing = replicas.zeros(own * layout.length, layout.dtype)
        around = [(me + after) % count for after in range(count)]
        begins = dict(zip(around, accumulate((own * lengths[owner] for owner in around), initial=0), strict=False))
        here = {owner: outgoing[begins[owner] :][: own * lengths[owner]] for owner in range(count)}
        super().__init__(replicas, layout, outgoing[:0] if own == 1 else replicas.zeros(size, layout.dtype))
        nothing = outgoing[:0]
        self.pieces = [nothing if r == me else self._piece(outgoing, begins, lengths, r, own) for r in range(count)]
        """By replica: the memory from which this replica's subtree sums of what that one holds are sent."""
        self.parts = [nothing if r == me else replicas.zeros(len(n) * size, layout.dtype) for r, n in enumerate(nodes)]
        """By replica: the memory for its subtree sums of what this replica holds."""
        self._additions: list[Callable[[], None]] = []
        """Each adds up one segment that this replica holds."""
        totals: dict[int, Tensor] = {}
        before = 0
        for owner in held:
            length = lengths[owner]
            totals[owner] = here[owner][:length] if own == 1 else self.result[before : before + length]
            sums = {
                node: (here[owner] if r == me else self.parts[r][len(of) * before :])[k * length :][:length]
                for r, of in enumerate(nodes)
                for k, node in enumerate(of)
            }
            self._additions.append(self._addition(sums, totals[owner]))
            before += length
        self._own = [(part, self._within(totals[part.owner], part)) for part in layout.parts if part.owner in totals]
        """Each part that this replica holds, and its total."""
        self._targets = [self._places(here, lengths, k) for k in range(own)]
        """By subtree: the places that `fill` writes to."""

    def _addition(self, sums: Mapping[TreeNode, Tensor], total: Tensor) -> Callable[[], None]:
        """What adds up a segment. `sums`: by subtree of any replica, its sum of the segment."""
        return TreeAdditions(sums, self.replicas.block_count, total).run

    def _piece(self, outgoing: Tensor, begins: dict[int, int], lengths: list[int], replica: int, subtrees: int) -> Tensor:
        """What goes to another replica, in the memory [K N]."""
        first = (replica + 1 - self.replicas.holders) % len(lengths)
        return outgoing[begins[first] : begins[replica] + subtrees * lengths[replica]]

    def _within(self, segment: Tensor, part: BucketPart) -> Tensor:
        """A part in the memory of its segment [n]."""
        assert self.layout.segments is not None and part.owner is not None
        start = part.offset - self.layout.segments[part.owner][0]
        return segment[start : start + part.stop - part.start]

    def _places(self, here: dict[int, Tensor], lengths: list[int], k: int) -> list[Place]:
        """Where the k-th subtree's sums go."""
        found = []
        for part in self.layout.parts:
            assert part.owner is not None
            length, is_whole = lengths[part.owner], self.layout.is_whole(part)
            memory = self._within(here[part.owner][k * length :][:length], part)
            memory = memory.view(self.layout.shapes[part.parameter]) if is_whole else memory
            found.append(Place(memory, part.parameter, part.start, part.stop, is_whole))
        return found

    def fill(self, sums: Sums) -> None:
        """See `GradientBucket.fill`."""
        for k, places in enumerate(self._targets):
            fill_places(places, sums, k)

    def post_first(self) -> Handle:
        """See `GradientBucket.post_first`."""
        r = self.replicas
        return r.transport.all_to_all(self.parts, self.pieces, group=r.ranks, channel=r.channel)

    def put_totals(self, sums: Sums) -> None:
        """See `GradientBucket.put_totals`: adds, and copies the totals of what this replica holds."""
        for add in self._additions:
            add()
        if self._own:
            copy_all(
                [sums[part.parameter].place(part.start, part.stop) for part, _ in self._own], [total for _, total in self._own]
            )


class FastOwnerBucket(OwnerBucket):
    """As `OwnerBucket`, of the fast reduction: each replica sends one sum, of all its blocks, and holders add these over the
    tree of replicas, as an all-reduce in host memory does."""

    def __init__(self, replicas: ReplicaGroup, layout: BucketLayout) -> None:
        self._subtrees = len(replicas.own_subtrees)
        count = len(replicas.ranks)
        one_each = tuple(((replica, replica + 1),) for replica in range(count))
        super().__init__(replace(replicas, subtrees_by_replica=one_each, block_count=count), layout)

    def _addition(self, sums: Mapping[TreeNode, Tensor], total: Tensor) -> Callable[[], None]:
        """See `OwnerBucket._addition`."""
        return partial(add_over_tree, [sums[node] for node in sorted(sums)], self.replicas.own_index, total)

    def fill(self, sums: Sums) -> None:
        """See `GradientBucket.fill`: this replica's subtrees are added here, left to right."""
        (places,) = self._targets
        fill_places_with_all(places, sums, self._subtrees)
