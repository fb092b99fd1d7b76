"""The pydantic model of a job, `Job`: its keys and sections with their types, defaults and checks."""

from __future__ import annotations

import os
import re
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Annotated, Any, Literal

from pydantic import (
    BeforeValidator,
    Discriminator,
    Field,
    NonNegativeFloat,
    NonNegativeInt,
    PlainValidator,
    PositiveFloat,
    PositiveInt,
    PrivateAttr,
    Tag,
    field_validator,
    model_validator,
)

from raypar.errors import ConfigError, PlanError
from raypar.files.safe_yaml import dump_yaml, parse_yaml
from raypar.files.untrusted_files import shorten
from raypar.job.placement_section import PlacementConfig
from raypar.job.plain_values import is_importable_name, to_plain_values
from raypar.job.section import MAX_WORKERS, Section
from raypar.job.validation_errors import AUTO, GIVEN
from raypar.plan.parallel_plan import ParallelPlan, describe_mesh
from raypar.plan.recomputation import RecomputePolicy
from raypar.record.events import MAX_STEPS
from raypar.worker.autocast_precisions import PrecisionName
from raypar.worker.init_from_setting import InitialWeightsFile
from raypar.worker.job_spec import LOSS_OF_MODEL, DataSpec, JobSpec, OptimizerSpec, Precision, Ref, ValidationSpec

JOB_BYTES = 1 << 20
"""Size limit of a job file."""
MAX_PARTS, MAX_SAMPLES = 2**16, 2**24
"""Limits of numbers in a job file, because lists of that length are made: of microbatches, blocks or chunks of a step; of
samples of a step."""
Workers = Annotated[PositiveInt, Field(le=MAX_WORKERS)]
Parts = Annotated[PositiveInt, Field(le=MAX_PARTS)]


PathText = Annotated[str, BeforeValidator(lambda value: os.fspath(value) if isinstance(value, os.PathLike) else value)]
"""A path; from Python also a `pathlib.Path`."""


RUN_NAME = r"[A-Za-z0-9][\w.-]{0,99}"
"""What the name of a job must be, as a regular expression."""
RUN_NAME_CURE = "letters, digits, '.', '_' and '-' only: it names the run's folder"
"""The same, for messages."""


def is_run_name(text: str) -> bool:
    """Whether a text can name a run's folder."""
    return re.fullmatch(RUN_NAME, text) is not None


def _function(value: Any) -> Any:
    """`value`, if it is a callable or a text `module:name`. Raises `ValueError`."""
    if not callable(value) and not (isinstance(value, str) and is_importable_name(value)):
        raise ValueError("module:name, for example torch.optim:AdamW")
    return value


def _loss_function(value: Any) -> Any:
    """`value`, if it is a callable, a text `module:name`, or `model`. Raises `ValueError`."""
    return value if isinstance(value, str) and value == LOSS_OF_MODEL else _function(value)


class FunctionConfig(Section):
    """A function and its arguments: `{function: module:name, args: {...}}`, or just `module:name`."""

    function: Annotated[str | Callable[..., Any], PlainValidator(_function)]
    """`module:name` of the function or class; from Python also the callable itself."""
    args: dict[str, Any] = {}
    """Keyword arguments."""

    @model_validator(mode="before")
    @classmethod
    def _short(cls, value: Any) -> Any:
        if isinstance(value, tuple) and len(value) == 2 and isinstance(value[1], Mapping):
            return {"function": value[0], "args": dict(value[1])}
        return {"function": value} if isinstance(value, str) or callable(value) else value

    def to_ref(self) -> Ref:
        """The function as a `Ref`, for `JobSpec`."""
        return Ref(self.function, self.args)


class ModelConfig(FunctionConfig):
    """The function that builds the model, how a model that is an unmodified module is divided, and what its forward may do."""

    units: Annotated[tuple[str, ...], Field(strict=False)] = ()
    """Names of the modules, with `*` for any part, at which the model is divided into layers: each such module runs whole.
    Empty: the elements of the model's lists of modules, and what stands beside them."""
    buffers: Literal["refuse", "last", "sum"] = "refuse"
    """What becomes of a buffer that the forward writes in training. `refuse`: it is an error. `last`: the value that the last
    microbatch has written. `sum`: what all microbatches have added. Each microbatch begins with the value from the beginning of
    the step. (Running statistics of batch norms are always kept, as one process would.)"""


