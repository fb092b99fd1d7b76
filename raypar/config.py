"""The job file: read, checked and turned into the plain values the rest of raypar works with.

The only module that knows pydantic. It imports neither torch nor ray, so that a wrong key is reported at once.
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
from raypar.plan.parallel_plan import ParallelPlan
from raypar.run_folder_checks import MAX_STEPS
from raypar.safe_yaml import parse_yaml
from raypar.untrusted_files import read_limited_text, shorten
from raypar.worker.job_spec import DataSpec, JobSpec, OptimizerSpec, Ref, ValidationSpec
from raypar.worker.weights_source import WeightsSource

_AUTO, _GIVEN = "<auto>", "<given>"
"""Pydantic's names of the branches of `plan` in error locations; removed before a message is shown."""

JOB_BYTES = 1 << 20
"""Size limit of a job file."""
MAX_WORKERS, MAX_PARTS, MAX_SAMPLES = 2**16, 2**16, 2**24
"""Limits of numbers in a job file, since lists of that length are made: workers; microbatches, blocks or chunks of a step;
samples of a step."""
Workers = Annotated[PositiveInt, Field(le=MAX_WORKERS)]
Parts = Annotated[PositiveInt, Field(le=MAX_PARTS)]


class _Section(BaseModel):
    """Strict: a string is no number, an unknown key is an error."""

    model_config = ConfigDict(extra="forbid", frozen=True, strict=True)


def _import_path(text: str) -> str:
    if not re.fullmatch(r"[A-Za-z_][\w.]*:[A-Za-z_][\w.]*", text):
        raise ValueError("module:name, for example torch.optim:AdamW")
    return text


class FunctionConfig(_Section):
    """`{function: module:name, args: {...}}`, or just `module:name`."""

    function: Annotated[str, AfterValidator(_import_path)]
    args: dict[str, Any] = {}

    @model_validator(mode="before")
    @classmethod
    def _short(cls, value: Any) -> Any:
        return {"function": value} if isinstance(value, str) else value

    def to_ref(self) -> Ref:
        """For `JobSpec`."""
        return Ref(self.function, self.args)


class DataConfig(FunctionConfig):
    """A map-style data set. `names`: of a tuple sample's fields; `processes`: CPU processes that read ahead."""

    input: str | None = None
    target: str | None = None
    names: Annotated[tuple[str, ...], Field(strict=False)] = ()
    processes: Annotated[NonNegativeInt, Field(le=MAX_WORKERS)] = 0

    def to_data(self) -> DataSpec:
        """For `JobSpec`."""
        return DataSpec(self.to_ref(), self.names, self.input, self.target, self.processes)


class ValidationConfig(DataConfig):
    """`every` steps (0: at the end only), the first `samples` samples (0: all)."""

    every: NonNegativeInt = 0
    samples: NonNegativeInt = 0


class OptimizerConfig(FunctionConfig):
    """`groups`: `{match: pattern of parameter names, ...overrides}`; the first match wins."""

    groups: Annotated[tuple[dict[str, Any], ...], Field(strict=False)] = ()

    @field_validator("groups")
    @classmethod
    def _match(cls, groups: tuple[dict[str, Any], ...]) -> tuple[dict[str, Any], ...]:
        if any(not isinstance(group.get("match"), str) for group in groups):
            raise ValueError("a list of {match: pattern, lr: ..., ...}; every group needs a match")
        return groups

    def to_optimizer(self) -> OptimizerSpec:
        """For `JobSpec`."""
        groups = tuple((g["match"], {k: v for k, v in g.items() if k != "match"}) for g in self.groups)
        return OptimizerSpec(self.to_ref(), groups)


def _counts(value: Any) -> Any:
    """One count, or one per stage."""
    each = value if isinstance(value, (list, tuple)) and value else [value]
    if any(not isinstance(count, int) or isinstance(count, bool) or count < 1 for count in each):
        raise ValueError("a number >= 1, or a list with one per stage")
    if sum(each) > MAX_WORKERS:
        raise ValueError(f"at most {MAX_WORKERS:,} in all")
    return tuple(value) if isinstance(value, (list, tuple)) else value


Counts = Annotated[Any, BeforeValidator(_counts)]
"""int or tuple[int, ...]."""


