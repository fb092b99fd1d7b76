"""Pieces of a model's state, addressed by name and element, and the moves between workers that give each what it needs.

Everything here is about one version of the state: the one after some number of steps. Workers are numbers that are never used
again for another worker. Nothing here knows ranks, which belong to a plan.
"""

from __future__ import annotations

import itertools
from collections import Counter, defaultdict
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from operator import attrgetter
from typing import Any, TypedDict

from raypar.errors import PlanError


@dataclass(frozen=True, slots=True, order=True)
class Piece:
    """Elements `[start, stop)` of the flattened, unsharded tensor called `name`, with their optimizer state.

    A parameter that is cut over shards is flattened with the cut dim as the slowest, under every plan
    (`shard_ranges.TensorCut`).
    """

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
"""(digest of the names, pieces and types held, digest of their bits). Bits are compared if the first digests are equal."""

Holdings = Mapping[int, Iterable[Piece]]
"""Worker -> the pieces that it holds, or needs, of one version of the state."""


@dataclass(frozen=True, slots=True, order=True)
class PieceMove:
    """Worker `source` sends `piece` to worker `dest`."""

    source: int
    dest: int
    piece: Piece


def merge_pieces(pieces: Iterable[Piece]) -> tuple[Piece, ...]:
    """The union of the pieces: the same elements in the fewest pieces, sorted."""
    merged: list[Piece] = []
    for piece in sorted(pieces, key=attrgetter("name", "start", "stop")):  # as they are ordered anyway, in a third of the time
        if merged and merged[-1].name == piece.name and piece.start <= merged[-1].stop:
            if piece.stop > merged[-1].stop:
                merged[-1] = Piece(piece.name, merged[-1].start, piece.stop)
        else:
            merged.append(piece)
    return tuple(merged)


def subtract_pieces(pieces: Iterable[Piece], held: Iterable[Piece]) -> tuple[Piece, ...]:
    """The set difference: the elements of `pieces` that are not in `held`, in the fewest pieces."""
    holes: dict[str, list[Piece]] = defaultdict(list)
    for piece in merge_pieces(held):
        holes[piece.name].append(piece)
    left: list[Piece] = []
    for piece in merge_pieces(pieces):
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


def count_shared_elements(first: Iterable[Piece], second: Iterable[Piece]) -> int:
    """Number of elements that lie in both."""
    first = merge_pieces(first)
    return sum(p.size for p in first) - sum(p.size for p in subtract_pieces(first, second))


def pieces_nobody_holds(have: Holdings, need: Holdings) -> tuple[Piece, ...]:
    """The pieces that some worker needs and no worker holds."""
    return subtract_pieces([p for pieces in need.values() for p in pieces], [p for pieces in have.values() for p in pieces])


def plan_moves(have: Holdings, need: Holdings) -> tuple[PieceMove, ...]:
    """The moves after which every worker has what it needs: exactly the elements it lacks. Holders send about equally much.

    Raises `PlanError` if nobody holds some piece; callers check `pieces_nobody_holds` first.
    """
    lost = pieces_nobody_holds(have, need)
    if lost:
        raise PlanError(f"nobody holds {', '.join(map(str, lost[:4]))}", cure="take the state from a mirror or a checkpoint")
    there: dict[str, dict[Piece, list[int]]] = defaultdict(lambda: defaultdict(list))  # many workers hold the same pieces
    for worker in sorted(have):
        for piece in have[worker]:
            there[piece.name][piece].append(worker)
    parts: dict[Piece, list[tuple[Piece, list[int]]]] = {}
    """What some worker lacks -> its parts, and who holds each: replicas lack the same."""
    sent: dict[int, int] = defaultdict(int)
    found: list[PieceMove] = []
    for dest in sorted(need):
        for wanted in subtract_pieces(need[dest], have.get(dest, ())):
            if wanted not in parts:
                held_by = there[wanted.name].items()
                parts[wanted] = [
                    (piece, [w for held, those in held_by if _holds(held, piece) for w in those])
                    for piece in _split(wanted, there[wanted.name])
                ]
            for piece, holders in parts[wanted]:
                source = min((w for w in holders if w != dest), key=lambda w: (sent[w], w))
                sent[source] += piece.size
                found.append(PieceMove(source, dest, piece))
    return _merged(found)


def _split(wanted: Piece, held: Iterable[Piece]) -> list[Piece]:
    """`wanted`, split wherever one of the `held` pieces begins or ends, so that a holder has all or nothing of each part."""
    ends = itertools.chain.from_iterable((piece.start, piece.stop) for piece in held)
    edges = sorted({wanted.start, wanted.stop, *(end for end in ends if wanted.start < end < wanted.stop)})
    return [Piece(wanted.name, lo, hi) for lo, hi in itertools.pairwise(edges)]


