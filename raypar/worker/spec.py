"""The former place of `raypar.worker.job_spec`, for driver scripts of before; it goes with the next release."""

from raypar.worker.job_spec import DataSpec, JobSpec, OptimizerSpec, Ref, ValidationSpec

__all__ = ["DataSpec", "JobSpec", "OptimizerSpec", "Ref", "ValidationSpec"]
