"""From a checked job to a finished run; the command line and `Trainer` have no other way."""

from raypar.launch.new_run import run_job
from raypar.launch.result import Result, raise_failure
from raypar.launch.resume import resume_job

__all__ = ["Result", "raise_failure", "resume_job", "run_job"]
