"""Runs jobs: from a checked job to a finished run. The command line and `Trainer` both come through here."""

from raypar.launch.result import Result
from raypar.launch.resume import resume_job
from raypar.launch.run_failure import raise_run_failure
from raypar.launch.start_new_run import train_job_in_new_folder

__all__ = ["Result", "raise_run_failure", "resume_job", "train_job_in_new_folder"]
