"""Reads and checks a job file; the result is a `Job`, from which the plain values for the rest of raypar are made.

No other module uses pydantic. This module imports neither torch nor ray, so that a wrong key is reported at once.
"""

from __future__ import annotations

import difflib
import os
import re
import typing
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Annotated, Any, Literal

import yaml
from pydantic import (
    AfterValidator,
    BaseModel,
    BeforeValidator,
    ConfigDict,
    Discriminator,
    Field,
    NonNegativeFloat,
    NonNegativeInt,
    PositiveFloat,
    PositiveInt,
    PrivateAttr,
    Tag,
    ValidationError,
    field_validator,
    model_validator,
)

from raypar.errors import ConfigError, PlanError
from raypar.keys_of_other_frameworks import advice_for
from raypar.plan.parallel_plan import ParallelPlan
from raypar.run_folder_checks import MAX_STEPS
from raypar.safe_yaml import parse_yaml
from raypar.untrusted_files import read_limited_text, shorten
from raypar.worker.job_spec import DataSpec, JobSpec, OptimizerSpec, Ref, ValidationSpec
from raypar.worker.weights_source import InitialWeightsFile

_AUTO, _GIVEN = "<auto>", "<given>"
"""Pydantic's names of the branches of `plan` in error locations; removed before a message is shown."""

JOB_BYTES = 1 << 20
"""Size limit of a job file."""
MAX_WORKERS, MAX_PARTS, MAX_SAMPLES = 2**16, 2**16, 2**24
"""Limits of numbers in a job file, because lists of that length are made: of workers; of microbatches, blocks or chunks of a
step; of samples of a step."""
Workers = Annotated[PositiveInt, Field(le=MAX_WORKERS)]
Parts = Annotated[PositiveInt, Field(le=MAX_PARTS)]


class _Section(BaseModel):
    """Base of all sections of a job file. Strict: a string is not taken for a number, and an unknown key is an error."""

    model_config = ConfigDict(extra="forbid", frozen=True, strict=True)


def _import_path(text: str) -> str:
    """`text`, if it has the form `module:name`. Raises `ValueError`."""
    if not re.fullmatch(r"[A-Za-z_][\w.]*:[A-Za-z_][\w.]*", text):
        raise ValueError("module:name, for example torch.optim:AdamW")
    return text


class FunctionConfig(_Section):
    """A function and its arguments: `{function: module:name, args: {...}}`, or just `module:name`."""

    function: Annotated[str, AfterValidator(_import_path)]
    """`module:name` of the function or class."""
    args: dict[str, Any] = {}
    """Keyword arguments."""

    @model_validator(mode="before")
    @classmethod
    def _short(cls, value: Any) -> Any:
        return {"function": value} if isinstance(value, str) else value

    def to_ref(self) -> Ref:
        """The function as a `Ref`, for `JobSpec`."""
        return Ref(self.function, self.args)


class DataConfig(FunctionConfig):
    """The map-style data set of a job, and how its samples become the model's input and the loss's target."""

    input: str | None = None
    """The field that the first layer of a sequential model reads; None: `x`."""
    target: str | None = None
    """The field that the loss gets as its target; None: `y`."""
    names: Annotated[tuple[str, ...], Field(strict=False)] = ()
    """Names of the fields of a sample that is a tuple; empty: `x`, `y`, `z`."""
    processes: Annotated[NonNegativeInt, Field(le=MAX_WORKERS)] = 0
    """CPU processes that load samples ahead of the steps; 0: the worker itself loads them."""

    def to_data(self) -> DataSpec:
        """The data set as a `DataSpec`, for `JobSpec`."""
        return DataSpec(self.to_ref(), self.names, self.input, self.target, self.processes)


class ValidationConfig(DataConfig):
    """The data set for validation, and when it is used."""

    every: NonNegativeInt = 0
    """Steps from one validation to the next; there is one at the end too. 0: at the end only."""
    samples: NonNegativeInt = 0
    """How many samples are used, from the first on; 0: all."""


class OptimizerConfig(FunctionConfig):
    """The optimizer class, its arguments, and groups of parameters with other arguments."""

    groups: Annotated[tuple[dict[str, Any], ...], Field(strict=False)] = ()
    """`{match: pattern of parameter names, ...other arguments}`; a parameter belongs to the first group that matches."""

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