class PlanConfig(_Section):
    """Placement and schedule. `stages`: workers along the pipeline; `chunks`: stages per worker (None: the
    schedule's default); `cuts`: first layer of stages 1, 2, ...; `warmup`: forwards before the first backward, per stage.

    `shards`: workers that share the layers of one replica of a stage. `styles`: pattern of layer names -> how such a layer is
    cut over the shards; the first match counts, other layers get inferred styles. `sequence_parallel`: between sharded layers
    values [batch, sequence, features] are cut over the sequence.
    """

    stages: Workers = 1
    replicas: Counts = 1
    shards: Counts = 1
    schedule: str = "1f1b"
    chunks: Parts | None = None
    cuts: Annotated[tuple[PositiveInt, ...] | None, Field(strict=False)] = None
    schedule_file: str | None = None
    warmup: Annotated[tuple[NonNegativeInt, ...] | None, Field(strict=False)] = None
    styles: dict[str, str] = {}
    sequence_parallel: bool = False

    @property
    def replicas_per_stage(self) -> tuple[int, ...]:
        """One count per worker position."""
        return self.replicas if isinstance(self.replicas, tuple) else (self.replicas,) * self.stages

    @property
    def shards_per_stage(self) -> tuple[int, ...]:
        """One count per worker position."""
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
        """The plan for a model of that many layers. Raises `PlanError` when they do not fill the stages."""
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
    """`every` steps (0: never but at the end), the last `keep` are kept."""

    every: NonNegativeInt = 0
    keep: PositiveInt = 2
    at_end: bool = True


class ElasticConfig(_Section):
    """How a run survives lost workers: it continues with the others while there are `min_workers` or more; with fewer it waits
    for others, up to `wait_for_workers_s`.

    Lost workers are replaced, up to `max_workers` (None: as many as the plan has). `standbys` extra workers are started and
    wait, so that an empty seat is filled at once. Joining workers get seats between two steps, when all have started or
    `grow_after_s` after the first, if that saves more time than the move costs.

    `step_deadline_s`: a step has hung if it takes longer than this and than 5 times the longest of the last 100 steps; workers
    that do not answer then are given up. A worker with the only copy of some state (a copy in the mirror counts as another) is
    waited for `last_copy_wait_s` longer, while nothing says that its process or its node has ended. `mirror`: how often the
    state is copied to another worker's memory, for when the last live copy dies: every so many steps, or `auto`, as often as
    2 % of the time allows.
    `stragglers`: a worker that computes more than `straggler_times` as long as its replicas for 20 steps in a row (in a stage
    with one replica: as its own first 20) is reported (`report`), or leaves when another can take its place (`replace`).
    """

    min_workers: PositiveInt = 1
    max_workers: Workers | None = None
    standbys: Annotated[NonNegativeInt, Field(le=MAX_WORKERS)] = 0
    grow_after_s: NonNegativeFloat = 5.0
    step_deadline_s: PositiveFloat = 3.0
    last_copy_wait_s: NonNegativeFloat = 600.0
    mirror: Literal["auto", "off"] | PositiveInt = "auto"
    stragglers: Literal["report", "replace"] = "report"
    straggler_times: Annotated[float, Field(gt=1)] = 1.5

    @field_validator("mirror", mode="before")
    @classmethod
    def _words(cls, value: Any) -> Any:
        """YAML reads `off` as a truth value."""
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
    """`true`: with the defaults; `false`: not elastic. A bare `elastic:` could be meant either way."""
    if value is None:
        raise ConfigError("elastic is empty", cure="write `elastic: {}` (or true) for the defaults, `elastic: false` for none")
    return ({} if value else None) if isinstance(value, bool) else value


class InitFromConfig(_Section):
    """Weights to begin with: `{path: FILE, strip_prefix: "model.", ...}`, or just the path.

    `path`: a .safetensors file, a folder with an index, a state_dict, an export, a checkpoint or a run of raypar. `rename`:
    regular expression -> replacement. `allow_missing`: patterns of the model's names that keep their own initial values;
    `allow_unexpected`: patterns of the file's names that are not used.
    """

    path: str
    strip_prefix: str = ""
    add_prefix: str = ""
    rename: dict[str, str] = {}
    allow_missing: Annotated[tuple[str, ...], Field(strict=False)] = ()
    allow_unexpected: Annotated[tuple[str, ...], Field(strict=False)] = ()

    @model_validator(mode="before")
    @classmethod
    def _short(cls, value: Any) -> Any:
        return {"path": os.fspath(value)} if isinstance(value, (str, os.PathLike)) else value

    def to_source(self) -> WeightsSource:
        """For `JobSpec`."""
        given = self.path, self.strip_prefix, self.add_prefix, tuple(self.rename.items())
        return WeightsSource(*given, self.allow_missing, self.allow_unexpected)


