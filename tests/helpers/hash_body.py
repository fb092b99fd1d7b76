"""A worker's body without torch: tensors are hashes of how they came about, so that any other order gives another number.

It runs the real programs (lowered schedules) and the real routing and addition tree. State: for every layer the weights `w`
and the optimizer's `o`, `ELEMENTS` hashes each. With `zero`, the replicas of a stage share out the elements (`holders` of
each slice) and every step begins by gathering the weights; without it every replica holds all. Python's hash of integers is
not salted.
"""

from __future__ import annotations

from collections.abc import Generator, Iterator, Mapping
from dataclasses import dataclass, field
from functools import cache
from typing import Any

from raypar.elastic.actions import AdoptPlan
from raypar.errors import CommError, GroupAborted
from raypar.plan import Microbatches, MicrobatchRouting, ParallelPlan, StageConnections
from raypar.plan.addition_tree import covering_nodes, fold_tree
from raypar.plan.microbatches import contiguous_part
from raypar.plan.pieces import Piece, merge_pieces
from raypar.schedule.instructions import Backward, ExchangeVotes, Forward, OptimizerStep, Program, Recv, ReduceGradients, Send
from raypar.schedule.lower import lower_schedule
from raypar.schedule.registry import build_schedule

ELEMENTS = 4
Element = tuple[str, int, int]
"""("w" or "o", layer, number)"""


def h(*numbers: int) -> int:
    return hash(numbers)


@dataclass(frozen=True)
class Job:
    """What is trained. `mirror_every` 0: no mirror."""

    layers: int = 4
    batching: Microbatches = field(default_factory=lambda: Microbatches(4, 4, 8))
    steps: int = 5
    zero: bool = False
    holders: int = 1
    mirror_every: int = 0

    def initial(self) -> dict[Element, int]:
        return {(kind, n, e): h(ord(kind), n, e) for kind in "wo" for n in range(self.layers) for e in range(ELEMENTS)}

    def layout(self, plan: ParallelPlan) -> tuple[tuple[Piece, ...], ...]:
        """What each rank has to hold."""
        return layout(plan, self.zero, self.holders)


@cache
def layout(plan: ParallelPlan, zero: bool, holders: int) -> tuple[tuple[Piece, ...], ...]:
    found = []
    for (role,) in plan.roles:
        pieces = []
        for stage in plan.stages:
            if stage.workers != plan.grids[role.grid]:
                continue
            slices = {contiguous_part((role.replica + i) % stage.replicas, stage.replicas, ELEMENTS) for i in range(holders)}
            for run in slices if zero else {range(ELEMENTS)}:
                if len(run):
                    pieces += [Piece(f"{k}{n}", run.start, run.stop) for k in "wo" for n in range(stage.first, stage.last)]
        found.append(merge_pieces(pieces))
    return tuple(found)


def elements(pieces: tuple[Piece, ...]) -> Iterator[Element]:
    for piece in pieces:
        for e in range(piece.start, piece.stop):
            yield piece.name[0], int(piece.name[1:]), e


@cache
def programs(plan: ParallelPlan, batching: Microbatches) -> tuple[Program, ...]:
    routing = MicrobatchRouting(plan, batching)
    made = lower_schedule(build_schedule("1f1b", routing), routing, StageConnections.chain(len(plan.stages)))
    return tuple(
        tuple(i for i in p if isinstance(i, (Forward, Backward, Send, Recv, ReduceGradients, ExchangeVotes, OptimizerStep)))
        for p in made
    )


# -- what moves ------------------------------------------------------------------------------------------------------------


class Handle:
    """One pending message."""

    __slots__ = ("error", "settled", "value", "waiter")

    def __init__(self) -> None:
        self.settled, self.value, self.error, self.waiter = False, None, None, None

    def settle(self, value: Any = None, error: Exception | None = None) -> None:
        if not self.settled:
            self.settled, self.value, self.error = True, value, error
            if self.waiter is not None:
                self.waiter()


@dataclass(frozen=True, slots=True)
class Wait:
    handle: Handle
    what: Any


@dataclass(frozen=True, slots=True)
class Work:
    label: Any
    cost_ms: float = 0.2


