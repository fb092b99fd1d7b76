"""Makes a checked `Job` of `Trainer`'s arguments: functions, models and data sets become references that workers can call."""

from __future__ import annotations

import copy
import functools
import inspect
import os
import re
import sys
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from typing import Any, ParamSpec, Protocol, TypeVar

from raypar.callbacks import check_callbacks
from raypar.errors import ConfigError, with_article
from raypar.files.printable_text import repr_text, shorten
from raypar.job import (
    DataConfig,
    FunctionConfig,
    Job,
    LossConfig,
    LrScheduleConfig,
    ModelConfig,
    OptimizerConfig,
    OptimizerEntry,
    PlanConfig,
    ValidationConfig,
)
from raypar.job.data_section import SET_NAME, is_misspelt, refuse_two_sets_of_one_name
from raypar.job.read_job import RUN_ARGUMENTS, job_from_argument_tree, parse_data_section
from raypar.job.stable_callable_text import find_unstable_argument
from raypar.launch.convert_ray_train_configs import RAY_TRAIN_ARGUMENTS, ImpliedSetting, settings_from_ray_train
from raypar.launch.signature_in_help import BriefSignature
from raypar.plan import ParallelPlan
from raypar.plan.wording import count_noun
from raypar.storage.filesystems import place_of_checkpoint_object

T = TypeVar("T")

BUILT_MODEL_BYTES = 32 << 20
"""Size limit of a model that is given built: it travels to every worker through Ray's store."""

Arguments = Mapping[str, Any]
"""Keyword arguments of a function."""
FunctionArgument = str | Callable[..., Any] | tuple[str | Callable[..., Any], Arguments] | Arguments | FunctionConfig
"""A function: `"module:name"`, the callable itself, a pair with its keyword arguments, or a section as a job file has it."""


class MapStyleSource(Protocol):
    """A map-style data set."""

    def __len__(self) -> int: ...

    def __getitem__(self, index: Any, /) -> Any: ...


SampleSource = MapStyleSource | Iterable[object]
"""A data set, map-style or iterable."""


class MetricObject(Protocol):
    """An object that measures, as those of torchmetrics."""

    def update(self, output: Any, target: Any, /) -> None: ...

    def compute(self) -> Any: ...

    def reset(self) -> None: ...


FUNCTIONS: dict[str, type[FunctionConfig]] = {
    "model": ModelConfig,
    "loss": LossConfig,
    "data": DataConfig,
    "optimizer": OptimizerConfig,
    "lr_schedule": LrScheduleConfig,
    "validation": ValidationConfig,
}
"""Arguments that are functions, or objects in their place -> their section of a job."""

OBJECTS_OF_DATA = ("sampler", "weights", "group_by")
"""Keys of the argument `data` that may be an object in place of a function."""
P = ParamSpec("P")


def with_checked_argument_names(init: Callable[P, None]) -> Callable[P, None]:
    """Decorator of `Trainer.__init__`: `ConfigError` for unknown and missing arguments. Python's `TypeError` says no cure."""
    signature = inspect.signature(init)
    parameters = signature.parameters
    needed = {name for name, parameter in parameters.items() if parameter.default is parameter.empty and name != "self"}

    @functools.wraps(init)
    def checked(*positional: P.args, **given: P.kwargs) -> None:
        if len(positional) > 1:
            what = f"Trainer got {len(positional) - 1} arguments without names"
            raise ConfigError(what, cure="give them by name: model=..., loss=..., data=...")
        if not needed <= set(given) <= set(parameters):
            raise _error_of_names(given)
        init(*positional, **given)

    # Without types, for notebooks, whose tooltips show all arguments; `__init__.__annotations__` has the types.
    bare = [parameter.replace(annotation=parameter.empty) for parameter in parameters.values()]
    checked.__signature__ = BriefSignature(bare)  # type: ignore[attr-defined]
    checked.__doc__ = ""  # without one, `help` shows that of `object.__init__`
    return checked


def _error_of_names(given: Arguments) -> ConfigError:
    """The error for missing and unknown arguments."""
    try:
        job_from_argument_tree(_as_job_tree({key: value for key, value in given.items() if key not in RAY_TRAIN_ARGUMENTS}))
    except ConfigError as error:
        return error
    raise AssertionError(f"Trainer's arguments {sorted(given)} fit a job, but not Trainer's signature")


