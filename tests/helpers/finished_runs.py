"""Finished runs as their folders have them, made in this process: a job is trained on a plan, and its checkpoint is saved."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

from helpers import checkpoint_folders
from torch import Tensor

from raypar.errors import ConfigError
from raypar.job import Job
from raypar.plan import ParallelPlan
from raypar.storage.run_folder import RunFolder
from raypar.worker.layer_graph_of_job import make_layer_graph
from raypar.worker.run_in_one_process import OneProcessRun


def train_into_folder(
    job: Job, run_dir: Path, then: Callable[[OneProcessRun], None] = lambda run: None, **mesh: Any
) -> tuple[Path, dict[str, Tensor]]:
    """(the run's folder, its parameters) after all steps on a plan of stages, replicas and shards as `mesh` says.

    `then` is called with the run at its end.

    A run whose job no file can name has no job.yaml, as one that was started from Python.
    """
    folder = RunFolder.create(run_dir, job.name)
    try:
        folder.job.write_text(job.to_yaml())
    except ConfigError as error:
        folder.why_no_job.write_text(error.what)
    graph = make_layer_graph(job)
    with OneProcessRun(job, ParallelPlan.mesh(layers=len(graph.layers), **mesh), "1f1b", graph=graph) as local:
        for step in range(job.steps):
            local.step(step)
        checkpoint_folders.save_run(local, folder.checkpoints, job.steps)
        then(local)
        return folder.path, {name: copies[0].detach().clone() for name, copies in local.parameters().items()}
