"""`Trainer`'s arguments as a `JobSpec`: checked, with functions, models and data sets as references that workers can call."""

from __future__ import annotations

import copy
import functools
import os
from collections.abc import Collection, Mapping
from dataclasses import dataclass, fields
from difflib import get_close_matches
from typing import Any

from raypar.config import PlanConfig, check_trainer_arguments, parse_init_from
from raypar.errors import ConfigError
from raypar.keys_of_other_frameworks import advice_for
from raypar.plan import ParallelPlan
from raypar.worker.job_spec import DataSpec, JobSpec, OptimizerSpec, Ref, ValidationSpec, find_unstable_argument

BUILT_MODEL_BYTES = 32 << 20
"""Size limit of a model that is given built: it travels to every worker through Ray's store."""

FUNCTIONS = ("model", "loss", "data", "optimizer", "lr_schedule", "validation")
"""Arguments that are functions or objects, which no job file has as they are."""
NOT_IN_A_JOB_FILE = (*FUNCTIONS, "init_from", "plan", "schedule", "elastic", "callbacks", "resume_from_checkpoint")
"""Arguments that are checked here or by a parser of their own, not by the rules for a job file's keys."""


def check_argument_names(extra: Collection[str], plan: Any, named: Collection[str]) -> None:
    """Raise `ConfigError` for an argument beside the `named` ones that a job does not have, or that belongs in the plan."""
    known = {f.name for f in fields(JobSpec)}
    whole_plan = isinstance(plan, ParallelPlan)  # which says nothing of styles
    for key in extra:
        if key not in known or (key in PlanConfig.model_fields and not whole_plan):
            near = get_close_matches(key, [*named, *known], n=1, cutoff=0.6)
            cure = f"did you mean {near[0]!r}?" if near else "see help(raypar.Trainer)"
            if key in PlanConfig.model_fields:
                cure = f"it is part of the plan: plan={{{key!r}: ...}}"
            else:
                cure = advice_for(key) or cure
            raise ConfigError(f"Trainer has no argument {key!r}", cure=cure)


def check_schedule_argument(schedule: str | None, plan: Any) -> None:
    """Raise `ConfigError` if `schedule` contradicts `plan`."""
    if schedule is not None and isinstance(plan, str) and plan == "auto":
        raise ConfigError(
            f'schedule is {schedule!r}, but with plan="auto" the planner chooses the schedule too',
            cure=f'leave schedule out, or give the plan: plan={{"stages": ..., "schedule": {schedule!r}}}',
        )
    if schedule is not None and isinstance(plan, Mapping) and plan.get("schedule", schedule) != schedule:
        raise ConfigError(
            f"schedule is {schedule!r}, and the plan's is {plan['schedule']!r}",
            cure="give one of them, in plan or beside it",
        )


def check_argument_values(given: Mapping[str, Any]) -> None:
    """Check `Trainer`'s arguments, by name, as the same keys of a job file. Raises `ConfigError` or `PlanError`."""
    values = {name: value for name, value in given.items() if name not in NOT_IN_A_JOB_FILE}
    values["name"] = values["name"] or "run"
    if isinstance(values["run_dir"], os.PathLike):
        values["run_dir"] = os.fspath(values["run_dir"])
    check_trainer_arguments(values)
    if given["validation"] is None and (given["validate_every"] or given["validation_samples"]):
        raise ConfigError(
            "validate_every or validation_samples is given, but validation is not",
            cure="give validation=, a data set, or leave them out",
        )


def build_job_spec(given: Mapping[str, Any], extra: Collection[str]) -> JobSpec:
    """The job that `Trainer`'s arguments describe. `extra`: names of arguments that are fields of `JobSpec` as they are."""
    init_from = parse_init_from(given.get("init_from"))
    reading = {
        "names": tuple(given["data_names"]),
        "input": given["data_input"],
        "target": given["data_target"],
        "processes": given["data_processes"],
    }
    validation, lr_schedule = given["validation"], given["lr_schedule"]
    return JobSpec(
        name=given["name"] or "run",
        model=model_reference(given["model"]),
        loss=loss_reference(given["loss"]),
        data=make_data_spec(given["data"], "data", reading),
        optimizer=OptimizerSpec(function_reference(given["optimizer"], "optimizer")),
        lr_schedule=function_reference(lr_schedule, "lr_schedule") if lr_schedule is not None else None,
        validation=ValidationSpec(
            make_data_spec(validation, "validation", reading), given["validate_every"], given["validation_samples"]
        )
        if validation is not None
        else None,
        **{name: given[name] for name in ("seed", "steps", "batch_size", "microbatches", "virtual_replicas", "clip_norm")},
        **{name: given[name] for name in extra if name != "init_from"},
        init_from=init_from,
    )