def job_from_trainer_arguments(given: Arguments) -> tuple[Job, dict[str, Any]]:
    """(the job that `Trainer`'s arguments describe, the arguments that say how it is run, by name: `RUN_ARGUMENTS`).

    Raises `ConfigError` or `PlanError`.
    """
    tree = _as_job_tree(given)
    for setting in settings_from_ray_train(*(tree.pop(name, None) for name in RAY_TRAIN_ARGUMENTS)):
        setting.apply_to(tree)
    workers = tree.get("workers")
    if _same(given["plan"], Job.model_fields["plan"].default) and defaults_to_auto_plan(workers):
        tree["plan"] = plan_section("auto", given["schedule"])
    job = job_from_argument_tree(tree)
    between = isinstance(getattr(given.get("scaling_config"), "num_workers", None), tuple)  # the limits of an elastic run
    check_plan_fits_workers(
        job, workers, exactly=given.get("workers") is None and not between, equal=given.get("workers") is not None
    )
    return job, {name: tree[name] for name in RUN_ARGUMENTS if name in tree}


def defaults_to_auto_plan(workers: int | None) -> bool:
    """Whether a job without a plan gets `plan: auto`: who says how many workers there are lets the planner use them."""
    return isinstance(workers, int) and workers > 1


def check_plan_fits_workers(job: Job, workers: int | None, *, exactly: bool = False, equal: bool = False) -> None:
    """Raise `ConfigError` if the plan has more than `workers` workers; `exactly` (for `ScalingConfig`) and
    `equal` (for the argument `workers`): also if fewer."""
    plan = job.plan
    if not isinstance(plan, PlanConfig) or workers is None:
        return
    if exactly and plan.workers != workers:
        raise ConfigError(
            f"the plan has {count_noun(plan.workers, 'worker')} = {plan.describe()}, and scaling_config.num_workers is "
            f"{workers}",
            cure='give one of them, or plan="auto"',
        )
    if equal and plan.workers != workers:
        raise ConfigError(
            f"the plan has {count_noun(plan.workers, 'worker')} = {plan.describe()}, but workers is {workers}",
            cure='leave workers out, for the plan says how many there are; or let the planner use them: plan="auto"',
        )
    if plan.workers > workers:
        raise ConfigError(
            f"the plan has {count_noun(plan.workers, 'worker')} = {plan.describe()}, but workers is {workers}",
            cure='give a smaller plan, plan="auto", or leave workers out',
        )


def _as_job_tree(given: Arguments) -> dict[str, Any]:
    """The arguments in the form of a job file, without those that have their default."""
    tree: dict[str, Any] = {}
    for name, value in given.items():
        if name == "validation" and (sets := _sets_in(value)):
            tree[name] = _sections_of_sets(value, sets)
            continue
        if name == "init_from":
            value = place_of_checkpoint_object(value, name)
        if name in ("data", "validation"):
            value = _with_data_loader_taken_apart(name, value, given.get("batch_size"))
        if name in FUNCTIONS:
            if value is not None or name not in ("lr_schedule", "validation"):
                tree[name] = function_section(name, value)
        elif name == "plan":
            tree[name] = plan_section(value, given.get("schedule"))
        elif name == "callbacks":
            tree[name] = _callback_sections(value)
        elif name == "metrics" and isinstance(value, Mapping):
            tree[name] = {key: metric_section(one) for key, one in value.items()}
        elif isinstance(value, os.PathLike) and name not in RUN_ARGUMENTS:
            tree[name] = os.fspath(value)
        else:
            tree[name] = dict(value) if isinstance(value, Mapping) else value
    defaults = {name: info.default for name, info in Job.model_fields.items() if name not in FUNCTIONS}
    return {name: value for name, value in tree.items() if name not in defaults or not _same(value, defaults[name])}


