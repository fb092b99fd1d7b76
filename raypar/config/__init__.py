"""What a job may say, in a job file or as `Trainer`'s arguments: one model checks both, and explains what is wrong.

No other package uses pydantic. This one imports neither torch nor ray, so that a wrong key is reported at once.
"""

from raypar.config.job import (
    CheckpointConfig,
    DataConfig,
    EarlyStoppingConfig,
    ElasticConfig,
    FunctionConfig,
    InitFromConfig,
    Job,
    OptimizerConfig,
    PlanConfig,
    PrecisionConfig,
    TrackerConfig,
    ValidationConfig,
)
from raypar.config.read_job import (
    RUN_ARGUMENTS,
    check_run_arguments,
    job_from_arguments,
    load_job,
    parse_job,
    parse_plan_section,
)

__all__ = [
    "RUN_ARGUMENTS",
    "CheckpointConfig",
    "DataConfig",
    "EarlyStoppingConfig",
    "ElasticConfig",
    "FunctionConfig",
    "InitFromConfig",
    "Job",
    "OptimizerConfig",
    "PlanConfig",
    "PrecisionConfig",
    "TrackerConfig",
    "ValidationConfig",
    "check_run_arguments",
    "job_from_arguments",
    "load_job",
    "parse_job",
    "parse_plan_section",
]
