"""The simulation of a schedule: its duration and its memory, before anything runs.

Every worker runs its order strictly. A forward waits for the values of all edges into its stage, a backward for the
gradients of all relays to it, and both for parameters that are gathered for them. So start times are longest paths, and one
pass finds them: a worker runs on until it needs a bundle that does not exist yet; the worker that makes the bundle wakes it.
O(instructions). Exact for ints and Fractions, too.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from math import inf
from typing import Any

from raypar.errors import ScheduleError
from raypar.plan import GradientRelay, MicrobatchRouting, ParallelPlan, StageConnections, StageEdge, serving_shards
from raypar.plan.bundle_parts import LEAST_BYTES_IN_PARTS, travels_in_parts
from raypar.plan.wording import count_noun
from raypar.schedule.data_flow import DataFlow, message_ends
from raypar.schedule.gathering import has_gathers, insert_gathers
from raypar.schedule.instructions import (
    ACTIVATIONS,
    FETCHED,
    INPUT_GRADIENTS,
    KEPT_INPUTS,
    RESIDENT,
    UNOFFLOADED,
    VALUES,
    WEIGHT_GRADIENTS,
    Communication,
    Compute,
    Cost,
    ExchangeVotes,
    Gather,
    Instruction,
    MessageKind,
    ReduceGradients,
)
from raypar.schedule.step_timeline import (
    KeptBytes,
    Timeline,
    TimelineSpan,
    peak_activation_memory,
    peak_activations,
    peak_kept_bytes,
)

__all__ = ["SimulationCosts", "Timeline", "TimelineSpan", "simulate_schedule"]


@dataclass(frozen=True)
class SimulationCosts:
    """The times and sizes of a step's parts. Tuples are by stage (chunk); times are in ms.

    Instructions declare which of these costs they take: a `Backward` takes `input_ms + weight_ms`. A message takes
    `latency_ms + bytes / bandwidth_bytes_per_ms`; messages from one worker to another share their link, in order, for the
    bytes part.
    """

    forward_ms: tuple[float, ...]
    """Forward of one microbatch."""
    input_ms: tuple[float, ...]
    """Input gradients of one microbatch."""
    weight_ms: tuple[float, ...]
    """Weight gradients of one microbatch."""
    latency_ms: float = 0
    """Fixed time of a message."""
    bandwidth_bytes_per_ms: float = inf
    """Bytes that a link carries in a ms."""
    reduce_ms: tuple[float, ...] = ()
    """Reduction of a stage's gradients once all its replicas are done, beside compute; empty: no time."""
    scatter_ms: tuple[float, ...] = ()
    """What a replica sends of one microbatch's gradients, beside compute, where these are scattered; empty: no time."""
    step_ms: float = 0
    """Time once a step, after everything else (vote, optimizer, call)."""
    overhead_ms: float = 0
    """Time of the processor for each compute instruction, send and receive."""
    activation_bytes: tuple[int, ...] = ()
    """Bytes kept from forward to backward for one microbatch; empty: not known."""
    kept_bytes: KeptBytes | None = None
    """Bytes of every kind of kept memory, by stage and microbatch; None: only `activation_bytes` is known."""
    recompute_ms: tuple[float, ...] = ()
    """Recomputing the dropped activations of one microbatch; empty: as long as its forward."""
    gather_ms: tuple[float, ...] = ()
    """One gather of a stage's parameters beside compute, where these come and go by microbatch; the gathers of a worker follow
    each other. Empty: no time."""
    offload_ms: tuple[float, ...] = ()
    """Writing the offloaded activations of one microbatch beside compute; empty: no time."""
    first_read_ms: tuple[float, ...] = ()
    """Reading what its backward needs first of them, beside compute; empty: as long as writing all."""
    read_wait_ms: tuple[float, ...] = ()
    """How long its backward waits for the rest, which it reads layer by layer; empty: no time."""
    most_unwritten: tuple[int, ...] = ()
    """By stage: most bytes of offloaded activations that wait to be written; empty: none do."""
    nodes: tuple[int, ...] = ()
    """By rank: the number of its node, which decides which bundles are sent in parts (`plan/bundle_parts.py`); empty: none are.
    Those who receive parts gather them for one `latency_ms` more: the bytes of that stay inside a node."""

    @staticmethod
    def uniform(stages: int, forward_ms: float = 1, backward_ms: float = 2, weight_ms: float | None = None) -> SimulationCosts:
        """Costs of stages that are all alike; `weight_ms` is half of `backward_ms` by default."""
        weight = backward_ms / 2 if weight_ms is None else weight_ms
        return SimulationCosts((forward_ms,) * stages, (backward_ms - weight,) * stages, (weight,) * stages)

    def compute_ms(self, kind: type[Compute]) -> list[float]:
        """By stage, the ms that an instruction of this class takes."""
        parts: dict[Cost, tuple[float, ...]] = {
            "forward": self.forward_ms,
            "recompute": self.recompute_ms or self.forward_ms,
            "input": self.input_ms,
            "weight": self.weight_ms,
        }
        return [sum(parts[part][stage] for part in kind.cost) for stage in range(len(self.forward_ms))]

    def kept_shares(self, plan: ParallelPlan) -> dict[str, tuple[float, ...]]:
        """Kind of memory of which the plan keeps some in the place of activations -> by stage, its share of the activations of
        a microbatch; empty: not known."""
        found: dict[str, tuple[float, ...]] = {}
        if self.kept_bytes is None:
            return found
        whole = [sum(sizes) or 1 for sizes in self.kept_bytes.get(UNOFFLOADED, self.kept_bytes[ACTIVATIONS])]
        for kind, layers in ((KEPT_INPUTS, plan.recompute), (RESIDENT, plan.offload), (FETCHED, plan.offload)):
            if layers and kind in self.kept_bytes:
                found[kind] = tuple(sum(kept) / of for kept, of in zip(self.kept_bytes[kind], whole, strict=True))
        if FETCHED in found:
            there = [sum(sizes) / of for sizes, of in zip(self.kept_bytes[ACTIVATIONS], whole, strict=True)]
            found[FETCHED] = tuple(begin + more for begin, more in zip(there, found[FETCHED], strict=True))
        return found


