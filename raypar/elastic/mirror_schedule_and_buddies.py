"""The mirror: after which steps it takes a snapshot, and which ranks keep the copies.

The mirror is a second copy of each worker's state in another worker's memory. A *mirror snapshot* is the copy of all workers'
state after the same step. It is taken every n steps, or as often as the measured cost allows.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Hashable, Sequence
from dataclasses import dataclass, field


@dataclass
class MirrorSchedule:
    """Chooses the steps with a mirror snapshot. The first step of every generation has one: new workers hold no copy yet.

    With `every` and `cost` both 0 the mirror is off.
    """

    every: int = 0
    """Steps between two snapshots; 0: `cost` decides."""
    cost: float = 0.0
    """A snapshot is due once the seconds spent on the last one are at most this fraction of the time since then."""
    last: int | None = None
    """The step of this generation that took the last snapshot; None: no step has."""
    first: int | None = None
    """The step of the run that took the very first snapshot; None: no step has."""
    complete: bool = False
    """Whether some snapshot is known to be complete on all workers."""
    complete_in_generation: bool = False
    """Whether a snapshot of this generation is complete, so that none of an earlier generation is needed."""
    _steps_s: float = field(default=0.0, init=False)
    """Seconds of the committed steps since the last snapshot, including its own step."""
    _spent_s: float = field(default=0.0, init=False)
    """Seconds that were spent on the mirror in these steps."""
    _measured: bool = field(default=False, init=False)
    """Whether the step of the last snapshot is committed, so that its cost is known."""
    _reported: dict[int, float] = field(default_factory=dict, init=False)
    """Step -> the longest time that a worker spent on the mirror in it."""
    _before: bool = field(default=False, init=False)
    """Whether this generation took a snapshot before the last one."""

    def begin(self) -> None:
        """Start a new generation: its first step takes a snapshot."""
        self.last = None
        self._steps_s = self._spent_s = 0.0
        self._measured = False
        self._reported = {}
        self._before = self.complete_in_generation = False

    @property
    def enabled(self) -> bool:
        """Whether snapshots are taken at all."""
        return bool(self.every or self.cost)

    @property
    def awaits_report(self) -> bool:
        """Whether the last snapshot's step is not committed yet. A further snapshot could replace the last complete one."""
        return self.last is not None and not self._measured

    def begin_if_due(self, step: int, anyway: bool = False) -> bool:
        """Begin a snapshot with `step`, which is issued now, if one is due. Returns whether it was.

        `anyway`: whether a snapshot is due whatever the time, for instance before a checkpoint.
        """
        if not self.enabled or self.awaits_report:
            return False
        due = (
            anyway
            or self.last is None
            or ((step + 1) % self.every == 0 if self.every else self.cost * self._steps_s >= self._spent_s)
        )
        if due:
            self._before = self.last is not None
            self.first = step if self.first is None else self.first
            self.last, self._measured = step, False
            self._steps_s = self._spent_s = 0.0
        return due

    def report(self, step: int, mirror_seconds: float) -> None:
        """Take what one worker spent on the mirror in `step`. The slowest worker counts."""
        self._reported[step] = max(self._reported.get(step, 0.0), mirror_seconds)

    def commit(self, step: int, seconds: float) -> None:
        """Note that all workers have reported `step`.

        A snapshot is exchanged beside later steps, so their reports have the rest of its cost.
        """
        spent = self._reported.pop(step, 0.0)
        if self.last is not None and step >= self.last:
            self._steps_s += seconds
            self._spent_s += spent
            self._measured = True
            if self._before:  # a snapshot's step is voted on once the one before is complete
                self.complete = self.complete_in_generation = True


def assign_buddies(nodes: Sequence[Hashable], first_rank_with_same_state: Sequence[Hashable] = ()) -> dict[int, int]:
    """Rank -> the rank that keeps the mirror's second copy of its state. Empty for a single rank.

    `nodes[rank]`: the node that the rank lives on. `first_rank_with_same_state[rank]`: of `plan.ownership`. A rank that holds
    the same state is a bad keeper. Where the nodes allow it, a rank with other state is taken, so that the state survives the
    loss of all ranks that hold it.

    Ranks sorted by node, largest node first, form a ring. The keeper of a rank is as many places further as the largest node
    has ranks. So no rank has its keeper on its own node, and every rank keeps one copy. If one node has more than half of all
    ranks, its ranks take turns among all other ranks, some of which keep several copies.
    """
    keepers, one_node = _keepers_elsewhere(nodes), len(set(nodes)) == 1
    for rank in keepers:
        if not first_rank_with_same_state or first_rank_with_same_state[keepers[rank]] != first_rank_with_same_state[rank]:
            continue
        for other in keepers:  # an exchange leaves every keeper with as many copies as before
            mine, theirs = keepers[other], keepers[rank]
            elsewhere = one_node or (nodes[rank] != nodes[mine] and nodes[other] != nodes[theirs])
            apart = rank != mine and other != theirs and elsewhere
            key_of = first_rank_with_same_state
            worse = key_of[mine] == key_of[rank] or key_of[theirs] == key_of[other] != key_of[mine]
            if apart and not worse:
                keepers[rank], keepers[other] = mine, theirs
                break
    return keepers


def _keepers_elsewhere(nodes: Sequence[Hashable]) -> dict[int, int]:
    world = len(nodes)
    if world < 2:
        return {}
    sizes = Counter(nodes)
    first = {node: rank for rank, node in reversed(list(enumerate(nodes)))}
    order = sorted(range(world), key=lambda rank: (-sizes[nodes[rank]], first[nodes[rank]], rank))
    largest = sizes[nodes[order[0]]]
    if largest == world:
        return {order[i]: order[(i + 1) % world] for i in range(world)}
    if 2 * largest <= world:
        return {order[i]: order[(i + largest) % world] for i in range(world)}
    others = order[largest:]
    crowd = {rank: others[i % len(others)] for i, rank in enumerate(order[:largest])}
    return crowd | {rank: order[i] for i, rank in enumerate(others)}
