"""Runs of forward passes in one process, in the place of those on Ray (`raypar.launch.forward_run.run_passes`)."""

from __future__ import annotations

import tempfile
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import pytest

from raypar.errors import WorkerLost
from raypar.job import Job
from raypar.launch import forward_run
from raypar.plan import ParallelPlan
from raypar.record.events import ValidationRecord
from raypar.record.folder import output_file
from raypar.storage.checkpoint_store import CheckpointRef
from raypar.worker.data.check_and_count_streams import resolve_streams
from raypar.worker.layer_graph_of_job import make_layer_graph
from raypar.worker.run_in_one_process import OneProcessRun
from raypar.worker.worker_reports import merge_validation_losses


class PassesInOneProcess:
    """The runs one after the other: run i on the plan of `meshes[i]`, the last one from then on.

    `lost`: run -> (pass, computation) in which its workers are lost, and their outputs of that pass with them.
    """

    def __init__(self, *meshes: dict[str, int], lost: dict[int, tuple[int, int]] | None = None) -> None:
        self.meshes: Sequence[dict[str, int]] = meshes or ({},)
        self.lost = lost or {}
        self.runs: list[tuple[int, int]] = []
        """(first pass, number of passes) of each run."""

    def __call__(self, job: Job, checkpoint: CheckpointRef, passes: int, *more: Any) -> None:
        """See `run_passes`."""
        assert job.forward_passes is not None
        tell, _, on_folder = more
        mesh, lost = self.meshes[min(len(self.runs), len(self.meshes) - 1)], self.lost.get(len(self.runs))
        self.runs.append((job.forward_passes.first, passes))
        job = resolve_streams(job.for_workers()).job
        graph, at, calls = make_layer_graph(job), 0, 0

        def counted(evaluate: Callable[..., object]) -> Callable[..., object]:
            def call(*args: object) -> object:
                nonlocal calls
                calls += 1
                if lost == (at, calls):
                    raise WorkerLost("the workers were lost", cure="none")
                return evaluate(*args)

            return call

        plan = ParallelPlan.mesh(layers=len(graph.layers), **mesh)
        with (
            tempfile.TemporaryDirectory() as room,
            OneProcessRun(job, plan, "1f1b", graph=graph) as local,
        ):
            folder = Path(room)
            outputs = output_file(folder, 0).parent
            outputs.mkdir()
            on_folder(folder)
            for core in local.cores:
                core.load(checkpoint, only_weights=True)
                for stage in core.stages.values():
                    stage.evaluate = counted(stage.evaluate)  # type: ignore[method-assign,assignment]
            for at in range(passes):
                calls = 0
                if lost == (at, 0):
                    raise WorkerLost("the driver was lost", cure="none")
                reports = local._run([core.validation_routine(job.steps, at) for core in local.cores])
                for report in reports:
                    for microbatch, content in report.outputs.items():
                        output_file(folder, microbatch).write_bytes(content)
                tell(
                    ValidationRecord(
                        step=job.steps + at, validation_loss=merge_validation_losses(reports), count=1.0, seconds=1.0
                    )
                )
            assert not list(outputs.iterdir())


def make_passes_here(monkeypatch: pytest.MonkeyPatch, microbatches: int, *meshes: Any, **more: Any) -> PassesInOneProcess:
    """Has runs be made in this process, with so many microbatches in a pass. The others: see `PassesInOneProcess`."""
    made = PassesInOneProcess(*meshes, **more)
    monkeypatch.setattr(forward_run, "run_passes", made)
    monkeypatch.setattr(forward_run, "MICROBATCHES_OF_PASS", microbatches)
    return made