def _holds(held: Piece, piece: Piece) -> bool:
    return held.start <= piece.start and piece.stop <= held.stop


def _merged(found: Iterable[PieceMove]) -> tuple[PieceMove, ...]:
    """The same moves, with adjacent pieces from one worker to another joined."""
    ways: dict[tuple[int, int], list[Piece]] = defaultdict(list)
    for move in found:
        ways[move.source, move.dest].append(move.piece)
    return tuple(PieceMove(*way, piece) for way in sorted(ways) for piece in merge_pieces(ways[way]))


MAX_DIRECT = 8
"""Most neighbours with which a worker hands over state from device to device. Each takes a communicator beside those of the
steps, of which there are some tens at most, and all workers wait while it is made."""


def moves_by_worker(moves: Iterable[PieceMove]) -> Mapping[int, tuple[PieceMove, ...]]:
    """Worker -> the moves in which it takes part, in their order."""
    found: dict[int, list[PieceMove]] = defaultdict(list)
    for move in moves:
        for worker in {move.source, move.dest}:
            found[worker].append(move)
    return {worker: tuple(own) for worker, own in found.items()}


def may_move_directly(moves: Iterable[PieceMove]) -> bool:
    """Whether no worker has more than `MAX_DIRECT` others from which it gets state, or which get it."""
    pairs = {(move.source, move.dest) for move in moves if move.source != move.dest}
    return max(Counter(worker for pair in pairs for worker in pair).values(), default=0) <= MAX_DIRECT


@dataclass(frozen=True)
class AdoptPlanCommand:
    """One worker's part of a new plan, and the state that it sends and receives for it."""

    assignment: Any
    """A `schedule.program_assignment.ProgramAssignment`; None for a worker without a seat, which only sends state."""
    rank_of_worker: Mapping[int, int]
    """Worker number -> its rank in the new transport."""
    steps_done: int
    """Number of steps that have been applied to the state from which all workers start."""
    moves: tuple[PieceMove, ...] = ()
    """The moves of state in which this worker takes part."""
    checkpoint_folder: str | None = None
    """Folder of the checkpoint from which the state is read; None: from memory, or initial values."""
    only_weights: bool = False
    """Whether parameters and buffers are read from the checkpoint, and no state of optimizers."""
    run_begins: bool = False
    """Whether the run begins, so that all state has its initial values."""
    direct: bool = False
    """Whether state moves from device to device in this generation, and not through host memory (`may_move_directly`)."""
    from_mirror: bool = False
    """Whether `moves` and the worker's own state come from a mirror snapshot."""
    mirror_keepers: Mapping[int, int] = field(default_factory=dict)
    """Rank -> the rank that keeps the mirror's second copy of its state (`elastic.buddies`)."""
    nodes: tuple[int, ...] = ()
    """By rank: the number of its node; empty: not known (`plan.bundle_parts`)."""
    epochs: Mapping[int, tuple[tuple[int, int], ...]] = field(default_factory=dict)
    """Stream of iterable data -> (epoch, position of its first sample) of the last epochs that workers have found."""
    cursors: Mapping[int, tuple[tuple[int, int, int, str], ...]] = field(default_factory=dict)
    """Stream -> (position, epoch, number in the epoch, state of the data set) of places from which it can be read on."""
    digests: Mapping[int, int] = field(default_factory=dict)
    """Microbatch -> digest of its samples, in the last step that is done, as far as it is known."""
    validated: Mapping[int, float] = field(default_factory=dict)
    """Number of steps done -> value of the metric that the learning rates follow, of all validations so far; empty if they
    follow none."""
    skipped_steps: tuple[int, ...] = ()
    """The steps before `steps_done` that were skipped, ascending, where the loss is scaled; a checkpoint has its own."""


class AdoptedStages(TypedDict):
    """What a worker has built for a new plan."""

    rank: int
    """Its rank."""
    parameters: dict[str, tuple[int, ...]]
    """Parameter of its stages -> shape here."""
    bytes: int
    """Bytes of these parameters."""
    initial: dict[str, int]
    """Name -> digest of the initial value, of what has one."""
    collated: dict[str, int]
    """Field of the job's first microbatch -> digest, of those that this worker reads, where the run begins and the job has
    `data.collate`; else empty."""
    not_kept: str
    """What optimizer state can no longer be saved, and why; empty if none."""
