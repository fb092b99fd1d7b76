"""Trains a job in a new run folder."""

from __future__ import annotations

import contextlib
import os
from typing import TYPE_CHECKING

from raypar.errors import ConfigError
from raypar.files.redact_secrets import find_secrets_in_job, redact_certain_secrets, secrets_of_environment
from raypar.files.safe_yaml import parse_yaml
from raypar.launch.choose_plan import ChosenPlan, make_plan_chooser, plan_json
from raypar.launch.launch_options import EventHandler, LaunchOptions
from raypar.launch.launch_run import launch_run, make_callbacks
from raypar.launch.result import CheckpointArgument, Result
from raypar.launch.resume import find_checkpoint, prepare_resumed_run
from raypar.launch.run_on_storage import new_run_on_storage
from raypar.launch.steps_of_epochs import with_steps_of_epochs
from raypar.record.events import Note, RunWarning
from raypar.storage.run_folder import RunFolder, check_run_dir_is_writable, parse_storage_location
from raypar.storage.s3_lease_store import check_run_dir_on_storage
from raypar.user_code.user_code_errors import make_importable

if TYPE_CHECKING:
    from raypar.job import Job


COMMANDS_WITHOUT_JOB = (
    "`raypar resume`, `evaluate` and `predict` will refuse it (Trainer, given the same arguments, does that), and "
    "`export --format hf` will need --model"
)
"""What cannot be done by a command with a run that has no job.yaml."""


def warnings_about_secrets(job_yaml: str | None) -> list[str]:
    """A warning for each text in a job file that looks like a secret: the run folder has a copy of the file."""
    if job_yaml is None:
        return []
    found = find_secrets_in_job(parse_yaml(job_yaml, "job.yaml"), secrets_of_environment(os.environ))
    return [
        f"{key} looks like a secret, and job.yaml in the run folder will have it\n  cure: have your function read it from an "
        "environment variable, and leave it out of the job"
        for key in found
    ]


def job_file_text(job: Job, tell: EventHandler) -> tuple[str | None, str]:
    """(the text of the run's job file, why there is none): one of them is None or empty. Why there is none is told, too."""
    try:
        return job.to_yaml(), ""
    except ConfigError as error:
        why = redact_certain_secrets(error.what, secrets_of_environment(os.environ))
        tell(Note(text=f"the run gets no job.yaml: {why}; {COMMANDS_WITHOUT_JOB}. To get one: {error.cure}"))
        return None, why


def train_job_in_new_folder(
    job: Job,
    tell: EventHandler,
    *,
    stop_at_step: int | None = None,
    address: str | None = None,
    local_nodes: int = 1,
    workers: int | None = None,
    resume_from: CheckpointArgument | None = None,
) -> Result:
    """Train a job in a new run folder. The folder has a job file, or a text that says which objects no file can name.

    `address`: the Ray cluster to join; `local_nodes`: of a local Ray cluster; `workers`: the most that `plan: auto` may use;
    `resume_from`: what `find_checkpoint` takes; training continues after its steps.
    """
    make_importable(job.source_dir)
    job = with_steps_of_epochs(job, tell)
    shared = parse_storage_location(job.run_dir, "run_dir")
    if shared is not None:
        check_run_dir_on_storage(shared)
    else:
        check_run_dir_is_writable(job.run_dir, job.name)
    job_yaml, why_no_job = job_file_text(job, tell)
    if "plan" not in job.model_fields_set and job.usable_processors > 1:
        text = f"no plan is given: one worker; plan auto uses as many of the {job.usable_processors} processors as help"
        tell(Note(text=text))
    for line in warnings_about_secrets(job_yaml):
        tell(RunWarning(text=line))
    with contextlib.ExitStack() as stack:

        def create_folder(chosen: ChosenPlan) -> RunFolder:
            if shared is None:
                made = RunFolder.create(job.run_dir, job.name)
            else:
                made = stack.enter_context(new_run_on_storage(shared, job.name, tell))
            with made.removed_if_filling_fails():
                if job_yaml is not None:
                    made.job.write_text(job_yaml)
                    stack.enter_context(made.hold_lock())
                else:
                    made.why_no_job.write_text(why_no_job)
                made.plan.write_text(plan_json(chosen))
            return made

        options = LaunchOptions(
            job,
            create_folder,
            stop_at_step=stop_at_step,
            address=address,
            local_nodes=local_nodes,
            callbacks=make_callbacks(job),
        )
        choose = make_plan_chooser(job, workers)
        if resume_from is not None:
            options, choose = prepare_resumed_run(find_checkpoint(resume_from, tell, job.run_dir), options, choose, tell)
        return launch_run(choose, options, tell)
