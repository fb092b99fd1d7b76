"""Places, starts and removes the workers of a run on the Ray cluster, as actors in detached placement groups."""

from __future__ import annotations

import asyncio
import contextlib
import re
import time
from collections.abc import Callable, Collection, Mapping
from typing import Any

import ray
from ray.util.placement_group import PlacementGroup, placement_group, placement_group_table, remove_placement_group
from ray.util.scheduling_strategies import PlacementGroupSchedulingStrategy

from raypar.actors.cluster_info import ClusterCapacity, cluster_capacity, max_workers_per_node
from raypar.actors.worker_actor import make_worker_actor_class
from raypar.comm.tcp.handshake import RunCredential
from raypar.elastic.plural_wording import format_worker_numbers, verb_form
from raypar.errors import ClusterError
from raypar.plan import ParallelPlan

POLL_S = 0.05
SWEEP_S = 20.0
"""How long actors of an earlier driver may take to end."""
SAY_S, SAY_AGAIN_S = 2.0, 30.0
"""Time between two lines about the workers that are waited for: if their number has changed, and if not."""
SHUN_S = 15.0
"""How long a new worker waits for a place on another node than one that is known to be slow."""
NODE_LABEL = "ray.io/node-id"


def run_namespace(run: str) -> str:
    """The Ray namespace of all actors and groups of a run, where a new driver finds what an earlier one has left."""
    return f"raypar-{run}"


class WorkerPool:
    """Placement groups and workers by worker number. All are detached: they outlive their driver until they are removed."""

    def __init__(
        self,
        credential: RunCredential,
        gpus: int = 0,
        environment: Mapping[str, str] | None = None,
        filesystems: Mapping[str, bytes] | None = None,
    ) -> None:
        self.credential = credential
        """The run's name, and the secret by which its workers recognise each other."""
        self.run = credential.run
        """The run's name."""
        self.gpus = gpus
        """GPUs of each worker."""
        self.environment = dict(environment or {})
        """Environment variables of worker processes; the job's own runtime environment overrides them."""
        self.filesystems = filesystems or {}
        """Id -> pickle of file systems that were given as objects, on which checkpoints lie."""
        self.groups: dict[int, PlacementGroup] = {}
        """Worker -> its placement group; the shards of one replica share a group."""
        self.bundles: dict[int, int] = {}
        """Worker -> index of its bundle in the group."""
        self.workers: dict[int, Any] = {}
        """Worker -> actor handle."""
        self.closed = False
        """Whether the run has ended: no worker is started any more."""

    # -- placing -----------------------------------------------------------------------------------------------------------

    async def reserve(self, plan: ParallelPlan, wait_s: float, say: Callable[[str], None]) -> None:
        """Reserve a placement group for each replica of each position, with a bundle per shard; wait until all are placed.

        A group lies on one node where a node is large enough. Worker numbers are the plan's ranks. Raises `ClusterError` when
        not all groups are placed after `wait_s` seconds.
        """
        self._still_open()
        for rank, seat in enumerate(plan.seats):
            if seat.shard == 0:
                shards = sum(s.position == seat.position and s.replica == seat.replica for s in plan.seats)
                group = self._group(rank, shards)
            self.groups[rank], self.bundles[rank] = group, seat.shard
        start, told = time.monotonic(), (0.0, -1)
        while True:
            there = await asyncio.to_thread(self._there)
            if there == plan.world:
                return
            waited = time.monotonic() - start
            if waited > wait_s:
                raise placement_timeout_error(
                    there, plan.world, wait_s, await asyncio.to_thread(cluster_capacity), bool(self.gpus)
                )
            if waited > told[0] + (SAY_S if there != told[1] else SAY_AGAIN_S):
                told = waited, there
                say(placement_wait_text(there, plan.world, (await asyncio.to_thread(cluster_capacity)).may_add_nodes))
            await asyncio.sleep(POLL_S)

    async def reserve_one(self, number: int, avoid: Collection[str], shun: Collection[str] = ()) -> None:
        """Reserve a group for one more worker; wait until it is placed, however long that takes.

        Not on the nodes `avoid`, and not on the nodes `shun` either unless no other node has had room for `SHUN_S`. While it
        waits, an autoscaler sees the demand.
        """
        group = await asyncio.to_thread(self._group, number, 1, {*avoid, *shun})
        if self.closed:  # meanwhile
            await asyncio.to_thread(remove_placement_group, group)
            return
        self.groups[number], self.bundles[number] = group, 0
        start_s, shunned = time.monotonic(), bool(set(shun) - set(avoid))
        while number in self.groups and not await asyncio.to_thread(self._there, number):
            if shunned and time.monotonic() - start_s > SHUN_S:
                shunned = False
                await asyncio.to_thread(remove_placement_group, group)
                group = await asyncio.to_thread(self._group, number, 1, avoid)
                if number in self.groups:
                    self.groups[number] = group
                else:  # dismissed meanwhile
                    await asyncio.to_thread(remove_placement_group, group)
            await asyncio.sleep(4 * POLL_S)

    def _group(self, number: int, bundles: int, avoid: Collection[str] = ()) -> PlacementGroup:
        """A new placement group, not placed yet, for the workers from `number` on; not on the nodes `avoid`."""
        selector = [{NODE_LABEL: f"!in({','.join(sorted(avoid))})"}] * bundles if avoid else None
        return placement_group(
            [{"CPU": 1, "GPU": self.gpus} if self.gpus else {"CPU": 1}] * bundles,
            strategy="STRICT_PACK" if bundles == 1 or bundles <= max_workers_per_node(self.gpus) else "PACK",
            name=f"{run_namespace(self.run)}-{number}",
            lifetime="detached",
            bundle_label_selector=selector,
        )

    def _there(self, only: int | None = None) -> int:
        """How many workers have a placement group that is placed; with `only`, 1 or 0 for that worker."""
        table = placement_group_table()
        groups = self.groups if only is None else {n: g for n, g in self.groups.items() if n == only}
        return sum(table.get(group.id.hex(), {}).get("state") == "CREATED" for group in groups.values())

    # -- workers -----------------------------------------------------------------------------------------------------------

    def start_worker(self, number: int, spec: bytes, host: str | None, orphan_timeout_s: float) -> Any:
        """Start a worker actor in its placement group; it loads torch at its first call. Returns its handle.

        Raises ValueError when another driver has used the number, `ClusterError` when the run has ended meanwhile.
        """
        self._still_open()
        strategy = PlacementGroupSchedulingStrategy(self.groups[number], placement_group_bundle_index=self.bundles[number])
        made = make_worker_actor_class().options(
            name=f"worker-{number}",
            namespace=run_namespace(self.run),
            lifetime="detached",
            num_cpus=1,
            scheduling_strategy=strategy,
            **self._of_its_own(),
        )
        self.workers[number] = made.remote(self.credential, number, spec, host, orphan_timeout_s, self.filesystems)
        return self.workers[number]

    def _of_its_own(self) -> dict[str, Any]:
        """Actor options of a worker with GPUs: their number, and environment variables, for which Ray starts a new process."""
        if not self.gpus:
            return {}
        given = ray.get_runtime_context().runtime_env.get("env_vars") or {}
        return {"num_gpus": self.gpus, "runtime_env": {"env_vars": {**self.environment, **given}}}

    def find(self) -> None:
        """Take over all workers that an earlier driver has left, and their placement groups."""
        for number in find_existing_worker_numbers(self.run):
            with contextlib.suppress(ValueError):  # gone since it was listed
                self.workers[number] = ray.get_actor(f"worker-{number}", namespace=run_namespace(self.run))
        for info in list_leftover_placement_groups(self.run):
            number = int(str(info["name"]).rpartition("-")[2])
            group = ray.util.get_placement_group(info["name"])
            for shard in range(len(info["bundles"])):
                if number + shard in self.workers:
                    self.groups[number + shard], self.bundles[number + shard] = group, shard
            if number not in self.groups:
                remove_placement_group(group)

    def dismiss(self, number: int) -> Callable[[], None]:
        """Forget a worker; returns a function that kills the actor and returns its CPU, which may block. Idempotent."""
        worker, group = self.workers.pop(number, None), self.groups.pop(number, None)
        last = group is not None and all(group.id != other.id for other in self.groups.values())

        def rest() -> None:
            if worker is not None:
                with contextlib.suppress(Exception):
                    ray.kill(worker, no_restart=True)
            if group is not None and last:
                with contextlib.suppress(Exception):
                    remove_placement_group(group)

        return rest

    def _still_open(self) -> None:
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