class LossConfig(FunctionConfig):
    """The loss function and its arguments, or `model`: the model computes the loss itself, and returns an object with it."""

    function: Annotated[str | Callable[..., Any], PlainValidator(_loss_function)]
    """`module:name` of the function or class; from Python also the callable itself; or `model`."""


class DataConfig(FunctionConfig):
    """The map-style data set of a job, and how its samples become the model's input and the loss's target."""

    input: str | None = None
    """The field of a sample that the first layer of a sequential model reads; None: `x`. (A module with a forward of its own
    gets the fields that have the names of its parameters.)"""
    target: str | None = None
    """The field of a sample that the loss gets as its target; None: `y`."""
    names: Annotated[tuple[str, ...], Field(strict=False)] = ()
    """Names of the fields of a sample that is a tuple; empty: `x`, `y`, `z`."""
    processes: Annotated[NonNegativeInt, Field(le=MAX_WORKERS)] = 0
    """Processes of each worker that load samples ahead of the steps, like a `DataLoader`'s `num_workers`; 0: the worker itself
    loads them."""

    def to_data(self) -> DataSpec:
        """The data set as a `DataSpec`, for `JobSpec`."""
        return DataSpec(self.to_ref(), self.names, self.input, self.target, self.processes)


class ValidationConfig(DataConfig):
    """The data set for validation, and when it is used."""

    every: NonNegativeInt = 0
    """Steps from one validation to the next; there is one at the end too. 0: at the end only."""
    samples: NonNegativeInt = 0
    """How many samples are used, from the first on; 0: all."""

    def to_validation(self, data: DataConfig) -> ValidationSpec:
        """The section as a `ValidationSpec`, for `JobSpec`. Its samples have the fields of `data`, unless it names them."""
        names, first, target = self.names or data.names, self.input or data.input, self.target or data.target
        return ValidationSpec(DataSpec(self.to_ref(), names, first, target, self.processes), self.every, self.samples)


class OptimizerConfig(FunctionConfig):
    """The optimizer class, its arguments, and groups of parameters with other arguments."""

    groups: Annotated[tuple[dict[str, Any], ...], Field(strict=False)] = ()
    """Parameters that get other arguments: `{match: "*.bias", weight_decay: 0.0}` for each group. A parameter belongs to the
    first group whose pattern matches its name."""

    @field_validator("groups")
    @classmethod
    def _match(cls, groups: tuple[dict[str, Any], ...]) -> tuple[dict[str, Any], ...]:
        if any(not isinstance(group.get("match"), str) for group in groups):
            raise ValueError("a list of {match: pattern, lr: ..., ...}; every group needs a match")
        return groups

    def to_optimizer(self) -> OptimizerSpec:
        """The optimizer as an `OptimizerSpec`, for `JobSpec`."""
        groups = tuple((g["match"], {k: v for k, v in g.items() if k != "match"}) for g in self.groups)
        return OptimizerSpec(self.to_ref(), groups)


def _counts(value: Any) -> Any:
    """`value`, if it is one count or a list with one count per stage. Raises `ValueError`."""
    each = value if isinstance(value, (list, tuple)) and value else [value]
    if any(not isinstance(count, int) or isinstance(count, bool) or count < 1 for count in each):
        raise ValueError("a number >= 1, or a list with one per stage")
    if sum(each) > MAX_WORKERS:
        raise ValueError(f"at most {MAX_WORKERS:,} in all")
    return tuple(value) if isinstance(value, (list, tuple)) else value


def _recompute_policy(value: Any) -> Any:
    """`value`, if it is `none`, `full` or a list of patterns. Raises `ValueError`."""
    if value in ("none", "full"):
        return value
    if not isinstance(value, (list, tuple)) or not value or not all(isinstance(pattern, str) and pattern for pattern in value):
        raise ValueError('none, full, or a list of patterns of layer names, for example ["block*"]')
    return tuple(value)


