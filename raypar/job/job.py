"""A whole job, `Job`: its keys and sections with their types, defaults and checks, and what each key is for."""

from __future__ import annotations

import math
import os
import re
from collections.abc import Iterable, Mapping, Sequence
from fractions import Fraction
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal, TypeVar

from pydantic import (
    BeforeValidator,
    Discriminator,
    Field,
    NonNegativeFloat,
    NonNegativeInt,
    PositiveFloat,
    PositiveInt,
    PrivateAttr,
    Tag,
    field_validator,
    model_validator,
)
from pydantic_core import PydanticCustomError

from raypar.errors import ConfigError, PlanError
from raypar.files.printable_text import shorten
from raypar.files.safe_yaml import dump_yaml, parse_yaml
from raypar.job.average_section import AverageConfig
from raypar.job.checkpoint_section import CheckpointConfig
from raypar.job.data_section import DataConfig, PackConfig, ValidationConfig, ValidationSetConfig
from raypar.job.early_stopping_section import EarlyStoppingConfig
from raypar.job.elastic_section import ElasticConfig, switch
from raypar.job.function_section import (
    FunctionConfig,
    LossConfig,
    LrScheduleConfig,
    ModelConfig,
    OptimizerConfig,
    OptimizerEntry,
    SingleOptimizerConfig,
)
from raypar.job.init_from_section import InitFromConfig
from raypar.job.key import BITS, BITS_FROM_A_STEP_ON, BITS_OF_CUT_LAYERS, CLIENT, DRIVER, WORKERS, WORKERS_AND_DRIVER, project
from raypar.job.lr_schedule_metric import FollowedMetric
from raypar.job.metrics_section import MetricConfig, check_metric_is_computed, check_metric_names, mode_of
from raypar.job.placement_section import PlacementConfig
from raypar.job.plan_section import DividedOrWhole, PlanConfig
from raypar.job.precision_and_plan_names import AUTO, GIVEN
from raypar.job.precision_section import PrecisionConfig, check_precision
from raypar.job.section import MAX_PARTS, MAX_WORKERS, Parts, PathText, Section
from raypar.job.tracker_section import TrackerConfig
from raypar.plan.forward_pass_batching import ForwardPasses
from raypar.plan.loss_scale import LossScaling
from raypar.plan.microbatches import MAX_STEPS, BatchesOfSteps, Microbatches
from raypar.plan.offloading import HOST, OffloadPolicy
from raypar.plan.parallel_plan import ParallelPlan
from raypar.plan.recomputation import RecomputePolicy
from raypar.record.metric_names import is_of_validation, name_in_validation

if TYPE_CHECKING:
    from raypar.record.best_checkpoint_rules import BestRule

T = TypeVar("T")

_NO_LENGTH = object()
"""Stands for `steps` where a job gives neither steps nor epochs."""
STEPS_OF_JOB = "job.steps"
"""Stands for the number of steps among the arguments of `lr_schedule`."""
JOB_BYTES = 1 << 20
"""Size limit of a job file."""
MAX_SAMPLES = 2**24
"""Limit on the samples of a step in a job file: lists of that length are made."""


RUN_NAME = r"[A-Za-z0-9][\w.-]{0,99}"
"""What the name of a job must be, as a regular expression."""
RUN_NAME_CURE = "letters, digits, '.', '_' and '-' only: it names the run's folder"
"""The same, for messages."""


def is_run_name(text: str) -> bool:
    """Whether a text can name a run's folder."""
    return re.fullmatch(RUN_NAME, text) is not None


