"""Messages between client, driver and workers. Unpickling them imports neither user code nor torch, so the driver starts
quickly."""

from __future__ import annotations

import pickle
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Generic, TypeVar

from raypar.elastic.events import FailureKind
from raypar.elastic.placement_constraints import PlacementConstraints
from raypar.errors import RayparError, error_message
from raypar.files.json_type import Json
from raypar.job import Job
from raypar.job.lr_schedule_metric import FollowedMetric
from raypar.plan import Microbatches, ModelOutline, ParallelPlan, StageConnections

if TYPE_CHECKING:  # what only clients and the driver send, which have loaded it: a worker does not load it
    from raypar.elastic.run_policy import RunPolicy
    from raypar.planner.model_profile import ModelProfile
    from raypar.record.events import Resumption
    from raypar.schedule.step_timeline import Timeline

T = TypeVar("T")

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
    assignments: bytes
    """By rank: the workers' `ProgramAssignment`, pickled together, so that the plan, which all have, is pickled once."""
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
    followed: FollowedMetric | None = None
    """The metric that the learning rates follow, with its values before the run; None: they follow none."""
    resumption: Sequence[Resumption] | None = None
    """The event of the resumption, if it is one, which the driver records; None for a new run."""
    changes: tuple[str, ...] = ()
    """What the resume changes of the job (`JobChange`); empty if nothing, and for a new run."""
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


@dataclass(frozen=True)
class CallFailure:
    """The failure of a call, sent as a value so that the error arrives whole and of its own class."""

    kind: FailureKind
    """Who is to blame: user code, raypar, a lost worker, or an abort."""
    error: Exception
    """The error itself."""


@dataclass(frozen=True)
class StepCall:
    """The arguments with which the driver calls `WorkerActor.step` of every member."""

    generation: int
    """The generation in which the step is executed."""
    step: int
    """The step, from 0."""
    trace: bool
    """Whether the report has the times of all instructions."""
    into_mirror: bool
    """Whether the mirror gets a snapshot of the state after this step."""
    cursors: bool = False
    """Whether the report says from where streams of iterable data can be read on."""
    validated: float | None = None
    """What the validation before the step has found for the metric that the learning rates follow; None if there was none
    directly before it, or they follow none."""
    before: StepCall | None = None
    """The call for the step before it in this generation; who has not got that one yet executes it first. Calls may overtake
    one another: Ray keeps no order for asyncio actors, as agents are, and whose agent is lost is called directly."""

    def to_bytes(self) -> bytes:
        """It as one argument for all members: Ray would serialize every other argument anew for each of them."""
        return pickle.dumps(self)

    @staticmethod
    def from_bytes(data: bytes) -> StepCall:
        """The call that `to_bytes` has encoded."""
        call: StepCall = pickle.loads(data)
        return call


@dataclass(frozen=True)
class GatheredAnswers(Generic[T]):
    """What an agent (`NodeAgent`) has heard so far. Workers in neither field have not answered yet."""

    answers: Mapping[int, T] = field(default_factory=dict)
    """Worker -> its answer."""
    unreached: tuple[int, ...] = ()
    """Workers that the agent cannot call, or whose call has raised: dead, or behind an agent that is."""
    lost: tuple[str, ...] = ()
    """Nodes of further agents that have failed or have not replied in time."""


@dataclass(frozen=True)
class WorkerHello:
    """What a worker reports about itself when it has started, before it knows a plan."""

    address: str
    """Where other workers connect: `host:port`."""
    node: str
    """Ray's id of its node, in hex."""
    pid: int
    """Id of its process."""
    fingerprint: dict[str, str]
    """The libraries and hardware with which it computes (`numerics_fingerprint.py`)."""
    liveness_address: str = ""
    """Address of its `LivenessListener`; empty if it has none."""


def pickle_error_for_client(error: Exception | None) -> bytes | None:
    """The error as bytes for the client; if it cannot be pickled, an error with its text."""
    if error is None:
        return None
    try:
        return pickle.dumps(error)
    except Exception:
        return pickle.dumps(RayparError(f"{type(error).__name__}: {error_message(error)}"))
