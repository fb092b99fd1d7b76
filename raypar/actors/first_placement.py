"""Places the workers that a run begins with: all of its plan or, in an elastic run, as many as the cluster has room for."""

from __future__ import annotations

import asyncio
import time
from collections import Counter
from collections.abc import Callable, Mapping
from dataclasses import dataclass

from raypar.actors.cluster_info import ClusterCapacity, NodeResources, cluster_capacity, list_live_node_resources
from raypar.actors.worker_pool import POLL_S, WorkerPool
from raypar.elastic.desired_capacity import StartInputs, StartLimits, decide_start
from raypar.elastic.placement_constraints import PlacementConstraints
from raypar.errors import ClusterError
from raypar.plan import ParallelPlan
from raypar.plan.wording import count_noun
from raypar.ray_compat.autoscaler import read_autoscaler_answer

SAY_S, SAY_AGAIN_S = 2.0, 30.0
"""Time between two lines for the user about workers without a place: if their number has changed, and if not."""
ASK_AUTOSCALER_S = 0.5
"""Time between two questions to the autoscaler."""
CERTAIN_S = 1.5
"""A group counts as infeasible once the autoscaler has called it so for this long."""

PlanFitsPlaced = Callable[[Mapping[int, str], Mapping[str, NodeResources]], bool]
"""Whether there is a plan for workers placed so (worker -> node), given the resources of the nodes. It may take seconds."""


@dataclass(frozen=True)
class WorkerGroup:
    """Workers that are asked for together: all shards of one replica."""

    numbers: tuple[int, ...]
    """Their numbers."""
    on_demand: bool = False
    """Whether they are asked for on nodes that the cloud does not take back."""


def make_groups(plan: ParallelPlan, on_demand: int = 0) -> tuple[WorkerGroup, ...]:
    """A group for the workers that compute layers together (`ParallelPlan.shard_groups`); worker numbers are the plan's ranks.

    The first replicas are asked for on on-demand nodes, until `on_demand` workers are.
    """
    safe, asked = set[tuple[int, ...]](), 0
    for group in sorted(plan.shard_groups, key=lambda ranks: (plan.roles[ranks[0]][0].replica, ranks)):
        if asked < on_demand:
            safe.add(group)
            asked += len(group)
    return tuple(WorkerGroup(group, group in safe) for group in plan.shard_groups)


class FirstPlacement:
    """Asks the cluster for a place for each worker of a plan, and waits until the run can begin."""

    def __init__(
        self,
        pool: WorkerPool,
        groups: tuple[WorkerGroup, ...],
        limits: StartLimits,
        say: Callable[[str], None],
        fits: PlanFitsPlaced = lambda placed, facts: True,
    ) -> None:
        self.pool = pool
        """Asks Ray for placement groups."""
        self.groups = groups
        """The workers of the plan."""
        self.limits = limits
        """How many of them must be placed, and how long that may take."""
        self.say = say
        """Shows a line to the user."""
        self.fits = fits
        """Whether the planner has a plan for the workers that are placed."""
        self._fits_for: tuple[frozenset[int], bool] | None = None
        """The placed workers for which the planner was asked last, and its answer."""
        self._infeasible_since_s: dict[tuple[int, ...], float] = {}
        """Group that the autoscaler calls infeasible -> since when."""
        self._infeasible: tuple[WorkerGroup, ...] = ()
        """Groups that are infeasible for `CERTAIN_S` or longer."""
        self._looked_s = 0.0
        """When the autoscaler was last asked."""
        self._told = (0.0, (-1, -1))
        """When the last line was shown, and the numbers in it."""

    async def wait(self) -> dict[int, str]:
        """Wait until the run can begin; worker -> node of those that are placed.

        Raises `ClusterError` when the cluster can never place enough of them, or has not in time.
        """
        for group in self.groups:
            await asyncio.to_thread(self.pool.request_group, group.numbers, on_demand=group.on_demand)
        start_s = quiet_from_s = time.monotonic()
        before = -1
        while True:
            self.pool.check_open()
            placed = await asyncio.to_thread(self.pool.placed_workers)
            now_s = time.monotonic()
            quiet_from_s, before = (now_s if len(placed) != before else quiet_from_s), len(placed)
            if len(placed) < self.limits.wanted and now_s - self._looked_s > ASK_AUTOSCALER_S:
                self._looked_s = now_s
                await asyncio.to_thread(self._ask_autoscaler, placed, now_s)
            view = self._view(placed, now_s - start_s, now_s - quiet_from_s)
            decision = decide_start(view, self.limits)
            if decision.step == "begin":
                return placed
            if decision.step == "impossible":
                raise impossible_placement_error(self._infeasible, self.pool.placement, self.limits)
            if decision.step == "too_late":
                capacity = await asyncio.to_thread(cluster_capacity)
                raise placement_timeout_error(len(placed), self.limits, capacity, bool(self.pool.placement.gpus))
            if decision.step == "ask_planner":
                facts = await asyncio.to_thread(list_live_node_resources)
                self._fits_for = frozenset(placed), await asyncio.to_thread(self.fits, placed, facts)
                continue
            await self._tell(view)
            await asyncio.sleep(POLL_S)

    def _view(self, placed: Mapping[int, str], waited_s: float, quiet_s: float) -> StartInputs:
        """The inputs of `decide_start` at this moment."""
        return StartInputs(
            len(placed),
            sum(len(group.numbers) for group in self._infeasible),
            waited_s,
            quiet_s,
            sum(len(group.numbers) for group in self.groups if group.on_demand and group.numbers[0] not in placed),
            any(group.on_demand for group in self._infeasible),
            self._fits_for[1] if self._fits_for is not None and self._fits_for[0] == frozenset(placed) else None,
        )

    def _ask_autoscaler(self, placed: Mapping[int, str], now_s: float) -> None:
        """Note the groups that fit no node, not even an empty one, and for which the autoscaler adds none."""
        placement, already = self.pool.placement, Counter(placed.values())
        answer, facts = read_autoscaler_answer(), list_live_node_resources()
        ids = {number: group.id.hex() for number, group in list(self.pool.groups.items())}
        lacking = [group for group in self.groups if group.numbers[0] not in placed]
        refused = [g for g in lacking if ids.get(g.numbers[0]) in answer.infeasible and not answer.launching]
        busy = {
            group.numbers
            for group in refused
            for node, known in facts.items()
            if placement.fits_node(known.resources, known.labels, len(group.numbers), group.on_demand, already[node])
        }
        since = {g.numbers: self._infeasible_since_s.get(g.numbers, now_s) for g in refused if g.numbers not in busy}
        self._infeasible_since_s = since
        self._infeasible = tuple(g for g in refused if now_s - since.get(g.numbers, now_s) >= CERTAIN_S)

    async def _tell(self, view: StartInputs) -> None:
        """Show a line about the workers without a place, if one is due."""
        numbers = view.placed, view.infeasible
        if view.waited_s > self._told[0] + (SAY_S if numbers != self._told[1] else SAY_AGAIN_S):
            self._told = view.waited_s, numbers
            may_add_nodes = (await asyncio.to_thread(cluster_capacity)).may_add_nodes
            self.say(placement_wait_text(view, self.limits, may_add_nodes))


