"""The options of a run that cannot change its results."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from raypar.elastic.placement_constraints import PlacementConstraints
from raypar.errors import ConfigError
from raypar.record.events import Event, Resumption
from raypar.storage.run_folder import RunFolder

if TYPE_CHECKING:
    from raypar.job import ElasticConfig, Job
    from raypar.launch.chosen_plan import ChosenPlan
    from raypar.storage.checkpoint_store import CheckpointRef

EventHandler = Callable[[Event], None]
"""Gets every event of a run."""


@dataclass(frozen=True)
class LaunchOptions:
    """All options of a run that cannot change its results. Times are in seconds."""

    make_folder: Callable[[ChosenPlan], RunFolder]
    """Makes or finds the run folder and writes job and plan into it; called when all input has been checked."""
    resume: CheckpointRef | None = None
    """The checkpoint to resume from."""
    resumption: list[Resumption] | None = None
    """The event of a resumption (`describe_resumption`), which `make_folder` adds; None for a new run."""
    steps_done: int = 0
    """Steps that are done in the checkpoint to resume from."""
    former_code: Any = None
    """The job's code as that checkpoint has it (`code_of_job`); None if it has none, and for a new run."""
    save_every: int = 0
    """Steps from one checkpoint to the next; 0: at the end only."""
    save_at_end: bool = True
    """Whether the end of the run is saved."""
    keep_checkpoints: int = 2
    """How many checkpoints are kept."""
    trace_every: int = 0
    """Steps from one measured step to the next; 0: a few steps only."""
    stop_at_step: int | None = None
    """Number of steps after which the run saves and stops, to be resumed."""
    max_time_s: float | None = None
    """Time after which the run saves and stops."""
    callbacks: tuple[Any, ...] = ()
    """The user's callbacks and trackers."""
    address: str | None = None
    """The Ray cluster to join; None: `RAY_ADDRESS`, else a local Ray cluster."""
    local_nodes: int = 1
    """Nodes of the local Ray cluster."""
    wait_for_workers_s: float = 300.0
    """How long the run waits for a cluster that has room for its workers."""
    orphan_timeout_s: float = 60.0
    """How long a worker waits for its driver before it exits."""
    price_per_worker_hour: float | None = None
    """What one worker costs an hour, for the metrics."""
    placement: PlacementConstraints = field(default_factory=PlacementConstraints)
    """What the nodes of workers must have."""
    elastic: ElasticConfig | None = None
    """How the run grows, shrinks and recovers; None: it does none of these."""


def launch_options_from_job(
    job: Job,
    make_folder: Callable[[ChosenPlan], RunFolder],
    stop_at_step: int | None,
    address: str | None,
    local_nodes: int = 1,
) -> LaunchOptions:
    """The options that a job file and the command line give.

    Raises `ConfigError` for callbacks that cannot be made, impossible local nodes and a step to stop at below 1.
    """
    from raypar.actors.ray_connection import check_local_node_count
    from raypar.callbacks import callbacks_from_job

    check_local_node_count(address, local_nodes)

    if stop_at_step is not None and stop_at_step < 1:
        raise ConfigError(f"--stop-at-step {stop_at_step}", cure="give 1 step or more")
    return LaunchOptions(
        make_folder=make_folder,
        save_every=job.checkpoint.every,
        save_at_end=job.checkpoint.at_end,
        keep_checkpoints=job.checkpoint.keep,
        trace_every=job.trace_every,
        callbacks=callbacks_from_job(job),
        stop_at_step=stop_at_step,
        max_time_s=job.max_time_s,
        address=address,
        local_nodes=local_nodes,
        wait_for_workers_s=job.wait_for_workers_s,
        price_per_worker_hour=job.price_per_worker_hour,
        placement=job.placement.to_constraints(),
        elastic=job.elastic,
    )
