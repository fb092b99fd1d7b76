"""The objects of one driver, each made once and shared by the code that carries out what the run machine decides."""

from __future__ import annotations

from dataclasses import dataclass

from raypar.actors.background_tasks import BackgroundTasks
from raypar.actors.driver_storage_session import DriverStorageSession
from raypar.actors.event_feed import EventFeed
from raypar.actors.plan_cache import PlanCache
from raypar.actors.run_recorder import RunRecorder
from raypar.actors.run_request import RunRequest
from raypar.actors.run_state_in_ray_kv import Journal
from raypar.actors.side_effect_thread import SideEffectThread
from raypar.actors.step_reports import StepReports
from raypar.actors.worker_calls import WorkerCalls
from raypar.actors.worker_pool import WorkerPool
from raypar.actors.worker_registry import WorkerRegistry
from raypar.elastic.run_machine import RunMachine


@dataclass(frozen=True)
class DriverParts:
    """What a driver works with once it knows its run request."""

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
    calls: WorkerCalls
    """Calls to workers, whose answers become events."""
    tasks: BackgroundTasks
    """Work beside the event loop."""
    feed: EventFeed
    """What the client is told."""
    storage_session: DriverStorageSession | None
    """Lease and upload of a run on shared storage; None for one in a folder."""