Counts = Annotated[Any, BeforeValidator(_counts)]
"""One count (int), or one per stage (tuple of int)."""


class PlanConfig(Section):
    """Which workers hold which layers, and in which order they compute."""

    stages: Workers = 1
    """Pipeline parallel: how many workers stand one behind the other, each with its part of the layers (with `chunks`: with
    several parts)."""
    replicas: Counts = 1
    """Data parallel: how many workers hold the same layers and compute different microbatches; one number, or a list with one
    per stage."""
    shards: Counts = 1
    """Tensor parallel: over how many workers the tensors of each layer are cut (this is not ZeRO or FSDP); one number, or a
    list with one per stage."""
    schedule: str = "1f1b"
    """The order in which a worker computes forwards and backwards; `afab` is another name of `gpipe`."""
    chunks: Parts | None = None
    """Stages of each worker (virtual pipeline stages); None: 2 with `interleaved` and `zb-v`, else 1."""
    cuts: Annotated[tuple[PositiveInt, ...] | None, Field(strict=False)] = None
    """Split points: the numbers of the first layers of stages 1, 2, ...; None: layers are timed, and divided so that the
    predicted step is shortest. Results do not depend on it."""
    schedule_file: PathText | None = None
    """A file with a schedule of your own, in place of `schedule`: a line for each worker, as `raypar simulate --csv` writes
    it."""
    warmup: Annotated[tuple[NonNegativeInt, ...] | None, Field(strict=False)] = None
    """For each stage: how many forwards a worker computes before its first backward; None: as the schedule has it."""
    styles: dict[str, str] = {}
    """How layers are cut over shards: pattern of layer names -> style, such as `"block*.up": column`. The first match counts;
    for other layers the style is inferred from their names."""
    sequence_parallel: bool = False
    """Whether values [batch, sequence, features] between sharded layers are cut along the sequence (sequence parallel)."""

    recompute: Annotated[Any, BeforeValidator(_recompute_policy)] = "none"
    """Activation checkpointing: layers whose activations are dropped after the forward and computed again for the backward, for
    less memory and more time, with the same results. `none`, `full`, or a list of patterns of layer names."""

    @property
    def replicas_per_stage(self) -> tuple[int, ...]:
        """Number of replicas of each worker position."""
        return self.replicas if isinstance(self.replicas, tuple) else (self.replicas,) * self.stages

    @property
    def shards_per_stage(self) -> tuple[int, ...]:
        """Number of shards of each worker position."""
        return self.shards if isinstance(self.shards, tuple) else (self.shards,) * self.stages

    @property
    def workers(self) -> int:
        """Number of workers of the plan."""
        return sum(r * s for r, s in zip(self.replicas_per_stage, self.shards_per_stage, strict=True))

    _parallel_plan: ParallelPlan | None = PrivateAttr(default=None)
    """The `ParallelPlan` that the section was made from, if it was."""

    @property
    def unwritable_parts(self) -> list[str]:
        """A line for each part of the section that no job file can express."""
        plan = self._parallel_plan
        if plan is None or not plan.recompute or self.recompute == "full":
            return []
        return [f"plan.recompute has numbers of layers, {list(plan.recompute)}: a job file has patterns of their names"]

    def describe(self) -> str:
        """The plan's shape as text: `2 stages x 2 replicas`."""
        return describe_mesh(self.replicas_per_stage, self.shards_per_stage)

    @model_validator(mode="after")
    def _fits(self) -> PlanConfig:
        from raypar.schedule.registry import resolve_chunks_per_worker

        for key in ("replicas", "shards", "warmup"):
            value = getattr(self, key)
            if isinstance(value, tuple) and len(value) != self.stages:
                raise PlanError(
                    f"plan.{key} has {len(value)} entries for {self.stages} stages", cure="give one number, or one per stage"
                )
        chunks = resolve_chunks_per_worker(self.schedule, self.chunks)
        if self.cuts is not None and len(self.cuts) != self.stages * chunks - 1:
            raise PlanError(
                f"plan.cuts has {len(self.cuts)} cuts for {self.stages * chunks} stages"
                + (f" ({self.stages} workers x {chunks} chunks)" if chunks > 1 else ""),
                cure=f"give {self.stages * chunks - 1}: the first layer of stages 1, 2, ...",
            )
        if self.schedule_file is not None and not Path(self.schedule_file).is_file():
            raise ConfigError(
                f"plan.schedule_file {shorten(self.schedule_file)} does not exist, or is no regular file",
                cure="give the path of a schedule file",
            )
        return self

    @classmethod
    def of_plan(cls, plan: ParallelPlan, schedule: str, **more: Any) -> PlanConfig:
        """The section for a whole plan, with `more` keys. Raises `PlanError` if `schedule` has the stages elsewhere."""
        shapes = {stage.position: (stage.replicas, stage.shards) for stage in plan.stages}
        replicas, shards = zip(*(shapes[position] for position in range(plan.positions)), strict=True)
        made = cls(
            stages=plan.positions,
            replicas=replicas[0] if len(set(replicas)) == 1 else replicas,
            shards=shards[0] if len(set(shards)) == 1 else shards,
            schedule=schedule,
            chunks=len(plan.stages) // plan.positions,
            cuts=tuple(stage.first for stage in plan.stages[1:]),
            recompute="full" if plan.recompute and len(plan.recompute) == plan.stages[-1].last else "none",
            **more,
        )
        positions, theirs = ([stage.position for stage in one.stages] for one in (plan, made.to_plan(plan.stages[-1].last)))
        if positions != theirs:
            raise PlanError(
                f"the plan has its stages on positions {positions}, and schedule {schedule} on {theirs}",
                cure="give schedule= the name of the schedule that the plan is for",
            )
        made._parallel_plan = plan
        return made

    def to_plan(self, layers: int) -> ParallelPlan:
        """The plan for a model with `layers` layers; without cuts, stages have nearly equal numbers of layers.

        Raises `PlanError` if the layers do not fill the stages.
        """
        from raypar.schedule.registry import placement_of_schedule, resolve_chunks_per_worker

        if self._parallel_plan is not None:
            if self._parallel_plan.stages[-1].last != layers:
                raise PlanError(
                    f"the plan is for {self._parallel_plan.stages[-1].last} layers, and the model has {layers}",
                    cure="make the plan for the model's layers, or give its section: plan={'stages': ...}",
                )
            return self._parallel_plan
        return ParallelPlan.of(
            self.replicas_per_stage,
            self.shards_per_stage,
            layers=layers,
            chunks=resolve_chunks_per_worker(self.schedule, self.chunks),
            placement=placement_of_schedule(self.schedule),
            cuts=self.cuts,
        )