def simulate_schedule(
    schedule: Sequence[Sequence[Instruction]], routing: MicrobatchRouting, crossing: StageConnections, costs: SimulationCosts
) -> Timeline:
    """The timeline of one step of a schedule, or of the programs it was lowered to.

    The bundles of a schedule leave as soon as they are made, those of a program at their `Send`; neither blocks compute.
    Where each worker has one role the shards of a replica move in lockstep, so only the first one is simulated; else each waits
    for the others at what they compute together. Raises `ScheduleError` when the schedule does not fit the plan, or stops with
    workers waiting for each other.
    """
    plan = routing.plan
    if len(schedule) != plan.world:
        raise ScheduleError(
            f"the schedule has {count_noun(len(schedule), 'worker')}, the plan {plan.world}",
            cure="make one order per worker of the plan",
        )
    if not any(map(has_gathers, schedule)):
        schedule = insert_gathers([tuple(order) for order in schedule], plan)
    speaker = plan.order_givers
    simulation = _Simulation(schedule, sorted(set(speaker)), routing, crossing, costs)
    rows = simulation.run()
    end = max((row[-1].end_ms for row in rows.values() if row), default=0)
    busy = {rank: sum(finish - start for i, start, finish in row if not i.runs_beside) for rank, row in rows.items()}
    for span, ranks in _reductions(rows, plan, costs):
        end = max(end, span.end_ms)
        for rank in ranks:
            rows[rank].append(span)
    if costs.step_ms:
        for row in rows.values():
            row.append(TimelineSpan(ExchangeVotes(), max((s.end_ms for s in row), default=0), end + costs.step_ms))
    for rank, gathers in simulation.gathers.items():
        rows[rank] = sorted([*rows[rank], *gathers], key=lambda span: span.start_ms) if gathers else rows[rank]
    spans = {rank: tuple(row) for rank, row in rows.items()}
    sizes = costs.kept_bytes
    shares = costs.kept_shares(plan)
    unwritten = costs.most_unwritten
    peak_kept = tuple(peak_kept_bytes(order, sizes, unwritten) for order in schedule) if sizes is not None else None
    return Timeline(
        spans=tuple(spans[rank] for rank in speaker),
        names=tuple(plan.coordinate(rank) for rank in range(plan.world)),
        makespan_ms=end + costs.step_ms,
        busy_ms=tuple(busy[rank] for rank in speaker),
        peak_activations=tuple(peak_activations(o, len(plan.stages_of(r)), shares) for r, o in enumerate(schedule)),
        peak_bytes=tuple(sum(kept.values()) for kept in peak_kept)
        if peak_kept is not None
        else tuple(peak_activation_memory(o, costs.activation_bytes) for o in schedule)
        if costs.activation_bytes
        else None,
        peak_kept=peak_kept,
    )