def parse_init_from(given: Any) -> WeightsSource | None:
    """The source that `Trainer`'s argument `init_from` gives: a section's value, or a `WeightsSource`. Raises `ConfigError`."""
    if given is None or isinstance(given, WeightsSource):
        return given
    if isinstance(given, Mapping) and any(hasattr(value, "untyped_storage") for value in given.values()):
        raise ConfigError(
            f"init_from is a state_dict with {len(given)} entries: it takes what workers can read, a file or folder",
            cure="save it (safetensors.torch.save_file(state, FILE)) and give the path, or load it in the model function",
        )
    try:
        return InitFromConfig.model_validate(given).to_source()
    except ValidationError as error:
        raise _told(error, ("init_from",)) from None


class EarlyStoppingConfig(_Section):
    """Stop when the validation loss has not fallen by more than `min_delta` for `patience` validations."""

    patience: PositiveInt = 3
    min_delta: NonNegativeFloat = 0.0


class TrackerConfig(_Section):
    """`{tracker: tensorboard | wandb | mlflow, args: {...}}`, or just its name."""

    tracker: Literal["tensorboard", "wandb", "mlflow"]
    args: dict[str, Any] = {}

    @model_validator(mode="before")
    @classmethod
    def _short(cls, value: Any) -> Any:
        return {"tracker": value} if isinstance(value, str) else value


class Job(_Section):
    """A whole job file. `device`: results on CPUs and GPUs differ. `max_time_s`, `wait_for_workers_s`: seconds;
    `trace_every`: steps between measured steps, 0: a few."""

    name: str
    seed: int = 0
    steps: Annotated[PositiveInt, Field(le=MAX_STEPS)]
    batch_size: Annotated[PositiveInt, Field(le=MAX_SAMPLES)]
    microbatches: Parts
    virtual_replicas: Annotated[NonNegativeInt, Field(le=MAX_PARTS)] = 0
    model: FunctionConfig
    loss: FunctionConfig
    data: DataConfig
    optimizer: OptimizerConfig
    lr_schedule: FunctionConfig | None = None
    clip_norm: PositiveFloat | None = None
    validation: ValidationConfig | None = None
    plan: Annotated[
        Annotated[Literal["auto"], Tag(_AUTO)] | Annotated[PlanConfig, Tag(_GIVEN)],
        Discriminator(lambda value: _AUTO if isinstance(value, str) else _GIVEN),
    ] = PlanConfig()
    elastic: Annotated[ElasticConfig | None, BeforeValidator(_switch)] = None
    checkpoint: CheckpointConfig = CheckpointConfig()
    run_dir: str = "runs/"
    reduction: Literal["canonical", "fast"] = "canonical"
    dtype: Literal["float32", "float64"] = "float32"
    init: Literal["model", "by-name"] = "model"
    deferred_init: Literal["auto", "always", "never"] = "auto"
    init_from: InitFromConfig | None = None
    device: Literal["cpu", "gpu"] = "cpu"
    threads: Annotated[PositiveInt, Field(le=MAX_WORKERS)] = 1
    non_finite: Literal["stop", "skip"] = "stop"
    max_time_s: PositiveFloat | None = None
    early_stopping: EarlyStoppingConfig | None = None
    callbacks: Annotated[tuple[FunctionConfig, ...], Field(strict=False)] = ()
    trackers: Annotated[tuple[TrackerConfig, ...], Field(strict=False)] = ()
    wait_for_workers_s: NonNegativeFloat = 300.0
    trace_every: NonNegativeInt = 0

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
        """The schedule asked for. Raises `PlanError` for `plan: auto`."""
        return self._given().schedule

    @property
    def workers(self) -> int:
        """How many workers the plan needs; for `plan: auto` as many as this machine has processors for."""
        if isinstance(self.plan, PlanConfig):
            return self.plan.workers
        return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1

    def to_plan(self, layers: int) -> ParallelPlan:
        """The plan for a model of that many layers. Raises `PlanError`."""
        return self._given().to_plan(layers)

    def _given(self) -> PlanConfig:
        if not isinstance(self.plan, PlanConfig):
            raise PlanError(
                "plan is auto: there is no plan before the planner has run", cure="set plan.stages and plan.replicas"
            )
        return self.plan

    def to_spec(self) -> JobSpec:
        """The job as a `JobSpec`, with nothing about the cluster."""
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
        """A job file that loads to this job, defaults written out."""
        return yaml.safe_dump(self.model_dump(mode="json", exclude_none=True), sort_keys=False, default_flow_style=None)


class _Arguments(Job):
    """A job with the arguments of `Trainer` that a job file does not have."""

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
    """Read a job file, apply `a.b=c` overrides (values in YAML), check everything. Raises `ConfigError` or `PlanError`."""
    path = Path(path)
    cure = "give the path of a YAML file such as jobs/quickstart.yaml"
    text = read_limited_text(path, follow=True, limit=JOB_BYTES, cure=cure, what="job file ")
    return parse_job(text, overrides, source=str(path), name=path.stem)