class Mesh:
    """The connections of one generation. `post(delay, call)` puts a call on the world's clock; `fault(mesh)` may change a
    message."""

    def __init__(self, world: Any, generation: int, workers: tuple[int, ...]) -> None:
        self.world, self.generation, self.workers = world, generation, workers
        self.rank = {worker: rank for rank, worker in enumerate(workers)}
        self.closed: dict[int, str] = {}
        self.left: set[int] = set()
        self.recvs: dict[tuple[Any, ...], Handle] = {}
        self.sends: dict[tuple[Any, ...], Handle] = {}
        self.here: dict[tuple[Any, ...], Any] = {}
        self.taken: set[tuple[Any, ...]] = set()

    def send(self, src: int, dst: int, tag: Any, payload: Any) -> Handle:
        handle = Handle()
        self._check(src)
        if dst in self.left:
            handle.settle(error=CommError(f"rank {dst} closed its end"))
            return handle
        key = (dst, src, tag)
        self.sends[key] = handle
        for delay in self.world.message(self, key):
            self.world.at(delay, lambda: self._arrive(key, payload, handle))
        return handle

    def _arrive(self, key: tuple[Any, ...], payload: Any, handle: Handle) -> None:
        if key[0] in self.closed or key[1] in self.left:
            return  # who sent it waits until it hears that the other end is closed, or closes its own
        self.sends.pop(key, None)
        handle.settle()
        if key in self.taken or key in self.here:
            return  # a duplicate
        waiting = self.recvs.pop(key, None)
        if waiting is None:
            self.here[key] = payload
        else:
            self.taken.add(key)
            waiting.settle(payload)

    def recv(self, dst: int, src: int, tag: Any) -> Handle:
        handle = Handle()
        self._check(dst)
        key = (dst, src, tag)
        if key in self.here:
            self.taken.add(key)
            handle.settle(self.here.pop(key))
        elif src in self.left:
            handle.settle(error=CommError(f"rank {src} closed its end"))
        else:
            self.recvs[key] = handle
        return handle

    def _check(self, rank: int) -> None:
        if rank in self.closed:
            raise GroupAborted(self.closed[rank])

    def close(self, worker: int, why: str) -> None:
        """The worker's end: its own calls fail at once, the others' a moment later, what is on its way arrives nowhere."""
        rank = self.rank.get(worker)
        if rank is None or rank in self.closed:
            return
        self.closed[rank] = why
        for key in [k for k in self.recvs if k[0] == rank]:
            self.recvs.pop(key).settle(error=GroupAborted(why))
        for key in [k for k in self.sends if k[1] == rank]:
            self.sends.pop(key).settle(error=GroupAborted(why))
        self.world.at(0.3, lambda: self._leave(rank))

    def _leave(self, rank: int) -> None:
        self.left.add(rank)
        gone = CommError(f"rank {rank} closed its end")
        for key in [k for k in self.recvs if k[1] == rank]:
            self.recvs.pop(key).settle(error=gone)
        for key in [k for k in self.sends if k[0] == rank]:
            self.sends.pop(key).settle(error=gone)


# -- the body --------------------------------------------------------------------------------------------------------------