async def reserve_all_workers(pool: WorkerPool, plan: ParallelPlan, wait_s: float, say: Callable[[str], None]) -> None:
    """Reserve a place for every worker of a plan. Raises `ClusterError` when they are not placed after `wait_s` seconds."""
    await FirstPlacement(pool, make_groups(plan), StartLimits(plan.world, plan.world, 0.0, wait_s), say).wait()


def placement_wait_text(view: StartInputs, limits: StartLimits, may_add_nodes: bool) -> str:
    """The line for the user while workers are not placed.

    `waiting for 3 more workers: the cluster has a place for 1 of 4, an autoscaler is running; 280 s left`
    """
    lacking = limits.wanted - view.placed
    text = f"waiting for {count_noun(lacking, 'more worker')}: the cluster has a place for {view.placed} of {limits.wanted}"
    text += ", an autoscaler is running" * may_add_nodes
    if view.infeasible:
        text += f", but it adds no node for {view.infeasible} of them"
    if limits.least < limits.wanted and view.fits is False:
        text += f"; no plan for {count_noun(view.placed, 'worker')} fits into memory"
    elif limits.least < limits.wanted:
        text += f"; the run begins with {limits.least} or more when no others come for {limits.grow_after_s:g} s"
    return f"{text}; {max(0.0, limits.wait_s - view.waited_s):.0f} s left"


def impossible_placement_error(
    infeasible: tuple[WorkerGroup, ...], placement: PlacementConstraints, limits: StartLimits
) -> ClusterError:
    """The error when the cluster has no node for so many workers that the run can never begin, and adds none."""
    shapes = dict.fromkeys(placement.describe(len(group.numbers), group.on_demand) for group in infeasible)
    number = sum(len(group.numbers) for group in infeasible)
    least = f"at least {limits.least}" if limits.least < limits.wanted else f"all {limits.wanted}"
    least += f", {placement.on_demand} of them on-demand" * bool(placement.on_demand)
    return ClusterError(
        f"the autoscaler has no node for {number} of {count_noun(limits.wanted, 'worker')}, and the run needs {least}: "
        f"none has, or may be added with, {' or '.join(shapes)}",
        cure="compare the job's `placement` and plan.shards with the autoscaler's node types and their max_workers "
        "(`ray status`), choose a smaller plan, or lower elastic.min_workers",
    )


def placement_timeout_error(there: int, limits: StartLimits, cluster: ClusterCapacity, gpus: bool) -> ClusterError:
    """The error when workers could not be placed in time."""
    cure = "wait for other jobs to end, add nodes, choose a smaller plan, or raise wait_for_workers_s"
    if cluster.may_add_nodes:
        cure = (
            "`ray status` says what the autoscaler does: its max_workers may be too low, or no node type may have "
            f"{'a GPU' if gpus else 'CPUs'} enough; else raise wait_for_workers_s, or choose a smaller plan"
        )
    what = (
        f"only {there} of {count_noun(limits.wanted, 'worker')} could be placed within {limits.wait_s:.0f} s; "
        f"the cluster has {cluster.cpus} CPUs, {cluster.free_cpus:g} of them free" + f", and {cluster.gpus} GPUs" * gpus
    )
    return ClusterError(what + ", and its autoscaler has added no more" * cluster.may_add_nodes, cure=cure)