Counts = Annotated[Any, BeforeValidator(_counts)]
"""One count (int), or one per stage (tuple of int)."""


class PlanConfig(_Section):
    """Which workers hold which layers, and in which order they compute."""

    stages: Workers = 1
    """Worker positions along the pipeline; each has `chunks` stages."""
    replicas: Counts = 1
    """Workers that hold the same stages and compute different microbatches; one number, or one per position."""
    shards: Counts = 1
    """Workers that share the layers of one replica; one number, or one per position."""
    schedule: str = "1f1b"
    """Name of the schedule."""
    chunks: Parts | None = None
    """Stages per worker; None: the schedule's default."""
    cuts: Annotated[tuple[PositiveInt, ...] | None, Field(strict=False)] = None
    """First layer of stages 1, 2, ...; None: stages of nearly equal numbers of layers."""
    schedule_file: str | None = None
    """A file with the schedule, in place of `schedule`."""
    warmup: Annotated[tuple[NonNegativeInt, ...] | None, Field(strict=False)] = None
    """By worker position: forwards before the first backward; None: as the schedule has it."""
    styles: dict[str, str] = {}
    """Pattern of layer names -> sharding style of such a layer. The first match counts; other layers get inferred styles."""
    sequence_parallel: bool = False
    """Whether values [batch, sequence, features] between sharded layers are cut along the sequence."""

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

    def to_plan(self, layers: int) -> ParallelPlan:
        """The plan for a model with `layers` layers. Raises `PlanError` if they do not fill the stages."""
        from raypar.schedule.registry import placement_of_schedule, resolve_chunks_per_worker

        return ParallelPlan.of(
            self.replicas_per_stage,
            self.shards_per_stage,
            layers=layers,
            chunks=resolve_chunks_per_worker(self.schedule, self.chunks),
            placement=placement_of_schedule(self.schedule),
            cuts=self.cuts,
        )


class CheckpointConfig(_Section):
    """When checkpoints are saved, and how many of them are kept."""

    every: NonNegativeInt = 0
    """Steps from one checkpoint to the next; 0: no checkpoint before the end."""
    keep: PositiveInt = 2
    """How many checkpoints are kept: the newest ones."""
    at_end: bool = True
    """Whether the end of the run is saved."""


class ElasticConfig(_Section):
    """How a run continues when workers are lost, and when workers join."""

    min_workers: PositiveInt = 1
    """With fewer workers than this the run waits for others, up to the job's `wait_for_workers_s`."""
    max_workers: Workers | None = None
    """Lost workers are replaced up to this number; None: as many as the plan has."""
    standbys: Annotated[NonNegativeInt, Field(le=MAX_WORKERS)] = 0
    """Extra workers that are started and wait, so that an empty seat is filled at once."""
    grow_after_s: NonNegativeFloat = 5.0
    """Joining workers get seats between two steps: when all of them have started, or this long after the first one. They get
    none if moving the state costs more time than they save."""
    step_deadline_s: PositiveFloat = 3.0
    """A step has hung if it takes longer than this and longer than 5 times the longest of the last 100 steps. Workers that do
    not answer then are given up."""
    last_copy_wait_s: NonNegativeFloat = 600.0
    """How much longer a silent worker is waited for if it has the only copy of some state (a copy in the mirror counts as
    another one). The wait ends early if its process or its node is known to have ended."""
    mirror: Literal["auto", "off"] | PositiveInt = "auto"
    """Steps from one copy of the state into another worker's memory to the next; the copy is used when the last live one is
    lost. `auto`: as often as 2 % of the time allows."""
    stragglers: Literal["report", "replace"] = "report"
    """What happens to a straggler: a line for the user, or it leaves as soon as another worker can take its place."""
    straggler_times: Annotated[float, Field(gt=1)] = 1.5
    """A straggler computes more than this many times as long as its replicas, for 20 steps in a row; without other replicas, as
    its own first 20 steps."""

    @field_validator("mirror", mode="before")
    @classmethod
    def _words(cls, value: Any) -> Any:
        """Undo what YAML makes of `off`: a truth value."""
        value = {False: "off", True: "auto"}[value] if isinstance(value, bool) else value
        if value not in ("auto", "off") and not (isinstance(value, int) and value > 0):
            raise ValueError("auto, off, or a number of steps")
        return value

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


