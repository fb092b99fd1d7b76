"""The configuration of a job: one pydantic model checks job files and `Trainer`'s arguments, with the same errors.

No other package uses pydantic. This one imports neither torch nor ray, so that a wrong key is reported at once.
"""

from raypar.config.job import CheckpointConfig as CheckpointConfig
from raypar.config.job import DataConfig as DataConfig
from raypar.config.job import EarlyStoppingConfig as EarlyStoppingConfig
from raypar.config.job import ElasticConfig as ElasticConfig
from raypar.config.job import FunctionConfig as FunctionConfig
from raypar.config.job import InitFromConfig as InitFromConfig
from raypar.config.job import Job as Job
from raypar.config.job import LossConfig as LossConfig
from raypar.config.job import ModelConfig as ModelConfig
from raypar.config.job import OptimizerConfig as OptimizerConfig
from raypar.config.job import PlanConfig as PlanConfig
from raypar.config.job import PrecisionConfig as PrecisionConfig
from raypar.config.job import TrackerConfig as TrackerConfig
from raypar.config.job import ValidationConfig as ValidationConfig
from raypar.config.placement_section import PlacementConfig as PlacementConfig
from raypar.config.read_job import RUN_ARGUMENTS as RUN_ARGUMENTS
from raypar.config.read_job import check_run_arguments as check_run_arguments
from raypar.config.read_job import job_from_argument_tree as job_from_argument_tree
from raypar.config.read_job import load_job as load_job
from raypar.config.read_job import parse_job as parse_job
from raypar.config.read_job import parse_plan_section as parse_plan_section
