"""How a job is launched: what is not in the job; and what a trial of Ray Tune makes of it, a run's name and folder."""

from __future__ import annotations

import os
import sys
import warnings
from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING

from raypar.callbacks import Callback
from raypar.errors import ConfigError
from raypar.files.json_values import Json
from raypar.job.changes import NO_CHANGES, Changes
from raypar.record.events import Event, Resumption
from raypar.storage.run_folder import RunFolder

if TYPE_CHECKING:
    from raypar.job import Job
    from raypar.launch.choose_plan import ChosenPlan
    from raypar.storage.checkpoint_store import CheckpointRef

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
    former_code: Json = None
    """The job's code as that checkpoint has it (`code_of_job`); None if it has none, and for a new run."""
    changes: Changes = NO_CHANGES
    """What this resume, and those before it, have changed of the job."""
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

    def __post_init__(self) -> None:
        """Raises `ConfigError` for impossible local nodes and a step to stop at below 1."""
        from raypar.actors.ray_connection import check_local_node_count

        check_local_node_count(self.address, self.local_nodes)
        if self.stop_at_step is not None and self.stop_at_step < 1:
            raise ConfigError(f"--stop-at-step {self.stop_at_step}", cure="give 1 step or more")


def current_trial_id() -> str | None:
    """The id of the Ray Tune trial that this process works for; None outside of trials."""
    tune = sys.modules.get("ray.tune")
    if tune is None:
        return None
    with warnings.catch_warnings():  # outside of a trial Ray warns, and returns None
        warnings.simplefilter("ignore")
        found: str | None = tune.get_context().get_trial_id()
    return found


def name_of_run_in_trial(name: str, default: str, trial: str | None) -> str:
    """The name of a run in this trial: `name`, or one of its own if that is the default, which other trials have too."""
    return name if trial is None or name != default else f"{default}_{trial}"


def check_run_dir_in_trial(run_dir: str | os.PathLike[str], trial: str | None) -> None:
    """Raise `ConfigError` if checkpoints would go to the temporary folder that Ray Tune makes a trial's working folder."""
    text = os.fspath(run_dir)
    if trial is not None and "://" not in text and not os.path.isabs(text):
        raise ConfigError(
            f"run_dir {text!r} is relative, and this is trial {trial} of Ray Tune, whose folder {os.getcwd()} is temporary",
            cure="give run_dir an absolute path, or a URI of shared storage",
        )