class InitFromConfig(_Section):
    """Weights to begin with: `{path: FILE, strip_prefix: "model.", ...}`, or just the path."""

    path: str
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
        return {"path": os.fspath(value)} if isinstance(value, (str, os.PathLike)) else value

    def to_source(self) -> InitialWeightsFile:
        """The section as a `InitialWeightsFile`, for `JobSpec`."""
        given = self.path, self.strip_prefix, self.add_prefix, tuple(self.rename.items())
        return InitialWeightsFile(*given, self.allow_missing, self.allow_unexpected)


def parse_init_from(given: Any) -> InitialWeightsFile | None:
    """`Trainer`'s argument `init_from` (a `InitialWeightsFile`, or the section's value) as a `InitialWeightsFile`. Raises
    `ConfigError`."""
    if given is None or isinstance(given, InitialWeightsFile):
        return given
    if isinstance(given, Mapping) and any(hasattr(value, "untyped_storage") for value in given.values()):
        raise ConfigError(
            f"init_from is a state_dict with {len(given)} entries: it must be a file or folder that workers can read",
            cure="save it (safetensors.torch.save_file(state, FILE)) and give the path, or load it in the model function",
        )
    try:
        return InitFromConfig.model_validate(given).to_source()
    except ValidationError as error:
        raise _config_error(error, ("init_from",)) from None


class EarlyStoppingConfig(_Section):
    """When a run stops early: if the validation loss has not fallen by more than `min_delta` for `patience` validations."""

    patience: PositiveInt = 3
    """Validations in a row without a lower loss after which the run stops."""
    min_delta: NonNegativeFloat = 0.0
    """How much the loss has to fall to count as lower."""


class TrackerConfig(_Section):
    """An experiment tracker: `{tracker: tensorboard | wandb | mlflow, args: {...}}`, or just its name."""

    tracker: Literal["tensorboard", "wandb", "mlflow"]
    """The kind of tracker."""
    args: dict[str, Any] = {}
    """Arguments of the tracker's class."""

    @model_validator(mode="before")
    @classmethod
    def _short(cls, value: Any) -> Any:
        return {"tracker": value} if isinstance(value, str) else value


