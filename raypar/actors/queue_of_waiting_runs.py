"""The queue of runs that wait for a place on one cluster. Runs are placed one after the other.

Two runs that reserved workers at the same time might each get a part of a small cluster, and wait for the rest for ever. So
every run draws a ticket in Ray's key-value store. The one with the lowest living ticket waits until the cluster has room for
all of its workers, and reserves them; it gives the ticket up when they have started. A ticket lives while its owner keeps
changing it.
"""

from __future__ import annotations

import contextlib
import json
import math
import threading
import time
import uuid
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, Protocol

from raypar.actors.control_store_watch import ControlStoreLost, call_ray
from raypar.errors import ClusterError, Interrupted
from raypar.plan.wording import count_noun
from raypar.ray_compat.key_value_store import kv_delete, kv_get, kv_list, kv_put

PREFIX = "raypar-queue/"
"""How the keys of all tickets begin."""
BEAT_S = 2.0
"""How often the owner of a ticket changes it."""
DEAD_S = 12.0
"""A ticket that has not changed for so long has lost its owner."""
POLL_S = 0.5
"""How often a waiting run looks."""
SWEEP_S = 5.0
"""How often a waiting run looks for placement groups of runs that have ended."""
SAY_AGAIN_S = 30.0
"""Time between two equal lines about the wait."""
SETTLED_S = 1.0
"""How long the reason of a wait must be unchanged before a line tells it: Ray's count of free CPUs lags a little."""


class TicketStore(Protocol):
    """Keys and values that all processes of the cluster share."""

    def put_if_absent(self, key: str, value: bytes) -> bool:
        """Store the value unless the key exists; whether it is stored."""

    def put(self, key: str, value: bytes) -> None:
        """Store the value."""

    def delete(self, key: str) -> None:
        """Remove the key."""

    def items(self) -> dict[str, bytes]:
        """All tickets by key."""


@dataclass(frozen=True)
class ClusterRoom:
    """What the cluster has, for one look."""

    cpus: int
    """Logical CPUs."""
    free_cpus: float
    """CPUs that nothing uses."""
    may_add_nodes: bool
    """Whether an autoscaler may add nodes."""
    cpus_by_run: Mapping[str, int]
    """CPUs that raypar's runs have reserved."""

    def without(self, run: str) -> ClusterRoom:
        """The room once what an earlier driver of `run` has left is removed, as the next one does first."""
        left = {other: cpus for other, cpus in self.cpus_by_run.items() if other != run}
        return replace(self, free_cpus=self.free_cpus + self.cpus_by_run.get(run, 0), cpus_by_run=left)


@dataclass(frozen=True)
class Ticket:
    """A run's place in the queue."""

    number: int
    """The lower one is placed first."""
    run: str
    """The run's name."""
    cpus: int
    """CPUs that it needs."""


def placement_obstacle(cpus: int, room: ClusterRoom, before: Ticket | None) -> str | None:
    """What a run that needs `cpus` waits for, as a line; None if it may reserve its workers now.

    `before`: the run that is placed first. Where an autoscaler may add nodes the reservation itself is what makes it do so.
    """
    used = [f"run {run} has {n}" for run, n in sorted(room.cpus_by_run.items(), key=lambda one: (-one[1], one[0]))]
    others = room.cpus - room.free_cpus - sum(room.cpus_by_run.values())
    used += [f"others have {others:.3g}"] * (others > 0.005)
    state = f"{room.free_cpus:g} of {room.cpus} {'is' if room.free_cpus == 1 else 'are'} free" + "".join(f", {u}" for u in used)
    if before is not None:
        return f"waiting for {count_noun(cpus, 'CPU')}, behind run {before.run}, which needs {before.cpus}: {state}"
    if room.free_cpus >= cpus or room.may_add_nodes:
        return None
    return f"waiting for {count_noun(cpus, 'CPU')}: {state}"


