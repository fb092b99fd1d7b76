"""Evaluation of trained weights: one validation pass over a data set, on the plan of a job."""

from __future__ import annotations

from collections.abc import Mapping

from raypar.errors import ConfigError, RayparError
from raypar.files.json_values import Json
from raypar.job import Job, ValidationConfig
from raypar.job.metrics_section import VALIDATION
from raypar.launch.forward_run import Cluster, make_forward_job, run_forward
from raypar.launch.launch_options import EventHandler
from raypar.storage.checkpoint_store import CheckpointRef

OF_EVERY_PASS = ("step", "validation_loss", "count", "seconds")
"""The facts of a validation pass that are no metric of the job's."""


def evaluate_checkpoint(
    job: Job,
    checkpoint: CheckpointRef,
    data: ValidationConfig | None,
    tell: EventHandler,
    cluster: Cluster,
    *,
    batch_size: int | None = None,
) -> dict[str, Json]:
    """The facts of a validation pass, as a run records them: `validation_loss`, `count` (samples or tokens), `seconds`, `step`.

    `data`: the data set; None: the job's validation data. The loss is bit for bit that of the job's own validation after the
    checkpoint's steps, on any plan. `batch_size`: samples that go through the model at once; None: as in training. Raises
    `ConfigError` without data, and the error of a run that fails.
    """
    from raypar.worker.checkpoint.checkpoint_files import load_manifest

    wanted = data or job.validation
    if wanted is None:
        raise ConfigError("the job has no validation data", cure="give the data set: --data module:function; from Python data=")
    forward = make_forward_job(job, load_manifest(checkpoint).steps_done, wanted.replace(every=0), batch_size)
    result = run_forward(forward, checkpoint, tell, cluster)
    found = [facts for facts in result.history if "validation_loss" in facts]
    if not found:
        raise RayparError("the pass over the data has reported no loss", cure="report this")
    return found[-1]


def describe_evaluation(facts: Mapping[str, Json]) -> str:
    """The loss with all its digits, and a line for each metric."""
    lines = [f"loss {facts['validation_loss']!r} over {facts['count']:,g} counted, {facts['seconds']:.2f} s"]
    lines += [f"{name.removeprefix(VALIDATION)} {value!r}" for name, value in facts.items() if name not in OF_EVERY_PASS]
    return "\n".join(lines)