def placement_wait_text(there: int, wanted: int, may_add_nodes: bool) -> str:
    """The line for the user while workers are not placed: `waiting for 3 more workers: the cluster has a place for 1 of 4`."""
    more = "1 more worker" if wanted - there == 1 else f"{wanted - there} more workers"
    return f"waiting for {more}: the cluster has a place for {there} of {wanted}" + ", an autoscaler is running" * may_add_nodes


def placement_timeout_error(there: int, wanted: int, wait_s: float, cluster: ClusterCapacity, gpus: bool) -> ClusterError:
    """The error when workers could not be placed within `wait_s`."""
    cure = "wait for other jobs to end, add nodes, choose a smaller plan, or raise wait_for_workers_s"
    if cluster.may_add_nodes:
        cure = (
            "`ray status` says what the autoscaler does: its max_workers may be too low, or no node type may have "
            f"{'a GPU' if gpus else 'CPUs'} enough; else raise wait_for_workers_s, or choose a smaller plan"
        )
    what = (
        f"only {there} of {wanted} workers could be placed within {wait_s:.0f} s; the cluster has {cluster.cpus} CPUs, "
        f"{cluster.free_cpus} of them free" + f", and {cluster.gpus} GPUs" * gpus
    )
    return ClusterError(what + ", and its autoscaler has added no more" * cluster.may_add_nodes, cure=cure)


async def _quietly(ref: Any) -> None:
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
        remove_placement_group(ray.util.get_placement_group(info["name"]))
    deadline = time.monotonic() + SWEEP_S
    while still := find_existing_worker_numbers(run):
        for number in still:  # who was still to be placed does not end with its group
            with contextlib.suppress(ValueError):
                ray.kill(ray.get_actor(f"worker-{number}", namespace=run_namespace(run)), no_restart=True)
        if time.monotonic() > deadline:
            raise ClusterError(
                f"{format_worker_numbers(still)} of an earlier driver of run {run} {verb_form(still, 'does', 'do')} not end "
                f"within {SWEEP_S:.0f} s",
                cure="look at their nodes, or choose another name for the run",
            )
        time.sleep(POLL_S)
    return len(left)