def _with_data_loader_taken_apart(key: str, value: Any, batch_size: int | None) -> Any:
    """The section of a `DataLoader`, or of one in the place of a section's function; anything else unchanged.

    Keys that the section has are as it says. Raises `ConfigError` for a loader with parts that no key stands for, and for one
    whose batches are not of `batch_size`; those of validation have any size.
    """
    if "torch" not in sys.modules:
        return value  # there is no loader
    section = dict(value) if isinstance(value, Mapping) else {"function": value}
    from raypar.worker.data.data_loader_parts import check_batch_size, data_loader_parts, is_data_loader

    if not is_data_loader(section.get("function")):
        return value
    parts = data_loader_parts(section["function"], key)
    section["function"] = parts.dataset
    if parts.collate is not None and not {"collate", "pad", "pack"} & set(section):
        section["collate"] = {"function": parts.collate}
    section.setdefault("processes", parts.processes)
    if key == "data":
        if isinstance(batch_size, int):
            check_batch_size(parts, batch_size, key)
        section.setdefault("drop_last", parts.drop_last)
        if parts.of_stream and section.get("shuffle_window"):
            return section
        if not {"shuffle", "sampler", "weights", "group_by"} & set(section):
            section |= {"shuffle": parts.shuffle} if parts.sampler is None else {"sampler": parts.sampler}
    elif parts.drop_last or parts.sampler is not None:
        own = "drop_last=True" if parts.drop_last else f"its own sampler, {with_article(type(parts.sampler).__name__)}"
        raise ConfigError(
            f"validation is a DataLoader with {own}, and a validation reads every sample in order", cure="leave that out"
        )
    return section


def _same(value: T, default: T) -> bool:
    """Whether an argument equals its default; 1, 1.0 and True differ."""
    return type(value) is type(default) and bool(value == default)


def plan_section(plan: T, schedule: str | None) -> T | PlanConfig | dict[str, Any]:
    """The section `plan` of a job for `Trainer`'s arguments `plan` and `schedule`.

    Raises `ConfigError` if `schedule` contradicts the plan, and `PlanError` for stages that lie where no schedule of that name
    has them.
    """
    if isinstance(plan, ParallelPlan):
        return PlanConfig.of_plan(plan, schedule or "1f1b")
    if isinstance(plan, PlanConfig) and schedule in (None, plan.schedule):
        return plan
    if schedule is None:
        return dict(plan) if isinstance(plan, Mapping) else plan
    if isinstance(plan, str) and plan == "auto":
        raise ConfigError(
            f'schedule is {repr_text(schedule)}, but with plan="auto" the planner chooses the schedule too',
            cure=f'leave schedule out, or give the plan: plan={{"stages": ..., "schedule": {repr_text(schedule)}}}',
        )
    tree = {"plan": plan}
    ImpliedSetting("plan.schedule", schedule, "schedule").apply_to(tree)
    return tree["plan"]


def _callback_sections(given: Any) -> Any:
    """The section `callbacks`; callback objects are wrapped in functions that return them. Raises `ConfigError`."""
    if given is None or isinstance(given, (str, int, float, Mapping)):
        return given  # wrong types: the job's own checks report them
    if not isinstance(given, Iterable):
        check_callbacks(given)  # one callback alone, or its class: raises an error of its own
    given = [_with_unpacked_pair("a callback", one) if isinstance(one, Mapping) else one for one in given]
    return [one if _makes_callback(one) else {"function": Given(check_callbacks([one])[0])} for one in given]


def metric_section(value: T) -> T | dict[str, Any]:
    """One of the section `metrics`: a metric object, in the place of a function or inside a section, is wrapped in a function
    that returns it."""
    if isinstance(value, Mapping):
        section = _with_unpacked_pair("a metric", value)
        return {**section, "function": _function_of_metric(section["function"])} if "function" in section else section
    made = _function_of_metric(value)
    return {"function": made} if made is not value else value


def _function_of_metric(value: T) -> T | Given:
    """What stands for a metric: an object with `update` and `compute` is given by a function."""
    is_object = hasattr(value, "update") and hasattr(value, "compute") and not isinstance(value, (type, Mapping))
    return Given(value) if is_object else value


def _makes_callback(value: Any) -> bool:
    """Whether an item of `callbacks` is a function that makes a callback, in one of its forms, and not the callback itself.

    Numbers and None count as such too: the job's checks refuse them.
    """
    pair = isinstance(value, tuple) and len(value) == 2 and isinstance(value[1], Mapping)
    plain = isinstance(value, (str, int, float, Mapping, FunctionConfig, type(None)))
    return pair or plain or inspect.isroutine(value) or isinstance(value, functools.partial)


