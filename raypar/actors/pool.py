"""The seats of a run: one detached placement group and its worker actors per replica of a stage, and their removal."""

from __future__ import annotations

import asyncio
import contextlib
import time
from collections.abc import Callable
from typing import Any

import ray
from ray.util.placement_group import PlacementGroup, placement_group, placement_group_table, remove_placement_group
from ray.util.scheduling_strategies import PlacementGroupSchedulingStrategy

from raypar.actors.cluster_watch import capacity
from raypar.actors.worker_actor import worker_class
from raypar.errors import ClusterError
from raypar.plan import ParallelPlan

POLL_S = 0.05


def namespace(run: str) -> str:
    """Every actor and group of a run lives here, so that a start-up can find what an earlier driver left."""
    return f"raypar-{run}"


class Pool:
    """Placement groups and workers of one plan. All detached: they outlive whoever made them, until they are removed."""

    def __init__(self, run: str, plan: ParallelPlan) -> None:
        self.run, self.plan = run, plan
        self.groups: list[PlacementGroup] = []
        self.workers: dict[int, Any] = {}
        """By number; the first plan's ranks are the first numbers."""

    async def reserve(self, wait_s: float, say: Callable[[str], None]) -> list[tuple[PlacementGroup, int]]:
        """One STRICT_PACK group per seat (a replica of a position with all its shards). Returns (group, bundle) by rank.

        Raises `ClusterError` when they are not there after `wait_s` seconds.
        """
        places: list[tuple[PlacementGroup, int]] = []
        for rank, seat in enumerate(self.plan.seats):
            if seat.shard == 0:
                shards = sum(s.position == seat.position and s.replica == seat.replica for s in self.plan.seats)
                name = f"{namespace(self.run)}-{rank}"
                self.groups.append(
                    placement_group([{"CPU": 1}] * shards, strategy="STRICT_PACK", name=name, lifetime="detached")
                )
            places.append((self.groups[-1], seat.shard))
        start, told_s = time.monotonic(), 0.0
        while True:
            there = await asyncio.to_thread(self._there)
            if there == self.plan.world:
                return places
            waited = time.monotonic() - start
            if waited > wait_s:
                cluster = capacity()
                raise ClusterError(
                    f"only {there} of {self.plan.world} workers could be placed within {wait_s:.0f} s; the cluster has "
                    f"{cluster.total} CPUs, {cluster.free} of them free",
                    cure="wait for other jobs to end, add nodes, choose a smaller plan, or raise elastic.wait_for_workers_s",
                )
            if waited - told_s > 2.0:
                told_s = waited
                say(f"waiting for {self.plan.world - there} of {self.plan.world} workers")
            await asyncio.sleep(POLL_S)

    def _there(self) -> int:
        table = placement_group_table()
        created = [g for g in self.groups if table.get(g.id.hex(), {}).get("state") == "CREATED"]
        return sum(len(g.bundle_specs) for g in created)

    def hire(self, places: list[tuple[PlacementGroup, int]], spec: bytes, host: str | None, orphan_timeout_s: float) -> None:
        """Start one actor per seat; they load torch while this returns."""
        actor = worker_class()
        for number, (group, bundle) in enumerate(places):
            self.workers[number] = actor.options(
                name=f"worker-{number}",
                namespace=namespace(self.run),
                lifetime="detached",
                num_cpus=1,
                scheduling_strategy=PlacementGroupSchedulingStrategy(group, placement_group_bundle_index=bundle),
            ).remote(self.run, number, spec, host, orphan_timeout_s)

    def dismiss(self, number: int) -> None:
        """Kill one worker; it is not waited for, and nothing is called there any more."""
        worker = self.workers.pop(number, None)
        if worker is not None:
            with contextlib.suppress(Exception):
                ray.kill(worker, no_restart=True)

    async def close(self, patience_s: float = 1.0) -> None:
        """Workers close their loaders and sockets, then they and their groups are removed."""
        with contextlib.suppress(Exception):
            closing = [asyncio.ensure_future(_quietly(w.close.remote())) for w in self.workers.values()]
            if closing:
                await asyncio.wait(closing, timeout=patience_s)
        self.remove()

    def remove(self) -> None:
        """Kill every worker, return every reserved CPU. Idempotent."""
        for worker in self.workers.values():
            with contextlib.suppress(Exception):
                ray.kill(worker, no_restart=True)
        for group in self.groups:
            with contextlib.suppress(Exception):
                remove_placement_group(group)
        self.workers, self.groups = {}, []


async def _quietly(ref: Any) -> None:
    with contextlib.suppress(Exception):
        await ref


def sweep(run: str) -> int:
    """Remove placement groups that an earlier driver of this run left behind, and the actors in them; how many there were."""
    left = [
        info
        for info in placement_group_table().values()
        if str(info["name"]).startswith(namespace(run) + "-") and info["state"] != "REMOVED"
    ]
    for info in left:
        remove_placement_group(ray.util.get_placement_group(info["name"]))
    return len(left)
