"""What a worker reports of a training step and of a validation pass, and the loss of a pass from all workers' reports."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import TypedDict

from raypar.errors import WorkerLost
from raypar.plan.microbatches import mean_loss
from raypar.plan.pieces import Digest
from raypar.worker.data.microbatch_stream_positions import StreamsRead
from raypar.worker.process.environment_and_signals_guard import StateWarnings
from raypar.worker.step.step_commit import InstructionSpan


@dataclass(frozen=True)
class StepReport:
    """What one worker reports of one step."""

    rank: int
    """The worker's rank."""
    step: int
    """The step, from 0."""
    loss: float
    """The step's loss, over all workers (rule 8 of the numerics contract)."""
    count: float
    """Number of terms of the loss: samples, or what the loss function counts."""
    norm: float
    """Norm of the gradient before clipping (rule 7)."""
    lr: float | None
    """The learning rate (`StepCommit.learning_rate`); None for a skipped step, and if this worker knows none."""
    loss_scale: float | None
    """`VoteResult.loss_scale`."""
    skipped: bool
    """Whether the step was not applied, because loss or norm are not finite."""
    seconds: float
    """How long the step took, without the mirror."""
    busy_seconds: float
    """The part of `seconds` that went into computing."""
    read_seconds: float
    """The part of `seconds` in which the worker read samples, or waited for the processes that do, and nobody else was waited
    for."""
    started_ns: int
    """`time.perf_counter_ns` at the start."""
    spans: tuple[InstructionSpan, ...]
    """The instructions and their times, if the step was traced."""
    ledger: Mapping[str, Mapping[str, int]]
    """Bytes by kind of operation since the generation began (`comm.transport.CommunicationLedger`): of a traced step, and every
    `worker_core.SAMPLE_S`; else empty."""
    peak_rss_bytes: int
    """Peak resident memory of the process so far."""
    memory: Mapping[str, int] = field(default_factory=dict)
    """Kind of memory -> bytes in use now (`WorkerCore.memory`), every `worker_core.SAMPLE_S`; else empty."""
    mirror_seconds: float = 0.0
    """Time that went into the mirror; not part of `seconds`."""
    digest: Digest | None = None
    """Digest of the state after the step, if the mirror copied it and other workers should hold the same."""
    streams: StreamsRead | None = None
    """What was read of iterable data."""
    warnings: StateWarnings = ()
    """Process state that users' code has left changed since the last report (`TorchStateGuard.lines`)."""
    not_kept: str = ""
    """What optimizer state can no longer be saved, and why; looked for after 1, 2, 4, 8, ... steps, and where it is copied."""
    metrics: Mapping[str, float] = field(default_factory=dict)
    """Name -> value of the job's metrics over the step's microbatches, every `metrics_every` steps, from the worker that
    computes them; else empty."""


@dataclass(frozen=True)
class ValidationReport:
    """What one worker reports of one validation pass."""

    rank: int
    """The worker's rank."""
    step: int
    """Number of training steps done before the pass."""
    losses: Mapping[int, tuple[float, float]]
    """Microbatch -> (sum, count), of the microbatches whose last stage ran here."""
    seconds: float
    """How long the pass took."""
    metrics: Mapping[str, float] = field(default_factory=dict)
    """Name -> value of the job's metrics over all microbatches, from the worker that has merged them; empty from others."""
    outputs: Mapping[int, bytes] = field(default_factory=dict)
    """Microbatch of the whole data set -> what is kept of its output or was measured, in a run that makes forward passes
    only."""
    warnings: StateWarnings = ()
    """As in `StepReport`."""


class Report(TypedDict, total=False):
    """A worker's `StepReport` or `ValidationReport` as the driver has it; or the reports of all workers of one step, merged."""

    loss: float
    norm: float
    count: float
    lr: float | None
    loss_scale: float | None
    skipped: bool
    seconds: float
    busy_seconds: float
    read_seconds: float
    mirror_seconds: float
    digest: Digest | None
    streams: StreamsRead | None
    warnings: StateWarnings
    not_kept: str
    metrics: Mapping[str, float]
    memory: Mapping[str, int]
    spans: Sequence[tuple[str, float, float]]
    """(label, start, end) of instructions, in milliseconds."""
    ledger: Mapping[str, Mapping[str, int]]
    peak_rss_bytes: int | Sequence[int]
    """Merged: by rank."""
    losses: Mapping[int, tuple[float, float]]
    outputs: Mapping[int, bytes]
    workers: int
    """How many workers' reports are merged; only merged reports have this and what follows."""
    busy_shares: Sequence[float]
    """By rank: the share of the step in which the worker computed."""
    data_wait: float
    """The largest share of the step in which a worker waited for samples."""
    time: float
    """When the step was committed."""


def merge_validation_losses(reports: list[ValidationReport]) -> float:
    """The validation loss, from all workers' reports: the exact sum of the sums, divided by the count (rule 8)."""
    losses = {m: pair for report in reports for m, pair in report.losses.items()}
    if not losses:
        raise WorkerLost("no worker reported a validation loss", cure="report this: a worker must hold the last stage")
    return mean_loss(losses)[0]
