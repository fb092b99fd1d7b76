"""What a run is meant to do, and how long the machine waits for what."""

from __future__ import annotations

from dataclasses import dataclass

from raypar.elastic.desired_capacity import WorkerCountLimits


@dataclass(frozen=True, slots=True)
class RunPolicy:
    """The limits of one run. Fixed when the run starts; every deadline is in seconds."""

    workers: int
    """Workers that the run begins with."""
    job_steps: int
    """Steps of the whole job."""
    steps_before_run: int = 0
    """Steps that were done before this run: it resumes after them."""
    validates: bool = False
    """Whether the job has validation data."""
    validate_every: int = 0
    """Steps between two validations; 0: only after the last step."""
    save_every: int = 0
    """Steps between two checkpoints; 0: only at the end."""
    save_at_end: bool = True
    """Whether a finished job is saved. A run that is stopped is always saved."""
    stop_at: int | None = None
    """End after so many steps, without the last validation."""

    start_deadline_s: float = 600.0
    """Limit for the first step, which warms everything up."""
    step_deadline_s: float = 60.0
    """Least limit for a later step."""
    step_deadline_times: float = 20.0
    """A step may also take this multiple of the longest recent step."""
    pass_deadline_s: float = 600.0
    """Limit for a validation pass, a checkpoint, and the planner."""
    root_cause_s: float = 3.0
    """How long the cause of a broken connection is looked for before the connection itself is reported."""
    save_grace_s: float = 10.0
    """How long a failed run waits for a checkpoint that is being written."""
    abort_s: float = 1.5
    """How long workers may take to leave an aborted step."""
    interrupt_s: float = 5.0
    """How long a recovery may go on after Ctrl-C."""

    elastic: bool = False
    """Whether the run goes on without a lost worker."""
    min_workers: int = 1
    """Fewer workers than these do not train."""
    max_workers: int | None = None
    """More workers than these get no seat; None: as many as the run begins with."""
    hires: bool = False
    """Whether the run starts workers itself, in place of those it has lost."""
    standbys: int = 0
    """Workers started beyond the wanted number, to wait for a seat with everything loaded."""
    retry_s: float = 5.0
    """Pause after a worker could not be started; doubled each time, five times at most."""
    grow: bool = True
    """Whether workers that join get a seat although none is empty."""
    grow_after_s: float = 2.0
    """How long the first worker that waits for a seat waits for others to join."""
    move_s: float = 0.5
    """What a move to another plan costs: a plan has to save more than that."""
    max_attempts: int = 8
    """Recoveries without a new step between them after which the run gives up."""
    claim_s: float = 10.0
    """Limit for the journal's answer to the claim of a generation."""
    status_s: float = 1.0
    """Least limit for a worker's answer in a recovery."""
    status_medians: float = 3.0
    """That answer may also take this multiple of a usual step, because a computation cannot be interrupted."""
    hopeless_s: float = 0.2
    """Limit for that answer where the worker answers no pings either."""
    adopt_s: float = 5.0
    """Limit for a move to a new plan, from memory; the state's size is added."""
    load_s: float = 60.0
    """The same from a checkpoint."""
    capacity_s: float = 300.0
    """How long the run waits for workers when there are fewer than `min_workers`; 0: not at all."""
    last_copy_wait_s: float = 600.0
    """How long the run waits for a silent worker that holds the only copy of some state; 0: not at all."""

    mirror_every: int = 0
    """Steps between two snapshots of the mirror; see `MirrorSchedule`."""
    mirror_cost: float = 0.0
    """Fraction of the time that the mirror may take, where `mirror_every` is 0."""
    straggler_times: float = 1.5
    """A worker that takes this multiple of the time it should is slow; see `StragglerWatch`."""
    straggler_steps: int = 20
    """So many slow steps in a row make a straggler."""
    replace_stragglers: bool = False
    """Whether a straggler leaves when another worker can come."""

    @property
    def end(self) -> int:
        """The number of steps after which this run ends by itself."""
        return self.job_steps if self.stop_at is None else min(self.stop_at, self.job_steps)

    @property
    def wanted(self) -> int:
        """The number of workers that the run would like to train with."""
        return self.max_workers or self.workers

    @property
    def capacity(self) -> WorkerCountLimits:
        """What of the policy bounds the number of workers."""
        return WorkerCountLimits(self.wanted, self.min_workers, self.standbys, self.hires, self.grow, self.retry_s)
