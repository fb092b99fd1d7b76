"""The public names as editors and type checkers see them; `__init__.py` imports them when they are asked for."""

from raypar import callbacks as callbacks
from raypar import errors as errors
from raypar.callbacks import Callback as Callback
from raypar.callbacks import EarlyStopping as EarlyStopping
from raypar.callbacks import StepInfo as StepInfo
from raypar.callbacks import Stop as Stop
from raypar.callbacks import ValidationInfo as ValidationInfo
from raypar.errors import RayparError as RayparError
from raypar.job import Job as Job
from raypar.launch.load_model import load as load
from raypar.launch.result import Result as Result
from raypar.model.graph import Graph as Graph
from raypar.model.graph import Layer as Layer
from raypar.plan import ParallelPlan as ParallelPlan
from raypar.plan import StagePlan as StagePlan
from raypar.trainer import Trainer as Trainer

__version__: str
