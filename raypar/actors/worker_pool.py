"""Places, starts and removes the workers of a run on the Ray cluster, as actors in detached placement groups."""

from __future__ import annotations

import asyncio
import contextlib
import re
import time
from collections.abc import Awaitable, Callable, Collection, Mapping
from dataclasses import dataclass
from typing import Any

import ray
from ray.util.placement_group import PlacementGroup, placement_group, placement_group_table, remove_placement_group
from ray.util.scheduling_strategies import PlacementGroupSchedulingStrategy

from raypar.actors.actor_handle_types import WorkerHandle, kill_actor
from raypar.actors.cluster_info import max_workers_per_node
from raypar.actors.worker_actor import make_worker_actor_class
from raypar.comm.tcp.handshake import RunCredential
from raypar.elastic.placement_constraints import PlacementConstraints
from raypar.errors import ClusterError
from raypar.files.json_type import Json
from raypar.plan.wording import format_worker_numbers, word_form
from raypar.ray_compat.autoscaler import has_autoscaler
from raypar.ray_compat.nodes import placement_group_of

POLL_S = 0.05
SWEEP_S = 20.0
"""How long actors of an earlier driver may take to end."""
SHUN_S = 15.0
"""How long a new worker waits for a place on another node than one that is known to be slow."""


@dataclass(frozen=True)
class FoundGroups:
    """Placement groups of an earlier driver of the run, each as the numbers of its workers."""

    pending: tuple[tuple[int, ...], ...]
    """Groups without any worker process."""
    started: tuple[tuple[int, ...], ...]
    """Groups with worker processes; of each, the workers that have a process."""


def run_namespace(run: str) -> str:
    """The Ray namespace of all actors and groups of a run, where a new driver finds what an earlier one has left."""
    return f"raypar-{run}"


