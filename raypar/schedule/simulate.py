"""How long a schedule takes and what it keeps in memory, before anything runs.

Every worker runs its order strictly; a forward waits for the values of all edges into its stage, a backward for the
gradients of all edges out of it. So start times are longest paths and one pass finds them: a worker runs on until it needs a
bundle that does not exist yet, and is woken by the one that makes it. O(instructions). Exact for ints and Fractions too.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import chain
from math import inf

from raypar.errors import ScheduleError
from raypar.plan import Crossing, ParallelPlan, Routing
from raypar.schedule.instructions import (
    Backward,
    BackwardInput,
    BackwardWeight,
    Forward,
    Instruction,
    Kind,
    Recv,
    Reduce,
    Send,
    Vote,
)
from raypar.schedule.timeline import Timeline, TimelineSpan, peak_activations, peak_bytes

__all__ = ["Costs", "Timeline", "TimelineSpan", "simulate"]


@dataclass(frozen=True)
class Costs:
    """What a step's parts cost; lists are per stage (chunk), times in ms and of one microbatch.

    A `Backward` takes `input_ms + weight_ms`. A message takes `latency_ms + bytes / bandwidth_bytes_per_ms`; messages from one
    worker to another share their link, in order, for the bytes part. `reduce_ms`: reduction of a stage's gradients once all
    its replicas are done, beside compute (empty: nothing). `step_ms`: once, after everything (vote, optimizer, call).
    `overhead_ms`: the processor's, for each compute instruction, send and receive. `activation_bytes`: kept from forward to
    backward (empty: not known).
    """

    forward_ms: tuple[float, ...]
    input_ms: tuple[float, ...]
    weight_ms: tuple[float, ...]
    latency_ms: float = 0
    bandwidth_bytes_per_ms: float = inf
    reduce_ms: tuple[float, ...] = ()
    step_ms: float = 0
    overhead_ms: float = 0
    activation_bytes: tuple[int, ...] = ()

    @staticmethod
    def uniform(stages: int, forward_ms: float = 1, backward_ms: float = 2, weight_ms: float | None = None) -> Costs:
        """All stages alike; `weight_ms` is by default half of the backward."""
        weight = backward_ms / 2 if weight_ms is None else weight_ms
        return Costs((forward_ms,) * stages, (backward_ms - weight,) * stages, (weight,) * stages)


def simulate(schedule: Sequence[Sequence[Instruction]], routing: Routing, crossing: Crossing, costs: Costs) -> Timeline:
    """When everything happens in one step of a schedule, or of the programs it was lowered to.

    A schedule's bundles leave as soon as they are made, a program's when it comes to the `Send`; neither blocks compute.
    The shards of a seat move in lockstep, so the first one speaks for all. Raises `ScheduleError` when the schedule does not
    fit the plan, or stops with workers waiting for each other.
    """
    plan = routing.plan
    if len(schedule) != plan.world:
        raise ScheduleError(
            f"the schedule has {len(schedule)} workers, the plan {plan.world}", cure="make one order per worker of the plan"
        )
    speaker = [rank - seat.shard for rank, seat in enumerate(plan.seats)]
    rows = _compute(schedule, sorted(set(speaker)), routing, crossing, costs)
    end = max((row[-1].end_ms for row in rows.values() if row), default=0)
    busy = {rank: sum(finish - start for _, start, finish in row) for rank, row in rows.items()}
    for span, ranks in _reductions(rows, plan, costs):
        end = max(end, span.end_ms)
        for rank in ranks:
            rows[rank].append(span)
    if costs.step_ms:
        for row in rows.values():
            row.append(TimelineSpan(Vote(), max((s.end_ms for s in row), default=0), end + costs.step_ms))
    spans = {rank: tuple(row) for rank, row in rows.items()}
    return Timeline(
        spans=tuple(spans[rank] for rank in speaker),
        names=tuple(plan.coordinate(rank) for rank in range(plan.world)),
        makespan_ms=end + costs.step_ms,
        busy_ms=tuple(busy[rank] for rank in speaker),
        peak_activations=tuple(peak_activations(o, chunks=len(plan.stages_of(r))) for r, o in enumerate(schedule)),
        peak_bytes=tuple(peak_bytes(o, costs.activation_bytes) for o in schedule) if costs.activation_bytes else None,
    )


def _compute(
    schedule: Sequence[Sequence[Instruction]], ranks: Sequence[int], routing: Routing, crossing: Crossing, costs: Costs
) -> dict[int, list[TimelineSpan]]:
    """Spans of the compute instructions of `ranks`, which are closed under the crossing.

    A bundle has a slot, (2 * edge + (1 for a gradient)) * microbatches + microbatch, and `arrival[slot]` is when its consumer
    may use it, None before it was sent.
    """
    plan, count, stages = routing.plan, routing.microbatches.count, range(len(routing.plan.stages))
    lowered = any(not {Send, Recv}.isdisjoint(map(type, schedule[rank])) for rank in ranks)
    replica_ranks = [plan.replica_ranks(s) for s in stages]
    rank_of = [[replica_ranks[s][routing.replica(s, m)] for m in range(count)] for s in stages]
    edges = [(2 * i * count, e) for i, e in enumerate(crossing.edges)]
    into = [[(slot, e) for slot, e in edges if e.dst == s] for s in stages]
    out_of = [[(slot, e) for slot, e in edges if e.src == s] for s in stages]
    # Slots an instruction needs, and (slot, ranks of the consumer by microbatch, bytes) of what it makes; by stage.
    values = [[slot for slot, _ in into[s]] for s in stages]
    gradients = [[slot + count for slot, e in out_of[s] if e.differentiable] for s in stages]
    makes_values = [[(slot, rank_of[e.dst], e.nbytes) for slot, e in out_of[s]] for s in stages]
    makes_gradients = [[(slot + count, rank_of[e.src], e.nbytes) for slot, e in into[s] if e.differentiable] for s in stages]
    backward_ms = [i + w for i, w in zip(costs.input_ms, costs.weight_ms, strict=True)]
    slot_of: dict[tuple[int, int, Kind], int] = {(e.src, e.dst, "activation"): slot for slot, e in edges}
    slot_of |= {(e.dst, e.src, "gradient"): slot + count for slot, e in edges}
    bytes_of = {slot + offset: e.nbytes for slot, e in edges for offset in (0, count)}

    overhead_ms, latency_ms, bandwidth = costs.overhead_ms, costs.latency_ms, costs.bandwidth_bytes_per_ms
    free_links = not latency_ms and bandwidth == inf
    arrival: list[float | None] = [None] * (2 * len(edges) * count)
    link_free: dict[tuple[int, int], float] = {}
    waiting: dict[int, int] = {}
    rows: dict[int, list[TimelineSpan]] = {rank: [] for rank in ranks}
    position: dict[int, int] = dict.fromkeys(ranks, 0)
    now: dict[int, float] = dict.fromkeys(ranks, 0)
    runnable = list(reversed(ranks))

    def deliver(slot: int, microbatch: int, nbytes: int, source: int, target: int, ready: float) -> None:
        if source != target and not free_links:
            on_link = max(ready, link_free.get((source, target), 0)) + (nbytes / bandwidth if nbytes else 0)
            link_free[source, target] = on_link
            ready = on_link + latency_ms
        arrival[slot + microbatch] = ready
        woken = waiting.pop(slot + microbatch, None)
        if woken is not None:
            runnable.append(woken)

    needs: Sequence[int]
    makes: Sequence[tuple[int, list[int], int]]
    while runnable:
        rank = runnable.pop()
        order, row, time = schedule[rank], rows[rank], now[rank]
        for index in range(position[rank], len(order)):
            instruction = order[index]
            if isinstance(instruction, Forward):
                stage = instruction.stage
                needs, makes, ms = values[stage], makes_values[stage], costs.forward_ms[stage]
            elif isinstance(instruction, (Backward, BackwardInput)):
                stage = instruction.stage
                duration = backward_ms if isinstance(instruction, Backward) else costs.input_ms
                needs, makes, ms = gradients[stage], makes_gradients[stage], duration[stage]
            elif isinstance(instruction, BackwardWeight):
                needs, makes, ms = (), (), costs.weight_ms[instruction.stage]
            else:
                if isinstance(instruction, Send):
                    time += overhead_ms
                    if instruction.peer in rows:  # other shards of the receiver are not simulated
                        slot = slot_of[instruction.stage, instruction.to_stage, instruction.kind]
                        deliver(slot, instruction.microbatch, bytes_of[slot], rank, instruction.peer, time)
                elif isinstance(instruction, Recv):
                    time += overhead_ms
                continue
            microbatch = instruction.microbatch
            for slot in needs:
                there = arrival[slot + microbatch]
                if there is None:
                    waiting[slot + microbatch] = rank
                    break
                if there > time:
                    time = there
            else:
                start = time + overhead_ms
                time = start + ms
                row.append(TimelineSpan(instruction, start, time))
                for slot, consumers, nbytes in makes:
                    target = consumers[microbatch]
                    if target == rank or not lowered:
                        deliver(slot, microbatch, nbytes, rank, target, time)
                continue
            position[rank] = index
            break
        else:
            position[rank] = len(order)
        now[rank] = time
    stuck = [rank for rank in ranks if position[rank] < len(schedule[rank])]
    if stuck:
        waits = "; ".join(f"{plan.coordinate(rank)} at {schedule[rank][position[rank]]}" for rank in stuck[:4])
        raise ScheduleError(
            f"{len(stuck)} workers wait for each other for ever: {waits}" + ("; ..." if len(stuck) > 4 else ""),
            cure="let every forward come after the forwards of the stages before it, every backward after those behind it",
        )
    return rows


def _reductions(
    rows: dict[int, list[TimelineSpan]], plan: ParallelPlan, costs: Costs
) -> list[tuple[TimelineSpan, tuple[int, ...]]]:
    """The reduction of each stage and who takes part; those of one position share its workers' links, one after the other."""
    if not any(costs.reduce_ms):
        return []
    ready: dict[int, float] = {}
    for span in chain.from_iterable(rows.values()):
        if isinstance(span.instruction, (Backward, BackwardWeight)) and costs.reduce_ms[span.instruction.stage]:
            stage = span.instruction.stage
            ready[stage] = max(ready.get(stage, 0), span.end_ms)
    found: list[tuple[TimelineSpan, tuple[int, ...]]] = []
    link_free: dict[int, float] = {}
    for stage in sorted(ready, key=lambda s: (ready[s], s)):
        place = plan.stages[stage].position
        start = max(ready[stage], link_free.get(place, 0))
        link_free[place] = start + costs.reduce_ms[stage]
        found.append((TimelineSpan(Reduce(stage), start, link_free[place]), plan.replica_ranks(stage)))
    return found
