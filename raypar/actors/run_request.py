"""The request for one run, which the client sends to the driver. Unpickling it imports neither user code nor torch."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field

from raypar.elastic.placement_constraints import PlacementConstraints
from raypar.elastic.run_policy import RunPolicy
from raypar.files.json_values import Json
from raypar.job import Job
from raypar.plan import Microbatches, ModelOutline, ParallelPlan, StageConnections
from raypar.planner.model_profile import ModelProfile
from raypar.record.events import Resumption
from raypar.schedule.step_timeline import Timeline

GRACE_S = 1.5
"""How long the steps in flight may take after Ctrl-C before they are voided."""


@dataclass(frozen=True)
class RunRequest:
    """Everything that a driver has to know about a run."""

    run: str
    """The run's name."""
    folder: str
    """Absolute path of the run folder; of a run on shared storage its working folder."""
    policy: RunPolicy
    """Limits and settings for the run machine's decisions."""
    plan: ParallelPlan
    """The first generation's plan."""
    schedule_name: str
    """The schedule of `plan`."""
    crossing: StageConnections
    """The values that pass between the stages of `plan`."""
    batching: Microbatches
    """How the samples of a step are divided into microbatches, and these into blocks."""
    job: Job
    """What the driver needs of the job (`Job.for_driver`)."""
    spec: bytes
    """What workers need of the job (`Job.for_workers`), pickled; the driver does not open it."""
    assignments: tuple[bytes, ...]
    """By rank: the worker's `ProgramAssignment`, pickled; the driver does not open it."""
    callbacks: bytes
    """The `Callbacks`, pickled; they are called in the driver."""
    contract: Mapping[str, Json]
    """The part of the job that a checkpoint stores, to check that it is resumed by the same job; digests of its code too."""
    predicted: Timeline
    """The step as the simulator predicts it, for the picture."""
    outline: ModelOutline
    """The model's layers and edges, from which another plan is made when workers come or go."""
    profile: ModelProfile
    """Times and sizes of the layers, for the planner's choice of another plan."""
    validation_batching: Microbatches | None = None
    """How the samples of a whole validation pass are divided into microbatches; None without validation."""
    resume: str | None = None
    """The checkpoint folder that workers load; None for a new run."""
    resumption: Sequence[Resumption] | None = None
    """The event of the resumption, if it is one, which the driver records; None for a new run."""
    warnings: tuple[str, ...] = ()
    """What is told and recorded as warnings when the run begins."""
    listen_host: str | None = None
    """The address that workers listen on; None: their node's address."""
    traced_steps: Collection[int] = frozenset()
    """Steps whose instructions are timed for the picture."""
    start_deadline_s: float = 300.0
    """How long a worker may take to start, and to build its stages."""
    orphan_timeout_s: float = 60.0
    """How long a worker waits for its driver before it exits."""
    silent_s: float = 10.0
    """Time without an answer after which a worker is silent."""
    placement: PlacementConstraints = field(default_factory=PlacementConstraints)
    """What the nodes of workers must have."""
    environment: Mapping[str, str] = field(default_factory=dict)
    """Environment variables of worker processes; the job's own runtime environment overrides them."""
    storage: str = ""
    """URI of the run on shared storage; empty for a run in a folder."""
    filesystems: Mapping[str, bytes] = field(default_factory=dict)
    """Id -> pickle of the file systems, given as objects, that contain the run or the checkpoint to load."""
    lease_owner: str = ""
    """Id of the owner of the run's lease there."""
    lease_in_ray: bool = False
    """Whether the lease is in Ray's key-value store."""

    @property
    def on_one_machine(self) -> bool:
        """Whether all workers are on the driver's machine: in a local Ray cluster."""
        return self.listen_host == "127.0.0.1"
