"""The start of a driver: with new workers, or with the workers of a former driver."""

from __future__ import annotations

import asyncio
import pickle
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from raypar.actors import membership_event_text
from raypar.actors.driver_parts import DriverParts
from raypar.actors.hello_and_failure_messages import CallFailure, WorkerHello
from raypar.actors.run_state_in_ray_kv import MembershipRecord
from raypar.actors.worker_pool import remove_leftover_placement_groups
from raypar.elastic import events as on
from raypar.elastic.buddies import assign_buddies
from raypar.elastic.digest_check import InitialDigestCheck
from raypar.elastic.plural_wording import count_of, format_worker_numbers
from raypar.elastic.seating import spread_replicas_over_nodes
from raypar.errors import ClusterError
from raypar.plan.adopt_plan_command_to_worker import AdoptPlanCommand
from raypar.plan.ownership import same_state_keys


@dataclass
class DriverStartup:
    """Starts the workers of a run, or takes over those of a former driver.

    `start` and `take_over` return the event for which the run machine waits, or raise the error that ends the run.
    """

    parts: DriverParts
    """The objects of the driver."""

    async def start(self) -> on.RunEvent | None:
        """Place and start the workers of the job's plan, and build their stages.

        None if a worker was lost meanwhile: the machine has been told, and an elastic run continues with the others.
        """
        parts = self.parts
        request, plan, recorder = parts.request, parts.request.plan, parts.recorder
        swept = await asyncio.to_thread(remove_leftover_placement_groups, request.run)
        if swept:
            parts.feed.tell("warning", text=f"removed {swept} placement groups that an earlier driver of this run had left")
        await parts.pool.reserve(plan, request.wait_for_workers_s, lambda text: parts.feed.tell("waiting", text=text))
        await asyncio.to_thread(parts.journal.store_worker_number, plan.world - 1)
        for number in range(plan.world):
            parts.pool.start_worker(number, request.spec, request.listen_host, request.orphan_timeout_s)
        hellos: dict[int, WorkerHello] = await self._everybody(lambda number, w: w.hello.remote(), "start")
        for number, hello in hellos.items():
            parts.registry.add_started_worker(number, hello)
            await asyncio.to_thread(parts.journal.store_hello, number, hello)
        nodes = parts.registry.nodes_of_workers(hellos)
        members = spread_replicas_over_nodes(plan, nodes) if len(hellos) == plan.world else tuple(range(plan.world))
        parts.machine.membership.members = members
        pids = ", ".join(str(hellos[n].pid) for n in members if n in hellos)
        text = f"{count_of(len(hellos), 'worker')} on {count_of(len(set(nodes.values())), 'node')}: pids {pids}"
        precision = request.contract.get("precision")
        facts = {"precision": precision["compute"]} if precision else {}
        first = next((hellos[n].fingerprint for n in members if n in hellos), {})
        facts["fingerprint"] = dict(first)  # of one worker: differences between workers are warnings
        parts.side_effects.note("started", text=text, workers=[parts.registry.worker_facts(n) for n in members], **facts)
        parts.side_effects.aside(recorder.note_generation, plan, [hellos[n].node[:8] for n in members if n in hellos])
        for line in recorder.compare_fingerprints(list(hellos.values())):
            parts.side_effects.note("warning", text=line)
        await parts.side_effects.awaited(recorder.start_callbacks)
        await asyncio.to_thread(parts.journal.record, MembershipRecord(1, plan, members, request.schedule_name))
        if len(hellos) < plan.world:
            return None
        addresses = [hellos[number].address for number in members]
        deadline_s, done = request.start_deadline_s, request.policy.steps_before_run
        ranks = {number: rank for rank, number in enumerate(members)}
        keepers = assign_buddies([nodes[number] for number in members], same_state_keys(parts.machine.held_pieces(plan)))

        def part(rank: int) -> bytes:
            assignment, begins = pickle.loads(request.assignments[rank]), request.resume is None
            return pickle.dumps(AdoptPlanCommand(assignment, ranks, done, (), request.resume, begins, mirror_keepers=keepers))

        described = await self._everybody(
            lambda number, w: w.adopt.remote(1, part(ranks[number]), plan.coordinate(ranks[number]), addresses, deadline_s),
            "build its stages",
        )
        if len(described) < plan.world:
            return None
        initial = InitialDigestCheck()
        for number in members:
            different = initial.add(number, described[number]["initial"])
            if different is not None:
                raise different
        megabytes = ", ".join(f"{described[n]['bytes'] / 1e6:.1f}" for n in members)
        parts.feed.tell("built", text=f"stages built and connected; parameters by worker in MB: {megabytes}")
        await parts.side_effects.awaited(recorder.restart_step_timer)
        return on.WorkersReady()

    async def _everybody(self, call: Callable[[int, Any], Any], what: str) -> dict[int, Any]:
        """Call every worker; worker number -> answer. `what`: what the workers are asked to do, for messages.

        If several calls fail, a failure of user code is raised first, then one of raypar, then a loss. An elastic run reports
        lost workers to the machine instead, and leaves them out of the answers.
        """
        parts = self.parts
        numbers = list(parts.pool.workers)
        asking = [asyncio.ensure_future(parts.calls.ask(n, call(n, parts.pool.workers[n]))) for n in numbers]
        waiting, start_s = set(asking), time.monotonic()
        elastic = parts.request.policy.elastic
        while waiting and time.monotonic() - start_s < parts.request.start_deadline_s:
            done, waiting = await asyncio.wait(waiting, timeout=1.0, return_when=asyncio.FIRST_COMPLETED)
            for number, task in zip(numbers, asking, strict=True):
                if task.done() and number in parts.pool.workers:  # keeps it from exiting as an orphan while it waits
                    parts.pool.workers[number].ping.remote()
            lost = any(isinstance(task.result(), CallFailure) and task.result().kind == "lost" for task in done)
            if lost and elastic and what != "start":
                break  # the others wait for it in vain: the next generation frees them
        answers = {n: task.result() for n, task in zip(numbers, asking, strict=True) if task.done()}
        failed = {n: a for n, a in answers.items() if isinstance(a, CallFailure)}
        blamed: list[on.FailureKind] = ["user", "error"]
        if not elastic:
            blamed += ["lost", "aborted"]
        for kind in blamed:
            for number, failure in failed.items():
                if failure.kind == kind:
                    raise await asyncio.to_thread(parts.calls.explain_out_of_memory, number, failure.error)
        for number, failure in failed.items():  # the only sign of a worker that has died after building
            generation = None if failure.kind == "lost" else 1
            parts.tasks.post(on.CallFailed(failure.kind, failure.error, number, generation))
        if waiting and not failed and parts.machine.membership.generation == 1:
            silent = [n for n, task in zip(numbers, asking, strict=True) if task in waiting]
            stacks = await parts.calls.stacks(silent)
            raise ClusterError(
                f"{format_worker_numbers(silent)} did not {what} within {parts.request.start_deadline_s:.0f} s\n{stacks}",
                cure="look at the stacks above and at Ray's logs on those nodes",
            )
        return {n: a for n, a in answers.items() if n not in failed}

    async def take_over(self, record: MembershipRecord) -> on.RunEvent:
        """Find the workers of the former driver, and how much of the run the user has seen; the event for the run machine."""
        parts = self.parts
        request, recorder = parts.request, parts.recorder
        await asyncio.to_thread(parts.pool.find)
        workers = dict(parts.pool.workers)
        for number, hello in (await asyncio.to_thread(parts.journal.hellos)).items():
            if number in workers or number in record.members:
                parts.registry.add_started_worker(number, hello)
        starting = tuple(n for n in workers if n not in parts.registry.hellos)
        for number in starting:
            parts.tasks.spawn(parts.registry.await_hello(number, workers[number], request.start_deadline_s))
        parts.plans.schedules[record.plan] = record.schedule
        seen = await parts.side_effects.awaited(recorder.take_over)  # in its thread, which alone writes these files
        parts.reports.outcomes, parts.reports.in_journal = dict(seen.outcomes), dict(seen.unseen)
        parts.feed.pass_on(recorder.new_events())
        generation = await asyncio.to_thread(parts.journal.newest_claimed_generation)
        numbers_given = max(
            await asyncio.to_thread(parts.journal.count_worker_numbers), *(n + 1 for n in (*workers, *record.members))
        )
        found = len(workers) - len(starting)
        text = f"the driver was lost; a new one has found {found} workers and goes on after step {seen.steps}"
        parts.side_effects.note("driver", text=text, generation=generation, step=seen.steps)
        for rank, number in enumerate(record.members):
            if number not in workers and number not in seen.lost:
                who = parts.registry.worker_facts(number)
                why = "it died while there was no driver"
                parts.side_effects.note(
                    "lost", **membership_event_text.worker_lost_event(record.plan.coordinate(rank), who, why)
                )
        # Not waited for: what callbacks import may take seconds, and the workers can begin without them.
        parts.side_effects.perform(recorder.start_callbacks, lambda _: on.Tick())
        return on.DriverFailover(
            tuple(workers),
            generation,
            seen.steps,
            record.plan,
            record.members,
            seen.validated,
            seen.saved,
            starting,
            numbers_given,
            None if seen.last_s is None else max(0.0, time.time() - seen.last_s),
        )
