"""Which ranks a worker exchanges messages with in a generation, known before they connect: the others need no socket."""

from __future__ import annotations

from collections.abc import Callable

from raypar.job import Job
from raypar.plan import vote_tree
from raypar.plan.pieces import AdoptPlanCommand
from raypar.plan.tensor_parallel_layout import TensorParallelLayout
from raypar.worker.required_communicators import required_communicators


def connected_ranks(
    part: AdoptPlanCommand, rank: int, spec: Job, layout: Callable[[int], TensorParallelLayout]
) -> frozenset[int]:
    """The ranks with which `rank` exchanges messages; each of them names `rank`, too. All others in a run of few workers.

    These are the ranks of its communicators (stages beside its own, ties, replicas, shards), those to and from which state
    moves, its neighbours in the tree of votes, and who keeps its copy of the state and whose it keeps. The first of the workers
    that measure metrics gathers what the others have measured, so they name each other. `layout(shards)`: how the model is cut
    over that many shards (`WorkerCore.layout`).
    """
    everybody = frozenset(part.rank_of_worker.values())
    if len(everybody) <= vote_tree.MOST_DIRECT:
        return everybody - {rank}
    ranks = part.rank_of_worker
    found = {ranks[worker] for move in part.moves for worker in (move.source, move.dest)}
    if part.assignment is not None:
        found.update(*(key.members for key in required_communicators(part, rank, spec, layout)))
        plan = part.assignment.plan
        found |= vote_tree.vote_neighbours(rank, plan.world)
        found |= {keeper if ward == rank else ward for ward, keeper in part.mirror_keepers.items() if rank in (ward, keeper)}
        for stage in plan.stages_of(rank):
            found |= set(plan.replica_ranks(stage, plan.role_in(rank, stage).shard))
        measuring = plan.replica_ranks(len(plan.stages) - 1, 0)
        if rank in measuring:
            found |= set(measuring if rank == measuring[0] else measuring[:1])
    return frozenset(found - {rank})