class Job(_Section):
    """A whole job file."""

    name: str
    """Names the run and its folder."""
    seed: int = 0
    """Seed of all random numbers of the job."""
    steps: Annotated[PositiveInt, Field(le=MAX_STEPS)]
    """Optimizer steps in all."""
    batch_size: Annotated[PositiveInt, Field(le=MAX_SAMPLES)]
    """Samples of one step."""
    microbatches: Parts
    """Into how many microbatches a batch is cut."""
    virtual_replicas: Annotated[NonNegativeInt, Field(le=MAX_PARTS)] = 0
    """Contiguous blocks of microbatches, in which gradients are summed first; 0: one per microbatch, at most 16."""
    model: FunctionConfig
    """The function that builds the model."""
    loss: FunctionConfig
    """The loss function, or a function that makes it."""
    data: DataConfig
    """The training data."""
    optimizer: OptimizerConfig
    """The optimizer of every worker."""
    lr_schedule: FunctionConfig | None = None
    """The learning rate scheduler; None: a constant rate."""
    clip_norm: PositiveFloat | None = None
    """Largest norm of the whole gradient; None: it is not clipped."""
    validation: ValidationConfig | None = None
    """The validation data; None: no validation."""
    plan: Annotated[
        Annotated[Literal["auto"], Tag(_AUTO)] | Annotated[PlanConfig, Tag(_GIVEN)],
        Discriminator(lambda value: _AUTO if isinstance(value, str) else _GIVEN),
    ] = PlanConfig()
    """The parallel plan; `auto`: the planner chooses it."""
    elastic: Annotated[ElasticConfig | None, BeforeValidator(_switch)] = None
    """How the run survives lost workers; None: it does not."""
    checkpoint: CheckpointConfig = CheckpointConfig()
    """When checkpoints are saved."""
    run_dir: str = "runs/"
    """The folder in which run folders are made."""
    reduction: Literal["canonical", "fast"] = "canonical"
    """How gradients are summed: in an order that does not depend on the number of replicas and stages, or in a faster one."""
    dtype: Literal["float32", "float64"] = "float32"
    """Type of the parameters."""
    init: Literal["model", "by-name"] = "model"
    """Initial values: those that the model function gives, or those of every module's `reset_parameters` under a seed made from
    the module's name."""
    deferred_init: Literal["auto", "always", "never"] = "auto"
    """Whether large tensors of the model are computed only by the workers that own them; the values are the same."""
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
    """Callables that make the user's callbacks."""
    trackers: Annotated[tuple[TrackerConfig, ...], Field(strict=False)] = ()
    """Experiment trackers that get the metrics."""
    wait_for_workers_s: NonNegativeFloat = 300.0
    """Seconds that the run waits for room for its workers, and later for lost ones below `elastic.min_workers`."""
    trace_every: NonNegativeInt = 0
    """Steps from one measured step to the next; 0: a few steps only."""

    _source_dir: Path = PrivateAttr(default_factory=Path.cwd)

    @field_validator("name")
    @classmethod
    def _usable_as_folder(cls, name: str) -> str:
        if not re.fullmatch(r"[A-Za-z0-9][\w.-]{0,99}", name):
            raise ValueError("letters, digits, '.', '_' and '-' only: it names the run's folder")
        return name

    @model_validator(mode="after")
    def _fits(self) -> Job:
        self.to_spec().batching  # noqa: B018  raises PlanError when the microbatches do not fit the batch
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
        if isinstance(self.plan, PlanConfig):
            return self.plan.workers
        return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1

    def to_plan(self, layers: int) -> ParallelPlan:
        """The plan for a model with `layers` layers. Raises `PlanError`."""
        return self._given_plan().to_plan(layers)

    def _given_plan(self) -> PlanConfig:
        """The section `plan`. Raises `PlanError` for `plan: auto`."""
        if not isinstance(self.plan, PlanConfig):
            raise PlanError(
                "plan is auto: there is no plan before the planner has run", cure="set plan.stages and plan.replicas"
            )
        return self.plan

    def to_spec(self) -> JobSpec:
        """The part of the job that workers need, as a `JobSpec`: nothing about the cluster."""
        validation = self.validation
        plan = self.plan if isinstance(self.plan, PlanConfig) else PlanConfig()
        return JobSpec(
            name=self.name,
            seed=self.seed,
            steps=self.steps,
            batch_size=self.batch_size,
            microbatches=self.microbatches,
            virtual_replicas=self.virtual_replicas,
            model=self.model.to_ref(),
            loss=self.loss.to_ref(),
            data=self.data.to_data(),
            optimizer=self.optimizer.to_optimizer(),
            lr_schedule=self.lr_schedule.to_ref() if self.lr_schedule is not None else None,
            clip_norm=self.clip_norm,
            validation=ValidationSpec(validation.to_data(), validation.every, validation.samples) if validation else None,
            dtype=self.dtype,
            init=self.init,
            deferred_init=self.deferred_init,
            init_from=self.init_from.to_source() if self.init_from is not None else None,
            device=self.device,
            threads=self.threads,
            reduction=self.reduction,
            non_finite=self.non_finite,
            styles=tuple(plan.styles.items()),
            sequence_parallel=plan.sequence_parallel,
        )

    def to_yaml(self) -> str:
        """The text of a job file that loads to this job, with all defaults written out."""
        return yaml.safe_dump(self.model_dump(mode="json", exclude_none=True), sort_keys=False, default_flow_style=None)


class _Arguments(Job):
    """A job with those arguments of `Trainer` that a job file does not have; used to check them."""

    most_workers: PositiveInt | None = None
    local_nodes: PositiveInt = 1
    stop_at_step: PositiveInt | None = None
    address: str | None = None


ARGUMENTS = {
    "checkpoint.every": "checkpoint_every",
    "checkpoint.keep": "keep",
    "validation.every": "validate_every",
    "validation.samples": "validation_samples",
    "data.input": "data_input",
    "data.target": "data_target",
    "data.names": "data_names",
    "data.processes": "data_processes",
    "most_workers": "workers",
}
"""Key of a job file -> argument of `Trainer`, where they have different names."""


# -- reading -----------------------------------------------------------------------------------------------------------------