class CheckpointConfig(Section):
    """When checkpoints are saved, and how many of them are kept."""

    every: NonNegativeInt = 0
    """Steps from one checkpoint to the next; 0: no checkpoint before the end."""
    keep: PositiveInt = 2
    """How many checkpoints are kept: the newest ones."""
    at_end: bool = True
    """Whether a checkpoint is saved at the end of the run."""


MIRROR_COST = 0.02
"""Share of the steps' time that the mirror may take, when `elastic.mirror` is auto."""


class ElasticConfig(Section):
    """How a run continues when workers are lost, and when workers join."""

    min_workers: PositiveInt = 1
    """The run begins with so many workers if no others have come for `grow_after_s`, and grows when others come. With fewer
    than this it waits for others, up to the job's `wait_for_workers_s`, at the beginning and later."""
    max_workers: Workers | None = None
    """Lost workers are replaced up to this number; None: as many as the plan has."""
    standbys: Annotated[NonNegativeInt, Field(le=MAX_WORKERS)] = 0
    """Extra workers that are started and wait, so that a lost worker is replaced at once."""
    grow_after_s: NonNegativeFloat = 5.0
    """Workers that join get work between two steps: when all of them have started, or this many seconds after the first one.
    They get none if moving the state to them takes more time than they save; beyond `standbys` they are then given back to the
    cluster."""
    step_deadline_s: PositiveFloat = 3.0
    """Seconds. A step counts as hung if it takes longer than this and longer than 5 times the longest of the last 100 steps;
    workers that do not answer then are given up. Up to two minutes in which a worker that answers pings reads samples do not
    count."""
    last_copy_wait_s: NonNegativeFloat = 600.0
    """How many more seconds a silent worker is waited for if it has the only copy of some state (a copy in the mirror counts as
    another one). The wait ends early if its process or its node is known to have ended."""
    mirror: Literal["auto", "off"] | PositiveInt = "auto"
    """Every how many steps each worker copies its state into the memory of another one, for the case that the last worker with
    some state is lost. `auto`: as often as 2 % of the time allows. `off`: never."""
    stragglers: Literal["report", "replace"] = "report"
    """What happens to a straggler (a slow worker): a line reports it, or it is replaced as soon as another worker can take its
    place."""
    straggler_times: Annotated[float, Field(gt=1)] = 1.5
    """A worker is a straggler if it computes more than this many times as long as its replicas, 20 steps in a row; a worker
    without replicas is compared with its own first 20 steps."""

    @field_validator("mirror", mode="before")
    @classmethod
    def _words(cls, value: Any) -> Any:
        """Undo what YAML makes of `off`: a truth value."""
        value = {False: "off", True: "auto"}[value] if isinstance(value, bool) else value
        if value not in ("auto", "off") and not (isinstance(value, int) and value > 0):
            raise ValueError("auto, off, or a number of steps")
        return value

    def to_policy_fields(self, wait_for_workers_s: float) -> dict[str, Any]:
        """The fields of `elastic.run_policy.RunPolicy` for an elastic run. Deadlines are short: a wrong suspicion costs a
        recovery only. `wait_for_workers_s`: the job's."""
        return {
            "elastic": True,
            "hires": True,
            "min_workers": self.min_workers,
            "max_workers": self.max_workers,
            "standbys": self.standbys,
            "grow_after_s": self.grow_after_s,
            "step_deadline_s": self.step_deadline_s,
            "step_deadline_times": 5.0,
            "capacity_s": wait_for_workers_s,
            "last_copy_wait_s": self.last_copy_wait_s,
            "replace_stragglers": self.stragglers == "replace",
            "straggler_times": self.straggler_times,
            "mirror_every": self.mirror if isinstance(self.mirror, int) else 0,
            "mirror_cost": MIRROR_COST if self.mirror == "auto" else 0.0,
        }

    @model_validator(mode="after")
    def _least_and_most(self) -> ElasticConfig:
        if self.max_workers is not None and self.min_workers > self.max_workers:
            raise ConfigError(
                f"elastic.min_workers is {self.min_workers} and elastic.max_workers is {self.max_workers}: there would "
                "never be workers enough",
                cure=f"set min_workers to {self.max_workers} or less, or max_workers to {self.min_workers} or more",
            )
        return self