@dataclass
class HashBody:
    """See `raypar.elastic.generation_guard.WorkerTrainingBackend`."""

    job: Job
    worker: int
    world: Any
    state: dict[Element, int] = field(default_factory=dict)
    done: int = 0
    plan: ParallelPlan | None = None
    mesh: Mesh | None = None
    rank: int = -1

    def __post_init__(self) -> None:
        self.mine: tuple[Element, ...] = ()
        self.rate: int | None = None
        """What the present step's learning rate follows; None if it follows no validation."""
        self.snapshot_due = False
        self.compared: dict[int, tuple[int, int]] = {}
        self.totals: dict[int, int] | None = None
        self.last: Any = None
        self.copies: dict[int, dict[Element, int]] = {}
        self.complete_cut: int | None = None
        self.pending: tuple[int, Handle | None, Handle | None] | None = None

    # -- Body ------------------------------------------------------------------------------------------------------------

    def applied(self) -> int:
        return self.done

    def vote_result(self) -> Any:
        return self.last

    def can_apply_late(self) -> bool:
        return self.totals is not None

    def pieces(self) -> tuple[Piece, ...]:
        return as_pieces(self.state)

    def held_snapshots(self) -> Mapping[int, tuple[Piece, ...]]:
        self._take_buddys()
        return {step: as_pieces(copy) for step, copy in self.copies.items()}

    def digests(self) -> Mapping[int, tuple[int, int]]:
        return self.compared

    def steps_skipped(self) -> tuple[int, ...]:
        return ()

    def abort(self, reason: str) -> None:
        if self.mesh is not None:
            self.mesh.close(self.worker, reason)

    def apply_late(self, step: int, vote_result: Any) -> None:
        self._apply(step, vote_result)

    def adopt(self, order: tuple[AdoptPlan, Mesh]) -> Generator[Any, Any, None]:
        plan_order, mesh = order
        self.mesh = mesh
        self.totals = None
        yield Work("connect", 1.0)
        if plan_order.from_mirror:
            self._take_buddys()
            base = dict(self.copies.get(plan_order.done, {}))
        elif plan_order.from_checkpoint:
            base = dict(self.world.checkpoints[plan_order.done])
        else:
            base = dict(self.state) if self.done == plan_order.done else {}
        me, sent, got = mesh.rank[self.worker], [], []
        for move in plan_order.moves:
            if move.source == self.worker:
                payload = [(e, base[e]) for e in elements((move.piece,))]
                sent.append(mesh.send(me, mesh.rank[move.dest], ("move", move.piece), payload))
            if move.dest == self.worker:
                got.append(mesh.recv(me, mesh.rank[move.source], ("move", move.piece)))
        for handle in got:
            yield Wait(handle, "state")
            base.update(handle.value)
        for handle in sent:
            yield Wait(handle, "state to be taken")
        yield Work("build", 1.0)
        if self.worker not in plan_order.members:
            return
        self.rank = plan_order.members.index(self.worker)
        self.plan, self.done = plan_order.plan, plan_order.done
        self.state = base
        self.mine = tuple(elements(self.job.layout(self.plan)[self.rank]))
        assert all(e in base for e in self.mine), f"worker {self.worker} lacks state"
        self.routing = MicrobatchRouting(self.plan, self.job.batching)
        self.program = programs(self.plan, self.job.batching)[self.rank]
        self.pending = None

    def share_out_anew(self, order: tuple[AdoptPlan, Mesh]) -> bool:
        """Workers of `misfits` would need other connections."""
        if self.worker in self.world.world.misfits:
            return False
        self.plan = order[0].plan
        self.routing = MicrobatchRouting(self.plan, self.job.batching)
        self.program = programs(self.plan, self.job.batching)[self.rank]
        return True

    def validate(self) -> Generator[Any, Any, int]:
        """One message round, so that there is something to break off."""
        assert self.mesh is not None and self.plan is not None
        yield Work("validate")
        others = [r for r in range(self.plan.world) if r != self.rank]
        for peer in others:
            self.mesh.send(self.rank, peer, ("validate", self.done), 0)
        for peer in others:
            yield Wait(self.mesh.recv(self.rank, peer, ("validate", self.done)), "validation")
        return self.done

    # -- a step ------------------------------------------------------------------------------------------------------------

    def step(self, step: int, into_mirror: bool) -> Generator[Any, Any, Any]:
        mesh, plan, rank, job = self.mesh, self.plan, self.rank, self.job
        assert mesh is not None and plan is not None
        role = plan.roles[rank][0]
        self.totals, self.snapshot_due = None, into_mirror
        weights: dict[int, int] = {}
        stage_index = plan.stages_of(rank)[0]
        stage = plan.stages[stage_index]
        peers = [r for r in plan.replica_ranks(stage_index) if r != rank]
        layers = range(stage.first, stage.last)
        known = self.state
        if job.zero and peers:
            own = [(e, self.state[e]) for e in self.mine if e[0] == "w"]
            for peer in peers:
                mesh.send(rank, peer, ("w", step), own)
            known = dict(own)
            for peer in peers:
                handle = mesh.recv(rank, peer, ("w", step))
                yield Wait(handle, "weights")
                known.update(handle.value)
        for n in layers:
            weights[n] = h(*(known["w", n, e] for e in range(ELEMENTS)))
        inputs: dict[int, list[int]] = {}
        outgoing: dict[Any, int] = {}
        incoming: dict[Any, Handle] = {}
        sums: dict[int, dict[int, int]] = {n: {} for n in layers}
        losses: dict[int, int] = {}
        last_stage = len(plan.stages) - 1
        others: list[tuple[int, Handle]] = []
        rows: dict[int, dict[Any, int | None]] = {}
        for instruction in self.program:
            kind = type(instruction)
            if kind is Send:
                m = instruction.microbatch
                mesh.send(rank, instruction.peer, (step, instruction.kind, m), outgoing.pop((instruction.kind, m)))
            elif kind is Recv:
                m = instruction.microbatch
                incoming[instruction.kind, m] = mesh.recv(rank, instruction.peer, (step, instruction.kind, m))
            elif kind is Forward:
                m = instruction.microbatch
                x = h(1, step, m)
                if stage_index:
                    handle = incoming.pop(("activation", m))
                    yield Wait(handle, instruction)
                    x = handle.value
                yield Work(instruction)
                inputs[m] = []
                for n in layers:
                    inputs[m].append(x)
                    x = h(2, n, weights[n], x)
                if stage_index == last_stage:
                    losses[m] = h(5, x)
                    outgoing["loss", m] = h(6, x)
                else:
                    outgoing["activation", m] = x
            elif kind is Backward:
                m = instruction.microbatch
                if stage_index == last_stage:
                    g = outgoing.pop(("loss", m))
                else:
                    handle = incoming.pop(("gradient", m))
                    yield Wait(handle, instruction)
                    g = handle.value
                yield Work(instruction)
                block = job.batching.block_of(m)
                for n, x in zip(reversed(layers), reversed(inputs.pop(m)), strict=True):
                    mine, before = h(7, n, x, g, weights[n]), sums[n].get(block)
                    sums[n][block] = mine if before is None else h(8, before, mine)
                    g = h(3, n, g, x, weights[n])
                if stage_index:
                    outgoing["gradient", m] = g
            elif kind is ReduceGradients:
                nodes = covering_nodes(self.routing.blocks_of_replica(stage_index, role.replica), job.batching.blocks)
                rows = {
                    n: {node: fold_tree({(b, b + 1): s for b, s in sums[n].items()}, node, add) for node in nodes}
                    for n in layers
                }
                for peer in peers:
                    mesh.send(rank, peer, ("g", step), rows)
                    others.append((peer, mesh.recv(rank, peer, ("g", step))))
            elif kind is ExchangeVotes:
                for _, handle in others:
                    yield Wait(handle, "gradients")
                    for n, row in handle.value.items():
                        rows[n] = rows[n] | row
                self.totals = {n: fold_tree(rows[n], (0, job.batching.blocks), add) or 0 for n in layers}
                if into_mirror:
                    yield from self._finish_cut()
                ballots = {rank: losses}
                for peer in range(plan.world):
                    if peer != rank:
                        mesh.send(rank, peer, ("v", step), losses)
                handles = [(peer, mesh.recv(rank, peer, ("v", step))) for peer in range(plan.world) if peer != rank]
                for peer, handle in handles:
                    yield Wait(handle, "vote")
                    ballots[peer] = handle.value
                whole = {m: loss for ballot in ballots.values() for m, loss in ballot.items()}
                self.vote = h(*(whole[m] for m in range(job.batching.count)))
            elif kind is OptimizerStep:
                yield Work(instruction)
                self._apply(step, self.vote)
        return self.last

    def _apply(self, step: int, outcome: int) -> None:
        assert self.totals is not None and step == self.done
        new: dict[Element, int] = {}
        for kind, n, e in self.mine:
            if kind == "o":
                o = h(11, self.state["o", n, e], self.totals[n], e, outcome, *(() if self.rate is None else (self.rate,)))
                new["o", n, e] = o
                new["w", n, e] = h(12, self.state["w", n, e], o)
        self.state, self.done, self.totals, self.last = new, step + 1, None, outcome
        if self.snapshot_due:
            self._take_snapshot()

    # -- the mirror --------------------------------------------------------------------------------------------------------

    def _take_snapshot(self) -> None:
        """Own copy now, and one for the next worker. Older cuts than the last complete one are not needed any more."""
        assert self.mesh is not None and self.plan is not None
        self.compared = {step: digest for step, digest in self.compared.items() if step == self.complete_cut}
        what = h(*(h(ord(kind), n, e) for kind, n, e in sorted(self.state)))
        self.compared[self.done] = what, h(*(value for _, value in sorted(self.state.items())))
        kept = {step: c for step, c in self.copies.items() if step == self.complete_cut}
        self.copies = kept | {self.done: dict(self.state)}
        world, me = self.plan.world, self.rank
        self.pending = (self.done, None, None)
        if world > 1:
            try:
                send = self.mesh.send(me, (me + 1) % world, ("cut", self.done), dict(self.state))
                recv = self.mesh.recv(me, (me - 1) % world, ("cut", self.done))
            except GroupAborted:
                return  # applied late, or aborted just now: the next generation takes a cut at once
            self.pending = (self.done, send, recv)

    def _finish_cut(self) -> Generator[Any, Any, None]:
        """Before the vote on the step that takes the next cut: so a whole vote says that the last cut is complete
        everywhere."""
        if self.pending is not None:
            step, *handles = self.pending
            for handle in handles:
                if handle is not None:
                    yield Wait(handle, "the mirror")
            self._take_buddys()
            self.complete_cut, self.pending = step, None

    def _take_buddys(self) -> None:
        if self.pending is not None:
            step, _, recv = self.pending
            if recv is not None and recv.settled and recv.error is None and step in self.copies:
                self.copies[step].update(recv.value)


def add(a: int, b: int) -> int:
    return h(9, a, b)


def as_pieces(state: Mapping[Element, int]) -> tuple[Piece, ...]:
    return merge_pieces(Piece(f"{k}{n}", e, e + 1) for k, n, e in state)