class Job(Section):
    """A whole job: the keys of a job file, which are `Trainer`'s arguments too."""

    name: Annotated[str, WORKERS] = "run"
    """Name of the run and of its folder. A job file without it has the name of the file."""
    seed: Annotated[int, BITS] = 0
    """Seed of all random numbers of the job."""
    steps: Annotated[PositiveInt, Field(le=MAX_STEPS), WORKERS] = None  # type: ignore[assignment]  # until epochs are counted
    """Number of optimizer steps of the whole run. Either it or `epochs` is given."""
    epochs: Annotated[Annotated[PositiveFloat, Field(allow_inf_nan=False)] | None, CLIENT] = None
    """Number of passes over `data`, in place of `steps`: so many steps of `batch_size` samples as reach them, parts of epochs
    too; with `data.drop_last` an epoch is its whole batches."""
    batch_size: Annotated[PositiveInt, Field(le=MAX_SAMPLES), BITS_FROM_A_STEP_ON]
    """Samples of one step, over all workers (the global batch size)."""
    microbatches: Annotated[Parts, BITS_FROM_A_STEP_ON]
    """Number of parts into which a batch is cut, as in gradient accumulation: replicas share them out, and the stages of a
    pipeline work on different ones at the same time."""
    virtual_replicas: Annotated[NonNegativeInt, Field(le=MAX_PARTS), BITS_FROM_A_STEP_ON] = 0
    """Blocks of consecutive microbatches. Gradients are summed inside each block first, then over the blocks in a fixed order,
    so results depend on this number, and not on how many replicas there are. A replica computes whole blocks: with more
    replicas than blocks some have no work. 0: one block for each microbatch, at most 16."""
    virtual_shards: Annotated[NonNegativeInt, Field(le=MAX_PARTS), BITS_OF_CUT_LAYERS] = 0
    """Into how many parts the tensors of layers are cut, whatever `plan.shards` is, which divides it: a worker computes several
    of these, and results depend on this number, not on how many shards there are. So an elastic run may lose and gain shards
    with the same results, and `plan: auto` may choose them. 0: as many as the plan has shards, so that other shards give other
    results."""
    model: Annotated[ModelConfig, BITS]
    """The function that builds the model: it returns an `nn.Module`, a list of blocks or a `raypar.Graph`."""
    loss: Annotated[LossConfig, BITS]
    """The loss: a function of (output, target) that returns the mean over the samples, or (sum, count); or a loss module;
    `model`: the model's own loss."""
    data: Annotated[DataConfig, BITS_FROM_A_STEP_ON]
    """The training data: a function or class that gives a map-style data set, and how its samples are used."""
    optimizer: Annotated[OptimizerConfig, BITS_FROM_A_STEP_ON] = OptimizerConfig.model_construct(function="torch.optim:AdamW")
    """The optimizer: a class of `torch.optim` or your own, with its arguments; or a list of several, each with the pattern of
    the parameters that it trains."""
    lr_schedule: Annotated[LrScheduleConfig | None, BITS_FROM_A_STEP_ON] = None
    """A function of the step (from 0) that returns the factor on all learning rates; or a scheduler of
    `torch.optim.lr_scheduler` or `transformers`, or a function of the optimizer that makes one, which makes one step after each
    step of the optimizer, or with `metric` after each validation. Among `args` the text `job.steps` stands for the number of
    steps. None: the factor is 1."""
    clip_norm: Annotated[PositiveFloat | None, BITS_FROM_A_STEP_ON] = None
    """Largest norm of the whole gradient, as in `clip_grad_norm_`; None: it is not clipped."""
    validation: Annotated[ValidationConfig | None, WORKERS] = None
    """The validation data; None: no validation."""
    metrics: Annotated[dict[str, MetricConfig], WORKERS] = {}
    """Name -> metric, which is computed in every validation: a function, a class or, from Python, an object. Its values are
    called `validation_NAME`, those of one of several validation sets `validation/SET/NAME`."""
    metrics_every: Annotated[NonNegativeInt, WORKERS_AND_DRIVER] = 0
    """Every how many steps the metrics are computed in training too, of the samples of the step, as the model is before its
    update; their values are called `NAME`. 0: in validations only."""
    plan: Annotated[
        Annotated[Literal["auto"], Tag(AUTO)] | Annotated[PlanConfig, Tag(GIVEN)],
        Discriminator(lambda value: AUTO if isinstance(value, str) else GIVEN),
        CLIENT,
    ] = PlanConfig.model_construct()
    """The parallel plan, of stages x replicas x shards workers, one of each without it; `auto`: the planner chooses it."""
    elastic: Annotated[ElasticConfig | None, BeforeValidator(switch), CLIENT] = None
    """How the run continues when workers are lost or join: keys as below, or `true` for the defaults; None, or `false`: a lost
    worker ends the run."""
    placement: Annotated[PlacementConfig, CLIENT] = PlacementConfig.model_construct()
    """On which nodes of a cluster workers may be, and so which nodes an autoscaler adds; without it on any."""
    checkpoint: Annotated[CheckpointConfig, DRIVER] = CheckpointConfig.model_construct()
    """When checkpoints are saved."""
    average: Annotated[AverageConfig | None, BITS_FROM_A_STEP_ON] = None
    """A moving average of the weights beside them, in checkpoints too: `raypar export --average`. None: there is none."""
    run_dir: Annotated[PathText, CLIENT] = "runs/"
    """The folder in which run folders are made, or the URI of a place on object storage (`s3://BUCKET/runs`). With workers on
    several machines it must be a place that all of them reach."""
    reduction: Annotated[Literal["canonical", "fast"], BITS] = "canonical"
    """How gradients are summed. `canonical`: in an order that does not depend on the number of replicas and stages, so that
    results do not either. `fast`: in any order, on GPUs NCCL's own, which the run calls not bit-identical."""
    dtype: Annotated[Literal["float32", "float64"], BITS] = "float32"
    """Type of the parameters, their gradients and the optimizer's state."""
    precision: Annotated[PrecisionConfig | None, BITS] = None
    """Mixed precision; None: everything is computed in `dtype`."""
    init: Annotated[Literal["model", "by-name"], WORKERS] = "model"
    """Initial values of the parameters. `model`: those that the model function gives, after it was seeded with `seed`.
    `by-name`: those of every module's `reset_parameters()`, under a seed made from the module's name."""
    deferred_init: Annotated[Literal["auto", "always", "never"], WORKERS] = "auto"
    """Whether the model function runs without memory for large tensors, so that a worker only ever holds the tensors that are
    its own. The values are the same. `auto`: if the model takes more than 1 GiB."""
    init_from: Annotated[InitFromConfig | None, WORKERS] = None
    """A file with weights to begin with; None: the values that `init` says."""
    device: Annotated[Literal["cpu", "gpu"], BITS] = "cpu"
    """What workers compute on. Results on CPUs and GPUs differ."""
    threads: Annotated[PositiveInt, Field(le=MAX_WORKERS), BITS] = 1
    """PyTorch threads of each worker."""
    non_finite: Annotated[Literal["stop", "skip"], BITS] = "stop"
    """What happens at a loss or gradient norm that is NaN or infinite: the run fails, or the step changes no parameters."""
    max_time_s: Annotated[PositiveFloat | None, DRIVER] = None
    """Time after which the run saves and stops, in seconds."""
    early_stopping: Annotated[EarlyStoppingConfig | None, CLIENT] = None
    """When the run stops before its last step; None: it does not."""
    callbacks: Annotated[tuple[FunctionConfig, ...], Field(strict=False), CLIENT] = ()
    """Functions or classes that make your callbacks, objects of classes derived from `raypar.Callback`."""
    trackers: Annotated[tuple[TrackerConfig, ...], Field(strict=False), CLIENT] = ()
    """Experiment trackers that get the metrics."""
    wait_for_workers_s: Annotated[NonNegativeFloat, DRIVER] = 300.0
    """How many seconds the run waits for room for its workers on the cluster; later, with fewer than `elastic.min_workers`, for
    others."""
    trace_every: Annotated[NonNegativeInt, CLIENT] = 0
    """Every how many steps one is measured, instruction by instruction; the last one that was measured is drawn in
    `swimlane.svg`. 0: a few steps, the first and the last among them."""
    price_per_worker_hour: Annotated[Annotated[PositiveFloat, Field(allow_inf_nan=False)] | None, DRIVER] = None
    """What one worker costs an hour, in any currency, for the cost per sample among the metrics; None: it is not computed."""

    _source_dir: Path = PrivateAttr(default_factory=Path.cwd)
    _former_batches: tuple[BatchesOfSteps, ...] = PrivateAttr(default=())
    _forward_passes: ForwardPasses | None = PrivateAttr(default=None)
    _unsaved: frozenset[str] = PrivateAttr(default=frozenset())
    _undivided: frozenset[str] = PrivateAttr(default=frozenset())

    @model_validator(mode="before")
    @classmethod
    def _has_length(cls, tree: T) -> T | dict[str, Any]:
        """`tree` with a mark in the place of `steps` if there are neither steps nor epochs."""
        if not isinstance(tree, Mapping) or tree.get("steps") is not None:
            return tree
        rest = {key: value for key, value in tree.items() if key != "steps"}
        return rest if tree.get("epochs") is not None else {**rest, "steps": _NO_LENGTH}

    @model_validator(mode="before")
    @classmethod
    def _begins_with_folder(cls, tree: T) -> T | dict[str, Any]:
        """`tree` with the weights of `model.pretrained` as `init_from`, unless it says otherwise."""
        model = tree.get("model") if isinstance(tree, Mapping) else None
        folder = model.get("pretrained") if isinstance(model, Mapping) else getattr(model, "pretrained", None)
        if folder is None or not isinstance(tree, Mapping) or tree.get("init_from") is not None:
            return tree
        return {**tree, "init_from": folder}

    @field_validator("steps", mode="before")
    @classmethod
    def _steps(cls, value: T) -> T:
        if value is _NO_LENGTH:
            raise PydanticCustomError("missing", "Field required")
        return value

    @field_validator("name")
    @classmethod
    def _usable_as_folder(cls, name: str) -> str:
        if not is_run_name(name):
            raise ValueError(RUN_NAME_CURE)
        return name

    def _check_scattered_gradients(self, plan: PlanConfig) -> None:
        """Raise `PlanError` for keys with which gradients cannot be scattered."""
        if plan.gradients == "scatter" and self.reduction == "fast":
            raise PlanError(
                "plan.gradients: scatter and reduction: fast exclude each other: owners add scattered gradients in the "
                "canonical order, which costs nothing there",
                cure="leave reduction out, or set plan.gradients: fold",
            )

    def _check_activations_place(self) -> None:
        """Raise `ConfigError` for a place of activations that the device does not have."""
        where = self.activations_in
        if where == HOST and self.device == "cpu":
            raise ConfigError(
                "plan.activations_in is host, and device is cpu: activations lie in the host's memory already",
                cure="give a folder on a local disk, or leave plan.activations_in out",
            )
        if where not in (None, HOST) and self.device != "cpu":
            raise ConfigError(
                f"plan.activations_in is {shorten(where)}, and device is {self.device}: activations of GPUs go to the host's "
                "memory, and not to files",
                cure=f"set plan.activations_in: {HOST}, or leave it out",
            )

    @model_validator(mode="after")
    def _fits(self) -> Job:
        blocks = self.batching.blocks  # raises PlanError when the microbatches do not fit the batch
        if isinstance(self.plan, PlanConfig):
            self.plan.check_shares(blocks, self.virtual_shards)
            self._check_scattered_gradients(self.plan)
        if self.epochs is not None and self.data.mix:
            raise ConfigError(
                f"epochs is {self.epochs:g}, and data.mix has sources that end at different places",
                cure="set steps in the place of epochs",
            )
        if self.epochs is not None and self.steps is not None:
            raise ConfigError(
                f"steps is {self.steps} and epochs is {self.epochs:g}, and either of them is the length of the run",
                cure="leave one of them out",
            )
        check_precision(self.precision if self.precision is not None else PrecisionConfig(), self.dtype)
        if self.optimizer_in is not None and self.device != "cpu":
            raise ConfigError(
                f"plan.optimizer_in is {shorten(self.optimizer_in)}, and device is {self.device}: files can hold what a "
                "processor steps, and a GPU steps what is in its own memory",
                cure="leave plan.optimizer_in out; plan.zero divides the optimizer's state over replicas",
            )
        self._check_activations_place()
        packs = any(one.pack is not None for one in (self.data, *self.validation_sets.values()))
        if packs and self.loss.is_loss_of_model and self.loss.count is None:
            raise ConfigError(
                "data.pack, and loss: model: rows have unequal numbers of labels, and whether the model compares a token with "
                "the next one, which may be another document's, is not said",
                cure="set loss: {function: model, count: shifted_labels} (causal language models of transformers), or count: "
                "labels",
            )
        check_metric_names(self.metrics)
        self.check_sets()
        if self.metrics_every and not self.metrics:
            raise ConfigError(
                f"metrics_every is {self.metrics_every}, and the job has no metrics", cure="set metrics, or leave it out"
            )
        self._check_metrics_are_measured()
        if self.checkpoint.only == "trained" and self.init_from is None:
            raise ConfigError(
                "checkpoint.only is trained, and nothing says where the frozen values come from again",
                cure="set model.pretrained, or init_from: the weights with which the run begins",
            )
        if self.metrics_every and not self.measured_in_training:
            raise ConfigError(
                f"metrics_every is {self.metrics_every}, and the metrics ({', '.join(self.metrics)}) are of all samples of a "
                "validation",
                cure="leave metrics_every out, or give a metric that measures each microbatch",
            )
        self._check_choices()
        return self

    def check_sets(self) -> None:
        """Raises `ConfigError` for metrics of a validation set that the job does not have."""
        for of_set, one in self.validation_sets.items():
            key = f"validation.{of_set}.metrics" if of_set else "validation.metrics"
            for name in one.metrics or ():
                if name not in self.metrics:
                    raise ConfigError(
                        f"{key} names {name!r}, which is none of the job's metrics",
                        cure=f"it is one of {', '.join(self.metrics)}" if self.metrics else "add it to metrics",
                    )

    def _check_metrics_are_measured(self) -> None:
        """Raises `ConfigError` for metrics that neither training nor a validation set has."""
        of_sets = {name for of_set in self.validation_sets for name in self.metrics_of_set(of_set)}
        names = ", ".join(name for name in self.metrics if name not in of_sets | self.measured_in_training)
        if names and self.validation is None:
            raise ConfigError(
                f"metrics ({names}) are computed in validations, which the job does not have",
                cure="set validation, or metrics_every: 1 for metrics of every step in training, or leave metrics out",
            )
        if names:
            raise ConfigError(
                f"metrics ({names}) are among those of no validation set",
                cure="name them in the metrics of a set, set metrics_every: 1 for metrics of every step in training, or leave "
                "them out",
            )

    @property
    def measured_in_training(self) -> frozenset[str]:
        """The names of the metrics that are computed in training too."""
        return frozenset(name for name, metric in self.metrics.items() if self.metrics_every and metric.of == "microbatch")

    def _check_choices(self) -> None:
        """Raises `ConfigError` for metrics in `early_stopping`, `checkpoint.best` and `lr_schedule` that nobody computes."""
        if (followed := self.followed_metric) is not None:
            if not is_of_validation(followed):
                raise ConfigError(
                    f"lr_schedule.metric is {followed}, which is not measured in validations",
                    cure="give validation_loss, validation_NAME for one of metrics, or validation/SET/NAME for one of several "
                    "sets",
                )
            self.check_metric_has_values(followed, "lr_schedule.metric")
        stopping = self.early_stopping
        if stopping is not None:
            self.check_metric_has_values(stopping.metric, "early_stopping", others_add=bool(self.callbacks))
            mode_of(stopping.metric, stopping.mode, "early_stopping")
        for best in self.checkpoint.best:
            if not self.callbacks:  # which may add metrics
                check_metric_is_computed(best.metric, self.series, "checkpoint.best")
            mode_of(best.metric, best.mode, "checkpoint.best")

    def check_metric_has_values(self, metric: str, key: str, *, others_add: bool = False) -> None:
        """Raises `ConfigError` for a metric that has no value before the end of the run. `others_add`: whether callbacks may
        add metrics."""
        if is_of_validation(metric) and (self.validation is None or not self.validation.every):
            raise ConfigError(f"{key} needs validation losses", cure=f"set validation and validation.every, or leave {key} out")
        if not others_add:
            check_metric_is_computed(metric, self.series, key)

    @property
    def followed_metric(self) -> str | None:
        """The metric of validations that the learning rates follow; None: they are a function of the step."""
        return self.lr_schedule.metric if self.lr_schedule is not None else None

    def make_followed_metric(self, values: Mapping[int, float]) -> FollowedMetric | None:
        """The metric that the learning rates follow, if they do. `values`: number of steps done -> value, of validations
        before the run."""
        if self.followed_metric is None or self.validation is None:
            return None
        return FollowedMetric(self.followed_metric, self.validation.every, dict(values))

    @property
    def series(self) -> frozenset[str]:
        """The names of all numbers that the run records by step, except for those that callbacks add."""
        validated = {name_in_validation("loss")} if self.validation is not None else set()
        for of_set in self.validation_sets:
            validated |= {name_in_validation(name, of_set) for name in ("loss", *self.metrics_of_set(of_set))}
        return frozenset({"loss", "norm", "lr", *validated, *self.measured_in_training})

    @property
    def best_rules(self) -> list[BestRule]:
        """By which metrics checkpoints are kept."""
        from raypar.record.best_checkpoint_rules import BestRule

        return [
            BestRule(best.metric, mode_of(best.metric, best.mode, "checkpoint.best"), best.keep)
            for best in self.checkpoint.best
        ]

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
        return isinstance(self.plan, PlanConfig) and self.plan.cuts is None and not self.plan.placements

    def to_plan(self, layers: int | Sequence[str]) -> ParallelPlan:
        """The plan for a model with these layers (names, or how many). Raises `PlanError`."""
        plan = self._given_plan().to_plan(layers)
        for index, stage in enumerate(plan.stages):
            if stage.division and stage.virtual_shards != self.virtual_shards:
                raise PlanError(
                    f"the plan divides {stage.virtual_shards} virtual shards over the shards of stage {index}, and "
                    f"virtual_shards is {self.virtual_shards}",
                    cure=f"set virtual_shards to {stage.virtual_shards}, or leave the plan's divisions out",
                )
        return plan.with_virtual_shards(self.virtual_shards) if self.virtual_shards else plan

    @property
    def recompute(self) -> RecomputePolicy:
        """Which layers the plan recomputes, as the job says it; `none` where the planner may choose some."""
        found: RecomputePolicy = self.plan.given_recompute if isinstance(self.plan, PlanConfig) else "none"
        return found

    @property
    def offload(self) -> OffloadPolicy:
        """Of which layers the plan offloads activations, as the job says it; `none` for `plan: auto`."""
        return self.plan.offload_policy if isinstance(self.plan, PlanConfig) else "none"

    def _given_plan(self) -> PlanConfig:
        """The section `plan`. Raises `PlanError` for `plan: auto`."""
        if not isinstance(self.plan, PlanConfig):
            raise PlanError(
                "plan is auto: there is no plan before the planner has run", cure="set plan.stages and plan.replicas"
            )
        return self.plan

    @property
    def batching(self) -> Microbatches:
        """How the samples of a step are divided into microbatches, and these into blocks. Raises `PlanError`."""
        return Microbatches(self.microbatches, self.virtual_replicas, self.batch_size, self._former_batches)

    def after_batches(self, former: tuple[BatchesOfSteps, ...]) -> Job:
        """The job of a run whose first steps had other batches (`Microbatches.former`)."""
        if former == self._former_batches:
            return self
        job = self.model_copy()
        job._former_batches = former
        return job

    @property
    def forward_passes(self) -> ForwardPasses | None:
        """The passes of a run that makes forward passes over its validation data and nothing else; None: it trains."""
        return self._forward_passes

    def in_passes(self, passes: ForwardPasses | None) -> Job:
        """The job of a run that makes these forward passes only."""
        job = self.model_copy()
        job._forward_passes = passes
        return job

    @property
    def unsaved(self) -> frozenset[str]:
        """The parameters that checkpoints leave out. Known once the model is."""
        return self._unsaved

    def without_saving(self, names: Iterable[str]) -> Job:
        """The job, whose checkpoints leave out these parameters."""
        job = self.model_copy()
        job._unsaved = frozenset(names)
        return job

    @property
    def undivided(self) -> frozenset[str]:
        """The parameters whose optimizer state one owner keeps whole, under `plan.zero`. Known once the optimizer was tried."""
        return self._undivided

    def with_undivided(self, names: Iterable[str]) -> Job:
        """The job, in which one owner keeps whole what an optimizer keeps for each of these parameters."""
        job = self.model_copy()
        job._undivided = frozenset(names)
        return job

    def steps_of_epochs(self, samples: int) -> int:
        """The number of steps that `epochs` of so many samples are. Raises `ConfigError` for none, and for too many."""
        assert self.epochs is not None
        epochs, per_epoch = Fraction(str(self.epochs)), Fraction(samples, self.batch_size)
        steps = math.ceil(epochs * (math.floor(per_epoch) if self.data.drop_last else per_epoch))
        if not 1 <= steps <= MAX_STEPS:
            raise ConfigError(
                f"epochs is {self.epochs:g}, of {samples:,} samples in batches of {self.batch_size:,}: {steps:,} steps",
                cure=f"give epochs of 1 to {MAX_STEPS:,} steps"
                + (", a smaller batch_size, or leave data.drop_last out" if steps < 1 else ""),
            )
        return steps

    @property
    def styles(self) -> tuple[tuple[str, str], ...]:
        """(pattern of layer names, style), the first match counts; for stages with shards only."""
        return tuple(self.plan.styles.items()) if isinstance(self.plan, PlanConfig) else ()

    @property
    def layout(self) -> tuple[tuple[str, DividedOrWhole], ...]:
        """(dimension, `shards` or `whole`); for stages with shards only."""
        return tuple(self.plan.layout.items()) if isinstance(self.plan, PlanConfig) else ()

    @property
    def sequence_parallel(self) -> bool:
        """Whether values between layers are cut over the sequence; for stages with shards only."""
        return isinstance(self.plan, PlanConfig) and self.plan.sequence_parallel

    @property
    def leaves_zero_open(self) -> bool:
        """Whether the planner chooses the ZeRO stage: the lowest with which a plan fits into workers' memory."""
        return not isinstance(self.plan, PlanConfig) or self.plan.zero == "auto"

    @property
    def leaves_recompute_open(self) -> bool:
        """Whether the planner may have layers recomputed, so that a plan fits into workers' memory."""
        return not isinstance(self.plan, PlanConfig) or (self.leaves_zero_open and self.plan.recompute == "auto")

    @property
    def leaves_gradients_open(self) -> bool:
        """Whether the planner chooses if gradients are folded or scattered. On GPUs, where it is not measured what scattering
        costs, it is done where a job says so."""
        chooses = not isinstance(self.plan, PlanConfig) or self.plan.gradients == "auto"
        return chooses and self.reduction == "canonical" and self.device == "cpu"

    @property
    def asks_for_gradients(self) -> bool:
        """Whether the job says in words that the planner is to choose that."""
        return isinstance(self.plan, PlanConfig) and "gradients" in self.plan.model_fields_set

    @property
    def worker_memory_bytes(self) -> int | None:
        """What a worker may use, as the job says it; None: it does not."""
        given = self.placement.worker_memory_mib
        return None if given is None else round(given * 2**20)

    @property
    def reduction_buffer_bytes(self) -> int:
        """Most memory of the buckets of a stage's gradients."""
        section = self.plan if isinstance(self.plan, PlanConfig) else PlanConfig()
        return section.reduction_buffer_mib << 20

    @property
    def optimizer_in(self) -> str | None:
        """The folder in whose files the optimizer's state lies; None: it lies in memory."""
        return self.plan.optimizer_in if isinstance(self.plan, PlanConfig) else None

    @property
    def activations_in(self) -> str | None:
        """The folder to whose files activations are offloaded, or `HOST`; None: they lie in memory."""
        return self.plan.activations_in if isinstance(self.plan, PlanConfig) else None

    @property
    def activations_folder(self) -> str | None:
        """The folder to whose files activations are offloaded; None: they lie in memory, a GPU's or its host's."""
        return None if self.activations_in == HOST else self.activations_in

    @property
    def loss_target_name(self) -> str:
        """Name of the value with which the loss compares the model's output; of the labels, if the model computes the loss."""
        return self.data.target or ("labels" if self.loss.is_loss_of_model else "y")

    @property
    def loss_fields(self) -> tuple[str, ...]:
        """The fields of a batch that the loss gets beside the model's output: the target, and weights where it has them."""
        return (self.loss_target_name, *([] if self.loss.sample_weight is None else [self.loss.sample_weight]))

    @property
    def training_data(self) -> DataConfig:
        """The data of training, with what `data.pad` and `data.pack` need to know of the loss."""
        if self.data.pad is None and self.data.pack is None:
            return self.data
        return self.data.replace(target=self.loss_target_name, pack=self._with_first_label(self.data.pack))

    def _with_first_label(self, pack: PackConfig | None) -> PackConfig | None:
        """`data.pack` with the `first_label` that the job's loss asks for."""
        if pack is None or pack.first_label is not None:
            return pack
        return pack.replace(first_label="mask" if self.loss.count == "shifted_labels" else "keep")

    @property
    def scheduled(self) -> LrScheduleConfig | None:
        """`lr_schedule` with the number of steps in the place of `job.steps` among its arguments."""
        return self._with_number_of_steps(self.lr_schedule)

    def schedule_of(self, entry: SingleOptimizerConfig) -> LrScheduleConfig | None:
        """The schedule of the learning rates of one of the job's optimizers, as `scheduled`."""
        own = entry.lr_schedule if isinstance(entry, OptimizerEntry) else None
        return self._with_number_of_steps(own if own is not None else self.lr_schedule)

    @property
    def optimizer_as_scheduled(self) -> OptimizerConfig:
        """`optimizer`, in whose entries the schedules are as `schedule_of` has them."""
        entries = self.optimizer.entries
        own = [entry.replace(lr_schedule=self._with_number_of_steps(entry.lr_schedule)) for entry in entries]
        return self.optimizer.replace(entries=tuple(own)) if own else self.optimizer

    def _with_number_of_steps(self, ref: LrScheduleConfig | None) -> LrScheduleConfig | None:
        """See `scheduled`."""
        if ref is None or STEPS_OF_JOB not in [value for value in ref.args.values() if isinstance(value, str)]:
            return ref
        return ref.replace(
            args={
                key: self.steps if isinstance(value, str) and value == STEPS_OF_JOB else value
                for key, value in ref.args.items()
            }
        )

    @property
    def validation_sets(self) -> dict[str, ValidationSetConfig]:
        """Name -> data set of `validation`; the name of one alone is empty. Empty without validation."""
        return self.validation.by_name if self.validation is not None else {}

    def metrics_of_set(self, name: str) -> tuple[str, ...]:
        """The names of the metrics that are computed of a validation set, in the job's order."""
        chosen = self.validation_sets[name].metrics
        return tuple(metric for metric in self.metrics if chosen is None or metric in chosen)

    def samples_of_metrics(self, samples: Mapping[str, int]) -> dict[str, int]:
        """Metric -> number of samples that it measures in a validation. `samples`: those of each validation set."""
        of_sets = {name: self.metrics_of_set(name) for name in samples}
        return {metric: sum(samples[name] for name in of_sets if metric in of_sets[name]) for metric in self.metrics}

    @property
    def validation_data(self) -> DataConfig:
        """The data of `validation`, which must be given, with one set; see `data_of_set`."""
        assert self.validation is not None and not self.validation.sets
        return self.data_of_set(self.validation)

    def data_of_set(self, own: ValidationSetConfig) -> DataConfig:
        """The data of a validation set; samples have the fields of `data` and are collated as those, unless it says
        otherwise."""
        data = self.data
        own_batches = own.collate is not None or own.pad is not None or own.pack is not None
        return DataConfig.model_construct(
            function=own.function,
            args=own.args,
            names=own.names or data.names,
            input=own.input or data.input,
            target=own.target or self.training_data.target,
            collate=own.collate if own_batches else data.collate,
            pad=own.pad if own_batches else data.pad,
            pack=self._with_first_label(own.pack if own_batches else data.pack),
            shuffle=False,
            streams=own.streams,
            processes=own.processes,
        )

    @property
    def reads_streams(self) -> bool:
        """Whether some data is read as streams, by the workers of the first stage alone. Known once `data.streams` is."""
        return self.data.streams is not None or any(one.streams is not None for one in self.validation_sets.values())

    @property
    def precision_in_words(self) -> str | None:
        """The precision for people; None where everything is computed in `dtype`."""
        found = self.precision if self.precision is not None else PrecisionConfig()
        scaled = ", the loss is scaled" if found.loss_scaling is not None else ""
        if found.parameters is not None:
            copies = f"layers compute with {found.parameters} copies of the parameters{scaled}"
            if found.gradients != "float32":
                return f"{copies}, and their gradients are added in it; the parameters are {found.master}"
            return f"{copies}; the parameters and the sums of their gradients are {found.master}"
        if found.compute is None:
            return None
        computes = f"layers and the loss compute in {found.compute} (torch.autocast){scaled}"
        return f"{computes}, parameters and their gradients are float32"

    @property
    def loss_scaling(self) -> LossScaling | None:
        """How the scale of the loss changes, with float16; None: the loss is not scaled."""
        return None if self.precision is None else self.precision.loss_scaling

    def for_workers(self) -> Job:
        """What workers get of the job: the keys that they need. The others have their defaults, so that no worker has the
        settings of trackers, say."""
        made = project(self, lambda key: key.for_workers).after_batches(self._former_batches)
        return made.in_passes(self._forward_passes).without_saving(self._unsaved).with_undivided(self._undivided)

    def for_driver(self) -> Job:
        """What the driver gets of the job, likewise: neither functions nor their arguments, so that it imports no user code."""
        return project(self, lambda key: key.for_driver)

    def to_yaml(self) -> str:
        """The text of a job file that loads to this job, with all defaults written out; callables are written `module:name`,
        tuples among arguments as lists.

        Raises `ConfigError` that names every value that no text can stand for, such as a lambda or a data set object.
        """
        from raypar.job.plain_values import to_plain_values

        tree, unwritable = to_plain_values(self if self.epochs is None else self.replace(steps=None))
        if unwritable:
            raise ConfigError(
                f"the job cannot be written as a job file: {'; '.join(unwritable)}",
                cure="put functions and classes into a module that workers can import, and give what they need as args: "
                "numbers, texts, lists and dicts; an object that is called (a collator, a metric) may lie in one too, named as "
                'a text, "module:name"',
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
