"""The start of a driver: with new workers, or with the workers of a former driver."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass

import ray

from raypar.actors import worker_and_generation_events
from raypar.actors.background_tasks import BackgroundTasks
from raypar.actors.cluster_info import NodeResources, list_live_node_resources, memory_per_worker
from raypar.actors.events_for_client import EventFeed
from raypar.actors.first_placement import FirstPlacement, make_groups
from raypar.actors.messages import CallFailure, RunRequest, WorkerHello
from raypar.actors.plan_cache import PlanCache
from raypar.actors.run_recorder import RunRecorder
from raypar.actors.run_state_in_ray_kv import Journal, MembershipRecord
from raypar.actors.side_effect_thread import SideEffectThread
from raypar.actors.step_reports import StepReports
from raypar.actors.worker_calls import WorkerCalls
from raypar.actors.worker_failures import WorkerFailures
from raypar.actors.worker_pool import WorkerPool, remove_leftover_placement_groups
from raypar.actors.worker_registry import WorkerRegistry
from raypar.elastic import events as on
from raypar.elastic.desired_capacity import StartLimits, least_workers_at_start
from raypar.elastic.phases import Phase
from raypar.elastic.placement_constraints import match_labels
from raypar.elastic.run_machine import RunMachine
from raypar.elastic.seating import WorkerPlaces, spread_replicas_over_nodes
from raypar.errors import ClusterError
from raypar.plan import ParallelPlan
from raypar.plan.wording import count_noun, format_worker_numbers
from raypar.record.events import DriverLoss, JobChange, Note, RunStart, RunWarning, Wait


@dataclass
class DriverStartup:
    """Starts the workers of a run, or takes over those of a former driver.

    `start` and `take_over` return the event for which the run machine waits, or raise the error that ends the run.
    """

    request: RunRequest
    """What the client sent: everything about the run."""
    machine: RunMachine
    """Makes all decisions of the run."""
    journal: Journal
    """The state of the run that outlives this driver."""
    plans: PlanCache
    """The plan for each number of workers, with its schedule, assignments and predicted memory."""
    pool: WorkerPool
    """Placement groups and actors of the workers."""
    registry: WorkerRegistry
    """Which workers have started, are silent, have to leave or are lost."""
    recorder: RunRecorder
    """Writes the run folder and calls the callbacks."""
    side_effects: SideEffectThread
    """The thread in which the recorder runs."""
    reports: StepReports
    """Workers' reports of steps that the user has not seen."""
    failures: WorkerFailures
    """Makes the events about workers that have failed."""
    calls: WorkerCalls
    """Calls to workers, whose answers become events."""
    tasks: BackgroundTasks
    """Work beside the event loop."""
    feed: EventFeed
    """What the client is told."""

    async def start(self) -> on.RunEvent | None:
        """Place and start the workers of the job's plan; the machine then has them adopt it.

        None if a worker was lost meanwhile: the machine has been told, and an elastic run continues with the others.
        """
        request, recorder = self.request, self.recorder
        await self._clear_up()
        plan, members = await self._place_workers()
        for number in members:
            self.pool.start_worker(number, request.spec, request.listen_host, request.orphan_timeout_s)
        hellos = await self._await_hellos(members)
        for number, hello in hellos.items():
            await self.registry.admit(number, hello)
        nodes = self.registry.nodes_of_workers(hellos)
        pids = ", ".join(str(hellos[n].pid) for n in members if n in hellos)
        text = f"{count_noun(len(hellos), 'worker')} on {count_noun(len(set(nodes.values())), 'node')}: pids {pids}"
        facts = worker_and_generation_events.training_facts(request.contract)
        first = next((hellos[n].fingerprint for n in members if n in hellos), {})
        facts["fingerprint"] = dict(first)  # of one worker: differences between workers are warnings
        facts["best"] = [asdict(rule) for rule in request.job.best_rules] or None
        self.side_effects.note(RunStart(text=text, workers=[self.registry.worker_facts(n) for n in members], **facts))
        for line in recorder.why_not_bitwise(list(hellos.values())):
            self.side_effects.note(RunWarning(text=line))
        await self.side_effects.awaited(recorder.start_callbacks)
        if len(hellos) < plan.world:
            return None
        if request.changes and self.reports.samples is not None:
            samples, done = self.reports.samples, request.policy.steps_before_run
            await self.side_effects.awaited(lambda: samples.begin_anew(done))
        else:
            await self._open_samples(request.policy.steps_before_run)
        return on.WorkersReady()

    async def _clear_up(self) -> None:
        """Record that the run was resumed, if it was, and remove what an earlier driver has left in Ray."""
        await self.side_effects.awaited(self.recorder.record_resumption)
        self.feed.pass_on(self.recorder.new_events())
        for line in self.request.changes:
            self.side_effects.note(JobChange(text=line, step=self.request.policy.steps_before_run + 1))
        for line in self.request.warnings:
            self.side_effects.note(RunWarning(text=line))
        swept = await asyncio.to_thread(remove_leftover_placement_groups, self.request.run)
        if swept:
            what = count_noun(swept, "placement group")
            self.feed.tell(RunWarning(text=f"removed {what} that an earlier driver of this run had left"))

    async def _place_workers(self) -> tuple[ParallelPlan, tuple[int, ...]]:
        """Ask for all workers of the job's plan and wait until the run can begin; returns (its first plan, worker by rank).

        Posts `FirstWorkersPlaced`. The other workers start in the background once the cluster has a place for them.
        """
        request, policy, pool = self.request, self.request.policy, self.pool
        wanted = request.plan.world
        least = (
            least_workers_at_start(request.plan, policy.min_workers, request.job.virtual_shards) if policy.elastic else wanted
        )
        limits = StartLimits(wanted, least, policy.grow_after_s, request.job.wait_for_workers_s)
        groups = make_groups(request.plan, request.placement.on_demand)
        chosen = [request.plan]

        def fits(placed: Mapping[int, str], facts: Mapping[str, NodeResources]) -> bool:
            found = self.plans.first(len(placed), memory_per_worker(placed, facts))
            chosen[0] = found or request.plan
            return found is not None

        await asyncio.to_thread(self.journal.store_worker_number, wanted - 1)
        on_demand = tuple(n for group in groups if group.on_demand for n in group.numbers)
        await asyncio.to_thread(self.journal.store_on_demand_workers, on_demand)
        first = FirstPlacement(pool, groups, limits, lambda text: self.feed.tell(Wait(text=text)), fits)
        nodes = await first.wait()
        plan = request.plan if len(nodes) == wanted else chosen[0]
        placed = [group for group in groups if group.numbers[0] in nodes]
        await asyncio.to_thread(self._warn_of_spot_node)
        await self.registry.update_zones()
        places = WorkerPlaces(nodes, self.registry.zone_of_node, on_demand)
        members = spread_replicas_over_nodes(plan, places, [group.numbers for group in placed])
        spare = [group for group in placed if group.numbers[0] not in members]
        pending = [group for group in groups if group not in placed]
        told = on.FirstWorkersPlaced(
            plan,
            members,
            tuple(n for group in spare for n in group.numbers),
            tuple(group.numbers for group in groups),
            on_demand,
            await asyncio.to_thread(self.journal.newest_claimed_generation),
        )
        self.tasks.post(told)
        if pending or spare:
            text = f"the run begins with {count_noun(plan.world, 'worker')} of {wanted} ({plan.describe()})"
            self.side_effects.note(Note(text=f"{text}; the others join when they are there"))
            self.side_effects.aside(self.recorder.write_plan_file, plan, self.plans.schedule_name(plan))
        for group in (*spare, *pending):
            self.tasks.spawn(self.registry.start_workers(group.numbers, request, requested=True))
        return plan, members

    def _warn_of_spot_node(self) -> None:
        """Warn if the job asks for workers on on-demand nodes but the driver itself is on a node of another kind."""
        placement, home = self.request.placement, ray.get_runtime_context().get_node_id()
        labels = list_live_node_resources().get(home, NodeResources()).labels
        wanted = {key: value for key, value in placement.on_demand_label_selector.items() if key in labels}
        if placement.on_demand and not match_labels(labels, wanted):
            has = ", ".join(f"{key}={labels[key]}" for key in wanted)
            text = f"the driver is on node {home[:8]} ({has}), which may be taken away: start raypar on an on-demand node"
            self.side_effects.note(RunWarning(text=text))

    async def _await_hellos(self, members: Sequence[int]) -> dict[int, WorkerHello]:
        """Wait until the first workers have loaded everything; worker number -> hello.

        If several fail, a failure of user code is raised first, then one of raypar, then a loss. An elastic run reports lost
        workers to the machine instead, and leaves them out.
        """
        numbers, workers = list(members), self.pool.workers
        asking = [asyncio.ensure_future(self.calls.ask(n, workers[n].hello.remote(False))) for n in numbers]
        waiting, start_s = set(asking), time.monotonic()
        while waiting and time.monotonic() - start_s < self.request.start_deadline_s:
            _, waiting = await asyncio.wait(waiting, timeout=1.0, return_when=asyncio.FIRST_COMPLETED)
            for number, task in zip(numbers, asking, strict=True):
                if task.done() and number in workers:  # keeps it from exiting as an orphan while it waits
                    workers[number].ping.remote()
        answers = {n: task.result() for n, task in zip(numbers, asking, strict=True) if task.done()}
        failed = {n: a for n, a in answers.items() if isinstance(a, CallFailure)}
        blamed: list[on.FailureKind] = ["user", "error"]
        if not self.request.policy.elastic:
            blamed += ["lost", "aborted"]
        for kind in blamed:
            for number, failure in failed.items():
                if failure.kind == kind:
                    raise await asyncio.to_thread(self.failures.explain_out_of_memory, number, failure.error)
        for number, failure in failed.items():
            self.failures.post(failure.kind, failure.error, number)
        if waiting and not failed and self.machine.phase is Phase.STARTING:
            silent = [n for n, task in zip(numbers, asking, strict=True) if task in waiting]
            stacks = await self.calls.stacks(silent)
            raise ClusterError(
                f"{format_worker_numbers(silent)} did not start within {self.request.start_deadline_s:.0f} s\n{stacks}",
                cure="look at the stacks above and at Ray's logs on those nodes",
            )
        return {n: a for n, a in answers.items() if not isinstance(a, CallFailure)}

    async def _open_samples(self, done: int) -> None:
        """Read what the journal of samples has of the steps that may be executed again, after `done` steps."""
        samples = self.reports.samples
        if samples is not None:
            await self.side_effects.awaited(lambda: samples.open(done))

    async def take_over(self, record: MembershipRecord) -> on.RunEvent:
        """Find the workers of the former driver, and how much of the run the user has seen; the event for the run machine."""
        request, recorder = self.request, self.recorder
        hellos = await asyncio.to_thread(self.journal.hellos)
        found_groups = await asyncio.to_thread(self.pool.find, {*hellos, *record.members})
        workers = dict(self.pool.workers)
        for number, hello in hellos.items():
            if number in workers or number in record.members:
                self.registry.add_started_worker(number, hello)
        starting = tuple(n for n in workers if n not in self.registry.hellos)
        for number in starting:
            self.tasks.spawn(self.registry.await_hello(number, workers[number], request.start_deadline_s))
        for group in found_groups.pending:
            self.tasks.spawn(self.registry.start_workers(group, request, requested=True))
        pending = tuple(number for group in found_groups.pending for number in group)
        self.plans.schedules[record.plan] = record.schedule
        seen = await self.side_effects.awaited(recorder.take_over)  # in its thread, which alone writes these files
        self.reports.outcomes, self.reports.in_journal = dict(seen.outcomes), dict(seen.unseen)
        await self._open_samples(min(seen.steps, seen.saved or 0))
        self.feed.pass_on(recorder.new_events())
        generation = await asyncio.to_thread(self.journal.newest_claimed_generation)
        numbers_given = max(
            await asyncio.to_thread(self.journal.count_worker_numbers), *(n + 1 for n in (*workers, *pending, *record.members))
        )
        found = len(workers) - len(starting)
        text = f"the driver was lost; a new one has found {count_noun(found, 'worker')} and goes on after step {seen.steps}"
        self.side_effects.note(DriverLoss(text=text, generation=generation, step=seen.steps))
        for rank, number in enumerate(record.members):
            if number not in workers and number not in seen.lost:
                who = self.registry.worker_facts(number)
                why = "it died while there was no driver"
                self.side_effects.note(worker_and_generation_events.worker_lost_event(record.plan.coordinate(rank), who, why))
        # Not waited for: what callbacks import may take seconds, and the workers can begin without them.
        self.side_effects.perform(recorder.start_callbacks, lambda _: on.Tick())
        return on.DriverFailover(
            tuple(workers),
            generation,
            seen.steps,
            record.plan,
            record.members,
            seen.validated,
            seen.saved,
            starting,
            pending,
            (*found_groups.pending, *found_groups.started),
            await asyncio.to_thread(self.journal.on_demand_workers),
            await asyncio.to_thread(self.journal.useful_workers),
            numbers_given,
            None if seen.last_s is None else max(0.0, time.time() - seen.last_s),
            seen.best,
        )