def function_section(key: str, value: T) -> T | FunctionConfig | dict[str, Any]:
    """The section `key` of a job for what `Trainer` takes in its place: a function, a pair, a model, a data set, ...

    Any other value is returned unchanged, and the job's own checks refuse it, as in a job file. Raises `ConfigError` for kinds
    of objects that deserve a message of their own.
    """
    if key == "optimizer" and (entries := _optimizer_entries(value)) is not None:
        return {"entries": entries}
    if key in ("loss", "optimizer"):
        _refuse_several(key, value)
    if isinstance(value, FunctionConfig):
        own = FUNCTIONS.get(key, FunctionConfig)
        given = {name: getattr(value, name) for name in value.model_fields_set if name in own.model_fields}
        return value if isinstance(value, own) else given
    if isinstance(value, Mapping):
        if key == "model" and value and all(hasattr(part, "shape") for part in value.values()):
            raise ConfigError(
                f"model is {with_article(type(value).__name__)} of tensors, such as {next(iter(value))}: weights, no module",
                cure="give the function or class that makes the module, and the weights' file as init_from=FILE",
            )
        if key == "data" and _is_several_data_sets(value):
            raise ConfigError(
                f"{key} is {with_article(type(value).__name__)} with keys "
                f"{', '.join(map(str, list(value)[:4]))}, not a data set",
                cure="give one data set (of several splits, one); or a dict with the keys "
                + ", ".join(FUNCTIONS[key].model_fields),
            )
        section = _with_unpacked_pair(key, value)
        if key == "optimizer" and (entries := _optimizer_entries(section.get("entries"))) is not None:
            section["entries"] = entries
        if key == "data":
            if isinstance(section.get("mix"), (list, tuple)):
                section["mix"] = [_mixed_source(number, one) for number, one in enumerate(section["mix"])]
            section |= {name: Given(section[name]) for name in OBJECTS_OF_DATA if _is_sequence_object(section.get(name))}
    elif key in ("data", "validation") and isinstance(value, tuple) and any(hasattr(part, "shape") for part in value):
        raise ConfigError(
            f"{key} is a tuple of {', '.join(type(part).__name__ for part in value[:4])}, not a data set of samples",
            cure=f"{key}=torch.utils.data.TensorDataset(inputs, targets), which takes tensors (torch.as_tensor(array))",
        )
    elif isinstance(value, tuple) and len(value) == 2 and isinstance(value[1], Mapping):
        section = {"function": value[0], "args": dict(value[1])}
    else:
        section = {"function": _function_for(key, value)}
        if not isinstance(value, str) and not callable(section["function"]):
            return value
    if isinstance(section.get("args"), Mapping):
        section["args"] = dict(section["args"])
    if "function" in section:
        section["function"] = _function_for(key, section["function"], as_stream=_asks_for_stream(section))
        if key == "loss":
            _check_loss(section)
    return section


def validation_argument(data: Any) -> ValidationConfig | str | None:
    """The section `validation` for a data set, or several, in any form that `Trainer` takes; None for None, and the name of one
    of the job's validation sets as it is. Raises `ConfigError`."""
    if data is None or (isinstance(data, str) and re.fullmatch(SET_NAME, data)):
        return data
    if sets := _sets_in(data):
        return parse_data_section(_sections_of_sets(data, sets), "data=")
    section = function_section("validation", _with_data_loader_taken_apart("validation", data, None))
    return parse_data_section(section, "data=")


def _sets_in(value: Any) -> dict[Any, Any]:
    """Name -> data set, of `validation` with several: a mapping of names, also beside `every`, or its key `sets`."""
    if not isinstance(value, Mapping) or "function" in value:
        return {}
    given = value.get("sets")
    found = {key: part for key, part in value.items() if key not in ValidationConfig.model_fields}
    if any(is_misspelt(key) or not (_is_data(part) or callable(part)) for key, part in found.items()):
        return {}
    if not isinstance(given, Mapping):
        return found
    refuse_two_sets_of_one_name(found, given)
    return {**found, **given}


def _sections_of_sets(value: Arguments, sets: Mapping[Any, Any]) -> dict[str, Any]:
    """The section `validation` with these sets. Raises `ConfigError` that names the set."""
    made: dict[Any, Any] = {}
    for name, one in sets.items():
        try:
            section = function_section("validation", _with_data_loader_taken_apart("validation", one, None))
        except ConfigError as error:
            raise ConfigError(f"validation set {name}: {error.what}", error.cure) from None
        made[name] = (
            {key: getattr(section, key) for key in section.model_fields_set} if isinstance(section, FunctionConfig) else section
        )
    rest = {key: part for key, part in value.items() if key in ValidationConfig.model_fields and key != "sets"}
    return {**rest, "sets": made}