_Made = list[tuple[int, list[int], "list[_Message]"]]
"""(slot of the bundle, rank of the consumer by microbatch or `_NOBODY`, what is sent by microbatch)."""
_NOBODY = -1
"""In the place of a consumer that another shard serves."""
_Message = tuple[int, bool]
"""(bytes that one shard of a consumer is sent, whether they are a part of the bundle)."""
_StepsOfStages = list[tuple[list[int], _Made, float]]
"""By stage, for a class of compute instructions: (slots that it waits for, bundles that it sends, ms)."""


class _Slots:
    """The numbers of bundles, called slots: ((shard that gets it) * number of edges and relays + number of the edge, or that of
    edges + number of the relay) * microbatches + microbatch."""

    def __init__(self, routing: MicrobatchRouting, crossing: StageConnections, nodes: Sequence[int]) -> None:
        plan, self.count, stages = routing.plan, routing.microbatches.count, range(len(routing.plan.stages))
        self.of_shard = (len(crossing.edges) + len(crossing.relays)) * self.count
        # In lockstep only the first shards are simulated.
        self.shards = [1 if plan.one_role_each else stage.shards for stage in plan.stages]
        self.total = self.of_shard * max(self.shards)
        self.flow = DataFlow(crossing, len(stages))
        self.ranks = [[routing.ranks(s, m) for m in range(self.count)] for s in stages]
        self._known_users: dict[tuple[int, int, int, int], list[int]] = {}
        """Arguments of `_users` -> what it returns."""
        self.first: dict[tuple[MessageKind, int, int], int] = {}
        """(kind, earlier stage, later stage) -> slot of microbatch 0."""
        self.messages: dict[tuple[MessageKind, int, int], list[_Message]] = {}
        """(kind, earlier stage, later stage) -> by microbatch, what each shard of the consumer is sent."""
        carried: list[tuple[str, StageEdge | GradientRelay]] = [(VALUES, edge) for edge in crossing.edges]
        carried += [(INPUT_GRADIENTS, relay) for relay in crossing.relays]
        for number, (what, carrier) in enumerate(carried):
            ends = message_ends(what, carrier)
            self.first[ends], self.messages[ends] = number * self.count, self._messages(carrier, nodes)

    def _messages(self, carrier: StageEdge | GradientRelay, nodes: Sequence[int]) -> list[_Message]:
        """By microbatch: what each shard of the consumer is sent."""
        whole = (carrier.nbytes, False)
        if not nodes or carrier.nbytes < LEAST_BYTES_IN_PARTS * max(1, len(carrier.values)):
            return [whole] * self.count
        rows = zip(self.ranks[carrier.src], self.ranks[carrier.dst], strict=True)
        return [(-(-whole[0] // len(u)), True) if travels_in_parts(m, u, nodes) else whole for m, u in rows]

    def needs(self, kind: type[Compute], stage: int, shard: int) -> list[int]:
        """Slots (of microbatch 0) that an instruction of this class waits for."""
        return [
            shard * self.of_shard + self.first[message_ends(what, carrier)]
            for what in kind.needs
            for carrier in self.flow.connections_into(what, stage)
        ]

    def makes(self, kind: type[Compute], stage: int, shard: int) -> _Made:
        """The bundles that an instruction of this class sends, one for each shard of a consumer that it may serve."""
        return [
            (other * self.of_shard + self.first[ends], users, self.messages[ends])
            for what in kind.makes
            for carrier in self.flow.connections_out_of(what, stage)
            for ends in [message_ends(what, carrier)]
            for other in range(self.shards[carrier.dst])
            if set(users := self._users(stage, shard, carrier.dst, other)) != {_NOBODY}
        ]

    def _users(self, maker: int, shard: int, stage: int, other: int) -> list[int]:
        """By microbatch: the rank of one shard of the stage, where this shard of `maker` serves it; else `_NOBODY`."""
        found = self._known_users.get((maker, shard, stage, other))
        if found is None:
            rows = zip(self.ranks[maker], self.ranks[stage], strict=True)
            found = [row[other] if serving_shards(makers, row)[other] == shard else _NOBODY for makers, row in rows]
            self._known_users[maker, shard, stage, other] = found
        return found


class _Simulation:
    """The simulation of the compute instructions of `ranks`, each as early as possible.

    `ranks` must contain every worker that sends bundles to one of them.
    """

    compute: dict[int, dict[type[Instruction], _StepsOfStages]]
    """Rank -> class of compute instructions -> by stage, what they wait for, send and take."""
    met: dict[Instruction, dict[int, float]]
    """Instruction that shards compute together -> rank that has come to it -> when. Empty in lockstep."""
    posts: set[type[Instruction]]
    """Classes of sends and receives."""
    lowered: bool
    """Whether the lists are programs: bundles to other ranks leave at their sends."""
    free_links: bool
    """Whether messages take no time."""
    rows: dict[int, list[TimelineSpan]]
    """Rank -> spans of the instructions that it has executed."""
    position: dict[int, int]
    """Rank -> index of the instruction at which it waits."""
    now: dict[int, float]
    """Rank -> time up to which it has executed."""
    arrival: list[float | None]
    """Slot -> time from which the consumer may use the bundle; None before the bundle is sent."""
    link_free: dict[tuple[int, int], float]
    """(sender, receiver) -> time at which their link has carried everything sent so far."""
    gathers: dict[int, list[TimelineSpan]]
    """Rank -> the spans of its gathers of parameters, from when each has the link until it has arrived."""
    gathered: dict[tuple[int, int], float]
    """(rank, stage) -> when the last gather of the stage's parameters has arrived, where there was one."""
    transfers_end: dict[int, float]
    """Rank -> when it has written and read all offloaded activations so far."""
    read_at: dict[tuple[int, int, int], float]
    """(rank, stage, microbatch) -> when its offloaded activations have been read."""
    waiting: dict[int, int]
    """Slot -> the rank that waits for it."""
    runnable: list[int]
    """Ranks that can go on."""

    def __init__(
        self,
        schedule: Sequence[Sequence[Instruction]],
        ranks: Sequence[int],
        routing: MicrobatchRouting,
        crossing: StageConnections,
        costs: SimulationCosts,
    ) -> None:
        self.schedule, self.ranks, self.plan, self.costs = schedule, ranks, routing.plan, costs
        self.free_links = not costs.latency_ms and costs.bandwidth_bytes_per_ms == inf
        self.lockstep = routing.plan.one_role_each
        self.slots = _Slots(routing, crossing, costs.nodes)
        kinds: set[type[Instruction]] = {kind for rank in ranks for kind in set(map(type, schedule[rank]))}
        self.posts = {kind for kind in kinds if issubclass(kind, Communication)}
        self.lowered = bool(self.posts)
        computing = [kind for kind in kinds if issubclass(kind, Compute)]
        self.compute, self.met = {}, {}
        made: dict[tuple[int, ...], dict[type[Instruction], _StepsOfStages]] = {}
        for rank in ranks:
            shards = self._shards_of(rank)
            if shards not in made:
                made[shards] = {kind: self._by_stage(kind, shards) for kind in computing}
            self.compute[rank] = made[shards]
        self.arrival = [None] * self.slots.total
        self.link_free, self.waiting, self.transfers_end, self.read_at = {}, {}, {}, {}
        self.gathers, self.gathered = {rank: [] for rank in ranks}, {}
        self.gather_ms = costs.gather_ms or (0,) * len(self.plan.stages)
        self.rows = {rank: [] for rank in ranks}
        self.position, self.now = dict.fromkeys(ranks, 0), dict.fromkeys(ranks, 0)
        self.runnable = list(reversed(ranks))

    def run(self) -> dict[int, list[TimelineSpan]]:
        """Run the simulation and return the spans by rank. Raises `ScheduleError` if workers wait for each other for ever."""
        arrival, waiting, runnable, posts = self.arrival, self.waiting, self.runnable, self.posts
        lowered, overhead_ms, gathered = self.lowered, self.costs.overhead_ms, self.gathered
        offloads = bool(self.costs.offload_ms)
        while runnable:
            rank = runnable.pop()
            order: Sequence[Any] = self.schedule[rank]
            row, time, compute = self.rows[rank], self.now[rank], self.compute[rank]
            for index in range(self.position[rank], len(order)):
                instruction = order[index]
                by_stage = compute.get(type(instruction))
                if by_stage is None:
                    if type(instruction) in posts:
                        time += overhead_ms
                        self._post(rank, instruction, time)
                    elif "gather" in instruction.cost:
                        self._gather(rank, instruction, time)
                    continue
                needs, makes, ms = by_stage[instruction.stage]
                microbatch = instruction.microbatch
                if offloads:
                    time = self._read_before(rank, instruction, time)
                for slot in needs:
                    there = arrival[slot + microbatch]
                    if there is None:
                        waiting[slot + microbatch] = rank
                        break
                    if there > time:
                        time = there
                else:
                    if gathered and instruction.needs_weights:
                        time = max(time, gathered.get((rank, instruction.stage), time))
                    begin = time if self.lockstep else self._meet(rank, instruction, time)
                    if begin is None:
                        self.position[rank] = index
                        break
                    start = begin + overhead_ms
                    time = start + ms
                    if offloads:
                        time = self._read_inside(rank, instruction, start, time)
                    end = self._transfer(rank, instruction, time) if offloads else time
                    row.append(TimelineSpan(instruction, start, end))
                    for slot, consumers, messages in makes:
                        target = consumers[microbatch]
                        if target == rank or (not lowered and target != _NOBODY):
                            self._deliver(slot + microbatch, messages[microbatch], rank, target, time)
                    continue
                self.position[rank] = index
                break
            else:
                self.position[rank] = len(order)
            self.now[rank] = time
        self._check_finished()
        return self.rows

    def _transfer(self, rank: int, instruction: Compute, now: float) -> float:
        """Write offloaded activations, or read the first of them, one after the other, beside what follows the instruction.
        Returns when it is over: of a read, when all is there."""
        if not instruction.transfer:
            return now
        writes = instruction.transfer == "write"
        takes_ms = self.costs.offload_ms if writes else self.costs.first_read_ms or self.costs.offload_ms
        end = self.transfers_end[rank] = max(now, self.transfers_end.get(rank, 0)) + takes_ms[instruction.stage]
        if writes:
            return now
        self.read_at[rank, instruction.stage, instruction.microbatch] = end
        return end

    def _read_inside(self, rank: int, instruction: Compute, start: float, end: float) -> float:
        """When a backward is over that reads the rest of its activations itself; other instructions: `end`. The disk has then
        read that beside what it has to write and read else."""
        stage = instruction.stage
        is_read = ACTIVATIONS in instruction.frees and (rank, stage, instruction.microbatch) in self.read_at
        if not self.costs.first_read_ms or not is_read:
            return end
        rest_ms = self.costs.offload_ms[stage] - self.costs.first_read_ms[stage]
        self.transfers_end[rank] = max(start, self.transfers_end.get(rank, 0)) + rest_ms
        return max(end + self.costs.read_wait_ms[stage], self.transfers_end[rank] if rest_ms else end)

    def _read_before(self, rank: int, instruction: Compute, now: float) -> float:
        """When the activations that an instruction needs have been read, if they were offloaded; else now."""
        if ACTIVATIONS not in instruction.frees:
            return now
        return max(now, self.read_at.get((rank, instruction.stage, instruction.microbatch), now))

    def _check_finished(self) -> None:
        stuck = [rank for rank in self.ranks if self.position[rank] < len(self.schedule[rank])]
        if not stuck:
            return
        first = [f"{self.plan.coordinate(rank)} at {self.schedule[rank][self.position[rank]]}" for rank in stuck[:4]]
        raise ScheduleError(
            f"{len(stuck)} workers wait for each other for ever: {'; '.join(first)}" + ("; ..." if len(stuck) > 4 else ""),
            cure="let every forward come after the forwards of the stages before it, every backward after those behind it",
        )

    def _shards_of(self, rank: int) -> tuple[int, ...]:
        """By stage: which shard of it a rank is; 0 for stages of others, and in lockstep."""
        if self.lockstep:
            return (0,) * len(self.plan.stages)
        shards = self.plan.shards_of_stages(rank)
        return tuple(shards.get(stage, 0) for stage in range(len(self.plan.stages)))

    def _by_stage(self, kind: type[Compute], shards: Sequence[int]) -> _StepsOfStages:
        """What instructions of a class wait for, send and take. `shards`: by stage, which shard executes them."""
        return [
            (self.slots.needs(kind, stage, shards[stage]), self.slots.makes(kind, stage, shards[stage]), ms)
            for stage, ms in enumerate(self.costs.compute_ms(kind))
        ]

    def _meet(self, rank: int, instruction: Compute, time: float) -> float | None:
        """When shards begin what they compute together: once the last one has come to it; None before that."""
        shards = self.plan.stages[instruction.stage].shards
        if shards == 1:
            return time
        there = self.met.setdefault(instruction, {})
        if len(there) < shards:
            there[rank] = time
            if len(there) < shards:
                return None
            self.runnable += [other for other in there if other != rank]
        return max(there.values())

    def _post(self, rank: int, post: Communication, time: float) -> None:
        """Send what a program sends; other shards of the receiver are not simulated."""
        if post.sends and post.peer in self.rows:
            kind, src, dst, microbatch = post.bundle
            slot, message = self.slots.first[kind, src, dst], self.slots.messages[kind, src, dst][microbatch]
            receiver = dst if kind == "activation" else src
            shard = 0 if self.lockstep else self.plan.role_in(post.peer, receiver).shard
            self._deliver(shard * self.slots.of_shard + slot + microbatch, message, rank, post.peer, time)

    def _gather(self, rank: int, gather: Gather, time: float) -> None:
        """Post a gather of parameters, which begins to arrive when those before it have."""
        gathers = self.gathers[rank]
        start = max(time, gathers[-1].end_ms) if gathers else time
        self.gathered[rank, gather.stage] = end = start + self.gather_ms[gather.stage]
        if end > start:
            gathers.append(TimelineSpan(gather, start, end))

    def _deliver(self, slot: int, message: _Message, source: int, target: int, ready: float) -> None:
        """Deliver a bundle that leaves at `ready`, and wake the rank that waits for it."""
        if not self.free_links and source != target:
            nbytes, is_part = message
            on_link = max(ready, self.link_free.get((source, target), 0))
            on_link += nbytes / self.costs.bandwidth_bytes_per_ms if nbytes else 0
            self.link_free[source, target] = on_link
            ready = on_link + self.costs.latency_ms * (1 + is_part)
        self.arrival[slot] = ready
        if slot in self.waiting:
            self.runnable.append(self.waiting.pop(slot))


def _reductions(
    rows: dict[int, list[TimelineSpan]], plan: ParallelPlan, costs: SimulationCosts
) -> list[tuple[TimelineSpan, tuple[int, ...]]]:
    """(span, ranks that take part) of each stage's reduction; those of one grid share links, so they follow each other."""
    if not any(costs.reduce_ms) and not any(costs.scatter_ms):
        return []
    ready: dict[int, float] = {}
    for row in rows.values():
        scattered = 0.0
        for instruction, _, end_ms in row:
            if not isinstance(instruction, Compute) or WEIGHT_GRADIENTS not in instruction.makes:
                continue
            stage, there = instruction.stage, end_ms
            if costs.scatter_ms and costs.scatter_ms[stage]:
                there = scattered = max(scattered, there) + costs.scatter_ms[stage]
            if costs.reduce_ms[stage] or there > end_ms:
                ready[stage] = max(ready.get(stage, 0), there)
    found: list[tuple[TimelineSpan, tuple[int, ...]]] = []
    link_free: dict[int, float] = {}
    for stage in sorted(ready, key=lambda s: (ready[s], s)):
        place = plan.grid_of_stage[stage]
        start = max(ready[stage], link_free.get(place, 0))
        link_free[place] = start + costs.reduce_ms[stage]
        ranks = tuple(rank for row in plan.stages[stage].workers for rank in row if rank in rows)
        found.append((TimelineSpan(ReduceGradients(stage), start, link_free[place]), ranks))
    return found
