"""Ends a driver: removes everything of the run from the cluster, tells the client, and only then exits."""

from __future__ import annotations

import asyncio
import contextlib
import os
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass

import ray

from raypar.actors.background_tasks import BackgroundTasks
from raypar.actors.driver_storage_session import DriverStorageSession
from raypar.actors.events_for_client import EventFeed
from raypar.actors.messages import pickle_error_for_client
from raypar.actors.run_recorder import RunRecorder
from raypar.actors.run_state_in_ray_kv import DriverReplaced, EndFacts, Journal
from raypar.actors.side_effect_thread import SideEffectThread
from raypar.actors.worker_pool import WorkerPool, remove_leftover_placement_groups
from raypar.elastic import actions as do
from raypar.elastic.run_machine import RunMachine
from raypar.errors import ClusterError
from raypar.record.events import EndOfRun, RunWarning

CLIENT_GONE_S = 60.0
"""How long the end of a run waits to be seen by the client."""


LAST_CALLBACKS_S = 60.0
"""How long callbacks of steps may go on after the end of the run."""

HURRIED_CALLBACKS_S = 3.0
"""The same after Ctrl-C, which has waited for them already."""

END_CALLBACKS_S = 600.0
"""How long the last callbacks, such as those of trackers that send what they have, may take."""

RECORD_S = 5.0
"""How long a driver that has lost the control store may take to record the end of its run."""


def record_and_exit(record: Callable[[], None]) -> None:
    """Call `record` and end this process, after `RECORD_S` at the latest. Skips Ray's shutdown, which may block."""
    recording = threading.Thread(target=record, name="raypar-record-end", daemon=True)
    recording.start()
    recording.join(RECORD_S)
    os._exit(1)


@dataclass
class DriverShutdown:
    """Ends the run on the cluster and this driver with it."""

    machine: RunMachine
    """Makes all decisions of the run."""
    journal: Journal
    """The state of the run that outlives this driver."""
    pool: WorkerPool
    """Placement groups and actors of the workers."""
    recorder: RunRecorder
    """Writes the run folder and calls the callbacks."""
    side_effects: SideEffectThread
    """The thread in which the recorder runs."""
    tasks: BackgroundTasks
    """Work beside the event loop."""
    feed: EventFeed
    """What the client is told."""
    storage_session: DriverStorageSession | None
    """Lease and upload of a run on shared storage; None for one in a folder."""
    write_members_file: Callable[[], None]
    """Writes members.json."""
    count_step_calls: Callable[[], int]
    """The number of calls to workers for steps so far."""

    def tear_down(self, action: do.Teardown, reason: str) -> None:
        """End the run."""
        self.tasks.spawn(self.end_run(action, self.count_step_calls()))

    async def end_run(self, teardown: do.Teardown, step_calls: int) -> None:
        """Remove everything, tell the client, and exit once the client has seen the end or is gone."""
        if teardown.end != "deposed" and await self._is_replaced(teardown.done):
            why = "another driver has taken over, which goes on with the run"
            teardown = do.Teardown("deposed", why, teardown.done)
        facts: EndFacts = {
            "end": teardown.end,
            "why": teardown.why,
            "done": teardown.done,
            "error": pickle_error_for_client(teardown.error),
        }
        if teardown.end == "deposed":  # another driver uses the workers, the journal and the run folder
            self.feed.tell(EndOfRun(**facts))
            if self.storage_session is not None:
                self.storage_session.upload.abandon()
            return
        with contextlib.suppress(Exception):
            await asyncio.to_thread(self.journal.end, facts)
        try:
            await self.pool.close()
        except Exception as error:
            self.feed.tell(RunWarning(text=f"not every worker could be removed: {error}"))
        limit_s = HURRIED_CALLBACKS_S if teardown.end == "interrupted" else LAST_CALLBACKS_S
        if await self.side_effects.abandon_if_busy(limit_s):
            text = f"a callback has not returned {limit_s:.0f} s after the end of the run: no callback is called any more"
            self.feed.tell(RunWarning(text=f"{text}\n  cure: mend the callback; what it waits for needs a time limit"))
        recording = asyncio.ensure_future(self.side_effects.awaited(lambda: self.recorder.record_end(teardown, step_calls)))
        try:
            if not (await asyncio.wait([recording], timeout=END_CALLBACKS_S))[0]:
                await self.side_effects.abandon_if_busy(0.0)
                text = f"a callback has not returned from on_end for {END_CALLBACKS_S:.0f} s: the run ends without it"
                self.feed.tell(RunWarning(text=f"{text}\n  cure: mend the callback; what it waits for needs a time limit"))
            else:
                recording.result()
        except Exception as error:
            self.feed.tell(RunWarning(text=f"the end of the run could not be recorded: {error}"))
        self.write_members_file()
        await self.side_effects.awaited(lambda: None)
        self.feed.pass_on(self.recorder.new_events())
        if self.storage_session is not None:
            await self.storage_session.finish(self.feed.tell)
        await self._leave(facts)

    async def _is_replaced(self, done: int) -> bool:
        """Whether another driver has claimed the run, which the last quick steps may not have looked for."""
        try:
            await asyncio.to_thread(self.journal.check_claim, done)
        except DriverReplaced:
            return True
        except Exception:
            return False  # the store does not answer: nobody can claim anything there
        return False

    def record_lost_control_store(self, why: str) -> None:
        """Record in the run folder that the run has failed, since Ray's control store does not answer.

        Calls the recorder from another thread than the one that calls it otherwise, because that one waits for the store.
        """
        error = ClusterError(why, cure="`raypar resume` goes on from the last checkpoint")
        self.recorder.record_end(do.Teardown("failed", why, self.machine.progress.emitted, error), None)

    async def finish_former_end(self, facts: EndFacts) -> None:
        """Finish the end that a former driver had begun when it was killed; a failing part does not stop the others."""
        for work in (lambda: remove_leftover_placement_groups(self.pool.run), lambda: self.recorder.record_former_end(facts)):
            try:
                await asyncio.to_thread(work)
            except Exception as error:
                self.feed.tell(RunWarning(text=f"the end of the run, which a former driver had begun: {error}"))
        self.feed.pass_on(self.recorder.new_events())
        if self.storage_session is not None:
            await self.storage_session.finish(self.feed.tell)
        await self._leave(facts)

    async def _leave(self, facts: EndFacts) -> None:
        """Tell the client of the end; once it has seen that or is gone, erase the journal and end this actor."""
        self.feed.tell(EndOfRun(**facts))
        self.feed.heard_s = time.monotonic()
        while time.monotonic() - self.feed.heard_s < CLIENT_GONE_S:
            await asyncio.sleep(1.0)
        if self.storage_session is not None:
            await asyncio.to_thread(self.storage_session.remove_folder)
        while True:  # `exit_actor` takes effect after a call only, and nobody calls this actor any more
            with contextlib.suppress(Exception):
                await asyncio.to_thread(self.journal.erase)
                await asyncio.to_thread(ray.kill, ray.get_runtime_context().current_actor, no_restart=True)
            await asyncio.sleep(1.0)