def _optimizer_entries(value: object) -> list[object] | None:
    """The section's `entries` for a list of optimizers, each with the pattern of its parameters; None for anything else."""
    if not isinstance(value, (list, tuple)) or not value:
        return None
    if not all(isinstance(one, OptimizerEntry) or (isinstance(one, Mapping) and "match" in one) for one in value):
        return None
    entries: list[object] = []
    for number, one in enumerate(value):
        if isinstance(one, Mapping):
            one = _with_unpacked_pair(f"optimizer.{number}", one)
            if "function" in one:
                one["function"] = _function_for("optimizer", one["function"])
            if one.get("lr_schedule") is not None:
                one["lr_schedule"] = function_section("lr_schedule", one["lr_schedule"])
        entries.append(one)
    return entries


def _refuse_several(key: str, value: object) -> None:
    """Raise `ConfigError` for several losses or optimizers."""
    parts: list[object] = []
    if isinstance(value, (list, tuple)) and not (len(value) == 2 and isinstance(value[1], Mapping)):
        parts = list(value)
    elif isinstance(value, Mapping) and not set(value) & set(FUNCTIONS[key].model_fields):
        parts = list(value.values())
    functions = [part for part in parts if callable(part) or isinstance(part, (str, tuple, Mapping, FunctionConfig))]
    if len(functions) > 1 and len(functions) == len(parts):
        which = "losses" if key == "loss" else "optimizers"
        raise ConfigError(
            f"{key} is {len(parts)} {which}: a run has one, and several that take turns (a GAN) are not supported",
            cure="add losses up in one function; train a GAN by a loop of your own"
            if key == "loss"
            else 'give each the pattern of the parameters that it trains: [{"match": "*.weight", "function": torch.optim.Muon}'
            ', {"match": "*", "function": torch.optim.AdamW}]; other options for some parameters are optimizer.groups; train '
            "a GAN by a loop of your own",
        )


def _is_sequence_object(value: Any) -> bool:
    """Whether a value of `data.sampler`, `weights` or `group_by` is what the function gives itself: a sampler, a tensor, ..."""
    plain = isinstance(value, (str, list, tuple, Mapping, FunctionConfig)) or callable(value)
    return not plain and hasattr(type(value), "__iter__")


def _with_unpacked_pair(key: str, section: Arguments) -> dict[str, Any]:
    """A section whose function is a pair (function, keyword arguments), with these in `args`. Raises `ConfigError` for both."""
    pair = section.get("function")
    if not (isinstance(pair, tuple) and len(pair) == 2 and isinstance(pair[1], Mapping)):
        return dict(section)
    if section.get("args"):
        raise ConfigError(
            f"{key} has arguments for its function twice: in the pair (function, {{...}}), and in args", cure="give one of them"
        )
    return {**section, "function": pair[0], "args": dict(pair[1])}


def _is_several_data_sets(value: Arguments) -> bool:
    """Whether a mapping holds splits of a data set, instead of being a section of a job."""
    splits = all(hasattr(part, "__getitem__") and not isinstance(part, (str, Mapping)) for part in value.values())
    return bool(value) and splits and not set(value) & {*ValidationConfig.model_fields, *DataConfig.model_fields}


def _mixed_source(number: int, source: T) -> T | dict[str, Any]:
    """One of `data.mix`, with a function in the place of a data set that is given itself."""
    if not isinstance(source, Mapping):
        return source
    section = _with_unpacked_pair(f"data.mix.{number}", source)
    if "function" not in section:
        return section
    return section | {"function": _function_for("data", section["function"], as_stream=_asks_for_stream(section))}


