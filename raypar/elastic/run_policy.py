"""The settings of a run: its goals, and the time limits of the run machine."""

from __future__ import annotations

from dataclasses import dataclass

from raypar.elastic.desired_capacity import WorkerCountLimits


@dataclass(frozen=True, slots=True)
class RunPolicy:
    """The settings of one run, fixed when it starts. Names that end in `_s` are in seconds."""

    workers: int
    """Number of workers of the job's own plan. An elastic run may begin with fewer."""
    job_steps: int
    """Number of steps of the whole job."""
    steps_before_run: int = 0
    """Number of steps that were done before this run; it resumes after them."""
    validates: bool = False
    """Whether the job has validation data."""
    validate_every: int = 0
    """Steps between two validations; 0: only after the last step."""
    rates_follow_validations: bool = False
    """Whether learning rates follow the values of validations (`lr_schedule.metric`)."""
    validates_first: bool = False
    """Whether a resumed run validates before its first step: the learning rates follow a validation that is due after
    `steps_before_run` steps, and the checkpoint does not have its value."""
    save_every: int = 0
    """Steps between two checkpoints; 0: only at the end."""
    save_at_end: bool = True
    """Whether a finished job is saved. A run that is stopped is always saved."""
    forward_passes: int = 0
    """Number of forward passes that the run makes, over one part of a data set after the other, in the place of training; it
    begins and ends after `job_steps` steps, and saves nothing. 0: the run trains."""
    stop_at: int | None = None
    """Number of steps of the job after which the run ends early, without the last validation; None: it does not."""

    start_deadline_s: float = 600.0
    """Limit for the first step, which includes warm-up."""
    step_deadline_s: float = 60.0
    """Least limit for a later step."""
    step_deadline_times: float = 20.0
    """A step may also take this multiple of the longest recent step."""
    slow_sample_s: float = 120.0
    """How long a step may take in all while a worker that answers pings reads samples for it. Replacing that worker would not
    help, as another one would read the same samples."""
    pass_deadline_s: float = 600.0
    """Limit for a validation pass, a checkpoint, and the planner."""
    root_cause_s: float = 3.0
    """How long the cause of a broken connection is looked for before the connection itself is reported."""
    save_grace_s: float = 10.0
    """How long a failed run waits for a checkpoint that is being written."""
    save_wait_s: float = 300.0
    """How long a finished run retries its last checkpoint while the disk is full or unavailable; 0: it does not."""
    save_retry_s: float = 10.0
    """Time between two attempts to write that checkpoint."""
    callbacks_s: float = 10.0
    """How long callbacks may take, after the grace of a Ctrl-C, for steps that all workers have applied."""
    abort_s: float = 1.5
    """How long workers may take to leave an aborted step."""
    interrupt_s: float = 5.0
    """Limit for a recovery after Ctrl-C."""

    elastic: bool = False
    """Whether the run goes on without a lost worker."""
    min_workers: int = 1
    """The run does not train with fewer workers."""
    max_workers: int | None = None
    """The most workers that get a seat; None: as many as the run begins with."""
    hires: bool = False
    """Whether the run starts workers itself, in place of lost ones."""
    standbys: int = 0
    """Workers started beyond the wanted number, to wait for a seat with everything loaded."""
    replica_size: int = 1
    """Workers of one replica of a stage (its shards), which are asked for together."""
    on_demand: int = 0
    """Least number of workers on on-demand nodes, which the cloud does not take back."""
    retry_s: float = 5.0
    """Pause after a worker could not be started; it doubles with each further failure, five times at most."""
    grow: bool = True
    """Whether the run moves to a larger plan to give waiting workers a seat."""
    grow_after_s: float = 2.0
    """How long the first worker that waits for a seat waits for others to join."""
    move_s: float = 0.5
    """Cost of a move to another plan: a larger plan has to save more time."""
    max_attempts: int = 8
    """Recoveries in a row without a new step between them; with one more the run fails."""
    claim_s: float = 90.0
    """Limit for the journal's answer to the claim of a generation. While the network to Ray's control store is broken the
    workers keep the state; Ray itself ends the driver's node after about half a minute."""
    status_s: float = 1.0
    """Least limit for a worker's status report in a recovery."""
    status_medians: float = 3.0
    """The report may also take this multiple of a usual step, because a computation cannot be interrupted."""
    hopeless_s: float = 0.2
    """Limit for answers in a recovery if none of the missing workers answers pings either."""
    adopt_s: float = 5.0
    """Limit for adopting a new plan with state from memory; time for the state's size is added."""
    load_s: float = 60.0
    """Limit for adopting a new plan with state from a checkpoint; time for the state's size is added."""
    capacity_s: float = 300.0
    """How long the run waits for workers when there are fewer than `min_workers`; 0: not at all."""
    last_copy_wait_s: float = 600.0
    """How long the run waits for a silent worker that holds the only copy of some state; 0: not at all."""
    restarts: bool = False
    """Whether a run without a checkpoint begins again with its first step if some of its state is lost."""

    mirror_every: int = 0
    """Steps between two snapshots of the mirror; see `MirrorSchedule`."""
    mirror_cost: float = 0.0
    """Fraction of the time that the mirror may take, where `mirror_every` is 0."""
    straggler_times: float = 1.5
    """A worker is slow if it takes more than this multiple of the expected time; see `StragglerWatch`."""
    straggler_steps: int = 20
    """Number of slow steps in a row that make a straggler."""
    replace_stragglers: bool = False
    """Whether a straggler is asked to leave if another worker can replace it."""
    rebalance_stragglers: bool = False
    """Whether a straggler gets fewer blocks; it is asked to leave only if that does not help and another can replace it."""
    block_work: tuple[int, ...] = ()
    """Number of microbatches in each block of a step; empty: not known, and shares stay as they are."""

    @property
    def end_step(self) -> int:
        """The number of steps after which this run ends by itself."""
        return self.job_steps if self.stop_at is None else min(self.stop_at, self.job_steps)

    @property
    def wanted(self) -> int:
        """The number of workers that the run would like to train with."""
        return self.max_workers or self.workers

    @property
    def capacity(self) -> WorkerCountLimits:
        """The limits on the number of workers."""
        return WorkerCountLimits(
            self.wanted,
            self.min_workers,
            self.standbys,
            self.hires,
            self.grow,
            self.retry_s,
            self.replica_size,
            self.on_demand,
        )
