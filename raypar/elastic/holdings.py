"""Who holds which part of the state, who needs it, and what has to move (DESIGN 4.9: state is addressed by name and slice).

Everything here is about one version of the state: that after some number of steps. Workers are numbers that are never used
again for another worker; ranks belong to a plan and are not known here.
"""

from __future__ import annotations

import itertools
import math
from collections import Counter, defaultdict
from collections.abc import Hashable, Iterable, Mapping, Sequence
from dataclasses import dataclass

from raypar.errors import PlanError
from raypar.plan import ParallelPlan


@dataclass(frozen=True, slots=True, order=True)
class Piece:
    """Elements `[start, stop)` of the flattened, unsharded state called `name`."""

    name: str
    start: int
    stop: int

    def __post_init__(self) -> None:
        if not 0 <= self.start < self.stop:
            raise PlanError(f"piece {self.name}[{self.start}:{self.stop}] is empty", cure="leave out what has no elements")

    def __str__(self) -> str:
        return f"{self.name}[{self.start}:{self.stop}]"

    @property
    def size(self) -> int:
        """Number of elements."""
        return self.stop - self.start


Digest = tuple[int, int]
"""Of what somebody holds: what it is (names, places, types), and its bits. Only digests of the same thing are compared."""

Holdings = Mapping[int, Iterable[Piece]]
"""worker -> what it holds, or needs, of one version of the state."""


@dataclass(frozen=True, slots=True, order=True)
class Move:
    """`piece` goes from worker `source` to worker `dest`."""

    source: int
    dest: int
    piece: Piece


def union(pieces: Iterable[Piece]) -> tuple[Piece, ...]:
    """The same elements in the fewest pieces, sorted."""
    merged: list[Piece] = []
    for piece in sorted(pieces):
        if merged and merged[-1].name == piece.name and piece.start <= merged[-1].stop:
            if piece.stop > merged[-1].stop:
                merged[-1] = Piece(piece.name, merged[-1].start, piece.stop)
        else:
            merged.append(piece)
    return tuple(merged)


def without(pieces: Iterable[Piece], held: Iterable[Piece]) -> tuple[Piece, ...]:
    """The elements of `pieces` that are not in `held`: the set difference, in the fewest pieces."""
    holes: dict[str, list[Piece]] = defaultdict(list)
    for piece in union(held):
        holes[piece.name].append(piece)
    left: list[Piece] = []
    for piece in union(pieces):
        at = piece.start
        for hole in holes.get(piece.name, ()):
            if hole.stop <= at or hole.start >= piece.stop:
                continue
            if hole.start > at:
                left.append(Piece(piece.name, at, hole.start))
            at = hole.stop
        if at < piece.stop:
            left.append(Piece(piece.name, at, piece.stop))
    return tuple(left)


def overlap(first: Iterable[Piece], second: Iterable[Piece]) -> int:
    """Number of elements that are in both."""
    first = union(first)
    return sum(p.size for p in first) - sum(p.size for p in without(first, second))


def missing(have: Holdings, need: Holdings) -> tuple[Piece, ...]:
    """What somebody needs and nobody has."""
    return without([p for pieces in need.values() for p in pieces], [p for pieces in have.values() for p in pieces])


def moves(have: Holdings, need: Holdings) -> tuple[Move, ...]:
    """What has to move so that everybody has what it needs: exactly the set difference, and every holder sends about as much.

    Raises `PlanError` when something is `missing`: whoever calls looks at that first and knows where else to find it.
    """
    lost = missing(have, need)
    if lost:
        raise PlanError(f"nobody holds {', '.join(map(str, lost[:4]))}", cure="take the state from a mirror or a checkpoint")
    there: dict[str, list[tuple[int, Piece]]] = defaultdict(list)
    for worker in sorted(have):
        for piece in have[worker]:
            there[piece.name].append((worker, piece))
    sent: dict[int, int] = defaultdict(int)
    found: list[Move] = []
    for dest in sorted(need):
        for wanted in without(need[dest], have.get(dest, ())):
            for piece in _cut(wanted, (held for _, held in there[wanted.name])):
                holders = [w for w, held in there[wanted.name] if w != dest and _holds(held, piece)]
                source = min(holders, key=lambda w: (sent[w], w))
                sent[source] += piece.size
                found.append(Move(source, dest, piece))
    return _joined(found)


def _cut(wanted: Piece, held: Iterable[Piece]) -> list[Piece]:
    """`wanted`, cut wherever one of the `held` pieces begins or ends, so that a holder has each part wholly or not at all."""
    ends = itertools.chain.from_iterable((piece.start, piece.stop) for piece in held)
    edges = sorted({wanted.start, wanted.stop, *(end for end in ends if wanted.start < end < wanted.stop)})
    return [Piece(wanted.name, lo, hi) for lo, hi in itertools.pairwise(edges)]


def _holds(held: Piece, piece: Piece) -> bool:
    return held.start <= piece.start and piece.stop <= held.stop


def _joined(found: Iterable[Move]) -> tuple[Move, ...]:
    """Neighbouring pieces on the same way travel as one."""
    ways: dict[tuple[int, int], list[Piece]] = defaultdict(list)
    for move in found:
        ways[move.source, move.dest].append(move.piece)
    return tuple(Move(*way, piece) for way in sorted(ways) for piece in union(ways[way]))


