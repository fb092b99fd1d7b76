"""Writes one checkpoint while training continues: snapshots on all workers, files, manifest, final name."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass

from raypar.actors.run_recorder import RunRecorder
from raypar.actors.side_effect_thread import SideEffectThread
from raypar.actors.worker_calls import WorkerCalls
from raypar.actors.worker_messages import CallFailure
from raypar.actors.worker_pool import WorkerPool
from raypar.elastic import events as on
from raypar.elastic.run_machine import RunMachine
from raypar.errors import RayparError


@dataclass
class CheckpointTask:
    """Posts `CheckpointStateCopied`, after which training may continue, and then `CheckpointSaved`; or `CheckpointFailed`."""

    machine: RunMachine
    pool: WorkerPool
    recorder: RunRecorder
    side_effects: SideEffectThread
    calls: WorkerCalls
    post: Callable[[on.RunEvent], None]
    """Gives an event to the run machine."""

    def __post_init__(self) -> None:
        self._disk = ThreadPoolExecutor(1, "raypar-disk")

    async def save(self, done: int) -> None:
        """Take a snapshot on every worker; then, while training continues, wait for the files and commit the checkpoint."""
        generation, recorder = self.machine.membership.generation, self.recorder
        try:
            folder = await asyncio.to_thread(recorder.checkpoint_begin, done)
        except RayparError as error:
            self.post(on.CheckpointFailed(done, error))
            return
        members = {n: self.pool.workers[n] for n in self.machine.membership.members if n in self.pool.workers}
        asked = [self.calls.ask(number, w.save.remote(generation, done, str(folder))) for number, w in members.items()]
        taken = await asyncio.gather(*asked)
        if not any(isinstance(answer, CallFailure) for answer in taken):
            self.post(on.CheckpointStateCopied(done))
            taken = await asyncio.gather(*(self.calls.ask(n, w.save_result.remote()) for n, w in members.items()))
        failed = [answer for answer in taken if isinstance(answer, CallFailure)]
        if failed:
            await asyncio.to_thread(recorder.checkpoint_drop, folder)
            self.post(on.CheckpointFailed(done, failed[0].error))
            return
        try:
            await asyncio.get_running_loop().run_in_executor(self._disk, recorder.checkpoint_end, done, folder, taken)
        except Exception as error:
            self.post(on.CheckpointFailed(done, error))
            return
        self.side_effects.perform(
            lambda: recorder.checkpoint_seen(done), lambda _: self.side_effects.seen(on.CheckpointSaved(done))
        )
