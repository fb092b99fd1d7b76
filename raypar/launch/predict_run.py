"""Prediction: the outputs of trained weights for each sample of a data set, on the plan of a job, in the order of samples."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from raypar.errors import ConfigError
from raypar.job import FunctionConfig, Job, LossConfig, ValidationConfig
from raypar.launch.forward_run import Cluster, choose_data, find_samples, make_forward_job, run_forward
from raypar.launch.launch_options import EventHandler
from raypar.launch.parquet_writer import Rows
from raypar.launch.prediction_sinks import RowSink
from raypar.storage.checkpoint_store import CheckpointRef
from raypar.user_code.user_code_errors import make_importable


@dataclass(frozen=True)
class PredictionRequest:
    """What is predicted."""

    data: ValidationConfig | str | None
    """The data set, or the name of one of the job's validation sets; None: the job's validation data."""
    function: FunctionConfig | None = None
    """A function of the output that returns what is kept of it; None: all of it."""
    batch_size: int | None = None
    """Samples that go through the model at once; None: as in training."""
    samples: int | None = None
    """How many samples are used, from the first on; None: all."""


def predict_with_checkpoint(
    job: Job,
    checkpoint: CheckpointRef,
    request: PredictionRequest,
    rows: RowSink,
    tell: EventHandler,
    cluster: Cluster,
) -> int:
    """Give `rows` the outputs of all samples in their order, part by part; returns the number of samples.

    The values are bit for bit those of one process with the same microbatches, on any plan with as many shards. A run that
    is lost with its driver, or with all copies of a stage, goes on with the part that is not written. Raises `ConfigError`
    without data, or for a function that cannot be imported, and the error of a run that fails.
    """
    from raypar.worker.checkpoint.checkpoint_files import load_manifest

    wanted = choose_data(job, request.data, request.samples)
    if wanted.sets:
        raise ConfigError(
            f"the job has the validation sets {', '.join(wanted.sets)}, and outputs are those of one",
            cure=f"name one of them: --data {next(iter(wanted.sets))}; from Python data=",
        )
    if (wanted.streams or 1) > 1:
        raise ConfigError(
            f"data set {wanted.label} is to be read as {wanted.streams} streams, and rows have the order of one",
            cure="leave streams out of the data: without it there is one",
        )
    make_importable(job.source_dir)
    if request.function is not None:
        request.function.resolve()  # workers would miss it only at the first microbatch
    forward = make_forward_job(job, load_manifest(checkpoint).steps_done, wanted, request.batch_size)
    forward, samples = find_samples(forward, tell)
    made = make_prediction_job(forward, samples, request.function)
    rows.expect(samples)
    run_forward(made, samples, checkpoint, RowWriter(rows), tell, cluster)
    return samples


def make_prediction_job(forward: Job, samples: int, function: FunctionConfig | None) -> Job:
    """The job of a run of forward passes, whose outputs are kept in the place of a loss."""
    from raypar.worker.data.data_set_with_sample_numbers import with_numbered_samples
    from raypar.worker.kept_predictions import Prediction

    given = forward.replace(
        validation=with_numbered_samples(forward.validation_data, samples),
        loss=LossConfig.model_construct(function=Prediction(function)),
        metrics={},
    )
    return given.replace(data=given.validation_data)


class RowWriter:
    """Writes the outputs of consecutive microbatches as rows."""

    def __init__(self, rows: RowSink) -> None:
        self.sink = rows
        """What takes the rows."""
        self.rows = 0
        """Number of rows that are written."""

    def __call__(self, kept: Sequence[bytes]) -> None:
        """Write the outputs of the next microbatches; at once if they are of one size."""
        import torch

        from raypar.worker.data.data_set_with_sample_numbers import SAMPLE
        from raypar.worker.kept_predictions import NUMBERS, unpack_predictions

        parts: list[Rows] = [unpack_predictions(data) for data in kept]
        shapes = [{name: tensor.shape[1:] for name, tensor in part.items()} for part in parts]
        groups = [parts] if all(shape == shapes[0] for shape in shapes) else [[part] for part in parts]
        for group in groups:
            rows = {name: torch.cat([part[name] for part in group]) for name in sorted(group[0].keys() - {SAMPLE})}
            samples = torch.cat([part[SAMPLE] for part in group])
            assert samples.tolist() == list(range(self.rows, self.rows + len(samples)))
            self.sink.write({NUMBERS: samples, **rows})
            self.rows += len(samples)