def load_job(path: str | Path, overrides: Sequence[str] = ()) -> Job:
    """The checked job of a job file, after overrides `a.b=c` (values in YAML). Raises `ConfigError` or `PlanError`."""
    path = Path(path)
    cure = "give the path of a YAML file such as jobs/quickstart.yaml"
    text = read_limited_text(path, follow=True, limit=JOB_BYTES, cure=cure, what="job file ")
    return parse_job(text, overrides, source=str(path), name=path.stem)


def parse_job(text: str, overrides: Sequence[str] = (), *, source: str = "job", name: str | None = None) -> Job:
    """The checked job of a YAML text. `name`: the job's name if the text gives none; `source`: name of the text in messages."""
    tree = parse_yaml(text, source)
    if not isinstance(tree, dict):
        raise ConfigError(f"{source} holds a {type(tree).__name__}, not keys and values", cure=f"keys: {', '.join(_keys(Job))}")
    for override in overrides:
        _apply_override(tree, override)
    if name is not None:
        tree.setdefault("name", name)
    try:
        return Job.model_validate(tree)
    except ValidationError as error:
        raise _config_error(error, ()) from None


def parse_plan_section(given: Mapping[str, Any]) -> PlanConfig:
    """`Trainer`'s argument `plan`, a dict like the section of a job file, checked. Raises `ConfigError` or `PlanError`."""
    try:
        return PlanConfig.model_validate(dict(given))
    except ValidationError as error:
        raise _config_error(error, ("plan",)) from None


def parse_elastic_section(given: bool | Mapping[str, Any] | ElasticConfig | None) -> ElasticConfig | None:
    """`Trainer`'s argument `elastic`, checked: a dict like the section of a job file, or True for its defaults. Raises
    `ConfigError`."""
    if isinstance(given, bool) or given is None:
        return ElasticConfig() if given else None
    if not isinstance(given, (Mapping, ElasticConfig)):
        raise ConfigError(f"elastic is {given!r}", cure='give True, or a dict such as {"min_workers": 2}')
    try:
        return given if isinstance(given, ElasticConfig) else ElasticConfig.model_validate(dict(given))
    except ValidationError as error:
        raise _config_error(error, ("elastic",)) from None


def check_trainer_arguments(given: Mapping[str, Any]) -> None:
    """Check `Trainer`'s arguments by the rules for the same keys of a job file. Raises `ConfigError` or `PlanError`.

    `given`: argument name -> value, without the arguments that are functions.
    """
    key_of = {argument: key for key, argument in ARGUMENTS.items()}
    function = {"function": "given:elsewhere"}
    tree: dict[str, Any] = {key: dict(function) for key in ("model", "loss", "data", "optimizer", "validation")}
    for argument, value in given.items():
        section, _, key = key_of.get(argument, argument).rpartition(".")
        (tree.setdefault(section, {}) if section else tree)[key] = value
    try:
        _Arguments.model_validate(tree)
    except ValidationError as error:
        raise _config_error(error, (), of_trainer=True) from None


def _apply_override(tree: dict[str, Any], override: str) -> None:
    """Set one key by `a.b=c`. A `module:name` entry or `plan: auto` becomes a mapping if a key inside it is set."""
    path, equals, text = override.partition("=")
    parts = path.strip().split(".")
    if not equals or not all(parts):
        raise ConfigError(f"override {override!r} is not key=value", cure="for example --set plan.stages=4")
    value = parse_yaml(text, f"--set {override}")
    here: Any = tree
    for index, part in enumerate(parts[:-1]):
        at = ".".join(parts[: index + 1])
        if isinstance(here, list):
            here = _item(here, part, at)
            continue
        inside = here.get(part)
        if inside is None or (at == "plan" and inside == "auto"):
            inside = here[part] = {}
        elif isinstance(inside, str) and ":" in inside:
            inside = here[part] = {"function": inside}
        if not isinstance(inside, (dict, list)):
            raise ConfigError(f"--set {override}: {at} is {inside!r} and has no keys", cure=f"set {at} itself")
        here = inside
    if isinstance(here, list):
        _item(here, parts[-1], path)
        here[int(parts[-1])] = value
    else:
        here[parts[-1]] = value


def _item(items: list[Any], part: str, at: str) -> Any:
    """The item of a list by its number as text. Raises `ConfigError`."""
    if not part.isdigit() or int(part) >= len(items):
        raise ConfigError(f"{at}: there are {len(items)} entries, numbered from 0", cure="give the number of one of them")
    return items[int(part)]


