"""The loop in which the driver publishes a run's metrics every few seconds, with the numbers of workers by state."""

from __future__ import annotations

import asyncio
from dataclasses import dataclass
from functools import partial

from raypar.actors.metrics_publisher import PUBLISH_S, PUBLISH_S_PER_WORKER
from raypar.actors.run_recorder import RunRecorder
from raypar.actors.side_effect_thread import SideEffectThread
from raypar.actors.worker_pool import WorkerPool
from raypar.elastic.phases import Phase
from raypar.elastic.run_machine import RunMachine
from raypar.record.events import RunWarning
from raypar.telemetry.run_telemetry import WorkerCounts, count_workers


@dataclass
class MetricsPublishingLoop:
    """Publishes the metrics of a run every `PUBLISH_S`, of many workers less often, in the driver's side-effect thread."""

    machine: RunMachine
    """Makes all decisions of the run."""
    pool: WorkerPool
    """Placement groups and actors of the workers."""
    recorder: RunRecorder
    """Writes the run folder and calls the callbacks."""
    side_effects: SideEffectThread
    """The thread in which the recorder runs."""

    async def watch(self) -> None:
        """Publish until the run is over. Publications do not pile up behind a slow side effect: each waits for the one before.

        An error is told in one line; it ends the publication, not the run.
        """
        try:
            while self.machine.phase is not Phase.OVER:
                await self.side_effects.awaited(partial(self.recorder.publish_metrics, self.worker_counts()))
                await asyncio.sleep(max(PUBLISH_S, PUBLISH_S_PER_WORKER * len(self.machine.membership.members)))
        except Exception as error:
            text = f"metrics are not published any more ({type(error).__name__}: {error}); training is not touched by that"
            self.side_effects.note(RunWarning(text=text))

    def worker_counts(self) -> WorkerCounts:
        """The workers of the run at present."""
        membership, pool = self.machine.membership, self.pool
        return count_workers(
            members=membership.members,
            gone=membership.gone,
            spares=membership.spares,
            existing=pool.workers,
            groups={number: group.id for number, group in list(pool.groups.items())},
            generation=membership.generation,
        )