def _function_for(key: str, value: Any, *, as_stream: bool = False) -> Any:
    """The callable for what is given as the function of section `key`; anything else unchanged. Raises `ConfigError`.

    `as_stream`: whether rows of Ray Data are read as a stream in any case.
    """
    if key == "model" and _is_module(value):
        return _built_model(value)
    if key != "loss" and _is_module(value):
        raise ConfigError(
            f"{key} is {with_article(type(value).__name__)} that is built already",
            cure=f"give a function that builds it ({key}=lambda: nn.Sequential(...)): every worker makes only its own stage",
        )
    if isinstance(value, functools.partial) and (unstable := find_unstable_argument(value)) is not None:
        raise ConfigError(
            f"{key} is a functools.partial with the argument {shorten(unstable)}, which is another text in another process, so "
            "the run could not be resumed",
            cure=f"give a function that makes that argument itself, or the class of it a __repr__ that says what it holds: "
            f"{key}=a function, or (function, {{...}})",
        )
    if hasattr(value, "last_epoch") and hasattr(value, "optimizer"):
        name = type(value).__name__
        raise ConfigError(
            f"{key} is {with_article(name)} of an optimizer that is made already",
            cure=f"give its class with its arguments, lr_schedule=({name}, {{...}}), or a function of the optimizer that "
            "makes it",
        )
    if isinstance(value, str) or callable(value):
        return value
    if key in ("data", "validation") and not isinstance(value, (tuple, Mapping)) and _is_data(value):
        from raypar.data.ray_rows import is_ray_data
        from raypar.worker.data.user_dataset import is_stream, require_map_style

        if is_ray_data(value):
            return Given(_of_ray_data(value, key, as_stream))
        if is_stream(value) and not hasattr(value, "__next__"):
            return Given(value)
        require_map_style(value, key)
        return Given(value)
    if key == "optimizer" and hasattr(value, "param_groups"):
        name = type(value).__name__
        cure = f"give its class, which every worker calls with the parameters that it holds: optimizer=({name}, {{'lr': ...}})"
        raise ConfigError(f"{key} is {with_article(name)}", cure=cure)
    return value


def _of_ray_data(value: Any, key: str, as_stream: bool) -> Any:
    """The rows of a data set of Ray Data; a stream of them where that is asked for, and where they are too many.

    Raises `DataError`.
    """
    from raypar.data.ray_rows import read_ray_rows, require_ordered

    require_ordered(value, key)
    rows = None if as_stream else read_ray_rows(value, key)
    if rows is not None:
        return rows
    from raypar.actors.ray_row_stream import RayRowStream

    return RayRowStream.of(value, key, too_large=not as_stream)


def _asks_for_stream(section: Arguments) -> bool:
    """Whether a section has keys of iterable data."""
    return section.get("streams") is not None or bool(section.get("shuffle_window"))


def _is_data(value: Any) -> bool:
    """Whether `value` is a collection of samples, though it may be one that cannot be read by sample id."""
    return any(hasattr(type(value), name) for name in ("__getitem__", "__iter__", "iter_batches"))


def _is_module(value: Any) -> bool:
    """Whether `value` is an `nn.Module` that is built already."""
    return hasattr(value, "named_parameters") and not isinstance(value, type)


def _built_model(value: Any) -> Given:
    """A small model that is built already, with its values.

    Raises `ConfigError` for a larger one: every worker would get all of it, through Ray's store; `ModelError` for one without
    layers, and for one that another framework has wrapped, which perhaps cannot be copied.
    """
    from raypar.model.capture.sequential import layers_in, whole_module
    from raypar.model.refuse_framework_wrappers import refuse_framework_wrappers

    refuse_framework_wrappers("", value)
    if whole_module(value) is None:
        layers_in(value)
    nbytes = sum(t.numel() * t.element_size() for t in (*value.parameters(), *value.buffers()))
    if nbytes > BUILT_MODEL_BYTES:
        raise ConfigError(
            f"model is {with_article(type(value).__name__)} that is built already, with {nbytes / 2**20:.0f} MiB of values; "
            f"up to {BUILT_MODEL_BYTES >> 20} MiB are sent to workers",
            cure="give a function that builds it (model=lambda: nn.Sequential(...)), and init_from=FILE for its values",
        )
    return Given(copy.deepcopy(value))


def _check_loss(section: Arguments) -> None:
    """Raise `ConfigError` for a loss module with parameters. A loss given by name is checked by `preflight`."""
    args = section.get("args", {})
    if callable(section["function"]) and isinstance(args, dict):
        from raypar.worker.stage.loss import make_loss_function

        make_loss_function(LossConfig(function=section["function"], args=args))


@dataclass(frozen=True)
class Given:
    """A factory that returns what it was given; pickled to the workers with it. Checkpoints' contracts hold its `repr`."""

    value: Any

    @property
    def label_in_messages(self) -> str:
        """The class of the object: the text of a data set may take seconds to make."""
        return type(self.value).__name__

    def __call__(self) -> Any:
        return self.value