class WorkerPool:
    """Placement groups and workers by worker number. All are detached: they outlive their driver until they are removed."""

    def __init__(
        self,
        credential: RunCredential,
        placement: PlacementConstraints | None = None,
        environment: Mapping[str, str] | None = None,
        filesystems: Mapping[str, bytes] | None = None,
    ) -> None:
        self.credential = credential
        """The run's name, and the secret by which its workers recognise each other."""
        self.run = credential.run
        """The run's name."""
        self.placement = placement or PlacementConstraints()
        """What a worker's node must have."""
        self.environment = dict(environment or {})
        """Environment variables of worker processes; the job's own runtime environment overrides them."""
        self.filesystems = filesystems or {}
        """Id -> pickle of file systems that were given as objects, on which checkpoints lie."""
        self.groups: dict[int, PlacementGroup] = {}
        """Worker -> its placement group; the shards of one replica share a group."""
        self.bundles: dict[int, int] = {}
        """Worker -> index of its bundle in the group."""
        self.workers: dict[int, WorkerHandle] = {}
        """Worker -> actor handle."""
        self.dismissed: set[int] = set()
        """Workers that are gone or were given back, even if they never had a placement group."""
        self.closed = False
        """Whether the run has ended: no worker is started any more."""

    # -- placing -----------------------------------------------------------------------------------------------------------

    def request_group(self, numbers: tuple[int, ...], avoid: Collection[str] = (), *, on_demand: bool = False) -> None:
        """Ask the cluster for a place for these workers in one placement group; returns before there is one.

        Not on the nodes `avoid`. An autoscaler adds a node for a group that has no place. Blocks briefly.
        """
        group = self._make_group(numbers, avoid, on_demand)
        if self.closed or self.dismissed.issuperset(numbers):  # meanwhile
            remove_placement_group(group)
            return
        for bundle, number in enumerate(numbers):
            self.groups[number], self.bundles[number] = group, bundle

    def _make_group(self, numbers: tuple[int, ...], avoid: Collection[str], on_demand: bool) -> PlacementGroup:
        """A new placement group, not placed yet, with a bundle for each of the workers."""
        size, selector = len(numbers), self.placement.selector(on_demand, avoid)
        # One node for all shards of a replica: where there is a node large enough, or an autoscaler may add one.
        together = size == 1 or size <= max_workers_per_node(self.placement.gpus) or has_autoscaler()
        group: PlacementGroup = placement_group(
            [dict(self.placement.bundle)] * size,
            strategy="STRICT_PACK" if together else "PACK",
            name=f"{run_namespace(self.run)}-{numbers[0]}",
            lifetime="detached",
            bundle_label_selector=[selector] * size if selector else None,
        )
        return group

    def placed_workers(self) -> dict[int, str]:
        """Worker -> the node on which its bundle lies, of all groups that are placed. Blocks briefly."""
        table = placement_group_table()
        found = {}
        for number, group in list(self.groups.items()):
            info = table.get(group.id.hex(), {})
            if info.get("state") == "CREATED":
                found[number] = str(info.get("bundles_to_node_id", {}).get(self.bundles[number], ""))
        return found

    async def wait_until_placed(
        self,
        numbers: tuple[int, ...],
        avoid: Callable[[], Collection[str]] = frozenset,
        shun: Collection[str] = (),
        *,
        on_demand: bool = False,
        note_node: Callable[[str], None] = lambda node: None,
    ) -> bool:
        """Wait until the group of these workers is placed, however long that takes. False if it was given back meanwhile.

        No node of `avoid()` is taken. Nodes of `shun` are taken after `SHUN_S`, if no other node has had room until then. When
        a node is allowed again, or the group lies on one that joined after the request and is to be avoided, the group is
        requested anew, because a group's allowed nodes cannot be changed. `note_node` is told of the nodes on which the group
        lies before `avoid()` is asked about them. Raises `ClusterError` if somebody else has removed the group.
        """
        first, start_s = numbers[0], time.monotonic()
        excluded = {*avoid(), *shun}
        while first in self.groups:
            group = self.groups[first]
            info = (await asyncio.to_thread(placement_group_table)).get(group.id.hex(), {})
            placed = info.get("state") == "CREATED"
            nodes = set(map(str, info.get("bundles_to_node_id", {}).values())) if placed else set[str]()
            for node in nodes:
                note_node(node)
            if placed and not nodes & set(avoid()):
                return first in self.groups
            if info.get("state") == "REMOVED" and self.groups.get(first) is group:
                raise ClusterError("its placement group was removed", cure="look for who removes placement groups")
            waited_s = time.monotonic() - start_s
            excluded_now = {*avoid(), *(shun if waited_s <= SHUN_S else ())}
            if placed or excluded - excluded_now:
                excluded = excluded_now
                await asyncio.to_thread(remove_placement_group, group)
                new_group = await asyncio.to_thread(self._make_group, numbers, excluded, on_demand)
                if first not in self.groups:  # given back meanwhile
                    await asyncio.to_thread(remove_placement_group, new_group)
                self.groups.update({number: new_group for number in numbers if number in self.groups})
            await asyncio.sleep(min(1.0, max(4 * POLL_S, waited_s / 20)))
        return False

    # -- workers -----------------------------------------------------------------------------------------------------------

    def start_worker(self, number: int, spec: bytes, host: str | None, orphan_timeout_s: float) -> WorkerHandle:
        """Start a worker actor in its placement group; it loads torch at its first call. Returns its handle.

        If another driver of this run has started it meanwhile, that one's handle. Raises `ClusterError` when the run has ended
        meanwhile.
        """
        self.check_open()
        strategy = PlacementGroupSchedulingStrategy(self.groups[number], placement_group_bundle_index=self.bundles[number])
        made = make_worker_actor_class().options(
            name=f"worker-{number}",
            namespace=run_namespace(self.run),
            lifetime="detached",
            num_cpus=1,
            scheduling_strategy=strategy,
            **self._of_its_own(),
        )
        try:
            self.workers[number] = made.remote(self.credential, number, spec, host, orphan_timeout_s, self.filesystems)
        except ValueError:  # the name is taken: a former driver, wrongly thought dead, has started this worker
            self.workers[number] = find_worker(self.run, number)
        return self.workers[number]

    def _of_its_own(self) -> dict[str, Json]:
        """Actor options of a worker with GPUs: their number, and environment variables, for which Ray starts a new process."""
        gpus = self.placement.gpus
        if not gpus:
            return {}
        given = ray.get_runtime_context().runtime_env.get("env_vars") or {}
        return {"num_gpus": gpus, "runtime_env": {"env_vars": {**self.environment, **given}}}

    def find(self, former: Collection[int]) -> FoundGroups:
        """Take over all workers that an earlier driver has left, and the placement groups of these and of workers to come.

        `former`: workers that had joined; those of them that are gone do not start again.
        """
        for number in find_existing_worker_numbers(self.run):
            with contextlib.suppress(ValueError):  # gone since it was listed
                self.workers[number] = find_worker(self.run, number)
        pending, started = [], []
        for info in list_leftover_placement_groups(self.run):
            first = int(str(info["name"]).rpartition("-")[2])
            group, numbers = placement_group_of(info), range(first, first + len(info["bundles"]))
            there = tuple(number for number in numbers if number in self.workers)
            if not there and not set(numbers).isdisjoint(former):
                remove_placement_group(group)
                continue
            for number in there or numbers:
                self.groups[number], self.bundles[number] = group, number - first
            if there:
                started.append(there)
            else:
                pending.append(tuple(numbers))
        return FoundGroups(tuple(pending), tuple(started))

    def dismiss(self, number: int) -> Callable[[], None]:
        """Forget a worker; returns a function that kills the actor and returns its CPU, which may block. Idempotent."""
        self.dismissed.add(number)
        worker, group = self.workers.pop(number, None), self.groups.pop(number, None)
        last = group is not None and all(group.id != other.id for other in self.groups.values())

        def rest() -> None:
            if worker is not None:
                with contextlib.suppress(Exception):
                    kill_actor(worker, no_restart=True)
            if group is not None and last:
                with contextlib.suppress(Exception):
                    remove_placement_group(group)

        return rest

    def check_open(self) -> None:
        """Raise `ClusterError` if the run has ended."""
        if self.closed:
            raise ClusterError(f"run {self.run} has ended before its workers were there", cure="nothing is to be done")

    async def close(self, patience_s: float = 1.0) -> None:
        """End all workers: they close loaders and sockets, then actors and groups are removed. None can start afterwards."""
        self.closed = True
        with contextlib.suppress(Exception):
            closing = [asyncio.ensure_future(_quietly(w.close.remote())) for w in self.workers.values()]
            if closing:
                await asyncio.wait(closing, timeout=patience_s)
        await asyncio.to_thread(self.remove)

    def remove(self) -> None:
        """Kill every worker and return every reserved CPU. Idempotent."""
        for number in {*self.workers, *self.groups}:
            self.dismiss(number)()


