"""Carries out what the run machine decides about single workers: start, release and kill them, report those that are lost."""

from __future__ import annotations

import asyncio
from dataclasses import dataclass
from pathlib import Path

import ray

from raypar.actors import worker_and_generation_events
from raypar.actors.background_tasks import BackgroundTasks
from raypar.actors.messages import RunRequest
from raypar.actors.run_state_in_ray_kv import Journal
from raypar.actors.side_effect_thread import SideEffectThread
from raypar.actors.worker_calls import WorkerCalls
from raypar.actors.worker_pool import WorkerPool
from raypar.actors.worker_registry import WorkerRegistry
from raypar.elastic import actions as do
from raypar.elastic import events as on
from raypar.elastic.suspect_nodes import SUSPECT_S
from raypar.errors import NodeLost, error_first_line
from raypar.plan.wording import format_worker_numbers, word_form
from raypar.record.events import RunWarning, Straggler, WorkerLeave, WorkerRelease, WorkerRequest

VMSTAT = Path("/proc/vmstat")
"""The file whose line `oom_kill` has the count since the machine was started."""


class KernelOomKills:
    """Counts OOM kills since the last call of `new`."""

    def __init__(self, path: Path = VMSTAT) -> None:
        self._path = path
        """The kernel's counters."""
        self._seen = self._count()
        """The count at the last look."""

    def new(self) -> int:
        """How many there were since the last look; 0 where the kernel does not say."""
        before, self._seen = self._seen, self._count()
        return max(0, self._seen - before)

    def _count(self) -> int:
        """The kernel's count; 0 where it cannot be read."""
        try:
            lines = self._path.read_text().splitlines()
            return next((int(line.split()[1]) for line in lines if line.startswith("oom_kill ")), 0)
        except (OSError, ValueError, IndexError):
            return 0


@dataclass
class MembershipActions:
    """Workers that come and go, and what people are told about them."""

    request: RunRequest
    """What the client sent."""
    pool: WorkerPool
    """Placement groups and actors of the workers."""
    registry: WorkerRegistry
    """Starts and dismisses workers; knows their nodes."""
    journal: Journal
    """Keeps the numbers of workers for a new driver."""
    calls: WorkerCalls
    """Names a worker's seat."""
    side_effects: SideEffectThread
    """Shows events and writes them to events.jsonl."""
    tasks: BackgroundTasks
    """Work beside the event loop."""
    memory_kills: KernelOomKills | None
    """Processes that the kernel has ended because memory is short; None if not all workers are on this machine."""

    def start_workers(self, action: do.StartWorkers, reason: str) -> None:
        """Start further workers under numbers which no other workers ever get."""
        self.tasks.spawn(self._start_workers(action.workers, action.on_demand))

    async def _start_workers(self, numbers: tuple[int, ...], on_demand: bool) -> None:
        await asyncio.to_thread(self.journal.store_worker_number, numbers[-1])
        if on_demand:
            await asyncio.to_thread(self.journal.store_on_demand_workers, numbers)
        starts = word_form(numbers, "a worker is wanted: worker %s starts", "a replica is wanted: workers %s start")
        text = f"{starts % ', '.join(map(str, numbers))} as soon as there is room"
        self.side_effects.note(WorkerRequest(text=text, worker=numbers[0], workers=list(numbers)))
        await self.registry.start_workers(numbers, self.request, on_demand=on_demand)

    def release_workers(self, action: do.ReleaseWorkers, reason: str) -> None:
        """Withdraw the demand for workers, and end those that run."""
        numbers = action.workers
        text = f"{format_worker_numbers(numbers)} {word_form(numbers, 'is', 'are')} given back: {reason}"
        self.side_effects.note(WorkerRelease(text=text, workers=list(numbers)))
        for number in numbers:
            self.registry.dismiss(number)

    def store_useful_workers(self, action: do.StoreUsefulWorkers, reason: str) -> None:
        """Store in the journal how many workers the planner can use."""
        self.side_effects.perform(lambda: self.journal.store_useful_workers(action.workers), lambda _: on.Tick())

    def kill_worker(self, action: do.KillWorker, reason: str) -> None:
        """Kill a worker that leaves, or one that does not answer."""
        worker = action.worker
        if action.why == "drained":
            text = f"worker {worker} has left: {reason}"
            self.side_effects.note(WorkerLeave(text=text, **self.registry.worker_facts(worker)))
            self.registry.dismiss(worker)
        else:
            self.registry.avoid_suspect_node_of(worker)
            self._report_lost_worker(worker, worker_and_generation_events.describe_why_worker_given_up(action.why))

    def report_straggler(self, found: do.ReportStraggler, reason: str) -> None:
        """Report a straggler. If it has to leave, the worker in its place is started on another node."""
        coordinate, who = self.calls.coordinate(found.worker), self.registry.worker_facts(found.worker)
        if found.leaves and not found.recovered:
            self.registry.avoid_slow_node_of(found.worker)
        text = worker_and_generation_events.straggler_text(found, coordinate, who)
        event = Straggler(
            text=text,
            coordinate=coordinate,
            times=round(found.slowdown, 2),
            steps=found.steps,
            over=found.recovered,
            leaves=found.leaves,
            **who,
        )
        self.side_effects.note(event)

    def note_event(self, event: on.RunEvent) -> None:
        """Report the worker whose death has failed a call, if that is the event, and remove what is left of it."""
        if isinstance(event, on.CallFailed) and event.kind == "lost" and event.worker is not None:
            self._report_lost_worker(event.worker, error_first_line(event.error), isinstance(event.error, NodeLost))
            self._look_for_memory_kills()

    def _report_lost_worker(self, number: int, why: str, with_node: bool = False) -> None:
        """Report a lost worker, and its node if the node is lost too; remove what is left of the worker. Idempotent."""
        if number not in self.pool.workers:
            return
        coordinate, who = self.calls.coordinate(number), self.registry.worker_facts(number)
        self.side_effects.note(worker_and_generation_events.worker_lost_event(coordinate, who, why))
        self.registry.dismiss(number)
        self.registry.note_lost_worker(number, with_node)

    def _look_for_memory_kills(self) -> None:
        """After a loss in a local cluster: if the kernel has ended processes for lack of memory, start no worker for a while.

        Its memory would be taken from those that still live, of which one may have the last copy of some state.
        """
        if self.memory_kills is None or not (killed := self.memory_kills.new()):
            return
        self.registry.avoid_nodes({*self.registry.node_of_worker.values(), ray.get_runtime_context().get_node_id()})
        processes = "a process" if killed == 1 else f"{killed} processes"
        self.side_effects.note(
            RunWarning(
                text=f"the kernel has ended {processes} of this machine because memory is short: no worker is started for "
                f"{SUSPECT_S:.0f} s or more\n  cure: give this machine or container more memory, or have fewer workers "
                "(plan, elastic.max_workers)",
            )
        )