def seated(
    need: Sequence[Sequence[Piece]],
    have: Holdings,
    workers: Sequence[int],
    nodes: Mapping[int, str] | None = None,
    copies: Sequence[Hashable] = (),
    replicas: Sequence[Hashable] = (),
) -> tuple[int, ...]:
    """Which worker takes which seat: those who hold most of what a seat needs first; among equals the lowest numbers.

    `need[rank]`: what the seat needs. With `nodes` (worker -> node) and `copies` (by rank, what it is a copy of), copies of the
    same sit on different nodes as far as that moves nothing more; before that, the shards of one of the `replicas` (by rank,
    which one it is a part of) sit on one node. Returns one worker a seat. Raises `PlanError` when there are fewer workers than
    seats.
    """
    if len(workers) < len(need):
        raise PlanError(f"{len(need)} seats but {len(workers)} workers", cure="choose a plan for the workers there are")
    sizes = [sum(p.size for p in union(pieces)) for pieces in need]
    pairs = sorted(
        (sizes[rank] - overlap(pieces, have.get(worker, ())), rank, worker)
        for rank, pieces in enumerate(need)
        for worker in workers
    )
    chosen: dict[int, int] = {}
    for _, rank, worker in pairs:
        if rank not in chosen and worker not in chosen.values():
            chosen[rank] = worker
    members = [chosen[rank] for rank in range(len(need))]
    if nodes and len(set(nodes.values())) > 1 and copies:
        cost = {(rank, worker): size for size, rank, worker in pairs}
        _placed(members, sorted(set(workers) - set(members)), cost, nodes, copies, replicas or range(len(need)))
    return tuple(members)


def _placed(
    members: list[int],
    idle: list[int],
    cost: Mapping[tuple[int, int], int],
    nodes: Mapping[int, str],
    copies: Sequence[Hashable],
    replicas: Sequence[Hashable],
) -> None:
    """Exchange two members, or one for an idle worker, wherever that moves less; or as much and brings shards of a replica
    together; or that too and parts two copies that share a node. In place; ends because every exchange lowers (elements to
    move, pairs of shards apart, pairs of copies on one node)."""

    def shared(of: Sequence[Hashable]) -> Counter[tuple[Hashable, str]]:
        return Counter((of[rank], nodes.get(worker, "")) for rank, worker in enumerate(members))

    def more(of: Sequence[Hashable], here: Counter[tuple[Hashable, str]], rank: int, other: int | None, worker: int) -> int:
        """Pairs of the same on one node that there are more of."""
        old, changed = members[rank], Counter[tuple[Hashable, str]]()
        changed[of[rank], nodes.get(worker, "")] += 1
        changed[of[rank], nodes.get(old, "")] -= 1
        if other is not None:
            changed[of[other], nodes.get(old, "")] += 1
            changed[of[other], nodes.get(worker, "")] -= 1
        return sum(math.comb(here[k] + d, 2) - math.comb(here[k], 2) for k, d in changed.items())

    def gain(rank: int, other: int | None, worker: int) -> tuple[int, int, int]:
        """(elements, pairs apart, pairs of copies) that there are more of when `worker`, now at rank `other` or idle, comes to
        `rank`."""
        elements = cost[rank, worker] - cost[rank, members[rank]]
        if other is not None:
            elements += cost[other, members[rank]] - cost[other, worker]
        return elements, -more(replicas, mates, rank, other, worker), more(copies, twins, rank, other, worker)

    size = Counter(replicas)
    better = True
    while better:
        better = False
        for rank in range(len(members)):
            mates, twins, node = shared(replicas), shared(copies), nodes.get(members[rank], "")
            complete = mates[replicas[rank], node] == size[replicas[rank]]
            if complete and twins[copies[rank], node] < 2 and not cost[rank, members[rank]]:
                continue  # nothing to gain
            others: list[tuple[int | None, int]] = [(o, w) for o, w in enumerate(members) if o != rank]
            ways = [(gain(rank, other, worker), worker, other) for other, worker in (*others, *((None, w) for w in idle))]
            (change, worker, other) = min(ways, key=lambda way: way[:2], default=((0, 0, 0), -1, None))
            if change >= (0, 0, 0):
                continue
            old, better = members[rank], True
            members[rank] = worker
            if other is not None:
                members[other] = old
            else:
                idle[idle.index(worker)] = old


@dataclass(frozen=True)
class WholeParameters:
    """What each rank of a plan has to hold when nothing is sliced. `sizes`: by layer, parameter -> elements (a tie under its
    first name, in every layer that uses it); what the optimizer keeps for a parameter goes with it.
    """

    sizes: tuple[Mapping[str, int], ...]

    def __call__(self, plan: ParallelPlan) -> tuple[tuple[Piece, ...], ...]:
        """By rank."""
        return tuple(tuple(Piece(name, 0, size) for name, size in sorted(self.of(plan, r).items())) for r in range(plan.world))

    def of(self, plan: ParallelPlan, rank: int) -> dict[str, int]:
        """Parameters of one rank, and their sizes."""
        found: dict[str, int] = {}
        for index in plan.stages_of(rank):
            for layer in range(plan.stages[index].first, plan.stages[index].last):
                found |= self.sizes[layer]
        return found