def find_worker(run: str, number: int) -> WorkerHandle:
    """The handle of a worker that lives. Raises `ValueError` if none of that number does."""
    found: WorkerHandle = ray.get_actor(f"worker-{number}", namespace=run_namespace(run))  # type: ignore[assignment]
    return found


async def _quietly(ref: Awaitable[None]) -> None:
    """Await a call and ignore its failure."""
    with contextlib.suppress(Exception):
        await ref


def list_leftover_placement_groups(run: str) -> list[dict[str, Any]]:
    """Placement groups that carry the run's name."""
    return [
        info
        for info in placement_group_table().values()
        if re.fullmatch(re.escape(run_namespace(run)) + r"-\d+", str(info["name"])) and info["state"] != "REMOVED"
    ]


def find_existing_worker_numbers(run: str) -> list[int]:
    """Numbers of the run's workers that Ray knows."""
    names = [a["name"] or "" for a in ray.util.list_named_actors(all_namespaces=True) if a["namespace"] == run_namespace(run)]
    return [int(match[1]) for match in (re.fullmatch(r"worker-(\d+)", name) for name in names) if match is not None]


def remove_leftover_placement_groups(run: str) -> int:
    """Remove the placement groups that an earlier driver of this run has left, with their actors. Returns their number.

    Raises `ClusterError` when the actors' names are not free again after `SWEEP_S`.
    """
    left = list_leftover_placement_groups(run)
    for info in left:
        remove_placement_group(placement_group_of(info))
    deadline = time.monotonic() + SWEEP_S
    while still := find_existing_worker_numbers(run):
        for number in still:  # who was still to be placed does not end with its group
            with contextlib.suppress(ValueError):
                kill_actor(find_worker(run, number), no_restart=True)
        if time.monotonic() > deadline:
            raise ClusterError(
                f"{format_worker_numbers(still)} of an earlier driver of run {run} {word_form(still, 'does', 'do')} not end "
                f"within {SWEEP_S:.0f} s",
                cure="look at their nodes, or choose another name for the run",
            )
        time.sleep(POLL_S)
    return len(left)


def remove_placement_groups_of_ended_runs() -> dict[str, int]:
    """Remove the placement groups of runs that have no driver any more. Returns run -> number of its groups.

    A run that loses Ray's control store cannot remove them; once the store is back they would keep nodes reserved for ever.
    """
    left: dict[str, list[PlacementGroup]] = {}
    for info in placement_group_table().values():
        match = re.fullmatch(re.escape(run_namespace("")) + r"(.+)-\d+", str(info["name"]))
        if match is not None and info["state"] != "REMOVED":
            left.setdefault(match[1], []).append(placement_group_of(info))
    # Looked for after the groups: a driver is registered before it asks for any.
    named = ray.util.list_named_actors(all_namespaces=True) if left else []
    driven = {actor["namespace"] for actor in named if actor["name"] == "driver"}
    ended = {run: groups for run, groups in left.items() if run_namespace(run) not in driven}
    for group in (group for groups in ended.values() for group in groups):
        remove_placement_group(group)
    return {run: len(groups) for run, groups in ended.items()}