def parse_job(text: str, overrides: Sequence[str] = (), *, source: str = "job", name: str | None = None) -> Job:
    """The job in a YAML text. `name`: the job's name if the text gives none; `source`: name of the text in messages."""
    tree = parse_yaml(text, source)
    if not isinstance(tree, dict):
        raise ConfigError(f"{source} holds a {type(tree).__name__}, not keys and values", cure=f"keys: {', '.join(_keys(Job))}")
    for override in overrides:
        _apply(tree, override)
    if name is not None:
        tree.setdefault("name", name)
    try:
        return Job.model_validate(tree)
    except ValidationError as error:
        raise _told(error, ()) from None


def parse_plan_section(given: Mapping[str, Any]) -> PlanConfig:
    """The section `plan` alone, as `Trainer` takes it. Raises `ConfigError` or `PlanError`."""
    try:
        return PlanConfig.model_validate(dict(given))
    except ValidationError as error:
        raise _told(error, ("plan",)) from None


def parse_elastic_section(given: bool | Mapping[str, Any] | ElasticConfig | None) -> ElasticConfig | None:
    """The section `elastic` alone, as `Trainer` takes it; True: with its defaults. Raises `ConfigError`."""
    if isinstance(given, bool) or given is None:
        return ElasticConfig() if given else None
    if not isinstance(given, (Mapping, ElasticConfig)):
        raise ConfigError(f"elastic is {given!r}", cure='give True, or a dict such as {"min_workers": 2}')
    try:
        return given if isinstance(given, ElasticConfig) else ElasticConfig.model_validate(dict(given))
    except ValidationError as error:
        raise _told(error, ("elastic",)) from None


def check_trainer_arguments(given: Mapping[str, Any]) -> None:
    """Check arguments of `Trainer` as the same keys of a job file are checked. Raises `ConfigError` or `PlanError`.

    `given`: by the argument's name, without the functions: `Trainer` takes callables too.
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
        raise _told(error, (), of_trainer=True) from None


def _apply(tree: dict[str, Any], override: str) -> None:
    """Set one key; `module:name` entries and `plan: auto` become mappings where a key inside them is set."""
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
    if not part.isdigit() or int(part) >= len(items):
        raise ConfigError(f"{at}: there are {len(items)} entries, numbered from 0", cure="give the number of one of them")
    return items[int(part)]


# -- explaining --------------------------------------------------------------------------------------------------------------


def _sections(annotation: Any) -> Iterator[type[BaseModel]]:
    if isinstance(annotation, type) and issubclass(annotation, BaseModel):
        yield annotation
    for inner in typing.get_args(annotation):
        yield from _sections(inner)


def _keys(model: type[BaseModel]) -> list[str]:
    return list(model.model_fields)


def _all_keys(model: type[BaseModel], prefix: str = "") -> Iterator[str]:
    for name, info in model.model_fields.items():
        yield prefix + name
        for inner in _sections(info.annotation):
            yield from _all_keys(inner, f"{prefix}{name}.")


def _section_at(path: Sequence[str | int]) -> type[BaseModel]:
    model: type[BaseModel] = Job
    for part in path:
        field = model.model_fields.get(part) if isinstance(part, str) else None
        if field is not None:  # else an item of a list, or a key of values that have no section
            model = next(_sections(field.annotation), model)
    return model


def _nearest(key: str, path: Sequence[str | int]) -> str | None:
    """The full name of a key of the same name in another section, else of the most similar key in this one."""
    elsewhere = [k for k in _all_keys(Job) if k.rpartition(".")[2] == key]
    if elsewhere:
        return elsewhere[0]
    found = difflib.get_close_matches(key, _keys(_section_at(path)), n=1, cutoff=0.6)
    return ".".join(map(str, [*path, found[0]])) if found else None


def _told(error: ValidationError, inside: tuple[str, ...], *, of_trainer: bool = False) -> ConfigError:
    """One error for all of pydantic's findings. `inside`: the section that was checked; `of_trainer`: name arguments."""
    found = [_explain({**one, "loc": (*inside, *one["loc"])}, of_trainer) for one in error.errors()]
    return ConfigError("; ".join(what for what, _ in found[:5]), cure=found[0][1])


_HALF_PRECISION = ("bfloat16", "float16", "bf16", "fp16", "half")


def _explain(error: Mapping[str, Any], of_trainer: bool = False) -> tuple[str, str]:
    """(what, cure) of one of pydantic's findings."""
    path = [part for part in error["loc"] if part not in (_AUTO, _GIVEN)]
    key = shorten(".".join(map(str, path))) or "the job file"
    if error["type"] == "extra_forbidden":
        near = _nearest(str(path[-1]), path[:-1])
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
