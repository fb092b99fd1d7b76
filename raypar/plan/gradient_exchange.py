"""The way in which the replicas of a stage exchange a bucket of gradients in the canonical reduction: one choice for the
buffers, the communicators and the predicted time.

All ways send 2 (R-1)/R of the bucket's bytes where each of R replicas has one complete subtree, and all give the same bits.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Literal

from raypar.plan.addition_tree import TreeNode

GradientExchange = Literal["swap", "halving", "owners"]
"""`swap`: two replicas send each other their whole sums. `halving`: recursive halving and doubling between neighbours, in
2 log2 R messages. `owners`: each replica adds the sums of one slice (all-to-all) and sends the total to all (all-gather), in
2 (R-1) messages."""

HALVING_HOST_BYTES = 256 << 10
"""Largest bucket in host memory that is halved.

Of small buckets the number of messages counts: with four and eight processes on two cores `owners` take 1.2 to 1.3 times as
long as `halving` over TCP (1.1 over Unix sockets) for 4 to 256 KiB, 1.0 to 1.1 times for 2 MiB, and 0.8 to 0.95 times for 8
MiB; many of 2 MiB together 0.8 to 1.2 times (jobs/bench/results/gradient_exchange_2core-epyc_202611.md). On a device all is
enqueued at once; there it has not been measured."""


def gradient_exchange(subtrees: Sequence[Sequence[TreeNode]], host_bytes: int | None) -> GradientExchange:
    """How replicas exchange a bucket.

    `subtrees`: of each replica, the complete subtrees of its run of blocks, left to right; `host_bytes`: the bucket's size in
    host memory; None: it is in a device's, of whatever size, so that one communicator suffices.
    """
    replicas = len(subtrees)
    if [len(nodes) for nodes in subtrees] != [1] * replicas:
        return "owners"
    if replicas == 2:
        return "swap"
    sizes = {stop - start for ((start, stop),) in subtrees}
    halved = replicas.bit_count() == len(sizes) == 1 and (host_bytes is None or host_bytes <= HALVING_HOST_BYTES)
    return "halving" if halved else "owners"


def buffer_elements(length: int, subtrees: Sequence[int], owned: Sequence[int] | None = None) -> int:
    """Elements of all buffers of a bucket of `length` elements, on the replica where they are most, whichever way it is
    exchanged: its subtree sums of everything, all others' sums of what it adds, and the total.

    `subtrees`: by replica, the number of its subtree sums. `owned`: by replica, of how many elements of the bucket it gets the
    totals, where only their holders do; None: each adds an even share, and all get all totals.
    """
    most, everybody = 2 * length, sum(subtrees)
    for replica, own in enumerate(subtrees):
        share = -(-length // len(subtrees)) if owned is None else owned[replica]
        total = 0 if own == 1 else length if owned is None else share  # the only sums' memory is free when they are sent
        most = max(most, own * length + (everybody - own) * share + total)
    return most
