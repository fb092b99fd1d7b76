"""Which communicators a worker's part of a plan needs, known before anything is built, because NCCL's are made first.

Only operations that move the device's memory are counted. Host memory (votes, counts of gradients, the mirror, lists of
state) and barriers travel over the control transport's sockets.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from functools import cache

from raypar.comm.nccl.device import COMMUNICATORS, MAX_COMMUNICATORS, WORKER_ENVIRONMENT
from raypar.comm.transport import FAST_REDUCTION_CHANNELS, SHARD_CHANNELS, CommunicatorKey
from raypar.comm.virtual_shards import workers_add_subtrees
from raypar.errors import PlanError
from raypar.job import Job
from raypar.model.graph import Graph
from raypar.model.tensor_parallel.compute_shard_layout import compute_shard_layout
from raypar.plan import MicrobatchRouting, ParallelPlan, TiedParameter
from raypar.plan.addition_tree import covering_nodes
from raypar.plan.bundle_parts import gets_parts
from raypar.plan.gradient_exchange import gradient_exchange
from raypar.plan.pieces import MAX_DIRECT, AdoptPlanCommand
from raypar.plan.tensor_parallel_layout import TensorParallelLayout
from raypar.plan.tied_gradient_transfers import tied_gradient_pairs
from raypar.schedule.instructions import Communication
from raypar.schedule.program_assignment import ProgramAssignment
from raypar.worker.stage.stage_in_virtual_shards import reduction_channel
from raypar.worker.step.parameter_gather import gather_operation


def required_communicators(
    part: AdoptPlanCommand,
    rank: int,
    spec: Job,
    layout: Callable[[int], TensorParallelLayout],
    *,
    anywhere: bool = False,
) -> frozenset[CommunicatorKey]:
    """All communicators that one rank needs in a generation; every member of a communicator names it.

    `layout(shards)`: how the model is cut over that many shards (`WorkerCore.layout`). `anywhere`: the workers may be on other
    nodes than the part says.
    """
    assignment = part.assignment
    found = {CommunicatorKey(pair, "message") for pair in device_to_device_rank_pairs(part) if rank in pair}
    if assignment is not None:
        plan = assignment.plan
        for instruction in (*assignment.program, *assignment.validation_program):
            if isinstance(instruction, Communication):
                found.add(CommunicatorKey(instruction.ends(rank), "message"))
        found |= {key for key in _ties(plan, assignment.crossing.ties, layout) if rank in key.members}
        for stage in plan.stages_of(rank):
            fast, shards = spec.reduction == "fast", plan.stages[stage].shards
            role = plan.role_in(rank, stage)
            for number in plan.stages[stage].run_of(role.shard):
                channel, routing = reduction_channel(plan, stage, number), MicrobatchRouting(plan, spec.batching)
                found |= set(_reduction(routing, stage, role.shard, channel, fast=fast))
                replicas, gather = plan.replica_ranks(stage, role.shard), gather_operation(plan.stages[stage])
                if stage in assignment.crossing.exchanges_buffers:
                    found.add(CommunicatorKey(replicas, "all_gather", channel))
                if plan.divides_state(stage):
                    found.add(CommunicatorKey(replicas, gather, channel))
            if shards > 1:
                # A loss on cut logits gathers. So do layers of the gathered style; every stage is assumed to have one.
                last = plan.stages[stage].last == max(other.last for other in plan.stages)
                cut = layout(plan.stages[stage].virtual_shards)
                operations = cut.operations(sequence=False)
                rows = "all_to_all" in operations  # norms by rows, and rows that leave the stage, are gathered
                gathers = last or rows or cut.divides_samples or "all_gather" in operations
                gathers = gathers or not workers_add_subtrees(plan.stages[stage].runs)
                nodes = None if anywhere else part.nodes
                gathers = gathers or gets_parts(plan, assignment.crossing, stage, role.replica, nodes)
                found |= set(_shards(plan, stage, role.replica, spec.sequence_parallel, gathers, rows))
    return frozenset(found)


def count_communicators(spec: Job, graph: Graph, parts: Sequence[ProgramAssignment]) -> list[int]:
    """How many communicators each worker needs while a plan is carried out, without those that move state, by rank."""
    layout = cache(lambda shards: compute_shard_layout(graph, shards, dict(spec.styles), dict(spec.layout)))
    orders = (AdoptPlanCommand(part, {}, 0) for part in parts)
    return [len(required_communicators(order, rank, spec, layout, anywhere=True)) for rank, order in enumerate(orders)]


def nccl_environment(spec: Job, graph: Graph, plan: ParallelPlan, parts: Sequence[ProgramAssignment]) -> dict[str, str]:
    """Variables with which the workers of a run are started, so that NCCL suits every plan that the job permits.

    NCCL reads them once a process, and CuPy has no way to set blocks (NCCL_MAX_CTAS) for a communicator. Messages and gradients
    travel beside computation, which needs the multiprocessors: few blocks are best. For a sum over shards a worker waits with
    nothing to compute, and more are faster. All communicators must fit on a GPU together, so how many blocks they may have
    follows from their number. That is known where the run has one plan: there each worker decides, by its GPU (`limit_blocks`).
    An elastic run may come to any plan up to `MAX_COMMUNICATORS`, for which 4 are as many as fit on today's GPUs.
    """
    if spec.elastic is not None or all(stage.shards == 1 for stage in plan.stages):
        return dict(WORKER_ENVIRONMENT)
    settings = {name: value for name, value in WORKER_ENVIRONMENT.items() if name != "NCCL_MAX_CTAS"}
    return {**settings, COMMUNICATORS: str(max(count_communicators(spec, graph, parts)))}


def check_communicator_limit(
    spec: Job, graph: Graph, plan: ParallelPlan, parts: Sequence[ProgramAssignment], *, elastic: bool
) -> None:
    """Raise `PlanError` if a worker would use more communicators than every GPU can run at the same time.

    A GPU with few multiprocessors takes fewer, which its worker says before the first step (`check_communicator_keys`).
    """
    counts = count_communicators(spec, graph, parts)
    used, most = max(counts), MAX_COMMUNICATORS - MAX_DIRECT * elastic
    if used > most:
        kept = f", {MAX_DIRECT} more being kept for state that changes hands in an elastic run" * elastic
        raise PlanError(
            f"{plan.coordinate(counts.index(used))} would use {used} NCCL communicators (one for each worker that it sends to, "
            "one for each that it receives from, some for its replicas and shards); a GPU surely works "
            f"on {most} at a time{kept}",
            cure="give neighbouring stages numbers of replicas that are closer to each other, so that each talks to fewer",
        )


def device_to_device_rank_pairs(part: AdoptPlanCommand) -> frozenset[tuple[int, int]]:
    """(source, dest) ranks of state that this worker moves from device to device when the generation begins.

    Sources without a seat in the generation are included. Empty where all state travels through host memory.
    """
    moves = part.moves if part.direct else ()
    pairs = {(part.rank_of_worker[move.source], part.rank_of_worker[move.dest]) for move in moves}
    return frozenset(pair for pair in pairs if pair[0] != pair[1])


def _ties(
    plan: ParallelPlan, ties: Iterable[TiedParameter], layout: Callable[[int], TensorParallelLayout]
) -> Iterator[CommunicatorKey]:
    """Messages by which workers with a tied parameter get its gradients of other stages (`worker.step.tied_gradients`)."""
    for tie in ties:
        cuts = {
            count: layout(count).cuts.get(tie.name) for count in {plan.stages[stage].virtual_shards for stage in tie.stages}
        }
        for pair in tied_gradient_pairs(plan, tie, cuts):
            yield CommunicatorKey(pair, "message")


def _reduction(routing: MicrobatchRouting, stage: int, shard: int, channel: int, *, fast: bool) -> Iterator[CommunicatorKey]:
    """Collectives that reduce gradients over the replicas of a stage (`comm.gradient_reduction`)."""
    group = routing.plan.replica_ranks(stage, shard)
    if len(group) == 1:
        return
    if routing.plan.divides_state(stage) or routing.scatters(stage):
        yield CommunicatorKey(group, "all_to_all", channel)
        if not routing.plan.divides_state(stage):
            yield CommunicatorKey(group, "all_gather", channel)
        return
    if fast:
        yield CommunicatorKey(group, "all_reduce", FAST_REDUCTION_CHANNELS + channel)
        return
    blocks = routing.microbatches.blocks
    subtrees = [covering_nodes(routing.blocks_of_replica(stage, r), blocks) for r in range(len(group))]
    collectives = {"swap": ("all_gather",), "halving": ("halving_all_reduce",), "owners": ("all_to_all", "all_gather")}
    for name in collectives[gradient_exchange(subtrees, host_bytes=None)]:
        yield CommunicatorKey(group, name, channel)


def _shards(
    plan: ParallelPlan, stage: int, replica: int, sequence: bool, gathers: bool, rows: bool
) -> Iterator[CommunicatorKey]:
    """Collectives of the layers of one replica (`model.tensor_parallel.shard_group.ShardGroup`).

    `gathers`: they gather also where they do not cut the sequence; `rows`: some are cut along a spatial dim.
    """
    group = plan.stages[stage].workers[replica]
    yield CommunicatorKey(group, "all_reduce", SHARD_CHANNELS + stage)
    if sequence or gathers:
        yield CommunicatorKey(group, "all_gather", SHARD_CHANNELS + stage)
    if rows:
        yield CommunicatorKey(group, "all_to_all", SHARD_CHANNELS + stage)
    if sequence:
        yield CommunicatorKey(group, "reduce_scatter", SHARD_CHANNELS + stage)
