"""How a job is launched: what is not in the job."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from raypar.callbacks import Callback
from raypar.errors import ConfigError
from raypar.files.json_type import Json
from raypar.job.history_of_resume_changes import NO_CHANGES, Changes
from raypar.record.events import Event, Resumption
from raypar.storage.run_folder import RunFolder

if TYPE_CHECKING:
    from raypar.job import Job
    from raypar.launch.choose_plan import ChosenPlan
    from raypar.storage.checkpoint_store import CheckpointRef
    from raypar.worker.checkpoint.frozen_table import FrozenTable

EventHandler = Callable[[Event], None]
"""Gets every event of a run."""


@dataclass(frozen=True)
class LaunchOptions:
    """A job and how it is launched: what no job file says. Times are in seconds."""

    job: Job
    """The job."""
    make_folder: Callable[[ChosenPlan], RunFolder]
    """Makes or finds the run folder and writes job and plan into it; called when all input has been checked."""
    resume: CheckpointRef | None = None
    """The checkpoint to resume from."""
    resumption: list[Resumption] | None = None
    """The event of a resumption (`describe_resumption`), which `make_folder` adds; None for a new run."""
    steps_done: int = 0
    """Steps that are done in the checkpoint to resume from."""
    validated: Mapping[int, float] = field(default_factory=dict)
    """Number of steps done -> value of the metric that the learning rates follow, as that checkpoint has it."""
    former_code: Json = None
    """The job's code as that checkpoint has it (`code_of_job`); None if it has none, and for a new run."""
    former_fingerprint: Json = None
    """The fingerprint of the data as that checkpoint has it (`data_fingerprint.py`); None if it has none, and for a new run."""
    changes: Changes = NO_CHANGES
    """What this resume, and those before it, have changed of the job."""
    frozen: FrozenTable | None = None
    """The frozen values that the checkpoint to resume from leaves out; None: it has all."""
    forward_passes: int = 0
    """Number of forward passes that the run makes in the place of training; 0: it trains."""
    stop_at_step: int | None = None
    """Number of steps after which the run saves and stops, to be resumed."""
    callbacks: tuple[Callback, ...] = ()
    """The user's callbacks and trackers, made."""
    address: str | None = None
    """The Ray cluster to join; None: `RAY_ADDRESS`, else a local Ray cluster."""
    local_nodes: int = 1
    """Nodes of the local Ray cluster."""
    orphan_timeout_s: float = 60.0
    """How long a worker waits for its driver before it exits."""

    @property
    def validates_first(self) -> bool:
        """Whether the run begins with a validation that the learning rates follow: it is due after the checkpoint's steps, and
        the checkpoint does not have its value."""
        followed = self.job.make_followed_metric(self.validated)
        return followed is not None and followed.lacks(self.steps_done)

    def __post_init__(self) -> None:
        """Raises `ConfigError` for impossible local nodes and a step to stop at below 1."""
        from raypar.actors.ray_connection import check_local_node_count

        check_local_node_count(self.address, self.local_nodes)
        if self.stop_at_step is not None and self.stop_at_step < 1:
            raise ConfigError(f"--stop-at-step {self.stop_at_step}", cure="give 1 step or more")