def model_reference(value: Any) -> Ref:
    """The model function as `Trainer` takes it, or a small model that is built already, which is taken with its values.

    Raises `ConfigError` for a larger one: every worker would get all of it, through Ray's store.
    """
    if not hasattr(value, "named_parameters") or isinstance(value, type):
        return function_reference(value, "model")
    nbytes = sum(t.numel() * t.element_size() for t in (*value.parameters(), *value.buffers()))
    if nbytes > BUILT_MODEL_BYTES:
        raise ConfigError(
            f"model is a {type(value).__name__} that is built already, with {nbytes / 2**20:.0f} MiB of values; up to "
            f"{BUILT_MODEL_BYTES >> 20} MiB are sent to workers",
            cure="give a function that builds it (model=lambda: nn.Sequential(...)), and init_from=FILE for its values",
        )
    return Ref(Given(copy.deepcopy(value)))


def function_reference(value: Any, what: str) -> Ref:
    """A function as `Trainer` takes it."""
    if isinstance(value, Ref):
        return value
    args: Mapping[str, Any] = {}
    if isinstance(value, tuple) and len(value) == 2 and isinstance(value[1], Mapping):
        value, args = value
    if what != "loss" and hasattr(value, "named_parameters") and not isinstance(value, type):
        raise ConfigError(
            f"{what} is a {type(value).__name__} that is built already",
            cure=f"give a function that builds it ({what}=lambda: nn.Sequential(...)): every worker makes only its own stage",
        )
    if isinstance(value, str) or callable(value):
        if isinstance(value, functools.partial) and (unstable := find_unstable_argument(value)) is not None:
            raise ConfigError(
                f"{what} is a functools.partial with the argument {unstable}, which is another text in another process, so "
                "the run could not be resumed",
                cure=f"give a function that makes that argument itself, or the class of it a __repr__ that says what it holds: "
                f"{what}=a function, or (function, {{...}})",
            )
        return Ref(value, args)
    cure = 'give "module:name", a function, or a pair (function, keyword arguments)'
    if what == "optimizer" and hasattr(value, "param_groups"):
        name = type(value).__name__
        cure = f"give its class, which every worker calls with the parameters that it holds: optimizer=({name}, {{'lr': ...}})"
    elif hasattr(value, "dataset") and hasattr(value, "batch_sampler"):
        cure = f"give the data set in it ({what}=loader.dataset): raypar makes the batches, of batch_size= samples each"
    raise ConfigError(f"{what} is a {type(value).__name__}", cure=cure)


def loss_reference(value: Any) -> Ref:
    """A loss as `Trainer` takes it: a function, a loss module, or the class of one. Raises `ConfigError` for a module that
    would have to be trained."""
    from raypar.worker.stage.loss_function import make_loss_function

    ref = function_reference(value, "loss")
    if callable(ref.target):  # "module:name" is imported by `preflight`, from the folder that the job is started in
        make_loss_function(ref)
    return ref


def make_data_spec(value: Any, what: str, reading: Mapping[str, Any]) -> DataSpec:
    """A data set as `Trainer` takes it: a factory, or the data set itself. `reading`: the other fields of its `DataSpec`."""
    if isinstance(value, DataSpec):
        if any(reading.values()):
            raise ConfigError(
                f"{what} is a DataSpec, and data_input, data_target, data_names or data_processes is given beside it",
                cure="give them to the DataSpec, or give the data set itself",
            )
        return value
    if isinstance(value, Mapping):
        raise ConfigError(
            f"{what} is a {type(value).__name__} with keys {', '.join(map(str, list(value)[:4]))}, not a data set",
            cure='give one data set (of several splits, one); or "module:name", or a pair (function, keyword arguments)',
        )
    if not callable(value) and hasattr(value, "__getitem__") and not isinstance(value, (str, tuple)):
        return DataSpec(Ref(Given(value)), **reading)
    return DataSpec(function_reference(value, what), **reading)


@dataclass(frozen=True)
class Given:
    """A factory that returns what it was given; pickled to the workers with it. Checkpoints' contracts hold its name."""

    value: Any

    def __call__(self) -> Any:
        return self.value
