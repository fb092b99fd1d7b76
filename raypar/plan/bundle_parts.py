"""When bundles travel in parts: each shard of a receiving replica gets another part of every value, and they gather the rest.

The scatter/gather optimization of Megatron (Narayanan et al. 2021, arXiv:2104.04473, section 4.1). All T shards of the receiver
need the whole value, and all shards of the sender have it. Between nodes 1/T of it goes to each of them, so that the network
carries the value once, and the shards gather the parts inside their node, where that is fast.
"""

from __future__ import annotations

from collections.abc import Sequence

from raypar.plan.microbatch_routing import MicrobatchRouting, serving_shards
from raypar.plan.parallel_plan import ParallelPlan
from raypar.plan.stage_connections import GradientRelay, StageConnections, StageEdge

LEAST_BYTES_IN_PARTS = 64 << 10
"""Smaller tensors travel whole: a network of 10 Gbit/s carries 64 KiB in 52 microseconds, as long as an empty gather takes."""


def travels_in_parts(makers: Sequence[int], users: Sequence[int], nodes: Sequence[int]) -> bool:
    """Whether bundles from one replica to another travel in parts: the users are on one node, and who serves them is not.

    `makers`, `users`: ranks, by shard. `nodes`: by rank, the number of its node; empty: not known, so that all travel whole.
    """
    if len(users) == 1 or not nodes:
        return False
    here = {nodes[rank] for rank in users}
    return len(here) == 1 and here.isdisjoint(nodes[makers[shard]] for shard in serving_shards(tuple(makers), tuple(users)))


def gets_parts(
    plan: ParallelPlan, connections: StageConnections, stage: int, replica: int, nodes: Sequence[int] | None
) -> bool:
    """Whether a replica of a stage gets bundles in parts. `nodes`: as of `travels_in_parts`; None: whether it may on some."""
    stages = plan.stages
    sources = {edge.src for edge in connections.into(stage)} | {relay.src for relay in connections.relays_to(stage)}
    users = stages[stage].workers[replica]
    if nodes is None:
        nodes = [int(rank in users) for rank in range(plan.world)]  # if not on these, then on none
    return any(travels_in_parts(row, users, nodes) for source in sources for row in stages[source].workers)


def node_of_each_replica(plan: ParallelPlan) -> tuple[int, ...]:
    """By rank: the number of its node, if all that compute layers together are on one and no others are."""
    groups = plan.shard_groups
    return tuple(next(number for number, group in enumerate(groups) if rank in group) for rank in range(plan.world))


def network_bytes(routing: MicrobatchRouting, carrier: StageEdge | GradientRelay, nodes: Sequence[int]) -> tuple[int, bool]:
    """(bytes that an edge or relay sends from node to node in a step, whether some of them travel in parts).

    All its values are taken to be of one size.
    """
    count, cut = 0, False
    large = carrier.nbytes >= LEAST_BYTES_IN_PARTS * len(carrier.values)
    for m in range(routing.microbatches.count):
        makers, users = routing.ranks(carrier.src, m), routing.ranks(carrier.dst, m)
        if large and travels_in_parts(makers, users, nodes):
            count, cut = count + 1, True
        else:
            served = zip(serving_shards(makers, users), users, strict=True)
            count += sum(nodes[makers[shard]] != nodes[rank] for shard, rank in served)
    return count * carrier.nbytes, cut
