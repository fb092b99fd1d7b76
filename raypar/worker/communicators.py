"""Which wires a worker's part of a plan needs: known before anything is built, because NCCL's communicators are made first.

Only what moves memory of the device is counted. Host memory (votes, counts of gradients, the mirror, lists of state) and
barriers travel over the control transport's sockets.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Sequence
from functools import cache
from itertools import product

from raypar.comm.communicator_key import FAST, SHARDS, CommunicatorKey
from raypar.comm.nccl.device import MAX_COMMUNICATORS
from raypar.elastic.adopt_order import AdoptOrder
from raypar.errors import PlanError
from raypar.model.graph import Graph
from raypar.model.tensor_parallel.layout import layout_of
from raypar.plan import ParallelPlan, Routing, Tie
from raypar.plan.addition_tree import covering_nodes
from raypar.plan.shard_layout import ShardLayout
from raypar.schedule.instructions import Recv, Send
from raypar.worker.assignment import Assignment
from raypar.worker.job_spec import JobSpec
from raypar.worker.tied_gradients import tie_sources

MOST_DIRECT = 8
"""A communicator each, beside those of the steps, of which there are some tens at most; and making one takes time in which
everybody waits."""


def communicators_of(
    part: AdoptOrder, rank: int, spec: JobSpec, layout: Callable[[int], ShardLayout]
) -> frozenset[CommunicatorKey]:
    """All that one rank needs in a generation; the members of a wire all name it. `layout(shards)`: how the model is cut over
    so many (`WorkerCore.layout`)."""
    assignment = part.assignment
    found = {CommunicatorKey(pair, "message") for pair in direct_moves(part) if rank in pair}
    if assignment is not None:
        plan = assignment.plan
        for instruction in (*assignment.program, *assignment.validation_program):
            if isinstance(instruction, Send):
                found.add(CommunicatorKey((rank, instruction.peer), "message"))
            elif isinstance(instruction, Recv):
                found.add(CommunicatorKey((instruction.peer, rank), "message"))
        found |= {wire for wire in _ties(plan, assignment.crossing.ties, layout) if rank in wire.members}
        for stage in plan.stages_of(rank):
            fast, shards = spec.reduction == "fast", plan.stages[stage].shards
            found |= set(_reduction(Routing(plan, spec.cut), stage, plan.seats[rank].shard, fast))
            if shards > 1:
                # The loss of logits that are cut gathers, and layers of the style to, whose stages are not looked up.
                last = plan.stages[stage].last == max(other.last for other in plan.stages)
                gathers = last or "all_gather" in layout(shards).operations(sequence=False)
                found |= set(_shards(plan, stage, plan.seats[rank].replica, spec.sequence_parallel, gathers))
    return frozenset(found)


def check_communicators(spec: JobSpec, graph: Graph, plan: ParallelPlan, parts: Sequence[Assignment], *, elastic: bool) -> None:
    """Raise `PlanError` where a worker would use more communicators than make progress beside each other on any GPU.

    A GPU with few multiprocessors takes fewer, which its worker says before the first step (`check_communicator_keys`).
    """
    layout = cache(lambda shards: layout_of(graph, shards, dict(spec.styles)))
    counts = [len(communicators_of(AdoptOrder(part, {}, 0), rank, spec, layout)) for rank, part in enumerate(parts)]
    used, most = max(counts), MAX_COMMUNICATORS - MOST_DIRECT * elastic
    if used > most:
        kept = f", {MOST_DIRECT} more being kept for state that changes hands in an elastic run" * elastic
        raise PlanError(
            f"{plan.coordinate(counts.index(used))} would use {used} NCCL communicators (one for each worker that it sends to, "
            "one for each that it receives from, some for its replicas and shards); a GPU surely works "
            f"on {most} at a time{kept}",
            cure="give neighbouring stages numbers of replicas that are closer to each other, so that each talks to fewer",
        )


def direct_moves(part: AdoptOrder) -> frozenset[tuple[int, int]]:
    """(source, dest) of state that changes hands from device to device when the generation begins; also from who has no seat in
    it. None where somebody had more than `MOST_DIRECT` neighbours: then it all travels through host memory."""
    pairs = {(part.ranks[move.source], part.ranks[move.dest]) for move in part.moves}
    pairs = {pair for pair in pairs if pair[0] != pair[1]}
    neighbours = Counter(rank for pair in pairs for rank in pair)
    return frozenset(pairs) if max(neighbours.values(), default=0) <= MOST_DIRECT else frozenset()


def _ties(plan: ParallelPlan, ties: Iterable[Tie], layout: Callable[[int], ShardLayout]) -> Iterator[CommunicatorKey]:
    """Every worker with a tied parameter gets its gradients in other workers' stages, from one replica of those
    (`worker.tied_gradients`)."""
    for tie in ties:
        for source in tie.stages:
            for stage in tie.stages:
                if plan.stages[source].position == plan.stages[stage].position:
                    continue
                for replica, shard in product(range(plan.stages[stage].replicas), range(plan.stages[stage].shards)):
                    sender, receiver = replica % plan.stages[source].replicas, plan.rank(stage, replica, shard)
                    for giver, _ in tie_sources(plan, tie.name, source, stage, shard, layout):
                        yield CommunicatorKey((plan.rank(source, sender, giver), receiver), "message")


def _reduction(routing: Routing, stage: int, shard: int, fast: bool) -> Iterator[CommunicatorKey]:
    """Gradients over the replicas of a stage (`comm.gradient_reduction`)."""
    group = routing.plan.replica_ranks(stage, shard)
    if len(group) == 1:
        return
    if fast:
        yield CommunicatorKey(group, "all_reduce", FAST + stage)
        return
    subtrees = [len(covering_nodes(routing.run(stage, r), routing.microbatches.blocks)) for r in range(len(group))]
    if subtrees != [1, 1]:  # two with one subtree each swap them whole
        yield CommunicatorKey(group, "all_to_all", stage)
    yield CommunicatorKey(group, "all_gather", stage)


def _shards(plan: ParallelPlan, stage: int, replica: int, sequence: bool, gathers: bool) -> Iterator[CommunicatorKey]:
    """What the layers of one replica do together (`model.tensor_parallel.group.ShardGroup`). `gathers`: also where they do not
    cut the sequence."""
    group = tuple(plan.rank(stage, replica, shard) for shard in range(plan.stages[stage].shards))
    yield CommunicatorKey(group, "all_reduce", SHARDS + stage)
    if sequence or gathers:
        yield CommunicatorKey(group, "all_gather", SHARDS + stage)
    if sequence:
        yield CommunicatorKey(group, "reduce_scatter", SHARDS + stage)
