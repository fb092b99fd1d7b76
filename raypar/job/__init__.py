"""What a job is: one tree of sections, which checks job files and `Trainer`'s arguments, and which driver and workers get too.

No other package uses pydantic. This one imports neither torch nor ray, so that a wrong key is reported at once.
"""

from raypar.job.average_section import AverageConfig as AverageConfig
from raypar.job.checkpoint_section import CheckpointConfig as CheckpointConfig
from raypar.job.data_section import DataConfig as DataConfig
from raypar.job.data_section import PackConfig as PackConfig
from raypar.job.data_section import PadConfig as PadConfig
from raypar.job.data_section import ValidationConfig as ValidationConfig
from raypar.job.data_section import WeightsConfig as WeightsConfig
from raypar.job.early_stopping_section import EarlyStoppingConfig as EarlyStoppingConfig
from raypar.job.elastic_section import ElasticConfig as ElasticConfig
from raypar.job.function_section import FunctionConfig as FunctionConfig
from raypar.job.function_section import LossConfig as LossConfig
from raypar.job.function_section import LrScheduleConfig as LrScheduleConfig
from raypar.job.function_section import ModelConfig as ModelConfig
from raypar.job.function_section import OptimizerConfig as OptimizerConfig
from raypar.job.function_section import OptimizerEntry as OptimizerEntry
from raypar.job.function_section import SingleOptimizerConfig as SingleOptimizerConfig
from raypar.job.init_from_section import InitFromConfig as InitFromConfig
from raypar.job.job import Job as Job
from raypar.job.metrics_section import MetricConfig as MetricConfig
from raypar.job.placement_section import PlacementConfig as PlacementConfig
from raypar.job.plan_section import PlanConfig as PlanConfig
from raypar.job.precision_section import LossScaleConfig as LossScaleConfig
from raypar.job.precision_section import PrecisionConfig as PrecisionConfig
from raypar.job.tracker_section import TrackerConfig as TrackerConfig
