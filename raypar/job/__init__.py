"""The configuration of a job: one pydantic model checks job files and `Trainer`'s arguments, with the same errors.

No other package uses pydantic. This one imports neither torch nor ray, so that a wrong key is reported at once.
"""

from raypar.job.job import CheckpointConfig as CheckpointConfig
from raypar.job.job import DataConfig as DataConfig
from raypar.job.job import EarlyStoppingConfig as EarlyStoppingConfig
from raypar.job.job import ElasticConfig as ElasticConfig
from raypar.job.job import FunctionConfig as FunctionConfig
from raypar.job.job import InitFromConfig as InitFromConfig
from raypar.job.job import Job as Job
from raypar.job.job import LossConfig as LossConfig
from raypar.job.job import ModelConfig as ModelConfig
from raypar.job.job import OptimizerConfig as OptimizerConfig
from raypar.job.job import PlanConfig as PlanConfig
from raypar.job.job import PrecisionConfig as PrecisionConfig
from raypar.job.job import TrackerConfig as TrackerConfig
from raypar.job.job import ValidationConfig as ValidationConfig
from raypar.job.placement_section import PlacementConfig as PlacementConfig
from raypar.job.read_job import RUN_ARGUMENTS as RUN_ARGUMENTS
from raypar.job.read_job import check_run_arguments as check_run_arguments
from raypar.job.read_job import job_from_argument_tree as job_from_argument_tree
from raypar.job.read_job import load_job as load_job
from raypar.job.read_job import parse_job as parse_job
from raypar.job.read_job import parse_plan_section as parse_plan_section