class PlacementQueue:
    """One run's ticket, and the wait for its turn."""

    def __init__(
        self,
        store: TicketStore,
        run: str,
        cpus: int,
        *,
        clock: Callable[[], float] = time.monotonic,
        sleep: Callable[[float], None] = time.sleep,
    ) -> None:
        self.store = store
        """Where tickets are."""
        self.run = run
        """The run's name."""
        self.cpus = cpus
        """CPUs that it needs."""
        self.clock = clock
        """The clock."""
        self.sleep = sleep
        """Sleeps."""
        self.number = 0
        """The number of the ticket; 0 without one."""
        self.seen: dict[str, tuple[bytes, float]] = {}
        """Ticket of another run -> what it held when it was last seen to change, and when that was."""
        self.left = threading.Event()
        """Set when the ticket was given up."""

    def draw(self) -> None:
        """Draw a ticket with the next number."""
        while True:
            number = 1 + max((ticket_number(key) for key in self.store.items()), default=0)
            if self.store.put_if_absent(ticket_key(number), self._content()):
                self.number = number
                return

    def beat(self) -> None:
        """Change the ticket, so that others see that its owner lives."""
        if not self.left.is_set():
            self.store.put(ticket_key(self.number), self._content())

    def leave(self) -> None:
        """Give the ticket up. Idempotent."""
        if not self.left.is_set():
            self.left.set()
            self.store.delete(ticket_key(self.number))

    def first_before(self) -> Ticket | None:
        """The ticket that is first in the queue, if it is another one; tickets whose owners are gone are removed."""
        now, living = self.clock(), list[Ticket]()
        for key, content in self.store.items().items():
            if (number := ticket_number(key)) >= self.number:
                continue
            was, since_s = self.seen.get(key, (b"", now))
            if was != content:
                self.seen[key] = (content, now)
            elif now - since_s > DEAD_S:
                self.store.delete(key)
                continue
            living.append(parse_ticket(number, content))
        return min(living, key=lambda ticket: ticket.number, default=None)

    def wait_for_turn(
        self,
        look: Callable[[], ClusterRoom],
        wait_s: float,
        say: Callable[[str], None],
        stop_signals: Sequence[str] = (),
        sweep: Callable[[], Mapping[str, int]] = dict,
    ) -> None:
        """Wait until this run is first and the cluster has room for it.

        `say`: is called with each line about the wait. `stop_signals`: names of signals that have asked this process to end, to
        which signal handlers add. `sweep`: removes the placement groups of ended runs, and returns run -> number of its groups.
        Raises `Interrupted` once there is a stop signal, `ClusterError` after `wait_s` seconds.
        """
        began_s = self.clock()
        told = topic = ""
        told_s = since_s = began_s
        swept_s = -math.inf
        while True:
            if self.clock() - swept_s >= SWEEP_S:
                swept_s = self.clock()
                for run, groups in sweep().items():
                    say(f"removed {count_noun(groups, 'placement group')} of run {run}, which has no driver any more")
            before = self.first_before()
            text = placement_obstacle(self.cpus, look().without(self.run), before)
            if stop_signals:
                raise Interrupted(f"run {self.run} has not begun: {stop_signals[0]} while it was {text or 'about to begin'}")
            if text is None:
                break
            now = self.clock()
            # Behind another run only a change of that run is worth a line, not what the runs before it are given.
            former, topic = topic, text if before is None else before.run
            since_s = since_s if topic == former else now
            if now - began_s > wait_s:
                raise ClusterError(
                    f"the cluster had no room for run {self.run} within {wait_s:.0f} s; it was {text}",
                    cure="wait for other jobs to end (`raypar runs`, `raypar stop`), add nodes, choose a smaller plan, or "
                    "raise wait_for_workers_s",
                )
            if now - since_s >= SETTLED_S and (topic != told or now - told_s >= SAY_AGAIN_S):
                told, told_s = topic, now
                say(text)
            self.sleep(POLL_S)
        if told:
            say(f"the cluster has room for run {self.run} now")

    def _content(self) -> bytes:
        """The ticket, another one at every call."""
        return json.dumps({"run": self.run, "cpus": self.cpus, "beat": uuid.uuid4().hex}).encode()