# -- explaining --------------------------------------------------------------------------------------------------------------


def _sections(annotation: Any) -> Iterator[type[BaseModel]]:
    """The sections that a field's type names."""
    if isinstance(annotation, type) and issubclass(annotation, BaseModel):
        yield annotation
    for inner in typing.get_args(annotation):
        yield from _sections(inner)


def _keys(model: type[BaseModel]) -> list[str]:
    """The keys of a section."""
    return list(model.model_fields)


def _all_keys(model: type[BaseModel], prefix: str = "") -> Iterator[str]:
    """The keys of a section and of all sections in it, such as `plan.stages`."""
    for name, info in model.model_fields.items():
        yield prefix + name
        for inner in _sections(info.annotation):
            yield from _all_keys(inner, f"{prefix}{name}.")


def _section_at(path: Sequence[str | int]) -> type[BaseModel]:
    """The section of a job file to which `path` leads."""
    model: type[BaseModel] = Job
    for part in path:
        field = model.model_fields.get(part) if isinstance(part, str) else None
        if field is not None:  # else an item of a list, or a key of values that have no section
            model = next(_sections(field.annotation), model)
    return model


def _suggest_key(key: str, path: Sequence[str | int]) -> str | None:
    """A suggestion for an unknown key: the full name of the same key in another section, else of the most similar one here."""
    elsewhere = [k for k in _all_keys(Job) if k.rpartition(".")[2] == key]
    if elsewhere:
        return elsewhere[0]
    found = difflib.get_close_matches(key, _keys(_section_at(path)), n=1, cutoff=0.6)
    return ".".join(map(str, [*path, found[0]])) if found else None


def _config_error(error: ValidationError, inside: tuple[str, ...], *, of_trainer: bool = False) -> ConfigError:
    """One `ConfigError` for all findings of pydantic. `inside`: the section that was checked; `of_trainer`: whether the message
    names arguments of `Trainer`, not keys of a job file."""
    found = [_explain_finding({**one, "loc": (*inside, *one["loc"])}, of_trainer) for one in error.errors()]
    return ConfigError("; ".join(what for what, _ in found[:5]), cure=found[0][1])


_HALF_PRECISION = ("bfloat16", "float16", "bf16", "fp16", "half")


def _explain_finding(error: Mapping[str, Any], of_trainer: bool = False) -> tuple[str, str]:
    """(what, cure) of one finding of pydantic."""
    path = [part for part in error["loc"] if part not in (_AUTO, _GIVEN)]
    key = shorten(".".join(map(str, path))) or "the job file"
    if error["type"] == "extra_forbidden":
        advice = advice_for(str(path[-1]))
        if advice is not None:
            return f"unknown key {key}", advice
        near = _suggest_key(str(path[-1]), path[:-1])
        valid = ", ".join(_keys(_section_at(path[:-1])))
        return f"unknown key {key}" + (f": did you mean {near}?" if near else ""), f"valid keys here: {valid}"
    if error["type"] == "missing":
        return f"{key} is missing", f"add {key} to the job file"
    expected = error["msg"].removeprefix("Value error, ").removeprefix("Input should be ")
    if error["type"].startswith(("model_", "dict_type")):
        names = [at for at, part in enumerate(path) if isinstance(part, str)]  # an item of a list is told by the list's section
        known = _section_at(path[: names[-1]]).model_fields.get(str(path[names[-1]])) if names else None
        section = next(_sections(known.annotation), None) if known is not None else None if path else Job
        expected = f"keys and values ({', '.join(_keys(section))})" if section else "keys and values"
    if error["loc"] == ("plan", _AUTO):
        expected = f"auto, or keys and values ({', '.join(_keys(PlanConfig))})"
    got = error["input"]
    if of_trainer:
        key = ARGUMENTS.get(key, key)
    cure = f"correct the argument {key} of Trainer" if of_trainer else f"correct {key} in the job file"
    if error["loc"] == ("dtype",) and got in _HALF_PRECISION:
        cure += "; for mixed precision leave it float32, and use torch.autocast in the forward of your layers"
    return f"{key}: expected {expected}, got {shorten(repr(got))} ({type(got).__name__})", cure
