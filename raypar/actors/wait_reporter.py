"""Tells the client what the driver waits for, whenever the client has been told nothing else for a while."""

from __future__ import annotations

import asyncio
import threading
import time
from dataclasses import dataclass, field

from raypar.actors.actor_handle_types import WorkerHandle
from raypar.actors.events_for_client import EventFeed
from raypar.actors.messages import RunRequest
from raypar.actors.worker_calls import WorkerCalls
from raypar.actors.worker_pool import WorkerPool
from raypar.actors.worker_registry import WorkerRegistry
from raypar.elastic.phases import Phase
from raypar.elastic.run_machine import RunMachine
from raypar.elastic.user_messages import SILENCE_S, WaitAnnouncer, describe_waited_workers
from raypar.worker.process.thread_activity import IDLE, STARTING, WAITING_FOR_WORKERS, describe_thread_activity

POLL_S = 0.5
"""Time from one check for a silence to the next."""
ANSWER_TIMEOUT_S = 1.0
"""How long a worker may take to answer what it is doing."""
SILENT_STEPS = 2.0
"""During training a silence counts only if it is longer than this many times the longest recent step."""


@dataclass
class WaitReporter:
    """Reports silences from the start of a driver to the end of its run."""

    request: RunRequest
    """What the client sent: everything about the run."""
    machine: RunMachine
    """Makes all decisions of the run."""
    pool: WorkerPool
    """Placement groups and actors of the workers."""
    registry: WorkerRegistry
    """Which workers have started, are silent, have to leave or are lost."""
    calls: WorkerCalls
    """Calls to workers, whose answers become events."""
    feed: EventFeed
    """What the client is told."""
    announcer: WaitAnnouncer = field(default_factory=WaitAnnouncer)
    """Decides when a line is due."""
    last_start_activity: dict[int, str] = field(default_factory=dict)
    """Worker that still starts -> the activity that it told last. While it loads code it is often too busy to answer."""
    pending: dict[int, asyncio.Future[str]] = field(default_factory=dict)
    """Worker -> call of its `activity` that had not been answered at the last check."""

    async def watch(self) -> None:
        """Report what is waited for until the run is over."""
        while self.machine.phase is not Phase.OVER:
            await asyncio.sleep(POLL_S)
            since_s, patience_s = self.feed.told_s, self._patience_s()
            if time.monotonic() - since_s < patience_s:
                continue
            doing = await self._what_is_waited_for()
            line = self.announcer.due_line(doing, time.monotonic(), since_s, patience_s)
            if line is not None and self.feed.told_s == since_s:
                self.feed.tell_wait(line)

    def _patience_s(self) -> float:
        """How long a silence may last. Longer where steps are long: each of them ends with a progress line anyway."""
        longest_s = self.machine.step_times.longest_s(len(self.machine.membership.members) or 1)
        return max(SILENCE_S, SILENT_STEPS * (longest_s or 0.0))

    async def _what_is_waited_for(self) -> str | None:
        """What workers that owe an answer or still start up are doing; else what a thread for files or callbacks does."""
        waited = {number for number in self.calls.unanswered if number in self.pool.workers}
        waited = waited or {number for number in self.pool.workers if number not in self.registry.hellos}
        if not waited:
            ours = [thread.ident for thread in threading.enumerate() if thread.name.startswith("raypar-") and thread.ident]
            return next(filter(None, map(describe_thread_activity, ours)), None)
        said = await self._ask({number: self.pool.workers[number] for number in sorted(waited)})
        starting = waited - self.registry.hellos.keys()
        # a worker that has just said hello has no call, and waits for the others
        said = {number: WAITING_FOR_WORKERS if doing == IDLE else doing for number, doing in said.items()}
        self.last_start_activity |= {number: doing for number, doing in said.items() if number in starting}
        silent = {n: self.last_start_activity.get(n, STARTING) if n in starting else "not answering" for n in waited}
        plan = self.machine.membership.plan or self.request.plan
        return describe_waited_workers({**silent, **said}, plan.world, WAITING_FOR_WORKERS)

    async def _ask(self, workers: dict[int, WorkerHandle]) -> dict[int, str]:
        """Worker -> what it is doing, for those that answer in time. A worker with a call still pending is not called again."""
        pending = self.pending
        for number, worker in workers.items():
            if number not in pending:
                pending[number] = asyncio.ensure_future(asyncio.wrap_future(worker.activity.remote().future()))
                pending[number].add_done_callback(mark_failure_as_seen)
        await asyncio.wait([pending[number] for number in workers], timeout=ANSWER_TIMEOUT_S)
        ended = {number: asked for number, asked in pending.items() if asked.done()}
        self.pending = {number: asked for number, asked in pending.items() if not asked.done()}
        answered = {number: asked.result() for number, asked in ended.items() if asked.exception() is None}
        return {number: doing for number, doing in answered.items() if number in workers}


def mark_failure_as_seen(asked: asyncio.Future[str]) -> None:
    """Read the failure of a call to a worker that was given up, so that asyncio does not print it as never retrieved."""
    if not asked.cancelled():
        asked.exception()