def ticket_key(number: int) -> str:
    """The key of a ticket."""
    return f"{PREFIX}{number:08d}"


def ticket_number(key: str) -> int:
    """The number of the ticket with this key; 0 if it is none."""
    text = key.removeprefix(PREFIX)
    return int(text) if text.isdecimal() else 0


def parse_ticket(number: int, content: bytes) -> Ticket:
    """The ticket in a value, which another version of raypar may have written."""
    try:
        found: Any = json.loads(content)
        return Ticket(number, str(found["run"]), int(found["cpus"]))
    except (ValueError, KeyError, TypeError):
        return Ticket(number, "?", 0)


class RayTicketStore:
    """Tickets in the key-value store of the Ray cluster that this process is connected to."""

    def put_if_absent(self, key: str, value: bytes) -> bool:
        """Store the value unless the key exists. A call that Ray has repeated finds its own value."""
        return call_ray(lambda: not kv_put(key, value, overwrite=False) or kv_get(key) == value)

    def put(self, key: str, value: bytes) -> None:
        """Store the value."""
        call_ray(lambda: kv_put(key, value, overwrite=True))

    def delete(self, key: str) -> None:
        """Remove the key."""
        call_ray(lambda: kv_delete(key))

    def items(self) -> dict[str, bytes]:
        """All tickets by key."""
        keys = [key.decode() for key in call_ray(lambda: kv_list(PREFIX))]
        values = call_ray(lambda: {key: kv_get(key) for key in keys})
        return {key: value for key, value in values.items() if value is not None}


def look_at_cluster() -> ClusterRoom:
    """The room on the Ray cluster that this process is connected to."""
    from ray.util.placement_group import placement_group_table

    from raypar.actors.cluster_info import cluster_capacity

    capacity, by_run = cluster_capacity(), dict[str, int]()
    for info in placement_group_table().values():
        run, _, number = str(info["name"]).removeprefix("raypar-").rpartition("-")
        if str(info["name"]).startswith("raypar-") and number.isdecimal() and info["state"] == "CREATED":
            by_run[run] = by_run.get(run, 0) + int(sum(bundle.get("CPU", 0) for bundle in info["bundles"].values()))
    return ClusterRoom(capacity.cpus, capacity.free_cpus, capacity.may_add_nodes, by_run)


@contextlib.contextmanager
def placement_turn(run: str, cpus: int, wait_s: float, say: Callable[[str], None]) -> Iterator[PlacementQueue]:
    """Wait for the run's turn, then run the body with its ticket held until `leave` is called, or the body ends.

    Raises `ClusterError` after `wait_s`, `Interrupted` after Ctrl-C or SIGTERM.
    """
    from raypar.actors.driver_client import collecting_signals
    from raypar.actors.worker_pool import remove_placement_groups_of_ended_runs

    queue = PlacementQueue(RayTicketStore(), run, cpus)
    queue.draw()

    def keep_alive() -> None:
        while not queue.left.wait(BEAT_S):
            with contextlib.suppress(Exception):  # the control store may be away for a while
                queue.beat()

    def sweep() -> Mapping[str, int]:
        try:
            return call_ray(remove_placement_groups_of_ended_runs)
        except ControlStoreLost:
            raise
        except Exception:  # the run does not depend on it
            return {}

    threading.Thread(target=keep_alive, name="raypar-queue", daemon=True).start()
    try:
        # Otherwise Ray's signal handler would print a stack and end the process, and the ticket would stay for `DEAD_S`.
        with collecting_signals() as stop_signals:
            queue.wait_for_turn(lambda: call_ray(look_at_cluster), wait_s, say, stop_signals, sweep)
        yield queue
    finally:
        with contextlib.suppress(Exception):  # Ray may be gone: the others see that the ticket does not change
            queue.leave()