def _switch(value: Any) -> Any:
    """The section that `elastic: true` (the defaults) or `elastic: false` (None) stands for. Raises `ConfigError` for a bare
    `elastic:`, which could be meant either way."""
    if value is None:
        raise ConfigError("elastic is empty", cure="write `elastic: {}` (or true) for the defaults, `elastic: false` for none")
    return ({} if value else None) if isinstance(value, bool) else value


class InitFromConfig(Section):
    """Weights to begin with: `{path: FILE, strip_prefix: "model.", ...}`, or just the path."""

    path: PathText
    """A .safetensors file, a folder with an index, a state_dict, an export, a checkpoint or a run of raypar."""
    strip_prefix: str = ""
    """Removed from the beginning of the file's names."""
    add_prefix: str = ""
    """Added before the file's names."""
    rename: dict[str, str] = {}
    """Regular expression -> replacement, for the file's names."""
    allow_missing: Annotated[tuple[str, ...], Field(strict=False)] = ()
    """Patterns of the model's names that may be missing in the file; they keep their own initial values."""
    allow_unexpected: Annotated[tuple[str, ...], Field(strict=False)] = ()
    """Patterns of the file's names that are not used."""

    @model_validator(mode="before")
    @classmethod
    def _short(cls, value: Any) -> Any:
        if isinstance(value, Mapping) and any(hasattr(part, "untyped_storage") for part in value.values()):
            raise ConfigError(
                f"init_from is a state_dict with {len(value)} entries: it must be a file or folder that workers can read",
                cure="save it (safetensors.torch.save_file(state, FILE)) and give the path, or load it in the model function",
            )
        return {"path": os.fspath(value)} if isinstance(value, (str, os.PathLike)) else value

    def to_source(self) -> InitialWeightsFile:
        """The section as a `InitialWeightsFile`, for `JobSpec`."""
        given = self.path, self.strip_prefix, self.add_prefix, tuple(self.rename.items())
        return InitialWeightsFile(*given, self.allow_missing, self.allow_unexpected)


