"""Trains a job from a job file in a new run folder."""

from __future__ import annotations

import contextlib
from typing import TYPE_CHECKING

from raypar.launch.chosen_plan import ChosenPlan, make_plan_chooser, plan_json
from raypar.launch.launch_run import launch_run
from raypar.launch.result import Result
from raypar.launch.result_neutral_options import EventHandler, result_neutral_options_from_job
from raypar.run_folder import RunFolder
from raypar.user_code import make_importable

if TYPE_CHECKING:
    from raypar.config import Job


def train_job_in_new_folder(
    job: Job, tell: EventHandler, *, stop_at_step: int | None = None, address: str | None = None, local_nodes: int = 1
) -> Result:
    """Train a job in a new run folder. `address`: the Ray cluster to join; `local_nodes`: of a local Ray cluster."""
    make_importable(job.source_dir)
    spec = job.to_spec()
    with contextlib.ExitStack() as stack:

        def create_folder(chosen: ChosenPlan) -> RunFolder:
            made = RunFolder.create(job.run_dir, job.name)
            with made.removed_if_filling_fails():
                made.job.write_text(job.to_yaml())
                stack.enter_context(made.hold_lock())
                made.plan.write_text(plan_json(chosen))
            return made

        options = result_neutral_options_from_job(job, create_folder, stop_at_step, address, local_nodes)
        return launch_run(spec, make_plan_chooser(job, spec), options, tell)
