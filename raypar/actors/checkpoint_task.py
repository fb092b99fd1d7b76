"""Writes one checkpoint while training continues: snapshots on all workers, files, manifest, final name."""

from __future__ import annotations

import asyncio
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from typing import TYPE_CHECKING

from raypar.actors.background_tasks import BackgroundTasks
from raypar.actors.messages import CallFailure
from raypar.actors.run_recorder import RunRecorder
from raypar.actors.side_effect_thread import SideEffectThread
from raypar.actors.worker_calls import WorkerCalls
from raypar.actors.worker_pool import WorkerPool
from raypar.elastic import actions as do
from raypar.elastic import events as on
from raypar.elastic.run_machine import RunMachine
from raypar.errors import RayparError, StateNotKeptError, error_first_line
from raypar.plan.wording import after_steps

if TYPE_CHECKING:
    from raypar.worker.checkpoint.checkpoint_files import ShardRecord


@dataclass
class CheckpointTask:
    """Saves checkpoints. Posts `AllWorkersCopiedState`, after which training may continue, then `CheckpointSaved`; or
    `CheckpointFailed`."""

    machine: RunMachine
    """Makes all decisions of the run."""
    pool: WorkerPool
    """Placement groups and actors of the workers."""
    recorder: RunRecorder
    """Writes the run folder and calls the callbacks."""
    side_effects: SideEffectThread
    """The thread in which the recorder runs."""
    calls: WorkerCalls
    """Calls to workers, whose answers become events."""
    tasks: BackgroundTasks
    """Work beside the event loop."""

    def __post_init__(self) -> None:
        self._disk = ThreadPoolExecutor(1, "raypar-disk")

    def start_checkpoint(self, action: do.StartCheckpoint, reason: str) -> None:
        """Begin a checkpoint."""
        self.tasks.spawn(self.save(action.done))

    async def save(self, done: int) -> None:
        """Take a snapshot on every worker; then, while training continues, wait for the files and commit the checkpoint."""
        generation, checkpoints = self.machine.membership.generation, self.recorder.checkpoints
        try:
            begun = await asyncio.to_thread(checkpoints.begin, done)
        except RayparError as error:
            self.tasks.post(on.CheckpointFailed(done, error))
            return
        members = {n: self.pool.workers[n] for n in self.machine.membership.members if n in self.pool.workers}
        asked = [self.calls.ask(number, w.save.remote(generation, done, str(begun), False)) for number, w in members.items()]
        taken: list[ShardRecord | CallFailure | None] = list(await asyncio.gather(*asked))
        if not any(isinstance(answer, CallFailure) for answer in taken):
            self.tasks.post(on.AllWorkersCopiedState(done))
            taken = list(await asyncio.gather(*(self.calls.ask(n, w.save_result.remote()) for n, w in members.items())))
        failed = [answer for answer in taken if isinstance(answer, CallFailure)]
        if failed:
            await asyncio.to_thread(checkpoints.drop, begun)
            cause = next((f.error for f in failed if isinstance(f.error, StateNotKeptError)), failed[0].error)
            if isinstance(cause, StateNotKeptError):
                cause = await self._save_weights(done, cause)
            self.tasks.post(on.CheckpointFailed(done, cause))
            return
        records = [answer for answer in taken if not isinstance(answer, CallFailure)]
        try:
            await asyncio.get_running_loop().run_in_executor(self._disk, checkpoints.commit, done, begun, records)
        except Exception as error:
            self.tasks.post(on.CheckpointFailed(done, error))
            return
        self.side_effects.perform(
            lambda: self.recorder.checkpoint_seen(done),
            lambda _: self.side_effects.after_telling_client(on.CheckpointSaved(done)),
        )

    async def _save_weights(self, done: int, error: StateNotKeptError) -> StateNotKeptError:
        """Save parameters and buffers, because the optimizer has state that cannot be saved; the error with where they are."""
        generation, checkpoints = self.machine.membership.generation, self.recorder.checkpoints
        workers = {n: self.pool.workers[n] for n in self.machine.membership.members if n in self.pool.workers}
        what = f"the state {after_steps(done)} cannot be saved: {error.what}"
        try:
            begun = await asyncio.to_thread(checkpoints.begin, done, only_weights=True)
            asked = [self.calls.ask(n, w.save.remote(generation, done, str(begun), True)) for n, w in workers.items()]
            taken: list[ShardRecord | CallFailure | None] = list(await asyncio.gather(*asked))
            if not any(isinstance(answer, CallFailure) for answer in taken):
                taken = list(await asyncio.gather(*(self.calls.ask(n, w.save_result.remote()) for n, w in workers.items())))
            if failed := [answer for answer in taken if isinstance(answer, CallFailure)]:
                await asyncio.to_thread(checkpoints.drop, begun)
                raise failed[0].error
            records = [answer for answer in taken if not isinstance(answer, CallFailure)]
            weights = await asyncio.to_thread(checkpoints.commit_weights, done, begun, records)
        except Exception as failure:
            return StateNotKeptError(f"{what}; nor can its parameters ({error_first_line(failure)})", error.cure)
        return StateNotKeptError(
            f"{what}. Parameters and buffers are in {weights}",
            cure=f"{error.cure}; begin a new run with these weights: init_from={weights}",
        )
