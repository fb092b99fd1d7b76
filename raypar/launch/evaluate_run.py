"""Evaluation of trained weights: the loss and the metrics over a data set of any size, on the plan of a job."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING

from raypar.files.json_type import Json
from raypar.job import Job, ValidationConfig
from raypar.launch.forward_run import Cluster, choose_data, find_samples, make_forward_job, run_forward
from raypar.launch.launch_options import EventHandler
from raypar.launch.launch_run import keep_callers_state
from raypar.record.events import Note, ValidationRecord
from raypar.record.metric_names import name_in_validation, short_name
from raypar.storage.checkpoint_store import CheckpointRef
from raypar.user_code.user_code_errors import make_importable

if TYPE_CHECKING:
    from raypar.worker.forward_passes import LossTotal

OF_EVERY_PASS = ("step", "validation_loss", "count", "seconds")
"""The facts of a validation pass that are no metric of the job's."""


def evaluate_checkpoint(
    job: Job,
    checkpoint: CheckpointRef,
    data: ValidationConfig | str | None,
    tell: EventHandler,
    cluster: Cluster,
    *,
    batch_size: int | None = None,
    samples: int | None = None,
) -> dict[str, Json]:
    """The facts of a validation pass, as a run records them: `validation_loss`, `count` (samples or tokens), `seconds`, `step`.

    `data`: the data set, or several, or the name of one of the job's validation sets; None: the job's validation data. Losses
    and metrics are bit for bit those of the job's own validation after the checkpoint's steps, on any plan. `batch_size`:
    samples that go through the model at once; None: as in the validation; `samples`: how many are used of each set, from the
    first on; None: all. Raises `ConfigError` without data, and the error of a run that fails.
    """
    from raypar.worker.checkpoint.checkpoint_files import load_manifest
    from raypar.worker.forward_passes import LossTotal

    wanted = choose_data(job, data, samples)
    make_importable(job.source_dir)
    steps = load_manifest(checkpoint).steps_done
    metrics: dict[str, float] = {}
    overall, seconds = LossTotal(), 0.0
    for of_set, one in wanted.by_name.items():
        if of_set:
            tell(Note(text=f"validation set {of_set}"))
        forward = make_forward_job(job, steps, ValidationConfig.of_set(one), batch_size)
        loss, took, values = _evaluate(forward, checkpoint, overall, tell, cluster)
        seconds += took
        metrics |= {name_in_validation("loss", of_set): loss} if of_set else {}
        metrics |= {name_in_validation(name, of_set): value for name, value in values.items()}
    record = ValidationRecord(step=steps, validation_loss=overall.mean, count=overall.count, seconds=seconds, more=metrics)
    tell(record)
    return {name: value for name, value in record.facts().items() if name != "kind"}


def _evaluate(
    forward: Job, checkpoint: CheckpointRef, overall: LossTotal, tell: EventHandler, cluster: Cluster
) -> tuple[float, float, dict[str, float]]:
    """(mean loss over one data set, how many seconds its passes took, name -> value of the metrics). Adds to `overall`."""
    from raypar.worker.forward_passes import Totals
    from raypar.worker.process.torch_state_guard import TorchStateGuard

    forward, number = find_samples(forward, tell)
    guard = TorchStateGuard(forward.threads)
    with keep_callers_state():
        totals = Totals(forward, guard, overall)

    def take(kept: Sequence[bytes]) -> None:
        with keep_callers_state():
            totals.add(kept)

    seconds = run_forward(forward, number, checkpoint, take, tell, cluster)
    with keep_callers_state():
        guard.establish()
        return totals.loss.mean, seconds, totals.values()


def describe_evaluation(facts: Mapping[str, Json]) -> str:
    """The loss with all its digits, and a line for each metric."""
    lines = [f"loss {facts['validation_loss']!r} over {facts['count']:,g} counted, {facts['seconds']:.2f} s"]
    lines += [f"{short_name(name)} {value!r}" for name, value in facts.items() if name not in OF_EVERY_PASS]
    return "\n".join(lines)