class EarlyStoppingConfig(Section):
    """When a run stops early: if the validation loss has not fallen by more than `min_delta` for `patience` validations."""

    patience: PositiveInt = 3
    """Validations in a row without a lower loss after which the run stops."""
    min_delta: NonNegativeFloat = 0.0
    """How much the loss has to fall to count as lower."""


class TrackerConfig(Section):
    """An experiment tracker: `{tracker: tensorboard | wandb | mlflow, args: {...}}`, or just its name."""

    tracker: Literal["tensorboard", "wandb", "mlflow"]
    """The kind of tracker."""
    args: dict[str, Any] = {}
    """Arguments of the tracker's class."""

    @model_validator(mode="before")
    @classmethod
    def _short(cls, value: Any) -> Any:
        return {"tracker": value} if isinstance(value, str) else value


class PrecisionConfig(Section):
    """The dtypes in which a job computes, where they are others than its `dtype`."""

    compute: PrecisionName | None = None
    """`bf16`: layers and the loss run under `torch.autocast` to bfloat16, parameters, their gradients and the optimizer stay
    float32. None: everything is computed in `dtype`."""

    def to_precision(self) -> Precision:
        """The same for workers."""
        return Precision(self.compute)


class Job(Section):
    """A whole job: the keys of a job file, which are `Trainer`'s arguments too."""

    name: str = "run"
    """Name of the run and of its folder. A job file without it has the name of the file."""
    seed: int = 0
    """Seed of all random numbers of the job."""
    steps: Annotated[PositiveInt, Field(le=MAX_STEPS)]
    """Number of optimizer steps of the whole run."""
    batch_size: Annotated[PositiveInt, Field(le=MAX_SAMPLES)]
    """Samples of one step, over all workers (the global batch size)."""
    microbatches: Parts
    """Number of parts into which a batch is cut, as in gradient accumulation: replicas share them out, and the stages of a
    pipeline work on different ones at the same time."""
    virtual_replicas: Annotated[NonNegativeInt, Field(le=MAX_PARTS)] = 0
    """Blocks of consecutive microbatches. Gradients are summed inside each block first, then over the blocks in a fixed order,
    so results depend on this number, and not on how many replicas there are. A replica computes whole blocks: with more
    replicas than blocks some have no work. 0: one block for each microbatch, at most 16."""
    model: ModelConfig
    """The function that builds the model: it returns an `nn.Module`, a list of blocks or a `raypar.Graph`."""
    loss: LossConfig
    """The loss: a function of (output, target) that returns the mean over the samples, or (sum, count); or a loss module;
    `model`: the model's own loss."""
    data: DataConfig
    """The training data: a function or class that gives a map-style data set, and how its samples are used."""
    optimizer: OptimizerConfig = OptimizerConfig(function="torch.optim:AdamW")
    """The optimizer: a class of `torch.optim` or your own, with its arguments."""
    lr_schedule: FunctionConfig | None = None
    """A function of the step (from 0) that returns the factor on all learning rates; None: 1."""
    clip_norm: PositiveFloat | None = None
    """Largest norm of the whole gradient, as in `clip_grad_norm_`; None: it is not clipped."""
    validation: ValidationConfig | None = None
    """The validation data; None: no validation."""
    plan: Annotated[
        Annotated[Literal["auto"], Tag(AUTO)] | Annotated[PlanConfig, Tag(GIVEN)],
        Discriminator(lambda value: AUTO if isinstance(value, str) else GIVEN),
    ] = PlanConfig()
    """The parallel plan, of stages x replicas x shards workers, one of each without it; `auto`: the planner chooses it."""
    elastic: Annotated[ElasticConfig | None, BeforeValidator(_switch)] = None
    """How the run continues when workers are lost or join: keys as below, or `true` for the defaults; None, or `false`: a lost
    worker ends the run."""
    placement: PlacementConfig = PlacementConfig()
    """On which nodes of a cluster workers may be, and so which nodes an autoscaler adds; without it on any."""
    checkpoint: CheckpointConfig = CheckpointConfig()
    """When checkpoints are saved."""
    run_dir: PathText = "runs/"
    """The folder in which run folders are made, or the URI of a place on object storage (`s3://BUCKET/runs`). With workers on
    several machines it must be a place that all of them reach."""
    reduction: Literal["canonical", "fast"] = "canonical"
    """How gradients are summed. `canonical`: in an order that does not depend on the number of replicas and stages, so that
    results do not either. `fast`: in any order."""
    dtype: Literal["float32", "float64"] = "float32"
    """Type of the parameters, their gradients and the optimizer's state."""
    precision: PrecisionConfig | None = None
    """Mixed precision; None: everything is computed in `dtype`."""
    init: Literal["model", "by-name"] = "model"
    """Initial values of the parameters. `model`: those that the model function gives, after it was seeded with `seed`.
    `by-name`: those of every module's `reset_parameters()`, under a seed made from the module's name."""
    deferred_init: Literal["auto", "always", "never"] = "auto"
    """Whether the model function runs without memory for large tensors, so that a worker only ever holds the tensors that are
    its own. The values are the same. `auto`: if the model takes more than 1 GiB."""
    init_from: InitFromConfig | None = None
    """A file with weights to begin with; None: the values that `init` says."""
    device: Literal["cpu", "gpu"] = "cpu"
    """What workers compute on. Results on CPUs and GPUs differ."""
    threads: Annotated[PositiveInt, Field(le=MAX_WORKERS)] = 1
    """PyTorch threads of each worker."""
    non_finite: Literal["stop", "skip"] = "stop"
    """What happens at a loss or gradient norm that is NaN or infinite: the run fails, or the step changes no parameters."""
    max_time_s: PositiveFloat | None = None
    """Time after which the run saves and stops, in seconds."""
    early_stopping: EarlyStoppingConfig | None = None
    """When the run stops before its last step; None: it does not."""
    callbacks: Annotated[tuple[FunctionConfig, ...], Field(strict=False)] = ()
    """Functions or classes that make your callbacks, objects of classes derived from `raypar.Callback`."""
    trackers: Annotated[tuple[TrackerConfig, ...], Field(strict=False)] = ()
    """Experiment trackers that get the metrics."""
    wait_for_workers_s: NonNegativeFloat = 300.0
    """How many seconds the run waits for room for its workers on the cluster; later, with fewer than `elastic.min_workers`, for
    others."""
    trace_every: NonNegativeInt = 0
    """Every how many steps one is measured, instruction by instruction; the last one that was measured is drawn in
    `swimlane.svg`. 0: a few steps, the first and the last among them."""
    price_per_worker_hour: Annotated[PositiveFloat, Field(allow_inf_nan=False)] | None = None
    """What one worker costs an hour, in any currency, for the cost per sample among the metrics; None: it is not computed."""

    _source_dir: Path = PrivateAttr(default_factory=Path.cwd)

    @field_validator("name")
    @classmethod
    def _usable_as_folder(cls, name: str) -> str:
        if not is_run_name(name):
            raise ValueError(RUN_NAME_CURE)
        return name

    @model_validator(mode="after")
    def _fits(self) -> Job:
        self.to_spec().batching  # noqa: B018  raises PlanError when the microbatches do not fit the batch
        if self.precision is not None and self.precision.compute is not None and self.dtype != "float32":
            raise ConfigError(
                f"precision.compute is {self.precision.compute}, but dtype is {self.dtype}, which autocast leaves as it is",
                cure="set dtype: float32, or leave precision out",
            )
        if self.early_stopping is not None and (self.validation is None or not self.validation.every):
            raise ConfigError(
                "early_stopping needs validation losses",
                cure="set validation and validation.every, or leave early_stopping out",
            )
        return self

    @property
    def source_dir(self) -> Path:
        """The folder from which the job was loaded; its functions are imported from there."""
        return self._source_dir

    @property
    def plan_is_auto(self) -> bool:
        """Whether the planner chooses the plan."""
        return self.plan == "auto"

    @property
    def schedule_name(self) -> str:
        """The name of the job's schedule, or its file. Raises `PlanError` for `plan: auto`."""
        given = self._given_plan()
        return given.schedule_file or given.schedule

    @property
    def workers(self) -> int:
        """Number of workers of the plan; for `plan: auto` the number of processors of this machine."""
        return self.plan.workers if isinstance(self.plan, PlanConfig) else self.usable_processors

    @property
    def usable_processors(self) -> int:
        """Number of processors of this machine that this process may use."""
        return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1

    @property
    def leaves_cuts_open(self) -> bool:
        """Whether the job gives a plan without `cuts`, so that measured times decide them."""
        return isinstance(self.plan, PlanConfig) and self.plan.cuts is None

    def to_plan(self, layers: int) -> ParallelPlan:
        """The plan for a model with `layers` layers. Raises `PlanError`."""
        return self._given_plan().to_plan(layers)

    @property
    def recompute(self) -> RecomputePolicy:
        """Which layers the plan recomputes, as the job says it; `none` for `plan: auto`."""
        found: RecomputePolicy = self.plan.recompute if isinstance(self.plan, PlanConfig) else "none"
        return found

    def _given_plan(self) -> PlanConfig:
        """The section `plan`. Raises `PlanError` for `plan: auto`."""
        if not isinstance(self.plan, PlanConfig):
            raise PlanError(
                "plan is auto: there is no plan before the planner has run", cure="set plan.stages and plan.replicas"
            )
        return self.plan

    def to_spec(self) -> JobSpec:
        """The part of the job that workers need, as a `JobSpec`: nothing about the cluster."""
        plan = self.plan if isinstance(self.plan, PlanConfig) else PlanConfig()
        return JobSpec(
            name=self.name,
            seed=self.seed,
            steps=self.steps,
            batch_size=self.batch_size,
            microbatches=self.microbatches,
            virtual_replicas=self.virtual_replicas,
            model=self.model.to_ref(),
            units=self.model.units,
            loss=self.loss.to_ref(),
            data=self.data.to_data(),
            optimizer=self.optimizer.to_optimizer(),
            lr_schedule=self.lr_schedule.to_ref() if self.lr_schedule is not None else None,
            clip_norm=self.clip_norm,
            validation=self.validation.to_validation(self.data) if self.validation is not None else None,
            dtype=self.dtype,
            precision=self.precision.to_precision() if self.precision is not None else Precision(),
            init=self.init,
            deferred_init=self.deferred_init,
            init_from=self.init_from.to_source() if self.init_from is not None else None,
            buffers=self.model.buffers,
            device=self.device,
            threads=self.threads,
            reduction=self.reduction,
            non_finite=self.non_finite,
            styles=tuple(plan.styles.items()),
            sequence_parallel=plan.sequence_parallel,
        )

    def to_yaml(self) -> str:
        """The text of a job file that loads to this job, with all defaults written out; callables are written `module:name`,
        tuples among arguments as lists.

        Raises `ConfigError` that names every value that no text can stand for, such as a lambda or a data set object.
        """
        tree, unwritable = to_plain_values(self)
        if unwritable:
            raise ConfigError(
                f"the job cannot be written as a job file: {'; '.join(unwritable)}",
                cure="put functions and classes into a module that workers can import, and give what they need as args: "
                "numbers, texts, lists and dicts",
            )
        try:
            text = dump_yaml(tree)
            if len(text) > JOB_BYTES:
                raise ConfigError(f"{len(text):,} characters, and a job file has at most {JOB_BYTES:,}")
            parse_yaml(text, "the text")  # what would not be read is not written
        except (ConfigError, ValueError) as error:  # ValueError: a number of more digits than Python writes
            what = error.what if isinstance(error, ConfigError) else str(error)
            raise ConfigError(
                f"the job cannot be written as a job file: {what}",
                cure="have the functions read long lists and large values from a file that args names",
            ) from None
        return text


Section.root = Job
