"""Prediction: the outputs of trained weights for each sample of a data set, on the plan of a job, in the order of samples."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from raypar.errors import ClusterError, ConfigError, UserCodeError, WorkerLost, error_first_line
from raypar.job import FunctionConfig, Job, LossConfig, ValidationConfig
from raypar.launch.activity_reporter import ActivityReporter
from raypar.launch.forward_run import Cluster, make_forward_job, run_forward
from raypar.launch.launch_options import EventHandler
from raypar.launch.launch_run import keep_callers_state
from raypar.record.events import Event, Note, ValidationRecord
from raypar.record.folder import OUTPUTS
from raypar.storage.checkpoint_store import CheckpointRef
from raypar.user_code.user_code_errors import make_importable

if TYPE_CHECKING:
    from torch import Tensor

    from raypar.plan import Microbatches

Rows = Mapping[str, "Tensor"]
"""Column -> its rows: `sample`, the numbers of the samples, and the outputs by name."""


class RowsInMemory:
    """Keeps all rows."""

    def __init__(self) -> None:
        self._parts: list[Rows] = []

    @staticmethod
    def opened() -> contextlib.AbstractContextManager[RowsInMemory]:
        """One, as the context of a block."""
        return contextlib.nullcontext(RowsInMemory())

    def write(self, rows: Rows) -> None:
        """Keep the rows of further samples."""
        self._parts.append(rows)

    def columns_in_memory(self) -> dict[str, Tensor]:
        """Column -> all its rows. Raises `UserCodeError` where rows differ in size."""
        import torch

        found = {}
        for name in self._parts[0] if self._parts else ():
            rows = [part[name] for part in self._parts]
            if any(part.shape[1:] != rows[0].shape[1:] for part in rows):
                raise UserCodeError(
                    f"the rows of the output {name!r} differ in size: {list(rows[0].shape[1:])} and others",
                    cure="give out=FILE.parquet, whose rows may, or a function that makes them alike",
                )
            found[name] = torch.cat(rows)
        return found


MICROBATCHES_OF_PASS = 32
"""The most microbatches of one pass, whose outputs are in memory at a time."""


@dataclass(frozen=True)
class PredictionRequest:
    """What is predicted."""

    data: ValidationConfig | None
    """The data set; None: the job's validation data."""
    function: FunctionConfig | None = None
    """A function of the output that returns what is kept of it; None: all of it."""
    batch_size: int | None = None
    """Samples that go through the model at once; None: as in training."""


def predict_with_checkpoint(
    job: Job,
    checkpoint: CheckpointRef,
    request: PredictionRequest,
    write: Callable[[Rows], None],
    tell: EventHandler,
    cluster: Cluster,
) -> int:
    """Give `write` the outputs of all samples in their order, part by part; returns the number of samples.

    The values are bit for bit those of one process with the same microbatches, on any plan with as many shards. A run that
    is lost with its driver, or with all copies of a stage, goes on with the part that is not written. Raises `ConfigError`
    without data, and the error of a run that fails.
    """
    from raypar.worker.checkpoint.checkpoint_files import load_manifest
    from raypar.worker.prediction import whole_batching

    wanted = request.data or job.validation
    if wanted is None:
        raise ConfigError("the job has no validation data", cure="give the data set: --data module:function; from Python data=")
    make_importable(job.source_dir)
    forward = make_forward_job(job, load_manifest(checkpoint).steps_done, wanted.replace(every=0), request.batch_size)
    samples = count_samples(forward, tell)
    whole = whole_batching(samples, forward.batch_size, forward.microbatches)
    passes = -(-whole.count // MICROBATCHES_OF_PASS)
    parts = PartsOfPrediction(whole, -(-whole.count // passes), write)
    while True:
        before = parts.passes
        made = make_prediction_job(forward, samples, parts.microbatches, before, request.function)
        try:
            run_forward(made, checkpoint, parts.taking(tell), cluster, passes=passes - before, on_folder=parts.use_folder)
            return samples
        except (WorkerLost, ClusterError) as error:
            if parts.passes == before:
                raise
            tell(Note(text=f"after {parts.samples_written} samples: {error_first_line(error)}; the others follow in a new run"))


def count_samples(forward: Job, tell: EventHandler) -> int:
    """The number of samples of the data that go through the model. First call of user code."""
    from raypar.worker.data.user_dataset import dataset_size, make_dataset
    from raypar.worker.process.torch_state_guard import TorchStateGuard

    with ActivityReporter(tell).reporting(), keep_callers_state():
        guard = TorchStateGuard(forward.threads)
        guard.establish()
        with guard.watching("the job's data"):
            size = dataset_size(make_dataset(forward.data), forward.data.label)
    limit = forward.validation.samples if forward.validation is not None else 0
    return min(size, limit or size)


def make_prediction_job(forward: Job, samples: int, microbatches: int, first_pass: int, function: FunctionConfig | None) -> Job:
    """The job of a run of forward passes, whose outputs are kept in the place of a loss."""
    from raypar.worker.data.numbered_samples import with_numbered_samples
    from raypar.worker.prediction import Prediction

    data = with_numbered_samples(forward.validation_data, samples)
    given = forward.replace(
        validation=data,
        loss=LossConfig.model_construct(function=Prediction(samples, microbatches, function, first_pass)),
        metrics={},
    )
    return given.replace(data=given.validation_data)


class PartsOfPrediction:
    """Takes the outputs of each pass that is over from the run's folder, and writes them in the order of microbatches."""

    def __init__(self, whole: Microbatches, microbatches: int, write: Callable[[Rows], None]) -> None:
        self.whole, self.microbatches, self.write = whole, microbatches, write
        self.passes = 0
        """Passes whose outputs are written."""
        self._folder = Path()

    @property
    def samples_written(self) -> int:
        """Number of samples whose outputs are written."""
        done = min(self.passes * self.microbatches, self.whole.count)
        return self.whole.samples(done - 1).stop if done else 0

    def use_folder(self, folder: Path) -> None:
        """Take outputs from this run folder from now on."""
        self._folder = folder / OUTPUTS

    def taking(self, tell: EventHandler) -> EventHandler:
        """A handler of events that takes the outputs of a pass when it is over, and tells how many samples are written."""

        def handle(event: Event) -> None:
            if not isinstance(event, ValidationRecord):
                tell(event)
                return
            self._take()
            tell(Note(text=f"{self.samples_written:,} of {self.whole.batch_size:,} samples"))

        return handle

    def _take(self) -> None:
        """Write the outputs of the next pass."""
        import torch

        from raypar.worker.data.numbered_samples import SAMPLE
        from raypar.worker.prediction import unpack

        first = self.passes * self.microbatches
        parts: list[Rows] = []
        for microbatch in range(first, min(first + self.microbatches, self.whole.count)):
            path = self._folder / f"{microbatch:012d}"
            parts.append(unpack(path.read_bytes()))
            path.unlink()
            assert parts[-1][SAMPLE].tolist() == list(self.whole.samples(microbatch)), f"microbatch {microbatch}"
        shapes = [{name: tensor.shape[1:] for name, tensor in part.items()} for part in parts]
        groups = [parts] if all(shape == shapes[0] for shape in shapes) else [[part] for part in parts]
        for group in groups:
            rows = {name: torch.cat([part[name] for part in group]) for name in sorted(group[0].keys() - {SAMPLE})}
            self.write({"sample": torch.cat([part[SAMPLE] for part in group]), **rows})
        self.passes += 1
